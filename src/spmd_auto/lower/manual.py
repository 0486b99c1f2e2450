"""Operations written out by hand: a fully manual `shard_map` of one operation, then staged reductions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_auto import _compat
from spmd_auto.lower import edges, transforms
from spmd_auto.lower.placement import DeferredSum, Placement, Step
from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.propagate.graph import Site


def manual_op(
    eqn: Any, operands: list[Any], placement: Placement, logical: LogicalMesh, mesh: jax.sharding.Mesh
) -> Any:
    """`eqn` on shards of its operands, partial sums combined step by step."""
    assert placement.manual is not None
    name = eqn.primitive.name
    if name == "gather":
        local = _local_gather(eqn, operands[0].shape, placement, logical)
    elif name == "scatter-add":
        local = _local_scatter_add(eqn, operands[0].shape, placement, logical)
    elif name in edges.LOCAL:
        local = edges.LOCAL[name](eqn, placement, logical)
    elif name in transforms.LOCAL:
        local = transforms.LOCAL[name](eqn, placement, logical)
    else:
        local = None

    def body(*shards: Any) -> Any:
        out = _compat.bind(eqn, shards)[0] if local is None else local(*shards)
        return _combine(out, placement.manual or (), logical)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(logical.partition_spec(spec) for spec in placement.targets),
        out_specs=logical.partition_spec(placement.reduced),
        check_vma=False,
    )
    out = mapped(*operands)
    if name == "scatter-add":
        return operands[0] + out
    return _outside(eqn, operands, out) if name == "gather" else out


@dataclasses.dataclass(slots=True)
class Pending:
    """The result of an equation that is evaluated later, at the root of its sum."""

    eqn: Any
    site: Site
    operands: list[Any]  # arrays of a leaf, or further pending results


def settled(x: Any) -> Any:
    """A value itself: a pending result that something beside its sum wants (a branch's unused operand) is made here."""
    return _compat.bind(x.eqn, [settled(operand) for operand in x.operands])[0] if isinstance(x, Pending) else x


def deferred_sum(
    eqn: Any, operands: list[Any], deferred: DeferredSum, logical: LogicalMesh, mesh: jax.sharding.Mesh
) -> Any:
    """The sum `eqn` of pending results as one manual operation: local leaves, local adds, one reduction.

    Addends that are whole already pass through the same tree outside and are added after the reduction.
    """
    arrays: list[Any] = []
    specs: list[Spec] = []
    first: dict[Site, int] = {}  # where a leaf's operands start among `arrays`

    def collect(node: Any) -> None:
        if not isinstance(node, Pending):
            return
        if node.site in deferred.leaves:
            first[node.site] = len(arrays)
            arrays.extend(node.operands)
            specs.extend(deferred.leaves[node.site])
            return
        for child in node.operands:
            collect(child)

    def evaluate(node: Any, shards: Any) -> Any:
        """The partial part of the tree on `shards`, or its whole part if there are none; None: nothing there."""
        if not isinstance(node, Pending):
            return node if shards is None else None
        if node.site in deferred.leaves:
            if shards is None:
                return None
            start = first[node.site]
            return _compat.bind(node.eqn, shards[start : start + len(node.operands)])[0]
        values = [x for x in (evaluate(child, shards) for child in node.operands) if x is not None]
        if len(values) < len(node.operands):  # an add with one side elsewhere, or nothing at all
            return values[0] if values else None
        return _compat.bind(node.eqn, values)[0]

    tree = Pending(eqn, (), operands)
    collect(tree)
    mapped = jax.shard_map(
        lambda *shards: _combine(evaluate(tree, shards), deferred.steps, logical),
        mesh=mesh,
        in_specs=tuple(logical.partition_spec(spec) for spec in specs),
        out_specs=logical.partition_spec(deferred.reduced),
        check_vma=False,
    )
    total, whole = mapped(*arrays), evaluate(tree, None)
    return total if whole is None else total + whole


def _combine(out: Any, steps: tuple[Step, ...], logical: LogicalMesh) -> Any:
    """Partial sums combined step by step; of truth values, whether one of them is true."""
    truth = out.dtype == bool
    if truth:  # a sum of as many as there are devices must not wrap
        out = out.astype(np.min_scalar_type(logical.device_count))
    for step in steps:
        axes = tuple(logical.names[a] for a in step.axes)
        if step.dim is None:
            out = lax.psum(out, axes)
        else:
            out = lax.psum_scatter(out, axes, scatter_dimension=step.dim, tiled=True)
    return out != 0 if truth else out


def _wide(indices: Any) -> Any:
    """Indices in a type that holds every row number: a uint8 token can't be compared with a table of 512 rows."""
    return indices.astype(jnp.int32) if jnp.iinfo(indices.dtype).bits < 32 else indices


def _first_row(table: Any, dim: int, split: tuple[int, ...], logical: LogicalMesh) -> Any:
    """Global index of the first row that this device holds of a dimension split over mesh axes."""
    position = 0
    for axis in split:
        position = position * logical.sizes[axis] + lax.axis_index(logical.names[axis])
    return position * table.shape[dim]


def _local_gather(eqn: Any, global_shape: tuple[int, ...], placement: Placement, logical: LogicalMesh) -> Any:
    """A gather whose indexed dimension is split: each device serves the rows it holds, zeros elsewhere."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    dim = numbers.collapsed_slice_dims[0]
    column = numbers.start_index_map.index(dim)

    def local(table: Any, indices: Any) -> Any:
        indices = _wide(indices)
        rows = indices[..., column]
        if params["mode"] == lax.GatherScatterMode.CLIP:
            rows = jnp.clip(rows, 0, global_shape[dim] - 1)
        rows = rows - jnp.asarray(_first_row(table, dim, placement.targets[0][dim], logical), rows.dtype)
        inside = (rows >= 0) & (rows < table.shape[dim])
        shifted = indices.at[..., column].set(jnp.clip(rows, 0, table.shape[dim] - 1))
        sizes = tuple(
            table.shape[d] if params["slice_sizes"][d] == global_shape[d] else params["slice_sizes"][d]
            for d in range(table.ndim)
        )
        out = lax.gather(table, shifted, numbers, sizes, mode=lax.GatherScatterMode.CLIP)
        inside = jnp.expand_dims(inside, [d for d in range(out.ndim) if d in numbers.offset_dims])
        return jnp.where(inside, out, jnp.zeros((), out.dtype))

    return local


def _single(numbers: Any) -> tuple[int, ...]:
    """Dimensions of a scatter's operand of which an update has one place."""
    return (*numbers.inserted_window_dims, *numbers.operand_batching_dims)


def _local_scatter_add(eqn: Any, global_shape: tuple[int, ...], placement: Placement, logical: LogicalMesh) -> Any:
    """Each device adds its updates to zeros (the operand must count once) and drops those for others' rows."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    columns = [
        (column, dim, placement.targets[0][dim])
        for column, dim in enumerate(numbers.scatter_dims_to_operand_dims)
        # an indexed window that covers its whole dimension starts at 0 on every device's own piece
        if placement.targets[0][dim] and dim in numbers.inserted_window_dims
    ]
    kept = [d for d in range(len(global_shape)) if d not in _single(numbers)]
    windows = dict.fromkeys(_single(numbers), 1)
    windows |= {d: eqn.invars[2].aval.shape[k] for d, k in zip(kept, numbers.update_window_dims, strict=True)}

    def local(table: Any, indices: Any, updates: Any) -> Any:
        indices = _wide(indices)
        zeros = jnp.zeros_like(table)
        if not columns:
            return _compat.bind(eqn, (zeros, indices, updates))[0]
        if params["mode"] == lax.GatherScatterMode.CLIP:  # every index, for the scatter below drops what is outside
            for column, dim in enumerate(numbers.scatter_dims_to_operand_dims):
                inside = jnp.clip(indices[..., column], 0, global_shape[dim] - windows[dim])
                indices = indices.at[..., column].set(inside)
        for column, dim, split in columns:
            rows = indices[..., column]
            rows = rows - jnp.asarray(_first_row(table, dim, split, logical), rows.dtype)
            indices = indices.at[..., column].set(rows)
        dropping = dict(params, mode=lax.GatherScatterMode.FILL_OR_DROP, indices_are_sorted=False)
        return _compat.bind(eqn, (zeros, indices, updates), dropping)[0]

    return local


def _outside(eqn: Any, operands: list[Any], out: Any) -> Any:
    """Indices outside the table give the fill value, as the whole gather does."""
    params = eqn.params
    if params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return out
    numbers = params["dimension_numbers"]
    dim = numbers.collapsed_slice_dims[0]
    rows = _wide(operands[1])[..., numbers.start_index_map.index(dim)]
    inside = (rows >= 0) & (rows < operands[0].shape[dim])
    inside = jnp.expand_dims(inside, [d for d in range(out.ndim) if d in numbers.offset_dims])
    fill = params["fill_value"]
    if fill is None:
        inexact = jnp.issubdtype(out.dtype, jnp.inexact)
        signed = jnp.issubdtype(out.dtype, jnp.signedinteger)
        fill = jnp.nan if inexact else jnp.iinfo(out.dtype).min if signed else jnp.iinfo(out.dtype).max
    return jnp.where(inside, out, jnp.asarray(fill, out.dtype))
