"""Where a decorated step gets its plan from: an earlier run that kept it, another process, or a search."""

from __future__ import annotations

from typing import Any

from spmd_auto.plan import cache as kept
from spmd_auto.plan.file import plan_from_json
from spmd_auto.plan.make import MeshLike, Progress, candidate_meshes, devices_of, make_plan
from spmd_auto.plan.pins import Pins
from spmd_auto.plan.plan import Plan
from spmd_auto.plan.question import Question, ask
from spmd_auto.runtime.group import Group
from spmd_auto.runtime.processes import compare, failing_together, plan_together
from spmd_auto.search.beam import SearchOptions
from spmd_auto.trace import Program
from spmd_auto.verify.rank import Verified


def find_plan(
    program: Program,
    mesh: MeshLike,
    *,
    pins: Pins,
    memory: float | None = None,
    search: SearchOptions | None = None,
    progress: Progress | None = None,
    cache: bool = True,
    verify: Verified = False,
    group: Group | None = None,
) -> Plan:
    """The plan of a program.

    Args:
      verify: whether, and where, the best few plans are compiled; see `spmd_auto.plan`.
      cache: whether plans are kept for later runs, and looked for among those kept.
      group: the processes that plan it together.
    """
    devices = devices_of(mesh)

    def search_it() -> Plan:
        return make_plan(program, mesh, pins=pins, memory=memory, search=search, progress=progress, verify=verify)

    def keep_it(question: Question) -> Plan:
        store = kept.PlanCache()
        found = store.get(question, program, pins=pins, memory=memory, devices=devices)
        if found is None:
            found = search_it()
            store.put(question, found)
        return found

    def apply_it(data: dict[str, Any]) -> Plan:
        return plan_from_json(
            data, program, "the plan sent", pins=pins, memory=memory, devices=devices, origin="process 0"
        )

    keeps = cache and kept.is_on()
    if not keeps and group is None:
        return search_it()
    with failing_together(group, f"to prepare the plan of {program.name}"):
        question = ask(program, candidate_meshes(mesh), pins, memory, search, verify)
    if group is None:
        return keep_it(question)
    compare(group, question, program, devices)
    return plan_together(group, program.name, lambda: keep_it(question) if keeps else search_it(), apply_it)
