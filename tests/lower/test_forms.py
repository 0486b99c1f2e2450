"""Calls, loops, effects, kernels and mutable arrays: replayed under a forced split, equal to one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_auto import _compat
from spmd_auto.errors import LoweringError, TraceError
from spmd_auto.plan import make_plan
from spmd_auto.propagate.factors import format_rule
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from spmd_auto.verify import tree_relative_error
from tests.known_answers.toy import toy_mesh

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
PINS = {"x": P(("a", "b"), None), "w": P("b", "a")}  # all of x, and both dimensions of w, are split


def _data(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


X, W = _data(8, 16), _data(16, 8)


def _plan(step: Callable[..., Any], *args: Any, mesh: Any = None) -> Any:
    logical = toy_mesh(2, 4) if mesh is None else mesh
    return make_plan(trace(step, *args), logical, pins=PINS, search=SearchOptions(states=20))


def _run(step: Callable[..., Any], *args: Any, mesh: Any = None) -> Any:
    """The step under the forced split, on eight devices."""
    plan = _plan(step, *args, mesh=mesh)
    lowered = plan.lower_step(donate=False)
    flat = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(args), lowered.in_shardings, strict=True)]
    outs = lowered.lower().compile(compiler_options=FAST)(*flat)
    return jax.tree.unflatten(plan.program.out_tree, outs)


def _sin(x: Any) -> Any:
    return np.sin(x)


@jax.custom_batching.custom_vmap
def _own_batching(x: Any) -> Any:
    return jnp.sin(x) * 2


@_own_batching.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    return jnp.sin(x) * 2, batched[0]


@functools.partial(jax.custom_vjp)
def _own_gradient(x: Any) -> Any:
    return jnp.sin(x)


_own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),), optimize_remat=True)


def _partitioned(rule: str) -> Any:
    made = custom_partitioning(lambda x: jnp.sin(x) * 2)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        shardings = tuple(a.sharding for a in args)
        return mesh, lambda x: jnp.sin(x) * 2, result.sharding, shardings

    made.def_partition(  # a piece is computed like the whole
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule=rule,
    )
    return made


def _double(source: Any, target: Any) -> None:
    target[...] = source[...] * 2


def _doubled(x: Any) -> Any:
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def _twice(x: Any) -> Any:
    return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _solve(x: Any, w: Any) -> Any:
    return jnp.linalg.solve(w @ w.T + 9 * jnp.eye(16), x.T).T


def _accumulated(x: Any, w: Any) -> Any:
    total = jax.new_ref(jnp.zeros((8, 8)))
    total[...] += x @ w
    total[0, :] = jnp.ones(8)
    return jax.freeze(total) * 2


def _looped_ref(x: Any, w: Any) -> Any:
    total = jax.new_ref(jnp.zeros(8))

    def body(carry: Any, row: Any) -> Any:
        total[...] += row @ w
        return carry + row.sum(), None

    carry, _ = lax.scan(body, jnp.float32(0), x)
    return carry, total[...]


def _search_while(x: Any, w: Any) -> Any:
    def body(state: Any) -> Any:
        x, steps = state
        jax.debug.callback(lambda v: None, x.sum())
        return jnp.tanh(x @ w @ w.T), steps + 1

    return lax.while_loop(lambda state: (jnp.abs(state[0]).sum() > 1e-3) & (state[1] < 3), body, (x, 0))


def _branches(x: Any, w: Any) -> Any:
    def yes(x: Any) -> Any:
        jax.debug.callback(lambda v: None, x.sum())
        return x @ w

    return lax.cond(x.sum() > 0, yes, lambda x: (x * 2) @ w, x), lax.switch(2, [lambda x: x, jnp.sin, jnp.cos], x)


def _scanned(length: int | None, reverse: bool = False) -> Any:
    def step(x: Any, w: Any) -> Any:
        xs = x[: length or 0] if length is not None else x

        def body(carry: Any, row: Any) -> Any:
            inner, _ = lax.scan(lambda c, _: (jnp.tanh(c + row @ w), None), carry, None, length=2)
            return inner, (inner, row * 2)

        return lax.scan(body, jnp.zeros(8), xs, reverse=reverse)

    return step


def _platforms(x: Any, w: Any) -> Any:
    return lax.platform_dependent(x @ w, cpu=jnp.sin, default=jnp.cos)


def _linear(x: Any, w: Any) -> Any:
    def times(w: Any, x: Any) -> Any:
        return jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, y: y @ w.T, w, x)

    return jax.value_and_grad(lambda x: (times(w, x) ** 2).sum())(x)


def _ffi(x: Any, w: Any) -> Any:
    # LAPACK's Cholesky by its registered name: a foreign function that every jaxlib brings
    return jnp.sin(jnp.linalg.cholesky(w @ w.T + 9 * jnp.eye(16))), jax.numpy.linalg.eigh(w.T @ w)[0]


STEPS: dict[str, Callable[..., Any]] = {
    "custom_linear_solve": lambda x, w: jax.value_and_grad(lambda x: (_solve(x, w) ** 2).sum())(x),
    "linear_call": _linear,
    "custom_vmap": lambda x, w: _own_batching(x) @ w,
    "custom_vmap batched": lambda x, w: jax.vmap(_own_batching)(x) @ w,
    "custom_vjp with remat": lambda x, w: jax.value_and_grad(lambda x: (_own_gradient(x) @ w).sum())(x),
    "remat_opt": lambda x, w: jax.vjp(_own_gradient, x @ w)[0],
    "composite": lambda x, w: lax.composite(lambda x: jnp.sin(x) * 2, "tests.twice")(x) @ w,
    "custom_partitioning": lambda x, w: _partitioned("i j -> i j")(x @ w),
    "pallas_call": lambda x, w: _doubled(x) @ w,
    "pure_callback": lambda x, w: _twice(x) @ w,
    "metadata": lambda x, w: x @ w + 1,
    "new_ref": _accumulated,
    "new_ref in a scan": _looped_ref,
    "while with an effect": _search_while,
    "cond with an effect": _branches,
    "scan": _scanned(None),
    "scan reversed": _scanned(None, reverse=True),
    "scan of one": _scanned(1),
    "scan of none": _scanned(0),
    "platform_dependent": _platforms,
    "debug_print": lambda x, w: (jax.debug.print("{}", x.sum()), x @ w)[1],
    "foreign functions": _ffi,
    "gamma": lambda x, w: jax.random.gamma(jax.random.key(0), jnp.abs(x)) @ w,
    "searchsorted": lambda x, w: jnp.searchsorted(jnp.arange(8.0), x @ w) + jnp.frexp(x @ w)[1],
    "sort": lambda x, w: lax.sort((x, -x), dimension=1, num_keys=1)[1] @ w,
    "run_state": lambda x, w: _run_state(x) @ w,
    "platform rng": lambda x, w: lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), (8, 16))[1] % 7 @ w,
}


def _run_state(x: Any) -> Any:
    from jax._src.state.discharge import run_state

    def body(ref: Any) -> None:
        ref[...] = ref[...] * 2

    return run_state(body)(x)


@pytest.mark.parametrize("name", STEPS)
def test_equal_to_one_device(name: str, devices: list[Any]) -> None:
    step = STEPS[name]
    expected = jax.jit(lambda **kw: step(kw["x"], kw["w"]))(x=X, w=W)
    out = _run(lambda s: step(s["x"], s["w"]), {"x": X, "w": W})
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    assert tree_relative_error(jax.device_get(out), jax.device_get(expected)) < 1e-5


def test_arguments_are_split_as_forced() -> None:
    """Else the comparisons above would compare one device with itself."""
    plan = _plan(lambda s: STEPS["scan"](s["x"], s["w"]), {"x": X, "w": W})
    by_path = dict(zip((a.path for a in plan.program.arguments), plan.placements.arguments, strict=True))
    assert sorted(by_path.values()) == [((0, 1), ()), ((1,), (0,))]


def _mesh(*sizes: int, names: str = "ab") -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), tuple(names), axis_types=_compat.axis_types_auto(len(sizes)))


@pytest.mark.parametrize("theirs", [((2, 4), "ab"), ((2, 4), "pq"), ((8, 1), "ab"), ((8,), "z")], ids=str)
def test_users_shard_map(theirs: tuple[tuple[int, ...], str], devices: list[Any]) -> None:
    """On the plan's mesh, and on one of other axes over the same devices."""
    sizes, names = theirs
    mesh, rows = _mesh(*sizes, names=names), P(tuple(names))

    def body(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w) + lax.axis_index(names[0]), lax.psum(x.sum(), tuple(names))

    def step(s: Any) -> Any:
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(rows, P()), out_specs=(rows, P()))
        return jax.value_and_grad(lambda x: (mapped(x * 2, s["w"])[0] ** 2).sum())(s["x"]), mapped(s["x"], s["w"])[1]

    args = {"x": X, "w": W}
    assert tree_relative_error(_run(step, args, mesh=_mesh(2, 4)), jax.jit(step)(args)) < 1e-5


@pytest.mark.parametrize("sizes", [(2,), (4, 2), (2, 2, 2)], ids=str)
def test_users_shard_map_of_another_mesh_is_refused(sizes: tuple[int, ...], devices: list[Any]) -> None:
    chosen = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    other = Mesh(chosen, tuple("zyx"[: len(sizes)]), axis_types=_compat.axis_types_auto(len(sizes)))

    def step(s: Any) -> Any:
        return jax.shard_map(jnp.sin, mesh=other, in_specs=P("z"), out_specs=P("z"))(s["x"]) @ s["w"]

    with pytest.raises(LoweringError, match=rf"shard_map at .*test_forms\.py.*'z': {sizes[0]}.*'a': 2, 'b': 4"):
        _run(step, {"x": X, "w": W}, mesh=_mesh(2, 4))


def test_users_shard_map_of_the_same_axes_in_another_order(devices: list[Any]) -> None:
    """The order says which devices make a group: devices 0 and 4 here, 0 and 1 there."""
    mesh, theirs = _mesh(2, 4), _mesh(4, 2, names="ba")

    def step(s: Any) -> Any:
        def body(x: Any) -> Any:
            return lax.psum(x, "a") + 100.0 * lax.axis_index("b")

        return jax.shard_map(body, mesh=theirs, in_specs=P(("b", "a")), out_specs=P("b"))(s["x"]) @ s["w"]

    with pytest.raises(LoweringError, match=r"has the mesh \{'b': 4, 'a': 2\}"):
        _run(step, {"x": X, "w": W}, mesh=mesh)


def test_users_shard_map_says_what_belongs_together() -> None:
    mesh = _mesh(2, 4)

    def step(x: Any, w: Any) -> Any:
        return jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("a"), P(None, "b")), out_specs=P("a", "b"))(
            x, w
        )

    (op,) = [op for op in _plan(lambda s: step(s["x"], s["w"]), {"x": X, "w": W}).analysis.graph.ops if op.rule]
    assert format_rule(op.rule, [(8, 16), (16, 8)], [(8, 8)]) == "(i -),(- j)->(i j) major={i=2, j=4}"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("where", ["plain", "scan", "while", "cond"])
def test_effects_happen_once(where: str, ordered: bool, devices: list[Any]) -> None:
    """On eight devices as often as on one, with whole operands, in order if they are ordered."""
    seen: list[Any] = []

    def note(value: Any) -> None:
        seen.append(np.asarray(value).copy())

    def step(s: Any) -> Any:
        y = s["x"] @ s["w"]
        if where == "plain":
            io_callback(note, None, y, ordered=ordered)
            io_callback(note, None, y * 2, ordered=ordered)
        elif where == "scan":
            lax.scan(lambda c, row: (c, io_callback(note, None, row, ordered=ordered)), 0, y)
        elif where == "while":

            def body(i: Any) -> Any:
                io_callback(note, None, y + i, ordered=ordered)
                return i + 1

            lax.while_loop(lambda i: i < 3, body, 0)
        else:
            lax.cond(y[0, 0] > -1e9, lambda: io_callback(note, None, y, ordered=ordered), lambda: None)
        return y

    args = {"x": X, "w": W}
    jax.block_until_ready(_run(step, args))
    jax.effects_barrier()
    y = X @ W
    wanted = {"plain": [y, y * 2], "scan": list(y), "while": [y, y + 1, y + 2], "cond": [y]}[where]
    assert len(seen) == len(wanted)
    if ordered:
        np.testing.assert_allclose(np.stack(seen), np.stack(wanted), rtol=1e-5, atol=1e-5)


def test_results_of_a_callback_that_nobody_reads(devices: list[Any]) -> None:
    """The effect stays, and what it reads stays in use."""
    seen = []

    def step(s: Any) -> Any:
        io_callback(lambda v: seen.append(1) or np.float32(0), jax.ShapeDtypeStruct((), np.float32), s["x"] @ s["w"])
        return s["x"]

    jax.block_until_ready(_run(step, {"x": X, "w": W}))
    jax.effects_barrier()
    assert seen == [1]


def test_mutable_argument_is_refused() -> None:
    with pytest.raises(TraceError, match="(?s)mutable array.*freeze"):
        trace(lambda ref, x: x + ref[...], jax.new_ref(jnp.zeros((8, 16))), X)
