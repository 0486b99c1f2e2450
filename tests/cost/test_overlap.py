"""Communication beside computation: only where there is computation, only what nothing waits for, never for nothing."""

from __future__ import annotations

import dataclasses

import pytest

import spmd_auto
from spmd_auto.cost import Pricer, make_report
from spmd_auto.mesh import Chip, Link, LogicalMesh
from spmd_auto.propagate.assignment import Assignment
from tests.cost.test_pricer import analysis, check_equal, program, walk
from tests.known_answers.toy import CHIP
from tests.models import mlp
from tests.strategies import expert_strategies, priced


def mesh(hidden, slowdown=0.0, bandwidth=1e9, flops=1e9):
    chip = dataclasses.replace(CHIP, flops=((8, flops),), hidden=hidden, slowdown=slowdown)
    return LogicalMesh(("a", "b"), (2, 4), (Link(bandwidth, 1e-6),) * 2, chip)


def report(name, *args, **options):
    return priced(program("gpt"), mesh(*args, **options), name, analysis("gpt")).report


@pytest.mark.parametrize("name", ["data", "zero1", "zero3", "megatron", "megatron+sequence+zero3"])
def test_hidden_is_bound_by_the_computation_and_by_the_share(name):
    plain = report(name, 0.0)
    assert (plain.hidden, plain.slowed) == (0, 0)
    assert plain.seconds == pytest.approx(plain.compute + plain.fused + plain.communication)
    loose = sum(c.seconds for c in plain.collectives if c.leaves and c.form != "partial sum reduced")
    # much computation: the share of what may be hidden, but for the update, which has no computation of its own
    busy = report(name, 0.8, flops=1e6)
    assert 0 < busy.hidden <= 0.8 * loose * (1 + 1e-9)
    # hardly any: no more than there is
    idle = report(name, 0.8, flops=1e15, bandwidth=1e3)
    assert idle.hidden <= idle.compute * (1 + 1e-9)
    assert idle.seconds == pytest.approx(idle.compute + idle.fused + idle.communication - idle.hidden)


def test_gradients_of_a_perceptron_hide_and_what_it_costs():
    step, params, data = mlp.make(2, 64, 64)

    def of(hidden, slowdown, assignment):
        at = mesh(hidden, slowdown, flops=1e8)
        return spmd_auto.price(step, params, data, mesh=at, assignment=assignment).report

    whole, beside = of(0.0, 0.0, {"batch": "a"}), of(0.5, 0.1, {"batch": "a"})
    assert whole.communication > 0
    assert beside.communication == whole.communication
    assert beside.hidden == pytest.approx(0.5 * whole.communication)
    assert beside.slowed == pytest.approx(0.1 * beside.hidden)
    assert beside.seconds == pytest.approx(whole.seconds - 0.9 * beside.hidden)


def test_partial_sums_of_activations_are_never_hidden():
    """Tensor parallel: what waits for a sum can't run beside it."""
    made = report("megatron", 0.9, flops=1e6)
    waited = sum(c.seconds for c in made.collectives if not c.leaves)
    assert waited > 0
    assert made.exposed >= waited * (1 - 1e-9)


@pytest.mark.parametrize("name", expert_strategies(mesh(0.0)))
def test_seconds_are_monotone_in_links_and_chips(name):
    """More bandwidth, more FLOP/s, more overlap or less slowdown never make a step longer."""
    for flops in (1e7, 1e9, 1e11):
        seconds = [report(name, 0.7, 0.2, b, flops).seconds for b in (1e7, 1e8, 1e9, 1e10)]
        assert seconds == sorted(seconds, reverse=True)
    seconds = [report(name, 0.7, 0.2, 1e9, flops).seconds for flops in (1e7, 1e8, 1e9, 1e10, 1e11)]
    assert seconds == sorted(seconds, reverse=True)


def test_more_overlap_and_less_slowdown_never_cost():
    p = Pricer(analysis("gpt"), mesh(0.0))
    state = p.price(Assignment())
    *_, (state, _) = walk(p, 2, 25)
    seconds = []
    for hidden, slowdown in ((0.0, 0.0), (0.3, 0.5), (0.6, 0.5), (0.6, 0.2), (0.9, 0.2), (0.9, 0.0)):
        other = Pricer(analysis("gpt"), mesh(hidden, slowdown))
        seconds.append(other.assemble(state.assignment, state.specs, state.forms).seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


@pytest.mark.parametrize("model", ["gpt", "unrolled", "moe"])
def test_a_change_has_the_price_of_the_whole_with_overlap(model):
    price = Pricer(analysis(model), mesh(0.7, 0.2, flops=1e8))
    hidden = 0.0
    for seed in range(3):
        for state, path in walk(price, seed, 25):
            whole = price.price(state.assignment)
            check_equal(state, whole, path)
            assert state.held == pytest.approx(whole.held, rel=1e-6, abs=1e-12)
            made = make_report(price, state)
            assert made.seconds == pytest.approx(state.seconds, rel=1e-9)
            hidden = max(hidden, made.hidden)
    assert hidden > 0


def test_chips_hide_as_their_profiles_say():
    hosts = spmd_auto.cluster("h100", hosts=2)
    assert 0 < hosts.chip.slowdown < hosts.chip.hidden < 1
    assert spmd_auto.cluster("cpu").chip.hidden == 0
    assert isinstance(hosts.chip, Chip)
