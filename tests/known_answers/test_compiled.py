"""Right answers from outside, read out of compiled programs (EXPECTATIONS A 7, 8, 9, 11, 18)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import make_plan
from spmd_auto.trace import Role, trace
from spmd_auto.verify import compile_for, parse_target, read_compiled
from tests.known_answers.toy import all_reduce, toy_mesh

SCALARS = 64  # bytes: losses and norms are not counted as traffic


def compiled(plan, target="cpu"):
    where = parse_target(target)
    mesh = plan.mesh.build(where.devices(plan.mesh.device_count))
    return read_compiled(compile_for(where, plan.lower_step(mesh).lower()), mesh)


def large(summary):
    return [c for c in summary.collectives if c.payload_bytes > SCALARS]


class MLP(nn.Module):
    layers: int
    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(self.width)(x)
            x = nn.relu(x)
        return x


def mlp_step(batch, width, layers=6, tx=None):
    model = MLP(layers, width)
    tx = tx or optax.sgd(1e-2)

    def create(key):
        params = model.init(key, jnp.zeros((1, width)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    data = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return trace(step, jax.eval_shape(create, jax.random.key(0)), {"x": data, "y": data})


def test_data_parallel_mlp_is_one_all_reduce_of_all_gradients():
    plan = make_plan(mlp_step(256, 32), toy_mesh(4))
    assert plan.specs["batch/x"] == jax.P("a")
    plan = price_strategy(plan.program, toy_mesh(4), {"batch": "a"})
    (collective,) = large(compiled(plan))
    assert (collective.kind, collective.payload_bytes) == ("all-reduce", 25_344)
    assert all(spec == jax.P() for path, spec in plan.specs.items() if "params" in path)


def test_data_parallel_is_found_and_moves_no_more():
    plan = make_plan(mlp_step(256, 32), toy_mesh(4))
    assert plan.report.bytes_moved <= all_reduce(4, 25_344)


def test_tensor_parallel_mlp_is_five_all_reduces_with_alternating_kernels():
    plan = make_plan(mlp_step(32, 256), toy_mesh(4))
    found = large(compiled(plan))
    assert [c.kind for c in found for _ in range(c.times)] == ["all-reduce"] * 5
    assert {c.payload_bytes for c in found} == {32_768}
    kernels = [plan.specs[f"state/params/Dense_{i}/kernel"] for i in range(6)]
    column, row = jax.P(None, "a"), jax.P("a")
    assert kernels in ([column, row] * 3, [row, column] * 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_of_the_mlp_scatters_gradients_and_gathers_weights(stage, require_target):
    require_target("gpu:h100:1x4")
    program = mlp_step(256, 32, tx=optax.adam(1e-3))
    plan = price_strategy(program, toy_mesh(4), {"batch": "a"}, zero=stage, zero_axes=("a",))
    found = compiled(plan, "gpu:h100:1x4").bytes_by_kind_and_axes()
    kernels = 6 * 32 * 32 * 4
    scattered, gathered = found["reduce-scatter", ("a",)], found["all-gather", ("a",)]
    assert scattered == pytest.approx(0.75 * 25_344, rel=0.01)
    # weights are gathered once, and under stage 3 again for the backward pass, but for the first layer's
    expected = 25_344 if stage == 2 else 25_344 + kernels * 5 / 6
    assert gathered == pytest.approx(0.75 * expected, rel=0.05)
    assert found.get(("all-reduce", ("a",)), 0.0) < all_reduce(4, SCALARS)
    for leaf, spec in zip(program.arguments, plan.placements.arguments, strict=True):
        moment = leaf.role is Role.OPTIMIZER
        weight = leaf.role is Role.PARAMETER and stage == 3
        if len(leaf.shape) > 1 and (moment or weight):
            assert any(spec), leaf.path


class BertLayer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(x, x))
        y = nn.Dense(width, name="fc2")(nn.gelu(nn.Dense(4 * width, name="fc1")(x)))
        return nn.LayerNorm()(x + y)


class Bert(nn.Module):
    layers: int
    heads: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = BertLayer(self.heads, name=f"layer{i}")(x)
        return x


def bert_step(layers=2, batch=8, sequence=8, width=128, heads=8):
    model = Bert(layers, heads)
    data = jax.ShapeDtypeStruct((batch, sequence, width), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), data)["params"]

    def step(state, batch):
        def loss_fn(params):
            return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

        grads = jax.grad(loss_fn)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 1e-2 * g, state["params"], grads)}

    return trace(step, {"params": params}, {"x": data, "y": data})


def test_bert_data_parallel_is_one_all_reduce():
    plan = price_strategy(bert_step(), toy_mesh(4), {"batch": "a"})
    assert [(c.kind, c.times) for c in large(compiled(plan))] == [("all-reduce", 1)]


@pytest.mark.parametrize("target", ["cpu", "gpu:h100:1x4"])
def test_bert_tensor_parallel_is_four_all_reduces_a_layer_but_one(target, require_target):
    """The partial sums of q, k and v are added before they are reduced: on every platform."""
    require_target(target)
    plan = price_strategy(bert_step(), toy_mesh(4), {"heads*": "a", "mlp*": "a"})
    assert plan.report.bytes_moved == pytest.approx(7 * all_reduce(4, 32_768))
    found = large(compiled(plan, target))
    activations = [c for c in found if c.payload_bytes == 8 * 8 * 128 * 4]
    assert sum(c.times for c in activations) == 7
    assert {c.kind for c in found} == {"all-reduce"}
    specs = plan.specs
    for layer in ("layer0", "layer1"):
        assert specs[f"state/params/{layer}/attention/query/kernel"] == jax.P(None, "a")
        assert specs[f"state/params/{layer}/attention/out/kernel"] == jax.P("a")
        assert specs[f"state/params/{layer}/fc1/kernel"] == jax.P(None, "a")
        assert specs[f"state/params/{layer}/fc2/kernel"] == jax.P("a")


def test_data_parallel_dropout_adds_no_collective_and_draws_slices_of_the_bits(devices):
    def step(state, batch):
        def loss_fn(w):
            x = batch["x"]
            keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
            return jnp.mean((jnp.where(keep, x, 0) @ w - batch["y"]) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - grad}, loss

    data = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    program = trace(step, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, {"x": data, "y": data})
    plan = price_strategy(program, toy_mesh(4), {"batch": "a"})
    mesh = plan.mesh.build(devices)
    lowered = plan.lower_step(mesh, donate=False)
    executable = lowered.compile()
    (collective,) = large(read_compiled(executable, mesh))
    assert (collective.kind, collective.payload_bytes // 1000) == ("all-reduce", 16)
    assert "u32[64,64]" in executable.as_text() or "u32[4096]" in executable.as_text()
    key = jax.random.key(1)
    args = [jax.random.normal(key, (64, 64)), jax.random.normal(key, (256, 64)), jax.random.normal(key, (256, 64))]
    sharded = executable(*[jax.device_put(x, s) for x, s in zip(args, lowered.in_shardings, strict=True)])
    whole = jax.jit(step)({"w": args[0]}, {"x": args[1], "y": args[2]})
    assert float(sharded[1]) == pytest.approx(float(whole[1]), rel=1e-6)
