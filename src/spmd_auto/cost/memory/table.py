"""Peak memory of one device, by liveness over the program.

Buffers are arguments, results of contractions, gathers, scatters, reductions and loops; what is between
them is fused: it holds its inputs alive and takes no room itself, unless two consumers share it and it
stands on two large buffers.  Loop results live for the whole loop, constants of the loop too.  Beside the
buffers the operation at hand may hold gathered operands and a raw partial result.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.graph import Graph, Op
from spmd_auto.trace import Role

ROWS = 400  # moments kept after dominated ones are dropped
_MATERIAL = ("sort", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "top_k", "carry_out", "ys")


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on one device. `total` is the sum of all other fields."""

    parameters: float
    optimizer: float
    batch: float
    other: float
    temporaries: float

    @property
    def total(self) -> float:
        return self.parameters + self.optimizer + self.batch + self.other + self.temporaries


class MemoryTable:
    """Live bytes per value class at each moment that can be the peak; mesh-independent."""

    def __init__(self, analysis: Analysis):
        self.analysis = analysis
        classes = analysis.classes
        self.count = len(classes.values)
        self.argument_bytes: dict[Role | None, np.ndarray] = defaultdict(lambda: np.zeros(self.count))
        for leaf, value in zip(analysis.program.arguments, analysis.graph.arguments, strict=True):
            self.argument_bytes[leaf.role][classes.of_value[value.id]] += value.bytes
        self.arguments = sum(self.argument_bytes.values(), np.zeros(self.count))
        self.rows, self.row_op = self._timeline(analysis.graph)

    def _timeline(self, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        classes = self.analysis.classes
        end = len(graph.ops)
        loop_span = _loop_spans(graph)
        uses: dict[int, int] = defaultdict(int)
        for op in graph.ops:
            for v in op.operands:
                uses[v.id] += 1
        roots: dict[int, frozenset[int]] = {}  # value id -> buffers it stands on
        born: dict[int, int] = {}
        dies: dict[int, int] = {}
        size: dict[int, tuple[int, int]] = {}  # buffer (value id) -> (class, bytes)
        arguments = {v.id for v in graph.arguments}

        def use(value_id: int, op: Op) -> None:
            for buffer in roots.get(value_id, ()):
                when = op.id
                for site in op.loop:
                    first, last = loop_span[site]
                    if born[buffer] < first:  # born outside: needed by every trip
                        when = max(when, last)
                        break
                dies[buffer] = max(dies[buffer], when)

        for op in graph.ops:
            for v in op.operands:
                use(v.id, op)
            if op.name == "carry":
                continue
            for v in op.results:
                if not v.shape or v.id in arguments:
                    roots.setdefault(v.id, frozenset())
                    continue
                under = frozenset().union(*(roots.get(x.id, frozenset()) for x in op.operands))
                large = sum(size[b][1] * 2 >= v.bytes for b in under)
                material = op.cuts_regions or op.name.startswith("reduce_") or op.name in _MATERIAL
                if op.name in ("xs", "carry_in"):
                    material = False
                if material or (uses[v.id] > 1 and large > 1) or not v.depends and op.name == "random_bits":
                    roots[v.id] = frozenset([v.id])
                    size[v.id] = (classes.of_value[v.id], v.bytes)
                    start = op.id
                    if op.name in ("ys", "carry_out"):
                        start = loop_span[op.loop[-1]][0]
                    born[v.id] = start
                    dies[v.id] = op.id
                else:
                    roots[v.id] = under
        for v in graph.results:
            for buffer in roots.get(v.id, ()):
                dies[buffer] = end
        changes: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for buffer, start in born.items():
            cls, amount = size[buffer]
            changes[start].append((cls, amount))
            changes[dies[buffer] + 1].append((cls, -amount))
        live = np.zeros(self.count)
        rows: list[np.ndarray] = []
        owners: list[int] = []
        for op in graph.ops:
            for cls, amount in changes.get(op.id, ()):
                live[cls] += amount
            owner = classes.of_op[op.id]
            if op.id in changes or (owner is not None and op.cuts_regions):
                rows.append(live.copy())
                owners.append(-1 if owner is None else owner)
        if not rows:
            return np.zeros((1, self.count)), np.array([-1])
        return _drop_dominated(np.array(rows), np.array(owners))

    def peak(self, fractions: np.ndarray, transient: np.ndarray) -> float:
        """Bytes of arguments and temporaries at the peak; `transient` has the extra bytes per operation class."""
        return float(self.arguments @ fractions + self.temporaries(fractions, transient))

    def temporaries(self, fractions: np.ndarray, transient: np.ndarray) -> float:
        extra = np.append(transient, 0.0)[self.row_op]  # -1, no operation of a class, is the last entry
        return float(np.max(self.rows @ fractions + extra))

    def report(self, fractions: np.ndarray, transient: np.ndarray) -> MemoryReport:
        part = {role: float(amount @ fractions) for role, amount in self.argument_bytes.items()}
        named = (Role.PARAMETER, Role.OPTIMIZER, Role.BATCH)
        return MemoryReport(
            part.get(Role.PARAMETER, 0.0),
            part.get(Role.OPTIMIZER, 0.0),
            part.get(Role.BATCH, 0.0),
            sum(amount for role, amount in part.items() if role not in named),
            self.temporaries(fractions, transient),
        )


def _loop_spans(graph: Graph) -> dict[tuple[int, ...], tuple[int, int]]:
    spans: dict[tuple[int, ...], tuple[int, int]] = {}
    for op in graph.ops:
        for site in op.loop:
            first, _ = spans.get(site, (op.id, op.id))
            spans[site] = (first, op.id)
    return spans


def _drop_dominated(rows: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keeps moments that no other moment of the same operation class exceeds in every value class."""
    order = np.argsort(-rows.sum(axis=1), kind="stable")
    kept: list[int] = []
    by_owner: dict[int, list[int]] = defaultdict(list)
    for i in order:
        same = by_owner[int(owners[i])]
        if any(np.all(rows[k] >= rows[i]) for k in same):
            continue
        same.append(int(i))
        kept.append(int(i))
        if len(kept) == ROWS:
            break
    return rows[kept], owners[kept]
