"""One operation under a strategy: what each device holds, its price, what XLA makes of it, and whether it is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from spmd_auto import _compat
from spmd_auto.cost.operation import OpForm
from spmd_auto.cost.pricer import Pricer
from spmd_auto.errors import MeshError
from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.plan.make import analyse_for, candidate_meshes, price_strategy
from spmd_auto.plan.pins import resolve_pins, result_path
from spmd_auto.plan.plan import Plan
from spmd_auto.propagate.assignment import Assignment, Spec
from spmd_auto.propagate.axes import find_axes
from spmd_auto.propagate.graph import build_graph
from spmd_auto.tools.op_result import OpArray, OpResult, describe
from spmd_auto.tools.op_specs import read_specs, written_operands, written_results
from spmd_auto.trace import Leaf, trace
from spmd_auto.verify.check import compare
from spmd_auto.verify.hlo import read_compiled
from spmd_auto.verify.parity import assert_tree_close, tree_relative_error


def run_op(
    fn: Callable[..., Any],
    *args: Any,
    mesh: LogicalMesh | jax.sharding.Mesh,
    in_specs: Any,
    out_specs: Any = None,
    tolerance: float | None = None,
    strict: bool = True,
) -> OpResult:
    """Runs one operation, or a small function, under a strategy written by hand, and checks it against one device.

    Args:
      fn: a function of arrays (use `functools.partial` for what is no array).
      args: arrays; or `ShapeDtypeStruct`s: then nothing is run, and it is compiled only if the devices are here.
      mesh: its axes are what specs speak of; `spmd_auto.cluster(...).mesh(data=2, model=4)` needs no devices.
      in_specs: one entry per argument: a PartitionSpec, split counts as MindSpore writes them (`((2, 1), (1, 4))`), or
        None for whatever follows from the others.  An argument of several leaves takes one for all, or a tree.  Each
        operation takes its operands as they lie; only where it can't, what is cheapest is moved before.
      out_specs: the same for the leaves of the result; None: what the operation makes of its operands.
      tolerance: largest relative error (default: by the coarsest float type, 50 units of rounding).
      strict: raise where the results differ from one device's; else `OpResult.equal` tells.

    Raises:
      StrategyError: a wrong number of specs, one longer than its array's rank, an unknown mesh axis or one used twice,
        an indivisible dimension, or split counts that the mesh can't make.
      MeshError: a mesh without named axes, or arrays to run on devices that are not here.
      VerifyError: the results differ from one device's.
    """
    if not isinstance(mesh, (LogicalMesh, jax.sharding.Mesh)):
        raise MeshError(
            f"mesh is a {type(mesh).__name__}",
            "specs name the axes of a mesh",
            ["jax.make_mesh((2, 4), ('data', 'model'))", 'spmd_auto.cluster("h100").mesh(data=2, model=4)'],
        )
    plan = _plan(fn, args, mesh, in_specs, out_specs)
    program, placements = plan.program, plan.placements
    flat = jax.tree_util.tree_leaves(args)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in flat)
    jax_mesh = _devices_here(plan, mesh, needed=not abstract)
    verification = outputs = error = None
    allowed = _tolerance(program.arguments + program.results) if tolerance is None else tolerance
    if jax_mesh is not None:
        lowered = plan.lower_step(jax_mesh, donate=False)
        compiled = lowered.compile()
        verification = compare(plan, read_compiled(compiled, jax_mesh), jax_mesh.devices.flat[0].platform)
        if not abstract:
            placed = [
                jax.device_put(_array(x, aval), sharding)
                for x, aval, sharding in zip(flat, lowered.abstract, lowered.in_shardings, strict=True)
            ]
            outputs = jax.tree_util.tree_unflatten(program.out_tree, compiled(*placed))
            alone = jax.jit(fn)(*jax.device_put(args, jax_mesh.devices.flat[0]))
            error = tree_relative_error(outputs, alone)
            if strict:
                assert_tree_close(
                    outputs, alone, allowed, f"{program.name} on {plan.mesh.describe()} and on one device"
                )
    operands, results = (
        tuple(_describe(plan.mesh, leaf, spec) for leaf, spec in zip(leaves, specs, strict=True))
        for leaves, specs in ((program.arguments, placements.arguments), (program.results, placements.results))
    )
    return OpResult(operands, results, plan, verification, outputs, error, allowed)


def _plan(fn: Callable[..., Any], args: tuple[Any, ...], mesh: Any, in_specs: Any, out_specs: Any) -> Plan:
    """The strategy: what is written is pinned, and logical axes split as on the operands through the whole function."""
    logical = candidate_meshes(mesh)[0]
    program = trace(fn, *args)
    # a result that looks like the next state of an argument is a result like any other here
    program = dataclasses.replace(program, replaces=(None,) * len(program.results))
    graph = build_graph(program)
    of = find_axes(graph).of
    operands = written_operands(program, in_specs, [of[v.id] for v in graph.arguments])
    results = written_results(program, out_specs, [of[v.id] for v in graph.results])
    specs = read_specs(logical, operands, results)
    paths = [leaf.path for leaf in program.arguments] + [result_path(leaf) for leaf in program.results]
    pins = {path: spec for path, spec in zip(paths, specs, strict=True) if spec is not None}
    pinned = resolve_pins(program, logical, pins)
    analysis = analyse_for(program, logical, pinned)
    order: dict[tuple[int, int], None] = {}
    for one, spec in zip((*operands, *results), specs, strict=True):
        free = PartitionSpec.UNCONSTRAINED
        entries = [None if e is free else e for e in spec or ()]
        for group, axes in zip(one.labels, logical.spec(entries, len(one.labels)), strict=True):
            if group not in analysis.stacked:
                order.update(dict.fromkeys((group, axis) for axis in axes))
    plan = price_strategy(program, mesh, Assignment(tuple(order)), analysis=analysis, pins=pins)
    pricer, priced = plan.pricer, plan.priced
    forms = list(priced.forms)
    for i in pricer.structure.active:
        forms[i] = _as_they_lie(pricer, i, priced.specs) or forms[i]
    return Plan(pricer, pricer.assemble(priced.assignment, priced.specs, forms), plan.search, plan.devices, pinned)


def _as_they_lie(pricer: Pricer, op_class: int, specs: Sequence[Spec]) -> OpForm | None:
    """The cheapest form that takes all operands as they lie; None if there is none. The planner would also gather them.

    (A small operand is often gathered faster than the result is summed up; but then it would be another strategy.)
    """
    cls = pricer.analysis.classes.ops[op_class]
    for form in pricer.forms(op_class, specs):
        moved = (
            pricer.reshards.price(v.bytes, specs[c], target).transfers
            for v, c, target in zip(cls.op.operands, cls.operands, form.targets, strict=True)
            if v.placed
        )
        if not any(moved):
            return form
    return None


def _devices_here(plan: Plan, mesh: Any, needed: bool) -> jax.sharding.Mesh | None:
    """The jax mesh to run on; None if its devices are not here and are not needed."""
    if isinstance(mesh, jax.sharding.Mesh):
        try:
            present = set(jax.devices(mesh.devices.flat[0].platform))
        except RuntimeError:
            present = set()
        if set(mesh.devices.flat) <= present:
            return plan.mesh.build(plan.devices)
        if needed:
            raise MeshError(
                f"the devices of the mesh {plan.mesh.describe()} are not here",
                "arrays can't be put on devices that are only compiled for",
                ["pass ShapeDtypeStructs: nothing is run then"],
            )
        return None
    if not needed and len(jax.devices()) < plan.mesh.device_count:
        return None
    return plan.mesh.build()


def _array(x: Any, aval: jax.ShapeDtypeStruct) -> Any:
    return x if isinstance(x, jax.Array) else np.asarray(x, aval.dtype)


def _describe(mesh: LogicalMesh, leaf: Leaf, spec: Spec) -> OpArray:
    return describe(mesh, leaf.path or "result", leaf.dtype, leaf.shape, leaf.itemsize, spec)


def _tolerance(leaves: Sequence[Leaf]) -> float:
    """50 units of rounding of the coarsest float type; 4 of one with two bytes, which are coarse already."""
    inexact = jax.numpy.inexact
    floats = [x.dtype for x in leaves if not _compat.is_extended(x.dtype) and jax.numpy.issubdtype(x.dtype, inexact)]
    units = [float(jax.numpy.finfo(d).eps) * (4 if np.dtype(d).itemsize < 4 else 50) for d in floats]
    return max(units, default=0.0)
