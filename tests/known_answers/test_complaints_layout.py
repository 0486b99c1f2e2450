"""Complaints about other tools (EXPECTATIONS B): what moves, what is gathered without a word, what does not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax

import spmd_auto
from spmd_auto.search import SearchOptions
from spmd_auto.verify import tree_relative_error
from tests.known_answers.complaints import error, executed, kinds
from tests.known_answers.toy import all_reduce, toy_mesh

FAST = SearchOptions(states=200)


def A(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def test_micro_batches_are_no_all_to_all(devices):
    """xla#13306: bf16[8,2048] split 4-way and reshaped to [2,4,2048] becomes an all-to-all."""

    def step(params, x):
        def micro(total, part):
            grad = jax.grad(lambda w: jnp.mean((part @ w).astype(jnp.float32) ** 2))(params["w"])
            return total + grad, None

        total, _ = lax.scan(micro, jnp.zeros_like(params["w"]), x.reshape(2, 4, 2048))
        return {"w": params["w"] - total}

    args = {"w": A(2048, 8).astype(jnp.bfloat16)}, A(8, 2048).astype(jnp.bfloat16)
    plan = spmd_auto.plan(step, *args, mesh=toy_mesh(4), search=FAST)
    out, summary = executed(plan, *args)
    assert plan.report.flops < 0.3 * 2 * 2 * 8 * 2048 * 8, "the work is split"
    assert "all-to-all" not in {c.kind for c in plan.report.collectives} | kinds(summary)
    assert tree_relative_error(out, jax.jit(step)(*args)) < 1e-2
    # pinned to pieces that no micro-batch has, something must move: less than all of it, and with its source line
    pinned = spmd_auto.plan(step, *args, mesh=toy_mesh(4), pins={"x": P("a")}, search=FAST)
    moved = [c for c in pinned.report.collectives if c.kind == "all-to-all"]
    assert sum(c.bytes for c in moved) < 3 / 4 * 8 * 2048 * 2 / 2
    assert all("test_complaints_layout.py" in c.source for c in moved)


def test_reshard_that_xla_calls_involuntary_full_rematerialization(devices):
    """jax#21562, jax#18591, xla#15207: f32[16,16,16] on (4,2) from (y,-,x) to (-,xy,-)."""

    def fn(x):
        return jnp.tanh(x) * 2

    x, mesh = A(16, 16, 16), toy_mesh(4, 2)
    plan = spmd_auto.plan(fn, x, mesh=mesh, pins={"x": P("b", None, "a"), "result": P(None, ("a", "b"))}, search=FAST)
    out, summary = executed(plan, x)
    assert plan.placements.arguments[0] == ((1,), (), (0,))
    assert plan.placements.results[0] == ((), (0, 1), ())
    assert plan.report.collectives, "the reshard has a price"
    assert all("test_complaints_layout.py" in c.source for c in plan.report.collectives)
    gathered = x.nbytes * 7 / 8  # what a device would be sent to hold all of it
    assert 0 < plan.report.bytes_moved < gathered / 2
    found = sum(summary.bytes_by_axes().values())
    assert found == pytest.approx(plan.report.bytes_moved)
    np.testing.assert_allclose(out, jax.jit(fn)(x), rtol=1e-6)


@pytest.mark.parametrize("way", [None, P("a"), P("b"), P(("a", "b"))], ids=str)
def test_reshape_beside_a_mesh_axis_of_one_device(way, devices):
    """jax#39309."""

    def fn(x):
        return x.reshape(4, 2, 16) * 2, x.reshape(16, 8) + 1, x.reshape(8, 1, 16)

    x = A(8, 16)
    for sizes in ((1, 8), (8, 1)):
        plan = spmd_auto.plan(fn, x, mesh=toy_mesh(*sizes), pins={} if way is None else {"x": way}, search=FAST)
        assert error(plan, fn, x) == 0


def test_static_scatter_does_not_gather_everything(devices):
    """jax#23052: x.at[:, 3].set(u), split along what is not indexed."""

    def fn(x, u):
        return x.at[:, 3].set(u), x.at[:, jnp.array([1, 5])].add(1.0)

    x, u = A(16, 8), A(16)
    plan = spmd_auto.plan(fn, x, u, mesh=toy_mesh(8), pins={"x": P("a"), "u": P("a")}, search=FAST)
    out, summary = executed(plan, x, u)
    assert plan.report.bytes_moved == 0
    assert not summary.collectives
    assert tree_relative_error(out, jax.jit(fn)(x, u)) == 0


@pytest.mark.parametrize("order", [{"vocab": "b", "batch": "a"}, {"batch": "a", "vocab": "b"}], ids=str)
def test_gradient_of_an_embedding_split_by_vocabulary(order, devices):
    """xla#42481: sums over the batch and places of the vocabulary in the wrong order."""

    def step(params, tokens):
        def loss(p):
            return jnp.mean(jnp.tanh(p["table"][tokens] @ p["out"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    args = {"table": A(64, 8), "out": A(8, 4)}, np.random.default_rng(0).integers(0, 64, (8, 4)).astype(np.int32)
    plan = spmd_auto.price(step, *args, mesh=toy_mesh(2, 4), assignment=order)
    assert plan.specs["params/table"] == P("b")
    assert error(plan, step, *args) < 1e-5


def test_grouped_convolution_does_not_gather_the_batch(devices):
    """xla#47945."""

    def step(params, x):
        def loss(p):
            out = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", feature_group_count=4)
            return jnp.mean(out**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    args = {"w": A(16, 2, 3, 3)}, A(8, 8, 8, 8)
    plan = spmd_auto.price(step, *args, mesh=toy_mesh(8), assignment={"batch": "a"})
    out, summary = executed(plan, *args)
    assert plan.specs["x"] == P("a")
    assert kinds(summary) == {"all-reduce"}
    assert sum(summary.bytes_by_axes().values()) == pytest.approx(all_reduce(8, args[0]["w"].nbytes), rel=0.01)
    assert tree_relative_error(out, jax.jit(step)(*args)) < 1e-5


def test_a_size_that_nothing_divides_is_reported():
    """jax#26946: [17, 16] over 8 is silently whole."""
    plan = spmd_auto.price(
        lambda params, x: x @ params["w"],
        {"w": A(17, 17)},
        A(8, 17),
        mesh=toy_mesh(8),
        assignment={"batch": "a"},
    )
    assert plan.specs["params/w"] == P()
    assert "held whole by every device: params/w" in plan.explain().replace("\n", " ")
    with pytest.raises(spmd_auto.errors.PinError, match="17") as caught:
        spmd_auto.plan(lambda x: x * 2, A(17, 16), mesh=toy_mesh(8), pins={"x": P("a")})
    assert "x" in str(caught.value)


def test_a_priced_reshard_is_inserted(devices):
    """autoparallel#348: the plan says all-to-all, the program has none."""

    def fn(params, x):
        return jnp.tanh(x @ params["w"])

    args = {"w": A(16, 16)}, A(16, 16)
    pins = {"x": P("a"), "result": P(None, "a")}
    plan = spmd_auto.plan(fn, *args, mesh=toy_mesh(8), pins=pins, search=FAST)
    out, summary = executed(plan, *args)
    predicted, found = plan.report.bytes_by_kind_and_axes(), summary.bytes_by_kind_and_axes()
    assert predicted
    assert found == pytest.approx(predicted)
    assert tree_relative_error(out, jax.jit(fn)(*args)) < 1e-6


def test_unused_parameters_are_planned_and_kept(devices):
    """autoparallel#384, #368: unused parameters crash."""

    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(state["params"])
        updates, opt = optax.adam(1e-2).update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    params = {"w": A(16, 16), "unused": A(16, 3), "odd": A(7)}
    state = {"params": params, "opt": optax.adam(1e-2).init(params)}
    for zero in (0, 3):
        plan = spmd_auto.price(
            step, state, A(8, 16), mesh=toy_mesh(8), assignment={"batch": "a"}, zero=zero, zero_axes=("a",)
        )
        assert error(plan, step, state, A(8, 16)) < 1e-5


def test_a_small_bias_does_not_make_a_budget_infeasible():
    """autoparallel#394: a bias of 280 on (8, 8); 64 does not divide it, 8 does."""

    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    struct = jax.ShapeDtypeStruct
    args = (
        {"w": struct((4096, 280), jnp.float32), "b": struct((280,), jnp.float32)},
        struct((512, 4096), jnp.float32),
    )
    weights = 4096 * 280 * 4
    plan = spmd_auto.plan(step, *args, mesh=toy_mesh(8, 8), memory=0.6 * weights, search=SearchOptions(states=500))
    assert plan.memory <= 0.6 * weights
