"""A price as a report whose terms add up."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from spmd_auto.cost.memory import MemoryReport
from spmd_auto.cost.operation import OpForm
from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.cost.provenance import dtype_of, factor_axes, leaves_of, moved_axes, what_is_moved
from spmd_auto.mesh.collectives import Transfer
from spmd_auto.mesh.logical import Spec
from spmd_auto.propagate.graph import Op, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Alike collectives of a price. Operations that are alike are priced as one: `operation`, `source` and `dtype` are
    those of the first of them.

    Attributes:
      kind: XLA's name.
      axes: names of the mesh axes, in the order of the mesh.
      bytes: bytes that one device sends for it in one step.
      seconds: its time in one step, if nothing of it is hidden.
      times: how often it runs in one step.
      where: the operation that asks for it, in words.
      source: `file:line (function)` of that operation.
      operation: its primitive.
      logical: names of the logical axes that are gathered, reduced or moved along.
      form: what is moved: "gathered weight", "reduced gradient", "partial sum reduced", "gathered activation", ...
      leaves: paths of the parameters, or other arguments, that it is moved for; none for activations.
      dtype: type of the elements as they are sent.
      latency: seconds of `seconds` that do not depend on the bytes.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    times: int
    where: str
    source: str
    operation: str = ""
    logical: tuple[str, ...] = ()
    form: str = ""
    leaves: tuple[str, ...] = ()
    dtype: str = ""
    latency: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PriceReport:
    """Terms of a price: `seconds == compute + fused + slowed + exposed`, `exposed == communication - hidden`, and
    `memory.total` the sum of its parts.

    Attributes:
      compute: seconds in operations that have a form.
      fused: seconds in elementwise operations, by the bytes they move.
      communication: seconds in collectives, one after the other.
      hidden: seconds of `communication` that run beside computation; see `spmd_auto.cost.overlap`.
      slowed: seconds that computation takes longer for that.
      flops: FLOP in contractions on one device.
      collectives: everything moved, most bytes first.
      memory: bytes at the peak.
    """

    compute: float
    fused: float
    communication: float
    flops: float
    collectives: tuple[Collective, ...]
    memory: MemoryReport
    hidden: float = 0.0
    slowed: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which nothing but communication runs."""
        return self.communication - self.hidden

    @property
    def latency(self) -> float:
        """Seconds of `communication` that no bandwidth shortens."""
        return sum(c.latency for c in self.collectives)

    @property
    def seconds(self) -> float:
        return self.compute + self.fused + self.slowed + self.exposed

    def bytes_by_axes(self) -> dict[tuple[str, ...], float]:
        out: dict[tuple[str, ...], float] = defaultdict(float)
        for c in self.collectives:
            out[c.axes] += c.bytes
        return dict(out)

    def bytes_by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...]], float]:
        out: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        for c in self.collectives:
            out[c.kind, c.axes] += c.bytes
        return dict(out)

    @property
    def bytes_moved(self) -> float:
        return sum(c.bytes for c in self.collectives)


class _Collector:
    """Collectives of a price, in the names of the mesh and of the program."""

    def __init__(self, pricer: Pricer, specs: Sequence[Spec]):
        self.pricer, self.specs, self.found = pricer, specs, list[Collective]()

    def add(
        self,
        transfers: Iterable[Transfer],
        trips: int,
        op: Op,
        where: str,
        value_class: int,
        value: Value,
        axes_of: Callable[[Transfer], tuple[str, ...]],
    ) -> None:
        """Adds what is done `trips` times for a value of a class."""
        analysis, names = self.pricer.analysis, self.pricer.mesh.names
        for t in transfers if trips else ():
            self.found.append(
                Collective(
                    t.kind,
                    tuple(names[a] for a in t.axes),
                    t.bytes * trips,
                    t.seconds * trips,
                    trips,
                    where,
                    op.source,
                    op.name,
                    axes_of(t),
                    what_is_moved(analysis, value_class, t.kind),
                    leaves_of(analysis, value_class),
                    dtype_of(value),
                    t.latency * trips,
                )
            )

    def operation(self, index: int, form: OpForm, summed: int) -> None:
        """The collectives of an operation class itself; its reductions run `summed` times."""
        analysis = self.pricer.analysis
        cls = analysis.classes.ops[index]
        op, specs = cls.op, self.specs
        k = max(range(len(op.results)), key=lambda k: op.results[k].bytes)
        c, value, raw = cls.results[k], op.results[k], form.raws[k]

        def along(t: Transfer) -> tuple[str, ...]:
            return factor_axes(analysis, op, form.choice, t)

        def to_stored(t: Transfer) -> tuple[str, ...]:
            # what was scattered on the way is split by neither spec: the factor's axis says where it came from
            return moved_axes(analysis, c, t, raw, specs[c]) or along(t)

        self.add(form.reductions, summed, op, f"result of {op.name}", c, value, along)
        self.add(form.reshards, cls.trips, op, f"result of {op.name}", c, value, to_stored)
        self.add(form.exchange, cls.trips, op, f"pieces of {op.name}", c, value, along)


def collectives_of(pricer: Pricer, priced: Priced) -> list[Collective]:
    """Everything a price moves, most bytes first."""
    structure, analysis = pricer.structure, pricer.analysis
    ops = analysis.classes.ops
    made = _Collector(pricer, priced.specs)
    for i in structure.active:
        form, cls = priced.forms[i], ops[i]
        assert form is not None
        made.operation(i, form, structure.alone.get(i, cls.trips if structure.share_sum[i] == 1 else 0))
    for i, edge in enumerate(structure.edges):
        c, k = edge.consumers[0]
        op = ops[c].op
        targets = [priced.forms[n].targets[p] for n, p in edge.consumers]  # type: ignore[union-attr]  # all active

        def along(t: Transfer, value: int = edge.value, targets: list[Spec] = targets) -> tuple[str, ...]:
            return moved_axes(analysis, value, t, priced.specs[value], *targets)

        moved = pricer.edge_transfers(i, priced.specs, priced.forms)
        made.add(moved, edge.trips, op, f"operand of {op.name}", edge.value, op.operands[k], along)
    for i, group in enumerate(structure.sums):
        c = group.leaves[0][0]
        cls, form = ops[c], priced.forms[c]
        assert form is not None

        def summed(t: Transfer, op: Op = cls.op, form: OpForm = form) -> tuple[str, ...]:
            return factor_axes(analysis, op, form.choice, t)

        where = f"sum of {len(group.leaves)} {cls.op.name}"
        moved = pricer.sum_group(i, priced.forms)[1]
        made.add(moved, group.trips, cls.op, where, cls.results[0], cls.op.results[0], summed)
    return sorted(made.found, key=lambda c: -c.bytes)


def make_report(pricer: Pricer, priced: Priced) -> PriceReport:
    """The terms of a price."""
    structure, ops = pricer.structure, pricer.analysis.classes.ops
    compute = flops = 0.0
    for i in structure.active:
        form = priced.forms[i]
        assert form is not None
        compute += ops[i].trips * form.compute
        flops += ops[i].trips * form.flops
    found = collectives_of(pricer, priced)
    hidden = pricer.overlap.beside(pricer.held(priced.forms, priced.edge_seconds, priced.sum_seconds))
    return PriceReport(
        compute,
        pricer.fused_seconds(priced.specs),
        sum(c.seconds for c in found),
        flops,
        tuple(found),
        pricer.memory.report(priced.fractions, priced.transient),
        hidden,
        pricer.overlap.slowdown * hidden,
    )
