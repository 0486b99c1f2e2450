"""The price of an assignment, in full or as the change from another one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from spmd_auto.cost.memory import MemoryTable
from spmd_auto.cost.operation import Around, OperationTable, OpForm
from spmd_auto.cost.overlap import Held, Overlap
from spmd_auto.cost.reshard import Reshard, ReshardTable
from spmd_auto.cost.structure import Structure, build_structure
from spmd_auto.mesh.collectives import Transfer
from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.propagate.analysis import Analysis
from spmd_auto.propagate.assignment import Assignment, PinnedSpec, SpecTable


@dataclasses.dataclass(slots=True, eq=False)
class Priced:
    """An assignment with everything that follows from it.

    Attributes:
      specs: spec of each value class.
      forms: chosen form of each active operation class (None for flat ones).
      edge_seconds, sum_seconds: seconds per step of each edge and sum group.
      transient: transient bytes of each operation class.
      fractions: share of each value class on one device.
      apart: seconds of a step if nothing ran beside anything else.
      held: seconds of computation and of communication that may run beside it, by region (`Overlap`).
      seconds: predicted time of a step.
      memory: predicted peak bytes of one device.
      score: what the search minimises: seconds, and a penalty above the memory budget.
      keys: digests of all specs, as they are and with interchangeable mesh axes permuted (`Pricer.symmetries`); the
        first is equal for equal specs (and, but for a 64-bit chance, only for those).
    """

    assignment: Assignment
    specs: list[Spec]
    forms: list[OpForm | None]
    edge_seconds: list[float]
    sum_seconds: list[float]
    transient: np.ndarray
    fractions: np.ndarray
    apart: float
    held: Held
    seconds: float
    memory: float
    score: float
    keys: tuple[int, ...]

    @property
    def key(self) -> int:
        """Equal for states that are the same up to the names of interchangeable mesh axes."""
        return min(self.keys)


class Pricer:
    """Prices assignments of one program on one mesh.

    Args:
      budget: bytes of memory per device that a plan may need (default: no limit).
      structure, memory: pass those of another mesh to share them.
    """

    def __init__(
        self,
        analysis: Analysis,
        mesh: LogicalMesh,
        budget: float = float("inf"),
        pinned: Sequence[PinnedSpec] = (),
        structure: Structure | None = None,
        memory: MemoryTable | None = None,
    ):
        self.analysis, self.mesh, self.budget = analysis, mesh, budget
        self.specs = SpecTable(analysis, mesh.sizes, [link.bandwidth for link in mesh.links], pinned)
        self.structure = structure or build_structure(analysis)
        self.memory = memory or MemoryTable(analysis)
        self.reshards = ReshardTable(mesh)
        self.operations = OperationTable(mesh, self.reshards)
        self.overlap = Overlap(analysis, self.structure, mesh.chip)
        self.states = 0
        self.symmetries = [_Relabelled(p) for p in interchanges(mesh, pinned)]
        self._trips = [cls.trips for cls in analysis.classes.ops]
        self._operand_bytes = [[v.bytes for v in cls.op.operands] for cls in analysis.classes.ops]
        self._around = [(*cls.operands, *cls.results) for cls in analysis.classes.ops]
        self._best: list[dict[tuple[Spec, ...], OpForm]] = [{} for _ in self._around]
        self._flat_seconds = {c: b / mesh.chip.memory_bandwidth for c, b in self.structure.flat_bytes.items()}

    # ---- parts --------------------------------------------------------------------------------

    def forms(self, op_class: int, specs: Sequence[Spec]) -> tuple[OpForm, ...]:
        """All forms of an operation class under the specs of the value classes, cheapest first."""
        specs_around = tuple([specs[c] for c in self._around[op_class]])
        return self.operations.forms(self.analysis.classes.ops[op_class].op, self._surroundings(op_class, specs_around))

    def best(self, op_class: int, specs: Sequence[Spec]) -> OpForm:
        """The cheapest form of an operation class."""
        specs_around = tuple([specs[c] for c in self._around[op_class]])
        found = self._best[op_class].get(specs_around)
        if found is None:
            op = self.analysis.classes.ops[op_class].op
            found = self.operations.best(op, self._surroundings(op_class, specs_around))
            self._best[op_class][specs_around] = found
        return found

    def _surroundings(self, op_class: int, specs_around: tuple[Spec, ...]) -> Around:
        split = len(self.analysis.classes.ops[op_class].operands)
        structure = self.structure
        return Around(
            specs_around[:split],
            specs_around[split:],
            structure.share_sum[op_class],
            structure.share_operands[op_class],
            structure.latency[op_class],
        )

    def _edge_moves(self, index: int, specs: Sequence[Spec], forms: Sequence[OpForm | None]) -> list[Reshard]:
        """The reshards of one trip of an edge: every step to a distinct target once."""
        edge = self.structure.edges[index]
        source = specs[edge.value]
        reached: list[Spec] = [source]
        moves: list[Reshard] = []
        for op_class, position in edge.consumers:
            target = forms[op_class].targets[position]  # type: ignore[union-attr]  # consumers are active
            if target in reached:
                continue
            total = self._operand_bytes[op_class][position]
            for before, after in itertools.pairwise(self.reshards.path(source, target)):
                if after not in reached:
                    reached.append(after)
                    moves.append(self.reshards.price(total, before, after, edge.latency))
        return moves

    def edge(self, index: int, specs: Sequence[Spec], forms: Sequence[OpForm | None]) -> float:
        """Seconds per step of an edge."""
        moves = self._edge_moves(index, specs, forms)
        if not moves:
            return 0.0
        return sum([move.seconds for move in moves]) * self.structure.edges[index].trips

    def edge_transfers(self, index: int, specs: Sequence[Spec], forms: Sequence[OpForm | None]) -> list[Transfer]:
        """Transfers of one trip of an edge."""
        return [t for move in self._edge_moves(index, specs, forms) for t in move.transfers]

    def sum_group(self, index: int, forms: Sequence[OpForm | None]) -> tuple[float, list[Transfer], bool]:
        """(seconds per step, transfers of one trip, whether the reductions are shared) of a sum group."""
        group = self.structure.sums[index]
        separate: list[Transfer] = []
        shared: list[Transfer] | None = None
        first: tuple[object, ...] = ()
        for op_class, permutation in group.leaves:
            form = forms[op_class]
            assert form is not None
            separate += form.reductions
            alike = (
                tuple([form.raws[0][d] for d in permutation]),
                tuple([(t.kind, t.axes) for t in form.reductions]),
            )
            if form.exchange:
                shared = None  # its devices talk before there is a sum
                break
            if not first:
                first = alike
                scale = group.root_itemsize / self.analysis.classes.ops[op_class].op.results[0].itemsize
                shared = [t.scaled(scale) for t in form.reductions]
            elif alike != first:
                shared = None  # the partial sums lie otherwise: they can't be added before they are combined
                break
        if shared is None:
            separate = [t for c, _ in group.leaves for t in forms[c].reductions]  # type: ignore[union-attr]
        apart = sum([t.seconds for t in separate])
        if shared is None or not shared:
            return apart * group.trips, separate, False
        together = sum([t.seconds for t in shared])
        return together * group.trips, shared, True

    def op_seconds(self, op_class: int, form: OpForm) -> float:
        """Seconds per step of an operation class, without its operands' reshards and its sums' reductions."""
        seconds = self._trips[op_class] * form.after
        if op_class in self.structure.alone:
            seconds += self.structure.alone[op_class] * sum([t.seconds for t in form.reductions])
        return seconds

    def fused_seconds(self, specs: Sequence[Spec]) -> float:
        return sum(s * self.reshards.fractions[specs[c]] for c, s in self._flat_seconds.items())

    # ---- whole prices ---------------------------------------------------------------------------

    def price(self, assignment: Assignment) -> Priced:
        """The full price."""
        self.states += 1
        specs = self.specs.all(assignment)
        ops = self.analysis.classes.ops
        forms: list[OpForm | None] = [None] * len(ops)
        for i in self.structure.active:
            forms[i] = self.best(i, specs)
        return self.assemble(assignment, specs, forms)

    def assemble(self, assignment: Assignment, specs: list[Spec], forms: list[OpForm | None]) -> Priced:
        """The price of given specs and forms."""
        edges = [self.edge(i, specs, forms) for i in range(len(self.structure.edges))]
        sums = [self.sum_group(i, forms)[0] for i in range(len(self.structure.sums))]
        ops = self.analysis.classes.ops
        seconds = self.fused_seconds(specs) + sum(edges) + sum(sums)
        transient = np.zeros(len(ops))
        held = self.held(forms, edges, sums)
        for i in self.structure.active:
            form = forms[i]
            assert form is not None
            seconds += self.op_seconds(i, form)
            transient[i] = form.transient
        fractions = np.array([self.reshards.fractions[spec] for spec in specs])
        keys = []
        for relabelled in self.symmetries:
            key = 0
            for c, spec in enumerate(specs):
                key ^= hash((c, relabelled[spec]))  # of integers and tuples only: the same in every process
            keys.append(key)
        return self._scored(assignment, specs, forms, edges, sums, transient, fractions, seconds, held, tuple(keys))

    def held(self, forms: Sequence[OpForm | None], edges: Sequence[float], sums: Sequence[float]) -> Held:
        """Computation, and communication that may run beside it, by region."""
        held = self.overlap.nothing()
        if self.overlap.active:
            for i in self.structure.active:
                form = forms[i]
                assert form is not None
                self.overlap.operation(held, i, form)
            for i, spent in enumerate(edges):
                self.overlap.edge(held, i, spent)
            for i, spent in enumerate(sums):
                self.overlap.sum_group(held, i, spent)
        return held

    def _scored(
        self,
        assignment: Assignment,
        specs: list[Spec],
        forms: list[OpForm | None],
        edges: list[float],
        sums: list[float],
        transient: np.ndarray,
        fractions: np.ndarray,
        apart: float,
        held: Held,
        keys: tuple[int, ...],
    ) -> Priced:
        memory = self.memory.peak(fractions, transient)
        seconds = apart - self.overlap.saved(held)
        score = seconds if memory <= self.budget else seconds + 10 + 1e3 * (memory / self.budget - 1)
        return Priced(
            assignment, specs, forms, edges, sums, transient, fractions, apart, held, seconds, memory, score, keys
        )

    def change(
        self, parent: Priced, assignment: Assignment, touched: Iterable[int], known: set[int] | None = None
    ) -> Priced | None:
        """The price of `assignment` from its parent's; only `touched` value classes may differ.

        Equal to `price(assignment)` up to rounding.

        Args:
          known: keys of states that need no price any more; a new key is added.

        Returns:
          None if no spec changes, or the specs are known.
        """
        old = parent.specs
        changed = [(c, spec) for c, spec in self.specs.some(touched, assignment) if spec != old[c]]
        if not changed:
            return None
        keys = []
        for relabelled, key in zip(self.symmetries, parent.keys, strict=True):
            for c, spec in changed:
                key ^= hash((c, relabelled[old[c]])) ^ hash((c, relabelled[spec]))
            keys.append(key)
        if known is not None:
            if min(keys) in known:
                return None
            known.add(min(keys))
        self.states += 1
        specs = list(old)
        fractions = parent.fractions.copy()
        seconds, held, overlap = parent.apart, list(parent.held), self.overlap
        structure, share = self.structure, self.reshards.fractions
        op_ids: set[int] = set()
        edge_ids: set[int] = set()
        for c, spec in changed:
            fraction = share[spec]
            if c in self._flat_seconds:
                seconds += self._flat_seconds[c] * (fraction - fractions[c])
            specs[c] = spec
            fractions[c] = fraction
            op_ids.update(structure.ops_of_value.get(c, ()))
            edge_ids.update(structure.edges_of_value.get(c, ()))
        forms, edges, sums = list(parent.forms), list(parent.edge_seconds), list(parent.sum_seconds)
        transient = parent.transient.copy()
        sum_ids: set[int] = set()
        for i in op_ids:
            form, before = self.best(i, specs), forms[i]
            if form is before:
                continue
            assert before is not None
            transient[i] = form.transient
            seconds += self.op_seconds(i, form) - self.op_seconds(i, before)
            overlap.operation(held, i, before, -1)
            overlap.operation(held, i, form)
            if form.targets != before.targets:
                edge_ids.update(structure.edges_of_op.get(i, ()))
            if form.reductions != before.reductions or form.raws != before.raws:
                sum_ids.update(structure.sums_of_op.get(i, ()))
            forms[i] = form
        for i in edge_ids:
            now = self.edge(i, specs, forms)
            seconds += now - edges[i]
            overlap.edge(held, i, now - edges[i])
            edges[i] = now
        for i in sum_ids:
            now = self.sum_group(i, forms)[0]
            seconds += now - sums[i]
            overlap.sum_group(held, i, now - sums[i])
            sums[i] = now
        return self._scored(assignment, specs, forms, edges, sums, transient, fractions, seconds, held, tuple(keys))


MOST_SYMMETRIES = 24


def interchanges(mesh: LogicalMesh, pinned: Sequence[PinnedSpec] = ()) -> list[tuple[int, ...]]:
    """Permutations of the mesh axes that change no price; the identity first.

    Axes are interchangeable if they have the same size and the same link, and no pin names them.
    """
    named = {axis for spec in pinned for axes in spec for axis in axes or ()}
    kind = [object() if a in named else _kind_of(mesh, a) for a in range(len(mesh.sizes))]
    alike = (p for p in itertools.permutations(range(len(kind))) if all(kind[a] == kind[b] for a, b in enumerate(p)))
    return list(itertools.islice(alike, MOST_SYMMETRIES))


def _kind_of(mesh: LogicalMesh, axis: int) -> object:
    """Equal for axes of equal size on equal links, which they share with the same other axes: on a torus dimension that
    two axes share they are not interchangeable with one that has a dimension to itself."""
    parts = mesh.parts_of(axis)
    sharing = [sum(q.tier == p.tier for b in range(len(mesh.sizes)) for q in mesh.parts_of(b)) for p in parts]
    return mesh.sizes[axis], tuple((p.size, p.link) for p in parts), tuple(sharing)


class _Relabelled(dict[Spec, Spec]):
    """Specs with interchangeable mesh axes permuted, for digests.

    The axes of one dimension stay in the order of the mesh if they were, and out of it if not: they are gathered at
    once only in that order, which has a price.
    """

    def __init__(self, permutation: tuple[int, ...]):
        super().__init__()
        self.permutation = permutation
        self.changes = permutation != tuple(sorted(permutation))

    def __missing__(self, spec: Spec) -> Spec:
        self[spec] = found = tuple([self._dimension(axes) for axes in spec]) if self.changes else spec
        return found

    def _dimension(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        moved = tuple([self.permutation[a] for a in axes])
        ordered = tuple(sorted(moved))
        if axes == tuple(sorted(axes)):
            return ordered
        return moved if moved != ordered else moved[::-1]
