"""Classes: values that always get the same spec, and operations that always get the same price.

The search prices classes, with summed trip counts, so its work does not grow with depth.
"""

from __future__ import annotations

import dataclasses

from spmd_auto.propagate.axes import Axes
from spmd_auto.propagate.forms import Form, ParameterForms
from spmd_auto.propagate.graph import Graph, Op
from spmd_auto.propagate.regions import Regions


@dataclasses.dataclass(frozen=True, slots=True)
class ValueClass:
    """What decides a value's spec.

    Attributes:
      shape: global shape.
      groups: axis group of each dimension.
      regions: region of each pair of dimensions (-1 for none).
      turned: for each pair, whether it stands the other way round than on its region's first value.
      form: (parameter group, form) or None.
      placed: whether values of the class get a spec at all.
      pin: index into the analysis' pins, or None.
    """

    shape: tuple[int, ...]
    groups: tuple[int, ...]
    regions: tuple[int, ...]
    turned: tuple[bool, ...]
    form: tuple[int, Form] | None
    placed: bool
    pin: int | None


@dataclasses.dataclass(slots=True, eq=False)
class OpClass:
    """Operations of one signature on values of the same classes; `trips` is summed over them."""

    op: Op
    operands: tuple[int, ...]
    results: tuple[int, ...]
    trips: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Classes:
    """Value classes and operation classes.

    Attributes:
      values: the value classes; `of_value[id]` is a value's class.
      ops: the operation classes; `of_op[id]` is an operation's class, None if nothing it makes is placed or used.
    """

    values: list[ValueClass]
    of_value: list[int]
    ops: list[OpClass]
    of_op: list[int | None]


def find_classes(graph: Graph, axes: Axes, regions: Regions, forms: ParameterForms, pins: dict[int, int]) -> Classes:
    """`pins` maps value ids to an index of a pinned spec."""
    value_ids: dict[ValueClass, int] = {}
    of_value = []
    for value in graph.values:
        key = ValueClass(
            value.shape,
            axes.of[value.id],
            regions.of[value.id],
            regions.turned[value.id],
            forms.of.get(value.id),
            value.placed,
            pins.get(value.id),
        )
        of_value.append(value_ids.setdefault(key, len(value_ids)))
    op_ids: dict[tuple[object, ...], int] = {}
    ops: list[OpClass] = []
    of_op: list[int | None] = []
    used = used_values(graph)
    for op in graph.ops:
        if not any(v.id in used for v in op.results):
            of_op.append(None)
            continue
        arrays = [*op.operands, *op.results]
        if not any(v.depends for v in op.results) or not any(v.shape for v in arrays):
            of_op.append(None)
            continue
        operands = tuple(of_value[v.id] for v in op.operands)
        results = tuple(of_value[v.id] for v in op.results)
        index = op_ids.setdefault((op.signature, operands, results), len(op_ids))
        if index == len(ops):
            ops.append(OpClass(op, operands, results))
        ops[index].trips += op.trips
        of_op.append(index)
    return Classes(list(value_ids), of_value, ops, of_op)


def used_values(graph: Graph) -> set[int]:
    """Values that a result depends on; XLA drops the rest (the loss of a step that returns only its gradients)."""
    used = {v.id for v in (*graph.results, *graph.roots)}
    while True:
        before = len(used)
        for op in reversed(graph.ops):
            if any(v.id in used for v in op.results):
                used.update(v.id for v in op.operands)
        if len(used) == before:  # carries of loops need another pass
            return used
