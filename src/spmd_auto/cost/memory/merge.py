"""Equal operations on equal operands are one in the compiled program; what an optimization barrier hides is not equal.

A rematerialised region that is not behind a barrier (`jax.checkpoint(..., prevent_cse=False)` outside of a loop) is so
merged with the first computation: it saves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from spmd_auto import _compat
from spmd_auto.propagate.graph import Graph, Op, Value

OperandKey = Callable[[Op, Value], object]


@dataclasses.dataclass(slots=True, eq=False)
class Merged:
    """Operations without repetitions, operands renamed; `of` maps the id of a repeated value to the first."""

    ops: list[Op]
    of: dict[int, Value]

    def first(self, value: Value) -> Value:
        """The value that stands for `value`."""
        return self.of.get(value.id, value)


def merge(graph: Graph, scope: list[int], hidden: OperandKey) -> Merged:
    """Merges equal operations of each loop body.

    Args:
      scope: per operation the barrier it is behind, or -1.
      hidden: what else tells two readings of an operand apart.
    """
    of: dict[int, Value] = {}
    seen: dict[object, Op] = {}
    kept: list[Op] = []
    for op in graph.ops:
        operands = tuple([of.get(v.id, v) for v in op.operands])
        renamed = op if operands == op.operands else dataclasses.replace(op, operands=operands)
        first = None
        key = _key(graph, op, operands, scope[op.id], hidden)
        if key is not None:
            first = seen.setdefault(key, renamed)
        if first is None or first is renamed:
            kept.append(renamed)
            continue
        of.update((v.id, w) for v, w in zip(op.results, first.results, strict=True))
    return Merged(kept, of)


def _key(graph: Graph, op: Op, operands: tuple[Value, ...], scope: int, hidden: OperandKey) -> object:
    """Equal for operations that the compiler merges; None for one that it leaves alone."""
    if op.eqn is None or op.eqn.effects:
        return None
    behind = graph.barriers[scope].values if scope >= 0 else frozenset()
    read = []
    for var, value, own in zip(op.eqn.invars, operands, op.operands, strict=True):
        if isinstance(var, _compat.Literal):
            read.append((str(var.aval), repr(var.val)))
        else:
            read.append((value.id, scope if own.id in behind else -1, hidden(op, own)))
    try:
        avals = tuple([str(v.aval) for v in op.eqn.outvars])
        key = (op.name, op.loop, tuple(read), tuple(op.eqn.params.items()), avals)
        hash(key)
    except TypeError:  # a parameter that can't be hashed
        return None
    return key


def scopes(graph: Graph) -> list[int]:
    """Per operation the innermost barrier (index into `graph.barriers`) it is behind, or -1."""
    found = [-1] * len(graph.ops)
    for index in range(len(graph.barriers) - 1, -1, -1):  # inner ones last, so that they win
        barrier = graph.barriers[index]
        found[barrier.first : barrier.last] = [index] * (barrier.last - barrier.first)
    return found
