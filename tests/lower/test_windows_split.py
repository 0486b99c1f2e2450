"""Windows over a split dimension: neighbours' edges travel, nothing else, and the numbers stay those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_auto.plan import price_strategy
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from spmd_auto.verify.check import compare
from spmd_auto.verify.hlo import read_compiled
from tests.known_answers.toy import toy_mesh

NHWC = ("NHWC", "HWIO", "NHWC")
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SIZE, CHANNELS = 64, 4


def conv(window=3, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1):
    def apply(x, k):
        return lax.conv_general_dilated(
            x,
            k[:window, :window, : CHANNELS // groups],
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=NHWC,
            feature_group_count=groups,
        )

    return apply


def pool(how, start, window, stride):
    def apply(x, k):
        return lax.reduce_window(x, start, how, (1, window, window, 1), (1, stride, stride, 1), "SAME") * k.sum()

    return apply


def up(x, k):
    return lax.conv_transpose(x, k[:4, :4], (2, 2), "SAME", dimension_numbers=NHWC)


LAYERS = {
    "3x3": conv(),
    "5x5": conv(5),
    "even window": conv(4),
    "stride 2": conv(strides=(2, 2)),
    "stride 2, wide": conv(5, strides=(2, 2)),
    "stride 2, patches": conv(2, strides=(2, 2), padding="VALID"),
    "dilated": conv(dilation=(2, 2)),
    "groups": conv(groups=2),
    "transposed": up,
    "causal": conv(3, padding=((2, 0), (2, 0))),
    "max 3 by 2": pool(lax.max, -np.inf, 3, 2),
    "max 3 by 1": pool(lax.max, -np.inf, 3, 1),
    "max 2 by 2": pool(lax.max, -np.inf, 2, 2),
    "min 4 by 2": pool(lax.min, np.inf, 4, 2),
}


def step_of(layer):
    def step(params, x):
        def loss_fn(params, x):
            h = jnp.tanh(conv()(x, params["k"]))  # so that the layer's input is computed, and its cotangent needed
            return jnp.mean(layer(h, params["k"]) ** 2)

        loss, (grads, dx) = jax.value_and_grad(loss_fn, (0, 1))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, grads, dx)

    return step


@pytest.mark.parametrize("split", [{"height": "a"}, {"height": "a", "width": "b"}], ids=["8", "2x4"])
@pytest.mark.parametrize("name", LAYERS)
def test_edges_travel_and_numbers_stay(name, split, devices):
    with jax.enable_x64(True):
        step = step_of(LAYERS[name])
        rng = np.random.default_rng(0)
        params = {"k": rng.normal(size=(5, 5, CHANNELS, CHANNELS))}
        x = rng.normal(size=(2, SIZE, SIZE, CHANNELS))
        program = trace(step, params, x)
        mesh = toy_mesh(8) if len(split) == 1 else toy_mesh(2, 4)
        plan = price_strategy(program, mesh, split)
        gathers = [c for c in plan.report.collectives if c.kind == "all-gather"]
        assert not gathers, gathers
        lowered = plan.lower_step(donate=False)
        flat = [jax.device_put(v, s) for v, s in zip((params["k"], x), lowered.in_shardings, strict=True)]
        compiled = lowered.lower().compile(compiler_options=FAST)
        got = jax.device_get(jax.tree.unflatten(program.out_tree, compiled(*flat)))
        want = jax.device_get(jax.jit(step)(params, x))
        assert tree_relative_error(got, want) < 1e-9
        mesh = plan.mesh.build(devices)
        verification = compare(plan, read_compiled(compiled, mesh), "cpu")
        assert verification.flops_agree, verification
        if name == "groups":  # run on shards: XLA finds that both passes exchange the same edges of the input
            assert all(row.found_bytes <= row.predicted_bytes for row in verification.differing_rows), verification
        else:
            assert not verification.differing_rows, verification
