"""What a decorated step says: one line per plan, warnings about what was not expected, progress on long work."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd_auto import _compat
from spmd_auto.plan.make import Progress
from spmd_auto.plan.plan import ORIGINS, Plan

logger = logging.getLogger("spmd_auto")

# Bytes of an array closed over by a step from which on it is reported.
LARGE = 1 << 20
# Plans for arrays of the same types from which on somebody should look why.
MANY = 4


def found(plan: Plan) -> None:
    """One line for the plan, and a warning for each thing that can't be split."""
    logger.info(
        "%r found in %.2f s (%d states)%s%s",
        plan,
        plan.search.seconds,
        plan.search.states,
        f"; stopped by its {plan.search.stopped}" if plan.search.stopped else "",
        f"; not searched again: {ORIGINS[plan.search.origin]}" if plan.search.origin else "",
    )
    if plan.search.verified:
        logger.info("%s", plan.search.verified)
    for unknown in plan.analysis.graph.unknown.values():
        logger.warning("%s (%d bytes)", unknown, unknown.bytes)
    closed_over(plan)


def closed_over(plan: Plan) -> None:
    """Warns of large arrays that a step closes over: constants of the program, whole on every device."""
    consts = [np.shape(x) for x in _compat.consts_of(plan.program.jaxpr)]
    sizes = [int(getattr(x, "nbytes", 0)) for x in _compat.consts_of(plan.program.jaxpr)]
    if sum(sizes) >= LARGE:
        size, shape = max(zip(sizes, consts, strict=True))
        logger.warning(
            "%s closes over %d bytes of arrays (the largest: %s, %d bytes): whole on each device, and part of the "
            "program; pass them as arguments to have them split",
            plan.program.name,
            sum(sizes),
            list(shape),
            size,
        )


def planned_again(name: str, keys: Sequence[Any]) -> None:
    """Warns, once, of a step that is planned again and again for arrays of the same types."""
    alike = [other for other, types in keys if types == keys[-1][1]]
    if len(alike) == MANY:
        logger.warning(
            "%s was planned %d times for arrays of the same shapes: something that is no array is new in each call "
            "(a static argument, a setting of a module, a function made anew)",
            name,
            MANY,
        )


@contextlib.contextmanager
def progress(name: str, quiet: bool) -> Iterator[Progress | None]:
    """Shows where the search is, on a terminal only."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"planning {name}") as status:
        yield lambda text: status.update(f"planning {name}: {text}")
