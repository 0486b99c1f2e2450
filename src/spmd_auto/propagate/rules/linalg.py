"""Factorisations and transforms: each problem of a batch is solved whole."""

from __future__ import annotations

from spmd_auto.propagate.factors import Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike, leading, of_names


def triangular_solve(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """`a x = b` (or `x a = b`): the right-hand sides are independent of each other."""
    rank = len(operands[0])
    build = RuleBuilder(operands, results)
    for d in range(rank - 2):
        build.add([(0, d), (1, d)], [(0, d)])
    free = rank - 1 if params["left_side"] else rank - 2
    build.add([(1, free)], [(0, free)])
    return build.build()


def ormqr(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Reflectors, their scales and a matrix that they are applied to from one side: its other side is free."""
    rank = len(operands[2])
    build = RuleBuilder(operands, results)
    for d in range(rank - 2):
        build.add([(0, d), (1, d), (2, d)], [(0, d)])
    free = rank - 1 if params["left"] else rank - 2
    build.add([(2, free)], [(0, free)])
    return build.build()


def tridiagonal_solve(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Three diagonals and right-hand sides, which are independent of each other."""
    rank = len(operands[3])
    build = RuleBuilder(operands, results)
    for d in range(rank - 2):
        build.add([(k, d) for k in range(4)], [(0, d)])
    build.add([(3, rank - 1)], [(0, rank - 1)])
    return build.build()


_matrices = leading(lambda params, operands: len(operands[0]) - 2)

RULES: dict[str, RuleLike] = {
    **of_names(_matrices, "cholesky cholesky_update eig eigh geqrf geqp3 hessenberg"),
    **of_names(_matrices, "householder_product lu qr schur svd symmetric_product tridiagonal"),
    "lu_pivots_to_permutation": leading(lambda params, operands: len(operands[0]) - 1),
    "triangular_solve": triangular_solve,
    "tridiagonal_solve": tridiagonal_solve,
    "ormqr": ormqr,
    "fft": leading(lambda params, operands: len(operands[0]) - len(params["fft_lengths"])),
}
