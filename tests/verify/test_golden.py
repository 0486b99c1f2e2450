"""Real compiler output, cut down, against what the compiled programs are known to do.

`*_shard_map`: one manual program over a mesh (a, b, c) = (2, 4, 2) on 32x128 float32 shards, 16 KiB each: sums over
every combination of axes, a gather, scatter, all-to-all over b, (a, c) and (c, a), a shift along b, and five sums over
b in a loop. `*_reshards`: automatic reshards with transposed groups, a conditional, a loop of eight and one that
depends on data. `*_zero3`: a scanned, rematerialised MLP with weights stored split over a, mesh (a, b) = (4, 4).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_auto.verify import ProgramSummary, read_hlo

GOLDEN = Path(__file__).parent / "golden"
KIB = 1024.0


def read(name: str) -> ProgramSummary:
    axes = (("a", "b"), (4, 4)) if "zero3" in name else (("a", "b", "c"), (2, 4, 2))
    return read_hlo((GOLDEN / f"{name}.hlo").read_text(), *axes)


def totals(summary: ProgramSummary) -> dict[tuple[str, tuple[str, ...]], tuple[int, float, float]]:
    return {k: (t.times, t.payload_bytes / KIB, t.ring_bytes / KIB) for k, t in summary.combined().items()}


# (times, payload KiB, ring KiB)
SHARD_MAP = {
    ("all-reduce", ("a",)): (1, 16, 16),
    ("all-reduce", ("b",)): (6, 96, 144),
    ("all-reduce", ("c",)): (1, 16, 16),
    ("all-reduce", ("a", "c")): (2, 32, 48),
    ("all-reduce", ("b", "c")): (1, 16, 28),
    ("all-gather", ("b",)): (1, 64, 48),
    ("all-gather", ("a", "c")): (2, 128, 96),
    ("reduce-scatter", ("b",)): (1, 16, 12),
    ("reduce-scatter", ("a", "c")): (2, 32, 24),
    ("all-to-all", ("b",)): (1, 16, 12),
    ("all-to-all", ("a", "c")): (2, 32, 24),
    ("collective-permute", ("b",)): (1, 16, 16),
}


@pytest.mark.parametrize("name", ["cpu_shard_map", "gpu_shard_map"])
def test_every_kind_over_every_axis(name):
    assert totals(read(name)) == SHARD_MAP


def test_every_kind_on_tpu():
    # This compiler turns scatters as small as these into whole sums; the gather over b runs beside the loop, printed in
    # three computations, one of them inside of the loop of five.
    expected = {k: v for k, v in SHARD_MAP.items() if k[0] != "reduce-scatter"}
    expected["all-reduce", ("b",)] = (7, 112, 168)
    expected["all-reduce", ("a", "c")] = (4, 64, 96)
    assert totals(read("tpu_shard_map")) == expected


@pytest.mark.parametrize("name", ["cpu_shard_map", "gpu_shard_map", "tpu_shard_map"])
def test_flops_of_a_dot_in_a_loop(name):
    assert read(name).dot_flops == 5 * 2 * 32 * 128 * 128


def test_source_and_op_name():
    gather = next(c for c in read("cpu_shard_map").collectives if c.kind == "all-gather")
    assert gather.op_name == "jit(f)/shard_map/all_gather"
    assert gather.source == "gen.py:36"
    psum = next(c for c in read("cpu_shard_map").collectives if c.axes == ("a", "c"))
    assert psum.op_name == "jit(f)/shard_map/ar('a', 'c')/psum"


def test_gpu_zero3_is_one_gather_per_layer_and_pass_and_one_scatter():
    # 6 layers, two bfloat16 weights of 256 x 128 a device (64 KiB) in one combined collective.
    expected = {
        ("all-gather", ("a",)): (12, 12 * 128, 12 * 96),
        ("reduce-scatter", ("a",)): (6, 6 * 128, 6 * 96),
        ("all-reduce", ("b",)): (12, 12 * 32, 12 * 48),
        ("all-reduce", ("a",)): (1, 4 / KIB, 6 / KIB),
    }
    assert totals(read("gpu_zero3")) == expected
    # jax 0.12 prints all-reduce starts as ((operands), results).
    assert totals(read("gpu_zero3_jax_0_12")) == expected


def test_tpu_zero3_with_asynchronous_fusions():
    # 4 layers, weights of 2048 x 2048 a device (8 MiB). One gather is printed in three computations, another in four.
    # One scatter is padded from 2048 to 2112 rows and sends 48 rows (192 KiB) to a neighbour afterwards.
    mib = KIB
    assert totals(read("tpu_zero3")) == {
        ("all-gather", ("a",)): (16, 16 * 8 * mib, 16 * 6 * mib),
        ("reduce-scatter", ("a",)): (8, 4 * (8 + 8.25) * mib, 4 * (6 + 6.1875) * mib),
        ("all-reduce", ("b",)): (8, 8 * 4 * mib, 8 * 6 * mib),
        ("collective-permute", ("a",)): (4, 4 * 192, 4 * 192),
        ("all-reduce", ("a",)): (1, 4 / KIB, 6 / KIB),
    }


@pytest.mark.parametrize(
    ("name", "layers", "batch", "inner"), [("gpu_zero3", 6, 64, 128), ("tpu_zero3", 4, 1024, 2048)]
)
def test_zero3_flops(name, layers, batch, inner):
    # Seven products a layer: two forward, again for the backward pass but the last, four backward.
    width = {"gpu_zero3": 256, "tpu_zero3": 2048}[name]
    assert read(name).dot_flops == layers * 7 * 2 * batch * width * inner


def test_transposed_groups_and_parts_of_an_axis():
    by_name = {}
    for c in read("cpu_reshards").collectives:
        by_name.setdefault((c.op_name.removeprefix("jit(f)/"), c.kind), []).append((c.axes, c.group_size))
    # replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([2,4,2]T(1,0,2)) {'axis_0'}
    assert by_name["g1/sin", "all-gather"] == [(("b",), 4)]
    # a part of b first, then the rest of b with c
    assert sorted(by_name["g0/sin", "all-gather"]) == [(("b",), 2), (("b", "c"), 4)]
    assert by_name["g3/sin", "all-gather"] == [(("b", "c"), 8)]
    assert by_name["g4/sin", "collective-permute"] == [(("a", "c"), 4)]
    assert by_name["halo/concatenate", "collective-permute"] == [(("b",), 4)]


@pytest.mark.parametrize("name", ["cpu_reshards", "gpu_reshards", "tpu_reshards"])
def test_branches_are_marked(name):
    for c in read(name).collectives:
        if c.op_name:
            assert c.in_branch == ("/cond/branch" in c.op_name), c


@pytest.mark.parametrize("name", ["cpu_reshards", "gpu_reshards"])
def test_loops_that_depend_on_data_count_once_and_are_noted(name):
    summary = read(name)
    assert len(summary.notes) == 1
    assert "depends on data" in summary.notes[0]
    assert {c.times for c in summary.collectives if "while/cond/reduce_sum" in c.op_name} == {1}


@pytest.mark.parametrize("name", ["cpu_reshards", "gpu_reshards", "tpu_reshards"])
def test_trip_count_of_a_loop_from_3_to_11(name):
    assert {c.times for c in read(name).collectives if "while/body/closed_call/mul" in c.op_name} == {8}


def test_combined_tuple_counts_every_array():
    c = next(c for c in read("gpu_reshards").collectives if "g4/sin:g3/sin:g2/sin" in c.op_name)
    assert (c.kind, c.axes, c.payload_bytes, c.dtypes) == ("all-gather", ("b", "c"), 262144, ("f32",) * 3)


# Two attention products (batch x heads 16 a device); a strided convolution and its kernel gradient, whose padding meets
# 23 of 24 positions a dimension; a depthwise convolution.
ATTENTION = 2 * 2 * 16 * 64 * 64 * 32
CONVOLUTIONS = 2 * (2 * 4 * 64 * 32 * 23 * 23)
DEPTHWISE = 2 * 4 * 14 * 14 * 32 * 9


def test_flops_of_batched_dots_and_convolutions():
    assert read("cpu_dots").dot_flops == ATTENTION + CONVOLUTIONS + DEPTHWISE


def test_flops_of_library_calls_on_gpu():
    # cuDNN gets its input padded, so that padding is multiplied as well.
    assert read("gpu_dots").dot_flops == ATTENTION + CONVOLUTIONS * (24 / 23) ** 2 + DEPTHWISE


def test_flops_of_dots_written_as_convolutions_on_tpu():
    lines = (GOLDEN / "tpu_dots.hlo").read_text().splitlines()
    kept = [line for line in lines if " convolution(" not in line or "convolution-base-dilated" in line]
    assert read_hlo("\n".join(kept), ("a", "b", "c"), (2, 4, 2)).dot_flops == ATTENTION
