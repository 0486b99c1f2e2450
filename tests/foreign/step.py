"""A training step around a model that was written elsewhere: forward, loss, gradient, optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH, SEQUENCE, VOCAB, CLASSES, IMAGE = 16, 16, 64, 8, 32  # 16 samples can be split over all eight devices

Tree = Any
# (parameters, other variables, batch, dropout key) -> (loss, new other variables)
Loss = Callable[[Tree, Tree, Tree, Any], tuple[Any, Tree]]


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """What is needed to train one model.

    Attributes:
      step: `(state, batch) -> (new state, {"loss", "grads"})`; the state holds parameters, optimizer state, other
        variables of the model (running statistics; may be empty) and the count of steps.
      state, batch: concrete arrays.
    """

    step: Callable[[Tree, Tree], tuple[Tree, Tree]]
    state: Tree
    batch: Tree


def training(loss: Loss, params: Tree, batch: Tree, extra: Tree | None = None) -> Training:
    """Wraps a loss; parameters become float64 where x64 is on."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        key = jax.random.fold_in(jax.random.PRNGKey(0), state["count"])
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], state["extra"], batch, key)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "extra": extra,
            "count": state["count"] + 1,
        }
        return new, {"loss": value, "grads": grads}

    params, extra = (jax.tree.map(widest, tree) for tree in (params, extra or {}))
    state = {"params": params, "opt_state": tx.init(params), "extra": extra, "count": jnp.zeros((), jnp.int32)}
    return Training(step, state, batch)


def random_like(shapes: Tree) -> Tree:
    """Random parameters of abstract shapes (scales and variances are one): an initialiser would have to be compiled."""
    rng = np.random.default_rng(0)

    def one(path: Any, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        ones = jax.tree_util.keystr(path[-1:], simple=True) in ("scale", "var")
        return jnp.ones(x.shape, x.dtype) if ones else jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype)

    return jax.tree.map_with_path(one, shapes)


def widest(x: Any) -> Any:
    """Floats in the widest type that is switched on."""
    return x.astype(float_type()) if jnp.issubdtype(x.dtype, jnp.floating) else x


def float_type() -> Any:
    return jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32


def tokens(*shape: int, high: int = VOCAB, low: int = 3) -> np.ndarray:
    """Token ids; the lowest ones mean padding, start and end in some models."""
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(np.int32)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(float_type())


def padded(batch: int, length: int) -> np.ndarray:
    """An attention mask of sequences of different lengths, none empty."""
    lengths = np.random.default_rng(1).integers(length // 2, length + 1, batch)
    return (np.arange(length) < lengths[:, None]).astype(np.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over all positions; `logits` have one dimension more than `labels`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
