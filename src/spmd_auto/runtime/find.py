"""Where a decorated step gets its plan from: an earlier run that kept it, or a search."""

from __future__ import annotations

from spmd_auto.plan import cache as kept
from spmd_auto.plan.make import MeshLike, Progress, candidate_meshes, devices_of, make_plan
from spmd_auto.plan.pins import Pins
from spmd_auto.plan.plan import Plan
from spmd_auto.plan.question import ask
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
    cache: bool = True,
) -> Plan:
    """The plan of a program.

    Args:
      cache: whether plans are kept for later runs, and looked for among those kept.
    """
    question = ask(program, candidate_meshes(mesh), pins, memory, search) if cache and kept.is_on() else None
    store = kept.PlanCache()
    if question is not None:
        found = store.get(question, program, pins=pins, memory=memory, devices=devices_of(mesh))
        if found is not None:
            return found
    plan = make_plan(program, mesh, pins=pins, memory=memory, search=search, progress=progress)
    if question is not None:
        store.put(question, plan)
    return plan
