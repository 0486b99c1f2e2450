"""Tracing: a user's step becomes a `Program`."""

from spmd_auto.trace import objects
from spmd_auto.trace.calls import Call, static_arguments, take_apart
from spmd_auto.trace.program import Leaf, Program, abstract, trace
from spmd_auto.trace.state import Role

__all__ = ["Call", "Leaf", "Program", "Role", "abstract", "objects", "static_arguments", "take_apart", "trace"]
