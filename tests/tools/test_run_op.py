"""One operation under a strategy written by hand."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import spmd_auto
from spmd_auto.errors import MeshError, StrategyError, VerifyError
from spmd_auto.tools import run_op as module
from tests.known_answers.toy import all_reduce, toy_mesh
from tests.test_errors import refused

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(s, np.float32) for s in ((8, 16), (16, 32)))


@pytest.fixture(scope="module")
def mesh(devices):
    return jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("data", "model"))


def matmul(x, w):
    return x @ w


@pytest.mark.parametrize(
    ("ins", "outs", "spec", "local", "moved"),
    [
        (((2, 1), (1, 4)), None, P("data", "model"), (4, 8), {}),
        (((2, 4), (4, 1)), None, P("data"), (4, 32), {("all-reduce", ("model",)): all_reduce(4, 4 * 32 * 4)}),
        (
            (P("data", "model"), P("model")),
            P("data", "model"),
            P("data", "model"),
            (4, 8),
            {("reduce-scatter", ("model",)): 3 / 4 * 4 * 32 * 4},
        ),
        ((P("data"), P()), ((1, 1),), P(), (8, 32), {("all-gather", ("data",)): 8 * 32 * 4 / 2}),
        (((8, 1), None), None, P(("data", "model")), (1, 32), {}),
    ],
)
def test_matmul(mesh, ins, outs, spec, local, moved):
    done = spmd_auto.run_op(matmul, X, W, mesh=mesh, in_specs=ins, out_specs=outs)
    assert (done.results[0].spec, done.results[0].local) == (spec, local)
    assert done.outputs.sharding.shard_shape((8, 32)) == local
    assert done.collectives == pytest.approx(moved)
    assert done.plan.report.bytes_by_kind_and_axes() == pytest.approx(moved)
    assert done.equal
    assert done.relative_error < 1e-6
    np.testing.assert_allclose(done.outputs, X @ W, rtol=1e-4, atol=1e-5)


def test_printed(mesh):
    text = str(spmd_auto.run_op(matmul, X, W, mesh=mesh, in_specs=((2, 4), (4, 1))))
    for words in ("matmul on (data=2, model=4)", "float32[4, 4]", "(2, 4)", "-> result", "all-reduce", "768 B"):
        assert words in text
    assert "equals one device" in text


def test_a_small_function_of_a_tree_and_what_follows_from_the_operands(mesh):
    def mlp(params, x):
        return {"y": jax.nn.relu(x @ params["up"]) @ params["down"], "n": x.sum()}

    params = {"up": W, "down": W.T}
    done = spmd_auto.run_op(
        mlp, params, X, mesh=mesh, in_specs=({"up": P(None, "model"), "down": P("model")}, P("data", None))
    )
    assert [(a.name, a.local) for a in done.operands] == [
        ("params/down", (8, 16)),
        ("params/up", (16, 8)),
        ("x", (4, 16)),
    ]
    assert {a.name: a.local for a in done.results} == {"n": (), "y": (4, 16)}
    assert done.collectives["all-reduce", ("model",)] == all_reduce(4, 4 * 16 * 4)
    both = spmd_auto.run_op(mlp, params, X, mesh=mesh, in_specs=(P(), P("data")))  # one spec for all leaves
    assert {a.local for a in both.operands} == {(16, 32), (32, 16), (4, 16)}


def test_an_operation_that_returns_what_it_gets_keeps_its_operands(mesh):
    x = {"a": jnp.ones((8, 4))}
    for _ in range(2):  # nothing is donated
        done = spmd_auto.run_op(
            lambda x: {"a": x["a"] * 2}, x, mesh=mesh, in_specs=(P("data"),), out_specs=(P(None, "model"),)
        )
    assert done.operands[0].spec == P("data")
    assert done.results[0].spec == P(None, "model")


def test_a_reshard_is_an_operation_too(mesh):
    done = spmd_auto.run_op(lambda x: x, X, mesh=mesh, in_specs=(P("model"),), out_specs=P(None, "model"))
    assert (done.operands[0].local, done.results[0].local) == ((2, 16), (8, 4))
    assert done.collectives == {("all-to-all", ("model",)): 8 * 16 * 4 / 4 * 3 / 4}
    twice = spmd_auto.run_op(lambda x: [y := x * 2, y], X, mesh=mesh, in_specs=P("data"), out_specs=[P("data"), P()])
    assert [a.local for a in twice.results] == [(4, 16), (8, 16)]
    bound = spmd_auto.run_op(functools.partial(jnp.sum, axis=1), X, mesh=mesh, in_specs=((2, 1),))
    assert (bound.plan.program.name, bound.results[0].local) == ("partial", (4,))
    np.testing.assert_array_equal(twice.outputs[1], 2 * X)


@pytest.mark.parametrize(
    ("fn", "local"),
    [
        (jax.nn.softmax, (4, 4)),
        (jnp.transpose, (4, 4)),
        (lambda x: x.reshape(8, 4, 4), (4, 1, 4)),
        (lambda x: jnp.argmax(x, 1), (4,)),
        (lambda x: jnp.sort(x, axis=1), (4, 16)),
    ],
)
def test_operations_of_other_kinds(mesh, fn, local):
    done = spmd_auto.run_op(fn, X, mesh=mesh, in_specs=((2, 4),))
    assert done.equal
    assert done.results[0].local == local


def test_abstract_arguments_run_nothing(mesh):
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    here = spmd_auto.run_op(matmul, *args, mesh=mesh, in_specs=((2, 4), (4, 1)))
    assert here.outputs is None
    assert here.equal is None
    assert here.verification is not None
    assert here.collectives == {("all-reduce", ("model",)): 768.0}
    absent = spmd_auto.run_op(
        matmul, *args, mesh=spmd_auto.cluster("h100", hosts=2).mesh(data=4, model=4), in_specs=((4, 4), (4, 1))
    )
    assert absent.verification is None
    assert absent.collectives == {("all-reduce", ("model",)): all_reduce(4, 2 * 32 * 4)}
    assert absent.seconds > 0
    assert "16 devices of the mesh are not here" in str(absent)
    with refused(MeshError, what="needs 16 devices"):
        spmd_auto.run_op(matmul, X, W, mesh=absent.plan.mesh, in_specs=((4, 4), (4, 1)))


def test_results_that_differ_are_an_error_or_told(mesh, monkeypatch):
    lower = module.Plan.lower_step

    def wrong(self, *args, **kwargs):
        lowered = lower(self, *args, **kwargs)
        shifted = jax.jit(lambda *xs: tuple(y + 1 for y in lowered.jitted(*xs)), in_shardings=lowered.in_shardings)
        return dataclasses.replace(lowered, jitted=shifted)

    monkeypatch.setattr(module.Plan, "lower_step", wrong)
    with refused(VerifyError, what=("matmul", "on one device differ by")):
        spmd_auto.run_op(matmul, X, W, mesh=mesh, in_specs=((2, 1), (1, 4)))
    told = spmd_auto.run_op(matmul, X, W, mesh=mesh, in_specs=((2, 1), (1, 4)), strict=False)
    assert told.equal is False
    assert "DIFFERS from one device" in str(told)
    assert spmd_auto.run_op(matmul, X, W, mesh=mesh, in_specs=((2, 1), (1, 4)), tolerance=2.0).equal


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int32])
def test_every_kind_of_number(mesh, dtype):
    x, w = (jnp.asarray(np.round(a * 4), dtype) for a in (X, W))
    done = spmd_auto.run_op(matmul, x, w, mesh=mesh, in_specs=((1, 8), (8, 1)))
    assert done.equal


def test_convolution_and_gather(mesh):
    image, kernel = (RNG.standard_normal(s, np.float32) for s in ((4, 8, 8, 8), (16, 8, 3, 3)))
    conv = spmd_auto.run_op(
        lambda x, k: lax.conv(x, k, (1, 1), "SAME"), image, kernel, mesh=mesh, in_specs=((2, 4, 1, 1), (1, 4, 1, 1))
    )
    assert conv.results[0].local == (2, 16, 8, 8)
    assert conv.collectives == {("all-reduce", ("model",)): all_reduce(4, 2 * 16 * 8 * 8 * 4)}
    rows = spmd_auto.run_op(lambda t, i: t[i], W, np.array([3, 1, 3, 2]), mesh=mesh, in_specs=((1, 4), (2,)))
    assert rows.results[0].local == (2, 8)
    assert rows.collectives == {}


# ---- mistakes -------------------------------------------------------------------------------------


def op(ins, outs=None, mesh=None, shape=(8, 16)):
    args = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct((shape[-1], 32), np.float32)
    return spmd_auto.run_op(matmul, *args, mesh=mesh or toy_mesh(2, 4), in_specs=ins, out_specs=outs)


@pytest.mark.parametrize(
    ("ins", "outs", "what", "why", "fixes"),
    [
        ((P("a"),), None, "in_specs of matmul has 1 specs", "there are 2 arguments", "one spec per argument"),
        (P("a"), None, "in_specs of matmul is P('a'", "there are 2 arguments", "a tuple of 2 specs"),
        ((P("a"), P()), (P(), P()), "out_specs of matmul has 2 specs", "there is 1 result", "one spec per result"),
        (
            (P("a", None, "b"), P()),
            None,
            ("in_specs[0] of matmul (x, shape (8, 16))", "3 entries", "rank 2"),
            "",
            "one",
        ),
        ((P(), P("z")), None, ("in_specs[1] of matmul (w", "mesh axis 'z'"), "'a', 'b'", "use one of"),
        ((P("a", "a"), P()), None, "mesh axis 'a' twice", "", "one dimension of an array"),
        ((P("a"), P()), P("c"), ("out_specs[0] of matmul", "mesh axis 'c'"), "the mesh has", "use one of"),
        (((3, 1), (1, 1)), None, ("in_specs[0]", "dimension 0", "in 3"), "8 is not divisible by 3", "1, 2, 4, 8"),
        (((1, 2), (1, 1, 1)), None, ("in_specs[1] of matmul (w", "3 for an array of rank 2"), "each", "(1, 1)"),
        (("a", P()), None, "in_specs[0] of matmul is 'a'", "one array", "PartitionSpec"),
        ((P("a"), P()), ("a",), "out_specs[0] of matmul is 'a'", "one array", "PartitionSpec"),
    ],
)
def test_specs_that_can_not_be(ins, outs, what, why, fixes):
    with refused(StrategyError, what=what, why=why, fixes=fixes):
        op(ins, outs)


def test_an_indivisible_dimension_names_what_would_divide_it():
    with refused(
        StrategyError,
        what=("in_specs[0] of matmul (x, shape (12, 16))", "dimension 0", "in 8"),
        why="12 is not divisible by a=2 x b=4",
        fixes=("one of 1, 2, 4 pieces", "pad dimension 0 to 16"),
    ):
        op((P(("a", "b")), P()), shape=(12, 16))


def test_counts_of_several_meanings():
    with refused(StrategyError, what=("in_specs[0] of matmul", "several specs"), fixes=("P('a'", "P('b'")):
        op(((2, 1), (1, 1)), mesh=toy_mesh(2, 2))
    assert op(((2, 1), (1, 2)), mesh=toy_mesh(2, 2)).results[0].spec == P("a", "b")  # together they are clear


def test_a_mesh_without_axes():
    with refused(MeshError, what="mesh is a Cluster", why="axes of a mesh", fixes=".mesh(data=2, model=4)"):
        op((P(), P()), mesh=spmd_auto.cluster("h100"))
