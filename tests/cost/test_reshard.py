"""Reshards: the price of a path is the sum of its steps, and each step is a collective that does it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from spmd_auto.cost.reshard import ReshardTable, gather_steps
from spmd_auto.mesh import Link
from spmd_auto.mesh.collectives import ALL_GATHER, ALL_TO_ALL, PERMUTE
from spmd_auto.propagate.assignment import axis_places
from tests.known_answers.toy import toy_mesh

S = 4096


def specs(axes: int, rank: int):
    """All specs of a rank over all subsets and orders of mesh axes."""
    out = []
    for count in range(axes + 1):
        for chosen in itertools.permutations(range(axes), count):
            for dims in itertools.product(range(rank), repeat=count):
                spec: list[list[int]] = [[] for _ in range(rank)]
                for axis, dim in zip(chosen, dims, strict=True):
                    spec[dim].append(axis)
                out.append(tuple(map(tuple, spec)))
    return list(dict.fromkeys(out))


MESHES = {"2x4": toy_mesh(2, 4), "fast inner": toy_mesh(2, 4, bandwidth=(1e9, 1e10)), "2x2x2": toy_mesh(2, 2, 2)}


@pytest.mark.parametrize("name", MESHES)
def test_price_is_the_sum_of_the_steps_of_its_path(name):
    table = ReshardTable(MESHES[name])
    every = specs(len(MESHES[name].sizes), 2)
    assert len(every) > 10
    longest = 0
    for source, target in itertools.permutations(every, 2):
        path = table.path(source, target)
        assert path[0] == source
        assert path[-1] == target
        assert len(set(path)) == len(path)
        longest = max(longest, len(path))
        whole = table.price(S, source, target)
        steps = [table.price(S, a, b) for a, b in itertools.pairwise(path)]
        assert whole.seconds == pytest.approx(sum(step.seconds for step in steps), rel=1e-12)
        assert whole.transfers == tuple(t for step in steps for t in step.transfers)
        assert whole.seconds == pytest.approx(sum(t.seconds for t in whole.transfers), rel=1e-12)
        # a path of more than one step has steps of one step
        assert all(table.path(a, b) == (a, b) for a, b in itertools.pairwise(path))
    assert longest > 2


@pytest.mark.parametrize("name", MESHES)
def test_nothing_moves_only_if_nothing_has_to(name):
    mesh = MESHES[name]
    table = ReshardTable(mesh)
    for source, target in itertools.product(specs(len(mesh.sizes), 2), repeat=2):
        # every device holds what it needs if the target only cuts further
        cuts = all(t[: len(s)] == s for s, t in zip(source, target, strict=True))
        assert (table.price(S, source, target).seconds == 0) == cuts, (source, target)
        assert (not table.price(S, source, target).transfers) == cuts


@pytest.mark.parametrize("name", MESHES)
def test_prices_are_linear_in_bytes_without_latency_and_never_fall(name):
    mesh = MESHES[name]
    table = ReshardTable(mesh)
    for source, target in itertools.permutations(specs(len(mesh.sizes), 2), 2):
        one, ten = table.price(S, source, target).seconds, table.price(10 * S, source, target).seconds
        assert ten == pytest.approx(10 * one, rel=1e-12)
        assert one >= 0


def test_closed_forms():
    mesh = toy_mesh(2, 4)
    table = ReshardTable(mesh)

    def kinds(source, target):
        return [(t.kind, t.axes, t.bytes) for t in table.price(S, source, target).transfers]

    assert kinds(((0,), ()), ((), ())) == [(ALL_GATHER, (0,), S / 2)]
    assert kinds(((1,), ()), ((), ())) == [(ALL_GATHER, (1,), S * 3 / 4)]
    assert kinds(((0, 1), ()), ((), ())) == [(ALL_GATHER, (0, 1), S * 7 / 8)]
    assert kinds(((0, 1), ()), ((0,), ())) == [(ALL_GATHER, (1,), S / 2 * 3 / 4)]
    assert kinds(((0,), ()), ((), (0,))) == [(ALL_TO_ALL, (0,), S / 2 / 2)]
    assert kinds(((), ()), ((0,), (1,))) == []
    assert kinds(((0,), ()), ((0,), (1,))) == []
    # sliced first, then exchanged: fewer bytes
    assert kinds(((0,), ()), ((1,), (0,))) == [(ALL_TO_ALL, (0,), S / 8 / 2)]
    swapped = kinds(((0, 1), ()), ((1, 0), ()))
    assert [(kind, axes) for kind, axes, _ in swapped] == [(PERMUTE, (0, 1))]


def test_gathers_on_slow_links_come_first():
    mesh = toy_mesh(2, 4, bandwidth=(1e9, 1e10))
    assert gather_steps(mesh, ((1,), (0,)), ((), ())) == [(0,), (1,)]
    assert gather_steps(mesh, ((0,), (1,)), ((), ())) == [(0,), (1,)]
    assert gather_steps(mesh, ((0, 1), ()), ((), ())) == [(0, 1)]
    assert gather_steps(mesh, ((1, 0), ()), ((), ())) == [(0,), (1,)]
    assert gather_steps(mesh, ((1,), (0,)), ((1,), ())) == [(0,)]


@pytest.mark.parametrize("name", MESHES)
def test_what_is_gathered_is_what_the_target_drops(name):
    mesh = MESHES[name]
    for source, target in itertools.product(specs(len(mesh.sizes), 2), repeat=2):
        gathered = [axis for step in gather_steps(mesh, source, target) for axis in step]
        assert sorted(gathered) == sorted(set(axis_places(source)) - set(axis_places(target)))


def test_latency_is_paid_by_share():
    slow = dataclasses.replace(toy_mesh(2, 4), links=(Link(1e9, 1e-3), Link(1e9, 1e-3)))
    table = ReshardTable(slow)
    source, target = ((0,), ()), ((), ())
    whole, none = table.price(S, source, target, 1.0).seconds, table.price(S, source, target, 0.0).seconds
    assert whole - none == pytest.approx(1e-3)
    assert table.price(S, source, target, 0.25).seconds == pytest.approx(none + 0.25e-3)


def test_price_counts_the_bytes_of_the_pieces():
    """A gather over one axis of a value that another axis splits too sends the pieces only."""
    mesh = toy_mesh(2, 4)
    table = ReshardTable(mesh)
    split = table.price(S, ((0,), (1,)), ((), (1,))).transfers
    whole = table.price(S, ((0,), ()), ((), ())).transfers
    assert math.isclose(split[0].bytes * 4, whole[0].bytes)
