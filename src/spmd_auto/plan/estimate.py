"""How many devices a training state needs at least, before there is a step to trace."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from spmd_auto import _compat
from spmd_auto.errors import MemoryBudgetError


@dataclasses.dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a training state as a whole: `total` is the sum of its parts."""

    parameters: int | float
    gradients: int | float
    optimizer: int | float

    @property
    def total(self) -> int | float:
        return self.parameters + self.gradients + self.optimizer


class DeviceEstimate(int):
    """A number of devices, and the bytes it comes from.

    Attributes:
      state: bytes of parameters, gradients and optimizer state.
      memory: bytes of one device.
    """

    state: StateBytes
    memory: float

    def __new__(cls, state: StateBytes, memory: float) -> DeviceEstimate:
        devices = super().__new__(cls, math.ceil(state.total / memory))
        devices.state, devices.memory = state, memory
        return devices

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceEstimate, (self.state, self.memory)

    @property
    def bytes_per_device(self) -> float:
        """Bytes on each of these devices, split evenly."""
        return self.state.total / self

    def __str__(self) -> str:
        from spmd_auto.plan.explain import size

        s = self.state
        parts = f"parameters {size(s.parameters)} + gradients {size(s.gradients)} + optimizer state {size(s.optimizer)}"
        return f"{int(self)} devices of {size(self.memory)}: {size(s.total)} = {parts}"


def estimate_devices(
    parameters: Any,
    *,
    memory: float,
    itemsize: int = 4,
    copies: int = 4,
    dtype: Any = None,
    optimizer: Any = None,
) -> DeviceEstimate:
    """The smallest number of devices whose memory holds a training state split evenly over all of them.

    Args:
      parameters: a number of parameters (`200e9`), or the parameters: a tree of arrays or `ShapeDtypeStruct`s.
      memory: bytes of one device, `80 * 2**30`.
      itemsize: bytes of one number; with a tree its own dtypes count.
      copies: numbers kept per parameter, where no optimizer is given: itself, its gradient and Adam's two moments.
      dtype: element type instead of `itemsize`; with a tree that of its floating-point leaves.
      optimizer: optax transformation; then the bytes of its state for this tree are exact, and `copies` is not used.

    Returns:
      An int that also has the bytes (`.state`): a lower bound, activations and arrays that are not split come on top.

    Raises:
      MemoryBudgetError: a size that is not positive, a tree without arrays, or an optimizer with a mere number of
        parameters, or that is none.
    """
    if isinstance(parameters, (int, float)) or not hasattr(parameters, "dtype") and hasattr(parameters, "__float__"):
        if optimizer is not None:
            raise MemoryBudgetError(
                f"estimate_devices: an optimizer for parameters={parameters!r}",
                "what an optimizer keeps depends on the shapes of the parameters",
                [
                    "jax.eval_shape(model.init, ...) as parameters: nothing is computed",
                    "copies=4 for Adam's two moments",
                ],
            )
        size = itemsize if dtype is None else jax.numpy.dtype(dtype).itemsize
        sizes = {"parameters": parameters, "memory": memory, "itemsize": size, "copies": copies}
        _check_positive(sizes)
        one = parameters * size
        return DeviceEstimate(_by_copies(one, copies), memory)
    _check_positive({"memory": memory, "copies": copies})
    leaves, tree = jax.tree_util.tree_flatten(parameters)
    if not leaves:
        raise MemoryBudgetError(
            f"estimate_devices: parameters is {parameters!r}", "it has no arrays", ["a number of parameters, or a tree"]
        )
    abstract = [_abstract(x, dtype) for x in leaves]
    held = sum(map(_bytes, abstract))
    trained = sum(_bytes(x) for x in abstract if _is_inexact(x))
    if optimizer is None:
        return DeviceEstimate(_by_copies(held, copies), memory)
    if not callable(getattr(optimizer, "init", None)):
        raise MemoryBudgetError(
            f"estimate_devices: optimizer is a {type(optimizer).__name__}",
            "the bytes of its state are those of what its init makes",
            ["an optax transformation: optax.adamw(1e-3)"],
        )
    state = jax.eval_shape(optimizer.init, jax.tree_util.tree_unflatten(tree, abstract))
    kept = sum(map(_bytes, jax.tree_util.tree_leaves(state)))
    return DeviceEstimate(StateBytes(held, trained, kept), memory)


def _by_copies(one: float, copies: float) -> StateBytes:
    """The first copy is the parameters, the second their gradients, further ones the optimizer's."""
    gradients = one * min(max(copies - 1, 0), 1)
    return StateBytes(one * min(copies, 1), gradients, one * max(copies - 2, 0))


def _check_positive(sizes: dict[str, Any]) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise MemoryBudgetError(f"estimate_devices: {name}={size!r}", "sizes are above zero")


def _abstract(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    if not _compat.has_shape(x) and not isinstance(x, (bool, int, float, complex)):
        raise MemoryBudgetError(
            f"estimate_devices: a leaf of the parameters is a {type(x).__name__}",
            "only arrays have bytes",
            ["the arrays alone: eqx.filter(model, eqx.is_array), nnx.state(model)"],
        )
    shape, own = jax.numpy.shape(x), getattr(x, "dtype", None) or jax.numpy.result_type(x)
    cast = dtype is not None and not _compat.is_extended(own) and jax.numpy.issubdtype(own, jax.numpy.floating)
    return jax.ShapeDtypeStruct(shape, dtype if cast else own)


def _is_inexact(x: Any) -> bool:
    return not _compat.is_extended(x.dtype) and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * _compat.itemsize(x)
