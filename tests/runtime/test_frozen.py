"""Frozen parameters: no gradient and no optimizer state for what does not change, and split like any parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd_auto
from spmd_auto.propagate.classes import used_values
from spmd_auto.search import SearchOptions
from spmd_auto.trace import Role
from tests.known_answers.toy import toy_mesh

FAST = SearchOptions(states=150)
WIDTH, RANK = 64, 4


def frozen():
    rng = np.random.default_rng(0)
    return {f"layer{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1 for i in range(2)}


def lora():
    rng = np.random.default_rng(1)
    return {
        f"layer{i}": {
            "a": rng.normal(size=(WIDTH, RANK)).astype(np.float32) * 0.1,
            "b": rng.normal(size=(RANK, WIDTH)).astype(np.float32) * 0.1,
        }
        for i in range(2)
    }


def forward(base, adapter, x):
    for name, w in base.items():
        x = jnp.tanh(x @ w + x @ adapter[name]["a"] @ adapter[name]["b"])
    return x


def data(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(16, WIDTH)).astype(np.float32) for k in "xy"}


TX = optax.adamw(1e-2)


def separate(state, frozen, batch):
    """Frozen parameters as an argument of their own."""

    def loss_fn(adapter):
        return jnp.mean((forward(frozen, adapter, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


LABELLED = optax.multi_transform(
    {"train": optax.adamw(1e-2), "frozen": optax.set_to_zero()},
    {"base": "frozen", "adapter": "train"},
)


def masked(state, batch):
    """Frozen parameters in the state, held by the optimizer."""

    def loss_fn(params):
        return jnp.mean((forward(params["base"], params["adapter"], batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = LABELLED.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def masked_state():
    params = {"base": frozen(), "adapter": lora()}
    return {"params": params, "opt_state": LABELLED.init(params)}


def separate_state():
    return {"params": lora(), "opt_state": TX.init(lora())}


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


CASES = [
    pytest.param(separate, lambda: (separate_state(), frozen(), data()), "frozen/", id="argument"),
    pytest.param(masked, lambda: (masked_state(), data()), "state/params/base/", id="in the state"),
]


@pytest.mark.parametrize(("step", "arguments", "head"), CASES)
def test_trains_as_on_one_device(step, arguments, head):
    ours, plain = spmd_auto.auto_shard(search=FAST)(step), jax.jit(step)
    mine, expected = list(arguments()), list(arguments())
    for _ in range(3):
        mine[0], a = ours(*mine)
        expected[0], b = plain(*expected)
        assert float(a) == pytest.approx(float(b), rel=1e-5)


@pytest.mark.parametrize(("step", "arguments", "head"), CASES)
def test_no_gradient_and_no_optimizer_state(step, arguments, head):
    plan = spmd_auto.plan(step, *arguments(), mesh=toy_mesh(8), search=FAST)
    base = [leaf for leaf in plan.program.arguments if leaf.path.startswith(head)]
    assert {leaf.role for leaf in base} == {Role.PARAMETER}
    optimizer = sum(leaf.bytes for leaf in plan.program.arguments if leaf.role is Role.OPTIMIZER)
    assert optimizer == 2 * bytes_of(lora())
    used = used_values(plan.analysis.graph)
    made = [(op, v) for op in plan.analysis.graph.ops for v in op.results if op.flops and v.id in used]
    assert not [op.source for op, v in made if op.backward and v.shape == (WIDTH, WIDTH)]
    assert [op for op, v in made if op.backward and v.shape == (WIDTH, RANK)]


def test_lora_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.lora = nnx.LoRA(WIDTH, RANK, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.dense(x) + self.lora(x)

    def make():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)

    def step(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return loss

    ours, plain = spmd_auto.auto_shard(search=FAST)(step), nnx.jit(step)
    mine, expected = make(), make()
    for i in range(3):
        assert float(ours(*mine, data(i))) == pytest.approx(float(plain(*expected, data(i))), rel=1e-5)
    program = ours.plan(*mine, data()).program
    assert "model/dense/kernel" not in {leaf.path for leaf in program.results}
    assert not any("dense" in leaf.path for leaf in program.arguments if leaf.path.startswith("optimizer"))
