"""What a plan does at one operation: which axis splits which of its dimensions, what is moved for it, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd_auto import _compat
from spmd_auto.cost.operation import OpForm
from spmd_auto.cost.report import Collective
from spmd_auto.mesh.collectives import Transfer
from spmd_auto.plan.plan import Plan
from spmd_auto.propagate.factors import Factor, Kind
from spmd_auto.propagate.graph import Op
from spmd_auto.tools.op_result import describe

_HOW = {
    Kind.PASS: "each device makes its piece of the result",
    Kind.REDUCE: "each device makes a partial sum, and the sums are combined",
    Kind.HALO: "each device gets the edges of its neighbours' pieces",
    Kind.MOVE: "blocks change places between devices",
}


def describe_operation(plan: Plan, op_class: int, ops: Sequence[Op]) -> dict[str, Any]:
    """The fields of an `OperationInfo` for operations of one class and one source line."""
    form, op = plan.priced.forms[op_class], ops[0]
    assert form is not None
    times = sum(o.trips for o in ops)
    classes, specs = plan.analysis.classes, plan.priced.specs
    cls = classes.ops[op_class]
    stored = [specs[c] for c in (*cls.operands, *cls.results)]
    variables = [v.aval for v in (*op.eqn.invars, *op.eqn.outvars)]
    names = [v.path or f"operand {k}" for k, v in enumerate(op.operands)]
    names += [f"result {k}" if len(op.results) > 1 else "result" for k in range(len(op.results))]
    arrays = [
        describe(plan.mesh, name, getattr(aval, "dtype", ""), value.shape, value.itemsize, spec)
        for name, aval, value, spec in zip(
            names, variables, (*op.operands, *op.results), (*form.targets, *form.raws), strict=True
        )
    ]
    return {
        "name": op.name,
        "source": op.source,
        "scope": _compat.name_stack(op.eqn),
        "times": times,
        "operands": tuple(arrays[: len(op.operands)]),
        "results": tuple(arrays[len(op.operands) :]),
        "stored": tuple(plan.mesh.partition_spec(spec) for spec in stored),
        "seconds": form.compute * times,
        "collectives": _collectives(plan, op_class, op, form, times),
        "why": tuple(_why(plan, op, form)),
    }


def _collectives(plan: Plan, op_class: int, op: Op, form: OpForm, times: int) -> tuple[Collective, ...]:
    pricer, structure = plan.pricer, plan.pricer.structure
    cls = plan.analysis.classes.ops[op_class]
    out: list[Collective] = []

    def add(transfers: Sequence[Transfer], where: str) -> None:
        for t in transfers:
            axes = tuple(plan.mesh.names[a] for a in t.axes)
            out.append(Collective(t.kind, axes, t.bytes * times, t.seconds * times, times, where, op.source))

    for k, (value, c, target) in enumerate(zip(op.operands, cls.operands, form.targets, strict=True)):
        if value.placed:
            latency = structure.latency[op_class][1][k]
            shared = structure.share_operands[op_class][k]
            where = f"operand {k}" + (f", moved once for {shared} operations" if shared > 1 else "")
            add(pricer.reshards.price(value.bytes, plan.priced.specs[c], target, latency).transfers, where)
    shared = structure.share_sum[op_class]
    together = f", at most once for {shared} operations that are added up" if shared > 1 else ""
    add(form.reductions, f"partial sums{together}")
    add(form.exchange, "between pieces")
    add(form.reshards, "result")
    return tuple(out)


def _why(plan: Plan, op: Op, form: OpForm) -> list[str]:
    lines = []
    for axis, index in zip(plan.mesh.names, form.choice, strict=True):
        if index is None:
            lines.append(f"{axis} splits nothing here: its devices do the same work")
            continue
        factor = op.rule[index]
        lines.append(f"{axis} splits {_axis(plan, op, factor)} of size {factor.size}: {_HOW[factor.kind]}")
    return lines


def _axis(plan: Plan, op: Op, factor: Factor) -> str:
    """The logical axis of a factor."""
    of = plan.analysis.axes.of
    places = [of[op.operands[k].id][d] for k, d in factor.operands] + [
        of[op.results[k].id][d] for k, d in factor.results
    ]
    named = [plan.analysis.names[group] for group in places if group in plan.analysis.names]
    return named[0] if named else "a dimension"
