"""Logical axes: the dimensions that must be split together, through the whole program.

Dimensions joined by a PASS or REDUCE factor are united (named-dimension analysis); alike axes (same
size, same surroundings) then form one *group*, so that a plan does not grow with depth.  The group is
what has a name and what an assignment speaks of.
"""

from __future__ import annotations

import dataclasses

from spmd_auto.propagate.factors import Factor, Kind
from spmd_auto.propagate.graph import Graph, Op, Value
from spmd_auto.propagate.unionfind import UnionFind

ROUNDS = 4  # how far "same surroundings" looks, in operations


@dataclasses.dataclass(slots=True, eq=False)
class Axes:
    """Groups of logical axes.

    Attributes:
      of: for each value id, the group of each of its dimensions.
      axis_of: for each value id, the single axis of each dimension (before grouping).
      size: largest size of a dimension in each group.
    """

    of: list[tuple[int, ...]]
    axis_of: list[tuple[int, ...]]
    size: list[int]

    @property
    def count(self) -> int:
        return len(self.size)


def find_axes(graph: Graph) -> Axes:
    base, total = [], 0
    for value in graph.values:
        base.append(total)
        total += len(value.shape)
    sets = UnionFind(total)
    for op in graph.ops:
        for factor in op.rule:
            if factor.kind is Kind.REPLICATE or (factor.kind is Kind.MOVE and not _all_kept(op, factor)):
                continue
            dims = [base[op.operands[k].id] + d for k, d in factor.operands]
            dims += [base[op.results[k].id] + d for k, d in factor.results]
            for dim in dims[1:]:
                sets.union(dims[0], dim)
    axis_of = [tuple(sets.find(base[v.id] + d) for d in range(len(v.shape))) for v in graph.values]
    group = _group(graph, axis_of)
    of = [tuple(group[a] for a in axes) for axes in axis_of]
    size = [1] * (max(group.values(), default=-1) + 1)
    for value, groups in zip(graph.values, of, strict=True):
        for g, n in zip(groups, value.shape, strict=True):
            size[g] = max(size[g], n)
    return Axes(of, axis_of, size)


def _all_kept(op: Op, factor: Factor) -> bool:
    """Whether blocks only change places (a split, a join).  A slice or a padding may cut a table of positions to the
    length at hand: what it leaves out has nothing to do with what it keeps."""
    before = sum(op.operands[k].shape[d] for k, d in factor.operands)
    return before == sum(op.results[k].shape[d] for k, d in factor.results)


def _factor_axes(op: Op, axis_of: list[tuple[int, ...]]) -> list[int | None]:
    out: list[int | None] = []
    for factor in op.rule:
        if factor.operands:
            k, d = factor.operands[0]
            out.append(axis_of[op.operands[k].id][d])
        elif factor.results:
            k, d = factor.results[0]
            out.append(axis_of[op.results[k].id][d])
        else:
            out.append(None)
    return out


def _intern(keys: dict[int, object]) -> dict[int, int]:
    ids: dict[object, int] = {}
    return {axis: ids.setdefault(key, len(ids)) for axis, key in keys.items()}


def _group(graph: Graph, axis_of: list[tuple[int, ...]]) -> dict[int, int]:
    """Weisfeiler-Lehman over factors: an axis is coloured by the operations it stands in, in four rounds."""
    size: dict[int, object] = {}
    for value, axes in zip(graph.values, axis_of, strict=True):
        for axis, n in zip(axes, value.shape, strict=True):
            size.setdefault(axis, n)
    colour = _intern(size)
    seen = [(op.signature, op.trips, _factor_axes(op, axis_of)) for op in graph.ops]
    for _ in range(ROUNDS):
        around: dict[int, dict[tuple[object, ...], int]] = {axis: {} for axis in colour}
        for signature, trips, axes in seen:
            colours = tuple(-1 if a is None else colour[a] for a in axes)
            for position, axis in enumerate(axes):
                if axis is not None:
                    key = (signature, position, trips, colours)
                    around[axis][key] = around[axis].get(key, 0) + 1
        colour = _intern({axis: (colour[axis], tuple(sorted(around[axis].items()))) for axis in colour})
    return _alternate(graph.values, axis_of, colour)


def _alternate(values: list[Value], axis_of: list[tuple[int, ...]], colour: dict[int, int]) -> dict[int, int]:
    """Splits a group in two where alike axes meet on one value like a chain (square layers): even and odd ones.

    Without this, identical square layers could not be split by column and by row in turn.
    """
    neighbours: dict[int, set[int]] = {}
    for value, axes in zip(values, axis_of, strict=True):
        if not value.depends:
            continue
        for i, a in enumerate(axes):
            for b in axes[i + 1 :]:
                if a != b and colour[a] == colour[b] and value.shape[i] > 1:
                    neighbours.setdefault(a, set()).add(b)
                    neighbours.setdefault(b, set()).add(a)
    parity: dict[int, int] = {}
    odd_cycles: set[int] = set()
    for start in sorted(neighbours):
        if start in parity:
            continue
        parity[start] = 0
        queue = [start]
        for axis in queue:
            for other in sorted(neighbours[axis]):
                if other not in parity:
                    parity[other] = 1 - parity[axis]
                    queue.append(other)
                elif parity[other] == parity[axis]:
                    odd_cycles.add(colour[axis])
    return _intern({axis: (c, 0 if c in odd_cycles else parity.get(axis, 0)) for axis, c in colour.items()})
