"""Programs as data: arguments and calls of small recipes, drawn at random and written down so that they can be cut."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

SIZES = (8, 8, 16, 16, 24, 4, 2, 6, 3, 5, 1)  # of a dimension; most divide by 8 or by 4
MOST = 8192  # elements of a value


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An array that the program is given: floats of kind "f", or indices of kind "i" into something of size `high`."""

    shape: tuple[int, ...]
    kind: str = "f"
    high: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A recipe applied to values (by number: every argument makes one value, every call `results` ones)."""

    recipe: str
    operands: tuple[int, ...]
    params: tuple[tuple[str, Any], ...] = ()
    results: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """`apply(*arrays, **params)`, and how to propose operands and parameters for it; None: nothing fits.

    `smooth`: whether it may stand in a program that is differentiated.
    """

    apply: Callable[..., Any]
    propose: Callable[[Draft], tuple[tuple[int, ...], Mapping[str, Any]] | None]
    smooth: bool = True


class Draft:
    """A program in the making.

    Attributes:
      nodes: arguments and calls in the order of evaluation.
      avals: shape and kind ("f", "i") of every value.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.nodes: list[Argument | Call] = []
        self.avals: list[tuple[tuple[int, ...], str]] = []

    def argument(self, shape: tuple[int, ...], kind: str = "f", high: int = 0) -> int:
        self.nodes.append(Argument(tuple(shape), kind, high))
        self.avals.append((tuple(shape), kind))
        return len(self.avals) - 1

    def shape(self, value: int) -> tuple[int, ...]:
        return self.avals[value][0]

    def size(self) -> int:
        return self.rng.choice(SIZES)

    def dims(self, low: int, high: int) -> tuple[int, ...]:
        """A new shape; small enough."""
        while True:
            shape = tuple(self.size() for _ in range(self.rng.randint(low, high)))
            if elements(shape) <= MOST // 4:
                return shape

    def pick(
        self, low: int = 1, high: int = 5, kind: str = "f", where: Callable[[tuple[int, ...]], bool] | None = None
    ) -> int:
        """A value of rank `low` to `high`; mostly one of the last made, sometimes a new argument."""
        able = [
            v
            for v, (shape, k) in enumerate(self.avals)
            if k == kind and low <= len(shape) <= high and (where is None or where(shape))
        ]
        if able and self.rng.random() < 0.85:
            return able[-1] if self.rng.random() < 0.4 else self.rng.choice(able)
        for _ in range(20):
            shape = self.dims(low, min(high, max(low, 4)))
            if where is None or where(shape):
                return self.argument(shape, kind, 8)
        return self.argument(shape, kind, 8)

    def like(self, shape: tuple[int, ...], kind: str = "f") -> int:
        """A value of exactly this shape: one there, or a new argument."""
        able = [v for v, aval in enumerate(self.avals) if aval == (shape, kind)]
        return self.rng.choice(able) if able and self.rng.random() < 0.6 else self.argument(shape, kind, 8)

    def indices(self, shape: tuple[int, ...], high: int) -> int:
        """Integers, most of them from 0 to `high`, some outside."""
        able = [v for v, aval in enumerate(self.avals) if aval == (shape, "i")]
        return self.rng.choice(able) if able and self.rng.random() < 0.3 else self.argument(shape, "i", high)

    def dim(self, value: int) -> int:
        return self.rng.randrange(len(self.shape(value)))

    def chance(self, p: float = 0.5) -> bool:
        return self.rng.random() < p

    def add(self, name: str, recipe: Recipe) -> bool:
        """Applies a recipe to values drawn at random; False if nothing fitted."""
        nodes, avals = len(self.nodes), len(self.avals)
        proposed = recipe.propose(self)
        if proposed is not None:
            operands, params = proposed
            try:
                outs = jax.eval_shape(
                    lambda *xs: recipe.apply(*xs, **params), *(abstract(self.avals[v]) for v in operands)
                )
            except (TypeError, ValueError, IndexError, NotImplementedError):
                outs = None
            if outs is not None:
                outs = outs if isinstance(outs, tuple) else (outs,)
                if all(0 < elements(o.shape) <= MOST for o in outs):
                    self.nodes.append(Call(name, operands, tuple(params.items()), len(outs)))
                    self.avals += [(o.shape, "f" if jnp.issubdtype(o.dtype, jnp.floating) else "i") for o in outs]
                    return True
        del self.nodes[nodes:], self.avals[avals:]
        return False


def abstract(aval: tuple[tuple[int, ...], str]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval[0], jnp.float64 if aval[1] == "f" else jnp.int32)


def elements(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
