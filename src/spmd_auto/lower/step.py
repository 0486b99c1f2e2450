"""A plan's step as plain `jax.jit` code on a flat argument list."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd_auto import _compat
from spmd_auto.lower.placement import Placements
from spmd_auto.lower.replay import Replay
from spmd_auto.trace import Program


@dataclasses.dataclass(slots=True, eq=False)
class LoweredStep:
    """A jitted flat step.

    Attributes:
      jitted: `jax.jit` object over flat arguments.
      in_shardings, out_shardings: one per flat argument and result.
      abstract: flat `ShapeDtypeStruct`s of the arguments.
    """

    jitted: Any
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    abstract: tuple[jax.ShapeDtypeStruct, ...]
    _lowered: Any = None
    _compiled: Any = None

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the step; lowered once."""
        if self._lowered is None:
            self._lowered = self.jitted.lower(*self.abstract)
        return self._lowered

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def compile(self) -> Any:
        """The compiled step for the mesh's own devices; compiled once."""
        if self._compiled is None:
            self._compiled = self.lower().compile()
        return self._compiled


def lower_step(program: Program, placements: Placements, mesh: jax.sharding.Mesh, donate: bool = True) -> LoweredStep:
    """Lowers a program under placements.

    Args:
      donate: give the buffers of replaced arguments (the state) to the results that replace them.
    """

    def flat_step(*args: Any) -> tuple[Any, ...]:
        replay = Replay(placements, mesh)
        return tuple(replay.results(replay.run(program.jaxpr, args)))

    flat_step.__name__ = flat_step.__qualname__ = program.name
    shardings = Replay(placements, mesh)
    ins = tuple(shardings.sharding(spec) for spec in placements.arguments)
    outs = tuple(
        ins[replaced] if replaced is not None else shardings.sharding(spec)
        for replaced, spec in zip(program.replaces, placements.results, strict=True)
    )
    donated = tuple(sorted(i for i in program.replaces if i is not None)) if donate else ()
    jitted = jax.jit(flat_step, in_shardings=ins, out_shardings=outs, donate_argnums=donated)
    abstract = tuple(  # weakly typed where the step's own arguments are, so that its results are as under jit
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=_compat.is_weak(var.aval))
        for leaf, var in zip(program.arguments, _compat.open_jaxpr(program.jaxpr).invars, strict=True)
    )
    return LoweredStep(jitted, ins, outs, abstract)
