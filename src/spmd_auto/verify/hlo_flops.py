"""Floating point operations of the dots and convolutions in HLO text, 2 per multiply-add.

Convolutions count only the positions where kernel and input really meet, as XLA's own cost analysis does
(`xla/service/hlo_cost_analysis.cc`): TPU compilers write a batched dot as a convolution over a dilated batch dimension,
and counting its padding would multiply the result by the batch. GPU programs hide both behind library calls.
Products of vectors that a compiler writes as multiply and reduce are not counted.
"""

from __future__ import annotations

import math
import re

from spmd_auto.propagate.convolution import meetings
from spmd_auto.verify.hlo_text import Computation, HloArray, Instruction

_WINDOW_FIELD = re.compile(r"(\w+)=([^\s}]+)")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def dot_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOP of one execution of an instruction; 0 for everything but dots, convolutions and library calls for them."""
    if instruction.opcode in ("dot", "scaled-dot"):
        return _contraction(computation, instruction, instruction.attribute("lhs_contracting_dims") or "")
    if instruction.opcode == "convolution":
        lhs, rhs = _operands(computation, instruction, 2)
        return _convolution(instruction, lhs, rhs, instruction.arrays[0]) if lhs and rhs else 0.0
    if instruction.opcode == "custom-call" and (match := _TARGET.search(instruction.text)):
        return _library_call(computation, instruction, match.group(1))
    return 0.0


def _library_call(computation: Computation, instruction: Instruction, target: str) -> float:
    if target.startswith("__cublas") and (match := _GEMM_CONTRACTED.search(instruction.text)):
        return _contraction(computation, instruction, match.group(1).replace('"', ""))
    if target.startswith("__cudnn$conv"):
        first, second = _operands(computation, instruction, 2)
        result = instruction.arrays[0]
        if not first or not second:
            return 0.0
        # The labels always speak of the forward convolution's input, kernel and output.
        if target.startswith("__cudnn$convBackwardInput"):
            return _convolution(instruction, result, second, first)
        if target.startswith("__cudnn$convBackwardFilter"):
            return _convolution(instruction, first, result, second)
        return _convolution(instruction, first, second, result)
    return 0.0


def _operands(computation: Computation, instruction: Instruction, count: int) -> list[HloArray | None]:
    found: list[HloArray | None] = []
    for name in instruction.operands[:count]:
        arrays = computation.by_name[name].arrays if name in computation.by_name else ()
        found.append(arrays[0] if arrays else None)
    return found + [None] * (count - len(found))


def _contraction(computation: Computation, instruction: Instruction, contracted: str) -> float:
    (lhs,) = _operands(computation, instruction, 1)
    if lhs is None:
        return 0.0
    depth = math.prod(lhs.shape[int(d)] for d in contracted.split(",") if d)
    return 2.0 * instruction.arrays[0].elements * depth


def _convolution(instruction: Instruction, lhs: HloArray, rhs: HloArray, out: HloArray) -> float:
    match = _DIM_LABELS.search(instruction.text)
    if match is None:
        return 0.0
    lhs_labels, rhs_labels, out_labels = match.groups()
    window = dict(_WINDOW_FIELD.findall(instruction.attribute("window") or ""))
    rank = sum(label.isdigit() for label in out_labels)

    def per_dimension(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * rank

    strides, lhs_dilations, rhs_dilations = (
        [int(x) for x in per_dimension(key, "1")] for key in ("stride", "lhs_dilate", "rhs_dilate")
    )
    pads = [int(pad.split("_")[0]) for pad in per_dimension("pad", "0_0")]
    flops = 2.0 * out.shape[out_labels.index("b")] * out.shape[out_labels.index("f")]
    flops *= rhs.shape[rhs_labels.index("i")]
    for d in range(rank):
        flops *= meetings(
            size=lhs.shape[lhs_labels.index(str(d))],
            kernel=rhs.shape[rhs_labels.index(str(d))],
            out=out.shape[out_labels.index(str(d))],
            stride=strides[d],
            pad=pads[d],
            dilation=lhs_dilations[d],
            kernel_dilation=rhs_dilations[d],
        )
    return flops
