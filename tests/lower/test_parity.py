"""Loss and gradients of a lowered step equal those of one device, in x64, under every strategy (pairwise covering)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_auto.plan import make_plan
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from tests.known_answers.toy import toy_mesh
from tests.models import gpt
from tests.strategies import MESHES, priced

COVERING = json.loads((Path(__file__).parent / "covering.json").read_text())
BATCH, SEQUENCE, VOCAB = 16, 16, 32
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def test_covering_array_covers_all_pairs():
    factors = list(COVERING["factors"].values())
    for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2):
        seen = {(row[i], row[j]) for row in COVERING["rows"]}
        assert seen == set(itertools.product(first, second))


class MLP(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 16, param_dtype=jnp.float64)(tokens).mean(1)
        for width in (64, 64):
            x = nn.relu(nn.Dense(width, param_dtype=jnp.float64)(x))
            x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(x)
        return nn.Dense(VOCAB, param_dtype=jnp.float64)(x)[:, None, :]


def build(model: str, dropout: bool):
    """(module, step(params, opt_state -> new state, loss, gradients))."""
    rate = 0.25 if dropout else 0.0
    module = (
        MLP(rate)
        if model == "mlp"
        else gpt.GPT(2, 32, 8, VOCAB, scan=model == "gpt", remat=model == "gpt", dropout=rate, dtype=jnp.float64)
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def create(key):
        params = module.init({"params": key, "dropout": key}, jnp.zeros((BATCH, SEQUENCE), jnp.int32))["params"]
        params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
        return {"params": params, "opt_state": tx.init(params)}

    def step(state, batch):
        def loss_fn(params):
            rngs = {"dropout": jax.random.key(3)} if dropout else None
            logits = module.apply({"params": params}, batch["x"], rngs=rngs)
            labels = batch["y"][:, : logits.shape[1]]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, (loss, grads)

    return create, step


_references: dict[tuple[str, bool], tuple] = {}


def reference(model: str, dropout: bool):
    if (model, dropout) not in _references:
        create, step = build(model, dropout)
        rng = np.random.default_rng(0)
        batch = {k: rng.integers(0, VOCAB, (BATCH, SEQUENCE)).astype(np.int32) for k in "xy"}
        state = jax.jit(create)(jax.random.key(0))
        _references[model, dropout] = step, state, batch, jax.device_get(jax.jit(step)(state, batch)[1])
    return _references[model, dropout]


# the quick run with the newest jax takes every sixth row
ROWS = [pytest.param(row, marks=[pytest.mark.slow] if i % 6 else []) for i, row in enumerate(COVERING["rows"])]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_parity(row, devices):
    strategy, mesh_name, model, dropout = row
    with jax.enable_x64(True):
        step, state, batch, expected = reference(model, dropout)
        program = trace(step, state, batch)
        mesh = toy_mesh(*MESHES[mesh_name])
        if strategy == "found":
            plan = make_plan(program, mesh, search=SearchOptions(beam_width=2, states=1500))
        else:
            plan = priced(program, mesh, strategy)
        assert any(any(spec) for spec in plan.placements.arguments), "nothing is split: the test would show nothing"
        lowered = plan.lower_step(donate=False)
        flat = [
            jax.device_put(x, s) for x, s in zip(jax.tree.leaves((state, batch)), lowered.in_shardings, strict=True)
        ]
        outs = lowered.lower().compile(compiler_options=FAST)(*flat)
        loss, grads = jax.tree.unflatten(program.out_tree, outs)[1]
        assert abs(float(loss) - float(expected[0])) < 1e-9 * abs(float(expected[0]))
        assert tree_relative_error(jax.device_get(grads), expected[1]) < 1e-9
