"""Factors: how the dimensions of an operation's operands and results belong together.

One rule per operation, in Shardy's terms.  A *factor* is an index of the operation's iteration
space (the `i`, `j`, `k` of an einsum); its *kind* says what may happen when the factor is split
over devices:

- `PASS`       each device computes its own piece of the result from its own pieces of the operands;
- `REDUCE`     each device computes a partial result of full size; the partials are combined (`combine`);
- `REPLICATE`  the operation needs the factor whole;
- `HALO`       each device needs its piece and the edge of its neighbour's (collective-permutes).

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
    """

    size: int
    operands: tuple[tuple[int, int], ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    kind: Kind = Kind.PASS
    combine: str = "add"

    @property
    def splittable(self) -> bool:
        return self.kind in (Kind.PASS, Kind.REDUCE)


Rule: TypeAlias = tuple[Factor, ...]
Shapes: TypeAlias = Sequence[tuple[int, ...]]

_LABEL = re.compile(r"[A-Za-z]\w*|[-1.]")


def _shapes_of(side: str) -> list[list[str]]:
    return [_LABEL.findall(group) for group in re.findall(r"\(([^)]*)\)", side)]


def parse_rule(text: str, operand_shapes: Shapes, result_shapes: Shapes) -> Rule:
    """Reads a rule written as `"(i k),(k j)->(i j) reduction={k}"`.

    Each dimension carries one label; `-` marks a dimension without a factor (needed whole).
    `reduction={..}`, `need_replication={..}` and `permutation={..}` name the kinds of labels;
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
    for word, kind in (("reduction", Kind.REDUCE), ("need_replication", Kind.REPLICATE), ("permutation", Kind.HALO)):
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
    for word, kind in (("reduction", Kind.REDUCE), ("need_replication", Kind.REPLICATE), ("permutation", Kind.HALO)):
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
    combines = {factor.combine for factor in rule if factor.kind is Kind.REDUCE} - {"add"}
    return text + (f" combine={combines.pop()}" if combines else "")
