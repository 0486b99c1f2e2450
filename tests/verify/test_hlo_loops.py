"""Trip counts from the loop condition, and counts multiplied down the call graph."""

from __future__ import annotations

import pytest

from spmd_auto.errors import VerifyError
from spmd_auto.verify import read_hlo
from spmd_auto.verify.hlo_loops import count_executions
from spmd_auto.verify.hlo_text import parse_arrays, parse_hlo, split_tuple

LOOP = """HloModule m

%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %p = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{{0}} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %x, %n)
}}

%cond (q: (s32[], f32[8], s32[])) -> pred[] {{
  %q = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %bound = s32[] get-tuple-element(%q), index=2
  %limit = s32[] constant({limit})
  ROOT %c = pred[] compare({left}, {right}), direction={direction}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  %start = s32[] constant({start})
  %m = s32[] constant({limit})
  %init = (s32[], f32[8]{{0}}, /*index=2*/s32[]) tuple(%start, %a, %m)
  ROOT %w = (s32[], f32[8]{{0}}, s32[]) while(%init), condition=%cond, body=%body
}}
"""


def trips(start=0, limit=10, step=1, direction="LT", left="%j", right="%limit"):
    text = LOOP.format(start=start, limit=limit, step=step, direction=direction, left=left, right=right)
    executions = count_executions(parse_hlo(text))
    return None if executions.unknown_loops else executions.times["body"]


@pytest.mark.parametrize(
    ("expected", "loop"),
    [
        (10, {}),
        (7, {"start": 3}),
        (11, {"direction": "LE"}),
        (5, {"step": 2}),
        (4, {"step": 3}),
        (10, {"direction": "NE"}),
        (10, {"start": 10, "limit": 0, "step": -1, "direction": "GT"}),
        (11, {"start": 10, "limit": 0, "step": -1, "direction": "GE"}),
        (10, {"left": "%limit", "right": "%j", "direction": "GT"}),
        (10, {"right": "%bound"}),  # the bound is carried through the loop
        (0, {"start": 12}),
        (None, {"step": 0}),
        (None, {"direction": "GT", "start": 20}),  # never ends
        (None, {"left": "%bound", "right": "%limit"}),  # not the counter
    ],
)
def test_trip_count_from_the_condition(expected, loop):
    assert trips(**loop) == expected


def test_condition_in_a_fusion():
    text = LOOP.format(start=0, limit=6, step=1, direction="LT", left="%j", right="%limit").replace(
        "ROOT %c = pred[] compare(%j, %limit), direction=LT",
        "ROOT %c = pred[] fusion(%limit, %j), kind=kLoop, calls=%compared",
    )
    fused = """
%compared (u: s32[], v: s32[]) -> pred[] {
  %u = s32[] parameter(0)
  %v = s32[] parameter(1)
  ROOT %c2 = pred[] compare(%v, %u), direction=LT
}

%cond ("""
    assert count_executions(parse_hlo(text.replace("\n%cond (", fused, 1))).times["body"] == 6


NESTED = """HloModule m

%inner_body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum
}

%outer_body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %w = f32[8]{0} while(%p), condition=%c, body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
  %f = f32[8]{0} fusion(%w), kind=kLoop, calls=%shared
  ROOT %k = f32[8]{0} conditional(%i, %f, %f), branch_computations={%shared, %left}
}

%shared (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%p), channel_id=2, replica_groups=[2,2]<=[4], dimensions={0}
}

%left (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} collective-permute(%p), channel_id=3, source_target_pairs={{0,2},{2,0}}
}

%dead (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %z = f32[8]{0} all-reduce(%p), channel_id=9, replica_groups={}, to_apply=%sum
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %w = f32[8]{0} while(%a), condition=%c, body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}
  %s = ((f32[8]{0}), f32[16]{0}) async-start(%w), calls=%shared
  %u = ((f32[8]{0}), f32[16]{0}) async-update(%s), calls=%shared
  ROOT %d = f32[16]{0} async-done(%u), calls=%shared
}
"""


def test_counts_multiply_down_the_call_graph():
    summary = read_hlo(NESTED, ("x", "y"), (2, 2))
    found = {(c.kind, c.axes): (c.times, c.in_branch) for c in summary.collectives}
    assert found == {
        ("all-reduce", ("y",)): (15, False),
        ("all-gather", ("y",)): (11, True),  # 5 by the fusion, 5 as a branch, 1 asynchronous
        ("collective-permute", ("x",)): (5, True),
    }


def test_collectives_of_one_device_do_not_count():
    text = """HloModule m

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %r = f32[8]{0} all-reduce(%a), channel_id=1, replica_groups={{0},{1},{2},{3}}, to_apply=%sum
  %g = f32[8]{0} all-gather(%r), channel_id=2, replica_groups=[4,1]<=[4], dimensions={0}
  ROOT %p = f32[8]{0} collective-permute(%g), channel_id=3, source_target_pairs={{0,0},{3,3}}
}
"""
    assert read_hlo(text, ("x", "y"), (2, 2)).collectives == ()


def test_text_without_a_program():
    with pytest.raises(VerifyError, match="not a compiled HLO module"):
        parse_hlo("module @jit_f { func.func public @main() }")


def test_array_types():
    arrays = parse_arrays("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[]{:S(2)}, s4[<=5], f8e4m3fn[7])")
    assert [(a.dtype, a.shape, a.nbytes) for a in arrays] == [
        ("bf16", (2, 3), 12),
        ("u32", (), 4),
        ("s4", (5,), 2.5),
        ("f8e4m3fn", (7,), 7),
    ]


def test_split_tuple():
    assert split_tuple("f32[2]{0}") == ["f32[2]{0}"]
    assert split_tuple("((f32[2]{0}, s8[3,4]{1,0:T(8,128)}), (f32[4]{0}), u32[])") == [
        "(f32[2]{0}, s8[3,4]{1,0:T(8,128)})",
        "(f32[4]{0})",
        "u32[]",
    ]
