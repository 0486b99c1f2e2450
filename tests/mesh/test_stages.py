"""Times of collectives by tier: hierarchical, torus, switch, shared links, small messages, combining."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

import spmd_auto
from spmd_auto.mesh import Chip, Link, LogicalMesh, load_profile
from spmd_auto.mesh.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, collective
from spmd_auto.mesh.hardware import LINE, SWITCH, TORUS
from tests.known_answers.toy import CHIP

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE)
S = 1e8


def one(n, form, bandwidth=1e9, latency=1e-6):
    return LogicalMesh(("a",), (n,), (Link(bandwidth, latency, form),), CHIP)


def seconds(mesh, kind, axes, size=S, share=1.0):
    return collective(mesh, kind, axes, size, share).seconds


# ---- tiers ----------------------------------------------------------------------------------------------


def test_all_reduce_over_hosts_is_hierarchical():
    """Scatter inside, reduce 1/8 across, gather inside; one axis over both tiers costs what two axes cost."""
    hosts = spmd_auto.cluster("h100", hosts=4)
    between, inside = (tier.link for tier in hosts.tiers)
    expected = 2 * (7 * inside.latency + S * 7 / 8 / inside.bandwidth)
    expected += 2 * (3 * between.latency + S / 8 * 3 / 4 / between.bandwidth)
    assert seconds(hosts.mesh(data=4, model=8), ALL_REDUCE, (0, 1)) == pytest.approx(expected)
    assert seconds(hosts.mesh(data=32), ALL_REDUCE, (0,)) == pytest.approx(expected)
    # hosts in two steps of two: the same bytes, a hop less
    split = seconds(hosts.mesh(a=2, b=16), ALL_REDUCE, (0, 1))
    assert split == pytest.approx(expected - 2 * between.latency)


def test_an_axis_that_straddles_hosts_is_as_slow_as_their_links():
    hosts = spmd_auto.cluster("h100", hosts=2, per_host=12)
    mesh = hosts.mesh(a=3, b=8)  # groups of eight do not fill hosts of twelve
    between = hosts.tiers[0].link
    assert seconds(mesh, ALL_GATHER, (1,)) == pytest.approx(7 * between.latency + S * 7 / 8 / between.bandwidth)
    assert mesh.links[1] == between


# ---- forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_closed_and_open_rings(n):
    """A link of a closed ring has both ways together: the same bytes in half the time, half the hops."""
    line, torus = one(n, LINE, 1e9), one(n, TORUS, 2e9)
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        assert seconds(line, kind, (0,)) == pytest.approx((n - 1) * 1e-6 + S * (n - 1) / n / 1e9)
        assert seconds(torus, kind, (0,)) == pytest.approx(n // 2 * 1e-6 + S * (n - 1) / n / 2e9)
    # half of all messages of an open ring cross its middle, each way
    cut = max(k * (n - k) for k in range(1, n)) / n * S
    assert seconds(line, ALL_TO_ALL, (0,)) == pytest.approx((n - 1) * 1e-6 + cut / 1e9)
    # on a closed ring each message takes the shorter way
    hops = sum(min(k, n - k) for k in range(1, n)) / n * S / 2
    assert seconds(torus, ALL_TO_ALL, (0,)) == pytest.approx(n // 2 * 1e-6 + hops / 1e9)
    assert seconds(line, PERMUTE, (0,)) == seconds(torus, PERMUTE, (0,))  # one message goes one way


def test_dimensions_of_a_torus_work_at_once():
    cube = spmd_auto.cluster("v5p", topology="4x4x4").mesh(x=4, y=4, z=4)
    link = load_profile("v5p").inside
    expected = 3 * 2 * link.latency + S * 63 / 64 / (3 * 2 * link.bandwidth)
    assert seconds(cube, ALL_GATHER, (0, 1, 2)) == pytest.approx(expected)
    assert seconds(cube, ALL_REDUCE, (0, 1, 2)) == pytest.approx(2 * expected)
    # one mesh axis over the whole torus is the same collective
    flat = spmd_auto.cluster("v5p", topology="4x4x4").mesh(all=64)
    assert seconds(flat, ALL_GATHER, (0,)) == pytest.approx(expected)


def test_axes_that_share_a_dimension_of_a_torus_share_its_links():
    torus = spmd_auto.cluster("v5e", topology="16x16")
    whole, split = torus.mesh(x=16, y=16), torus.mesh(x=16, y0=4, y1=4)
    link = load_profile("v5e").inside
    # four neighbours of a ring have no link that closes them
    assert seconds(split, ALL_GATHER, (2,)) == pytest.approx(3 * link.latency + S * 3 / 4 / link.bandwidth)
    # four devices four apart have three other rings on their links, which are closed
    ring = 2 * 4 * link.latency + S * 3 / 4 / (2 * link.bandwidth / 4)
    assert seconds(split, ALL_GATHER, (1,)) == pytest.approx(ring)
    for kind in (ALL_GATHER, ALL_REDUCE):
        assert seconds(split, kind, (1, 2)) >= seconds(whole, kind, (1,))


@pytest.mark.parametrize("n", [2, 8, 512])
def test_small_all_reduces_on_a_switch_take_a_tree(n):
    mesh = one(n, SWITCH)
    ring, tree = 2 * (n - 1) * 1e-6, 2 * math.ceil(math.log2(n)) * 1e-6
    assert seconds(mesh, ALL_REDUCE, (0,), 1.0) == pytest.approx(min(ring, tree), rel=1e-2)
    large = 1e13
    assert seconds(mesh, ALL_REDUCE, (0,), large) == pytest.approx(2 * large * (n - 1) / n / 1e9, rel=1e-6)
    assert seconds(mesh, ALL_GATHER, (0,)) == seconds(one(n, "ring"), ALL_GATHER, (0,))


# ---- curves ---------------------------------------------------------------------------------------------

TORUS_2D = spmd_auto.cluster("v5e", topology="8x16")
MESHES = {
    "hosts": spmd_auto.cluster("h100", hosts=4).mesh(a=4, b=8),
    "hosts, one axis": spmd_auto.cluster("a100", hosts=3).mesh(a=24),
    "torus": TORUS_2D.mesh(a=8, b=16),
    "torus, cut": TORUS_2D.mesh(a=2, b=4, c=4, d=4),
    "cpu": spmd_auto.cluster("cpu").mesh(a=8),
}


@given(
    name=st.sampled_from(sorted(MESHES)),
    kind=st.sampled_from(KINDS),
    size=st.floats(1.0, 1e11),
    more=st.floats(1.0, 10.0),
    share=st.sampled_from((1.0, 0.25, 0.01)),
    data=st.data(),
)
def test_prices_are_monotone_and_continuous_in_the_bytes(name, kind, size, more, share, data):
    mesh = MESHES[name]
    every = range(len(mesh.sizes))
    axes = tuple(data.draw(st.sets(st.sampled_from(every), min_size=1), label="axes"))
    small, large = (collective(mesh, kind, axes, s, share) for s in (size, size * more))
    assert small.seconds <= large.seconds * (1 + 1e-12)
    assert small.bytes <= large.bytes
    assert 0 <= small.latency <= small.seconds
    near = collective(mesh, kind, axes, size * (1 + 1e-6), share)
    assert near.seconds == pytest.approx(small.seconds, rel=1e-5)
    # k pieces never cost less than the whole, where nothing is combined
    if share == 1.0:
        assert 2 * collective(mesh, kind, axes, size / 2).seconds >= small.seconds * (1 - 1e-12)


@given(n=st.integers(2, 64), form=st.sampled_from((LINE, TORUS, SWITCH, "ring")), kind=st.sampled_from(KINDS))
def test_prices_grow_with_the_devices_of_one_form(n, form, kind):
    assert seconds(one(n, form), kind, (0,)) <= seconds(one(n + 1, form), kind, (0,)) * (1 + 1e-12)


def test_only_small_collectives_share_latency():
    chip = Chip("toy", "gpu", ((8, 1e9),), 1e15, 1e15, 0.0, combine=1e6)
    mesh = LogicalMesh(("a",), (4,), (Link(1e9, 1e-3),), chip)

    def latency(size, share):
        return collective(mesh, ALL_GATHER, (0,), size, share).latency

    assert latency(1.0, 0.1) == pytest.approx(0.1 * 3e-3, rel=1e-4)
    assert latency(5e5, 0.1) == pytest.approx((0.1 + 0.9 / 2) * 3e-3)
    assert latency(1e6, 0.1) == latency(1e9, 0.1) == pytest.approx(3e-3)
    assert latency(1.0, 1.0) == pytest.approx(3e-3)
