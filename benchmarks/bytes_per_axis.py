"""Predicted against compiled bytes per mesh axis, for experts' strategies on a scanned GPT and a one-hot MoE.

python benchmarks/bytes_per_axis.py [gpu] [tpu]
"""

from __future__ import annotations

import sys

from common import GPT, Report, compile_and_read

from spmd_auto.mesh import cluster
from spmd_auto.plan import Plan, price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.search.strategies import build, flips_without
from spmd_auto.trace import trace
from tests.models import gpt
from tests.strategies import expert_strategies, priced

MOE = {"layers": 4, "batch": 64, "sequence": 256, "width": 512, "heads": 8, "vocab": 4096, "experts": 8}


def expert_parallel(moe_program, mesh) -> Plan:
    analysis = analyse_for(moe_program, mesh, {})
    flips = flips_without(analysis, "experts", "batch", "sequence", 0)
    return price_strategy(
        moe_program, mesh, build(analysis, mesh, [("batch", "a"), ("experts", "a")], flips=flips), analysis=analysis
    )


def rows(report: Report, name: str, plan: Plan, target: str) -> float:
    """Prints a strategy's rows; the largest relative difference over a set of mesh axes that matters (1 % of all)."""
    verification, seconds = compile_and_read(plan, target)
    total = sum(r.found_bytes for r in verification.rows)
    worst = 0.0
    for row in verification.rows:
        if max(row.found_bytes, row.predicted_bytes) < 0.01 * total:
            continue
        difference = row.predicted_bytes / row.found_bytes - 1 if row.found_bytes else float("inf")
        worst = max(worst, abs(difference))
        report.add(
            f"{name:26} {'+'.join(row.axes):8} {row.predicted_bytes / 1e6:10.1f} {row.found_bytes / 1e6:10.1f} "
            f"{100 * difference:+7.2f} %"
        )
    flops = verification.predicted_flops / verification.found_flops - 1
    report.add(
        f"{'':26} {'all':8} {plan.report.bytes_moved / 1e6:10.1f} {total / 1e6:10.1f} "
        f"{100 * (plan.report.bytes_moved / total - 1):+7.2f} %   FLOP {100 * flops:+.3f} %, {seconds:.0f} s"
    )
    return max(worst, abs(flops))


def main() -> int:
    wanted = [a for a in sys.argv[1:] if a in ("gpu", "tpu")] or ["gpu", "tpu"]
    failed = []
    _, step, state, batch = gpt.make(**GPT)
    program = trace(step, state, batch)
    if "gpu" in wanted:
        report = Report("bytes_per_axis_gpu")
        mesh = cluster("h100", hosts=2).mesh(a=4, b=4)
        analysis = analyse_for(program, mesh, {})
        report.add(f"GPT {GPT} on (4, 4) of 2 x 8 H100; MB per device and step")
        report.add(f"{'strategy':26} {'axes':8} {'predicted':>10} {'compiled':>10}")
        for name in expert_strategies(mesh):
            if rows(report, name, priced(program, mesh, name, analysis), "gpu:h100:2x8") > 0.02:
                failed.append(name)
        _, step, state, batch = gpt.make(**MOE)
        moe = expert_parallel(trace(step, state, batch), cluster("h100").mesh(a=8))
        if rows(report, "expert parallel (MoE)", moe, "gpu:h100:1x8") > 0.02:
            failed.append("expert parallel")
        report.add(f"within 2 %: {'all' if not failed else 'all but ' + ', '.join(failed)}")
        report.write()
    if "tpu" in wanted:
        report = Report("bytes_per_axis_tpu")
        mesh = cluster("v5e", topology="4x4").mesh(a=4, b=4)
        report.add(f"GPT {GPT} on (4, 4) of 16 v5e; MB per device and step")
        report.add(f"{'strategy':26} {'axes':8} {'predicted':>10} {'compiled':>10}")
        name = "megatron+sequence+zero3"
        if rows(report, name, priced(program, mesh, name), "tpu:v5e:4x4") > 0.05:
            failed.append(f"{name} on tpu")
        report.write()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
