"""Plans: made by search or by hand, saved, loaded, explained."""

from spmd_auto.plan.estimate import estimate_devices
from spmd_auto.plan.make import make_plan, plan, price, price_strategy
from spmd_auto.plan.plan import Plan, SearchRecord

__all__ = ["Plan", "SearchRecord", "estimate_devices", "make_plan", "plan", "price", "price_strategy"]
