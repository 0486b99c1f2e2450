"""A function that refuses to lose what it changes in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from spmd_auto.errors import TraceError
from spmd_auto.trace.calls import argument_names, join, title
from spmd_auto.trace.objects import is_object


class Watched:
    """A function that refuses to lose what it changes in its arguments: pytrees of the user's own classes, changed in
    place. The function gets copies of its arguments, so that only what is returned lasts.
    """

    def __init__(self, fn: Callable[..., Any], names: frozenset[str]):
        functools.update_wrapper(self, fn)
        self.fn, self.names = fn, names

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(argument_names(self.fn, len(args)), args, strict=True)) | kwargs
        objects = {
            name: x
            for name, x in arguments.items()
            if name in self.names
            and not is_object(x)
            and not isinstance(x, (dict, list, tuple))
            and not jax.tree_util.all_leaves([x])
        }
        before = {name: jax.tree_util.tree_leaves(x) for name, x in objects.items()}
        out = self.fn(*args, **kwargs)
        returned = {id(x) for x in jax.tree_util.tree_leaves(out)}
        for name, x in objects.items():
            for (path, now), then in zip(jax.tree_util.tree_leaves_with_path(x), before[name], strict=False):
                if now is not then and not isinstance(then, jax.ShapeDtypeStruct) and id(now) not in returned:
                    raise TraceError(
                        f"{title(self.fn)} changes {join(name, path)!r} in place and does not return it",
                        "a step gets copies of its arguments: only what it returns lasts",
                        [f"return {name} too, and go on with what the step returns"],
                    )
        return out
