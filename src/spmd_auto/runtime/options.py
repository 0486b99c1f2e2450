"""Options of a decorated step that mean nothing: told when the step is decorated, not when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax

from spmd_auto.errors import BatchError, MeshError, PinError, StrategyError, TraceError
from spmd_auto.mesh import Cluster, LogicalMesh
from spmd_auto.search.beam import SearchOptions
from spmd_auto.verify.rank import check_verified

Ragged = Literal["replicate", "refuse"]

# What jit takes, and what stands for it here.
_OF_JIT = {
    "donate_argnums": "donate=True gives away what the step returns anew, donate=False nothing",
    "donate_argnames": "donate=True gives away what the step returns anew, donate=False nothing",
    "in_shardings": "pins={'params/*': jax.P('model')}; what is not pinned is planned",
    "out_shardings": "pins={'result/...': jax.P('model')}; what is not pinned is planned",
}


def check_function(fn: Any) -> None:
    """Whether there is something to decorate.

    Raises:
      TraceError: no function.
    """
    if callable(fn) and not isinstance(fn, (jax.sharding.Mesh, type)):  # a Mesh is a decorator of its own
        return
    meshes = (jax.sharding.Mesh, jax.sharding.AbstractMesh, Cluster, LogicalMesh)
    raise TraceError(
        f"auto_shard of a {type(fn).__name__}",
        "it decorates a step: a function, or an object that is called like one",
        ["auto_shard(mesh=...)(step)" if isinstance(fn, meshes) else "auto_shard(step)"],
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Whether all options mean something.

    Raises:
      StrategyError, PinError, BatchError, VerifyError: one does not.
    """
    check_verified(options["verify"])
    for name in ("donate", "cache", "quiet"):
        if not isinstance(options[name], bool):
            raise StrategyError(
                f"{name}={options[name]!r}",
                "what is donated is found: the arguments that the step returns anew (its state)"
                if name == "donate"
                else "it is on or off",
                [f"{name}=True", f"{name}=False"],
            )
    search = options["search"]
    if search is not None and not isinstance(search, SearchOptions):
        raise StrategyError(
            f"search={search!r} is a {type(search).__name__}",
            "the limits of a search are spmd_auto.SearchOptions",
            ["search=spmd_auto.SearchOptions(states=500)"],
        )
    pins = options["pins"]
    if pins is not None and not isinstance(pins, Mapping):
        raise PinError(
            f"pins is a {type(pins).__name__}",
            "",
            ["a dict of path -> PartitionSpec: pins={'*/kernel': jax.P('model')}"],
        )
    ragged = options["ragged"]
    if ragged not in ("replicate", "refuse"):
        raise BatchError(
            f"ragged={ragged!r}",
            "a batch that can't be split as the first one was is computed whole on each device, or refused",
            ['ragged="replicate"', 'ragged="refuse"'],
        )


def check_names(options: Mapping[str, Any]) -> None:
    """Options of `jax.jit` that a step does not take; others that nobody knows are Python's business.

    Raises:
      StrategyError: one of those.
    """
    for name in options:
        if name in _OF_JIT:
            raise StrategyError(f"auto_shard has no {name}", "that is an option of jax.jit", [_OF_JIT[name]])


def followed_mesh(name: str, mesh: Any, other: str, others: Any) -> Any:
    """The mesh of a step that follows another one: the other's.

    Args:
      name, mesh: of the step.
      other, others: name and mesh of the step that it follows.

    Raises:
      MeshError: the step was given another mesh.
    """
    if mesh is None or _alike(mesh, others):
        return others
    has = "none: its plan chooses one" if others is None else f"{others!r}"
    raise MeshError(
        f"{name} has a mesh of its own, and like={other}",
        f"it uses the state of {other}, which lies on the mesh of {other} ({has})",
        [f"leave mesh= out: {name} runs on the mesh of {other}", f"give {other} the mesh", "leave like= out"],
    )


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, jax.sharding.Mesh) and isinstance(b, jax.sharding.Mesh):  # whatever their axes' types
        return (
            a.axis_names == b.axis_names and a.devices.shape == b.devices.shape and bool((a.devices == b.devices).all())
        )
    return a is b or (type(a) is type(b) and bool(a == b))
