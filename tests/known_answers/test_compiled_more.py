"""Right answers from outside, read out of compiled programs (EXPECTATIONS A 10, 13, 14, 15)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import make_plan
from spmd_auto.search import SearchOptions
from spmd_auto.trace import Role, trace
from tests.known_answers.test_compiled import compiled, large, mlp_step
from tests.known_answers.toy import all_reduce, toy_mesh


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sgd(loss):
    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, jax.grad(loss)(params, batch))

    return step


def test_adafactor_scatters_gradients_and_gathers_weights_at_most_twice(require_target):
    """A 10: adafactor keeps sums by row and by column; no gradient is all-reduced in full for them."""
    require_target("gpu:h100:1x4")
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=32)
    program = mlp_step(256, 32, tx=tx)
    plan = price_strategy(program, toy_mesh(4), {"batch": "a"}, zero=2, zero_axes=("a",))
    summary = compiled(plan, "gpu:h100:1x4")
    found = summary.bytes_by_kind_and_axes()
    weights = sum(leaf.bytes for leaf in program.arguments if leaf.role is Role.PARAMETER)
    assert found["reduce-scatter", ("a",)] == pytest.approx(0.75 * weights, rel=0.05)
    assert found["all-gather", ("a",)] <= 2 * 0.75 * weights * 1.01
    kernel = 32 * 32 * 4
    assert all(c.payload_bytes < kernel for c in summary.collectives if c.kind == "all-reduce")


def test_tied_embedding_on_two_axes_is_all_reduced_only():
    """A 13: vocabulary 1024, width 8, mesh (2, 2)."""

    def loss(params, batch):
        x = params["table"][batch["x"]]
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    tokens = struct(16, 8, dtype=jnp.int32)
    program = trace(sgd(loss), {"table": struct(1024, 8)}, {"x": tokens, "y": tokens})
    plan = price_strategy(program, toy_mesh(2, 2), {"vocab": ("a", "b")})
    assert plan.specs["params/table"] == jax.P(("a", "b"))
    assert {c.kind for c in large(compiled(plan))} == {"all-reduce"}
    assert {c.kind for c in plan.report.collectives} == {"all-reduce"}
    best = make_plan(program, toy_mesh(2, 2), search=SearchOptions(states=500))
    assert best.seconds <= plan.seconds


def test_four_convolutions_in_tensor_parallel_are_three_all_reduces():
    """A 14: batch 8, 256 channels; layers - 1."""

    def loss(params, batch):
        x = batch["x"]
        for k in range(4):
            x = jax.nn.relu(lax.conv_general_dilated(x, params[f"w{k}"], (1, 1), "SAME", dimension_numbers=NUMBERS))
        return jnp.mean((x - batch["y"]) ** 2)

    images = struct(8, 4, 4, 256)
    program = trace(sgd(loss), {f"w{k}": struct(3, 3, 256, 256) for k in range(4)}, {"x": images, "y": images})
    activations = 8 * 4 * 4 * 256 * 4
    plan = price_strategy(program, toy_mesh(4), {"channels": "a", "channels_3": "a"})
    column, row = jax.P(None, None, None, "a"), jax.P(None, None, "a")
    assert [plan.specs[f"params/w{k}"] for k in range(4)] == [column, row, column, row]
    found = large(compiled(plan))
    assert [c.kind for c in found for _ in range(c.times)] == ["all-reduce"] * 3
    assert {c.payload_bytes for c in found} == {activations}
    best = make_plan(program, toy_mesh(4), search=SearchOptions(states=500))
    assert best.report.bytes_moved <= 3 * all_reduce(4, activations)
    assert best.seconds <= plan.seconds


NUMBERS = ("NHWC", "HWIO", "NHWC")


def test_moe_layer_is_one_all_reduce_and_four_all_to_alls():
    """A 15: batch 64, sequence 16, width 64, groups of 32, 16 experts; attention and gate whole."""
    groups, size, width, experts, capacity, hidden = 32, 32, 64, 16, 4, 256
    program = trace(sgd(moe_loss), moe_params(width, experts, hidden), {k: struct(64, 16, width) for k in "xy"})
    mesh = toy_mesh(4)
    assert groups * size == 64 * 16
    assert groups * experts * capacity * width * 4 == 524_288
    plan = make_plan(program, mesh, search=SearchOptions(states=1000))
    specs = plan.specs
    assert specs["params/wi"] == jax.P("a")
    assert specs["params/wo"] == jax.P("a")
    assert all(specs[f"params/{n}"] == jax.P() for n in "qkvo")
    gate = width * experts * 4  # the search stores it split, and gathers it: cheaper than to all-reduce its gradient
    found = [c for c in large(compiled(plan)) if c.payload_bytes > gate]
    exchanged = [c for c in found for _ in range(c.times) if c.kind == "all-to-all"]
    assert [c.payload_bytes for c in exchanged] == [524_288 // 4] * 4  # the share of a device
    assert [(c.kind, c.times) for c in found if c.kind != "all-to-all"] == [("all-reduce", 1)]


def moe_params(width, experts, hidden):
    attention = {n: struct(width, 4, width // 4) for n in "qkv"} | {"o": struct(4, width // 4, width)}
    return attention | {
        "gate": struct(width, experts),
        "wi": struct(experts, width, hidden),
        "wo": struct(experts, hidden, width),
    }


def moe_loss(params, batch, size=32, capacity=4):
    """Attention, then an MoE of groups of tokens with a one-hot dispatch to `capacity` places of each expert."""
    x = batch["x"]
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
    x = x + jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", scores, v), params["o"])
    tokens = x.reshape(-1, size, x.shape[-1])
    gates = jax.nn.softmax(tokens @ params["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
    place = (jnp.cumsum(chosen, axis=1) * chosen - 1).astype(jnp.int32)
    mask = jax.nn.one_hot(place, capacity) * chosen[..., None]
    combine = mask * gates[..., None]
    sent = jnp.einsum("gsec,gsm->egcm", mask, tokens)
    made = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, params["wi"]))
    back = jnp.einsum("egch,ehm->egcm", made, params["wo"])
    out = jnp.einsum("gsec,egcm->gsm", combine, back).reshape(x.shape)
    return jnp.mean((x + out - batch["y"]) ** 2)
