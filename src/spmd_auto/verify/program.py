"""What a compiled program moves, computes and keeps: the result of reading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Axes = tuple[str, ...]

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction of one device's program.

    Attributes:
      kind: one of `KINDS`.
      axes: names of the mesh axes over which the members of a group differ, in the order of the mesh.
      group_size: devices in a group (less than the product of the axes' sizes where only part of an axis joins).
      payload_bytes: of an all-reduce the reduced buffer, of an all-gather the gathered result, of a reduce-scatter the
        input, of the others the local buffer; unpadded, all arrays of a combined collective together.
      ring_bytes: bytes that one device sends per execution: (n - 1)/n of the payload, twice that for an all-reduce, the
        whole payload for a permute.
      times: executions per run of the program: trip counts of all surrounding loops.
      dtypes: element types, one an array.
      op_name: JAX's name stack and primitive, "" where the compiler dropped it.
      source: `file:line` in the user's code, "" where unknown.
      in_branch: it stands in a branch of a conditional (every branch counts as taken).
    """

    kind: str
    axes: Axes
    group_size: int
    payload_bytes: float
    ring_bytes: float
    times: int
    dtypes: tuple[str, ...]
    op_name: str = ""
    source: str = ""
    in_branch: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Several collectives of one kind over the same axes: executions, payload and ring bytes of all of them."""

    times: int
    payload_bytes: float
    ring_bytes: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device, as the compiler states them (`compiled.memory_analysis()`).

    Attributes:
      arguments, outputs, temporaries: sizes of the buffers.
      aliases: bytes of outputs that reuse a donated argument.
      peak: most bytes live at once, arguments included; None where the compiler doesn't say. Below about 150 MB of
        temporaries a TPU reports its on-chip memory here instead, and a CPU may leave its temporaries out.
    """

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    peak: int | None

    @property
    def needed(self) -> int:
        """Bytes that a device needs: the peak where it can be one, else all buffers.

        A peak holds what goes in and comes out and most of the temporaries: compilers pack those into a buffer hardly
        larger than what of them is live at once. One that holds less than half of them is something else.
        """
        least = self.arguments + self.outputs - self.aliases
        most = least + self.temporaries
        return self.peak if self.peak is not None and least + self.temporaries / 2 <= self.peak <= most else most


@dataclass(frozen=True, slots=True)
class ProgramSummary:
    """One device's share of a compiled program.

    Attributes:
      axis_names, axis_sizes: the mesh it is described on.
      collectives: in the order of the text; groups of one device are left out.
      dot_flops: floating point operations of dots and convolutions, 2 per multiply-add, loops included.
      memory: None where only text was read.
      notes: what could not be read exactly, in words.
    """

    axis_names: Axes
    axis_sizes: tuple[int, ...]
    collectives: tuple[Collective, ...]
    dot_flops: float
    memory: MemoryUse | None = None
    notes: tuple[str, ...] = ()

    def combined(self) -> dict[tuple[str, Axes], CollectiveTotal]:
        """Totals per (kind, axes) over one run of the program, largest ring bytes first."""
        totals: dict[tuple[str, Axes], CollectiveTotal] = {}
        for c in self.collectives:
            old = totals.get((c.kind, c.axes), CollectiveTotal(0, 0.0, 0.0))
            totals[c.kind, c.axes] = CollectiveTotal(
                old.times + c.times,
                old.payload_bytes + c.payload_bytes * c.times,
                old.ring_bytes + c.ring_bytes * c.times,
            )
        return dict(sorted(totals.items(), key=lambda item: (-item[1].ring_bytes, item[0])))

    def bytes_by_kind_and_axes(self) -> dict[tuple[str, Axes], float]:
        """Ring bytes that one device sends in one run of the program, per (kind, axes)."""
        return {key: total.ring_bytes for key, total in self.combined().items()}

    def bytes_by_axes(self) -> dict[Axes, float]:
        """Ring bytes that one device sends in one run of the program, per axes."""
        totals: Counter[Axes] = Counter()
        for (_, axes), total in self.combined().items():
            totals[axes] += total.ring_bytes  # type: ignore[assignment]  # Counter holds floats as well
        return dict(totals)

    @property
    def total_bytes(self) -> float:
        """Ring bytes that one device sends in one run of the program."""
        return sum(self.bytes_by_axes().values())

    def count(self, kind: str | None = None, axes: Axes | None = None) -> int:
        """Executions of collectives in one run of the program, of one kind and over exactly these axes if given."""
        return sum(
            c.times for c in self.collectives if kind in (None, c.kind) and (axes is None or tuple(axes) == c.axes)
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write and `from_json` reads back equal."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProgramSummary:
        collectives = tuple(
            Collective(**{**c, "axes": tuple(c["axes"]), "dtypes": tuple(c["dtypes"])}) for c in data["collectives"]
        )
        memory = None if data["memory"] is None else MemoryUse(**data["memory"])
        return cls(
            axis_names=tuple(data["axis_names"]),
            axis_sizes=tuple(data["axis_sizes"]),
            collectives=collectives,
            dot_flops=data["dot_flops"],
            memory=memory,
            notes=tuple(data["notes"]),
        )
