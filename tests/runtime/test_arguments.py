"""Arguments of unusual types, and options that say where they lie."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AbstractMesh

import spmd_auto
from spmd_auto import _compat
from spmd_auto.search import SearchOptions

FAST = SearchOptions(states=50)
sharded = functools.partial(spmd_auto.auto_shard, search=FAST)


# ---- elements of less than a byte ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float8_e4m3fn"])
def test_elements_of_less_than_a_byte(dtype, kind):
    """Quantised weights: JAX 0.10.2's compiled programs refuse them ("input layouts disagree"), its jit does not."""

    def step(params, x):
        return {"q": params["q"], "s": params["s"] * 2}, x @ (params["q"].astype(jnp.float32) * params["s"])

    q = np.arange(16 * 8).reshape(16, 8) % 2
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    ours = sharded(step, pins={"params/q": P("device")})
    state = {"q": kind(q.astype(jnp.dtype(dtype))), "s": np.float32(0.5)}
    for i in range(3):  # the second and third time on what the step itself returned
        state, out = ours(state, x)
        np.testing.assert_allclose(out, x @ q * 0.5 * 2**i, rtol=1e-5, atol=1e-5)
        assert state["q"].dtype == jnp.dtype(dtype)
        assert state["q"].sharding.spec == P("device")
        np.testing.assert_array_equal(np.asarray(state["q"]).astype(np.float32), q)
    assert ours.compile(state, x).memory_analysis() is not None


def test_such_arguments_compile_once():
    count = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda event, *_, **__: count.append(1) if event.endswith("backend_compile_duration") else None
    )
    try:
        ours = sharded(lambda q, x: x @ q.astype(jnp.float32))
        q, x = np.ones((16, 8), jnp.int4), np.ones((8, 16), np.float32)
        ours.plan(q, x)
        count.clear()
        for _ in range(3):
            ours(q, x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(count) == 1


# ---- one buffer twice ---------------------------------------------------------------------------------------


def twice(w, how):
    """A state of two leaves that share their buffers, as an average of the parameters does at its beginning."""
    whole = jax.NamedSharding(jax.make_mesh((8,), ("all",), axis_types=(jax.sharding.AxisType.Auto,)), P())
    if how == "moved by JAX":
        return jax.device_put(w, whole), jax.device_put(w, whole)
    return {
        "one array": (w, w),
        "two views": (w, jax.device_put(w, w.sharding)),
        "placed": (jax.device_put(w, whole),) * 2,
        "half placed": (w, jax.device_put(w, whole)),
    }[how]


@pytest.mark.parametrize("how", ["one array", "two views", "placed", "half placed", "moved by JAX"])
def test_a_donated_buffer_that_is_passed_twice(how):
    """JAX 0.10.2 ends the process if an array that was moved twice is donated twice."""

    def step(state, x):
        new = state["w"] * 0.5 + x.mean()
        return {"w": new, "average": state["average"] * 0.9 + new * 0.1}, x.sum()

    w, x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32), np.ones(8, np.float32)
    ours = sharded(step, pins={"state/*": P()})
    first, second = twice(jnp.asarray(w), how)
    state, expected = {"w": first, "average": second}, {"w": w, "average": w}
    for _ in range(3):
        state, expected = ours(state, x)[0], step(expected, x)[0]
        for k in state:
            np.testing.assert_allclose(state[k], expected[k], rtol=1e-5, atol=1e-6)
    kept = sharded(lambda state, w: ({"w": state["w"] * 2}, jnp.sum(w)), pins={"*": P()})
    first, second = twice(jnp.asarray(w), how)
    assert float(kept({"w": first}, second)[1]) == pytest.approx(w.sum(), rel=1e-4)


def test_keys_that_are_passed_twice():
    def step(state):
        return {"a": jax.random.fold_in(state["a"], 1), "b": jax.random.fold_in(state["b"], 2)}, jnp.ones(())

    key = jax.random.key(3)
    state, _ = sharded(step)({"a": key, "b": key})
    expected, _ = step({"a": jax.random.key(3), "b": jax.random.key(3)})
    for k in state:
        np.testing.assert_array_equal(jax.random.key_data(state[k]), jax.random.key_data(expected[k]))


def test_arrays_that_the_step_itself_returned_are_not_looked_at(monkeypatch):
    """It would cost a microsecond for each array and call."""
    looked = []
    real = _compat.buffers
    monkeypatch.setattr(_compat, "buffers", lambda x: looked.append(x) or real(x))
    ours = sharded(lambda state, x: (jax.tree.map(lambda w: w * 2, state), x.sum()))
    state = {k: jnp.ones((16, 16)) for k in "abc"}
    state, _ = ours(state, np.ones(8, np.float32))
    assert len(looked) == 3
    state, _ = ours(state, np.ones(8, np.float32))
    assert len(looked) == 3


# ---- weak types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate",
    [
        0.5,
        jnp.array(0.5),
        jnp.sin(0.5),
        np.float32(0.5),
        np.float64(0.5),
        jnp.float32(0.5),
        jax.device_put(0.5),
        2,
        True,
    ],
)
def test_types_of_results_are_those_under_jit(rate):
    """A loss scale that is a weak array must not make float32 of bfloat16 gradients."""

    def step(state, rate):
        return {"w": state["w"] * rate, "rate": rate * 0.9, "count": state["count"] + 1}, jnp.sum(state["w"] * rate)

    state = {"w": jnp.ones((16, 16), jnp.bfloat16), "count": 0}
    plain, ours = jax.jit(step), sharded(step, donate=False)
    for _ in range(2):
        expected, got = plain(state, rate), ours(state, rate)
        assert jax.tree.map(lambda x: (x.dtype, x.weak_type), got) == jax.tree.map(
            lambda x: (x.dtype, x.weak_type), expected
        )
        state, rate = {"w": got[0]["w"], "count": got[0]["count"]}, got[0]["rate"]


def test_a_number_in_the_state_stays_weak_and_compiles_once():
    def step(state, x):
        return {"w": state["w"] * state["rate"], "rate": state["rate"] * 0.9}, x.sum()

    ours = sharded(step)
    state = {"w": jnp.ones((16, 16), jnp.bfloat16), "rate": 1.0}
    for _ in range(3):
        state, _ = ours(state, np.ones(8, np.float32))
        assert state["w"].dtype == jnp.bfloat16
    assert len(ours._entries) == 1
    assert float(state["rate"]) == pytest.approx(0.9**3)


# ---- names ------------------------------------------------------------------------------------------------


def test_names_of_arguments_are_the_users_own():
    def named(fn, step, self, create):
        return fn["w"] * step + self, create.sum()

    values = {"fn": params(), "step": 2.0, "self": np.float32(1), "create": np.ones(8, np.float32)}
    ours = sharded(named)
    np.testing.assert_allclose(ours(**values)[0], params()["w"] * 2 + 1, rtol=1e-6)
    assert set(ours.plan(**values).specs) == {"fn/w", "step", "self", "create"}
    assert set(spmd_auto.plan(named, **values, mesh=AbstractMesh((8,), ("a",))).specs) == {
        "fn/w",
        "step",
        "self",
        "create",
    }


# ---- settings of JAX ----------------------------------------------------------------------------------------


def test_a_step_is_planned_for_the_settings_that_it_is_called_under():
    """jit traces anew where a context changes what is computed; the first plan must not be used silently."""
    ours = sharded(lambda params, x: x @ params["w"], donate=False)
    low = ours.lower(params(), batch(16)).as_text()
    with jax.default_matmul_precision("highest"):
        high = ours.lower(params(), batch(16)).as_text()
        ours(params(), batch(16))
    assert "HIGHEST" in high
    assert "HIGHEST" not in low
    ours(params(), batch(16))
    assert len(ours._entries) == 2


def test_double_precision_of_a_step_that_was_planned_without():
    ours = sharded(lambda n: jnp.linspace(0.0, 1.0, 8) * n)
    n = np.float32(3)
    assert ours(n).dtype == jnp.float32
    with jax.enable_x64(True):
        assert ours(n).dtype == jax.jit(lambda n: jnp.linspace(0.0, 1.0, 8) * n)(n).dtype == jnp.float64


# ---- meshes -----------------------------------------------------------------------------------------------


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def params():
    return {"w": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}


def batch(size=8192):
    return np.random.default_rng(1).normal(size=(size, 16)).astype(np.float32)


def test_an_abstract_mesh_keeps_its_axes_and_needs_no_devices():
    plan = spmd_auto.plan(step, params(), batch(1 << 20), mesh=AbstractMesh((16, 4), ("data", "model")))
    assert plan.mesh.names == ("data", "model")
    assert plan.mesh.sizes == (16, 4)
    assert plan.specs["x"] == P(("data", "model"))
    hand = spmd_auto.price(
        step, params(), batch(), mesh=AbstractMesh((4, 2), ("data", "model")), assignment={"batch": "data"}
    )
    assert hand.specs["x"] == P("data")


def test_an_abstract_mesh_of_as_many_devices_as_there_are_runs():
    ours = sharded(step, mesh=AbstractMesh((2, 4), ("data", "model")), pins={"x": P(("data", "model"))})
    new, value = ours(params(), batch())
    expected, wanted = step(params(), batch())
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    np.testing.assert_allclose(new["w"], expected["w"], rtol=1e-5, atol=1e-6)
    assert ours.plan(params(), batch()).specs["x"] == P(("data", "model"))


def test_every_plan_of_a_step_names_the_devices_that_the_user_gave(devices):
    """Also later ones, and those of steps that follow it: what a loader or a checkpoint asks for their shardings."""
    mesh = jax.sharding.Mesh(np.array(devices[4:]), ("data",))
    ours = sharded(step, mesh=mesh)
    follows = sharded(loss, like=ours)
    explicit = sharded(loss, like=ours, mesh=mesh)
    for size, fn in ((8192, ours), (24, ours), (48, follows), (16, explicit)):
        plan = fn.plan(params(), batch(size))
        (placed, x), _ = jax.device_put(((params(), batch(size)), {}), plan.shardings())
        assert x.sharding.device_set == placed["w"].sharding.device_set == set(devices[4:])
        result = fn(placed, x)
        assert jax.tree.leaves(result)[0].sharding.device_set == set(devices[4:])


def test_a_step_that_is_planned_before_the_one_it_follows_says_so(caplog):
    train = sharded(step)
    with caplog.at_level(logging.WARNING, logger="spmd_auto"):
        sharded(loss, like=train)(params(), batch(16))
        [message] = [record.message for record in caplog.records]
        assert "loss is planned before step" in message
        caplog.clear()
        train.plan(params(), batch(16))
        sharded(loss, like=train)(params(), batch(16))
        assert not caplog.records
