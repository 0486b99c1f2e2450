"""What a plan is the answer to: everything that decides the outcome of planning, as text that is equal in any process.

Two questions of equal text have the same plan. So a plan may be kept for later (`plan/cache.py`), and processes can
tell whether they are about to plan the same (`runtime/processes.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from spmd_auto import _compat
from spmd_auto.mesh import LogicalMesh
from spmd_auto.plan.pins import Pins
from spmd_auto.propagate.rules.build import RuleLike
from spmd_auto.propagate.rules.registry import registered_rules
from spmd_auto.search.beam import SearchOptions
from spmd_auto.trace import Leaf, Program

Lines = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question to the planner.

    Attributes:
      parts: what it consists of, in plain words -> lines of text.
      lasting: whether equal text means the same in a later process too; False where a part has no text of its own
        (a rule that is an object with state).
    """

    parts: dict[str, Lines]
    lasting: bool = True

    @property
    def key(self) -> str:
        return digest(line for name, lines in self.parts.items() for line in (name, *lines, ""))


def digest(lines: Iterator[str] | Sequence[str]) -> str:
    """SHA-256 of lines, in hex."""
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode())
        found.update(b"\0")
    return found.hexdigest()


def ask(
    program: Program,
    meshes: Sequence[LogicalMesh],
    pins: Pins,
    memory: float | None,
    search: SearchOptions | None,
    verify: object = False,
) -> Question:
    """The question that `make_plan` answers for these arguments.

    A time limit is no part of it: a plan that no limit cut short is the plan under any limit.
    """
    options = dataclasses.replace(search or SearchOptions(), seconds=None)
    rules = {name: _rule_text(rule) for name, rule in sorted(registered_rules().items())}
    parts: dict[str, Lines] = {
        "the versions": (*versions(), f"64-bit types {_compat.is_set('jax_enable_x64')}"),
        "the arguments": tuple(_leaf_text(*entry) for entry in _arguments(program)),
        "the operations": (program.name, program.fingerprint, _backward(program.jaxpr)),
        "the results": tuple(
            f"{_leaf_text(leaf)} replaces {i}" for leaf, i in zip(program.results, program.replaces, strict=True)
        ),
        "the devices": tuple(repr(mesh) for mesh in meshes),
        "the pins": tuple(f"{path}: {_pin_text(pin)}" for path, pin in pins.items()),  # in order: the last one wins
        "the memory per device": (repr(memory),),
        "the search options": (repr(options),),
        "the programs compiled": (str(verify),),
        "the rules added": tuple(f"{name}: {text}" for name, text in rules.items()),
    }
    return Question(parts, all(text is not None for text in rules.values()))


def _arguments(program: Program) -> Iterator[tuple[Leaf, Any]]:
    declared = program.declared or (None,) * len(program.arguments)
    yield from zip(program.arguments, declared, strict=True)


def _leaf_text(leaf: Leaf, declared: Any = None) -> str:
    role = "" if leaf.role is None else f" {leaf.role.name.lower()}"
    return f"{leaf.path} {leaf.dtype}{list(leaf.shape)}{role}" + (f" declared {declared.entries}" if declared else "")


def _pin_text(pin: Any) -> str:
    if isinstance(pin, jax.sharding.NamedSharding):
        pin = pin.spec
    if not isinstance(pin, jax.sharding.PartitionSpec):
        return repr(pin)
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    entries = ["*" if e is free else [] if e is None else [e] if isinstance(e, str) else list(e) for e in tuple(pin)]
    while entries and entries[-1] == []:
        entries.pop()
    return str(entries)


def _backward(jaxpr: Any) -> str:
    """Digest of which operations differentiation made: part of the analysis, and not of a jaxpr's text."""
    known: dict[int, str] = {}

    def of(inner: Any) -> str:
        if id(inner) not in known:
            marks: list[str] = []
            for eqn in _compat.open_jaxpr(inner).eqns:
                marks.append("01"[_compat.is_transposed(eqn)])
                marks += [of(j) for value in eqn.params.values() for j in _jaxprs(value)]
            known[id(inner)] = digest(marks)
        return known[id(inner)]

    return of(jaxpr)


def _jaxprs(value: Any) -> Iterator[Any]:
    if _compat.is_jaxpr(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _jaxprs(entry)


@functools.cache
def versions() -> Lines:
    """Versions of JAX and of this package; of the latter also a digest of its files: a development tree changes between
    two versions."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    found = hashlib.sha256()
    for path in files:
        found.update(str(path.relative_to(package)).encode())
        found.update(path.read_bytes())
    try:
        version = metadata.version("spmd-auto")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return f"spmd_auto {version} {found.hexdigest()[:16]}", f"jax {jax.__version__}"


def _rule_text(rule: RuleLike) -> str | None:
    """A rule as text; a function by its code, its defaults and what it closes over. None: it has no text."""
    if isinstance(rule, str):
        return rule
    return _value_text(rule)


def _value_text(value: Any) -> str | None:
    if isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        value = (value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, closed)
    if isinstance(value, types.CodeType):
        value = (value.co_code.hex(), value.co_names, value.co_consts)
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (tuple, list)):
        inner = [_value_text(entry) for entry in value]
        return None if any(text is None for text in inner) else f"({','.join(map(str, inner))})"
    text = repr(value)
    return None if re.search(r"0x[0-9a-f]{6,}", text) else text
