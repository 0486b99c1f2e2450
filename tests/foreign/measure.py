"""One model under one strategy: planned, lowered, run on eight devices and held against one device."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

import jax

from spmd_auto import _compat
from spmd_auto.mesh import LogicalMesh
from spmd_auto.plan import Plan, make_plan
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.graph import BATCH
from spmd_auto.search import SearchOptions
from spmd_auto.trace import Program, trace
from spmd_auto.verify import read_compiled, tree_relative_error
from spmd_auto.verify.check import Verification, compare
from tests.foreign.step import Training
from tests.known_answers.toy import toy_mesh
from tests.strategies import priced

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WIDE, NARROW = 1e-9, 1e-5  # as tests/lower/test_parity.py (x64) and tests/plan/test_odd_programs.py (float32)
SEARCH = SearchOptions(beam_width=2, states=600)


@dataclasses.dataclass(slots=True)
class Reference:
    """A traced and analysed model, and what one device computes."""

    training: Training
    program: Program
    analysis: Analysis
    mesh: LogicalMesh
    expected: Any
    tolerance: float
    trace_seconds: float
    analysis_seconds: float


@dataclasses.dataclass(slots=True)
class Outcome:
    """A strategy of a model: the plan, the compiled program beside it, errors against one device.

    `state_error` is the largest of the parts of the state: in one norm, keys (large numbers) would hide all else.
    """

    plan: Plan
    plan_seconds: float
    verification: Verification
    compile_seconds: float
    loss_error: float
    grads_error: float
    state_error: float


def refer(training: Training) -> Reference:
    """Traces and analyses under x64 (call inside `jax.enable_x64(True)`), runs on one device."""
    start = time.perf_counter()
    program = trace(training.step, training.state, training.batch)
    traced = time.perf_counter()
    mesh = toy_mesh(2, 4)
    analysis = analyse_for(program, mesh, {})
    analysed = time.perf_counter()
    compiled = jax.jit(training.step).lower(training.state, training.batch).compile(compiler_options=FAST)
    expected = jax.device_get(compiled(training.state, training.batch))
    tolerance = NARROW if rounds(program.jaxpr) else WIDE
    return Reference(training, program, analysis, mesh, expected, tolerance, traced - start, analysed - traced)


def rounds(jaxpr: Any) -> bool:
    """Whether a program that was traced under x64 rounds arrays to narrower floats: some models cast by hand."""
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "convert_element_type":
            (source,), (target,) = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
            wide = _compat.is_float(source) and source.dtype.itemsize == 8
            if wide and source.shape and _compat.is_float(target) and target.dtype.itemsize < 8:
                return True
        if any(rounds(x) for x in jaxprs_of(eqn)):
            return True
    return False


def jaxprs_of(eqn: Any) -> list[Any]:
    return [x for p in eqn.params.values() for x in (p if isinstance(p, tuple) else (p,)) if _compat.is_jaxpr(x)]


def outcome(reference: Reference, strategy: str) -> Outcome:
    """Plans (`found`, or an expert's strategy by name), compiles and runs."""
    start = time.perf_counter()
    if strategy == "found":
        plan = make_plan(reference.program, reference.mesh, search=SEARCH)
    else:
        plan = priced(reference.program, reference.mesh, strategy, reference.analysis)
    planned = time.perf_counter()
    lowered = plan.lower_step(donate=False)
    compiled = lowered.lower().compile(compiler_options=FAST)
    verification = compare(plan, read_compiled(compiled, plan.mesh.build(jax.devices("cpu")[:8])), "cpu")
    seconds = time.perf_counter() - planned
    leaves = jax.tree.leaves((reference.training.state, reference.training.batch))
    flat = [jax.device_put(x, s) for x, s in zip(leaves, lowered.in_shardings, strict=True)]
    state, told = jax.device_get(jax.tree.unflatten(reference.program.out_tree, compiled(*flat)))
    expected_state, expected = reference.expected
    return Outcome(
        plan,
        planned - start,
        verification,
        seconds,
        tree_relative_error(told["loss"], expected["loss"]),
        tree_relative_error(told["grads"], expected["grads"]),
        max(tree_relative_error(state[part], expected_state[part]) for part in expected_state),
    )


def lost_splits(plan: Plan) -> dict[str, int]:
    """Where a split ends that could go on: bytes (unsplit, all trips) by primitive and source line.

    Operations that are no contraction and no reduction, whose operand computed from the batch is split over a mesh axis
    that the result, at least as large, is not.  What has a parameter's form is left out: ZeRO gathers on purpose.
    """
    analysis = plan.analysis
    classes = analysis.classes
    forms = analysis.forms.of
    lost: Counter[str] = Counter()
    for op in analysis.graph.ops:
        if op.flops or op.name.startswith(("reduce_", "arg", "scatter")) or classes.of_op[op.id] is None:
            continue

        def axes(value: Any) -> set[int]:
            return {a for dim in plan.priced.specs[classes.of_value[value.id]] for a in dim}

        split = {a for v in op.operands if v.depends & BATCH and v.placed and v.id not in forms for a in axes(v)}
        largest = max((v.bytes for v in op.operands), default=0)
        for value in op.results:
            if value.placed and value.bytes >= largest and not split <= axes(value):
                lost[f"{op.name} {op.source.split('site-packages/')[-1]}"] += value.bytes * op.trips
    return dict(lost.most_common())
