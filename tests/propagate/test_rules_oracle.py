"""Every rule, executed by hand: each factor alone, and drawn shapes, types, meshes and placements together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from spmd_auto import _compat
from spmd_auto.propagate.factors import Kind
from spmd_auto.propagate.rules import elementwise, known_primitives

from .applications import BY_PIECES, CASES, UNSTATABLE, Draw, cycling
from .oracle import Placement, disagreement, expected, make_mesh, splittable
from .together import disagreement_of_any

MESHES = [(2,), (4,), (2, 2), (2, 4), (8,)]
STATABLE = [name for name, case in CASES.items() if case.primitive not in UNSTATABLE]

# Seconds to compile, and elementwise like all the others.
SLOW = {"igamma", "igammac", "igamma_grad_a", "polygamma", "zeta", "regularized_incomplete_beta"}
SLOW |= {"random_gamma", "threefry4x32"}

# Primitives of the elementwise family with one application: executed a dozen at a time.
SIMPLE = [
    name for name in STATABLE if name in elementwise.RULES and CASES[name].dtypes == (np.float32,) and name not in SLOW
]
DOZENS = [SIMPLE[i : i + 12] for i in range(0, len(SIMPLE), 12)]

# Not in both of the tested releases.
_NEWER = {"log2", "one_minus_square", "polynomial", "with_memory_space_constraint"}
_NEWER |= {"acospi", "asinpi", "atan2pi", "atanpi", "cospi", "exp2m1", "fma", "fmuladd", "log2p1", "sinpi", "tanpi"}
_NEWER |= {"random_gamma_grad", "random_poisson", "raw_bits"}
_OLDER = {"shard_alike"}


def test_every_rule_has_an_application() -> None:
    without = known_primitives() - {case.primitive for case in CASES.values()}
    assert without <= (_OLDER if hasattr(lax, "log2") else _NEWER) | {"expand_dims"}


@pytest.mark.parametrize("names", DOZENS, ids=lambda names: names[0])
def test_each_factor_alone_of_a_dozen(names: list[str]) -> None:
    examples = []
    for name in names:
        app = CASES[name].apply(Draw(cycling(4, 6, 8, 10)))
        examples.append((app, app.rule(), [{index: ("a",)} for index in splittable(app.rule(), 2)]))
    assert disagreement_of_any(examples, make_mesh((2,))) is None


@pytest.mark.parametrize("name", [name for name in STATABLE if name not in SIMPLE])
def test_each_factor_alone(name: str) -> None:
    app = CASES[name].apply(Draw(cycling(4, 6, 8, 10)))
    rule = app.rule()
    placements: list[Placement] = [{index: ("a",)} for index in splittable(rule, 2)]
    assert disagreement(app, rule, placements, make_mesh((2,))) is None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.primitive in BY_PIECES])
def test_piece_by_piece(name: str) -> None:
    """Without a mesh: all factors pass, so a piece of the results is the primitive of the pieces of the operands."""
    app = CASES[name].apply(Draw(cycling(4, 6)))
    assert {factor.kind for factor in app.rule()} == {Kind.PASS}
    for factor in app.rule():
        half = factor.size // 2
        places = dict(factor.operands)
        pieces = [x[(slice(None),) * places[k] + (slice(half),)] if k in places else x for k, x in enumerate(app.args)]
        for k, out in enumerate(_compat.bind(app.eqn, pieces)):
            index = (slice(None),) * dict(factor.results)[k] + (slice(half),)
            assert np.array_equal(out, expected(app)[k][index])


@st.composite
def _examples(draw: Any, name: str, shape: tuple[int, ...] | None = None) -> Any:
    """An application, a mesh, and three ways to split the one over the other."""
    case = CASES[name]
    shape = shape or draw(st.sampled_from(MESHES))
    largest = max(shape)
    # One size in three divides by the whole mesh, so that one factor can take two axes, in either order.
    sizes = st.sampled_from([largest, 2 * largest, math.prod(shape)])
    app = case.apply(Draw(lambda _: draw(sizes), draw(st.integers(0, 99)), draw(st.sampled_from(case.dtypes))))
    rule = app.rule()
    axes = list("ab"[: len(shape)])
    placements = []
    for _ in range(3):
        placement: dict[int, tuple[str, ...]] = {}
        left = dict.fromkeys(range(len(rule)), 1)
        for axis in draw(st.permutations(axes)):
            pieces = shape[axes.index(axis)]
            fits = [f for f in left if f in splittable(rule, 1) and rule[f].size % (left[f] * pieces) == 0]
            chosen = draw(st.sampled_from(fits)) if fits else None
            if chosen is not None:
                placement[chosen] = (*placement.get(chosen, ()), axis)
                left[chosen] *= pieces
        if placement not in placements:
            placements.append(placement)
    return app, rule, placements, shape


@pytest.mark.parametrize("names", DOZENS, ids=lambda names: names[0])
def test_drawn_of_a_dozen(names: list[str]) -> None:
    shape = MESHES[DOZENS.index(names) % len(MESHES)]

    @settings(
        max_examples=1,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.tuples(*[_examples(name, shape) for name in names]))
    def check(examples: Any) -> None:
        assert disagreement_of_any([example[:3] for example in examples], make_mesh(shape)) is None

    check()


@pytest.mark.parametrize("name", [name for name in STATABLE if name not in SLOW and name not in SIMPLE])
def test_drawn(name: str) -> None:
    simple = "/" not in name and CASES[name].dtypes == (np.float32,)

    @settings(
        max_examples=1 if simple else 3,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(_examples(name))
    def check(example: Any) -> None:
        app, rule, placements, shape = example
        assert disagreement(app, rule, placements, make_mesh(shape)) is None

    check()
