"""Calibration: fits on timings made up, the structure of a real run, and profiles that come of it. Nothing is timed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import spmd_auto
from spmd_auto import cli
from spmd_auto.errors import MeshError, ProfileError
from spmd_auto.mesh import Link, LogicalMesh, load_profile, registry
from spmd_auto.mesh.collectives import collective
from spmd_auto.mesh.hardware import LINE, SWITCH, TORUS
from spmd_auto.tools import calibrate as module
from spmd_auto.tools.calibrate import Calibration, Figure
from spmd_auto.tools.fit import Sample, fit_link
from spmd_auto.tools.measure import KINDS
from tests.known_answers.toy import CHIP
from tests.test_errors import refused


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(registry, "_ADDED", {})


def timed(link, n, sizes, error=lambda: 1.0):
    mesh = LogicalMesh(("x",), (n,), (link,), CHIP)
    return [
        Sample(kind, "x", n, size, collective(mesh, kind, (0,), size).seconds * error())
        for kind in KINDS
        for size in sizes
    ]


@pytest.mark.parametrize("form", ["ring", TORUS, LINE])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_a_link_is_found_again(form, n):
    link = Link(3e10, 7e-6, form)
    found = fit_link(timed(link, n, (1e3, 1e5, 1e7)), form)
    assert found.bandwidth == pytest.approx(3e10, rel=1e-6)
    assert found.latency == pytest.approx(7e-6, rel=1e-6)
    assert found.form == form


def test_noise_moves_a_fit_by_no_more_than_itself():
    random = np.random.default_rng(0)
    samples = timed(Link(3e10, 7e-6), 8, (1e3, 1e4, 1e5, 1e6, 1e7), lambda: random.uniform(0.9, 1.1))
    found = fit_link(samples, "ring")
    assert found.bandwidth == pytest.approx(3e10, rel=0.1)
    assert found.latency == pytest.approx(7e-6, rel=0.1)


@pytest.mark.parametrize(("link", "sizes"), [(Link(1e9, 0.0), (1e5, 1e7)), (Link(1e15, 1e-5), (8.0, 64.0))])
def test_neither_figure_is_ever_negative(link, sizes):
    random = np.random.default_rng(1)
    for _ in range(20):
        found = fit_link(timed(link, 4, sizes, lambda: random.uniform(0.8, 1.2)), SWITCH)
        assert found.latency >= 0
        assert 0 < found.bandwidth <= 1e15


def test_a_run_reports_old_and_measured_figures(monkeypatch, devices):
    monkeypatch.setattr(module, "MATMULS", (16, 32))
    monkeypatch.setattr(module, "STREAM", 2**16)
    monkeypatch.setattr(module, "SIZES", (2**8, 2**14))
    mesh = jax.sharding.Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    said = []
    found = spmd_auto.calibrate(mesh, seconds=300, progress=said.append)
    assert not found.stopped
    assert {(s.kind, s.axis, s.devices) for s in found.samples} == {(k, a, 2) for k in KINDS for a in ("x", "y")}
    assert all(s.seconds > 0 and s.bytes > 0 for s in found.samples)
    assert [(w, n) for w, n, _ in found.matmuls] == [(2, 16), (4, 16), (2, 32), (4, 32)]
    names = ["memory_bandwidth", "flops.2", "flops.4", "inside.bandwidth", "inside.latency"]
    assert [f.name for f in found.figures] == names
    old = load_profile("cpu")
    assert found.figures[0].old == old.chip.memory_bandwidth
    assert found.figures[3].old == old.inside.bandwidth
    assert all(f.measured >= 0 for f in found.figures)
    assert len(said) == len(found.samples) + len(found.matmuls) + 1
    for words in ("measured, against the profile 'cpu'", "ratio", "matrix products", "inside.latency"):
        assert words in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.chip = "other"  # type: ignore[misc]


def test_a_time_limit_stops_and_is_said(devices):
    found = spmd_auto.calibrate(seconds=1e-9)
    assert found.stopped
    assert (found.figures, found.samples, found.matmuls) == ((), (), ())
    assert "the time limit ended it early" in str(found)
    assert found.profile()["flops"]["4"] == load_profile("cpu").chip.flops_for(4)


MADE = Calibration(
    "h100",
    (
        Figure("memory_bandwidth", "bytes/s", 2.68e12, 2.7e12),
        Figure("flops.2", "FLOP/s", 5.4e14, 6.5e14),
        Figure("between.bandwidth", "bytes/s", 4.5e10, 2.0e10),
        Figure("between.latency", "seconds", 1e-5, 1.4e-5),
    ),
    ((2, 1024, 6.5e14),),
    (),
)


def test_what_moved_comes_first():
    assert [f.name for f in MADE.moved()] == ["between.bandwidth", "between.latency", "flops.2"]
    assert MADE.moved()[0].ratio == pytest.approx(0.444, abs=1e-3)
    assert "moved: between.bandwidth x0.444" in " ".join(str(MADE).split())


def test_a_saved_profile_is_a_profile(tmp_path):
    path = tmp_path / "measured.toml"
    MADE.save(str(path))
    assert spmd_auto.register_profile(path) == "measured"
    before, after = load_profile("h100"), load_profile("measured")
    assert after.chip.flops_for(2) == 6.5e14
    assert after.chip.flops_for(4) == pytest.approx(before.chip.flops_for(4))
    assert after.between == Link(2.0e10, 1.4e-5, SWITCH)
    assert after.inside == before.inside
    assert (after.chip.memory, after.chip.hidden, after.chip.combine) == (
        before.chip.memory,
        before.chip.hidden,
        before.chip.combine,
    )
    with refused(ProfileError, what="can't be written"):
        MADE.save(str(tmp_path / "no" / "such.toml"))


def test_registered_figures_are_used_by_clusters():
    assert MADE.register() == "h100"
    assert spmd_auto.cluster("h100", hosts=2).tiers[0].link.bandwidth == 2.0e10
    assert MADE.register("mine") == "mine"
    assert spmd_auto.cluster("mine", hosts=2).chip.flops_for(2) == 6.5e14


@pytest.mark.parametrize("name", ["v5e", "v5p", "cpu", "b200"])
def test_every_profile_survives_being_calibrated(name):
    nothing = Calibration(name, (), (), ())
    spmd_auto.register_profile(nothing.profile(), "again")
    old, new = load_profile(name), load_profile("again")
    assert dataclasses.replace(new.chip, name=name) == old.chip
    assert (new.inside, new.between, new.torus, new.wraps_at) == (old.inside, old.between, old.torus, old.wraps_at)


def test_seconds_are_positive():
    with refused(MeshError, what="seconds=0", why="some seconds", fixes="seconds=20"):
        spmd_auto.calibrate(seconds=0)


def test_the_command_prints_and_saves(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "calibrate", lambda **options: MADE)
    path = tmp_path / "x.toml"
    assert cli.main(["calibrate", "--seconds", "1", "--save", str(path)]) == 0
    assert "measured, against the profile 'h100'" in capsys.readouterr().out
    assert path.read_text().startswith("platform")
