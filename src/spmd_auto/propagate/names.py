"""Names that a person recognises for groups of logical axes: batch, sequence, embed, heads, mlp, vocab, layers, ...

Given by what an axis does (indexed into, stacked by a scan, shared by most parameters, batch of a
contraction of activations, ...), never by what a model or layer is called; numbered beyond the first.
"""

from __future__ import annotations

from collections import Counter

from spmd_auto.propagate.axes import Axes
from spmd_auto.propagate.graph import BATCH, PARAMETER, Graph, Op
from spmd_auto.trace import Program, Role


def name_axes(program: Program, graph: Graph, axes: Axes) -> dict[int, str]:
    """Names for all groups that stand on an argument or a contraction of a value computed from them."""
    names: dict[int, str] = {}
    used: Counter[str] = Counter()

    def give(group: int, name: str) -> None:
        if group in names or axes.size[group] == 1:
            return
        used[name] += 1
        names[group] = name if used[name] == 1 else f"{name}_{used[name]}"

    for group in _stacked(graph, axes):
        names[group] = "layers"  # all alike to a reader, and never assigned
    batch_leaves = [
        (leaf, value)
        for leaf, value in zip(program.arguments, graph.arguments, strict=True)
        if leaf.role is Role.BATCH and value.shape
    ]
    work = _work(graph, axes)
    leading: dict[
        int, tuple[int, int]
    ] = {}  # (contractions' FLOP, bytes): not a mask's or a key's dimension before data's
    for leaf, value in batch_leaves:  # behind the loop of a step that scans over micro-batches
        free = [g for g in axes.of[value.id] if names.get(g) != "layers"]
        if free:
            leading[free[0]] = max(leading.get(free[0], (0, 0)), (work[free[0]], leaf.bytes))
    for group in sorted(leading, key=lambda g: leading[g], reverse=True):
        give(group, "batch")
    batch_leaves.sort(key=lambda entry: -entry[0].bytes)
    tables, answers = _indexed(graph, axes)
    for group in sorted(tables, key=lambda g: -axes.size[g]):  # positions and kinds of tokens after the words
        give(group, "vocab")
    for group in answers:  # an untied head makes logits of the words of its table
        give(group, "vocab" if axes.size[group] in {axes.size[g] for g in tables} else "classes")
    contractions = [op for op in graph.ops if op.flops and len(op.operands) >= 2]
    for group, name in _window_axes(contractions, axes).items():
        give(group, name)
    for group in _expert_axes(contractions, axes):
        give(group, "experts")
    heads, widths = _activation_contractions(contractions, axes)
    for group in heads:
        give(group, "heads")
    stream = _parameter_axes(program, graph, axes, contractions)
    channels = _channels(contractions, axes)
    for group in stream:
        if group not in names and group not in channels and stream[group] > 2:
            give(group, "embed")
            break
    for group in widths if heads else ():
        give(group, "head_dim")
    for leaf, value in batch_leaves:
        free = [g for g in axes.of[value.id] if names.get(g) != "layers"]
        if len(free) > 1 and free[1] not in names:
            integer = leaf.itemsize <= 8 and getattr(leaf.dtype, "kind", "f") in "iu"
            give(free[1], "sequence" if integer or len(free) == 3 else "features")
        for group in free[2:]:
            give(group, "features")
    for group in stream:
        give(group, "channels" if group in channels else "mlp")
    for value in graph.arguments:
        for group in axes.of[value.id]:
            give(group, "hidden")
    for op in contractions:
        for value in (*op.operands, *op.results):
            if value.depends:
                for group in axes.of[value.id]:
                    give(group, "inner")
    return names


def _work(graph: Graph, axes: Axes) -> Counter[int]:
    """FLOP of the contractions that each group stands on."""
    work: Counter[int] = Counter()
    for op in graph.ops:
        if op.flops:
            for group in {g for v in (*op.operands, *op.results) for g in axes.of[v.id]}:
                work[group] += op.flops * op.trips
    return work


def _stacked(graph: Graph, axes: Axes) -> list[int]:
    """Groups of layers that scans iterate over, outermost first, and of micro-batches: loops over what leads a batch.

    A recurrence over the words of a sentence iterates over a later dimension of the batch: that is a sequence.
    """
    batches = [v for v in graph.arguments if v.depends == BATCH and v.shape]
    leading = {axes.of[v.id][0] for v in batches}
    later = {g for v in batches for g in axes.of[v.id][1:]}
    seen = {g for v in (*graph.arguments, *graph.results) for g in axes.of[v.id]}
    out: dict[int, None] = {}
    for op in graph.ops:
        value = op.operands[0] if op.name == "xs" else op.results[0] if op.name == "ys" else None
        if value is None or not value.shape or not value.depends & PARAMETER:
            continue
        group = axes.of[value.id][0]
        if group in leading or group in seen - later:
            out.setdefault(group)
    return list(out)


def _indexed(graph: Graph, axes: Axes) -> tuple[list[int], list[int]]:
    """Dimensions that a gather indexes into: (those of parameters, embedding tables; those of logits that a parameter
    makes, the answers that labels pick from)."""
    made = {g for v in graph.arguments if v.depends == PARAMETER for g in axes.of[v.id]}
    tables: dict[int, None] = {}
    answers: dict[int, None] = {}
    for op in graph.ops:
        if op.name != "gather":
            continue
        passing = {d for f in op.rule for k, d in f.operands if k == 0 and f.results}
        table, index = op.operands[:2]
        looked_up = [axes.of[table.id][d] for d, n in enumerate(table.shape) if d not in passing and n > 1]
        if table.depends == PARAMETER:
            tables.update(dict.fromkeys(looked_up))
        elif table.depends & PARAMETER and index.depends == BATCH:
            answers.update(dict.fromkeys(g for g in looked_up if g in made))
    return list(tables), list(answers)


def _activation_contractions(contractions: list[Op], axes: Axes) -> tuple[list[int], list[int]]:
    """(heads, widths) of contractions between two activations (attention): their batch dimensions that a
    parameter makes are heads, what they contract of such is the width of a head."""
    heads: dict[int, None] = {}
    width: dict[int, None] = {}
    made_by_parameter: set[int] = set()
    for op in contractions:
        for value in op.operands[:2]:
            if value.depends == PARAMETER:
                made_by_parameter.update(axes.of[value.id])
    for op in contractions:
        a, b = op.operands[:2]
        if not (a.depends & BATCH and b.depends & BATCH):
            continue
        for factor in op.rule:
            if not factor.operands:
                continue
            k, d = factor.operands[0]
            group = axes.of[op.operands[k].id][d]
            if group not in made_by_parameter:
                continue
            if len({k for k, _ in factor.operands}) == 2 and factor.results:
                heads.setdefault(group)
            elif not factor.results:
                width.setdefault(group)
    return list(heads), [g for g in width if g not in heads]


def _expert_axes(contractions: list[Op], axes: Axes) -> list[int]:
    """Batch dimensions of contractions with a parameter: a stack of alike weights, each for its own inputs."""
    out: dict[int, None] = {}
    for op in contractions:
        if not any(v.depends == PARAMETER for v in op.operands[:2]):
            continue
        if op.name.startswith("ragged_dot"):
            for d in _group_dimensions(op):
                out.setdefault(axes.of[op.operands[1].id][d])
            continue
        for factor in op.rule:
            if factor.results and len({k for k, _ in factor.operands}) == 2:
                k, d = factor.operands[0]
                out.setdefault(axes.of[op.operands[k].id][d])
    return list(out)


def _group_dimensions(op: Op) -> tuple[int, ...]:
    """Dimensions of a ragged contraction's second operand that number the groups."""
    numbers = op.eqn.params.get("ragged_dot_dimension_numbers")
    return tuple(numbers.rhs_group_dimensions) if numbers is not None else (0,)


_SPATIAL = {1: ("sequence",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def _window_axes(contractions: list[Op], axes: Axes) -> dict[int, str]:
    """Dimensions over which kernels move, and those of the kernels."""
    out: dict[int, str] = {}
    for op in contractions:
        if op.name != "conv_general_dilated" or op.operands[1].depends != PARAMETER:
            continue
        numbers = op.eqn.params["dimension_numbers"]
        spatial = numbers.lhs_spec[2:]
        for name, i, j in zip(_SPATIAL.get(len(spatial), ()), spatial, numbers.rhs_spec[2:], strict=False):
            out.setdefault(axes.of[op.operands[0].id][i], name)
            out.setdefault(axes.of[op.operands[1].id][j], "window")
    return out


def _channels(contractions: list[Op], axes: Axes) -> set[int]:
    """Features that more convolutions than other contractions read or make from a parameter."""
    balance: Counter[int] = Counter()
    for op in contractions:
        if op.operands[1].depends == PARAMETER:
            for group in axes.of[op.operands[1].id]:
                balance[group] += 1 if op.name == "conv_general_dilated" else -1
    return {group for group, count in balance.items() if count > 0}


def _parameter_axes(program: Program, graph: Graph, axes: Axes, contractions: list[Op]) -> dict[int, int]:
    """Contracted groups on parameters and on how many leaves they stand, most first (the residual stream)."""
    leaves: Counter[int] = Counter()
    order: dict[int, int] = {}
    for leaf, value in zip(program.arguments, graph.arguments, strict=True):
        if leaf.role is Role.PARAMETER:
            for group in set(axes.of[value.id]):
                leaves[group] += 1
                order.setdefault(group, len(order))
    contracted = {axes.of[op.operands[k].id][d] for op in contractions for f in op.rule for k, d in f.operands}
    chosen = [g for g in leaves if g in contracted]
    return {g: leaves[g] for g in sorted(chosen, key=lambda g: (-leaves[g], order[g]))}
