"""A byte-level causal transformer as a user would write it for one device: nothing here knows of sharding."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

VOCAB = 256


class Block(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, _):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=jnp.bfloat16)(y, y, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=False)(y)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16)(y))
        y = nn.Dense(width, dtype=jnp.bfloat16)(y)
        return x + nn.Dropout(self.dropout, deterministic=False)(y), None


class Transformer(nn.Module):
    layers: int
    width: int
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, self.width, dtype=jnp.bfloat16)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = embed(tokens) + positions.astype(jnp.bfloat16)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = layers(self.heads, self.dropout, name="layers")(x, None)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def build(layers: int, width: int, heads: int, sequence: int, dropout: float = 0.1, rate: float = 1e-3):
    """(create_state, train_step) of the demo."""
    model = Transformer(layers, width, heads, dropout)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_constant_schedule(0.0, rate, 20)))

    def create_state(key):
        rngs = {"params": key, "dropout": key}
        params = model.init(rngs, jnp.zeros((1, sequence), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, batch):
        def loss_fn(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(7), state.step)}
            logits = state.apply_fn({"params": params}, batch["x"], rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return create_state, train_step
