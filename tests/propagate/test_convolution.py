"""FLOP of convolutions, counted by hand: one multiply-add per output feature, input feature and meeting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_auto.propagate.convolution import convolution_flops, meetings

# name -> (keywords of conv_general_dilated, spatial size, kernel size, meetings of elements by hand)
CASES = {
    "no padding": ({"padding": "VALID"}, 8, 3, 6 * 3),
    "edges of zeros": ({"padding": "SAME"}, 8, 3, 8 * 3 - 2),
    "stride": ({"padding": "VALID", "window_strides": (2,)}, 8, 2, 4 * 2),
    "holes in the input": ({"padding": [(0, 0)], "lhs_dilation": (2,)}, 4, 1, 4),
    "holes in the kernel": ({"padding": "VALID", "rhs_dilation": (2,)}, 8, 3, 4 * 3),
}


@pytest.mark.parametrize("name", CASES)
def test_flops(name):
    options, size, kernel, meetings = CASES[name]
    options = {"window_strides": (1,), "dimension_numbers": ("NHC", "HIO", "NHC")} | options
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, size, 3), (kernel, 3, 5)))
    (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, **options))(lhs, rhs).jaxpr.eqns
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    assert convolution_flops(eqn.params, *shapes) == 2 * (2 * 3 * 5) * meetings


def test_groups_read_their_own_features():
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 6), (3, 2, 9)))
    closed = jax.make_jaxpr(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=3
        )
    )(lhs, rhs)
    (eqn,) = closed.jaxpr.eqns
    assert convolution_flops(eqn.params, (2, 8, 6), (3, 2, 9), (2, 6, 9)) == 2 * (2 * 6 * 9) * 2 * 3


def test_any_strides_and_holes_as_counted_one_by_one():
    rng = np.random.default_rng(0)
    for _ in range(500):
        size, kernel, out, stride, dilation, kernel_dilation = (int(n) for n in rng.integers(1, 9, 6))
        pad = int(rng.integers(-4, 7))
        places = [j * stride - pad + k * kernel_dilation for j in range(out) for k in range(kernel)]
        by_hand = sum(p >= 0 and p % dilation == 0 and p // dilation < size for p in places)
        found = meetings(
            size=size,
            kernel=kernel,
            out=out,
            stride=stride,
            pad=pad,
            dilation=dilation,
            kernel_dilation=kernel_dilation,
        )
        assert found == by_hand, (size, kernel, out, stride, pad, dilation, kernel_dilation)


def test_a_kernel_as_long_as_its_input_needs_no_table_of_all_pairs():
    n = 1_000_000
    assert meetings(size=n, kernel=n, out=n, stride=1, pad=n - 1, dilation=1, kernel_dilation=1) == n * (n + 1) // 2
