"""Trust, but verify: what the compiled program really contains, held against the plan's prediction."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
from rich.table import Table

from spmd_auto.errors import VerifyError
from spmd_auto.plan.explain import render, size
from spmd_auto.verify.cache import SummaryCache
from spmd_auto.verify.hlo import read_compiled
from spmd_auto.verify.program import ProgramSummary
from spmd_auto.verify.rewrites import Finding, Outcome, find_rewrites
from spmd_auto.verify.targets import Target, compile_for, parse_target

if TYPE_CHECKING:
    from spmd_auto.plan import Plan

TOLERANCE = 0.02  # bytes per mesh axis
NEGLIGIBLE = 0.002  # of all bytes
SCALARS = 4096  # bytes: losses, norms and counters


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRow:
    """Bytes that one device sends per step over one set of mesh axes, by kind; predicted and found.

    Attributes:
      finding: what XLA made of them; None where nobody looked.
    """

    axes: tuple[str, ...]
    predicted: dict[str, float]
    found: dict[str, float]
    finding: Finding | None = None

    @property
    def predicted_bytes(self) -> float:
        return sum(self.predicted.values())

    @property
    def found_bytes(self) -> float:
        return sum(self.found.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """A compiled program against its plan.

    Attributes:
      target: where it was compiled for.
      rows: bytes by mesh axes.
      predicted_flops, found_flops: FLOP of contractions on one device.
      predicted_memory, found_memory: bytes at the peak (None: the platform does not say).
      summary: everything read out of the program.
    """

    target: str
    rows: tuple[AxisRow, ...]
    predicted_flops: float
    found_flops: float
    predicted_memory: float
    found_memory: float | None
    summary: ProgramSummary

    @property
    def equal(self) -> bool:
        """Whether bytes agree on every set of mesh axes within 2 %, and FLOP within 1 %."""
        return not self.differing_rows and self.flops_agree

    @property
    def differing_rows(self) -> list[AxisRow]:
        """Rows whose bytes differ, the largest difference first."""
        total = sum(max(r.predicted_bytes, r.found_bytes) for r in self.rows)
        ignored = negligible(total)
        rows = [
            row
            for row in self.rows
            if abs(row.predicted_bytes - row.found_bytes) > max(TOLERANCE * row.found_bytes, ignored)
        ]
        return sorted(rows, key=lambda row: -abs(row.predicted_bytes - row.found_bytes))

    @property
    def flops_agree(self) -> bool:
        most = max(self.predicted_flops, self.found_flops)
        return abs(self.predicted_flops - self.found_flops) <= 0.01 * most

    @property
    def verdict(self) -> str:
        if self.equal:
            return "the compiled program moves what the plan predicted"
        if not self.differing_rows:
            return (
                f"the compiled program has {self.found_flops:.4g} FLOP in contractions where "
                f"{self.predicted_flops:.4g} were predicted"
            )
        worst = self.differing_rows[0]
        finding = worst.finding
        bytes_of = (
            f"over {'+'.join(worst.axes)} it moves {size(worst.found_bytes)} where {size(worst.predicted_bytes)} "
            f"were predicted"
        )
        if all(row.finding is not None and row.finding.outcome is Outcome.REWRITTEN for row in self.differing_rows):
            assert finding is not None
            how = "; ".join(sorted(rewrite.value for rewrite in finding.rewrites))
            return f"XLA rewrote the plan's collectives: {bytes_of} ({how})"
        lines = [] if finding is None else [line.source for line in finding.lines if line.source]
        at = f", most of it from {lines[0]}" if lines else ""
        return f"the compiled program differs from the plan: {bytes_of}{at}"

    def table(self) -> Table:
        table = Table(title=f"plan against the program compiled for {self.target}", title_justify="left")
        for name in ("mesh axes", "collective"):
            table.add_column(name)
        for name in ("predicted", "found"):
            table.add_column(name, justify="right")
        table.add_column("outcome")
        for row in self.rows:
            how = "" if row.finding is None else row.finding.how
            for kind in sorted({*row.predicted, *row.found}):
                a, b = row.predicted.get(kind, 0.0), row.found.get(kind, 0.0)
                if max(a, b) >= 1:
                    table.add_row("+".join(row.axes), kind, size(a), size(b), how)
                    how = ""
        table.add_section()
        table.add_row("", "FLOP in contractions", f"{self.predicted_flops:.4g}", f"{self.found_flops:.4g}")
        found = "unknown" if self.found_memory is None else size(self.found_memory)
        table.add_row("", "peak memory", size(self.predicted_memory), found)
        return table

    def __str__(self) -> str:
        return render(self.table(), self.verdict)


def negligible(total: float) -> float:
    """Bytes that do not matter where so many are moved in all."""
    return max(NEGLIGIBLE * total, SCALARS)


def compare(plan: Plan, summary: ProgramSummary, target: str) -> Verification:
    """Holds a compiled program's summary against a plan's prediction."""
    predicted: dict[tuple[str, ...], dict[str, float]] = {}
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for (kind, axes), b in plan.report.bytes_by_kind_and_axes().items():
        predicted.setdefault(axes, {})[kind] = b
    for (kind, axes), b in summary.bytes_by_kind_and_axes().items():
        found.setdefault(axes, {})[kind] = b
    ignored = negligible(max(plan.report.bytes_moved, summary.total_bytes))

    def row(axes: tuple[str, ...]) -> AxisRow:
        finding = find_rewrites(
            [c for c in plan.report.collectives if c.axes == axes],
            [c for c in summary.collectives if c.axes == axes],
            ignored,
        )
        return AxisRow(axes, predicted.get(axes, {}), found.get(axes, {}), finding)

    rows = tuple(row(axes) for axes in sorted({*predicted, *found}))
    memory = summary.memory
    return Verification(
        target,
        rows,
        plan.report.flops,
        summary.dot_flops,
        plan.memory,
        None if memory is None else float(memory.needed),
        summary,
    )


def verify(plan: Plan, platform: str | Target = "cpu", *, cache: bool = False) -> Verification:
    """Compiles a plan for a platform, present or not, and reads the program.

    Args:
      platform: "cpu" (simulated devices), "tpu:v5p:8x8x8", "gpu:h100:2x8".
      cache: reuse the summary of an equal program compiled before.

    Raises:
      VerifyError: `plan` is none, the platform can't be compiled for here, or has another number of devices.
    """
    if not hasattr(plan, "lower_step"):
        raise VerifyError(
            f"verify was given a {type(plan).__name__}",
            "it compares a plan with the program compiled for it",
            ["verify(step.plan(*args))", "verify(spmd_auto.plan(step, *args, mesh=mesh))"],
        )
    target = parse_target(platform)
    mesh = plan.mesh.build(target.devices(plan.mesh.device_count))
    return compare(plan, _summary(plan, mesh, target, cache), str(target))


def _summary(plan: Plan, mesh: jax.sharding.Mesh, target: Target, cache: bool) -> ProgramSummary:
    lowered = plan.lower_step(mesh).lower()
    store = SummaryCache() if cache else None
    key = store.key(lowered, target, mesh) if store else ""
    found = store.get(key) if store else None
    if found is None:
        found = read_compiled(compile_for(target, lowered), mesh)
        if store:
            store.put(key, found)
    return found
