"""What is neither language nor vision alone: a plain MLP, recurrence, large tables."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from programs.training import array, training

BF16 = jnp.bfloat16


class MLP(nn.Module):
    layers: int
    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            h = nn.gelu(nn.Dense(4 * self.width, dtype=BF16)(x))
            x = x + nn.Dense(self.width, dtype=BF16)(h)
        return nn.Dense(1024, dtype=BF16)(x).astype(jnp.float32)


class Recurrent(nn.Module):
    """Two layers of a recurrent cell over a text."""

    cell: Any
    width: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16_384, self.width, dtype=BF16)(tokens)
        for _ in range(2):
            x = nn.RNN(self.cell(self.width, dtype=BF16, param_dtype=jnp.float32))(x.astype(jnp.float32))
        return nn.Dense(16_384, dtype=BF16)(x).astype(jnp.float32)


class Recommender(nn.Module):
    """Large tables, their rows joined with dense features, crossed, and an MLP."""

    tables: int = 8

    @nn.compact
    def __call__(self, batch):
        rows = [nn.Embed(1_000_000, 128, name=f"table_{k}")(batch["ids"][:, k]) for k in range(self.tables)]
        dense = nn.relu(nn.Dense(128)(nn.relu(nn.Dense(512)(batch["dense"]))))
        stacked = jnp.stack([dense, *rows], axis=1)
        crossed = jnp.einsum("bid,bjd->bij", stacked, stacked)[:, *np.triu_indices(self.tables + 1, 1)]
        x = jnp.concatenate([dense, crossed], -1)
        for width in (2048, 1024, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


def _mlp():
    return training(MLP(6, 4096), {"x": array(65_536, 4096, dtype=BF16), "y": array(65_536)})


def _recurrent(cell: Any):
    tokens = array(512, 128)
    return training(Recurrent(cell, 1024), {"x": tokens, "y": tokens})


def recommender():
    features = {"ids": array(262_144, 8), "dense": array(262_144, 16, dtype=jnp.float32)}

    def loss_of(out, clicked):
        return optax.sigmoid_binary_cross_entropy(out, clicked).mean()

    return training(Recommender(), {"x": features, "y": array(262_144)}, loss_of)


PROGRAMS = {
    "mlp": _mlp,
    "lstm": lambda: _recurrent(nn.OptimizedLSTMCell),
    "recommender": recommender,
    "gru": lambda: _recurrent(nn.GRUCell),
}
