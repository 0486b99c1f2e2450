"""Hardware profiles: all that are promised, every figure with a source, and wrong ones refused."""

from __future__ import annotations

import copy

import pytest

import spmd_auto
from spmd_auto.errors import MeshError, ProfileError
from spmd_auto.mesh import load_profile, profile_names, registry
from tests.test_errors import refused

GOOD = {
    "platform": "gpu",
    "source": "measured in a test",
    "memory": 16e9,
    "memory_bandwidth": 1e12,
    "flops": {"2": 1e14, "4": 5e13},
    "flops_efficiency": 0.5,
    "per_host": 4,
    "inside": {"bandwidth": 1e11, "latency": 2e-6, "form": "switch"},
    "between": {"bandwidth": 1e10, "latency": 1e-5},
}


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(registry, "_ADDED", {})


def changed(**figures):
    data = copy.deepcopy(GOOD)
    for key, value in figures.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    return data


def test_all_promised_chips_are_there():
    assert set(profile_names()) >= {"a100", "h100", "h200", "b200", "v4", "v5e", "v5p", "v6e", "cpu"}


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_has_a_source(name):
    profile = load_profile(name)
    named = dict(profile.sources)
    needed = {"flops", "memory", "memory_bandwidth", "inside", "kernel_overhead"}
    needed |= {"between"} if profile.between else set()
    needed |= {"torus", "wraps_at"} if profile.torus else set()
    needed |= {"combine", "hidden", "slowdown"} if profile.chip.hidden else set()
    assert set(named) >= needed
    assert all(len(text) > 5 for text in named.values())
    if profile.chip.platform != "cpu":
        assert all("https://" in named[figure] for figure in ("flops", "memory", "memory_bandwidth", "inside"))


def test_a_registered_profile_is_found():
    assert spmd_auto.register_profile(GOOD, "toy9") == "toy9"
    devices = spmd_auto.cluster("toy9", hosts=2)
    assert devices.device_count == 8
    assert devices.chip.flops_for(2) == 5e13
    assert devices.chip.name == "toy9"
    with pytest.raises(MeshError, match="did you mean 'toy9'"):
        spmd_auto.cluster("toy8")


def test_a_file_is_registered_by_its_name(tmp_path):
    path = tmp_path / "mine.toml"
    text = [f"{k} = {v!r}".replace("'", '"') for k, v in GOOD.items() if not isinstance(v, dict)]
    for key, table in GOOD.items():
        if isinstance(table, dict):
            text += [f"[{key}]", *(f"{k} = {v!r}".replace("'", '"') for k, v in table.items())]
    path.write_text("\n".join(text))
    assert spmd_auto.register_profile(path) == "mine"
    assert load_profile("mine").inside.form == "switch"


def test_a_taken_name_is_refused_unless_it_is_replaced():
    with refused(ProfileError, what="'cpu' already", fixes=("my_cpu", "replace=True")):
        spmd_auto.register_profile(GOOD, "cpu")
    spmd_auto.register_profile(GOOD, "cpu", replace=True)
    assert load_profile("cpu").chip.memory == 16e9


@pytest.mark.parametrize(
    ("figures", "what", "why", "fix"),
    [
        ({"memroy": 16e9}, "'memroy'", "a profile has", "did you mean 'memory'?"),
        ({"memory": None}, "no 'memory'", "every chip", "bytes"),
        ({"memory": 16}, "memory = 16", "another unit may be meant", "memory in bytes"),
        ({"memory": "16 GB"}, "'16 GB'", "it is a str", "bytes"),
        ({"memory": -1.0}, "memory = -1.0", "negative", "bytes"),
        ({"memory_bandwidth": 3.35}, "memory_bandwidth = 3.35", "another unit", "bytes/s"),
        ({"flops": {"2": 989}}, "flops.2 = 989", "another unit", "FLOP/s"),
        ({"flops": {"bf16": 1e14}}, "bf16", "bytes per element", "flops = {2"),
        ({"flops": 1e14}, "flops = ", "table", "[flops]"),
        ({"flops_efficiency": 55}, "flops_efficiency = 55", "another unit", "share"),
        ({"inside": {"bandwidth": 1e11, "latency": 3.0}}, "inside.latency = 3.0", "another unit", "seconds"),
        ({"inside": {"bandwidth": 1e11}}, "[inside]", "latency in seconds", "latency = 3e-6"),
        ({"inside": {"bandwidth": 1e11, "latency": 0.0, "form": "mesh"}}, "inside.form = 'mesh'", "ring", "switch"),
        ({"torus": 2}, "torus = 2", "closed", "wraps_at"),
        ({"per_host": 1.5}, "per_host = 1.5", "whole number", ""),
        ({"platform": "fpga"}, "platform = 'fpga'", "three platforms", "gpu"),
        ({"source": " "}, "source = ' '", "can't be checked", "datasheet"),
    ],
)
def test_wrong_figures_are_refused(figures, what, why, fix):
    with refused(ProfileError, what=what, why=why, fixes=fix):
        spmd_auto.register_profile(changed(**figures), "toy9")
    assert "toy9" not in profile_names()


def test_a_file_that_can_not_be_read(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text("memory = = 3")
    with refused(ProfileError, what="odd.toml can't be read", why="TOMLDecodeError", fixes="TOML"):
        spmd_auto.register_profile(path)
    with refused(ProfileError, what="named None", why="letters", fixes="name="):
        spmd_auto.register_profile(GOOD)
