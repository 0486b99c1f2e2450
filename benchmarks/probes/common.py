"""What all probes share: targets without devices, and rows of predicted against compiled bytes.

Run a probe from the repository's root: `PYTHONPATH=src:. JAX_PLATFORMS=cpu python benchmarks/probes/NAME.py`.
Its printed output is committed beside it as `NAME.txt`.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import jax

from spmd_auto.mesh import Chip, Link, LogicalMesh
from spmd_auto.mesh.simulate import simulate_devices
from spmd_auto.plan import Plan
from spmd_auto.verify.hlo import read_compiled
from spmd_auto.verify.program import ProgramSummary
from spmd_auto.verify.targets import compile_for, parse_target

SHORT = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
GPU, TPU, CPU = "gpu:h100:1x8", "tpu:v5e:2x4", "cpu:8"

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
simulate_devices(8)


def header(*targets: str) -> None:
    print(f"jax {jax.__version__}; compiled for {', '.join(targets)}")


def logical(target: str, bandwidth: tuple[float, ...] = (), **sizes: int) -> LogicalMesh:
    """A mesh on which only bytes count: no latency, and compute so dear that all of it is split.

    Probes are small; on a real chip's profile latencies and kernel floors would decide instead of bytes.
    """
    chip = Chip("bytes", target.split(":")[0], ((8, 1e9),), 1e15, 1e15, 0.0)
    speeds = bandwidth or (1e9,) * len(sizes)
    return LogicalMesh(tuple(sizes), tuple(sizes.values()), tuple(Link(b, 0.0) for b in speeds), chip)


def jax_mesh(mesh: LogicalMesh, target: str) -> jax.sharding.Mesh:
    return mesh.build(parse_target(target).devices(mesh.device_count))


def compiled(jitted: Any, args: Any, mesh: jax.sharding.Mesh, target: str) -> ProgramSummary:
    """Any jitted function, compiled for a target and read."""
    return read_compiled(compile_for(target, jitted.lower(*args)), mesh)


def compiled_plan(plan: Plan, target: str) -> ProgramSummary:
    mesh = jax_mesh(plan.mesh, target)
    return read_compiled(compile_for(target, plan.lower_step(mesh).lower()), mesh)


def counts(summary: ProgramSummary) -> str:
    """Executions per step by kind; a combined collective counts each array it carries.

    On CPUs an all-to-all is a tuple with one array a peer: it counts once.  GPUs may flatten what they combine.
    """
    found: dict[str, int] = {}
    for c in summary.collectives:
        arrays = 1 if c.kind == "all-to-all" else len(c.dtypes)
        found[c.kind] = found.get(c.kind, 0) + c.times * arrays
    return " + ".join(f"{n} {SHORT[k]}" for k, n in sorted(found.items())) or "none"


def kib(table: dict[Any, float]) -> str:
    return ", ".join(f"{_label(key)} {b / 1024:.1f}" for key, b in sorted(table.items()) if b >= 64) or "0"


def _label(key: Any) -> str:
    if isinstance(key[-1], tuple):
        return f"{SHORT[key[0]]} {_label(key[1])}"
    return "+".join(key)


def row(label: str, plan: Plan, target: str) -> ProgramSummary:
    """Compiles a plan and prints KiB per device and step, predicted and compiled, by mesh axes."""
    summary = compiled_plan(plan, target)
    predicted = plan.report
    print(f"{label} [{target.split(':')[0]}]")
    print(f"    predicted KiB: {kib(predicted.bytes_by_axes())}")
    print(f"    compiled  KiB: {kib(summary.bytes_by_axes())}   ({counts(summary)})")
    print(f"    FLOP of contractions: predicted {predicted.flops:.4g}, compiled {summary.dot_flops:.4g}")
    return summary
