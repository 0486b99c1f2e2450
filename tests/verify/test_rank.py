"""`verify=`: the best few plans are compiled, and chosen by what their programs move and keep."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import pytest

import spmd_auto
from spmd_auto.errors import MemoryBudgetError, VerifyError
from spmd_auto.mesh import cluster_of
from spmd_auto.plan import price
from spmd_auto.verify import MemoryUse, ProgramSummary, rank
from spmd_auto.verify.check import compare


def step(state, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


STATE = {"params": {name: jax.ShapeDtypeStruct((128, 128), jnp.float32) for name in "ab"}}
BATCH = {"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}


@pytest.fixture
def mesh(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_AUTO_CACHE", str(tmp_path))
    return cluster_of(jax.devices()[:4]).mesh(d=4)


def two_plans(mesh, memory=float("inf")):
    data = price(step, STATE, BATCH, mesh=mesh, assignment={"batch": "d"})
    whole = price(step, STATE, BATCH, mesh=mesh, assignment={})
    for plan in (data, whole):
        plan.pricer.budget = memory
    return data, whole


def found(plan, factor=1.0, needed=1000):
    """A compiled program that moves `factor` times what the plan predicted."""
    compiled = spmd_auto.verify(plan, "cpu").summary
    more = tuple(dataclasses.replace(c, ring_bytes=c.ring_bytes * factor) for c in compiled.collectives)
    summary = dataclasses.replace(compiled, collectives=more, memory=MemoryUse(needed, 0, 0, 0, None))
    return compare(plan, summary, "cpu")


def test_seconds_scale_with_the_bytes_found(mesh):
    plan, _ = two_plans(mesh)
    sent = plan.report.communication
    assert sent > 0
    assert rank.found_seconds(plan, found(plan)) == pytest.approx(plan.seconds)
    assert rank.found_seconds(plan, found(plan, 3)) == pytest.approx(plan.seconds + 2 * sent, rel=0.01)


def test_what_nobody_predicted_has_a_price(mesh):
    plan, whole = two_plans(mesh)
    verification = compare(whole, found(plan).summary, "cpu")
    assert rank.found_seconds(whole, verification) > whole.seconds


def test_bytes_found_decide(mesh, monkeypatch):
    data, whole = two_plans(mesh)
    factor = {data: 1e4, whole: 1.0}
    monkeypatch.setattr(rank, "verify", lambda plan, where, cache: found(plan, factor[plan]))
    assert rank.choose([data, whole], "cpu") is whole
    assert "number 2 by predicted time" in whole.search.verified
    assert whole.search.verified in whole.explain().replace("\n", " ") or "were compiled for cpu" in whole.explain()


def test_memory_found_decides(mesh, monkeypatch):
    data, whole = two_plans(mesh, memory=2000.0)
    needed = {data: 5000, whole: 1500}
    monkeypatch.setattr(rank, "verify", lambda plan, where, cache: found(plan, needed=needed[plan]))
    assert rank.choose([data, whole], "cpu") is whole
    needed[whole] = 3000
    with pytest.raises(MemoryBudgetError, match="once it is compiled"):
        rank.choose([data, whole], "cpu")


def test_a_plan_that_does_not_compile_is_passed_over(mesh, monkeypatch):
    data, whole = two_plans(mesh)

    def compile_(plan, where, cache):
        if plan is data:
            raise jax.errors.JaxRuntimeError("INTERNAL: no")
        return found(plan)

    monkeypatch.setattr(rank, "verify", compile_)
    assert rank.choose([data, whole], "cpu") is whole
    assert "1 did not compile" in whole.search.verified
    with pytest.raises(VerifyError, match="none of the 1 best plans"):
        rank.choose([data], "cpu")


def test_a_plan_is_chosen_among_several_compiled_ones(mesh):
    said: list[str] = []
    plan = spmd_auto.plan(step, STATE, BATCH, mesh=mesh, verify="cpu", progress=said.append)
    compiled = [text for text in said if text.startswith("compiling plan")]
    assert len(compiled) > 1
    assert f"the best {len(compiled)} were compiled for cpu" in plan.search.verified


def test_a_decorated_step_is_verified_on_its_own_devices(mesh):
    sharded = spmd_auto.auto_shard(step, mesh=mesh, verify=True, quiet=True)
    assert "compiled for the devices at hand" in sharded.plan(STATE, BATCH).search.verified


def test_summaries_are_kept(mesh, monkeypatch):
    first = spmd_auto.plan(step, STATE, BATCH, mesh=mesh, verify=True)
    monkeypatch.setattr(sys.modules["spmd_auto.verify.check"], "compile_for", None)  # nothing is compiled again
    assert spmd_auto.plan(step, STATE, BATCH, mesh=mesh, verify=True).specs == first.specs


def test_devices_that_are_not_there_have_to_be_named():
    mesh = spmd_auto.cluster("v5e", topology="2x2").mesh(a=4)
    with pytest.raises(VerifyError, match="no tpu devices here"):
        spmd_auto.plan(step, STATE, BATCH, mesh=mesh, verify=True)


@pytest.mark.parametrize("verify", ["tpu:v9", 3, None])
def test_what_is_no_target_is_refused_at_once(verify):
    with pytest.raises(VerifyError):
        spmd_auto.auto_shard(step, verify=verify)
    with pytest.raises(VerifyError):
        spmd_auto.plan(step, STATE, BATCH, verify=verify)


def test_an_interrupt_ends_it(mesh, monkeypatch):
    def interrupted(plan, where, cache):
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spmd_auto.plan(step, STATE, BATCH, mesh=mesh, verify="cpu")


def test_nothing_moved_is_nothing_to_scale(mesh):
    _, whole = two_plans(mesh)
    empty = ProgramSummary(("d",), (4,), (), 0.0)
    assert rank.found_seconds(whole, compare(whole, empty, "cpu")) == whole.seconds
