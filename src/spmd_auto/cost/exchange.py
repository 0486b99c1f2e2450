"""What devices send each other inside an operation: edges of neighbours (HALO), blocks that change places (MOVE)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd_auto.mesh.collectives import PERMUTE, Transfer, collective
from spmd_auto.mesh.logical import LogicalMesh, ShardFractions, Spec
from spmd_auto.propagate.factors import Factor
from spmd_auto.propagate.graph import Op


def exchanges(
    mesh: LogicalMesh,
    fractions: ShardFractions,
    op: Op,
    arranged: Sequence[tuple[int, int]],
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
) -> tuple[Transfer, ...] | None:
    """The collectives inside `op` on one device, or None if it can't be split so.

    Args:
      arranged: (mesh axis, factor).
      operand_specs, result_specs: how the local operation sees its arrays.
    """
    made: list[Transfer] = []
    for index in dict.fromkeys(index for _, index in arranged):
        factor = op.rule[index]
        if factor.halos:
            axes = [axis for axis, f in arranged if f == index]
            edges = _edges(mesh, fractions, op, factor, axes, operand_specs)
            if edges is None:
                return None
            made += edges
    return tuple(made)


def _edges(
    mesh: LogicalMesh,
    fractions: ShardFractions,
    op: Op,
    factor: Factor,
    axes: list[int],
    operand_specs: Sequence[Spec],
) -> list[Transfer] | None:
    """One permute for each side of each operand; None where an edge is wider than the neighbour's piece."""
    pieces = math.prod(mesh.sizes[a] for a in axes)
    made: list[Transfer] = []
    for (k, d), halo in zip(factor.operands, factor.halos, strict=True):
        value = op.operands[k]
        width = value.shape[d] // pieces
        for elements in halo:
            if elements > width:
                return None
            if elements:
                size = value.bytes * fractions[operand_specs[k]] * elements / width
                made.append(collective(mesh, PERMUTE, axes, size))
    return made
