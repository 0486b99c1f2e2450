"""FLOP of convolutions, counted by hand: one multiply-add per output feature, input feature and meeting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmd_auto.propagate.convolution import convolution_flops

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
