"""What a compiled program really contains, and whether it computes what one device computes."""

from spmd_auto.verify.hlo import read_compiled, read_hlo, read_memory
from spmd_auto.verify.program import Collective, CollectiveTotal, MemoryUse, ProgramSummary
from spmd_auto.verify.targets import Target, compile_for, parse_target

__all__ = [
    "Collective",
    "CollectiveTotal",
    "MemoryUse",
    "ProgramSummary",
    "Target",
    "compile_for",
    "parse_target",
    "read_compiled",
    "read_hlo",
    "read_memory",
]
