"""Every primitive of the installed JAX is decided about."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spmd_auto.propagate.graph import CALLS, CONTROL
from spmd_auto.propagate.rules import known_primitives
from spmd_auto.propagate.rules.opaque import OPAQUE

from . import primitives
from .primitives import CANNOT_STAND, KERNELS

# Of another release than one of the two that are tested, or of an extension that JAX does not import by itself.
_ELSEWHERE = {"checkpoint", "core_call", "expand_dims", "pjit", "tpu_custom_call"}


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    found = subprocess.run([sys.executable, primitives.__file__], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def _in_kernel(module: str) -> bool:
    return module.startswith(KERNELS)


def test_every_primitive_is_decided_about(installed: dict[str, str]) -> None:
    decided = known_primitives() | set(CALLS) | set(CONTROL) | set(OPAQUE) | set(CANNOT_STAND)
    assert len(installed) > 300
    assert {name: module for name, module in installed.items() if name not in decided and not _in_kernel(module)} == {}


def test_decisions_exclude_each_other() -> None:
    groups = [set(known_primitives()), set(CALLS), set(CONTROL), set(OPAQUE), set(CANNOT_STAND)]
    for i, first in enumerate(groups):
        for second in groups[i + 1 :]:
            assert not first & second


def test_no_rule_is_for_a_primitive_that_never_was(installed: dict[str, str]) -> None:
    newer = {
        "log2",
        "program_order",
        "with_memory_space_constraint",
        "one_minus_square",
        "polynomial",
        "xla_metadata_call",
        "unstack",
        "acospi",
        "asinpi",
        "atan2pi",
        "atanpi",
        "cospi",
        "exp2m1",
        "fma",
        "fmuladd",
        "log2p1",
        "sinpi",
        "tanpi",
        "random_gamma_grad",
        "random_poisson",
        "raw_bits",
    }
    older = {"shard_alike", "call", "closed_call", "core_map"}
    decided = known_primitives() | set(CALLS) | set(CONTROL) | set(OPAQUE)
    assert decided - set(installed) - newer - older - _ELSEWHERE == set()


def test_reasons_are_given() -> None:
    assert all(len(why) > 10 for why in (*OPAQUE.values(), *CANNOT_STAND.values()))
