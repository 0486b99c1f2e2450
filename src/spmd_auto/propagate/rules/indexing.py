"""Gather and scatter: reading and writing at places that only the data know.

Where a looked-up dimension of the operand (a vocabulary, a table's rows) is split, each device serves the indices
that fall into its own range and is silent about the others:

- gather: it puts zero where an index is not its own, so the results *add up*.  A whole index is first clamped (mode
  "clip") or found to be outside of the operand ("fill": the fill value then counts once, not on every device).
- scatter: it drops the updates that are not its own, so its piece of the operand *passes*.  Indices and updates are
  whole.

Where the updates of a scatter are split, each device scatters its own into a full-size result, and these combine.
The operand then counts once: all devices but the first start from the neutral element (in a training step it is the
zeros of a gradient anyway).
"""

from __future__ import annotations

from spmd_auto.propagate.factors import Kind, Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleFunction, RuleLike

_OPERAND, _INDICES, _UPDATES = 0, 1, 2


def gather(params: Params, operands: Shapes, results: Shapes) -> Rule:
    numbers, slice_sizes = params["dimension_numbers"], params["slice_sizes"]
    operand, result = operands[_OPERAND], results[0]
    build = RuleBuilder(operands, results)
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    places = [d for d in range(len(result)) if d not in numbers.offset_dims]
    for d, at in enumerate(places):
        build.add([(_INDICES, d)] + ([(_OPERAND, batching[d])] if d in batching else []), [(0, at)])
    absent = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(operand)) if d not in absent]
    for d, at in zip(windows, numbers.offset_dims, strict=True):
        if slice_sizes[d] == operand[d]:
            build.add([(_OPERAND, d)], [(0, at)])
        else:
            build.needed_whole((_OPERAND, d))
    for d in numbers.collapsed_slice_dims:
        if d in numbers.start_index_map:
            build.add([(_OPERAND, d)], kind=Kind.REDUCE)
        else:
            build.needed_whole((_OPERAND, d))
    return build.build()


def scatters(combine: str | None) -> RuleFunction:
    """A scatter; `combine` is None where the last update wins, so that the updates are needed whole."""

    def rule(params: Params, operands: Shapes, results: Shapes) -> Rule:
        numbers = params["dimension_numbers"]
        operand, updates = operands[_OPERAND], operands[_UPDATES]
        build = RuleBuilder(operands, results)
        batching = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        places = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
        for d, at in enumerate(places):
            pieces = [(_INDICES, d), (_UPDATES, at)]
            if d in batching:
                build.add([(_OPERAND, batching[d]), *pieces], [(0, batching[d])])
            elif combine is None:
                build.add(pieces, kind=Kind.REPLICATE)
            else:
                build.add(pieces, kind=Kind.REDUCE, combine=combine)
        absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        windows = [d for d in range(len(operand)) if d not in absent]
        for d, at in zip(windows, numbers.update_window_dims, strict=True):
            if updates[at] == operand[d]:
                build.add([(_OPERAND, d), (_UPDATES, at)], [(0, d)])
            else:
                build.needed_whole((_UPDATES, at))
                build.add([(_OPERAND, d)], [(0, d)], kind=Kind.REPLICATE)
        for d in numbers.inserted_window_dims:
            indexed = d in numbers.scatter_dims_to_operand_dims
            build.add([(_OPERAND, d)], [(0, d)], kind=Kind.PASS if indexed else Kind.REPLICATE)
        return build.build()

    return rule


RULES: dict[str, RuleLike] = {
    "gather": gather,
    "scatter": scatters(None),
    "scatter-add": scatters("add"),
    "scatter-sub": scatters("add"),
    "scatter-mul": scatters("mul"),
    "scatter-min": scatters("min"),
    "scatter-max": scatters("max"),
}
