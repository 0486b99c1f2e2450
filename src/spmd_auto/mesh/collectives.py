"""The price of a collective: its bytes, and its seconds by the tiers of links that it crosses.

Bytes by the ring formulas (Thakur et al. 2005): over `n` devices and `S` bytes whole, gather, scatter and all-to-all
send S (n-1)/n bytes per device; an all-reduce is a scatter and a gather. Seconds: see `spmd_auto.mesh.stages`.
"""

from __future__ import annotations

import dataclasses
import math

from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.mesh.stages import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, ways

__all__ = ["ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "PERMUTE", "REDUCE_SCATTER", "Transfer", "collective"]


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a price.

    Attributes:
      kind: XLA's name of the collective.
      axes: mesh axes (indices, sorted) it runs over.
      bytes: bytes that one device sends.
      seconds: its time.
      latency: the part of its time that is latency.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: float
    seconds: float
    latency: float = 0.0

    def scaled(self, factor: float) -> Transfer:
        return Transfer(self.kind, self.axes, self.bytes * factor, self.seconds * factor, self.latency * factor)


def collective(
    mesh: LogicalMesh, kind: str, axes: tuple[int, ...] | list[int], size: float, latency: float = 1.0
) -> Transfer:
    """Prices a collective.

    Args:
      axes: mesh axes of the group.
      size: payload bytes per device: the reduced buffer, the gathered result, the input before a scatter,
        the local buffer of an all-to-all or permute.
      latency: share of the latency that it pays; below 1 if XLA combines it with others, as long as it is small
        (`Chip.combine`).
    """
    axes = tuple(sorted([a for a in axes if mesh.sizes[a] > 1]))  # nobody is sent anything along the others
    count = math.prod([mesh.sizes[a] for a in axes])
    if count == 1:
        return Transfer(kind, axes, 0.0, 0.0)
    if latency < 1:  # what fills a combined collective by itself pays its latency alone
        latency += (1 - latency) * min(1.0, size / mesh.chip.combine)
    seconds, paid = min([(latency * a + size * b, latency * a) for a, b in ways(mesh, kind, axes)])
    if kind == PERMUTE:
        return Transfer(kind, axes, size, seconds, paid)
    rounds = 2 if kind == ALL_REDUCE else 1
    return Transfer(kind, axes, rounds * size * (count - 1) / count, seconds, paid)
