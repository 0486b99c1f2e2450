"""A 6-layer GPT of width 1024 on 16 TPU v5e: the plan found, against XLA's own auto-sharding and experts' strategies.

XLA's auto-sharding pass, measured on the same step in an environment of its own (jax 0.4.38, libtpu 0.0.7):
151 s, 956 MB sent per device and step, 153 MB of arguments, 497 MB of temporaries.

    python benchmarks/gpt_on_v5e.py [--no-compile]
"""

from __future__ import annotations

import sys
import time

from common import GPT, Report, compile_and_read, moved

from spmd_auto.mesh import cluster
from spmd_auto.plan import make_plan
from spmd_auto.plan.make import analyse_for
from spmd_auto.trace import trace
from tests.models import gpt
from tests.strategies import expert_strategies, priced

XLA_MOVED, XLA_ARGUMENTS, XLA_TEMPORARIES = 956e6, 153e6, 497e6


def main() -> int:
    report = Report("gpt_on_v5e")
    start = time.perf_counter()
    _, step, state, batch = gpt.make(**GPT)
    program = trace(step, state, batch)
    report.add(f"trace {time.perf_counter() - start:.2f} s")
    v5e = cluster("v5e", topology="4x4")
    budget = XLA_ARGUMENTS + XLA_TEMPORARIES
    best_of = []
    for _ in range(3):  # the machine is shared: the median of three
        start = time.perf_counter()
        plan = make_plan(program, v5e, memory=budget)
        best_of.append(time.perf_counter() - start)
    report.add(
        f"plan for {budget / 1e6:.0f} MB per device: {sorted(best_of)[1]:.2f} s after tracing (median of "
        f"{', '.join(f'{s:.2f}' for s in best_of)}), {plan.search.states} states"
    )
    report.add(repr(plan))
    if "--no-compile" in sys.argv:
        return 0
    rows = {"found": plan}
    mesh = v5e.mesh(a=4, b=4)
    analysis = analyse_for(program, mesh, {})
    for name in expert_strategies(mesh):
        rows[name] = priced(program, mesh, name, analysis)
    report.add()
    report.add(
        f"{'strategy':26} {'predicted':>10} {'compiled':>10} {'arguments':>10} {'temporaries':>11} {'peak':>9}  MB"
    )
    results = {}
    for name, candidate in rows.items():
        verification, seconds = compile_and_read(candidate, "tpu:v5e:4x4")
        memory = verification.summary.memory
        assert memory is not None
        results[name] = (moved(verification), memory)
        report.add(
            f"{name:26} {candidate.report.bytes_moved / 1e6:10.1f} {moved(verification) / 1e6:10.1f} "
            f"{memory.arguments / 1e6:10.1f} {memory.temporaries / 1e6:11.1f} {(memory.peak or 0) / 1e6:9.1f}"
            f"  compiled in {seconds:.0f} s"
        )
        report.write()
    report.add(
        f"{'XLA auto-sharding':26} {'':10} {XLA_MOVED / 1e6:10.1f} {XLA_ARGUMENTS / 1e6:10.1f} "
        f"{XLA_TEMPORARIES / 1e6:11.1f}"
    )
    ours, memory = results["found"]

    def total(m) -> float:
        return m.arguments + m.temporaries

    within = {name: b for name, (b, m) in results.items() if name != "found" and total(m) <= max(total(memory), budget)}
    best = min(within, key=within.__getitem__) if within else "none fits"
    checks = {
        "arguments + temporaries not above XLA auto-sharding's": total(memory) <= budget,
        "fewer bytes than XLA auto-sharding": ours < XLA_MOVED,
        f"fewer bytes than the best expert's at that memory ({best})": all(ours < b for b in within.values()),
    }
    report.add()
    for what, holds in checks.items():
        report.add(f"{'holds' if holds else 'FAILS'}: {what}")
    report.write()
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
