"""The forms an operation can take under given specs, each with its price.

A form gives each mesh axis to one of the operation's factors, or to none (the work is then done by all
devices of the axis).  Candidates are the factors that already hold the axis on an operand or a result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from spmd_auto.cost.compute import compute_seconds
from spmd_auto.cost.exchange import exchanges
from spmd_auto.cost.reshard import ReshardTable
from spmd_auto.mesh.collectives import ALL_REDUCE, REDUCE_SCATTER, Transfer, collective
from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.propagate.assignment import axis_places, make_spec
from spmd_auto.propagate.convolution import edge_share
from spmd_auto.propagate.factors import Kind, Rule
from spmd_auto.propagate.graph import Op, Value

ON_SHARDS = ("fft",)  # lowering writes these out on shards: XLA gathers them along every dimension


def stageable(op: Op) -> bool:
    """Whether lowering can write an operation out as a manual `shard_map` with staged reductions.

    A gather only if it indexes one dimension.
    """
    if op.name == "gather":
        numbers = op.eqn.params["dimension_numbers"]
        return len(numbers.collapsed_slice_dims) == 1 and len(numbers.start_index_map) == 1
    return op.name in ("dot_general", "conv_general_dilated", "scatter-add", "reduce_sum")


@dataclasses.dataclass(frozen=True, slots=True)
class OpForm:
    """One way to run an operation.

    Attributes:
      choice: for each mesh axis the factor (index into the rule) that holds it, or None.
      targets: specs the operands must have.
      raws: specs of the raw results, before partial sums are combined.
      reductions: collectives that combine the partial sums.
      reshards: collectives that bring the combined result into its own spec.
      exchange: what devices send each other inside the operation: edges of HALO factors, blocks of MOVE ones.
      compute: seconds of the local operation.
      flops: FLOP of the local operation.
      after: seconds of compute, exchange, reshards and, unless they are shared with a sum group, reductions.
      total: `after` and this operation's share of its operands' reshards; what forms compete by.
      transient: bytes of gathered operands and raw partial results, held only while the operation runs.
    """

    choice: tuple[int | None, ...]
    targets: tuple[Spec, ...]
    raws: tuple[Spec, ...]
    reductions: tuple[Transfer, ...]
    reshards: tuple[Transfer, ...]
    exchange: tuple[Transfer, ...]
    compute: float
    flops: float
    after: float
    total: float
    transient: float


class Around(NamedTuple):
    """What an operation's forms depend on beside itself.

    Attributes:
      operands, results: specs under which the values are stored.
      shared_sum: number of operations whose partial sums are combined together (1: alone).
      shared_operands: for each operand among how many operations a reshard of it is shared.
      latency: share of the latency that collectives on the result, and on each operand, pay.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    shared_sum: int
    shared_operands: tuple[int, ...]
    latency: tuple[float, tuple[float, ...]]


class Layout(NamedTuple):
    """An operation with mesh axes on its factors: specs of operands and raw results, axes over which the results are
    partial sums, what is exchanged, seconds and FLOP of the local operation, and seconds of both."""

    targets: tuple[Spec, ...]
    raws: tuple[Spec, ...]
    partial: tuple[int, ...]
    exchange: tuple[Transfer, ...]
    compute: float
    flops: float
    seconds: float


class OperationTable:
    """Forms of operations on one mesh (the best one memoised by signature and surroundings)."""

    def __init__(self, mesh: LogicalMesh, reshards: ReshardTable):
        self.mesh, self.reshards = mesh, reshards
        self._memo: dict[tuple[int, Around], OpForm] = {}
        self._layouts: dict[tuple[int, tuple[tuple[int, int], ...]], Layout | None] = {}

    def forms(self, op: Op, around: Around) -> tuple[OpForm, ...]:
        """All forms of `op`, cheapest first."""
        made = [self._price(op, choice, around) for choice in self._choices(op, around)]
        # the sort is stable, so equal prices keep the order of choices
        return tuple(sorted((form for form in made if form is not None), key=lambda form: form.total))

    def best(self, op: Op, around: Around) -> OpForm:
        """The cheapest form of `op` (memoised): the first of `forms`, found without pricing hopeless ones in full."""
        key = (op.signature, around)
        found = self._memo.get(key)
        if found is None:
            limit = math.inf
            for choice in self._choices(op, around):
                form = self._price(op, choice, around, limit)
                if form is not None and form.total < limit:
                    found, limit = form, form.total
            assert found is not None  # no axis on any factor is always possible
            self._memo[key] = found
        return found

    def _choices(self, op: Op, around: Around) -> Iterable[tuple[int | None, ...]]:
        return itertools.product(*[self._candidates(op, axis, around) for axis in range(len(self.mesh.sizes))])

    @staticmethod
    def _candidates(op: Op, axis: int, around: Around) -> list[int | None]:
        operands, results = around.operands, around.results
        found: list[int | None] = []
        for index, factor in enumerate(op.rule):
            if not factor.splittable:
                continue
            if any(axis in operands[k][d] for k, d in factor.operands) or any(
                axis in results[k][d] for k, d in factor.results
            ):
                found.append(index)
        found.append(None)  # last: doing the work on all devices of an axis is seldom the cheapest
        return found

    def _arrange(self, rule: Rule, choice: tuple[int | None, ...], around: Around) -> list[tuple[int, int]] | None:
        """(mesh axis, factor) in the order of majors that the stored specs suggest; None if one doesn't divide."""
        sizes = self.mesh.sizes
        arranged: list[tuple[int, int]] = []
        for index in dict.fromkeys(choice):
            if index is None:
                continue
            factor = rule[index]
            axes = [axis for axis, f in enumerate(choice) if f == index]
            pieces = 1
            for axis in axes:
                pieces *= sizes[axis]
            if factor.size % pieces:
                return None
            if len(axes) > 1:
                stored = [around.operands[k][d] for k, d in factor.operands]
                stored += [around.results[k][d] for k, d in factor.results]
                order = [axis for kept in sorted(stored, key=len, reverse=True) for axis in kept]
                axes.sort(key=order.index)
            arranged += [(axis, index) for axis in axes]
        return arranged

    def _price(self, op: Op, choice: tuple[int | None, ...], around: Around, limit: float = math.inf) -> OpForm | None:
        """None if a factor can't be split so, or the operation or its operands alone cost more than `limit`."""
        arranged = self._arrange(op.rule, choice, around)
        if arranged is None:
            return None
        key = (op.signature, tuple(arranged))
        if key not in self._layouts:
            self._layouts[key] = self._layout(op, arranged)
        layout = self._layouts[key]
        if layout is None or layout.seconds > limit:
            return None
        targets, raws, partial, exchange, compute, flops, seconds = layout
        incoming = transient = 0.0
        for k, value in enumerate(op.operands):
            if value.placed and around.operands[k] != targets[k]:
                price = self.reshards.price(value.bytes, around.operands[k], targets[k], around.latency[1][k])
                incoming += price.seconds / around.shared_operands[k]
                if incoming > limit:
                    return None
                transient += value.bytes * self.reshards.fractions[targets[k]]
        reductions: list[Transfer] = []
        reshards: list[Transfer] = []
        for value, raw, stored in zip(op.results, raws, around.results, strict=True):
            if raw == stored and not partial:
                continue
            combined, spec = self._combine(op, value, raw, stored, partial, around)
            reductions += combined
            reshards += self.reshards.price(value.bytes, spec, stored, around.latency[0]).transfers
            if raw != stored:
                transient += value.bytes * self.reshards.fractions[raw]
        reducing = sum([t.seconds for t in reductions])
        after = seconds + sum([t.seconds for t in reshards])
        if around.shared_sum == 1:
            after += reducing
            total = incoming + after
        else:
            total = incoming + after + reducing / around.shared_sum
        return OpForm(
            choice,
            targets,
            raws,
            tuple(reductions),
            tuple(reshards),
            exchange,
            compute,
            flops,
            after,
            total,
            transient,
        )

    def _layout(self, op: Op, arranged: list[tuple[int, int]]) -> Layout | None:
        """What follows from the axes of the factors alone; None if pieces are smaller than the edges they need."""
        at_operand: list[list[tuple[int, ...]]] = [[()] * len(v.shape) for v in op.operands]
        at_result: list[list[tuple[int, ...]]] = [[()] * len(v.shape) for v in op.results]
        partial: list[int] = []
        pieces = 1
        for axis, index in arranged:
            factor = op.rule[index]
            for k, d in factor.operands:
                at_operand[k][d] += (axis,)
            for k, d in factor.results:
                at_result[k][d] += (axis,)
            if factor.kind is Kind.REDUCE:
                partial.append(axis)
            pieces *= self.mesh.sizes[axis]
        targets = tuple([tuple(spec) for spec in at_operand])
        raws = tuple([tuple(spec) for spec in at_result])
        exchange = exchanges(self.mesh, self.reshards.fractions, op, arranged, targets, raws)
        if exchange is None:
            return None
        edges = 1.0
        for index in {index for _, index in arranged if op.rule[index].halos and op.name == "conv_general_dilated"}:
            lhs, rhs, out = op.operands[0].shape, op.operands[1].shape, op.results[0].shape
            edges *= edge_share(op.eqn.params, lhs, rhs, out, dict(op.rule[index].operands)[0])
        seconds, flops = compute_seconds(self.reshards.fractions, op, targets, raws, pieces, edges)
        return Layout(
            targets, raws, tuple(partial), exchange, seconds, flops, seconds + sum([t.seconds for t in exchange])
        )

    def _combine(
        self, op: Op, value: Value, raw: Spec, wanted: Spec, partial: tuple[int, ...], around: Around
    ) -> tuple[list[Transfer], Spec]:
        """Collectives that turn a partial sum of spec `raw` into a whole value, scattered where `wanted` is split.

        Where the partial sum is split already, what is wanted may not divide its pieces any more.
        """
        if not partial:
            return [], raw
        mesh, latency = self.mesh, around.latency[0]
        size = value.bytes * self.reshards.fractions[raw]
        place = axis_places(wanted)
        current = axis_places(raw)
        pieces = [math.prod(mesh.sizes[a] for a in axes) for axes in raw]
        scattered: list[int] = []
        for axis in (a for axes in wanted for a in axes if a in partial and a not in current):
            dim = place[axis]
            if value.shape[dim] % (pieces[dim] * mesh.sizes[axis]) == 0:
                pieces[dim] *= mesh.sizes[axis]
                scattered.append(axis)
        made: list[Transfer] = []
        if not stageable(op):
            # said by a constraint: one joint scatter over one dimension, its axes in the order of the mesh;
            # XLA makes a full all-reduce and slices otherwise
            if len({place[a] for a in scattered}) > 1 or scattered != sorted(scattered):
                return [collective(mesh, ALL_REDUCE, partial, size, latency)], raw
            stages = [tuple(scattered)] if scattered else []
        else:
            by_speed = sorted({place[a] for a in scattered}, key=lambda d: -max(_speed(mesh, a) for a in wanted[d]))
            stages = [(a,) for dim in by_speed for a in scattered if place[a] == dim]
        for axes in stages:
            made.append(collective(mesh, REDUCE_SCATTER, axes, size, latency))
            for axis in axes:
                size /= mesh.sizes[axis]
                current[axis] = place[axis]
        whole = [a for a in partial if a not in scattered]
        if whole:
            made.append(collective(mesh, ALL_REDUCE, whole, size, latency))
        return made, make_spec(len(raw), current)


def _speed(mesh: LogicalMesh, axis: int) -> float:
    return mesh.links[axis].bandwidth
