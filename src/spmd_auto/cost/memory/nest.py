"""The flat graph as nested regions: the whole step, and the bodies of its loops and branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spmd_auto.propagate.graph import Graph, Loop, Op, Site


@dataclasses.dataclass(slots=True, eq=False)
class Nested:
    """A loop (`loop` is what the graph knows of it) or a branch (None), with its links and what stands inside."""

    site: Site
    loop: Loop | None
    enters: list[Op]
    body: list[Op | Nested]
    leaves: list[Op]

    @property
    def first(self) -> int:
        """Index of its first operation."""
        return min(op.id for op in self.operations())

    def operations(self) -> list[Op]:
        """All operations inside, those of inner loops too."""
        found = [*self.enters, *self.leaves]
        for item in self.body:
            found += item.operations() if isinstance(item, Nested) else [item]
        return found


def nest(graph: Graph, ops: Sequence[Op], used: set[int]) -> list[Op | Nested]:
    """Those of `ops` that make a value in `used`, in order, those of each loop in a region of its own."""
    return _nest(graph, [op for op in ops if any(v.id in used for v in op.results)], 0)


def _nest(graph: Graph, ops: Sequence[Op], depth: int) -> list[Op | Nested]:
    items: list[Op | Nested] = []
    k = 0
    while k < len(ops):
        if len(ops[k].loop) <= depth:
            items.append(ops[k])
            k += 1
            continue
        site, start = ops[k].loop[depth], k
        while k < len(ops) and len(ops[k].loop) > depth and ops[k].loop[depth] == site:
            k += 1
        items.append(_region(graph, site, ops[start:k], depth + 1))
    return items


def _region(graph: Graph, site: Site, ops: Sequence[Op], depth: int) -> Nested:
    enters, inside, leaves = [], [], []
    for op in ops:
        link = len(op.loop) == depth
        if link and op.name in ("carry_in", "xs"):
            enters.append(op)
        elif link and op.name in ("carry", "carry_out", "ys"):
            leaves.append(op)
        else:
            inside.append(op)
    return Nested(site, graph.loops.get(site), enters, _nest(graph, inside, depth), leaves)
