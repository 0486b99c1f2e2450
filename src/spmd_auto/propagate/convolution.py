"""How much a convolution computes."""

from __future__ import annotations

import math
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


def edge_share(
    params: Mapping[str, Any], lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...], d: int
) -> float:
    """Multiply-adds of a piece in the middle of dimension `d` of the input, over those of a piece of average size.

    At least 1: only pieces at the two ends meet zeros of padding, and every device runs the program of those between.
    """
    numbers = params["dimension_numbers"]
    k = numbers.lhs_spec[2:].index(d)
    size, dilation = lhs[d], params["lhs_dilation"][k]
    sizes = {
        "kernel": rhs[numbers.rhs_spec[2 + k]],
        "out": out[numbers.out_spec[2 + k]],
        "stride": params["window_strides"][k],
        "dilation": dilation,
        "kernel_dilation": params["rhs_dilation"][k],
    }
    pad = params["padding"][k][0]
    reach = sizes["out"] * sizes["stride"] + sizes["kernel"] * sizes["kernel_dilation"] + abs(pad)
    endless = meetings(size=size + 2 * reach, pad=pad - reach * dilation, **sizes)
    return endless / max(1, meetings(size=size, pad=pad, **sizes))


def meetings(*, size: int, kernel: int, out: int, stride: int, pad: int, dilation: int, kernel_dilation: int) -> int:
    """Pairs (output position, kernel position) of one dimension that fall on an element of the input."""
    # output position j meets the input where j * stride = pad - tap + dilation * (0, 1, ... size - 1)
    start = pad - np.arange(kernel, dtype=np.int64) * kernel_dilation
    first, last = np.maximum(0, -(-start // stride)), np.minimum(out - 1, (start + (size - 1) * dilation) // stride)
    common = math.gcd(stride, dilation)
    period = dilation // common
    solution = start // common * pow(stride // common, -1, period) % period if period > 1 else 0 * start
    met = (last - solution) // period - (first - 1 - solution) // period
    return int(met[(start % common == 0) & (last >= first)].sum())
