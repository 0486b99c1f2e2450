"""Complaints about other tools (EXPECTATIONS B): wrong or failing results, each run on several devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

import spmd_auto
from spmd_auto.plan.make import make_plan
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from tests.known_answers.complaints import error, executed, kinds
from tests.known_answers.toy import toy_mesh

FAST = SearchOptions(states=200)


def A(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4,), (2,)], ids=str)
def test_random_bits_do_not_depend_on_shards(sizes, devices):
    """jax#40232; bits equal those of one device, and nothing is moved for them."""

    def fn(x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        each = jax.vmap(lambda k: jax.random.bits(k, (16,)))(jax.random.split(key, 8))
        return jnp.where(mask, x, 0), jax.random.bits(key, (16, 8)), each, jax.random.uniform(key, (8, 16))

    args = A(8, 16), jax.random.key(3)
    plan = spmd_auto.plan(fn, *args, mesh=toy_mesh(*sizes), pins={"x": P("a")}, search=FAST)
    out, summary = executed(plan, *args)
    for x, y in zip(out, jax.jit(fn)(*args), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not kinds(summary)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_top_k_of_a_split_axis(k, devices):
    """jax#19271: values and places of a split axis; equal numbers keep their order."""

    def fn(x):
        return lax.top_k(x, k)

    x = np.round(A(8, 32), 1)  # with ties
    for spec in (P(None, "a"), P("a"), P("a", "b")):
        mesh = toy_mesh(2, 4) if "b" in spec else toy_mesh(8)
        plan = spmd_auto.plan(fn, x, mesh=mesh, pins={"x": spec}, search=FAST)
        values, places = executed(plan, x)[0]
        np.testing.assert_array_equal(values, jax.jit(fn)(x)[0])
        np.testing.assert_array_equal(places, jax.jit(fn)(x)[1])


STARTS = ((0, 0), (2, 7), (1, 9), (100, 100), (-1, -3))


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_dynamic_slices_with_clamped_starts(spec, devices):
    """xla#49118, xla#49122, and a slice of a slice, whose first start XLA forgets to clamp."""

    def fn(x, update, at):
        start = (at[0], at[1])
        piece = lax.dynamic_slice(x, start, (2, 14))
        return lax.dynamic_slice(x, start, (1, 2)), lax.dynamic_update_slice(x, update, start), piece

    x, update = A(4, 16), A(1, 2)
    shares = P(None, "b") if spec == P("a") else P("a", None)
    pins = {"x": spec, "result/2": shares}
    plan = spmd_auto.plan(fn, x, update, np.zeros(2, np.int32), mesh=toy_mesh(2, 2), pins=pins, search=FAST)
    for at in STARTS:
        out = executed(plan, x, update, np.array(at, np.int32))[0]
        top, left = (a + n if a < 0 else a for a, n in zip(at, x.shape, strict=True))
        row, column = min(top, 3), min(left, 14)
        np.testing.assert_array_equal(out[0], x[row : row + 1, column : column + 2])
        expected = x.copy()
        expected[row : row + 1, column : column + 2] = update
        np.testing.assert_array_equal(out[1], expected)
        row, column = min(top, 2), min(left, 2)
        np.testing.assert_array_equal(out[2], x[row : row + 2, column : column + 14])


@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=str)
def test_strided_convolution_split_eight_ways(spec, devices):
    """jax#16894: (8,1280,8,8) x (640,1280,3,3), stride 2."""

    def fn(x, w):
        return lax.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)))

    args = A(8, 1280, 8, 8), A(640, 1280, 3, 3)
    expected = jax.jit(fn)(*args)
    plan = spmd_auto.plan(fn, *args, mesh=toy_mesh(8), pins={"x": spec, "w": P("a")}, search=FAST)
    assert tree_relative_error(executed(plan, *args)[0], expected) < 1e-5


@functools.partial(custom_partitioning, static_argnums=())
def softened(x):
    return jnp.tanh(x) * 2


def _partition(mesh, arg_shapes, result_shape):
    sharding = NamedSharding(mesh, arg_shapes[0].sharding.spec)
    return mesh, lambda x: jnp.tanh(x) * 2, sharding, (sharding,)


softened.def_partition(
    partition=_partition,
    infer_sharding_from_operands=lambda mesh, arg_shapes, result_shape: arg_shapes[0].sharding,
    sharding_rule="i j -> i j",
)


def test_custom_partitioning_inside_a_scan(devices):
    """jax#17382."""

    def fn(params, x):
        return lax.scan(lambda c, w: (softened(c @ w), c.sum()), x, params["w"])

    args = {"w": A(3, 16, 16)}, A(8, 16)
    plan = spmd_auto.plan(fn, *args, mesh=toy_mesh(8), pins={"x": P("a")}, search=FAST)
    assert error(plan, fn, *args) < 1e-5


def scanned(params, x):
    def layer(c, w):
        return jnp.tanh(c @ w["up"]) @ w["down"], None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def gradient_step(params, x):
    grads = jax.grad(scanned)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads)


LAYERS = {"up": A(4, 16, 32) / 4, "down": A(4, 32, 16) / 4}
SPLITS = {"data": {"batch": "a"}, "tensor": {"mlp": "a"}, "both": {"batch": "a", "mlp": "b"}}


@pytest.mark.parametrize("name", SPLITS)
def test_gradient_of_a_scan(name, devices):
    """jax#33029."""
    mesh = toy_mesh(2, 4) if name == "both" else toy_mesh(8)
    plan = spmd_auto.price(gradient_step, LAYERS, A(8, 16), mesh=mesh, assignment=SPLITS[name])
    assert error(plan, gradient_step, LAYERS, A(8, 16)) < 1e-5


def test_stacked_gradients_of_a_scan_are_split(devices):
    """pytorch/xla#8883: what the backward pass stacks is as large as all layers, and must lie split."""
    plan = spmd_auto.price(gradient_step, LAYERS, A(8, 16), mesh=toy_mesh(8), assignment={"mlp": "a"})
    specs, classes = plan.priced.specs, plan.analysis.classes
    stacked = [op.results[0] for op in plan.analysis.graph.ops if op.name == "ys" and op.results[0].shape[0] == 4]
    weights = [v for v in stacked if v.shape in ((4, 16, 32), (4, 32, 16))]
    assert len(weights) == 2
    assert all(any(specs[classes.of_value[v.id]]) for v in weights)
    text = plan.lower_step(plan.mesh.build(devices), donate=False).compile().as_text()
    assert "f32[4,16,4]" in text
    assert "f32[4,16,32]" not in text


def test_gathered_weights_are_not_kept_for_the_backward_pass(devices):
    """autoparallel#410: under ZeRO-3 each pass gathers each layer again, and no stack of whole weights is held."""
    plan = spmd_auto.price(
        gradient_step, LAYERS, A(512, 16), mesh=toy_mesh(8), assignment={"batch": "a"}, zero=3, zero_axes=("a",)
    )
    _, summary = executed(plan, LAYERS, A(512, 16))
    layer = (16 * 32 + 32 * 16) * 4
    gathered = sum(c.bytes for c in plan.report.collectives if c.kind == "all-gather")
    assert gathered == pytest.approx(7 / 8 * 2 * 4 * layer, rel=0.15)
    found = sum(b for (kind, _), b in summary.bytes_by_kind_and_axes().items() if kind == "all-gather")
    assert found == pytest.approx(gathered, rel=0.15)
    text = plan.lower_step(plan.mesh.build(devices), donate=False).compile().as_text()
    assert "f32[4,16,32]" not in text


def test_ffts_run_on_their_shards(devices):
    """XLA gathers a transform along every dimension, and its CPU version refuses what was gathered."""

    def loss(x):
        return jnp.mean(jnp.abs(jnp.fft.fft(x)) ** 2) + jnp.mean(jnp.abs(jnp.fft.rfft2(x)))

    def step(x):
        return x - jax.grad(loss)(x)

    x = A(3, 24, 16)
    for spec in (P(None, "a"), P(None, None, "a")):
        plan = make_plan(trace(step, x), toy_mesh(8), pins={"x": spec}, search=FAST)
        assert error(plan, step, x) < 1e-5
    plan = make_plan(trace(lambda x: jnp.fft.fft(x), x), toy_mesh(8), pins={"x": P(None, "a")}, search=FAST)
    assert not executed(plan, x)[1].collectives
    for spec in (P(None, "a"), P(None, None, "a")):  # the transform beside its operand: both lie alike
        program = trace(lambda x: jnp.abs(jnp.fft.fft(x)) + x, x)
        plan = make_plan(program, toy_mesh(8), pins={"x": spec, "result": spec}, search=FAST)
        found = executed(plan, x)[1].bytes_by_kind_and_axes()
        assert found == pytest.approx(plan.report.bytes_by_kind_and_axes())
        assert bool(found) == (spec == P(None, None, "a"))
