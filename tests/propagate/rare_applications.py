"""Applications of primitives that few programs hold, and further forms of those that many do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, PartitionSpec

from spmd_auto import _compat

Register = Callable[..., None]
F = np.float32
# What some random primitives ask for since jax 0.12.
_OUT: dict[str, Any] = {"out_sharding": None} if jax.__version_info__ >= (0, 12) else {}


def _hidden(module: str, name: str) -> Any:
    """A primitive that JAX does not export; None in a release that does not have it."""
    try:
        return getattr(importlib.import_module(f"jax._src.{module}"), f"{name}_p", None)
    except ImportError:
        return None


def _mesh(kind: Any) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("z",), axis_types=(kind,))


def _reshard(x: Any) -> Any:
    with jax.sharding.use_abstract_mesh(_mesh(jax.sharding.AxisType.Explicit).abstract_mesh):
        return jax.sharding.reshard(x, PartitionSpec())


def handed_on(case: Register) -> None:
    """Hints and annotations."""
    whole = NamedSharding(_mesh(_compat.axis_types_auto(1)[0]), PartitionSpec())
    case("tie", lambda d: (lambda x, y: _hidden("lax.lax", "tie").bind(x, y), [d.num(d.i, d.j), d.num(d.i, d.j)]))
    case("sharding_constraint", lambda d: (lambda x: lax.with_sharding_constraint(x, whole), [d.num(d.i, d.j)]))
    case("layout_constraint", lambda d: (lambda x: with_layout_constraint(x, Layout((0, 1))), [d.num(d.i, d.j)]))
    case("reshard", lambda d: (_reshard, [d.num(d.i, d.j)]))
    case("xla_metadata_value", lambda d: (lambda x: set_xla_metadata(jnp.sin(x), kept="yes"), [d.real(d.i, d.j)]))
    alike = _hidden("shard_alike", "shard_alike")
    if alike:
        case("shard_alike", lambda d: (lambda *a: tuple(alike.bind(*a)), [d.num(d.i, d.j), d.num(d.i, d.j)]))
    space = _hidden("state.primitives", "with_memory_space_constraint")
    if space:
        in_hbm = jax.memory.Space.Device
        case(
            "with_memory_space_constraint", lambda d: (lambda x: space.bind(x, memory_space=in_hbm), [d.num(d.i, d.j)])
        )


def compared(case: Register) -> None:
    """Elementwise operations without a public function, or of one release only."""
    for name in ["eq_to", "le_to", "lt_to"]:
        p = _hidden("lax.lax", name)
        case(name, lambda d, p=p: (lambda x, y: p.bind(x, y), [d.num(d.i, d.j), d.num(d.i, d.j)]))
    square = _hidden("lax.lax", "one_minus_square")
    if square:
        case("one_minus_square", lambda d: (lambda x: square.bind(x), [d.real(d.i, d.j)]))
    newer = dict.fromkeys(["acospi", "asinpi", "atanpi", "cospi", "exp2m1", "log2p1", "sinpi", "tanpi"], 1)
    for name, count in {**newer, "atan2pi": 2, "fma": 3, "fmuladd": 3}.items():
        p = getattr(lax, f"{name}_p", None) or _hidden("lax.lax", name)
        if p:
            case(
                name,
                lambda d, p=p, count=count: (
                    lambda *a: p.bind(*a),
                    [d.real(d.i, d.j, low=0.1, high=0.9) for _ in range(count)],
                ),
            )


def made_from_nothing(case: Register) -> None:
    case("empty", lambda d: (lambda: lax.empty((d.i, d.j), F), []))
    empty = _hidden("lax.lax", "empty2")
    case("empty2", lambda d: (lambda: empty.bind(dtype=np.dtype(F), memory_space=jax.memory.Space.Device), []))
    index = _hidden("lax.control_flow.conditionals", "platform_index")
    case("platform_index", lambda d: (lambda: index.bind(platforms=(("cpu",), None)), []))
    counts = _hidden("random.prng", "iota_2x32_shape")
    case("iota_2x32_shape", lambda d: (lambda: counts.bind(shape=(d.i, d.j), **_OUT), []))
    copies = _hidden("state.primitives", "broadcast_to")
    case("broadcast_to", lambda d: (lambda x: copies.bind(x, shape=(d.i, d.j, d.k)), [d.num(1, d.k)]))
    case("broadcast_to/vector", lambda d: (lambda x: copies.bind(x, shape=(d.i, d.k)), [d.num(d.k)]))


def random(case: Register) -> None:
    for name, keys, words in [
        ("threefry2x32", 2, 2),
        ("threefry4x32", 4, 4),
        ("philox2x32", 1, 2),
        ("philox4x32", 2, 4),
    ]:
        p = _hidden(f"random.{name}", name)

        def make(d: Any, p: Any = p, keys: int = keys, words: int = words, name: str = name) -> Any:
            key, counts = [d.uint() for _ in range(keys)], [d.uint(d.i, d.j) for _ in range(words)]
            return lambda *a: p.bind(*a), [*key, *counts]

        case(name, make)
    gamma = _hidden("random.core", "random_gamma")
    case(
        "random_gamma",
        lambda d: (lambda k, a: gamma.bind(k, a, log_space=True, **_OUT), [d.keys(4), d.real(4, 8, low=1, high=2)]),
    )
    poisson = _hidden("random.core", "_random_poisson")
    if poisson:
        case(
            "random_poisson",
            lambda d: (
                lambda k, a: poisson.bind(k, a, dtype=np.dtype(np.int32), **_OUT),
                [d.keys(4), d.real(4, 8, low=1, high=2)],
            ),
        )
    slope = _hidden("random.core", "_gamma_grad")
    if slope:
        case("random_gamma_grad", lambda d: (lambda a, x: slope.bind(a, x), [d.real(d.i, d.j, low=1, high=2)] * 2))
    raw = _hidden("random.prng", "raw_bits")
    if raw:
        case("raw_bits", lambda d: (lambda k: tuple(raw.bind(k, shape=(6, 8))), [d.keys(4)]))


def dots(case: Register) -> None:
    if hasattr(lax, "scaled_dot"):

        def scaled(d: Any) -> Any:
            wide = [d.num(d.b, d.i, 4 * d.k), d.num(d.b, 4 * d.k, d.j)]
            scales = [2.0 ** d.int(d.b, d.i, d.k, low=-2, high=3), 2.0 ** d.int(d.b, 2 * d.k, d.j, low=-2, high=3)]
            args = [x.astype(jnp.float8_e4m3fn) for x in wide] + [x.astype(jnp.float8_e8m0fnu) for x in scales]
            return lambda a, b, s, t: lax.scaled_dot(a, b, lhs_scale=s, rhs_scale=t, preferred_element_type=F), args

        case("scaled_dot", scaled)

    def ragged_batch(d: Any) -> Any:
        numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
        sizes = jnp.asarray([d.b - 1, 0, 1], np.int32)
        return lambda a, b: lax.ragged_dot_general(a, b, sizes, numbers), [d.num(d.b, d.i, d.k), d.num(d.b, d.k, d.j)]

    case("ragged_dot_general/ragged_batch", ragged_batch)


def reductions(case: Register) -> None:
    def pair(a: Any, b: Any) -> Any:
        return a[0] + b[0], jnp.maximum(a[1], b[1])

    case("reduce/pair", lambda d: (lambda *x: lax.reduce(x, (F(0), F(-9)), pair, (1,)), [d.num(d.i, d.k, d.j)] * 2))
    for name in ["cumsum", "cumlogsumexp"]:
        f = getattr(lax, name)
        case(f"{name}/reverse", lambda d, f=f: (lambda x: f(x, 0, reverse=True), [d.real(d.i, d.j)]))
    case("argmax/only", lambda d: (lambda x: lax.argmax(x, 0, np.int32), [jnp.arange(d.i, dtype=F)]))
    case(
        "sort/two_keys",
        lambda d: (
            lambda x, y, z: lax.sort((x, y, z), dimension=1, num_keys=2, is_stable=True),
            [d.num(d.i, d.j), d.num(d.i, d.j), d.real(d.i, d.j)],
        ),
    )


def indexing(case: Register) -> None:
    for name, method in {"": "set", "-add": "add", "-max": "max"}.items():
        case(
            f"scatter{name}/rows_promise",
            lambda d, method=method: (
                lambda x, i, u: getattr(x.at[i], method)(u, mode="promise_in_bounds", unique_indices=True),
                [d.num(d.v, d.j), jnp.arange(d.v, dtype=np.int32)[::-1], d.num(d.v, d.j)],
            ),
        )
    case(
        "scatter/batched",
        lambda d: (
            jax.vmap(lambda x, i, u: x.at[i].set(u)),
            [d.num(d.b, d.v, d.j), d.int(d.b, d.i, low=0, high=d.v + 2), d.num(d.b, d.i, d.j)],
        ),
    )


def windows(case: Register) -> None:
    forms = {
        "pool": ((1, 2), (1, 2), ((0, 0), (0, 0))),
        "overlap": ((1, 3), (1, 1), ((0, 0), (1, 1))),
        "rest": ((1, 2), (1, 3), ((0, 0), (0, 0))),
    }
    add = _hidden("lax.windowed_reductions", "select_and_gather_add")
    general = importlib.import_module("jax._src.lax.windowed_reductions")._select_and_scatter

    def gathers(d: Any, window: Any, strides: Any, padding: Any) -> Any:
        params = {"window_dimensions": window, "window_strides": strides, "padding": padding}
        params |= {"select_prim": lax.ge_p, "base_dilation": (1, 1), "window_dilation": (1, 1)}
        return lambda t, x: add.bind(t, x, **params), [d.num(d.i, 6 * d.j), d.real(d.i, 6 * d.j)]

    def scatters(d: Any, window: Any, strides: Any, padding: Any) -> Any:
        count = (6 * d.j + sum(padding[1]) - window[1]) // strides[1] + 1
        return (
            lambda x, s: general(x, lax.ge, window, strides, padding, s, F(0), lax.max),
            [d.real(d.i, 6 * d.j), d.num(d.i, count)],
        )

    for name, form in forms.items():
        case(f"select_and_gather_add/{name}", lambda d, form=form: gathers(d, *form))
        case(f"select_and_scatter/{name}", lambda d, form=form: scatters(d, *form))
    case(
        "reduce_window/pair",
        lambda d: (
            lambda *x: lax.reduce_window(
                x, (F(0), F(0)), lambda a, b: (a[0] + b[0], a[1] * b[1] + a[1]), (1, 2), (1, 2), "VALID"
            ),
            [d.num(d.i, 2 * d.j)] * 2,
        ),
    )

    def conv(numbers: str, **kw: Any) -> Callable[..., Any]:
        layout = tuple(numbers.split())
        return lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), **{"padding": "SAME", "dimension_numbers": layout, **kw}
        )

    usual = "NCHW OIHW NCHW"
    dilated = conv(usual, padding=((2, 2), (1, 0)), rhs_dilation=(2, 1), lhs_dilation=(1, 2))
    for name, make in {
        "nchw": lambda d: (conv(usual), [d.num(d.b, d.c, d.h, 4), d.num(d.o, d.c, 3, 1)]),
        "mixed": lambda d: (conv("CHWN HOWI HNWC"), [d.num(d.c, d.h, 4, d.b), d.num(3, d.o, 1, d.c)]),
        "dilated": lambda d: (dilated, [d.num(d.b, d.c, d.h, 4), d.num(d.o, d.c, 3, 2)]),
        "batch_groups": lambda d: (
            conv(usual, batch_group_count=d.g),
            [d.num(3 * d.g, d.c, 4, 4), d.num(2 * d.g, d.c, 3, 1)],
        ),
        "depthwise": lambda d: (
            conv(usual, feature_group_count=d.g),
            [d.num(d.b, d.g, 4, 4), d.num(2 * d.g, 1, 3, 1)],
        ),
    }.items():
        case(f"conv_general_dilated/{name}", make)


def linalg(case: Register) -> None:
    la = lax.linalg

    def matrix(d: Any) -> Any:
        return d.real(d.b, 3, 3) + 5 * jnp.eye(3)

    def symmetric(d: Any) -> Any:
        m = matrix(d)
        return m + m.transpose(0, 2, 1)

    geqrf, geqp3 = _hidden("lax.linalg", "geqrf"), importlib.import_module("jax._src.lax.linalg").geqp3
    case("cholesky_update", lambda d: (la.cholesky_update, [jnp.eye(3) * 3, d.real(3)]))
    case("eig", lambda d: (la.eig, [matrix(d)]))
    case("geqrf", lambda d: (lambda a: geqrf.bind(a), [matrix(d)]))
    case("geqp3", lambda d: (geqp3, [matrix(d), jnp.zeros((d.b, 3), np.int32)]))
    case("hessenberg", lambda d: (la.hessenberg, [matrix(d)]))
    case("householder_product", lambda d: (la.householder_product, [matrix(d), d.real(d.b, 3)]))
    case("schur", lambda d: (la.schur, [symmetric(d)]))
    case("tridiagonal", lambda d: (la.tridiagonal, [symmetric(d)]))
    case(
        "symmetric_product",
        lambda d: (lambda a, c: la.symmetric_product(a, c, beta=2.0), [d.num(d.b, 3, d.i), symmetric(d)]),
    )
    case(
        "lu_pivots_to_permutation",
        lambda d: (lambda p: la.lu_pivots_to_permutation(p, 5), [jnp.broadcast_to(jnp.asarray([2, 1, 4]), (d.b, 3))]),
    )
    case(
        "tridiagonal_solve",
        lambda d: (la.tridiagonal_solve, [d.num(d.b, 3), 9 + d.num(d.b, 3), d.num(d.b, 3), d.num(d.b, 3, d.i)]),
    )
    if hasattr(la, "ormqr"):
        for left in (True, False):
            case(
                f"ormqr/{'left' if left else 'right'}",
                lambda d, left=left: (
                    lambda a, t, c: la.ormqr(a, t, c, left=left),
                    [matrix(d), d.real(d.b, 3), d.num(d.b, *((3, d.i) if left else (d.i, 3)))],
                ),
            )
    case("fft/two", lambda d: (lambda x: lax.fft(x, "FFT", (d.j, 4)), [d.real(d.i, d.j, 4).astype(jnp.complex64)]))
    case("fft/real", lambda d: (lambda x: lax.fft(x, "RFFT", (d.j,)), [d.real(d.i, d.j)]))
    case("fft/back", lambda d: (lambda x: lax.fft(x, "IRFFT", (6,)), [d.real(d.i, 4).astype(jnp.complex64)]))


def mapped(case: Register) -> None:
    """Functions that bring a partitioning of their own: see tests/lower/test_forms.py for their numbers."""
    from jax.experimental.custom_partitioning import custom_partitioning

    rows = PartitionSpec("z")

    def shard_map(x: Any) -> Any:
        mesh = _mesh(_compat.axis_types_auto(1)[0])
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=rows, out_specs=rows)(x)

    made = custom_partitioning(lambda x, y: x @ y)
    made.def_partition(
        partition=lambda *_: None,
        infer_sharding_from_operands=lambda *_: None,
        sharding_rule="i k, k j -> i j",
        reduction_factors=("k",),
    )
    case("shard_map", lambda d: (shard_map, [d.num(d.i, d.j)]))
    case("custom_partitioning", lambda d: (lambda x, y: made(x, y), [d.num(d.i, d.k), d.num(d.k, d.j)]))


FAMILIES = (handed_on, compared, made_from_nothing, random, dots, reductions, indexing, windows, linalg, mapped)
