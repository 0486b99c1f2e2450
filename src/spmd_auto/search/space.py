"""What a search may do on one mesh: candidate axes, regions to flip, parameter groups; and what each move touches."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.forms import Form

FLOPS_SHARE = 0.002  # an axis of contractions below this share of the FLOP is not worth splitting
BYTES_SHARE = 0.01  # nor a parameter group of its own below this share of the parameters' bytes


@dataclasses.dataclass(slots=True, eq=False)
class Space:
    """Candidates of a search.

    Attributes:
      groups: axis groups that may be assigned.
      large_forms: parameter groups large enough for a decision of their own.
      regions_of_pair: regions in which two axis groups contend.
      classes_of_group, classes_of_region, classes_of_form: value classes that a move may change.
    """

    analysis: Analysis
    mesh: LogicalMesh
    groups: list[int]
    large_forms: list[int]
    regions_of_pair: dict[tuple[int, int], list[int]]
    classes_of_group: dict[int, frozenset[int]]
    classes_of_region: dict[int, frozenset[int]]
    classes_of_form: dict[tuple[int, Form], frozenset[int]]


def build_space(analysis: Analysis, mesh: LogicalMesh) -> Space:
    axes, graph, forms = analysis.axes, analysis.graph, analysis.forms
    flops: dict[int, int] = defaultdict(int)
    for op in graph.ops:
        if op.flops:
            for factor in op.rule:
                if factor.operands:
                    k, d = factor.operands[0]
                    flops[axes.of[op.operands[k].id][d]] += op.flops * op.trips
    most = max(flops.values(), default=0)
    wanted = {g for g, f in flops.items() if f > FLOPS_SHARE * most}
    wanted.update(g for v in graph.arguments for g in axes.of[v.id])
    groups = [
        g
        for g in sorted(wanted)
        if g not in analysis.stacked and axes.size[g] > 1 and any(axes.size[g] % n == 0 for n in mesh.sizes if n > 1)
    ]
    total = sum(forms.bytes)
    regions_of_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
    for region, pair in enumerate(analysis.regions.pair):
        regions_of_pair[pair].append(region)
    of_group: dict[int, set[int]] = defaultdict(set)
    of_region: dict[int, set[int]] = defaultdict(set)
    of_form: dict[tuple[int, Form], set[int]] = defaultdict(set)
    for index, cls in enumerate(analysis.classes.values):
        if not cls.placed:
            continue
        for g in cls.groups:
            of_group[g].add(index)
        for r in cls.regions:
            if r >= 0:
                of_region[r].add(index)
        if cls.form is not None:
            of_form[cls.form].add(index)
    return Space(
        analysis,
        mesh,
        groups,
        [g for g in range(len(forms.groups)) if forms.bytes[g] > BYTES_SHARE * total],
        dict(regions_of_pair),
        {g: frozenset(s) for g, s in of_group.items()},
        {r: frozenset(s) for r, s in of_region.items()},
        {f: frozenset(s) for f, s in of_form.items()},
    )
