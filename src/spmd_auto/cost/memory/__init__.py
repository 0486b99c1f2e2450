"""Memory of one device: a quick table for the search, and the buffers of the compiled program for a plan."""

from spmd_auto.cost.memory.table import MemoryReport, MemoryTable

__all__ = ["MemoryReport", "MemoryTable"]
