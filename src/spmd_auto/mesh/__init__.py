"""Devices: hardware profiles, tiers of links, the logical mesh, and the price of a collective."""

from spmd_auto.mesh.hardware import Chip, Link
from spmd_auto.mesh.logical import LogicalMesh, Spec, shard_fraction
from spmd_auto.mesh.registry import load_profile, profile_names, register_profile
from spmd_auto.mesh.tiers import Cluster, Tier, cluster, cluster_of, logical_mesh_of

__all__ = [
    "Chip",
    "Cluster",
    "Link",
    "LogicalMesh",
    "Spec",
    "Tier",
    "cluster",
    "cluster_of",
    "load_profile",
    "logical_mesh_of",
    "profile_names",
    "register_profile",
    "shard_fraction",
]
