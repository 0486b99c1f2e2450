"""Arguments of a step that several processes run: what each of them has becomes one array over all devices.

No process sends its arrays to another one: each makes its own shards. Only rows that lie elsewhere than the plan wants
them are exchanged, by the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd_auto import _compat
from spmd_auto.errors import LoweringError, ProcessError, TraceError
from spmd_auto.runtime.group import Group, named
from spmd_auto.trace.calls import argument_names, title


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """An array of this process' rows: of dimension 0, in the order of the processes.

    Attributes:
      rows: what this process has.
      processes: how many have as many.
    """

    rows: Any
    processes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.rows.shape[0] * self.processes, *self.rows.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.rows.dtype


def local_names(fn: Callable[..., Any], local: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the arguments that are local to each process.

    Raises:
      TraceError: the function has no such argument.
    """
    if not isinstance(local, (str, Sequence)):
        raise TraceError(f"local={local!r}", "it has names of the step's arguments", ['local="batch"'])
    names = (local,) if isinstance(local, str) else tuple(local)
    try:
        known = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return names
    for name in names:
        if name not in known:
            raise TraceError(
                f"local has {name!r}, but {title(fn)} has no such argument",
                f"its arguments are {', '.join(known)}",
                [f"local={known[-1]!r}"] if known else [],
            )
    return names


def with_local_rows(
    fn: Callable[..., Any], names: Sequence[str], group: Group | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose local arrays have the shape of the whole; unchanged with one process.

    Arrays that lie on all processes already, and numbers, stay as they are.
    """
    if group is None or not names:
        return args, kwargs
    count = len(group.members)

    def whole(x: Any) -> Any:
        if not np.ndim(x) or _compat.is_tracer(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((x.shape[0] * count, *x.shape[1:]), x.dtype)
        return LocalRows(x, count)

    heads = argument_names(fn, len(args))
    return (
        tuple(jax.tree.map(whole, x) if head in names else x for head, x in zip(heads, args, strict=True)),
        {head: jax.tree.map(whole, x) if head in names else x for head, x in kwargs.items()},
    )


def place_across(x: Any, sharding: Any, aval: jax.ShapeDtypeStruct, path: str) -> tuple[Any, bool]:
    """A leaf as an array over the devices of several processes, and whether devices had to exchange parts of it.

    Args:
      x: an array over all devices; this process' rows; or an array or number that is the same on every process.

    Raises:
      LoweringError: an array that lies on some of the processes only, and not on this one alone.
    """
    if isinstance(x, LocalRows):
        rows = x.rows if _compat.is_extended(aval.dtype) else np.asarray(x.rows, aval.dtype)
        return _of_rows(rows, sharding, aval.shape)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.device_set == sharding.device_set:
            return jax.device_put(x, sharding), bool(x.ndim)
        raise LoweringError(
            f"argument leaf {path!r} lies on {len(x.sharding.device_set)} devices of several processes, the step runs "
            f"on {len(sharding.device_set)}",
            "JAX can't move an array of several processes to another set of devices",
            ["make it by the step's .init", "pass it as a NumPy array that every process has"],
        )
    if not _compat.is_extended(aval.dtype):
        x = np.asarray(x, aval.dtype)
    return jax.make_array_from_callback(aval.shape, sharding, lambda index: x[index]), False


def _of_rows(rows: Any, sharding: Any, shape: tuple[int, ...]) -> tuple[Any, bool]:
    first = rows.shape[0] * _members(sharding).index(jax.process_index())

    def piece(index: Any) -> Any:
        start, stop, _ = index[0].indices(shape[0])
        return rows[(slice(start - first, stop - first), *index[1:])]

    if _has_own_rows(sharding, shape):
        return jax.make_array_from_callback(shape, sharding, piece), False
    return jax.device_put(jax.make_array_from_callback(shape, _in_order(sharding, len(rows)), piece), sharding), True


def _members(sharding: Any) -> list[int]:
    return sorted({device.process_index for device in sharding.device_set})


@functools.lru_cache(maxsize=256)
def _has_own_rows(sharding: Any, shape: tuple[int, ...]) -> bool:
    """Whether every device holds rows of its own process only: the same answer on all processes."""
    members = _members(sharding)
    each = shape[0] // len(members)
    for device, index in sharding.devices_indices_map(shape).items():
        start, stop, _ = index[0].indices(shape[0])
        first = each * members.index(device.process_index)
        if start < first or stop > first + each:
            return False
    return True


@functools.lru_cache(maxsize=256)
def _in_order(sharding: Any, rows: int) -> Any:
    """A sharding over the same devices by which each process holds its own rows."""
    members = _members(sharding)
    devices = sorted(sharding.device_set, key=lambda device: (device.process_index, device.id))
    if len(devices) % len(members):
        raise LoweringError(
            f"{len(devices)} devices on {len(members)} processes",
            "rows that belong to processes can be spread only if each has the same number of devices",
            ["a mesh over jax.devices()", "pass the whole batch on every process, without local="],
        )
    each = len(devices) // len(members)
    grid = np.array(devices, dtype=object).reshape(len(members), each)
    mesh = jax.sharding.Mesh(grid, ("process", "device"), axis_types=_compat.axis_types_auto(2))
    return jax.sharding.NamedSharding(mesh, jax.P("process" if rows % each else ("process", "device")))


def compare_values(group: Group, name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Whether arrays that each process has for itself are the same on all of them.

    Raises:
      ProcessError: on all of them, if they are not; names the first leaf.
    """
    lines = [f"{path}\n{_value_digest(x)}" for path, x in zip(paths, leaves, strict=True)]
    texts = group.first_difference(lines)
    if texts is None:
        return
    others = [member for member, text in zip(group.members, texts, strict=True) if text != texts[0]]
    raise ProcessError(
        f"argument leaf {texts[0].splitlines()[0]!r} of {name} is not the same on {named(others)} as on process "
        f"{group.members[0]}",
        "an array that a process has for itself is taken for the whole, and each process makes its own shards of it",
        [
            "auto_shard(local=('batch',)), with the argument's name, if each process has its own rows of it",
            "make it of the same seed on every process",
        ],
    )


def _value_digest(x: Any) -> str:
    if isinstance(x, (LocalRows, jax.ShapeDtypeStruct)) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return ""
    if isinstance(x, jax.Array) and _compat.is_extended(x.dtype):
        x = jax.random.key_data(x)
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).hexdigest()
