"""An assignment: which mesh axes each logical axis gets, and the spec of every value that follows from it.

Assignments stand in one global order.  Each dimension of a value takes its mesh axes unless an earlier
one holds them; a *flip* reverses that order in one region; a parameter's *form* may add a further split
(ZeRO).  Nothing here knows prices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from spmd_auto.mesh.logical import Spec
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.classes import ValueClass
from spmd_auto.propagate.forms import Form

PinnedSpec = tuple[tuple[int, ...] | None, ...]  # None: that dimension is free
FormKey = tuple[int, Form]  # (parameter group, form)
Split = tuple[int, int]  # (axis group, mesh axis)


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """A strategy.

    Attributes:
      order: (axis group, mesh axis), strongest first.
      flips: (region, mesh axis) where the weaker of two contenders wins.
      forms: extra splits of parameters' forms: ((group, form), candidates), sorted by key; for each mesh axis
        the first candidate dimension that it divides is taken.
    """

    order: tuple[Split, ...] = ()
    flips: frozenset[tuple[int, int]] = frozenset()
    forms: tuple[tuple[FormKey, tuple[Split, ...]], ...] = ()


class SpecTable:
    """Specs of all value classes under assignments, on a mesh of given axis sizes (memoised).

    Args:
      axis_speed: bytes/s of each axis' links.  Where a form splits a dimension over several axes the fastest
        is the major one: a scatter then starts, and a gather ends, on the fast links, with the large pieces.
    """

    def __init__(
        self,
        analysis: Analysis,
        axis_sizes: Sequence[int],
        axis_speed: Sequence[float] = (),
        pinned: Sequence[PinnedSpec] = (),
    ):
        self.classes = analysis.classes.values
        self.sizes = tuple(axis_sizes)
        self.speed = tuple(axis_speed) or (1.0,) * len(self.sizes)
        self.pinned = tuple(pinned)
        self._groups = _interned([frozenset(c.groups) for c in self.classes])
        self._regions = _interned([frozenset(r for r in c.regions if r >= 0) for c in self.classes])
        self._form = [c.form for c in self.classes]
        self._memo: list[dict[object, Spec]] = [{} for _ in self.classes]

    def all(self, assignment: Assignment) -> list[Spec]:
        """Specs of all value classes."""
        return [spec for _, spec in self.some(range(len(self.classes)), assignment)]

    def some(self, indices: Iterable[int], assignment: Assignment) -> list[tuple[int, Spec]]:
        """(class, spec) of some value classes."""
        order, flips, forms = assignment.order, assignment.flips, dict(assignment.forms)
        of_groups: dict[int, tuple[Split, ...]] = {}  # the parts that touch a set of groups, or of regions
        of_regions: dict[int, tuple[tuple[int, int], ...]] = {}
        group_ids, group_sets = self._groups
        region_ids, region_sets = self._regions
        out = []
        for index in indices:
            here = group_ids[index]
            splits = of_groups.get(here)
            if splits is None:
                groups = group_sets[here]
                splits = of_groups[here] = tuple([split for split in order if split[0] in groups])
            flipped: tuple[tuple[int, int], ...] = ()
            if flips:
                here = region_ids[index]
                if here in of_regions:
                    flipped = of_regions[here]
                else:
                    regions = region_sets[here]
                    flipped = of_regions[here] = tuple(sorted([f for f in flips if f[0] in regions]))
            form = self._form[index]
            extra = forms.get(form) if form is not None else None
            memo, key = self._memo[index], (splits, flipped, extra)
            spec = memo.get(key)
            if spec is None:
                spec = memo[key] = self._compute(index, assignment, extra or ())
            out.append((index, spec))
        return out

    def _compute(self, index: int, assignment: Assignment, splits: tuple[Split, ...]) -> Spec:
        cls = self.classes[index]
        rank = len(cls.shape)
        taken: dict[int, int] = {}  # mesh axis -> dimension, in the order of majors
        parts = [1] * rank
        free = [True] * rank
        if cls.pin is not None:
            for dim, axes in enumerate(self.pinned[cls.pin]):
                free[dim] = axes is None
                for axis in axes or ():
                    taken[axis] = dim
                    parts[dim] *= self.sizes[axis]
        elif not cls.placed:
            return ((),) * rank
        wanted: dict[int, list[tuple[int, int]]] = {}
        for position, (group, axis) in enumerate(assignment.order):
            for dim in range(rank):
                if cls.groups[dim] == group and free[dim] and axis not in taken:
                    wanted.setdefault(axis, []).append((position, dim))
        for axis in sorted(wanted):
            n = self.sizes[axis]
            able = [(p, d) for p, d in wanted[axis] if cls.shape[d] % (parts[d] * n) == 0]
            if not able:
                continue
            dim = able[0][1] if len(able) == 1 else self._contest(cls, sorted(able), axis, assignment)
            taken[axis] = dim
            parts[dim] *= n
        for group, axis in sorted(splits, key=lambda split: (-self.speed[split[1]], split[1])):
            if axis in taken:
                continue
            n = self.sizes[axis]
            for dim in range(rank):
                if free[dim] and cls.groups[dim] == group and cls.shape[dim] % (parts[dim] * n) == 0:
                    taken[axis] = dim
                    parts[dim] *= n
                    break
        return make_spec(rank, taken)

    @staticmethod
    def _contest(value_class: ValueClass, able: list[tuple[int, int]], axis: int, assignment: Assignment) -> int:
        """The dimension that wins most of its pairs; the order decides a pair unless its region is flipped."""
        pairs = {pair: k for k, pair in enumerate(itertools.combinations(range(len(value_class.shape)), 2))}
        wins = dict.fromkeys((d for _, d in able), 0)
        for (p, i), (q, j) in itertools.combinations(able, 2):
            pair = pairs[min(i, j), max(i, j)]
            second = (value_class.regions[pair], axis) in assignment.flips
            if p == q:  # one logical axis twice: which dimension is first must be the same through the region
                second ^= value_class.turned[pair]
            wins[j if second else i] += 1
        return max(able, key=lambda entry: (wins[entry[1]], -entry[0], -entry[1]))[1]


def _interned(sets: list[frozenset[int]]) -> tuple[list[int], list[frozenset[int]]]:
    """(number of each set, the distinct sets)."""
    ids: dict[frozenset[int], int] = {}
    return [ids.setdefault(s, len(ids)) for s in sets], list(ids)


def make_spec(rank: int, taken: dict[int, int]) -> Spec:
    """A spec from {mesh axis: dimension}; axes stand in a dimension in the order of the dict, major first."""
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis, dim in taken.items():
        dims[dim].append(axis)
    return tuple(tuple(axes) for axes in dims)


def axis_places(spec: Spec) -> dict[int, int]:
    """{mesh axis: dimension} of a spec."""
    return {axis: dim for dim, axes in enumerate(spec) for axis in axes}
