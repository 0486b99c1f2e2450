"""Measuring the devices that are there, and what that moves in their hardware profile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from spmd_auto.errors import MeshError, ProfileError
from spmd_auto.mesh import LogicalMesh, cluster_of, load_profile, logical_mesh_of, register_profile
from spmd_auto.plan.explain import duration, render, size
from spmd_auto.tools.fit import Sample, fit_link
from spmd_auto.tools.measure import KINDS, collective_seconds, matmul_rate, stream_rate

MATMULS = (128, 256, 512, 1024, 2048)
STREAM = 2**26
SIZES = (2**12, 2**16, 2**20, 2**23)
TYPES = ((2, jnp.bfloat16), (4, jnp.float32))
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a profile: `unit` is "FLOP/s", "bytes/s" or "seconds"."""

    name: str
    unit: str
    old: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over old."""
        return self.measured / self.old if self.old else float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, against the profile that plans use.

    Attributes:
      chip: name of the profile.
      figures: old and measured figures; those that time did not suffice for are not there.
      matmuls: (bytes per element, n, FLOP/s) of n x n matrix products: the curve.
      samples: timed collectives.
      stopped: whether the time limit ended it early.
    """

    chip: str
    figures: tuple[Figure, ...]
    matmuls: tuple[tuple[int, int, float], ...]
    samples: tuple[Sample, ...]
    stopped: bool = False

    def moved(self, share: float = 0.1) -> tuple[Figure, ...]:
        """Figures that are off by more than a share, the most first."""
        off = [f for f in self.figures if not 1 - share <= f.ratio <= 1 / (1 - share)]
        return tuple(sorted(off, key=lambda f: -max(f.ratio, 1 / max(f.ratio, 1e-12))))

    def profile(self) -> dict[str, Any]:
        """A profile with the measured figures; the others are the old ones. For `spmd_auto.register_profile`."""
        old = load_profile(self.chip)
        found = {f.name: f.measured for f in self.figures}
        chip = old.chip
        data: dict[str, Any] = {
            "platform": chip.platform,
            "source": f"spmd_auto.calibrate(); what it did not measure is of the profile {self.chip!r}",
            "memory": chip.memory,
            "memory_bandwidth": found.get("memory_bandwidth", chip.memory_bandwidth),
            "kernel_overhead": chip.overhead,
            "per_host": old.per_host,
            "hidden": chip.hidden,
            "slowdown": chip.slowdown,
            "flops": {str(n): found.get(f"flops.{n}", rate) for n, rate in chip.flops},
        }
        if chip.combine != float("inf"):
            data["combine"] = chip.combine
        if old.torus:
            data |= {"torus": old.torus, "wraps_at": old.wraps_at}
        for key, link in (("inside", old.inside), ("between", old.between)):
            if link is not None:
                data[key] = {field: found.get(f"{key}.{field}", getattr(link, field)) for field in _LINK}
                data[key]["form"] = link.form
        return data

    def save(self, path: str) -> None:
        """Writes `profile()` as a TOML file.

        Raises:
          ProfileError: the file can't be written.
        """
        lines, tables = [], []
        for key, value in self.profile().items():
            if isinstance(value, dict):
                tables += ["", f"[{key}]", *(f"{k} = {_toml(v)}" for k, v in value.items())]
            else:
                lines.append(f"{key} = {_toml(value)}")
        try:
            Path(path).write_text("\n".join([*lines, *tables]) + "\n")
        except OSError as error:
            raise ProfileError(f"the profile can't be written to {path}", str(error)) from error

    def register(self, name: str | None = None) -> str:
        """Registers `profile()`; without a name it takes the place of the old one, for the devices at hand too."""
        return register_profile(self.profile(), name or self.chip, replace=name is None)

    def __str__(self) -> str:
        table = Table(title=f"measured, against the profile {self.chip!r}", title_justify="left")
        for column in ("figure", "old", "measured", "ratio"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for f in self.figures:
            table.add_row(f.name, _shown(f.old, f.unit), _shown(f.measured, f.unit), f"{f.ratio:.3g}")
        curve = Table(title="matrix products, FLOP/s", title_justify="left")
        curve.add_column("n")
        for width, _ in TYPES:
            curve.add_column(f"{width} bytes", justify="right")
        rates = {(width, n): rate for width, n, rate in self.matmuls}
        for n in dict.fromkeys(n for _, n, _ in self.matmuls):
            curve.add_row(str(n), *(f"{rates[w, n]:.3g}" if (w, n) in rates else "" for w, _ in TYPES))
        off = self.moved()
        notes = ["moved: " + ", ".join(f"{f.name} x{f.ratio:.3g}" for f in off) if off else "no figure is off by 10 %"]
        if self.stopped:
            notes.append("the time limit ended it early: the other figures are as they were")
        return render(table, curve, *notes)


_LINK = ("bandwidth", "latency")


def calibrate(
    mesh: jax.sharding.Mesh | None = None, *, seconds: float = 20.0, progress: Progress | None = None
) -> Calibration:
    """Measures the devices at hand: matrix products by size, memory bandwidth, collectives over each mesh axis.

    Nothing is changed: `Calibration.register` makes plans of this process use the figures, `Calibration.save` keeps
    them. Simulated devices share one machine's cores, so what they measure is of that.

    Args:
      mesh: whose axes are measured (default: all devices, an axis for each tier of links).
      seconds: when to stop measuring, with what is there; what runs is brought to its end.
      progress: called with each line of what is being measured.

    Raises:
      MeshError: `seconds` is not positive.
    """
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise MeshError(f"seconds={seconds!r}", "measuring takes some seconds", ["seconds=20"])
    end = time.monotonic() + seconds
    logical = logical_mesh_of(mesh) if mesh is not None else cluster_of().meshes()[0]
    mesh = mesh if mesh is not None else logical.build()
    chip = load_profile(logical.chip.name)
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    figures: list[Figure] = []
    matmuls: list[tuple[int, int, float]] = []
    samples: list[Sample] = []

    def go_on(what: str) -> bool:
        if time.monotonic() >= end:
            return False
        if progress is not None:
            progress(what)
        return True

    def finished() -> bool:
        if not go_on(f"memory: {size(STREAM)}"):
            return False
        rate = stream_rate(device, STREAM)
        figures.append(Figure("memory_bandwidth", "bytes/s", chip.chip.memory_bandwidth, rate))
        # by size first: when time ends, all axes and kinds have their small ones
        for bytes_ in SIZES:
            for axis in (a for a in mesh.axis_names if mesh.shape[a] > 1):
                for kind in KINDS:
                    if not go_on(f"{kind} over {axis}: {size(bytes_)}"):
                        return False
                    payload, spent = collective_seconds(mesh, kind, axis, bytes_)
                    samples.append(Sample(kind, axis, mesh.shape[axis], payload, spent))
        for n in MATMULS:
            for width, dtype in TYPES:
                if not go_on(f"matrix product of {width} bytes: {n}"):
                    return False
                matmuls.append((width, n, matmul_rate(device, n, dtype)))
        return True

    stopped = not finished()
    known = dict(chip.chip.flops)
    for width, _ in TYPES:
        rates = [rate for w, _, rate in matmuls if w == width]
        if rates and width in known:
            figures.append(Figure(f"flops.{width}", "FLOP/s", known[width], max(rates)))
    figures += _links(logical, samples)
    return Calibration(logical.chip.name, tuple(figures), tuple(matmuls), tuple(samples), stopped)


def _links(mesh: LogicalMesh, samples: list[Sample]) -> list[Figure]:
    """Figures of the tiers that have an axis of their own, in the terms of a profile."""
    profile, out = load_profile(mesh.chip.name), []
    for key, old in (("inside", profile.inside), ("between", profile.between)):
        mine = [name for a, name in enumerate(mesh.names) if old is not None and _of_tier(mesh, a, key)]
        timed = [s for s in samples if s.axis in mine]
        # two sizes at least: else latency and bandwidth can't be told apart
        if old is None or len({s.bytes for s in timed}) < 2:
            continue
        form = mesh.links[mesh.names.index(mine[0])].form
        link = fit_link(timed, form)
        ways = 2 if form == "torus" else 1  # a profile has one way of one link
        out.append(Figure(f"{key}.bandwidth", "bytes/s", old.bandwidth, link.bandwidth / ways))
        out.append(Figure(f"{key}.latency", "seconds", old.latency, link.latency))
    return out


def _of_tier(mesh: LogicalMesh, axis: int, key: str) -> bool:
    parts = [part for part in mesh.parts_of(axis) if part.size > 1]
    return len(parts) == 1 and (parts[0].tier == "host") == (key == "between")


def _shown(value: float, unit: str) -> str:
    if unit == "seconds":
        return duration(value)
    return f"{size(value)}/s" if unit == "bytes/s" else f"{value:.3g} FLOP/s"


def _toml(value: Any) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
