"""Mixture-of-experts blocks as people write them: six ways to bring tokens to their experts and back.

Each is `block(params, x) -> y` on tokens `x[batch, sequence, width]`; none marks its experts in any way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EXPERTS, WIDTH, HIDDEN, BATCH, SEQUENCE = 8, 16, 32, 16, 8
CAPACITY = 2  # tokens that an expert takes of each sequence


def experts_mlp(params, buffers):
    """`buffers[experts, slots, width]` through each expert's own two layers."""
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", buffers, params["up"]))
    return jnp.einsum("ecf,efd->ecd", hidden, params["down"])


def routing(params, x):
    """(weight of the best expert, its index) of each token."""
    return lax.top_k(jax.nn.softmax(x @ params["router"], axis=-1), 1)


def one_hot(params, x):
    """GShard: masks [batch, sequence, experts, slots] dispatch and combine, with drops beyond the capacity."""
    gates, index = routing(params, x)
    chosen = jax.nn.one_hot(index[..., 0], EXPERTS, dtype=x.dtype)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    dispatch = jax.nn.one_hot(place.astype(jnp.int32), CAPACITY, dtype=x.dtype) * chosen[..., None]
    buffers = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", buffers, params["up"]))
    out = jnp.einsum("ebcf,efd->ebcd", hidden, params["down"])
    return jnp.einsum("bsec,ebcd->bsd", dispatch * gates[..., None], out)


def shared(params, x):
    """One-hot dispatch, and one expert that sees every token."""
    return one_hot(params, x) + jax.nn.relu(x @ params["shared_up"]) @ params["shared_down"]


def sorted_slots(params, x):
    """Tokens sorted by expert, written into slots by index, read back from them."""
    tokens = x.reshape(-1, WIDTH)
    gates, index = routing(params, tokens)
    slots = CAPACITY * BATCH
    order = jnp.argsort(index[:, 0])
    expert = index[order, 0]
    rank = jnp.arange(order.size) - jnp.searchsorted(expert, expert)
    slot = jnp.where(rank < slots, expert * slots + rank, EXPERTS * slots)
    buffers = jnp.zeros((EXPERTS * slots, WIDTH), x.dtype).at[slot].set(tokens[order], mode="drop")
    out = experts_mlp(params, buffers.reshape(EXPERTS, slots, WIDTH)).reshape(-1, WIDTH)
    back = out.at[slot].get(mode="fill", fill_value=0) * gates[order]
    return jnp.zeros_like(tokens).at[order].set(back).reshape(x.shape)


def ragged(params, x):
    """Dropless: tokens sorted by expert, groups of their own sizes."""
    tokens = x.reshape(-1, WIDTH)
    gates, index = routing(params, tokens)
    order = jnp.argsort(index[:, 0])
    sizes = jnp.bincount(index[:, 0], length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.relu(lax.ragged_dot(tokens[order], params["up"], sizes))
    out = lax.ragged_dot(hidden, params["down"], sizes) * gates[order]
    return jnp.zeros_like(tokens).at[order].set(out).reshape(x.shape)


def vmapped(params, x):
    """Every expert on every token, as `vmap` of one expert's function over a stack of parameters."""

    def expert(up, down, tokens):
        return jax.nn.relu(tokens @ up) @ down

    weights = jax.nn.softmax(x @ params["router"], axis=-1)
    out = jax.vmap(expert, in_axes=(0, 0, None))(params["up"], params["down"], x)
    return jnp.einsum("ebsd,bse->bsd", out, weights)


def expert_choice(params, x):
    """Experts choose their tokens: gathered by index, added back by index."""
    tokens = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(tokens @ params["router"], axis=-1)
    weight, index = lax.top_k(scores.T, CAPACITY * BATCH)
    out = experts_mlp(params, tokens[index]) * weight[..., None]
    return jnp.zeros_like(tokens).at[index].add(out).reshape(x.shape)


BLOCKS = {f.__name__: f for f in (one_hot, shared, sorted_slots, ragged, vmapped, expert_choice)}


def make(block: str):
    """(step(params, x) -> new params, (loss, gradients); params; x) in float64."""
    rng = np.random.default_rng(0)
    shapes = {
        "before": (WIDTH, WIDTH),  # so that tokens have gradients, as in a deep model
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    if block == "shared":
        shapes |= {"shared_up": (WIDTH, HIDDEN), "shared_down": (HIDDEN, WIDTH)}
    params = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    x = rng.normal(size=(BATCH, SEQUENCE, WIDTH))

    def step(params, x):
        def loss_fn(params):
            h = jnp.tanh(x @ params["before"])
            return jnp.mean((BLOCKS[block](params, h) + h) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, grads)

    return step, params, x
