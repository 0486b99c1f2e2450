"""Pins: shardings that the user fixed. Never overridden; one that cannot hold is an error that says why."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_auto.errors import MeshError, PinError
from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.trace import Program

Pins = Mapping[str, Any]  # tree-path glob -> PartitionSpec


def resolve_pins(program: Program, mesh: LogicalMesh, pins: Pins) -> dict[int, Spec]:
    """Argument index -> spec.

    Globs match whole paths (`state/params/*/kernel`) or their ends (`Dense_0/kernel`); later pins win. A whole path
    means that leaf alone, whatever characters are in it.

    Raises:
      PinError: no leaf matches, unknown mesh axis, or a dimension that the axes don't divide.
    """
    if not isinstance(pins, Mapping):
        raise PinError(
            f"pins is a {type(pins).__name__}",
            "",
            ["a dict of path -> PartitionSpec: pins={'*/kernel': jax.P('model')}"],
        )
    found: dict[int, Spec] = {}
    paths = [leaf.path for leaf in program.arguments]
    for glob, wanted in pins.items():
        hits = _matches(paths, glob)
        if not hits:
            near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.3) or paths[:3]
            raise PinError(
                f"pin {glob!r} matches no argument leaf of {program.name}",
                f"there are {len(paths)} leaves; paths look like {paths[0]!r}",
                [f"did you mean {path!r}?" for path in near],
            )
        for i in hits:
            leaf = program.arguments[i]
            try:
                spec = mesh.spec(wanted, len(leaf.shape))
            except MeshError as error:
                raise PinError(
                    f"pin {glob!r}: {error.what} (leaf {leaf.path}, shape {leaf.shape})", error.why, error.fixes
                ) from error
            _check_divides(mesh, leaf.path, leaf.shape, spec, glob)
            found[i] = spec
    return found


def _matches(paths: Sequence[str], glob: str) -> list[int]:
    if glob in paths:
        return [paths.index(glob)]
    return [
        i
        for i, path in enumerate(paths)
        if path.endswith(f"/{glob}") or fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, f"*/{glob}")
    ]


def _check_divides(mesh: LogicalMesh, path: str, shape: tuple[int, ...], spec: Spec, glob: str) -> None:
    for dim, axes in enumerate(spec):
        parts = math.prod(mesh.sizes[a] for a in axes)
        if shape[dim] % parts:
            able = [n for n, s in zip(mesh.names, mesh.sizes, strict=True) if shape[dim] % s == 0 and s > 1]
            other = [d for d, n in enumerate(shape) if n % parts == 0]
            fixes = [f"{name!r} divides dimension {dim}" for name in able]
            fixes += [f"dimension {d} (size {shape[d]}) is divisible by {parts}" for d in other]
            fixes.append(f"pad dimension {dim} to {-(-shape[dim] // parts) * parts}")
            raise PinError(
                f"pin {glob!r}: dimension {dim} of {path} (shape {shape}) can't be split in {parts}",
                f"{shape[dim]} is not divisible by {' x '.join(f'{mesh.names[a]}={mesh.sizes[a]}' for a in axes)}",
                fixes,
            )
