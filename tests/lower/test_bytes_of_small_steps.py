"""Small steps whose compiled programs once moved or computed something else than predicted; found in models that were
written elsewhere. Compiled for the simulated CPU devices, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for, make_plan
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from spmd_auto.verify import read_compiled, tree_relative_error
from spmd_auto.verify.check import compare
from tests.known_answers.toy import toy_mesh


def A(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def sgd(loss):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def gated(params, x):
    """The two halves of one projection are cut apart: a split of the fused dimension does not fall on the cut."""
    gate, data = jnp.split(x @ params["up"], 2, axis=-1)
    return jnp.mean((jax.nn.silu(gate) * data @ params["down"]) ** 2)


def convolutions(params, x):
    """A stride: its gradient is a convolution over holes."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, params["a"], (1, 1), "SAME", dimension_numbers=dimensions)
    x = jax.lax.conv_general_dilated(jax.nn.relu(x), params["b"], (2, 2), "SAME", dimension_numbers=dimensions)
    return jnp.mean(x**2)


def in_groups(params, x):
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, params["a"], (1, 1), "SAME", dimension_numbers=dimensions)
    x = jax.lax.conv_general_dilated(
        jax.nn.relu(x), params["c"], (1, 1), "SAME", dimension_numbers=dimensions, feature_group_count=4
    )
    return jnp.mean(x**2)


GATED = {"up": A(16, 256), "down": A(128, 16)}
KERNELS = {"a": A(3, 3, 8, 64), "b": A(3, 3, 64, 64)}
IMAGES = A(32, 16, 16, 8)  # larger than the kernels: their gradients travel, not activations
STEPS = {
    # the fused projection's columns are split; so is the contracted dimension of the next layer
    "fused projection": (gated, GATED, A(32, 16), lambda names: {names["up", 1]: "b", names["down", 0]: "b"}, ()),
    "convolutions": (convolutions, KERNELS, IMAGES, lambda names: {"batch": "b"}, ()),
    "convolutions, gradients scattered": (convolutions, KERNELS, IMAGES, lambda names: {"batch": "b"}, ("b",)),
    "convolutions in groups, gradients scattered in stages": (
        in_groups,
        {"a": KERNELS["a"], "c": A(3, 3, 16, 64)},
        IMAGES,
        lambda names: {"batch": ("a", "b")},
        ("a", "b"),
    ),
}


@pytest.mark.parametrize("shape", [(5,), (8,), (2, 4)], ids=str)
def test_a_loop_carries_what_the_plan_says_not_what_its_result_is(shape, devices):
    """The gradient is whole in its loop and split behind it: XLA would carry it split and gather it in every trip."""

    def step(h, x):
        def loss(h):
            carry, _ = jax.lax.scan(lambda c, x: (jnp.tanh(c @ h[:, :width] + x), None), jnp.zeros((30, width)), x)
            return jnp.sum(carry)

        return jax.value_and_grad(loss)(h)

    mesh, width = toy_mesh(*shape), 2 * shape[-1]
    pins = {"result/1": jax.P(mesh.names[-1])}
    program = trace(step, A(width, 4 * width), A(5, 30, width))
    plan = make_plan(program, mesh, pins=pins, search=SearchOptions(states=60))
    verification = compare(plan, read_compiled(plan.lower_step().compile(), plan.mesh.build(devices)), "cpu")
    for row in verification.rows:
        assert row.predicted_bytes == pytest.approx(row.found_bytes, abs=64), str(verification)


@pytest.mark.parametrize("name", STEPS)
def test_compiled_bytes_and_flops_are_as_predicted(name, devices):
    loss, params, x, splits, scattered = STEPS[name]
    mesh = toy_mesh(2, 4)
    program = trace(sgd(loss), params, x)
    analysis = analyse_for(program, mesh, {})
    names = {
        (leaf.path.split("/")[-1], d): analysis.names[group]
        for leaf, value in zip(program.arguments, analysis.graph.arguments, strict=True)
        for d, group in enumerate(analysis.axes.of[value.id])
        if group in analysis.names
    }
    plan = price_strategy(
        program, mesh, splits(names), zero=2 if scattered else 0, zero_axes=scattered, analysis=analysis
    )
    lowered = plan.lower_step(donate=False)
    compiled = lowered.compile()
    verification = compare(plan, read_compiled(compiled, plan.mesh.build(devices)), "cpu")
    # nothing is ignored: a few bytes are scalars that XLA combines or not
    for row in verification.rows:
        assert row.predicted_bytes == pytest.approx(row.found_bytes, abs=64), str(verification)
    assert verification.predicted_flops == verification.found_flops
    flat = [jax.device_put(leaf, s) for leaf, s in zip(jax.tree.leaves((params, x)), lowered.in_shardings, strict=True)]
    out = jax.tree.unflatten(program.out_tree, compiled(*flat))
    assert tree_relative_error(out, jax.jit(sgd(loss))(params, x)) < 1e-5
