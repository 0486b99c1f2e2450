"""How often each computation of a compiled module runs: trip counts of loops, multiplied down the call graph."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from spmd_auto.verify.hlo_text import Computation, HloText, Instruction

_KNOWN_TRIP_COUNT = re.compile(r"known_trip_count\D+?(\d+)")
_CONSTANT = re.compile(r"\bconstant\((-?\d+)\)")
# Values pass through these unchanged (a loop counter is never truncated in practice).
_TRANSPARENT = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier"})


@dataclass(frozen=True, slots=True)
class Executions:
    """Attributes:
    times: computation -> how often it runs per execution of the program; 0 or absent for dead ones.
    in_branch: computations reached through a conditional: every branch counts as taken.
    unknown_loops: bodies of loops whose trip count depends on data; they count as run once.
    """

    times: Mapping[str, int]
    in_branch: frozenset[str]
    unknown_loops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Linear:
    """The scalar `loop_state[element] + offset`, or just `offset` where element is None."""

    element: int | None
    offset: int


def count_executions(module: HloText) -> Executions:
    """Walks the call graph from the entry."""
    times: dict[str, int] = defaultdict(int)
    times[module.entry] = 1
    in_branch: set[str] = set()
    unknown: list[str] = []
    for name in _callers_first(module):
        for instruction in module.computations[name].instructions:
            calls, branches = _callees(instruction)
            trips = 1
            if instruction.opcode == "while":
                known = trip_count(module, module.computations[name], instruction)
                if known is None:
                    unknown.append(instruction.attribute("body") or instruction.name)
                trips = 1 if known is None else known
            for callee in (*calls, *branches):
                times[callee] += times[name] * trips
                if name in in_branch or callee in branches:
                    in_branch.add(callee)
    return Executions(dict(times), frozenset(in_branch), tuple(unknown))


def trip_count(module: HloText, caller: Computation, loop: Instruction) -> int | None:
    """Iterations of a `while`, None where they depend on data.

    CPU and GPU modules print `known_trip_count`; TPU modules don't, there the condition, the step in the body and the
    initial value are read.
    """
    if (match := _KNOWN_TRIP_COUNT.search(loop.text)) is not None:
        return int(match.group(1))
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    if condition is None or body is None:
        return None
    compared = _comparison(module, condition)
    if compared is None:
        return None
    direction, left, right = compared
    if left.element is None:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left.element is None:
        return None
    limit = _invariant_value(module, caller, loop, body, right)
    start = _initial_value(module, caller, loop, left.element)
    step = _step(module, body, left.element)
    if limit is None or start is None or not step:
        return None
    distance = limit - (start + left.offset)
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    return max(0, -(-distance // step)) if step > 0 else None


def _callers_first(module: HloText) -> list[str]:
    order: list[str] = []
    done: set[str] = set()
    stack: list[tuple[str, bool]] = [(module.entry, False)]
    while stack:
        name, finished = stack.pop()
        if finished:
            order.append(name)
        elif name not in done and name in module.computations:
            done.add(name)
            stack.append((name, True))
            for instruction in module.computations[name].instructions:
                calls, branches = _callees(instruction)
                stack.extend((callee, False) for callee in (*calls, *branches))
    return order[::-1]


def _callees(instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(computations called, branches of a conditional). Reducers (`to_apply` of a reduce) move and multiply nothing."""
    opcode = instruction.opcode
    # An asynchronous operation names its computation on start and, in some printers, on every later step as well.
    if opcode.endswith(("-done", "-update")):
        return (), ()
    if opcode == "while":
        return _names(instruction, "condition", "body"), ()
    if opcode == "conditional":
        return (), _names(instruction, "branch_computations", "true_computation", "false_computation")
    if opcode.startswith("call"):
        return _names(instruction, "to_apply", "calls"), ()
    if "calls=" in instruction.text or "called_computations=" in instruction.text:
        return _names(instruction, "calls", "called_computations"), ()
    return (), ()


def _names(instruction: Instruction, *keys: str) -> tuple[str, ...]:
    found = (instruction.attribute(key) for key in keys)
    return tuple(name for value in found if value for name in re.findall(r"[\w.\-]+", value))


def _comparison(module: HloText, condition: Computation) -> tuple[str, _Linear, _Linear] | None:
    """(direction, left, right) of the comparison at the root of a loop condition, seen through one fusion."""
    root, scope, environment = condition.root, condition, None
    if root is not None and root.opcode in ("fusion", "call"):
        called = module.computations.get(root.attribute("calls") or root.attribute("to_apply") or "")
        if called is None:
            return None
        environment = [_linear(module, condition, name) for name in root.operands]
        root, scope = called.root, called
    if root is None or root.opcode != "compare" or len(root.operands) != 2:
        return None
    left, right = (_linear(module, scope, name, environment) for name in root.operands)
    direction = root.attribute("direction")
    return None if left is None or right is None or direction is None else (direction, left, right)


def _linear(
    module: HloText, scope: Computation, name: str, environment: list[_Linear | None] | None = None
) -> _Linear | None:
    """A scalar of a loop condition or body as a linear expression of the loop state.

    Args:
      environment: the caller's operands when `scope` is a fused computation; None when it is the condition or body
        itself, whose parameter is the loop state.
    """
    instruction = scope.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        match = _CONSTANT.search(instruction.text)
        return None if match is None else _Linear(None, int(match.group(1)))
    if instruction.opcode == "parameter" and environment is not None:
        match = re.search(r"\bparameter\((\d+)\)", instruction.text)
        index = -1 if match is None else int(match.group(1))
        return environment[index] if 0 <= index < len(environment) else None
    if instruction.opcode == "get-tuple-element":
        source = scope.by_name.get(instruction.operands[0])
        index = instruction.attribute("index")
        is_state = source is not None and source.opcode == "parameter" and environment is None
        return _Linear(int(index), 0) if is_state and index is not None else None
    if instruction.opcode in _TRANSPARENT and instruction.operands:
        return _linear(module, scope, instruction.operands[0], environment)
    if instruction.opcode in ("add", "subtract") and len(instruction.operands) == 2:
        a, b = (_linear(module, scope, operand, environment) for operand in instruction.operands)
        if a is None or b is None or (a.element is not None and b.element is not None):
            return None
        if instruction.opcode == "add":
            return _Linear(a.element if b.element is None else b.element, a.offset + b.offset)
        return None if b.element is not None else _Linear(a.element, a.offset - b.offset)
    if instruction.opcode in ("fusion", "call"):
        called = module.computations.get(instruction.attribute("calls") or instruction.attribute("to_apply") or "")
        if called is not None and called.root is not None:
            inner = [_linear(module, scope, operand, environment) for operand in instruction.operands]
            return _linear(module, called, called.root.name, inner)
    return None


def _next_value(module: HloText, body: Computation, element: int) -> _Linear | None:
    root = body.root
    if root is None or root.opcode != "tuple" or element >= len(root.operands):
        return None
    return _linear(module, body, root.operands[element])


def _step(module: HloText, body: Computation, element: int) -> int | None:
    after = _next_value(module, body, element)
    return after.offset if after is not None and after.element == element else None


def _initial_value(module: HloText, caller: Computation, loop: Instruction, element: int) -> int | None:
    state = caller.by_name.get(loop.operands[0]) if loop.operands else None
    while state is not None and state.opcode in _TRANSPARENT and state.operands:
        state = caller.by_name.get(state.operands[0])
    if state is None or state.opcode != "tuple" or element >= len(state.operands):
        return None
    value = _linear(module, caller, state.operands[element])
    return value.offset if value is not None and value.element is None else None


def _invariant_value(
    module: HloText, caller: Computation, loop: Instruction, body: Computation, limit: _Linear
) -> int | None:
    """The bound of a loop: a constant, or an element of the state that the body hands on unchanged."""
    if limit.element is None:
        return limit.offset
    if _step(module, body, limit.element) != 0:
        return None
    start = _initial_value(module, caller, loop, limit.element)
    return None if start is None else start + limit.offset
