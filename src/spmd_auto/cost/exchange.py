"""What devices send each other inside an operation: edges of neighbours (HALO), blocks that change places (MOVE)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd_auto.cost.blocks import Exchange, exchange, pieces_of
from spmd_auto.mesh.collectives import PERMUTE, Transfer, collective
from spmd_auto.mesh.logical import LogicalMesh, ShardFractions, Spec
from spmd_auto.propagate.factors import Factor, Kind
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
        elif factor.kind is Kind.MOVE:
            axes = [axis for axis, f in arranged if f == index]
            moved = _moved(mesh, fractions, op, factor, axes, operand_specs, result_specs)
            if moved is None:
                return None
            made += moved
    return tuple(made)


def blocks_of(op: Op, factor: Factor, pieces: int) -> Exchange | None:
    """How the blocks of a MOVE factor change places between `pieces` devices; None if there are too many of them, or
    if the operation is none that `pieces_of` knows."""
    dim = factor.results[0][1]
    operands = tuple(op.operands[k].shape[d] for k, d in factor.operands)
    results = tuple(op.results[k].shape[d] for k, d in factor.results)
    found = pieces_of(op.name, op.eqn.params, operands, results, dim)
    return None if found is None else exchange(found, operands, results, pieces)


def _moved(
    mesh: LogicalMesh,
    fractions: ShardFractions,
    op: Op,
    factor: Factor,
    axes: list[int],
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
) -> list[Transfer] | None:
    """One permute for each round of blocks."""
    pieces = math.prod(mesh.sizes[a] for a in axes)
    # along its other dimensions a slice is cut before its blocks move, and a padding grows after it
    values, specs, places = (
        (op.operands, operand_specs, factor.operands)
        if op.name == "pad"
        else (op.results, result_specs, factor.results)
    )
    k, d = max(places, key=lambda place: values[place[0]].bytes)  # some results of a split may be empty
    small = values[k]
    local = small.bytes * fractions[specs[k]]
    if not local:
        return []
    if op.name == "rev":  # each shard goes to its opposite
        return [collective(mesh, PERMUTE, axes, local)]
    found = blocks_of(op, factor, pieces)
    if found is None:
        return None
    return [collective(mesh, PERMUTE, axes, local * found.block / (small.shape[d] // pieces))] * found.sent


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
