"""Recipes that compute: elementwise ones, reductions, contractions, convolutions, windows, linear algebra."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.draft import Draft, Recipe

Proposal = tuple[tuple[int, ...], dict[str, Any]] | None

UNARY = {
    "tanh": jnp.tanh,
    "square": lambda x: x * x * 0.5,
    "relu": lambda x: jnp.maximum(x, 0),
    "logistic": jax.nn.sigmoid,
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "stop": lambda x: lax.stop_gradient(x) + x,
    "positive": lambda x: (x > 0).astype(x.dtype) * 2 - 1,
}
BINARY = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "sub": jnp.subtract,
    "max": jnp.maximum,
    "select": lambda x, y: jnp.where(x > y, x, 2 * y),
    "divide": lambda x, y: x / (1 + y * y),
}
REDUCTIONS = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "mean": jnp.mean,
    "prod": jnp.prod,
    "logsumexp": jax.nn.logsumexp,
    "var": jnp.var,
}
CUMULATIVE = {"sum": lax.cumsum, "max": lax.cummax, "logsumexp": lax.cumlogsumexp, "prod": lax.cumprod}


def unary(d: Draft) -> Proposal:
    return (d.pick(0),), {"kind": d.rng.choice(list(UNARY))}


def binary(d: Draft) -> Proposal:
    x = d.pick(0)
    shape = d.shape(x)
    if d.chance(0.5):
        shape = tuple(1 if d.chance(0.3) else n for n in shape)[d.rng.randint(0, len(shape)) if d.chance(0.3) else 0 :]
    operands = (x, d.like(shape))
    return operands if d.chance() else operands[::-1], {"kind": d.rng.choice(list(BINARY))}


def reduction(d: Draft) -> Proposal:
    x = d.pick()
    dims = tuple(sorted(d.rng.sample(range(len(d.shape(x))), d.rng.randint(1, min(2, len(d.shape(x)))))))
    return (x,), {"kind": d.rng.choice(list(REDUCTIONS)), "dims": dims, "keepdims": d.chance(0.3)}


def _reduce(x: Any, kind: str, dims: tuple[int, ...], keepdims: bool) -> Any:
    return REDUCTIONS[kind](x, axis=dims, keepdims=keepdims)


def softmax(d: Draft) -> Proposal:
    x = d.pick()
    return (x,), {"axis": d.dim(x)}


def _counted(x: Any, dim: int) -> Any:
    return jnp.count_nonzero(x > 0, axis=dim).astype(jnp.int32)


def dot(d: Draft) -> Proposal:
    x = d.pick(1, 4)
    shape = d.shape(x)
    dims = d.rng.sample(range(len(shape)), len(shape))
    contract = dims[: d.rng.choice((1, 1, 1, 2, 0))]
    batch = [k for k in dims if k not in contract][: d.rng.choice((0, 0, 0, 1, 2))]
    roles = ["c"] * len(contract) + ["b"] * len(batch) + ["f"] * d.rng.choice((0, 1, 1, 1, 2))
    order = d.rng.sample(range(len(roles)), len(roles))
    sizes = [shape[k] for k in (*contract, *batch)]
    other = tuple(sizes[i] if roles[i] != "f" else d.size() for i in order)
    at = {i: p for p, i in enumerate(order)}
    numbers = (
        (tuple(contract), tuple(at[i] for i in range(len(contract)))),
        (tuple(batch), tuple(at[len(contract) + i] for i in range(len(batch)))),
    )
    return (x, d.like(other)), {"numbers": numbers, "swapped": d.chance(0.3)}


def _dot(x: Any, y: Any, numbers: Any, swapped: bool) -> Any:
    (a, b), (c, e) = numbers
    scale = 1.0
    for k in a:
        scale *= x.shape[k]
    args = (y, x, ((b, a), (e, c))) if swapped else (x, y, ((a, b), (c, e)))
    return lax.dot_general(*args) / scale**0.5


def gram(d: Draft) -> Proposal:
    x = d.pick(2, 2)
    return (x,), {"first": d.chance()}


def conv(d: Draft) -> Proposal:
    x = d.pick(3, 4)
    shape = d.shape(x)
    layout = d.rng.sample(range(len(shape)), len(shape)) if d.chance(0.4) else list(range(len(shape)))
    channels = shape[layout[1]]
    groups = d.rng.choice([g for g in (1, 1, 2, 4, 8, channels) if channels % g == 0])
    features = groups * d.rng.choice((1, 2, 4, 8))
    spatial = len(shape) - 2
    window = tuple(d.rng.choice((1, 2, 3, 3, 4)) for _ in range(spatial))
    padding = d.rng.choice(("SAME", "VALID", tuple((d.rng.randint(0, 2), d.rng.randint(0, 2)) for _ in range(spatial))))
    dilated = d.chance(0.2)
    params = {
        "strides": tuple(d.rng.choice((1, 1, 2, 3)) for _ in range(spatial)),
        "padding": padding if not dilated or padding != "SAME" else "VALID",
        "lhs_dilation": tuple(d.rng.choice((1, 2)) for _ in range(spatial)) if dilated else (1,) * spatial,
        "rhs_dilation": tuple(d.rng.choice((1, 1, 1, 2)) for _ in range(spatial)),
        "layout": tuple(layout),
        "groups": groups,
    }
    return (x, d.like((features, channels // groups, *window))), params


def _conv(
    x: Any, w: Any, strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, layout: Any, groups: int
) -> Any:
    plain = tuple(range(x.ndim))
    numbers = lax.ConvDimensionNumbers(layout, plain, layout)
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


def window(d: Draft) -> Proposal:
    x = d.pick(1, 4)
    rank = len(d.shape(x))
    sizes = tuple(d.rng.choice((1, 1, 2, 3)) for _ in range(rank))
    strides = tuple(d.rng.choice((1, n)) for n in sizes)
    return (x,), {
        "kind": d.rng.choice(("max", "sum")),
        "window": sizes,
        "strides": strides,
        "padding": d.rng.choice(("SAME", "VALID")),
    }


def _window(x: Any, kind: str, window: Any, strides: Any, padding: str) -> Any:
    if kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
    return lax.reduce_window(x, 0.0, lax.add, window, strides, padding)


def cumulative(d: Draft) -> Proposal:
    x = d.pick(1)
    return (x,), {"kind": d.rng.choice(list(CUMULATIVE)), "axis": d.dim(x), "reverse": d.chance(0.3)}


def square_matrix(d: Draft) -> Proposal:
    x = d.pick(2, 3, where=lambda s: s[-1] <= 16)
    return (x,), {}


def _cholesky(x: Any) -> Any:
    return jnp.linalg.cholesky(x @ jnp.swapaxes(x, -1, -2) + 20 * jnp.eye(x.shape[-2]))


def _solve(x: Any) -> Any:
    a = jnp.tanh(x @ jnp.swapaxes(x, -1, -2)) / x.shape[-2] + 2 * jnp.eye(x.shape[-2])
    return jnp.linalg.solve(a, x)


def fft(d: Draft) -> Proposal:
    return (d.pick(1, 3),), {}


RECIPES = {
    "unary": Recipe(lambda x, kind: UNARY[kind](x), unary),
    "binary": Recipe(lambda x, y, kind: BINARY[kind](x, y), binary),
    "reduction": Recipe(_reduce, reduction),
    "softmax": Recipe(lambda x, axis: jax.nn.softmax(x, axis), softmax),
    "counted": Recipe(_counted, lambda d: ((x := d.pick(),), {"dim": d.dim(x)})[0:2], smooth=False),
    "argmax": Recipe(
        lambda x, axis: jnp.argmax(x, axis).astype(jnp.int32), lambda d: ((x := d.pick(2),), {"axis": d.dim(x)})
    ),
    "dot": Recipe(_dot, dot),
    "gram": Recipe(lambda x, first: (x.T @ x if first else x @ x.T) / 4, gram),
    "conv": Recipe(_conv, conv),
    "window": Recipe(_window, window),
    "cumulative": Recipe(lambda x, kind, axis, reverse: CUMULATIVE[kind](x, axis, reverse), cumulative),
    "cholesky": Recipe(_cholesky, square_matrix),
    "solve": Recipe(_solve, square_matrix),
    "fft": Recipe(lambda x: jnp.abs(jnp.fft.fft(x)) / x.shape[-1], fft),
}
