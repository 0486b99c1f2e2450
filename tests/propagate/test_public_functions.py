"""Public functions of jax.numpy, jax.scipy, jax.nn, jax.random and jax.lax leave no primitive unknown, nor whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax
from jax.scipy.optimize import minimize

from spmd_auto.propagate.graph import build_graph
from spmd_auto.trace import trace

F = np.float32
X, M, V = np.ones((4, 6), F), 2 * np.eye(4, dtype=F), np.ones(6, F)
N, C, K = np.ones((4, 6), np.int32), np.ones((4, 6), np.complex64), jax.random.key(0)
P = np.full((4, 6), 0.5, F)

# Functions by the arrays that they are called with.
_ARRAYS = {"X": X, "M": M, "V": V, "N": N, "C": C, "P": P}
_FUNCTIONS: dict[tuple[Any, str], str] = {
    (jnp, "X"): """abs angle argmax argmin argsort around average cbrt ceil conj cos cosh count_nonzero cov corrcoef
        cumprod cumsum deg2rad diagonal diff exp exp2 expm1 fabs flip fliplr floor gradient histogram i0 imag isfinite
        isinf isnan log log10 log1p log2 max mean median min nan_to_num nanmax nanmean nanmin nanstd nansum nanvar
        negative ones_like prod ptp ravel real reciprocal rint rot90 round sign signbit sin sinc sinh sort sqrt square
        squeeze std sum tan tanh trace transpose tril triu trunc var zeros_like unwrap positive nancumsum frexp modf""",
    (jnp, "X X"): """add arctan2 allclose array_equal copysign divide equal floor_divide fmax fmin fmod greater
        heaviside hypot inner isclose kron less logaddexp logaddexp2 maximum minimum mod multiply nextafter not_equal
        outer power remainder subtract true_divide vdot""",
    (jnp, "N"): "bitwise_count bitwise_not invert logical_not",
    (jnp, "N N"): "bitwise_and bitwise_or bitwise_xor gcd lcm left_shift right_shift ldexp",
    (jnp.linalg, "M"): "cholesky det eigh eigvalsh inv norm pinv qr slogdet svd eig",
    (jnp.linalg, "M M"): "solve lstsq matmul",
    (jnp, "V"): "diag vander",
    (jnp.fft, "V"): "fft rfft fftshift",
    (jnp.fft, "C"): "fft2 ifft irfft fftn",
    (jsp.special, "P"): """digamma entr erf erfc erfinv exp1 expi expit gammaln i0 i0e i1 i1e log_ndtr log_softmax logit
        ndtr ndtri logsumexp softmax spence""",
    (jsp.special, "P P"): "beta betaln gammainc gammaincc kl_div rel_entr xlog1py xlogy poch",
    (jsp.special, "P P P"): "betainc",
    (jax.nn, "X"): """celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax
        logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus squareplus standardize swish
        tanh normalize""",
}
_RANDOM = """ball bernoulli beta binomial bits categorical cauchy chisquare dirichlet double_sided_maxwell exponential
    f gamma generalized_normal geometric gumbel laplace loggamma logistic lognormal maxwell multivariate_normal normal
    orthogonal pareto permutation poisson rademacher randint rayleigh split t triangular truncated_normal uniform
    wald weibull_min choice fold_in"""
_RANDOM_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ball": (3,),
    "beta": (P, P),
    "binomial": (9.0, P),
    "categorical": (X,),
    "chisquare": (P,),
    "choice": (V,),
    "dirichlet": (V,),
    "double_sided_maxwell": (0.0, 1.0),
    "f": (P, P),
    "fold_in": (3,),
    "gamma": (P,),
    "generalized_normal": (2.0,),
    "geometric": (P,),
    "loggamma": (P,),
    "multivariate_normal": (np.ones(4, F), M),
    "orthogonal": (4,),
    "pareto": (P,),
    "permutation": (X,),
    "poisson": (P,),
    "randint": ((4,), 0, 9),
    "rayleigh": (P,),
    "t": (P,),
    "triangular": (0.0, 0.5, 1.0),
    "truncated_normal": (-1.0, 1.0),
    "wald": (P,),
    "weibull_min": (1.0, 2.0),
}
_OTHERS: dict[str, Callable[[], Any]] = {
    "linalg.cho_solve": lambda: jsp.linalg.cho_solve(jsp.linalg.cho_factor(M), M),
    "linalg.expm": lambda: jsp.linalg.expm(M),
    "linalg.eigh": lambda: jsp.linalg.eigh(M),
    "linalg.hessenberg": lambda: jsp.linalg.hessenberg(M),
    "linalg.lu": lambda: jsp.linalg.lu(M),
    "linalg.lu_solve": lambda: jsp.linalg.lu_solve(jsp.linalg.lu_factor(M), M),
    "linalg.polar": lambda: jsp.linalg.polar(M),
    "linalg.schur": lambda: jsp.linalg.schur(M),
    "linalg.solve_triangular": lambda: jsp.linalg.solve_triangular(M, M),
    "linalg.sqrtm": lambda: jsp.linalg.sqrtm(M),
    "signal.convolve2d": lambda: jsp.signal.convolve2d(X, X),
    "signal.fftconvolve": lambda: jsp.signal.fftconvolve(X, X),
    "ndimage.map_coordinates": lambda: jsp.ndimage.map_coordinates(X, [V, V], 1),
    "sparse.cg": lambda: jsp.sparse.linalg.cg(lambda v: 2 * v, V),
    "sparse.gmres": lambda: jsp.sparse.linalg.gmres(lambda v: 2 * v, V),
    "sparse.bicgstab": lambda: jsp.sparse.linalg.bicgstab(lambda v: 2 * v, V),
    "optimize.minimize": lambda: minimize(lambda v: (v**2).sum(), V, method="BFGS").x,
    "stats.norm.logpdf": lambda: jsp.stats.norm.logpdf(X),
    "stats.mode": lambda: jsp.stats.mode(X).mode,
    "interpolate": lambda: jsp.interpolate.RegularGridInterpolator((np.arange(4.0), np.arange(6.0)), X)(P[:, :2]),
    "concatenate": lambda: (jnp.concatenate([X, X]), jnp.tensordot(X, X.T, 1), jnp.dot(X, X.T), X @ X.T),
    "bincount": lambda: (jnp.bincount(N[0], length=3), jnp.unpackbits(N.astype(np.uint8)), jsp.special.zeta(3.0, P)),
    "einsum": lambda: jnp.einsum("ij,kj,k->i", X, X, X[:, 0]),
    "where and unique": lambda: (jnp.unique(X, size=3), jnp.nonzero(X, size=3), jnp.searchsorted(V, V)),
    "percentile": lambda: (jnp.percentile(X, 30), jnp.quantile(X, 0.3, axis=0), jnp.interp(V, V, V)),
    "put and take": lambda: (jnp.put_along_axis(X, N[:, :1], 0.0, 1, inplace=False), jnp.take_along_axis(X, N, 1)),
    "roll and repeat": lambda: (
        jnp.roll(X, 2, 1),
        jnp.repeat(X, 2, 0),
        jnp.tile(X, (2, 1)),
        jnp.pad(X, 1, mode="reflect"),
    ),
    "polynomials": lambda: (jnp.polyval(V, X), jnp.polyfit(V, V, 2), jnp.roots(V, strip_zeros=False)),
    "segment_sum": lambda: jax.ops.segment_sum(X, N[:, 0], 4),
    "dot_product_attention": lambda: jax.nn.dot_product_attention(X[None, :, None], X[None, :, None], X[None, :, None]),
    "image.resize": lambda: jax.image.resize(X, (8, 3), "bicubic"),
    "associative_scan": lambda: lax.associative_scan(jnp.add, X),
    "map": lambda: lax.map(jnp.sin, X, batch_size=2),
    "conv_transpose": lambda: lax.conv_transpose(X[None, :, :, None], X[:2, :2, None, None], (2, 2), "SAME"),
    "pooling": lambda: lax.reduce_window(X, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "top_k": lambda: (lax.top_k(X, 2), lax.approx_max_k(X, 2)),
    "rng_bit_generator": lambda: lax.rng_bit_generator(np.arange(4, dtype=np.uint32), (4, 6)),
}


def _calls() -> dict[str, Callable[[], Any]]:
    calls = dict(_OTHERS)
    for (module, arrays), names in _FUNCTIONS.items():
        args = [_ARRAYS[letter] for letter in arrays.split()]
        for name in filter(lambda name, module=module: hasattr(module, name), names.split()):
            calls[f"{module.__name__}.{name}"] = functools.partial(getattr(module, name), *args)
    for name in filter(lambda name: hasattr(jax.random, name), _RANDOM.split()):
        calls[f"jax.random.{name}"] = functools.partial(getattr(jax.random, name), K, *_RANDOM_ARGUMENTS.get(name, ()))
    return calls


CALLS = _calls()


def test_there_are_many() -> None:
    assert len(CALLS) > 230


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_unknown(name: str) -> None:
    program = trace(lambda: CALLS[name]())
    assert build_graph(program).unknown == {}
