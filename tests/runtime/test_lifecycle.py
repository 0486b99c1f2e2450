"""State and batches between steps: checkpoints, loaders, initialisers, arrays that lie elsewhere, counters."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import P

from spmd_auto.verify import tree_relative_error
from tests.runtime import test_nnx
from tests.test_decorator import MEMORY, MODEL, Counter, check_lies_as_planned, create, data, sharded, train_step


@pytest.fixture
def compiled():
    counter = Counter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


def lie_as(tree, shardings):
    alike = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, shardings)
    return jax.tree.leaves(alike)


# ---- shardings as a tree ----------------------------------------------------------------------------------


def planned():
    """A step and its plan, whose state is not whole anywhere."""
    step = sharded(memory=MEMORY)
    plan = step.plan(jax.eval_shape(create, jax.random.key(0)), data())
    assert sum(any(spec) for path, spec in plan.specs.items() if path.startswith("state/")) > 4
    return step, plan


def test_a_checkpoint_is_restored_in_pieces(tmp_path):
    step, plan = planned()
    state, _ = step(step.init(create, jax.random.key(0)), data())
    (shardings, _), _ = plan.shardings()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", state)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(create, jax.random.key(0))
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes.replace(step=state.step), shardings
        )
        restored = checkpointer.restore(tmp_path / "1", target)
    assert check_lies_as_planned(restored, plan) == 0
    assert tree_relative_error(jax.device_get(restored.params), jax.device_get(state.params)) == 0
    _, expected = step(jax.tree.map(jnp.copy, state), data(1))
    _, loss = step(restored, data(1))
    assert float(loss) == float(expected)


def test_a_checkpoint_of_one_plan_is_restored_for_another(tmp_path):
    """A restart on other axes: what was saved in pieces is read in the pieces of the new plan."""
    step, _ = planned()
    state = step.init(create, jax.random.key(0))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    other = sharded(memory=MEMORY, mesh=mesh, pins={"state/params/Dense_0/kernel": P("b", "a")})
    plan = other.plan(state, data())
    (shardings, _), _ = plan.shardings()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        restored = checkpointer.restore(tmp_path / "1", target)
    assert restored.params["Dense_0"]["kernel"].sharding.spec == P("b", "a")
    assert all(lie_as(restored, shardings))
    assert float(other(restored, data())[1]) == pytest.approx(float(step(state, data())[1]), rel=1e-5)


def test_shardings_have_the_tree_of_the_arguments():
    step, plan = planned()
    state = jax.jit(create)(jax.random.key(0))
    shardings, keywords = plan.shardings()
    assert keywords == {}
    assert jax.tree.structure(shardings) == jax.tree.structure((state, data()))
    placed = jax.device_put((state, data()), shardings)
    assert check_lies_as_planned(placed[0], plan) == 0
    call = step._apart(placed, {})
    entry = step._entry(call, placed, {})
    moved = [a is not b for a, b in zip(call.leaves, step._place(call, entry, step._lowered(entry)), strict=True)]
    assert not any(moved)


def test_a_loader_makes_its_batches_as_planned():
    step = sharded(pins={"batch/*": P("device")})
    state = step.init(create, jax.random.key(0), batch=data())
    (_, shardings), _ = step.plan(state, data()).shardings()
    assert shardings["x"].spec == P("device")
    batch = jax.tree.map(jax.make_array_from_process_local_data, shardings, data())
    assert all(lie_as(batch, shardings))
    _, loss = step(state, batch)
    _, expected = jax.jit(train_step)(jax.jit(create)(jax.random.key(0)), data())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert not step._moved


def test_shardings_of_nnx_objects_have_the_tree_of_their_state():
    step = test_nnx.sharded(memory=test_nnx.MEMORY)
    model, optimizer = test_nnx.make()
    plan = step.plan(model, optimizer, test_nnx.data())
    (of_model, of_optimizer, _), _ = plan.shardings()
    state = nnx.state(model)
    assert jax.tree.structure(of_model) == jax.tree.structure(state)
    placed = jax.device_put(state, of_model)
    nnx.update(model, placed)
    assert any(plan.specs["model/first/kernel"])
    assert model.first.kernel[...].sharding.spec == plan.specs["model/first/kernel"]
    moments = jax.device_put(nnx.state(optimizer), of_optimizer)
    assert moments["opt_state"][0]["mu"]["first"]["kernel"][...].sharding.spec == plan.specs["model/first/kernel"]


# ---- initialisers -------------------------------------------------------------------------------------------


def test_born_of_the_initialisers_of_linen_and_optax_themselves():
    tx = optax.adam(1e-2)

    def step(variables, opt_state, batch):
        def loss_fn(variables):
            return jnp.mean((MODEL.apply(variables, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(variables)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables, updates), opt_state, loss

    def both(key):
        variables = MODEL.init(key, jnp.zeros((1, 16)))
        return variables, tx.init(variables)

    ours = sharded(step, memory=MEMORY)
    variables, opt_state = ours.init(both, jax.random.key(0), batch=data())
    specs = ours.plan(variables, opt_state, data()).specs
    assert any(specs["variables/params/Dense_0/kernel"])
    assert variables["params"]["Dense_0"]["kernel"].sharding.spec == specs["variables/params/Dense_0/kernel"]
    mu = opt_state[0].mu["params"]["Dense_0"]["kernel"]
    assert mu.sharding.spec == specs["opt_state/0/mu/params/Dense_0/kernel"]
    assert not mu.sharding.is_fully_replicated
    _, _, loss = ours(variables, opt_state, data())
    assert float(loss) == pytest.approx(float(step(*both(jax.random.key(0)), data())[2]), rel=1e-5)
    infer = sharded(lambda variables, x: MODEL.apply(variables, x), memory=MEMORY)
    made = infer.init(MODEL.init, jax.random.key(0), jnp.zeros((1, 16)), batch=data()["x"])
    np.testing.assert_allclose(infer(made, data()["x"]), MODEL.apply(made, data()["x"]), rtol=1e-4, atol=1e-5)


# ---- arrays that lie elsewhere ------------------------------------------------------------------------------


def test_a_state_sharded_otherwise_is_moved_once_with_one_notice(caplog, devices):
    step, plan = planned()
    mesh = jax.sharding.Mesh(np.array(devices[::-1]), ("mine",))
    state = jax.jit(create)(jax.random.key(0))
    expected = float(sharded(donate=False)(state, data())[1])
    elsewhere = jax.tree.map(
        lambda x: jax.device_put(x, jax.NamedSharding(mesh, P("mine") if x.ndim and x.shape[0] % 8 == 0 else P())),
        state,
    )
    with caplog.at_level(logging.INFO, logger="spmd_auto"):
        for i in range(3):
            elsewhere, loss = step(elsewhere, data(i))
            assert check_lies_as_planned(elsewhere, plan) == 0
            assert i or float(loss) == pytest.approx(expected, rel=1e-5)
    [message] = [record.message for record in caplog.records if "lie otherwise" in record.message]
    assert "moved once" in message


# ---- counters -----------------------------------------------------------------------------------------------


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.calls = nnx.Variable(0)  # a number of Python's, an array after the first step


def nnx_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model.first(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    model.calls[...] += 1
    return loss


def test_a_number_in_an_nnx_variable_compiles_once(compiled):
    model = Counting(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step, found = sharded(nnx_step), []
    for i in range(3):
        before = compiled.backend
        step(model, optimizer, data(i))
        found.append(compiled.backend - before)
    assert found[0] >= 1
    assert found[1:] == [0, 0]
    assert int(model.calls[...]) == 3
    assert len(step._entries) == 1


def tree_step(state, batch):
    return {"w": state["w"] * 0.5, "step": state["step"] + 1, "rate": state["rate"] * 0.9}, jnp.mean(batch["x"])


@pytest.mark.parametrize("start", [0, np.int32(0), np.int64(0)])
def test_a_number_in_a_tree_compiles_once(compiled, start):
    step, found = sharded(tree_step), []
    state = {"w": np.ones((16, 16), np.float32), "step": start, "rate": np.float32(1.0)}
    for i in range(3):
        before = compiled.backend
        state, _ = step(state, data(i))
        found.append(compiled.backend - before)
    assert found[1:] == [0, 0]
    assert int(state["step"]) == 3
    assert float(state["rate"]) == pytest.approx(0.9**3)


def test_a_number_in_an_equinox_module_compiles_as_often_as_under_filter_jit(compiled):
    """There a number is a setting: an array from the beginning compiles once."""
    equinox = pytest.importorskip("equinox")

    class Counted(equinox.Module):
        weight: jax.Array
        step: jax.Array

    def advance(model, x):
        return Counted(model.weight * 0.5, model.step + 1), jnp.sum(x @ model.weight)

    step, model, found = sharded(advance), Counted(jnp.eye(16), jnp.array(0)), []
    for i in range(3):
        before = compiled.backend
        model, _ = step(model, data(i)["x"])
        found.append(compiled.backend - before)
    assert found[1:] == [0, 0]
    assert int(model.step) == 3


# ---- the profiler -------------------------------------------------------------------------------------------


def test_scopes_are_in_a_profile_and_in_the_compiled_program(tmp_path):
    def scoped(state, batch):
        with jax.named_scope("my_block"):
            y = batch["x"] @ state["w"]
        with jax.named_scope("my_update"):
            return {"w": state["w"] - 0.1 * y.mean()}, y.sum()

    step = sharded(scoped)
    state = {"w": np.ones((16, 16), np.float32)}
    text = step.compile(state, data()).as_text()
    for scope in ("my_block", "my_update"):
        assert f"/{scope}/" in text, text
    state, _ = step(state, data())
    with jax.profiler.trace(str(tmp_path)), jax.profiler.StepTraceAnnotation("train", step_num=0):
        state, loss = step(state, data())
        jax.block_until_ready(loss)
    [file] = tmp_path.rglob("*.xplane.pb")
    content = file.read_bytes()
    assert b"scoped" in content
    assert b"my_block" in content
