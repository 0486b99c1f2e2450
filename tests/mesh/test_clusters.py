"""Clusters, their meshes and links; and what is refused."""

from __future__ import annotations

import math
import types

import jax
import numpy as np
import pytest
from jax import P

import spmd_auto
from spmd_auto.errors import MeshError
from spmd_auto.mesh import LogicalMesh, cluster_of, load_profile, logical_mesh_of, profile_names
from tests.known_answers.toy import toy_mesh
from tests.test_errors import refused


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_plausible_and_name_their_source(name):
    profile = load_profile(name)
    chip = profile.chip
    assert chip.platform in ("cpu", "gpu", "tpu")
    assert chip.flops_for(2) >= chip.flops_for(4) > 0
    assert chip.memory > 1e9
    assert chip.memory_bandwidth > profile.inside.bandwidth > 1e8
    assert 0 < profile.inside.latency < 1e-3
    assert len(profile.source) > 10
    assert profile.torus == 0 or profile.wraps_at > 1
    if profile.between is not None:
        assert profile.between.bandwidth <= profile.inside.bandwidth


def test_hosts_and_devices():
    devices = spmd_auto.cluster("h100", hosts=64)
    assert devices.device_count == 512
    assert [(tier.name, tier.size) for tier in devices.tiers] == [("host", 64), ("gpu", 8)]
    assert devices.tiers[0].link.bandwidth < devices.tiers[1].link.bandwidth
    assert spmd_auto.cluster("h100", hosts=2, per_host=4).device_count == 8
    assert spmd_auto.cluster("h100").device_count == 8
    assert spmd_auto.cluster("cpu", hosts=2, per_host=4).device_count == 8


def test_torus():
    devices = spmd_auto.cluster("v5p", topology="4x8x16")
    assert devices.device_count == 512
    assert [tier.size for tier in devices.tiers] == [4, 8, 16]
    assert "512 v5p" in devices.describe()
    # only a closed ring sends both ways
    profile = load_profile("v5e")
    short, closed = spmd_auto.cluster("v5e", topology=f"2x{profile.wraps_at}").tiers
    assert closed.link.bandwidth == 2 * short.link.bandwidth == 2 * profile.inside.bandwidth


def test_meshes_of_a_cluster_cover_all_devices():
    for devices in (
        spmd_auto.cluster("h100", hosts=2),
        spmd_auto.cluster("a100", per_host=12),
        spmd_auto.cluster("v5e", topology="4x4"),
        spmd_auto.cluster("a100", per_host=7),
        spmd_auto.cluster("a100", per_host=1),
    ):
        meshes = devices.meshes()
        assert meshes
        assert len({(m.names, m.sizes) for m in meshes}) == len(meshes)
        for mesh in meshes:
            assert mesh.device_count == devices.device_count
            assert len(mesh.names) == len(set(mesh.names)) == len(mesh.links)


def test_mesh_with_own_names_takes_the_slowest_link_that_an_axis_crosses():
    devices = spmd_auto.cluster("h100", hosts=4)
    between, inside = (tier.link for tier in devices.tiers)
    assert devices.mesh(data=4, model=8).links == (between, inside)
    assert devices.mesh(data=32).links == (between,)
    assert devices.mesh(a=4, b=2, c=4).links == (between, inside, inside)
    assert devices.mesh(a=2, b=16).links == (between, between)  # b straddles the hosts


def test_mesh_of_a_jax_mesh_keeps_axes_names_and_order(devices):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 1, 2), ("x", "y", "z"))
    logical = logical_mesh_of(mesh)
    assert (logical.names, logical.sizes) == (("x", "y", "z"), (4, 1, 2))
    assert logical.chip.platform == "cpu"
    assert cluster_of(devices[:3]).device_count == 3


@pytest.mark.parametrize(("sizes", "hosts"), [((2, 4), 1), ((4,), 1), ((1,), 1), ((4, 8), 4), ((2, 16), 4)])
def test_mesh_of_an_abstract_mesh_is_of_chips_like_those_at_hand(sizes, hosts):
    """Planning needs no devices: only what kind they are."""
    abstract = jax.sharding.AbstractMesh(sizes, ("x", "y")[: len(sizes)])
    logical = logical_mesh_of(abstract)
    expected = spmd_auto.cluster("cpu", hosts=hosts, per_host=math.prod(sizes) // hosts)
    assert logical == expected.mesh(**dict(zip(abstract.axis_names, sizes, strict=True)))


def test_an_abstract_torus_is_not_guessed(monkeypatch):
    chip = types.SimpleNamespace(device_kind="TPU v5 lite", process_index=0)
    monkeypatch.setattr(jax, "devices", lambda: [chip] * 4)
    assert logical_mesh_of(jax.sharding.AbstractMesh((4,), ("x",))).chip.name == "v5e"
    with pytest.raises(MeshError, match="form a torus") as caught:
        logical_mesh_of(jax.sharding.AbstractMesh((4, 4), ("x", "y")))
    assert 'spmd_auto.cluster("v5e", topology=...).mesh(x=4, y=4)' in caught.value.fixes[0]


# ---- specs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "partition"),
    [
        (((), ()), P()),
        (((0,), ()), P("a")),
        (((), (1,)), P(None, "b")),
        (((0, 1), ()), P(("a", "b"))),
        (((1, 0), ()), P(("b", "a"))),
        (((1,), (0,)), P("b", "a")),
    ],
)
def test_specs_and_partition_specs_are_the_same_thing(spec, partition):
    mesh = toy_mesh(2, 4)
    assert mesh.partition_spec(spec) == partition
    assert mesh.spec(partition, 2) == spec


def test_build_names_its_axes_and_refuses_too_few_devices(devices):
    mesh = toy_mesh(2, 4).build()
    assert mesh.axis_names == ("a", "b")
    assert mesh.devices.shape == (2, 4)
    assert list(mesh.devices.flat) == devices
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert toy_mesh(2).build(devices[3:]).devices.tolist() == devices[3:5]
    with refused(MeshError, what=("needs 16 devices", "8 are there"), fixes="simulate_devices(16)"):
        toy_mesh(16).build()


# ---- refused ---------------------------------------------------------------------------------------------


def test_unknown_chip_offers_the_nearest():
    with refused(MeshError, what="no hardware profile 'h10'", why=("h100", "v5p"), fixes="did you mean 'h100'?"):
        spmd_auto.cluster("h10")
    with refused(MeshError, what="'zzz'", fixes="'a100'"):
        spmd_auto.cluster("zzz")


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_torus_without_topology(chip):
    example = "x".join(["4"] * load_profile(chip).torus)
    with refused(MeshError, what=f"{chip} chips form a torus", why="dimensions", fixes=f'topology="{example}"'):
        spmd_auto.cluster(chip)
    assert spmd_auto.cluster(chip, topology=example).device_count == math.prod([4] * load_profile(chip).torus)


@pytest.mark.parametrize("topology", ["8x8", "4x4x4x4", "0x4x4", "", "abc", "4x-4x4", "4,4,4", "4x4x", 64])
def test_wrong_topology(topology):
    with refused(MeshError, what=f"topology {topology!r} for v5p", why="3 dimensions", fixes='topology="4x4x4"'):
        spmd_auto.cluster("v5p", topology=topology)


def test_topology_and_hosts_are_not_mixed():
    with refused(MeshError, what="h100 has no topology", why="switched", fixes="hosts=2"):
        spmd_auto.cluster("h100", topology="2x4")
    with refused(MeshError, what="neither hosts nor per_host", fixes='topology="4x4"'):
        spmd_auto.cluster("v5e", topology="4x4", hosts=2)


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"hosts": -2}, {"per_host": 0}, {"hosts": 1.5}])
def test_numbers_of_devices_are_whole_and_positive(wrong):
    (name,) = wrong
    with refused(MeshError, what=f"{name}={wrong[name]!r}", why="whole number above zero"):
        spmd_auto.cluster("h100", **wrong)


def test_sizes_that_do_not_multiply_to_the_devices():
    devices = spmd_auto.cluster("h100", hosts=2)
    with refused(MeshError, what=("24 places", "16 devices"), why="exactly one place", fixes="product is 16"):
        devices.mesh(data=3, model=8)
    with refused(MeshError, what="data=-2"):
        devices.mesh(data=-2, model=-8)


def test_hosts_with_unequal_numbers_of_devices():
    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

        def __init__(self, host):
            self.process_index = host

    assert cluster_of([Device(h) for h in (0, 0, 1, 1)]).describe() == "4 h100 (2 host x 2 device)"
    with refused(MeshError, what="3 devices on 2 hosts", why="same number"):
        cluster_of([Device(h) for h in (0, 0, 1)])


@pytest.mark.parametrize("partition", [P("c"), P("a", "a"), P(None, None, "a")])
def test_specs_that_can_not_be(partition):
    assert isinstance(toy_mesh(2, 4), LogicalMesh)
    with pytest.raises(MeshError):
        toy_mesh(2, 4).spec(partition, 2)
