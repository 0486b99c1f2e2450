"""Checks of what goes wrong silently: a cluster of another size than meant, gradients summed where a mean was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmd_auto import _compat
from spmd_auto.errors import BatchError, MeshError, TraceError
from spmd_auto.verify.parity import tree_norm, tree_relative_error


def check_cluster(*, devices: int | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Holds what JAX sees against what is expected; what is None is not looked at. Starts JAX.

    Args:
      devices: devices of all processes together.
      processes: number of processes.
      process: the number that this process should have, from 0.

    Raises:
      MeshError: something else is there; for a process that was never told of the others it says so.
    """
    for name, value, least in (("devices", devices, 1), ("processes", processes, 1), ("process", process, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise MeshError(f"check_cluster({name}={value!r})", f"it is a whole number from {least}")
    if process is not None and processes is not None and process >= processes:
        raise MeshError(
            f"check_cluster(processes={processes}, process={process})",
            f"processes are numbered from 0 to {processes - 1}",
            ["an environment variable that counts from 1? subtract 1"],
        )
    there, here, count = jax.process_count(), jax.process_index(), jax.device_count()
    if processes is not None and there != processes:
        alone = there == 1
        raise MeshError(
            f"{there} process{'' if alone else 'es'}, {processes} expected",
            "this process does not know of the others: each would train alone, on its own, and nothing would fail"
            if alone
            else "some processes did not join, or more did",
            [
                f"jax.distributed.initialize(coordinator_address, num_processes={processes}, process_id=...) before "
                "anything else of JAX",
                f"start {processes} processes",
            ],
        )
    if process is not None and here != process:
        raise MeshError(
            f"this is process {here}, {process} expected",
            "the launcher and JAX number the processes otherwise: the data of another process would be read",
            [
                f"jax.distributed.initialize(..., process_id={process})",
                "read jax.process_index() instead of the variable",
            ],
        )
    if devices is not None and count != devices:
        per = jax.local_device_count()
        raise MeshError(
            f"{count} devices, {devices} expected",
            f"{per} in this process, {there} process{'' if there == 1 else 'es'}, platform {jax.default_backend()}",
            [
                f"spmd_auto.simulate_devices({devices}) to try it on this CPU"
                if jax.default_backend() == "cpu"
                else "CUDA_VISIBLE_DEVICES, or TPU_VISIBLE_CHIPS, hides some?",
                f"check_cluster(devices={count}) if these are what is meant",
            ],
        )


Scaling = Literal["mean", "sum", "neither"]


def check_gradients(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *args: Any,
    axis: int = 0,
    returns: Literal["loss", "gradients"] = "loss",
    tolerance: float = 1e-3,
) -> Scaling:
    """Whether gradients are the mean or the sum over the samples of a batch.

    The gradient of a batch is held against that of the batch twice over: a mean stays as it is, a sum doubles.  With a
    sum the step grows with the batch, and with the number of devices where each adds its own samples.

    Args:
      fn: `fn(params, batch, *args)`, a loss (a scalar, or a tuple whose first is one), or with `returns="gradients"`
        what returns the gradients, or a tuple whose last they are (`jax.value_and_grad`). Not a whole step: an
        optimizer may divide the scale away.
      params, batch: trees of arrays. The gradients at these parameters must not be zero.
      args: passed on as they are (keys, settings).
      axis: the samples' dimension of the leaves of `batch`; leaves without it are left alone.
      tolerance: relative error that counts as equal.

    Returns:
      "mean", "sum", or "neither": a penalty beside a sum, samples that are weighted, or noise that differs.

    Raises:
      TraceError: `fn` is no such function.
      BatchError: no leaf of the batch has samples, or the gradients are zero or not finite: nothing can be told.
    """
    gradients = jax.jit(_gradients(fn, returns))
    once = gradients(params, batch, *args)
    size = tree_norm(once)
    if not 0 < size < float("inf"):
        raise BatchError(
            f"the gradients have the norm {size}",
            "nothing can be told from gradients that are zero or not finite",
            ["parameters as they are initialised, and a batch of real data"],
        )
    twice = gradients(params, _twice(batch, axis), *args)
    doubled = jax.tree_util.tree_map(lambda g: 2 * g, once)
    if tree_relative_error(twice, once) <= tolerance:
        return "mean"
    return "sum" if tree_relative_error(twice, doubled) <= tolerance else "neither"


def _gradients(fn: Callable[..., Any], returns: str) -> Callable[..., Any]:
    name = getattr(fn, "__name__", type(fn).__name__)
    if returns not in ("loss", "gradients"):
        raise TraceError(f"check_gradients(returns={returns!r})", "", ["'loss'", "'gradients'"])

    def loss(params: Any, *rest: Any) -> Any:
        out = fn(params, *rest)
        value: Any = out[0] if isinstance(out, tuple) and out else out
        if not hasattr(value, "shape") or value.shape != () or not _compat.is_float(value):
            shape = f"shape {value.shape}" if hasattr(value, "shape") else f"a {type(value).__name__}"
            raise TraceError(
                f"{name} returns {shape} where a loss is a number",
                "gradients are those of one floating-point number; a whole step hides them behind its optimizer",
                [
                    "check_gradients(loss_fn, params, batch)",
                    'check_gradients(jax.grad(loss_fn), ..., returns="gradients")',
                ],
            )
        return value

    def given(params: Any, *rest: Any) -> Any:
        out = fn(params, *rest)
        grads = out[-1] if isinstance(out, tuple) and out else out
        want, got = (jax.tree_util.tree_structure(x) for x in (params, grads))
        if want != got:
            raise TraceError(f"{name} returns {got} as gradients", f"the parameters are {want}", ["jax.grad(loss_fn)"])
        return grads

    return given if returns == "gradients" else jax.grad(loss)


def _twice(batch: Any, axis: int) -> Any:
    found = False

    def double(x: Any) -> Any:
        nonlocal found
        shape = jnp.shape(x)
        if not -len(shape) <= axis < len(shape):
            return x
        found = True
        return jnp.concatenate([jnp.asarray(x)] * 2, axis)

    out = jax.tree_util.tree_map(double, batch)
    if not found:
        raise BatchError(
            f"no leaf of the batch has a dimension {axis}", "samples are counted along it", ["axis=: another dimension"]
        )
    return out
