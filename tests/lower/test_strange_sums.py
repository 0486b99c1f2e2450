"""Sums that must not stay partial, and values that something beside their sum wants: equal to one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd_auto
from spmd_auto.lower.manual import Pending
from spmd_auto.search import SearchOptions
from tests.known_answers.toy import toy_mesh

MESH = dataclasses.replace(toy_mesh(2, 4), names=("data", "model"))
FAST = SearchOptions(states=60)
CONTRACTED = {"x": P(None, "model"), "w": P("model"), "v": P("model")}


def run(step, pins, *args):
    """The step under pins on eight devices, beside one; and the plan."""
    plan = spmd_auto.plan(step, *args, mesh=MESH, pins=pins, search=FAST)
    lowered = plan.lower_step(donate=False)
    placed = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(args), lowered.in_shardings, strict=True)]
    found = jax.tree.unflatten(plan.program.out_tree, lowered.compile()(*placed))
    return plan, found, step(*args)


def same(found, expected, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol)


def operands(dtype, x=1, w=1):
    return jnp.full((8, 64), x, dtype), jnp.full((64, 16), w, dtype), jnp.full((64, 16), w, dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "x", "between"),
    [
        ("an int8 sum that wraps, made wide", jnp.int8, 3, lambda y: y.astype(jnp.int32)),
        ("an int32 sum, rounded when it is whole", jnp.int32, 2**20 + 1, lambda y: y.astype(jnp.bfloat16)),
        ("whether there is anything", jnp.float32, 1, lambda y: y.astype(bool).astype(jnp.float32)),
        ("the real part", jnp.complex64, 1 + 2j, lambda y: y.real),
    ],
)
def test_what_is_not_linear_sees_whole_sums(devices, name, dtype, x, between):
    def step(x, w, v):
        return between(lax.dot(x, w)) + between(lax.dot(x, v))

    _, found, expected = run(step, CONTRACTED, *operands(dtype, x))
    same(found, expected)


def test_float_casts_stay_inside_one_sum(devices):
    """One reduction for two contractions and the cast behind them."""

    def step(x, w, v):
        return lax.dot(x, w).astype(jnp.float32) + lax.dot(x, v).astype(jnp.float32)

    plan, found, expected = run(step, CONTRACTED, *operands(jnp.bfloat16))
    same(found, expected)
    assert len(plan.analysis.graph.ops) > 3
    assert len(plan.pricer.structure.sums) == 1


def test_truth_values_are_summed_up_to_truth(devices):
    table = jnp.arange(64) % 3 == 0
    index = jnp.arange(16) * 5 % 64
    plan, found, expected = run(lambda t, i: t[i], {"t": P("model"), "i": P("data")}, table, index)
    same(found, expected)
    a, b = jnp.eye(8, 64, dtype=bool), jnp.ones((64, 16), bool)
    _, found, expected = run(lambda x, w: jnp.dot(x, w), {"x": P(None, "model"), "w": P("model")}, a, b)
    same(found, expected)


@pytest.mark.parametrize("mode", ["clip", "drop"])
@pytest.mark.parametrize("pin", [P("model"), P(None, "model"), P("data", "model")])
def test_scattered_updates_outside_of_the_table(devices, mode, pin):
    """Each index is clipped, or drops its update, also those of dimensions that are not split."""
    table = jnp.zeros((16, 8))
    rng = np.random.default_rng(0)  # so many that the table's partial sums are cheaper to send than the updates
    rows, columns = (jnp.array(rng.integers(-n, 2 * n, 1024)) for n in table.shape)
    updates = jnp.array(rng.integers(0, 9, 1024).astype(np.float32))

    def step(table, rows, columns, updates):
        return table.at[rows, columns].add(updates, mode=mode, wrap_negative_indices=False)

    batch = {name: P("data") for name in ("rows", "columns", "updates") if "data" not in pin}
    _, found, expected = run(step, {"table": pin, **batch}, table, rows, columns, updates)
    same(found, expected)


def test_a_window_that_is_clipped_back_into_the_table(devices):
    def step(table, starts, updates):
        numbers = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))  # one row, a window of its columns
        return lax.scatter_add(table, starts, updates, numbers, mode="clip")

    rng = np.random.default_rng(0)
    table, updates = jnp.zeros((16, 8)), jnp.array(rng.integers(0, 9, (512, 3)).astype(np.float32))
    starts = jnp.array(rng.integers(-9, 24, (512, 2)))
    pins = {"table": P("model"), "starts": P("data"), "updates": P("data")}
    _, found, expected = run(step, pins, table, starts, updates)
    same(found, expected)


# ---- values that something beside their sum wants ------------------------------------------------


def test_an_unused_operand_of_a_branch(devices):
    def step(x, w, v, flag):
        y = lax.dot(x, w)
        other = lax.cond(flag > 0, lambda y: 1.0, lambda y: 2.0, y)
        return (y + lax.dot(x, v)) * other

    _, found, expected = run(step, CONTRACTED, *operands(jnp.float32), jnp.int32(1))
    same(found, expected)


def test_a_callback_sees_the_whole_value(devices):
    seen = []

    def step(x, w, v):
        y = lax.dot(x, w)
        jax.debug.callback(lambda y: seen.append(np.asarray(y)), y)
        return y + lax.dot(x, v)

    _, found, _ = run(step, CONTRACTED, *operands(jnp.float32))
    jax.effects_barrier()
    np.testing.assert_allclose(found, 128.0)
    assert seen
    assert all((y == 64.0).all() for y in seen)


def test_a_value_written_to_a_mutable_array(devices):
    def step(x, w, v):
        y = lax.dot(x, w)
        total = jax.new_ref(jnp.zeros_like(y))
        total[...] += y
        return total[...] + (y + lax.dot(x, v))

    _, found, expected = run(step, CONTRACTED, *operands(jnp.float32))
    same(found, expected)


def test_a_jit_inside_with_shardings_of_its_own(devices):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(x, w, v):
        inner = jax.jit(lambda y: y, in_shardings=jax.NamedSharding(mesh, P("data")))
        return inner(lax.dot(x, w)) + lax.dot(x, v)

    args = operands(jnp.float32)
    found = spmd_auto.auto_shard(step, mesh=mesh, pins=CONTRACTED, search=FAST)(*args)
    np.testing.assert_allclose(found, 128.0)
    assert not isinstance(found, Pending)
