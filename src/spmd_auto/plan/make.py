"""Making plans: the whole way from a traced program to the best plan found, or to the price of a given strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from spmd_auto.cost.memory import MemoryTable
from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.cost.structure import build_structure
from spmd_auto.errors import BatchError, MemoryBudgetError, MeshError, PinError, StrategyError
from spmd_auto.mesh import Cluster, LogicalMesh, cluster_of, logical_mesh_of
from spmd_auto.plan.pins import Pin, Pinned, Pins, resolve_pins
from spmd_auto.plan.plan import Plan, SearchRecord
from spmd_auto.propagate.analysis import Analysis, PinKey, analyse
from spmd_auto.propagate.assignment import Assignment, PinnedSpec
from spmd_auto.search import strategies
from spmd_auto.search.beam import Clock, SearchOptions, search_mesh
from spmd_auto.search.refine import refine
from spmd_auto.search.space import build_space
from spmd_auto.trace import Program, Role, trace

if TYPE_CHECKING:
    from spmd_auto.verify.rank import Verified

# Share of a chip's memory that a plan may fill: the allocators of XLA keep the rest.
USABLE = 0.92

MeshLike = LogicalMesh | Cluster | jax.sharding.Mesh | jax.sharding.AbstractMesh | None
Progress = Callable[[str], None]

# Plans of a search that `verify` compiles.
FEW = 4


def candidate_meshes(mesh: MeshLike) -> list[LogicalMesh]:
    """Logical meshes to search: the one given, or those that a cluster offers (default: this process' devices)."""
    if isinstance(mesh, LogicalMesh):
        return [mesh]
    if isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        return [logical_mesh_of(mesh)]
    if mesh is None:
        mesh = cluster_of()
    if isinstance(mesh, Cluster):
        return mesh.meshes()
    raise MeshError(
        f"mesh is a {type(mesh).__name__}",
        "a plan is for a jax Mesh, a spmd_auto.cluster(...) or a logical mesh",
        ['spmd_auto.cluster("h100", hosts=2)', "jax.make_mesh((2, 4), ('data', 'model'))"],
    )


def budget_for(mesh: LogicalMesh, memory: float | None) -> float:
    """Bytes of one device that a plan may need. Simulated CPU devices share the host's memory: no limit."""
    if memory is not None:
        if not isinstance(memory, (int, float)) or not memory > 0:
            raise MemoryBudgetError(f"memory={memory!r}", "a device has some bytes of memory", ["memory=16e9: 16 GB"])
        return float(memory)
    return float("inf") if mesh.chip.platform == "cpu" else USABLE * mesh.chip.memory


def analyse_for(program: Program, mesh: LogicalMesh, pinned: Mapping[PinKey, Pin]) -> Analysis:
    """The analysis of a program for the chips of a mesh and what is pinned."""
    pins = {key: k for k, key in enumerate(pinned)}
    return analyse(program, pins, widen=mesh.chip.platform == "cpu")


def _specs(pinned: Mapping[PinKey, Pin]) -> list[PinnedSpec]:
    return [pin.spec for pin in pinned.values()]


def devices_of(mesh: object) -> list[Any] | None:
    """The devices of a jax Mesh in its order; None for a mesh that names none."""
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def make_plan(
    program: Program,
    mesh: MeshLike = None,
    *,
    pins: Pins | None = None,
    memory: float | None = None,
    search: SearchOptions | None = None,
    progress: Progress | None = None,
    verify: Verified = False,
) -> Plan:
    """Searches the best plan for a program.

    Args:
      mesh: a jax Mesh, AbstractMesh or logical mesh (axes kept), a cluster (axes searched), or None for the devices at
        hand.
      pins: tree-path glob -> PartitionSpec.
      memory: bytes per device; default 92 % of the chip's, no limit on the CPU.
      verify: True, or a target: the best few plans are compiled for the devices at hand, or for the target, and the
        best is chosen by what their programs move and keep.

    Raises:
      MemoryBudgetError: nothing fits; says what came nearest.
      PinError: a pin that can't hold.
      VerifyError: `verify`, and the plans can't be compiled.
    """
    start = time.perf_counter()
    options = search or SearchOptions()
    meshes = candidate_meshes(mesh)
    clock = Clock(options.states, None if options.seconds is None else time.monotonic() + options.seconds)
    analysis: Analysis | None = None
    structure = memory_table = None
    ends: list[tuple[Pricer, Priced, Pinned]] = []
    states = 0
    for candidate, pinned in _pinned_candidates(program, meshes, pins or {}):
        if analysis is None:
            analysis = analyse_for(program, candidate, pinned)
            structure, memory_table = build_structure(analysis), MemoryTable(analysis)
        pricer = Pricer(analysis, candidate, budget_for(candidate, memory), _specs(pinned), structure, memory_table)
        found = search_mesh(pricer, build_space(analysis, candidate), options, clock, progress, FEW if verify else 0)
        states += pricer.states
        ends += [(pricer, priced, pinned) for priced in found]
        if clock.stopped:
            break
    ends.sort(key=lambda end: end[1].score)
    record = SearchRecord(states, time.perf_counter() - start, clock.stopped, len(meshes))
    plans = [_finished(*end, record, devices_of(mesh)) for end in _distinct(ends, FEW if verify else 1)]
    fitting = [plan for plan in plans if plan.priced.memory <= plan.pricer.budget]
    if not fitting:
        raise _does_not_fit(plans[0])
    if not verify:
        return fitting[0]
    from spmd_auto.verify.rank import choose  # compiling comes after planning

    return choose(fitting, verify, progress)


def _distinct(ends: list[tuple[Pricer, Priced, Pinned]], count: int) -> list[tuple[Pricer, Priced, Pinned]]:
    """The first ends that are not the same layouts and forms on the same mesh."""
    out: dict[object, tuple[Pricer, Priced, Pinned]] = {}
    for pricer, priced, pinned in ends:
        choices = tuple(None if form is None else (form.choice, form.targets) for form in priced.forms)
        out.setdefault((pricer.mesh, tuple(priced.specs), choices), (pricer, priced, pinned))
        if len(out) == count:
            break
    return list(out.values())


def _finished(pricer: Pricer, priced: Priced, pinned: Pinned, record: SearchRecord, devices: list[Any] | None) -> Plan:
    # the search adds up changes: priced anew, a plan has the very price that its file gives when it is loaded
    priced = pricer.assemble(priced.assignment, priced.specs, priced.forms)
    return Plan(pricer, priced, record, devices, pinned)


def _pinned_candidates(program: Program, meshes: Sequence[LogicalMesh], pins: Pins) -> list[tuple[LogicalMesh, Pinned]]:
    """The meshes on which all pins hold: a cluster's meshes differ in the names and sizes of their axes.

    Raises:
      PinError: on the first mesh, if they hold on none.
    """
    able, first = [], None
    for mesh in meshes:
        try:
            able.append((mesh, resolve_pins(program, mesh, pins)))
        except PinError as error:
            first = first or error
    if not able:
        assert first is not None
        raise first
    return able


def _does_not_fit(plan: Plan) -> MemoryBudgetError:
    memory, budget = plan.report.memory, plan.pricer.budget
    gb = 1e9
    whole = sum(leaf.bytes for leaf in plan.program.arguments if leaf.role is not Role.BATCH)
    needed = max(plan.mesh.device_count + 1, round(plan.mesh.device_count * memory.total / budget + 0.5))
    return MemoryBudgetError(
        f"no plan of {plan.program.name} fits {budget / gb:.3g} GB per device on {plan.mesh.describe()}",
        f"the nearest needs {memory.total / gb:.3g} GB: parameters {memory.parameters / gb:.3g}, optimizer state "
        f"{memory.optimizer / gb:.3g}, batch {memory.batch / gb:.3g}, temporaries {memory.temporaries / gb:.3g}; "
        f"{(memory.total - budget) / gb:.3g} GB are missing (the whole state is {whole / gb:.3g} GB)",
        [
            f"about {needed} devices of this size",
            "a smaller batch, or rematerialised layers (jax.checkpoint), if temporaries are the larger part",
            f"memory={memory.total:.3g} if the devices have it",
        ],
    )


def price_strategy(
    program: Program,
    mesh: LogicalMesh | jax.sharding.Mesh | jax.sharding.AbstractMesh,
    assignment: Assignment | Mapping[str, str | Sequence[str]],
    *,
    zero: int = 0,
    zero_axes: Sequence[str] = (),
    analysis: Analysis | None = None,
    memory: float | None = None,
    refined: bool = False,
    pins: Pins | None = None,
) -> Plan:
    """The plan that a strategy given by hand stands for, priced.

    Args:
      assignment: logical axis (or a glob, `heads*`) -> mesh axis or axes, strongest first:
        `{"batch": "data", "heads*": "model"}`.
      zero: ZeRO stage 0 to 3 over `zero_axes`, for all parameters.
      refined: let operations agree on forms jointly (as the search's last step does).

    Raises:
      StrategyError: an axis that the program or the mesh does not have.
      BatchError: a logical axis that the mesh axes given to it can't divide on any value.
    """
    zero_axes = (zero_axes,) if isinstance(zero_axes, str) else zero_axes
    named = isinstance(zero_axes, (list, tuple)) and all(isinstance(axis, str) for axis in zero_axes)
    stage = isinstance(zero, int) and not isinstance(zero, bool) and 0 <= zero <= 3
    if not stage or not named or (zero and not zero_axes) or len(set(zero_axes)) < len(zero_axes):
        raise StrategyError(
            f"zero={zero!r} over the mesh axes {zero_axes!r}",
            "ZeRO has the stages 0 to 3 (optimizer state, gradients, parameters), over mesh axes, each named once",
            ["zero=3, zero_axes=('data',)"],
        )
    logical = candidate_meshes(mesh)[0]
    pinned = resolve_pins(program, logical, pins or {})
    analysis = analysis or analyse_for(program, logical, pinned)
    if not isinstance(assignment, Assignment):
        if not isinstance(assignment, Mapping):
            raise _unnamed(assignment)
        for axis, tos in assignment.items():
            names = [axis, tos] if isinstance(tos, str) else [axis, *tos] if isinstance(tos, (list, tuple)) else [tos]
            if not all(isinstance(name, str) for name in names):
                raise _unnamed(assignment)
            strategies.resolve_axes(analysis, axis)
        splits = [(axis, to) for axis, tos in assignment.items() for to in ([tos] if isinstance(tos, str) else tos)]
        for axis, to in splits:
            check_axis(analysis, logical, axis, to)
        assignment = strategies.build(analysis, logical, splits, zero_stage=zero, zero_axes=zero_axes)
    pricer = Pricer(analysis, logical, budget_for(logical, memory), _specs(pinned))
    priced = pricer.price(assignment)
    priced = refine(pricer, priced) if refined else priced
    return Plan(pricer, priced, SearchRecord(states=1), devices_of(mesh), pinned)


def _unnamed(assignment: object) -> StrategyError:
    return StrategyError(
        f"assignment={assignment!r}",
        "logical axes are given mesh axes, both by name",
        ["assignment={'batch': 'data', 'mlp': ('model', 'host')}"],
    )


def check_axis(analysis: Analysis, mesh: LogicalMesh, axis: str, to: str) -> None:
    """Whether a logical axis (or a glob) can be split over a mesh axis at all.

    Raises:
      StrategyError: an axis that the program or the mesh does not have.
      BatchError: the mesh axis divides it on no value.
    """
    groups = strategies.resolve_axes(analysis, axis)
    n = mesh.sizes[strategies.resolve_mesh_axis(mesh, to)]
    sizes = [analysis.axes.size[group] for group in groups]
    if all(size % n for size in sizes):
        size = sizes[0]
        divisors = [d for d in range(n, 1, -1) if size % d == 0]
        raise BatchError(
            f"logical axis {axis!r} of size {size} can't be split over {to!r} ({n} devices)",
            "it is smaller than the mesh axis" if size < n else f"{size} is not divisible by {n}",
            [f"a mesh axis of {divisors[0]}" if divisors else f"a {axis} of at least {n}", "leave the axis whole"],
        )


def plan(
    step: Callable[..., Any],
    /,
    *args: Any,
    mesh: MeshLike = None,
    pins: Pins | None = None,
    memory: float | None = None,
    search: SearchOptions | None = None,
    progress: Progress | None = None,
    verify: Verified = False,
    **kwargs: Any,
) -> Plan:
    """Plans a step on arrays or `ShapeDtypeStruct`s; no device is needed if `mesh` is a cluster.

    Args:
      mesh, pins, memory, search, progress: as for `auto_shard`.
      verify: compile the best few plans and take the one that is best by the bytes and the memory of its program: True
        for the devices at hand, or a target ("tpu:v5e:4x4").

    Raises:
      MemoryBudgetError, PinError, MeshError: nothing fits, a pin can't hold, no mesh.
      VerifyError: `verify` means nothing, or the plans can't be compiled.
    """
    from spmd_auto.verify.rank import check_verified

    check_verified(verify)
    program = trace(step, *args, **kwargs)
    return make_plan(program, mesh, pins=pins, memory=memory, search=search, progress=progress, verify=verify)


def price(
    step: Callable[..., Any],
    /,
    *args: Any,
    mesh: LogicalMesh | jax.sharding.Mesh | jax.sharding.AbstractMesh,
    assignment: Mapping[str, str | Sequence[str]],
    zero: int = 0,
    zero_axes: Sequence[str] = (),
    **kwargs: Any,
) -> Plan:
    """Prices a strategy that the user chose; see `price_strategy`."""
    return price_strategy(trace(step, *args, **kwargs), mesh, assignment, zero=zero, zero_axes=zero_axes)
