"""From a priced assignment to the buffers of the compiled program, in the order of the operations.

What is elementwise or merely relabels is fused: it has no buffer, and keeps alive the buffers that it stands on (its
*roots*).  Contractions, gathers, scatters, reductions, loops and reshards make buffers.  A fused value gets one where a
contraction reads it from memory (`Habits.operands_stored`), where it enters a loop, or where two readers share it and
it stands on two large buffers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from spmd_auto.cost.memory.events import Buffer, Event, Lifetime, live
from spmd_auto.cost.memory.merge import merge, scopes
from spmd_auto.cost.memory.nest import Nested, nest
from spmd_auto.cost.memory.platform import FUSED, HABITS, SLOW, Habits
from spmd_auto.cost.operation import OpForm
from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.cost.reshard import gather_steps
from spmd_auto.cost.structure import reads_stored
from spmd_auto.mesh.logical import Spec
from spmd_auto.propagate.classes import used_values
from spmd_auto.propagate.forms import Form
from spmd_auto.propagate.graph import Op, Value

Roots = frozenset[Buffer]
NONE: Roots = frozenset()
SMALL = 1e5  # bytes of values that a fusion may as well keep in registers
MOST_SINKS = 4


class Program:
    """A priced assignment as one device's program sees it: local sizes, forms, which sums are shared."""

    def __init__(self, pricer: Pricer, priced: Priced, habits: Habits | None = None):
        self.pricer, self.priced = pricer, priced
        self.analysis = pricer.analysis
        self.graph, self.classes = self.analysis.graph, self.analysis.classes
        self.habits = habits or HABITS[pricer.mesh.chip.platform]
        self.used = used_values(self.graph)
        self.scope = scopes(self.graph)
        self.merged = merge(self.graph, self.scope, self._gathered_again)
        self.barriers = sorted(self.graph.barriers, key=lambda b: b.first)
        self.passed = 0  # barriers that the walk has passed
        self._bytes: dict[tuple[int, int, Spec], float] = {}
        self.leaves: set[int] = set()
        self.between: set[int] = set()
        self.root_of: dict[int, int] = {}
        for tree in pricer.structure.trees:
            if pricer.sum_group(tree.group, priced.forms)[2]:
                self.leaves.update(tree.leaves)
                self.between.update(tree.between)
                self.root_of[tree.root] = tree.leaves[0]

    def _gathered_again(self, op: Op, value: Value) -> object:
        """Tells the backward pass' own gathers of a weight from those of the forward pass."""
        form = self.form(op)
        if form is None or not self.again(op, value):
            return None
        target = form.targets[op.operands.index(value)]
        return target if gather_steps(self.pricer.mesh, self.spec(value), target) else None

    def again(self, op: Op, value: Value) -> bool:
        """Whether the backward pass reads a stored parameter."""
        return op.backward and value.placed and reads_stored(self.analysis, value.id)

    def spec(self, value: Value) -> Spec:
        return self.priced.specs[self.classes.of_value[value.id]]

    def form(self, op: Op) -> OpForm | None:
        index = self.classes.of_op[op.id]
        return None if index is None else self.priced.forms[index]

    def local_shape(self, value: Value, spec: Spec) -> list[int]:
        sizes = self.pricer.mesh.sizes
        return [-(-n // math.prod(sizes[a] for a in axes)) for n, axes in zip(value.shape, spec, strict=True)]

    def bytes(self, value: Value, spec: Spec | None = None) -> float:
        """Bytes of a buffer that holds a value on one device."""
        spec = self.spec(value) if spec is None else spec
        key = (self.classes.of_value[value.id], value.itemsize, spec)
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = self.habits.buffer_bytes(self.local_shape(value, spec), value.itemsize)
        return found

    def kind(self, value: Value) -> str:
        """What a value is for, in the words of a memory report."""
        form = self.analysis.forms.of.get(value.id)
        if form is None:
            return "activations"
        return {Form.STORED: "weights", Form.OPTIMIZER: "optimizer", Form.GRADIENT: "gradients"}[form[1]]


def lifetime(pricer: Pricer, priced: Priced, habits: Habits | None = None) -> Lifetime:
    """Temporaries of one device over the step; arguments, and outputs that take an argument's room, are not in it."""
    program = Program(pricer, priced, habits)
    items = nest(program.graph, program.merged.ops, program.used)
    results = [program.merged.first(v) for v in program.graph.results]
    region = _Region(program, items, results, {})
    region.fresh_results()
    return region.run()


class _Region:
    """The events of the whole step, or of a loop's body or a branch."""

    def __init__(
        self,
        program: Program,
        items: Sequence[Op | Nested],
        results: Sequence[Value],
        hoisted: dict[int, Buffer],
    ):
        self.program, self.items, self.results = program, items, results
        self.habits = program.habits
        self.events: list[Event] = []
        self.early: list[Event] = []
        self.roots: dict[int, Roots] = {}
        self.held: dict[int, Buffer] = {}
        self.resharded: dict[tuple[int, Spec, bool, int], Buffer] = {}
        self.hoisted = hoisted
        self.reduced_from: dict[Buffer, Roots] = {}
        self.current: Op | None = None
        self.backward = False
        self._survey()

    # ---- what is known before the walk ----------------------------------------------------------

    def _survey(self) -> None:
        """Who reads each value: `readers`, and through fused operations `sinks`; what has to be `stored`."""
        made = {v.id for item in self.items for v in self._results(item)}
        self.made = made
        self.readers: dict[int, list[Op | Nested]] = defaultdict(list)
        for item in self.items:
            for value in self._operands(item):
                self.readers[value.id].append(item)
        self.sinks: dict[int, frozenset[int]] = defaultdict(frozenset)
        self.stored: set[int] = set()
        ends = {v.id for v in self.results}
        for index in range(len(self.items) - 1, -1, -1):
            item = self.items[index]
            if self._fuses(item):
                sinks = frozenset[int]()
                for value in self._results(item):
                    sinks |= self.sinks[value.id]
                    if value.id in ends:
                        sinks |= {-1 - value.id}
            else:
                sinks = frozenset([index])
            for k, value in enumerate(self._operands(item)):
                if len(self.sinks[value.id]) < MOST_SINKS:
                    self.sinks[value.id] |= sinks
                if not self._fuses(item) and self._reads_memory(item, k):
                    self.stored.add(value.id)
        self.added: set[int] = set()  # scatters into zeros that an addition takes over
        self.forced: set[int] = set()
        for item in self.items:
            if isinstance(item, Op) and item.name == "scatter-add" and not item.operands[0].depends:
                self._fold(item)

    def _fold(self, scatter: Op) -> None:
        """A scatter into zeros whose result is only added to another value is done in place on that value."""
        form = self.program.form(scatter)
        if form is not None and (form.reductions or form.raws[0] != self.program.spec(scatter.results[0])):
            return
        value = scatter.results[0]
        for _ in range(4):
            readers = self.readers[value.id]
            if len(readers) != 1 or not isinstance(readers[0], Op) or value in self.results:
                return
            reader = readers[0]
            if reader.name in ("add", "add_any"):
                self.added.add(scatter.id)
                self.forced.add(reader.results[0].id)
                return
            if reader.name not in ("convert_element_type", "reshape", "mul", "neg", "slice"):
                return
            value = reader.results[0]

    @staticmethod
    def _results(item: Op | Nested) -> Sequence[Value]:
        if isinstance(item, Op):
            return item.results
        return [v for op in item.leaves if op.name != "carry" for v in op.results]

    def _operands(self, item: Op | Nested) -> Sequence[Value]:
        if isinstance(item, Op):
            return item.operands
        inside = {v.id for op in item.operations() for v in op.results}
        read: dict[int, Value] = {}
        for op in item.operations():
            for v in op.operands:
                if v.id not in inside:
                    read.setdefault(v.id, v)
        return list(read.values())

    def _fuses(self, item: Op | Nested) -> bool:
        return isinstance(item, Op) and (item.name in FUSED or item.id in self.program.between)

    def _reads_memory(self, item: Op | Nested, k: int) -> bool:
        """Whether an operation that is not fused reads its k-th operand from a buffer."""
        if isinstance(item, Nested):
            return True
        if item.flops:
            return self.habits.operands_stored
        if item.name.startswith("scatter") and k == 0:
            return bool(item.operands[0].depends)
        return item.name in ("sort", "optimization_barrier") or item.name.startswith("cum")

    # ---- buffers --------------------------------------------------------------------------------

    def buffer(self, value: Value, what: str, spec: Spec | None = None, kind: str = "") -> Buffer:
        name = value.path or f"{what} {value.itemsize}B{list(value.shape)}"
        return Buffer(self.program.bytes(value, spec), kind or self.program.kind(value), name)

    def emit(
        self,
        uses: Iterable[Buffer],
        defines: list[Buffer],
        in_place: bool = False,
        inner: Lifetime | None = None,
        replaces: Sequence[tuple[Buffer, Buffer]] = (),
    ) -> None:
        op = self.current.id if self.current is not None else -1
        self.events.append(Event(op, set(uses), defines, in_place, inner, replaces, self.backward))

    def external(self, value: Value) -> bool:
        return value.id not in self.made

    def under(self, value: Value, fused: bool = False) -> Roots:
        """The buffers that reading a value keeps alive."""
        buffer = self.held.get(value.id)
        if buffer is None:
            return self.roots.get(value.id, NONE)
        roots = self.roots.get(value.id, NONE)
        if fused and self.habits.recomputes and buffer.operand:
            large = [b for b in roots if b.bytes * 2 >= buffer.bytes]
            if len(large) == 1:
                return roots
        return frozenset([buffer])

    def store(self, value: Value, what: str, in_place: bool = True, operand: bool = False) -> None:
        """Gives a fused value a buffer."""
        if value.id in self.held or self.external(value) or not value.shape:
            return
        roots = self.roots.get(value.id, NONE)
        if any(self.reduced_from.get(r, NONE) & roots for r in roots):
            in_place = False  # x and a reduction of x are both read: x can't be overwritten as it goes
        buffer = self.buffer(value, what)
        buffer.operand = operand
        self.emit(roots, [buffer], in_place)
        self.held[value.id] = buffer

    def moved(self, value: Value, target: Spec, again: bool, what: str) -> Roots:
        """The buffer of a value brought into another spec; a slice is fused."""
        path = self.program.pricer.reshards.path(self.program.spec(value), target)
        at = self.under(value)
        for source, spec in itertools.pairwise(path):
            if _only_slices(source, spec):
                continue
            scope = self.program.scope[self.current.id] if self.current is not None else -1
            key = (value.id, spec, again, scope)
            known = self.resharded.get(key)
            if known is None:
                if not self.external(value) and value.id not in self.held:
                    self.store(value, what)
                    at = self.under(value)
                kind = "gathered weights" if self.program.kind(value) == "weights" else ""
                known = self.resharded[key] = self.buffer(value, what, spec, kind)
                self.emit(at, [known])
            at = frozenset([known])
        return at

    def combined(self, value: Value, raw: Buffer, source: Spec, what: str) -> None:
        """From the raw result of an operation to the buffer of its value."""
        target = self.program.spec(value)
        at, spec = raw, source
        if spec != target:
            for _, step in itertools.pairwise(self.program.pricer.reshards.path(source, target)):
                after = self.buffer(value, what, step)
                self.emit([at], [after])
                at, spec = after, step
        self.held[value.id] = at

    # ---- the walk -------------------------------------------------------------------------------

    def run(self) -> Lifetime:
        for item in self.items:
            if isinstance(item, Nested):
                ops = item.operations()
                self.current, self.backward = ops[0], all(op.backward for op in ops if op.flops)
                self._barriers(ops[0])
                self._loop(item)
            else:
                self.current, self.backward = item, item.backward
                self._barriers(item)
                self._fused(item) if self._fuses(item) else self._op(item)
        ends: set[Buffer] = set()
        for value in self.results:
            ends |= self.under(value)
        self.emit(ends, [])
        return live([*self.early, *self.events])

    def _barriers(self, op: Op) -> None:
        """What a barrier before `op` hands on is in memory, all at once."""
        program = self.program
        while program.passed < len(program.barriers) and program.barriers[program.passed].first <= op.id:
            barrier = program.barriers[program.passed]
            program.passed += 1
            behind: set[Buffer] = set()
            for value in (program.merged.first(program.graph.values[i]) for i in sorted(barrier.values)):
                self.store(value, "rematerialised from")
                behind |= self.under(value)
            self.emit(behind, [])

    def fresh_results(self) -> None:
        """Marks results that take no argument's room: they are buffers of their own to the end."""
        program = self.program.analysis.program
        for value, replaced in zip(self.results, program.replaces, strict=True):
            if replaced is None:
                self.forced.add(value.id)

    def _fused(self, op: Op) -> None:
        form = self.program.form(op)
        roots: Roots = NONE
        for k, value in enumerate(op.operands):
            target = form.targets[k] if form is not None and value.placed else None
            if target is not None and target != self.program.spec(value):
                roots |= self.moved(value, target, self.program.again(op, value), f"operand of {op.name}")
            else:
                roots |= self.under(value, True)
        for k, value in enumerate(op.results):
            if not value.shape:
                continue
            self.roots[value.id] = roots
            if form is not None and value.placed and form.raws[k] != self.program.spec(value):
                raw = self.buffer(value, op.name, form.raws[k])
                if _only_slices(form.raws[k], self.program.spec(value)):
                    continue
                self.emit(roots, [raw])
                self.combined(value, raw, form.raws[k], op.name)
                continue
            own = self.program.bytes(value)
            shared = len(self.sinks[value.id]) > 1 and own >= SMALL
            several = sum(b.bytes * 2 >= own for b in roots) > 1
            slow = self.habits.stores_slow and op.name in SLOW
            if value.id in self.forced or op.name == "random_bits" or (shared and (slow or several)):
                self.store(value, op.name)
        if op.id in self.program.root_of:
            self._sum_root(op)

    def _sum_root(self, op: Op) -> None:
        """The end of a chain of partial sums: combined here."""
        leaf = self.program.graph.ops[self.program.root_of[op.id]]
        value = op.results[0]
        form = self.program.form(leaf)
        assert form is not None
        raw = self.buffer(value, "sum of partial sums", None, "partial sums")
        raw.bytes = self.program.bytes(leaf.results[0], form.raws[0])
        self.emit(self.roots[value.id], [raw], True)
        last = self.buffer(value, "sum")
        if last.bytes < raw.bytes:
            self.emit([raw], [last])
            self.held[value.id] = last
        else:
            self.held[value.id] = raw

    def _op(self, op: Op) -> None:
        program = self.program
        form = program.form(op)
        if op.id in self.added:
            self.roots[op.results[0].id] = frozenset().union(*[self.under(v) for v in op.operands])
            return
        uses: set[Buffer] = set()
        for k, value in enumerate(op.operands):
            if not value.shape:
                continue
            what = f"operand of {op.name}"
            if self._reads_memory(op, k):
                self.store(value, what, operand=bool(op.flops))
            if form is not None and value.placed and form.targets[k] != program.spec(value):
                uses |= self.moved(value, form.targets[k], self.program.again(op, value), what)
            else:
                uses |= self.under(value)
        in_place = op.name.startswith("scatter") or op.name == "dynamic_update_slice"
        raws = [
            self.buffer(v, op.name, form.raws[k] if form is not None and v.placed else None)
            for k, v in enumerate(op.results)
        ]
        large = [b for b, v in zip(raws, op.results, strict=True) if v.shape]
        partial = form is not None and bool(form.reductions) and op.id not in program.leaves
        zeros = op.name == "scatter-add" and not op.operands[0].depends and form is not None
        if zeros and form is not None and form.raws[0] != program.spec(op.results[0]):
            # made of zeros long before it is filled
            self.early.append(Event(op.id, set(), large, backward=True))
            self.emit({*uses, *large}, [])
        else:
            self.emit(uses, large, in_place)
        for k, (value, raw) in enumerate(zip(op.results, raws, strict=True)):
            if not value.shape:
                continue
            if op.name.startswith("reduce_") or op.name.startswith("arg"):
                behind = frozenset(uses)
                self.reduced_from[raw] = behind.union(*[self.reduced_from.get(b, NONE) for b in uses])
            self.held[value.id] = raw
            if op.id in program.leaves or form is None or not value.placed:
                continue
            if form.raws[k] != program.spec(value):
                if partial:
                    raw.kind = "partial sums"
                self.combined(value, raw, form.raws[k], op.name)

    def _loop(self, item: Nested) -> None:
        program, loop = self.program, item.loop
        uses: set[Buffer] = set()
        links = {op.operands[0].id: op for op in item.enters}
        for value in self._operands(item):
            if not value.shape:
                continue
            if not self.external(value) and value.id not in self.held and not self.roots.get(value.id):
                continue  # made of nothing, inside of the loop
            link = links.get(value.id)
            form = program.form(link) if link is not None else None
            self.store(value, "operand of a loop")
            if form is not None and value.placed and form.targets[0] != program.spec(value):
                uses |= self.moved(value, form.targets[0], False, "operand of a loop")
            else:
                uses |= self.under(value)
            uses |= self._hoisted(item, value)
        defines: list[Buffer] = []
        replaces: list[tuple[Buffer, Buffer]] = []
        results: list[Value] = []
        if loop is not None:
            carried = {op.results[0].id: op.operands[0] for op in item.enters if op.name == "carry_in"}
            final = {v.id: op.results[0] for op in item.leaves if op.name == "carry_out" for v in op.operands}
            for k in range(loop.carries):
                value, out = loop.body_in[loop.consts + k], program.merged.first(loop.body_out[k])
                if value.id not in program.used or not value.shape:
                    continue
                buffer = self.buffer(value, "carry")
                defines.append(buffer)
                results.append(out)
                start = carried.get(value.id)
                if start is not None and start.id in self.held:
                    replaces.append((buffer, self.held[start.id]))
                if out.id in final:
                    self.held[final[out.id].id] = buffer
            for op in item.leaves:
                if op.name == "ys" and op.results[0].id in program.used and op.results[0].shape:
                    buffer = self.buffer(op.results[0], "stacked")
                    defines.append(buffer)
                    self.held[op.results[0].id] = buffer
                    results.append(op.operands[0])
        body = _Region(program, item.body, results, self.hoisted)
        self.emit(uses, defines, inner=body.run(), replaces=replaces)

    def _hoisted(self, item: Nested, value: Value) -> set[Buffer]:
        """The buffer of a stack that is cast to fewer bytes before the loop instead of in every trip."""
        if not self.habits.hoists_casts or not self.external(value):
            return set()
        inside = [v for op in item.enters if op.operands[0] is value and op.name == "xs" for v in op.results] or [value]
        casts = [op for op in item.body if isinstance(op, Op) and any(v in inside for v in op.operands)]
        narrow = [
            op for op in casts if op.name == "convert_element_type" and op.results[0].itemsize < op.operands[0].itemsize
        ]
        if not casts or len(narrow) < len(casts) or value.bytes < 2**18:
            return set()
        buffer = self.hoisted.get(value.id)
        if buffer is None:
            buffer = self.buffer(value, "cast of the stack", kind="weights")
            buffer.bytes *= narrow[0].results[0].itemsize / value.itemsize
            self.hoisted[value.id] = buffer
            self.emit([], [buffer])
        return {buffer}


def _only_slices(source: Spec, target: Spec) -> bool:
    return all(set(a) <= set(b) for a, b in zip(source, target, strict=True))
