"""Prices: a change costs what the whole costs, terms add up, searches can trust them."""

from __future__ import annotations

import functools
import random

import jax
import pytest

import spmd_auto
from spmd_auto.cost import Pricer, make_report
from spmd_auto.cost.pricer import interchanges
from spmd_auto.mesh import LogicalMesh
from spmd_auto.plan import Plan
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.search.actions import moves
from spmd_auto.search.refine import refine
from spmd_auto.search.space import build_space
from spmd_auto.trace import Role, trace
from tests.known_answers.toy import toy_mesh
from tests.models import gpt, mlp
from tests.strategies import expert_strategies, priced

MODELS = {
    "gpt": {"width": 32, "sequence": 16, "vocab": 64},
    "unrolled": {"width": 32, "sequence": 16, "vocab": 64, "scan": False, "remat": False},
    "moe": {"width": 32, "sequence": 16, "vocab": 64, "experts": 4},
}
HOSTS = spmd_auto.cluster("h100", hosts=2, per_host=4)
MESHES: dict[str, LogicalMesh] = {
    "toy 8": toy_mesh(8),
    "toy 2x4": toy_mesh(2, 4, bandwidth=(1e9, 1e10)),
    "toy 2x2x2": toy_mesh(2, 2, 2),
    "toy 1x4": toy_mesh(1, 4),
    "h100": HOSTS.mesh(host=2, gpu=4),
}


@functools.cache
def program(model):
    _, step, state, batch = gpt.make(**MODELS[model])
    return trace(step, state, batch)


@functools.cache
def analysis(model):
    return analyse_for(program(model), MESHES["toy 8"], {})


def pricer(model, mesh, budget=float("inf")):
    return Pricer(analysis(model), MESHES[mesh], budget)


def walk(price, seed, steps):
    """(moves made, priced states) of a random walk by changes alone."""
    rng = random.Random(seed)
    space = build_space(price.analysis, price.mesh)
    state, path = price.price(Assignment()), []
    yield state, path
    for _ in range(steps):
        choices = list(moves(space, state.assignment, fine=rng.random() < 0.5))
        # orders and forms are drawn as often as the many flips
        kinds = sorted({move.label[0] for move in choices})
        kind = rng.choice(kinds)
        move = rng.choice([m for m in choices if m.label[0] == kind])
        child = price.change(state, move.after, move.touched)
        if child is None:  # no spec changes: the whole price must say the same
            whole = price.price(move.after)
            assert whole.specs == state.specs, move.label
            continue
        path = [*path, move.label]
        state = child
        yield state, path


def check_equal(changed, whole, path):
    assert changed.specs == whole.specs, path
    assert changed.key == whole.key, path
    assert changed.seconds == pytest.approx(whole.seconds, rel=1e-9), path
    assert changed.memory == pytest.approx(whole.memory, rel=1e-9), path
    assert changed.score == pytest.approx(whole.score, rel=1e-9), path
    assert [f and f.choice for f in changed.forms] == [f and f.choice for f in whole.forms], path
    assert changed.edge_seconds == pytest.approx(whole.edge_seconds, rel=1e-9), path
    assert changed.sum_seconds == pytest.approx(whole.sum_seconds, rel=1e-9), path


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_price_of_changes_is_the_price_of_the_whole(model, mesh):
    price = pricer(model, mesh, budget=3e5)
    lengths = []
    for seed in range(4):
        for state, path in walk(price, seed, 30):
            check_equal(state, price.price(state.assignment), path)
        lengths.append(len(path))
    assert max(lengths) > 5, "hardly a move changed anything: the test would show little"


def test_a_walk_back_gives_the_first_price():
    price = pricer("gpt", "toy 2x4")
    space = build_space(price.analysis, price.mesh)
    start = price.price(Assignment())
    split = next(m for m in moves(space, start.assignment) if m.label[0] == "last")
    there = price.change(start, split.after, split.touched)
    assert there is not None
    back = price.change(there, Assignment(), split.touched)
    assert back is not None
    check_equal(back, start, "back")


def test_known_specs_are_not_priced_twice():
    price = pricer("gpt", "toy 2x4")
    space = build_space(price.analysis, price.mesh)
    start, known = price.price(Assignment()), set()
    split = next(m for m in moves(space, start.assignment) if m.label[0] == "last")
    assert price.change(start, split.after, split.touched, known) is not None
    states = price.states
    assert price.change(start, split.after, split.touched, known) is None
    assert price.change(start, start.assignment, split.touched, known) is None
    assert price.states == states


# ---- reports ----------------------------------------------------------------------------------------------


def reports(model, mesh):
    price = pricer(model, mesh)
    yield price, price.price(Assignment())
    for seed in range(3):
        *_, (state, _) = walk(price, seed, 25)
        yield price, state
        yield price, refine(price, state)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_terms_of_a_report_add_up(model, mesh):
    for price, state in reports(model, mesh):
        report = make_report(price, state)
        assert report.seconds == pytest.approx(state.seconds, rel=1e-9)
        assert report.seconds == report.compute + report.fused + report.slowed + report.exposed
        assert report.exposed == report.communication - report.hidden
        assert 0 <= report.hidden <= min(report.communication, report.compute)
        assert 0 <= report.latency <= report.communication * (1 + 1e-12)
        assert min(report.compute, report.fused, report.communication, report.slowed) >= 0
        assert sum(c.seconds for c in report.collectives) == pytest.approx(report.communication, rel=1e-12)
        assert sum(report.bytes_by_axes().values()) == pytest.approx(report.bytes_moved)
        assert sum(report.bytes_by_kind_and_axes().values()) == pytest.approx(report.bytes_moved)
        sent = [c.bytes for c in report.collectives]
        assert sent == sorted(sent, reverse=True)
        assert all(c.axes and set(c.axes) <= set(price.mesh.names) for c in report.collectives)
        m = report.memory
        assert m.total == pytest.approx(state.memory, rel=1e-12)
        assert m.total == m.parameters + m.optimizer + m.batch + m.other + m.temporaries
        assert min(m.parameters, m.optimizer, m.batch, m.other, m.temporaries) >= 0


def test_memory_of_arguments_is_what_the_specs_say():
    for price, state in reports("gpt", "toy 2x4"):
        plan = Plan(price, state)
        expected = dict.fromkeys(Role, 0.0)
        for leaf, spec in zip(plan.program.arguments, plan.placements.arguments, strict=True):
            parts = 1
            for axes in spec:
                for axis in axes:
                    parts *= price.mesh.sizes[axis]
            assert leaf.role is not None
            expected[leaf.role] += leaf.bytes / parts
        memory = plan.report.memory
        assert memory.parameters == pytest.approx(expected[Role.PARAMETER])
        assert memory.optimizer == pytest.approx(expected[Role.OPTIMIZER])
        assert memory.batch == pytest.approx(expected[Role.BATCH])
        assert memory.other == pytest.approx(expected[Role.COUNTER] + expected[Role.KEY])


def test_one_device_moves_nothing_and_holds_everything():
    program = trace(*mlp.make(2, 64, 64))
    plan = spmd_auto.plan(*mlp.make(2, 64, 64), mesh=toy_mesh(1))
    assert plan.report.bytes_moved == 0
    assert plan.report.communication == 0
    assert plan.report.flops == 2 * 64**3 * 5  # 2 forward, 2 for weights, 1 for the activation between
    state = sum(leaf.bytes for leaf in program.arguments if leaf.role is Role.PARAMETER)
    assert plan.report.memory.parameters == state


def test_whole_program_on_many_devices_costs_what_one_costs():
    """Nothing split: every device does all of it."""
    many, one = pricer("gpt", "toy 8").price(Assignment()), Pricer(analysis("gpt"), toy_mesh(1)).price(Assignment())
    assert many.seconds == pytest.approx(one.seconds)
    assert many.memory == pytest.approx(one.memory)


def test_perfect_split_divides_compute():
    step, params, batch = mlp.make(3, 64, 64)
    whole = spmd_auto.price(step, params, batch, mesh=toy_mesh(4), assignment={})
    split = spmd_auto.price(step, params, batch, mesh=toy_mesh(4), assignment={"batch": "a"})
    assert split.report.flops == whole.report.flops / 4
    assert split.report.compute == pytest.approx(whole.report.compute / 4)
    assert whole.report.bytes_moved == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_hold_what_they_say(stage):
    mesh = MESHES["toy 8"]
    name = f"zero{stage}" if stage else "data"
    plan = priced(program("gpt"), mesh, name, analysis("gpt"))
    memory = plan.report.memory
    base = priced(program("gpt"), mesh, "data", analysis("gpt")).report.memory
    small = 0.02  # leaves that 8 doesn't divide stay whole
    assert memory.optimizer == pytest.approx(base.optimizer / (8 if stage else 1), rel=small)
    assert memory.parameters == pytest.approx(base.parameters / (8 if stage == 3 else 1), rel=small)
    assert bool(plan.zero_axes()) == bool(stage)


@pytest.mark.parametrize("name", expert_strategies(toy_mesh(2, 4)))
def test_seconds_fall_with_faster_links_and_faster_chips(name):
    slow = toy_mesh(2, 4, bandwidth=(1e9, 1e9))
    fast = toy_mesh(2, 4, bandwidth=(4e9, 4e9))
    a = priced(program("gpt"), slow, name, analysis("gpt")).report
    b = priced(program("gpt"), fast, name, analysis("gpt")).report
    assert b.communication < a.communication
    assert b.seconds < a.seconds


# ---- refinement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["toy 2x4", "toy 2x2x2", "h100"])
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_refinement_is_never_worse_and_keeps_the_specs(model, mesh):
    price = pricer(model, mesh)
    better = 0
    for seed in range(4):
        *_, (state, _) = walk(price, seed, 25)
        refined = refine(price, state)
        assert refined.specs == state.specs
        assert refined.score <= state.score
        again = price.assemble(refined.assignment, refined.specs, refined.forms)
        assert again.seconds == pytest.approx(refined.seconds, rel=1e-12)
        better += refined.seconds < state.seconds * (1 - 1e-9)
        assert refine(price, refined).seconds == pytest.approx(refined.seconds, rel=1e-6)
    assert better or mesh == "h100"


def test_refinement_does_not_leave_the_budget():
    price = pricer("gpt", "toy 2x4")
    for seed in range(4):
        *_, (state, _) = walk(price, seed, 25)
        tight = Pricer(analysis("gpt"), MESHES["toy 2x4"], state.memory * 1.0001)
        held = tight.assemble(state.assignment, state.specs, state.forms)
        assert refine(tight, held).memory <= tight.budget


def test_prices_of_operations_are_sorted_and_the_best_is_the_first():
    price = pricer("moe", "toy 2x4")
    *_, (state, _) = walk(price, 1, 20)
    seen = 0
    for i in price.structure.active:
        forms = price.forms(i, state.specs)
        assert forms[0] == price.best(i, state.specs)
        totals = [form.total for form in forms]
        assert totals == sorted(totals)
        assert len({form.choice for form in forms}) == len(forms)
        seen += len(forms) > 1
    assert seen > 10


def test_state_and_struct_arguments_have_one_price():
    step, params, batch = mlp.make(2, 32, 32)
    arrays = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), (params, batch))
    a = spmd_auto.price(step, params, batch, mesh=toy_mesh(4), assignment={"batch": "a"})
    b = spmd_auto.price(step, *arrays, mesh=toy_mesh(4), assignment={"batch": "a"})
    assert a.report == b.report


def swapped(assignment: Assignment, a: int, b: int) -> Assignment:
    """The assignment with two mesh axes' names exchanged."""
    other = {a: b, b: a}

    def move(axis):
        return other.get(axis, axis)

    return Assignment(
        tuple((group, move(axis)) for group, axis in assignment.order),
        frozenset((region, move(axis)) for region, axis in assignment.flips),
        tuple((key, tuple((g, move(axis)) for g, axis in splits)) for key, splits in assignment.forms),
    )


def test_states_that_differ_in_the_names_of_alike_axes_have_one_price_and_one_key():
    price = pricer("moe", "toy 2x2x2")
    compared = 0
    for seed in range(3):
        for state, _ in walk(price, seed, 12):
            twin = price.price(swapped(state.assignment, 0, 2))
            if twin.key == state.key:
                assert twin.seconds == pytest.approx(state.seconds, rel=1e-9)
                compared += twin.keys[0] != state.keys[0]
    assert compared > 10
    # axes of other links, or other sizes, are themselves
    a, b = (pricer("moe", "toy 2x4").price(Assignment(((0, axis),))).key for axis in (0, 1))
    assert a != b


def test_a_pin_takes_the_symmetry_away():
    mesh = MESHES["toy 2x2x2"]
    assert len(interchanges(mesh)) == 6
    assert len(interchanges(mesh, [((1,), ())])) == 2
    assert interchanges(MESHES["toy 2x4"]) == [(0, 1)]
