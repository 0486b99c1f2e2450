"""Known strategies, said in the words of an assignment: data parallel, Megatron, sequence, expert, ZeRO.

They are written over logical axis *names*; nothing about a model is known here.  They serve to price and
lower a strategy that a person has in mind; the search does not start from them.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from spmd_auto.errors import StrategyError
from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.assignment import Assignment, FormKey, Split
from spmd_auto.propagate.forms import Form

ZERO_FORMS = {
    1: (Form.OPTIMIZER,),
    2: (Form.OPTIMIZER, Form.GRADIENT),
    3: (Form.OPTIMIZER, Form.GRADIENT, Form.STORED),
}


def resolve_axis(analysis: Analysis, name: str) -> int:
    """The axis group of a name.

    Raises:
      StrategyError: no such logical axis; the nearest names are offered.
    """
    group = analysis.group(name)
    if group is None or group in analysis.stacked:
        known = sorted({n for g, n in analysis.names.items() if g not in analysis.stacked})
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        raise StrategyError(
            f"no logical axis {name!r} in {analysis.program.name}",
            "the stacking dimension of a scan is never split: it would gather the stack"
            if group is not None
            else f"its axes are {', '.join(known)}",
            [f"did you mean {n!r}?" for n in near],
        )
    return group


def resolve_mesh_axis(mesh: LogicalMesh, name: str) -> int:
    if name not in mesh.names:
        raise StrategyError(
            f"no mesh axis {name!r}",
            f"the mesh is {mesh.describe()}",
            [f"use {n!r}" for n in difflib.get_close_matches(name, mesh.names, n=1, cutoff=0.0)],
        )
    return mesh.names.index(name)


def resolve_axes(analysis: Analysis, pattern: str) -> list[int]:
    """The axis groups of a name, or of a glob such as `heads*` (layers that are not alike have axes of their own)."""
    if not any(mark in pattern for mark in "*?["):
        return [resolve_axis(analysis, pattern)]
    found = [g for g, n in analysis.names.items() if g not in analysis.stacked and fnmatch.fnmatchcase(n, pattern)]
    return found or [resolve_axis(analysis, pattern)]


def order(analysis: Analysis, mesh: LogicalMesh, splits: Sequence[tuple[str, str]]) -> tuple[Split, ...]:
    """The order of an assignment.

    Raises:
      StrategyError: no such logical axis or mesh axis, or a logical axis is given a mesh axis twice.
    """
    found: list[Split] = []
    for axis, to in splits:
        for group in resolve_axes(analysis, axis):
            split = (group, resolve_mesh_axis(mesh, to))
            if split in found:
                raise StrategyError(
                    f"the logical axis {analysis.names[group]!r} is given the mesh axis {to!r} twice",
                    "a mesh axis splits a dimension once",
                    [f"name {to!r} once", "a mesh with more axes: jax.make_mesh((2, 4), ('data', 'model'))"],
                )
            found.append(split)
    return tuple(found)


def zero(
    analysis: Analysis, mesh: LogicalMesh, stage: int, axes: Iterable[str]
) -> tuple[tuple[FormKey, tuple[Split, ...]], ...]:
    """ZeRO of a stage over mesh axes, for every parameter: its largest dimensions first."""
    forms = analysis.forms
    out: list[tuple[FormKey, tuple[Split, ...]]] = []
    indices = [resolve_mesh_axis(mesh, a) for a in axes]
    for group in range(len(forms.groups)):
        splits = zero_splits(analysis, group, indices)
        for form in ZERO_FORMS[stage]:
            out.append(((group, form), splits))
    return tuple(sorted(out))


def zero_splits(analysis: Analysis, group: int, axes: Sequence[int], smallest_first: bool = False) -> tuple[Split, ...]:
    """Candidate dimensions of a parameter group for each mesh axis; never a scan's stacking dimension."""
    dims = [g for g in dict.fromkeys(analysis.forms.groups[group]) if g not in analysis.stacked]
    dims.sort(key=lambda g: -analysis.axes.size[g])
    if smallest_first:
        dims.reverse()
    return tuple((g, a) for a in axes for g in dims)


def flips_without(analysis: Analysis, strong: str, weak: str, absent: str, axis: int) -> frozenset[tuple[int, int]]:
    """Flips of all regions where `strong` and `weak` contend on values that don't carry `absent`."""
    a, b, c = (resolve_axis(analysis, name) for name in (strong, weak, absent))
    pair = tuple(sorted((a, b)))
    regions = analysis.regions
    return frozenset(
        (r, axis) for r in range(regions.count) if regions.pair[r] == pair and c not in regions.groups_beside[r]
    )


def build(
    analysis: Analysis,
    mesh: LogicalMesh,
    splits: Sequence[tuple[str, str]],
    *,
    zero_stage: int = 0,
    zero_axes: Sequence[str] = (),
    flips: frozenset[tuple[int, int]] = frozenset(),
) -> Assignment:
    """An assignment from names: `splits=[("batch", "data"), ("heads", "model")]`, strongest first."""
    forms = zero(analysis, mesh, zero_stage, zero_axes) if zero_stage else ()
    return Assignment(order(analysis, mesh, splits), flips, forms)
