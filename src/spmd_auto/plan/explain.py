"""A plan in words and numbers."""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
import re
from typing import Any

from rich.console import Console
from rich.table import Table

from spmd_auto.cost.report import make_report
from spmd_auto.errors import StrategyError
from spmd_auto.plan.plan import ORIGINS, Plan
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.search.refine import refine
from spmd_auto.tools.notation import spec_to_counts

WIDTH = 110


def render(*parts: Any, width: int = WIDTH) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, no_color=True)
    for part in parts:
        console.print(part)
    return out.getvalue()


def size(n: float) -> str:
    """Bytes for a reader."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            return f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a plan and what undoing it alone would change (positive: the choice saves)."""

    what: str
    given: str
    saves_seconds: float
    saves_moved: float
    saves_memory: float


def choices(plan: Plan) -> list[Choice]:
    """Each logical axis and each ZeRO axis of a plan against the same plan without it."""
    assignment = plan.priced.assignment
    alternatives: list[tuple[str, str, Assignment]] = []
    for name, to in plan.axis_splits().items():
        group = plan.analysis.group(name)
        without = tuple(split for split in assignment.order if split[0] != group)
        alternatives.append((name, "+".join(to), dataclasses.replace(assignment, order=without)))
    for axis_index, axis in enumerate(plan.mesh.names):
        kept = tuple((key, tuple(s for s in splits if s[1] != axis_index)) for key, splits in assignment.forms)
        if kept == assignment.forms:
            continue
        forms = sorted(
            {key[1].name.lower() for key, splits in assignment.forms if any(s[1] == axis_index for s in splits)}
        )
        kept = tuple(entry for entry in kept if entry[1])
        alternatives.append(("ZeRO: " + ", ".join(forms), axis, dataclasses.replace(assignment, forms=kept)))
    refined = plan.search.states > 1  # a plan found by search is refined; so is what it is compared with
    out = []
    for what, given, other in alternatives:
        priced = refine(plan.pricer, plan.pricer.price(other)) if refined else plan.pricer.price(other)
        moved = make_report(plan.pricer, priced).bytes_moved
        out.append(
            Choice(
                what,
                given,
                priced.seconds - plan.seconds,
                moved - plan.report.bytes_moved,
                priced.memory - plan.memory,
            )
        )
    return out


def axis_table(plan: Plan) -> Table:
    table = Table(title=f"logical axes of {plan.program.name} on {plan.mesh.describe()}", title_justify="left")
    for column in ("axis", "size", "given", "without it: time", "moved", "memory"):
        table.add_column(column, justify="left" if column in ("axis", "given") else "right")
    done = {}
    for choice in choices(plan):
        done[choice.what] = choice
    names = {n: g for g, n in plan.analysis.names.items() if g not in plan.analysis.stacked}
    on_arguments = {g for v in plan.analysis.graph.arguments for g in plan.analysis.axes.of[v.id]}
    for name, group in names.items():
        if name not in done and group not in on_arguments:
            continue
        choice = done.get(name)
        whole = "whole, nothing divides it" if _nearest(plan, plan.analysis.axes.size[group]) else "whole"
        cells = (
            (
                choice.given,
                f"{_signed(choice.saves_seconds, duration)}",
                _signed(choice.saves_moved, size),
                _signed(choice.saves_memory, size),
            )
            if choice
            else (whole, "", "", "")
        )
        table.add_row(name, str(plan.analysis.axes.size[group]), *cells)
    for choice in done.values():
        if choice.what.startswith("ZeRO"):
            table.add_row(
                choice.what,
                "",
                choice.given,
                _signed(choice.saves_seconds, duration),
                _signed(choice.saves_moved, size),
                _signed(choice.saves_memory, size),
            )
    return table


def _nearest(plan: Plan, elements: int) -> tuple[int, str] | None:
    """A dimension that no mesh axis divides stays whole: the nearest longer one that could be split, and over what."""
    axes = [(n, name) for n, name in zip(plan.mesh.sizes, plan.mesh.names, strict=True) if n > 1]
    if elements == 1 or not axes or any(elements % n == 0 for n, _ in axes):
        return None
    return min((-(-elements // n) * n, name) for n, name in axes)


def _signed(x: float, show: Any) -> str:
    return ("+" if x >= 0 else "-") + show(abs(x))


def price_table(plan: Plan) -> Table:
    report = plan.report
    table = Table(title="predicted for one step, per device", title_justify="left")
    table.add_column("term")
    table.add_column("time", justify="right")
    table.add_column("detail")
    table.add_row("compute", duration(report.compute), f"{report.flops:.3g} FLOP in contractions")
    table.add_row("elementwise", duration(report.fused), "by the bytes that fused operations move")
    moved = ", ".join(
        f"{kind} over {'+'.join(axes)} {size(b)}"
        for (kind, axes), b in sorted(report.bytes_by_kind_and_axes().items())
        if b >= 1
    )
    table.add_row("communication", duration(report.communication), moved or "none")
    if report.hidden:
        beside = "of weights and gradients, beside the computation of their loops"
        table.add_row("  hidden", _signed(-report.hidden, duration), beside)
        table.add_row("  slowed", _signed(report.slowed, duration), "computation that shares the device with them")
    table.add_row("sum", duration(report.seconds), f"{size(report.bytes_moved)} sent")
    m = report.memory
    table.add_row(
        "memory",
        size(m.total),
        f"parameters {size(m.parameters)}, optimizer {size(m.optimizer)}, batch {size(m.batch)}, "
        f"temporaries {size(m.temporaries)}, other {size(m.other)}",
    )
    return table


def collective_table(plan: Plan, count: int = 8) -> Table | None:
    """The collectives that send most: what is moved, along which logical axes, and for which line of code."""
    found = plan.report.collectives
    if not found:
        return None
    table = Table(title="what is moved in one step, per device", title_justify="left")
    for column in ("collective", "sent", "times", "what", "along", "for"):
        table.add_column(column, justify="right" if column in ("sent", "times") else "left")
    for c in found[:count]:
        leaves = c.leaves[0] + (f" and {len(c.leaves) - 1} alike" if len(c.leaves) > 1 else "") if c.leaves else ""
        what = f"{c.form} ({c.dtype})" + (f": {leaves}" if leaves else "")
        place = re.sub(r"^.*/(?=[^/]*:\d)", "", c.source)
        cells = (f"{c.kind} over {'+'.join(c.axes)}", size(c.bytes), str(c.times), what, ", ".join(c.logical))
        table.add_row(*cells, f"{c.operation} at {place}" if place else c.operation)
    if len(found) > count:
        rest = found[count:]
        table.add_row(f"and {len(rest)} more", size(sum(c.bytes for c in rest)), *[""] * 4)
    return table


def unused_axes(plan: Plan) -> list[str]:
    """Mesh axes of more than one device over which no value is split."""
    used = {axis for spec in plan.priced.specs for dimension in spec for axis in dimension}
    sizes = zip(plan.mesh.names, plan.mesh.sizes, strict=True)
    return [name for a, (name, size) in enumerate(sizes) if size > 1 and a not in used]


def whole_leaves(plan: Plan, count: int = 5) -> list[tuple[str, int]]:
    """The largest argument leaves that every device holds whole: (path, bytes)."""
    whole = [
        (leaf.path, leaf.bytes)
        for leaf, spec in zip(plan.program.arguments, plan.placements.arguments, strict=True)
        if not any(spec) and leaf.shape
    ]
    return sorted(whole, key=lambda entry: -entry[1])[:count]


def explain_plan(plan: Plan) -> str:
    return render(*explain_parts(plan))


def explain_parts(plan: Plan) -> tuple[Any, ...]:
    """Tables and notes, to be printed by rich."""
    notes = []
    record = plan.search
    how = f"{record.states} states on {record.meshes} meshes in {record.seconds:.2f} s"
    if plan.gap is None:
        how += "; how far it is from the best strategy there is: not known"
    notes.append(f"found by search: {how}" if record.states > 1 else "a strategy given by hand")
    if record.origin:
        notes.append(f"not searched again: {ORIGINS[record.origin]}")
    if record.stopped:
        notes.append(f"the search was stopped by its {record.stopped}: the best plan so far")
    if record.verified:
        notes.append(record.verified)
    idle = unused_axes(plan)
    if idle:
        notes.append(f"nothing is split over {', '.join(idle)}: its devices compute the same")
    whole = whole_leaves(plan)
    if whole:
        notes.append("held whole by every device: " + ", ".join(f"{path} ({size(b)})" for path, b in whole))
    for unknown in plan.analysis.graph.unknown.values():
        notes.append(f"{unknown} ({size(unknown.bytes)})")
    moved = collective_table(plan)
    return axis_table(plan), price_table(plan), *([moved] if moved is not None else []), *notes


def explain_leaf(plan: Plan, path: str) -> str:
    """What a plan does to one argument leaf.

    Raises:
      StrategyError: no such leaf.
    """
    leaves = plan.program.arguments
    index = next((i for i, leaf in enumerate(leaves) if path in (leaf.path, leaf.path.split("/", 1)[-1])), None)
    if index is None:
        paths = [leaf.path for leaf in leaves]
        near = difflib.get_close_matches(str(path), paths, n=3, cutoff=0.3) or paths[:3]
        raise StrategyError(f"no argument leaf {path!r}", "", [f"did you mean {n!r}?" for n in near])
    leaf, spec = leaves[index], plan.placements.arguments[index]
    groups = plan.analysis.axes.of[plan.analysis.graph.arguments[index].id]
    counts = spec_to_counts(plan.mesh.partition_spec(spec), plan.mesh, len(spec))
    local = tuple(n // count for n, count in zip(leaf.shape, counts, strict=True))
    lines = [
        f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}, {leaf.role.value if leaf.role else ''}",
        f"  spec {plan.mesh.partition_spec(spec)}, split counts {counts}: pieces of {list(local)}, "
        f"{size(leaf.bytes / math.prod(counts))} per device of {size(leaf.bytes)}",
    ]
    pin = plan.pinned.get(("argument", index))
    if pin is not None:
        lines.append(f"  pinned by {pin.source}")
        return "\n".join(lines) + "\n"
    given = plan.axis_splits()
    for dim, (group, axes) in enumerate(zip(groups, spec, strict=True)):
        name = plan.analysis.names.get(group, f"axis{group}")
        if axes:
            to = "+".join(plan.mesh.names[a] for a in axes)
            by_zero = [plan.mesh.names[a] for a in axes if plan.mesh.names[a] not in given.get(name, ())]
            how = f"ZeRO over {'+'.join(by_zero)}" if by_zero else f"{name} is split over {to} everywhere"
            lines.append(f"  dimension {dim} is {name}, over {to}: {how}")
        else:
            near = _nearest(plan, leaf.shape[dim])
            why = "the stacking dimension of a scan" if group in plan.analysis.stacked else "not split by this plan"
            if near is not None and group not in plan.analysis.stacked:
                why = f"no mesh axis divides {leaf.shape[dim]}; padded to {near[0]} it could be split over {near[1]}"
            lines.append(f"  dimension {dim} is {name}, whole: {why}")
    return "\n".join(lines) + "\n"
