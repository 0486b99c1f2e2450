"""`@auto_shard`: a step written for one device, planned once per abstract signature and run on all of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax

from spmd_auto import _compat
from spmd_auto.errors import BatchError, LoweringError
from spmd_auto.lower import LoweredStep
from spmd_auto.mesh import LogicalMesh
from spmd_auto.plan.make import MeshLike
from spmd_auto.plan.pins import Pins
from spmd_auto.plan.plan import Plan
from spmd_auto.runtime import report
from spmd_auto.runtime.across import LocalRows, compare_values, local_names, with_local_rows
from spmd_auto.runtime.find import find_plan
from spmd_auto.runtime.follow import frozen_pins, no_longer_split
from spmd_auto.runtime.group import Group, group_of
from spmd_auto.runtime.leaves import leaf_type, place, without_aliases
from spmd_auto.runtime.processes import compile_together, failing_together
from spmd_auto.runtime.start import Creation
from spmd_auto.search.beam import SearchOptions
from spmd_auto.trace import Call, objects, static_arguments, take_apart, trace

logger = logging.getLogger("spmd_auto")

Ragged = Literal["replicate", "refuse"]


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """A planned signature: its plan and, once called, its jitted step."""

    plan: Plan
    lowered: LoweredStep | None = None
    compared: bool = False  # the first call's arrays, between processes


class AutoSharded:
    """A step function that plans itself. Made by `auto_shard`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        mesh: MeshLike = None,
        pins: Pins | None = None,
        memory: float | None = None,
        search: SearchOptions | None = None,
        donate: bool = True,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        like: AutoSharded | None = None,
        ragged: Ragged = "replicate",
        local: str | Sequence[str] = (),
        cache: bool = True,
        quiet: bool = False,
    ):
        functools.update_wrapper(self, fn)
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # a partial or a callable object has none
        if ragged not in ("replicate", "refuse"):
            raise BatchError(
                f"ragged={ragged!r}",
                "a batch that can't be split as the first one was is computed whole on each device, or refused",
                ['ragged="replicate"', 'ragged="refuse"'],
            )
        self._fn = fn
        self._mesh, self._pins, self._memory, self._search = mesh, dict(pins or {}), memory, search
        self._donate = donate
        self._static = (static_argnums, static_argnames)
        self._static_argnums, self._static_argnames = static_arguments(fn, static_argnums, static_argnames)
        self._like, self._cache, self._quiet = like, cache, quiet
        self._ragged: Ragged = ragged
        self._local = local_names(fn, local)
        self._entries: dict[Any, _Entry] = {}
        self._jax_meshes: dict[LogicalMesh, jax.sharding.Mesh] = {}
        self._moved = False
        self._lock = threading.RLock()
        self._bound: weakref.WeakKeyDictionary[Any, AutoSharded] = weakref.WeakKeyDictionary()

    def __get__(self, instance: Any, owner: type | None = None) -> AutoSharded | _Bound:
        """A decorated method: an object that is no pytree is closed over (and planned for once), as jit would have it
        with a static `self`; a module is the first argument."""
        if instance is None:
            return self
        with self._lock:
            found = self._bound.get(instance) if _is_weak(instance) else None
            if found is None:
                if objects.is_object(instance) or not jax.tree_util.all_leaves([instance]):
                    return _Bound(self, instance)
                found = self._copy(types.MethodType(self._fn, instance))
                if _is_weak(instance):
                    self._bound[instance] = found
            return found

    def _copy(self, fn: Callable[..., Any]) -> AutoSharded:
        numbers, names = self._static
        if isinstance(numbers, int):
            numbers = (numbers,)
        return AutoSharded(
            fn,
            mesh=self._mesh,
            pins=self._pins,
            memory=self._memory,
            search=self._search,
            donate=self._donate,
            static_argnums=tuple(n - 1 if n > 0 else n for n in numbers),  # counted with self
            static_argnames=names,
            like=self._like,
            ragged=self._ragged,
            local=self._local,
            cache=self._cache,
            quiet=self._quiet,
        )

    # ---- planning -----------------------------------------------------------------------------

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments (arrays or `ShapeDtypeStruct`s); planned once per abstract signature."""
        args, kwargs = self._whole(args, kwargs)
        with objects.references("flax.nnx" in sys.modules):
            return self._entry(self._apart(args, kwargs), args, kwargs).plan

    def explain(self, *args: Any, path: str | None = None, **kwargs: Any) -> str:
        """The plan in words; without arguments that of the first signature."""
        if not args and not kwargs:
            if not self._entries:
                raise LoweringError(
                    f"{self.__name__} has no plan yet", "it plans at its first call", ["pass the arguments to explain"]
                )
            return next(iter(self._entries.values())).plan.explain(path)
        return self.plan(*args, **kwargs).explain(path)

    def _apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return take_apart(self._fn, args, kwargs, self._static_argnums, self._static_argnames)

    def _entry(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        key = call.key, tuple(leaf_type(x) for x in call.leaves)
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:  # another thread may have planned it meanwhile
                entry = self._entries.get(key)
                if entry is None:
                    entry = _Entry(self._make_plan(args, kwargs))
                    self._entries[key] = entry
                    report.planned_again(self.__name__, list(self._entries))
        return entry

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        group = self._group()
        with failing_together(group, f"to trace {self.__name__}"):
            program = trace(
                self._fn, *args, static_argnums=self._static_argnums, static_argnames=self._static_argnames, **kwargs
            )
        mesh, pins = self._mesh, dict(self._pins)
        first = self._first_plan()
        if first is not None:  # the state's specs are frozen by the first plan
            mesh = first.mesh
            pins = frozen_pins(first, program) | pins  # the user's own pins come last: they win
        with report.progress(self.__name__, self._quiet) as progress:
            plan = find_plan(
                program,
                mesh,
                pins=pins,
                memory=self._memory,
                search=self._search,
                progress=progress,
                cache=self._cache,
                group=group,
            )
        if not self._quiet:
            report.found(plan)
        if self._entries:
            self._check_ragged(next(iter(self._entries.values())).plan, plan)
        return plan

    def _check_ragged(self, first: Plan, plan: Plan) -> None:
        for leaf, dim, parts in no_longer_split(first, plan):
            what = (
                f"{leaf.path!r} of {self.__name__} has {leaf.shape[dim]} in dimension {dim}, not divisible by {parts}"
            )
            why = f"the first batch was split into {parts}; this one is computed whole on each device"
            if self._ragged == "refuse":
                raise BatchError(
                    what, why, ["drop the last batch, or fill it and mask", 'auto_shard(ragged="replicate")']
                )
            if not self._quiet:
                logger.warning("%s: %s", what, why)

    def _first_plan(self) -> Plan | None:
        if self._entries:
            return next(iter(self._entries.values())).plan
        return self._like._first_plan() if self._like is not None else None

    # ---- running ------------------------------------------------------------------------------

    def _group(self) -> Group | None:
        """The processes that run the step, if there are several."""
        if isinstance(self._mesh, jax.sharding.Mesh) or self._like is None:
            return group_of(self._mesh)
        return self._like._group()

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_local_rows(self._fn, self._local, self._group(), args, kwargs) if self._local else (args, kwargs)

    def _jax_mesh(self, plan: Plan) -> jax.sharding.Mesh:
        if isinstance(self._mesh, jax.sharding.Mesh):
            return jax.sharding.Mesh(
                self._mesh.devices, self._mesh.axis_names, axis_types=_compat.axis_types_auto(self._mesh.devices.ndim)
            )
        if self._like is not None:
            return self._like._jax_mesh(plan)
        found = self._jax_meshes.get(plan.mesh)
        if found is None:
            found = self._jax_meshes[plan.mesh] = plan.mesh.build()
        return found

    def _lowered(self, entry: _Entry) -> LoweredStep:
        with self._lock:
            if entry.lowered is None:
                entry.lowered = entry.plan.lower_step(self._jax_mesh(entry.plan), self._donate)
            return entry.lowered

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoweredStep:
        args, kwargs = self._whole(args, kwargs)
        with objects.references("flax.nnx" in sys.modules):
            return self._lowered(self._entry(self._apart(args, kwargs), args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the planned step, over flat arguments."""
        return self._step(args, kwargs).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Compiled` of the planned step, the one that calls run."""
        return self._compiled(self._step(args, kwargs))

    def _compiled(self, lowered: LoweredStep) -> Any:
        with self._lock:
            group = None if lowered.is_compiled else self._group()
            return (
                lowered.compile()
                if group is None
                else compile_together(group, lowered.lower, lowered.compile, self.__name__)
            )

    def _compare(self, entry: _Entry, call: Call) -> None:
        with self._lock:
            group = None if entry.compared else self._group()
            entry.compared = True
            if group is not None:
                compare_values(group, self.__name__, [leaf.path for leaf in entry.plan.program.arguments], call.leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.is_set("jax_disable_jit"):  # the user wants to see the step's own lines run
            return self._fn(*args, **kwargs)
        args, kwargs = self._whole(args, kwargs)
        with objects.references("flax.nnx" in sys.modules):
            call = self._apart(args, kwargs)
            traced = _compat.tracers(call.leaves)
            if traced and not _compat.are_staged(traced):
                raise LoweringError(
                    f"{self.__name__} was called inside of grad, vmap or another transformation of JAX",
                    "it is a program for all devices, planned for what it computes: nothing is differentiated or "
                    "batched through it",
                    [
                        f"transform first, then shard: auto_shard(jax.grad({self.__name__}))",
                        "call the undecorated function there",
                    ],
                )
            entry = self._entry(call, args, kwargs)
            lowered = self._lowered(entry)
            if traced:  # inside of jit: a part of the outer program, with the plan's constraints
                return entry.plan.program.returned.put_back(lowered.jitted(*call.leaves), call.leaves)
            self._compare(entry, call)
            placed = self._place(call, entry.plan, lowered)
            if _compat.is_set("jax_debug_nans") or _compat.is_set("jax_debug_infs"):
                return entry.plan.program.returned.put_back(lowered.jitted(*placed), placed)  # JAX itself then looks
            compiled = self._compiled(lowered)
            return entry.plan.program.returned.put_back(compiled(*placed), placed)

    def _place(self, call: Call, plan: Plan, lowered: LoweredStep) -> list[Any]:
        placed = []
        for x, sharding, aval, leaf in zip(
            call.leaves, lowered.in_shardings, lowered.abstract, plan.program.arguments, strict=True
        ):
            array, moved = place(x, sharding, aval, leaf.path)
            if moved and not self._moved:
                self._moved = True
                if not self._quiet:
                    often = "in each call" if isinstance(x, LocalRows) else "once"
                    logger.info(
                        "arguments of %s lie otherwise than planned (first: %s): moved %s",
                        self.__name__,
                        leaf.path,
                        often,
                    )
            placed.append(array)
        if self._donate:
            placed = without_aliases(placed, {i for i in plan.program.replaces if i is not None})
        return placed

    # ---- the state ----------------------------------------------------------------------------

    def init(self, create: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """Runs `create(*args, **kwargs)` so that the state is born sharded: never whole on one device.

        Args:
          create: makes the step's first argument (a `TrainState`, an nnx module), or a tuple of its first ones
            (`model, optimizer`).
          batch: the step's other arguments (one, or a tuple of them), arrays or abstract; needed if the
            step has no plan yet. (A keyword `batch` of `create` itself: `functools.partial(create, batch=...)`.)

        Raises:
          LoweringError: no plan and no batch, or the created state has another shape than the planned one.
        """
        others = () if batch is None else batch if isinstance(batch, tuple) else (batch,)
        creation = Creation(self._fn, create, args, kwargs, None if batch is None else len(others))
        plan = self._first_plan()
        if batch is not None:
            plan = self.plan(*creation.states(creation.abstract), *others)
        if plan is None:
            raise LoweringError(
                f"{self.__name__}.init has no plan to follow",
                "how the state lies depends on the batch too",
                ["pass batch=... to init", "call .plan(state, batch) first, with jax.eval_shape's state"],
            )
        shapes = {leaf.path: leaf.shape for leaf in plan.program.arguments}
        return creation.run(plan.specs, self._jax_mesh(plan), shapes, self._group())


class _Bound:
    """A decorated method of a module: the module is the step's first argument."""

    def __init__(self, step: AutoSharded, instance: Any):
        functools.update_wrapper(self, step)
        self._step, self._instance = step, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self._step.plan(self._instance, *args, **kwargs)

    def explain(self, *args: Any, path: str | None = None, **kwargs: Any) -> str:
        if not args and not kwargs:
            return self._step.explain(path=path)
        return self._step.explain(self._instance, *args, path=path, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.lower(self._instance, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.compile(self._instance, *args, **kwargs)


def _is_weak(x: Any) -> bool:
    try:
        weakref.ref(x)
        hash(x)
    except TypeError:
        return False
    return True


@overload
def auto_shard(fn: Callable[..., Any]) -> AutoSharded: ...
@overload
def auto_shard(
    fn: None = None,
    *,
    mesh: MeshLike = None,
    pins: Pins | None = None,
    memory: float | None = None,
    search: SearchOptions | None = None,
    donate: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    like: AutoSharded | None = None,
    ragged: Ragged = "replicate",
    local: str | Sequence[str] = (),
    cache: bool = True,
    quiet: bool = False,
) -> Callable[[Callable[..., Any]], AutoSharded]: ...
def auto_shard(fn: Any = None, **options: Any) -> Any:
    """Spreads a step written for one device over all devices.

    Args:
      mesh: a jax Mesh whose axes are to be used, a `spmd_auto.cluster(...)`, or None: the devices at hand.
      pins: tree-path glob -> PartitionSpec, never overridden.
      memory: bytes per device that a plan may need (default: what the chip has).
      search: limits of the search.
      donate: give the old state's buffers to the new one (as `donate_argnums` of jit).
      static_argnums, static_argnames: arguments that are not arrays, as in jit.
      like: another `auto_shard`ed step whose state this one uses (an evaluation step).
      ragged: what becomes of a later batch whose size can't be split as the first one's was: "replicate" computes it
        whole on each device, with a warning; "refuse" raises `BatchError`.
      local: names of arguments of which each of several processes passes its own rows (of dimension 0, the same number
        on each); without it, a process' own arrays are taken for the whole. One process: no difference.
      cache: keep the plan on disk, and take one that an earlier run kept for the same program instead of searching (in
        `$SPMD_AUTO_CACHE`, or `~/.cache/spmd_auto`; `SPMD_AUTO_PLAN_CACHE=off` turns it off for all steps).
      quiet: no notices and no progress.
    """
    if fn is None:
        return lambda f: AutoSharded(f, **options)
    return AutoSharded(fn, **options)
