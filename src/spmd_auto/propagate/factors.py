"""Factors: how the dimensions of an operation's operands and results belong together.

One rule per operation, in Shardy's terms.  A *factor* is an index of the operation's iteration
space (the `i`, `j`, `k` of an einsum); its *kind* says what may happen when the factor is split
over devices:

- `PASS`       each device computes its own piece of the result from its own pieces of the operands;
- `REDUCE`     each device computes a partial result of full size; the partials are combined (`combine`);
- `REPLICATE`  the operation needs the factor whole;
- `HALO`       each device needs its piece and the edges of its neighbours' (`halos`; collective-permutes);
- `MOVE`       each device's piece of the result lies elsewhere: blocks change places (a slice, a join, a reversal).

A rule never mentions a mesh, and never a model.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from typing import TypeAlias

from spmd_auto.errors import RuleError


class Kind(enum.Enum):
    """What splitting a factor over devices means for the operation."""

    PASS = "pass"
    REDUCE = "reduce"
    REPLICATE = "replicate"
    HALO = "halo"
    MOVE = "move"


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """One index of an operation's iteration space.

    Attributes:
      size: number of elements of the factor.  A split into `n` pieces is possible if `n` divides it.
        It may be smaller than the dimension it stands on: then it is the dimension's *major* part
        (reshape 32 -> (8, 4) has a factor of size 8 on both).
      operands: pairs (operand position, dimension) on which the factor stands.
      results: pairs (result position, dimension).  Empty for a reduced factor.
      kind: see `Kind`.
      combine: how partial results combine if `kind` is REDUCE: "add", "max", "min", "mul", "and", "or".
      halos: for each of `operands` how many elements before and after its own piece a device needs; empty if none.
        Of a HALO factor, and of a REDUCE one whose pieces overlap (a convolution's gradient for its kernel).
    """

    size: int
    operands: tuple[tuple[int, int], ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    kind: Kind = Kind.PASS
    combine: str = "add"
    halos: tuple[tuple[int, int], ...] = ()

    @property
    def splittable(self) -> bool:
        return self.kind is not Kind.REPLICATE


Rule: TypeAlias = tuple[Factor, ...]
Shapes: TypeAlias = Sequence[tuple[int, ...]]

_WORDS = (
    ("reduction", Kind.REDUCE),
    ("need_replication", Kind.REPLICATE),
    ("permutation", Kind.HALO),
    ("move", Kind.MOVE),
)
_LABEL = re.compile(r"[A-Za-z]\w*|[-1.]")


def _shapes_of(side: str) -> list[list[str]]:
    return [_LABEL.findall(group) for group in re.findall(r"\(([^)]*)\)", side)]


def parse_rule(text: str, operand_shapes: Shapes, result_shapes: Shapes) -> Rule:
    """Reads a rule written as `"(i k),(k j)->(i j) reduction={k}"`.

    Each dimension carries one label; `-` marks a dimension without a factor (needed whole).
    `reduction={..}`, `need_replication={..}`, `permutation={..}` (halos) and `move={..}` name the kinds of labels;
    `halo={i=1:1/0:0}` gives a label's halos, before:after for each operand it stands on;
    `combine=max` sets how partial results combine; `major={i=4}` says that the factor `i` has 4 elements
    and is the major part of the dimensions it stands on, where they are larger.

    Raises:
      RuleError: the text does not fit the shapes, or a label has two sizes.
    """
    left, arrow, rest = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'")
    match = re.match(r"\s*((?:\([^)]*\)\s*,?\s*)*)(.*)$", rest)
    assert match is not None
    right, tail = match.group(1), match.group(2)
    groups, outs = _shapes_of(left), _shapes_of(right)
    kinds: dict[str, Kind] = {}
    for word, kind in _WORDS:
        found = re.search(word + r"=\{([^}]*)\}", tail)
        for label in re.findall(r"\w+", found.group(1)) if found else ():
            kinds[label] = kind
    combine = re.search(r"combine=(\w+)", tail)
    if len(groups) != len(operand_shapes) or len(outs) != len(result_shapes):
        raise RuleError(
            f"rule {text!r} has {len(groups)} operands and {len(outs)} results; "
            f"the operation has {len(operand_shapes)} and {len(result_shapes)}"
        )
    major = re.search(r"major=\{([^}]*)\}", tail)
    given = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", major.group(1) if major else "")}
    edges = re.search(r"halo=\{([^}]*)\}", tail)
    halos = {
        name: tuple((int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", each))
        for name, each in re.findall(r"(\w+)=([\d:/]+)", edges.group(1) if edges else "")
    }
    sizes: dict[str, int] = dict(given)
    where: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for side, (labels, shapes) in enumerate(((groups, operand_shapes), (outs, result_shapes))):
        for position, (names, shape) in enumerate(zip(labels, shapes, strict=True)):
            if len(names) != len(shape):
                raise RuleError(f"rule {text!r}: group {position} has {len(names)} labels for the shape {shape}")
            for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
                if name in "-.1":
                    continue
                if sizes.setdefault(name, size) != size and (name not in given or size % given[name]):
                    raise RuleError(f"rule {text!r}: label {name} has sizes {sizes[name]} and {size}")
                where.setdefault(name, ([], []))[side].append((position, dim))
    return tuple(
        Factor(
            sizes[name],
            tuple(ops),
            tuple(res),
            kinds.get(name, Kind.PASS),
            combine.group(1) if combine and kinds.get(name) is Kind.REDUCE else "add",
            halos.get(name, ()),
        )
        for name, (ops, res) in where.items()
    )


def format_rule(rule: Rule, operand_shapes: Shapes, result_shapes: Shapes) -> str:
    """Writes a rule in the grammar of `parse_rule`, and is the inverse of it.

    Two REDUCE factors with different `combine` can't be written (no operation has them).
    """
    names = "ijklmnopqrstuvwxyzabcdefgh"
    label = {index: names[index] if index < len(names) else f"f{index}" for index in range(len(rule))}

    def side(shapes: Shapes, which: str) -> str:
        grid = [["-"] * len(shape) for shape in shapes]
        for index, factor in enumerate(rule):
            for position, dim in getattr(factor, which):
                grid[position][dim] = label[index]
        return ",".join("(" + " ".join(row) + ")" for row in grid)

    text = side(operand_shapes, "operands") + "->" + side(result_shapes, "results")
    for word, kind in _WORDS:
        chosen = [label[index] for index, factor in enumerate(rule) if factor.kind is kind]
        if chosen:
            text += f" {word}={{{', '.join(chosen)}}}"
    shapes_of = {"operands": operand_shapes, "results": result_shapes}
    major = [
        f"{label[index]}={factor.size}"
        for index, factor in enumerate(rule)
        if any(shapes_of[which][k][d] != factor.size for which in shapes_of for k, d in getattr(factor, which))
    ]
    if major:
        text += f" major={{{', '.join(major)}}}"
    edges = [
        f"{label[index]}={'/'.join(f'{before}:{after}' for before, after in factor.halos)}"
        for index, factor in enumerate(rule)
        if factor.halos
    ]
    if edges:
        text += f" halo={{{', '.join(edges)}}}"
    combines = {factor.combine for factor in rule if factor.kind is Kind.REDUCE} - {"add"}
    return text + (f" combine={combines.pop()}" if combines else "")
