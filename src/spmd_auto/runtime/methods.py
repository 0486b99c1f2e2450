"""Decorated methods: what `instance.step` is, and how long it lives."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from spmd_auto.errors import LoweringError


class OfInstances:
    """One thing for each object, as long as the object lives. By identity, whatever the object's own idea of equality:
    what a method computes may hang on all that the object holds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, instance: Any) -> Any:
        """The thing of an object, or None."""
        found = self._known.get(id(instance))
        return found[1] if found is not None and found[0]() is instance else None

    def put(self, instance: Any, thing: Any) -> None:
        key = id(instance)
        self._known[key] = _reference(instance, lambda _: self._known.pop(key, None)), thing


class Method:
    """A method as a function that does not keep its object alive: whoever calls it has the object.

    Else the step kept for an object would keep the object, and neither would ever go.
    """

    def __init__(self, fn: Callable[..., Any], instance: Any):
        functools.update_wrapper(self, fn)
        self._fn, self._instance = fn, _reference(instance)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(types.MethodType(fn, instance))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(self._instance(), *args, **kwargs)


class Bound:
    """`instance.step`. Equal for the same step and object, as Python's own bound methods are.

    Args:
      step: the decorated function.
      instance: kept alive.
      front: arguments before those of a call: a module is the first argument of its methods; another object is none,
        its own step closes over it.
    """

    def __init__(self, step: Any, instance: Any, front: tuple[Any, ...] = ()):
        functools.update_wrapper(self, step)
        self.__name__: str = step.__name__
        self.step, self._instance, self._front = step, instance, front

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and self.step is other.step and self._instance is other._instance

    def __hash__(self) -> int:
        return hash((id(self.step), id(self._instance)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*self._front, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.plan(*self._front, *args, **kwargs)

    def explain(self, *args: Any, path: str | None = None, **kwargs: Any) -> str:
        if not args and not kwargs:
            return self.step.explain(path=path)
        return self.step.explain(*self._front, *args, path=path, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.lower(*self._front, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.compile(*self._front, *args, **kwargs)

    def init(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._front:
            kind = type(self._instance).__name__
            raise LoweringError(
                f"{self.__name__}.init of a {kind} that is there already",
                "the module is the step's first argument, and so what init creates",
                [f"{kind}.{self.__name__}.init(create, ..., batch=...) where `create` makes the {kind}"],
            )
        return self.step.init(create, *args, **kwargs)


def _reference(instance: Any, gone: Callable[[Any], Any] | None = None) -> Callable[[], Any]:
    try:
        return weakref.ref(instance, gone)
    except TypeError:  # it can't tell that it goes (`__slots__`): kept
        return lambda: instance
