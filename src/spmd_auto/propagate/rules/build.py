"""Helpers that rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from spmd_auto.errors import RuleError
from spmd_auto.propagate.factors import Factor, Kind, Rule, Shapes

Params: TypeAlias = Mapping[str, Any]
RuleFunction: TypeAlias = Callable[[Params, Shapes, Shapes], "Rule | str"]
RuleLike: TypeAlias = "str | RuleFunction"
Place: TypeAlias = tuple[int, int]  # (position of an operand or result, dimension)


class RuleBuilder:
    """Collects the factors of one operation, in the order in which they are added.

    A dimension of size 1 (or 0) takes no factor: nothing can be split there, and broadcasting makes it
    stand beside dimensions of any size.
    """

    def __init__(self, operands: Shapes, results: Shapes) -> None:
        self.operands = operands
        self.results = results
        self._factors: list[Factor] = []

    def add(
        self,
        operands: Iterable[Place] = (),
        results: Iterable[Place] = (),
        *,
        kind: Kind = Kind.PASS,
        combine: str = "add",
        size: int | None = None,
        halos: Mapping[Place, tuple[int, int]] | None = None,
    ) -> None:
        """Adds a factor.  Without `size` it covers whole dimensions, which must agree.

        Args:
          halos: elements before and after its own piece that a device needs, by operand place.
        """
        operands, results = tuple(sorted(operands)), tuple(sorted(results))
        if size is None:
            sizes = {self.operands[k][d] for k, d in operands} | {self.results[k][d] for k, d in results}
            if len(sizes) != 1:
                raise RuleError(f"one factor on dimensions of sizes {sorted(sizes)}")
            size = sizes.pop()
        if size > 1:
            edges = tuple((halos or {}).get(place, (0, 0)) for place in operands)
            self._factors.append(Factor(size, operands, results, kind, combine, edges if any(map(any, edges)) else ()))

    def needed_whole(self, *operands: Place) -> None:
        """Says of operand dimensions that have no counterpart in the results that they can't be split."""
        for place in operands:
            self.add([place], kind=Kind.REPLICATE)

    def build(self) -> Rule:
        return tuple(self._factors)


def pass_except(*keys: str) -> RuleFunction:
    """A rule: dimension k of every operand and result belong together, but those named by the parameters `keys`.

    Scalars beside arrays (fill values, bounds, start indices) are skipped.  A named dimension that has one size
    everywhere is one factor that needs replication; otherwise its places have no factor at all.
    """

    def rule(params: Params, operands: Shapes, results: Shapes) -> Rule:
        rank = len(results[0])
        named: set[int] = set()
        for key in keys:
            value = params[key]
            named.update(d % rank for d in (value if isinstance(value, (tuple, list)) else (value,)))
        build = RuleBuilder(operands, results)
        for d in range(rank):
            ops = [(k, d) for k, shape in enumerate(operands) if len(shape) == rank]
            res = [(k, d) for k, shape in enumerate(results) if len(shape) == rank]
            if d not in named:
                build.add(ops, res)
            elif len({operands[k][d] for k, _ in ops} | {results[k][d] for k, _ in res}) == 1:
                build.add(ops, res, kind=Kind.REPLICATE)
        return build.build()

    return rule


def leading(count: Callable[[Params, Shapes], int]) -> RuleFunction:
    """A rule: the first `count` dimensions are a batch of independent problems; the others are needed whole."""

    def rule(params: Params, operands: Shapes, results: Shapes) -> Rule:
        build = RuleBuilder(operands, results)
        for d in range(count(params, operands)):
            build.add([(k, d) for k in range(len(operands))], [(k, d) for k in range(len(results))])
        return build.build()

    return rule


def of_names(rule: RuleLike, names: str) -> dict[str, RuleLike]:
    """The same rule for several primitives."""
    return dict.fromkeys(names.split(), rule)
