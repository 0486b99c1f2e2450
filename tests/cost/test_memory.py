"""Peak memory on small programs whose answer can be counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from spmd_auto.cost import Pricer
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh
from tests.models import gpt

N = 64
ARRAY = N * N * 4  # bytes


def S(*shape):
    return jax.ShapeDtypeStruct(shape or (N, N), jnp.float32)


def memory(fn, *args):
    mesh = toy_mesh(1)
    price = Pricer(analyse_for(trace(fn, *args), mesh, {}), mesh)
    state = price.price(Assignment())
    return price.memory.report(state.fractions, state.transient)


def test_one_product_holds_its_result():
    report = memory(lambda a, b: a @ b, S(), S())
    assert report.batch == 2 * ARRAY
    assert report.temporaries == ARRAY
    assert report.total == 3 * ARRAY


@pytest.mark.parametrize("length", [2, 5, 10])
def test_a_chain_holds_two_at_a_time(length):
    def chain(x, w):
        for _ in range(length):
            x = x @ w
        return x

    assert memory(chain, S(), S()).temporaries == 2 * ARRAY


@pytest.mark.parametrize("length", [2, 5, 10])
def test_results_that_are_needed_later_are_all_held(length):
    def fan(x, w):
        made = [x @ w + i for i in range(length)]
        made = [jnp.tanh(m) @ w for m in made]
        return sum(m.sum() for m in made)

    def all_at_once(x, w):
        made = [(x + i) @ w for i in range(length)]
        total = made[0]
        for m in made[1:]:
            total = total @ m
        return total

    assert memory(all_at_once, S(), S()).temporaries >= length * ARRAY
    assert memory(fan, S(), S()).temporaries <= memory(all_at_once, S(), S()).temporaries + 2 * length * ARRAY


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x.sum()


def test_the_backward_pass_holds_one_activation_per_layer():
    def step(params, x):
        return jax.grad(loss)(params, x)

    sizes = {n: memory(step, [S()] * n, S()).temporaries for n in (2, 4, 8)}
    # gradients take the place of the activations that they no longer need
    assert sizes[4] - sizes[2] == 2 * ARRAY
    assert sizes[8] - sizes[4] == 4 * ARRAY


def gpt_memory(**options):
    _, step, state, batch = gpt.make(width=32, sequence=32, vocab=64, **options)
    return memory(step, state, batch)


def test_rematerialised_layers_take_less():
    plain, remat = gpt_memory(layers=8, remat=False), gpt_memory(layers=8, remat=True)
    assert remat.temporaries < 0.7 * plain.temporaries
    assert remat.parameters == plain.parameters
    assert remat.optimizer == plain.optimizer == pytest.approx(2 * plain.parameters)


def test_scanned_and_unrolled_layers_take_alike():
    scanned, unrolled = gpt_memory(layers=4, scan=True), gpt_memory(layers=4, scan=False)
    assert scanned.parameters == unrolled.parameters
    assert scanned.temporaries == pytest.approx(unrolled.temporaries, rel=0.6)


def test_more_layers_and_larger_batches_take_more():
    by_layers = [gpt_memory(layers=n).temporaries for n in (2, 4, 8)]
    assert by_layers == sorted(set(by_layers))
    by_batch = [gpt_memory(batch=n).temporaries for n in (4, 8, 16)]
    assert by_batch == sorted(set(by_batch))


def test_unused_arguments_are_held():
    report = memory(lambda a, b: a @ a, S(), S())
    assert report.batch == 2 * ARRAY
    assert report.temporaries == ARRAY
