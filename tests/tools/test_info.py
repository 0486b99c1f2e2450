"""What a plan does at one parameter, operation or line."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P, lax

import spmd_auto
from spmd_auto.errors import StrategyError
from tests.known_answers.toy import all_reduce, toy_mesh
from tests.test_errors import batch, refused, state, step

KERNEL = 16 * 24 * 4


def hand(assignment, fn=step, args=None, **options):
    args = (state(), batch()) if args is None else args
    return spmd_auto.price(fn, *args, mesh=toy_mesh(2, 4), assignment=assignment, **options)


def test_gradients_of_data_parallelism_are_reduced():
    info = hand({"batch": ("a", "b")}).parallel_info("params/up/kernel")
    leaf = info.leaves[0]
    assert (leaf.array.shape, leaf.array.local, leaf.array.counts) == ((16, 24), (16, 24), (1, 1))
    assert leaf.role == "parameter"
    assert leaf.zero == 0
    assert leaf.forms == {"stored": P(), "gradient": P()}
    moved = {(c.kind, c.axes): (c.bytes, c.where) for c in leaf.collectives}
    assert moved == {("all-reduce", ("a", "b")): (all_reduce(8, KERNEL), "of its gradient")}
    assert leaf.collectives[0].seconds == pytest.approx(all_reduce(8, KERNEL) / 1e9)
    assert info.bytes_moved == all_reduce(8, KERNEL)


def adam_step(state, x):
    def loss(w):
        return jnp.mean((x @ w) ** 2)

    value, grads = jax.value_and_grad(loss)(state["w"])
    updates, opt = optax.adam(1e-3).update(grads, state["opt"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value


W = jax.ShapeDtypeStruct((64, 32), jnp.float32)
ADAM = {"w": W, "opt": jax.eval_shape(optax.adam(1e-3).init, W)}, jax.ShapeDtypeStruct((1024, 64), jnp.float32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forms_and_stage_of_a_parameter(stage):
    plan = hand({"batch": ("a", "b")}, adam_step, ADAM, zero=stage, zero_axes=("a", "b") if stage else ())
    leaf = plan.parallel_info("state/w").leaves[0]
    assert leaf.zero == stage
    split = P(("a", "b"))
    forms = {"stored": split if stage > 2 else P(), "gradient": split if stage > 1 else P()}
    assert leaf.forms == {**forms, "optimizer": split if stage else P()}
    kinds = {(c.kind, c.where) for c in leaf.collectives}
    if stage == 0:
        assert kinds == {("all-reduce", "of its gradient")}
    if stage in (1, 2):
        assert ("all-gather", "of the new value") in kinds or ("all-gather", "in the optimizer") in kinds
    if stage == 3:
        assert {("all-gather", "where it is read"), ("reduce-scatter", "of its gradient")} <= kinds
        assert any("ZeRO over" in line for line in leaf.why)
    assert sum(c.bytes for c in leaf.collectives) == pytest.approx(plan.report.bytes_moved, rel=0.02)  # but the loss


def test_a_split_that_the_assignment_gives_anyway_is_no_zero():
    plan = hand({"mlp": ("a", "b")}, zero=3, zero_axes=("a", "b"))
    assert [leaf.zero for leaf in plan.parallel_info("*/kernel").leaves] == [0, 0]
    assert hand({"mlp": "b"}, zero=3, zero_axes=("a", "b")).parallel_info("up/kernel").leaves[0].zero == 3


def tied(w, x, y):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) + jnp.mean((y @ w) ** 2))(w["k"])
    return {"k": w["k"] - grad}, loss


def test_a_gradient_of_two_uses_is_reduced_once():
    data = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    weight = {"k": jax.ShapeDtypeStruct((16, 24), jnp.float32)}
    info = hand({"batch": ("a", "b")}, tied, (weight, data, data)).parallel_info("w/k")
    assert [(c.kind, c.bytes) for c in info.leaves[0].collectives] == [("all-reduce", all_reduce(8, KERNEL))]


def scan_step(params, x):
    loss, grad = jax.value_and_grad(lambda p: jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2))(
        params["w"]
    )
    return {"w": params["w"] - grad}, loss


def test_layers_of_a_loop_count_as_often_as_they_run():
    args = {"w": jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)}, jax.ShapeDtypeStruct((512, 16), jnp.float32)
    leaf = hand({"batch": ("a", "b")}, scan_step, args).parallel_info("params/w").leaves[0]
    moved = [(c.kind, c.times, c.bytes) for c in leaf.collectives]
    assert moved == [("all-reduce", 3, 3 * all_reduce(8, 16 * 16 * 4))]


def test_what_is_moved_for_all_leaves_and_operations_is_the_report():
    for assignment, options in (({"batch": "a", "mlp": "b"}, {}), ({"mlp": ("a", "b")}, {})):
        plan = hand(assignment, **options)
        ops = {op.name for op in plan.analysis.graph.ops if op.eqn is not None}
        infos = []
        for name in ops:
            try:
                infos += plan.parallel_info(name).operations
            except StrategyError:
                continue  # passes elements on
        total = sum(c.bytes for info in infos for c in info.collectives)
        assert total == pytest.approx(plan.report.bytes_moved)
        assert sum(info.seconds for info in infos) == pytest.approx(plan.report.compute)


def test_an_operation():
    plan = hand({"batch": "a", "mlp": "b"})
    ops = plan.parallel_info("dot_general").operations
    assert len(ops) == 5
    up, down = ops[:2]
    assert [a.local for a in (*up.operands, *up.results)] == [(4, 16), (16, 6), (4, 6)]
    assert up.operands[1].name == "state/params/up/kernel"
    assert up.collectives == ()
    assert [(c.kind, c.axes, c.bytes) for c in down.collectives] == [("all-reduce", ("b",), all_reduce(4, 4 * 16 * 4))]
    assert down.why[0] == "a splits batch of size 8: each device makes its piece of the result"
    assert down.why[1].startswith("b splits mlp of size 24: each device makes a partial sum")
    assert up.times == 1
    text = str(plan.parallel_info("dot_general"))
    for words in (
        "dot_general at",
        "float32[4, 6]",
        "(1, 4)",
        "all-reduce over b: 384 B",
        "partial sums",
        "nothing is",
    ):
        assert words in text


def test_operands_that_are_moved_show_how_they_lie():
    plan = hand({"batch": "a", "mlp": "b"}, zero=3, zero_axes=("a",))
    down = plan.parallel_info("dot_general").operations[1]
    assert down.stored[1] == P(("b", "a"))
    assert down.operands[1].spec == P("b")
    assert [(c.kind, c.where) for c in down.collectives][0] == ("all-gather", "operand 1")


def scanned(params, x):
    def layer(h, w):
        with jax.named_scope("my_block"):
            return jnp.tanh(h @ w), None

    return lax.scan(layer, x, params)[0].sum()


LINE = inspect.getsourcelines(scanned)[1] + 3
STACK = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)


@pytest.mark.parametrize("what", ["dot_general", f"test_info.py:{LINE}", f"tools/test_info.py:{LINE}", "my_block"])
def test_names_lines_and_scopes(what):
    info = hand({"batch": "a"}, scanned, STACK).parallel_info(what)
    dots = [op for op in info.operations if op.name == "dot_general"]
    assert [op.times for op in dots] == [3]
    assert "my_block" in dots[0].scope
    assert f"test_info.py:{LINE} " in dots[0].source


def test_globs_and_other_leaves():
    plan = hand({"batch": "a"})
    assert [leaf.array.name for leaf in plan.parallel_info("*/kernel").leaves] == [
        "state/params/down/kernel",
        "state/params/up/kernel",
    ]
    data = plan.parallel_info("batch/x").leaves[0]
    assert (data.role, data.forms, data.zero, data.alike) == ("batch", {}, 0, ("batch/x",))
    assert data.array.local == (4, 16)
    pinned = spmd_auto.plan(step, state(), batch(), mesh=toy_mesh(2, 4), pins={"up/kernel": P("a")})
    assert pinned.parallel_info("up/kernel").leaves[0].why == ("pinned by pin 'up/kernel'",)


def test_leaves_that_are_alike_are_told_together():
    def two(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["q"] + x @ p["k"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    weight = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    args = {"q": weight, "k": weight}, jax.ShapeDtypeStruct((8, 16), jnp.float32)
    info = hand({"batch": ("a", "b")}, two, args).parallel_info("params/*")
    assert [leaf.alike for leaf in info.leaves] == [("params/k", "params/q")] * 2
    assert info.bytes_moved == sum(c.bytes for c in info.leaves[0].collectives)
    assert "all 2 that are alike" in str(info)


def test_unknown_places():
    plan = hand({"batch": "a"})
    with refused(StrategyError, what="nothing in step is called 'up/kernal'", fixes="'params/up/kernel'?"):
        plan.parallel_info("up/kernal")
    with refused(StrategyError, what="'dot_genral'", fixes="did you mean 'dot_general'?"):
        spmd_auto.parallel_info(plan, "dot_genral")
    with refused(StrategyError, what="'test_errors.py:1'", fixes="test_errors.py:"):
        plan.parallel_info("test_errors.py:1")
    with refused(StrategyError, what="''"):
        plan.parallel_info("")
