"""The factor rule of every primitive: one family per file."""

from spmd_auto.propagate.rules.registry import known_primitives, opaque_reason, register_rule, rule_for

__all__ = ["known_primitives", "opaque_reason", "register_rule", "rule_for"]
