"""Plain linear layers, as Alpa's published tests use them: forward, squared error, backward, SGD."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def make(layers: int, batch: int, width: int, bias: bool = False, relu: bool = False):
    """(step, abstract parameters, abstract batch): layers of `width x width`."""

    def forward(params, x):
        for i, layer in enumerate(params):
            x = x @ layer["w"]
            if bias:
                x = x + layer["b"]
            if relu and i + 1 < len(params):
                x = jax.nn.relu(x)
        return x

    def step(params, batch):
        def loss(p):
            return jnp.mean((forward(p, batch["x"]) - batch["y"]) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)

    f32 = jnp.float32
    layer = {"w": jax.ShapeDtypeStruct((width, width), f32)}
    if bias:
        layer["b"] = jax.ShapeDtypeStruct((width,), f32)
    params = [dict(layer) for _ in range(layers)]
    data = jax.ShapeDtypeStruct((batch, width), f32)
    return step, params, {"x": data, "y": data}
