"""Pins: shardings that the user fixed. Never overridden; one that cannot hold is an error that says why."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd_auto.errors import MeshError, PinError
from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.propagate.analysis import PinKey
from spmd_auto.propagate.assignment import PinnedSpec
from spmd_auto.propagate.inside import Constraint, constraints_in
from spmd_auto.tools.notation import counts_to_spec, is_counts
from spmd_auto.trace import Leaf, Program
from spmd_auto.trace.declared import Declared

Pins = Mapping[str, Any]  # tree-path glob -> PartitionSpec, or split counts: (8, 1)
_RESULT = "result/"


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A pinned spec (None for a dimension that is left free) and where it was written."""

    spec: PinnedSpec
    source: str


Pinned = dict[PinKey, Pin]


def resolve_pins(program: Program, mesh: LogicalMesh, pins: Pins) -> Pinned:
    """All that is pinned: by `pins`, by the model's own metadata, by `with_sharding_constraint` inside the step.

    Globs match whole paths of argument leaves (`state/params/*/kernel`) or their ends (`Dense_0/kernel`); later pins
    win. A whole path means that leaf alone, whatever characters are in it. `result/...` pins a leaf of the results.

    Raises:
      PinError: no leaf matches, unknown mesh axis, a dimension that the axes don't divide, or two sources that
        contradict each other.
    """
    if not isinstance(pins, Mapping):
        raise PinError(
            f"pins is a {type(pins).__name__}",
            "",
            ["a dict of path -> PartitionSpec: pins={'*/kernel': jax.P('model')}"],
        )
    found: Pinned = {}
    arguments = [leaf.path for leaf in program.arguments]
    results = [result_path(leaf) for leaf in program.results]
    for glob, wanted in pins.items():
        if not isinstance(glob, str):
            raise PinError(
                f"pins has the key {glob!r}, a {type(glob).__name__}",
                "a leaf is named by its path",
                [f"pins={{{(arguments or ['x'])[0]!r}: ...}}", "pins={'*/kernel': jax.P('model')}"],
            )
        hits = [("argument", i, program.arguments[i]) for i in matches(arguments, glob)]
        if glob.startswith(_RESULT) or not hits:
            if hits and matches(results, glob):
                raise PinError(
                    f"pin {glob!r} may mean the argument {hits[0][2].path!r} or a result of {program.name}",
                    "'result/' begins the path of what the step returns, and an argument is called result",
                    ["call the argument otherwise", "pin a part of its path that no result has"],
                )
            hits += [("result", i, program.results[i]) for i in matches(results, glob.removesuffix("/"))]
        if not hits:
            side, paths = ("result", results) if glob.startswith(_RESULT) and results else ("argument", arguments)
            near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.3) or paths[:3]
            raise PinError(
                f"pin {glob!r} matches no {side} leaf of {program.name}",
                f"there are {len(paths)} leaves; paths look like {paths[0]!r}" if paths else "it has none",
                [f"did you mean {path!r}?" for path in near],
            )
        for side, i, leaf in hits:
            source = f"pin {glob!r}"
            found[side, i] = Pin(_spec_of(mesh, wanted, leaf.shape, source, f"leaf {leaf.path}"), source)
    _add_declared(program, mesh, found)
    for constraint in constraints_in(program.jaxpr):
        source = f"{constraint.written} at {constraint.source}"
        _check_mesh(mesh, constraint, source)
        spec = _spec_of(mesh, constraint.sharding.spec, constraint.shape, source, "value inside the step")
        found["inside", constraint.site] = Pin(spec, source)
    _check_results(program, mesh, found)
    return found


def result_path(leaf: Leaf) -> str:
    """What a leaf of the results is called in pins: `result/loss`; `result` for a step that returns one array."""
    return f"{_RESULT}{leaf.path}".rstrip("/")


def _add_declared(program: Program, mesh: LogicalMesh, found: Pinned) -> None:
    """What the model's metadata says, checked against what the caller says.

    Metadata that names an axis which this mesh does not have was written for another mesh: it can't hold here, and the
    model must be plannable all the same. That is said in one warning.
    """
    elsewhere: list[tuple[str, Declared]] = []
    for i, declared in enumerate(program.declared):
        if declared is None:
            continue
        leaf = program.arguments[i]
        if not {axis for entry in declared.entries for axis in _axes_of(entry)} <= set(mesh.names):
            elsewhere.append((leaf.path, declared))
            continue
        source = f"the model's metadata {declared.source}"
        spec = _spec_of(mesh, declared.entries, leaf.shape, source, f"leaf {leaf.path}")
        other = found.get(("argument", i))
        if other is not None and _split(mesh, other.spec) != _split(mesh, spec):
            raise PinError(
                f"leaf {leaf.path} (shape {leaf.shape}) is pinned twice: {_show(mesh, other.spec)} by {other.source}, "
                f"{_show(mesh, spec)} by {source}",
                "neither is overridden",
                [f"drop {other.source}", "change the metadata, or unbox it: flax.linen.meta.unbox(params)"],
            )
        found["argument", i] = other or Pin(spec, source)
    if elsewhere:
        path, declared = elsewhere[0]
        warnings.warn(
            f"{len(elsewhere)} leaves of {program.name} declare mesh axes that the plan's mesh {mesh.names} does not "
            f"have (first {path}: {declared.source}); what they declare is left aside. Give auto_shard the mesh that "
            "the model was written for to have it kept.",
            stacklevel=2,
        )


def _check_results(program: Program, mesh: LogicalMesh, found: Pinned) -> None:
    """The next state lies where the state lies."""
    for o, i in enumerate(program.replaces):
        mine, theirs = found.get(("result", o)), found.get(("argument", i)) if i is not None else None
        if mine is None or i is None:
            continue
        if theirs is not None and _split(mesh, theirs.spec) != _split(mesh, mine.spec):
            raise PinError(
                f"result {program.results[o].path} replaces {program.arguments[i].path}, which is pinned otherwise: "
                f"{_show(mesh, mine.spec)} by {mine.source}, {_show(mesh, theirs.spec)} by {theirs.source}",
                "a state that changed its sharding would have to be moved in every step",
                [f"drop {mine.source}", f"drop {theirs.source}"],
            )
        del found["result", o]
        found["argument", i] = theirs or mine


def _spec_of(mesh: LogicalMesh, wanted: Any, shape: tuple[int, ...], source: str, what: str) -> PinnedSpec:
    if isinstance(wanted, jax.sharding.NamedSharding):
        wanted = wanted.spec
    if is_counts(wanted):
        try:
            wanted = counts_to_spec(wanted, shape, mesh)
        except MeshError as error:
            raise PinError(f"{source}: {error.what} ({what})", error.why, error.fixes) from error
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    entries = tuple(wanted) if isinstance(wanted, (jax.sharding.PartitionSpec, tuple, list)) else ()
    free = {d for d, entry in enumerate(entries) if entry is unconstrained}
    if free:
        wanted = jax.sharding.PartitionSpec(*[None if d in free else entry for d, entry in enumerate(entries)])
    try:
        spec = mesh.spec(wanted, len(shape))
    except MeshError as error:
        raise PinError(f"{source}: {error.what} ({what}, shape {shape})", error.why, error.fixes) from error
    _check_divides(mesh, what.removeprefix("leaf "), shape, spec, source)
    return tuple(None if d in free else axes for d, axes in enumerate(spec))


def _check_mesh(mesh: LogicalMesh, constraint: Constraint, source: str) -> None:
    theirs, ours = dict(constraint.sharding.mesh.shape), dict(zip(mesh.names, mesh.sizes, strict=True))
    used = {a for entry in constraint.sharding.spec for a in _axes_of(entry)}
    if any(theirs[a] != ours.get(a) for a in used):
        raise PinError(
            f"{source}: {constraint.sharding.spec} uses the mesh axes {sorted(used)}",
            f"the plan's mesh is {ours}, the one of the sharding {theirs}",
            ["give that mesh to auto_shard: @auto_shard(mesh=mesh)", "remove the constraint"],
        )


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _split(mesh: LogicalMesh, spec: PinnedSpec) -> PinnedSpec:
    """What a spec splits: axes of one device split nothing."""
    return tuple(None if axes is None else tuple(a for a in axes if mesh.sizes[a] > 1) for axes in spec)


def _show(mesh: LogicalMesh, spec: PinnedSpec) -> str:
    return str(mesh.partition_spec(tuple(axes or () for axes in spec)))


def matches(paths: Sequence[str], glob: str) -> list[int]:
    """Indices of the paths that a pin's glob means: one whole path, else those it matches, whole or by their ends."""
    if glob in paths:
        return [paths.index(glob)]
    return [
        i
        for i, path in enumerate(paths)
        if path.endswith(f"/{glob}") or fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, f"*/{glob}")
    ]


def _check_divides(mesh: LogicalMesh, path: str, shape: tuple[int, ...], spec: Spec, source: str) -> None:
    for dim, axes in enumerate(spec):
        parts = math.prod(mesh.sizes[a] for a in axes)
        if shape[dim] % parts:
            able = [n for n, s in zip(mesh.names, mesh.sizes, strict=True) if shape[dim] % s == 0 and s > 1]
            other = [d for d, n in enumerate(shape) if n % parts == 0]
            fixes = [f"{name!r} divides dimension {dim}" for name in able]
            fixes += [f"dimension {d} (size {shape[d]}) is divisible by {parts}" for d in other]
            fixes.append(f"pad dimension {dim} to {-(-shape[dim] // parts) * parts}")
            raise PinError(
                f"{source}: dimension {dim} of {path} (shape {shape}) can't be split in {parts}",
                f"{shape[dim]} is not divisible by {' x '.join(f'{mesh.names[a]}={mesh.sizes[a]}' for a in axes)}",
                fixes,
            )
