"""Model families under data, tensor, ZeRO-3, mixed and found plans: loss, gradients, statistics of one device, in x64.

Here each family meets two strategies, and each strategy several families; all pairs are in benchmarks/families.py.
"""

from __future__ import annotations

import functools

import jax
import pytest

from spmd_auto.mesh import LogicalMesh
from spmd_auto.plan import Plan, price_strategy
from spmd_auto.plan.make import analyse_for, make_plan
from spmd_auto.search import SearchOptions
from spmd_auto.search.strategies import resolve_mesh_axis
from spmd_auto.trace import Program, trace
from spmd_auto.verify import tree_relative_error
from tests.known_answers.toy import toy_mesh
from tests.models.families import FAMILIES

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MESHES = {"8": toy_mesh(8), "2x4": toy_mesh(2, 4)}
STRATEGIES = ("data", "tensor", "zero3", "mixed", "found")
MODEL_AXES = ("channels", "mlp", "heads", "vocab", "height", "hidden")


@functools.cache
def built(family: str):
    with jax.enable_x64(True):
        step, state, batch = FAMILIES[family]()
        return trace(step, state, batch), (state, batch), jax.device_get(jax.jit(step)(state, batch))


def planned(program: Program, mesh: LogicalMesh, strategy: str) -> Plan:
    if strategy == "found":
        return make_plan(program, mesh, search=SearchOptions(states=800))
    analysis = analyse_for(program, mesh, {})
    n = mesh.sizes[resolve_mesh_axis(mesh, mesh.names[-1])]
    able = [
        name
        for group, name in sorted(analysis.names.items())
        if name.split("_")[0] in MODEL_AXES and analysis.axes.size[group] % n == 0 and group not in analysis.stacked
    ]
    tensor = dict.fromkeys(able, mesh.names[-1])
    data = {"batch": mesh.names if strategy != "mixed" or len(mesh.names) == 1 else mesh.names[:1]}
    if strategy == "data":
        return price_strategy(program, mesh, data, analysis=analysis)
    if strategy == "tensor":
        assert tensor
        return price_strategy(program, mesh, tensor, analysis=analysis)
    if strategy == "zero3":
        return price_strategy(program, mesh, data, zero=3, zero_axes=mesh.names, analysis=analysis)
    return price_strategy(program, mesh, tensor | data, zero=3, zero_axes=mesh.names[:1], analysis=analysis)


PAIRS = [(family, strategy) for family in FAMILIES for strategy in STRATEGIES]


def mesh_of(family: str, strategy: str) -> str:
    """Strategies meet both meshes over the families, and families over the strategies."""
    return ["8", "2x4"][(list(FAMILIES).index(family) + STRATEGIES.index(strategy)) % 2]


ROWS = [
    pytest.param(family, strategy, id=f"{family}-{strategy}", marks=[pytest.mark.slow] if i % 3 else [])
    for i, family in enumerate(FAMILIES)
    for strategy in (STRATEGIES[i % 5], STRATEGIES[(i + 2) % 5])
]


@pytest.mark.parametrize(("family", "strategy"), ROWS)
def test_family(family, strategy, devices):
    error = worst_error(family, strategy)
    assert error < 1e-9, error


def worst_error(family: str, strategy: str) -> float:
    """The largest relative error of loss, gradients and statistics."""
    program, arguments, want = built(family)
    with jax.enable_x64(True):
        plan = planned(program, MESHES[mesh_of(family, strategy)], strategy)
        assert any(any(spec) for spec in plan.placements.arguments), "nothing is split: the test would show nothing"
        assert not plan.analysis.graph.unknown
        lowered = plan.lower_step(donate=False)
        flat = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(arguments), lowered.in_shardings, strict=True)]
        outs = lowered.lower().compile(compiler_options=FAST)(*flat)
        state, (loss, grads) = jax.device_get(jax.tree.unflatten(program.out_tree, outs))
        errors = [abs(float(loss) - float(want[1][0])) / abs(float(want[1][0])), tree_relative_error(grads, want[1][1])]
        if want[0]["statistics"]:
            errors.append(tree_relative_error(state["statistics"], want[0]["statistics"]))
        return max(errors)
