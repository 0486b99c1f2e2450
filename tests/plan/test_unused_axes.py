"""Mesh axes over which a plan splits nothing are told: their devices do the same work twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import spmd_auto
from spmd_auto.plan.explain import unused_axes


def test_mesh_axes_over_which_nothing_is_split_are_named():
    mesh = spmd_auto.cluster("h100", hosts=2, per_host=2).mesh(a=2, b=2, one=1)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def step(w, batch):
        return jnp.mean(batch @ w)

    whole = spmd_auto.price(step, x, x, mesh=mesh, assignment={})
    assert unused_axes(whole) == ["a", "b"]
    assert "nothing is split over a, b" in whole.explain()
    for to, idle in ((("a",), ["b"]), (("a", "b"), [])):
        split = spmd_auto.price(step, x, x, mesh=mesh, assignment={"batch": to})
        assert unused_axes(split) == idle
