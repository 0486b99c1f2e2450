"""Beam search over assignments: small, diverse beams from several seeds.

Deterministic; its budget is counted in states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator

from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.errors import StrategyError
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.search.actions import moves, with_zero
from spmd_auto.search.refine import refine
from spmd_auto.search.space import Space

IMPROVES = 1e-4  # a state must be better by this share to count as progress


@dataclasses.dataclass(frozen=True, slots=True)
class SearchOptions:
    """Limits of a search.

    Attributes:
      beam_width: states kept at each depth.
      per_structure: states kept with the same set of assigned axes (diversity).
      polished: best beams whose end is improved by fine moves and joint refinement.
      patience: depths without progress before a beam ends.
      depth: most moves of a beam.
      states: budget of priced states, over all meshes and seeds.
      seconds: optional time limit; the best plan so far is kept and the plan says that it was stopped.

    Raises:
      StrategyError: a limit under which nothing is searched.
    """

    beam_width: int = 2
    per_structure: int = 1
    polished: int = 2
    patience: int = 2
    depth: int = 16
    states: int = 20_000
    seconds: float | None = None

    def __post_init__(self) -> None:
        least = {"beam_width": 1, "per_structure": 1, "polished": 1, "patience": 1, "depth": 0, "states": 1}
        for name, n in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < n:
                default = type(self).__dataclass_fields__[name].default
                raise StrategyError(f"SearchOptions({name}={value!r})", f"it counts, from {n}", [f"{name}={default}"])
        if self.seconds is not None and not self.seconds >= 0:
            what = f"SearchOptions(seconds={self.seconds!r})"
            raise StrategyError(what, "seconds from now", ["seconds=60", "seconds=None: no limit"])


@dataclasses.dataclass(slots=True)
class Clock:
    """What is left of the budget; `stopped` once it is spent."""

    states_left: int
    deadline: float | None
    stopped: str = ""

    def spend(self) -> None:
        """Counts one priced state."""
        self.states_left -= 1
        if self.states_left <= 0:
            self.stopped = "state budget"
        elif self.deadline is not None and time.monotonic() > self.deadline:
            self.stopped = "time limit"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cycle collector: a search makes millions of tuples and no cycles; looking costs a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def search_mesh(
    pricer: Pricer,
    space: Space,
    options: SearchOptions,
    clock: Clock,
    progress: Callable[[str], None] | None = None,
    few: int = 0,
) -> list[Priced]:
    """Plans found on one mesh, best first, refined.

    Args:
      few: so many of the best states that beams only passed through are refined too, and are among the plans.
    """
    ends: list[Priced] = []
    passed: list[Priced] = []
    known: set[int] = set()  # specs that some beam has seen: no other one prices them again
    for label, seed in seeds(space):
        if clock.stopped:
            break
        start = pricer.price(seed)
        if start.key in known:
            continue
        known.add(start.key)
        # from nothing the first good move is nearly always the batch, which is a seed of its own
        follow = seed.order or seed.forms or not _batch_like(space)
        best = _beam(pricer, space, start, options, clock, known, passed if few else None) if follow else start
        ends.append(best)
        if few:
            passed.append(start)
        if progress is not None:
            progress(f"{pricer.mesh.describe()} from {label}: {min(ends, key=_score).seconds * 1e3:.2f} ms")
    polished = [_descend(pricer, space, end, clock) for end in sorted(ends, key=_score)[: options.polished]]
    runners_up = [state for state in sorted(passed, key=_score) if all(state is not end for end in ends)]
    refined = [refine(pricer, end) for end in (*polished, *runners_up[:few])]
    return sorted(refined, key=_score)


def _score(priced: Priced) -> float:
    return priced.score


def seeds(space: Space) -> list[tuple[str, Assignment]]:
    """Where beams start: nothing split, and all parameters' forms split over every axis.

    From nothing, states that are good only after two moves can be out of reach (the first one alone raises
    the price); from everything, moves that give memory back are downhill.
    """
    empty = Assignment()
    sharded = empty
    everything = list(range(len(space.analysis.forms.groups)))
    for axis, n in enumerate(space.mesh.sizes):
        if n > 1:
            sharded, _ = with_zero(space, sharded, everything, axis, 3)
    first: list[tuple[str, Assignment]] = [("nothing split", empty)]
    axes = [axis for axis, n in enumerate(space.mesh.sizes) if n > 1]
    for group in _batch_like(space):
        split = Assignment(tuple((group, axis) for axis in axes))
        first.append((f"{space.analysis.names.get(group, group)} split", split))
    if sharded.forms:
        first.append(("parameters split", sharded))
    return first


def _batch_like(space: Space) -> list[int]:
    """The axis group of the leading dimension (of no loop) of the largest batch leaf, if all devices divide it."""
    from spmd_auto.trace import Role

    analysis = space.analysis
    leaves = [
        (leaf.bytes, -i, value)
        for i, (leaf, value) in enumerate(zip(analysis.program.arguments, analysis.graph.arguments, strict=True))
        if leaf.role is Role.BATCH and leaf.shape
    ]
    if not leaves:
        return []
    _, _, value = max(leaves, key=lambda entry: entry[:2])
    count = space.mesh.device_count
    free = [(g, n) for g, n in zip(analysis.axes.of[value.id], value.shape, strict=True) if g not in analysis.stacked]
    return [g for g, n in free[:1] if n % count == 0]


def _beam(
    pricer: Pricer,
    space: Space,
    start: Priced,
    options: SearchOptions,
    clock: Clock,
    known: set[int],
    passed: list[Priced] | None,
) -> Priced:
    """The best state that a beam comes to; all that it kept on its way go to `passed`, where they are wanted."""
    beam, best, stale = [start], start, 0
    for _ in range(options.depth):
        children: list[Priced] = []
        for parent in beam:
            for move in moves(space, parent.assignment):
                if clock.stopped:
                    break
                child = pricer.change(parent, move.after, move.touched, known)
                if child is not None:
                    children.append(child)
                    clock.spend()
        if not children:
            break
        children.sort(key=_score)
        beam = _diverse(children, options)
        if passed is not None:
            passed += beam
        if beam[0].score < best.score * (1 - IMPROVES):
            best, stale = beam[0], 0
        else:
            stale += 1
        if stale >= options.patience or clock.stopped:
            break
    return best


def _descend(pricer: Pricer, space: Space, state: Priced, clock: Clock) -> Priced:
    """First-improvement descent with fine moves (one region, one parameter group), each tried once a pass."""
    while True:
        before = state
        tried: set[tuple[object, ...]] = set()
        improved = True
        while improved and not clock.stopped:
            improved = False
            for move in moves(space, state.assignment, fine=True):
                if move.label in tried:
                    continue
                tried.add(move.label)
                child = pricer.change(state, move.after, move.touched)
                if child is None:
                    continue
                clock.spend()
                if child.score < state.score * (1 - IMPROVES):
                    state, improved = child, True
                    break  # the moves of the new state, less those tried
                if clock.stopped:
                    break
        if state is before or clock.stopped:
            return state


def _diverse(children: list[Priced], options: SearchOptions) -> list[Priced]:
    kept: list[Priced] = []
    structures: dict[frozenset[tuple[int, int]], int] = {}
    for child in children:
        structure = frozenset(child.assignment.order)
        if structures.get(structure, 0) < options.per_structure:
            structures[structure] = structures.get(structure, 0) + 1
            kept.append(child)
            if len(kept) == options.beam_width:
                break
    return kept
