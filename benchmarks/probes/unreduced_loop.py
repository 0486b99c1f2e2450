"""Unreduced sums over a loop of micro-batches: one reduction a step instead of one per micro-batch and layer.

There is no unreduced loop carry.  But each contraction over samples may get a leading dimension of groups: the
carry keeps it, split over the data axis, and it is summed once after the loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.probes.common import GPU, TPU, compiled_plan, header, logical, row
from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error

LAYERS, WIDTH, MICRO, GROUPS, ROWS = 4, 128, 8, 8, 4


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def loss(params, x, y):
    out, _ = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w["up"]) @ w["down"], None), x, params)
    return ((out - y) ** 2).sum()


def plain(params, batch):
    def micro(total, xy):
        grads = jax.grad(loss)(params, *(a.reshape(GROUPS * ROWS, WIDTH) for a in xy))
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), (batch["x"], batch["y"]))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)


def grouped(params, batch):
    """The same: each contraction over samples gets the leading dimension of groups, summed after the loop."""

    def micro(total, xy):
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(lambda p: jnp.zeros((GROUPS, *p.shape)), params)
    total, _ = jax.lax.scan(micro, zeros, (batch["x"], batch["y"]))
    return jax.tree.map(lambda p, g: p - 0.1 * g.sum(0), params, total)


def micro_batches(target: str) -> None:
    params = {"up": shape(LAYERS, WIDTH, 2 * WIDTH), "down": shape(LAYERS, 2 * WIDTH, WIDTH)}
    data = {"x": shape(MICRO, GROUPS, ROWS, WIDTH), "y": shape(MICRO, GROUPS, ROWS, WIDTH)}
    mesh = logical(target, d=8)
    for fn in (plain, grouped):
        with jax.default_matmul_precision("highest"):
            program = trace(fn, params, data)
        analysis = analyse_for(program, mesh, {})
        group = analysis.axes.of[analysis.graph.arguments[2].id][1]  # the second dimension of batch/x
        plan = price_strategy(program, mesh, Assignment(((group, 0),)), analysis=analysis)
        row(f"{MICRO} micro-batches x {LAYERS} scanned layers, {fn.__name__}", plan, target)
        found = compiled_plan(plan, target).collectives
        inside = sum(c.times * len(c.dtypes) for c in found if c.times > 1)
        outside = sum(len(c.dtypes) for c in found if c.times == 1)
        print(f"    reductions a step: {inside} inside loops, {outside} after them")


def equal() -> None:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    params = {n: 0.1 * jax.random.normal(next(keys), s) for n, s in params.items()}
    data = {n: jax.random.normal(next(keys), (MICRO, GROUPS, ROWS, WIDTH)) for n in "xy"}
    a, b = jax.jit(plain)(params, data), jax.jit(grouped)(params, data)
    print(f"plain against grouped on one CPU device: relative error {tree_relative_error(a, b):.1e}")


def main() -> None:
    header(GPU, TPU)
    equal()
    for target in (GPU, TPU):
        micro_batches(target)


if __name__ == "__main__":
    main()
