"""One or more applications of every primitive that has a rule: what the oracle, the mutations and the golden test use.

An application is a function of a `Draw`, which hands out sizes and data, and returns a function to trace with its
arguments.  The last equation of the named primitive is the one under test; those before it are computed whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from spmd_auto import _compat
from spmd_auto.propagate.rules import rule_for

from . import rare_applications

Pick = Callable[[str], int]
Made = tuple[Callable[..., Any], list[Any]]


class Draw:
    """Sizes by letter (`d.i`, the same each time) and seeded data of the drawn type."""

    def __init__(self, pick: Pick, seed: int = 0, dtype: Any = np.float32) -> None:
        self._pick, self._sizes = pick, dict[str, int]()
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def __getattr__(self, letter: str) -> int:
        if letter.startswith("_"):
            raise AttributeError(letter)
        if letter not in self._sizes:
            self._sizes[letter] = self._pick(letter)
        return self._sizes[letter]

    def num(self, *shape: int) -> Any:
        """Small whole numbers of the drawn type, so that sums and products are exact, never 0."""
        values = self.rng.integers(1, 5, shape) * self.rng.choice([-1, 1], shape)
        return jnp.asarray(values, self.dtype)

    def real(self, *shape: int, low: float = -2.0, high: float = 2.0) -> Any:
        return jnp.asarray(self.rng.uniform(low, high, shape), np.float32)

    def int(self, *shape: int, low: int = -40, high: int = 40) -> Any:
        return jnp.asarray(self.rng.integers(low, high, shape), np.int32)

    def uint(self, *shape: int) -> Any:
        return jnp.asarray(self.rng.integers(0, 2**31, shape), np.uint32)

    def bool(self, *shape: int) -> Any:
        return jnp.asarray(self.rng.integers(0, 2, shape), bool)

    def keys(self, *shape: int) -> Any:
        return jax.random.wrap_key_data(self.uint(*shape, 2), impl="threefry2x32")


@dataclasses.dataclass(frozen=True)
class Application:
    """A primitive with its parameters and concrete operands."""

    name: str
    eqn: Any
    args: list[Any]

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(np.shape(a)) for a in self.args]

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(v.aval.shape) for v in self.eqn.outvars]

    def rule(self) -> Any:
        avals = [v.aval for v in self.eqn.invars], [v.aval for v in self.eqn.outvars]
        return rule_for(self.eqn.primitive.name, self.eqn.params, *avals)


@dataclasses.dataclass(frozen=True)
class Case:
    """How to make applications of one primitive, of any sizes."""

    name: str
    primitive: str
    make: Callable[[Draw], Made]
    dtypes: tuple[Any, ...] = (np.float32,)

    def apply(self, draw: Draw) -> Application:
        fun, args = self.make(draw)
        traced = jax.make_jaxpr(fun)(*args)
        eqn, values = _Finder(self.primitive, _count(traced, self.primitive)).run(traced, args)
        return Application(self.name, eqn, values)


_CALLS = ("jit", "custom_jvp_call")


def _count(jaxpr: Any, name: str) -> int:
    inner = [_compat.call_jaxpr(e) for e in _compat.open_jaxpr(jaxpr).eqns if e.primitive.name in _CALLS]
    return sum(e.primitive.name == name for e in _compat.open_jaxpr(jaxpr).eqns) + sum(_count(j, name) for j in inner)


class _Finder:
    """Evaluates a jaxpr up to the last equation of a primitive, inner functions included."""

    def __init__(self, name: str, count: int) -> None:
        assert count, f"{name} does not occur"
        self.name, self.left, self.found = name, count, None

    def run(self, jaxpr: Any, args: list[Any]) -> Any:
        """The equation and its operands."""
        self._evaluate(jaxpr, args)
        assert self.found is not None
        return self.found

    def _evaluate(self, jaxpr: Any, args: list[Any]) -> list[Any] | None:
        inner = _compat.open_jaxpr(jaxpr)
        env = dict(zip(inner.constvars, _compat.consts_of(jaxpr), strict=False))
        env |= dict(zip(inner.invars, args, strict=True))

        def read(v: Any) -> Any:
            value = v.val if isinstance(v, _compat.Literal) else env[v]
            return value if _compat.is_extended(v.aval.dtype) else jnp.asarray(value, v.aval.dtype)

        for eqn in inner.eqns:
            values = [read(v) for v in eqn.invars]
            self.left -= eqn.primitive.name == self.name
            if self.left == 0 and self.found is None and eqn.primitive.name == self.name:
                self.found = (eqn, values)
                return None
            if eqn.primitive.name in _CALLS:
                out = self._evaluate(_compat.call_jaxpr(eqn), values)
            else:
                out = _compat.bind(eqn, values)
            if out is None:
                return None
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in inner.outvars]


# JAX 0.10 and 0.12 can't lower mulhi inside of `shard_map`, and philox multiplies with it: their pieces are computed
# one by one.
BY_PIECES = {"mulhi", "philox2x32", "philox4x32"}
# The first gives other numbers each time; the others are not an operation on a piece, but a program with a mesh of its
# own (their numbers: tests/lower/test_forms.py).
UNSTATABLE = {"rng_uniform", "shard_map", "custom_partitioning"} | BY_PIECES

CASES: dict[str, Case] = {}


def _case(name: str, make: Callable[[Draw], Made], *dtypes: Any) -> None:
    """Registers `primitive/what`."""
    assert name not in CASES, name
    CASES[name] = Case(name, name.split("/")[0], make, dtypes or (np.float32,))


_LAX = vars(lax)
F = np.float32
B = jnp.bfloat16
W = np.int32


def _elementwise() -> None:
    names = (
        ("abs neg sign floor ceil round exp exp2 expm1 sin cos tan tanh sinh cosh asinh atan erf erfc", -2, 2),
        ("logistic is_finite square cbrt bessel_i0e bessel_i1e", -2, 2),
        ("log log1p log2 sqrt rsqrt lgamma digamma acosh", 1.1, 3),
        ("asin acos atanh erf_inv", -0.9, 0.9),
    )
    unary = {name: (low, high) for line, low, high in names for name in line.split()}
    for name, (low, high) in unary.items():
        if hasattr(lax, name):
            _case(name, lambda d, f=_LAX[name], low=low, high=high: (f, [d.real(d.i, d.j, low=low, high=high)]))
    for name in ["add", "sub", "mul", "div", "rem", "max", "min", "eq", "ne", "lt", "le", "gt", "ge"]:
        _case(name, lambda d, f=_LAX[name]: (f, [d.num(d.i, d.j), d.num(d.i, d.j)]), F, B, W)
    for name in ["pow", "atan2", "nextafter", "igamma", "igammac", "igamma_grad_a", "polygamma", "zeta"]:
        _case(
            name,
            lambda d, f=_LAX[name]: (f, [d.real(d.i, d.j, low=2, high=4), d.real(d.i, d.j, low=2, high=4)]),
        )
    for name, f in {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}.items():
        _case(name, lambda d, f=f: (f, [d.int(d.i, d.j), d.int(d.i, d.j)]))
    for name in ["shift_left", "shift_right_logical", "shift_right_arithmetic"]:
        _case(name, lambda d, f=_LAX[name]: (f, [d.int(d.i, d.j), d.int(d.i, d.j, low=0, high=5)]))
    _case("mulhi", lambda d: (lax.mulhi, [d.uint(d.i, d.j), d.uint(d.i, d.j)]))
    _case("not", lambda d: (lax.bitwise_not, [d.int(d.i, d.j)]))
    _case("population_count", lambda d: (lax.population_count, [d.int(d.i, d.j)]))
    _case("clz", lambda d: (lax.clz, [d.int(d.i, d.j)]))
    _case("integer_pow", lambda d: (lambda x: lax.integer_pow(x, 3), [d.num(d.i, d.j)]))
    _case("add_any", lambda d: (jax.grad(lambda x: (x * x).sum()), [d.num(d.i, d.j)]))
    _case("complex", lambda d: (lax.complex, [d.real(d.i, d.j), d.real(d.i, d.j)]))
    for name in ["real", "imag", "conj"]:
        _case(name, lambda d, f=_LAX[name]: (f, [lax.complex(d.real(d.i, d.j), d.real(d.i, d.j))]))
    _case("convert_element_type", lambda d: (lambda x: x.astype(jnp.int32), [d.real(d.i, d.j)]))
    _case("copy", lambda d: (jnp.copy, [d.num(d.i, d.j)]))
    _case("name", lambda d: (lambda x: checkpoint_name(x, "kept"), [d.num(d.i, d.j)]))
    _case("reduce_precision", lambda d: (lambda x: lax.reduce_precision(x, 5, 7), [d.real(d.i, d.j)]))
    _case("stop_gradient", lambda d: (lax.stop_gradient, [d.num(d.i, d.j)]))
    _case("clamp/array", lambda d: (lax.clamp, [d.num(d.i, d.j) - 3, d.num(d.i, d.j), d.num(d.i, d.j) + 3]))
    _case("clamp/scalar", lambda d: (lambda x: lax.clamp(-1.0, x, 2.0), [d.num(d.i, d.j)]))
    _case("select_n/array", lambda d: (lax.select_n, [d.bool(d.i, d.j), d.num(d.i, d.j), d.num(d.i, d.j)]))
    _case("select_n/scalar", lambda d: (lax.select_n, [jnp.asarray(True), d.num(d.i, d.j), d.num(d.i, d.j)]))
    _case("regularized_incomplete_beta", lambda d: (lax.betainc, [d.real(d.i, low=0.1, high=0.9) for _ in range(3)]))
    if hasattr(lax, "polynomial"):
        _case("polynomial", lambda d: (lambda x: lax.polynomial(x, [d.real(d.i), d.real(d.i)]), [d.real(d.i)]))
    _case("bitcast_convert_type/same", lambda d: (lambda x: lax.bitcast_convert_type(x, jnp.int32), [d.real(d.i, d.j)]))
    _case(
        "bitcast_convert_type/narrow", lambda d: (lambda x: lax.bitcast_convert_type(x, jnp.uint8), [d.real(d.i, d.j)])
    )
    _case(
        "bitcast_convert_type/wide",
        lambda d: (lambda x: lax.bitcast_convert_type(x, jnp.uint32), [d.uint(d.i, d.j, 4).astype(jnp.uint8)]),
    )
    _case(
        "optimization_barrier",
        lambda d: (lambda *a: lax.optimization_barrier(a), [d.num(d.i, d.j), d.num(d.k), d.num(d.i)]),
    )
    _case("device_put", lambda d: (jax.device_put, [d.num(d.i, d.j)]))
    _case("add/size1", lambda d: (lax.add, [d.num(d.i, 1, d.j), d.num(d.i, 1, d.j)]))


def _shape() -> None:
    for name, f in {
        "split": lambda d: (lambda x: x.reshape(d.i, d.j, d.k), [d.num(d.i * d.j, d.k)]),
        "merge": lambda d: (lambda x: x.reshape(d.i * d.j, d.k), [d.num(d.i, d.j, d.k)]),
        "ones": lambda d: (lambda x: x.reshape(1, d.i, d.j, 1), [d.num(d.i, 1, d.j)]),
        "flat": lambda d: (lambda x: x.reshape(-1), [d.num(d.i, d.j, d.k)]),
        "gcd": lambda d: (lambda x: x.reshape(d.i * 4, 3), [d.num(d.i * 3, 4)]),
        "coprime": lambda d: (lambda x: x.reshape(3, 2, d.i), [d.num(2, 3, d.i)]),
        "uneven": lambda d: (lambda x: x.reshape(d.i, 3 * d.j), [d.num(d.i * 3, d.j)]),
        "late": lambda d: (lambda x: x.reshape(3, d.i, d.j), [d.num(3, d.i * d.j)]),
    }.items():
        _case(f"reshape/{name}", f)
    _case("broadcast_in_dim/vector", lambda d: (lambda x: lax.broadcast_in_dim(x, (d.i, d.j), (1,)), [d.num(d.j)]))
    _case("broadcast_in_dim/scalar", lambda d: (lambda x: lax.broadcast_in_dim(x, (d.i, d.j), ()), [d.num()]))
    _case(
        "broadcast_in_dim/ones", lambda d: (lambda x: lax.broadcast_in_dim(x, (d.i, d.j, d.k), (0, 2)), [d.num(d.i, 1)])
    )
    _case("transpose", lambda d: (lambda x: lax.transpose(x, (2, 0, 1)), [d.num(d.i, d.j, d.k)]))
    _case("squeeze", lambda d: (lambda x: lax.squeeze(x, (1, 3)), [d.num(d.i, 1, d.j, 1)]))
    _case("concatenate", lambda d: (lambda *a: lax.concatenate(a, 1), [d.num(d.i, d.j, d.k), d.num(d.i, d.m, d.k)]))
    _case("split", lambda d: (lambda x: lax.split(x, (d.j, d.m), 1), [d.num(d.i, d.j + d.m, d.k)]))
    _case(
        "pad",
        lambda d: (
            lambda x: lax.pad(x, F(0), ((0, 0, 0), (1, 1, 0), (0, 0, 0), (1, -1, 0))),
            [d.num(d.i, d.j, d.k, d.i)],
        ),
    )
    _case("pad/interior", lambda d: (lambda x: lax.pad(x, F(3), ((0, 0, 1), (0, 0, 0))), [d.num(d.i, d.j)]))
    _case("slice", lambda d: (lambda x: lax.slice(x, (0, 1, 0), (d.i, d.j - 1, d.k)), [d.num(d.i, d.j, d.k)]))
    _case("slice/strided", lambda d: (lambda x: lax.slice(x, (0, 0), (d.i, d.j), (1, 2)), [d.num(d.i, d.j)]))
    _case("rev", lambda d: (lambda x: lax.rev(x, (1,)), [d.num(d.i, d.j, d.k)]))
    _case(
        "dynamic_slice",
        lambda d: (
            lambda x, s: lax.dynamic_slice(x, (3, s, 0), (d.i, 2, d.k)),
            [d.num(d.i, d.j, d.k), d.int(low=0, high=d.j)],
        ),
    )
    _case(
        "dynamic_update_slice/row",
        lambda d: (
            lambda x, y, s: lax.dynamic_update_slice(x, y, (s, 0)),
            [d.num(d.i, d.j), d.num(1, d.j), d.int(low=0, high=d.i + 2)],
        ),
    )
    _case(
        "dynamic_update_slice/window",
        lambda d: (
            lambda x, y, s: lax.dynamic_update_slice(x, y, (1, s, 2)),
            [d.num(d.i, d.j, d.k), d.num(d.i, 2, d.k), d.int(low=0, high=d.j)],
        ),
    )
    _case(
        "dynamic_update_slice/cell",
        lambda d: (
            lambda x, y, s, t: lax.dynamic_update_slice(x, y, (s, t)),
            [d.num(d.i, d.j), d.num(1, 1), d.int(low=-1, high=d.i), d.int(low=0, high=d.j)],
        ),
    )
    _case("tile", lambda d: (lambda x: lax.tile(x, (d.i, 1, d.k)), [d.num(3, d.j, d.i)]))
    _case("stack", lambda d: (lambda *a: jnp.stack(a, 1), [d.num(d.i, d.j), d.num(d.i, d.j)]))
    _case("unstack", lambda d: (lambda x: jnp.unstack(x, axis=1), [d.num(d.i, 4, d.j)]))


def _contraction() -> None:
    def dot(numbers: Any, **kw: Any) -> Callable[..., Any]:
        return lambda a, b: lax.dot_general(a, b, numbers, **kw)

    _case("dot_general/matmul", lambda d: (dot((((1,), (0,)), ((), ()))), [d.num(d.i, d.k), d.num(d.k, d.j)]), F, B, W)
    _case("dot_general/transposed", lambda d: (dot((((0,), (1,)), ((), ()))), [d.num(d.k, d.i), d.num(d.j, d.k)]))
    _case(
        "dot_general/batch",
        lambda d: (dot((((3,), (3,)), ((0, 2), (0, 2)))), [d.num(d.b, d.i, d.h, d.k), d.num(d.b, d.j, d.h, d.k)]),
    )
    _case("dot_general/outer", lambda d: (dot((((), ()), ((), ()))), [d.num(d.i), d.num(d.j)]))
    _case(
        "dot_general/two", lambda d: (dot((((0, 1), (1, 0)), ((), ()))), [d.num(d.k, d.m, d.i), d.num(d.m, d.k, d.j)])
    )
    _case("dot_general/full", lambda d: (dot((((0, 1), (0, 1)), ((), ()))), [d.num(d.k, d.m), d.num(d.k, d.m)]))
    _case(
        "dot_general/preferred",
        lambda d: (dot((((1,), (0,)), ((), ())), preferred_element_type=F), [d.num(d.i, d.k), d.num(d.k, d.j)]),
        B,
    )
    sizes = np.asarray([1, 2, 0, 1], np.int32)

    def ragged(
        a: Any, b: Any, contract: Any, batch: Any, rows: tuple[int, ...], groups: tuple[int, ...], shape: Any = ()
    ) -> Any:
        numbers = lax.RaggedDotDimensionNumbers((contract, batch), rows, groups)
        return lax.ragged_dot_general(a, b, jnp.broadcast_to(jnp.asarray(sizes), (*shape, 4)), numbers)

    _case(
        "ragged_dot_general/rows",
        lambda d: (
            lambda a, b: ragged(a, b, ((1,), (1,)), ((), ()), (0,), (0,)),
            [d.num(d.i, d.k), d.num(4, d.k, d.j)],
        ),
    )
    _case(
        "ragged_dot_general/contract",
        lambda d: (lambda a, b: ragged(a, b, ((0,), (0,)), ((), ()), (0,), ()), [d.num(d.k, d.i), d.num(d.k, d.j)]),
    )
    _case(
        "ragged_dot_general/batch",
        lambda d: (
            lambda a, b: ragged(a, b, ((2,), (2,)), ((0,), (0,)), (1,), (1,), (d.b,)),
            [d.num(d.b, d.i, d.k), d.num(d.b, 4, d.k, d.j)],
        ),
    )


def _reduction() -> None:
    for name, f in {"sum": jnp.sum, "max": lax.reduce_max, "min": lax.reduce_min, "prod": lax.reduce_prod}.items():
        _case(f"reduce_{name}", lambda d, f=f: (lambda x: f(x, (0, 2)), [d.num(d.i, d.j, d.k)]), F, W)
    for name in ["and", "or", "xor"]:
        f = getattr(lax, f"reduce_{name}")
        _case(f"reduce_{name}", lambda d, f=f: (lambda x: f(x, (1,)), [d.int(d.i, d.k)]))
    for name in ["and", "or"]:
        f = getattr(lax, f"reduce_{name}")
        _case(f"reduce_{name}/bool", lambda d, f=f: (lambda x: f(x, (1,)), [d.bool(d.i, d.k)]))
    for name in ["argmax", "argmin"]:
        _case(name, lambda d, f=_LAX[name]: (lambda x: f(x, 1, jnp.int32), [d.real(d.i, d.k, d.j)]))
    _case("reduce", lambda d: (lambda x: lax.reduce(x, F(0), lambda a, b: a * 2 + b, (1,)), [d.num(d.i, d.k, d.j)]))
    for name in ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"]:
        _case(name, lambda d, f=_LAX[name]: (lambda x: f(x, 1), [d.real(d.i, d.j, d.k)]))
    _case("sort", lambda d: (lambda x: lax.sort(x, dimension=1), [d.real(d.i, d.j, d.k)]))
    _case(
        "sort/pairs",
        lambda d: (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), [d.real(d.i, d.j), d.real(d.i, d.j)]),
    )
    _case("top_k", lambda d: (lambda x: lax.top_k(x, 2), [d.real(d.i, d.j)]))
    _case("top_k/all", lambda d: (lambda x: lax.top_k(x, d.j), [d.real(d.i, d.j)]))
    _case("approx_top_k", lambda d: (lambda x: lax.approx_max_k(x, 2), [d.real(d.i, d.j)]))


def _indexing() -> None:
    gather_modes = {"fill": "fill", "clip": "clip", "promise": "promise_in_bounds"}
    for name, mode in gather_modes.items():
        slack = 0 if name == "promise" else 3
        _case(
            f"gather/rows_{name}",
            lambda d, mode=mode, slack=slack: (
                lambda x, i: x.at[i].get(mode=mode),
                [d.num(d.v, d.j), d.int(d.b, d.i, low=0, high=d.v + slack)],
            ),
            F,
            W,
        )
        _case(
            f"gather/pairs_{name}",
            lambda d, mode=mode, slack=slack: (
                lambda x, i, j: x.at[i, :, j].get(mode=mode),
                [d.num(d.v, d.j, d.w), d.int(d.b, low=0, high=d.v + slack), d.int(d.b, low=0, high=d.w + slack)],
            ),
        )
        _case(
            f"gather/along_{name}",
            lambda d, mode=mode, slack=slack: (
                lambda x, i: jnp.take_along_axis(x, i, 1, mode=mode),
                [d.num(d.b, d.v), d.int(d.b, d.i, low=0, high=d.v + slack)],
            ),
        )
    _case(
        "gather/batched",
        lambda d: (
            jax.vmap(lambda x, i: x.at[i].get(mode="fill")),
            [d.num(d.b, d.v, d.j), d.int(d.b, d.i, low=0, high=d.v + 2)],
        ),
    )
    _case(
        "gather/bool",
        lambda d: (lambda x, i: x.at[i].get(mode="clip"), [d.bool(d.v, d.j), d.int(d.b, low=0, high=d.v)]),
    )

    def starts(d: Draw) -> Any:
        """Where windows start: anywhere on the first dimension; on the second, which they cover, at 0 but once."""
        return d.int(d.b, 2, low=0, high=d.v).at[1:, 1].set(0)

    def windows(d: Draw, mode: str) -> Made:
        numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))
        return (
            lambda x, i: lax.gather(x, i, numbers, (2, d.j), mode=mode),
            [d.num(d.v, d.j), starts(d)],
        )

    _case("gather/windows_fill", lambda d: windows(d, "fill"))
    _case("gather/windows_clip", lambda d: windows(d, "clip"))

    ops = {"add": "add", "mul": "multiply", "min": "min", "max": "max", "sub": "subtract"}
    for name, method in ops.items():
        if name == "sub" and not hasattr(lax, "scatter_sub"):
            continue
        for mode in ("drop", "clip"):
            _case(
                f"scatter-{name}/rows_{mode}",
                lambda d, method=method, mode=mode: (
                    lambda x, i, u: getattr(x.at[i], method)(u, mode=mode),
                    [d.num(d.v, d.j), d.int(d.b, low=0, high=d.v + 2), d.num(d.b, d.j)],
                ),
            )
    for mode in ("drop", "clip"):
        _case(
            f"scatter/rows_{mode}",
            lambda d, mode=mode: (
                lambda x, i, u: x.at[i].set(u, mode=mode),
                [d.num(d.v, d.j), d.int(d.b, low=0, high=d.v + 2), d.num(d.b, d.j)],
            ),
        )
    _case("scatter/slice", lambda d: (lambda x, u: x.at[2].set(u), [d.num(d.v, d.j), d.num(d.j)]))
    _case(
        "scatter-add/batched",
        lambda d: (
            jax.vmap(lambda x, i, u: x.at[i].add(u)),
            [d.num(d.b, d.v, d.j), d.int(d.b, d.i, low=0, high=d.v + 2), d.num(d.b, d.i, d.j)],
        ),
    )
    _case(
        "scatter-add/pairs",
        lambda d: (
            lambda x, i, j, u: x.at[i, :, j].add(u),
            [d.num(d.v, d.j, d.w), d.int(d.b, low=0, high=d.v + 2), d.int(d.b, low=0, high=d.w + 2), d.num(d.b, d.j)],
        ),
    )

    def scatter_windows(d: Draw, mode: str) -> Made:
        numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
        return (
            lambda x, i, u: lax.scatter_add(x, i, u, numbers, mode=mode),
            [d.num(d.v, d.j), starts(d), d.num(d.b, 2, d.j)],
        )

    _case("scatter-add/windows_drop", lambda d: scatter_windows(d, "drop"))
    _case("scatter-add/windows_clip", lambda d: scatter_windows(d, "clip"))
    _case(
        "scatter/apply", lambda d: (lambda x, i: x.at[i].apply(jnp.sin), [d.num(d.v, d.j), d.int(d.b, low=0, high=d.v)])
    )


def _born() -> None:
    _case("iota", lambda d: (lambda: lax.broadcasted_iota(jnp.int32, (d.i, d.j, d.k), 1), []))
    _case("random_bits", lambda d: (lambda k: jax.random.bits(k, (d.i, d.j)), [d.keys()]))
    _case("random_bits/keys", lambda d: (jax.vmap(lambda k: jax.random.bits(k, (d.i,))), [d.keys(d.b)]))
    _case("random_split", lambda d: (lambda k: jax.random.split(k, d.i), [d.keys()]))
    _case("random_split/keys", lambda d: (jax.vmap(lambda k: jax.random.split(k, d.i)), [d.keys(d.b)]))
    _case("random_fold_in", lambda d: (jax.vmap(jax.random.fold_in), [d.keys(d.b), d.uint(d.b)]))
    _case("random_clone", lambda d: (jax.random.clone, [d.keys(d.b)]))
    _case("random_seed", lambda d: (jax.vmap(jax.random.key), [d.int(d.b)]))
    _case("random_wrap", lambda d: (jax.random.wrap_key_data, [d.uint(d.b, d.i, 2)]))
    _case("random_unwrap", lambda d: (jax.random.key_data, [d.keys(d.b, d.i)]))
    _case("rng_bit_generator", lambda d: (lambda k: lax.rng_bit_generator(k, (d.i, d.j)), [d.uint(4)]))
    _case("rng_uniform", lambda d: (lambda a, b: lax.rng_uniform(a, b, (d.i, d.j)), [F(0), F(1)]))


def _window() -> None:
    for name, (window, stride, padding) in {
        "pool": ((1, 2, 1), (1, 2, 1), "VALID"),
        "same": ((1, 3, 1), (1, 1, 1), "SAME"),
        "overlap": ((1, 4, 1), (1, 2, 1), "VALID"),
    }.items():
        for kind, (init, f) in {"max": (-np.inf, lax.max), "min": (np.inf, lax.min), "sum": (0.0, lax.add)}.items():
            _case(
                f"reduce_window_{kind}/{name}",
                lambda d, w=window, s=stride, p=padding, init=init, f=f: (
                    lambda x: lax.reduce_window(x, F(init), f, w, s, p),
                    [d.num(d.i, 2 * d.j, d.k)],
                ),
            )
        _case(
            f"select_and_scatter_add/{name}",
            lambda d, w=window, s=stride, p=padding: (
                jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, w, s, p) ** 2).sum()),
                [d.real(d.i, 2 * d.j, d.k)],
            ),
        )
    _case(
        "reduce_window",
        lambda d: (
            lambda x: lax.reduce_window(x, F(0), lambda a, b: 2 * a + b, (1, 2), (1, 2), "VALID"),
            [d.num(d.i, 2 * d.j)],
        ),
    )

    def conv(d: Draw, width: int, stride: int, padding: str, groups: int = 1, index: int = -1) -> Made:
        inputs, outputs = (d.c, d.o) if groups == 1 else (groups * 2, groups * 3)
        image, kernel = d.num(d.b, stride * d.h, inputs), d.num(width, inputs // groups, outputs)

        def f(x: Any, k: Any) -> Any:
            return lax.conv_general_dilated(
                x, k, (stride,), padding, dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=groups
            )

        if index < 0:
            return f, [image, kernel]
        return (lambda x, k: jax.grad(lambda *a: (f(*a) ** 2).sum(), index)(x, k)), [image, kernel]

    for name, args in {
        "same": (4, 1, "SAME"),
        "one": (1, 1, "VALID"),
        "patches": (2, 2, "VALID"),
        "valid": (4, 1, "VALID"),
        "skip": (1, 2, "VALID"),
    }.items():
        for suffix, index in {"": -1, "_dx": 0, "_dk": 1}.items():
            _case(f"conv_general_dilated/{name}{suffix}", lambda d, args=args, index=index: conv(d, *args, index=index))
    for suffix, index in {"": -1, "_dx": 0, "_dk": 1}.items():
        _case(
            f"conv_general_dilated/groups{suffix}",
            lambda d, index=index: conv(d, 4, 1, "SAME", groups=d.g, index=index),
        )


def _linalg() -> None:
    def matrix(d: Draw) -> Any:
        return d.real(d.b, 3, 3) + 5 * jnp.eye(3)

    def positive(d: Draw) -> Any:
        m = matrix(d)
        return m @ m.transpose(0, 2, 1)

    _case("cholesky", lambda d: (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), [positive(d)]))
    _case("eigh", lambda d: (lambda a: lax.linalg.eigh(a, symmetrize_input=False), [positive(d)]))
    _case("lu", lambda d: (lax.linalg.lu, [matrix(d)]))
    _case("qr", lambda d: (lax.linalg.qr, [matrix(d)]))
    _case("svd", lambda d: (lax.linalg.svd, [matrix(d)]))
    for left in (True, False):
        _case(
            f"triangular_solve/{'left' if left else 'right'}",
            lambda d, left=left: (
                lambda a, b: lax.linalg.triangular_solve(a, b, left_side=left),
                [matrix(d), d.num(d.b, *((3, d.i) if left else (d.i, 3)))],
            ),
        )
    _case("fft", lambda d: (lambda x: lax.fft(x, "FFT", (d.j,)), [d.real(d.i, d.j).astype(jnp.complex64)]))


for _family in (_elementwise, _shape, _contraction, _reduction, _indexing, _born, _window, _linalg):
    _family()
for _rare in rare_applications.FAMILIES:
    _rare(_case)


def cycling(*sizes: int) -> Pick:
    """Sizes handed out in turn: the same application each time."""
    turn = itertools.cycle(sizes)
    return lambda letter: next(turn)
