"""Equinox modules: what is no array is a setting, as under `filter_jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd_auto
from spmd_auto.errors import TraceError
from spmd_auto.search import SearchOptions
from spmd_auto.trace import Role

eqx = pytest.importorskip("equinox")

FAST = SearchOptions(states=150)
MEMORY = 14_000.0  # bytes per device: less than the whole state


class Model(eqx.Module):
    layers: list
    drop: eqx.nn.Dropout
    pool: eqx.nn.MaxPool1d

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.layers = [eqx.nn.Linear(16, 64, key=a), jax.nn.relu, eqx.nn.Linear(32, 16, key=b)]
        self.drop = eqx.nn.Dropout(0.1)
        self.pool = eqx.nn.MaxPool1d(2, 2)

    def __call__(self, x, key):
        first, act, second = self.layers
        x = self.pool(act(first(x))[None])[0]
        return second(self.drop(x, key=key))


OPTIMIZER = optax.adamw(1e-2)


def make():
    model = Model(jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def train_step(model, opt_state, batch, key):
    def loss_fn(model):
        keys = jax.random.split(key, batch["x"].shape[0])
        return jnp.mean((jax.vmap(model)(batch["x"], keys) - batch["y"]) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def data(seed=0, size=16):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, 16)).astype(np.float32) for k in "xy"}


def trained(step, state, steps=3):
    losses = []
    model, opt_state = state
    for i in range(steps):
        model, opt_state, loss = step(model, opt_state, data(i), jax.random.key(i))
        losses.append(float(loss))
    return model, losses


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_trains_as_filter_jit_does(memory):
    expected_model, expected = trained(eqx.filter_jit(train_step), make())
    step = spmd_auto.auto_shard(search=FAST, memory=memory)(train_step)
    model, losses = trained(step, make())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(step._entries) == 1
    assert jax.tree.structure(model) == jax.tree.structure(expected_model)
    assert model.layers[1] is jax.nn.relu
    np.testing.assert_allclose(model.layers[0].weight, expected_model.layers[0].weight, rtol=1e-5, atol=1e-6)
    plan = step.plan(*make(), data(), jax.random.key(0))
    roles = {leaf.path: leaf.role for leaf in plan.program.arguments}
    assert roles["model/layers/0/weight"] is Role.PARAMETER
    assert roles["opt_state/0/mu/layers/0/weight"] is Role.OPTIMIZER


def test_born_in_pieces():
    step = spmd_auto.auto_shard(search=FAST, memory=MEMORY)(train_step)
    state = step.init(make, batch=(data(), jax.random.key(0)))
    assert isinstance(state[0], Model)
    spec = step.plan(*state, data(), jax.random.key(0)).specs["model/layers/0/weight"]
    assert any(spec)
    assert state[0].layers[0].weight.sharding.spec == spec
    _, expected = trained(eqx.filter_jit(train_step), make())
    assert trained(step, state)[1] == pytest.approx(expected, rel=1e-5)


def test_shardings_have_the_form_of_a_filtered_module():
    step = spmd_auto.auto_shard(search=FAST)(train_step)
    model, opt_state = make()
    (shardings, *_), _ = step.plan(model, opt_state, data(), jax.random.key(0)).shardings()
    arrays = eqx.filter(model, eqx.is_array)
    moved = jax.device_put(arrays, shardings)
    assert eqx.combine(moved, model).layers[0].weight.shape == (64, 16)


def test_a_setting_plans_anew():
    model, _ = make()
    step = spmd_auto.auto_shard(search=FAST)(lambda model, x, key: jax.vmap(lambda v: model(v, key))(x).sum())
    args = data()["x"], jax.random.key(0)
    first = float(step(model, *args))
    quiet = eqx.nn.inference_mode(model)
    second = float(step(quiet, *args))
    assert first != second == pytest.approx(float(jax.vmap(lambda v: quiet(v, args[1]))(args[0]).sum()), rel=1e-4)
    assert len(step._entries) == 2


def test_a_setting_that_can_not_be_hashed():
    class Odd(eqx.Module):
        weight: jax.Array
        names: object

    step = spmd_auto.auto_shard(search=FAST)(lambda model, x: x @ model.weight)
    with pytest.raises(TraceError, match="can't be hashed"):
        step(Odd(jnp.eye(16), {1, 2}), data()["x"])


def test_a_decorated_method():
    class Linear(eqx.Module):
        weight: jax.Array

        @spmd_auto.auto_shard(search=FAST)
        def apply(self, x):
            return x @ self.weight

    layer = Linear(jnp.eye(16) * 2)
    np.testing.assert_allclose(layer.apply(data()["x"]), data()["x"] * 2)
    assert "self/weight" in layer.apply.plan(data()["x"]).specs
