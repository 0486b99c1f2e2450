"""Shardings that a model declares about its own arrays: boxes of linen, metadata of nnx variables.

Read by their form (`names`, `out_sharding`), so that Flax is not imported for a model that doesn't use it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

Entry = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """Mesh axes of each dimension as a model's metadata gives them, and who says so."""

    entries: tuple[Entry, ...]
    source: str


def declared_of(tree: Any) -> list[Declared | None]:
    """One entry per leaf of `tree`, in its order; None where nothing is declared, or only names of logical axes.

    `nn.with_partitioning` and `nnx.with_partitioning` name mesh axes; `nn.with_logical_partitioning`, and nnx variables
    under rules, name logical axes, which the rules (of the box, or those in force) turn into mesh axes.
    """
    boxes = jax.tree_util.tree_leaves(tree, is_leaf=is_box)
    out: list[Declared | None] = []
    for box in boxes:
        if not is_box(box):
            out.append(None)
            continue
        leaves = jax.tree_util.tree_leaves(box)
        out += [_read(box)] if len(leaves) == 1 else [None] * len(leaves)
    return out


def is_box(x: Any) -> bool:
    """Whether `x` holds an array together with metadata: a box of linen, an nnx variable."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return False
    return (hasattr(x, "unbox") and hasattr(x, "names")) or (hasattr(x, "get_metadata") and hasattr(x, "type"))


def _read(box: Any) -> Declared | None:
    if hasattr(box, "names"):
        logical = type(box).__name__.startswith("Logical")
        rules = getattr(box, "rules", None) or (_linen_rules() if logical else ())
        if logical and not rules:
            return None
        return _translated(box.names, rules, f"{type(box).__name__}{tuple(box.names)!r}")
    metadata: Mapping[str, Any] = box.get_metadata()
    names = next((metadata[k] for k in ("out_sharding", "sharding_names", "sharding") if metadata.get(k)), None)
    if not isinstance(
        names, (tuple, list)
    ):  # a PartitionSpec is a tuple; a NamedSharding says what it says of an array
        return None
    source = f"{type(box).__name__}(sharding={tuple(names)!r})"
    return _translated(tuple(names), metadata.get("sharding_rules") or (), source)


def _translated(names: Sequence[Any], rules: Any, source: str) -> Declared:
    table: dict[Any, Any] = {}
    for name, axes in rules:
        table.setdefault(name, axes)
    used: set[Any] = set()
    entries: list[Entry] = []
    for name in names:
        entry = table.get(name) if rules else name
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        free = tuple(a for a in axes if a not in used)  # of two dimensions with one mesh axis the first has it
        used.update(free)
        entries.append(None if not free else free[0] if len(free) == 1 else free)
    return Declared(tuple(entries), source)


def _linen_rules() -> Sequence[Any]:
    linen = sys.modules.get("flax.linen")
    return tuple(linen.get_logical_axis_rules()) if linen is not None else ()
