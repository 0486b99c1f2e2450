from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from spmd_auto import store as places
from spmd_auto.verify import Collective, MemoryUse, ProgramSummary, SummaryCache

SUMMARY = ProgramSummary(
    axis_names=("data", "model"),
    axis_sizes=(2, 4),
    collectives=(
        Collective("all-reduce", ("model",), 4, 64.0, 96.0, 3, ("f32", "bf16"), "jit(f)/dot", "step.py:3"),
        Collective("all-gather", ("data",), 2, 10.5, 5.25, 1, ("s4",), in_branch=True),
    ),
    dot_flops=1e12,
    memory=MemoryUse(1, 2, 3, 4, None),
    notes=("loop b: trip count depends on data, counted once",),
)


def test_round_trip(tmp_path):
    store = SummaryCache(tmp_path / "new" / "folder")
    assert store.get("k") is None
    store.put("k", SUMMARY)
    assert store.get("k") == SUMMARY
    without = dataclasses.replace(SUMMARY, memory=None)
    store.put("k", without)
    assert store.get("k") == without
    assert [p.name for p in store.directory.iterdir()] == ["k.json"]  # no temporary left


def test_a_broken_file_counts_as_absent(tmp_path):
    store = SummaryCache(tmp_path)
    for text in ("", "{", "[]", '{"collectives": [{}]}'):
        (tmp_path / "k.json").write_text(text)
        assert store.get("k") is None


def test_a_disk_that_refuses_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    SummaryCache(tmp_path / "file").put("k", SUMMARY)


def test_key_depends_on_everything_that_decides_the_program(devices, monkeypatch):
    store = SummaryCache()
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8)))
    mesh, other = (
        Mesh(np.array(devices).reshape(shape), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        for shape in [(2, 4), (4, 2)]
    )
    key = store.key(lowered, "cpu:8", mesh)
    assert key == store.key(lowered.as_text(), "cpu:8", mesh)
    assert len(key) == 64
    changed = {
        store.key(lowered.as_text() + " ", "cpu:8", mesh),
        store.key(lowered, "cpu:4", mesh),
        store.key(lowered, "cpu:8", other),
        store.key(lowered, "cpu:8"),
    }
    monkeypatch.setattr(jax, "__version__", "0.0.0")
    changed.add(store.key(lowered, "cpu:8", mesh))
    assert len(changed) == 5
    assert key not in changed


def test_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SPMD_AUTO_CACHE", str(tmp_path))
    assert SummaryCache().directory == tmp_path
    monkeypatch.delenv("SPMD_AUTO_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(places.default_directory()) == "/home/someone/.cache/spmd_auto"
