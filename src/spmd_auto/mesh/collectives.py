"""The price of a collective.

Ring formulas (Thakur et al. 2005; FACTS of the project): over `n` devices and `S` bytes whole, gather,
scatter and all-to-all send S (n-1)/n bytes per device in n-1 steps; an all-reduce is a scatter and a
gather.  Over several axes it is one hierarchical collective: the fastest axis carries the whole, each
further one what is left.
"""

from __future__ import annotations

import dataclasses
import math

from spmd_auto.mesh.logical import LogicalMesh

# kind -> how often the payload goes round
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a price.

    Attributes:
      kind: XLA's name of the collective.
      axes: mesh axes (indices, sorted) it runs over.
      bytes: bytes that one device sends.
      seconds: its time.
      latency: the part of its time that does not depend on the bytes.
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
      latency: share of the latency that it pays; below 1 if XLA combines it with others.
    """
    axes = tuple(sorted(a for a in axes if mesh.sizes[a] > 1))  # nobody is sent anything along the others
    count = math.prod(mesh.sizes[a] for a in axes)
    if count == 1:
        return Transfer(kind, axes, 0.0, 0.0)
    if kind == PERMUTE:
        slow = min((mesh.links[a] for a in axes), key=lambda link: link.bandwidth)
        return Transfer(kind, axes, size, latency * slow.latency + size / slow.bandwidth, latency * slow.latency)
    rounds = 2 if kind == ALL_REDUCE else 1
    seconds, hops, left = 0.0, 0.0, size
    for axis in sorted(axes, key=lambda a: -mesh.links[a].bandwidth):
        n, link = mesh.sizes[axis], mesh.links[axis]
        hops += latency * link.latency * (n - 1)
        seconds += left * (n - 1) / n / link.bandwidth
        if kind != ALL_TO_ALL:  # an all-to-all sends on what leaves the fast group undiminished
            left /= n
    return Transfer(kind, axes, rounds * size * (count - 1) / count, rounds * (hops + seconds), rounds * hops)
