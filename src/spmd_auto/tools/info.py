"""What a plan does at one place: a parameter, an operation, a line of the user's code."""

from __future__ import annotations

import dataclasses
import difflib
import os.path
import re
from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec
from rich.table import Table

from spmd_auto import _compat
from spmd_auto.cost.report import Collective
from spmd_auto.errors import StrategyError
from spmd_auto.plan.explain import duration, render, size
from spmd_auto.plan.pins import matches
from spmd_auto.plan.plan import Plan
from spmd_auto.propagate.graph import Op
from spmd_auto.tools.info_leaf import describe_leaf
from spmd_auto.tools.info_operation import describe_operation
from spmd_auto.tools.op_result import OpArray

MOST = 8  # leaves, and operations, that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class LeafInfo:
    """One argument leaf under a plan.

    Attributes:
      array: global and local shape, spec in both notations, bytes of one device's piece.
      role: "parameter", "optimizer", "counter", "batch" or "key".
      forms: spec of a parameter's forms by name: "stored", "gradient", "optimizer".
      zero: ZeRO stage of the parameter: 0 none, 1 its optimizer state is split further, 2 its gradient, 3 itself.
      alike: paths of all leaves that `collectives` speaks of: those that the plan treats as one with this.
      collectives: all that is moved for `alike` in one step.
      why: in words, dimension by dimension.
    """

    array: OpArray
    role: str
    forms: dict[str, PartitionSpec]
    zero: int
    alike: tuple[str, ...]
    collectives: tuple[Collective, ...]
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OperationInfo:
    """Alike operations of one line under a plan.

    Attributes:
      name, source, scope: primitive, `file:line (function)`, and name stack of the first.
      times: how often they run in one step.
      operands, results: as they lie when the operation runs (a raw result may be a partial sum).
      stored: how the operands and results lie before and after.
      seconds: of local compute in one step.
      collectives: what is moved for them in one step.
      why: in words, mesh axis by mesh axis.
    """

    name: str
    source: str
    scope: str
    times: int
    operands: tuple[OpArray, ...]
    results: tuple[OpArray, ...]
    stored: tuple[PartitionSpec, ...]
    seconds: float
    collectives: tuple[Collective, ...]
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelInfo:
    """What a plan does at the places that were asked for: leaves, or operations."""

    what: str
    leaves: tuple[LeafInfo, ...] = ()
    operations: tuple[OperationInfo, ...] = ()

    @property
    def bytes_moved(self) -> float:
        """Bytes that one device sends there in one step; leaves that are treated as one count once."""
        found: dict[Any, tuple[Collective, ...]] = {leaf.alike: leaf.collectives for leaf in self.leaves}
        found |= {("operation", k): op.collectives for k, op in enumerate(self.operations)}
        return sum(c.bytes for collectives in found.values() for c in collectives)

    def __str__(self) -> str:
        parts: list[Any] = []
        for leaf in self.leaves[:MOST]:
            zero = f", ZeRO {leaf.zero}" if leaf.zero else ""
            parts.append(_arrays(f"{leaf.array.name} ({leaf.role}{zero})", [leaf.array]))
            parts += [f"  {form}: {spec}" for form, spec in leaf.forms.items()]
            parts += [f"  {line}" for line in leaf.why]
            among = f" (all {len(leaf.alike)} that are alike)" if len(leaf.alike) > 1 else ""
            parts += _moves(leaf.collectives, among)
        for op in self.operations[:MOST]:
            title = (
                f"{op.name} at {op.source or 'an unknown line'}, {op.times} times, {duration(op.seconds)} of compute"
            )
            parts.append(_arrays(title, [*op.operands, *op.results], op.stored))
            parts += [f"  {line}" for line in op.why]
            parts += _moves(op.collectives, "")
        more = max(len(self.leaves), len(self.operations)) - MOST
        return render(*parts, *([f"and {more} more"] if more > 0 else []))


def parallel_info(plan: Plan, what: str) -> ParallelInfo:
    """What a plan does at one place.

    Args:
      what: path or glob of argument leaves (`params/*/kernel`), the name of an operation (`dot_general`), a line of the
        user's code (`model.py:42`), or a part of a name stack (`layers/attention`); tried in this order.

    Raises:
      StrategyError: nothing is called so; the nearest names are offered.
    """
    leaves = plan.program.arguments
    hits = matches([leaf.path for leaf in leaves], what)
    if hits:
        return ParallelInfo(what, tuple(LeafInfo(**describe_leaf(plan, i)) for i in hits))
    ops = [op for op in plan.analysis.graph.ops if op.eqn is not None and _form(plan, op) is not None]
    line = re.fullmatch(r"(.+):(\d+)", what)
    found = [op for op in ops if op.name == what]
    if not found and line:
        found = [op for op in ops if _at(op, line[1], line[2])]
    if not found and what:
        found = [op for op in ops if what in _compat.name_stack(op.eqn)]
    if not found:
        raise _unknown(plan, what, ops)
    groups: dict[tuple[int, str], list[Op]] = {}
    for op in found:
        index = plan.analysis.classes.of_op[op.id]
        assert index is not None
        groups.setdefault((index, op.source), []).append(op)
    made = (describe_operation(plan, index, alike) for (index, _), alike in groups.items())
    return ParallelInfo(what, operations=tuple(OperationInfo(**entry) for entry in made))


def _form(plan: Plan, op: Op) -> Any:
    index = plan.analysis.classes.of_op[op.id]
    return None if index is None else plan.priced.forms[index]


def _at(op: Op, file: str, line: str) -> bool:
    path = op.source.rpartition(" (")[0]
    return path == f"{file}:{line}" or path.endswith(f"/{file}:{line}")


def _unknown(plan: Plan, what: str, ops: Iterable[Op]) -> StrategyError:
    known: dict[str, None] = {leaf.path: None for leaf in plan.program.arguments}
    for op in ops:
        known[op.name] = None
        known[os.path.basename(op.source).partition(" (")[0]] = None
        known.update(dict.fromkeys(_compat.name_stack(op.eqn).split("/")))
    known.pop("", None)
    near = difflib.get_close_matches(what, known, n=3, cutoff=0.4)
    tails = difflib.get_close_matches(what, [leaf.path.split("/", 1)[-1] for leaf in plan.program.arguments], n=2)
    return StrategyError(
        f"nothing in {plan.program.name} is called {what!r}",
        f"it has {len(plan.program.arguments)} argument leaves; operations that only pass elements on are left out",
        [f"did you mean {name!r}?" for name in dict.fromkeys((*tails, *near))],
    )


def _arrays(title: str, arrays: Iterable[OpArray], stored: Iterable[PartitionSpec] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    before = list(stored)
    for column in ("array", "shape", "spec", "split counts", "one device holds", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    if before:
        table.add_column("lies as")
    for k, a in enumerate(arrays):
        cells = (a.name, str(list(a.shape)), str(a.spec), str(a.counts), f"{a.dtype}{list(a.local)}", size(a.bytes))
        table.add_row(*cells, *([str(before[k])] if before else []))
    return table


def _moves(collectives: Iterable[Collective], among: str) -> list[str]:
    lines = [
        f"  {c.kind} over {'+'.join(c.axes)}: {size(c.bytes)}, {duration(c.seconds)}, {c.times} times: {c.where}"
        for c in collectives
    ]
    return [f"  moved in one step{among}:", *lines] if lines else ["  nothing is moved"]
