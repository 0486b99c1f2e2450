"""Split counts, MindSpore's way to write a strategy: `(8, 1)` is a matrix whose rows are split in eight.

A PartitionSpec names mesh axes, counts do not.  They are matched to whole mesh axes: the product of the axes given to
a dimension is its count, and axes are given from left to right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmd_auto.errors import MeshError
from spmd_auto.mesh.logical import LogicalMesh

Counts = tuple[int, ...]
AnyMesh = LogicalMesh | jax.sharding.Mesh | jax.sharding.AbstractMesh
_Choice = tuple[tuple[str, ...], ...]  # for each dimension its mesh axes


def is_counts(spec: Any) -> bool:
    """Whether a spec is written in counts: a tuple or list of whole numbers, not empty."""
    return isinstance(spec, (tuple, list)) and bool(spec) and all(type(n) is int for n in spec)


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Size of each mesh axis by name, outermost first."""
    if isinstance(mesh, LogicalMesh):
        return dict(zip(mesh.names, mesh.sizes, strict=True))
    return {str(name): int(n) for name, n in mesh.shape.items()}


def counts_to_spec(counts: Sequence[int], shape: Sequence[int], mesh: AnyMesh) -> PartitionSpec:
    """The PartitionSpec that split counts stand for on a mesh.

    Args:
      counts: pieces of each dimension, `(2, 1)`.
      shape: global shape of the array.

    Raises:
      MeshError: not one count per dimension, no positive number, a dimension that its count does not divide, a count
        that is no product of mesh axes, or counts that stand for several specs.
    """
    check_counts(counts, shape, mesh)
    return _spec(_match(tuple(counts), mesh))


def match_together(
    counts: Sequence[Sequence[int]], labels: Sequence[Sequence[Any]], mesh: AnyMesh
) -> list[PartitionSpec]:
    """The PartitionSpecs of the counts of several arrays that one operation joins, as MindSpore reads a strategy.

    Args:
      counts: for each array the pieces of its dimensions.
      labels: one for each dimension of each array; dimensions of the same label get the same mesh axes, those of
        different labels different ones.

    Raises:
      MeshError: counts of a label differ, a label stands twice on one array, or there is no way or several.
    """
    wanted: dict[Any, int] = {}
    for one, names in zip(counts, labels, strict=True):
        if len(set(names)) < len(names):
            raise MeshError(f"the split counts {tuple(one)}", "one label on two dimensions")
        for n, label in zip(one, names, strict=True):
            if wanted.setdefault(label, n) != n:
                raise MeshError(f"the split counts {tuple(one)}", f"{n} and {wanted[label]} pieces of one axis")
    chosen = dict(zip(wanted, _match(tuple(wanted.values()), mesh), strict=True))
    return [_spec(tuple(chosen[label] for label in names)) for names in labels]


def spec_to_counts(spec: Any, mesh: AnyMesh, rank: int | None = None) -> Counts:
    """The split counts of a PartitionSpec.

    Args:
      rank: dimensions of the array; a PartitionSpec may leave out the last ones.

    Raises:
      MeshError: an axis that the mesh does not have, one that is used twice, or more entries than `rank`.
    """
    entries = tuple(spec.spec if isinstance(spec, jax.sharding.NamedSharding) else spec)
    rank = len(entries) if rank is None else rank
    sizes = axis_sizes(mesh)
    if len(entries) > rank:
        raise MeshError(f"{spec} has {len(entries)} entries for an array of rank {rank}")
    counts, seen = [], set()
    for entry in (*entries, *(None,) * (rank - len(entries))):
        axes = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else (entry,)
        axes = tuple(entry) if isinstance(entry, (tuple, list)) else axes
        for axis in axes:
            if axis not in sizes:
                raise MeshError(f"{spec} names the mesh axis {axis!r}", f"the mesh has {', '.join(map(repr, sizes))}")
            if axis in seen:
                raise MeshError(f"{spec} uses the mesh axis {axis!r} twice", "an axis splits one dimension of an array")
            seen.add(axis)
        counts.append(math.prod(sizes[axis] for axis in axes))
    return tuple(counts)


def possible_counts(size: int, mesh: AnyMesh) -> list[int]:
    """The numbers of pieces that whole axes of a mesh can make of a dimension of `size` elements."""
    sizes = axis_sizes(mesh).values()
    made = {math.prod(some) for k in range(len(sizes) + 1) for some in itertools.combinations(sizes, k)}
    return sorted(n for n in made if size % n == 0)


def check_counts(counts: Sequence[int], shape: Sequence[int], mesh: AnyMesh) -> None:
    """Whether counts fit an array, each by itself.

    Raises:
      MeshError: not one count per dimension, no positive number, a dimension that its count does not divide, or a count
        that is no product of mesh axes.
    """
    counts, shape = tuple(counts), tuple(shape)
    for n in counts:
        if type(n) is not int or n < 1:
            raise MeshError(
                f"the split counts {counts} have {n!r}", "a count is a whole number of pieces", ["1: not split"]
            )
    if len(counts) != len(shape):
        raise MeshError(
            f"the split counts {counts} are {len(counts)} for an array of rank {len(shape)}",
            f"each dimension of {shape} has a count",
            [f"{(counts + (1,) * len(shape))[: len(shape)]}"],
        )
    for dim, (n, size) in enumerate(zip(counts, shape, strict=True)):
        if size % n:
            raise MeshError(
                f"the split counts {counts} split dimension {dim} of {shape} in {n}",
                f"{size} is not divisible by {n}",
                [f"one of {_listed(possible_counts(size, mesh))}: what this mesh and the dimension can do"],
            )
        if n not in possible_counts(0, mesh):
            raise MeshError(
                f"the split counts {counts} split dimension {dim} of {shape} in {n}",
                f"{n} is no product of axes of the mesh {axis_sizes(mesh)}",
                [f"one of {_listed(possible_counts(size, mesh))}: what this mesh and the dimension can do"],
            )


def _match(counts: Counts, mesh: AnyMesh) -> _Choice:
    """For each count its mesh axes: the only way from left to right, or else the only way at all."""
    sizes = {name: n for name, n in axis_sizes(mesh).items() if n > 1}
    order = {name: k for k, name in enumerate(sizes)}
    found = list(_matchings(counts, sizes))
    ahead = [c for c in found if (flat := [order[a] for axes in c for a in axes]) == sorted(flat)]
    best = ahead or found
    if len(best) == 1:
        return best[0]
    if not best:
        raise MeshError(
            f"the split counts {counts} need {math.prod(counts)} pieces of different mesh axes",
            f"the mesh is {axis_sizes(mesh)}, and an axis splits one dimension only",
            [f"counts that multiply to one of {_listed(possible_counts(0, mesh))}"],
        )
    raise MeshError(
        f"the split counts {counts} can be several specs on the mesh {axis_sizes(mesh)}",
        "they say how many pieces, not which mesh axis makes them",
        [str(_spec(choice)) for choice in best[:4]],
    )


def _matchings(counts: Counts, sizes: dict[str, int]) -> Iterator[_Choice]:
    if not counts:
        yield ()
        return
    for k in range(len(sizes) + 1):
        for axes in itertools.combinations(sizes, k):
            if math.prod(sizes[a] for a in axes) == counts[0]:
                rest = {a: n for a, n in sizes.items() if a not in axes}
                for others in _matchings(counts[1:], rest):
                    yield (axes, *others)


def _spec(choice: _Choice) -> PartitionSpec:
    """In canonical form: no None at the end."""
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in choice]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))
