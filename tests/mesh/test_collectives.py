"""Prices of collectives against closed forms (ring algorithms)."""

from __future__ import annotations

import pytest

from spmd_auto.mesh import Link, LogicalMesh
from spmd_auto.mesh.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, collective
from tests.known_answers.toy import CHIP

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE)
S = 1e6


def mesh(*sizes, bandwidth=1e9, latency=1e-6):
    speeds = bandwidth if isinstance(bandwidth, tuple) else (bandwidth,) * len(sizes)
    return LogicalMesh(tuple("abc"[: len(sizes)]), sizes, tuple(Link(b, latency) for b in speeds), CHIP)


@pytest.mark.parametrize("n", [2, 3, 8, 512])
def test_one_axis(n):
    m = mesh(n)
    hops, share = (n - 1) * 1e-6, (n - 1) / n * S
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
        t = collective(m, kind, (0,), S)
        assert t.bytes == pytest.approx(share)
        assert t.seconds == pytest.approx(hops + share / 1e9)
    t = collective(m, ALL_REDUCE, (0,), S)
    assert t.bytes == pytest.approx(2 * share)
    assert t.seconds == pytest.approx(2 * (hops + share / 1e9))
    t = collective(m, PERMUTE, (0,), S)
    assert (t.bytes, t.seconds) == (S, pytest.approx(1e-6 + S / 1e9))


@pytest.mark.parametrize("n", [2, 5, 16])
def test_all_reduce_is_scatter_and_gather(n):
    m = mesh(n, 4, bandwidth=(1e9, 3e9))
    for axes in ((0,), (1,), (0, 1)):
        whole = collective(m, ALL_REDUCE, axes, S)
        scatter, gather = collective(m, REDUCE_SCATTER, axes, S), collective(m, ALL_GATHER, axes, S)
        assert whole.seconds == pytest.approx(scatter.seconds + gather.seconds)
        assert whole.bytes == pytest.approx(scatter.bytes + gather.bytes)


def test_several_axes_start_on_the_fastest():
    m = mesh(4, 8, bandwidth=(1e9, 1e11), latency=0.0)
    t = collective(m, ALL_REDUCE, (0, 1), S)
    fast, slow = S * 7 / 8 / 1e11, S / 8 * 3 / 4 / 1e9
    assert t.seconds == pytest.approx(2 * (fast + slow))
    assert t.bytes == pytest.approx(2 * S * 31 / 32)
    # an all-to-all sends on what leaves the fast group undiminished
    t = collective(m, ALL_TO_ALL, (0, 1), S)
    assert t.seconds == pytest.approx(S * 7 / 8 / 1e11 + S * 3 / 4 / 1e9)


def test_two_axes_of_equal_links_cost_the_bytes_of_one_ring():
    two, one = mesh(2, 4, latency=0.0), mesh(8, latency=0.0)
    for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
        a, b = collective(two, kind, (0, 1), S), collective(one, kind, (0,), S)
        assert a.seconds == pytest.approx(b.seconds)
        assert a.bytes == pytest.approx(b.bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_prices_grow_with_bytes_and_devices_and_fall_with_bandwidth(kind):
    seconds = [collective(mesh(8), kind, (0,), s).seconds for s in (0.0, 1.0, 1e3, 1e6, 1e9)]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 5
    # affine in the bytes
    assert seconds[4] - seconds[0] == pytest.approx(1e3 * (seconds[3] - seconds[0]))
    by_count = [collective(mesh(n), kind, (0,), S).seconds for n in (1, 2, 4, 64)]
    assert by_count == sorted(by_count)
    assert collective(mesh(8, bandwidth=2e9), kind, (0,), S).seconds < collective(mesh(8), kind, (0,), S).seconds


@pytest.mark.parametrize("kind", [k for k in KINDS if k != PERMUTE])
def test_one_device_sends_nothing(kind):
    t = collective(mesh(1), kind, (0,), S)
    assert (t.bytes, t.seconds) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_latency_and_order_of_axes(kind):
    m = mesh(2, 4, bandwidth=(1e9, 5e9))
    assert collective(m, kind, (1, 0), S) == collective(m, kind, [0, 1], S)
    whole, half, none = (collective(m, kind, (0, 1), S, latency) for latency in (1.0, 0.5, 0.0))
    assert half.seconds == pytest.approx((whole.seconds + none.seconds) / 2)
    assert whole.bytes == half.bytes == none.bytes
    assert whole.scaled(3).seconds == pytest.approx(3 * whole.seconds)
    assert whole.scaled(3).bytes == 3 * whole.bytes
