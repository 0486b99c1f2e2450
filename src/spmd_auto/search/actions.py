"""The moves of the search: assign an axis first or last, drop it, flip a set of regions, split parameters' forms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from spmd_auto.propagate.assignment import Assignment, FormKey, Split
from spmd_auto.propagate.forms import Form
from spmd_auto.search.space import Space
from spmd_auto.search.strategies import ZERO_FORMS, zero_splits


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A move: what it is in words, the assignment after it, and the value classes it may change."""

    label: tuple[object, ...]
    after: Assignment
    touched: frozenset[int]


def moves(space: Space, state: Assignment, fine: bool = False) -> Iterator[Move]:
    """All moves from a state. `fine` adds those that decide for one region or one parameter group alone."""
    yield from _orders(space, state)
    yield from _flips(space, state, fine)
    yield from _forms(space, state, fine)


def _orders(space: Space, state: Assignment) -> Iterator[Move]:
    taken = set(state.order)
    size = space.analysis.axes.size
    for group in space.groups:
        touched = space.classes_of_group.get(group, frozenset())
        for axis, n in enumerate(space.mesh.sizes):
            split = (group, axis)
            if split in taken or n == 1 or size[group] % n:
                continue
            yield Move(("last", group, axis), dataclasses.replace(state, order=(*state.order, split)), touched)
            # coming first matters only where the group contends with another one for this axis
            if any(a == axis and _pair(group, g) in space.regions_of_pair for g, a in state.order):
                yield Move(("first", group, axis), dataclasses.replace(state, order=(split, *state.order)), touched)
    for i, (group, axis) in enumerate(state.order):
        rest = state.order[:i] + state.order[i + 1 :]
        yield Move(
            ("drop", group, axis),
            dataclasses.replace(state, order=rest),
            space.classes_of_group.get(group, frozenset()),
        )


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _flips(space: Space, state: Assignment, fine: bool) -> Iterator[Move]:
    """Flips sets of regions of one contending pair: one region, those with an axis beside, those without it."""
    beside = space.analysis.regions.groups_beside
    for axis in sorted({axis for _, axis in state.order}):
        groups = sorted(group for group, a in state.order if a == axis)
        for pair in itertools.combinations_with_replacement(groups, 2):
            regions = space.regions_of_pair.get(pair, [])
            if not regions:
                continue
            sets: dict[frozenset[int], tuple[object, ...]] = {}
            if fine or len(regions) == 1:
                for region in regions:
                    sets.setdefault(frozenset([region]), ("region", region))
            for other in sorted(frozenset().union(*(beside[r] for r in regions))):
                with_it = frozenset(r for r in regions if other in beside[r])
                sets.setdefault(with_it, ("with", other))
                if len(with_it) < len(regions):
                    sets.setdefault(frozenset(regions) - with_it, ("without", other))
            for chosen, how in sets.items():
                flips = state.flips ^ frozenset((r, axis) for r in chosen)
                touched = frozenset().union(*(space.classes_of_region.get(r, frozenset()) for r in chosen))
                yield Move(("flip", *pair, axis, *how), dataclasses.replace(state, flips=flips), touched)


def _forms(space: Space, state: Assignment, fine: bool) -> Iterator[Move]:
    """ZeRO 0 to 3 over one mesh axis, for all parameters or one large group, largest or smallest dimension first."""
    everything = list(range(len(space.analysis.forms.groups)))
    for axis, n in enumerate(space.mesh.sizes):
        if n == 1:
            continue
        for stage in (0, 1, 2, 3):
            for smallest_first in (False, True):
                if stage == 0 and smallest_first:
                    continue
                single = [[g] for g in space.large_forms] if fine else []
                for groups in (everything, *single):
                    after, touched = with_zero(space, state, groups, axis, stage, smallest_first)
                    if after.forms != state.forms:
                        which = "all" if groups is everything else groups[0]
                        yield Move(("zero", stage, axis, which, smallest_first), after, touched)


def with_zero(
    space: Space, state: Assignment, groups: list[int], axis: int, stage: int, smallest_first: bool = False
) -> tuple[Assignment, frozenset[int]]:
    """`state` with ZeRO of a stage over one mesh axis for the given parameter groups."""
    forms: dict[FormKey, tuple[Split, ...]] = dict(state.forms)
    touched: set[int] = set()
    for group in groups:
        splits = zero_splits(space.analysis, group, [axis], smallest_first)
        for form in Form:
            key = (group, form)
            kept = tuple(s for s in forms.get(key, ()) if s[1] != axis)
            now = kept + splits if stage and form in ZERO_FORMS[stage] else kept
            if now:
                forms[key] = now
            else:
                forms.pop(key, None)
            touched |= space.classes_of_form.get(key, frozenset())
    return dataclasses.replace(state, forms=tuple(sorted(forms.items()))), frozenset(touched)
