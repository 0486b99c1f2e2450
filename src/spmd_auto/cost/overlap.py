"""Communication beside computation: what can be hidden, where, and what it costs.

A step has *regions*: a loop's body, in the forward pass, the backward pass or the update. What is moved for a parameter
(a weight's gather, a gradient's reduction) is waited for by nothing nearby, and may run beside the computation of its
region; a partial sum of activations is waited for at once, and is never hidden. With a region's computation C and such
communication O, of which a share h (`Chip.hidden`) can be placed, and a slowdown s (`Chip.slowdown`) of what runs
beside it,

    hidden t = min(h O, C),    seconds = C + O - t + s t

which grows with C and with O, without a step: nothing is ever free, since h < 1.
"""

from __future__ import annotations

from collections import Counter

from spmd_auto.cost.operation import OpForm
from spmd_auto.cost.structure import Structure
from spmd_auto.mesh.hardware import Chip
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.forms import Form
from spmd_auto.propagate.graph import OPTIMIZER, Op

Held = list[float]  # per region: seconds of computation, and behind them seconds of communication that can be hidden


class Overlap:
    """The regions of a program, and what can be hidden in them. It holds nothing where the chip hides nothing."""

    def __init__(self, analysis: Analysis, structure: Structure, chip: Chip):
        self.hidden, self.slowdown = chip.hidden, chip.slowdown
        self.active = chip.hidden > 0
        self.count = 0
        if not self.active:
            return
        classes, self.structure = analysis.classes, structure
        self._trips = [cls.trips for cls in classes.ops]
        self._shares = self._regions(analysis)
        has_form = [value.form is not None for value in classes.values]
        self._loose = [any(has_form[c] for c in cls.results) for cls in classes.ops]
        self._loose_edge = [has_form[edge.value] for edge in structure.edges]

    def _regions(self, analysis: Analysis) -> list[list[tuple[int, float]]]:
        """For each operation class the regions it stands in, and the share of its trips in each."""
        ids: dict[object, int] = {}
        trips: list[Counter[int]] = [Counter() for _ in analysis.classes.ops]
        for op in analysis.graph.ops:
            c = analysis.classes.of_op[op.id]
            if c is not None:
                region = ids.setdefault((op.loop, _phase(analysis, op)), len(ids))
                trips[c][region] += op.trips
        self.count = len(ids)
        return [[(region, n / of.total()) for region, n in of.items()] if of.total() else [] for of in trips]

    def nothing(self) -> Held:
        return [0.0] * (2 * self.count)

    def operation(self, held: Held, op_class: int, form: OpForm, times: int = 1) -> None:
        """Adds (times=-1: takes away) an operation class: its computation, and what may be hidden of its sums."""
        if not self.active:
            return
        trips, structure = self._trips[op_class], self.structure
        loose = 0.0
        if self._loose[op_class]:
            summed = structure.alone.get(op_class, trips if structure.share_sum[op_class] == 1 else 0)
            loose = trips * sum([t.seconds for t in form.reshards])
            loose += summed * sum([t.seconds for t in form.reductions])
        for region, share in self._shares[op_class]:
            held[region] += times * share * trips * form.compute
            held[self.count + region] += times * share * loose

    def edge(self, held: Held, index: int, seconds: float) -> None:
        """Adds seconds of an edge: a weight's gathers may be hidden, an activation's not."""
        if self.active and self._loose_edge[index]:
            for region, share in self._shares[self.structure.edges[index].consumers[0][0]]:
                held[self.count + region] += share * seconds

    def sum_group(self, held: Held, index: int, seconds: float) -> None:
        """Adds seconds of a sum group: a gradient's may be hidden, an activation's not."""
        if not self.active:
            return
        leaf = self.structure.sums[index].leaves[0][0]
        if self._loose[leaf]:
            for region, share in self._shares[leaf]:
                held[self.count + region] += share * seconds

    def beside(self, held: Held) -> float:
        """Seconds of communication that run beside computation."""
        n, h = self.count, self.hidden
        return sum([max(0.0, min(h * held[n + r], held[r])) for r in range(n)])

    def saved(self, held: Held) -> float:
        """Seconds by which a step is shorter for it."""
        return (1 - self.slowdown) * self.beside(held)


def _phase(analysis: Analysis, op: Op) -> str:
    """The pass an operation belongs to: an update can't run beside what made its gradient, nor beside the next step."""
    if op.backward:
        return "backward"
    forms = analysis.forms.of
    made = [forms[v.id][1] for v in (*op.operands, *op.results) if v.id in forms]
    if Form.GRADIENT in made or Form.OPTIMIZER in made or any(v.depends & OPTIMIZER for v in op.results):
        return "update"
    return "forward"
