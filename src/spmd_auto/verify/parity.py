"""Whether a sharded program computes what one device computes.

Differences are taken over a whole tree at once. Leaf by leaf they mislead: the gradient of an attention's key bias,
say, is zero up to rounding, so its relative error is pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import VerifyError


def tree_norm(tree: Any) -> float:
    """Euclidean norm of all numbers in a tree, in float64. PRNG keys count by their bits."""
    return math.sqrt(sum(float(np.sum(np.abs(leaf) ** 2)) for leaf in _numbers(tree).values()))


def tree_relative_error(actual: Any, expected: Any) -> float:
    """`|actual - expected| / |expected|` over whole trees; the absolute error where `expected` is all zero.

    Args:
      actual, expected: trees of the same structure and shapes, arrays sharded in any way. Dtypes may differ.

    Returns:
      The error; nan where either has nan, inf where they differ in an infinite element.

    Raises:
      VerifyError: structures or shapes differ; the first leaf that differs is named.
    """
    ours, theirs = _numbers(actual), _numbers(expected)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise VerifyError(
            f"the trees differ in {len(odd)} leaves, first {odd[0]!r}",
            "one of the programs returns another structure",
            ["compare outputs of the same step"],
        )
    squares = 0.0
    for path, value in theirs.items():
        if ours[path].shape != value.shape:
            raise VerifyError(
                f"leaf {path!r} has shape {ours[path].shape}, expected {value.shape}",
                "one of the programs returns another shape",
                ["compare outputs of the same step"],
            )
        with np.errstate(invalid="ignore"):  # inf - inf
            difference = np.where(ours[path] == value, 0, ours[path] - value)
        squares += float(np.sum(np.abs(difference) ** 2))
    scale = math.sqrt(sum(float(np.sum(np.abs(v[np.isfinite(v)]) ** 2)) for v in theirs.values()))
    return math.sqrt(squares) / scale if scale else math.sqrt(squares)


def worst_leaf(actual: Any, expected: Any) -> tuple[str, float]:
    """The leaf that contributes most to the difference, and its share of `|expected|` of the whole tree."""
    ours, theirs = _numbers(actual), _numbers(expected)
    scale = tree_norm(expected) or 1.0
    errors = {path: float(np.linalg.norm((ours[path] - theirs[path]).ravel())) / scale for path in theirs}
    path = max(errors, key=lambda p: (errors[p], p), default="")
    return path, errors.get(path, 0.0)


def losses_relative_error(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest `|actual - expected| / max(|expected|, tiny)` over the steps of two runs.

    Raises:
      VerifyError: the runs have different lengths.
    """
    if len(actual) != len(expected):
        raise VerifyError(
            f"{len(actual)} losses against {len(expected)}", "the runs have different lengths", ["run as many steps"]
        )
    ours, theirs = (np.array([float(x) for x in run], np.float64) for run in (actual, expected))
    return float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), np.finfo(np.float64).tiny), initial=0.0))


def assert_tree_close(actual: Any, expected: Any, tolerance: float, what: str = "trees") -> None:
    """Raises unless `tree_relative_error(actual, expected) <= tolerance`.

    Raises:
      VerifyError: they are further apart (or nan); the leaf that differs most is named.
    """
    error = tree_relative_error(actual, expected)
    if not error <= tolerance:
        path, share = worst_leaf(actual, expected)
        raise VerifyError(
            f"{what} differ by {error:.3g}, more than {tolerance:.3g}",
            f"most of it in leaf {path!r} ({share:.3g} of the whole norm)",
            ["compare in float64 (jax_enable_x64) to tell rounding from a fault"],
        )


def _numbers(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by path as float64 or complex128 arrays on the host."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and _compat.is_extended(leaf.dtype):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        wide = np.complex128 if np.iscomplexobj(array) else np.float64
        leaves[jax.tree_util.keystr(path)] = array.astype(wide)
    return leaves
