"""A plan as one piece of HTML, for notebooks: tables only, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from spmd_auto.plan.explain import choices, duration, size
from spmd_auto.plan.plan import Plan
from spmd_auto.tools.notation import spec_to_counts
from spmd_auto.trace import Role

MOST = 12  # leaves that are shown

_STYLE = (
    "<style>.spmd-auto table{border-collapse:collapse;margin:0.4em 0}.spmd-auto th,.spmd-auto td"
    "{padding:0.15em 0.6em;text-align:left;border-bottom:1px solid #8884}.spmd-auto caption"
    "{text-align:left;font-weight:bold}.spmd-auto .n{text-align:right}</style>"
)


def plan_to_html(plan: Plan) -> str:
    """Summary, splits, price, memory and the largest leaves of a plan; every text is escaped."""
    mesh, report = plan.mesh, plan.report
    unit = "devices" if mesh.device_count > 1 else "device"
    head = (
        f"{plan.program.name} on {mesh.describe()}: {mesh.device_count} {unit}, {duration(plan.seconds)} a step, "
        f"{size(plan.memory)} per device, {size(report.bytes_moved)} sent"
    )
    parts = [
        f"<p><b>{html.escape(head)}</b></p>",
        _table("split", ("axis", "over", "without it: time", "memory"), _splits(plan), 2),
        _table("one step, per device", ("term", "time", "bytes"), _price(plan), 1),
        _table("memory, per device", ("kind", "bytes"), _memory(plan), 1),
        _table(
            f"largest of {len(plan.program.arguments)} arguments",
            ("argument", "role", "array", "spec", "split counts", "one device holds"),
            _leaves(plan),
        ),
    ]
    return f'<div class="spmd-auto">{_STYLE}{"".join(parts)}</div>'


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 99) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        open_tags = [tag if k < numbers_from else f"{tag} class='n'" for k in range(len(row))]
        return "".join(f"<{o}>{html.escape(cell)}</{tag}>" for o, cell in zip(open_tags, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>"
    return f"<table>{title}<thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"


def _splits(plan: Plan) -> list[tuple[str, ...]]:
    rows = [
        (
            c.what,
            c.given,
            _signed(c.saves_seconds, duration(abs(c.saves_seconds))),
            _signed(c.saves_memory, size(abs(c.saves_memory))),
        )
        for c in choices(plan)
    ]
    return rows or [("nothing is split", "", "", "")]


def _price(plan: Plan) -> list[tuple[str, ...]]:
    report = plan.report
    rows = [("compute", duration(report.compute), ""), ("elementwise", duration(report.fused), "")]
    seconds: dict[tuple[str, tuple[str, ...]], float] = {}
    for c in report.collectives:
        seconds[c.kind, c.axes] = seconds.get((c.kind, c.axes), 0.0) + c.seconds
    for key, moved in sorted(report.bytes_by_kind_and_axes().items()):
        rows.append((f"{key[0]} over {'+'.join(key[1])}", duration(seconds[key]), size(moved)))
    if report.hidden:
        rows.append(("hidden, slowed by it", duration(report.slowed - report.hidden), ""))
    return [*rows, ("sum", duration(report.seconds), size(report.bytes_moved))]


def _memory(plan: Plan) -> list[tuple[str, ...]]:
    m = plan.report.memory
    named = ("parameters", "optimizer", "batch", "temporaries", "other")
    return [*((kind, size(getattr(m, kind))) for kind in named), ("sum", size(m.total))]


def _leaves(plan: Plan) -> list[tuple[str, ...]]:
    """The largest leaves, parameters before others of their size."""
    pairs = list(zip(plan.program.arguments, plan.placements.arguments, strict=True))
    pairs.sort(key=lambda pair: (-pair[0].bytes, pair[0].role is not Role.PARAMETER))
    rows = []
    for leaf, axes in pairs[:MOST]:
        spec = plan.mesh.partition_spec(axes)
        counts = spec_to_counts(spec, plan.mesh, len(leaf.shape))
        local = [n // k for n, k in zip(leaf.shape, counts, strict=True)]
        role = leaf.role.value if leaf.role is not None else ""
        rows.append((leaf.path, role, f"{leaf.dtype}{list(leaf.shape)}", str(spec), str(counts), str(local)))
    if len(pairs) > MOST:
        rows.append((f"and {len(pairs) - MOST} more", "", "", "", "", ""))
    return rows


def _signed(x: float, shown: str) -> str:
    return ("+" if x >= 0 else "-") + shown
