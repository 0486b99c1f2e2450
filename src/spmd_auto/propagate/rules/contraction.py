"""Sums of products: dot_general and its ragged form."""

from __future__ import annotations

import math
from typing import TypeAlias

from spmd_auto.propagate.factors import Kind, Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike

_Dims: TypeAlias = tuple[int, ...]
_DotNumbers: TypeAlias = tuple[tuple[_Dims, _Dims], tuple[_Dims, _Dims]]  # (contracted, batch), each (left, right)


def _dot(build: RuleBuilder, dimension_numbers: _DotNumbers, whole: set[tuple[int, int]], first: int) -> None:
    """Factors of a dot whose result is (.. `first` dimensions, batch, rest of left, rest of right)."""
    (left_contract, right_contract), (left_batch, right_batch) = dimension_numbers

    def add(operands: list[tuple[int, int]], results: list[tuple[int, int]], kind: Kind = Kind.PASS) -> None:
        build.add(operands, results, kind=Kind.REPLICATE if whole.intersection(operands) else kind)

    at = first
    for i, j in zip(left_batch, right_batch, strict=True):
        add([(0, i), (1, j)], [(0, at)])
        at += 1
    for side, used in ((0, {*left_batch, *left_contract}), (1, {*right_batch, *right_contract})):
        for d in range(len(build.operands[side])):
            if d in used:
                continue
            if side == 1 and (side, d) in whole:  # a ragged dot's groups are not in the result
                build.needed_whole((side, d))
            else:
                add([(side, d)], [(0, at)])
                at += 1
    for i, j in zip(left_contract, right_contract, strict=True):
        add([(0, i), (1, j)], [], Kind.REDUCE)


def dot_general(params: Params, operands: Shapes, results: Shapes) -> Rule:
    build = RuleBuilder(operands, results)
    _dot(build, params["dimension_numbers"], set(), 0)
    return build.build()


def ragged_dot_general(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """A dot whose rows fall into groups, of sizes that only the third operand knows.

    The ragged dimension and the groups are needed whole: a piece of either would need other group sizes.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    dot = numbers.dot_dimension_numbers
    whole = {(0, d) for d in numbers.lhs_ragged_dimensions} | {(1, d) for d in numbers.rhs_group_dimensions}
    if len(operands[2]) > 1:  # group sizes per batch element: they would have to be split along
        whole |= {(0, d) for d in dot[1][0]}
    build = RuleBuilder(operands, results)
    contracting = numbers.lhs_ragged_dimensions[0] in dot[0][0]
    _dot(build, dot, whole, 1 if contracting else 0)  # a ragged contraction gives one result per group, in front
    return build.build()


def scaled_dot(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """A dot of narrow floats: left, right, and a scale for each block of their contracted dimensions.

    The scales have the operands' other dimensions.  A contracted dimension is split between blocks: its factor is the
    greatest common divisor of the numbers of blocks, and the major part of all four.
    """
    dot = RuleBuilder(operands, results)
    _dot(dot, params["dimension_numbers"], set(), 0)
    build = RuleBuilder(operands, results)
    for factor in dot.build():
        places = [*factor.operands, *((k + 2, d) for k, d in factor.operands)]
        build.add(places, factor.results, kind=factor.kind, size=math.gcd(*(operands[k][d] for k, d in places)))
    return build.build()


RULES: dict[str, RuleLike] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "scaled_dot": scaled_dot,
}
