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


_matrices = leading(lambda params, operands: len(operands[0]) - 2)

RULES: dict[str, RuleLike] = {
    **of_names(_matrices, "cholesky cholesky_update eig eigh geqrf geqp3 hessenberg"),
    **of_names(_matrices, "householder_product lu qr schur svd"),
    "lu_pivots_to_permutation": leading(lambda params, operands: len(operands[0]) - 1),
    "triangular_solve": triangular_solve,
    "fft": leading(lambda params, operands: len(operands[0]) - len(params["fft_lengths"])),
}
