"""Logical axes of a deep unrolled model: 48 layers of a GPT with AdamW, each equation on its own.

python benchmarks/analysis_speed.py [--layers 48]
"""

from __future__ import annotations

import argparse
import statistics
import time

from common import Report

from spmd_auto import _compat
from spmd_auto.mesh import cluster
from spmd_auto.plan.make import analyse_for
from spmd_auto.trace import trace
from tests.models import gpt


def equations(jaxpr) -> int:
    """Equations of a jaxpr, those of inner ones included."""
    inner = _compat.open_jaxpr(jaxpr).eqns
    found = len(inner)
    for eqn in inner:
        for value in eqn.params.values():
            for x in value if isinstance(value, (tuple, list)) else (value,):
                if _compat.is_jaxpr(x):
                    found += equations(x)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    layers = parser.parse_args().layers
    report = Report("analysis_speed")
    _, step, state, batch = gpt.make(
        layers=layers, batch=64, sequence=512, width=1024, heads=16, vocab=32_768, scan=False, remat=False
    )
    start = time.perf_counter()
    program = trace(step, state, batch)
    report.add(f"trace {time.perf_counter() - start:.1f} s (JAX's own tracing of the step included)")
    mesh = cluster("h100", hosts=2).mesh(host=2, gpu=8)
    walls, analysis = [], None
    for _ in range(3):
        start = time.perf_counter()
        analysis = analyse_for(program, mesh, {})
        walls.append(time.perf_counter() - start)
    assert analysis is not None
    report.add(
        f"{layers} unrolled layers: {equations(program.jaxpr)} equations, {len(analysis.graph.ops)} operations, "
        f"{len(analysis.classes.values)} classes of values and {len(analysis.classes.ops)} of operations; "
        f"analysed in {statistics.median(walls):.2f} s (median of {', '.join(f'{w:.2f}' for w in walls)})"
    )
    report.add("logical axes: " + ", ".join(sorted(set(analysis.names.values()))))
    report.write()


if __name__ == "__main__":
    main()
