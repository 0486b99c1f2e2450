"""Windowed operations on shards, for the oracle: the edges a HALO (or REDUCE) factor claims come from the neighbours.

Written apart from what lowering does: all shards of a dimension are gathered and this device's part is cut out of
them, so nothing here depends on who sends what to whom; only on how many elements the rule says are needed.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def _widened(local: Any, x: Any, k: int, dim: int, before: int, after: int, fill: Any) -> Any:
    """Operand `k`'s shard with exactly `before` and `after` further elements on a dimension."""
    axes = local.axes("operands", k, dim)
    width = x.shape[dim]
    whole = lax.all_gather(x, axes, axis=dim, tiled=True)
    ends = [(0, 0, 0)] * x.ndim
    ends[dim] = (before, after, 0)
    whole = lax.pad(whole, jnp.asarray(fill, x.dtype), ends)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axes) * width, width + before + after, dim)


def widened(local: Any, args: list[Any], fills: list[Any]) -> tuple[list[Any], dict[tuple[int, int], tuple[int, int]]]:
    """Operands with their edges, and {(operand, dimension): (before, after)} of every split dimension."""
    out, halos = list(args), {}
    for index in local.placement:
        factor = local.rule[index]
        edges = factor.halos or ((0, 0),) * len(factor.operands)
        for (k, dim), (before, after) in zip(factor.operands, edges, strict=True):
            halos[k, dim] = (before, after)
            if before or after:
                out[k] = _widened(local, out[k], k, dim, before, after, fills[k])
    return out, halos


def padded(size: int, window: int, output: int, low: int, stride: int, base: int, dilation: int) -> tuple[int, int]:
    """Padding after `low` such that a window over `size` elements gives `output` results."""
    return low, (output - 1) * stride + (window - 1) * dilation + 1 - ((size - 1) * base + 1) - low


def conv_padding(local: Any, args: list[Any], halos: dict[tuple[int, int], tuple[int, int]]) -> tuple[Any, ...]:
    p = local.params
    lhs, rhs, out = (p["dimension_numbers"].lhs_spec, p["dimension_numbers"].rhs_spec, p["dimension_numbers"].out_spec)
    padding = list(p["padding"])
    for s, (i, j, k) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        if (0, i) in halos:
            base = p["lhs_dilation"][s]
            low = padding[s][0] - halos[0, i][0] * base
            sizes = (args[0].shape[i], args[1].shape[j], local.shape("results", 0)[k])
            padding[s] = padded(*sizes, low, p["window_strides"][s], base, p["rhs_dilation"][s])
    return tuple(padding)


def reduce_window(local: Any, args: list[Any]) -> list[Any]:
    p = local.params
    name = local.app.eqn.primitive.name
    x = args[0]
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    highest = jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).max
    fill = {"reduce_window_max": lowest, "reduce_window_min": highest, "reduce_window_sum": 0}.get(name)
    if fill is None:
        fill = args[-1]
    args, halos = widened(local, args, [fill] * len(args))
    padding = list(p["padding"])
    for d in range(x.ndim):
        if (0, d) in halos:
            base = p["base_dilation"][d]
            low = padding[d][0] - halos[0, d][0] * base
            sizes = (args[0].shape[d], p["window_dimensions"][d], local.shape("results", 0)[d])
            padding[d] = padded(*sizes, low, p["window_strides"][d], base, p["window_dilation"][d])
    return local.bind(args, padding=tuple(padding))


def select_and_scatter_add(local: Any, args: list[Any]) -> list[Any]:
    p = local.params
    own = args[1].shape
    largest = p["select_prim"].name == "ge"
    info = jnp.finfo if jnp.issubdtype(args[1].dtype, jnp.inexact) else jnp.iinfo
    args, halos = widened(local, args, [0, info(args[1].dtype).min if largest else info(args[1].dtype).max])
    padding, start = list(p["padding"]), [0] * len(own)
    for d in range(len(own)):
        if (1, d) in halos:
            before, _ = halos[1, d]
            early = halos[0, d][0]
            # the first window of the widened source begins `padding` before the one of this device's own first
            low = early * p["window_strides"][d] + padding[d][0] - before
            padding[d], start[d] = (
                padded(
                    args[1].shape[d], p["window_dimensions"][d], args[0].shape[d], low, p["window_strides"][d], 1, 1
                ),
                before,
            )
    (out,) = local.bind(args, padding=tuple(padding))
    return [lax.slice(out, start, [a + n for a, n in zip(start, own, strict=True)])]
