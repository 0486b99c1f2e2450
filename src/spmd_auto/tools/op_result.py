"""What `run_op` found: the arrays and their pieces, price, compiled collectives, and whether the result is right."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import PartitionSpec
from rich.table import Table

from spmd_auto.mesh.logical import LogicalMesh, Spec
from spmd_auto.plan.explain import price_table, render, size
from spmd_auto.plan.plan import Plan
from spmd_auto.tools.notation import Counts, spec_to_counts
from spmd_auto.verify.check import Verification


@dataclasses.dataclass(frozen=True, slots=True)
class OpArray:
    """An operand or a result.

    Attributes:
      name: its path, "result" for a bare result.
      dtype: name of the element type.
      shape, local: of the whole array, and of one device's piece.
      spec, counts: how it is split, in both notations.
      bytes: of one device's piece.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    counts: Counts
    local: tuple[int, ...]
    bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class OpResult:
    """One operation under a strategy.

    Attributes:
      operands, results: every array with its pieces.
      plan: the priced strategy; `plan.report` has the terms of the price.
      verification: predicted against compiled bytes; None where the mesh's devices are not here.
      outputs: what the operation returned, sharded; None if it was not run (abstract arguments).
      relative_error: `|sharded - one device| / |one device|` over all results; None if it was not run.
      tolerance: the relative error that is taken for rounding.
    """

    operands: tuple[OpArray, ...]
    results: tuple[OpArray, ...]
    plan: Plan
    verification: Verification | None
    outputs: Any
    relative_error: float | None
    tolerance: float

    @property
    def seconds(self) -> float:
        """Predicted seconds."""
        return self.plan.seconds

    @property
    def collectives(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Bytes that one device sends by (kind, mesh axes): compiled where it was compiled, else predicted."""
        if self.verification is None:
            return self.plan.report.bytes_by_kind_and_axes()
        return self.verification.summary.bytes_by_kind_and_axes()

    @property
    def equal(self) -> bool | None:
        """Whether it computes what one device computes; None if it was not run."""
        return None if self.relative_error is None else self.relative_error <= self.tolerance

    def table(self) -> Table:
        """The arrays."""
        plan = self.plan
        table = Table(title=f"{plan.program.name} on {plan.mesh.describe()}", title_justify="left")
        for column in ("array", "shape", "spec", "split counts", "one device holds", "bytes"):
            table.add_column(column, justify="right" if column == "bytes" else "left")
        for side, arrays in (("", self.operands), ("-> ", self.results)):
            for a in arrays:
                shape, local = list(a.shape), f"{a.dtype}{list(a.local)}"
                table.add_row(side + a.name, str(shape), str(a.spec), str(a.counts), local, size(a.bytes))
            table.add_section()
        return table

    def __str__(self) -> str:
        parts: list[Any] = [self.table(), price_table(self.plan)]
        if self.verification is not None:
            parts += [self.verification.table(), self.verification.verdict]
        else:
            parts.append(f"not compiled: the {self.plan.mesh.device_count} devices of the mesh are not here")
        if self.relative_error is None:
            parts.append("not run: the arguments are abstract")
        else:
            verdict = "equals" if self.equal else "DIFFERS from"
            error = f"relative error {self.relative_error:.3g}, {self.tolerance:.3g} allowed"
            parts.append(f"{verdict} one device: {error}")
        return render(*parts)


def describe(mesh: LogicalMesh, name: str, dtype: Any, shape: tuple[int, ...], itemsize: int, spec: Spec) -> OpArray:
    """An array of a global shape under a spec."""
    written = mesh.partition_spec(spec)
    counts = spec_to_counts(written, mesh, len(shape))
    local = tuple(n // k for n, k in zip(shape, counts, strict=True))
    return OpArray(name, str(dtype), shape, written, counts, local, math.prod(local) * itemsize)
