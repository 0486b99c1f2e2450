"""All that is known of a program before any mesh: the one data type that leaves this room."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from spmd_auto.propagate.axes import Axes, find_axes
from spmd_auto.propagate.classes import Classes, find_classes
from spmd_auto.propagate.forms import ParameterForms, find_forms
from spmd_auto.propagate.graph import Graph, Site, build_graph
from spmd_auto.propagate.names import name_axes
from spmd_auto.propagate.regions import Regions, find_regions
from spmd_auto.trace import Program


@dataclasses.dataclass(slots=True, eq=False)
class Analysis:
    """A program with its factors, logical axes, regions, parameter forms and classes.

    Attributes:
      names: name of an axis group; unnamed ones are internal and never assigned.
      stacked: axis groups that scans iterate over; splitting them would gather the stack.
      seconds: what the analysis took.
    """

    program: Program
    graph: Graph
    axes: Axes
    regions: Regions
    forms: ParameterForms
    classes: Classes
    names: dict[int, str]
    stacked: frozenset[int]
    seconds: float

    def group(self, name: str) -> int | None:
        """The axis group of a name."""
        return next((g for g, n in self.names.items() if n == name), None)


# What a pin is on: ("argument", index), ("result", index), or ("inside", site of a `with_sharding_constraint`).
PinKey = tuple[str, "int | Site"]


def analyse(program: Program, pins: Mapping[PinKey, int] | None = None, *, widen: bool = False) -> Analysis:
    """Analyses a traced program.

    Args:
      program: the traced step.
      pins: what is pinned -> index of its spec; a pinned argument's successor is pinned with it.
      widen: count 2-byte floats as four bytes (CPUs; see `build_graph`).
    """
    start = time.perf_counter()
    graph = build_graph(program, widen)
    axes = find_axes(graph)
    regions = find_regions(graph, axes)
    forms = find_forms(program, graph, axes)
    pinned_values = _pinned_values(program, graph, pins or {})
    classes = find_classes(graph, axes, regions, forms, pinned_values)
    stacked = frozenset(
        axes.of[value.id][0]
        for op in graph.ops
        if op.name in ("xs", "ys")
        for value in (op.operands if op.name == "xs" else op.results)
        if value.shape
    )
    names = name_axes(program, graph, axes)
    return Analysis(program, graph, axes, regions, forms, classes, names, stacked, time.perf_counter() - start)


def _pinned_values(program: Program, graph: Graph, pins: Mapping[PinKey, int]) -> dict[int, int]:
    """Value id -> index of its pinned spec. Each result that can be pinned otherwise than its value is one of its own
    (`_Builder.returned`), so no pin takes another's place."""
    pinned: dict[int, int] = {}
    inside = {op.site: op.results[0].id for op in graph.ops if op.name == "sharding_constraint"}
    for (side, where), pin in pins.items():
        if side == "inside" and where in inside:
            pinned[inside[where]] = pin
        elif side == "result" and isinstance(where, int):
            pinned[graph.results[where].id] = pin
        elif side == "argument" and isinstance(where, int):
            pinned[graph.arguments[where].id] = pin
            for result, replaced in zip(graph.results, program.replaces, strict=True):
                if replaced == where:
                    pinned[result.id] = pin
    return pinned
