"""The best few plans of a search, compiled: the one whose program is the fastest by what it really moves.

A price may be wrong about a collective that XLA forms otherwise. So the plans that come nearest are compiled, and their
prices are made anew: communication scaled, over each set of mesh axes, by bytes found over bytes predicted, and memory
as the compiler states it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import jax

from spmd_auto.errors import MemoryBudgetError, VerifyError
from spmd_auto.mesh.collectives import collective
from spmd_auto.plan import Plan
from spmd_auto.plan.explain import size
from spmd_auto.verify.cache import SummaryCache
from spmd_auto.verify.check import Verification, compare, verify
from spmd_auto.verify.hlo import read_compiled
from spmd_auto.verify.targets import Target, parse_target

Verified = bool | str | Target  # False: nothing is compiled


def check_verified(value: object) -> None:
    """Whether a `verify=` option means something.

    Raises:
      VerifyError: it is neither on or off nor a target, or no such target.
    """
    if not isinstance(value, bool):
        parse_target(value)  # type: ignore[arg-type]  # it refuses what is no text


def found_seconds(plan: Plan, verification: Verification) -> float:
    """Predicted seconds of a step if it moves the bytes that its compiled program moves."""
    times: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for c in plan.report.collectives:
        times[c.axes] += c.seconds
    seconds = plan.seconds
    for row in verification.rows:
        if row.predicted_bytes > 0 and times[row.axes] > 0:
            seconds += times[row.axes] * (row.found_bytes / row.predicted_bytes - 1)
            continue
        axes = [plan.mesh.names.index(name) for name in row.axes]  # nothing was predicted over them
        for c in verification.summary.collectives:
            if c.axes == row.axes:
                seconds += c.times * collective(plan.mesh, c.kind, axes, c.payload_bytes).seconds
    return seconds


def choose(
    plans: Sequence[Plan], where: Literal[True] | str | Target, progress: Callable[[str], None] | None = None
) -> Plan:
    """The best of several plans by their compiled programs.

    Args:
      plans: of one program, best first.
      where: a target, or True: the devices that are there.
      progress: is told each plan before it is compiled, which may take minutes; an interrupt (Ctrl-C) ends it all.

    Returns:
      The plan, whose search record says what was compiled and found.

    Raises:
      VerifyError: none of the plans can be compiled for the target, or no devices of the mesh's kind are there.
      MemoryBudgetError: the compiled programs all need more memory than there is.
    """
    outcomes: list[tuple[float, float, int]] = []
    failures: list[Exception] = []
    for k, plan in enumerate(plans):
        if progress is not None:
            progress(f"compiling plan {k + 1} of {len(plans)} ({plan.seconds * 1e3:.3g} ms predicted)")
        try:
            verification = _verify_here(plan) if where is True else verify(plan, where, cache=True)
        except jax.errors.JaxRuntimeError as error:  # the compiler gave up: the next plan may do
            failures.append(error)
            continue
        outcomes.append((found_seconds(plan, verification), verification.found_memory or plan.memory, k))
    if not outcomes:
        raise VerifyError(
            f"none of the {len(plans)} best plans of {plans[0].program.name} compiles",
            str(failures[0]).splitlines()[0][:300],
            ["verify=False: plan by predicted bytes alone"],
        )
    fitting = [o for o in outcomes if o[1] <= plans[o[2]].pricer.budget]
    if not fitting:
        _, memory, k = min(outcomes, key=lambda o: o[1])
        raise MemoryBudgetError(
            f"no plan of {plans[k].program.name} fits {size(plans[k].pricer.budget)} per device once it is compiled",
            f"of the {len(outcomes)} best the nearest needs {size(memory)}; predicted were {size(plans[k].memory)}",
            ["more devices, or a smaller batch", f"memory={memory:.3g} if the devices have it"],
        )
    seconds, memory, k = min(fitting)
    target = "the devices at hand" if where is True else str(where)
    predicted = f"{plans[k].seconds * 1e3:.3g} ms predicted"
    note = (
        f"the best {len(plans)} were compiled for {target}: number {k + 1} by predicted time was taken "
        f"({predicted}, {seconds * 1e3:.3g} ms by the bytes found; {size(memory)} of memory)"
    )
    if failures:
        note += f"; {len(failures)} did not compile"
    chosen = plans[k]
    chosen.search = dataclasses.replace(chosen.search, verified=note)
    return chosen


def _verify_here(plan: Plan) -> Verification:
    """A plan against the program compiled for this process' devices."""
    platform = plan.mesh.chip.platform
    if plan.devices is None and (platform == "cpu" or platform != jax.default_backend()):
        if platform == "cpu":
            return verify(plan, "cpu", cache=True)
        raise VerifyError(
            f"verify=True, and there are no {platform} devices here",
            f"the plan is for {plan.mesh.describe()}",
            ['name what to compile for: verify="tpu:v5e:4x4"', "verify=False"],
        )
    mesh = plan.mesh.build(plan.devices)
    target = Target(mesh.devices.flat[0].platform, str(mesh.devices.flat[0].device_kind))
    lowered, store = plan.lower_step(mesh).lower(), SummaryCache()
    key = store.key(lowered, target, mesh)
    summary = store.get(key)
    if summary is None:
        summary = read_compiled(lowered.compile(), mesh)
        store.put(key, summary)
    return compare(plan, summary, target.platform)
