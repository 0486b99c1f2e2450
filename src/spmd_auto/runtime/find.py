"""Where a decorated step gets its plan from."""

from __future__ import annotations

from spmd_auto.plan.make import MeshLike, Progress, make_plan
from spmd_auto.plan.pins import Pins
from spmd_auto.plan.plan import Plan
from spmd_auto.search.beam import SearchOptions
from spmd_auto.trace import Program


def find_plan(
    program: Program,
    mesh: MeshLike,
    *,
    pins: Pins,
    memory: float | None = None,
    search: SearchOptions | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of a program."""
    return make_plan(program, mesh, pins=pins, memory=memory, search=search, progress=progress)
