"""Mixtures of experts that nobody registered: the expert axis is found, expert parallelism is right, tokens travel."""

from __future__ import annotations

import functools

import jax
import pytest

from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for, make_plan
from spmd_auto.search.strategies import build, flips_without
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from spmd_auto.verify.check import compare
from spmd_auto.verify.hlo import read_compiled
from tests.known_answers.toy import toy_mesh
from tests.models import moe

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MESHES = {"8": toy_mesh(8), "2x4": toy_mesh(2, 4)}


@functools.cache
def built(block):
    with jax.enable_x64(True):
        step, params, x = moe.make(block)
        program = trace(step, params, x)
        return program, (params, x), jax.device_get(jax.jit(step)(params, x))


@pytest.mark.parametrize("block", moe.BLOCKS)
def test_the_expert_axis_is_found(block):
    program, _, _ = built(block)
    analysis = analyse_for(program, MESHES["8"], {})
    for leaf, value in zip(program.arguments, analysis.graph.arguments, strict=True):
        if leaf.path in ("params/up", "params/down"):
            assert analysis.names[analysis.axes.of[value.id][0]].startswith("experts")
    assert not analysis.graph.unknown


def run(plan, program, arguments, devices):
    lowered = plan.lower_step(donate=False)
    compiled = lowered.lower().compile(compiler_options=FAST)
    flat = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(arguments), lowered.in_shardings, strict=True)]
    got = jax.device_get(jax.tree.unflatten(program.out_tree, compiled(*flat)))
    return got, compare(plan, read_compiled(compiled, plan.mesh.build(devices)), "cpu")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strategy", ["experts first", "found"])
@pytest.mark.parametrize("block", moe.BLOCKS)
def test_parity(block, strategy, mesh, devices):
    program, arguments, want = built(block)
    with jax.enable_x64(True):
        if strategy == "found":
            plan = make_plan(program, MESHES[mesh])
        elif block == "ragged":  # the groups of a ragged contraction are whole
            plan = price_strategy(program, MESHES[mesh], {"batch": "a", "mlp*": MESHES[mesh].names[-1]})
        else:
            axes = {"experts": "a"} if mesh == "8" else {"experts": "b"}
            plan = price_strategy(program, MESHES[mesh], axes | {"batch": MESHES[mesh].names})
            assert MESHES[mesh].names[-1] in str(plan.specs["params/up"][0])
        got, _ = run(plan, program, arguments, devices)
        assert tree_relative_error(got, want) < 1e-9


@pytest.mark.parametrize("block", ["one_hot", "shared"])
def test_dispatch_and_combine_are_all_to_alls(block, devices):
    """Batch keeps the routing, experts the buffers: two all-to-alls forward, two backward."""
    program, arguments, _ = built(block)
    mesh = MESHES["8"]
    with jax.enable_x64(True):
        analysis = analyse_for(program, mesh, {})
        flips = flips_without(analysis, "experts", "batch", "sequence", 0)
        plan = price_strategy(
            program, mesh, build(analysis, mesh, [("batch", "a"), ("experts", "a")], flips=flips), analysis=analysis
        )
        _, verification = run(plan, program, arguments, devices)
        kinds = [(c.kind, c.payload_bytes) for c in verification.summary.collectives for _ in range(c.times)]
        buffers = moe.EXPERTS * moe.BATCH * moe.CAPACITY * moe.WIDTH * 8 // 8
        assert kinds.count(("all-to-all", buffers)) == 4, kinds
        assert not verification.differing_rows, verification
