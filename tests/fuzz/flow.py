"""Recipes with a program inside: loops, branches, calls, custom derivatives; and random bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.draft import Draft, Recipe

Proposal = tuple[tuple[int, ...], dict[str, Any]] | None

DRAWS = {
    "uniform": lambda key, shape: jax.random.uniform(key, shape, jnp.float64),
    "normal": lambda key, shape: jax.random.normal(key, shape, jnp.float64),
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.5, shape) * 2.0,
    "permutation": lambda key, shape: jax.random.permutation(key, 1.0 * jnp.arange(shape[0])).reshape(
        -1, *[1] * (len(shape) - 1)
    ),
}


def drawn(d: Draft) -> Proposal:
    return (d.pick(1),), {"kind": d.rng.choice(list(DRAWS)), "seed": d.rng.randrange(100), "each": d.chance(0.3)}


def _drawn(x: Any, kind: str, seed: int, each: bool) -> Any:
    key = jax.random.fold_in(jax.random.key(seed), 3)
    if each and x.ndim > 1:
        keys = jax.random.split(key, x.shape[0])
        return x * jax.vmap(lambda k: DRAWS[kind](k, x.shape[1:]))(keys)
    return x * DRAWS[kind](key, x.shape)


def masked(d: Draft) -> Proposal:
    return (d.pick(2),), {}


def _masked(x: Any) -> Any:
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1.0) + jnp.arange(x.shape[-1]) / 8


def layers(d: Draft) -> Proposal:
    """tanh(c @ w[t]) through a stack of weights, or with one weight."""
    x = d.pick(2, 3)
    width, count = d.shape(x)[-1], d.rng.choice((2, 3, 4, 8))
    stacked = d.chance(0.7)
    w = d.like((count, width, width) if stacked else (width, width))
    return (x, w), {
        "count": None if stacked else count,
        "remat": d.chance(0.4),
        "outs": d.chance(0.3),
        "reverse": d.chance(0.2),
    }


def _layers(x: Any, w: Any, count: int | None, remat: bool, outs: bool, reverse: bool) -> Any:
    def layer(c: Any, wt: Any) -> tuple[Any, Any]:
        c = jnp.tanh(c @ (w if wt is None else wt))
        return c, c.sum(-1) if outs else None

    body = jax.checkpoint(layer) if remat else layer
    final, ys = lax.scan(body, x, None if count else w, length=count, reverse=reverse)
    return (final, ys) if outs else final


def recurrence(d: Draft) -> Proposal:
    """A loop over the first dimension of a sequence with a matrix for the state."""
    x = d.pick(2, 3, where=lambda s: s[0] > 1)
    width = d.shape(x)[-1]
    return (x, d.like((width, width))), {"reverse": d.chance(0.3), "unroll": d.rng.choice((1, 1, 2))}


def _recurrence(x: Any, u: Any, reverse: bool, unroll: int) -> Any:
    def body(c: Any, t: Any) -> tuple[Any, Any]:
        c = jnp.tanh(t + c @ u)
        return c, c * t

    return lax.scan(body, jnp.zeros_like(x[0]), x, reverse=reverse, unroll=unroll)


def accumulated(d: Draft) -> Proposal:
    """Partial results of the pieces of a batch, added up."""
    x = d.pick(2, 2, where=lambda s: s[0] % 4 == 0)
    return (x, d.like((d.shape(x)[1], d.size()))), {}


def _accumulated(x: Any, w: Any) -> Any:
    def body(total: Any, part: Any) -> tuple[Any, Any]:
        return total + jnp.tanh(part @ w).T @ part, part.sum()

    return lax.scan(body, jnp.zeros((w.shape[1], x.shape[1])), x.reshape(4, -1, x.shape[1]))


def until(d: Draft) -> Proposal:
    x = d.pick(2, 2)
    width = d.shape(x)[1]
    return (x, d.like((width, width))), {}


def _until(x: Any, w: Any) -> Any:
    def go_on(c: Any) -> Any:
        return (c[0] < 4) & (jnp.abs(c[1]).sum() > 1e-3)

    return lax.while_loop(go_on, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w) * 0.5), (0, x))[1]


def branches(d: Draft) -> Proposal:
    x = d.pick(2, 3)
    width = d.shape(x)[-1]
    return (x, d.like((width, width))), {"switch": d.chance(0.4)}


def _branches(x: Any, w: Any, switch: bool) -> Any:
    if switch:
        index = (x.sum() * 1e3).astype(jnp.int32) % 3
        return lax.switch(
            index, [lambda x, w: x @ w, lambda x, w: jnp.flip(x, 0), lambda x, w: jnp.tanh(x) * w[0]], x, w
        )
    return lax.cond(x.sum() > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: x * 2, x, w)


def called(d: Draft) -> Proposal:
    x = d.pick(2, 3)
    return (x, d.like((d.shape(x)[-1], d.size()))), {"kind": d.rng.choice(list(CALLS))}


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(2 * ct, -1, 1) * jnp.cos(x),))


@jax.custom_jvp
def _doubled(x: Any) -> Any:
    return x * 2


_doubled.defjvp(lambda p, t: (_doubled(p[0]), 3 * t[0]))


CALLS = {
    "remat": jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) * 2)),
    "jit": jax.jit(lambda x, w: x @ w + 1),
    "custom_vjp": lambda x, w: _clipped(x @ w),
    "custom_jvp": lambda x, w: _doubled(x @ w),
    "vmap": lambda x, w: jax.vmap(lambda row: jnp.tanh(row @ w))(x),
    "barrier": lambda x, w: lax.optimization_barrier(x @ w),
}


def associative(d: Draft) -> Proposal:
    x = d.pick(1, 3)
    return (x,), {"axis": d.dim(x)}


RECIPES = {
    "drawn": Recipe(_drawn, drawn),
    "masked": Recipe(_masked, masked),
    "layers": Recipe(_layers, layers),
    "recurrence": Recipe(_recurrence, recurrence),
    "accumulated": Recipe(_accumulated, accumulated),
    "until": Recipe(_until, until, smooth=False),
    "branches": Recipe(_branches, branches),
    "called": Recipe(lambda x, w, kind: CALLS[kind](x, w), called),
    "associative": Recipe(lambda x, axis: lax.associative_scan(jnp.add, x, axis=axis), associative),
}
