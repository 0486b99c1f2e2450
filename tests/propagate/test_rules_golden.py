"""Every rule as a text: what is agreed, line by line.  A change here is a change of meaning."""

from __future__ import annotations

import pytest

from spmd_auto.errors import RuleError
from spmd_auto.propagate.factors import Rule, format_rule, parse_rule
from spmd_auto.propagate.rules import register_rule, registry, rule_for

from .applications import CASES, Draw, cycling

# Of one of the two releases only.
OTHERS = {"log2", "polynomial", "one_minus_square", "with_memory_space_constraint", "shard_alike"}
OTHERS |= {"acospi", "asinpi", "atan2pi", "atanpi", "cospi", "exp2m1", "fma", "fmuladd", "log2p1", "sinpi", "tanpi"}
OTHERS |= {"random_gamma_grad", "random_poisson", "raw_bits"}

GOLDEN = """
abs (i j)->(i j)
neg (i j)->(i j)
sign (i j)->(i j)
floor (i j)->(i j)
ceil (i j)->(i j)
round (i j)->(i j)
exp (i j)->(i j)
exp2 (i j)->(i j)
expm1 (i j)->(i j)
sin (i j)->(i j)
cos (i j)->(i j)
tan (i j)->(i j)
tanh (i j)->(i j)
sinh (i j)->(i j)
cosh (i j)->(i j)
asinh (i j)->(i j)
atan (i j)->(i j)
erf (i j)->(i j)
erfc (i j)->(i j)
logistic (i j)->(i j)
is_finite (i j)->(i j)
square (i j)->(i j)
cbrt (i j)->(i j)
bessel_i0e (i j)->(i j)
bessel_i1e (i j)->(i j)
log (i j)->(i j)
log1p (i j)->(i j)
log2 (i j)->(i j)
sqrt (i j)->(i j)
rsqrt (i j)->(i j)
lgamma (i j)->(i j)
digamma (i j)->(i j)
acosh (i j)->(i j)
asin (i j)->(i j)
acos (i j)->(i j)
atanh (i j)->(i j)
erf_inv (i j)->(i j)
add (i j),(i j)->(i j)
sub (i j),(i j)->(i j)
mul (i j),(i j)->(i j)
div (i j),(i j)->(i j)
rem (i j),(i j)->(i j)
max (i j),(i j)->(i j)
min (i j),(i j)->(i j)
eq (i j),(i j)->(i j)
ne (i j),(i j)->(i j)
lt (i j),(i j)->(i j)
le (i j),(i j)->(i j)
gt (i j),(i j)->(i j)
ge (i j),(i j)->(i j)
pow (i j),(i j)->(i j)
atan2 (i j),(i j)->(i j)
nextafter (i j),(i j)->(i j)
igamma (i j),(i j)->(i j)
igammac (i j),(i j)->(i j)
igamma_grad_a (i j),(i j)->(i j)
polygamma (i j),(i j)->(i j)
zeta (i j),(i j)->(i j)
and (i j),(i j)->(i j)
or (i j),(i j)->(i j)
xor (i j),(i j)->(i j)
shift_left (i j),(i j)->(i j)
shift_right_logical (i j),(i j)->(i j)
shift_right_arithmetic (i j),(i j)->(i j)
mulhi (i j),(i j)->(i j)
not (i j)->(i j)
population_count (i j)->(i j)
clz (i j)->(i j)
integer_pow (i j)->(i j)
add_any (i j),(i j)->(i j)
complex (i j),(i j)->(i j)
real (i j)->(i j)
imag (i j)->(i j)
conj (i j)->(i j)
convert_element_type (i j)->(i j)
copy (i j)->(i j)
name (i j)->(i j)
reduce_precision (i j)->(i j)
stop_gradient (i j)->(i j)
clamp/array (i j),(i j),(i j)->(i j)
clamp/scalar (),(i j),()->(i j)
select_n/array (i j),(i j),(i j)->(i j)
select_n/scalar (),(i j),(i j)->(i j)
regularized_incomplete_beta (i),(i),(i)->(i)
polynomial (i),(i),(i)->(i)
bitcast_convert_type/same (i j)->(i j)
bitcast_convert_type/narrow (i j)->(i j -)
bitcast_convert_type/wide (i j -)->(i j)
optimization_barrier (i j),(k),(l)->(i j),(k),(l)
device_put (i j)->(i j)
add/size1 (i - j),(i - j)->(i - j)
reshape/split (i j)->(i - j) major={i=4}
reshape/merge (i - j)->(i j) major={i=4}
reshape/ones (i - j)->(- i j -)
reshape/flat (i - -)->(i) major={i=4}
reshape/gcd (i -)->(i -) major={i=4}
reshape/coprime (- - i)->(- - i)
reshape/uneven (i -)->(i -) major={i=4}
reshape/late (i j)->(i j -) major={j=4}
broadcast_in_dim/vector (j)->(i j)
broadcast_in_dim/scalar ()->(i j)
broadcast_in_dim/ones (i -)->(i j k)
transpose (j k i)->(i j k)
squeeze (i - j -)->(i j)
concatenate (i j k),(i j k)->(i j k) move={j} major={j=2}
split (i j k)->(i j k),(i j k) move={j} major={j=2}
pad (i j k l),()->(i j k l) move={j, l} major={j=2}
pad/interior (- i),()->(- i)
slice (i j k)->(i j k) move={j} major={j=2}
slice/strided (i -)->(i -)
rev (i j k)->(i j k) move={j}
dynamic_slice (i - j),(),(),()->(i - j)
dynamic_update_slice/row (i j),(- j),(),()->(i j) need_replication={i}
dynamic_update_slice/window (i k l),(i j l),(),(),()->(i k l) need_replication={j, k}
dynamic_update_slice/cell (i j),(- -),(),()->(i j) need_replication={i, j}
tile (- j -)->(i j k) major={i=6, k=8}
stack (i j),(i j)->(i - j)
unstack (i j k)->(i k),(i k),(i k),(i k) need_replication={j}
dot_general/matmul (i k),(k j)->(i j) reduction={k}
dot_general/transposed (k i),(j k)->(i j) reduction={k}
dot_general/batch (i k j m),(i l j m)->(i j k l) reduction={m}
dot_general/outer (i),(j)->(i j)
dot_general/two (k l i),(l k j)->(i j) reduction={k, l}
dot_general/full (i j),(i j)->() reduction={i, j}
dot_general/preferred (i k),(k j)->(i j) reduction={k}
ragged_dot_general/rows (i l),(j l k),(-)->(i k) reduction={l} need_replication={i, j}
ragged_dot_general/contract (k i),(k j),(-)->(- i j) need_replication={k}
ragged_dot_general/batch (i j m),(i k m l),(- -)->(i j l) reduction={m} need_replication={i, j, k}
reduce_sum (i j k)->(j) reduction={i, k}
reduce_max (i j k)->(j) reduction={i, k} combine=max
reduce_min (i j k)->(j) reduction={i, k} combine=min
reduce_prod (i j k)->(j) reduction={i, k} combine=mul
reduce_and (i j)->(i) reduction={j} combine=and
reduce_or (i j)->(i) reduction={j} combine=or
reduce_xor (i j)->(i) need_replication={j}
reduce_and/bool (i j)->(i) reduction={j} combine=and
reduce_or/bool (i j)->(i) reduction={j} combine=or
argmax (i j k)->(i k) need_replication={j}
argmin (i j k)->(i k) need_replication={j}
reduce (i j k),()->(i k) need_replication={j}
cumsum (i j k)->(i j k) need_replication={j}
cumprod (i j k)->(i j k) need_replication={j}
cummax (i j k)->(i j k) need_replication={j}
cummin (i j k)->(i j k) need_replication={j}
cumlogsumexp (i j k)->(i j k) need_replication={j}
sort (i j k)->(i j k) need_replication={j}
sort/pairs (i j),(i j)->(i j),(i j) need_replication={i}
top_k (i -)->(i -),(i -)
top_k/all (i j)->(i j),(i j) need_replication={j}
approx_top_k (i -)->(i -),(i -)
gather/rows_fill (l k),(i j -)->(i j k) reduction={l}
gather/pairs_fill (k j l),(i -)->(i j) reduction={k, l}
gather/along_fill (i k),(i j -)->(i j) reduction={k}
gather/rows_clip (l k),(i j -)->(i j k) reduction={l}
gather/pairs_clip (k j l),(i -)->(i j) reduction={k, l}
gather/along_clip (i k),(i j -)->(i j) reduction={k}
gather/rows_promise (l k),(i j -)->(i j k) reduction={l}
gather/pairs_promise (k j l),(i -)->(i j) reduction={k, l}
gather/along_promise (i k),(i j -)->(i j) reduction={k}
gather/batched (i l k),(i j -)->(i j k) reduction={l}
gather/bool (k j),(i -)->(i j) reduction={k}
gather/windows_fill (j k),(i -)->(i - k) need_replication={j}
gather/windows_clip (j k),(i -)->(i - k) need_replication={j}
scatter-add/rows_drop (k j),(i -),(i j)->(k j) reduction={i}
scatter-add/rows_clip (k j),(i -),(i j)->(k j) reduction={i}
scatter-mul/rows_drop (k j),(i -),(i j)->(k j) reduction={i} combine=mul
scatter-mul/rows_clip (k j),(i -),(i j)->(k j) reduction={i} combine=mul
scatter-min/rows_drop (k j),(i -),(i j)->(k j) reduction={i} combine=min
scatter-min/rows_clip (k j),(i -),(i j)->(k j) reduction={i} combine=min
scatter-max/rows_drop (k j),(i -),(i j)->(k j) reduction={i} combine=max
scatter-max/rows_clip (k j),(i -),(i j)->(k j) reduction={i} combine=max
scatter-sub/rows_drop (k j),(i -),(i j)->(k j) reduction={i}
scatter-sub/rows_clip (k j),(i -),(i j)->(k j) reduction={i}
scatter/rows_drop (k j),(i -),(i j)->(k j) need_replication={i}
scatter/rows_clip (k j),(i -),(i j)->(k j) need_replication={i}
scatter/slice (j i),(-),(i)->(j i)
scatter-add/batched (i l k),(i j -),(i j k)->(i l k) reduction={j}
scatter-add/pairs (k j l),(i -),(i j)->(k j l) reduction={i}
scatter-add/windows_drop (k l),(i -),(i j l)->(k l) reduction={i} need_replication={j, k}
scatter-add/windows_clip (k l),(i -),(i j l)->(k l) reduction={i} need_replication={j, k}
scatter/apply (k j),(i -),(i j)->(k j) need_replication={i}
iota ->(i j k)
random_bits ()->(i j)
random_bits/keys (i)->(i j)
random_split ()->(i)
random_split/keys (i)->(i j)
random_fold_in (i),(i)->(i)
random_clone (i)->(i)
random_seed (i)->(i)
random_wrap (i j -)->(i j)
random_unwrap (i j)->(i j -)
rng_bit_generator (-)->(-),(- -)
rng_uniform (),()->(- -)
reduce_window_max/pool (i j k)->(i j k) major={j=6}
reduce_window_min/pool (i j k)->(i j k) major={j=6}
reduce_window_sum/pool (i j k)->(i j k) major={j=6}
select_and_scatter_add/pool (i j k),(i j k)->(i j k) major={j=6}
reduce_window_max/same (i j k)->(i j k) permutation={j} halo={j=1:1}
reduce_window_min/same (i j k)->(i j k) permutation={j} halo={j=1:1}
reduce_window_sum/same (i j k)->(i j k) permutation={j} halo={j=1:1}
select_and_scatter_add/same (i j k),(i j k)->(i j k) permutation={j} halo={j=1:1/2:2}
reduce_window_max/overlap (i j k)->(i - k) need_replication={j}
reduce_window_min/overlap (i j k)->(i - k) need_replication={j}
reduce_window_sum/overlap (i j k)->(i - k) need_replication={j}
select_and_scatter_add/overlap (i j l),(i k l)->(i - l) need_replication={j, k}
reduce_window (i j),()->(i j) major={j=6}
conv_general_dilated/same (i l k),(m k j)->(i l j) reduction={k} need_replication={m} permutation={l} halo={l=1:2}
conv_general_dilated/same_dx (i l k),(m j k)->(i l j) reduction={k} need_replication={m} permutation={l} halo={l=2:1}
conv_general_dilated/same_dk (k l i),(k l j)->(- i j) reduction={k, l} halo={l=1:2/0:0}
conv_general_dilated/one (i l k),(- k j)->(i l j) reduction={k}
conv_general_dilated/one_dx (i l k),(- j k)->(i l j) reduction={k}
conv_general_dilated/one_dk (k l i),(k l j)->(- i j) reduction={k, l}
conv_general_dilated/patches (i l k),(m k j)->(i l j) reduction={k} need_replication={m} major={l=10}
conv_general_dilated/patches_dx (i l k),(m j k)->(i l j) reduction={k} need_replication={m} major={l=10}
conv_general_dilated/patches_dk (k l i),(k l j)->(- i j) reduction={k, l} major={l=10}
conv_general_dilated/valid (i l k),(m k j)->(i - j) reduction={k} need_replication={l, m}
conv_general_dilated/valid_dx (i l k),(m j k)->(i - j) reduction={k} need_replication={l, m}
conv_general_dilated/valid_dk (k l i),(k m j)->(- i j) reduction={k} need_replication={l, m}
conv_general_dilated/skip (i l k),(- k j)->(i l j) reduction={k} major={l=10}
conv_general_dilated/skip_dx (i l k),(- j k)->(i l j) reduction={k} major={l=10}
conv_general_dilated/skip_dk (k l i),(k l j)->(- i j) reduction={k, l} major={l=10}
conv_general_dilated/groups (i k j),(l - j)->(i k j) need_replication={l} permutation={k} major={j=4} halo={k=1:2}
conv_general_dilated/groups_dx (i k j),(l j -)->(i k j) need_replication={l} permutation={k} major={j=4} halo={k=2:1}
conv_general_dilated/groups_dk (j k i),(j k i)->(- - i) reduction={j, k} major={i=4} halo={k=1:2/0:0}
cholesky (i - -)->(i - -)
eigh (i - -)->(i - -),(i -)
lu (i - -)->(i - -),(i -),(i -)
qr (i - -)->(i - -),(i - -)
svd (i - -)->(i -),(i - -),(i - -)
triangular_solve/left (i - -),(i - j)->(i - j)
triangular_solve/right (i - -),(i j -)->(i j -)
fft (i -)->(i -)
tie (i j),(i j)->(i j)
sharding_constraint (i j)->(i j)
layout_constraint (i j)->(i j)
reshard (i j)->(i j)
xla_metadata_value (i j)->(i j)
shard_alike (i j),(i j)->(i j),(i j)
eq_to (i j),(i j)->(i j)
le_to (i j),(i j)->(i j)
lt_to (i j),(i j)->(i j)
empty ->(i j)
empty2 ->()
platform_index ->()
iota_2x32_shape ->(i j),(i j)
broadcast_to (- k)->(i j k)
broadcast_to/vector (j)->(i j)
threefry2x32 (),(),(i j),(i j)->(i j),(i j)
threefry4x32 (),(),(),(),(i j),(i j),(i j),(i j)->(i j),(i j),(i j),(i j)
philox2x32 (),(i j),(i j)->(i j),(i j)
philox4x32 (),(),(i j),(i j),(i j),(i j)->(i j),(i j),(i j),(i j)
random_gamma (i),(i j)->(i j)
scaled_dot (i j l),(i l k),(i j l),(i l k)->(i j k) reduction={l} major={l=8}
ragged_dot_general/ragged_batch (i j l),(i l k),(-)->(i j k) reduction={l} need_replication={i}
reduce/pair (i j k),(i j k),(),()->(i k),(i k) need_replication={j}
cumsum/reverse (i j)->(i j) need_replication={i}
cumlogsumexp/reverse (i j)->(i j) need_replication={i}
argmax/only (i)->() need_replication={i}
sort/two_keys (i j),(i j),(i j)->(i j),(i j),(i j) need_replication={j}
scatter/rows_promise (k j),(i -),(i j)->(k j) need_replication={i}
scatter-add/rows_promise (k j),(i -),(i j)->(k j) reduction={i}
scatter-max/rows_promise (k j),(i -),(i j)->(k j) reduction={i} combine=max
scatter/batched (i l k),(i j -),(i j k)->(i l k) need_replication={j}
select_and_gather_add/pool (i j),(i j)->(i j) major={j=18}
select_and_scatter/pool (i j),(i j),()->(i j) major={j=12}
select_and_gather_add/overlap (i j),(i k)->(i -) need_replication={j, k}
select_and_scatter/overlap (i j),(i k),()->(i -) need_replication={j, k}
select_and_gather_add/rest (i j),(i j)->(i j) major={j=12}
select_and_scatter/rest (i j),(i j),()->(i j) major={j=8}
reduce_window/pair (i -),(i -),(),()->(i -),(i -)
conv_general_dilated/nchw (i k l n),(j k m -)->(i j l n) reduction={k} need_replication={m} permutation={l} halo={l=1:1}
conv_general_dilated/mixed (k l n i),(m j - k)->(l i n j) reduction={k} need_replication={m} permutation={l} halo={l=1:1}
conv_general_dilated/dilated (i k l n),(j k m o)->(i j l -) reduction={k} need_replication={m, n, o} permutation={l} halo={l=2:2}
conv_general_dilated/batch_groups (i j k m),(i j l -)->(- i k m) reduction={j} need_replication={l} permutation={k} major={i=4} halo={k=1:1}
conv_general_dilated/depthwise (i j k m),(j - l -)->(i j k m) need_replication={l} permutation={k} major={j=4} halo={k=1:1}
cholesky_update (- -),(-)->(- -)
eig (i - -)->(i -),(i - -),(i - -)
geqrf (i - -)->(i - -),(i -)
geqp3 (i - -),(i -)->(i - -),(i -),(i -)
hessenberg (i - -)->(i - -),(i -)
householder_product (i - -),(i -)->(i - -)
schur (i - -)->(i - -),(i - -)
tridiagonal (i - -)->(i - -),(i -),(i -),(i -)
symmetric_product (i - -),(i - -)->(i - -)
lu_pivots_to_permutation (i -)->(i -)
tridiagonal_solve (i -),(i -),(i -),(i - j)->(i - j)
ormqr/left (i - -),(i -),(i - j)->(i - j)
ormqr/right (i - -),(i -),(i j -)->(i j -)
fft/two (i - -)->(i - -)
fft/real (i -)->(i -)
fft/back (i -)->(i -)
shard_map (- -)->(- -)
custom_partitioning (i j),(j k)->(i k) reduction={j}
with_memory_space_constraint (i j)->(i j)
one_minus_square (i j)->(i j)
acospi (i j)->(i j)
asinpi (i j)->(i j)
atanpi (i j)->(i j)
cospi (i j)->(i j)
exp2m1 (i j)->(i j)
log2p1 (i j)->(i j)
sinpi (i j)->(i j)
tanpi (i j)->(i j)
atan2pi (i j),(i j)->(i j)
fma (i j),(i j),(i j)->(i j)
fmuladd (i j),(i j),(i j)->(i j)
random_gamma_grad (i j),(i j)->(i j)
random_poisson (i),(i j)->(i j)
raw_bits (i)->(i j k),(i j k)
"""  # noqa: E501

LINES = dict(line.split(" ", 1) for line in GOLDEN.strip().splitlines())


def test_golden_is_complete() -> None:
    assert CASES.keys() <= LINES.keys()
    assert LINES.keys() - CASES.keys() <= OTHERS


@pytest.mark.parametrize("name", list(CASES))
def test_golden(name: str) -> None:
    app = CASES[name].apply(Draw(cycling(4, 6, 8, 10)))
    text = format_rule(app.rule(), app.operand_shapes, app.result_shapes)
    assert text == LINES[name]
    assert parse_rule(text, app.operand_shapes, app.result_shapes) == _by_label(app.rule())


def _by_label(rule: Rule) -> Rule:
    """A rule in the order in which its factors first occur in the text."""
    return tuple(sorted(rule, key=lambda f: min([(0, *p) for p in f.operands] + [(1, *p) for p in f.results])))


class _Aval:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


def _text(name: str, params: dict[str, object], operands: list[_Aval], results: list[_Aval]) -> str:
    rule = rule_for(name, params, operands, results)
    assert rule is not None
    return format_rule(rule, [a.shape for a in operands], [a.shape for a in results])


def test_without_an_application() -> None:
    x = _Aval(4, 6)
    for name in ("sharding_constraint", "reshard", "layout_constraint"):
        assert _text(name, {}, [x], [x]) == "(i j)->(i j)"
    assert _text("threefry2x32", {}, [x] * 4, [x] * 2) == "(i j),(i j),(i j),(i j)->(i j),(i j)"
    assert _text("expand_dims", {"dimensions": (1,)}, [x], [_Aval(4, 1, 6)]) == "(i j)->(i - j)"
    assert _text("iota_2x32_shape", {"shape": (4, 6)}, [], [x, x]) == "->(i j),(i j)"
    assert _text("add", {}, [x, _Aval(4, 1)], [x]) == "(i j),(i -)->(i j)"


def test_unknown_primitive() -> None:
    assert rule_for("no_such_primitive", {}, [_Aval(4)], [_Aval(4)]) is None


def test_registered_text_and_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    register_rule("my_dot", "(i k),(k j)->(i j) reduction={k}")
    register_rule("my_sum", lambda params, operands, results: "(i k)->(i) reduction={k} combine=max")
    assert _text("my_dot", {}, [_Aval(4, 6), _Aval(6, 8)], [_Aval(4, 8)]) == "(i j),(j k)->(i k) reduction={j}"
    assert _text("my_sum", {}, [_Aval(4, 6)], [_Aval(4)]) == "(i j)->(i) reduction={j} combine=max"
    with pytest.raises(RuleError):
        rule_for("my_dot", {}, [_Aval(4, 6), _Aval(8, 8)], [_Aval(4, 8)])
    register_rule("twice", "(i i)->(i i)")
    with pytest.raises(RuleError):
        rule_for("twice", {}, [_Aval(4, 4)], [_Aval(4, 4)])


def test_size_zero_takes_no_factor() -> None:
    assert rule_for("add", {}, [_Aval(0, 4)] * 2, [_Aval(0, 4)]) == rule_for(
        "add", {}, [_Aval(1, 4)] * 2, [_Aval(1, 4)]
    )
