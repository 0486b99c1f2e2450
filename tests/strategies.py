"""Strategies that experts write by hand, on meshes of one to three axes, in the words of `spmd_auto.price`."""

from __future__ import annotations

import dataclasses

from spmd_auto.mesh import Cluster, LogicalMesh
from spmd_auto.plan import Plan, price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.trace import Program

MESHES = {"8": (8,), "2x4": (2, 4), "2x2x2": (2, 2, 2)}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Splits by logical axis, strongest first, and ZeRO."""

    splits: dict[str, tuple[str, ...]]
    zero: int = 0
    zero_axes: tuple[str, ...] = ()


def logical_mesh(cluster: Cluster, name: str) -> LogicalMesh:
    return cluster.mesh(**dict(zip("abc", MESHES[name], strict=False)))


def expert_strategies(mesh: LogicalMesh) -> dict[str, Strategy]:
    """By name; the first axis carries data, the others the model where there are any."""
    every = mesh.names
    data, model = every[:1], every[1:] or every
    splittable = {"heads": model, "mlp": model, "vocab": model}
    batch = {"batch": data} if len(every) > 1 else {}
    return {
        "data": Strategy({"batch": every}),
        "megatron": Strategy({**batch, **splittable}),
        "megatron+sequence": Strategy({**batch, **splittable, "sequence": model}),
        "zero1": Strategy({"batch": every}, 1, every),
        "zero2": Strategy({"batch": every}, 2, every),
        "zero3": Strategy({"batch": every}, 3, every),
        "hybrid-zero": Strategy({"batch": every}, 3, every[-1:]),
        "megatron+sequence+zero3": Strategy({**batch, **splittable, "sequence": model}, 3, data),
    }


def priced(program: Program, mesh: LogicalMesh, name: str, analysis: Analysis | None = None) -> Plan:
    """The plan of an expert's strategy; axes that the program does not have, or goes along in a loop, are left out."""
    strategy = expert_strategies(mesh)[name]
    analysis = analysis or analyse_for(program, mesh, {})
    here = {name for group, name in analysis.names.items() if group not in analysis.stacked}
    splits = {axis: to for axis, to in strategy.splits.items() if axis in here}
    return price_strategy(program, mesh, splits, zero=strategy.zero, zero_axes=strategy.zero_axes, analysis=analysis)
