"""nnx modules and optimizers are changed in place, as under `nnx.jit`; shared parts stay shared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P

import spmd_auto
from spmd_auto.search import SearchOptions
from spmd_auto.trace import Role

FAST = SearchOptions(states=150)
MEMORY = 20_000.0  # bytes per device: less than the whole state


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(nnx.relu(self.norm(self.first(x)))))


def make():
    model = Model(nnx.Rngs(0))
    # a bias in front of a norm has no gradient: without eps Adam would make steps of the noise
    return model, nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)


def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def data(seed=0, size=16):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, 16)).astype(np.float32) for k in "xy"}


def sharded(fn=train_step, **options):
    options.setdefault("search", FAST)
    return spmd_auto.auto_shard(**options)(fn)


def leaves(*objects):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(nnx.state(list(objects)))
    ]


def trained(step, steps=3):
    model, optimizer = make()
    return model, optimizer, [float(step(model, optimizer, data(i))) for i in range(steps)]


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_trains_in_place_as_nnx_jit_does(memory):
    model, optimizer, expected = trained(nnx.jit(train_step))
    step = sharded(memory=memory)
    ours, ours_optimizer, losses = trained(step)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(step._entries) == 1
    for a, b in zip(leaves(ours, ours_optimizer), leaves(model, optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    assert int(ours_optimizer.step[...]) == 3
    assert float(jnp.abs(ours.norm.mean[...]).sum()) > 0


def test_state_stays_where_the_plan_wants_it():
    step = sharded(memory=MEMORY)
    model, optimizer, _ = trained(step)
    plan = step.plan(model, optimizer, data())
    assert "model/first/kernel" in plan.specs
    assert plan.specs["model/first/kernel"] != P()
    wanted = jax.NamedSharding(plan.mesh.build(), plan.specs["model/first/kernel"])
    assert model.first.kernel[...].sharding.is_equivalent_to(wanted, 2)
    roles = {leaf.path: leaf.role for leaf in plan.program.arguments}
    assert roles["model/first/kernel"] is Role.PARAMETER
    assert roles["optimizer/opt_state/0/mu/first/kernel"] is Role.OPTIMIZER
    assert roles["model/norm/mean"] is Role.OPTIMIZER
    assert roles["batch/x"] is Role.BATCH


def test_born_in_pieces():
    step = sharded(memory=MEMORY)
    model, optimizer = step.init(make, batch=data())
    assert isinstance(model, Model)
    plan = step.plan(model, optimizer, data())
    wanted = jax.NamedSharding(plan.mesh.build(), plan.specs["model/first/kernel"])
    assert model.first.kernel[...].sharding.is_equivalent_to(wanted, 2)
    assert not wanted.is_fully_replicated
    plain, _ = make()
    np.testing.assert_allclose(model.first.kernel[...], plain.first.kernel[...], rtol=1e-5, atol=1e-6)
    _, _, expected = trained(nnx.jit(train_step))
    assert [float(step(model, optimizer, data(i))) for i in range(3)] == pytest.approx(expected, rel=1e-5)


def test_what_is_not_changed_is_neither_returned_nor_donated():
    def evaluate(model, batch):
        model.eval()
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    model, _ = make()
    step = sharded(evaluate)
    plan = step.plan(model, data())
    assert [leaf.path for leaf in plan.program.results] == [""]
    assert plan.program.find("model/first/kernel").role is Role.PARAMETER
    assert plan.program.replaces == (None,)
    before = model.first.kernel[...]
    model.eval()
    a, b = step(model, data()), step(model, data())
    assert float(a) == float(b) == pytest.approx(float(nnx.jit(evaluate)(model, data())), rel=1e-5)
    assert not before.is_deleted()


def test_evaluation_shares_the_state_of_training():
    step = sharded(memory=MEMORY)
    model, optimizer = step.init(make, batch=data())
    plan = step.plan(model, optimizer, data())

    def evaluate(net, batch):
        return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)

    model.eval()
    follower = sharded(evaluate, like=step)
    other = follower.plan(model, data())
    for path, spec in other.specs.items():
        if path.startswith("net/") and other.program.find(path).shape:
            assert spec == plan.specs["model/" + path.removeprefix("net/")], path
    assert np.isfinite(float(follower(model, data())))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(16, 16, rngs=rngs)
        self.b = self.a

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))


def test_shared_submodules_are_one_array_and_stay_shared():
    def make():
        model = Tied(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    step, plain = sharded(), nnx.jit(train_step)
    model, optimizer = make()
    expected, expected_optimizer = make()
    for i in range(2):
        a, b = step(model, optimizer, data(i)), plain(expected, expected_optimizer, data(i))
        assert float(a) == pytest.approx(float(b), rel=1e-5)
    assert model.a is model.b
    assert sum("kernel" in path for path in step.plan(model, optimizer, data()).specs) == 1
    np.testing.assert_allclose(model.a.kernel[...], expected.a.kernel[...], rtol=1e-5)


def test_one_module_in_two_arguments():
    def both(first, second, x):
        first.a.kernel[...] = first.a.kernel[...] + 1.0
        return second(x).sum()

    model, expected = Tied(nnx.Rngs(0)), Tied(nnx.Rngs(0))
    step = sharded(both)
    a, b = step(model, model, data()["x"]), nnx.jit(both)(expected, expected, data()["x"])
    assert float(a) == pytest.approx(float(b), rel=1e-5)
    assert list(step.plan(model, model, data()["x"]).specs) == ["first/a/bias", "first/a/kernel", "x"]


def test_objects_come_back_and_new_ones_are_made():
    def step(model, x):
        model.count = nnx.Variable(jnp.zeros((8,)) + x.sum())
        return {"same": model, "new": nnx.Linear(16, 16, rngs=nnx.Rngs(1)), "loss": model(x).sum()}

    model = Tied(nnx.Rngs(0))
    out = sharded(step)(model, data()["x"])
    assert out["same"] is model
    assert float(model.count[...][0]) == pytest.approx(float(data()["x"].sum()), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(
        out["new"].kernel[...], nnx.Linear(16, 16, rngs=nnx.Rngs(1)).kernel[...], rtol=1e-5, atol=1e-6
    )


def test_a_new_object_alone():
    step = sharded(lambda x: nnx.Linear(16, 16, rngs=nnx.Rngs(1))(x) + 0 * x)
    assert step(data()["x"]).shape == (16, 16)
    made = sharded(lambda x: (nnx.Linear(16, 16, rngs=nnx.Rngs(1)), x.sum()))(data()["x"])
    assert isinstance(made[0], nnx.Linear)


def test_settings_of_a_module_plan_anew():
    def evaluate(model, x):
        return model(x).sum()

    step = sharded(evaluate)
    model, _ = make()
    first = step(model, data()["x"])
    model.eval()
    second, third = step(model, data()["x"]), step(model, data()["x"])
    assert float(second) == float(third) != float(first)
    assert len(step._entries) == 2


def test_partitioned_variables_are_pinned(devices):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("data", "model"))

    class Partitioned(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
            self.dense = nnx.Linear(16, 64, kernel_init=init, rngs=rngs)
            self.out = nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.dense(x)))

    step = sharded(mesh=mesh)
    with jax.set_mesh(mesh):  # nnx wants it wherever such a variable is made, in the optimizer's update too
        model = Partitioned(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        plan = step.plan(model, optimizer, data())
        for i in range(2):
            step(model, optimizer, data(i))
    for path in ("model", "optimizer/opt_state/0/mu"):
        assert plan.specs[f"{path}/dense/kernel"] == P(None, "model")
    assert model.dense.kernel[...].sharding.spec == P(None, "model")  # flax#5172, #5112
    assert optimizer.opt_state[0].mu.dense.kernel[...].sharding.spec == P(None, "model")


def test_module_and_arrays_in_one_argument():
    def step(state, x):
        loss = state["net"](x).sum() * state["scale"]
        state["net"].a.bias[...] = state["net"].a.bias[...] + 1.0
        return loss

    net = Tied(nnx.Rngs(0))
    assert np.isfinite(float(sharded(step)({"net": net, "scale": 2.0}, data()["x"])))
    assert float(net.a.bias[...][0]) == 1.0


def test_nnx_state_as_a_plain_tree():
    graph, state = nnx.split(Tied(nnx.Rngs(0)))

    def step(state, x):
        def loss_fn(state):
            return jnp.mean(nnx.merge(graph, state)(x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    ours, loss = sharded(step)(state, data()["x"])
    expected, other = jax.jit(step)(nnx.split(Tied(nnx.Rngs(0)))[1], data()["x"])
    assert float(loss) == pytest.approx(float(other), rel=1e-5)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
