"""A causal transformer as users write it: scanned, rematerialised layers, dropout, bf16 activations (linen)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    heads: int
    dropout: float = 0.0
    dtype: Any = jnp.bfloat16
    experts: int = 0
    capacity: int = 0

    @nn.compact
    def __call__(self, x, _=None):
        width = x.shape[-1]
        train = self.dropout > 0
        y = nn.LayerNorm(dtype=self.dtype, name="ln1")(x)
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        y = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, dropout_rate=self.dropout, deterministic=not train, name="attn"
        )(y, y, mask=mask)
        x = x + y
        y = nn.LayerNorm(dtype=self.dtype, name="ln2")(x)
        if self.experts:
            return x + OneHotMoE(self.experts, 4 * width, self.capacity, self.dtype, name="moe")(y), None
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(y))
        y = nn.Dense(width, dtype=self.dtype, name="down")(y)
        y = nn.Dropout(self.dropout, deterministic=not train)(y)
        return x + y, None


class OneHotMoE(nn.Module):
    """Top-1 routing with capacity by one-hot dispatch and combine (GShard's form)."""

    experts: int
    hidden: int
    capacity: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        logits = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="router")(x)
        probs = jax.nn.softmax(logits)
        one_hot = jax.nn.one_hot(jnp.argmax(probs, -1), self.experts, dtype=jnp.float32)
        gate = (probs * one_hot).sum(-1)
        position = jnp.cumsum(one_hot, 1) * one_hot - 1
        dispatch = jax.nn.one_hot(position.astype(jnp.int32), self.capacity, dtype=jnp.float32) * one_hot[..., None]
        combine = (dispatch * gate[..., None, None]).astype(self.dtype)
        dispatch = dispatch.astype(self.dtype)
        init = nn.initializers.normal()
        wi = self.param("wi", init, (self.experts, width, self.hidden)).astype(self.dtype)
        wo = self.param("wo", init, (self.experts, self.hidden, width)).astype(self.dtype)
        h = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        h = nn.gelu(jnp.einsum("egcm,emf->egcf", h, wi))
        h = jnp.einsum("egcf,efm->egcm", h, wo)
        return jnp.einsum("gsec,egcm->gsm", combine, h)


class GPT(nn.Module):
    layers: int
    width: int
    heads: int
    vocab: int
    scan: bool = True
    remat: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.bfloat16
    experts: int = 0
    capacity: int = 0

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        positions = self.param("positions", nn.initializers.normal(), (tokens.shape[1], self.width))
        x = embed(tokens) + positions.astype(self.dtype)
        # only inside of a loop nothing can merge the recomputation with the first computation
        block: Any = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        args = (self.heads, self.dropout, self.dtype, self.experts, self.capacity)
        if self.scan:
            x, _ = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.layers,
            )(*args, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = block(*args, name=f"layer{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x).astype(jnp.float32 if self.dtype == jnp.bfloat16 else self.dtype)


def make(
    *,
    layers=2,
    width=64,
    heads=4,
    vocab=128,
    batch=8,
    sequence=32,
    scan=True,
    remat=True,
    dropout=0.0,
    dtype: Any = jnp.bfloat16,
    experts=0,
    capacity_factor=2,
    tx=None,
):
    """(create_state, step, abstract state, abstract batch)."""
    model = GPT(
        layers, width, heads, vocab, scan, remat, dropout, dtype, experts, capacity_factor * sequence // max(experts, 1)
    )
    tx = tx or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def create(key):
        rngs = {"params": key, "dropout": key}
        params = model.init(rngs, jnp.zeros((batch, sequence), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, batch):
        def loss_fn(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(0), state.step)} if dropout else None
            logits = state.apply_fn({"params": params}, batch["x"], rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    state = jax.eval_shape(create, jax.random.key(0))
    return create, step, state, {"x": tokens, "y": tokens}
