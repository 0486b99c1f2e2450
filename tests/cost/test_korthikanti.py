"""Bytes of activations and of states against closed forms.

Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equations 1, 2
and 4: a layer stores s b h (34 + 5 a s / h) bytes; under tensor parallelism s b h (10 + 24/t + 5 a s / (h t)), with
sequence parallelism s b h / t (34 + 5 a s / h). The layer here stores what the paper counts (16-bit activations, masks
of one byte), by a rematerialisation policy that names it: what JAX itself would store is more, by intermediates of
softmax, GeLU and normalisation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from spmd_auto.plan.make import price_strategy
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh

# heads, width, micro-batch (table 3 of the paper); sequence 2048, tensor parallel 8
MODELS = {"22B": (64, 6144, 4), "175B": (96, 12288, 1), "530B": (128, 20480, 1), "1T": (160, 25600, 1)}
SEQUENCE, TENSOR, LAYERS = 2048, 8, 2


def kept(x):
    return checkpoint_name(x, "kept")


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return ((wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(
        x.dtype
    ) * scale


@jax.custom_jvp
def softmax(x):
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


@softmax.defjvp
def softmax_jvp(primals, tangents):
    """Backward from the result that is stored anyway, as fused kernels do it."""
    (x,), (dx,) = primals, tangents
    y = kept(jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype))
    return y, y * (dx - jnp.sum(y * dx, -1, keepdims=True))


def dropped(key, x):
    mask = kept(jax.random.bernoulli(key, 0.9, x.shape))
    return jnp.where(mask, x / 0.9, 0).astype(x.dtype)


def layer(x, inputs):
    """x (batch, sequence, width); weights of heads (width, heads, head width)."""
    w, keys = inputs
    y = kept(norm(x, w["ln1"]))  # input of q, k, v
    q, k, v = (kept(jnp.einsum("bsh,had->bsad", y, w[name])) for name in "qkv")
    scores = jnp.einsum("bsad,btad->bast", q, k)
    attended = kept(dropped(keys[0], softmax(scores)))
    context = kept(jnp.einsum("bast,btad->bsad", attended, v))
    x = kept(x + dropped(keys[1], jnp.einsum("bsad,adh->bsh", context, w["o"])))  # input of the second norm
    y = kept(norm(x, w["ln2"]))
    up = kept(jnp.einsum("bsh,hf->bsf", y, w["up"]))
    down = jnp.einsum("bsf,fh->bsh", kept(jax.nn.gelu(up)), w["down"])
    return x + dropped(keys[2], down), None


@functools.cache
def program(model):
    heads, width, batch = MODELS[model]
    bf16 = jnp.bfloat16
    split = (LAYERS, width, heads, width // heads)
    shapes = dict.fromkeys("qkv", split) | {"o": (LAYERS, heads, width // heads, width)}
    shapes |= {"up": (LAYERS, width, 4 * width), "down": (LAYERS, 4 * width, width)}
    shapes |= {"ln1": (LAYERS, width), "ln2": (LAYERS, width)}
    params = {name: jax.ShapeDtypeStruct(shape, bf16) for name, shape in shapes.items()}

    def step(params, batch, key):
        policy = jax.checkpoint_policies.save_only_these_names("kept")
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)

        def loss(params):
            keys = jax.random.split(key, (LAYERS, 3))
            x, _ = jax.lax.scan(body, batch["x"], (params, keys))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    key = jax.eval_shape(lambda: jax.random.key(0))
    return trace(step, params, {"x": jax.ShapeDtypeStruct((batch, SEQUENCE, width), bf16)}, key)


def stored(model, assignment):
    """Bytes of one layer that the forward loop hands to the backward loop, on one device."""
    plan = price_strategy(program(model), toy_mesh(TENSOR), assignment)
    fractions, of = plan.priced.fractions, plan.analysis.classes.of_value
    results = [op.results[0] for op in plan.analysis.graph.ops if op.name == "ys" and not op.backward]
    return sum(v.bytes * fractions[of[v.id]] for v in results) / LAYERS


@pytest.mark.parametrize("model", MODELS)
def test_activations_of_a_layer(model):
    a, h, b = MODELS[model]
    assert stored(model, {}) == pytest.approx(SEQUENCE * b * h * (34 + 5 * a * SEQUENCE / h), rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_activations_under_tensor_parallelism(model):
    a, h, b = MODELS[model]
    expected = SEQUENCE * b * h * (10 + 24 / TENSOR + 5 * a * SEQUENCE / (h * TENSOR))
    assert stored(model, {"heads": "a", "mlp": "a"}) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_activations_under_tensor_and_sequence_parallelism(model):
    a, h, b = MODELS[model]
    expected = SEQUENCE * b * h / TENSOR * (34 + 5 * a * SEQUENCE / h)
    assert stored(model, {"heads": "a", "mlp": "a", "sequence": "a"}) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_states_under_zero(stage):
    """4 bytes of weights, 4 of gradients, 8 of moments a float32 parameter, of which (Rajbhandari et al. 2020)
    stage 1 divides the optimizer's, stage 2 also the gradients', stage 3 also the weights'."""
    size, width, devices = 2, 256, 8
    single = jax.ShapeDtypeStruct((width, width), jnp.float32)
    state = {"params": [single] * size, "mean": [single] * size, "square": [single] * size}

    def step(state, batch):
        def loss(weights):
            x = batch["x"]
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        mean = [0.9 * m + 0.1 * g for m, g in zip(state["mean"], grads, strict=True)]
        square = [0.9 * v + 0.1 * g * g for v, g in zip(state["square"], grads, strict=True)]
        params = [p - m / (jnp.sqrt(v) + 1e-8) for p, m, v in zip(state["params"], mean, square, strict=True)]
        return {"params": params, "mean": mean, "square": square}, value

    traced = trace(step, state, {"x": jax.ShapeDtypeStruct((64, width), jnp.float32)})
    zero = {"zero": stage, "zero_axes": ("a",)} if stage else {}
    plan = price_strategy(traced, toy_mesh(devices), {"batch": "a"}, **zero)
    count, memory = size * width * width, plan.report.memory
    assert memory.parameters == 4 * count / (devices if stage == 3 else 1)
    assert memory.optimizer == 8 * count / (devices if stage else 1)
    gradients = [
        plan.priced.fractions[plan.analysis.classes.of_value[value.id]] * value.bytes
        for op in plan.analysis.graph.ops
        for value in op.results
        if op.name == "dot_general" and value.id in plan.analysis.forms.of
    ]
    assert sum(gradients) == 4 * count / (devices if stage >= 2 else 1)
