"""Devices that a state needs (EXPECTATIONS A 21)."""

from __future__ import annotations

import pytest

import spmd_auto
from spmd_auto.errors import MemoryBudgetError

GIB = 2**30


@pytest.mark.parametrize(("memory", "devices"), [(32, 94), (64, 47), (80, 38), (139, 22)])
def test_devices_for_two_hundred_billion_parameters(memory, devices):
    assert spmd_auto.estimate_devices(200e9, memory=memory * GIB) == devices


def test_bytes_of_the_parameters_alone():
    assert pytest.approx(745.06, abs=0.005) == 200e9 * 4 / GIB
    assert spmd_auto.estimate_devices(200e9, memory=745.06 * GIB, copies=1) == 1
    assert spmd_auto.estimate_devices(200e9, memory=745.05 * GIB, copies=1) == 2


def test_itemsize_and_copies_scale():
    whole = spmd_auto.estimate_devices(1e9, memory=1e9)
    assert whole == 16
    assert spmd_auto.estimate_devices(1e9, memory=1e9, itemsize=2) == 8
    assert spmd_auto.estimate_devices(1e9, memory=1e9, copies=1) == 4
    assert spmd_auto.estimate_devices(1, memory=1e9) == 1


@pytest.mark.parametrize("wrong", [{"parameters": 0}, {"memory": 0}, {"itemsize": -1}, {"copies": 0}])
def test_sizes_must_be_positive(wrong):
    options = {"parameters": 1e9, "memory": 1e9, **wrong}
    with pytest.raises(MemoryBudgetError, match=next(iter(wrong))):
        spmd_auto.estimate_devices(options.pop("parameters"), **options)
