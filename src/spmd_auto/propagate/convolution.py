"""How much a convolution computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def convolution_flops(
    params: Mapping[str, Any], lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]
) -> int:
    """FLOP of a `conv_general_dilated` of these shapes, 2 per multiply-add of elements that are there.

    Zeros of padding and of dilation don't count: the gradient of a strided convolution is mostly such zeros, and no
    compiler multiplies them.
    """
    numbers = params["dimension_numbers"]
    flops = 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]]
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for d, (i, j, k) in enumerate(dims):
        flops *= meetings(
            size=lhs[i],
            kernel=rhs[j],
            out=out[k],
            stride=params["window_strides"][d],
            pad=params["padding"][d][0],
            dilation=params["lhs_dilation"][d],
            kernel_dilation=params["rhs_dilation"][d],
        )
    return flops


def meetings(*, size: int, kernel: int, out: int, stride: int, pad: int, dilation: int, kernel_dilation: int) -> int:
    """Pairs (output position, kernel position) of one dimension that fall on an element of the input."""
    at = (np.arange(out) * stride - pad)[:, None] + np.arange(kernel) * kernel_dilation
    return int(((at >= 0) & (at % dilation == 0) & (at < (size - 1) * dilation + 1)).sum())
