"""The text of a compiled HLO module, cut into computations and instructions.

Reads what `compiled.as_text()` prints on CPU, GPU and TPU: one instruction a line, callees before callers. The
grammar is XLA's own printer (`xla/hlo/ir/hlo_instruction.cc`, `hlo_module.cc`); only what the other `hlo_*` modules
need is understood, anything else on a line stays in `Instruction.text`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from spmd_auto.errors import VerifyError

# Bytes per element by HLO primitive type; types narrower than a byte are packed on the wire.
_BYTES: dict[str, float] = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **dict.fromkeys(("s2", "u2"), 0.25),
    "c128": 16,
    "token": 0,
    "opaque": 0,
}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_FILE_NAME = re.compile(r'^(\d+) "(.*)"$')
_FILE_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_STACK_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)")


@dataclass(frozen=True, slots=True)
class HloArray:
    """One array type: element type as HLO writes it (`bf16`) and dimensions."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        """Bytes without layout padding. 8-bit floats (`f8e4m3fn`, ...) count one byte an element."""
        return self.elements * _BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      type_text: the result type as printed, tuples in parentheses.
      operands: names of the operands, in order.
      text: the whole line.
    """

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def arrays(self) -> tuple[HloArray, ...]:
        """The array types of the result, a tuple's flattened."""
        return parse_arrays(self.type_text)

    def attribute(self, key: str) -> str | None:
        """The value of `key=%name` or `key={...}` without `%` and outer braces, None where absent."""
        match = re.search(rf"\b{key}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.text)
        return None if match is None else match.group(1) or match.group(2) or ""


@dataclass(frozen=True, slots=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction] = field(repr=False, compare=False)

    @property
    def root(self) -> Instruction | None:
        return next((i for i in reversed(self.instructions) if i.is_root), None)


@dataclass(frozen=True, slots=True)
class HloText:
    """A parsed module.

    Attributes:
      computations: by name, in the order of the text.
      entry: name of the entry computation.
      sources: `file:line` by stack frame id, for modules that print their stack frames as tables.
    """

    computations: dict[str, Computation]
    entry: str
    sources: dict[int, str]


def parse_arrays(text: str) -> tuple[HloArray, ...]:
    """The array types in a piece of HLO text, left to right. Bounded dynamic dimensions (`<=8`) count their bound."""
    return tuple(
        HloArray(dtype, tuple(int(d) for d in dims.replace("<=", "").split(",") if d))
        for dtype, dims in _ARRAY.findall(text)
    )


def split_tuple(type_text: str) -> list[str]:
    """The elements of a printed tuple type; a type that isn't a tuple is its own only element."""
    if not type_text.startswith("("):
        return [type_text]
    parts, depth, start = [], 0, 1
    for i, char in enumerate(type_text):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            parts.append(type_text[start:i].strip())
            start = i + 1
    return [p for p in parts if p]


def parse_hlo(text: str) -> HloText:
    """Cuts the text of one optimised HLO module.

    Raises:
      VerifyError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    body: list[Instruction] = []
    for line in text.splitlines():
        if name:
            if line.startswith("}"):
                computations[name] = Computation(name, tuple(body), {i.name: i for i in body})
                name = ""
            elif (instruction := _parse_instruction(line)) is not None:
                body.append(instruction)
        elif (match := _COMPUTATION.match(line)) is not None:
            name, body = match.group(2), []
            if match.group(1):
                entry = name
    if not entry:
        raise VerifyError(
            "this text is not a compiled HLO module",
            "it has no ENTRY computation",
            ["pass the text of `jax.jit(f).lower(...).compile().as_text()`"],
        )
    return HloText(computations, entry, _sources(text))


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, type_text, opcode = match.groups()
    start = match.end()
    # Operands end at the parenthesis that closes the call; older printers put types (with parentheses) before names.
    depth, end = 1, start
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    inside = line[start : end - 1]
    # A constant's or parameter's argument is a value, not an operand.
    operands = () if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(inside))
    return Instruction(name, opcode, type_text, operands, line, root is not None)


def _sources(text: str) -> dict[int, str]:
    """Stack frame id -> `file:line` of its innermost frame, from the tables at the top of the module."""
    files: dict[str, str] = {}
    locations: dict[str, str] = {}
    frames: dict[int, str] = {}
    for section, line in _tables(text):
        if section == "FileNames" and (m := _FILE_NAME.match(line)):
            files[m.group(1)] = m.group(2)
        elif section == "FileLocations" and (m := _FILE_LOCATION.match(line)):
            locations[m.group(1)] = f"{files.get(m.group(2), '?')}:{m.group(3)}"
        elif section == "StackFrames" and (m := _STACK_FRAME.match(line)):
            frames[int(m.group(1))] = locations.get(m.group(2), "")
    return frames


def _tables(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif line.startswith(("%", "ENTRY")):
            return
        elif section and line:
            yield section, line
