"""Recipes that move elements: reshapes, slices, joins, gathers, scatters, sorts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.draft import Draft, Recipe

Proposal = tuple[tuple[int, ...], dict[str, Any]] | None


def reshape(d: Draft) -> Proposal:
    """Dimensions merged, cut, or all factored anew."""
    x = d.pick(1)
    shape = list(d.shape(x))
    for _ in range(d.rng.randint(1, 3)):
        way = d.rng.random()
        if way < 0.4 and len(shape) > 1:
            k = d.rng.randrange(len(shape) - 1)
            shape[k : k + 2] = [shape[k] * shape[k + 1]]
        elif way < 0.8:
            k = d.rng.randrange(len(shape))
            factor = d.rng.choice([n for n in range(1, shape[k] + 1) if shape[k] % n == 0])
            shape[k : k + 1] = [factor, shape[k] // factor]
        elif len(shape) < 5:
            shape.insert(d.rng.randint(0, len(shape)), 1)
        if len(shape) > 5:
            shape = [math.prod(shape[:-3]), *shape[-3:]]
    return (x,), {"shape": tuple(shape)}


def transpose(d: Draft) -> Proposal:
    x = d.pick(2)
    rank = len(d.shape(x))
    return (x,), {"order": tuple(d.rng.sample(range(rank), rank))}


def broadcast(d: Draft) -> Proposal:
    x = d.pick(0, 3)
    return (x,), {"size": d.size(), "at": d.rng.randint(0, len(d.shape(x)))}


def concatenate(d: Draft) -> Proposal:
    x = d.pick(1)
    axis, shape = d.dim(x), d.shape(x)
    size = shape[axis] if d.chance(0.6) else d.size()
    other = d.like((*shape[:axis], size, *shape[axis + 1 :]))
    return ((x, other) if d.chance() else (other, x, other)), {"axis": axis}


def stack(d: Draft) -> Proposal:
    x = d.pick(1, 4)
    return (x, d.like(d.shape(x))), {"axis": d.rng.randint(0, len(d.shape(x)))}


def split(d: Draft) -> Proposal:
    x = d.pick(1, where=lambda s: max(s) > 1)
    axis = d.rng.choice([k for k, n in enumerate(d.shape(x)) if n > 1] or [0])
    n = d.shape(x)[axis]
    if d.chance(0.6) and n % 2 == 0:
        return (x,), {"sizes": (n // 2, n // 2), "axis": axis}
    cut = d.rng.randint(1, max(1, n - 1))
    return (x,), {"sizes": (cut, n - cut), "axis": axis}


def pad(d: Draft) -> Proposal:
    x = d.pick(1)
    config = tuple(
        d.rng.choice(
            ((0, 0, 0), (1, 0, 0), (0, 3, 0), (2, 2, 0), (-1, 1, 0), (0, 0, 1), (4, 4, 0), (-2, -1, 0), (8, 0, 0))
        )
        for _ in d.shape(x)
    )
    return (x,), {"config": config}


def slices(d: Draft) -> Proposal:
    x = d.pick(1)
    starts, limits, strides = [], [], []
    for n in d.shape(x):
        a, b = (0, n) if d.chance(0.5) else sorted((d.rng.randint(0, n - 1), d.rng.randint(1, n)))
        starts.append(a)
        limits.append(max(b, a + 1))
        strides.append(d.rng.choice((1, 1, 1, 2, 3)))
    return (x,), {"starts": tuple(starts), "limits": tuple(limits), "strides": tuple(strides)}


def rolled(d: Draft) -> Proposal:
    x = d.pick(1)
    return (x,), {"shift": d.rng.choice((1, -1, 3, 8)), "axis": d.dim(x)}


def reversed_(d: Draft) -> Proposal:
    x = d.pick(1)
    return (x,), {"axis": d.dim(x)}


def tiled(d: Draft) -> Proposal:
    x = d.pick(1, 3)
    return (x,), {"reps": tuple(d.rng.choice((1, 1, 2, 3)) for _ in d.shape(x)), "repeats": d.chance()}


def take(d: Draft) -> Proposal:
    x = d.pick(1, 4)
    axis = d.dim(x)
    i = d.indices(d.dims(0, 2), d.shape(x)[axis])
    return (x, i), {"axis": axis, "mode": d.rng.choice(("clip", "fill", "wrap"))}


def take_along(d: Draft) -> Proposal:
    x = d.pick(1, 4)
    axis, shape = d.dim(x), d.shape(x)
    picked = d.rng.choice((1, shape[axis], d.size()))
    i = d.indices((*shape[:axis], picked, *shape[axis + 1 :]), shape[axis])
    return (x, i), {"axis": axis, "mode": d.rng.choice(("clip", "fill"))}


def pairs(d: Draft) -> Proposal:
    """x[i, j] of the first two dimensions, or of the first and the last."""
    x = d.pick(2, 4)
    shape = d.dims(1, 2)
    i, j = d.indices(shape, d.shape(x)[0]), d.indices(shape, d.shape(x)[1])
    return (x, i, j), {"apart": d.chance(0.3)}


def _pairs(x: Any, i: Any, j: Any, apart: bool) -> Any:
    return x[i, ..., j] if apart else x[i, j]


def scatter(d: Draft) -> Proposal:
    x = d.pick(1, 3)
    axis, shape = d.dim(x), d.shape(x)
    places = d.dims(1, 2)
    i = d.indices(places, shape[axis])
    u = d.like((*shape[:axis], *places, *shape[axis + 1 :]))
    return (x, i, u), {
        "axis": axis,
        "kind": d.rng.choice(("add", "add", "add", "min", "max", "subtract")),
        "mode": d.rng.choice(("drop", "clip")),
    }


def _scatter(x: Any, i: Any, u: Any, axis: int, kind: str, mode: str) -> Any:
    at = x.at[(*(slice(None),) * axis, i)]
    return getattr(at, kind)(u, mode=mode)


def scatter_pairs(d: Draft) -> Proposal:
    x = d.pick(2, 3)
    places = d.dims(1, 1)
    i, j = d.indices(places, d.shape(x)[0]), d.indices(places, d.shape(x)[1])
    return (x, i, j, d.like((*places, *d.shape(x)[2:]))), {}


def scatter_static(d: Draft) -> Proposal:
    """x.at[2:5, 3].set(u) and the like: indices that are no data, each place once."""
    x = d.pick(1, 3)
    axis, shape = d.dim(x), d.shape(x)
    places = tuple(d.rng.sample(range(shape[axis]), d.rng.randint(1, min(4, shape[axis]))))
    u = d.like((*shape[:axis], len(places), *shape[axis + 1 :]))
    return (x, u), {"axis": axis, "places": places, "kind": d.rng.choice(("set", "add", "multiply"))}


def _scatter_static(x: Any, u: Any, axis: int, places: tuple[int, ...], kind: str) -> Any:
    at = x.at[(*(slice(None),) * axis, jnp.array(places))]
    return getattr(at, kind)(u, unique_indices=True)


def segment_sum(d: Draft) -> Proposal:
    x = d.pick(1, 3)
    n = d.size()
    return (x, d.indices((d.shape(x)[0],), n)), {"segments": n}


def dynamic_slice(d: Draft) -> Proposal:
    x = d.pick(1, 3)
    shape = d.shape(x)
    starts = d.indices((len(shape),), max(shape))
    return (x, starts), {"sizes": tuple(n if d.chance() else d.rng.randint(1, n) for n in shape)}


def dynamic_update(d: Draft) -> Proposal:
    x = d.pick(1, 3)
    shape = d.shape(x)
    starts = d.indices((len(shape),), max(shape))
    return (x, starts, d.like(tuple(n if d.chance() else d.rng.randint(1, n) for n in shape))), {}


def windows_of_each(d: Draft) -> Proposal:
    """A dynamic slice of each row: a gather with batching dimensions and a window."""
    x = d.pick(2, 3)
    shape = d.shape(x)
    return (x, d.indices((shape[0],), shape[1])), {"size": d.rng.randint(1, shape[1])}


def _windows_of_each(x: Any, i: Any, size: int) -> Any:
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size))(x, i)


def sort(d: Draft) -> Proposal:
    x = d.pick(1)
    return (x,), {"axis": d.dim(x), "descending": d.chance(0.3)}


def sort_pairs(d: Draft) -> Proposal:
    x = d.pick(1)
    return (x, d.like(d.shape(x))), {"dim": d.dim(x)}


def top_k(d: Draft) -> Proposal:
    x = d.pick(1)
    return (x,), {"k": d.rng.randint(1, d.shape(x)[-1])}


def _top_k(x: Any, k: int) -> tuple[Any, Any]:
    values, places = lax.top_k(x, k)
    return values, places.astype(jnp.int32)


RECIPES = {
    "reshape": Recipe(lambda x, shape: x.reshape(shape), reshape),
    "transpose": Recipe(lambda x, order: x.transpose(order), transpose),
    "broadcast": Recipe(lambda x, size, at: jnp.repeat(jnp.expand_dims(x, at), size, at), broadcast),
    "concatenate": Recipe(lambda *xs, axis: jnp.concatenate(xs, axis), concatenate),
    "stack": Recipe(lambda x, y, axis: jnp.stack([x, y], axis), stack),
    "split": Recipe(lambda x, sizes, axis: tuple(lax.split(x, sizes, axis)), split),
    "pad": Recipe(lambda x, config: lax.pad(x, jnp.zeros((), x.dtype), config), pad),
    "slice": Recipe(lambda x, starts, limits, strides: lax.slice(x, starts, limits, strides), slices),
    "roll": Recipe(lambda x, shift, axis: jnp.roll(x, shift, axis), rolled),
    "reverse": Recipe(lambda x, axis: jnp.flip(x, axis), reversed_),
    "tile": Recipe(
        lambda x, reps, repeats: jnp.repeat(x, reps[0], 0) if repeats else jnp.tile(x, reps),
        tiled,
    ),
    "take": Recipe(lambda x, i, axis, mode: jnp.nan_to_num(jnp.take(x, i, axis, mode=mode)), take),
    "take_along": Recipe(
        lambda x, i, axis, mode: jnp.nan_to_num(jnp.take_along_axis(x, i, axis, mode=mode)), take_along
    ),
    "pairs": Recipe(_pairs, pairs),
    "scatter": Recipe(_scatter, scatter),
    "scatter_pairs": Recipe(lambda x, i, j, u: x.at[i, j].add(u), scatter_pairs),
    "scatter_static": Recipe(_scatter_static, scatter_static),
    "segment_sum": Recipe(lambda x, i, segments: jax.ops.segment_sum(x, i, segments), segment_sum),
    "dynamic_slice": Recipe(
        lambda x, at, sizes: lax.dynamic_slice(x, [at[k] for k in range(x.ndim)], sizes), dynamic_slice
    ),
    "dynamic_update": Recipe(
        lambda x, at, u: lax.dynamic_update_slice(x, u, [at[k] for k in range(x.ndim)]), dynamic_update
    ),
    "windows_of_each": Recipe(_windows_of_each, windows_of_each),
    "sort": Recipe(lambda x, axis, descending: jnp.sort(x, axis, descending=descending), sort),
    "argsort": Recipe(lambda x, axis, descending: jnp.argsort(x, axis, descending=descending).astype(jnp.int32), sort),
    "sort_pairs": Recipe(lambda x, y, dim: tuple(lax.sort((x, y), dimension=dim, num_keys=1)), sort_pairs),
    "top_k": Recipe(_top_k, top_k),
}
