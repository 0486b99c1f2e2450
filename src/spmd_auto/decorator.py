"""`@auto_shard`: a step written for one device, planned once per abstract signature and run on all of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import LoweringError, TraceError
from spmd_auto.lower import LoweredStep
from spmd_auto.mesh import LogicalMesh
from spmd_auto.plan.make import MeshLike, make_plan
from spmd_auto.plan.pins import Pins
from spmd_auto.plan.plan import Plan
from spmd_auto.search.beam import SearchOptions
from spmd_auto.trace import Leaf, Program, Role, static_arguments, trace

logger = logging.getLogger("spmd_auto")


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """A planned signature: its plan and, once called, its jitted step."""

    plan: Plan
    lowered: LoweredStep | None = None


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
    ):
        functools.update_wrapper(self, fn)
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # a partial or a callable object has none
        self._fn = fn
        self._mesh, self._pins, self._memory, self._search = mesh, dict(pins or {}), memory, search
        self._donate = donate
        self._static_argnums, self._static_argnames = static_arguments(fn, static_argnums, static_argnames)
        self._like = like
        self._entries: dict[Any, _Entry] = {}
        self._jax_meshes: dict[LogicalMesh, jax.sharding.Mesh] = {}
        self._resharded = False

    # ---- planning -----------------------------------------------------------------------------

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments (arrays or `ShapeDtypeStruct`s); planned once per abstract signature."""
        return self._entry(args, kwargs).plan

    def explain(self, *args: Any, path: str | None = None, **kwargs: Any) -> str:
        """The plan in words; without arguments that of the first signature."""
        if not args and not kwargs:
            if not self._entries:
                raise LoweringError(
                    f"{self.__name__} has no plan yet", "it plans at its first call", ["pass the arguments to explain"]
                )
            return next(iter(self._entries.values())).plan.explain(path)
        return self.plan(*args, **kwargs).explain(path)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # with their types: 1, 1.0 and True are equal, but trace differently
        static = tuple((type(args[i]), args[i]) for i in self._static_argnums if i < len(args))
        named = tuple((k, type(kwargs[k]), kwargs[k]) for k in self._static_argnames if k in kwargs)
        flat, tree = self._flatten(args, kwargs)
        return tree, static, named, tuple(_shape_dtype(x) for x in flat)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        dynamic = tuple(a for i, a in enumerate(args) if i not in self._static_argnums)
        named = {k: v for k, v in kwargs.items() if k not in self._static_argnames}
        return jax.tree_util.tree_flatten((dynamic, named))

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        key = self._signature(args, kwargs)
        try:
            entry = self._entries.get(key)
        except TypeError as error:
            raise TraceError(
                f"{self.__name__} has a static argument that can't be hashed: {error}",
                "a step is planned once for each value of its static arguments",
                ["a tuple instead of a list", "a frozen dataclass"],
            ) from error
        if entry is None:
            entry = self._entries[key] = _Entry(self._make_plan(args, kwargs))
        return entry

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        program = trace(
            self._fn, *args, static_argnums=self._static_argnums, static_argnames=self._static_argnames, **kwargs
        )
        mesh, pins = self._mesh, dict(self._pins)
        first = self._first_plan()
        if first is not None:  # the state's specs are frozen by the first plan
            mesh = first.mesh
            pins = _frozen(first, program) | pins  # the user's own pins come last: they win
        plan = make_plan(program, mesh, pins=pins, memory=self._memory, search=self._search)
        logger.info(
            "%r found in %.2f s (%d states)%s",
            plan,
            plan.search.seconds,
            plan.search.states,
            f"; stopped by its {plan.search.stopped}" if plan.search.stopped else "",
        )
        for unknown in plan.analysis.graph.unknown.values():
            logger.warning("%s (%d bytes)", unknown, unknown.bytes)
        return plan

    def _first_plan(self) -> Plan | None:
        if self._entries:
            return next(iter(self._entries.values())).plan
        return self._like._first_plan() if self._like is not None else None

    # ---- running ------------------------------------------------------------------------------

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
        if entry.lowered is None:
            entry.lowered = entry.plan.lower_step(self._jax_mesh(entry.plan), self._donate)
        return entry.lowered

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the planned step."""
        return self._lowered(self._entry(args, kwargs)).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Compiled` of the planned step, the one that calls run."""
        return self._lowered(self._entry(args, kwargs)).compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self._entry(args, kwargs)
        lowered = self._lowered(entry)
        flat, _ = self._flatten(args, kwargs)
        if any(_compat.is_tracer(x) for x in flat):
            raise LoweringError(
                f"{self.__name__} was called inside another JAX transformation (jit, grad, vmap, scan, ...)",
                "it is a compiled program for all devices: nothing can be traced through it",
                [
                    f"transform first, then shard: auto_shard(jax.grad({self.__name__}))",
                    "call the undecorated function there",
                ],
            )
        placed = [
            self._place(x, sharding, aval, leaf.path)
            for x, sharding, aval, leaf in zip(
                flat, lowered.in_shardings, lowered.abstract, entry.plan.program.arguments, strict=True
            )
        ]
        if self._donate:
            placed = _without_aliases(placed, {i for i in entry.plan.program.replaces if i is not None})
        return jax.tree_util.tree_unflatten(entry.plan.program.out_tree, lowered.compile()(*placed))

    def _place(self, x: Any, sharding: Any, aval: jax.ShapeDtypeStruct, path: str) -> Any:
        if isinstance(x, jax.Array):
            if x.is_deleted():
                raise LoweringError(
                    f"argument leaf {path!r} was donated to an earlier call and is gone",
                    "a step gives the buffers of its old state to the new one",
                    ["use the state that the step returned", "auto_shard(donate=False)"],
                )
            if x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            if x.ndim and not self._resharded and len(x.sharding.device_set) >= 1 and x.committed:
                self._resharded = True
                logger.info("arguments of %s lie otherwise than planned (first: %s): moved once", self.__name__, path)
        elif not _compat.is_extended(aval.dtype):
            x = np.asarray(x, aval.dtype)
        return jax.device_put(x, sharding)

    # ---- the state ----------------------------------------------------------------------------

    def init(self, create: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """Runs `create(*args, **kwargs)` so that the state is born sharded: never whole on one device.

        Args:
          create: makes the step's first argument (the state).
          batch: the step's other arguments (one, or a tuple of them), arrays or abstract; needed if the
            step has no plan yet.

        Raises:
          LoweringError: no plan and no batch, or the created state has another shape than the planned one.
        """
        try:
            abstract_state = jax.eval_shape(create, *args, **kwargs)
        except Exception as error:
            raise TraceError(
                f"{self.__name__}.init: the state can't be created under tracing: {type(error).__name__}",
                "the state is created by a compiled program, so that it is born in pieces (see the cause above)",
                ["functools.partial(create, size=...) for arguments that are no arrays"],
            ) from error
        plan = self._first_plan()
        if batch is not None:
            others = batch if isinstance(batch, tuple) else (batch,)
            plan = self.plan(abstract_state, *others)
        if plan is None:
            raise LoweringError(
                f"{self.__name__}.init has no plan to follow",
                "how the state lies depends on the batch too",
                ["pass batch=... to init", "call .plan(state, batch) first, with jax.eval_shape's state"],
            )
        mesh = self._jax_mesh(plan)
        by_path = plan.specs
        program = plan.program
        head = program.arguments[0].path.split("/")[0]
        leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_state)
        shardings = []
        for path, leaf in leaves:
            name = "/".join(p for p in (head, jax.tree_util.keystr(path, simple=True, separator="/")) if p)
            if name not in by_path or program.find(name).shape != leaf.shape:
                raise LoweringError(
                    f"{self.__name__}.init: the created state has a leaf {name!r} of shape {leaf.shape}",
                    "the planned state has none like it",
                    ["create the state that the step was planned for"],
                )
            shardings.append(jax.sharding.NamedSharding(mesh, by_path[name]))
        return jax.jit(create, out_shardings=jax.tree_util.tree_unflatten(tree, shardings))(*args, **kwargs)


def _without_aliases(arrays: list[Any], donated: set[int]) -> list[Any]:
    """Copies of arrays that are passed twice where one of the two is donated: a buffer can be given away only once."""
    first: dict[int, int] = {}
    out = list(arrays)
    for i, x in enumerate(arrays):
        k = first.setdefault(id(x), i)
        if k != i and (i in donated or k in donated):
            out[i] = jax.device_put(jnp.copy(x), x.sharding)
    return out


def _frozen(first: Plan, program: Program) -> dict[str, Any]:
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


def _shape_dtype(x: Any) -> tuple[Any, ...]:
    # 2.0 keeps a bfloat16 array bfloat16; a float32 array of 2, or np.float64(2), does not
    if isinstance(x, (float, complex)) and not isinstance(x, np.generic):
        return (), np.dtype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)), "weak"
    if isinstance(x, (bool, int)):
        return (), np.dtype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
    shape = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return shape, dtype if _compat.is_extended(dtype) else jax.dtypes.canonicalize_dtype(dtype)


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
    """
    if fn is None:
        return lambda f: AutoSharded(f, **options)
    return AutoSharded(fn, **options)
