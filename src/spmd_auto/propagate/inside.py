"""The user's own `with_sharding_constraint`s, found in a traced step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from spmd_auto import _compat
from spmd_auto.propagate.graph import CALLS, Site, call_site


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint: the site of its equation, its sharding, the shape of the value, the user's source line, and what
    was written there."""

    site: Site
    sharding: jax.sharding.NamedSharding
    shape: tuple[int, ...]
    source: str
    written: str = "with_sharding_constraint"


def constraints_in(jaxpr: Any, site: Site = ()) -> Iterator[Constraint]:
    """All constraints to a `NamedSharding`, in calls and loops too. Sites are those of the flat graph."""
    for index, eqn in enumerate(_compat.open_jaxpr(jaxpr).eqns):
        here = (*site, index)
        if eqn.primitive.name == "sharding_constraint":
            sharding = eqn.params["sharding"]
            if isinstance(sharding, jax.sharding.NamedSharding):
                yield Constraint(here, sharding, tuple(eqn.outvars[0].aval.shape), _compat.source_line(eqn))
        for side, values in (("in_shardings", eqn.invars), ("out_shardings", eqn.outvars)):
            for k, sharding in _compat.own_shardings(eqn, side) if eqn.primitive.name in CALLS else ():
                shape = tuple(values[k].aval.shape)
                yield Constraint(call_site(here, side, k), sharding, shape, _compat.source_line(eqn), side)
        for inner, below in _bodies(eqn, here):
            yield from constraints_in(inner, below)


def _bodies(eqn: Any, site: Site) -> Iterator[tuple[Any, Site]]:
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        yield _compat.call_jaxpr(eqn), site
    elif name == "scan":
        yield params["jaxpr"], site
    elif name == "while":
        yield params["cond_jaxpr"], (*site, 0)
        yield params["body_jaxpr"], (*site, 1)
    elif name == "cond":
        for k, branch in enumerate(params["branches"]):
            yield branch, (*site, k)
    elif name == "custom_linear_solve":
        yield _compat.linear_solve(eqn)[0], site
