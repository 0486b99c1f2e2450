"""Automatic sharding for JAX: a step written for one device, planned, explained, priced and verified for many."""

from spmd_auto import errors
from spmd_auto.decorator import AutoSharded, auto_shard
from spmd_auto.mesh import cluster, register_profile
from spmd_auto.mesh.simulate import simulate_devices
from spmd_auto.plan import Plan, estimate_devices, plan, price
from spmd_auto.propagate.rules import register_rule
from spmd_auto.search import SearchOptions
from spmd_auto.tools.calibrate import Calibration, calibrate
from spmd_auto.tools.checks import check_cluster, check_gradients
from spmd_auto.tools.info import parallel_info
from spmd_auto.tools.run_op import run_op
from spmd_auto.verify.check import Verification, verify

__all__ = [
    "AutoSharded",
    "Calibration",
    "Plan",
    "SearchOptions",
    "Verification",
    "auto_shard",
    "calibrate",
    "check_cluster",
    "check_gradients",
    "cluster",
    "errors",
    "estimate_devices",
    "parallel_info",
    "plan",
    "price",
    "register_profile",
    "register_rule",
    "run_op",
    "simulate_devices",
    "verify",
]
