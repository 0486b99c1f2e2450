"""Starts of dynamic slices and updates, brought inside by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

DYNAMIC = ("dynamic_slice", "dynamic_update_slice")


def inside(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of a dynamic slice or update with starts that need no clamping.

    They mean the same.  But XLA makes one slice of two (a slice, and a device's share of it) by adding their starts,
    and forgets that the first would have been clamped; and in a split dimension it drops an update that is.
    """
    whole = eqn.invars[0].aval.shape
    window = eqn.invars[1].aval.shape if eqn.primitive.name == "dynamic_update_slice" else eqn.outvars[0].aval.shape
    first = len(operands) - len(whole)
    return [*operands[:first], *(_clamped(x, n - m) for x, n, m in zip(operands[first:], whole, window, strict=True))]


def _clamped(start: Any, last: int) -> Any:
    dtype = jnp.result_type(start)
    if last > jnp.iinfo(dtype).max:  # an int8 start in a long dimension
        start, dtype = jnp.asarray(start, jnp.int32), jnp.dtype(jnp.int32)
    return lax.clamp(jnp.zeros((), dtype), jnp.asarray(start, dtype), jnp.asarray(last, dtype))
