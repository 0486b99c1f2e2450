"""Plans as JSON files: data, never code. Loading checks the format, the program's leaves and its fingerprint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from spmd_auto.cost.pricer import Pricer
from spmd_auto.errors import PlanFileError
from spmd_auto.mesh import Chip, Link, LogicalMesh
from spmd_auto.mesh.logical import Part
from spmd_auto.plan.make import analyse_for, budget_for
from spmd_auto.plan.pins import Pins, resolve_pins, result_path
from spmd_auto.plan.plan import Plan, SearchRecord
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.propagate.forms import Form
from spmd_auto.trace import Program, trace

FORMAT = "spmd_auto plan"
VERSION = 2


def plan_to_json(plan: Plan) -> dict[str, Any]:
    mesh, names, assignment = plan.mesh, plan.analysis.names, plan.priced.assignment
    default = plan.pricer.price(assignment)
    report = plan.report
    return {
        "format": FORMAT,
        "version": VERSION,
        "jax": jax.__version__,
        "program": plan.program.name,
        "fingerprint": plan.fingerprint,
        "mesh": {
            "names": list(mesh.names),
            "sizes": list(mesh.sizes),
            "links": [dataclasses.asdict(link) for link in mesh.links],
            "parts": [
                [{"size": p.size, "link": dataclasses.asdict(p.link), "tier": p.tier} for p in parts]
                for parts in mesh.parts
            ],
            "chip": dataclasses.asdict(mesh.chip),
        },
        "assignment": [{"axis": names.get(g, ""), "group": g, "mesh_axis": mesh.names[a]} for g, a in assignment.order],
        "flips": [[region, mesh.names[a]] for region, a in sorted(assignment.flips)],
        "forms": [
            {"group": group, "form": form.name, "splits": [[g, mesh.names[a]] for g, a in splits]}
            for (group, form), splits in assignment.forms
        ],
        # operations whose form was switched by joint refinement: class -> factor of each mesh axis
        "choices": [
            [i, list(form.choice)]
            for i, (form, other) in enumerate(zip(plan.priced.forms, default.forms, strict=True))
            if form is not None and other is not None and form.choice != other.choice
        ],
        "pins": _pins_to_json(plan),
        "leaves": [
            {"path": leaf.path, "shape": list(leaf.shape), "dtype": str(leaf.dtype), "spec": _spec_to_json(mesh, spec)}
            for leaf, spec in zip(plan.program.arguments, plan.placements.arguments, strict=True)
        ],
        "price": {
            "seconds": report.seconds,
            "compute": report.compute,
            "fused": report.fused,
            "communication": report.communication,
            "hidden": report.hidden,
            "slowed": report.slowed,
            "bytes_moved": report.bytes_moved,
            "memory": dataclasses.asdict(report.memory),
        },
        "search": {k: v for k, v in dataclasses.asdict(plan.search).items() if k != "origin"},
    }


def _pins_to_json(plan: Plan) -> dict[str, list[list[str] | None]]:
    """Pins by path. Those inside the step are part of the program, and are found in it again."""
    program, out = plan.program, {}
    for (side, where), pin in plan.pinned.items():
        if side == "argument" and isinstance(where, int):
            out[program.arguments[where].path] = _spec_to_json(plan.mesh, pin.spec)
        elif side == "result" and isinstance(where, int):
            out[result_path(program.results[where])] = _spec_to_json(plan.mesh, pin.spec)
    return out


def _spec_to_json(mesh: LogicalMesh, spec: Any) -> list[list[str] | None]:
    return [None if axes is None else [mesh.names[a] for a in axes] for axes in spec]  # None: left free by a pin


def save_plan(plan: Plan, path: str) -> None:
    text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise PlanFileError(f"the plan can't be written to {path}: {error}") from error


def load_plan(path: str, step: Any, /, *args: Any, **kwargs: Any) -> Plan:
    """Reads a plan file and applies it to a step.

    Args:
      step: the function, or a `Program` traced from it.

    Raises:
      PlanFileError: not a plan, another version, or made for another program (names the first leaf that differs).
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{path} can't be read as a plan: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanFileError(f"{path} is not a plan of spmd_auto", "its `format` field is missing or another one")
    return plan_from_json(data, step if isinstance(step, Program) else trace(step, *args, **kwargs), path)


def plan_from_json(
    data: dict[str, Any],
    program: Program,
    path: str,
    *,
    pins: Pins | None = None,
    memory: float | None = float("inf"),
    devices: Sequence[Any] | None = None,
    origin: str = "",
) -> Plan:
    """Applies what `plan_to_json` gave to a program.

    Args:
      path: what messages call the plan.
      pins: what the user pinned, in the user's words (default: the leaves' specs that the plan itself has).
      memory: bytes per device that the plan may need, as for `make_plan`; it is not refused for needing more.
      devices: of the jax Mesh that the user gave, in its order.
      origin: one of `ORIGINS`.

    Raises:
      PlanFileError: see `load_plan`.
    """
    if data.get("version") != VERSION:
        raise PlanFileError(
            f"{path} has version {data.get('version')}", f"this package reads version {VERSION}", ["plan again"]
        )
    try:
        _check_program(path, data, program)
        plan = _apply(data, program, pins, memory)
        plan.search = dataclasses.replace(plan.search, origin=origin)
        plan.devices = devices
        _check_outcome(path, data, plan)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, StopIteration) as error:
        raise PlanFileError(
            f"{path} is damaged: {type(error).__name__}: {error}",
            "a field is missing or has another form",
            ["plan again"],
        ) from error
    return plan


def _check_outcome(path: str, data: dict[str, Any], plan: Plan) -> None:
    """A plan that says one thing and does another: edited by hand, or made by another version of the rules."""
    for entry, leaf, spec in zip(data["leaves"], plan.program.arguments, plan.placements.arguments, strict=True):
        if entry["spec"] != _spec_to_json(plan.mesh, spec):
            raise PlanFileError(
                f"{path} is damaged: its strategy gives leaf {leaf.path!r} the spec {plan.mesh.partition_spec(spec)}",
                f"the file says {entry['spec']}: it was edited, or another version of spmd_auto made it",
                ["plan again"],
            )


def _check_program(path: str, data: dict[str, Any], program: Program) -> None:
    saved = {leaf["path"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in data["leaves"]}
    here = {leaf.path: (leaf.shape, str(leaf.dtype)) for leaf in program.arguments}
    for leaf_path in [*saved, *here]:
        if saved.get(leaf_path) != here.get(leaf_path):

            def show(entry: tuple[Any, Any] | None) -> str:
                return "absent" if entry is None else f"{entry[1]}{list(entry[0])}"

            raise PlanFileError(
                f"{path} was made for another program: leaf {leaf_path!r} differs",
                f"in the plan it is {show(saved.get(leaf_path))}, here {show(here.get(leaf_path))}",
                ["plan again for this model", "load it with the model and batch it was made for"],
            )
    if data["fingerprint"] != program.fingerprint:
        other_jax = f" (the plan was made with jax {data['jax']})" if data["jax"] != jax.__version__ else ""
        raise PlanFileError(
            f"{path} was made for another version of {data['program']!r}: the operations differ{other_jax}",
            "all leaves agree, but the traced program's fingerprint does not",
            ["plan again", "spmd_auto.price the same assignment on the new program"],
        )


def _pin_from_json(spec: list[list[str] | None]) -> jax.sharding.PartitionSpec:
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    return jax.sharding.PartitionSpec(*[free if axes is None else tuple(axes) or None for axes in spec])


def _apply(data: dict[str, Any], program: Program, pins: Pins | None, memory: float | None) -> Plan:
    m = data["mesh"]
    chip = dict(m["chip"])
    chip["flops"] = tuple((int(size), float(rate)) for size, rate in chip["flops"])
    mesh = LogicalMesh(
        tuple(m["names"]),
        tuple(m["sizes"]),
        tuple(Link(**link) for link in m["links"]),
        Chip(**chip),
        tuple(tuple(Part(p["size"], Link(**p["link"]), p["tier"]) for p in parts) for parts in m["parts"]),
    )
    axis = mesh.names.index
    if pins is None:
        pins = {path: _pin_from_json(spec) for path, spec in data["pins"].items()}
    pinned = resolve_pins(program, mesh, pins)
    analysis = analyse_for(program, mesh, pinned)
    assignment = Assignment(
        tuple((entry["group"], axis(entry["mesh_axis"])) for entry in data["assignment"]),
        frozenset((region, axis(name)) for region, name in data["flips"]),
        tuple(
            ((entry["group"], Form[entry["form"]]), tuple((g, axis(name)) for g, name in entry["splits"]))
            for entry in data["forms"]
        ),
    )
    pricer = Pricer(analysis, mesh, budget_for(mesh, memory), [pin.spec for pin in pinned.values()])
    priced = pricer.price(assignment)
    if len(data["choices"]):
        forms = list(priced.forms)
        for index, choice in data["choices"]:
            wanted = tuple(choice)
            forms[index] = next(form for form in pricer.forms(index, priced.specs) if form.choice == wanted)
        priced = pricer.assemble(assignment, priced.specs, forms)
    return Plan(pricer, priced, SearchRecord(**data["search"]), pinned=pinned)
