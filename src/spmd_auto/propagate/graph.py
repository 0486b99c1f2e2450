"""The program as a flat list of operations with factors: calls inlined, loops entered once with their trip count.

A scan becomes *link* operations (`carry_in`, `xs`, `carry`, `carry_out`, `ys`) around its body, so that
dimensions flow through it like through any other operation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from spmd_auto import _compat
from spmd_auto.propagate.convolution import convolution_flops
from spmd_auto.propagate.factors import Factor, Rule
from spmd_auto.propagate.rules import opaque_reason, rule_for
from spmd_auto.trace import Program, Role

# Bits of `Value.depends`: which roles of arguments a value is computed from.
PARAMETER, OPTIMIZER, BATCH, OTHER = 1, 2, 4, 8
_BIT = {
    Role.PARAMETER: PARAMETER,
    Role.OPTIMIZER: OPTIMIZER,
    Role.BATCH: BATCH,
    Role.COUNTER: OTHER,
    Role.KEY: OTHER,
}

LINKS = ("carry_in", "xs", "carry", "carry_out", "ys", "branch", "result")
CALLS = ("jit", "pjit", "call", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
CALLS += ("remat2", "checkpoint", "remat_opt", "linear_call", "composite", "xla_metadata_call")

Site = tuple[int, ...]  # indices of equations from the outermost jaxpr inwards (branches of a cond count too)


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One array of the flat program. `depends` has a bit per role of the arguments it is computed from."""

    id: int
    shape: tuple[int, ...]
    itemsize: int
    opaque: bool  # PRNG keys, mutable arrays, tokens: never constrained
    depends: int = 0
    path: str = ""  # of an argument
    bytes: int = 0
    mutable: bool = False  # an array that operations write into
    dtype: Any = None  # of its elements, as traced

    def __post_init__(self) -> None:
        self.bytes = math.prod(self.shape) * self.itemsize

    @property
    def placed(self) -> bool:
        """Whether it is worth a spec: an array computed from the arguments (the rest is cheap to recompute)."""
        return bool(self.depends) and bool(self.shape) and not self.opaque


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """One operation.

    `trips` is how often it runs per step, `loop` the sites of the loops and branches around it, `backward`
    whether reverse-mode differentiation made it (the cotangents' pass).
    """

    id: int
    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    rule: Rule
    trips: int
    loop: tuple[Site, ...]
    site: Site
    signature: int
    flops: int = 0
    eqn: Any = None
    backward: bool = False
    calls: tuple[Any, ...] = ()  # equations of the calls around it, outermost first

    @property
    def cuts_regions(self) -> bool:
        """Contractions, gathers and scatters: the two sides may order their mesh axes differently."""
        return self.flops > 0 or self.name == "gather" or self.name.startswith("scatter")

    @property
    def source(self) -> str:
        """`file:line (function)` of the user's code; of the innermost call with a line, if JAX's own code made it."""
        known = (_compat.source_line(eqn) for eqn in (self.eqn, *reversed(self.calls)) if eqn is not None)
        return next((line for line in known if line), "")


@dataclasses.dataclass(slots=True, eq=False)
class Loop:
    """The loop at `site`: values of its body's inputs (consts, carries, xs) and results (carries, ys), its results."""

    site: Site
    body_in: list[Value]
    body_out: list[Value]
    results: list[Value]
    consts: int
    carries: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Barrier:
    """Operations `first` to `last` (exclusive) read the values with these ids behind an optimization barrier: a
    rematerialised region, which the compiler may not merge with the first computation."""

    first: int
    last: int
    values: frozenset[int]


@dataclasses.dataclass(slots=True, eq=False)
class Unknown:
    """A primitive without a rule: kept whole, reported once.

    `why` says what is opaque about it, and is empty if it is merely not known; `source` is where it stands first, and
    `bytes` what its operands and results hold, over all its applications in a step.
    """

    primitive: str
    source: str
    bytes: int
    why: str = ""

    def __str__(self) -> str:
        why = self.why or "it has no sharding rule (spmd_auto.register_rule gives it one)"
        return f"{self.primitive} at {self.source or 'an unknown line'} keeps its arrays whole: {why}"


@dataclasses.dataclass(slots=True, eq=False)
class Graph:
    """The flat program: values, operations, loops, and where each equation went (`by_site`).

    `roots` are used though no result is made of them: predicates, and operands of effects.
    """

    values: list[Value] = dataclasses.field(default_factory=list)
    ops: list[Op] = dataclasses.field(default_factory=list)
    arguments: list[Value] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)
    loops: dict[Site, Loop] = dataclasses.field(default_factory=dict)
    branches: dict[Site, list[Value]] = dataclasses.field(default_factory=dict)  # results of a cond
    by_site: dict[Site, Op] = dataclasses.field(default_factory=dict)
    roots: list[Value] = dataclasses.field(default_factory=list)
    barriers: list[Barrier] = dataclasses.field(default_factory=list)  # an inner one before the one around it
    unknown: dict[str, Unknown] = dataclasses.field(default_factory=dict)
    signatures: int = 0


def build_graph(program: Program, widen: bool = False) -> Graph:
    """Flattens a program. Raises nothing for unknown primitives: see `Graph.unknown`.

    Args:
      widen: count bfloat16 and float16 as four bytes, as XLA computes and sends them on CPUs.
    """
    return _Builder(program, widen).graph


class _Builder:
    def __init__(self, program: Program, widen: bool):
        self.graph = Graph()
        self.widen = widen
        self.signature_ids: dict[Any, int] = {}
        self.loop: tuple[Site, ...] = ()
        self.backward = False
        self.calls: tuple[Any, ...] = ()
        self.rules: dict[int, Rule] = {}
        self.made: dict[Any, Rule | None] = {}
        jaxpr = program.jaxpr
        for leaf, var in zip(program.arguments, _compat.open_jaxpr(jaxpr).invars, strict=True):
            value = self.value(var.aval, leaf.path)
            value.depends = _BIT[leaf.role] if leaf.role is not None else OTHER
            self.graph.arguments.append(value)
        self.graph.results = self.returned(program.replaces, self.run(jaxpr, self.graph.arguments, 1, ()))
        self.graph.signatures = len(self.signature_ids)

    def value(self, aval: Any, path: str = "") -> Value:
        shape = tuple(getattr(aval, "shape", ()))
        mutable = _compat.is_ref(aval)
        opaque = mutable or not _compat.has_shape(aval) or _compat.is_extended(aval.dtype)
        itemsize = _compat.itemsize(aval)
        if self.widen and itemsize == 2 and _compat.is_float(aval):
            itemsize = 4
        dtype = getattr(aval, "dtype", None)
        value = Value(len(self.graph.values), shape, itemsize, opaque, 0, path, mutable=mutable, dtype=dtype)
        self.graph.values.append(value)
        return value

    def copied(self, value: Value) -> Value:
        copy = dataclasses.replace(value, id=len(self.graph.values), depends=0, path="")
        self.graph.values.append(copy)
        return copy

    def returned(self, replaces: Sequence[int | None], results: list[Value]) -> list[Value]:
        """Results that may lie otherwise than what they are: an argument, another result, or a constrained value.

        An argument that is its own next state lies as it lay.
        """
        taken = {v.id for v in self.graph.arguments}
        taken |= {op.results[0].id for op in self.graph.ops if op.name == "sharding_constraint"}
        out: list[Value] = []
        for value, replaced in zip(results, replaces, strict=True):
            own = replaced is not None and self.graph.arguments[replaced] is value
            if value.id in taken and value.placed and not own:
                result = self.copied(value)
                self.link("result", value, result, 0, 0, 1, ())
                value = result
            taken.add(value.id)
            out.append(value)
        return out

    def run(self, jaxpr: Any, args: Sequence[Value], trips: int, site: Site) -> list[Value]:
        inner = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Value] = {}
        for var, const in zip(inner.constvars, _compat.consts_of(jaxpr), strict=False):
            env[var] = self.value(_compat.get_aval(const))
        env.update(zip(inner.invars, args, strict=True))

        def read(var: Any) -> Value:
            return self.value(var.aval) if isinstance(var, _compat.Literal) else env[var]

        outer = self.backward
        for index, eqn in enumerate(inner.eqns):
            self.backward = outer or _compat.is_transposed(eqn)
            results = self.apply(eqn, [read(v) for v in eqn.invars], trips, (*site, index))
            env.update(zip(eqn.outvars, results, strict=True))
        self.backward = outer
        return [read(v) for v in inner.outvars]

    def apply(self, eqn: Any, operands: list[Value], trips: int, site: Site) -> list[Value]:
        name = eqn.primitive.name
        if name in CALLS:
            operands = self.constrained(eqn, "in_shardings", operands, trips, site)
            first = len(self.graph.ops)
            around, self.calls = self.calls, (*self.calls, eqn)
            results = self.run(_compat.call_jaxpr(eqn), operands, trips, site)
            self.calls = around
            if behind_barrier(eqn, bool(self.loop)):
                behind = frozenset(v.id for v in operands if v.depends)
                self.graph.barriers.append(Barrier(first, len(self.graph.ops), behind))
            return self.constrained(eqn, "out_shardings", results, trips, site)
        expanded = _compat.expand(eqn)
        if expanded is not None:
            return self.run(expanded, operands, trips, site)
        handler = CONTROL.get(name)
        if handler is not None and not any(v.mutable for v in operands):
            return handler(self, eqn, operands, trips, site)
        results = [self.value(v.aval) for v in eqn.outvars]
        if not results or eqn.effects:  # an effect keeps its operands in use
            self.graph.roots += operands
        if not results:  # there is nothing to split
            self.written(operands)
            if any(v.mutable for v in operands):
                self.keep_whole(name, eqn, operands, trips)
            return results
        self.emit(name, operands, results, trips, site, None, eqn)
        return results

    def constrained(self, eqn: Any, side: str, values: list[Value], trips: int, site: Site) -> list[Value]:
        """The values of a call with shardings of its own: each is as if under a `with_sharding_constraint`."""
        out = list(values)
        for k, _ in _compat.own_shardings(eqn, side):
            out[k] = self.copied(values[k])
            self.link("sharding_constraint", values[k], out[k], 0, 0, trips, call_site(site, side, k))
        return out

    def emit(
        self,
        name: str,
        operands: Sequence[Value],
        results: Sequence[Value],
        trips: int,
        site: Site,
        rule: Rule | None,
        eqn: Any = None,
    ) -> Op:
        if rule is None:
            rule = self.rule(name, eqn, operands, results)
        if rule is None:
            rule = ()
            self.keep_whole(name, eqn, (*operands, *results), trips)
        key = (
            name,
            tuple((v.shape, v.itemsize) for v in operands),
            tuple((v.shape, v.itemsize) for v in results),
            rule,
            flops := _flops(name, eqn, operands, results),
            _priced(eqn),
        )
        signature = self.signature_ids.setdefault(key, len(self.signature_ids))
        op = Op(
            len(self.graph.ops),
            name,
            tuple(operands),
            tuple(results),
            rule,
            trips,
            self.loop,
            site,
            signature,
            flops,
            eqn,
            self.backward,
            self.calls,
        )
        self.graph.ops.append(op)
        if eqn is not None:
            self.graph.by_site[site] = op
        self.depend(op)
        return op

    def rule(self, name: str, eqn: Any, operands: Sequence[Value], results: Sequence[Value]) -> Rule | None:
        """The rule of an equation; made once for equations that are alike (most of a deep model's are)."""
        shapes = tuple([v.shape for v in operands]), tuple([v.shape for v in results])
        try:
            key = (name, shapes, tuple(eqn.params.items()))
            if key not in self.made:
                self.made[key] = rule_for(name, *_compat.eqn_parts(eqn))
            return self.made[key]
        except TypeError:  # a parameter that can't be hashed
            return rule_for(name, *_compat.eqn_parts(eqn))

    def keep_whole(self, name: str, eqn: Any, values: Sequence[Value], trips: int) -> None:
        """Takes down that an operation keeps `values` whole."""
        # a loop over a mutable array is known, but not looked into
        why = "it works on a mutable array" if name in CONTROL else opaque_reason(name) or ""
        seen = self.graph.unknown.setdefault(name, Unknown(name, _compat.source_line(eqn), 0, why))
        seen.bytes += sum(v.bytes for v in values) * trips

    @staticmethod
    def written(operands: Sequence[Value]) -> None:
        """A mutable array depends on all that stands beside it where it may be written."""
        bits = 0
        for v in operands:
            bits |= v.depends
        for v in operands:
            if v.mutable:
                v.depends |= bits

    @staticmethod
    def depend(op: Op) -> bool:
        bits = 0
        for v in op.operands:
            bits |= v.depends
        changed = False
        for v in (*op.results, *(v for v in op.operands if v.mutable)):
            if v.depends | bits != v.depends:
                v.depends |= bits
                changed = True
        return changed

    def link(
        self, name: str, source: Value, target: Value, skip_source: int, skip_target: int, trips: int, site: Site
    ) -> None:
        """A link joins the dimensions of `source` and `target` one to one after skipping leading ones."""
        rule = tuple(
            Factor(source.shape[d + skip_source], ((0, d + skip_source),), ((0, d + skip_target),))
            for d in range(len(source.shape) - skip_source)
        )
        self.emit(name, [source], [target], trips, site, rule)

    def settle(self, first_op: int) -> None:
        """Repeats dependence over the operations of a loop until its carries agree."""
        changed = True
        while changed:
            changed = False
            for op in self.graph.ops[first_op:]:
                changed |= self.depend(op)

    # ---- control flow -------------------------------------------------------------------------

    def scan(self, eqn: Any, operands: list[Value], trips: int, site: Site) -> list[Value]:
        consts, carries = _compat.scan_counts(eqn.params)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        outer, self.loop, first = self.loop, (*self.loop, site), len(self.graph.ops)
        body_in: list[Value] = []
        for k, (operand, var) in enumerate(zip(operands, _compat.open_jaxpr(body).invars, strict=True)):
            if k < consts:
                body_in.append(operand)
                continue
            value = self.value(var.aval)
            stacked = k >= consts + carries
            self.link("xs" if stacked else "carry_in", operand, value, int(stacked), 0, trips, site)
            body_in.append(value)
        body_out = self.run(body, body_in, trips * length, site)
        results: list[Value] = []
        self.graph.loops[site] = Loop(site, body_in, body_out, results, consts, carries, length)
        for k, (value, var) in enumerate(zip(body_out, eqn.outvars, strict=True)):
            result = self.value(var.aval)
            stacked = k >= carries
            self.link("ys" if stacked else "carry_out", value, result, 0, int(stacked), trips, site)
            if not stacked:
                self.link("carry", value, body_in[consts + k], 0, 0, trips * length, site)
            results.append(result)
        self.loop = outer
        self.settle(first)
        return results

    def while_loop(self, eqn: Any, operands: list[Value], trips: int, site: Site) -> list[Value]:
        """A while loop counts as one trip: its length is not known on paper."""
        p = eqn.params
        c, b = p["cond_nconsts"], p["body_nconsts"]
        outer, self.loop, first = self.loop, (*self.loop, site), len(self.graph.ops)
        start = operands[c + b :]
        carry = [self.value(v.aval) for v in eqn.outvars]
        for source, target in zip(start, carry, strict=True):
            self.link("carry_in", source, target, 0, 0, trips, site)
        self.graph.roots += self.run(p["cond_jaxpr"], [*operands[:c], *carry], trips, (*site, 0))
        body_out = self.run(p["body_jaxpr"], [*operands[c : c + b], *carry], trips, (*site, 1))
        results = [self.value(v.aval) for v in eqn.outvars]
        self.graph.loops[site] = Loop(site, carry, body_out, results, 0, len(carry), 1)
        for value, back, result in zip(body_out, carry, results, strict=True):
            self.link("carry", value, back, 0, 0, trips, site)
            self.link("carry_out", value, result, 0, 0, trips, site)
        self.loop = outer
        self.settle(first)
        return results

    def cond(self, eqn: Any, operands: list[Value], trips: int, site: Site) -> list[Value]:
        """Every branch counts as taken: an upper bound of its price."""
        self.graph.roots.append(operands[0])
        results = self.graph.branches[site] = [self.value(v.aval) for v in eqn.outvars]
        outer = self.loop
        for k, branch in enumerate(eqn.params["branches"]):
            self.loop = (*outer, (*site, k))
            outs = self.run(branch, operands[1:], trips, (*site, k))
            self.loop = outer
            for value, result in zip(outs, results, strict=True):
                self.link("branch", value, result, 0, 0, trips, site)
        return results

    def linear_solve(self, eqn: Any, operands: list[Value], trips: int, site: Site) -> list[Value]:
        """Only the function that solves is run; the others were for differentiation."""
        jaxpr, positions = _compat.linear_solve(eqn)
        return self.run(jaxpr, [operands[k] for k in positions], trips, site)


CONTROL: dict[str, Callable[[_Builder, Any, list[Value], int, Site], list[Value]]] = {
    "scan": _Builder.scan,
    "while": _Builder.while_loop,
    "cond": _Builder.cond,
    "custom_linear_solve": _Builder.linear_solve,
}


def behind_barrier(eqn: Any, inside: bool) -> bool:
    """Whether a call is a recomputation that is lowered behind an optimization barrier.

    `prevent_cse=False` is meant for loops, where the first computation is in another body.  Outside of one (`inside`)
    the compiler would merge the two and keep what was to be computed again, so the barrier stays.
    """
    if not eqn.params.get("differentiated"):
        return False
    return not inside or bool(eqn.params.get("prevent_cse", True))


def call_site(site: Site, side: str, k: int) -> Site:
    """Where the sharding that a call gives its k-th operand or result stands: no equation is there."""
    return (*site, -1 - 2 * k - (side == "out_shardings"))


def _priced(eqn: Any) -> tuple[Any, ...]:
    """Parameters that a price reads beside shapes and rule: where the blocks of a split dimension go, how rows are
    indexed."""
    if eqn is None:
        return ()
    return tuple(eqn.params.get(name) for name in ("start_indices", "padding_config", "dimension_numbers"))


def _flops(name: str, eqn: Any, operands: Sequence[Value], results: Sequence[Value]) -> int:
    """Multiply-adds count two; only contractions count (the rest is bound by memory)."""
    if name in ("dot_general", "scaled_dot"):
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * math.prod(results[0].shape) * math.prod(operands[0].shape[d] for d in contract)
    if name == "ragged_dot_general" or name == "ragged_dot":
        return 2 * math.prod(operands[0].shape) * results[0].shape[-1]
    if name == "conv_general_dilated":
        return convolution_flops(eqn.params, operands[0].shape, operands[1].shape, results[0].shape)
    return 0
