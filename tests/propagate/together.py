"""The oracle for many applications at once: two programs in all, for compiling is what takes time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmd_auto import _compat
from spmd_auto.propagate.factors import Rule

from .applications import Application
from .oracle import QUICK, Placement, _close, _data, _plain_arrays, _split

Example = tuple[Application, Rule, Sequence[Placement]]


def disagreement_of_any(examples: Sequence[Example], mesh: Mesh) -> str | None:
    """What `disagreement` says of the first application that has one, and its name; None if there is none."""
    ways = [[_split(app, rule, placement, mesh) for placement in placements] for app, rule, placements in examples]

    def split(many: list[list[Any]]) -> list[Any]:
        return [[way(*args) for way in its] for its, args in zip(ways, many, strict=True)]

    def whole(many: list[list[Any]]) -> list[Any]:
        bound = [_compat.bind(app.eqn, args) for (app, _, _), args in zip(examples, many, strict=True)]
        return [[_data(x) for x in outs] for outs in bound]

    got = jax.jit(split, compiler_options=QUICK)([_plain_arrays(app) for app, _, _ in examples])
    want = jax.jit(whole, compiler_options=QUICK)([app.args for app, _, _ in examples])
    for (app, _, placements), its, wanted in zip(examples, got, want, strict=True):
        for placement, outs in zip(placements, its, strict=True):
            for k, out in enumerate(outs):
                for shard in out.addressable_shards:
                    have, should = np.asarray(shard.data), np.asarray(wanted[k])[shard.index]
                    if have.shape != should.shape or not _close(have, should):
                        return f"{app.name}, {placement}: result {k} on {shard.device}"
    return None
