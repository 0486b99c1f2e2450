"""Why a plan does not do something else: the same plan with one thing changed, priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmd_auto.cost.pricer import Pricer
from spmd_auto.errors import BatchError, MeshError, PinError, StrategyError
from spmd_auto.plan.compare import PlanComparison, compare_plans
from spmd_auto.plan.explain import duration, render, size
from spmd_auto.plan.make import analyse_for, check_axis
from spmd_auto.plan.pins import Pinned, matches, resolve_pins
from spmd_auto.plan.plan import Plan, SearchRecord
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.search import strategies
from spmd_auto.search.refine import refine
from spmd_auto.tools.notation import is_counts


@dataclasses.dataclass(frozen=True, slots=True)
class WhyNot:
    """What a plan would be with one thing changed, all else left as it is.

    Attributes:
      question: the change in words.
      reason: why it can't be, or what it would cost.
      plan: the changed plan, also where it needs too much memory; None where it can't be at all.
      comparison: the plan (first) and the changed one (second).
    """

    question: str
    reason: str
    plan: Plan | None = None
    comparison: PlanComparison | None = None

    @property
    def possible(self) -> bool:
        """Whether the change can be made, and fits the memory."""
        return self.plan is not None and self.plan.memory <= self.plan.pricer.budget

    def __str__(self) -> str:
        shown = self.comparison.parts(("as planned", "changed")) if self.comparison else []
        return render(f"{self.question}: {self.reason}", *shown)


def why_not(plan: Plan, what: str, instead: Any) -> WhyNot:
    """Prices a plan with one thing changed.

    Args:
      what: path or glob of argument leaves (`state/params/*/kernel`), or a logical axis (`heads`).
      instead: for leaves a PartitionSpec or split counts; for a logical axis the mesh axis or axes that split it, or
        None: held whole.  Of the two ranks that a new split can have (before all others, after them) the better one.

    Returns:
      The difference term by term, or why it can't be: a dimension that is not divisible, a pin of the user's that says
      otherwise, too little memory.

    Raises:
      PinError: no such leaf, or a spec that does not fit the mesh or the rank.
      StrategyError: no such logical or mesh axis, or an alternative that does not go with `what`.
    """
    if isinstance(instead, (PartitionSpec, jax.sharding.NamedSharding)) or is_counts(instead):
        return _other_spec(plan, what, instead)
    if not (instead is None or isinstance(instead, str) or _is_names(instead)):
        raise StrategyError(
            f"why_not({what!r}, {instead!r})",
            "an alternative is a spec for a leaf, or mesh axes for a logical axis",
            ['plan.why_not("params/*/kernel", jax.P("model"))', 'plan.why_not("heads", "model")'],
        )
    if plan.analysis.group(what) is None and any(what in leaf.path for leaf in plan.program.arguments):
        raise StrategyError(
            f"{what!r} is a leaf and no logical axis", "how a leaf lies is said by a spec", [f"jax.P({instead!r})"]
        )
    names = () if instead is None else (instead,) if isinstance(instead, str) else tuple(instead)
    return _other_axes(plan, what, names)


def _other_spec(plan: Plan, glob: str, spec: Any) -> WhyNot:
    question = f"{glob} as {spec}"
    try:
        found = resolve_pins(plan.program, plan.mesh, {glob: spec})
    except PinError as error:
        if not _says_something(plan, glob, spec):
            raise
        return WhyNot(question, f"can't be: {error}")
    new = {key: pin for key, pin in found.items() if pin.source == f"pin {glob!r}"}
    for key, pin in new.items():
        old = plan.pinned.get(key)
        if old is not None and old.spec != pin.spec:
            held = plan.mesh.partition_spec(tuple(axes or () for axes in old.spec))
            return WhyNot(question, f"can't be: {old.source} says {held}, and a pin is never overridden")
    pinned: Pinned = {**plan.pinned, **new}
    return _answer(plan, question, [_priced(plan, plan.priced.assignment, pinned)])


def _says_something(plan: Plan, glob: str, spec: Any) -> bool:
    """Whether leaves match, and the spec is one for their ranks: then it is the shapes or other pins that forbid it."""
    shapes = [leaf.shape for leaf in plan.program.arguments]
    hits = matches([leaf.path for leaf in plan.program.arguments], glob)
    try:
        for i in hits:
            if not is_counts(spec):
                plan.mesh.spec(spec, len(shapes[i]))
    except MeshError:
        return False
    return bool(hits) and (not is_counts(spec) or all(len(shapes[i]) == len(spec) for i in hits))


def _other_axes(plan: Plan, name: str, to: tuple[str, ...]) -> WhyNot:
    question = f"{name} over {'+'.join(to)}" if to else f"{name} whole"
    groups = strategies.resolve_axes(plan.analysis, name)
    for axis in to:
        try:
            check_axis(plan.analysis, plan.mesh, name, axis)
        except BatchError as error:
            return WhyNot(question, f"can't be: {error}")
    new = strategies.order(plan.analysis, plan.mesh, [(name, axis) for axis in to])
    assignment = plan.priced.assignment
    rest = tuple(split for split in assignment.order if split[0] not in groups)
    orders = {(*new, *rest), (*rest, *new)}
    if to and set(new) == {split for split in assignment.order if split[0] in groups}:
        orders = {assignment.order}  # it is so already
    plans = [_priced(plan, dataclasses.replace(assignment, order=order), plan.pinned) for order in sorted(orders)]
    return _answer(plan, question, plans)


def _priced(plan: Plan, assignment: Assignment, pinned: Pinned) -> Plan:
    """Another assignment and other pins; groups and regions do not depend on pins, so they keep their numbers."""
    same = list(pinned) == list(plan.pinned)
    analysis = plan.analysis if same else analyse_for(plan.program, plan.mesh, pinned)
    pricer = Pricer(analysis, plan.mesh, plan.pricer.budget, [pin.spec for pin in pinned.values()])
    priced = pricer.price(assignment)
    if plan.search.states > 1:  # what is compared with it is refined too
        priced = refine(pricer, priced)
    return Plan(pricer, priced, SearchRecord(states=1), plan.devices, pinned)


def _answer(plan: Plan, question: str, others: Sequence[Plan]) -> WhyNot:
    other = min(others, key=lambda p: p.priced.score)
    comparison = compare_plans(plan, other)
    if other.memory > other.pricer.budget:
        reason = f"it needs {size(other.memory)} of memory on a device, and {size(other.pricer.budget)} are there"
        return WhyNot(question, reason, other, comparison)
    if not comparison.specs and abs(other.seconds - plan.seconds) <= 1e-9 * plan.seconds:
        return WhyNot(question, "the plan does that already, or it changes nothing", other, comparison)
    slower, more = other.seconds - plan.seconds, other.memory - plan.memory
    time = f"{duration(abs(slower))} {'slower' if slower >= 0 else 'faster'} ({slower / plan.seconds:+.1%})"
    memory = f"{size(abs(more))} {'more' if more > 0 else 'less'} memory" if more else "as much memory"
    return WhyNot(question, f"{time}, {memory}", other, comparison)


def _is_names(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(isinstance(n, str) for n in x)
