"""Plan files: what is loaded is what was saved, in any process; anything else is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import P

import spmd_auto
from spmd_auto.errors import PlanFileError
from spmd_auto.plan import Plan, make_plan, price_strategy
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh
from tests.models import gpt

MESH = toy_mesh(2, 4)
SEARCH = SearchOptions(states=600)


@pytest.fixture(scope="module")
def program():
    _, step, state, batch = gpt.make(width=32, sequence=16, vocab=64)
    return trace(step, state, batch)


@pytest.fixture(scope="module")
def plan(program):
    return make_plan(program, MESH, pins={"positions": P()}, search=SEARCH)


@pytest.fixture
def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(str(path))
    return path


def same(a: Plan, b: Plan):
    assert a.seconds == b.seconds
    assert a.memory == b.memory
    assert a.specs == b.specs
    assert a.mesh == b.mesh
    assert a.priced.assignment == b.priced.assignment
    assert a.placements.by_site == b.placements.by_site
    assert a.placements.loops == b.placements.loops
    assert a.placements.results == b.placements.results
    assert a.report == b.report
    assert a.search == b.search


def test_loaded_plan_is_the_saved_one(plan, program, saved):
    loaded = Plan.load(str(saved), program)
    same(loaded, plan)
    assert loaded.axis_splits() == plan.axis_splits()
    assert loaded.zero_axes() == plan.zero_axes()


def test_saving_again_writes_the_same_file(program, saved, tmp_path):
    Plan.load(str(saved), program).save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_text() == saved.read_text()


def test_the_plan_is_not_trivial(plan):
    assert any(any(spec) for spec in plan.placements.arguments)
    assert plan.report.bytes_moved > 0
    assert len(plan.priced.assignment.order) > 1


def test_pins_survive(plan, program, saved):
    assert json.loads(saved.read_text())["pins"]
    loaded = Plan.load(str(saved), program)
    assert loaded.specs["state/params/positions"] == P()
    assert loaded.pricer.specs.pinned == plan.pricer.specs.pinned


def test_refined_choices_survive(program, tmp_path):
    """Joint refinement switches forms that the assignment alone doesn't say."""
    refined = None
    for mesh in (toy_mesh(2, 4), toy_mesh(2, 2, 2)):
        for strategy in ({"batch": "a", "heads": "b", "mlp": "b", "vocab": "b"}, {"sequence": "b", "batch": "a"}):
            for stage in (0, 3):
                plan = price_strategy(program, mesh, strategy, zero=stage, zero_axes=mesh.names[:1], refined=True)
                plain = plan.pricer.price(plan.priced.assignment)
                if plan.seconds < plain.seconds:
                    refined = plan
    assert refined is not None, "refinement found nothing: the test would show nothing"
    path = tmp_path / "refined.json"
    refined.save(str(path))
    assert json.loads(path.read_text())["choices"]
    same(Plan.load(str(path), program), refined)


CHILD = """
import sys
import spmd_auto
spmd_auto.simulate_devices(8)
from tests.models import gpt
from spmd_auto.plan import Plan, make_plan, price_strategy
from spmd_auto.trace import trace
from tests.plan.test_file import MESH, SEARCH
from jax import P
_, step, state, batch = gpt.make(width=32, sequence=16, vocab=64)
program = trace(step, state, batch)
found = make_plan(program, MESH, pins={"positions": P()}, search=SEARCH)
loaded = Plan.load(sys.argv[1], step, state, batch)
equal = found.priced.assignment == loaded.priced.assignment
print(program.fingerprint, found.lowered_hash(), loaded.lowered_hash(), equal)
"""


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_equal_plans_lower_to_equal_programs_in_another_process(plan, program, saved, seed):
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", CHILD, str(saved)], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fingerprint, found, loaded, equal = done.stdout.split()
    assert fingerprint == program.fingerprint
    assert found == loaded == plan.lowered_hash() == Plan.load(str(saved), program).lowered_hash()
    assert equal == "True"


def test_another_plan_lowers_to_another_program(plan, program):
    other = price_strategy(program, MESH, {"batch": ("a", "b")})
    assert other.specs != plan.specs
    assert other.lowered_hash() != plan.lowered_hash()


# ---- files that are refused -----------------------------------------------------------------------


def model(width=16, hidden=32, activation=jnp.tanh):
    def step(params, x):
        y = activation(x @ params["up"]) @ params["down"]
        return jax.tree.map(lambda p: p * 0.9, params), y.sum()

    f32 = jnp.float32
    params = {"up": jax.ShapeDtypeStruct((width, hidden), f32), "down": jax.ShapeDtypeStruct((hidden, width), f32)}
    return step, params, jax.ShapeDtypeStruct((8, width), f32)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    spmd_auto.plan(*model(), mesh=toy_mesh(2, 2), search=SearchOptions(states=60)).save(str(path))
    return path


def test_plan_of_another_model_names_the_leaf_that_differs(small):
    with pytest.raises(PlanFileError) as caught:
        Plan.load(str(small), *model(hidden=64))
    assert "leaf 'params/down' differs" in caught.value.what
    assert "float32[32, 16]" in caught.value.why
    assert "float32[64, 16]" in caught.value.why
    assert "plan again for this model" in caught.value.fixes


def test_plan_of_a_model_with_another_leaf(small):
    step, params, x = model()

    def more(params, x):
        return step({k: params[k] for k in ("up", "down")}, x)[1]

    with pytest.raises(PlanFileError, match="leaf 'params/bias' differs") as caught:
        Plan.load(str(small), more, {**params, "bias": jax.ShapeDtypeStruct((16,), jnp.float32)}, x)
    assert "in the plan it is absent" in caught.value.why


def test_plan_of_the_same_leaves_but_other_operations(small):
    with pytest.raises(PlanFileError, match="another version of 'step': the operations differ") as caught:
        Plan.load(str(small), *model(activation=jnp.sin))
    assert "fingerprint" in caught.value.why
    assert "plan again" in caught.value.fixes


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "can't be read as a plan"),
        ("{", "can't be read as a plan"),
        ("[]", "is not a plan of spmd_auto"),
        ("null", "is not a plan of spmd_auto"),
        ('{"format": "something else"}', "is not a plan of spmd_auto"),
        ('{"format": "spmd_auto plan"}', "has version None"),
        ('{"format": "spmd_auto plan", "version": 99}', "has version 99"),
        ('{"format": "spmd_auto plan", "version": 2}', "is damaged"),
    ],
)
def test_foreign_and_other_versions(tmp_path, text, what):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(PlanFileError) as caught:
        Plan.load(str(path), *model())
    assert str(path) in caught.value.what
    assert what in caught.value.what


def test_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(PlanFileError, match="can't be read as a plan"):
        Plan.load(str(tmp_path / "absent.json"), *model())
    with pytest.raises(PlanFileError, match="can't be read as a plan"):
        Plan.load(str(tmp_path), *model())
    binary = tmp_path / "binary.json"
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(PlanFileError, match="can't be read as a plan"):
        Plan.load(str(binary), *model())


FIELDS = ["mesh", "assignment", "flips", "forms", "choices", "pins", "leaves", "search"]


@pytest.mark.parametrize("field", ["fingerprint", *FIELDS])
def test_every_field_is_needed(small, field):
    data = json.loads(small.read_text())
    del data[field]
    small.write_text(json.dumps(data))
    with pytest.raises(PlanFileError):
        Plan.load(str(small), *model())


@pytest.mark.parametrize("wrong", [None, 3, "text", [[1]], {"a": 1}], ids=str)
@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_a_wrong_form_are_refused(small, field, wrong):
    data = json.loads(small.read_text())
    data[field] = wrong
    small.write_text(json.dumps(data))
    with pytest.raises(PlanFileError):
        Plan.load(str(small), *model())


def test_folder_that_is_not_there(small, tmp_path):
    with pytest.raises(PlanFileError, match="can't be written to"):
        Plan.load(str(small), *model()).save(str(tmp_path / "absent" / "plan.json"))


def test_edited_strategies_are_refused(small):
    data = json.loads(small.read_text())
    assert data["assignment"], "nothing is split: the test would show nothing"
    for entry in data["assignment"]:
        entry["group"] += 1000
    small.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match="is damaged: its strategy gives leaf") as caught:
        Plan.load(str(small), *model())
    assert "edited" in caught.value.why


def test_edited_mesh_axis_is_refused(small):
    data = json.loads(small.read_text())
    data["assignment"][0]["mesh_axis"] = "z"
    small.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match="damaged"):
        Plan.load(str(small), *model())
