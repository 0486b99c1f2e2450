"""One logical axis twice on a value: attention scores (sequence x sequence) and a square recurrent kernel.

The mesh axis can go to only one of the two dimensions.  The first one takes it; a flip of the value's region
gives it to the second.  So both choices can be said for the scores apart from the queries and keys, and for a
kernel apart from the state.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.probes.common import GPU, TPU, header, logical, row
from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.search import strategies
from spmd_auto.trace import trace

f32 = jnp.float32


def attention(params, x):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
    return x + jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", scores, v), params["o"])


def recurrence(params, x):
    def cell(state, token):
        state = jnp.tanh(state @ params["w"] + token @ params["u"])
        return state, state

    start = jnp.zeros_like(x[0] @ params["u"])
    return jax.lax.scan(cell, start, x)[1] @ params["out"]


def step_of(model):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def twice(analysis, group):
    """Regions in which an axis group contends with itself."""
    return [r for r, pair in enumerate(analysis.regions.pair) if pair == (group, group)]


def show(title, program, axis, target):
    mesh = logical(target, d=8)
    analysis = analyse_for(program, mesh, {})
    group = analysis.group(axis)
    regions = twice(analysis, group)
    print(f"-- {title}: {axis} contends with itself in {len(regions)} region(s)")
    base = strategies.build(analysis, mesh, [(axis, "d")])
    for label, flips in (("first dimension", []), ("second dimension", regions)):
        flipped = dataclasses.replace(base, flips=frozenset((r, 0) for r in flips))
        for refined in (False, True):
            plan = price_strategy(program, mesh, flipped, analysis=analysis, refined=refined)
            how = ", refined jointly" if refined else ""
            row(f"{axis}->d, contested values split on their {label}{how}", plan, target)


def main() -> None:
    header(GPU, TPU)
    width, heads, head, sequence, batch = 64, 4, 16, 128, 2

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, f32)

    params = {n: shape(width, heads, head) for n in "qkv"} | {"o": shape(heads, head, width)}
    data = {"x": shape(batch, sequence, width), "y": shape(batch, sequence, width)}
    with jax.default_matmul_precision("highest"):  # else a TPU moves float32 as bfloat16
        scores = trace(step_of(attention), params, data)
    for target in (GPU, TPU):
        show("attention scores", scores, "sequence", target)
    hidden, tokens, rows = 128, 16, 32
    params = {"w": shape(hidden, hidden), "u": shape(width, hidden), "out": shape(hidden, width)}
    data = {"x": shape(tokens, rows, width), "y": shape(tokens, rows, width)}
    with jax.default_matmul_precision("highest"):
        cell = trace(step_of(recurrence), params, data)
    names = analyse_for(cell, logical(GPU, d=8), {}).names
    axis = next(n for n in ("mlp", "hidden", "embed") if n in names.values())
    for target in (GPU, TPU):
        show("square recurrent kernel", cell, axis, target)


if __name__ == "__main__":
    main()
