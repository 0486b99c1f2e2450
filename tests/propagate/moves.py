"""Operations whose blocks change places, for the oracle.

What a MOVE factor claims is little: that each device can be given its piece of the results if it is sent what it lacks.
So the pieces of the operands are gathered, the operation runs whole, and the own piece is cut out.  That the blocks
which lowering really sends are enough is tested in tests/lower.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from spmd_auto.propagate.factors import Kind


def whole_then_cut(local: Any, args: list[Any]) -> list[Any]:
    args = list(args)
    for index, axes in local.placement.items():
        for k, d in local.rule[index].operands:
            if local.rule[index].kind is Kind.MOVE:
                args[k] = lax.all_gather(args[k], axes, axis=d, tiled=True)
    passing = {(k, d) for i in local.placement if local.rule[i].kind is not Kind.MOVE for k, d in local.rule[i].results}
    params = dict(local.params)
    if local.app.eqn.primitive.name == "slice":
        pieces = [local.pieces("operands", 0, d) if (0, d) in passing else 1 for d in range(args[0].ndim)]
        for key in ("start_indices", "limit_indices"):
            params[key] = tuple(at // n for at, n in zip(params[key], pieces, strict=True))
    outs = []
    for k, out in enumerate(local.bind(args, **params)):
        shape = local.shape("results", k)
        starts = [0 if (k, d) in passing else local.offset("results", k, d) for d in range(out.ndim)]
        outs.append(lax.dynamic_slice(out, starts, shape))
    return outs
