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
    """What a plan hangs on: shape, dtype, and whether a float is weakly typed.

    2.0 keeps a bfloat16 array bfloat16; np.float64(2), or a float32 array made of it, does not. Weak integers are not
    told from others: a `TrainState.step` begins as a number of Python's, or as an array read from a checkpoint.
    """
    shape = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if _compat.is_extended(dtype):
        return shape, dtype
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    of_python = isinstance(x, (float, complex)) and not isinstance(x, np.generic)
    weak = of_python or getattr(x, "weak_type", False)
    return (shape, dtype, "weak") if weak and jnp.issubdtype(dtype, jnp.inexact) else (shape, dtype)


def place(x: Any, sharding: Any, aval: jax.ShapeDtypeStruct, path: str) -> tuple[Any, bool]:
    """A leaf where the plan wants it, and whether a committed array had to be moved for it.

    Over several processes: see `place_across`.

    Raises:
      LoweringError: the array was donated to an earlier call, or has no values.
    """
    if _compat.is_abstract(x):
        raise LoweringError(
            f"argument leaf {path!r} is a {type(x).__name__}: it has no values",
            "a call runs the step",
            [".plan(...) and .compile(...) take shapes", "jax.eval_shape(step, ...) for the shapes of the results"],
        )
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
    if not _compat.is_extended(aval.dtype) and not aval.weak_type:  # JAX makes a weak array of a number itself
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
