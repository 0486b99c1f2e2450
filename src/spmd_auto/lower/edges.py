"""Windowed operations on shards: the edges come from the neighbours, the padding stays at the ends of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd_auto import _compat
from spmd_auto.lower.permute import permute
from spmd_auto.lower.placement import Placement
from spmd_auto.mesh.logical import LogicalMesh

Local = Callable[..., Any]


def with_edges(
    x: Any, dim: int, before: int, after: int, axes: tuple[str, ...], fill: Any, logical: LogicalMesh
) -> Any:
    """A shard with its neighbours' edges on a dimension split over `axes`; `fill` at the two ends."""
    count = math.prod(logical.sizes[logical.names.index(a)] for a in axes)
    position = lax.axis_index(axes)
    parts = [x]
    if before:
        edge = lax.slice_in_dim(x, x.shape[dim] - before, None, axis=dim)
        edge = permute(edge, axes, [(i, i + 1) for i in range(count - 1)], logical)
        parts.insert(0, jnp.where(position == 0, fill, edge))
    if after:
        edge = lax.slice_in_dim(x, 0, after, axis=dim)
        edge = permute(edge, axes, [(i + 1, i) for i in range(count - 1)], logical)
        parts.append(jnp.where(position == count - 1, fill, edge))
    return jnp.concatenate(parts, axis=dim)


def _extended(shards: list[Any], fills: list[Any], placement: Placement, logical: LogicalMesh) -> list[Any]:
    out = list(shards)
    for k, dim, before, after in placement.edges:
        axes = tuple(logical.names[a] for a in placement.targets[k][dim])
        out[k] = with_edges(out[k], dim, before, after, axes, fills[k], logical)
    return out


def _split_conv(eqn: Any, placement: Placement, logical: LogicalMesh) -> Local:
    """A convolution whose input is split, and like it the output or (a gradient for a kernel) the window."""
    params = eqn.params
    numbers = params["dimension_numbers"]

    def local(*shards: Any) -> Any:
        lhs, rhs = _extended(list(shards), [jnp.zeros((), x.dtype) for x in shards], placement, logical)
        padding = list(params["padding"])
        for k, dim, before, _ in placement.edges:
            if k != 0:
                continue
            s = numbers.lhs_spec.index(dim) - 2
            dilation, stride = params["lhs_dilation"][s], params["window_strides"][s]
            low = padding[s][0] - before * dilation
            span = (rhs.shape[numbers.rhs_spec[s + 2]] - 1) * params["rhs_dilation"][s] + 1
            covered = (lhs.shape[dim] - 1) * dilation + 1 + low
            output = eqn.outvars[0].aval.shape[numbers.out_spec[s + 2]]
            if not placement.targets[1][numbers.rhs_spec[s + 2]]:  # the output is split like the input
                output //= math.prod(logical.sizes[a] for a in placement.targets[0][dim])
            reach = (output - 1) * stride + span
            padding[s] = (low, reach - covered)
        counts = {}
        for key, dim in (("batch_group_count", numbers.lhs_spec[0]), ("feature_group_count", numbers.lhs_spec[1])):
            split = placement.targets[0][dim] if params[key] > 1 else ()
            counts[key] = params[key] // math.prod(logical.sizes[a] for a in split)
        return _compat.bind(eqn, (lhs, rhs), dict(params, padding=tuple(padding), **counts))[0]

    return local


def _split_pooling_gradient(eqn: Any, placement: Placement, logical: LogicalMesh) -> Local:
    """The gradient of max pooling: source (one value per window) and operand, both with edges; own piece cut out."""
    params = eqn.params

    def local(source: Any, operand: Any) -> Any:
        fills = [jnp.zeros((), source.dtype), _never_selected(params["select_prim"].name, operand.dtype)]
        wide_source, wide = _extended([source, operand], fills, placement, logical)
        padding, start = list(params["padding"]), [0] * operand.ndim
        for k, dim, before, _ in placement.edges:
            if k == 1:
                padding[dim], start[dim] = (0, 0), before
        out = _compat.bind(eqn, (wide_source, wide), dict(params, padding=tuple(padding)))[0]
        return lax.slice(out, start, [a + n for a, n in zip(start, operand.shape, strict=True)])

    return local


def _never_selected(select: str, dtype: Any) -> Any:
    """What pooling by `select` ("ge": the largest, "le": the smallest) takes last."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(-jnp.inf if select == "ge" else jnp.inf, dtype)
    return jnp.asarray(jnp.iinfo(dtype).min if select == "ge" else jnp.iinfo(dtype).max, dtype)


LOCAL: dict[str, Callable[[Any, Placement, LogicalMesh], Local]] = {
    "conv_general_dilated": _split_conv,
    "select_and_scatter_add": _split_pooling_gradient,
}
