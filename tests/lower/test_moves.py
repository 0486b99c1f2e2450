"""Slices, splits, joins and paddings along a split dimension: what must travel does, and arrives where it belongs."""

from __future__ import annotations

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_auto.cost.blocks import colour, exchange, pieces_of
from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.propagate.assignment import Assignment
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from spmd_auto.verify.check import compare
from spmd_auto.verify.hlo import read_compiled
from tests.known_answers.toy import toy_mesh

N = 8  # rows beside the dimension that is cut


def test_colours_are_proper_and_few():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(1, 9)
        edges = [(rng.randrange(n), rng.randrange(n)) for _ in range(rng.randint(0, 60))]
        found = colour(edges)
        for (e, a), (f, b) in itertools.combinations(zip(edges, found, strict=True), 2):
            assert a != b or (e[0] != f[0] and e[1] != f[1])
        degrees = [[e[side] for e in edges].count(v) for side in (0, 1) for v in range(n)]
        assert max(found, default=-1) + 1 <= max(degrees, default=0)


@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
def test_a_fused_projection_of_three_sends_each_device_its_thirds(devices):
    width = 24
    pieces = pieces_of("split", {}, (3 * width,), (width,) * 3, 0)
    assert pieces is not None
    found = exchange(pieces, (3 * width,), (width,) * 3, devices)
    assert found is not None
    assert found.sent * found.block <= 3 * width // devices  # never more than the piece that a device needs


CASES = {
    "split 3": (lambda x: lax.split(x, (16, 16, 16), axis=1), [48]),
    "split unequal": (lambda x: lax.split(x, (32, 16), axis=1), [48]),
    "join": (lambda x, y: jnp.concatenate([x, y], 1), [16, 16]),
    "join unequal": (lambda x, y, z: jnp.concatenate([x, y, z], 1), [16, 32, 16]),
    "slice first": (lambda x: x[:, :16], [48]),
    "slice middle": (lambda x: x[:, 16:32], [48]),
    "slice odd": (lambda x: x[:, 5:21], [32]),
    "pad behind": (lambda x: jnp.pad(x, ((0, 0), (0, 16)), constant_values=3.0), [16]),
    "pad around": (lambda x: jnp.pad(x, ((0, 0), (8, 24)), constant_values=3.0), [16]),
    "pad negative": (lambda x: lax.pad(x, 2.0, ((0, 0, 0), (-8, 8, 0))), [16]),
    "pad 0 -8": (lambda x: lax.pad(x, 2.0, ((0, 0, 0), (0, -8, 0))), [24]),
    "reverse": (lambda x: x[:, ::-1], [16]),
    "slice both": (lambda x: x[2:6, 16:32], [48]),
    "pad both": (lambda x: jnp.pad(x, ((2, 3), (0, 16)), constant_values=3.0), [16]),
}


@pytest.mark.parametrize("axes", [("a",), ("a", "b")], ids=["8", "2x4"])
@pytest.mark.parametrize("name", CASES)
def test_blocks_arrive(name, axes, devices):
    fun, widths = CASES[name]
    mesh = toy_mesh(8) if len(axes) == 1 else toy_mesh(2, 4)

    def step(*xs):
        out = fun(*[jnp.sin(x) for x in xs])
        return jax.tree.map(jnp.cos, out)

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(N, w)).astype(np.float32) for w in widths]
    program = trace(step, *arrays)
    analysis = analyse_for(program, mesh, {})
    columns = {analysis.axes.of[v.id][1] for v in (*analysis.graph.arguments, *analysis.graph.results)}
    order = tuple((g, a) for g in sorted(columns) for a in range(len(axes)))
    plan = price_strategy(program, mesh, Assignment(order), analysis=analysis)
    assert plan.placements.arguments[0][1], "nothing is split: the test would show nothing"
    lowered = plan.lower_step(donate=False)
    compiled = lowered.lower().compile()
    flat = [jax.device_put(x, s) for x, s in zip(arrays, lowered.in_shardings, strict=True)]
    want = jax.jit(step)(*arrays)
    for ours, theirs in zip(compiled(*flat), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    verification = compare(plan, read_compiled(compiled, plan.mesh.build(devices)), "cpu")
    found = {kind for row in verification.rows for kind in row.found}
    assert found <= {"collective-permute"}, found
    assert sum(r.found_bytes for r in verification.rows) == sum(r.predicted_bytes for r in verification.rows)
    whole = sum(N * w * 4 for w in widths) * 7 / 8
    assert math.fsum(r.found_bytes for r in verification.rows) < whole  # less than gathering


def test_a_fused_projection_is_tensor_parallel_without_gathers(devices):
    """Attention and a gated MLP with fused projections: besides Megatron's sums each device gets its own parts."""

    def step(params, x):
        def loss_fn(params):
            q, k, v = (a.reshape(*x.shape[:2], 8, 8) for a in jnp.split(x @ params["qkv"], 3, axis=-1))
            h = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ params["out"]
            gate, up = jnp.split(h @ params["wi"], 2, axis=-1)
            return jnp.mean((jax.nn.silu(gate) * up @ params["wo"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), (loss, grads)

    rng = np.random.default_rng(0)
    shapes = {"qkv": (64, 192), "out": (64, 64), "wi": (64, 512), "wo": (256, 64)}
    with jax.enable_x64(True):
        params = {name: rng.normal(size=shape) / 8 for name, shape in shapes.items()}
        x = rng.normal(size=(4, 16, 64))
        program = trace(step, params, x)
        plan = price_strategy(program, toy_mesh(8), {"heads": "a", "mlp_2": "a"})
        assert plan.specs["params/qkv"] == jax.P(None, "a")
        assert plan.specs["params/wi"] == jax.P(None, "a")
        lowered = plan.lower_step(donate=False)
        compiled = lowered.lower().compile()
        verification = compare(plan, read_compiled(compiled, plan.mesh.build(devices)), "cpu")
        assert not verification.differing_rows, verification
        (row,) = [row for row in verification.rows if row.found_bytes > 1000]
        assert row.found.keys() <= {"all-reduce", "collective-permute"}
        # of the three and the two parts a device needs an eighth each, forward and backward
        assert row.found["collective-permute"] <= 2 * 4 * 16 * (192 + 512) * 8 / 8
        flat = [jax.device_put(a, s) for a, s in zip(jax.tree.leaves((params, x)), lowered.in_shardings, strict=True)]
        got = jax.tree.unflatten(program.out_tree, compiled(*flat))
        assert tree_relative_error(jax.device_get(got), jax.device_get(jax.jit(step)(params, x))) < 1e-9
