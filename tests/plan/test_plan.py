"""What a plan offers: every tool is a method of the plan itself."""

from __future__ import annotations

import jax

import spmd_auto
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
