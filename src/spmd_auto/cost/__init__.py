"""Prices: compute, communication and memory of one assignment, term by term."""

from spmd_auto.cost.pricer import Priced, Pricer
from spmd_auto.cost.report import Collective, PriceReport, make_report

__all__ = ["Collective", "PriceReport", "Priced", "Pricer", "make_report"]
