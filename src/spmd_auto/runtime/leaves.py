"""Flat arguments of a call: their types, and where they have to lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import LoweringError
from spmd_auto.runtime.across import place_across


def leaf_type(x: Any) -> tuple[Any, ...]:
    # 2.0 keeps a bfloat16 array bfloat16; a float32 array of 2, or np.float64(2), does not
    if isinstance(x, (float, complex)) and not isinstance(x, np.generic):
        return (), np.dtype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)), "weak"
    if isinstance(x, (bool, int)):
        return (), np.dtype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
    shape = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return shape, dtype if _compat.is_extended(dtype) else jax.dtypes.canonicalize_dtype(dtype)


def place(x: Any, sharding: Any, aval: jax.ShapeDtypeStruct, path: str) -> tuple[Any, bool]:
    """A leaf where the plan wants it, and whether a committed array had to be moved for it.

    Over several processes: see `place_across`.

    Raises:
      LoweringError: the array was donated to an earlier call.
    """
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise LoweringError(
                f"argument leaf {path!r} was donated to an earlier call and is gone",
                "a step gives the buffers of its old state to the new one",
                ["use the state that the step returned", "auto_shard(donate=False)"],
            )
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x, False
    if not sharding.is_fully_addressable:
        return place_across(x, sharding, aval, path)
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding), bool(x.ndim) and x.committed
    if not _compat.is_extended(aval.dtype):
        x = np.asarray(x, aval.dtype)
    return jax.device_put(x, sharding), False


def without_aliases(arrays: list[Any], donated: set[int]) -> list[Any]:
    """Copies of arrays that are passed twice where one of the two is donated: a buffer can be given away only once."""
    first: dict[int, int] = {}
    out = list(arrays)
    for i, x in enumerate(arrays):
        k = first.setdefault(id(x), i)
        if k != i and (i in donated or k in donated):
            out[i] = jax.device_put(jnp.copy(x), x.sharding)
    return out
