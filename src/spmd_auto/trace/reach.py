"""What a jaxpr's results come from: which arguments they depend on, and which they are updates of."""

from __future__ import annotations

import weakref
from typing import Any

from spmd_auto import _compat


def reaches(jaxpr: Any, outputs: list[int]) -> list[bool]:
    """For each argument, whether any of the results at `outputs` depends on it.

    Looks through jit and scan (whose carry needs a fixed point); other control flow counts as
    depending on all its operands.
    """
    inner = _compat.open_jaxpr(jaxpr)
    wanted = {inner.outvars[o] for o in outputs if not isinstance(inner.outvars[o], _compat.Literal)}
    for eqn in reversed(inner.eqns):
        live = [i for i, v in enumerate(eqn.outvars) if v in wanted]
        if not live:
            continue
        for used, v in zip(_used(eqn, live), eqn.invars, strict=True):
            if used and not isinstance(v, _compat.Literal):
                wanted.add(v)
    return [v in wanted for v in inner.invars]


def _used(eqn: Any, live: list[int]) -> list[bool]:
    name = eqn.primitive.name
    if name in ("jit", "closed_call", "remat2"):
        return reaches(_compat.call_jaxpr(eqn), live)
    if name == "scan":
        consts, carries = _compat.scan_counts(eqn.params)
        outs = set(live)
        while True:
            used = reaches(eqn.params["jaxpr"], sorted(outs))
            more = {k for k in range(carries) if used[consts + k]} | outs
            if more == outs:
                # a carry that is live at the end needs its initial value, used by the body or not
                return [u or (consts <= i < consts + carries and i - consts in outs) for i, u in enumerate(used)]
            outs = more
    return [True] * len(eqn.invars)


# Not elementwise: what comes out at a place is not made of what was at that place.
_MIXING = ("dot", "conv", "gather", "sort", "cum", "transpose", "rev", "reduce", "ragged", "triangular", "fft", "top_k")
_ELEMENTWISE = ("convert_element_type", "reduce_precision")  # whatever their names begin with
_IN_PLACE = ("scatter", "dynamic_update_slice")  # the first operand is what they change


def updates(jaxpr: Any, output: int) -> set[int]:
    """The arguments that a result is an update of: reached elementwise, and not through a cotangent.

    New parameters are `p - rate * g`: they update `p`, while everything else that `g` depends on is reached
    through reverse-mode differentiation only.  A result that is an argument unchanged updates it.
    """
    inner = _compat.open_jaxpr(jaxpr)
    position, producer = _origins(inner)
    found: set[int] = set()
    seen: set[Any] = set()
    stack = [inner.outvars[output]]
    while stack:
        var = stack.pop()
        if isinstance(var, _compat.Literal) or var in seen:
            continue
        seen.add(var)
        if var in position:
            found.add(position[var])
        elif var in producer:
            eqn, k = producer[var]
            stack += [v for v in _sources(eqn, k) if not isinstance(v, _compat.Literal)]
    return found


_ORIGINS: weakref.WeakKeyDictionary[Any, tuple[dict[Any, int], dict[Any, tuple[Any, int]]]] = (
    weakref.WeakKeyDictionary()
)


def _origins(inner: Any) -> tuple[dict[Any, int], dict[Any, tuple[Any, int]]]:
    """(argument's position, equation and position of the result) by variable. Every leaf of a state asks for them."""
    found = _ORIGINS.get(inner)
    if found is None:
        position = {v: i for i, v in enumerate(inner.invars)}
        producer = {v: (eqn, k) for eqn in inner.eqns for k, v in enumerate(eqn.outvars)}
        found = _ORIGINS[inner] = position, producer
    return found


def _sources(eqn: Any, k: int) -> list[Any]:
    """Operands that the k-th result of an equation is an elementwise function of."""
    name, operands = eqn.primitive.name, eqn.invars
    if _compat.is_transposed(eqn):
        return []
    if name in ("jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"):
        return [operands[i] for i in updates(_compat.call_jaxpr(eqn), k)]
    if name == "scan":
        consts, carries = _compat.scan_counts(eqn.params)
        return [operands[consts + k]] if k < carries else []
    if name == "while":
        return [operands[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] + k]]
    if name == "cond":
        return [operands[1 + i] for branch in eqn.params["branches"] for i in updates(branch, k)]
    if name == "optimization_barrier":
        return [operands[k]]
    if name.startswith(_IN_PLACE):
        return [operands[0]]
    if name.startswith(_MIXING) and name not in _ELEMENTWISE:
        return []
    shape = eqn.outvars[k].aval.shape
    return [v for v in operands if getattr(v.aval, "shape", None) == shape]
