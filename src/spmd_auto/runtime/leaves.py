"""Flat arguments of a call: their types, and where they have to lie."""

from __future__ import annotations

from collections.abc import Sequence, Set
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


def without_aliases(
    arrays: Sequence[Any], passed: Sequence[Any], donated: Set[int], own: Set[int] = frozenset()
) -> list[Any]:
    """Arrays of which no two share a buffer where one of the two is donated: a buffer can be given away only once.

    JAX 0.10.2 ends the process if it is given away twice. It happens easily: an average of the parameters begins as the
    parameters themselves, and an array moved to more devices keeps its buffer on its own.

    Args:
      arrays: where the plan wants them.
      passed: the same as the user passed them.
      donated: indices of arrays that are given away.
      own: indices of arrays that the last call returned: no two of those share a buffer.
    """
    out = list(arrays)
    strange = [i for i, x in enumerate(passed) if i not in own and isinstance(x, jax.Array)]
    if not strange or not donated:
        return out
    kinds = {(arrays[i].shape, arrays[i].dtype) for i in strange}
    first: dict[Any, int] = {}
    for i, (x, given) in enumerate(zip(arrays, passed, strict=True)):
        if not isinstance(given, jax.Array) or (x.shape, x.dtype) not in kinds:
            continue
        marks = [id(given), *_compat.buffers(x)]
        others = {first[mark] for mark in marks if mark in first}
        if others and (i in donated or others & donated):
            out[i] = jax.device_put(jnp.copy(x), x.sharding)
        else:
            for mark in marks:
                first.setdefault(mark, i)
    return out
