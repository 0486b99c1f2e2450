"""Buffers, the events that make and use them, and what is live at each: plain liveness, no knowledge of programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class Buffer:
    """Bytes of one device that one value takes. `kind` is what it is for, `what` names it."""

    bytes: float
    kind: str
    what: str
    operand: bool = False  # stored only because a contraction reads it


@dataclasses.dataclass(slots=True, eq=False)
class Event:
    """One moment: `uses` are read, `defines` are made, `inner` runs (a loop's body) while both are held.

    Attributes:
      in_place: what is made may take the room of what is used here for the last time.
      replaces: pairs (made, used): the made one takes the other's room if that is used here for the last time.
    """

    op: int
    uses: set[Buffer]
    defines: list[Buffer]
    in_place: bool = False
    inner: Lifetime | None = None
    replaces: Sequence[tuple[Buffer, Buffer]] = ()
    backward: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """Bytes held at one operation, loops' bodies unfolded once. `op` is its index in the graph."""

    op: int
    bytes: float


@dataclasses.dataclass(slots=True, eq=False)
class Lifetime:
    """What a region holds over time.

    Attributes:
      peak: most bytes held at once.
      op: the operation at the peak.
      held: the buffers at the peak.
      moments: bytes at each event, in order.
    """

    peak: float
    op: int
    held: tuple[Buffer, ...]
    moments: tuple[Moment, ...]


def live(events: Sequence[Event]) -> Lifetime:
    """The lifetime of a list of events. A buffer lives from the event that makes it to the last that uses it."""
    last: dict[Buffer, int] = {}
    for when, event in enumerate(events):
        for buffer in (*event.uses, *event.defines):
            last[buffer] = when
    held: dict[Buffer, None] = {}
    current = peak = 0.0
    at, there, moments = -1, (), []
    for when, event in enumerate(events):
        dying = [b for b in event.uses if last[b] == when and b in held]
        made = sum(b.bytes for b in event.defines)
        spared = _spared(event, dying)
        inner = event.inner
        total = current + made - spared + (inner.peak if inner else 0.0)
        if inner:
            base = current + made - spared
            moments += [Moment(m.op, base + m.bytes) for m in inner.moments]
        moments.append(Moment(event.op, current + made - spared))
        if total > peak:
            peak, at = total, inner.op if inner and inner.peak else event.op
            there = (*held, *event.defines, *(inner.held if inner else ()))
        for buffer in event.defines:
            held[buffer] = None
            current += buffer.bytes
        for buffer in (*dying, *(b for b in event.defines if last[b] == when)):
            if buffer in held:
                del held[buffer]
                current -= buffer.bytes
    return Lifetime(peak, at, there, tuple(moments))


def _spared(event: Event, dying: list[Buffer]) -> float:
    if event.replaces:
        return sum(min(made.bytes, used.bytes) for made, used in event.replaces if used in dying)
    if not event.in_place or not dying:
        return 0.0
    spared, free = 0.0, sorted(dying, key=lambda b: -b.bytes)
    for buffer in event.defines:
        fit = next((b for b in free if b.bytes >= buffer.bytes), None)
        if fit is not None:
            free.remove(fit)
            spared += buffer.bytes
    return spared
