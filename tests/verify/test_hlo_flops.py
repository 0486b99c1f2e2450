"""FLOPs of dots and convolutions against XLA's own count of the unoptimised program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from spmd_auto.verify import read_hlo

CONVOLUTIONS = {
    "same": {"padding": "SAME"},
    "valid": {"padding": "VALID"},
    "strided": {"padding": "SAME", "window_strides": (2, 3)},
    "padded": {"padding": ((3, 1), (0, 2))},
    "kernel dilated": {"padding": "VALID", "rhs_dilation": (2, 1)},
    "input dilated": {"padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 3)},
    "grouped": {"padding": "SAME", "feature_group_count": 2},
    "batch grouped": {"padding": "SAME", "batch_group_count": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, devices):
    options = {"window_strides": (1, 1)} | CONVOLUTIONS[name]
    features = 8 // options.get("feature_group_count", 1)

    def f(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    lowered = jax.jit(f).lower(jnp.ones((4, 12, 10, 8)), jnp.ones((3, 3, features, 16)))
    # Optimisation may add operations (a copy, a pad), so XLA counts before it and we count after it.
    assert read_hlo(lowered.compile().as_text(), ("d",), (1,)).dot_flops == lowered.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(5, 6), (6, 7)]),
        ("bij,bkj->bik", [(3, 5, 6), (3, 7, 6)]),
        ("bijc,bcj->bi", [(2, 3, 4, 5), (2, 5, 4)]),
    ],
)
def test_dots(equation, shapes, devices):
    lowered = jax.jit(lambda x, y: jnp.einsum(equation, x, y)).lower(*(jnp.ones(s) for s in shapes))
    assert read_hlo(lowered.compile().as_text(), ("d",), (1,)).dot_flops == lowered.cost_analysis()["flops"]


def test_cublas_gemm():
    text = """HloModule m

ENTRY %main (a: bf16[4,64,32], b: bf16[4,32,16]) -> bf16[4,64,16] {
  %a = bf16[4,64,32]{2,1,0} parameter(0)
  %b = bf16[4,32,16]{2,1,0} parameter(1)
  %g = (bf16[4,64,16]{2,1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{\
"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}
  ROOT %o = bf16[4,64,16]{2,1,0} get-tuple-element(%g), index=0
}
"""
    assert read_hlo(text, ("d",), (1,)).dot_flops == 2 * 4 * 64 * 16 * 32
