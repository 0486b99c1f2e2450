"""What a plan does to one argument leaf: its forms, what is moved for it, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from spmd_auto.cost.report import Collective
from spmd_auto.mesh.collectives import Transfer
from spmd_auto.plan.explain import explain_leaf
from spmd_auto.plan.plan import Plan
from spmd_auto.propagate.forms import Form
from spmd_auto.tools.op_result import describe

_READ = {Form.STORED: "where it is read", Form.GRADIENT: "of its gradient", Form.OPTIMIZER: "in the optimizer"}
_MADE = {Form.STORED: "of the new value", Form.GRADIENT: "of its gradient", Form.OPTIMIZER: "in the optimizer"}


def describe_leaf(plan: Plan, index: int) -> dict[str, Any]:
    """The fields of a `LeafInfo` for the argument leaf of an index."""
    analysis = plan.analysis
    leaf, value = plan.program.arguments[index], analysis.graph.arguments[index]
    array = describe(plan.mesh, leaf.path, leaf.dtype, leaf.shape, leaf.itemsize, plan.placements.arguments[index])
    form = analysis.forms.of.get(value.id)
    if form is None:
        cls = analysis.classes.of_value[value.id]
        alike = tuple(
            other.path
            for other, v in zip(plan.program.arguments, analysis.graph.arguments, strict=True)
            if analysis.classes.of_value[v.id] == cls
        )
        forms, zero, collectives = {}, 0, _of_class(plan, cls)
    else:
        alike = tuple(analysis.forms.paths[form[0]])
        forms, zero = _forms(plan, form[0], leaf.shape)
        collectives = _of_group(plan, form[0])
    return {
        "array": array,
        "role": leaf.role.value if leaf.role is not None else "",
        "forms": forms,
        "zero": zero,
        "alike": alike,
        "collectives": collectives,
        "why": tuple(line.strip() for line in explain_leaf(plan, leaf.path).splitlines()[2:]),
    }


def _forms(plan: Plan, group: int, shape: tuple[int, ...]) -> tuple[dict[str, PartitionSpec], int]:
    """Spec of each form of a parameter (that of the first value of its shape), and the ZeRO stage."""
    analysis, assignment = plan.analysis, plan.priced.assignment
    given = set(assignment.order)
    splits = dict(assignment.forms)
    out: dict[str, PartitionSpec] = {}
    stage = 0
    for value in analysis.graph.values:
        found = analysis.forms.of.get(value.id)
        if found is None or found[0] != group or value.shape != shape or found[1].name.lower() in out:
            continue
        spec = plan.priced.specs[analysis.classes.of_value[value.id]]
        out[found[1].name.lower()] = plan.mesh.partition_spec(spec)
        wanted = set(splits.get(found, ()))
        here = {(g, a) for g, axes in zip(analysis.axes.of[value.id], spec, strict=True) for a in axes}
        if here & wanted - given:
            stage = max(stage, found[1].value + 1)
    return {form: out[form] for form in ("stored", "gradient", "optimizer") if form in out}, stage


def _of_group(plan: Plan, group: int) -> tuple[Collective, ...]:
    """All that is moved for the parameters of a group: gathers where they are read, their gradients, their update."""
    pricer, priced = plan.pricer, plan.priced
    structure, classes = pricer.structure, plan.analysis.classes

    def form_of(value_class: int) -> Form | None:
        found = classes.values[value_class].form
        return found[1] if found is not None and found[0] == group else None

    out: list[Collective] = []
    for i, edge in enumerate(structure.edges):
        form = form_of(edge.value)
        if form is not None:
            op = classes.ops[edge.consumers[0][0]].op
            moved = pricer.edge_transfers(i, priced.specs, priced.forms)
            out += _named(plan, moved, edge.trips, _READ[form], op.source)
    for i in structure.active:
        cls, chosen = classes.ops[i], priced.forms[i]
        form = next((f for c in cls.results if (f := form_of(c)) is not None), None)
        if form is None or chosen is None:
            continue
        alone = structure.alone.get(i, cls.trips if structure.share_sum[i] == 1 else 0)
        out += _named(plan, chosen.reductions, alone, _MADE[form], cls.op.source)
        out += _named(plan, (*chosen.reshards, *chosen.exchange), cls.trips, _MADE[form], cls.op.source)
    for i, total in enumerate(structure.sums):
        cls = classes.ops[total.leaves[0][0]]
        form = next((f for c in cls.results if (f := form_of(c)) is not None), None)
        if form is not None:
            out += _named(plan, pricer.sum_group(i, priced.forms)[1], total.trips, _MADE[form], cls.op.source)
    return tuple(sorted(out, key=lambda c: -c.bytes))


def _of_class(plan: Plan, value_class: int) -> tuple[Collective, ...]:
    out: list[Collective] = []
    for i in plan.pricer.structure.edges_of_value.get(value_class, ()):
        edge = plan.pricer.structure.edges[i]
        op = plan.analysis.classes.ops[edge.consumers[0][0]].op
        moved = plan.pricer.edge_transfers(i, plan.priced.specs, plan.priced.forms)
        out += _named(plan, moved, edge.trips, "where it is read", op.source)
    return tuple(out)


def _named(plan: Plan, transfers: Iterable[Transfer], trips: int, where: str, source: str) -> list[Collective]:
    names = plan.mesh.names
    return [
        Collective(t.kind, tuple(names[a] for a in t.axes), t.bytes * trips, t.seconds * trips, trips, where, source)
        for t in transfers
        if trips
    ]
