"""Roofline time of one operation on one device."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_auto.mesh.logical import ShardFractions, Spec
from spmd_auto.propagate.graph import LINKS, Op

# Share of an elementwise operation's bytes that reaches memory: most are fused into a neighbour.  Fitted
# once on compiled scanned transformers; it shifts all strategies alike.
FUSED_SHARE = 0.35

# Operations that move no bytes of their own: links of loops, and what fuses away or only relabels.
FREE = frozenset(LINKS) | {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"}


def compute_seconds(
    fractions: ShardFractions,
    op: Op,
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
    pieces: int,
    edges: float = 1.0,
) -> tuple[float, float]:
    """(seconds, FLOP) of `op` on one device.

    Args:
      operand_specs, result_specs: how the local operation sees its arrays.
      pieces: into how many pieces its iteration space is split.
      edges: FLOP of the largest piece over those of an average one.
    """
    chip = fractions.mesh.chip
    if op.flops:
        flops = op.flops / pieces * edges
        moved = 0.0
        for value, spec in zip(op.operands, operand_specs, strict=True):
            moved += value.bytes * fractions[spec]
        for value, spec in zip(op.results, result_specs, strict=True):
            moved += value.bytes * fractions[spec]
        rate = chip.flops_for(max(v.itemsize for v in op.operands[:2]))
        return max(flops / rate, moved / chip.memory_bandwidth, chip.overhead), flops
    if op.name in FREE:
        return 0.0, 0.0
    values, specs = (op.operands, operand_specs) if op.name.startswith("reduce_") else (op.results, result_specs)
    moved = sum(v.bytes * fractions[s] for v, s in zip(values, specs, strict=True))
    return FUSED_SHARE * moved / chip.memory_bandwidth, 0.0
