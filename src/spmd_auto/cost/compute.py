"""Roofline time of one operation on one device."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_auto.mesh.logical import LogicalMesh, Spec, local_bytes
from spmd_auto.propagate.graph import LINKS, Op, Value

# Share of an elementwise operation's bytes that reaches memory: most are fused into a neighbour.  Fitted
# once on compiled scanned transformers; it shifts all strategies alike.
FUSED_SHARE = 0.35

# Operations that move no bytes of their own: links of loops, and what fuses away or only relabels.
FREE = frozenset(LINKS) | {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota"}


def compute_seconds(
    mesh: LogicalMesh, op: Op, operand_specs: Sequence[Spec], result_specs: Sequence[Spec], pieces: int
) -> tuple[float, float]:
    """(seconds, FLOP) of `op` on one device.

    Args:
      operand_specs, result_specs: how the local operation sees its arrays.
      pieces: into how many pieces its iteration space is split.
    """
    flops = op.flops / pieces
    chip = mesh.chip

    def total(values: Sequence[Value], specs: Sequence[Spec]) -> float:
        return sum(local_bytes(mesh, v.bytes, s) for v, s in zip(values, specs, strict=True))

    if op.flops:
        moved = total(op.results, result_specs) + total(op.operands, operand_specs)
        rate = chip.flops_for(max((v.itemsize for v in op.operands[:2]), default=4))
        return max(flops / rate, moved / chip.memory_bandwidth, chip.overhead), flops
    if op.name in FREE:
        return 0.0, 0.0
    if op.name.startswith("reduce_"):
        return FUSED_SHARE * total(op.operands, operand_specs) / chip.memory_bandwidth, 0.0
    return FUSED_SHARE * total(op.results, result_specs) / chip.memory_bandwidth, 0.0
