"""Where a collective comes from: what is moved, in which form, and along which logical axes."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_auto.mesh.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Transfer
from spmd_auto.mesh.logical import Spec
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.forms import Form
from spmd_auto.propagate.graph import Op, Value

_DONE = {
    ALL_GATHER: "gathered",
    ALL_REDUCE: "reduced",
    REDUCE_SCATTER: "reduced and scattered",
    ALL_TO_ALL: "split along another dimension",
}
_WHAT = {Form.STORED: "weight", Form.GRADIENT: "gradient", Form.OPTIMIZER: "optimizer state"}


def what_is_moved(analysis: Analysis, value_class: int, kind: str) -> str:
    """The form of what a collective moves, in words: "gathered weight", "reduced gradient", "partial sum reduced".

    A weight is a stored parameter, a cast of one, or its new value; what has no form of a parameter is a partial sum
    where it is reduced, else an argument or an activation.
    """
    form = analysis.classes.values[value_class].form
    done = _DONE.get(kind, "sent on")
    if form is not None:
        return f"{done} {_WHAT[form[1]]}"
    if kind in (ALL_REDUCE, REDUCE_SCATTER):
        return f"partial sum {done}"
    paths = leaves_of(analysis, value_class)
    return f"{done} {'argument' if paths else 'activation'}"


def leaves_of(analysis: Analysis, value_class: int) -> tuple[str, ...]:
    """Paths of the parameters of the class' form, or of the arguments that are of the class themselves."""
    form = analysis.classes.values[value_class].form
    if form is not None:
        return tuple(analysis.forms.paths[form[0]])
    if not analysis.classes.values[value_class].shape:
        return ()  # all scalars of a program are one class
    of = analysis.classes.of_value
    return tuple(value.path for value in analysis.graph.arguments if of[value.id] == value_class)


def moved_axes(analysis: Analysis, value_class: int, transfer: Transfer, *specs: Spec) -> tuple[str, ...]:
    """The logical axes of the dimensions that the transfer's mesh axes split under the given specs."""
    groups = analysis.classes.values[value_class].groups
    over = set(transfer.axes)
    found = [g for spec in specs for g, axes in zip(groups, spec, strict=True) if over.intersection(axes)]
    return named(analysis, found)


def factor_axes(analysis: Analysis, op: Op, choice: Sequence[int | None], transfer: Transfer) -> tuple[str, ...]:
    """The logical axes of the factors of an operation that hold the transfer's mesh axes: those it sums over, or along
    which its pieces talk."""
    of = analysis.axes.of
    found: list[int] = []
    for axis in transfer.axes:
        index = choice[axis]
        if index is not None:
            factor = op.rule[index]
            found += [of[op.operands[k].id][d] for k, d in factor.operands][:1]
    return named(analysis, found)


def named(analysis: Analysis, groups: Sequence[int]) -> tuple[str, ...]:
    """Names of axis groups, each once; internal ones by their number."""
    return tuple(dict.fromkeys(analysis.names.get(g, f"axis{g}") for g in groups))


def dtype_of(value: Value) -> str:
    """The type in which a value's elements are sent: 2-byte floats that are counted as four bytes are float32."""
    dtype = value.dtype
    size = getattr(dtype, "itemsize", value.itemsize)
    return "float32" if value.itemsize == 4 and size == 2 else str(dtype)
