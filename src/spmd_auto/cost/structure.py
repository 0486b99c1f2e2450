"""What a price is summed over, known before any mesh: operations, shared reshards, shared sums.

Two costs are not local to an operation.  An *edge* is a value in one loop with all its consumers: each
distinct target is resharded once.  A *sum group* is the leaves of an add chain: their partial sums are
combined by one reduction at the root, or by separate ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import jax.numpy as jnp

from spmd_auto.cost.compute import FREE, FUSED_SHARE
from spmd_auto.cost.operation import ON_SHARDS
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.classes import OpClass
from spmd_auto.propagate.factors import Kind
from spmd_auto.propagate.forms import Form
from spmd_auto.propagate.graph import Op, Site, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A value class, the operands (operation class, position) that read it in one loop and pass, and how often.

    A stored parameter is read by the forward and the backward pass as two edges: what one pass gathers is not
    kept for the other.

    `latency` is the share of the latency that its collectives pay (see `_latencies`).
    """

    value: int
    consumers: tuple[tuple[int, int], ...]
    trips: int
    latency: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class SumGroup:
    """Operations whose results are only added up: `leaves` are pairs (operation class, permutation), where
    dimension `i` of the root is dimension `permutation[i]` of the leaf's result.  Further addends of the chain
    that are whole already (a residual) are added after the reduction.
    """

    leaves: tuple[tuple[int, tuple[int, ...]], ...]
    root_itemsize: int
    trips: int


@dataclasses.dataclass(frozen=True, slots=True)
class SumTree:
    """One occurrence of a sum group: ids of its root, leaves and the operations between, and the group's index."""

    root: int
    leaves: tuple[int, ...]
    between: tuple[int, ...]
    group: int


@dataclasses.dataclass(slots=True, eq=False)
class Structure:
    """Classes to price and the indices for pricing only what a change touches.

    Attributes:
      active: operation classes with a price of their own; the others are flat (one value class, elementwise).
      flat_bytes: value class -> bytes that flat operations move, times trips, unsplit.
      edges, sums: see `Edge`, `SumGroup`.
      trees: every occurrence of a sum group in the program.
      share_sum: per operation class, how many leaves its largest sum group has (1: none).
      alone: operation class -> trips of those operations that belong to no sum, where others of the class do.
      share_operands: per operation class and operand, among how many contractions a reshard is shared.
      latency: per operation class the share of the latency that collectives on its results and operands pay.
    """

    active: list[int]
    flat: frozenset[int]
    flat_bytes: dict[int, float]
    edges: list[Edge]
    sums: list[SumGroup]
    trees: list[SumTree]
    share_sum: list[int]
    alone: dict[int, int]
    share_operands: list[tuple[int, ...]]
    latency: list[tuple[float, tuple[float, ...]]]
    edges_of_value: dict[int, list[int]]
    edges_of_op: dict[int, list[int]]
    sums_of_op: dict[int, list[int]]
    ops_of_value: dict[int, list[int]]


def build_structure(analysis: Analysis) -> Structure:
    classes = analysis.classes
    flat, flat_bytes = _flat(classes.ops)
    active = [i for i in range(len(classes.ops)) if i not in flat]
    latency = _latencies(analysis)
    edges = _edges(analysis, flat, latency)
    sums, trees = _sums(analysis)
    share_sum = [1] * len(classes.ops)
    in_sums: Counter[int] = Counter()
    for group in sums:
        for c, _ in group.leaves:
            share_sum[c] = max(share_sum[c], len(group.leaves))
            in_sums[c] += group.trips
    alone = {c: classes.ops[c].trips - n for c, n in in_sums.items() if classes.ops[c].trips > n}
    share = [[1] * len(c.operands) for c in classes.ops]
    for edge in edges:
        heavy = [(c, k) for c, k in edge.consumers if classes.ops[c].op.flops]
        for c, k in heavy:
            share[c][k] = max(share[c][k], len(heavy))
    edges_of_value: dict[int, list[int]] = defaultdict(list)
    edges_of_op: dict[int, list[int]] = defaultdict(list)
    for i, edge in enumerate(edges):
        edges_of_value[edge.value].append(i)
        for c in sorted({c for c, _ in edge.consumers}):
            edges_of_op[c].append(i)
    sums_of_op: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(sums):
        for c in sorted({c for c, _ in group.leaves}):
            sums_of_op[c].append(i)
    ops_of_value: dict[int, list[int]] = defaultdict(list)
    for i in active:
        for c in sorted({*classes.ops[i].operands, *classes.ops[i].results}):
            ops_of_value[c].append(i)
    return Structure(
        active,
        flat,
        flat_bytes,
        edges,
        sums,
        trees,
        share_sum,
        alone,
        [tuple(s) for s in share],
        latency,
        edges_of_value,
        edges_of_op,
        sums_of_op,
        ops_of_value,
    )


def _flat(ops: list[OpClass]) -> tuple[frozenset[int], dict[int, float]]:
    flat: set[int] = set()
    weight: dict[int, float] = defaultdict(float)
    for i, cls in enumerate(ops):
        op = cls.op
        touched = {c for c, v in zip(cls.operands, op.operands, strict=True) if v.depends and v.shape}
        touched |= {c for c, v in zip(cls.results, op.results, strict=True) if v.shape}
        if len(touched) == 1 and not op.cuts_regions and op.name not in ON_SHARDS and _keeps_places(op):
            flat.add(i)
            if op.name not in FREE:
                weight[touched.pop()] += cls.trips * FUSED_SHARE * sum(v.bytes for v in op.results)
    return frozenset(flat), dict(weight)


def _keeps_places(op: Op) -> bool:
    """Whether each element of a result is made of those at its own place: all dimensions pass, and to themselves.

    A transform has dimensions that are needed whole, a transpose of a square array others; arrays that are cheap to
    make anew may be of any shape.
    """
    arrays = [(True, k, v) for k, v in enumerate(op.results)] + [(False, k, v) for k, v in enumerate(op.operands)]
    arrays = [(side, k, v) for side, k, v in arrays if v.shape and (side or v.depends)]
    for side, k, value in arrays:
        passing: set[int] = set()
        for factor in op.rule:
            mine = {d for position, d in (factor.results if side else factor.operands) if position == k}
            if factor.kind is Kind.PASS and mine:
                to = {d for position, d in factor.results if op.results[position].shape}
                passing |= {d for d in mine if factor.size == value.shape[d] and to == {d}}
        if any(n > 1 and d not in passing for d, n in enumerate(value.shape)):
            return False
    return True


def _latencies(analysis: Analysis) -> list[tuple[float, tuple[float, ...]]]:
    """Shares of latency: XLA combines the gradients' reductions of one loop body, and its weights' gathers.

    A collective on a value that has a parameter's form pays one part of the latency, of as many as there are
    such values in its loop, and a sum to a scalar (norms) one of as many as there are scalars; activations wait
    for each other and pay all of it.
    """
    forms, classes = analysis.forms.of, analysis.classes
    made: Counter[tuple[Site, ...]] = Counter()
    scalars: Counter[tuple[Site, ...]] = Counter()
    read: dict[tuple[Site, ...], set[int]] = defaultdict(set)
    for op in analysis.graph.ops:
        if op.flops or op.name.startswith(("reduce_", "scatter")):
            made[op.loop] += sum(v.id in forms for v in op.results)
            scalars[op.loop] += sum(not v.shape for v in op.results)
        if op.flops:
            read[op.loop].update(v.id for v in op.operands if v.id in forms)

    def share(value: Value, count: int) -> float:
        return 1.0 / max(1, count) if value.id in forms else 1.0

    out = []
    for cls in classes.ops:
        op = cls.op
        result = min((share(v, made[op.loop]) for v in op.results), default=1.0)
        if scalars[op.loop] and not any(v.shape for v in op.results):
            result = 1.0 / scalars[op.loop]
        out.append((result, tuple(share(v, len(read[op.loop])) for v in op.operands)))
    return out


def _edges(analysis: Analysis, flat: frozenset[int], latency: list[tuple[float, tuple[float, ...]]]) -> list[Edge]:
    classes = analysis.classes
    same = _common_casts(analysis)
    readers: dict[int, dict[tuple[tuple[Site, ...], int, bool], set[tuple[int, int]]]] = {}
    for op in analysis.graph.ops:
        c = classes.of_op[op.id]
        if c is None or c in flat:
            continue
        for k, value in enumerate(op.operands):
            if value.placed:
                again = op.backward and reads_stored(analysis, value.id)
                by_loop = readers.setdefault(same.get(value.id, value.id), {})
                by_loop.setdefault((op.loop, op.trips, again), set()).add((c, k))
    trips: Counter[tuple[int, tuple[tuple[int, int], ...]]] = Counter()
    for value_id, by_loop in readers.items():
        for (_, count, _), consumers in by_loop.items():
            trips[classes.of_value[value_id], tuple(sorted(consumers))] += count
    return [
        Edge(value, consumers, count, min(latency[c][1][k] for c, k in consumers))
        for (value, consumers), count in trips.items()
    ]


def reads_stored(analysis: Analysis, value_id: int) -> bool:
    """Whether a value is a parameter as it is stored (or a cast or transpose of one)."""
    form = analysis.forms.of.get(value_id)
    return form is not None and form[1] is Form.STORED


def _common_casts(analysis: Analysis) -> dict[int, int]:
    """Value id -> the value it repeats: casts of one value to one type. XLA keeps one, so it is resharded once."""
    same: dict[int, int] = {}
    first: dict[object, int] = {}
    for op in analysis.graph.ops:
        if op.name == "convert_element_type" and op.eqn is not None:
            operand = op.operands[0].id
            key = (same.get(operand, operand), op.loop, str(op.eqn.outvars[0].aval))
            same[op.results[0].id] = first.setdefault(key, op.results[0].id)
    return same


def _is_linear(op: Op) -> bool:
    """Operations between a leaf and its root that may be done on each device's partial sum: f(a + b) = f(a) + f(b).

    Casts among floating-point types are so up to rounding, and integers wrap in a narrower type alike. Others are not:
    a partial sum may overflow int8 where the int32 it becomes does not, and every sum of True is True.
    """
    if op.name != "convert_element_type":
        return op.name in ("transpose", "copy")
    before, after = (var.aval.dtype for var in (op.eqn.invars[0], op.eqn.outvars[0]))
    for kind in (jnp.complexfloating, jnp.inexact):
        if jnp.issubdtype(before, kind):
            return jnp.issubdtype(after, kind)
    integers = jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.integer)
    return integers and jnp.iinfo(after).bits <= jnp.iinfo(before).bits


def _makes_partial(op: Op) -> bool:
    """Contractions that lowering can run as they are on shards, inside a deferred sum."""
    if op.name == "conv_general_dilated":  # the number of groups would have to follow their split
        return op.eqn.params["feature_group_count"] == op.eqn.params["batch_group_count"] == 1
    return op.name in ("dot_general", "reduce_sum")


@dataclasses.dataclass(slots=True)
class _Part:
    """A value that is a sum of leaves, and of whole values: (leaf, permutation from the value's dimensions to the
    leaf's), and the operations between."""

    leaves: list[tuple[Op, tuple[int, ...]]]
    between: list[Op]


def _sums(analysis: Analysis) -> tuple[list[SumGroup], list[SumTree]]:
    graph, classes = analysis.graph, analysis.classes
    producer: dict[int, Op] = {v.id: op for op in graph.ops for v in op.results}
    uses: Counter[int] = Counter(v.id for op in graph.ops for v in op.operands)
    uses.update(v.id for v in (*graph.results, *graph.roots))

    def part(value: Value, loop: tuple[Site, ...]) -> _Part | None:
        """`value` as a sum with contractions' results in it, if it is used nowhere else; None: it is whole."""
        op = producer.get(value.id)
        if op is None or uses[value.id] > 1 or op.loop != loop or classes.of_op[op.id] is None:
            return None
        if _is_add(op):
            a, b = part(op.operands[0], loop), part(op.operands[1], loop)
            return _joined(a, b, [op])
        if _is_linear(op):
            inner = part(op.operands[0], loop)
            if inner is None:
                return None
            order = op.eqn.params["permutation"] if op.name == "transpose" else range(len(value.shape))
            return _Part([(leaf, tuple(p[d] for d in order)) for leaf, p in inner.leaves], [*inner.between, op])
        return _Part([(op, tuple(range(len(value.shape))))], []) if _makes_partial(op) else None

    taken: set[int] = set()
    trips: Counter[tuple[tuple[tuple[int, tuple[int, ...]], ...], int]] = Counter()
    found: list[tuple[Op, _Part, tuple[tuple[tuple[int, tuple[int, ...]], ...], int]]] = []
    for root in reversed(graph.ops):  # the last add of a chain is its root
        if not _is_add(root) or not root.results[0].shape or root.id in taken or classes.of_op[root.id] is None:
            continue
        whole = _joined(part(root.operands[0], root.loop), part(root.operands[1], root.loop), [])
        if whole is None or len(whole.leaves) < 2:
            continue
        taken.update(op.id for op in whole.between)
        leaves = sorted((_class(classes.of_op, leaf), permutation) for leaf, permutation in whole.leaves)
        key = (tuple(leaves), root.results[0].itemsize)
        trips[key] += root.trips
        found.append((root, whole, key))
    index = {key: i for i, key in enumerate(trips)}
    groups = [SumGroup(leaves, itemsize, count) for (leaves, itemsize), count in trips.items()]
    trees = [
        SumTree(root.id, tuple(leaf.id for leaf, _ in p.leaves), tuple(op.id for op in p.between), index[key])
        for root, p, key in found
    ]
    return groups, trees


def _joined(a: _Part | None, b: _Part | None, between: list[Op]) -> _Part | None:
    parts = [side for side in (a, b) if side is not None]
    if not parts:
        return None
    return _Part([x for side in parts for x in side.leaves], [*(x for side in parts for x in side.between), *between])


def _is_add(op: Op) -> bool:
    return op.name in ("add", "add_any") and op.operands[0].shape == op.operands[1].shape


def _class(of_op: list[int | None], op: Op) -> int:
    found = of_op[op.id]
    assert found is not None
    return found
