"""The plan: the one artefact. Specs, mesh, prices, and how to lower it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.cost.report import PriceReport, make_report
from spmd_auto.lower import LoweredStep, Placements, lower_step, place
from spmd_auto.mesh.logical import LogicalMesh
from spmd_auto.plan.pins import Pinned
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.trace import Leaf, Program

if TYPE_CHECKING:
    from spmd_auto.plan.compare import PlanComparison
    from spmd_auto.plan.why_not import WhyNot
    from spmd_auto.tools.info import ParallelInfo


# Where a plan came from that this process did not search for, in words.
ORIGINS = {"cache": "an earlier run found it, and kept it", "process 0": "process 0 found it for all"}


@dataclasses.dataclass(frozen=True, slots=True)
class SearchRecord:
    """How a plan was found: states priced, seconds, and why the search ended early ("" if it did not).

    Attributes:
      verified: what compiling the best few found, in words ("": none was compiled).
      origin: "" if it was found here or read from a plan file, else one of `ORIGINS`. No part of plan files.
    """

    states: int = 0
    seconds: float = 0.0
    stopped: str = ""
    meshes: int = 1
    verified: str = ""
    origin: str = dataclasses.field(default="", compare=False)


class Plan:
    """A strategy for one program on one mesh, with its price. Immutable; made by `plan`, `price` or `Plan.load`."""

    def __init__(
        self,
        pricer: Pricer,
        priced: Priced,
        record: SearchRecord | None = None,
        devices: Sequence[Any] | None = None,
        pinned: Pinned | None = None,
    ):
        self.pricer, self.priced, self.search = pricer, priced, record or SearchRecord()
        self.pinned = pinned or {}
        self.devices = devices  # those of the jax Mesh that the user gave, in its order

    # ---- what it is ---------------------------------------------------------------------------

    @property
    def analysis(self) -> Analysis:
        return self.pricer.analysis

    @property
    def program(self) -> Program:
        return self.analysis.program

    @property
    def mesh(self) -> LogicalMesh:
        return self.pricer.mesh

    @property
    def fingerprint(self) -> str:
        return self.program.fingerprint

    @functools.cached_property
    def report(self) -> PriceReport:
        """The price, term by term."""
        return make_report(self.pricer, self.priced)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.priced.seconds

    @property
    def memory(self) -> float:
        """Predicted peak bytes of one device."""
        return self.priced.memory

    @property
    def gap(self) -> float | None:
        """By which share of its seconds a step may take longer than under the best strategy there is; None: not known.

        A search looks at some of all strategies, and nothing says yet how good the best of the others could be. On one
        device there is only one.
        """
        return 0.0 if self.mesh.device_count == 1 else None

    @functools.cached_property
    def placements(self) -> Placements:
        return place(self.pricer, self.priced)

    def _specs(self, leaves: Sequence[Leaf], specs: Sequence[Any]) -> dict[str, PartitionSpec]:
        return {leaf.path: self.mesh.partition_spec(spec) for leaf, spec in zip(leaves, specs, strict=True)}

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each argument leaf, by path."""
        return self._specs(self.program.arguments, self.placements.arguments)

    def shardings(self, mesh: jax.sharding.Mesh | None = None) -> Any:
        """NamedShardings of all arguments, as the pytree `(args, kwargs)`."""
        mesh = mesh if mesh is not None else self.mesh.build(self.devices)
        flat = [jax.sharding.NamedSharding(mesh, spec) for spec in self.specs.values()]
        return jax.tree_util.tree_unflatten(self.program.in_tree, flat)

    def axis_splits(self) -> dict[str, tuple[str, ...]]:
        """Mesh axes given to each named logical axis, in the order of the assignment."""
        out: dict[str, tuple[str, ...]] = {}
        for group, axis in self.priced.assignment.order:
            name = self.analysis.names.get(group, f"axis{group}")
            out[name] = (*out.get(name, ()), self.mesh.names[axis])
        return out

    def zero_axes(self) -> dict[str, tuple[str, ...]]:
        """Mesh axes over which parameters' forms are split further, by form ("optimizer", "gradient", "stored")."""
        out: dict[str, dict[str, None]] = {}
        for (_, form), splits in self.priced.assignment.forms:
            axes = out.setdefault(form.name.lower(), {})
            for _, axis in splits:
                axes.setdefault(self.mesh.names[axis])
        return {form: tuple(axes) for form, axes in out.items()}

    # ---- what it does -------------------------------------------------------------------------

    def lower_step(self, mesh: jax.sharding.Mesh | None = None, donate: bool = True) -> LoweredStep:
        """The jitted flat step on a jax mesh (default: this process' devices)."""
        return lower_step(
            self.program, self.placements, mesh if mesh is not None else self.mesh.build(self.devices), donate
        )

    def lowered_hash(self, mesh: jax.sharding.Mesh | None = None) -> str:
        """Digest of the lowered program; equal plans give equal hashes, in any process."""
        return hashlib.sha256(self.lower_step(mesh).lower().as_text().encode()).hexdigest()[:32]

    def save(self, path: str) -> None:
        """Writes the plan as JSON."""
        from spmd_auto.plan.file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str, step: Any, /, *args: Any, **kwargs: Any) -> Plan:
        """Reads a plan for a step; see `spmd_auto.plan.file.load_plan`."""
        from spmd_auto.plan.file import load_plan

        return load_plan(path, step, *args, **kwargs)

    def explain(self, path: str | None = None) -> str:
        """The plan in words and numbers; with a leaf's path, what it does to that leaf and why."""
        from spmd_auto.plan.explain import explain_leaf, explain_plan

        return explain_plan(self) if path is None else explain_leaf(self, path)

    def parallel_info(self, what: str) -> ParallelInfo:
        """What the plan does at a leaf, an operation or a line of code; see `spmd_auto.parallel_info`."""
        from spmd_auto.tools.info import parallel_info

        return parallel_info(self, what)

    def to_code(self, module: str = "plan") -> str:
        """The text of a module of plain JAX that runs the step as planned; see `spmd_auto.plan.code.plan_to_code`."""
        from spmd_auto.plan.code import plan_to_code

        return plan_to_code(self, module)

    def compare(self, other: Plan) -> PlanComparison:
        """This plan (first) and another of the same program (second), term by term; see `PlanComparison`."""
        from spmd_auto.plan.compare import compare_plans

        return compare_plans(self, other)

    def why_not(self, what: str, instead: Any) -> WhyNot:
        """What it would cost to do one thing otherwise, or why it can't be.

        `plan.why_not("params/*/kernel", P("model"))` or `plan.why_not("heads", "model")`; see
        `spmd_auto.plan.why_not.why_not`.
        """
        from spmd_auto.plan.why_not import why_not

        return why_not(self, what, instead)

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        from spmd_auto.plan.html import plan_to_html

        return plan_to_html(self)

    def __repr__(self) -> str:
        splits = ", ".join(f"{axis}->{'+'.join(to)}" for axis, to in self.axis_splits().items()) or "nothing split"
        zero = "".join(f", {form} over {'+'.join(axes)}" for form, axes in self.zero_axes().items())
        return (
            f"<Plan of {self.program.name} on {self.mesh.describe()}: {splits}{zero}; "
            f"{self.seconds * 1e3:.3g} ms, {self.memory / 1e9:.3g} GB>"
        )
