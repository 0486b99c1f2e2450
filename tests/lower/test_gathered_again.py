"""What the forward pass gathered of a parameter is gathered again by the backward pass, whatever reads it there."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spmd_auto.mesh import cluster_of
from spmd_auto.plan import price
from spmd_auto.verify.check import verify


def test_kernels_that_the_backward_pass_reverses():
    """The gradient of a convolution reads its kernel through a reversal: an operation with no other operand."""

    def step(state, batch):
        def loss(params):
            x = batch["x"]
            for k in range(3):
                x = jnp.tanh(
                    jax.lax.conv_general_dilated(x, params[f"w{k}"], (1, 1), "SAME", dimension_numbers=_LAYOUT)
                )
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    f32 = jnp.float32
    state = {"params": {f"w{k}": jax.ShapeDtypeStruct((3, 3, 64, 64), f32) for k in range(3)}}
    batch = {"x": jax.ShapeDtypeStruct((8, 8, 8, 64), f32)}
    mesh = cluster_of(jax.devices()[:4]).mesh(d=4)
    plan = price(step, state, batch, mesh=mesh, assignment={"batch": "d"}, zero=3, zero_axes=("d",))
    summary = verify(plan, "cpu").summary
    gathered = sum(c.payload_bytes * c.times for c in summary.collectives if c.kind == "all-gather")
    kernel = 4 * 3 * 3 * 64 * 64
    assert gathered >= 5 * kernel  # three forward, and backward all but the first, which nothing asks for


_LAYOUT = ("NHWC", "HWIO", "NHWC")
