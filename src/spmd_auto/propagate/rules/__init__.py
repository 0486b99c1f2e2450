"""The factor rule of every primitive: one family per file."""

from spmd_auto.propagate.rules.registry import known_primitives, register_rule, rule_for

__all__ = ["known_primitives", "register_rule", "rule_for"]
