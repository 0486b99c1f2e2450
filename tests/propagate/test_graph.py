"""The flat program: calls inlined, loops entered once, dimensions flowing through both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmd_auto.propagate.analysis import analyse
from spmd_auto.propagate.graph import BATCH, OPTIMIZER, PARAMETER, build_graph
from spmd_auto.trace import trace


def S(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def graph(fn, *args):
    return build_graph(trace(fn, *args))


def names(g):
    return [op.name for op in g.ops]


def joined(fn, *args):
    """Axis groups of each argument and result."""
    a = analyse(trace(fn, *args))
    return [a.axes.of[v.id] for v in a.graph.arguments], [a.axes.of[v.id] for v in a.graph.results]


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        jax.named_call,
        lambda f: jax.jit(jax.jit(f)),
        lambda f: jax.custom_jvp(f),
        lambda f: jax.custom_vjp(f),
    ],
    ids=["jit", "checkpoint", "named_call", "jit of jit", "custom_jvp", "custom_vjp"],
)
def test_calls_are_inlined(wrap):
    def plain(x, w):
        return jnp.tanh(x @ w)

    wrapped = wrap(plain)
    if hasattr(wrapped, "defvjp"):
        wrapped.defvjp(lambda x, w: (plain(x, w), None), lambda _, ct: (ct, ct))
    if hasattr(wrapped, "defjvp"):
        wrapped.defjvp(lambda p, t: (plain(*p), t[0]))
    g = graph(lambda x, w: wrapped(x, w), S(8, 4), S(4, 4))
    assert names(g) == ["dot_general", "tanh"]
    assert not g.unknown
    assert g.results[0] is g.ops[-1].results[0]


def test_every_equation_has_its_site():
    def fn(x):
        return lax.scan(lambda c, _: (jnp.tanh(jax.jit(jnp.sin)(c)), None), x, None, length=3)[0] + 1.0

    g = graph(fn, S(4))
    assert g.by_site[0, 0, 0].name == "sin"
    assert g.by_site[0, 1].name == "tanh"
    assert g.by_site[1,].name == "add"
    assert all(g.by_site[op.site] is op for op in g.ops if op.eqn is not None)


def scanned(params, x):
    def body(carry, layer):
        carry = jnp.tanh(carry @ layer["w"])
        return carry, carry.sum(-1)

    return lax.scan(body, x, params)


def test_loops_are_entered_once_with_their_trip_count():
    g = graph(scanned, {"w": S(5, 4, 4)}, S(8, 4))
    dots = [op for op in g.ops if op.name == "dot_general"]
    assert [(op.trips, op.loop) for op in dots] == [(5, ((0,),))]
    assert dots[0].flops == 2 * 8 * 4 * 4
    loop = g.loops[0,]
    assert (loop.consts, loop.carries, loop.length) == (0, 1, 5)
    assert sorted(name for name in names(g) if name in ("xs", "carry_in", "carry", "carry_out", "ys")) == [
        "carry",
        "carry_in",
        "carry_out",
        "xs",
        "ys",
    ]


def test_trips_of_nested_loops_multiply():
    def fn(x):
        def outer(c, _):
            return lax.scan(lambda d, _: (jnp.sin(d), None), c, None, length=3)[0], None

        return lax.scan(outer, x, None, length=4)[0]

    (sine,) = [op for op in graph(fn, S(4)).ops if op.name == "sin"]
    assert sine.trips == 12
    assert len(sine.loop) == 2


def test_dimensions_flow_through_a_scan():
    (x_w, x), (last, sums) = joined(scanned, {"w": S(5, 4, 4)}, S(8, 4))
    assert x[0] == last[0] == sums[1]
    assert last[1] == x[1]  # the carry comes in again
    assert x_w[0] == sums[0]  # what is stacked on the way in and out runs together


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_directions_are_alike(reverse):
    def fn(x):
        return lax.scan(lambda c, y: (c + y, c * y), jnp.zeros(x.shape[1:]), x, reverse=reverse)

    (x,), (last, ys) = joined(fn, S(5, 8, 4))
    assert ys == x
    assert last == x[1:]


def test_dimensions_flow_through_a_while_loop():
    def fn(x, w):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]

    (x, w), (out,) = joined(fn, S(8, 4), S(4, 4))
    assert out[0] == x[0]
    assert len({*x}) == 2
    assert out[1] in w


def test_dimensions_flow_through_both_branches():
    def fn(p, x, y):
        return lax.cond(p, lambda a, b: a * 2, lambda a, b: b.T, x, y)

    (_, x, y), (out,) = joined(fn, S(dtype=jnp.bool_), S(8, 4), S(4, 8))
    assert out == x == y[::-1]


def test_a_branch_that_is_never_taken_counts_too():
    g = graph(lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x), S(dtype=jnp.int32), S(8))
    assert {"sin", "cos", "tanh"} <= set(names(g))


# ---- what values depend on ----------------------------------------------------------------------------------


def step(state, x):
    def loss(w):
        return jnp.mean((x @ w) ** 2)

    value, grad = jax.value_and_grad(loss)(state["w"])
    momentum = 0.9 * state["m"] + grad
    return {"w": state["w"] - momentum, "m": momentum}, value


def test_dependence_by_role():
    g = graph(step, {"w": S(4, 4), "m": S(4, 4)}, S(8, 4))
    by_path = {v.path: v for v in g.arguments}
    assert by_path["state/w"].depends == PARAMETER
    assert by_path["state/m"].depends == OPTIMIZER
    assert by_path["x"].depends == BATCH
    forward = next(op for op in g.ops if op.name == "dot_general")
    assert forward.results[0].depends == PARAMETER | BATCH
    assert g.results[1].depends == PARAMETER | OPTIMIZER | BATCH


def test_constants_depend_on_nothing_and_take_no_place():
    g = graph(lambda x: x + jnp.arange(8.0), S(8))
    iota = next(op for op in g.ops if op.name == "iota")
    assert iota.results[0].depends == 0
    assert not iota.results[0].placed
    assert g.arguments[0].placed


def test_dependence_of_a_carry_is_that_of_all_its_rounds():
    """Round one sees the start only; what later rounds bring in counts for all."""

    def fn(params, x):
        def body(c, _):
            a, b = c
            return (b, b @ params["w"]), a

        return lax.scan(body, (jnp.zeros_like(x), x), None, length=4)

    g = graph(fn, {"w": S(4, 4)}, S(8, 4))
    (loop,) = g.loops.values()
    first = loop.body_in[loop.consts]
    assert first.depends == PARAMETER | BATCH


def test_backward_operations_are_known():
    g = graph(step, {"w": S(4, 4), "m": S(4, 4)}, S(8, 4))
    dots = [op.backward for op in g.ops if op.name == "dot_general"]
    assert dots == [False, True]


def test_keys_take_no_place():
    g = graph(lambda key, x: x + jax.random.normal(key, x.shape), jax.random.key(0), S(8))
    assert not g.arguments[0].placed
    assert g.arguments[0].opaque
    assert not g.unknown


# ---- operations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (lambda a, b: a @ b, [(8, 4), (4, 6)], 2 * 8 * 4 * 6),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(3, 8, 4), (3, 4, 6)], 2 * 3 * 8 * 4 * 6),
        (
            lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"),
            [(2, 4, 8, 8), (6, 4, 3, 3)],
            # Taps that fall on the padding are no work: three per output, less one at each end of a dimension.
            2 * 2 * 6 * 4 * (3 * 8 - 2) ** 2,
        ),
        (lambda a, b: a * b, [(8, 4), (8, 4)], 0),
    ],
)
def test_floating_point_operations(fn, shapes, flops):
    assert sum(op.flops for op in graph(fn, *[S(*shape) for shape in shapes]).ops) == flops


def test_alike_operations_share_a_signature():
    def fn(x, w, v):
        return (x @ w) @ w + (x @ v)

    dots = [op.signature for op in graph(fn, S(8, 4), S(4, 4), S(4, 4)).ops if op.name == "dot_general"]
    assert len(set(dots)) == 1
    g = graph(lambda x, w: (x @ w, x.T @ x), S(8, 4), S(4, 4))
    assert len({op.signature for op in g.ops if op.name == "dot_general"}) == 2


def test_an_unknown_primitive_is_named_with_its_line_and_bytes():
    def fn(x):
        return jax.pure_callback(lambda y: y, S(8, 4), x)

    (unknown,) = graph(fn, S(8, 4)).unknown.values()
    assert unknown.primitive == "pure_callback"
    assert "test_graph.py" in unknown.source
    assert unknown.bytes == 2 * 8 * 4 * 4


def test_narrow_floats_are_counted_wide_for_a_cpu():
    program = trace(lambda x: x * 2, S(8, dtype=jnp.bfloat16))
    assert build_graph(program).arguments[0].bytes == 16
    assert build_graph(program, widen=True).arguments[0].bytes == 32
    assert build_graph(trace(lambda x: x, S(8, dtype=jnp.int16)), widen=True).arguments[0].bytes == 16


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x: x, [S(4, 4)]),
        (lambda: 1.0, []),
        (lambda: None, []),
        (lambda x: (x, x, 2.0), [S()]),
        (lambda x: jnp.zeros((3, 3)), [S(0, 4)]),
    ],
    ids=["identity", "no argument", "nothing", "scalar twice", "empty"],
)
def test_programs_of_almost_nothing(fn, args):
    a = analyse(trace(fn, *args))
    assert len(a.graph.results) == len(a.program.results)
    assert len(a.graph.arguments) == len(args)
