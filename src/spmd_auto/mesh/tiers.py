"""Devices as tiers of links, and the logical meshes a search may build from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd_auto.errors import MeshError
from spmd_auto.mesh.hardware import LINE, TORUS, Chip, Link
from spmd_auto.mesh.logical import LogicalMesh, Part
from spmd_auto.mesh.registry import load_profile


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """`size` groups of devices joined by one kind of link."""

    name: str
    size: int
    link: Link


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """Tiers from the outermost (slowest) to the innermost; devices are numbered in that order."""

    chip: Chip
    tiers: tuple[Tier, ...]

    @property
    def device_count(self) -> int:
        return math.prod(tier.size for tier in self.tiers)

    def describe(self) -> str:
        inner = " x ".join(f"{tier.size} {tier.name}" for tier in self.tiers)
        return f"{self.device_count} {self.chip.name} ({inner})"

    def mesh(self, **sizes: int) -> LogicalMesh:
        """A mesh with axes of your own names and sizes, outermost first: `cluster.mesh(data=4, model=4)`.

        Raises:
          MeshError: the sizes do not multiply to the number of devices, or an axis straddles a tier unevenly.
        """
        _check_positive(sizes)
        if math.prod(sizes.values()) != self.device_count:
            raise MeshError(
                f"mesh {sizes} has {math.prod(sizes.values())} places for {self.device_count} devices",
                "every device must have exactly one place",
                [f"sizes whose product is {self.device_count}"],
            )
        return self._mesh(list(sizes), list(sizes.values()))

    def _mesh(self, names: Sequence[str], sizes: Sequence[int]) -> LogicalMesh:
        parts = [self._parts(stride, size) for stride, size in _strides(list(sizes))]
        links = [min((p.link for p in of), key=lambda link: link.bandwidth) for of in parts]
        return LogicalMesh(tuple(names), tuple(sizes), tuple(links), self.chip, tuple(parts))

    def _parts(self, stride: int, size: int) -> tuple[Part, ...]:
        """What devices `stride` apart within `stride * size` have of each tier, innermost first."""
        inner, found, even = 1, list[Part](), True
        for tier in reversed(self.tiers):
            outer = inner * tier.size
            first, last = max(stride, inner), min(stride * size, outer)
            if first < last:
                even &= first % inner == last % first == outer % last == 0
                link = _part_of(tier, first // inner, last // first)
                found.append(Part(max(last // first, 1), link, tier.name))
            elif not even and stride < outer:
                found.append(Part(1, tier.link, tier.name))  # groups that fill no tier reach into the next one
            inner = outer
        if not found:
            return (Part(size, self.tiers[-1].link, self.tiers[-1].name),)
        if even:
            return tuple(found)
        slowest = min(found, key=lambda part: part.link.bandwidth)
        return (slowest._replace(size=size),)

    def meshes(self) -> list[LogicalMesh]:
        """Meshes to search: each tier an axis; a single tier also split in two, evenly first.

        Splitting one of several tiers further was seen to gain about 1 % and to cost five times the states.
        """
        tiers = [tier for tier in self.tiers if tier.size > 1] or [self.tiers[-1]]
        splits = [[(tier.size,)] + [(tier.size // k, k) for k in _divisors(tier.size)] for tier in tiers]
        found: list[LogicalMesh] = []
        choices = sorted(itertools.product(*splits), key=lambda c: sum(map(len, c)))
        for choice in choices:
            if sum(map(len, choice)) > max(2, len(tiers)):
                continue
            names, sizes = list[str](), list[int]()
            for tier, factors in zip(tiers, choice, strict=True):
                for index, size in enumerate(factors):
                    names.append(tier.name if len(factors) == 1 else f"{tier.name}{index}")
                    sizes.append(size)
            found.append(self._mesh(names, sizes))
        return found


def _part_of(tier: Tier, stride: int, size: int) -> Link:
    """The link of `size` groups of a tier that are `stride` apart.

    Through a switch each device has its own way. On a torus, rings of devices that are not neighbours run through the
    same links as the rings between them, and share them; only what goes all round a closed ring is closed.
    """
    link = tier.link
    if link.form not in (TORUS, LINE) or (stride == 1 and size == tier.size):
        return link
    closed = link.form == TORUS and stride * size == tier.size
    bandwidth = link.bandwidth if closed or link.form == LINE else link.bandwidth / 2
    return Link(bandwidth / stride, link.latency * stride, TORUS if closed else LINE)


def _divisors(n: int) -> list[int]:
    """Second factors of a split of n, the most even ones first."""
    divisors = [k for k in range(2, int(math.isqrt(n)) + 1) if n % k == 0]
    return divisors[::-1]


def _strides(sizes: list[int]) -> list[tuple[int, int]]:
    out, stride = [], 1
    for size in reversed(sizes):
        out.append((stride, size))
        stride *= size
    return out[::-1]


def _check_positive(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise MeshError(f"{name}={size!r}", "a number of devices is a whole number above zero", [f"{name}=1"])


def cluster(
    chip: str, *unnamed: Any, hosts: int = 1, per_host: int | None = None, topology: str | None = None
) -> Cluster:
    """A cluster that need not exist: `cluster("h100", hosts=64)`, `cluster("v5p", topology="8x8x8")`.

    Raises:
      MeshError: unknown chip, or a topology that the chip cannot have.
    """
    profile = load_profile(chip)
    if unnamed:
        given = unnamed[0]
        by_number = ["topology='4x4'"] if profile.torus else [f"hosts={given!r}", f"hosts=1, per_host={given!r}"]
        raise MeshError(
            f"cluster({chip!r}, {given!r}): what is {given!r}?",
            "hosts, devices of a host and shapes are given by name, as a number alone may mean either",
            [f"cluster({chip!r}, {words})" for words in by_number],
        )
    _check_positive({"hosts": hosts} | ({} if per_host is None else {"per_host": per_host}))
    if profile.torus:
        example = "x".join(["4"] * profile.torus)
        if topology is None:
            raise MeshError(
                f"{chip} chips form a torus: its shape is needed",
                f"their links join neighbours in {profile.torus} dimensions",
                [f'cluster("{chip}", topology="{example}")'],
            )
        if hosts != 1 or per_host is not None:
            raise MeshError(
                f'cluster("{chip}", topology="{topology}") takes neither hosts nor per_host',
                "the shape of a torus says how many chips there are",
                [f'cluster("{chip}", topology="{topology}")'],
            )
        sizes = [int(n) for n in str(topology).split("x")] if re.fullmatch(r"\d+(x\d+)*", str(topology)) else []
        if len(sizes) != profile.torus or min(sizes) < 1:
            raise MeshError(
                f"topology {topology!r} for {chip}",
                f"{chip} is a torus of {profile.torus} dimensions",
                [f'topology="{example}"'],
            )
        tiers = []
        for name, size in zip("xyz", sizes, strict=False):
            # a closed ring sends both ways round
            closed = size >= profile.wraps_at
            ways = 2 if closed else 1
            link = Link(profile.inside.bandwidth * ways, profile.inside.latency, TORUS if closed else LINE)
            tiers.append(Tier(name, size, link))
        return Cluster(profile.chip, tuple(tiers))
    if topology is not None:
        raise MeshError(f"{chip} has no topology argument", "its links are switched", [f'cluster("{chip}", hosts=2)'])
    inner = Tier("gpu" if profile.chip.platform == "gpu" else "device", per_host or profile.per_host, profile.inside)
    if hosts == 1:
        return Cluster(profile.chip, (inner,))
    if profile.between is None:
        raise MeshError(
            f"hosts={hosts} of {chip}",
            "its profile has no [between]: the links from host to host are not known",
            ["[between]  # bandwidth = bytes/s of one device one way, latency = seconds", "hosts=1"],
        )
    return Cluster(profile.chip, (Tier("host", hosts, profile.between), inner))


_KINDS = {"A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200"}
_KINDS |= {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6": "v6e"}


def profile_of_device(device: Any) -> str:
    """The profile for a device that is there; "cpu" for one that no profile fits."""
    kind = str(getattr(device, "device_kind", ""))
    return next((name for mark, name in _KINDS.items() if mark in kind), "cpu")


def cluster_of(devices: list[Any] | None = None) -> Cluster:
    """The cluster of the devices at hand: hosts and devices per host, as JAX reports them."""
    devices = jax.devices() if devices is None else devices
    hosts = len({d.process_index for d in devices})
    profile = load_profile(profile_of_device(devices[0]))
    link = profile.inside
    per_host = len(devices) // hosts
    if hosts * per_host != len(devices):
        raise MeshError(f"{len(devices)} devices on {hosts} hosts", "every host must have the same number of devices")
    inner = Tier("device", per_host, link)
    if hosts == 1:
        return Cluster(profile.chip, (inner,))
    return Cluster(profile.chip, (Tier("host", hosts, profile.between or link), inner))


def logical_mesh_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> LogicalMesh:
    """The logical mesh of a jax Mesh that the user gave: its axes, names and order are kept.

    An AbstractMesh names no devices: they are taken for chips like those at hand, on full hosts.

    Raises:
      MeshError: an AbstractMesh whose links can't be told from the devices at hand.
    """
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    known = cluster_of(list(mesh.devices.flat)) if isinstance(mesh, jax.sharding.Mesh) else _like_at_hand(sizes)
    return known.mesh(**sizes)


def _like_at_hand(sizes: Mapping[str, int]) -> Cluster:
    """A cluster of as many chips like those at hand."""
    devices = jax.devices()
    count = math.prod(sizes.values())
    if count == len(devices):
        return cluster_of(devices)
    name = profile_of_device(devices[0])
    profile = load_profile(name)
    hosts, rest = divmod(count, profile.per_host)
    if not profile.torus and hosts <= 1 and (hosts == 0 or not rest):
        return cluster(name, per_host=count)
    if not profile.torus and not rest:
        return cluster(name, hosts=hosts, per_host=profile.per_host)
    places = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    shape = "topology=..." if profile.torus else f"per_host={count}"
    raise MeshError(
        f"an AbstractMesh of {count} devices ({places}), {len(devices)} {name} are at hand",
        f"{name} chips form a torus: how many of them are linked is not said by their number"
        if profile.torus
        else f"a host has {profile.per_host} {name}, {count} do not fill hosts",
        [f'spmd_auto.cluster("{name}", {shape}).mesh({places})', "a jax Mesh of the devices themselves"],
    )
