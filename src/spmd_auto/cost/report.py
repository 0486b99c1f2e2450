"""A price as a report whose terms add up."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from spmd_auto.cost.memory import MemoryReport
from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.mesh.collectives import Transfer


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Alike collectives of a price.

    Attributes:
      kind: XLA's name.
      axes: names of the mesh axes, in the order of the mesh.
      bytes: bytes that one device sends for it in one step.
      seconds: its time in one step.
      times: how often it runs in one step.
      where: the operation that asks for it.
      source: `file:line (function)` of that operation.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    times: int
    where: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class PriceReport:
    """Terms of a price; `seconds == compute + fused + communication`, `memory.total` the sum of its parts.

    Attributes:
      compute: seconds in operations that have a form.
      fused: seconds in elementwise operations, by the bytes they move.
      communication: seconds in collectives (no overlap assumed).
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

    @property
    def seconds(self) -> float:
        return self.compute + self.fused + self.communication

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


def make_report(pricer: Pricer, priced: Priced) -> PriceReport:
    structure, ops = pricer.structure, pricer.analysis.classes.ops
    compute = flops = 0.0
    found: list[Collective] = []

    def add(transfers: Iterable[Transfer], trips: int, where: str, source: str) -> None:
        for t in transfers if trips else ():
            axes = tuple(pricer.mesh.names[a] for a in t.axes)
            found.append(Collective(t.kind, axes, t.bytes * trips, t.seconds * trips, trips, where, source))

    for i in structure.active:
        form, cls = priced.forms[i], ops[i]
        assert form is not None
        compute += cls.trips * form.compute
        flops += cls.trips * form.flops
        where = f"result of {cls.op.name}"
        add(form.reshards, cls.trips, where, cls.op.source)
        add(form.exchange, cls.trips, f"pieces of {cls.op.name}", cls.op.source)
        add(
            form.reductions,
            structure.alone.get(i, cls.trips if structure.share_sum[i] == 1 else 0),
            where,
            cls.op.source,
        )
    for i, edge in enumerate(structure.edges):
        op = ops[edge.consumers[0][0]].op
        add(pricer.edge_transfers(i, priced.specs, priced.forms), edge.trips, f"operand of {op.name}", op.source)
    for i, group in enumerate(structure.sums):
        op = ops[group.leaves[0][0]].op
        add(pricer.sum_group(i, priced.forms)[1], group.trips, f"sum of {len(group.leaves)} {op.name}", op.source)
    found.sort(key=lambda c: -c.bytes)
    return PriceReport(
        compute,
        pricer.fused_seconds(priced.specs),
        sum(c.seconds for c in found),
        flops,
        tuple(found),
        pricer.memory.report(priced.fractions, priced.transient),
    )
