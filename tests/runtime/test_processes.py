"""Two processes of four simulated devices each, against one of eight: the same losses, one search, and errors on both.

All that needs two processes is in `worker.py`, and runs in one pair of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import spmd_auto
from spmd_auto.errors import TraceError
from spmd_auto.runtime import across
from tests.runtime import worker
from tests.test_decorator import create, data, train_step

ROOT = Path(__file__).parents[2]
TIMEOUT = 150


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What came out of each scene, on both processes."""
    folder = tmp_path_factory.mktemp("processes")
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    env |= {"SPMD_AUTO_CACHE": str(folder / "kept"), "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    files = [folder / f"{rank}.json" for rank in range(2)]
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.worker", str(rank), str(port), str(files[rank])],
            env=env,
            cwd=ROOT,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(TIMEOUT) for process in running]
    except subprocess.TimeoutExpired:
        codes = None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read()[-3000:])
        log.close()
    assert codes == [0, 0], "\n".join(said)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def alone(devices):
    """Losses of one process of eight devices."""
    return worker.train(worker.sharded(quiet=True))


def results(both, scene):
    for out in both:
        assert "result" in out[scene], out[scene]
    return [out[scene]["result"] for out in both]


def test_the_worker_alone_has_eight_devices(devices):
    assert jax.process_count() == 1
    assert len(devices) == 8


@pytest.mark.parametrize(
    "scene", ["whole_batch", "local_rows", "rows_in_place", "rows_elsewhere", "rows_whole", "loader"]
)
def test_losses_are_those_of_one_process(both, alone, scene):
    for out in results(both, scene):
        np.testing.assert_allclose(out["losses"], alone, rtol=1e-5)


def test_a_state_that_each_process_made_is_taken_for_the_whole(both, alone):
    for out in results(both, "state_of_each"):
        np.testing.assert_allclose(out, alone, rtol=1e-5)


def test_only_the_first_process_searches(both):
    first, second = results(both, "whole_batch")
    assert first["searches"] > 0
    assert second["searches"] == 0
    assert (first["origin"], second["origin"]) == ("", "process 0")
    assert (first["explained"], second["explained"]) == (False, True)
    assert first["hash"] == second["hash"]
    assert first["mesh"] == ["host", "device"]


def test_a_kept_plan_goes_to_all(both):
    first, second = results(both, "plan_kept")
    assert (first["searches"], second["searches"]) == (0, 0)
    assert (first["origin"], second["origin"]) == ("cache", "process 0")
    assert first["hash"] == second["hash"] == both[0]["whole_batch"]["result"]["hash"]


def test_the_rows_of_the_processes_are_one_batch(both):
    for out in results(both, "local_rows"):
        assert out["rows"] == 16


def test_rows_are_exchanged_only_where_the_plan_wants_them_elsewhere(both):
    assert [out["moved"] for out in results(both, "rows_in_place")] == [False, False]
    assert [out["moved"] for out in results(both, "loader")] == [False, False]
    assert [out["moved"] for out in results(both, "rows_elsewhere")] == [True, True]
    assert [out["moved"] for out in results(both, "rows_whole")] == [True, True]


def test_a_step_that_follows_another_one_takes_local_and_global_arrays(both, alone):
    for out in results(both, "evaluation"):
        np.testing.assert_allclose(out, [alone[0]] * 2, rtol=1e-5)


def test_elements_of_less_than_a_byte(both):
    assert results(both, "less_than_a_byte") == [48.0, 48.0]


def test_inside_of_jit(both):
    assert results(both, "inside_of_jit") == [9.0, 9.0]


def test_keys_numbers_and_callbacks(both, devices):
    np.testing.assert_allclose(results(both, "keys_and_callbacks"), [worker.keys_and_callbacks()] * 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("other_program", ["on process 1 than on process 0", "the operations", "mul e 1.0", "mul e 2.0"]),
        ("other_shape", ["batch/x float32[16, 8]", "batch/x float32[32, 8]", "batches of the same size"]),
        ("other_pins", ["the pins", "process 0 has nothing", "process 1 has w: [['device']]"]),
        ("other_constant", ["the lowered program", "dense<1.0", "dense<2.0"]),
        ("other_values", ["'x'", "not the same on process 1 as on process 0", "auto_shard(local=('batch',))"]),
        ("other_seed", ["'create[0]'", "train_step.init", "of the same seed"]),
    ],
)
def test_what_is_not_the_same_is_an_error_on_both(both, scene, words):
    for out in both:
        assert out[scene].get("error") == "ProcessError", out[scene]
        for word in words:
            assert word in out[scene]["text"]


def test_a_plan_that_does_not_fit_is_an_error_on_both(both):
    for out in both:
        assert out["no_memory"]["error"] == "MemoryBudgetError"
        assert "no plan of train_step fits" in out["no_memory"]["text"]
    assert "raised by process 0" in both[1]["no_memory"]["text"]


@pytest.mark.parametrize(
    ("scene", "rank", "error", "says"),
    [
        (
            "trace_fails_on_one",
            1,
            "TraceError",
            "process 1 failed to prepare the plan of step: TraceError: step cannot",
        ),
        ("planning_breaks", 0, "KeyError", "process 0, which plans for all, failed to plan train_step: KeyError"),
        ("applying_breaks", 1, "KeyError", "process 1 failed to apply the plan of train_step: KeyError"),
    ],
)
def test_a_failure_of_one_process_is_an_error_on_both(both, scene, rank, error, says):
    assert both[rank][scene]["error"] == error
    assert both[1 - rank][scene]["error"] == "ProcessError"
    assert says in both[1 - rank][scene]["text"]


def test_a_mesh_of_one_process_is_its_own_affair(both):
    assert both[0]["mesh_of_one_process"]["result"] == 8.0
    assert "process 1 has no device in the mesh" in both[1]["mesh_of_one_process"]["text"]


def test_a_process_that_does_not_come_is_not_waited_for_for_ever(both):
    assert both[0]["one_does_not_come"]["error"] == "ProcessError"
    assert "waited 1 s for the others" in both[0]["one_does_not_come"]["text"]


# ---- one process --------------------------------------------------------------------------------


def test_with_one_process_local_changes_nothing(alone):
    step = worker.sharded(local="batch")
    assert worker.train(step) == alone
    assert step.plan(create(jax.random.key(0)), data()).program.find("batch/x").shape == (16, 16)
    batch = data()
    assert across.with_local_rows(train_step, ("batch",), None, (1, batch), {}) == ((1, batch), {})


def test_local_has_to_name_an_argument():
    with pytest.raises(TraceError, match="local has 'batches', but train_step has no such argument"):
        spmd_auto.auto_shard(local=("batches",))(train_step)


def test_a_changed_key_sharding_traces_the_creation_anew(devices):
    """The state is that of the trace at hand, not of the first one."""
    step = worker.sharded()
    whole = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "a"), jax.P())
    state = step.init(create, jax.random.key(0), batch=data())
    again = step.init(create, jax.device_put(jax.random.key(0), whole))
    assert all(
        (np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (state, again)), strict=True)
    )
