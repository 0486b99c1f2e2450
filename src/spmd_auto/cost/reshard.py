"""The collectives that turn one spec of a value into another, and their price."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from spmd_auto.mesh.collectives import ALL_GATHER, ALL_TO_ALL, PERMUTE, Transfer, collective
from spmd_auto.mesh.logical import LogicalMesh, ShardFractions, Spec
from spmd_auto.propagate.assignment import axis_places


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """Seconds and transfers; slicing is free."""

    seconds: float = 0.0
    transfers: tuple[Transfer, ...] = ()


NOTHING = Reshard()


class ReshardTable:
    """Prices of reshards on one mesh (memoised)."""

    def __init__(self, mesh: LogicalMesh):
        self.mesh = mesh
        self.fractions = ShardFractions(mesh)
        self._paths: dict[tuple[Spec, Spec], tuple[Spec, ...]] = {}
        self._memo: dict[tuple[int, Spec, Spec, float], Reshard] = {}

    def price(self, total_bytes: int, source: Spec, target: Spec, latency: float = 1.0) -> Reshard:
        """Prices `source` -> `target` for a value of `total_bytes` unsplit.

        The price of its path: on each step slice what the target adds, exchange what moves to another
        dimension, gather what it drops.
        """
        if source == target:
            return NOTHING
        key = (total_bytes, source, target, latency)
        found = self._memo.get(key)
        if found is None:
            steps = [self._step(total_bytes, a, b, latency) for a, b in itertools.pairwise(self.path(source, target))]
            found = Reshard(sum(s.seconds for s in steps), tuple(t for s in steps for t in s.transfers))
            self._memo[key] = found
        return found

    def path(self, source: Spec, target: Spec) -> tuple[Spec, ...]:
        """The specs that a reshard goes through, both ends included; lowering constrains to each."""
        found = self._paths.get((source, target))
        if found is None:
            found = self._paths[source, target] = (source, *_stages(self.mesh, source, target), target)
        return found

    def _step(self, total: int, source: Spec, target: Spec, latency: float) -> Reshard:
        mesh = self.mesh
        size = total * self.fractions[source]
        have, want = axis_places(source), axis_places(target)
        moves: list[Transfer] = []
        for dim in range(len(source)):
            kept = tuple(a for a in source[dim] if a in target[dim])
            if kept and (kept != source[dim][: len(kept)] or kept != target[dim][: len(kept)]):
                # the same axes in another order of major and minor: pieces change places
                axes = tuple(sorted(set(source[dim]) | set(target[dim])))
                moves.append(collective(mesh, PERMUTE, axes, min(size, total * self.fractions[target]), latency))
        for axis in want:
            if axis not in have:
                size /= mesh.sizes[axis]
        exchanged: dict[tuple[int, int], list[int]] = {}
        for axis, dim in have.items():
            if axis in want and want[axis] != dim:
                exchanged.setdefault((dim, want[axis]), []).append(axis)
        for (dim, other), axes in exchanged.items():
            if [a for a in source[dim] if a in axes] != [a for a in target[other] if a in axes]:
                # major and minor change places on the way
                moves.append(collective(mesh, PERMUTE, tuple(sorted(axes)), size, latency))
            moves.append(collective(mesh, ALL_TO_ALL, axes, size, latency))
        for axes in gather_steps(mesh, source, target):
            for axis in axes:
                size *= mesh.sizes[axis]
            moves.append(collective(mesh, ALL_GATHER, axes, size, latency))
        return Reshard(sum(m.seconds for m in moves), tuple(moves))


def gather_steps(mesh: LogicalMesh, source: Spec, target: Spec) -> list[tuple[int, ...]]:
    """The gathers between two specs, in order: groups of mesh axes that one collective gathers.

    Dimensions on slow links first, while the pieces are small.  Several axes of one dimension are one
    collective if they stand in the order of the mesh; in another order they are gathered one by one,
    minor first (XLA would make something larger of a joint one).
    """
    want = axis_places(target)
    dropped = [tuple(a for a in axes if a not in want) for axes in source]
    dropped = [axes for axes in dropped if axes]
    steps: list[tuple[int, ...]] = []
    for axes in sorted(dropped, key=lambda axes: min(mesh.links[a].bandwidth for a in axes)):
        if list(axes) == sorted(axes):
            steps.append(axes)
        else:
            steps += [(axis,) for axis in reversed(axes)]
    return steps


def _stages(mesh: LogicalMesh, source: Spec, target: Spec) -> list[Spec]:
    """Specs on the way, where something is gathered: in one go XLA gathers all of a value whose axes also move.

    What moves or is sliced does so before the gathers, while pieces are small; but an axis that is minor to one that
    moves away, or on a dimension that others come to, is gathered before that.
    """
    have, want = axis_places(source), axis_places(target)
    if all(axis in want for axis in have):
        return []
    moved = {axis for axis, dim in have.items() if want.get(axis, dim) != dim}
    entered = {dim for axis, dim in want.items() if axis in moved or axis not in have}
    early = {
        axis
        for dim, axes in enumerate(source)
        for k, axis in enumerate(axes)
        if axis not in want and (dim in entered or not moved.isdisjoint(axes[:k]))
    }
    stages: list[Spec] = []
    current = source
    for gathered in gather_steps(mesh, source, _without(source, early)):
        current = _without(current, gathered)
        stages.append(current)
    late = {axis for axis in have if axis not in want} - early
    arranged = tuple(
        tuple(a for a in axes if a not in moved) if late.intersection(axes) else target[dim]
        for dim, axes in enumerate(current)
    )
    if arranged != current:
        stages.append(arranged)
        current = arranged
    for gathered in gather_steps(mesh, current, target):
        current = _without(current, gathered)
        stages.append(current)
    return [stage for stage in stages if stage != target]


def _without(spec: Spec, axes: Iterable[int]) -> Spec:
    gone = set(axes)
    return tuple(tuple(a for a in dim if a not in gone) for dim in spec)
