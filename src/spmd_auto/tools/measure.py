"""Timed runs on the devices that are there: matrix products, a stream through memory, collectives over mesh axes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd_auto.mesh.stages import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE)
RUNS, LEAST = 3, 0.02  # a figure is the best of at least so many runs, over at least so many seconds


def best_of(run: Callable[[], Any]) -> float:
    """Seconds of the fastest run; the first one, which may compile, does not count."""
    jax.block_until_ready(run())
    best, spent, runs = float("inf"), 0.0, 0
    while runs < RUNS or spent < LEAST:
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds = time.perf_counter() - start
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return best


def matmul_rate(device: Any, n: int, dtype: Any) -> float:
    """FLOP/s of an n x n matrix product on one device."""
    x = jax.device_put(jnp.ones((n, n), dtype), device)
    return 2.0 * n**3 / best_of(functools.partial(jax.jit(jnp.matmul), x, x))


def stream_rate(device: Any, size: int) -> float:
    """Bytes/s that one device reads and writes, over an array of `size` bytes."""
    x = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    return 2.0 * size / best_of(functools.partial(jax.jit(lambda x: x + 1), x))


def collective_seconds(mesh: jax.sharding.Mesh, kind: str, axis: str, size: int) -> tuple[int, float]:
    """(payload bytes of one device, seconds) of a collective over one mesh axis; `size` is rounded to whole shards."""
    n = mesh.shape[axis]
    elements = max(n, size // 4 // n * n)
    local = elements // n if kind == ALL_GATHER else elements  # the payload of a gather is its result
    bodies: dict[str, Callable[[Any], Any]] = {
        ALL_REDUCE: lambda x: jax.lax.psum(x, axis),
        ALL_GATHER: lambda x: jax.lax.all_gather(x, axis, tiled=True),
        REDUCE_SCATTER: lambda x: jax.lax.psum_scatter(x, axis, tiled=True),
        ALL_TO_ALL: lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
        PERMUTE: lambda x: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
    }
    spec = jax.P(mesh.axis_names)  # each device has data of its own
    run = jax.jit(jax.shard_map(bodies[kind], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    x = jax.device_put(jnp.ones(local * mesh.size, jnp.float32), sharding)
    return elements * 4, best_of(functools.partial(run, x))
