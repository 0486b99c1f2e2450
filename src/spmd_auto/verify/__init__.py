"""What a compiled program really contains, and whether it computes what one device computes."""

from spmd_auto.verify.cache import SummaryCache
from spmd_auto.verify.hlo import read_compiled, read_hlo, read_memory
from spmd_auto.verify.parity import (
    assert_tree_close,
    losses_relative_error,
    tree_norm,
    tree_relative_error,
    worst_leaf,
)
from spmd_auto.verify.program import Collective, CollectiveTotal, MemoryUse, ProgramSummary
from spmd_auto.verify.targets import Target, compile_for, parse_target

__all__ = [
    "Collective",
    "CollectiveTotal",
    "MemoryUse",
    "ProgramSummary",
    "SummaryCache",
    "Target",
    "assert_tree_close",
    "compile_for",
    "losses_relative_error",
    "parse_target",
    "read_compiled",
    "read_hlo",
    "read_memory",
    "tree_norm",
    "tree_relative_error",
    "worst_leaf",
]
