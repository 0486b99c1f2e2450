"""Starts of dynamic slices and updates brought inside by hand, and other places where XLA forgets to clamp them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd_auto import _compat

_DYNAMIC = ("dynamic_slice", "dynamic_update_slice")


def bind_safely(eqn: Any, operands: list[Any]) -> list[Any]:
    """Applies an equation's primitive, in a form that XLA gets right."""
    name = eqn.primitive.name
    if name in _DYNAMIC:
        operands = inside(eqn, operands)
    elif name == "gather":
        operands = among_the_rows(eqn, operands)
    elif name.startswith("scatter"):
        operands = apart(eqn, operands)
    return _compat.bind(eqn, operands)


def inside(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of a dynamic slice or update with starts that need no clamping.

    They mean the same.  But XLA makes one slice of two (a slice, and a device's share of it) by adding their starts,
    and forgets that the first would have been clamped; and in a split dimension it drops an update that is.
    """
    whole = eqn.invars[0].aval.shape
    window = eqn.invars[1].aval.shape if eqn.primitive.name == "dynamic_update_slice" else eqn.outvars[0].aval.shape
    first = len(operands) - len(whole)
    return [*operands[:first], *(_clamped(x, n - m) for x, n, m in zip(operands[first:], whole, window, strict=True))]


def among_the_rows(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of a gather with indices that need no clamping, as `inside`: of one index XLA makes a slice."""
    params = eqn.params
    if params["mode"] != lax.GatherScatterMode.CLIP:  # else what is outside is not looked at
        return operands
    whole = eqn.invars[0].aval.shape
    most = jnp.iinfo(eqn.invars[1].aval.dtype).max
    last = [min(whole[d] - params["slice_sizes"][d], most) for d in params["dimension_numbers"].start_index_map]
    return [operands[0], jnp.clip(operands[1], 0, jnp.asarray(last, operands[1].dtype))]


def apart(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of a scatter to one place, its array behind a barrier.

    Where that array is split along the place's dimension, every device but one finds the place outside of its piece
    and writes back what it reads at the clamped place.  If the piece is a slice of an array that is whole, XLA makes
    one slice of the two, which is clamped elsewhere: the devices write back numbers of other places.
    """
    if math.prod(eqn.invars[1].aval.shape[:-1]) != 1:
        return operands
    return [lax.optimization_barrier(operands[0]), *operands[1:]]


def _clamped(start: Any, last: int) -> Any:
    dtype = jnp.result_type(start)
    if last > jnp.iinfo(dtype).max:  # an int8 start in a long dimension
        start, dtype = jnp.asarray(start, jnp.int32), jnp.dtype(jnp.int32)
    return lax.clamp(jnp.zeros((), dtype), jnp.asarray(start, dtype), jnp.asarray(last, dtype))
