"""Lowering: the same jaxpr with the plan's sharding constraints, as plain `jax.jit`."""

from spmd_auto.lower.placement import Placements, place
from spmd_auto.lower.step import LoweredStep, lower_step

__all__ = ["LoweredStep", "Placements", "lower_step", "place"]
