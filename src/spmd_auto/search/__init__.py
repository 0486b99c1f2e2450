"""Search: known strategies by name, beam search over assignments, joint refinement."""

from spmd_auto.search.beam import SearchOptions

__all__ = ["SearchOptions"]
