"""Two plans of one program side by side."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from jax.sharding import PartitionSpec
from rich.table import Table

from spmd_auto.cost.report import PriceReport
from spmd_auto.errors import StrategyError
from spmd_auto.plan.explain import duration, render, size
from spmd_auto.plan.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One figure of two plans: `unit` is "s" or "B"."""

    name: str
    unit: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """What the second has more."""
        return self.second - self.first


@dataclasses.dataclass(frozen=True, slots=True)
class SpecChange:
    """An argument leaf that lies otherwise: its bytes as a whole, and its spec in both plans."""

    path: str
    bytes: int
    first: PartitionSpec
    second: PartitionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class PlanComparison:
    """Two plans of one program.

    Attributes:
      first, second: the plans in short.
      terms: seconds of a step and its parts, bytes sent over each set of mesh axes, bytes of memory by kind.
      specs: argument leaves that lie otherwise, most bytes first.
    """

    first: str
    second: str
    terms: tuple[Term, ...]
    specs: tuple[SpecChange, ...]

    def term(self, name: str) -> Term:
        """The term of a name: "seconds", "compute", "sent over data", "memory", ..."""
        return next(term for term in self.terms if term.name == name)

    def parts(self, titles: tuple[str, str] = ("first", "second"), most: int = 20) -> list[Any]:
        """What `str` prints, for rich; at most `most` specs."""
        table = Table(title=f"{titles[0]}: {self.first}\n{titles[1]}: {self.second}", title_justify="left")
        for column in ("term", *titles, "difference"):
            table.add_column(column, justify="left" if column == "term" else "right")
        for t in self.terms:
            if not t.first and not t.second:
                continue
            show = duration if t.unit == "s" else size
            sign = "+" if t.difference > 0 else "-" if t.difference < 0 else ""
            table.add_row(t.name, show(t.first), show(t.second), sign + show(abs(t.difference)))
        if not self.specs:
            return [table, "all arguments lie alike"]
        specs = Table(title="arguments that lie otherwise", title_justify="left")
        for column in ("argument", "bytes", *titles):
            specs.add_column(column, justify="right" if column == "bytes" else "left")
        for change in self.specs[:most]:
            specs.add_row(change.path, size(change.bytes), str(change.first), str(change.second))
        more = len(self.specs) - most
        return [table, specs, *([f"and {more} more"] if more > 0 else [])]

    def __str__(self) -> str:
        return render(*self.parts())


def compare_plans(first: Plan, second: Plan) -> PlanComparison:
    """The figures of two plans of one program; the meshes may differ.

    Raises:
      StrategyError: plans of two programs; the first leaf that differs is named.
    """
    _check_same_program(first, second)
    a, b = first.report, second.report
    terms = [
        Term("seconds", "s", a.seconds, b.seconds),
        Term("compute", "s", a.compute, b.compute),
        Term("elementwise", "s", a.fused, b.fused),
        Term("communication", "s", a.communication, b.communication),
        Term("of it hidden", "s", a.hidden, b.hidden),
        Term("slowed beside it", "s", a.slowed, b.slowed),
    ]
    times_a, times_b = _seconds_by_axes(a), _seconds_by_axes(b)
    moved_a, moved_b = a.bytes_by_axes(), b.bytes_by_axes()
    for axes in sorted({*moved_a, *moved_b}):
        name = "+".join(axes)
        terms.append(Term(f"time over {name}", "s", times_a.get(axes, 0.0), times_b.get(axes, 0.0)))
        terms.append(Term(f"sent over {name}", "B", moved_a.get(axes, 0.0), moved_b.get(axes, 0.0)))
    terms.append(Term("memory", "B", a.memory.total, b.memory.total))
    for kind in dataclasses.fields(a.memory):
        terms.append(Term(f"memory: {kind.name}", "B", getattr(a.memory, kind.name), getattr(b.memory, kind.name)))
    before = [first.mesh.partition_spec(spec) for spec in first.placements.arguments]
    after = [second.mesh.partition_spec(spec) for spec in second.placements.arguments]
    changes = [
        SpecChange(leaf.path, leaf.bytes, one, other)
        for leaf, one, other in zip(first.program.arguments, before, after, strict=True)
        if one != other
    ]
    changes.sort(key=lambda change: -change.bytes)
    return PlanComparison(repr(first), repr(second), tuple(terms), tuple(changes))


def _check_same_program(first: Plan, second: Plan) -> None:
    if first.fingerprint == second.fingerprint:
        return
    a, b = ({leaf.path: (leaf.shape, str(leaf.dtype)) for leaf in p.program.arguments} for p in (first, second))
    odd = next((path for path in (*a, *b) if a.get(path) != b.get(path)), None)
    near = difflib.get_close_matches(odd or "", list(b), n=1, cutoff=0.6) if odd in a else []
    raise StrategyError(
        f"the plans are of two programs, {first.program.name} and {second.program.name}",
        f"leaf {odd!r} differs: {a.get(odd)} and {b.get(odd)}" if odd else "their leaves agree, their operations don't",
        ["compare plans of one step with arguments of the same shapes", *(f"is {odd!r} now {n!r}?" for n in near)],
    )


def _seconds_by_axes(report: PriceReport) -> dict[tuple[str, ...], float]:
    out: dict[tuple[str, ...], float] = {}
    for c in report.collectives:
        out[c.axes] = out.get(c.axes, 0.0) + c.seconds
    return out
