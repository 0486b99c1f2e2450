"""What can stand in a step's arguments beside plain pytrees of arrays: objects with references, and modules that
carry functions and settings among their arrays.

Each is treated as its own library's `jit` treats it. Libraries are looked up, never imported: an argument of a library
that was not imported can't be there.

- Objects of `flax.nnx` (modules, optimizers, random streams) are changed in place and may share parts. They go through
  nnx's update context: split outside, merged inside, split again inside, merged outside into the same objects.
- Modules of Equinox are pytrees whose leaves need not be arrays: what is no array is static, as in its `filter_jit`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import jax
import numpy as np

_TAG = "spmd_auto"


def is_object(x: Any) -> bool:
    """Whether `x` is an nnx object with references: a module, an optimizer, a random stream. A Variable alone, as in
    `nnx.State`, is a pytree of its array."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and not isinstance(x, nnx.Variable) and bool(nnx.graph.is_graph_node(x))


def is_module(x: Any) -> bool:
    """Whether `x` is an Equinox module."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


def module_leaves(tree: Any) -> list[bool]:
    """For each flat leaf of `tree` (objects count as leaves) whether a module holds it."""
    out: list[bool] = []
    for node in jax.tree_util.tree_leaves(tree, is_leaf=lambda x: is_object(x) or is_module(x)):
        count = len(jax.tree_util.tree_leaves(node, is_leaf=is_object)) if is_module(node) else 1
        out += [is_module(node)] * count
    return out


@contextlib.contextmanager
def references(needed: bool):
    """Keeps track of which object is which between `split_outside` and `merge_outside`."""
    if not needed:
        yield
        return
    from flax import nnx

    with nnx.update_context(_TAG):
        yield


def split(objects: Any, tracked: bool = True) -> tuple[Any, Any]:
    """(static structure, `nnx.State` of arrays) of a list of objects; outside first, then inside."""
    from flax import nnx

    if not tracked:  # none came from outside
        return nnx.split(objects)
    with nnx.split_context(_TAG) as context:
        return context.split(objects)


def merge(structure: Any, state: Any, inside: bool, tracked: bool = True) -> Any:
    """The objects again. Inside they are copies for tracing, outside the user's own, updated, and new ones."""
    from flax import nnx

    if not tracked:
        return nnx.merge(structure, state)
    with nnx.merge_context(_TAG, inside) as context:
        return context.merge(structure, state)


def joint(states: Any) -> Any:
    """One `nnx.State` of several, numbered."""
    from flax import nnx

    return nnx.State({i: state for i, state in enumerate(states) if len(state)})


def empty() -> Any:
    from flax import nnx

    return nnx.State({})
