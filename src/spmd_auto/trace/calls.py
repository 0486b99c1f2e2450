"""A call of a step taken apart: flat arrays, and everything else (structure, settings, objects) as a hashable rest.

What a user passes and gets back may hold objects that are changed in place and settings that are no arrays. The rest of
the house only sees flat arrays: `take_apart` makes them of the arguments, `Results` makes the user's results of flat
arrays and writes back into the user's objects.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from spmd_auto.errors import TraceError
from spmd_auto.trace import objects
from spmd_auto.trace.declared import is_box


def title(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional arguments; `arg0`, ... where the function gives none."""
    try:
        signature = inspect.signature(fn)
        names = [
            p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def join(prefix: str, path: Sequence[Any]) -> str:
    """A tree path behind a prefix, with slashes."""
    tail = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (prefix, tail) if part)


def static_arguments(
    fn: Callable[..., Any], argnums: int | Sequence[int] = (), argnames: str | Sequence[str] = ()
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Static arguments by position and by name, as `jax.jit` reads them: one number or name alone, negative numbers,
    and an argument named by the one and passed as the other.

    Raises:
      TraceError: a name or position that the function does not have, or something that is neither.
    """
    numbers = _several("static_argnums", argnums, int)
    names = _several("static_argnames", argnames, str)
    if not numbers and not names:
        return (), ()
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return tuple(numbers), tuple(names)
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    name_of_fn = title(fn)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for number in numbers:
            if not -len(positional) <= number < len(positional):
                raise TraceError(
                    f"static_argnums has {number}, but {name_of_fn} has {len(positional)} positional arguments",
                    "",
                    [f"one of {', '.join(map(str, range(len(positional))))}"],
                )
        numbers = [n % len(positional) for n in numbers]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in names:
            if name not in by_name:
                near = difflib.get_close_matches(name, by_name, n=2, cutoff=0.3)
                raise TraceError(
                    f"static_argnames has {name!r}, but {name_of_fn} has no such argument",
                    f"its arguments are {', '.join(by_name)}",
                    [f"did you mean {other!r}?" for other in near],
                )
    more_names = [positional[n] for n in numbers if n < len(positional) and positional[n] in by_name]
    more_numbers = [positional.index(name) for name in names if name in positional]
    return tuple(dict.fromkeys(numbers + more_numbers)), tuple(dict.fromkeys(names + more_names))


def _several(option: str, given: Any, kind: type) -> list[Any]:
    out = [given] if isinstance(given, (str, int)) or not isinstance(given, Iterable) else list(given)
    for entry in out:
        if not isinstance(entry, kind):
            example = "1" if kind is int else '"mode"'
            raise TraceError(
                f"{option}={given!r}",
                f"an argument is named there by its {'position' if kind is int else 'name'}, as in jit",
                [f"{option}={example}", f"{option}=({example},) for several"],
            )
    return out


def leaves_with_path(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Leaves with their paths; the only array of a box (a Variable, a Partitioned) has the path of the box."""
    out = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        if not is_box(node):
            out.append((path, node))
            continue
        inner = jax.tree_util.tree_flatten_with_path(node)[0]
        out += [(path if len(inner) == 1 else path + tail, leaf) for tail, leaf in inner]
    return out


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Arguments taken apart.

    Attributes:
      leaves: arrays and numbers, in the order of `tree`.
      tree: of `(args, kwargs)` without static arguments; an nnx object is the `nnx.State` of what no earlier one
        holds, and a setting of an Equinox module is None.
      names: of the positional arguments in `tree`.
      key: all that is no array; calls of equal keys whose leaves have equal types trace alike.
    """

    leaves: list[Any]
    tree: Any
    names: tuple[str, ...]
    key: Hashable
    _tracked: bool
    _outer: _Outer
    _static_args: dict[int, Any]
    _static_kwargs: dict[str, Any]

    @property
    def has_objects(self) -> bool:
        return bool(self._outer.objects)

    @property
    def arrays(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with arrays only."""
        return jax.tree_util.tree_unflatten(self.tree, self.leaves)

    def object_paths(self) -> list[str]:
        """Path of every object."""
        places = jax.tree_util.tree_flatten_with_path(
            jax.tree_util.tree_unflatten(self._outer.tree, list(range(self._outer.tree.num_leaves)))
        )[0]
        return [self._path(path) for path, i in places if i in self._outer.objects]

    def _path(self, path: Sequence[Any]) -> str:
        head = self.names[path[1].idx] if path[0].idx == 0 else str(path[1].key)
        return join(head, path[2:])

    def paths(self) -> list[str]:
        """Path of every leaf, beginning with the argument's name."""
        return [self._path(path) for path, _ in leaves_with_path(self.arrays)]

    def in_objects(self) -> list[bool]:
        """For every leaf whether an nnx object holds it."""
        return self._marks(frozenset(self._outer.objects))

    def held(self) -> list[bool]:
        """For every leaf whether an object or a module holds it: then it is state, whatever becomes of it."""
        return self._marks(self._outer.modules | frozenset(self._outer.objects))

    def _marks(self, places: frozenset[int]) -> list[bool]:
        out: list[bool] = []
        for i, entry in enumerate(self._outer.tree.flatten_up_to(self.arrays)):
            out += [i in places] * len(jax.tree_util.tree_leaves(entry))
        return out

    def put_together(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """(args, kwargs, objects) as the user's function takes them. Tracked objects inside a trace only."""
        outer = self._outer
        entries = outer.tree.flatten_up_to(jax.tree_util.tree_unflatten(self.tree, leaves))
        found: list[Any] = []
        if outer.objects:
            state = objects.joint([entries[place] for place in outer.objects])
            found = objects.merge(outer.structure, state, inside=True, tracked=self._tracked)
        entries = outer.filled(entries, found)
        dynamic, kwargs = jax.tree_util.tree_unflatten(outer.tree, entries)
        args = list(dynamic)
        for i in sorted(self._static_args):
            args.insert(i, self._static_args[i])
        return args, kwargs | self._static_kwargs, found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Outer:
    """A tree in which objects and settings are leaves, and where they are."""

    tree: Any
    objects: tuple[int, ...] = ()
    modules: frozenset[int] = frozenset()
    settings: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    structure: Any = None

    def filled(self, entries: Sequence[Any], found: Sequence[Any]) -> list[Any]:
        """`entries` with objects and settings in their places."""
        out = list(entries)
        for place, x in zip(self.objects, found, strict=True):
            out[place] = x
        for place, x in self.settings.items():
            out[place] = x
        return out


def _outer(tree: Any) -> tuple[_Outer, list[Any]]:
    """A tree's objects and settings found, and its leaves; the objects are not split yet."""
    leaves, outer = jax.tree_util.tree_flatten(tree, is_leaf=objects.is_object)
    marks = objects.module_leaves(tree)
    modules = frozenset(i for i, mark in enumerate(marks) if mark)
    places = tuple(i for i, x in enumerate(leaves) if objects.is_object(x))
    settings = {i: leaves[i] for i in modules if not objects.is_array(leaves[i]) and i not in places}
    return _Outer(outer, places, modules, settings), leaves


def take_apart(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    tracked: bool = True,
) -> Call:
    """Takes arguments apart. With nnx objects among them only within `objects.references`, unless they are not to be
    `tracked` (told again after a trace).

    Raises:
      TraceError: a static argument, or a setting of a module, that can't be hashed.
    """
    static = set(static_argnums)
    static_args = {i: args[i] for i in sorted(static) if i < len(args)}
    static_kwargs = {k: v for k, v in kwargs.items() if k in static_argnames}
    dynamic = (
        tuple(a for i, a in enumerate(args) if i not in static),
        {k: v for k, v in kwargs.items() if k not in static_kwargs},
    )
    names = tuple(n for i, n in enumerate(argument_names(fn, len(args))) if i not in static)
    outer, entries = _outer(dynamic)
    if outer.objects:
        structure, state = objects.split([entries[place] for place in outer.objects], tracked)
        outer = dataclasses.replace(outer, structure=structure)
        for k, place in enumerate(outer.objects):
            entries[place] = state[k] if k in state else objects.empty()
    entries = outer.filled(entries, [entries[place] for place in outer.objects])
    for place in outer.settings:
        entries[place] = None
    leaves, tree = jax.tree_util.tree_flatten(jax.tree_util.tree_unflatten(outer.tree, entries))
    # with their types: 1, 1.0 and True are equal, but trace differently
    values = (*static_args.items(), *static_kwargs.items(), *outer.settings.items())
    key = (tree, outer.tree, outer.structure, tuple((name, type(x), x) for name, x in values))
    try:
        hash(key)
    except TypeError as error:
        raise TraceError(
            f"{title(fn)} has a static argument that can't be hashed: {error}",
            "a step is planned once for each value of its static arguments, and for each setting of a module",
            ["a tuple instead of a list", "a frozen dataclass"],
        ) from error
    return Call(leaves, tree, names, key, tracked, outer, static_args, static_kwargs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Results:
    """How flat result arrays become what the user's function returns, and what it changed in its objects.

    Attributes:
      tree: of the user's results, with objects as `nnx.State` and settings as None.
      paths: of all flat results: the user's, then what changed in objects (under their arguments' names).
      has_objects: whether the arguments held objects.
      updates: for the results behind the user's, the argument leaf that each takes the place of, or None (new).
    """

    tree: Any
    paths: tuple[str, ...]
    updates: tuple[int | None, ...]
    has_objects: bool
    _outer: _Outer
    _held: Any = None  # tree of the state of [argument objects, new objects of the results]
    _kept: tuple[int | None, ...] = ()  # for each leaf of `_held` the argument leaf that it still is

    def put_back(self, flat: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """The user's results of all flat results. Objects of the call's arguments get their new arrays; those that
        nothing changed get the arrays that were passed, so that moved ones are not moved again.

        With objects only outside of the trace, in the `objects.references` in which the call was taken apart.
        """
        if self._held is None:
            entries = self._outer.tree.flatten_up_to(jax.tree_util.tree_unflatten(self.tree, flat))
            return jax.tree_util.tree_unflatten(self._outer.tree, self._outer.filled(entries, ()))
        user = self.tree.num_leaves
        changed = iter(flat[user:])
        leaves = [next(changed) if kept is None else arguments[kept] for kept in self._kept]
        state = jax.tree_util.tree_unflatten(self._held, leaves)
        _, new = objects.merge(self._outer.structure, state, inside=False, tracked=self.has_objects)
        entries = self._outer.tree.flatten_up_to(jax.tree_util.tree_unflatten(self.tree, flat[:user]))
        return jax.tree_util.tree_unflatten(self._outer.tree, self._outer.filled(entries, new))


def take_results_apart(
    out: Any, found: Sequence[Any], inputs: Sequence[Any], call: Call, in_paths: Sequence[str]
) -> tuple[list[Any], Results]:
    """Flat result arrays of a traced function, and how to make its results of them again.

    Args:
      out: what the function returned.
      found: the objects that it was given.
      inputs: the flat arguments that it was given.
    """
    outer, entries = _outer(out)
    for place in (*outer.objects, *outer.settings):
        entries[place] = None
    user_tree = jax.tree_util.tree_unflatten(outer.tree, entries)
    user = leaves_with_path(user_tree)
    paths, leaves = [join("", path) for path, _ in user], [leaf for _, leaf in user]
    tree = jax.tree_util.tree_structure(user_tree)
    if not found and not outer.objects:
        return leaves, Results(tree, tuple(paths), (), False, outer)
    new = [x for x in (jax.tree_util.tree_leaves(out, is_leaf=objects.is_object)) if objects.is_object(x)]
    structure, state = objects.split([list(found), new], tracked=bool(found))
    index = {id(x): i for i, x in enumerate(inputs)}
    updates: list[int | None] = []
    kept: list[int | None] = []
    by_path = {path: i for i, path in enumerate(in_paths)}
    heads = call.object_paths()
    for path, leaf in leaves_with_path(state):
        kept.append(index.get(id(leaf)))
        if kept[-1] is None:
            head = heads[path[1].key] if path[0].key == 0 else f"new{path[1].key}"
            name = join(head, path[2:])
            leaves.append(leaf)
            paths.append(name)
            updates.append(by_path.get(name))
    outer = dataclasses.replace(outer, structure=structure)
    return leaves, Results(
        tree, tuple(paths), tuple(updates), bool(found), outer, jax.tree_util.tree_structure(state), tuple(kept)
    )
