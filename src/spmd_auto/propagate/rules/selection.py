"""Selection in windows: the general gradient of pooling and its forward-mode derivative.

`select_and_gather_add` takes for each window the tangent of the chosen element, `select_and_scatter` combines each
window's source into the place of the chosen element.  Both compare all elements of a window, so a dimension can be
split where each window reads a block of its own; the number of windows is then the major part of the larger side.
"""

from __future__ import annotations

from spmd_auto.propagate.factors import Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike


def _windows_apart(params: Params, full: tuple[int, ...], windows: tuple[int, ...]) -> list[bool]:
    """Per dimension whether windows neither overlap nor leave a rest: `full` elements are `windows` equal blocks."""
    rank = len(full)
    padding = params.get("padding") or ((0, 0),) * rank
    dilations = [params.get(key) or (1,) * rank for key in ("base_dilation", "window_dilation")]
    return [
        tuple(padding[d]) == (0, 0)
        and all(dilation[d] == 1 for dilation in dilations)
        and params["window_dimensions"][d] <= params["window_strides"][d]
        and full[d] == windows[d] * params["window_strides"][d]
        for d in range(rank)
    ]


def select_and_gather_add(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Tangents and operand of one shape; the result has one element per window."""
    build = RuleBuilder(operands, results)
    for d, apart in enumerate(_windows_apart(params, operands[1], results[0])):
        if apart:
            build.add([(0, d), (1, d)], [(0, d)], size=results[0][d])
        else:
            build.needed_whole((0, d), (1, d))
    return build.build()


def select_and_scatter(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Operand, source (one element per window), initial value; the result has the operand's shape."""
    build = RuleBuilder(operands, results)
    for d, apart in enumerate(_windows_apart(params, operands[0], operands[1])):
        if apart:
            build.add([(0, d), (1, d)], [(0, d)], size=operands[1][d])
        else:
            build.needed_whole((0, d), (1, d))
    return build.build()


RULES: dict[str, RuleLike] = {
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter": select_and_scatter,
}
