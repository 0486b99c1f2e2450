"""Language models: GPT, Llama, BERT, encoder and decoder, mixture of experts; linen and nnx."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from programs.training import array, cross_entropy, optimizer, training
from tests.models import gpt

BF16 = jnp.bfloat16
WIDTH, HEADS, VOCAB, BATCH, SEQUENCE = 2048, 16, 32_768, 64, 1024
TOKENS = array(BATCH, SEQUENCE)


def _gpt(**changes: Any):
    sizes = {"layers": 4, "width": WIDTH, "heads": HEADS, "vocab": VOCAB, "batch": BATCH, "sequence": SEQUENCE}
    _, step, state, batch = gpt.make(**(sizes | changes))
    return step, state, batch


def _stack(
    layer: Any, count: int, scan: bool, remat: bool, x: jax.Array, *args: Any, name: str = "layers"
) -> jax.Array:
    """`count` layers, each `x, None = layer()(x, *args)`."""
    if remat:
        layer = nn.remat(layer, prevent_cse=not scan)
    if scan:
        stacked = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=count,
        )
        return stacked(name=name)(x, *args)[0]
    for k in range(count):
        x, _ = layer(name=f"{name}{k}")(x, *args)
    return x


# ---- Llama: rotary positions, grouped heads, gated MLP ----------------------------------------------


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of `x[batch, sequence, heads, width]`."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None, :], jnp.cos(angle)[:, None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


class LlamaLayer(nn.Module):
    groups: int = 4

    @nn.compact
    def __call__(self, x):
        width, size = x.shape[-1], x.shape[-1] // HEADS
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=BF16)
        h = nn.RMSNorm(dtype=BF16)(x)
        q = rotate(dense((self.groups, HEADS // self.groups, size), name="q")(h).reshape(*x.shape[:2], HEADS, size))
        q = q.reshape(*x.shape[:2], self.groups, -1, size)
        k = rotate(dense((self.groups, size), name="k")(h))
        v = dense((self.groups, size), name="v")(h)
        scores = jnp.einsum("bsgqd,btgd->bgqst", q, k).astype(jnp.float32) * size**-0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(BF16)
        out = jnp.einsum("bgqst,btgd->bsgqd", weights, v)
        x = x + dense(width, axis=(-3, -2, -1), name="o")(out)
        h = nn.RMSNorm(dtype=BF16)(x)
        h = nn.silu(dense(3 * width, name="gate")(h)) * dense(3 * width, name="up")(h)
        return x + dense(width, name="down")(h), None


class Llama(nn.Module):
    layers: int
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, dtype=BF16)(tokens)
        x = _stack(LlamaLayer, self.layers, self.scan, self.remat, x)
        x = nn.RMSNorm(dtype=BF16)(x)
        return nn.Dense(VOCAB, use_bias=False, dtype=BF16, name="head")(x).astype(jnp.float32)


def _llama(layers: int, scan: bool, remat: bool):
    return training(Llama(layers, scan, remat), {"x": TOKENS, "y": TOKENS})


# ---- BERT: normalised after each block, exact GELU, a head on the masked tokens only -----------------


class BertLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.MultiHeadDotProductAttention(HEADS, dtype=BF16)(x)
        x = nn.LayerNorm(dtype=BF16)(x + h)
        h = nn.Dense(4 * x.shape[-1], dtype=BF16)(x)
        h = nn.Dense(x.shape[-1], dtype=BF16)(nn.gelu(h, approximate=False))
        return nn.LayerNorm(dtype=BF16)(x + h), None


class Bert(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, batch):
        tokens = batch["tokens"]
        embed = nn.Embed(VOCAB, 1024, dtype=BF16)
        places = self.param("positions", nn.initializers.normal(), (tokens.shape[1], 1024))
        kinds = nn.Embed(2, 1024, dtype=BF16)(batch["segments"])
        x = nn.LayerNorm(dtype=BF16)(embed(tokens) + kinds + places.astype(BF16))
        x = _stack(BertLayer, self.layers, False, False, x)
        x = jnp.take_along_axis(x, batch["masked"][..., None], axis=1)
        x = nn.LayerNorm(dtype=BF16)(nn.gelu(nn.Dense(1024, dtype=BF16)(x)))
        return embed.attend(x).astype(jnp.float32)


def bert_unroll():
    tokens, masked = array(256, 512), array(256, 76)
    return training(Bert(4), {"x": {"tokens": tokens, "segments": tokens, "masked": masked}, "y": masked})


# ---- Encoder and decoder: T5's layers without biases, attention across -------------------------------


class Feed(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4 * x.shape[-1], use_bias=False, dtype=BF16)(nn.RMSNorm(dtype=BF16)(x))
        return x + nn.Dense(x.shape[-1], use_bias=False, dtype=BF16)(nn.relu(h))


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(dtype=BF16)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False, dtype=BF16)(h)
        return Feed()(x), None


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, memory):
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        attend = functools.partial(nn.MultiHeadDotProductAttention, HEADS, use_bias=False, dtype=BF16)
        x = x + attend(name="own")(nn.RMSNorm(dtype=BF16)(x), mask=mask)
        x = x + attend(name="across")(nn.RMSNorm(dtype=BF16)(x), memory)
        return Feed()(x), None


class EncoderDecoder(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(VOCAB, 1024, dtype=BF16)
        memory = _stack(EncoderLayer, self.layers, True, False, embed(batch["source"]), name="encoder")
        memory = nn.RMSNorm(dtype=BF16)(memory)
        x = _stack(DecoderLayer, self.layers, True, False, embed(batch["target"]), memory, name="decoder")
        return embed.attend(nn.RMSNorm(dtype=BF16)(x)).astype(jnp.float32)


def encoder_decoder():
    source, target = array(128, 512), array(128, 256)
    return training(EncoderDecoder(6), {"x": {"source": source, "target": target}, "y": target})


# ---- a GPT in nnx -------------------------------------------------------------------------------------


class NnxLayer(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.ln1 = nnx.LayerNorm(width, dtype=BF16, rngs=rngs)
        self.ln2 = nnx.LayerNorm(width, dtype=BF16, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, dtype=BF16, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=BF16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attn(self.ln1(x), mask=mask)
        return x + self.down(nnx.silu(self.up(self.ln2(x))))


class NnxGPT(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 1024, dtype=BF16, rngs=rngs)
        self.layers = nnx.List([NnxLayer(1024, 8, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(1024, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(1024, VOCAB, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def nnx_gpt():
    tx = optimizer()
    model = nnx.eval_shape(lambda: NnxGPT(4, nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(state, batch):
        def loss_fn(params):
            return cross_entropy(nnx.merge(graph, params, state["rest"])(batch["x"]), batch["y"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "rest": state["rest"],
        }, loss

    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params), "rest": rest}
    return step, state, {"x": TOKENS, "y": TOKENS}


PROGRAMS = {
    "gpt_scan_remat": lambda: _gpt(layers=8),
    "gpt_scan": lambda: _gpt(layers=6, remat=False),
    "gpt_unroll_remat": lambda: _gpt(scan=False),
    "gpt_unroll": lambda: _gpt(scan=False, remat=False),
    "llama_scan_remat": lambda: _llama(8, True, True),
    "llama_scan": lambda: _llama(4, True, False),
    "llama_unroll_remat": lambda: _llama(3, False, True),
    "moe_scan_remat": lambda: _gpt(layers=4, width=1024, heads=8, experts=8),
    "moe_unroll": lambda: _gpt(layers=3, width=1024, heads=8, experts=8, scan=False, remat=False),
    "bert_unroll": bert_unroll,
    "encoder_decoder": encoder_decoder,
    "nnx_gpt": nnx_gpt,
}
