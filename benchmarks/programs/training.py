"""A train step around a Flax module: float32 parameters, AdamW, gradients clipped by their global norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def training(model: nn.Module, batch: dict[str, Any], loss_of: Callable[..., jax.Array] = cross_entropy):
    """(step, abstract state, batch): `loss_of(model's output on batch["x"], batch["y"])` is made less.

    Statistics of batch normalisation, where there are any, are state without gradients.
    """
    tx = optimizer()

    def create(key):
        variables = model.init(key, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), batch["x"]))
        params = variables["params"]
        return {"params": params, "opt_state": tx.init(params), "statistics": variables.get("batch_stats", {})}

    def step(state, batch):
        def loss_fn(params):
            if not state["statistics"]:
                return loss_of(model.apply({"params": params}, batch["x"]), batch["y"]), {}
            variables = {"params": params, "batch_stats": state["statistics"]}
            out, new = model.apply(variables, batch["x"], mutable="batch_stats")
            return loss_of(out, batch["y"]), new["batch_stats"]

        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "statistics": statistics}, loss

    return step, jax.eval_shape(create, jax.random.key(0)), batch
