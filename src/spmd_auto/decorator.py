"""`@auto_shard`: a step written for one device, planned once per abstract signature and run on all of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from spmd_auto import _compat
from spmd_auto.errors import BatchError, LoweringError, StrategyError
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
from spmd_auto.runtime.methods import Bound, Method, OfInstances
from spmd_auto.runtime.options import Ragged, check_function, check_names, check_options, followed_mesh
from spmd_auto.runtime.processes import compile_together, failing_together
from spmd_auto.runtime.start import Creation
from spmd_auto.search.beam import SearchOptions
from spmd_auto.trace import Call, objects, static_arguments, take_apart, trace
from spmd_auto.trace.calls import argument_names
from spmd_auto.verify.rank import Verified

logger = logging.getLogger("spmd_auto")


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """A planned signature: its plan and, once called, its jitted step."""

    plan: Plan
    lowered: LoweredStep | None = None
    compared: bool = False  # the first call's arrays, between processes
    ahead_of_time: bool = True  # calls run the compiled program itself; False: they leave it to jit
    results: dict[int, weakref.ref[Any]] = dataclasses.field(default_factory=dict)  # the last call's, by argument


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
        like: AutoSharded | Bound | None = None,
        ragged: Ragged = "replicate",
        local: str | Sequence[str] = (),
        cache: bool = True,
        verify: Verified = False,
        quiet: bool = False,
    ):
        check_function(fn)
        functools.update_wrapper(self, fn)
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # a partial or a callable object has none
        like = _step_of(like)
        self._options: dict[str, Any] = {
            "mesh": mesh,
            "pins": pins,
            "memory": memory,
            "search": search,
            "donate": donate,
            "static_argnums": static_argnums,
            "static_argnames": static_argnames,
            "like": like,
            "ragged": ragged,
            "local": local,
            "cache": cache,
            "verify": verify,
            "quiet": quiet,
        }
        check_options(self._options)
        self._fn = fn
        self._mesh = mesh if like is None else followed_mesh(self.__name__, mesh, like.__name__, like._mesh)
        self._pins, self._memory, self._search = dict(pins or {}), memory, search
        self._donate = donate
        self._static_argnums, self._static_argnames = static_arguments(fn, static_argnums, static_argnames)
        self._like, self._cache, self._verify, self._quiet = like, cache, verify, quiet
        self._ragged: Ragged = ragged
        self._local = local_names(fn, local)
        self._entries: dict[Any, _Entry] = {}
        self._jax_meshes: dict[LogicalMesh, jax.sharding.Mesh] = {}
        self._moved = False
        self._lock = threading.RLock()
        self._of_instances = OfInstances()

    def __get__(self, instance: Any, owner: type | None = None) -> AutoSharded | Bound:
        """A decorated method: an object that is no pytree is closed over (and planned for once), as jit would have it
        with a static `self`; a module is the first argument."""
        if instance is None or isinstance(self._fn, staticmethod):
            return self
        if objects.is_object(instance) or not jax.tree_util.all_leaves([instance]):
            return Bound(self, instance, (instance,))
        with self._lock:
            found = self._of_instances.get(instance)
            if found is None:
                found = AutoSharded(Method(self._fn, instance), **self._options | self._static_without_self())
                self._of_instances.put(instance, found)
        return Bound(found, instance)

    def _static_without_self(self) -> dict[str, Any]:
        """Static arguments of the bound method; `static_argnums=0`, as with jit, is the object itself."""
        first = argument_names(self._fn, 1)[0]
        return {
            "static_argnums": tuple(n - 1 if n > 0 else n for n in self._static_argnums if n != 0),
            "static_argnames": tuple(name for name in self._static_argnames if name != first),
        }

    # ---- planning -----------------------------------------------------------------------------

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
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
        key = (call.key, _compat.trace_context()), tuple(leaf_type(x) for x in call.leaves)
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
            mesh = first.mesh if first.devices is None else first.mesh.build(first.devices)
            pins = frozen_pins(first, program) | pins  # the user's own pins come last: they win
        elif self._like is not None and not self._quiet:
            logger.warning(
                "%s is planned before %s, whose state it uses: the state is moved if that one wants it elsewhere; plan "
                "or init %s first",
                self.__name__,
                self._like.__name__,
                self._like.__name__,
            )
        with report.progress(self.__name__, self._quiet) as progress:
            plan = find_plan(
                program,
                mesh,
                pins=pins,
                memory=self._memory,
                search=self._search,
                progress=progress,
                cache=self._cache,
                verify=self._verify,
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
        return group_of(self._mesh)

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_local_rows(self._fn, self._local, self._group(), args, kwargs) if self._local else (args, kwargs)

    def _jax_mesh(self, plan: Plan) -> jax.sharding.Mesh:
        found = self._jax_meshes.get(plan.mesh)
        if found is None:
            found = self._jax_meshes[plan.mesh] = plan.mesh.build(plan.devices)
        return found

    def _lowered(self, entry: _Entry) -> LoweredStep:
        with self._lock:
            if entry.lowered is None:
                entry.lowered = entry.plan.lower_step(self._jax_mesh(entry.plan), self._donate)
                entry.ahead_of_time = all(_compat.takes_compiled(aval.dtype) for aval in entry.lowered.abstract)
            return entry.lowered

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoweredStep:
        args, kwargs = self._whole(args, kwargs)
        with objects.references("flax.nnx" in sys.modules):
            return self._lowered(self._entry(self._apart(args, kwargs), args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the planned step, over flat arguments."""
        return self._step(args, kwargs).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Compiled` of the planned step: the one that calls run, but for arguments of less than a byte."""
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

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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
            placed = self._place(call, entry, lowered)
            flat = self._run(entry, lowered, placed)
            replaces = entry.plan.program.replaces
            entry.results = {i: weakref.ref(flat[o]) for o, i in enumerate(replaces) if i is not None}
            return entry.plan.program.returned.put_back(flat, placed)

    def _run(self, entry: _Entry, lowered: LoweredStep, placed: list[Any]) -> Any:
        # JAX itself looks for them, in its own call
        looks = _compat.is_set("jax_debug_nans") or _compat.is_set("jax_debug_infs")
        if not looks and entry.ahead_of_time:
            return self._compiled(lowered)(*placed)
        if self._group() is not None:
            self._compiled(lowered)  # the processes compare their programs before they run them
        return lowered.jitted(*placed)

    def _place(self, call: Call, entry: _Entry, lowered: LoweredStep) -> list[Any]:
        placed, leaves = [], entry.plan.program.arguments
        for x, sharding, aval, leaf in zip(call.leaves, lowered.in_shardings, lowered.abstract, leaves, strict=True):
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
            donated = {i for i in entry.plan.program.replaces if i is not None}
            own = {i for i, result in entry.results.items() if result() is call.leaves[i]}
            placed = without_aliases(placed, call.leaves, donated, own)
        return placed

    # ---- the state ----------------------------------------------------------------------------

    def init(self, create: Callable[..., Any], /, *args: Any, batch: Any = None, **kwargs: Any) -> Any:
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


def _step_of(like: Any) -> AutoSharded | None:
    """The step that another one follows.

    Raises:
      StrategyError: it is no decorated step.
    """
    like = like.step if isinstance(like, Bound) else like
    if like is None or isinstance(like, AutoSharded):
        return like
    raise StrategyError(
        f"like={getattr(like, '__name__', like)!r} is a {type(like).__name__}",
        "the state of another auto_shard'ed step is followed: where it lies is known to that step",
        ["like=train_step, the name that the decorated step has", "pins=plan.specs to follow a plan"],
    )


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
    like: AutoSharded | Bound | None = None,
    ragged: Ragged = "replicate",
    local: str | Sequence[str] = (),
    cache: bool = True,
    verify: Verified = False,
    quiet: bool = False,
) -> Callable[[Callable[..., Any]], AutoSharded]: ...
def auto_shard(fn: Any = None, **options: Any) -> Any:
    """Spreads a step written for one device over all devices.

    Args:
      mesh: a jax Mesh (or AbstractMesh) whose axes are to be used, a `spmd_auto.cluster(...)`, or None: the devices at
        hand.
      pins: tree-path glob -> PartitionSpec, never overridden.
      memory: bytes per device that a plan may need (default: what the chip has).
      search: limits of the search.
      donate: give the old state's buffers to the new one, as jit does with what `donate_argnums` names. Nothing has to
        be named: what a result takes the place of is known. False: nothing is given away.
      static_argnums, static_argnames: arguments that are not arrays, as in jit.
      like: another `auto_shard`ed step whose state this one uses (an evaluation step), and on whose mesh it runs.
      ragged: what becomes of a later batch whose size can't be split as the first one's was: "replicate" computes it
        whole on each device, with a warning; "refuse" raises `BatchError`.
      local: names of arguments of which each of several processes passes its own rows (of dimension 0, the same number
        on each); without it, a process' own arrays are taken for the whole. One process: no difference.
      cache: keep the plan on disk, and take one that an earlier run kept for the same program instead of searching (in
        `$SPMD_AUTO_CACHE`, or `~/.cache/spmd_auto`; `SPMD_AUTO_PLAN_CACHE=off` turns it off for all steps).
      verify: compile the best few plans and take the one that is best by the bytes and the memory of its program: True
        for the devices at hand, or a target ("tpu:v5e:4x4"). What is compiled is kept, as plans are.
      quiet: no notices and no progress.

    Raises:
      TraceError: no function, or arguments named that it does not have.
      StrategyError, PinError, BatchError, VerifyError: an option that means nothing.
      MeshError: `like` and another mesh than that step's.
    """
    check_names(options)
    if fn is None:
        return lambda f: AutoSharded(f, **options)
    return AutoSharded(fn, **options)
