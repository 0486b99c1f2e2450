"""Operations that look through a window: convolutions and pooling."""

from __future__ import annotations

import dataclasses
import math

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
    def span(self) -> int:
        """Elements that a window covers, gaps of the dilation included."""
        return (self.window - 1) * self.window_dilation + 1

    def along_output(self) -> tuple[int, int, int] | None:
        """(pieces, elements before, elements after): each piece of the output needs one of the input and its edges.

        Output piece [o, o + m) looks at the dilated input from o * stride - padding to (o + m - 1) * stride - padding
        + span - 1.  Its own piece of the input is the same share of it, so the two must be in proportion.  None if
        they are not.  Pooling, patches and skipping need no edges.
        """
        if self.input * self.input_dilation != self.output * self.stride:
            return None
        return math.gcd(self.input, self.output), *self._edges(self.span - self.stride - self.padding[0])

    def along_window(self) -> tuple[int, int, int] | None:
        """(pieces, elements of the input before, and after): each piece of the window meets one of the input.

        The gradient for the kernel: there the window is as large as the image, and its pieces are summed.  Window
        piece [w, w + m) meets the dilated input from w * window_dilation - padding to
        (w + m - 1) * window_dilation + (output - 1) * stride - padding.
        """
        if self.input * self.input_dilation != self.window * self.window_dilation:
            return None
        after = (self.output - 1) * self.stride + 1 - self.window_dilation - self.padding[0]
        return math.gcd(self.input, self.window), *self._edges(after)

    def _edges(self, after: int) -> tuple[int, int]:
        """Elements of the input among `padding` places of the dilated input before a piece, and `after` behind it."""
        n = self.input_dilation
        return max(0, self.padding[0]) // n, -(-max(0, after) // n)


def _spatial(build: RuleBuilder, w: _Window, operand: tuple[int, int], result: tuple[int, int]) -> None:
    """The factor of a windowed dimension: it passes, with edges of the neighbours if windows overlap, or is whole."""
    found = w.along_output()
    if found is None:
        build.needed_whole(operand)
        return
    size, before, after = found
    kind = Kind.HALO if before or after else Kind.PASS
    build.add([operand], [result], kind=kind, size=size, halos={operand: (before, after)})


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
        elif w.window == 1 and w.along_output() == (w.output, 0, 0) and w.input == w.output:
            build.add([(k, d) for k in arrays], [(k, d) for k in range(len(results))])
    return build.build()


def select_and_scatter_add(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """The gradient of max pooling: source (one value per window), operand; the result has the operand's shape."""
    build = RuleBuilder(operands, results)
    sizes = list(zip(operands[1], params["window_dimensions"], operands[0], strict=True))
    for d, w in enumerate(_windows(params, sizes)):
        found = w.along_output()
        if found is None:
            build.needed_whole((0, d), (1, d))
            continue
        # windows that begin before the piece and those that end after it reach into it; they look further still
        early, late = -(-found[2] // w.stride), -(-found[1] // w.stride)
        halos = {(0, d): (early, late), (1, d): (early * w.stride + found[1], late * w.stride + found[2])}
        if not (early or late):
            halos = {}
        kind = Kind.HALO if halos else Kind.PASS
        build.add([(0, d), (1, d)], [(0, d)], kind=kind, size=w.output, halos=halos)
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
        meets = w.along_window()
        if meets is not None and w.along_output() is None and w.window > 1:
            build.add([i, j], kind=Kind.REDUCE, size=meets[0], halos={i: meets[1:]})
        else:
            _spatial(build, w, i, k)
            build.needed_whole(j)
    return build.build()


RULES: dict[str, RuleLike] = {
    **of_names(reduce_window, "reduce_window reduce_window_max reduce_window_min reduce_window_sum"),
    "select_and_scatter_add": select_and_scatter_add,
    "conv_general_dilated": conv_general_dilated,
}
