"""Running a plan on simulated devices and reading what it moves: for tests of complaints about other tools."""

from __future__ import annotations

from typing import Any

import jax

from spmd_auto.plan import Plan
from spmd_auto.verify import ProgramSummary, read_compiled, tree_relative_error

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SCALARS = 64  # bytes: sums to scalars are no traffic


def executed(plan: Plan, *args: Any) -> tuple[Any, ProgramSummary]:
    """(results, summary of the compiled program) on the simulated devices."""
    mesh = plan.mesh.build(jax.devices()[: plan.mesh.device_count])
    lowered = plan.lower_step(mesh, donate=False)
    compiled = lowered.lower().compile(compiler_options=FAST)
    flat = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(args), lowered.in_shardings, strict=True)]
    return jax.tree.unflatten(plan.program.out_tree, compiled(*flat)), read_compiled(compiled, mesh)


def error(plan: Plan, fn: Any, *args: Any) -> float:
    """Relative error of the plan's results on several devices."""
    return tree_relative_error(executed(plan, *args)[0], jax.jit(fn)(*args))


def kinds(summary: ProgramSummary) -> set[str]:
    """Kinds of the collectives that carry more than scalars."""
    return {c.kind for c in summary.collectives if c.payload_bytes > SCALARS}
