"""Forms of a parameter: how it is stored, how its gradient and its optimizer state lie.

Values joined elementwise to a parameter form a group.  By dataflow each is in one *form*: `stored`
(computed from parameters only, and the new parameter), `optimizer` (touches optimizer state) or
`gradient` (the rest).  ZeRO is an extra split per (group, form); how a weight is used in an operation
is that operation's own choice.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from spmd_auto.propagate.axes import Axes
from spmd_auto.propagate.factors import Kind
from spmd_auto.propagate.graph import OPTIMIZER, PARAMETER, Graph, Op
from spmd_auto.propagate.unionfind import UnionFind
from spmd_auto.trace import Program, Role


class Form(enum.IntEnum):
    """Order as ZeRO's stages: 1 splits OPTIMIZER, 2 also GRADIENT, 3 also STORED."""

    OPTIMIZER = 0
    GRADIENT = 1
    STORED = 2


@dataclasses.dataclass(slots=True, eq=False)
class ParameterForms:
    """Groups of alike parameters (same axis groups).

    Attributes:
      of: value id -> (group, form) for the values that have one.
      groups: for each group the axis groups of its parameters' dimensions.
      bytes: for each group the bytes of all its parameters, unsplit.
      paths: for each group the paths of its parameters.
    """

    of: dict[int, tuple[int, Form]]
    groups: list[tuple[int, ...]]
    bytes: list[int]
    paths: list[list[str]]


def find_forms(program: Program, graph: Graph, axes: Axes) -> ParameterForms:
    sets = UnionFind(len(graph.values))
    for op in graph.ops:
        for x, y in _same_elements(op):
            sets.union(x, y)
    group_of_root: dict[int, int] = {}
    ids: dict[tuple[int, ...], int] = {}
    sizes: list[int] = []
    paths: list[list[str]] = []
    parameters = [
        (leaf, value)
        for leaf, value in zip(program.arguments, graph.arguments, strict=True)
        if leaf.role is Role.PARAMETER and value.shape
    ]
    for leaf, value in parameters:
        group = ids.setdefault(axes.of[value.id], len(ids))
        if group == len(sizes):
            sizes.append(0)
            paths.append([])
        sizes[group] += leaf.bytes
        paths[group].append(leaf.path)
        group_of_root.setdefault(sets.find(value.id), group)
    of: dict[int, tuple[int, Form]] = {}
    for value in graph.values:
        group = group_of_root.get(sets.find(value.id))
        if group is None or not value.shape:
            continue
        if value.depends & ~PARAMETER == 0:
            form = Form.STORED
        elif value.depends & OPTIMIZER:
            form = Form.OPTIMIZER
        else:
            form = Form.GRADIENT
        of[value.id] = (group, form)
    for result, replaced in zip(graph.results, program.replaces, strict=True):
        if replaced is not None and result.shape and program.arguments[replaced].role is Role.PARAMETER:
            argument = of.get(graph.arguments[replaced].id)
            if argument is not None:
                of[result.id] = (argument[0], Form.STORED)
    return ParameterForms(of, list(ids), sizes, paths)


def _same_elements(op: Op) -> list[tuple[int, int]]:
    """Pairs (operand, result) of values that hold the same elements, or those of one layer of a stack."""
    if op.flops:
        return []
    if op.name in ("xs", "ys", "reshape"):
        return [(op.operands[0].id, op.results[0].id)]
    pairs = []
    for i, x in enumerate(op.operands):
        for j, y in enumerate(op.results):
            if not x.shape or math.prod(x.shape) != math.prod(y.shape):
                continue
            joined = sum(
                1
                for factor in op.rule
                if factor.kind is Kind.PASS
                for k, d in factor.operands
                if k == i and x.shape[d] == factor.size and any(r == j for r, _ in factor.results)
            )
            if joined >= sum(n > 1 for n in x.shape):
                pairs.append((x.id, y.id))
    return pairs
