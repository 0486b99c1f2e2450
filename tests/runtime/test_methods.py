"""Decorated methods of plain objects: one step for each object, as long as the object lives."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import spmd_auto
from spmd_auto.errors import LoweringError
from spmd_auto.search import SearchOptions

FAST = SearchOptions(states=50)
sharded = functools.partial(spmd_auto.auto_shard, search=FAST)


def params():
    return {"w": np.eye(16, dtype=np.float32)}


X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


class Scale:
    def __init__(self, by):
        self.by, self.traced = by, 0

    @sharded
    def apply(self, params, x):
        self.traced += 1
        return x @ params["w"] * self.by

    @sharded(static_argnums=(0, 3))
    def numbered(self, params, x, up):
        return x @ params["w"] * (self.by if up else -self.by)

    @sharded(static_argnames=("self", "up"))
    def named(self, params, x, up=True):
        return x @ params["w"] * (self.by if up else -self.by)

    @staticmethod
    @sharded
    def plain(params, x):
        return x @ params["w"]

    @sharded
    @staticmethod
    def within(params, x):
        return x @ params["w"]

    @sharded
    def train(self, params, x):
        return {"w": params["w"] - self.by * jnp.mean(x)}, jnp.mean(x @ params["w"])


def test_an_object_and_its_plans_go_with_the_last_reference():
    """A plan kept for an object must not keep the object (nor a trainer its state, for as long as its class lives)."""
    scale = Scale(2.0)
    np.testing.assert_array_equal(scale.apply(params(), X), X * 2)
    step, gone = weakref.ref(scale.apply.step), weakref.ref(scale)
    gc.collect()
    assert step() is not None  # kept between calls, though nobody holds the method
    scale.apply(params(), X)
    assert scale.traced == 1
    del scale
    gc.collect()
    assert gone() is None
    assert step() is None


def test_a_method_keeps_its_object():
    step = Scale(3.0).apply
    gc.collect()
    np.testing.assert_array_equal(step(params(), X), X * 3)


def test_methods_are_equal_as_those_of_python_are():
    a, b = Scale(1.0), Scale(1.0)
    assert a.apply == a.apply
    assert hash(a.apply) == hash(a.apply)
    assert a.apply != b.apply
    assert a.apply != a.named
    assert a.apply.step is a.apply.step


@dataclasses.dataclass
class Unhashable:
    by: float
    traced: int = 0

    @sharded
    def apply(self, params, x):
        self.traced += 1
        return x @ params["w"] * self.by


@dataclasses.dataclass(frozen=True)
class Equal:
    name: str
    table: dict = dataclasses.field(default_factory=dict, compare=False)

    @sharded
    def apply(self, params, x):
        return x @ params["w"] * self.table["by"]


class Slotted:
    __slots__ = ("by", "traced")

    def __init__(self, by):
        self.by, self.traced = by, 0

    apply = sharded(lambda self, params, x: (setattr(self, "traced", self.traced + 1), x @ params["w"] * self.by)[1])


@pytest.mark.parametrize("kind", [Unhashable, Slotted])
def test_objects_that_have_no_hash_or_no_weak_references_are_planned_for_once(kind):
    a, b = kind(2.0), kind(5.0)
    for _ in range(3):
        np.testing.assert_array_equal(a.apply(params(), X), X * 2)
        np.testing.assert_array_equal(b.apply(params(), X), X * 5)
    assert (a.traced, b.traced) == (1, 1)


def test_equal_objects_are_not_taken_for_each_other():
    a, b = Equal("same", {"by": 2.0}), Equal("same", {"by": 5.0})
    assert a == b
    np.testing.assert_array_equal(a.apply(params(), X), X * 2)
    np.testing.assert_array_equal(b.apply(params(), X), X * 5)


def test_a_copy_is_an_object_of_its_own():
    a = Scale(2.0)
    a.apply(params(), X)
    for b in (copy.copy(a), copy.deepcopy(a)):
        b.by = 7.0
        np.testing.assert_array_equal(b.apply(params(), X), X * 7)


def test_a_static_self_as_jit_wants_it():
    """`functools.partial(jax.jit, static_argnums=0)` is how methods are written for jit."""
    a = Scale(2.0)
    for up, sign in ((True, 1), (False, -1)):
        np.testing.assert_array_equal(a.numbered(params(), X, up), X * 2 * sign)
        np.testing.assert_array_equal(a.named(params(), X, up=up), X * 2 * sign)
    assert list(a.numbered.plan(params(), X, True).specs) == ["params/w", "x"]


@pytest.mark.parametrize("of", [Scale, Scale(2.0)])
def test_static_methods(of):
    np.testing.assert_array_equal(of.plain(params(), X), X)
    np.testing.assert_array_equal(of.within(params(), X), X)


def test_init_and_like_of_a_method():
    a = Scale(0.5)
    state = a.train.init(params, batch=X)
    state, _ = a.train(state, X)
    np.testing.assert_allclose(state["w"], params()["w"] - 0.5 * X.mean())
    loss = sharded(like=a.train)(lambda params, x: jnp.mean(x @ params["w"]))
    assert loss.plan(state, X).mesh == a.train.plan(state, X).mesh
    assert "logical axes of train" in a.train.explain()
    assert "while" not in a.train.lower(state, X).as_text()
    assert a.train.compile(state, X) is a.train.compile(state, X)


def test_init_of_a_module_that_is_there_says_how():
    equinox = pytest.importorskip("equinox")

    class Net(equinox.Module):
        w: object

        @sharded
        def step(self, x):
            return x @ self.w

    with pytest.raises(LoweringError, match=r"Net.step.init\(create"):
        Net(params()["w"]).step.init(lambda: Net(params()["w"]), batch=X)
    made = Net.step.init(lambda: Net(jnp.eye(16)), batch=X)
    np.testing.assert_array_equal(made.step(X), X)
