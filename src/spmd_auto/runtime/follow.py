"""Further plans that follow a first one: its state stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmd_auto.plan.plan import Plan
from spmd_auto.trace import Leaf, Program, Role


def frozen_pins(first: Plan, program: Program) -> dict[str, Any]:
    """Pins that make a further plan follow the first one's state: leaves of the same path and shape.

    Paths are compared without the argument's name, and as a part of the state: `state/params/w` of the first is
    `params/w`, or the leaf `w` of an argument that holds parameters, of the second.
    """
    state = [
        (leaf, spec)
        for leaf, spec in zip(first.program.arguments, first.specs.values(), strict=True)
        if leaf.role in (Role.PARAMETER, Role.OPTIMIZER)
    ]
    by_tail = {_tail(leaf.path): (leaf, spec) for leaf, spec in state}
    parts: dict[str, list[tuple[Leaf, Any]]] = {}
    for leaf, spec in state:
        names = leaf.path.split("/")
        for k in range(2, len(names)) if leaf.role is Role.PARAMETER else ():
            parts.setdefault("/".join(names[k:]), []).append((leaf, spec))
    pins = {}
    for leaf in program.arguments:
        tail = _tail(leaf.path)
        part = parts.get(tail, []) if leaf.role is Role.PARAMETER or "/" in tail else []
        known = by_tail.get(tail) or by_tail.get(leaf.path) or (part[0] if len(part) == 1 else None)
        if known is not None and known[0].shape == leaf.shape and leaf.shape:
            pins[leaf.path] = known[1]
    return pins


def _tail(path: str) -> str:
    return path.split("/", 1)[-1]


def no_longer_split(first: Plan, plan: Plan) -> Iterator[tuple[Leaf, int, int]]:
    """Batch leaves of another size than in the first plan, with (dimension, parts) that it can't be split into."""
    before = {
        leaf.path: (leaf, spec) for leaf, spec in zip(first.program.arguments, first.placements.arguments, strict=True)
    }
    for leaf in plan.program.arguments:
        known, spec = before.get(leaf.path, (None, ()))
        if (
            known is None
            or leaf.role is not Role.BATCH
            or known.shape == leaf.shape
            or len(known.shape) != len(leaf.shape)
        ):
            continue
        for dim, axes in enumerate(spec):
            parts = 1
            for axis in axes:
                parts *= first.mesh.sizes[axis]
            if leaf.shape[dim] % parts:
                yield leaf, dim, parts
