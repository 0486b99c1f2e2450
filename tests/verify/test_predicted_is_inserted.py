"""What is priced is inserted, and what is inserted was priced: random strategies on small programs, compiled.

A reshard that is priced and never happens, or the reverse, makes every choice between strategies wrong; bytes that
agree in sum can hide both. So each set of mesh axes is looked at alone.
"""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import pytest

from spmd_auto.errors import BatchError
from spmd_auto.mesh import cluster_of
from spmd_auto.plan.make import analyse_for, price_strategy
from spmd_auto.trace import trace
from spmd_auto.verify.check import verify
from tests.models import gpt

FEW = 8 << 10  # bytes: losses, norms and sums of biases may be combined or folded


def mlp():
    def step(state, batch):
        def loss(params):
            x = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
            return jnp.mean((x @ params["down"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    shapes = {"up": (64, 256), "bias": (256,), "down": (256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    return trace(step, {"params": params}, {"x": x, "y": x})


def transformer():
    _, step, state, batch = gpt.make(layers=2, batch=16, sequence=32, width=64, heads=4, vocab=256)
    return trace(step, state, batch)


PROGRAMS = {"mlp": mlp, "transformer": transformer}


@functools.cache
def analysed(name: str):
    program, mesh = PROGRAMS[name](), cluster_of(jax.devices()[:4]).mesh(a=2, b=2)
    return program, mesh, analyse_for(program, mesh, {})


def draw(name: str, seed: int | str):
    """The plan of a random strategy: up to three logical axes on random mesh axes, and a random stage of ZeRO."""
    program, mesh, analysis = analysed(name)
    draws = random.Random(f"{name} {seed}")
    axes = sorted({n for g, n in analysis.names.items() if g not in analysis.stacked})
    splits: dict[str, tuple[str, ...]] = {}
    for axis in draws.sample(axes, min(len(axes), draws.randint(1, 3))):
        splits[axis] = tuple(draws.sample(("a", "b"), draws.randint(1, 2)))
    stage = draws.choice((0, 0, 1, 2, 3))
    over = tuple(draws.sample(("a", "b"), draws.randint(1, 2))) if stage else ()
    try:
        plan = price_strategy(program, mesh, splits, zero=stage, zero_axes=over, analysis=analysis)
    except BatchError:  # too small an axis
        return draw(name, f"{seed}, again")
    return plan, splits, stage, over


def as_on_cpu(moved: dict[str, float]) -> float:
    """Bytes where each reduce-scatter is an all-reduce, as the compiler for CPUs has it."""
    return sum(b * (2 if kind == "reduce-scatter" else 1) for kind, b in moved.items())


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", range(8))
def test_each_set_of_mesh_axes_carries_what_was_priced(name, seed):
    plan, *drawn = draw(name, seed)
    for row in verify(plan, "cpu").rows:
        predicted, found = as_on_cpu(row.predicted), as_on_cpu(row.found)
        assert found == pytest.approx(predicted, rel=0.05, abs=FEW), f"over {row.axes}: {row}, {drawn}"
