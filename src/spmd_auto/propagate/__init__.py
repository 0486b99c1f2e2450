"""Propagation: factor rules, logical axes, regions, parameter forms, and the specs that an assignment implies."""

from spmd_auto.propagate.analysis import Analysis, analyse
from spmd_auto.propagate.assignment import Assignment, SpecTable
from spmd_auto.propagate.factors import Factor, Kind, Rule, format_rule, parse_rule

__all__ = ["Analysis", "Assignment", "Factor", "Kind", "Rule", "SpecTable", "analyse", "format_rule", "parse_rule"]
