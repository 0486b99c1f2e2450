"""What lowering puts into the program, decided beforehand as plain data: constraints and manual operations.

A cut point (contraction, gather, scatter, reduction) gets its operands constrained first to the value's own
spec, then to the form's; its raw result too, or the compiler would take another form.  An operation whose
partial sums a constraint can't express becomes a manual `shard_map` with staged reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from spmd_auto.cost.operation import ON_SHARDS, OpForm, stageable
from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.cost.reshard import ReshardTable, gather_steps
from spmd_auto.cost.structure import SumTree, reads_stored
from spmd_auto.mesh.collectives import ALL_REDUCE
from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.assignment import axis_places
from spmd_auto.propagate.factors import Kind
from spmd_auto.propagate.graph import Graph, Op, Site, Value

Own = Callable[[Value], Spec]
_WINDOWED = ("reduce_", "select_and_scatter")
_AS_IT_IS = ("top_k",)  # on CPUs XLA gathers it along every dimension


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One staged reduction inside a manual operation: over `axes`; scattered over `dim`, or whole if None."""

    axes: tuple[int, ...]
    dim: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Constraints around one operation.

    Attributes:
      operands: per operand the specs to constrain it to, in order.
      results: per result likewise.
      again: operands gathered again for the backward pass: they pass a barrier together with the others, or
        the compiler would keep what the forward pass gathered.
      manual: staged reductions if the operation is written out by hand, else None.
      targets, reduced: operand specs and the result spec after the steps, of a manual operation.
      moves: dimensions along which blocks change places in a manual operation; () if it runs on shards as it is; None
        if it is no such operation. It has no reductions.
      raws: specs of its results.
      edges: (operand, dimension, elements before, elements after) that its devices get from their neighbours.
    """

    operands: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    again: tuple[int, ...] = ()
    manual: tuple[Step, ...] | None = None
    targets: tuple[Spec, ...] = ()
    reduced: Spec = ()
    edges: tuple[tuple[int, int, int, int], ...] = ()
    moves: tuple[int, ...] | None = None
    raws: tuple[Spec, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredSum:
    """A sum of contractions, combined once at its root: one manual operation from the leaves' operands.

    Attributes:
      leaves: per leaf (by site) the specs of its operands.
      steps, reduced: reductions at the root and the spec after them.
      stored: the root's own spec.
    """

    leaves: dict[Site, tuple[Spec, ...]]
    steps: tuple[Step, ...]
    reduced: Spec
    stored: Spec


@dataclasses.dataclass(frozen=True, slots=True)
class LoopSpecs:
    """Specs of a loop's carries at the start and the end of its body, and of its results; None: not placed."""

    start: tuple[Spec | None, ...]
    end: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Placements:
    """Everything `lower` needs of a plan, by site of the equation."""

    mesh: LogicalMesh
    by_site: dict[Site, Placement]
    sums: dict[Site, DeferredSum]  # by the root's site
    pending: frozenset[Site]  # leaves and what is between them and the root: evaluated at the root
    loops: dict[Site, LoopSpecs]
    branches: dict[Site, tuple[Spec | None, ...]]  # results of a cond
    arguments: tuple[Spec, ...]
    results: tuple[Spec, ...]
    last: tuple[tuple[Spec, ...], ...] = ()  # per result the way to its spec, where it is the copy of another value


def place(pricer: Pricer, priced: Priced) -> Placements:
    analysis, mesh = pricer.analysis, pricer.mesh
    graph, classes, structure = analysis.graph, analysis.classes, pricer.structure

    def own(value: Value) -> Spec:
        return priced.specs[classes.of_value[value.id]]

    sums: dict[Site, DeferredSum] = {}
    pending: set[Site] = set()
    between: set[Site] = set()  # evaluated inside their sum's manual operation: nothing to constrain
    for tree in structure.trees:
        if pricer.sum_group(tree.group, priced.forms)[2]:
            sums[graph.ops[tree.root].site] = _deferred_sum(pricer, priced, tree, own)
            between.update(graph.ops[i].site for i in tree.between)
            pending.update(graph.ops[i].site for i in (*tree.leaves, *tree.between))
    by_site: dict[Site, Placement] = {}
    for op in graph.ops:
        index = classes.of_op[op.id]
        if index is None or op.eqn is None:
            continue
        form = priced.forms[index]
        if op.site in between:
            continue
        cut = op.cuts_regions or op.name.startswith(_WINDOWED) or op.name in (*ON_SHARDS, *_AS_IT_IS)
        if form is not None and (cut or _moves(op, form) or _pinned(pricer, op)):
            placement = _cut_point(pricer.reshards, op, form, own, op.site in pending)
        else:
            placement = _elementwise(pricer.reshards, op, form, own) if form is not None else None
        if placement is not None:
            assert form is not None
            by_site[op.site] = dataclasses.replace(placement, again=_again(analysis, mesh, op, form, own))
        elif op.name in ("add", "add_any") and op.results[0].placed:
            by_site[op.site] = Placement(((),) * len(op.operands), ((own(op.results[0]),),))
    copied = {op.results[0].id: own(op.operands[0]) for op in graph.ops if op.name == "result"}
    return Placements(
        mesh,
        by_site,
        sums,
        frozenset(pending),
        _loops(graph, own),
        {site: _placed(results, own) for site, results in graph.branches.items()},
        tuple(own(v) for v in graph.arguments),
        tuple(own(v) for v in graph.results),
        tuple(pricer.reshards.path(copied[v.id], own(v)) if v.id in copied else () for v in graph.results),
    )


def _pinned(pricer: Pricer, op: Op) -> bool:
    """Whether `op` is a `with_sharding_constraint` of the user, on the plan's own mesh and memory."""
    if op.name != "sharding_constraint":
        return False
    classes = pricer.analysis.classes
    memory = op.eqn.params["sharding"].memory_kind
    return classes.values[classes.of_value[op.results[0].id]].pin is not None and memory in (None, "device")


def _again(analysis: Analysis, mesh: LogicalMesh, op: Op, form: OpForm, own: Own) -> tuple[int, ...]:
    """Operands that the backward pass gathers of stored parameters."""
    if not op.backward:
        return ()
    return tuple(
        k
        for k, v in enumerate(op.operands)
        if v.placed and reads_stored(analysis, v.id) and gather_steps(mesh, own(v), form.targets[k])
    )


def _cut_point(reshards: ReshardTable, op: Op, form: OpForm, own: Own, deferred: bool) -> Placement:
    operands = []
    for value, target in zip(op.operands, form.targets, strict=True):
        if not value.placed:
            operands.append(())
            continue
        stored = own(value)
        operands.append(reshards.path(stored, target) if stored != target else (target,))
    results = []
    partial = bool(form.reductions)
    for value, raw in zip(op.results, form.raws, strict=True):
        if not value.placed or deferred:
            results.append(())
            continue
        stored = own(value)
        results.append(reshards.path(raw, stored) if not partial and raw != stored else (stored,))
    moves = () if op.name == "rev" else _moves(op, form)
    if moves or (op.name in _AS_IT_IS and any(index is not None for index in form.choice)):
        results = [reshards.path(raw, own(v)) if v.placed else () for v, raw in zip(op.results, form.raws, strict=True)]
        return Placement(tuple(operands), tuple(results), moves=moves, targets=form.targets, raws=form.raws)
    by_hand = _windowed_by_hand(op, form) or op.name in ON_SHARDS or (partial and _is_manual(op, form))
    if by_hand and not deferred:
        steps, reduced = _steps(form, own(op.results[0]))
        if not partial:
            results = [reshards.path(form.raws[0], own(op.results[0]))]
        return Placement(tuple(operands), tuple(results), (), steps, form.targets, reduced, _edges(op, form))
    return Placement(tuple(operands), tuple(results))


def _deferred_sum(pricer: Pricer, priced: Priced, tree: SumTree, own: Own) -> DeferredSum:
    graph, classes = pricer.analysis.graph, pricer.analysis.classes
    leaves: dict[Site, tuple[Spec, ...]] = {}
    for i in tree.leaves:
        index = classes.of_op[i]
        form = priced.forms[index] if index is not None else None
        assert form is not None
        leaves[graph.ops[i].site] = form.targets
    # any leaf tells where the sum goes; its dimensions are permuted into the root's
    op_class, permutation = pricer.structure.sums[tree.group].leaves[0]
    form, cls = priced.forms[op_class], classes.ops[op_class]
    assert form is not None
    steps, reduced = _steps(form, priced.specs[cls.results[0]])
    return DeferredSum(
        leaves,
        tuple(Step(s.axes, None if s.dim is None else permutation.index(s.dim)) for s in steps),
        tuple(reduced[d] for d in permutation),
        own(graph.ops[tree.root].results[0]),
    )


def _elementwise(reshards: ReshardTable, op: Op, form: OpForm, own: Own) -> Placement | None:
    """Constraints where the price of any other operation says that a layout changes; None if none does.

    Also where the change is a cut that moves nothing: a value left open takes its readers' layout, and XLA then
    gathers what was whole, or exchanges the edges of a slice.
    """
    operands: list[tuple[Spec, ...]] = []
    for value, target in zip(op.operands, form.targets, strict=True):
        stored = own(value)
        operands.append(reshards.path(stored, target) if value.placed and stored != target else ())
    results: list[tuple[Spec, ...]] = []
    for value, raw in zip(op.results, form.raws, strict=True):
        stored = own(value)
        results.append(reshards.path(raw, stored) if value.placed and (any(operands) or raw != stored) else ())
    return Placement(tuple(operands), tuple(results)) if any(operands) or any(results) else None


def _windowed_by_hand(op: Op, form: OpForm) -> bool:
    """Whether a windowed operation is run on shards: XLA gathers, or moves more than the edges, by itself.

    Seen for the gradient of max pooling (edges or not), for convolutions in groups, and for the gradient of a
    transposed convolution for its kernel.  And a convolution split along what it moves over and along the features
    that it makes is wrong in XLA.
    """
    if all(index is None for index in form.choice):
        return False
    if op.name != "conv_general_dilated":
        return op.name == "select_and_scatter_add"
    params = op.eqn.params
    summed = any(op.rule[i].halos and op.rule[i].kind is Kind.REDUCE for i in form.choice if i is not None)
    dilated = any(n > 1 for n in params["lhs_dilation"])
    grouped = params["batch_group_count"] > 1 or params["feature_group_count"] > 1
    return grouped or (dilated and summed) or _split_over_space_and_features(op, form)


def _split_over_space_and_features(op: Op, form: OpForm) -> bool:
    numbers = op.eqn.params["dimension_numbers"]
    space = {(0, d) for d in numbers.lhs_spec[2:]}
    made = (1, numbers.rhs_spec[0])
    held = {place for i in form.choice if i is not None for place in op.rule[i].operands}
    return made in held and not space.isdisjoint(held)


def _moves(op: Op, form: OpForm) -> tuple[int, ...]:
    """Dimensions along which blocks change places, in order."""
    chosen = {i for i in form.choice if i is not None}
    return tuple(sorted(op.rule[i].results[0][1] for i in chosen if op.rule[i].kind is Kind.MOVE))


def _edges(op: Op, form: OpForm) -> tuple[tuple[int, int, int, int], ...]:
    return tuple(
        (k, d, *halo)
        for index in dict.fromkeys(form.choice)
        if index is not None
        for (k, d), halo in zip(op.rule[index].operands, op.rule[index].halos, strict=False)
    )


def _is_manual(op: Op, form: OpForm) -> bool:
    """Whether an operation with partial sums is written out by hand; a reduction only if a constraint can't say it."""
    return stageable(op) and (op.name != "reduce_sum" or len(form.reductions) > 1)


def _steps(form: OpForm, stored: Spec) -> tuple[tuple[Step, ...], Spec]:
    """Reductions of a form; scatters one mesh axis at a time (a joint one over a whole torus is an all-reduce)."""
    places = axis_places(stored)
    spec = [list(axes) for axes in form.raws[0]]
    steps: list[Step] = []
    for transfer in form.reductions:
        if transfer.kind == ALL_REDUCE:
            steps.append(Step(transfer.axes, None))
            continue
        for axis in transfer.axes:
            steps.append(Step((axis,), places[axis]))
            spec[places[axis]].append(axis)
    return tuple(steps), tuple(tuple(axes) for axes in spec)


def _placed(values: Sequence[Value], own: Own) -> tuple[Spec | None, ...]:
    return tuple(own(v) if v.placed else None for v in values)


def _loops(graph: Graph, own: Own) -> dict[Site, LoopSpecs]:
    return {
        site: LoopSpecs(
            _placed(loop.body_in[loop.consts : loop.consts + loop.carries], own),
            _placed(loop.body_out[: loop.carries], own),
            _placed(loop.results, own),
        )
        for site, loop in graph.loops.items()
    }
