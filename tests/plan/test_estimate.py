"""Devices that a state needs (EXPECTATIONS A 21)."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import spmd_auto
from spmd_auto.errors import MemoryBudgetError
from tests.test_errors import refused

GIB = 2**30


@pytest.mark.parametrize(("memory", "devices"), [(32, 94), (64, 47), (80, 38), (139, 22)])
def test_devices_for_two_hundred_billion_parameters(memory, devices):
    assert spmd_auto.estimate_devices(200e9, memory=memory * GIB) == devices


def test_bytes_of_the_parameters_alone():
    assert pytest.approx(745.06, abs=0.005) == 200e9 * 4 / GIB
    assert spmd_auto.estimate_devices(200e9, memory=745.06 * GIB, copies=1) == 1
    assert spmd_auto.estimate_devices(200e9, memory=745.05 * GIB, copies=1) == 2


def test_itemsize_and_copies_scale():
    whole = spmd_auto.estimate_devices(1e9, memory=1e9)
    assert whole == 16
    assert spmd_auto.estimate_devices(1e9, memory=1e9, itemsize=2) == 8
    assert spmd_auto.estimate_devices(1e9, memory=1e9, copies=1) == 4
    assert spmd_auto.estimate_devices(1, memory=1e9) == 1


@pytest.mark.parametrize("wrong", [{"parameters": 0}, {"memory": 0}, {"itemsize": -1}, {"copies": 0}])
def test_sizes_must_be_positive(wrong):
    options = {"parameters": 1e9, "memory": 1e9, **wrong}
    with pytest.raises(MemoryBudgetError, match=next(iter(wrong))):
        spmd_auto.estimate_devices(options.pop("parameters"), **options)


PARAMS = {
    "dense": {"kernel": np.ones((128, 256), np.float32), "bias": np.ones(256, np.float32)},
    "half": jnp.ones((130, 200), jnp.bfloat16),
    "ids": np.arange(7, dtype=np.int32),
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "adamw in bfloat16": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "adafactor": optax.adafactor(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3), optax.ema(0.9)),
}


def floats(tree):
    return {k: v for k, v in tree.items() if k != "ids"}


def held(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_a_state_are_those_of_its_arrays(name):
    tx, params = OPTIMIZERS[name], jax.tree.map(jnp.asarray, floats(PARAMS))
    found = spmd_auto.estimate_devices(params, memory=1000, optimizer=tx)
    assert found.state.parameters == held(params) == (128 * 256 + 256) * 4 + 130 * 200 * 2
    assert found.state.optimizer == held(tx.init(params))
    assert found.state.gradients == held(
        jax.grad(lambda p: sum(x.sum() for x in jax.tree.leaves(p)).astype(float))(params)
    )
    assert found == -(-found.state.total // 1000)
    abstract = jax.eval_shape(lambda: params)
    assert spmd_auto.estimate_devices(abstract, memory=1000, optimizer=tx).state == found.state


def test_a_model_of_flax_that_is_never_made():
    model = nn.Dense(1 << 20)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1 << 16), jnp.float32))
    found = spmd_auto.estimate_devices(params, memory=80 * GIB, optimizer=optax.adam(1e-3))
    numbers = (1 << 36) + (1 << 20)
    assert found.state.total == 4 * 4 * numbers + 4  # and the count of steps
    assert found == 13
    assert found.bytes_per_device == found.state.total / 13


def test_leaves_that_are_not_trained_have_no_gradient():
    found = spmd_auto.estimate_devices(PARAMS, memory=1e9, optimizer=optax.sgd(0.1))
    assert found.state.parameters - found.state.gradients == 7 * 4
    keys = spmd_auto.estimate_devices(
        {"w": jnp.ones(4), "key": jax.random.key(0)}, memory=1e9, optimizer=optax.set_to_zero()
    )
    assert (keys.state.parameters, keys.state.gradients) == (16 + 8, 16)


def test_another_dtype():
    assert spmd_auto.estimate_devices(1e9, memory=1e9, dtype=jnp.bfloat16) == 8
    found = spmd_auto.estimate_devices(PARAMS, memory=1e9, dtype=jnp.bfloat16, optimizer=optax.adam(1e-3))
    numbers = 128 * 256 + 256 + 130 * 200
    assert found.state.parameters == 2 * numbers + 7 * 4
    assert found.state.gradients == 2 * numbers
    assert found.state.optimizer == 2 * 2 * numbers + 2 * 7 * 4 + 4  # optax keeps moments of whole numbers too


def test_copies_count_for_a_tree_without_an_optimizer():
    tree = {"w": np.ones((10, 10), np.float32)}
    assert spmd_auto.estimate_devices(tree, memory=400).state.total == 1600
    assert spmd_auto.estimate_devices(tree, memory=400) == 4
    assert spmd_auto.estimate_devices(tree, memory=400, copies=1) == 1


def test_it_is_an_int_with_its_bytes():
    found = spmd_auto.estimate_devices(200e9, memory=80 * GIB)
    assert isinstance(found, int)
    assert [found.state.parameters, found.state.gradients, found.state.optimizer] == [8e11, 8e11, 16e11]
    for text in ("38 devices of 85.9 GB", "3.2 TB = parameters 800 GB + gradients 800 GB + optimizer state 1.6 TB"):
        assert text in str(found)
    for again in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert (again, again.state, again.memory) == (38, found.state, found.memory)


def test_optimizers_that_say_nothing():
    with refused(MemoryBudgetError, what="parameters=200000000000.0", why="shapes", fixes=("eval_shape", "copies=4")):
        spmd_auto.estimate_devices(200e9, memory=1e9, optimizer=optax.adam(1e-3))
    with refused(MemoryBudgetError, what="optimizer is a str", why="init", fixes="optax.adamw"):
        spmd_auto.estimate_devices(PARAMS, memory=1e9, optimizer="adam")
    with refused(MemoryBudgetError, what="parameters is {}", why="no arrays"):
        spmd_auto.estimate_devices({}, memory=1e9)
    with refused(MemoryBudgetError, what="memory=0"):
        spmd_auto.estimate_devices(PARAMS, memory=0, optimizer=optax.adam(1e-3))
    with refused(MemoryBudgetError, what="a leaf of the parameters is a str", why="arrays", fixes="eqx.filter"):
        spmd_auto.estimate_devices({"w": "text"}, memory=1e9)
