"""Where a compiled program moves other bytes than its plan: what XLA made of it, or which line it comes from.

XLA rewrites collectives in a few ways that leave what is computed, and nearly what is moved, as it was. Those are a
closed list (`Rewrite`), each recognised by what it leaves behind; what none of them explains is a difference, and is
told with the source line that has most of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping

from spmd_auto.cost.report import Collective as Predicted
from spmd_auto.verify.program import Collective as Found

EQUAL = 0.02  # share of the bytes over a set of mesh axes up to which they are equal
REWRITTEN = 0.10  # and up to which a rewrite may change them
_SUMS = ("all-reduce", "reduce-scatter")
_WINDOWS = ("all-gather", "reduce-scatter", "all-to-all")


class Rewrite(enum.Enum):
    """What XLA does to collectives; the value says it in words."""

    COMBINED = "several collectives of one kind run as one"
    WINDOWED = "a gathered operand, or a scattered result, travels by permutes between the parts of its contraction"
    REASSOCIATED = "sums are reduced at another place of their additions, or in another form"
    HOISTED = "what is the same in each trip of a loop is moved once, outside"


class Outcome(enum.Enum):
    EQUAL = "equal"
    REWRITTEN = "rewritten by XLA"
    DIFFERENT = "different"


@dataclasses.dataclass(frozen=True, slots=True)
class LineDifference:
    """Bytes that one device sends per step for one line of code, over one set of mesh axes.

    Attributes:
      source: `file:line`, "" where the compiler dropped it. What is combined counts for its first line.
    """

    source: str
    predicted: float
    found: float

    @property
    def bytes(self) -> float:
        return self.found - self.predicted


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What became of the collectives over one set of mesh axes.

    Attributes:
      rewrites: those whose traces are there, also where bytes are equal.
      lines: lines whose bytes differ, the largest difference first; empty unless `outcome` is DIFFERENT.
    """

    outcome: Outcome
    rewrites: frozenset[Rewrite]
    lines: tuple[LineDifference, ...] = ()

    @property
    def how(self) -> str:
        """In words: the outcome, and the rewrites or the line."""
        names = ", ".join(sorted(r.name.lower() for r in self.rewrites))
        if self.outcome is Outcome.EQUAL:
            return f"equal ({names})" if names else "equal"
        if self.outcome is Outcome.REWRITTEN:
            return f"rewritten by XLA: {names}"
        return f"different, from {self.lines[0].source or 'a line unknown'}" if self.lines else "different"


def find_rewrites(predicted: Iterable[Predicted], found: Iterable[Found], ignored: float = 0.0) -> Finding:
    """What became of the predicted collectives over one set of mesh axes.

    Args:
      predicted, found: collectives over these axes.
      ignored: bytes that do not matter.
    """
    predicted, found = list(predicted), list(found)
    before: defaultdict[str, float] = defaultdict(float)
    after: defaultdict[str, float] = defaultdict(float)
    for p in predicted:
        before[p.kind] += p.bytes
    for f in found:
        after[f.kind] += f.ring_bytes * f.times
    had, has = sum(before.values()), sum(after.values())
    most, off = max(had, has), abs(has - had)
    matters = max(EQUAL * most, ignored)
    rewrites: set[Rewrite] = set()
    change = {kind: after[kind] - before[kind] for kind in {*before, *after}}
    padded = _is_padded(change, found, matters)
    if padded or any(len(f.dtypes) > 1 for f in found):
        rewrites.add(Rewrite.COMBINED)
    if _changes(change, ("collective-permute",), _WINDOWS, matters):
        rewrites.add(Rewrite.WINDOWED)
    if _is_reassociated(change, matters):
        rewrites.add(Rewrite.REASSOCIATED)
    if off > matters and has < had and _is_hoisted(predicted, found, matters):
        rewrites.add(Rewrite.HOISTED)
    if off <= matters:
        moved = rewrites - {Rewrite.COMBINED} if any(abs(c) > matters for c in change.values()) else set()
        return Finding(Outcome.REWRITTEN if moved else Outcome.EQUAL, frozenset(rewrites))
    explains = rewrites if padded else rewrites - {Rewrite.COMBINED}
    if off <= max(REWRITTEN * most, ignored) and explains:
        return Finding(Outcome.REWRITTEN, frozenset(rewrites))
    return Finding(Outcome.DIFFERENT, frozenset(rewrites), by_line(predicted, found))


def by_line(predicted: Iterable[Predicted], found: Iterable[Found]) -> tuple[LineDifference, ...]:
    """Lines by their difference, the largest first."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for p in predicted:
        sums[line_of(p.source)][0] += p.bytes
    for f in found:
        sums[line_of(f.source)][1] += f.ring_bytes * f.times
    lines = [LineDifference(source, a, b) for source, (a, b) in sums.items() if a != b]
    return tuple(sorted(lines, key=lambda line: (-abs(line.bytes), line.source)))


def line_of(source: str) -> str:
    """`file:line` of a source with or without its function."""
    return source.split(" (")[0]


def _changes(change: Mapping[str, float], more: Iterable[str], less: Iterable[str], matters: float) -> bool:
    """Whether there are more bytes of some kinds, and fewer of others."""
    return sum(change.get(k, 0.0) for k in more) > matters and any(change.get(k, 0.0) < -matters for k in less)


def _is_padded(change: Mapping[str, float], found: list[Found], matters: float) -> bool:
    """Whether sums were joined into one padded scatter, as on TPU: it names no operation, nor does the permute that
    brings its pieces to their places."""
    unnamed = {f.kind for f in found if not f.op_name}
    more = sum(change.get(k, 0.0) for k in ("reduce-scatter", "collective-permute"))
    return more > matters / 2 and {"reduce-scatter", "collective-permute"} <= unnamed


def _is_reassociated(change: Mapping[str, float], matters: float) -> bool:
    """Sums made in another form (all-reduce for scatter and gather, or back), or fewer or more of them alone."""
    swapped = any(change.get(k, 0.0) > matters for k in _SUMS) and any(
        change.get(k, 0.0) < -matters for k in (*_SUMS, "all-gather")
    )
    others = [kind for kind, c in change.items() if kind not in _SUMS and abs(c) > matters]
    alone = not others and any(abs(change.get(k, 0.0)) > matters for k in _SUMS)
    return swapped or alone


def _is_hoisted(predicted: list[Predicted], found: list[Found], matters: float) -> bool:
    """Whether a collective of a loop that matters is there with the same bytes, but runs fewer times."""

    for p in predicted:
        if p.times < 2 or p.bytes < matters / 2:
            continue
        each = p.bytes / p.times
        wanted = sum(q.times for q in predicted if q.kind == p.kind and _near(q.bytes / q.times, each))
        runs = sum(f.times for f in found if f.kind == p.kind and _near(f.ring_bytes, each))
        if 0 < runs < wanted:
            return True
    return False


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= EQUAL * b
