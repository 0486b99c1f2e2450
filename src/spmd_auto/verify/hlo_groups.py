"""Which devices a collective joins, said in mesh axes.

HLO writes groups of partition ids in four ways, all read here:

- a list, `replica_groups={{0,1},{2,3}}` (empty: one group of everything);
- an iota, `replica_groups=[2,2]<=[2,2]T(1,0)`: arange, reshaped, transposed, reshaped to [groups, size];
- a mesh of its own, `replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}`, also with a part of an axis,
  `'y':(2)4` (Shardy's sub-axis: 4 wide, with 2 before it);
- pairs of a permute, `source_target_pairs={{0,1},{1,0}}`.

In programs that `jax.jit` compiles, partition `i` is the i-th device of the flattened mesh, whatever the device's id
or place in the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_auto.errors import VerifyError

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LIST = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_AXIS_REF = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """Attributes:
    axes: indices of the mesh axes over which a group's members differ, ascending.
    size: members of the largest group; of a permute, the product of the sizes of `axes`.
    """

    axes: tuple[int, ...]
    size: int


class GroupReader:
    """Reads groups for one mesh; equal texts are read once.

    Args:
      axis_sizes: sizes of the mesh axes.
      device_ids: partition id of each mesh position, flattened row-major; None: position i is partition i.
    """

    def __init__(self, axis_sizes: Sequence[int], device_ids: Sequence[int] | None = None):
        self._shape = tuple(axis_sizes)
        self._count = math.prod(self._shape)
        ids = np.arange(self._count) if device_ids is None else np.asarray(device_ids).reshape(-1)
        if sorted(ids.tolist()) != list(range(self._count)):
            raise VerifyError(
                f"device_ids has to be an order of 0..{self._count - 1}, one for each place of a mesh {self._shape}",
                f"it has {len(ids)} entries, {len(set(ids.tolist()))} of them distinct",
                ["leave device_ids out if partition i is the i-th device of the flattened mesh (what jax.jit does)"],
            )
        place = np.empty(self._count, dtype=np.int64)
        place[ids] = np.arange(self._count)
        # Row p: the mesh coordinates of partition p.
        self._coordinates = np.stack(np.unravel_index(place, self._shape), axis=-1).reshape(self._count, -1)
        self._seen: dict[str, DeviceGroups] = {}

    def read(self, line: str) -> DeviceGroups:
        """Groups of the collective on one line of HLO.

        Raises:
          VerifyError: the groups name partitions that the mesh lacks, or are written in a way not known here.
        """
        for pattern, parse in ((_PAIRS, self._pairs), (_IOTA, _iota), (_LIST, self._list), (_MESH, _mesh)):
            if (match := pattern.search(line)) is not None:
                key = match.group(0)
                if key not in self._seen:
                    self._seen[key] = self._describe(key, parse(match))
                return self._seen[key]
        raise VerifyError(
            "can't read the groups of a collective",
            f"none of the known forms is in: {line.strip()[:300]}",
            ["please report this line with the versions of jax and of the compiler's plugin"],
        )

    def _describe(self, key: str, groups: DeviceGroups | list[list[int]]) -> DeviceGroups:
        if isinstance(groups, DeviceGroups):
            return groups
        highest = max((max(g) for g in groups if g), default=0)
        if highest >= self._count:
            raise VerifyError(
                f"a collective joins partition {highest}, the mesh {self._shape} has {self._count} devices",
                f"the groups are {key[:200]}",
                ["pass the mesh that the program was compiled for"],
            )
        differs = np.zeros(len(self._shape), dtype=bool)
        for group in groups:
            at = self._coordinates[np.asarray(group, dtype=np.int64)]
            differs |= (at != at[:1]).any(axis=0)
        return DeviceGroups(tuple(np.flatnonzero(differs).tolist()), max((len(g) for g in groups), default=1))

    def _pairs(self, match: re.Match[str]) -> DeviceGroups:
        pairs = [[int(x) for x in pair.split(",")] for pair in re.findall(r"\d+,\d+", match.group(1))]
        axes = self._describe(match.group(0), pairs).axes
        return DeviceGroups(axes, math.prod(self._shape[a] for a in axes))

    def _list(self, match: re.Match[str]) -> list[list[int]]:
        groups = [[int(x) for x in g.split(",") if x] for g in re.findall(r"\{([\d,]*)\}", match.group(1))]
        return groups or [list(range(self._count))]


def _ints(text: str | None) -> list[int]:
    return [int(x) for x in (text or "").split(",") if x]


def _iota(match: re.Match[str]) -> list[list[int]]:
    shape, dims, order = (_ints(g) for g in match.groups())
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(order) if order else ids).reshape(shape).tolist()


def _mesh(match: re.Match[str]) -> list[list[int]]:
    axes_text, iota_dims, iota_order, listed, refs = match.groups()
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(axes_text)]
    ids = np.asarray(_ints(listed)) if listed else np.arange(math.prod(size for _, size in axes))
    if iota_dims:
        ids = ids.reshape(_ints(iota_dims))
        ids = ids.transpose(_ints(iota_order)) if iota_order else ids
    # Cut each axis that is used in part into (before, used, after); then groups are the used dimensions.
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name, _ in axes}
    for name, before, size in _AXIS_REF.findall(refs):
        whole = dict(axes)[name]
        parts[name].append((int(before), int(size)) if size else (1, whole))
    dims: list[int] = []
    used: list[int] = []
    for name, whole in axes:
        done = 1
        for before, size in sorted(parts[name]):
            dims.append(before // done)
            used.append(len(dims))
            dims.append(size)
            done = before * size
        dims.append(whole // done)
    ids = ids.reshape(dims)
    rest = [d for d in range(len(dims)) if d not in used]
    return ids.transpose(rest + used).reshape(-1, math.prod(dims[d] for d in used)).tolist()
