from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import spmd_auto
from spmd_auto.errors import MeshError, VerifyError
from spmd_auto.mesh.simulate import simulate_devices
from spmd_auto.verify import Target, compile_for, parse_target, targets


@pytest.mark.parametrize(
    ("text", "target", "count"),
    [
        ("cpu", Target("cpu"), 8),
        ("cpu:4", Target("cpu", "", (4,)), 4),
        ("tpu:v5e:4x4", Target("tpu", "v5e", (4, 4)), 16),
        ("tpu:v5p:8x8x8", Target("tpu", "v5p", (8, 8, 8)), 512),
        ("TPU:V4:2x2x1", Target("tpu", "v4", (2, 2, 1)), 4),
        ("gpu:h100:2x8", Target("gpu", "h100", (2, 8)), 16),
        ("cuda:h100:1x4", Target("gpu", "h100", (1, 4)), 4),
    ],
)
def test_parse(text, target, count):
    assert parse_target(text) == target
    assert parse_target(target) is target
    assert target.device_count == count
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "platform"),
        ("npu:x:2x2", "'npu' is none of cpu, tpu, gpu"),
        ("tpu", "has a chip and a topology"),
        ("tpu:4x4", "has a chip and a topology"),
        ("tpu:v9:4x4", "chip 'v9' is none of v4, v5e, v5p, v6e"),
        ("tpu:v5e:2x2x2", "3 dimension"),
        ("tpu:v5p:4x4", "2 dimension"),
        ("tpu:v5e:3x4", "3 is no multiple"),
        ("tpu:v5e:0x4", "no size"),
        ("tpu:v5e:4xa", "no size"),
        ("gpu:h100:8", "1 dimension"),
        ("gpu:a100:1x8", "none of h100"),
        ("cpu:many", "no size"),
    ],
)
def test_unknown_targets_say_why_and_what_would_work(text, why):
    with pytest.raises(VerifyError, match=why) as error:
        parse_target(text)
    assert "tpu:v5e:4x4" in "".join(error.value.fixes)


def test_cpu_devices(devices):
    assert parse_target("cpu").devices() == devices
    assert parse_target("cpu:4").devices() == devices[:4]
    assert parse_target("cpu").devices(3) == devices[:3]
    with pytest.raises(VerifyError, match="already started with 8 CPU device") as error:
        parse_target("cpu:9").devices()
    assert any("simulate_devices(9)" in fix for fix in error.value.fixes)
    with pytest.raises(VerifyError, match="has 4 devices, 5 were asked for"):
        parse_target("cpu:4").devices(5)


@pytest.mark.parametrize(("text", "extra"), [("tpu:v5e:4x4", "tpu"), ("gpu:h100:2x8", "gpu")])
def test_missing_compiler_names_the_extra(text, extra, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    target = parse_target(text)
    assert not target.is_installed()
    with pytest.raises(VerifyError, match="not installed") as error:
        target.devices()
    assert error.value.fixes[0] == f"pip install 'spmd-auto[{extra}]'"


@pytest.mark.parametrize(
    ("text", "kind", "hosts"),
    [
        ("tpu:v5e:4x4", "TPU v5 lite", 4),
        ("tpu:v5e:1x1", "TPU v5 lite", 1),
        ("tpu:v4:2x2x2", "TPU v4", 2),
        ("tpu:v5p:8x8x8", "TPU v5", 128),
        ("tpu:v6e:2x4", "TPU v6 lite", 2),
        ("gpu:h100:2x8", "NVIDIA H100 80GB HBM3", 2),
        ("gpu:h100:64x8", "NVIDIA H100 80GB HBM3", 64),
    ],
)
def test_devices_that_are_not_there(text, kind, hosts, require_target):
    target = require_target(text)
    devices = target.devices()
    assert len(devices) == len(set(devices)) == target.device_count
    assert devices[0].device_kind == kind
    assert len({d.process_index for d in devices}) == hosts
    # The same objects again: a mesh made now and a mesh made later are of the same devices.
    assert all(a is b for a, b in zip(devices, target.devices(), strict=True))
    with pytest.raises(VerifyError, match="were asked for"):
        target.devices(target.device_count + 1)
    if target.platform == "tpu":
        with pytest.raises(VerifyError, match="whole slice"):
            target.devices(target.device_count - 1)


def test_a_topology_that_the_compiler_refuses(monkeypatch):
    def refuse(**arguments):
        raise RuntimeError("INVALID_ARGUMENT: no such machine\nmore")

    monkeypatch.setattr(targets, "_topology_devices", refuse)
    monkeypatch.setattr(Target, "is_installed", lambda self: True)
    with pytest.raises(VerifyError, match="tpu:v5e:6x4 doesn't accept this topology") as error:
        parse_target("tpu:v5e:6x4").devices()
    assert error.value.why == "INVALID_ARGUMENT: no such machine"


def test_compiler_options():
    assert parse_target("gpu:h100:1x8").compiler_options == {"xla_gpu_autotune_level": 0}
    assert parse_target("tpu:v5e:4x4").compiler_options == parse_target("cpu").compiler_options == {}
    compiled = compile_for("cpu", jax.jit(lambda x: x + 1).lower(1.0), {"xla_embed_ir_in_executable": True})
    assert compiled(2.0) == 3.0


def test_simulate_devices_is_idempotent(devices):
    simulate_devices(8)
    simulate_devices(2)
    assert len(jax.devices("cpu")) == 8


def test_simulate_devices_too_late(devices):
    with pytest.raises(MeshError, match="too late: JAX has already started with 8") as error:
        simulate_devices(9)
    assert any("JAX_NUM_CPU_DEVICES=9" in fix for fix in error.value.fixes)
    with pytest.raises(MeshError, match="at least one device"):
        simulate_devices(0)


def run_python(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_", "TF_", "ALLOW_"))} | environment
    env["PYTHONPATH"] = str(Path(spmd_auto.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_simulate_devices_before_jax_starts():
    code = (
        "from spmd_auto.mesh.simulate import simulate_devices as s; s(3); s(6); s(2);"
        "import jax; print(len(jax.devices()))"
    )
    assert run_python(code, JAX_PLATFORMS="cpu").split() == ["6"]


def test_target_starts_the_devices_it_needs():
    code = "from spmd_auto.verify import parse_target; print(len(parse_target('cpu:5').devices()))"
    assert run_python(code, JAX_PLATFORMS="cpu").split() == ["5"]


def test_environment_of_the_user_wins(require_target):
    require_target("tpu:v5e:2x2")
    code = (
        "import os; from spmd_auto.verify import parse_target; parse_target('tpu:v5e:2x2').devices();"
        "print(*(os.environ[k] for k in ('TPU_SKIP_MDS_QUERY', 'TF_CPP_MIN_LOG_LEVEL', 'ALLOW_MULTIPLE_LIBTPU_LOAD')))"
    )
    assert run_python(code, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="2").split() == ["1", "2", "1"]


@pytest.mark.parametrize("before", ["", "import jax; jax.devices();"])
def test_gpu_compiler_registers_without_cuda(before, require_target):
    # Without JAX_PLATFORMS JAX asks the plugin to start and it finds no CUDA, before or after us.
    require_target("gpu:h100:1x2")
    code = f"{before}from spmd_auto.verify import parse_target as t; print(len(t('gpu:h100:1x2').devices()))"
    assert run_python(code).split() == ["2"]
