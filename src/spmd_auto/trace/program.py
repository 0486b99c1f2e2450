"""A traced step: its jaxpr, the tree path and role of every leaf, and which result replaces which argument."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import TraceError
from spmd_auto.trace.declared import Declared, declared_of
from spmd_auto.trace.reach import reaches, updates


class Role(enum.Enum):
    """What a leaf of the arguments is for.

    PARAMETER  state that the results beside the state (loss, metrics) depend on;
    OPTIMIZER  state that only the new state depends on (moments, running statistics);
    COUNTER    state without dimensions;
    BATCH      an argument that no result replaces;
    KEY        a PRNG key.
    """

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    COUNTER = "counter"
    BATCH = "batch"
    KEY = "key"


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
      arguments, results: flat leaves in the order of `in_tree`, `out_tree`.
      replaces: for each result the index of the argument whose place it takes in the next call, or None.
      in_tree: tree of `(args, kwargs)` without static arguments.
      fingerprint: digest of the jaxpr and all paths; equal in another process.
      declared: for each argument leaf what the model's metadata says of its sharding.
    """

    name: str
    jaxpr: Any
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    replaces: tuple[int | None, ...]
    in_tree: Any
    out_tree: Any
    fingerprint: str
    declared: tuple[Declared | None, ...] = ()

    def find(self, path: str) -> Leaf:
        return next(leaf for leaf in self.arguments if leaf.path == path)


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """The strongly typed abstract value of an array, scalar or ShapeDtypeStruct (64-bit kept only under x64)."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):  # np.float64 is strong
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.asarray(x).dtype), weak_type=True)
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    shape = x.shape if hasattr(x, "shape") else np.shape(x)
    if not _compat.is_extended(dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _title(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        signature = inspect.signature(fn)
        names = [
            p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def _join(prefix: str, path: Sequence[Any]) -> str:
    tail = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (prefix, tail) if part)


def _flat_paths(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    out = []
    for path, leaf in leaves:
        side, rest = path[0].idx, path[1:]
        head = names[rest[0].idx] if side == 0 else str(rest[0].key)
        out.append((_join(head, rest[1:]), leaf))
    return out


def static_arguments(
    fn: Callable[..., Any], argnums: int | Sequence[int] = (), argnames: str | Sequence[str] = ()
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Static arguments by position and by name, as `jax.jit` reads them: one number or name alone, negative numbers,
    and an argument named by the one and passed as the other.

    Raises:
      TraceError: a name or position that the function does not have.
    """
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    names = [argnames] if isinstance(argnames, str) else list(argnames)
    if not numbers and not names:
        return (), ()
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return tuple(numbers), tuple(names)
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    title = _title(fn)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for number in numbers:
            if not -len(positional) <= number < len(positional):
                raise TraceError(
                    f"static_argnums has {number}, but {title} has {len(positional)} positional arguments",
                    "",
                    [f"one of {', '.join(map(str, range(len(positional))))}"],
                )
        numbers = [n % len(positional) for n in numbers]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in names:
            if name not in by_name:
                near = difflib.get_close_matches(name, by_name, n=2, cutoff=0.3)
                raise TraceError(
                    f"static_argnames has {name!r}, but {title} has no such argument",
                    f"its arguments are {', '.join(by_name)}",
                    [f"did you mean {other!r}?" for other in near],
                )
    more_names = [positional[n] for n in numbers if n < len(positional) and positional[n] in by_name]
    more_numbers = [positional.index(name) for name in names if name in positional]
    return tuple(dict.fromkeys(numbers + more_numbers)), tuple(dict.fromkeys(names + more_names))


def _match_state(
    jaxpr: Any,
    in_paths: list[str],
    in_avals: list[Any],
    out_paths: list[str],
    out_avals: list[Any],
    arguments: list[str],
) -> list[int | None]:
    """Which argument each result looks like: a result subtree with the paths, shapes and dtypes of a whole argument.

    Tried for the result itself, its elements and theirs, in order, each argument at most once.
    A bare array is never taken for state: a function of x often returns something of x's shape, and a
    replaced argument is donated.
    """
    replaces: list[int | None] = [None] * len(out_paths)
    groups: dict[str, list[int]] = {}
    for i, path in enumerate(in_paths):
        groups.setdefault(path.split("/")[0], []).append(i)

    def signature(paths: list[str], avals: list[Any], prefix: str) -> list[tuple[str, Any, Any]]:
        return [(p[len(prefix) :].lstrip("/"), a.shape, a.dtype) for p, a in zip(paths, avals, strict=True)]

    candidates: list[tuple[str, list[int]]] = []
    for depth in (0, 1, 2):
        heads: dict[str, list[int]] = {}
        for o, path in enumerate(out_paths):
            heads.setdefault("/".join(path.split("/")[:depth]), []).append(o)
        candidates += heads.items()
    free = [name for name in arguments if name in groups]
    for prefix, outs in candidates:
        if any(replaces[o] is not None for o in outs):
            continue
        want = signature([out_paths[o] for o in outs], [out_avals[o] for o in outs], prefix)
        alike = []
        for name in free:
            ins = groups[name]
            if in_paths[ins[0]] == name:
                continue
            if signature([in_paths[i] for i in ins], [in_avals[i] for i in ins], name) == want and any(
                in_avals[i].shape for i in ins
            ):
                alike.append(name)
        if not alike:
            continue
        chosen = next((n for n in alike if len(alike) > 1 and _is_update(jaxpr, outs, groups[n])), alike[0])
        for o, i in zip(outs, groups[chosen], strict=True):
            replaces[o] = i
        free.remove(chosen)
    return replaces


def _is_update(jaxpr: Any, outs: list[int], ins: list[int]) -> bool:
    """Whether results are the next values of arguments: most arrays are elementwise updates of their own arguments.

    The gradient of a tree of parameters looks like new parameters, and a teacher like its student; but the
    caller still needs those.  Counters and keys may be made anew.
    """
    inner = _compat.open_jaxpr(jaxpr)
    arrays = [
        (o, i)
        for o, i in zip(outs, ins, strict=True)
        if inner.invars[i].aval.shape and not _compat.is_extended(inner.invars[i].aval.dtype)
    ]
    others = [o for o, i in arrays if i not in updates(jaxpr, o)]
    # placeholders (adafactor's) come out as constants: they decide nothing; some optimizers keep the last gradient too
    updated, anew = len(arrays) - len(others), sum(any(reaches(jaxpr, [o])) for o in others)
    return updated > 0 and updated >= anew


def _only_updates(jaxpr: Any, matched: list[int | None], paths: list[str]) -> list[int | None]:
    """`matched` without the arguments whose results are no updates of them."""
    arguments: dict[str, list[int]] = {}
    for o, i in enumerate(matched):
        if i is not None:
            arguments.setdefault(paths[i].split("/")[0], []).append(o)
    kept: set[int] = set()
    for outs in arguments.values():
        if _is_update(jaxpr, outs, [i for o in outs if (i := matched[o]) is not None]):
            kept.update(outs)
    return [i if o in kept else None for o, i in enumerate(matched)]


def _roles(jaxpr: Any, paths: list[str], avals: list[Any], matched: list[int | None]) -> list[Role]:
    """`matched`: for each result the argument that it looks like (a new state, or a gradient)."""
    state = {i for i in matched if i is not None}
    aux = [o for o, i in enumerate(matched) if i is None]
    influences = reaches(jaxpr, aux) if state and aux else None
    roles = []
    for i, (path, aval) in enumerate(zip(paths, avals, strict=True)):
        if _compat.is_extended(aval.dtype):
            roles.append(Role.KEY)
        elif i not in state:
            parts = path.split("/")
            looks_like_state = not state and (
                "params" in parts or parts[0] in ("params", "variables", "state", "model")
            )
            roles.append(Role.PARAMETER if looks_like_state else Role.BATCH)
        elif not aval.shape:
            roles.append(Role.COUNTER)
        elif influences is not None:
            roles.append(Role.PARAMETER if influences[i] else Role.OPTIMIZER)
        else:
            optimizer = re.search(r"(^|/)(opt_state|optimizer|opt|mu|nu|trace)(/|$)", path)
            roles.append(Role.OPTIMIZER if optimizer else Role.PARAMETER)
    return roles


class _Watched:
    """A function that refuses to lose what it changes in its arguments: objects (nnx modules) changed in place.

    JAX gives the function copies of its arguments, so that only what is returned lasts.
    """

    def __init__(self, fn: Callable[..., Any], names: frozenset[str]):
        functools.update_wrapper(self, fn)
        self.fn, self.names = fn, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(_argument_names(self.fn, len(args)), args, strict=True)) | kwargs
        objects = {
            name: x
            for name, x in arguments.items()
            if name in self.names and not isinstance(x, (dict, list, tuple)) and not jax.tree_util.all_leaves([x])
        }
        before = {name: jax.tree_util.tree_leaves(x) for name, x in objects.items()}
        out = self.fn(*args, **kwargs)
        returned = {id(x) for x in jax.tree_util.tree_leaves(out)}
        for name, x in objects.items():
            for (path, now), then in zip(jax.tree_util.tree_leaves_with_path(x), before[name], strict=False):
                if now is not then and not isinstance(then, jax.ShapeDtypeStruct) and id(now) not in returned:
                    raise TraceError(
                        f"{_title(self.fn)} changes {_join(name, path)!r} in place and does not return it",
                        "a step gets copies of its arguments: only what it returns lasts",
                        [f"return {name} too, and go on with what the step returns"],
                    )
        return out


def trace(
    fn: Callable[..., Any],
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Program:
    """Traces `fn` on arrays or `ShapeDtypeStruct`s; nothing is computed.

    Raises:
      TraceError: `fn` fails under tracing (the original error is its cause).
    """
    name = _title(fn)
    static_argnums, static_argnames = static_arguments(fn, static_argnums, static_argnames)
    static = set(static_argnums)
    dynamic_args = tuple(a for i, a in enumerate(args) if i not in static)
    dynamic_kwargs = {k: v for k, v in kwargs.items() if k not in static_argnames}
    names = [n for i, n in enumerate(_argument_names(fn, len(args))) if i not in static]
    flat, in_tree = jax.tree_util.tree_flatten((dynamic_args, dynamic_kwargs))
    paths = [path for path, _ in _flat_paths(dynamic_args, dynamic_kwargs, names)]
    for path, leaf in zip(paths, flat, strict=True):
        if not isinstance(
            leaf, (jax.ShapeDtypeStruct, bool, int, float, complex, np.generic)
        ) and not _compat.has_shape(leaf):
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
    abstract_flat = [abstract(x) for x in flat]
    a_args, a_kwargs = jax.tree_util.tree_unflatten(in_tree, abstract_flat)
    full_args = list(a_args)
    for i in sorted(static):
        if i < len(args):
            full_args.insert(i, args[i])
    static_kwargs = {k: v for k, v in kwargs.items() if k in static_argnames}
    watched = _Watched(fn, frozenset(names) | frozenset(dynamic_kwargs))
    try:
        traced = jax.jit(watched, static_argnums=static_argnums, static_argnames=static_argnames).trace(
            *full_args, **a_kwargs, **static_kwargs
        )
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
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    out_paths = [_join("", path) for path, _ in out_leaves]
    jaxpr = traced.jaxpr
    in_avals = [v.aval for v in _compat.open_jaxpr(jaxpr).invars]
    out_avals = [v.aval for v in _compat.open_jaxpr(jaxpr).outvars]
    matched = _match_state(jaxpr, paths, in_avals, out_paths, out_avals, names + list(dynamic_kwargs))
    replaces = _only_updates(jaxpr, matched, paths)
    roles = _roles(jaxpr, paths, in_avals, matched)

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
        in_tree,
        out_tree,
        fingerprint(jaxpr, paths, out_paths),
        tuple(declared_of((dynamic_args, dynamic_kwargs))),
    )


def fingerprint(jaxpr: Any, in_paths: Sequence[str], out_paths: Sequence[str]) -> str:
    """Digest of the program that is equal in another process (object addresses are blanked out)."""
    text = re.sub(r"0x[0-9a-f]+", "0x", str(jaxpr))
    digest = hashlib.sha256()
    for part in (text, *in_paths, "->", *out_paths):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]
