"""Wrong rules on purpose, and whether the oracle tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from spmd_auto.errors import RuleError
from spmd_auto.propagate.factors import Factor, Kind, Rule
from spmd_auto.propagate.rules.registry import check_rule

from .applications import Application
from .oracle import disagreement, make_mesh, splittable

_COMBINES = ("add", "max", "min", "mul", "and", "or")


@dataclasses.dataclass(frozen=True)
class Mutation:
    kind: str
    what: str
    rule: Rule


def _with(rule: Rule, index: int, factor: Factor) -> Rule:
    return (*rule[:index], factor, *rule[index + 1 :])


def mutations_of(app: Application, rule: Rule) -> Iterator[Mutation]:
    """All mutations of a rule, one change each, in a fixed order."""
    shapes = {"operands": app.operand_shapes, "results": app.result_shapes}
    for index, factor in enumerate(rule):
        for kind in (Kind.PASS, Kind.REDUCE, Kind.REPLICATE):
            if kind is not factor.kind:
                changed = dataclasses.replace(factor, kind=kind)
                yield Mutation("kind", f"{index}: {factor.kind.name} -> {kind.name}", _with(rule, index, changed))
        if factor.kind is Kind.REDUCE:
            for combine in _COMBINES:
                if combine != factor.combine:
                    changed = dataclasses.replace(factor, combine=combine)
                    yield Mutation("combine", f"{index}: {factor.combine} -> {combine}", _with(rule, index, changed))
        for side, values in shapes.items():
            places = getattr(factor, side)
            for place in places:
                rest = tuple(p for p in places if p != place)
                changed = dataclasses.replace(factor, **{side: rest})
                yield Mutation("drop", f"{index}: not on {side} {place}", _with(rule, index, changed))
                for dim in range(len(values[place[0]])):
                    if dim != place[1]:
                        yield Mutation(
                            "move", f"{index}: {side} {place} -> dimension {dim}", _moved(rule, index, side, place, dim)
                        )
        for other in range(index + 1, len(rule)):
            if rule[other].size == factor.size:
                united = dataclasses.replace(
                    factor,
                    operands=factor.operands + rule[other].operands,
                    results=factor.results + rule[other].results,
                )
                yield Mutation("unite", f"{index} and {other}", _with(rule[:other] + rule[other + 1 :], index, united))


def _moved(rule: Rule, index: int, side: str, place: tuple[int, int], dim: int) -> Rule:
    """A factor moved to another dimension of the same value, in exchange with the factor that stood there."""
    there = (place[0], dim)
    swap = {place: there, there: place}
    out = []
    for at, factor in enumerate(rule):
        mine = at == index
        places = tuple(swap.get(p, p) if mine or p == there else p for p in getattr(factor, side))
        out.append(dataclasses.replace(factor, **{side: places}))
    return tuple(out)


def meaning(app: Application, rule: Rule) -> frozenset[tuple[object, ...]]:
    """What a rule says, without what makes no difference.

    Factors that can't be split say the same as no factor; on truth values "and", "min" and "mul" are one, and so
    are "or", "max" and "add".
    """
    truth = all(v.aval.dtype == bool for v in app.eqn.outvars)
    same = {"min": "and", "mul": "and", "max": "or", "add": "or"} if truth else {}
    said = []
    for factor in rule:
        if factor.splittable and (factor.operands or factor.results):
            combine = same.get(factor.combine, factor.combine) if factor.kind is Kind.REDUCE else ""
            places = frozenset(factor.operands), frozenset(factor.results)
            said.append((factor.size, *places, factor.kind, combine))
    return frozenset(said)


def less_free(rule: Rule, expected: Rule) -> bool:
    """Whether a rule can split less than expected: a place, or two places apart from each other."""

    def places(rule: Rule) -> set[tuple[object, ...]]:
        return {
            (side, place, factor.size)
            for factor in rule
            if factor.splittable
            for side in ("operands", "results")
            for place in getattr(factor, side)
        }

    fewer = sum(f.splittable for f in rule) < sum(f.splittable for f in expected)
    return fewer or not places(expected) <= places(rule)


def caught_by(app: Application, expected: Rule, mutant: Rule) -> str | None:
    """Who notices a wrong rule: "numbers", "form" (it can't be stated or executed), "freedom", or None."""
    # The oracle comes first, also for rules that the registry refuses: it shall judge by itself where it can.
    try:
        if disagreement(app, mutant, [{index: ("a",)} for index in splittable(mutant, 2)], make_mesh((2,))):
            return "numbers"
    except Exception:  # noqa: BLE001 - whatever JAX says of an operation that can't be
        return "form"
    try:
        check_rule(app.name, mutant, app.operand_shapes, app.result_shapes)
    except RuleError:
        return "form"
    return "freedom" if less_free(mutant, expected) else None
