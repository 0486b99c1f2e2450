"""Latency and bandwidth of a tier of links from timed collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from spmd_auto.mesh.hardware import Chip, Link
from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.mesh.stages import ways


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A timed collective over one mesh axis.

    Attributes:
      kind: XLA's name of the collective.
      axis: name of the mesh axis.
      devices: how many devices the axis has.
      bytes: payload of one device, as in `spmd_auto.mesh.collectives.collective`.
      seconds: measured time.
    """

    kind: str
    axis: str
    devices: int
    bytes: float
    seconds: float


def fit_link(samples: Iterable[Sample], form: str) -> Link:
    """The link that explains timed collectives best, by their relative errors.

    A collective's time is linear in the latency and in the inverse of the bandwidth, with the coefficients of
    `spmd_auto.mesh.stages`: least squares of (predicted / measured - 1), neither below zero.

    Args:
      form: the form of the tier ("ring", "switch", "torus", "line"), which the coefficients depend on.

    Returns:
      bandwidth in bytes/s of one device, latency in seconds per hop.
    """
    rows = []
    for sample in samples:
        latency, per_byte = _coefficients(sample.kind, sample.devices, form)
        rows.append((latency / sample.seconds, sample.bytes * per_byte / sample.seconds))
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency = inverse = 0.0
    if determinant > 1e-12 * aa * bb:
        latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0 or inverse <= 0:  # the better one of the two alone
        alone = (a * a / aa if aa else 0.0, b * b / bb if bb else 0.0)
        latency, inverse = (a / aa, 0.0) if alone[0] > alone[1] else (0.0, b / bb)
    return Link(1 / max(inverse, 1e-15), latency, form)


def _coefficients(kind: str, devices: int, form: str) -> tuple[float, float]:
    """Hops, and seconds per byte at one byte a second, of the way that large collectives take."""
    unit = LogicalMesh(("x",), (devices,), (Link(1.0, 1.0, form),), Chip("unit", "cpu", ((8, 1.0),), 1.0, 1.0, 0.0))
    return min(ways(unit, kind, (0,)), key=lambda way: way[1])
