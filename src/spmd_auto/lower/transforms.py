"""Fourier transforms on shards: XLA gathers them along every dimension, and on CPUs can't run what it gathered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from spmd_auto import _compat
from spmd_auto.lower.placement import Placement
from spmd_auto.mesh.logical import LogicalMesh


def _fft(eqn: Any, placement: Placement, logical: LogicalMesh) -> Callable[..., Any]:
    """The transform of one stack: a gathered array may lie in memory in an order that the CPU's transform refuses.

    A reshape brings it into the usual order.
    """
    transformed = len(eqn.params["fft_lengths"])

    def local(x: Any) -> Any:
        first = x.ndim - transformed
        stack = x.reshape(math.prod(x.shape[:first]), *x.shape[first:])
        out = _compat.bind(eqn, (stack,))[0]
        return out.reshape(*x.shape[:first], *out.shape[1:])

    return local


LOCAL: dict[str, Callable[[Any, Placement, LogicalMesh], Callable[..., Any]]] = {"fft": _fft}
