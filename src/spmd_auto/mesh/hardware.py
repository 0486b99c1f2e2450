"""What a chip can do and how chips are linked: the figures of a hardware profile."""

from __future__ import annotations

import dataclasses
import math

# Forms of a tier of links; see `spmd_auto.mesh.stages` for what each costs.
RING, SWITCH, TORUS, LINE = "ring", "switch", "torus", "line"


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """One device.

    Attributes:
      name: profile name, `h100`.
      platform: "gpu", "tpu" or "cpu".
      flops: attainable FLOP/s of matrix products by bytes per element (2: bf16, 4: float32, 8: float64).
      memory: bytes of device memory.
      memory_bandwidth: attainable bytes/s of that memory.
      overhead: seconds that a kernel costs at least.
      combine: bytes up to which the compiler combines neighbouring collectives into one.
      hidden: largest share of a collective that can run beside computation, of those that nothing waits for.
      slowdown: by which share computation is slower while a collective runs beside it.
    """

    name: str
    platform: str
    flops: tuple[tuple[int, float], ...]
    memory: float
    memory_bandwidth: float
    overhead: float
    combine: float = math.inf
    hidden: float = 0.0
    slowdown: float = 0.0

    def flops_for(self, itemsize: int) -> float:
        return next((rate for size, rate in self.flops if size >= itemsize), self.flops[-1][1])


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One tier of links.

    Attributes:
      bandwidth: bytes/s that a device can send over it in a collective (a closed ring of a torus: both ways together).
      latency: seconds per hop.
      form: "ring" (each device sends to the next), "switch" (any device to any other at full speed), "torus" (a closed
        ring of neighbours, both ways), or "line" (neighbours, both ways, without the link that closes the ring).
    """

    bandwidth: float
    latency: float
    form: str = RING


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """A chip and its links.

    Attributes:
      inside: link between the devices of one host (for a torus: one dimension, one direction).
      between: link between hosts, per device; None for a torus, whose hosts are invisible.
      per_host: devices of a full host.
      torus: number of torus dimensions, 0 for switched links.
      wraps_at: smallest ring length that is closed (a closed ring sends both ways).
      source: where the figures come from.
      sources: the same for each figure, by its name.
    """

    chip: Chip
    inside: Link
    between: Link | None
    per_host: int
    torus: int
    wraps_at: int
    source: str
    sources: tuple[tuple[str, str], ...] = ()
