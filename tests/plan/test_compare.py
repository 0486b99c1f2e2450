"""Two plans side by side, and what a plan would cost with one thing changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import P

import spmd_auto
from spmd_auto.errors import PinError, StrategyError
from spmd_auto.plan import price_strategy
from spmd_auto.plan import why_not as module
from spmd_auto.search import SearchOptions
from spmd_auto.search.refine import refine
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh
from tests.test_errors import FAST, batch, refused, state, step

MESH = toy_mesh(2, 4)
PROGRAM = trace(step, state(), batch())


def hand(assignment, mesh=MESH, **options):
    return price_strategy(PROGRAM, mesh, assignment, **options)


@pytest.fixture(scope="module")
def data():
    return hand({"batch": "a"})


# ---- compare --------------------------------------------------------------------------------------


def test_terms_are_those_of_the_reports(data):
    other = hand({"batch": "a", "mlp": "b"}, zero=3, zero_axes=("a",))
    table = data.compare(other)
    for name, value in (("seconds", "seconds"), ("compute", "compute"), ("communication", "communication")):
        assert table.term(name).first == getattr(data.report, value)
        assert table.term(name).second == getattr(other.report, value)
    for plan, side in ((data, "first"), (other, "second")):
        values = {t.name: getattr(t, side) for t in table.terms}
        parts = ("compute", "elementwise", "communication")
        assert values["seconds"] == pytest.approx(sum(values[n] for n in parts))
        assert values["seconds"] == pytest.approx(plan.seconds)
        assert values["memory"] == pytest.approx(sum(v for n, v in values.items() if n.startswith("memory:")))
        assert values["communication"] == pytest.approx(sum(v for n, v in values.items() if n.startswith("time over")))
        for axes, moved in plan.report.bytes_by_axes().items():
            assert values[f"sent over {'+'.join(axes)}"] == moved
    assert table.term("memory").difference == pytest.approx(other.memory - data.memory)


def test_specs_that_differ_stand_by_bytes():
    def f(w):
        return {k: v * 2 for k, v in w.items()}, sum(v.sum() for v in w.values())

    sizes = {"a small one": (8,), "large": (8, 64), "same": (128, 128), "middle": (8, 4)}
    program = trace(f, {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in sizes.items()})
    one = price_strategy(program, MESH, {}, pins={"w/same": P("a")})
    two = price_strategy(program, MESH, {}, pins={"*": P("a")})
    changes = one.compare(two).specs
    assert [(c.path, c.bytes) for c in changes] == [("w/large", 2048), ("w/middle", 128), ("w/a small one", 32)]
    assert {(c.first, c.second) for c in changes} == {(P(), P("a"))}
    text = str(one.compare(two))
    assert text.index("w/large") < text.index("w/a small one")
    assert "w/same" not in text
    assert "all arguments lie alike" in str(one.compare(one))


def test_meshes_may_differ(data):
    other = hand({"batch": "c"}, toy_mesh(2, 2, 2))
    table = data.compare(other)
    assert table.term("sent over c").first == 0
    assert table.term("sent over c").second > 0
    assert "(a=2, b=2, c=2)" in str(table)


def changed_step(state, batch):
    return step(state, {"x": -batch["x"]})


def test_plans_of_two_programs(data):
    other = spmd_auto.price(step, state(hidden=32), batch(), mesh=MESH, assignment={})
    with refused(StrategyError, what="two programs", why=("state/params/down/kernel", "(32, 16)"), fixes="one step"):
        data.compare(other)
    changed = spmd_auto.price(changed_step, state(), batch(), mesh=MESH, assignment={})
    with refused(StrategyError, what="two programs", why="their operations don't"):
        data.compare(changed)


# ---- why not --------------------------------------------------------------------------------------


def test_another_spec_is_priced_as_a_pin(data):
    answer = data.why_not("state/**/kernel", P("b", None))
    want = hand({"batch": "a"}, pins={"*/kernel": P("b")})
    assert answer.possible
    assert answer.plan.seconds == pytest.approx(want.seconds)
    assert answer.plan.memory == pytest.approx(want.memory)
    assert answer.comparison.term("seconds").difference == pytest.approx(want.seconds - data.seconds)
    assert {c.path for c in answer.comparison.specs} == {"state/params/up/kernel", "state/params/down/kernel"}
    assert "sent over b" in str(answer)
    assert data.why_not("up/kernel", (1, 4)).plan.specs["state/params/up/kernel"] == P(None, "b")


def test_earlier_pins_stay(data):
    pinned = hand({"batch": "a"}, pins={"up/kernel": P("b")})
    answer = pinned.why_not("down/kernel", P("b"))
    assert answer.plan.specs["state/params/up/kernel"] == P("b")
    refusal = pinned.why_not("up/kernel", P("a"))
    assert not refusal.possible
    assert refusal.plan is None
    for words in ("pin 'up/kernel' says P('b'", "never overridden"):
        assert words in refusal.reason


def test_another_mesh_axis_is_priced_first_and_last(data):
    answer = data.why_not("mlp", "b")
    assert answer.plan.seconds == pytest.approx(hand({"batch": "a", "mlp": "b"}).seconds)
    contested = data.why_not("mlp", "a")
    both = [hand(order).priced.score for order in ({"batch": "a", "mlp": "a"}, {"mlp": "a", "batch": "a"})]
    assert contested.plan.priced.score == pytest.approx(min(both))
    whole = data.why_not("batch", None)
    assert whole.plan.seconds == pytest.approx(hand({}).seconds)
    assert whole.plan.specs["batch/x"] == P()
    assert "slower" in whole.reason


@pytest.mark.parametrize("first", ["batch", "mlp"])
def test_the_better_rank_is_taken(first):
    """Which of two contenders is better depends on which is larger; the answer never depends on who asks first."""
    other = "mlp" if first == "batch" else "batch"
    for rows, width in ((8, 512), (512, 8)):
        program = trace(step, state(width, 64), batch(rows, width))
        alone = price_strategy(program, MESH, {first: "b"})
        both = [price_strategy(program, MESH, dict.fromkeys(o, "b")) for o in ((first, other), (other, first))]
        assert both[0].seconds != pytest.approx(both[1].seconds)
        assert alone.why_not(other, "b").plan.seconds == pytest.approx(min(plan.seconds for plan in both))


def test_what_the_plan_does_already(data):
    assert "does that already" in data.why_not("batch", "a").reason
    assert "does that already" in data.why_not("batch/x", P("a")).reason


def test_a_plan_that_was_found_is_compared_refined(data, monkeypatch):
    refined = []
    monkeypatch.setattr(module, "refine", lambda pricer, priced: refined.append(priced) or refine(pricer, priced))
    plan = spmd_auto.plan(step, state(), batch(), mesh=MESH)
    data.why_not("mlp", "b")
    assert refined == []  # nor is a strategy given by hand
    plan.why_not("mlp", "b")
    assert refined
    for axis in ("mlp", "batch", "features"):
        for to in ("a", "b", None):
            answer = plan.why_not(axis, to)
            assert answer.plan is None or answer.plan.seconds >= plan.seconds * (1 - 1e-9)


def test_what_is_not_divisible(data):
    narrow = spmd_auto.plan(step, state(hidden=6), batch(), mesh=MESH, search=SearchOptions(states=20))
    by_spec = narrow.why_not("up/kernel", P(None, "b"))
    assert not by_spec.possible
    assert "6 is not divisible by b=4" in by_spec.reason
    assert "not divisible" in narrow.why_not("up/kernel", (1, 4)).reason
    by_axis = narrow.why_not("mlp", "b")
    assert not by_axis.possible
    assert "6 is not divisible by 4" in by_axis.reason
    assert "can't be" in str(by_axis)


def test_what_needs_too_much_memory():
    tight = spmd_auto.plan(step, state(64, 512), batch(8, 64), mesh=MESH, memory=160e3, search=FAST)
    answer = tight.why_not("*/kernel", P())
    assert not answer.possible
    assert answer.plan.memory > 160e3
    for words in ("needs 301 kB", "160 kB are there"):
        assert words in answer.reason
    assert answer.comparison.term("memory: parameters").second > answer.comparison.term("memory: parameters").first


def test_questions_that_mean_nothing(data):
    with refused(PinError, what="'up/kernal'", fixes="up/kernel'?"):
        data.why_not("up/kernal", P("a"))
    with refused(PinError, what="mesh axis 'z'", fixes="use one of"):
        data.why_not("up/kernel", P("z"))
    with refused(PinError, what="rank 2"):
        data.why_not("up/kernel", P("a", None, "b"))
    with refused(PinError, what="are 1 for an array of rank 2"):
        data.why_not("up/kernel", (2,))
    with refused(StrategyError, what="no logical axis 'mpl'", fixes="did you mean 'mlp'"):
        data.why_not("mpl", "a")
    with refused(StrategyError, what="no mesh axis 'z'"):
        data.why_not("mlp", "z")
    with refused(StrategyError, what="'up/kernel' is a leaf", fixes="jax.P('a')"):
        data.why_not("up/kernel", "a")
    with refused(StrategyError, what="why_not('mlp', 3)", fixes="plan.why_not("):
        data.why_not("mlp", 3)
