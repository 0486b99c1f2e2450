"""Mistakes that train on silently: another cluster than meant, sums where means were meant (EXPECTATIONS B, FAQ)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd_auto
from spmd_auto.errors import BatchError, MeshError, TraceError
from tests.test_errors import refused

# ---- the cluster ----------------------------------------------------------------------------------


@pytest.fixture
def four_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda: 32)


def test_what_is_there_passes(devices):
    spmd_auto.check_cluster()
    spmd_auto.check_cluster(devices=8, processes=1, process=0)


def test_what_is_expected_of_several_processes_passes(four_processes):
    spmd_auto.check_cluster(devices=32, processes=4, process=2)


def test_wrong_number_of_devices(devices):
    with refused(MeshError, what="8 devices, 16 expected", why="platform cpu", fixes="simulate_devices(16)"):
        spmd_auto.check_cluster(devices=16)


def test_a_process_that_does_not_know_of_the_others():
    with refused(MeshError, what="1 process, 4 expected", why="train alone", fixes="num_processes=4"):
        spmd_auto.check_cluster(processes=4)


def test_processes_that_did_not_join(four_processes):
    with refused(MeshError, what="4 processes, 8 expected", why="did not join", fixes="start 8 processes"):
        spmd_auto.check_cluster(processes=8, devices=64)


def test_another_rank(four_processes):
    with refused(MeshError, what="this is process 2, 3 expected", why="otherwise", fixes="process_id=3"):
        spmd_auto.check_cluster(processes=4, process=3)


@pytest.mark.parametrize("wrong", [{"devices": 0}, {"processes": 1.5}, {"process": -1}, {"devices": "8"}])
def test_expectations_that_can_not_be(wrong):
    with refused(MeshError, what=f"check_cluster({next(iter(wrong))}=", why="whole number"):
        spmd_auto.check_cluster(**wrong)


def test_a_rank_that_counts_from_one():
    with refused(MeshError, what="process=4", why="from 0 to 3", fixes="subtract 1"):
        spmd_auto.check_cluster(processes=4, process=4)


# ---- gradients ------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((6, 3), np.float32), "b": np.zeros(3, np.float32)}
BATCH = {"x": RNG.standard_normal((8, 6), np.float32), "y": RNG.standard_normal((8, 3), np.float32), "scale": 2.0}


def errors_of(params, batch):
    return batch["scale"] * (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def penalty(params):
    return 0.1 * (params["w"] ** 2).sum()


CASES = {
    "mean": (lambda p, b: errors_of(p, b).mean(), "mean"),
    "sum": (lambda p, b: errors_of(p, b).sum(), "sum"),
    "sum over features, mean over samples": (lambda p, b: errors_of(p, b).sum(-1).mean(), "mean"),
    "mean over features, sum over samples": (lambda p, b: errors_of(p, b).mean(-1).sum(), "sum"),
    "mean and penalty": (lambda p, b: errors_of(p, b).mean() + penalty(p), "mean"),
    "sum and penalty": (lambda p, b: errors_of(p, b).sum() + penalty(p), "neither"),
    "square root": (lambda p, b: errors_of(p, b).sum() / b["x"].shape[0] ** 0.5, "neither"),
    "divided by a constant": (lambda p, b: errors_of(p, b).sum() / 8, "sum"),
    "with metrics": (lambda p, b: (errors_of(p, b).mean(), {"n": b["x"].shape[0]}), "mean"),
}


@pytest.mark.parametrize("name", CASES)
def test_scaling_of_losses(name):
    loss, scaling = CASES[name]
    assert spmd_auto.check_gradients(loss, PARAMS, BATCH) == scaling


def test_functions_that_return_gradients():
    for name in ("mean", "sum"):
        loss = CASES[name][0]
        assert spmd_auto.check_gradients(jax.grad(loss), PARAMS, BATCH, returns="gradients") == name
        assert spmd_auto.check_gradients(jax.value_and_grad(loss), PARAMS, BATCH, returns="gradients") == name


def test_gradients_added_up_by_devices(devices):
    """The mistake itself: each device takes its mean, and the devices' gradients are summed."""
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    spec = {"x": jax.P("data"), "y": jax.P("data"), "scale": jax.P()}

    def pieces(reduce):
        def per_device(params, batch):
            grads = jax.grad(lambda p: errors_of(p, batch).sum())(jax.lax.pcast(params, "data", to="varying"))
            return jax.tree.map(
                lambda g: reduce(g / batch["x"].shape[0] if reduce is jax.lax.pmean else g, "data"), grads
            )

        return jax.shard_map(per_device, mesh=mesh, in_specs=(jax.P(), spec), out_specs=jax.P())

    assert spmd_auto.check_gradients(pieces(jax.lax.psum), PARAMS, BATCH, returns="gradients") == "sum"
    assert spmd_auto.check_gradients(pieces(jax.lax.pmean), PARAMS, BATCH, returns="gradients") == "mean"


def test_samples_along_another_axis_and_further_arguments():
    def loss(params, x, key, weight):
        return weight * jnp.mean((params @ x) ** 2) + 0 * jax.random.normal(key)

    x = RNG.standard_normal((6, 8), np.float32)
    args = jax.random.key(0), 2.0
    assert spmd_auto.check_gradients(loss, PARAMS["w"].T, x, *args, axis=1) == "mean"


def test_what_says_nothing():
    with refused(BatchError, what="norm 0.0", why="zero"):
        spmd_auto.check_gradients(lambda p, b: 0 * errors_of(p, b).mean(), PARAMS, BATCH)
    with refused(BatchError, what="norm nan", why="not finite"):
        spmd_auto.check_gradients(lambda p, b: jnp.nan * errors_of(p, b).mean(), PARAMS, BATCH)
    with refused(BatchError, what="dimension 5", fixes="axis="):
        spmd_auto.check_gradients(CASES["mean"][0], PARAMS, BATCH, axis=5)


def test_functions_that_are_no_loss():
    with refused(TraceError, what="errors_of returns shape (8, 3)", why="one floating-point number", fixes="jax.grad"):
        spmd_auto.check_gradients(errors_of, PARAMS, BATCH)
    with refused(TraceError, what="returns a dict", why="behind its optimizer"):
        spmd_auto.check_gradients(lambda p, b: (p, errors_of(p, b).mean()), PARAMS, BATCH)
    with refused(TraceError, what="as gradients", why="the parameters are", fixes="jax.grad"):
        spmd_auto.check_gradients(CASES["mean"][0], PARAMS, BATCH, returns="gradients")
    with refused(TraceError, what="returns='state'", fixes="'gradients'"):
        spmd_auto.check_gradients(CASES["mean"][0], PARAMS, BATCH, returns="state")
