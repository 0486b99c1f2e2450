"""Replica groups in each written form, against groups made by numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from spmd_auto.errors import VerifyError
from spmd_auto.verify.hlo_groups import GroupReader

SIZES = (2, 4, 2)


def as_list(groups) -> str:
    return "replica_groups={" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


def groups_over(axes, sizes=SIZES, ids=None):
    ids = np.arange(math.prod(sizes)).reshape(sizes) if ids is None else ids
    rest = [a for a in range(len(sizes)) if a not in axes]
    return ids.transpose(*rest, *axes).reshape(-1, math.prod(sizes[a] for a in axes)).tolist()


ORDERED_AXES = [axes for n in (1, 2, 3) for axes in itertools.permutations(range(3), n)]


@pytest.mark.parametrize("axes", ORDERED_AXES)
def test_lists_over_axes_in_every_order(axes):
    read = GroupReader(SIZES).read(as_list(groups_over(axes)))
    assert read.axes == tuple(sorted(axes))
    assert read.size == math.prod(SIZES[a] for a in axes)


@pytest.mark.parametrize("axes", ORDERED_AXES)
def test_iotas_over_axes_in_every_order(axes):
    rest = [a for a in range(3) if a not in axes]
    size = math.prod(SIZES[a] for a in axes)
    order = ",".join(map(str, (*rest, *axes)))
    read = GroupReader(SIZES).read(f"x, replica_groups=[{16 // size},{size}]<=[2,4,2]T({order}), dimensions={{0}}")
    assert (read.axes, read.size) == (tuple(sorted(axes)), size)


@pytest.mark.parametrize("axes", ORDERED_AXES)
def test_devices_in_another_order(axes):
    # Partition ids shuffled over the mesh: groups are lists of those ids.
    ids = np.random.default_rng(1).permutation(16)
    read = GroupReader(SIZES, ids).read(as_list(groups_over(axes, ids=ids.reshape(SIZES))))
    assert read.axes == tuple(sorted(axes))


@pytest.mark.parametrize(
    ("text", "axes", "size"),
    [
        ("replica_groups={}", (0, 1, 2), 16),
        ("replica_groups={{0},{1}}", (), 1),
        ("replica_groups=[1,16]<=[16]", (0, 1, 2), 16),
        ("replica_groups=[4,4]<=[16]", (1, 2), 4),  # half of axis 1 and axis 2
        ("replica_groups=[2,8]<=[16]", (1, 2), 8),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", (1, 2), 8),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=4], device_ids=([2,4,2]T(1,0,2)) {'axis_1'}", (1,), 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=8], device_ids=([8,2]T(1,0)) {'axis_0'}", (2,), 2),
        ("replica_groups=mesh['x'=16] {'x':(1)2}", (0,), 2),
        ("replica_groups=mesh['x'=16] {'x':(2)4}", (1,), 4),
        ("replica_groups=mesh['x'=16] {'x':(8)2}", (2,), 2),
        ("replica_groups=mesh['x'=16] {'x':(1)2,'x':(8)2}", (0, 2), 4),
        ("replica_groups=mesh['x'=2,'y'=2] {}", (), 1),
        ("source_target_pairs={{0,2},{2,4},{4,6},{6,0}}", (1,), 4),
        ("source_target_pairs={{0,0},{1,1}}", (), 1),
        ("source_target_pairs={{0,9},{9,0}}", (0, 2), 4),
        ("source_target_pairs={}", (), 1),
    ],
)
def test_written_forms(text, axes, size):
    read = GroupReader(SIZES).read(f"  %c = f32[8] all-gather(%x), channel_id=1, {text}, use_global_device_ids=true")
    assert (read.axes, read.size) == (axes, size)


def test_512_devices():
    read = GroupReader((8, 8, 8)).read("replica_groups=[64,8]<=[8,8,8]T(0,2,1)")
    assert (read.axes, read.size) == ((1,), 8)


def test_groups_beyond_the_mesh():
    with pytest.raises(VerifyError, match="joins partition 15, the mesh \\(2, 4\\) has 8 devices"):
        GroupReader((2, 4)).read("replica_groups=[4,4]<=[16]")


def test_unknown_form():
    with pytest.raises(VerifyError, match="can't read the groups"):
        GroupReader(SIZES).read("  %c = f32[8] all-reduce(%x), replica_groups=<new>")


@pytest.mark.parametrize("ids", [[0, 1], [0] * 16, list(range(1, 17))])
def test_device_ids_that_are_no_order(ids):
    with pytest.raises(VerifyError, match="order of 0..15"):
        GroupReader(SIZES, ids)
