"""Optimizers: state lies like its parameter, ZeRO splits it, it is born split; two steps equal those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import spmd_auto
from spmd_auto.plan import price_strategy
from spmd_auto.trace import Role, trace
from spmd_auto.verify import tree_relative_error
from tests.known_answers.toy import toy_mesh

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SHAPES = {"up": {"kernel": (16, 64), "bias": (64,)}, "down": {"kernel": (64, 16), "bias": (16,)}}
MESH = toy_mesh(8)


def _label(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "masked": lambda: optax.masked(optax.adamw(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "partitioned": lambda: optax.partition({"matrix": optax.adamw(1e-2), "vector": optax.sgd(1e-2)}, _label),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 10)),
    "clipped_chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1e-2)),
}


def made(name):
    tx = OPTIMIZERS[name]()
    rng = np.random.default_rng(0)

    def create():
        params = jax.tree.map(lambda s: jnp.asarray(values[s]), SHAPES, is_leaf=lambda s: isinstance(s, tuple))
        return {"params": params, "opt": tx.init(params)}

    leaves = jax.tree.leaves(SHAPES, is_leaf=lambda s: isinstance(s, tuple))
    values = {s: rng.normal(size=s) / 4 for s in leaves}
    x = rng.normal(size=(16, 16))

    def step(state, x):
        def loss_fn(params):
            h = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
            return jnp.mean((h @ params["down"]["kernel"] + params["down"]["bias"] - x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return create, step, x


@pytest.mark.parametrize("strategy", ["tensor", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_lies_like_its_parameter(name, strategy, devices):
    with jax.enable_x64(True):
        create, step, x = made(name)
        program = trace(step, jax.eval_shape(create), x)
        if strategy == "tensor":
            plan = price_strategy(program, MESH, {"mlp*": "a"})
        else:
            plan = price_strategy(program, MESH, {"batch": "a"}, zero=3, zero_axes=("a",))
        params = {leaf.path.removeprefix("state/params/"): (leaf.shape, plan.specs[leaf.path])
                  for leaf in program.arguments if leaf.path.startswith("state/params/")}  # fmt: skip
        alike = 0
        for leaf in program.arguments:
            for path, (shape, spec) in params.items():
                if leaf.path.startswith("state/opt") and leaf.path.endswith(path) and leaf.shape == shape:
                    assert leaf.role is Role.OPTIMIZER, leaf
                    assert plan.specs[leaf.path] == spec, leaf.path
                    alike += spec != jax.P()
        assert alike >= (0 if name == "adafactor" else 1)
        if strategy == "zero3":  # nothing with room for it is whole, but adafactor's factors: a row and a column each
            whole = [
                leaf.path
                for leaf in program.arguments
                if leaf.path.startswith("state/")
                and any(n % 8 == 0 for n in leaf.shape)
                and plan.specs[leaf.path] == jax.P()
            ]
            assert all(name == "adafactor" and ("/v_row/" in path or "/v_col/" in path) for path in whole), whole
        lowered = plan.lower_step(donate=False)
        compiled = lowered.lower().compile(compiler_options=FAST)
        ours = theirs = jax.jit(create)()
        plain = jax.jit(step)
        for _ in range(2):
            flat = [jax.device_put(a, s) for a, s in zip(jax.tree.leaves((ours, x)), lowered.in_shardings, strict=True)]
            ours, loss = jax.tree.unflatten(program.out_tree, compiled(*flat))
            theirs, want = plain(theirs, x)
            assert abs(float(loss) - float(want)) < 1e-9 * abs(float(want))
        assert tree_relative_error(jax.device_get(ours), jax.device_get(theirs)) < 1e-9


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "partitioned", "multi_steps"])
def test_state_is_born_split(name, devices):
    create, step, x = made(name)
    sharded = spmd_auto.auto_shard(step, mesh=MESH.build(devices), pins={"state/params/*/kernel": jax.P("a")})
    batch = x.astype(np.float32)
    state = sharded.init(create, batch=batch)
    plan = sharded.plan(state, batch)
    for leaf, array in zip(plan.program.arguments, jax.tree.leaves(state), strict=False):
        assert array.sharding.is_equivalent_to(
            jax.NamedSharding(array.sharding.mesh, plan.specs[leaf.path]), array.ndim
        )
    kernel = state["params"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 64)
    state, loss = sharded(state, batch)
    assert np.isfinite(loss)
