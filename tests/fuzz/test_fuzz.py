"""Random programs: a hundred, shorter than those of benchmarks/fuzz.py; and small ones that once failed, by kind."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from jax import lax

import spmd_auto
from spmd_auto.lower.placement import Placement, Placements
from spmd_auto.lower.step import lower_step
from spmd_auto.propagate.analysis import analyse
from spmd_auto.trace import trace
from tests.fuzz.check import FuzzFailure, OneDeviceFails, check_all, check_order, check_parity, compare_results
from tests.fuzz.draft import Argument, Call
from tests.fuzz.programs import FuzzProgram, generate
from tests.fuzz.shrink import shrink
from tests.known_answers.toy import toy_mesh

CALLS = 5  # at most
QUICK = 25  # the quick run with the newest jax takes a quarter


@pytest.mark.parametrize(
    "start", [pytest.param(k, marks=[pytest.mark.slow] if k >= QUICK else []) for k in range(0, 100, 5)]
)
def test_random_programs(start, devices):
    split, refused = 0, []
    for seed in range(start, start + 5):
        try:
            split += check_all(generate(seed, CALLS), seed).split > 0
        except OneDeviceFails:
            refused.append(seed)
    jax.clear_caches()
    assert split, "nothing was split: the comparison would show nothing"
    assert len(refused) < 2, "the compiler refuses programs on one device: they show nothing"


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
JOINED = FuzzProgram(
    (Argument((16, 2, 16)), Call("fft", (0,)), Call("stack", (0, 1), (("axis", 2),))), (2,), gradient=True
)
OF_ONE = FuzzProgram((Argument((24, 16, 1)), Call("fft", (0,)), Call("reverse", (1,), (("axis", 2),))), (2,))
FAILED = {
    "transform of a dimension of size one": (OF_ONE, (8,)),
    "transform whose result lies where its operand does": (JOINED, (2, 4)),
    "one place of an array whose pieces were cut from a whole": (SORTED, (2, 2, 2)),
    "an empty piece of a roll": (ROLLED, (8,)),
    "transform of a gathered array": (TRANSFORMED, (8,)),
    "scatter of a sum that is split already": (SEGMENTS, (2, 4)),
    "share of a slice that was clamped": (SLICED, (2, 4)),
}


@pytest.mark.parametrize("name", FAILED)
def test_programs_that_failed(name, devices):
    program, sizes = FAILED[name]
    for seed in range(1000, 1004):
        check_parity(program, sizes, seed, wild=seed == 1002)


def lowered_with(program, mesh, name, placement):
    """A program on the simulated devices with one placement, at its first operation of a name."""
    analysis = analyse(program)
    (site,) = [op.site for op in analysis.graph.ops if op.name == name]
    whole = [tuple(((),) * len(leaf.shape) for leaf in leaves) for leaves in (program.arguments, program.results)]
    placements = Placements(mesh, {site: placement}, {}, frozenset(), {}, {}, *whole)
    return lower_step(program, placements, mesh.build(), donate=False)


@pytest.mark.parametrize("split", [(0, 1), (1, 0), (2, 0), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("operation", ["pad", "slice"])
def test_pieces_split_over_axes_out_of_order(split, operation, devices):
    """JAX numbers the devices of a permute by the order of the mesh, whatever the order of the axes' names."""
    x = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)

    def fn(x):
        if operation == "pad":
            return lax.pad(x, np.float32(0), ((0, 0, 0), (32, 0, 0)))
        return lax.slice(x, (0, 16), (8, 32))

    spec = ((), split)
    operands = ((spec,), ()) if operation == "pad" else ((spec,),)
    targets = (spec, ()) if operation == "pad" else (spec,)
    placement = Placement(operands, ((spec,),), moves=(1,), targets=targets, raws=(spec,))
    lowered = lowered_with(trace(fn, x), toy_mesh(2, 2, 2), operation, placement)
    out = lowered.compile()(jax.device_put(x, lowered.in_shardings[0]))[0]
    np.testing.assert_array_equal(out, fn(x))


@pytest.mark.parametrize("start", [0, 2, 10, 30])
@pytest.mark.parametrize("operation", ["dynamic_slice", "gather"])
def test_shares_of_a_slice_whose_start_is_clamped(operation, start, devices):
    """XLA makes one slice of two, and forgets that the first would have been clamped."""
    x = np.arange(64.0, dtype=np.float32).reshape(4, 16)

    def fn(x, at):
        if operation == "dynamic_slice":
            return lax.dynamic_slice(x, (0, at[0]), (4, 14))
        return jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (14,)))(x, at)

    rows, both = ((1,), ()), ((1,), (0,))
    others = (((1,), ()),) if operation == "gather" else ()
    placement = Placement(((rows,), others), ((rows, both),))
    if operation == "dynamic_slice":
        placement = Placement(((rows,), (), ()), ((rows, both),))
    at = np.full(4, start, np.int32)
    lowered = lowered_with(trace(fn, x, at), toy_mesh(2, 4), operation, placement)
    out = lowered.compile()(*[jax.device_put(a, s) for a, s in zip((x, at), lowered.in_shardings, strict=True)])[0]
    first = min(start, 2)
    np.testing.assert_array_equal(out, x[:, first : first + 14])


def test_convolution_split_over_space_and_features(devices):
    """Wrong in XLA with constraints alone."""

    def fn(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), ((0, 0), (1, 1)))

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 4, 6, 24), (8, 4, 1, 3)))
    pins = {"x": jax.P(None, None, "a", "b"), "w": jax.P("c"), "result": jax.P(None, "c", "a", "b")}
    plan = spmd_auto.plan(fn, x, w, mesh=toy_mesh(2, 2, 2), pins=pins)
    lowered = plan.lower_step(donate=False)
    out = lowered.compile()(*[jax.device_put(a, s) for a, s in zip((x, w), lowered.in_shardings, strict=True)])[0]
    np.testing.assert_allclose(out, fn(x, w), atol=1e-5)


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
