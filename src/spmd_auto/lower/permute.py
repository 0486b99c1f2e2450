"""Collective-permutes along a dimension that is split over several mesh axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import lax

from spmd_auto.mesh.logical import LogicalMesh


def permute(x: Any, axes: tuple[str, ...], pairs: Iterable[tuple[int, int]], logical: LogicalMesh) -> Any:
    """`lax.ppermute` of pieces numbered as the dimension is split over `axes`, the first one major.

    JAX numbers the devices of several axes in the order of the mesh, whatever the order of the names.
    """
    ordered = tuple(name for name in logical.names if name in axes)
    sizes = [logical.sizes[logical.names.index(name)] for name in ordered]
    places = np.arange(np.prod(sizes)).reshape(sizes).transpose([ordered.index(name) for name in axes]).ravel()
    return lax.ppermute(x, ordered, [(int(places[sender]), int(places[receiver])) for sender, receiver in pairs])
