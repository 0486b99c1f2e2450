"""A mesh on which only bytes count: compute is so dear that all of it must be split, latency is nothing."""

from __future__ import annotations

from spmd_auto.mesh import Chip, Link, LogicalMesh

CHIP = Chip("toy", "gpu", ((8, 1e9),), 1e15, 1e15, 0.0)


def toy_mesh(*sizes: int, bandwidth: tuple[float, ...] = ()) -> LogicalMesh:
    speeds = bandwidth or (1e9,) * len(sizes)
    return LogicalMesh(tuple("abc"[: len(sizes)]), sizes, tuple(Link(b, 0.0) for b in speeds), CHIP)


def all_reduce(devices: int, payload: float) -> float:
    """Bytes that one device sends."""
    return 2 * (devices - 1) / devices * payload
