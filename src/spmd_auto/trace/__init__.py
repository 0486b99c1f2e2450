"""Tracing: a user's step becomes a `Program`."""

from spmd_auto.trace.program import Leaf, Program, Role, abstract, static_arguments, trace

__all__ = ["Leaf", "Program", "Role", "abstract", "static_arguments", "trace"]
