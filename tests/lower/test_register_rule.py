"""A primitive that the package has never seen: kept whole and reported, and split once it has a rule."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import spmd_auto
from spmd_auto.propagate.rules import known_primitives, registry
from spmd_auto.search import SearchOptions
from spmd_auto.verify import tree_relative_error
from tests.known_answers.toy import toy_mesh

FAST = SearchOptions(states=100)
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)


def _primitive(name: str, fun: Any, result: Any) -> jex_core.Primitive:
    made = jex_core.Primitive(name)
    made.def_impl(jax.jit(fun))
    made.def_abstract_eval(lambda *avals: jax.core.ShapedArray(result(*avals), avals[0].dtype))
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))
    return made


_norm_p = _primitive("tests_norm", lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), lambda x: x.shape)
_dot_p = _primitive("tests_dot", lambda x, w: x @ w, lambda x, w: (x.shape[0], w.shape[1]))


def step(x: Any, w: Any) -> Any:
    return _norm_p.bind(_dot_p.bind(_norm_p.bind(x), w)).sum(0)


@pytest.fixture
def restored() -> Iterator[None]:
    before = dict(registry._TABLE)
    yield
    registry._TABLE.clear()
    registry._TABLE.update(before)


def _run(plan: Any) -> Any:
    lowered = plan.lower_step(donate=False)
    flat = [jax.device_put(x, s) for x, s in zip((X, W), lowered.in_shardings, strict=True)]
    return jax.tree.unflatten(plan.program.out_tree, lowered.compile()(*flat))


def _bytes_whole(plan: Any) -> dict[str, int]:
    return {name: unknown.bytes for name, unknown in plan.analysis.graph.unknown.items()}


def _own_primitives(plan: Any) -> list[Any]:
    """How the results of this file's primitives are split."""
    specs, classes, ops = plan.priced.specs, plan.analysis.classes, plan.analysis.graph.ops
    return [specs[classes.of_value[op.results[0].id]] for op in ops if op.name.startswith("tests_")]


def test_unknown_primitives_stay_whole(devices: list[Any]) -> None:
    plan = spmd_auto.plan(step, X, W, mesh=toy_mesh(8), pins={"x": P("a")}, search=FAST)
    # two norms (operand and result each) of 8 x 16 and 8 x 32 floats; one dot
    assert _bytes_whole(plan) == {"tests_norm": 4 * 2 * (8 * 16 + 8 * 32), "tests_dot": 4 * (8 * 16 + 16 * 32 + 8 * 32)}
    assert _own_primitives(plan) == [((), ())] * 3
    assert tree_relative_error(_run(plan), jax.jit(step)(X, W)) < 1e-5


def test_one_warning_per_unknown_primitive(caplog: pytest.LogCaptureFixture, devices: list[Any]) -> None:
    decorated = spmd_auto.auto_shard(step, search=FAST, donate=False)
    with caplog.at_level(logging.WARNING):
        decorated(X, W)
        decorated(X, W)
    warnings = [record.getMessage() for record in caplog.records if "whole" in record.getMessage()]
    assert len(warnings) == 2
    norm, dot = warnings
    line = step.__code__.co_firstlineno + 1
    assert norm.startswith("tests_norm at ")
    assert f"test_register_rule.py:{line} (step)" in norm
    assert "register_rule" in norm
    assert "(3072 bytes)" in norm
    assert dot.startswith("tests_dot at ")


def test_opaque_primitives_say_why(caplog: pytest.LogCaptureFixture, devices: list[Any]) -> None:
    def calls_back(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with caplog.at_level(logging.WARNING):
        spmd_auto.auto_shard(calls_back, search=FAST, donate=False)(X)
    (message,) = [record.getMessage() for record in caplog.records if "whole" in record.getMessage()]
    assert message.startswith("pure_callback at ")
    assert "host" in message
    assert "(1024 bytes)" in message


def test_registered_rules_split(restored: None, devices: list[Any]) -> None:
    spmd_auto.register_rule("tests_norm", "(i k)->(i k) need_replication={k}")
    spmd_auto.register_rule("tests_dot", lambda params, operands, results: "(i k),(k j)->(i j) reduction={k}")
    assert {"tests_norm", "tests_dot"} <= known_primitives()
    plan = spmd_auto.plan(step, X, W, mesh=toy_mesh(8), pins={"x": P("a")}, search=FAST)
    assert _bytes_whole(plan) == {}
    assert _own_primitives(plan) == [((0,), ())] * 3
    assert tree_relative_error(_run(plan), jax.jit(step)(X, W)) < 1e-5


def test_a_rule_that_does_not_fit_is_named(restored: None) -> None:
    spmd_auto.register_rule("tests_norm", "(i)->(i)")
    with pytest.raises(spmd_auto.errors.RuleError, match="labels for the shape"):
        spmd_auto.plan(step, X, W, mesh=toy_mesh(8), search=FAST)


@pytest.mark.parametrize("name", ["dot_general", "slice", "scatter-add", "fft"])
def test_what_is_written_out_on_shards_keeps_its_rule(restored: None, name: str) -> None:
    with pytest.raises(spmd_auto.errors.RuleError, match=f"'{name}'.*keeps its own rule"):
        spmd_auto.register_rule(name, "(i)->(i)")


def test_all_that_is_written_out_is_known_to_be_so() -> None:
    from spmd_auto.cost.operation import ON_SHARDS
    from spmd_auto.lower import edges, placement, transforms

    assert {*ON_SHARDS, *edges.LOCAL, *transforms.LOCAL, *placement._AS_IT_IS} <= registry.WRITTEN_OUT
    assert known_primitives() >= registry.WRITTEN_OUT
