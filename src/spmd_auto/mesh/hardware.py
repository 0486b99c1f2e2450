"""Hardware profiles: what a chip can do and how chips are linked. Data files, one per chip, with their sources."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from functools import cache
from importlib import resources

from spmd_auto.errors import MeshError


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
    """

    name: str
    platform: str
    flops: tuple[tuple[int, float], ...]
    memory: float
    memory_bandwidth: float
    overhead: float

    def flops_for(self, itemsize: int) -> float:
        return next((rate for size, rate in self.flops if size >= itemsize), self.flops[-1][1])


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One tier of links: bytes/s that a device can send over it, and seconds of latency per hop."""

    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """A chip and its links.

    Attributes:
      inside: link between the devices of one host (for a torus: one dimension, one direction).
      between: link between hosts, per device; None for a torus, whose hosts are invisible.
      per_host: devices of a full host.
      torus: number of torus dimensions, 0 for switched links.
      wraps_at: smallest ring length that is closed (a closed ring sends both ways).
    """

    chip: Chip
    inside: Link
    between: Link | None
    per_host: int
    torus: int
    wraps_at: int
    source: str


def profile_names() -> list[str]:
    folder = resources.files("spmd_auto.mesh") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


@cache
def load_profile(name: str) -> Profile:
    """Reads a profile by name.

    Raises:
      MeshError: no such profile; the nearest names are offered.
    """
    names = profile_names()
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.3) or names
        raise MeshError(
            f"no hardware profile {name!r}",
            f"profiles are: {', '.join(names)}",
            [f"did you mean {candidate!r}?" for candidate in near],
        )
    text = (resources.files("spmd_auto.mesh") / "profiles" / f"{name}.toml").read_text()
    data = tomllib.loads(text)
    chip = Chip(
        name,
        data["platform"],
        tuple(sorted((int(size), rate * data["flops_efficiency"]) for size, rate in data["flops"].items())),
        data["memory"],
        data["memory_bandwidth"] * data["memory_efficiency"],
        data["kernel_overhead"],
    )
    links = {key: Link(**data[key]) for key in ("inside", "between") if key in data}
    return Profile(
        chip,
        links["inside"],
        links.get("between"),
        data.get("per_host", 1),
        data.get("torus", 0),
        data.get("wraps_at", 0),
        data["source"],
    )
