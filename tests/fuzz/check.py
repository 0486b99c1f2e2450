"""What holds of every program: order of equations, results on several devices, bytes as predicted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_auto import _compat
from spmd_auto.cost.pricer import Pricer
from spmd_auto.plan.plan import Plan
from spmd_auto.propagate.analysis import Analysis, analyse
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.propagate.factors import Kind
from spmd_auto.propagate.forms import Form
from spmd_auto.search.strategies import zero_splits
from spmd_auto.trace import Program, trace
from spmd_auto.verify import read_compiled, tree_relative_error
from spmd_auto.verify.check import compare
from tests.fuzz.programs import FuzzProgram
from tests.known_answers.toy import toy_mesh

MESHES = ((8,), (2, 4), (2, 2, 2))
TOLERANCE = 1e-9  # relative, of all floats together
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class FuzzFailure(AssertionError):
    """A property does not hold."""


class OneDeviceFails(Exception):
    """The compiler refuses the program on one device, without this package."""


# ---- order of equations --------------------------------------------------------------------------


def reordered(program: Program, rng: random.Random) -> tuple[Program, dict[int, int]]:
    """(the program with its outermost equations in another order that their data allow, old index -> new index)."""
    inner = _compat.open_jaxpr(program.jaxpr)
    made_by = {v: k for k, eqn in enumerate(inner.eqns) for v in eqn.outvars}
    waits = [
        {made_by[v] for v in eqn.invars if not isinstance(v, _compat.Literal) and v in made_by} for eqn in inner.eqns
    ]
    order: list[int] = []
    left = set(range(len(inner.eqns)))
    while left:
        ready = sorted(k for k in left if waits[k].isdisjoint(left))
        order.append(rng.choice(ready))
        left.remove(order[-1])
    eqns = [inner.eqns[k] for k in order]
    closed = program.jaxpr
    jaxpr = closed.replace(eqns=eqns) if inner is closed else closed.replace(jaxpr=inner.replace(eqns=eqns))
    return dataclasses.replace(program, jaxpr=jaxpr), {old: new for new, old in enumerate(order)}


def partition(analysis: Analysis, label: Callable[[int], tuple[Hashable, ...]], moved: dict[int, int] | None) -> Any:
    """What `label` says of every array's dimensions, with names replaced by the place of their first use.

    Args:
      label: value id -> a label for each dimension.
      moved: old -> new index of outermost equations, to walk in the order of another program.
    """
    graph = analysis.graph
    values = [*graph.arguments, *graph.results]
    sites = sorted(graph.by_site)
    if moved is not None:
        back = {new: old for old, new in moved.items()}
        sites.sort(key=lambda site: (back[site[0]], site[1:]))
    for site in sites:
        values += graph.by_site[site].results
    first: dict[Hashable, int] = {}
    return [tuple(first.setdefault(x, len(first)) for x in label(v.id)) for v in values]


def check_order(program: Program, rng: random.Random) -> None:
    """Axes, groups and prices do not depend on the order of equations; a second analysis says the same."""
    analysis = analyse(program)
    for op in analysis.graph.ops:
        for factor in op.rule:
            if factor.kind in (Kind.PASS, Kind.REDUCE, Kind.HALO):
                dims = [analysis.axes.axis_of[op.operands[k].id][d] for k, d in factor.operands]
                dims += [analysis.axes.axis_of[op.results[k].id][d] for k, d in factor.results]
                if len(set(dims)) > 1:
                    raise FuzzFailure(f"one more round would join axes: {op.name} {factor}")
    other, moved = reordered(program, rng)
    for candidate, moves in ((analyse(program), None), (analyse(other), moved)):
        for what in ("axis_of", "of"):
            ours = partition(analysis, lambda v, what=what: getattr(analysis.axes, what)[v], None)
            theirs = partition(candidate, lambda v, what=what, c=candidate: getattr(c.axes, what)[v], moves)
            if ours != theirs:
                raise FuzzFailure(f"{what} depends on the order of equations (or on chance): {ours} {theirs}")


# ---- several devices -----------------------------------------------------------------------------


def random_assignment(analysis: Analysis, axes: int, rng: random.Random) -> Assignment:
    """Logical axes, mesh axes, order, flips and forms at random; most logical axes get something."""
    groups = [g for g in range(analysis.axes.count) if g not in analysis.stacked and analysis.axes.size[g] > 1]
    order = [(g, a) for g in groups for a in range(axes)]
    rng.shuffle(order)
    order = [split for split in order if rng.random() < 0.7]
    regions = range(analysis.regions.count)
    flips = frozenset((r, a) for r in regions for a in range(axes) if rng.random() < 0.3)
    forms = []
    for group in range(len(analysis.forms.groups)):
        for form in Form:
            given = [a for a in range(axes) if rng.random() < 0.3]
            splits = zero_splits(analysis, group, given, smallest_first=rng.random() < 0.5)
            if splits:
                forms.append(((group, form), splits))
    return Assignment(tuple(order), flips, tuple(sorted(forms)))


def random_plan(program: Program, sizes: tuple[int, ...], rng: random.Random, wild: bool) -> Plan:
    """A random strategy; `wild`: each operation takes any of its forms, not the cheapest."""
    analysis = analyse(program)
    pricer = Pricer(analysis, toy_mesh(*sizes))
    priced = pricer.price(random_assignment(analysis, len(sizes), rng))
    if wild:
        forms = list(priced.forms)
        for i in pricer.structure.active:
            forms[i] = rng.choice(pricer.forms(i, priced.specs))
        priced = pricer.assemble(priced.assignment, priced.specs, forms)
    return Plan(pricer, priced)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One program under one strategy.

    Attributes:
      split: arguments that are split.
      error: relative, over all floats.
      moved: (mesh axes, predicted bytes, compiled bytes) that one device sends.
    """

    split: int
    error: float
    moved: tuple[tuple[str, float, float], ...]


def check_parity(program: FuzzProgram, sizes: tuple[int, ...], seed: int, wild: bool = False) -> Outcome:
    """Runs a program on one device and under a random strategy on several.

    Raises:
      FuzzFailure: results differ.
      OneDeviceFails: there is nothing to compare with.
    """
    rng = random.Random(seed)
    with jax.enable_x64(True):
        args = program.inputs()
        traced = trace(program.function(), *args)
        try:
            expected = _on_one_device(program.function(), args)
        except jax.errors.JaxRuntimeError as error:
            raise OneDeviceFails(str(error).splitlines()[0]) from error
        plan = random_plan(traced, sizes, rng, wild)
        mesh = plan.mesh.build(jax.devices())
        lowered = plan.lower_step(mesh, donate=False)
        flat = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(args), lowered.in_shardings, strict=True)]
        compiled = lowered.lower().compile(compiler_options=FAST)
        outs = jax.tree.leaves(jax.device_get(compiled(*flat)))
        rows = compare(plan, read_compiled(compiled, mesh), "cpu").rows
        try:
            error = compare_results(outs, expected)
        except FuzzFailure:  # is it the compiler that is wrong, on one device?
            error = compare_results(outs, jax.tree.leaves(jax.device_get(program.function()(*args))))
    split = sum(any(spec) for spec in plan.placements.arguments)
    return Outcome(split, error, tuple(("+".join(row.axes), row.predicted_bytes, row.found_bytes) for row in rows))


def _on_one_device(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    return jax.tree.leaves(jax.device_get(jax.jit(fn).lower(*args).compile(compiler_options=FAST)(*args)))


def compare_results(outs: list[Any], wanted: list[Any]) -> float:
    """The relative error of the floats. Integers must be equal.

    Raises:
      FuzzFailure: they differ.
    """
    for k, (x, y) in enumerate(zip(outs, wanted, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise FuzzFailure(f"result {k} is {x.dtype}{x.shape}, not {y.dtype}{y.shape}")
        if not jnp.issubdtype(y.dtype, jnp.floating) and not np.array_equal(x, y):
            raise FuzzFailure(f"integers of result {k} differ in {np.mean(x != y):.1%} of places")
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            raise FuzzFailure(f"result {k} is not finite at other places")
    floats = [k for k, y in enumerate(wanted) if jnp.issubdtype(y.dtype, jnp.floating)]
    error = tree_relative_error([np.nan_to_num(outs[k]) for k in floats], [np.nan_to_num(wanted[k]) for k in floats])
    if not error < TOLERANCE:
        raise FuzzFailure(f"floats differ by {error:.3g}")
    return error


def check_all(program: FuzzProgram, seed: int) -> Outcome:
    """All properties, on a mesh and with a strategy of the seed."""
    rng = random.Random(seed)
    with jax.enable_x64(True):
        check_order(trace(program.function(), *program.inputs()), rng)
    return check_parity(program, rng.choice(MESHES), seed, wild=rng.random() < 0.3)
