"""What a plan offers: every tool is a method of the plan itself."""

from __future__ import annotations

import jax
import pytest

import spmd_auto
from spmd_auto.plan.explain import choices
from tests.known_answers.toy import toy_mesh
from tests.test_errors import FAST, batch, state, step


def planned(mesh):
    return spmd_auto.plan(step, state(), batch(), mesh=mesh, search=FAST)


def test_the_gap_to_the_best_is_known_on_one_device_and_else_said_to_be_unknown():
    alone = planned(spmd_auto.cluster("h100", per_host=1))
    assert alone.gap == 0.0
    assert "not known" not in alone.explain()
    plan = planned(spmd_auto.cluster("h100", per_host=8))
    assert plan.gap is None
    assert "how far it is from the best strategy there is: not known" in " ".join(plan.explain().split())


def test_every_tool_is_reached_from_a_plan(tmp_path):
    plan = planned(spmd_auto.cluster("h100", per_host=8))
    leaf = "state/params/up/kernel"
    assert "logical axes of step" in plan.explain()
    assert plan.explain(leaf).startswith(leaf)
    assert leaf in str(plan.why_not("up/kernel", jax.P(plan.mesh.names[-1])))
    assert "seconds" in str(plan.compare(plan))
    assert plan.compare(plan).term("seconds").difference == 0
    assert leaf in plan.to_code()
    assert leaf in str(plan.parallel_info(leaf))
    assert leaf in plan._repr_html_()
    plan.save(str(tmp_path / "plan.json"))
    assert spmd_auto.Plan.load(str(tmp_path / "plan.json"), step, state(), batch()).specs == plan.specs


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_zero_saves_is_said(stage):
    """maxtext#5104: a flag that does nothing. Each choice stands with the bytes and seconds that it saves."""

    def hand(**zero):
        mesh, axes = toy_mesh(2, 4), {"batch": "a"}
        return spmd_auto.price(step, state(64, 256), batch(64, 64), mesh=mesh, assignment=axes, **zero)

    plan, without = hand(zero=stage, zero_axes=("b",)), hand()
    [choice] = [c for c in choices(plan) if c.what.startswith("ZeRO")]
    assert choice.saves_memory == pytest.approx(without.memory - plan.memory)
    assert choice.saves_seconds == pytest.approx(without.seconds - plan.seconds)
    assert (choice.saves_memory > 0) == (stage > 1)  # plain descent keeps no optimizer state
    assert "ZeRO: " in plan.explain()
