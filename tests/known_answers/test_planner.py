"""Right answers from outside that need no compiler (EXPECTATIONS A 1-6, 12, 18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import spmd_auto
from spmd_auto.cost import make_report
from tests.known_answers.toy import all_reduce, toy_mesh
from tests.models import mlp


def moved(layers, batch, width, mesh, **options):
    step, params, data = mlp.make(layers, batch, width, **options)
    return spmd_auto.plan(step, params, data, mesh=mesh)


@pytest.mark.parametrize(
    ("layers", "batch", "width", "reduces", "payload"),
    [(2, 1024, 128, 2, 65_536), (2, 128, 1024, 1, 524_288), (12, 1024, 128, 12, 65_536), (12, 128, 1024, 11, 524_288)],
)
def test_mlp_moves_what_the_best_known_strategy_moves(layers, batch, width, reduces, payload):
    plan = moved(layers, batch, width, toy_mesh(4))
    assert plan.report.bytes_moved == pytest.approx(reduces * all_reduce(4, payload))


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_two_meshes_with_a_fast_second_axis(sizes):
    plan = moved(2, 1024, 128, toy_mesh(*sizes, bandwidth=(1e9, 1e11)))
    first, second = sizes
    expected = 2 * all_reduce(first, 65_536 / second) / 1e9 + all_reduce(second, 524_288 / first) / 1e11
    assert plan.report.communication <= expected * (1 + 1e-9)


def test_bias_costs_data_parallel_two_small_all_reduces_and_tensor_parallel_nothing():
    data = moved(2, 1024, 128, toy_mesh(4), bias=True)
    assert data.report.bytes_moved == pytest.approx(2 * all_reduce(4, 65_536) + 2 * all_reduce(4, 512))
    tensor = moved(2, 128, 1024, toy_mesh(4), bias=True)
    assert tensor.report.bytes_moved == pytest.approx(all_reduce(4, 524_288))


def test_transposes_and_reshapes_before_a_contraction_cost_one_all_reduce():
    """x (1024, 128) transposed, reshaped to (128, 32, 32), transposed and merged again, then contracted over 1024."""

    def f(x, w):
        a = x.T.reshape(128, 32, 32).transpose(1, 2, 0).reshape(1024, 128)
        return a.T @ w

    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    plan = spmd_auto.price(f, x, x, mesh=toy_mesh(4), assignment={"batch": "a"})
    assert [(c.kind, c.bytes) for c in plan.report.collectives] == [("all-reduce", all_reduce(4, 65_536))]


def attention(params, x):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", scores, v), params["o"])


def test_attention_forward_costs_one_all_reduce():
    """Batch 4, sequence 128, width 512, 16 heads; input and output whole, weights split by heads."""
    f32 = jnp.float32
    params = {n: jax.ShapeDtypeStruct((512, 16, 32), f32) for n in "qkv"} | {
        "o": jax.ShapeDtypeStruct((16, 32, 512), f32)
    }
    x = jax.ShapeDtypeStruct((4, 128, 512), f32)
    plan = spmd_auto.price(attention, params, x, mesh=toy_mesh(4), assignment={"heads": "a"})
    assert [(c.kind, c.bytes) for c in plan.report.collectives] == [("all-reduce", all_reduce(4, 1_048_576))]


def test_attention_search_is_not_worse_than_one_all_reduce_with_whole_input_and_output():
    f32 = jnp.float32
    params = {n: jax.ShapeDtypeStruct((512, 16, 32), f32) for n in "qkv"} | {
        "o": jax.ShapeDtypeStruct((16, 32, 512), f32)
    }
    x = jax.ShapeDtypeStruct((4, 128, 512), f32)
    plan = spmd_auto.plan(attention, params, x, mesh=toy_mesh(4))
    assert plan.report.bytes_moved <= all_reduce(4, 1_048_576)


@pytest.mark.parametrize("width", [64, 256])
def test_batch_of_one_is_never_data_parallel(width):
    step, params, data = mlp.make(2, 1, width)
    plan = spmd_auto.plan(step, params, data, mesh=toy_mesh(4))
    assert plan.specs["batch/x"] == jax.P() or plan.specs["batch/x"][0] is None


def test_argmax_over_the_whole_axis_and_a_split_reshape_cost_nothing():
    def f(x):
        return jnp.argmax(x, axis=0).reshape(8, 18)

    x = jax.ShapeDtypeStruct((144, 144), jnp.float32)
    plan = spmd_auto.plan(f, x, mesh=toy_mesh(4), pins={"x": jax.P(None, "a")})
    assert plan.report.bytes_moved == 0
    assert plan.placements.results[0] == ((0,), ())


def test_report_terms_add_up():
    step, params, data = mlp.make(2, 64, 64, bias=True, relu=True)
    plan = spmd_auto.plan(step, params, data, mesh=spmd_auto.cluster("h100", hosts=2))
    report = make_report(plan.pricer, plan.priced)
    assert report.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert report.compute + report.fused + report.slowed + report.communication - report.hidden == pytest.approx(
        report.seconds, rel=1e-12
    )
    assert sum(c.seconds for c in report.collectives) == pytest.approx(report.communication)
    assert report.memory.total == pytest.approx(plan.memory)
