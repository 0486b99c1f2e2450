"""What XLA makes of collectives is recognised in compiled text; what it did not make is a difference."""

from __future__ import annotations

import pytest

from spmd_auto.cost.report import Collective
from spmd_auto.verify import read_hlo
from spmd_auto.verify.rewrites import Finding, Outcome, Rewrite, find_rewrites

MB = 1 << 20
_GROUPS = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
_SUM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(*lines: str, loop: tuple[str, ...] = (), trips: int = 4) -> str:
    """A compiled module of these instructions, and of a loop of others."""
    body = "\n".join(f"  {line}" for line in loop)
    looped = (
        f"""
%body (state: (s32[])) -> (s32[]) {{
  %state = (s32[]) parameter(0)
{body}
  ROOT %next = (s32[]) copy(%state)
}}

%condition (state: (s32[])) -> pred[] {{
  %state.1 = (s32[]) parameter(0)
  ROOT %more = pred[] constant(true)
}}
"""
        if loop
        else ""
    )
    call = (
        "  %loop = (s32[]) while(%start), condition=%condition, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}\n'
        if loop
        else ""
    )
    text = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule jit_step, is_scheduled=true, num_partitions=4\n{_SUM}{looped}\n"
        f"ENTRY %main (x: f32[16]) -> f32[16] {{\n  %x = f32[16]{{0}} parameter(0)\n  %start = (s32[]) tuple()\n"
        f"{text}\n{call}  ROOT %out = f32[16]{{0}} copy(%x)\n}}\n"
    )


def line(name: str, shape: str, kind: str, source: str = "model.py", number: int = 7, named: bool = True) -> str:
    groups = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}" if kind == "collective-permute" else _GROUPS
    reduces = ", to_apply=%add" if kind in ("all-reduce", "reduce-scatter") else ""
    where = f' op_name="jit(step)/{kind}" source_file="{source}" source_line={number}' if named else ""
    return f"%{name} = {shape} {kind}(%x), channel_id=1, {groups}{reduces}, metadata={{{where.strip()}}}"


def wanted(kind: str, mb: float, times: int = 1, source: str = "model.py:7 (f)") -> Collective:
    return Collective(kind, ("a",), mb * MB * times, 0.0, times, "", source)


def found(text: str, *predicted: Collective) -> Finding:
    summary = read_hlo(text, ("a",), (4,))
    return find_rewrites(predicted, summary.collectives)


def f32(mb: float) -> str:
    return f"f32[{int(mb * MB / 4)}]{{0}}"


def test_the_same_is_equal():
    finding = found(program(line("g", f32(4), "all-gather")), wanted("all-gather", 3))
    assert finding == Finding(Outcome.EQUAL, frozenset())
    assert finding.how == "equal"


def test_combined_sums_are_equal_and_called_combined():
    text = program(line("r", f"({f32(4)}, {f32(8)})", "all-reduce"))
    finding = found(text, wanted("all-reduce", 6), wanted("all-reduce", 12))
    assert finding == Finding(Outcome.EQUAL, frozenset({Rewrite.COMBINED}))


def test_sums_padded_to_be_one_are_combined():
    text = program(
        line("s", f32(8.25), "reduce-scatter", named=False), line("p", f32(0.3), "collective-permute", named=False)
    )
    text = text.replace(f32(8.25), f32(8.25 / 4))  # the result of a scatter is a piece
    finding = found(text, wanted("reduce-scatter", 6))
    assert finding.outcome is Outcome.REWRITTEN
    assert Rewrite.COMBINED in finding.rewrites


def test_combining_alone_excuses_no_bytes():
    text = program(line("r", f"({f32(4)}, {f32(8.8)})", "all-gather"))
    finding = found(text, wanted("all-gather", 3), wanted("all-gather", 6))
    assert finding.outcome is Outcome.DIFFERENT
    assert finding.lines[0].source == "model.py:7"


def test_a_gather_in_permutes_is_windowed():
    finding = found(program(loop=(line("p", f32(1), "collective-permute"),), trips=3), wanted("all-gather", 3))
    assert finding.outcome is Outcome.REWRITTEN
    assert Rewrite.WINDOWED in finding.rewrites
    assert finding.how == "rewritten by XLA: windowed"


def test_a_sum_in_another_form_is_reassociated():
    text = program(line("r", f32(4), "all-reduce"))  # 6 MB: 3 of a scatter, 3 of a gather
    finding = found(text, wanted("reduce-scatter", 3), wanted("all-gather", 3))
    assert finding == Finding(Outcome.REWRITTEN, frozenset({Rewrite.REASSOCIATED}))


def test_twice_the_bytes_are_different_even_if_reassociated():
    finding = found(program(line("r", f32(4), "all-reduce")), wanted("reduce-scatter", 3))
    assert finding.outcome is Outcome.DIFFERENT
    assert Rewrite.REASSOCIATED in finding.rewrites


def test_what_runs_fewer_times_is_hoisted():
    text = program(line("g", f32(0.4), "all-gather"), line("h", f32(8), "all-gather"))
    finding = found(text, wanted("all-gather", 0.3, times=2), wanted("all-gather", 6))
    assert finding == Finding(Outcome.REWRITTEN, frozenset({Rewrite.HOISTED}))


@pytest.mark.parametrize("predicted", [(), (wanted("all-gather", 3),)])
def test_what_nobody_predicted_is_different_and_has_a_line(predicted):
    text = program(line("g", f32(4), "all-gather"), line("t", f32(4), "all-to-all", number=9))
    finding = found(text, *predicted)
    assert finding.outcome is Outcome.DIFFERENT
    assert finding.how == f"different, from model.py:{9 if predicted else 7}"
