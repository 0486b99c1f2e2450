"""A traced step: its jaxpr, the tree path and role of every leaf, and which result replaces which argument."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import TraceError
from spmd_auto.trace import objects, state
from spmd_auto.trace.calls import Call, Results, static_arguments, take_apart, take_results_apart, title
from spmd_auto.trace.declared import Declared, declared_of
from spmd_auto.trace.state import Role
from spmd_auto.trace.watch import Watched


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the arguments or results.

    Attributes:
      path: slash-separated tree path that starts with the argument's name, `state/params/Dense_0/kernel`.
      shape: global shape.
      dtype: NumPy or extended dtype.
      itemsize: bytes per element.
      role: see `Role`; results have the role of the argument they replace, or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    itemsize: int
    role: Role | None = None

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A step function on one device, as the rest of the house sees it.

    Attributes:
      name: the function's name.
      jaxpr: closed jaxpr over flat arguments.
      arguments, results: flat leaves in the order of `in_tree` and `out_tree`; behind them the results that are written
        into the arguments' objects.
      replaces: for each result the index of the argument whose place it takes in the next call, or None.
      in_tree: tree of `(args, kwargs)` without static arguments (see `Call.tree`).
      fingerprint: digest of the jaxpr and all paths; equal in another process.
      returned: how flat results become the user's.
      declared: for each argument leaf what the model's metadata says of its sharding.
    """

    name: str
    jaxpr: Any
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    replaces: tuple[int | None, ...]
    in_tree: Any
    fingerprint: str
    returned: Results
    declared: tuple[Declared | None, ...] = ()

    @property
    def out_tree(self) -> Any:
        """Tree of what the function returns: objects as `nnx.State`, settings of modules as None."""
        return self.returned.tree

    def find(self, path: str) -> Leaf:
        return next(leaf for leaf in self.arguments if leaf.path == path)


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """The abstract value of an array, number or ShapeDtypeStruct (64-bit kept only under x64).

    Numbers of Python are weakly typed, and arrays that JAX made of nothing else (`jnp.array(2.0)`), as under jit.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):  # np.float64 is strong
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.asarray(x).dtype), weak_type=True)
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    shape = x.shape if hasattr(x, "shape") else np.shape(x)
    if not _compat.is_extended(dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=bool(getattr(x, "weak_type", False)))


def trace(
    fn: Callable[..., Any],
    /,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Program:
    """Traces `fn` on arrays or `ShapeDtypeStruct`s; nothing is computed.

    Raises:
      TraceError: `fn` fails under tracing (the original error is its cause).
    """
    static_argnums, static_argnames = static_arguments(fn, static_argnums, static_argnames)
    with objects.references("flax.nnx" in sys.modules):
        call = take_apart(fn, args, kwargs, static_argnums, static_argnames)
        return _trace(fn, call)


def _trace(fn: Callable[..., Any], call: Call) -> Program:
    name, paths, held = title(fn), call.paths(), call.held()
    for path, leaf in zip(paths, call.leaves, strict=True):
        _check_leaf(name, path, leaf)
    watched = Watched(fn, frozenset(call.names) | frozenset(call.arrays[1]))
    made: list[Results] = []

    def flat_step(*leaves: Any) -> list[Any]:
        args, kwargs, found = call.put_together(leaves)
        flat, results = take_results_apart(watched(*args, **kwargs), found, leaves, call, paths)
        made.append(results)
        return flat

    flat_step.__name__ = flat_step.__qualname__ = name
    try:
        traced = jax.jit(flat_step).trace(*[abstract(x) for x in call.leaves])
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"{name} cannot be traced: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "the step must be a pure function of arrays (see the cause above for its own line)",
            [
                "try jax.make_jaxpr(step)(*args): the same error, without this package",
                "mark arguments that are not arrays as static",
            ],
        ) from error
    returned = made[-1]
    jaxpr, out_paths = traced.jaxpr, list(returned.paths)
    in_avals = [v.aval for v in _compat.open_jaxpr(jaxpr).invars]
    out_avals = [v.aval for v in _compat.open_jaxpr(jaxpr).outvars]
    in_place = {path.split("/")[0] for path, mark in zip(paths, call.in_objects(), strict=True) if mark}
    names = [head for head in (*call.names, *call.arrays[1]) if head not in in_place]
    matched = state.match(jaxpr, paths, in_avals, out_paths, out_avals, names)
    replaces = state.only_updates(jaxpr, matched, paths)
    for o, i in enumerate(returned.updates, len(out_paths) - len(returned.updates)):  # written in place
        alike = i is not None and (in_avals[i].shape, in_avals[i].dtype) == (out_avals[o].shape, out_avals[o].dtype)
        matched[o] = replaces[o] = i if alike else None
    roles = state.roles(jaxpr, paths, in_avals, matched, held)

    def leaf(path: str, aval: Any, role: Role | None) -> Leaf:
        return Leaf(path, tuple(aval.shape), aval.dtype, _compat.itemsize(aval), role)

    arguments = tuple(leaf(p, a, r) for p, a, r in zip(paths, in_avals, roles, strict=True))
    results = tuple(
        leaf(p, a, None if i is None else roles[i]) for p, a, i in zip(out_paths, out_avals, replaces, strict=True)
    )
    return Program(
        name,
        jaxpr,
        arguments,
        results,
        tuple(replaces),
        call.tree,
        fingerprint(jaxpr, paths, out_paths),
        returned,
        tuple(declared_of(call.arrays)),
    )


def _check_leaf(name: str, path: str, leaf: Any) -> None:
    numbers = (jax.ShapeDtypeStruct, bool, int, float, complex, np.generic)
    if not isinstance(leaf, numbers) and not _compat.has_shape(leaf):
        raise TraceError(
            f"argument leaf {path!r} of {name} is a {type(leaf).__name__}, not an array",
            "only arrays, numbers and ShapeDtypeStructs can be split over devices",
            ["name it in static_argnames / static_argnums", "leave it out of the arguments"],
        )
    if _compat.is_mutable(leaf):
        raise TraceError(
            f"argument leaf {path!r} of {name} is a mutable array",
            "a step is a function of arrays: what it writes into would have to be split alike before and after",
            ["give it jax.freeze(ref) and return the new array", "make the mutable array inside of the step"],
        )


def fingerprint(jaxpr: Any, in_paths: Sequence[str], out_paths: Sequence[str]) -> str:
    """Digest of the program that is equal in another process (object addresses are blanked out)."""
    text = re.sub(r"0x[0-9a-f]+", "0x", str(jaxpr))
    digest = hashlib.sha256()
    for part in (text, *in_paths, "->", *out_paths):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]
