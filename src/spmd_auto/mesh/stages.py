"""What a collective costs on a mesh: seconds of latency and seconds per byte, by the tiers it crosses.

Over `n` devices, with a link of `b` bytes/s and `a` seconds per hop, and `S` bytes whole:

- *ring* and *switch*: gather and scatter (n-1) a + S (n-1) / (n b), an all-reduce both (Thakur et al. 2005). On a
  switch an all-reduce may also go up and down trees: 2 a log2(n) + 2 S / b (Sanders et al. 2009), which is what small
  messages take; the cheaper one counts, so the price has no step.
- *torus* and *line*: n/2 hops on a closed ring, n-1 on an open one. Several dimensions of a torus work at once, each on
  its share of the data: S (N-1) / N over the sum of their bandwidths. An all-to-all is bound by the links in the
  middle: S floor(n^2/4) / (n b) along each dimension, the slowest of which counts.
- Over several tiers a collective is hierarchical: scatter inside, reduce across, gather inside. The fastest tier
  carries the whole, each further one what is left; an all-to-all carries all of it over each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd_auto.mesh.hardware import LINE, SWITCH, TORUS
from spmd_auto.mesh.logical import LogicalMesh, Part

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

# (seconds of latency, seconds per byte) of each way to do a collective
Ways = tuple[tuple[float, float], ...]


def ways(mesh: LogicalMesh, kind: str, axes: tuple[int, ...]) -> Ways:
    """The ways to do a collective over mesh axes (remembered by the mesh); its time is that of the cheapest one."""
    found = mesh.known_ways.get((kind, axes))
    if found is None:
        parts = [part for axis in axes for part in mesh.parts_of(axis) if part.size > 1]
        found = mesh.known_ways[kind, axes] = _permute(parts) if kind == PERMUTE else _staged(kind, parts)
    return found


def _permute(parts: Sequence[Part]) -> Ways:
    """One message: a closed ring sends it one way round only."""
    slow = [(p.link.bandwidth / (2 if p.link.form == TORUS else 1), p.link.latency) for p in parts]
    bandwidth, latency = min(slow)
    return ((latency, 1 / bandwidth),)


def _staged(kind: str, parts: Sequence[Part]) -> Ways:
    rounds = 2 if kind == ALL_REDUCE else 1
    latency = per_byte = 0.0
    left = 1.0
    for stage in _stages(parts):
        n = math.prod(part.size for part in stage)
        latency += sum(part.link.latency * _hops(part) for part in stage)
        if kind == ALL_TO_ALL:  # sends on what leaves the fast group undiminished
            per_byte += max(_exchange(part) for part in stage)
        else:
            per_byte += left * (n - 1) / n / sum(part.link.bandwidth for part in stage)
            left /= n
    found = [(rounds * latency, rounds * per_byte)]
    if kind == ALL_REDUCE and all(part.link.form == SWITCH for part in parts):
        latency = per_byte = 0.0
        left = 1.0
        for (part,) in _stages(parts):
            latency += part.link.latency * math.ceil(math.log2(part.size))
            per_byte += left / part.link.bandwidth
            left /= part.size
        found.append((rounds * latency, rounds * per_byte))
    return tuple(found)


def _stages(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts in the order in which they carry data, fastest first; dimensions of a torus that have links of their own
    are one stage."""
    out: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: -part.link.bandwidth):
        if _is_torus(part):
            free = (s for s in out if _is_torus(s[0]) and part.tier not in [other.tier for other in s])
            stage = next(free, None)
            if stage is not None:
                stage.append(part)
                continue
        out.append([part])
    return out


def _is_torus(part: Part) -> bool:
    return part.link.form in (TORUS, LINE)


def _hops(part: Part) -> int:
    return part.size // 2 if part.link.form == TORUS else part.size - 1


def _exchange(part: Part) -> float:
    n = part.size
    return (n * n // 4 if _is_torus(part) else n - 1) / n / part.link.bandwidth
