"""Slices, splits, joins and paddings of split dimensions on shards: blocks change places, round by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_auto import _compat
from spmd_auto.cost.blocks import Exchange, exchange, pieces_of
from spmd_auto.lower.permute import permute
from spmd_auto.lower.placement import Placement
from spmd_auto.mesh.logical import LogicalMesh


def moved_op(
    eqn: Any, operands: list[Any], placement: Placement, logical: LogicalMesh, mesh: jax.sharding.Mesh
) -> list[Any]:
    """`eqn` on shards, with blocks that change places along `placement.moves`.

    One split dimension of a slice or a padding after the other; a split or a join has one.
    """
    name, params = eqn.primitive.name, eqn.params
    shapes_in, shapes_out = [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars]
    arrays = 1 if name == "pad" else len(operands)  # the second operand of a padding is its value

    moves = placement.moves or ()

    def body(*args: Any) -> list[Any]:
        if not moves:
            return _compat.bind(eqn, args)
        shards = list(args[:arrays])
        fill = args[1] if name == "pad" else jnp.zeros((), shards[0].dtype)
        if name == "slice":
            shards = [_cut(eqn, shards[0], moves)]
        for dim in moves:
            sizes_in = tuple(shape[dim] for shape in shapes_in[:arrays])
            sizes_out = tuple(shape[dim] for shape in shapes_out)
            pieces = pieces_of(name, params, sizes_in, sizes_out, dim)
            split = placement.targets[0][dim]
            count = math.prod(logical.sizes[a] for a in split)
            found = exchange(pieces, sizes_in, sizes_out, count) if pieces is not None else None
            assert found is not None  # its price was known
            axes = tuple(logical.names[a] for a in split)
            shards = run_exchange(found, shards, [n // count for n in sizes_out], dim, axes, fill, logical)
        return [_padded(eqn, shards[0], fill, moves)] if name == "pad" else shards

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(logical.partition_spec(spec) for spec in placement.targets),
        out_specs=[logical.partition_spec(spec) for spec in placement.raws],
        check_vma=False,
    )
    return mapped(*operands)


def run_exchange(
    found: Exchange,
    shards: Sequence[Any],
    local_out: Sequence[int],
    dim: int,
    axes: tuple[str, ...],
    fill: Any,
    logical: LogicalMesh,
) -> list[Any]:
    """The results' shards along `dim`; places where no block arrives hold `fill`."""
    position = lax.axis_index(axes)
    joined = jnp.concatenate(shards, axis=dim) if len(shards) > 1 else shards[0]
    total = sum(local_out)
    shape = list(joined.shape)
    shape[dim] = total + found.block  # behind the results is room for blocks that nobody wants
    out = jnp.full(shape, fill, joined.dtype)
    for one in found.rounds:
        source = jnp.asarray(np.array([s or 0 for s in one.source], np.int32))[position]
        target = jnp.asarray(np.array([total if t is None else t for t in one.target], np.int32))[position]
        block = lax.dynamic_slice_in_dim(joined, source, found.block, dim)
        if one.pairs:
            block = permute(block, axes, one.pairs, logical)
        out = lax.dynamic_update_slice_in_dim(out, block, target, dim)
    starts = np.cumsum([0, *local_out])
    return [lax.slice_in_dim(out, int(a), int(b), axis=dim) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def _cut(eqn: Any, x: Any, moved: tuple[int, ...]) -> Any:
    """A slice along the dimensions that are not split; before the blocks move, so that less does."""
    params = eqn.params
    start, limit = list(params["start_indices"]), list(params["limit_indices"])
    for d, size in enumerate(x.shape):
        if d in moved or eqn.invars[0].aval.shape[d] == eqn.outvars[0].aval.shape[d]:
            start[d], limit[d] = 0, size
    return lax.slice(x, start, limit, params["strides"])


def _padded(eqn: Any, x: Any, fill: Any, moved: tuple[int, ...]) -> Any:
    """A padding along the dimensions that are not split."""
    return lax.pad(x, fill, [(0, 0, 0) if d in moved else c for d, c in enumerate(eqn.params["padding_config"])])
