"""Losses of lowered steps in the types that people train in: float32, and bfloat16 against a float32 truth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_auto.plan import make_plan
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh
from tests.models import gpt
from tests.strategies import MESHES, priced

SIZE = {"layers": 2, "width": 32, "heads": 8, "vocab": 32, "batch": 16, "sequence": 16, "dropout": 0.1}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.3e-2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mesh", "strategy"),
    [
        ("float32", "2x4", "megatron+sequence+zero3"),
        ("float32", "2x2x2", "found"),
        ("bfloat16", "8", "zero2"),
        ("bfloat16", "2x4", "found"),
    ],
)
def test_losses_follow_one_device_in_float32(dtype, mesh, strategy, devices):
    create, truth, _, _ = gpt.make(**SIZE, dtype=jnp.float32)
    _, step, state, batch = gpt.make(**SIZE, dtype=jnp.dtype(dtype))
    program = trace(step, state, batch)
    logical = toy_mesh(*MESHES[mesh])
    plan = make_plan(program, logical) if strategy == "found" else priced(program, logical, strategy)
    lowered = plan.lower_step(donate=False)
    rng = np.random.default_rng(0)
    data = {k: rng.integers(0, SIZE["vocab"], (16, 16)).astype(np.int32) for k in "xy"}
    expected_state = jax.jit(create)(jax.random.key(0))
    expected_state = expected_state.replace(step=jnp.zeros((), jnp.int32))
    flat = [
        jax.device_put(x, s) for x, s in zip(jax.tree.leaves((expected_state, data)), lowered.in_shardings, strict=True)
    ]
    reference = jax.jit(truth)
    for _ in range(3):
        outs = lowered.compile()(*flat)
        expected_state, expected = reference(expected_state, data)
        assert abs(float(outs[-1]) - float(expected)) < TOLERANCE[dtype] * float(expected)
        flat = [*outs[:-1], *flat[len(outs) - 1 :]]
