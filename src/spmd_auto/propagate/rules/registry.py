"""Which rule belongs to which primitive.

Rules are keyed by the primitive's *name*, so that one table serves every JAX release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd_auto.errors import RuleError
from spmd_auto.propagate.factors import Kind, Rule, Shapes, parse_rule
from spmd_auto.propagate.rules import (
    born,
    contraction,
    elementwise,
    indexing,
    linalg,
    mapped,
    reduction,
    selection,
    shape,
    window,
)
from spmd_auto.propagate.rules.build import Params, RuleLike
from spmd_auto.propagate.rules.opaque import OPAQUE

_TABLE: dict[str, RuleLike] = {}
for _family in (elementwise, shape, contraction, reduction, indexing, born, window, selection, linalg, mapped):
    _TABLE.update(_family.RULES)
_OWN = dict(_TABLE)

# Split forms of these are written out on shards, by what their own rules say.
WRITTEN_OUT = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "fft", "top_k"})
WRITTEN_OUT |= {"gather", "scatter-add", "select_and_scatter_add", "slice", "pad", "split", "concatenate", "rev"}


def register_rule(name: str, rule: RuleLike) -> None:
    """Adds or replaces the rule of a primitive, for all plans made from then on.

    A rule gives each dimension of the operands and results a label.  Equal labels belong together: each device computes
    its piece of the results from its pieces of the operands.  A label under `reduction={..}` stands on operands only;
    the devices' results are then summed up (or `combine=max|min|mul|and|or`).  A dimension marked `-` is needed whole.

        register_rule("my_norm", "(i k),(k)->(i k) need_replication={k}")
        register_rule("my_dot", "(i k),(k j)->(i j) reduction={k}")
        register_rule("my_map", lambda params, operands, results: "(i j)->(i j)" if params["flat"] else "(i -)->(i -)")

    A wrong rule costs time and never correctness: the compiler keeps the program's meaning under any sharding. So the
    operations that this package itself writes out on shards keep their own rules (`WRITTEN_OUT`).

    Args:
      name: the primitive's name, as a jaxpr prints it (`primitive.name`).
      rule: a text in that grammar, or a function `(params, operand_shapes, result_shapes)` of the equation that
        returns such a text or a tuple of factors.

    Raises:
      RuleError: the primitive keeps its own rule.
    """
    if name in WRITTEN_OUT:
        raise RuleError(
            f"register_rule({name!r}): this operation keeps its own rule",
            "its split forms are written out on shards by hand; under another rule they would give wrong numbers",
            ["pins={...} or with_sharding_constraint around the operation", "wrap it in a primitive of your own"],
        )
    _TABLE[name] = rule


def registered_rules() -> dict[str, RuleLike]:
    """The rules that `register_rule` added or put in the place of others."""
    return {name: rule for name, rule in _TABLE.items() if _OWN.get(name) is not rule}


def known_primitives() -> frozenset[str]:
    """Names of all primitives that have a rule."""
    return frozenset(_TABLE)


def opaque_reason(name: str) -> str | None:
    """Why a primitive is kept whole by decision; None if it has a rule or is unknown."""
    return None if name in _TABLE else OPAQUE.get(name)


def rule_for(name: str, params: Params, operands: Sequence[Any], results: Sequence[Any]) -> Rule | None:
    """The factors of one operation, always in the same order; None for an unknown or opaque primitive.

    A dimension on which no factor stands is needed whole (operand) or born whole (result).

    Args:
      name: the primitive's name.
      params: the equation's parameters.
      operands: anything with a `shape` (an aval); what has none counts as a scalar.
      results: likewise.

    Raises:
      RuleError: the rule does not fit the shapes.
    """
    rule = _TABLE.get(name)
    if rule is None:
        return None
    operand_shapes = [tuple(getattr(aval, "shape", ())) for aval in operands]
    result_shapes = [tuple(getattr(aval, "shape", ())) for aval in results]
    made = rule if isinstance(rule, str) else rule(params, operand_shapes, result_shapes)
    factors = parse_rule(made, operand_shapes, result_shapes) if isinstance(made, str) else made
    check_rule(name, factors, operand_shapes, result_shapes)
    return factors


def check_rule(name: str, rule: Rule, operand_shapes: Shapes, result_shapes: Shapes) -> None:
    """Each dimension carries at most one factor, which divides it; each value carries a factor at most once."""
    for side, shapes in (("operands", operand_shapes), ("results", result_shapes)):
        seen: set[tuple[int, int]] = set()
        for factor in rule:
            places = getattr(factor, side)
            if len({position for position, _ in places}) != len(places):
                raise RuleError(f"rule of {name}: {factor} stands on two dimensions of one value")
            if side == "results" and places and factor.kind is Kind.REDUCE:
                raise RuleError(f"rule of {name}: {factor} is reduced and yet in the result")
            for position, dim in places:
                if (position, dim) in seen:
                    raise RuleError(f"rule of {name}: two factors on dimension {dim} of {side}[{position}]")
                seen.add((position, dim))
                if position >= len(shapes) or dim >= len(shapes[position]) or shapes[position][dim] % factor.size:
                    raise RuleError(f"rule of {name}: {factor} does not fit {side} of shapes {list(shapes)}")
