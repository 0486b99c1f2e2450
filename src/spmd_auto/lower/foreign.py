"""Operations that replay must not just bind again: the user's own `shard_map`, and kernels."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmd_auto import _compat
from spmd_auto.errors import LoweringError


def shard_map(eqn: Any, operands: list[Any], mesh: jax.sharding.Mesh) -> list[Any]:
    """The user's `shard_map`, with its own specs, on the plan's mesh if that has the same axes.

    A mesh with other axes over the same devices in the same order stays as it is, if each of its axes is a run of axes
    of the plan's.  Other meshes could stand in one program too, but a collective over two of their axes makes the
    compiler of jax 0.12 abort the process (axes 4 x 2 in a program with 2 x 4).

    Raises:
      LoweringError: neither holds.
    """
    params = eqn.params
    theirs = params["mesh"]
    source = _compat.source_line(eqn)
    if tuple(theirs.shape.items()) == tuple(mesh.shape.items()):  # in this order: it says which devices make a group
        chosen = mesh
    elif isinstance(theirs, jax.sharding.Mesh) and _coarser(theirs, mesh):
        chosen = theirs
    else:
        raise LoweringError(
            f"a shard_map at {source} has the mesh {dict(theirs.shape)}, the plan's is {dict(mesh.shape)}",
            "its body is written for its own mesh axes and can't be put onto others",
            ["give that mesh to auto_shard: @auto_shard(mesh=mesh)", "write the body without shard_map"],
        )
    return _compat.bind(eqn, operands, {**params, "mesh": chosen})


def _coarser(theirs: jax.sharding.Mesh, ours: jax.sharding.Mesh) -> bool:
    """Whether each axis of a mesh over the same devices is a run of axes of the other."""
    starts = [set(itertools.accumulate(mesh.devices.shape, operator.mul, initial=1)) for mesh in (theirs, ours)]
    return list(theirs.devices.flat) == list(ours.devices.flat) and starts[0] <= starts[1]


def kernel(eqn: Any, operands: list[Any], mesh: jax.sharding.Mesh) -> list[Any]:
    """A kernel on whole arrays, on every device alike: compilers refuse to partition one on their own."""
    mapped = jax.shard_map(
        lambda *whole: _compat.bind(eqn, whole),
        mesh=mesh,
        in_specs=tuple(PartitionSpec() for _ in operands),
        out_specs=[PartitionSpec() for _ in eqn.outvars],
        check_vma=False,
    )
    return list(mapped(*operands))


FOREIGN: dict[str, Callable[[Any, list[Any], jax.sharding.Mesh], list[Any]]] = {
    "shard_map": shard_map,
    "pallas_call": kernel,
    "core_map": kernel,
    "mpmd_map": kernel,
    "tpu_custom_call": kernel,
}
