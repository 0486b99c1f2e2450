"""A partial sum over two mesh axes, scattered over two dimensions.

A sharding constraint can't say it: it becomes a full all-reduce.  The package writes that one contraction as a
manual `shard_map` with staged reductions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.probes.common import GPU, TPU, compiled, header, jax_mesh, kib, logical, row
from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.propagate.forms import Form
from spmd_auto.trace import trace


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def two_axes(target: str) -> None:
    """x^T y with the rows split over a and b; the result split over a by row and over b by column."""
    logical_mesh = logical(target, (1e9, 1e10), a=2, b=4)
    mesh = jax_mesh(logical_mesh, target)
    x, w = shape(512, 256), shape(256, 128)

    def said(x, y):
        return jax.lax.with_sharding_constraint(x.T @ y, NamedSharding(mesh, P("a", "b")))

    rows = NamedSharding(mesh, P(("a", "b")))
    summary = compiled(jax.jit(said, in_shardings=rows), (x, shape(512, 128)), mesh, target)
    print(f"said by a constraint [{target.split(':')[0]}]: compiled KiB {kib(summary.bytes_by_kind_and_axes())}")

    def step(params, batch):
        grads = jax.grad(lambda p: ((batch["x"] @ p["w"] - batch["y"]) ** 2).sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    with jax.default_matmul_precision("highest"):
        program = trace(step, {"w": w}, {"x": x, "y": shape(512, 128)})
    analysis = analyse_for(program, logical_mesh, {})
    batch, (height, width) = analysis.group("batch"), analysis.forms.groups[0]
    splits = ((height, 0), (width, 1))
    forms = tuple(sorted(((0, form), splits) for form in (Form.GRADIENT, Form.STORED)))
    plan = price_strategy(program, logical_mesh, Assignment(((batch, 0), (batch, 1)), forms=forms), analysis=analysis)
    summary = row("by the package: gradient of a weight stored as P('a', 'b')", plan, target)
    print(f"    by kind, predicted KiB: {kib(plan.report.bytes_by_kind_and_axes())}")
    print(f"    by kind, compiled  KiB: {kib(summary.bytes_by_kind_and_axes())}")


def main() -> None:
    header(GPU, TPU)
    for target in (GPU, TPU):
        two_axes(target)


if __name__ == "__main__":
    main()
