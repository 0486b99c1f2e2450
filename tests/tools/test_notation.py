"""Split counts as MindSpore writes them, turned into specs and back (EXPECTATIONS A 22)."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import P

import spmd_auto
from spmd_auto.errors import MeshError, PinError
from spmd_auto.search import SearchOptions
from spmd_auto.tools.notation import counts_to_spec, match_together, possible_counts, spec_to_counts
from tests.known_answers.toy import toy_mesh
from tests.test_errors import refused


@pytest.mark.parametrize(
    ("sizes", "counts", "shape", "spec"),
    [
        ((2, 4), (2, 4), (8, 8), P("a", "b")),
        ((2, 4), (4, 2), (8, 8), P("b", "a")),
        ((2, 4), (8, 1), (8, 3), P(("a", "b"))),
        ((2, 4), (1, 1), (3, 3), P()),
        ((2, 2), (2, 2), (4, 4), P("a", "b")),  # from left to right
        ((2, 2), (1, 4), (3, 4), P(None, ("a", "b"))),
        ((2, 3, 4), (3, 1, 8), (3, 5, 8), P("b", None, ("a", "c"))),
        ((1, 2), (2,), (4,), P("b")),
    ],
)
def test_counts_are_matched_to_whole_axes(sizes, counts, shape, spec):
    mesh = toy_mesh(*sizes)
    assert counts_to_spec(counts, shape, mesh) == spec
    assert spec_to_counts(spec, mesh, len(shape)) == counts


def test_a_jax_mesh_and_a_sharding_will_do(devices):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    assert counts_to_spec((4, 2), (8, 8), mesh) == P("b", "a")
    assert spec_to_counts(jax.NamedSharding(mesh, P(None, ("a", "b"))), mesh) == (1, 8)


@pytest.mark.parametrize(
    ("counts", "shape", "what", "why", "fixes"),
    [
        ((3, 1), (4, 8), "dimension 0 of (4, 8) in 3", "4 is not divisible by 3", "one of 1, 2, 4"),
        ((3, 1), (9, 8), "dimension 0 of (9, 8) in 3", "no product of axes", "one of 1"),
        ((2, 2), (8, 8), "need 4 pieces of different mesh axes", "one dimension only", "1, 2, 4, 8"),
        ((2,), (8, 8), "are 1 for an array of rank 2", "each dimension", "(2, 1)"),
        ((0, 2), (8, 8), "have 0", "whole number", "1: not split"),
    ],
)
def test_counts_that_can_not_be(counts, shape, what, why, fixes):
    with refused(MeshError, what=what, why=why, fixes=fixes):
        counts_to_spec(counts, shape, toy_mesh(2, 4))


def test_counts_that_can_be_several_specs_name_them():
    with refused(MeshError, what="can be several specs", why="which mesh axis", fixes=("P('a'", "P('b'")):
        counts_to_spec((2, 1), (4, 4), toy_mesh(2, 2))


def test_operands_together_tell_the_axes_apart():
    mesh = toy_mesh(2, 2)
    assert match_together([(2, 1), (1, 2)], ["mk", "kn"], mesh) == [P("a"), P(None, "b")]
    assert match_together([(2, 2), (2, 1)], ["mk", "kn"], mesh) == [P("a", "b"), P("b")]
    with refused(MeshError, why="2 and 1 pieces of one axis"):
        match_together([(2, 1), (2, 1)], ["mk", "kn"], mesh)


def test_specs_that_have_no_counts():
    with refused(MeshError, what="mesh axis 'c'", why="'a', 'b'"):
        spec_to_counts(P("c"), toy_mesh(2, 4))
    with refused(MeshError, what="'a' twice"):
        spec_to_counts(P("a", "a"), toy_mesh(2, 4))
    with refused(MeshError, what="2 entries", why=""):
        spec_to_counts(P("a", "b"), toy_mesh(2, 4), rank=1)


def test_possible_counts():
    assert possible_counts(12, toy_mesh(2, 4)) == [1, 2, 4]
    assert possible_counts(7, toy_mesh(2, 4)) == [1]


def double(x):
    return {"y": x["a"] * 2.0}


def test_counts_pin_arguments_and_stand_in_the_explanation():
    x = {"a": jax.ShapeDtypeStruct((4, 8), np.float32)}
    fast = SearchOptions(states=20)
    plan = spmd_auto.plan(double, x, mesh=toy_mesh(2, 4), pins={"x/a": (1, 4)}, search=fast)
    assert plan.specs["x/a"] == P(None, "b")
    assert "spec P(None, 'b'), split counts (1, 4): pieces of [4, 2]" in plan.explain("x/a")
    step = spmd_auto.auto_shard(double, mesh=toy_mesh(2, 4), pins={"x/a": [2, 1]}, search=fast)
    assert step.plan(x).specs["x/a"] == P("a")
    with refused(PinError, what=("pin 'x/a'", "leaf x/a", "in 3"), why="not divisible", fixes="one of 1, 2, 4"):
        spmd_auto.plan(double, x, mesh=toy_mesh(2, 4), pins={"x/a": (3, 1)}, search=fast)
