"""The logical mesh: named axes with the links they run over. What costs and specs speak of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import MeshError
from spmd_auto.mesh.hardware import Chip, Link

# For each dimension of a value the mesh axes (by index, major first) it is split over.
Spec = tuple[tuple[int, ...], ...]


class Part(NamedTuple):
    """What a mesh axis has of one tier of links: `size` devices on `link`; parts of one tier share its links."""

    size: int
    link: Link
    tier: str


@dataclasses.dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Axes in device order (first is outermost).

    Attributes:
      names, sizes, links: one entry per axis; the link is the slowest that the axis crosses.
      chip: what each device is.
      parts: for each axis the tiers that it crosses; empty if each axis is one tier of its own.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    chip: Chip
    parts: tuple[tuple[Part, ...], ...] = ()
    # prices by kind and axes: see `spmd_auto.mesh.stages.ways`
    known_ways: dict[tuple[str, tuple[int, ...]], tuple[tuple[float, float], ...]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def parts_of(self, axis: int) -> tuple[Part, ...]:
        if self.parts:
            return self.parts[axis]
        return (Part(self.sizes[axis], self.links[axis], self.names[axis]),)

    @property
    def device_count(self) -> int:
        return math.prod(self.sizes)

    def describe(self) -> str:
        inner = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"({inner}) of {self.chip.name}"

    def partition_spec(self, spec: Spec) -> jax.sharding.PartitionSpec:
        """The PartitionSpec of a spec, in canonical form (no trailing None)."""
        entries: list[Any] = [
            None if not axes else self.names[axes[0]] if len(axes) == 1 else tuple(self.names[a] for a in axes)
            for axes in spec
        ]
        while entries and entries[-1] is None:
            entries.pop()
        return jax.sharding.PartitionSpec(*entries)

    def spec(self, partition_spec: Any, rank: int) -> Spec:
        """The inverse of `partition_spec`.

        Raises:
          MeshError: an axis that the mesh does not have, or one used twice, too many entries, or no PartitionSpec.
        """
        if isinstance(partition_spec, jax.sharding.NamedSharding):
            partition_spec = partition_spec.spec
        if not isinstance(partition_spec, (jax.sharding.PartitionSpec, tuple, list)):
            raise MeshError(
                f"{partition_spec!r} is a {type(partition_spec).__name__}",
                "how an array lies is said by a PartitionSpec",
                ["jax.P('axis', None)", "jax.P() for a whole array"],
            )
        entries = tuple(partition_spec)
        if len(entries) > rank:
            raise MeshError(f"{partition_spec} has {len(entries)} entries for an array of rank {rank}")
        out: list[tuple[int, ...]] = []
        seen: set[str] = set()
        for entry in entries:
            if not (entry is None or isinstance(entry, (str, tuple, list))):
                raise MeshError(
                    f"{partition_spec} has the entry {entry!r}",
                    "an entry is a mesh axis, several of them, or None for a whole dimension",
                    [f"use one of {self.names}, or None"],
                )
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for axis in axes:
                if axis not in self.names:
                    raise MeshError(
                        f"{partition_spec} names the mesh axis {axis!r}",
                        f"the mesh has {', '.join(map(repr, self.names))}",
                        [f"use one of {self.names}"],
                    )
                if axis in seen:
                    raise MeshError(f"{partition_spec} uses the mesh axis {axis!r} twice")
                seen.add(axis)
            out.append(tuple(self.names.index(a) for a in axes))
        return tuple(out) + ((),) * (rank - len(entries))

    def build(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """A jax Mesh over `devices` (default: all, those of one process after those of another), with Auto axes.

        Raises:
          MeshError: not as many devices as the mesh has places.
        """
        devices = sorted(jax.devices(), key=lambda d: d.process_index) if devices is None else list(devices)
        if len(devices) < self.device_count:
            raise MeshError(
                f"the mesh {self.describe()} needs {self.device_count} devices, {len(devices)} are there",
                "a plan is for a fixed number of devices",
                [
                    f"plan again for {len(devices)} devices",
                    f"spmd_auto.simulate_devices({self.device_count}) before JAX starts, to try it on this CPU",
                ],
            )
        kinds = sorted({getattr(d, "device_kind", "?") for d in devices})
        if len(kinds) > 1:
            raise MeshError(
                f"devices of several kinds: {', '.join(kinds)}", "one plan splits work evenly over equal devices"
            )
        grid = np.array(devices[: self.device_count], dtype=object).reshape(self.sizes)
        return jax.sharding.Mesh(grid, self.names, axis_types=_compat.axis_types_auto(len(self.names)))


def shard_fraction(mesh: LogicalMesh, spec: Spec) -> float:
    """The share of a value that one device holds under a spec."""
    fraction = 1.0
    for axes in spec:
        for axis in axes:
            fraction /= mesh.sizes[axis]
    return fraction


class ShardFractions(dict[Spec, float]):
    """`shard_fraction` of one mesh, remembered by spec."""

    def __init__(self, mesh: LogicalMesh):
        super().__init__()
        self.mesh = mesh

    def __missing__(self, spec: Spec) -> float:
        self[spec] = fraction = shard_fraction(self.mesh, spec)
        return fraction
