"""Small models of the families people train, written as their papers and Flax's examples write them.

Each entry of `FAMILIES` is a function `() -> (step, state, batch)` with
`step(state, batch) -> (new state, (loss, gradients))`; run it under x64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 8


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut (strided where the image shrinks)."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        h = nn.Conv(self.channels, (3, 3), strides, use_bias=False)(x)
        h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
        h = nn.BatchNorm(use_running_average=False)(nn.Conv(self.channels, (3, 3), use_bias=False)(h))
        if x.shape != h.shape:
            x = nn.BatchNorm(use_running_average=False)(nn.Conv(self.channels, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + h)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(16, (7, 7), (2, 2), use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for channels, stride in ((16, 1), (32, 2)):
            x = Residual(channels, stride)(x)
        return nn.Dense(16)(x.mean((1, 2)))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (8, 8), (8, 8), "VALID")(x)
        x = x.reshape(x.shape[0], -1, 32)
        token = self.param("class", nn.initializers.zeros, (1, 1, 32))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 32)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 32))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x))
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(16)(nn.LayerNorm()(x)[:, 0])


class UNet(nn.Module):
    """Down by strides, up by a transposed convolution and by resizing, with skips that are joined to it."""

    @nn.compact
    def __call__(self, x, time=None):
        def block(x, channels):
            x = nn.GroupNorm(num_groups=4)(nn.Conv(channels, (3, 3))(x))
            if time is not None:
                x = x + nn.Dense(channels)(time)[:, None, None, :]
            return nn.silu(x)

        a = block(x, 16)
        b = block(nn.Conv(32, (3, 3), (2, 2))(a), 32)
        c = block(nn.Conv(32, (3, 3), (2, 2))(b), 32)
        b = block(jnp.concatenate([nn.ConvTranspose(32, (4, 4), (2, 2))(c), b], -1), 32)
        up = jax.image.resize(b, (*a.shape[:3], b.shape[-1]), "nearest")
        return nn.Conv(x.shape[-1], (1, 1))(block(jnp.concatenate([up, a], -1), 16))


class Recommender(nn.Module):
    """Large tables, their rows joined with dense features, and an MLP."""

    @nn.compact
    def __call__(self, batch):
        rows = [nn.Embed(512, 16, name=f"table_{k}")(batch["ids"][:, k]) for k in range(4)]
        dense = nn.relu(nn.Dense(16)(batch["dense"]))
        stacked = jnp.stack([dense, *rows], axis=1)
        crossed = jnp.einsum("bid,bjd->bij", stacked, stacked)[:, *np.triu_indices(5, 1)]
        x = jnp.concatenate([dense, crossed], -1)
        for width in (64, 32):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


class Recurrent(nn.Module):
    cell: Any

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        for _ in range(2):
            x = nn.RNN(self.cell(32, param_dtype=jnp.float64))(x)  # carries are born in it
        return nn.Dense(64)(x)


def _cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _built(model: nn.Module, inputs: tuple[Any, ...], batch: Any, loss_of: Callable[..., Any]):
    """A step with AdamW; the statistics of batch normalisation are state that gradients do not reach."""
    tx = optax.adamw(1e-3)
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    variables = jax.tree.map(lambda v: v.astype(jnp.float64), variables)
    params, statistics = variables["params"], variables.get("batch_stats", {})

    def step(state, batch):
        def loss_fn(params):
            def apply(*inputs):
                if not state["statistics"]:
                    return model.apply({"params": params}, *inputs), {}
                variables = {"params": params, "batch_stats": state["statistics"]}
                out, new = model.apply(variables, *inputs, mutable="batch_stats")
                return out, new["batch_stats"]

            return loss_of(apply, batch)

        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "statistics": statistics,
        }
        return new, (loss, grads)

    return step, {"params": params, "opt_state": tx.init(params), "statistics": statistics}, batch


def _images(size: int, channels: int = 4):
    return np.random.default_rng(0).normal(size=(BATCH, size, size, channels))


def _labels(*shape: int, classes: int = 16):
    return np.random.default_rng(1).integers(0, classes, shape).astype(np.int32)


def _classifier(model: nn.Module):
    batch = {"x": _images(32), "y": _labels(BATCH)}

    def loss_of(apply, batch):
        logits, statistics = apply(batch["x"])
        return _cross_entropy(logits, batch["y"]), statistics

    return _built(model, (batch["x"],), batch, loss_of)


def resnet():
    return _classifier(ResNet())


def vit():
    return _classifier(ViT())


def unet():
    batch = {"x": _images(16), "y": _images(16)[::-1].copy()}

    def loss_of(apply, batch):
        out, statistics = apply(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), statistics

    return _built(UNet(), (batch["x"],), batch, loss_of)


def diffusion():
    """Denoising: times and noise are drawn inside the step from a key of the batch."""
    batch = {"x": _images(16), "key": jax.random.key(5)}

    def loss_of(apply, batch):
        time_key, noise_key = jax.random.split(batch["key"])
        t = jax.random.uniform(time_key, (BATCH,), dtype=jnp.float64)
        noise = jax.random.normal(noise_key, batch["x"].shape, jnp.float64)
        level = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
        noisy = level * batch["x"] + jnp.sqrt(1 - level**2) * noise
        waves = t[:, None] * jnp.exp(jnp.arange(8.0))
        out, statistics = apply(noisy, jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))
        return jnp.mean((out - noise) ** 2), statistics

    return _built(UNet(), (batch["x"], jnp.zeros((BATCH, 16))), batch, loss_of)


def recommender():
    rng = np.random.default_rng(0)
    features = {"ids": rng.integers(0, 512, (BATCH, 4)).astype(np.int32), "dense": rng.normal(size=(BATCH, 8))}
    batch = {"x": features, "y": _labels(BATCH, classes=2)}

    def loss_of(apply, batch):
        logits, statistics = apply(batch["x"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean(), statistics

    return _built(Recommender(), (features,), batch, loss_of)


def _language(cell: Any):
    batch = {"x": _labels(BATCH, 8, classes=64), "y": _labels(BATCH, 8, classes=64)}

    def loss_of(apply, batch):
        logits, statistics = apply(batch["x"])
        return _cross_entropy(logits, batch["y"]), statistics

    return _built(Recurrent(cell), (batch["x"],), batch, loss_of)


def lstm():
    return _language(nn.OptimizedLSTMCell)


def gru():
    return _language(nn.GRUCell)


FAMILIES = {f.__name__: f for f in (resnet, vit, unet, diffusion, recommender, lstm, gru)}
