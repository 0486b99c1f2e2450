"""Specs that a person writes for the operands and results of one operation: read, checked, brought to one form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_auto.errors import MeshError, StrategyError
from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.tools.notation import check_counts, counts_to_spec, is_counts, match_together, possible_counts
from spmd_auto.trace import Leaf, Program


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A spec as it was written for one array.

    Attributes:
      spec: a PartitionSpec, split counts, or None: left free.
      where: how to call it in a message, `in_specs[0] of matmul`.
      labels: the logical axis of each dimension.
    """

    spec: Any
    where: str
    leaf: Leaf
    labels: tuple[int, ...]


def is_spec(x: Any) -> bool:
    """Whether `x` is what one array can be given: a PartitionSpec, a NamedSharding, split counts, or None."""
    return x is None or isinstance(x, (PartitionSpec, NamedSharding)) or is_counts(x)


def written_operands(program: Program, in_specs: Any, labels: Sequence[tuple[int, ...]]) -> list[Written]:
    """One entry for each argument leaf.

    Args:
      in_specs: one entry per positional argument (an argument of several leaves: one for all, or a tree like it).
      labels: for each leaf the logical axes of its dimensions.

    Raises:
      StrategyError: not one entry per argument, an entry that is no spec, or a tree of another structure.
    """
    indices, _ = jax.tree_util.tree_unflatten(program.in_tree, range(len(program.arguments)))
    entries = _entries("in_specs", program.name, in_specs, len(indices), "argument")
    out: list[Written] = []
    for k, (entry, inside) in enumerate(zip(entries, indices, strict=True)):
        where = f"in_specs[{k}] of {program.name}"
        leaves, tree = jax.tree_util.tree_flatten(inside)
        if is_spec(entry):
            specs = [entry] * len(leaves)
        else:
            specs, given = jax.tree_util.tree_flatten(entry, is_leaf=is_spec)
            if given != tree or not all(map(is_spec, specs)):
                raise StrategyError(
                    f"{where} is {entry!r}",
                    f"the argument is {'one array' if len(leaves) == 1 else f'a tree of {len(leaves)} arrays'}",
                    ["a PartitionSpec, or split counts such as (2, 1)", "a tree of them like the argument"],
                )
        out += [Written(s, where, program.arguments[i], labels[i]) for s, i in zip(specs, leaves, strict=True)]
    return out


def written_results(program: Program, out_specs: Any, labels: Sequence[tuple[int, ...]]) -> list[Written]:
    """One entry for each leaf of the results; all are free where `out_specs` is None.

    Raises:
      StrategyError: not one entry per result leaf, or an entry that is no spec.
    """
    count = len(program.results)
    entries = [None] * count if out_specs is None else _entries("out_specs", program.name, out_specs, count, "result")
    out = []
    for k, (entry, leaf) in enumerate(zip(entries, program.results, strict=True)):
        where = f"out_specs[{k}] of {program.name}"
        if not is_spec(entry):
            raise StrategyError(
                f"{where} is {entry!r}", "it is one array", ["a PartitionSpec, or split counts such as (2, 1)"]
            )
        out.append(Written(entry, where, leaf, labels[k]))
    return out


def read_specs(
    mesh: LogicalMesh, operands: Sequence[Written], results: Sequence[Written]
) -> list[PartitionSpec | None]:
    """The PartitionSpecs of operands, then results; None where left free.

    Split counts are matched to mesh axes for all arrays together, where that is possible: dimensions that are one
    logical axis get the same mesh axes.

    Raises:
      StrategyError: a spec longer than the rank, an unknown mesh axis or one used twice, a dimension that is not
        divisible, or split counts that no mesh axes make, or several.
    """
    everything = [*operands, *results]
    for one in everything:
        if is_counts(one.spec):
            try:
                check_counts(one.spec, one.leaf.shape, mesh)
            except MeshError as error:
                raise _refused(one, error) from error
    counted = _matched(mesh, operands, results)
    out: list[PartitionSpec | None] = []
    for k, one in enumerate(everything):
        spec = one.spec.spec if isinstance(one.spec, NamedSharding) else one.spec
        if is_counts(spec):
            spec = counted[k]
        elif spec is not None:
            _check(mesh, one, spec)
        out.append(spec)
    return out


def _matched(mesh: LogicalMesh, operands: Sequence[Written], results: Sequence[Written]) -> dict[int, PartitionSpec]:
    """Specs of the arrays written in counts, by index: all together, or operands and results apart, or each alone."""
    split = len(operands)
    counted = [k for k, one in enumerate((*operands, *results)) if is_counts(one.spec)]
    everything = [*operands, *results]
    for groups in ([counted], [[k for k in counted if k < split], [k for k in counted if k >= split]]):
        found: dict[int, PartitionSpec] = {}
        try:
            for group in groups:
                made = match_together([everything[k].spec for k in group], [everything[k].labels for k in group], mesh)
                found |= dict(zip(group, made, strict=True))
        except MeshError:
            continue
        return found
    found = {}
    for k in counted:
        try:
            found[k] = counts_to_spec(everything[k].spec, everything[k].leaf.shape, mesh)
        except MeshError as error:
            raise _refused(everything[k], error) from error
    return found


def _entries(side: str, name: str, specs: Any, count: int, each: str) -> list[Any]:
    if count == 1 and (is_spec(specs) or not isinstance(specs, (tuple, list))):
        return [specs]
    if is_spec(specs) or not isinstance(specs, (tuple, list)):
        raise StrategyError(
            f"{side} of {name} is {specs!r}",
            f"there are {count} {each}s",
            [f"a tuple of {count} specs, one per {each}"],
        )
    if len(specs) != count:
        raise StrategyError(
            f"{side} of {name} has {len(specs)} specs",
            f"there {'is 1' if count == 1 else f'are {count}'} {each}{'' if count == 1 else 's'}",
            [f"one spec per {each}; jax.P() for one that every device holds whole"],
        )
    return list(specs)


def _check(mesh: LogicalMesh, one: Written, spec: PartitionSpec) -> None:
    shape = one.leaf.shape
    free = PartitionSpec.UNCONSTRAINED
    try:
        axes_of = mesh.spec(PartitionSpec(*[None if e is free else e for e in spec]), len(shape))
    except MeshError as error:
        raise _refused(one, error) from error
    for dim, axes in enumerate(axes_of):
        pieces = math.prod(mesh.sizes[a] for a in axes)
        if shape[dim] % pieces:
            raise _refused(
                one,
                MeshError(
                    f"dimension {dim} can't be split in {pieces}",
                    f"{shape[dim]} is not divisible by {' x '.join(f'{mesh.names[a]}={mesh.sizes[a]}' for a in axes)}",
                    [
                        f"one of {', '.join(map(str, possible_counts(shape[dim], mesh)))} pieces: what this mesh and "
                        "the dimension can do",
                        f"pad dimension {dim} to {-(-shape[dim] // pieces) * pieces}",
                    ],
                ),
            )


_HINTS = {
    "entries for an array": "one entry per dimension at most; None for a whole one",
    "twice": "give the axis to one dimension of an array only",
}


def _refused(one: Written, error: MeshError) -> StrategyError:
    fixes = error.fixes or tuple(hint for mark, hint in _HINTS.items() if mark in error.what)
    what = f"{one.leaf.path}, shape {one.leaf.shape}" if one.leaf.path else f"shape {one.leaf.shape}"
    return StrategyError(f"{one.where} ({what}): {error.what}", error.why, fixes)
