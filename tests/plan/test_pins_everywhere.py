"""Pins on results, inside the step, and in the metadata of linen and nnx: kept, priced, and explained in conflicts."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

import spmd_auto
from spmd_auto.errors import PinError
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from spmd_auto.verify.check import compare
from spmd_auto.verify.hlo import read_compiled
from tests.known_answers.toy import toy_mesh

FAST = SearchOptions(states=300)
MESH = toy_mesh(2, 4)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def apply(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def step(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(apply(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), {"loss": loss, "out": apply(params, x)}


PARAMS = {"up": struct(16, 64), "down": struct(64, 16)}


def result_spec(plan, path):
    (index,) = [i for i, leaf in enumerate(plan.program.results) if leaf.path == path]
    return plan.mesh.partition_spec(plan.placements.results[index])


def test_results_are_pinned():
    spec = P("b", "a")
    plan = spmd_auto.plan(step, PARAMS, struct(8, 16), mesh=MESH, pins={"result/1/out": spec}, search=FAST)
    assert result_spec(plan, "1/out") == spec
    plan = spmd_auto.plan(step, PARAMS, struct(8, 16), mesh=MESH, pins={"result/0/up": P(None, "a")}, search=FAST)
    assert plan.specs["params/up"] == P(None, "a")  # the state lies where its successor lies


def test_a_result_and_the_state_it_replaces_can_not_lie_apart():
    pins = {"params/up": P("a"), "result/0/up": P("b")}
    with pytest.raises(PinError, match="replaces params/up") as error:
        spmd_auto.plan(step, PARAMS, struct(8, 16), mesh=MESH, pins=pins, search=FAST)
    assert "pin 'params/up'" in str(error.value)
    assert "pin 'result/0/up'" in str(error.value)


def constrained(mesh, spec, scanned=False):
    sharding = jax.NamedSharding(mesh, spec)

    def layer(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), sharding)

    def forward(w, x):
        if not scanned:
            return layer(layer(x, w), w)
        return jax.lax.scan(lambda h, _: (layer(h, w), None), x, None, length=3)[0]

    def inner_step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p["w"], x) ** 2))(params)
        return {"w": params["w"] - grads["w"]}, loss

    return inner_step


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b"), P("b"), P(P.UNCONSTRAINED, "b")], ids=str)
@pytest.mark.parametrize("scanned", [False, True])
def test_constraints_inside_are_kept_and_priced(spec, scanned, devices):
    jax_mesh = MESH.build(devices)
    inner_step = constrained(jax_mesh, spec, scanned)
    args = {"w": struct(32, 32)}, struct(16, 32)
    program = trace(inner_step, *args)
    plan = spmd_auto.plan(inner_step, *args, mesh=MESH, search=FAST)
    wanted = tuple(spec) + (None,) * (2 - len(spec))
    found = [op for op in plan.analysis.graph.ops if op.name == "sharding_constraint"]
    assert len(found) >= 2
    for op in found:
        have = plan.priced.specs[plan.analysis.classes.of_value[op.results[0].id]]
        for entry, axes in zip(wanted, have, strict=True):
            if entry is not P.UNCONSTRAINED:
                assert tuple(MESH.names[a] for a in axes) == ((entry,) if entry else ())
    lowered = plan.lower_step(donate=False)
    compiled = lowered.lower().compile()
    verification = compare(plan, read_compiled(compiled, jax_mesh), "cpu")
    assert not verification.differing_rows, verification
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=a.shape).astype(np.float32) for a in (args[0]["w"], args[1])]
    want = jax.jit(inner_step)({"w": jnp.asarray(arrays[0])}, jnp.asarray(arrays[1]))
    got = jax.tree.unflatten(
        program.out_tree,
        compiled(*[jax.device_put(x, s) for x, s in zip(arrays, lowered.in_shardings, strict=True)]),
    )
    assert tree_relative_error(jax.device_get(got), jax.device_get(want)) < 1e-6


class Linen(nn.Module):
    box: str

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        boxed = nn.with_partitioning if self.box == "mesh" else nn.with_logical_partitioning
        names = (None, "b") if self.box == "mesh" else ("embed", "mlp")
        return nn.Dense(64, kernel_init=boxed(init, names), use_bias=False)(x)


def linen_step(model):
    def train(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    return train


@pytest.mark.parametrize("box", ["mesh", "logical"])
def test_linen_metadata_pins(box):
    model = Linen(box)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16)))
    with nn.logical_axis_rules([("embed", None), ("mlp", "b")]):
        plan = spmd_auto.plan(linen_step(model), params, struct(8, 16), mesh=MESH, search=FAST)
    assert plan.specs["params/params/Dense_0/kernel"] == P(None, "b")
    assert "pinned by the model's metadata" in plan.explain("params/params/Dense_0/kernel")


def test_logical_names_without_rules_pin_nothing():
    model = Linen("logical")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16)))
    plan = spmd_auto.plan(linen_step(model), params, struct(8, 16), mesh=MESH, search=FAST)
    assert not plan.pinned


def test_metadata_and_a_pin_that_contradict_each_other_are_both_named():
    model = Linen("mesh")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16)))
    args = linen_step(model), params, struct(8, 16)
    with pytest.raises(PinError, match="is pinned twice") as error:
        spmd_auto.plan(*args, mesh=MESH, pins={"*/kernel": P("a")}, search=FAST)
    assert "pin '*/kernel'" in str(error.value)
    assert "Partitioned(None, 'b')" in str(error.value)
    assert spmd_auto.plan(*args, mesh=MESH, pins={"*/kernel": P(None, "b")}, search=FAST)  # they agree


def test_metadata_for_another_mesh_is_left_aside_and_named():
    """Models of others declare axes of their own mesh; they can be planned all the same."""
    model = Linen("mesh")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16)))
    with pytest.warns(UserWarning, match=r"1 leaves of train declare mesh axes .*Partitioned\(None, 'b'\)"):
        plan = spmd_auto.plan(linen_step(model), params, struct(8, 16), mesh=toy_mesh(8), search=FAST)
    assert not plan.pinned


def test_nnx_metadata_pins(devices):
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "b"))
            self.dense = nnx.Linear(16, 64, kernel_init=init, rngs=rngs)

    with jax.set_mesh(MESH.build(devices)):
        graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def train(state, x):
        def loss_fn(state):
            return jnp.mean(nnx.merge(graph, state).dense(x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), loss

    plan = spmd_auto.plan(train, state, struct(8, 16), mesh=MESH, search=FAST)
    assert plan.specs["state/dense/kernel"] == P(None, "b")


def test_pins_of_all_kinds_survive_a_file(tmp_path, devices):
    inner_step = constrained(MESH.build(devices), P("a", P.UNCONSTRAINED))
    args = {"w": struct(32, 32)}, struct(16, 32)
    plan = spmd_auto.plan(inner_step, *args, mesh=MESH, pins={"w": P("b")}, search=FAST)
    plan.save(str(tmp_path / "plan.json"))
    loaded = spmd_auto.Plan.load(str(tmp_path / "plan.json"), inner_step, *args)
    assert loaded.pinned.keys() == plan.pinned.keys()
    assert loaded.priced.specs == plan.priced.specs
    assert loaded.seconds == plan.seconds
