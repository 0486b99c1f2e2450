"""What a jaxpr's results come from: which arguments they depend on, and whether differentiation made them."""

from __future__ import annotations

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


def is_cotangent(jaxpr: Any, output: int) -> bool:
    """Whether the equation that makes a result was made by reverse-mode differentiation."""
    inner = _compat.open_jaxpr(jaxpr)
    var = inner.outvars[output]
    for eqn in reversed(inner.eqns):
        if var in eqn.outvars:
            if _compat.is_transposed(eqn):
                return True
            if eqn.primitive.name in ("jit", "closed_call", "remat2"):
                return is_cotangent(_compat.call_jaxpr(eqn), eqn.outvars.index(var))
            return False
    return False
