"""Operations that look through a window: convolutions and pooling."""

from __future__ import annotations

import dataclasses

from spmd_auto.propagate.factors import Kind, Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike, of_names


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """One dimension of a windowed operation: sizes of input, window and output, and how the window moves."""

    input: int
    window: int
    output: int
    stride: int
    padding: tuple[int, int]
    input_dilation: int
    window_dilation: int

    @property
    def apart(self) -> bool:
        """Windows do not overlap and cover the input (pooling, patches, skipping): block by block to one output."""
        plain = self.input_dilation == self.window_dilation == 1 and self.padding == (0, 0)
        return plain and self.window <= self.stride and self.input == self.output * self.stride

    @property
    def spreads(self) -> bool:
        """Each input makes a block of outputs of its own: the gradient of `apart` for the input."""
        plain = self.stride == self.window_dilation == 1 and self.output == self.input * self.input_dilation
        return plain and self.window - 1 <= self.padding[0] < self.input_dilation

    @property
    def covers(self) -> bool:
        """Each element of the window meets a block of the input of its own: the gradient of `apart` for the window."""
        plain = self.stride == self.input_dilation == 1 and self.padding[0] == 0
        return plain and self.output <= self.window_dilation and self.input == self.window * self.window_dilation


def _spatial(build: RuleBuilder, w: _Window, operand: tuple[int, int], result: tuple[int, int]) -> None:
    """The factor of a windowed dimension.

    Where each piece of the output needs one piece of the input, it passes; the smaller of the two is the major part
    of the larger.  Otherwise pieces need their neighbours' edges: a halo where both have the same size, else whole.
    """
    if w.apart:
        build.add([operand], [result], size=w.output)
    elif w.spreads:
        build.add([operand], [result], size=w.input)
    elif w.input == w.output:
        build.add([operand], [result], kind=Kind.HALO)
    else:
        build.needed_whole(operand)


def _windows(params: Params, sizes: list[tuple[int, int, int]]) -> list[_Window]:
    ones = (1,) * len(sizes)
    strides = params.get("window_strides") or ones
    padding = params.get("padding") or ((0, 0),) * len(sizes)
    base = params.get("base_dilation") or params.get("lhs_dilation") or ones
    window = params.get("window_dilation") or params.get("rhs_dilation") or ones
    return [
        _Window(*sizes[d], strides[d], (int(padding[d][0]), int(padding[d][1])), base[d], window[d])
        for d in range(len(sizes))
    ]


def reduce_window(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Pooling over arrays of one shape; further operands are scalars (initial values)."""
    build = RuleBuilder(operands, results)
    sizes = list(zip(operands[0], params["window_dimensions"], results[0], strict=True))
    arrays = [k for k, shape in enumerate(operands) if len(shape) == len(results[0])]
    for d, w in enumerate(_windows(params, sizes)):
        if len(arrays) == 1 and len(results) == 1:
            _spatial(build, w, (0, d), (0, d))
        elif w.window == w.stride == 1 and w.apart:
            build.add([(k, d) for k in arrays], [(k, d) for k in range(len(results))])
    return build.build()


def select_and_scatter_add(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """The gradient of max pooling: source (one value per window), operand; the result has the operand's shape."""
    build = RuleBuilder(operands, results)
    sizes = list(zip(operands[1], params["window_dimensions"], operands[0], strict=True))
    for d, w in enumerate(_windows(params, sizes)):
        if w.apart:
            build.add([(0, d), (1, d)], [(0, d)], size=w.output)
        else:
            build.needed_whole((0, d))
            build.add([(1, d)], [(0, d)], kind=Kind.HALO)
    return build.build()


def conv_general_dilated(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Batch and output features pass, input features are summed; groups pass as the major part of the features."""
    numbers = params["dimension_numbers"]
    (lhs_batch, lhs_feature, *lhs_spatial) = numbers.lhs_spec
    (rhs_out, rhs_in, *rhs_spatial) = numbers.rhs_spec
    (out_batch, out_feature, *out_spatial) = numbers.out_spec
    lhs, rhs, out = operands[0], operands[1], results[0]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    build = RuleBuilder(operands, results)
    if batch_groups > 1:
        build.add([(0, lhs_batch), (1, rhs_out)], [(0, out_feature)], size=batch_groups)
    else:
        build.add([(0, lhs_batch)], [(0, out_batch)])
    if groups > 1:
        build.add([(0, lhs_feature), (1, rhs_out)], [(0, out_feature)], size=groups)
    elif batch_groups == 1:
        build.add([(1, rhs_out)], [(0, out_feature)])
    if groups == 1:
        build.add([(0, lhs_feature), (1, rhs_in)], kind=Kind.REDUCE)
    sizes = [(lhs[i], rhs[j], out[k]) for i, j, k in zip(lhs_spatial, rhs_spatial, out_spatial, strict=True)]
    for d, w in enumerate(_windows(params, sizes)):
        i, j, k = (0, lhs_spatial[d]), (1, rhs_spatial[d]), (0, out_spatial[d])
        if w.covers and w.window > 1:
            build.add([i, j], kind=Kind.REDUCE, size=w.window)
        else:
            _spatial(build, w, i, k)
            build.needed_whole(j)
    return build.build()


RULES: dict[str, RuleLike] = {
    **of_names(reduce_window, "reduce_window reduce_window_max reduce_window_min reduce_window_sum"),
    "select_and_scatter_add": select_and_scatter_add,
    "conv_general_dilated": conv_general_dilated,
}
