"""Reductions over dimensions, running reductions, and orderings."""

from __future__ import annotations

from spmd_auto.propagate.factors import Kind, Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleFunction, RuleLike, of_names, pass_except


def reduces(combine: str | None) -> RuleFunction:
    """A reduction over the parameter `axes`; `combine` is None where partial results can't be combined."""

    def rule(params: Params, operands: Shapes, results: Shapes) -> Rule:
        gone = params["axes"] if "axes" in params else params["dimensions"]
        arrays = [k for k, shape in enumerate(operands) if len(shape) == len(operands[0])]
        build = RuleBuilder(operands, results)
        kept = 0
        for d in range(len(operands[0])):
            if d not in gone:
                build.add([(k, d) for k in arrays], [(k, kept) for k in range(len(results))])
                kept += 1
            elif combine is None:
                build.add([(k, d) for k in arrays], kind=Kind.REPLICATE)
            else:
                build.add([(k, d) for k in arrays], kind=Kind.REDUCE, combine=combine)
        return build.build()

    return rule


RULES: dict[str, RuleLike] = {
    "reduce_sum": reduces("add"),
    "reduce_max": reduces("max"),
    "reduce_min": reduces("min"),
    "reduce_prod": reduces("mul"),
    "reduce_and": reduces("and"),
    "reduce_or": reduces("or"),
    # No collective combines these: an exclusive or, a pair (value, place), a user's own function.
    **of_names(reduces(None), "reduce_xor argmax argmin reduce"),
    **of_names(pass_except("axis"), "cumsum cumprod cummax cummin cumlogsumexp top_k"),
    "sort": pass_except("dimension"),
    "approx_top_k": pass_except("reduction_dimension"),
}
