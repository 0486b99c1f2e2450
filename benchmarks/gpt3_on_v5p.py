"""A GPT-3 175B training step planned for 512 TPU v5p (8x8x8), compiled and read.

96 scanned, rematerialised layers of width 12,288, 96 heads, sequence 2048, batch 512, AdamW.

    python benchmarks/gpt3_on_v5p.py [--no-compile]
"""

from __future__ import annotations

import sys
import time

from common import Report, compile_and_read, moved

from spmd_auto.mesh import cluster
from spmd_auto.plan import make_plan
from spmd_auto.trace import trace
from tests.models import gpt

GPT3 = {"layers": 96, "batch": 512, "sequence": 2048, "width": 12_288, "heads": 96, "vocab": 51_200}


def main() -> int:
    report = Report("gpt3_on_v5p")
    start = time.perf_counter()
    _, step, state, batch = gpt.make(**GPT3)
    program = trace(step, state, batch)
    report.add(f"trace {time.perf_counter() - start:.2f} s, {len(program.arguments)} argument leaves")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        plan = make_plan(program, cluster("v5p", topology="8x8x8"))
        times.append(time.perf_counter() - start)
    report.add(
        f"plan: median {sorted(times)[1]:.2f} s of {', '.join(f'{t:.2f}' for t in times)}, {plan.search.states} states"
    )
    report.add(plan.explain())
    report.write()
    if "--no-compile" in sys.argv:
        return 0
    verification, seconds = compile_and_read(plan, "tpu:v5p:8x8x8")
    report.add(
        f"lowered, compiled and read in {seconds:.0f} s; {moved(verification) / 1e9:.2f} GB sent per device and step"
    )
    report.add(str(verification))
    memory = verification.summary.memory
    if memory is not None:
        report.add(
            f"arguments {memory.arguments / 1e9:.2f} GB, temporaries {memory.temporaries / 1e9:.2f} GB, "
            f"peak {(memory.peak or 0) / 1e9:.2f} GB per chip"
        )
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
