"""Random programs: a hundred of those of benchmarks/fuzz.py; and the small ones that once failed, with their kind."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from jax import lax

from spmd_auto.lower.placement import Placement, Placements
from spmd_auto.lower.step import lower_step
from spmd_auto.trace import trace
from tests.fuzz.check import FuzzFailure, OneDeviceFails, check_all, check_order, check_parity, compare_results
from tests.fuzz.draft import Argument, Call
from tests.fuzz.programs import FuzzProgram, generate
from tests.fuzz.shrink import shrink
from tests.known_answers.toy import toy_mesh

QUICK = 25  # the quick run with the newest jax takes a quarter


@pytest.mark.parametrize(
    "start", [pytest.param(k, marks=[pytest.mark.slow] if k >= QUICK else []) for k in range(0, 100, 5)]
)
def test_random_programs(start, devices):
    split = 0
    for seed in range(start, start + 5):
        try:
            split += check_all(generate(seed), seed).split > 0
        except OneDeviceFails:
            assert seed in (31,), "the compiler refuses more than is known"
    jax.clear_caches()
    assert split, "nothing was split: the comparison would show nothing"


ROLLED = FuzzProgram((Argument((16, 8)), Call("roll", (0,), (("shift", 8), ("axis", 1)))), (1,))
TRANSFORMED = FuzzProgram((Argument((3, 24, 16)), Call("fft", (0,))), (1,), gradient=True)
SEGMENTS = FuzzProgram(
    (
        Argument((24,), "i", 8),
        Argument((24, 4)),
        Call("segment_sum", (1, 0), (("segments", 8),)),
        Argument((4, 2)),
        Call("accumulated", (2, 3), (), 2),
    ),
    (4,),
)
SLICED = FuzzProgram(
    (Argument((4, 16)), Argument((2,), "i", 16), Argument((4, 14)), Call("dynamic_update", (0, 1, 2))),
    (3,),
    gradient=True,
)
SORTED = FuzzProgram(
    (
        Argument((8, 16)),
        Call("sort", (0,), (("axis", 1), ("descending", False))),
        Argument((8, 1)),
        Call("scatter_static", (1, 2), (("axis", 1), ("places", (11,)), ("kind", "multiply"))),
    ),
    (3,),
)
CONVOLVED = FuzzProgram(
    (
        Argument((8, 4, 6, 24)),
        Argument((8, 4, 1, 3)),
        Call(
            "conv",
            (0, 1),
            (
                ("strides", (1, 1)),
                ("padding", "SAME"),
                ("lhs_dilation", (1, 1)),
                ("rhs_dilation", (1, 1)),
                ("layout", (0, 1, 2, 3)),
                ("groups", 1),
            ),
        ),
    ),
    (2,),
    gradient=True,
)
FAILED = {
    "one place of an array whose pieces were cut from a whole": (SORTED, (2, 2, 2)),
    "convolution split over space and features": (CONVOLVED, (2, 2, 2)),
    "an empty piece of a roll": (ROLLED, (8,)),
    "transform of a gathered array": (TRANSFORMED, (8,)),
    "scatter of a sum that is split already": (SEGMENTS, (2, 4)),
    "share of a slice that was clamped": (SLICED, (2, 4)),
}


@pytest.mark.parametrize("name", FAILED)
def test_programs_that_failed(name, devices):
    program, sizes = FAILED[name]
    for seed in range(1000, 1008):
        check_parity(program, sizes, seed, wild=seed % 2 == 0)


@pytest.mark.parametrize("split", [(0, 1), (1, 0), (2, 0), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("operation", ["pad", "slice"])
def test_pieces_split_over_axes_out_of_order(split, operation, devices):
    """JAX numbers the devices of a permute by the order of the mesh, whatever the order of the axes' names."""
    x = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)

    def fn(x):
        if operation == "pad":
            return lax.pad(x, np.float32(0), ((0, 0, 0), (32, 0, 0)))
        return lax.slice(x, (0, 16), (8, 32))

    program, mesh = trace(fn, x), toy_mesh(2, 2, 2)
    spec = ((), split)
    operands = ((spec,), ()) if operation == "pad" else ((spec,),)
    targets = (spec, ()) if operation == "pad" else (spec,)
    placement = Placement(operands, ((spec,),), moves=(1,), targets=targets, raws=(spec,))
    placements = Placements(mesh, {(0,): placement}, {}, frozenset(), {}, (spec,), (spec,))
    lowered = lower_step(program, placements, mesh.build(devices), donate=False)
    out = lowered.compile()(jax.device_put(x, lowered.in_shardings[0]))[0]
    np.testing.assert_array_equal(out, fn(x))


def test_fuzzing_finds_and_shrinks_a_fault(devices, monkeypatch):
    """A fault on purpose: reductions of manual operations forgotten."""
    monkeypatch.setattr("spmd_auto.lower.manual._combine", lambda out, steps, logical: out)
    dot = Call("dot", (1, 2), (("numbers", (((1,), (0,)), ((), ()))), ("swapped", False)))
    program = FuzzProgram(
        (Argument((8, 16)), Call("unary", (0,), (("kind", "tanh"),)), Argument((16, 8)), dot), (3,), gradient=True
    )

    def fails(candidate: FuzzProgram) -> bool:
        for seed in range(6):
            try:
                check_parity(candidate, (2, 4), seed)
            except Exception:
                return True
        return False

    assert fails(program)
    assert len(shrink(program, fails).nodes) <= len(program.nodes)


def test_order_is_checked():
    def fn(x, y):
        return np.float32(2) * x + y, y @ x

    program = trace(fn, np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))
    for seed in range(5):
        check_order(program, random.Random(seed))


def test_integers_and_floats_are_compared():
    for wrong in (np.arange(3), np.array([0.0, 1.0, 2.1]), np.array([0.0, np.nan, 2.0])):
        wanted = np.arange(3) + 1 if wrong.dtype.kind == "i" else np.arange(3.0)
        with pytest.raises(FuzzFailure):
            compare_results([wrong], [wanted])
