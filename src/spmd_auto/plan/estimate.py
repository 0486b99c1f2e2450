"""How many devices a state needs at least, before there is a model to trace."""

from __future__ import annotations

import math

from spmd_auto.errors import MemoryBudgetError


def estimate_devices(parameters: float, *, memory: float, itemsize: int = 4, copies: int = 4) -> int:
    """The smallest number of devices whose memory holds a training state split evenly over all of them.

    Args:
      parameters: number of parameters, `200e9`.
      memory: bytes of one device, `80 * 2**30`.
      itemsize: bytes of one number.
      copies: numbers kept per parameter: itself, its gradient and Adam's two moments.

    Returns:
      A lower bound: activations, and arrays that are not split, come on top.

    Raises:
      MemoryBudgetError: a size that is not positive.
    """
    sizes = {"parameters": parameters, "memory": memory, "itemsize": itemsize, "copies": copies}
    for name, size in sizes.items():
        if not size > 0:
            raise MemoryBudgetError(f"estimate_devices: {name}={size!r}", "sizes are above zero")
    return math.ceil(parameters * itemsize * copies / memory)
