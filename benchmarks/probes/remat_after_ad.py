"""Rematerialisation added to, and removed from, a step that is already differentiated: a rewrite of its jaxpr.

The forward scan hands residuals to the backward scan as `ys`.  To add: keep the layer's carry instead, clone the
forward body into the backward one behind an `optimization_barrier`.  To remove: what the backward body computes
from residuals alone becomes further `ys` of the forward scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.probes.common import GPU, header, logical, row
from benchmarks.probes.remat_rewrite import rewrite
from spmd_auto.plan import price_strategy
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error

LAYERS, WIDTH, BATCH = 8, 128, 1024


def make_step(remat):
    def layer(x, w):
        return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None

    def step(params, batch):
        def loss(p):
            body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
            return jnp.mean((lax.scan(body, batch["x"], p)[0] - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    return step


def main() -> None:
    header(GPU)
    keys = iter(jax.random.split(jax.random.key(0), 4))
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = {n: 0.1 * jax.random.normal(next(keys), s) for n, s in shapes.items()}
    batch = {n: jax.random.normal(next(keys), (BATCH, WIDTH)) for n in "xy"}
    variants = {}
    for remat in (False, True):
        step = make_step(remat)
        with jax.default_matmul_precision("highest"):
            program = trace(step, params, batch)
        rewritten = rewrite(program.jaxpr, add=not remat)

        def changed(params, batch, rewritten=rewritten, program=program):
            return jax.tree.unflatten(program.out_tree, rewritten(*jax.tree.leaves((params, batch))))

        changed.__name__ = "step"
        before, after = jax.jit(step)(params, batch), jax.jit(changed)(params, batch)
        what = "removed" if remat else "added"
        print(f"remat {what} after AD: relative error {tree_relative_error(after, before):.1e}")
        variants["traced with remat" if remat else "traced without remat"] = program
        variants[f"remat {what} after AD"] = trace(changed, params, batch)
    for label, program in variants.items():
        plan = price_strategy(program, logical(GPU, d=8), {"batch": "d"})
        summary = row(label, plan, GPU)
        predicted, found = plan.report.memory.temporaries, summary.memory.temporaries
        print(f"    temporaries KiB: predicted {predicted / 1024:.0f}, compiled {found / 1024:.0f}")


if __name__ == "__main__":
    main()
