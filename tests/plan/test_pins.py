"""Pins are never overridden (EXPECTATIONS A 19 and 22)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import spmd_auto
from spmd_auto.errors import PinError
from spmd_auto.plan import price_strategy
from spmd_auto.plan.pins import resolve_pins
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh

FAST = SearchOptions(states=60)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def jax_mesh(*sizes):
    count = int(np.prod(sizes))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("data", "model")[: len(sizes)])


def double(x):
    return {"y": x["a"] * 2.0}


@pytest.mark.parametrize(
    ("spec", "local"),
    [(P(None, "model"), (6, 2)), (P("data", None), (3, 4)), (P("data", "model"), (3, 2)), (P(), (6, 4))],
)
def test_pinned_array_lies_as_pinned(spec, local):
    mesh = jax_mesh(2, 2)
    plan = spmd_auto.plan(double, {"a": struct(6, 4)}, mesh=mesh, pins={"x/a": spec}, search=FAST)
    sharding = jax.tree.leaves(plan.shardings(mesh))[0]
    assert sharding.shard_shape((6, 4)) == local
    step = spmd_auto.auto_shard(double, mesh=mesh, pins={"x/a": spec}, search=FAST)
    a = np.arange(24, dtype=np.float32).reshape(6, 4)
    step({"a": a})
    placed = jax.device_put(a, sharding)
    assert {shard.data.shape for shard in placed.addressable_shards} == {local}
    np.testing.assert_array_equal(step({"a": placed})["y"], 2 * a)


@pytest.mark.parametrize(("dimension", "parts", "local"), [(0, 2, (2, 8)), (1, 4, (4, 2))])
def test_pieces_of_a_tensor(dimension, parts, local):
    spec = P(*[None] * dimension, "data")
    plan = spmd_auto.plan(double, {"a": struct(4, 8)}, mesh=jax_mesh(parts), pins={"x/a": spec}, search=FAST)
    assert jax.tree.leaves(plan.shardings())[0].shard_shape((4, 8)) == local


def test_indivisible_pieces_are_refused():
    with pytest.raises(PinError, match=r"dimension 0 of x/a \(shape \(4, 8\)\) can't be split in 3"):
        spmd_auto.plan(double, {"a": struct(4, 8)}, mesh=jax_mesh(3), pins={"x/a": P("data")}, search=FAST)


def mlp_step(params, batch):
    def loss(p):
        return jnp.mean((jnp.tanh(batch @ p["up"]["kernel"]) @ p["down"]["kernel"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"up": {"kernel": struct(16, 32)}, "down": {"kernel": struct(32, 16)}}


@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a")), P()])
def test_pins_hold_in_the_plan_and_in_what_the_step_returns(spec):
    pins = {"up/kernel": spec}
    plan = spmd_auto.plan(mlp_step, PARAMS, struct(8, 16), mesh=toy_mesh(2, 4), pins=pins, search=FAST)
    assert plan.specs["params/up/kernel"] == spec
    new = next(i for i, leaf in enumerate(plan.program.results) if leaf.path == "0/up/kernel")
    assert plan.mesh.partition_spec(plan.placements.results[new]) == spec
    outs = plan.lower_step().compile().output_shardings
    assert outs[new].is_equivalent_to(jax.NamedSharding(plan.mesh.build(), spec), 2)


def test_pins_hold_for_a_strategy_given_by_hand():
    program = trace(mlp_step, PARAMS, struct(8, 16))
    plan = price_strategy(
        program, toy_mesh(2, 4), {"batch": "a", "mlp": "b"}, pins={"up/kernel": P("b"), "down/kernel": P()}
    )
    assert plan.specs["params/up/kernel"] == P("b")
    assert plan.specs["params/down/kernel"] == P()
    assert plan.specs["batch"] == P("a")


def test_globs_ends_whole_paths_and_order():
    program = trace(mlp_step, PARAMS, struct(8, 16))
    mesh = toy_mesh(2, 4)
    paths = [leaf.path for leaf in program.arguments]

    def pinned(pins):
        return {paths[i]: mesh.partition_spec(pin.spec) for (_, i), pin in resolve_pins(program, mesh, pins).items()}

    assert pinned({"*kernel": P("a")}) == {"params/down/kernel": P("a"), "params/up/kernel": P("a")}
    assert pinned({"up/kernel": P("a")}) == {"params/up/kernel": P("a")}
    assert pinned({"params/*/kernel": P("a"), "up/*": P("b")}) == {
        "params/down/kernel": P("a"),
        "params/up/kernel": P("b"),
    }
    assert pinned({"batch": P("a")}) == {"batch": P("a")}
    assert pinned({}) == {}


def test_a_whole_path_means_that_leaf_alone_whatever_is_in_it():
    def f(state):
        return {key: value * 2 for key, value in state.items()}

    program = trace(f, {"w[0]": struct(8), "w0": struct(8), "*": struct(8)})
    mesh = toy_mesh(2)

    def hit(glob):
        return [program.arguments[i].path for _, i in resolve_pins(program, mesh, {glob: P("a")})]

    assert hit("state/w[0]") == ["state/w[0]"]
    assert hit("state/*") == ["state/*"]
    assert hit("w[0]") == ["state/w0", "state/w[0]"]  # an end: the literal one, and the glob
    assert hit("w?") == ["state/w0"]


def test_scalars_can_be_pinned_whole_only():
    program = trace(lambda s: {"n": s["n"] + 1}, {"n": struct()})
    assert [pin.spec for pin in resolve_pins(program, toy_mesh(2), {"s/n": P()}).values()] == [()]
    with pytest.raises(PinError, match="rank 0"):
        resolve_pins(program, toy_mesh(2), {"s/n": P("a")})


def test_pins_choose_among_the_meshes_of_a_cluster():
    """The meshes that a search tries differ in the names of their axes: one on which the pins hold is taken."""
    devices = spmd_auto.cluster("a100", per_host=8)
    for spec, axes in ((P("gpu"), ("gpu",)), (P("gpu0", "gpu1"), ("gpu0", "gpu1"))):
        plan = spmd_auto.plan(mlp_step, PARAMS, struct(8, 16), mesh=devices, pins={"up/kernel": spec}, search=FAST)
        assert plan.mesh.names == axes
        assert plan.specs["params/up/kernel"] == spec
    with pytest.raises(PinError, match="names the mesh axis 'model'") as caught:
        spmd_auto.plan(mlp_step, PARAMS, struct(8, 16), mesh=devices, pins={"up/kernel": P("model")}, search=FAST)
    assert "'gpu'" in caught.value.why


def test_a_named_sharding_pins_by_its_spec():
    sharding = jax.NamedSharding(jax_mesh(2, 2), P(None, "model"))
    plan = spmd_auto.plan(double, {"a": struct(6, 4)}, mesh=jax_mesh(2, 2), pins={"x/a": sharding}, search=FAST)
    assert plan.specs["x/a"] == P(None, "model")


def run(step, pins, *args):
    """The results' specs, and the bytes that the plan sends beside those that the compiled program sends."""
    mesh = jax_mesh(2, 4)
    sharded = spmd_auto.auto_shard(step, mesh=mesh, pins=pins, search=FAST)
    out = sharded(*args)
    for found, expected in zip(jax.tree.leaves(out), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_array_equal(found, expected)
    plan = sharded.plan(*args)
    return [x.sharding.spec for x in jax.tree.leaves(out)], plan


def test_a_result_that_is_an_argument_may_lie_otherwise(devices):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    for result in (P(None, "model"), P(), P(("data", "model"))):
        specs, plan = run(lambda x: (x, x + 1), {"x": P("data"), "result/0": result}, x)
        assert specs[0] == result
        assert (plan.report.communication > 0) == (result != P(("data", "model")))  # priced; slicing is free


def test_one_value_as_two_results(devices):
    def twice(x):
        y = x * 2
        return y, y

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs, _ = run(twice, {"x": P("data"), "result/0": P(None, "model"), "result/1": P("model")}, x)
    assert specs == [P(None, "model"), P("model")]


def test_a_constrained_value_as_a_result_that_lies_otherwise(devices):
    mesh = jax_mesh(2, 4)

    def step(x):
        return jax.lax.with_sharding_constraint(x * 2, jax.NamedSharding(mesh, P("data")))

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs, plan = run(step, {"result": P(None, "model")}, x)
    assert specs == [P(None, "model")]
    assert plan.report.communication > 0


def test_axes_of_one_device_contradict_nobody():
    mesh = toy_mesh(8, 1, 1)
    program = trace(lambda s, x: ({"w": s["w"] * 0.9}, (s["w"] * x).sum()), {"w": struct(8)}, struct(8))
    pinned = resolve_pins(program, mesh, {"s/w": P(("b", "c")), "result/0/w": P(("c", "b"))})
    assert list(pinned) == [("argument", 0)]
    with pytest.raises(PinError, match="is pinned otherwise"):
        resolve_pins(program, mesh, {"s/w": P(("b", "c")), "result/0/w": P("a")})


def test_an_argument_called_result():
    def step(result):
        return {"y": result["y"] * 2, "z": result["z"]}

    program = trace(step, {"y": struct(8), "z": struct(8)})
    with pytest.raises(PinError, match="may mean the argument 'result/y' or a result"):
        resolve_pins(program, toy_mesh(2), {"result/y": P("a")})


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
def test_a_jit_inside_the_step_pins_what_it_says(devices, side):
    """Priced, and the compiled program moves what the plan says."""
    mesh = jax_mesh(2, 4)

    def step(x):
        return jax.jit(lambda y: y * 2, **{side: jax.NamedSharding(mesh, P(None, "data"))})(x) + 1

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs, plan = run(step, {"x": P("model"), "result": P("model")}, x)
    assert specs == [P("model")]
    assert plan.report.communication > 0
    assert spmd_auto.verify(plan).equal
    with pytest.raises(PinError, match=rf"{side} at .*test_pins.py.* uses the mesh axes \['data'\]"):
        spmd_auto.plan(step, x, mesh=toy_mesh(8), search=FAST)


def test_results_of_branches_lie_as_planned(devices):
    def step(flag, x):
        return jax.lax.cond(flag > 0, lambda x: x.T @ x, lambda x: x + 1, x)

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs, plan = run(step, {"x": P("data"), "result": P(None, "model")}, np.int32(1), x)
    assert specs == [P(None, "model")]
    ((placed,),) = plan.placements.branches.values()
    assert placed == plan.mesh.spec(P(None, "model"), 2)
