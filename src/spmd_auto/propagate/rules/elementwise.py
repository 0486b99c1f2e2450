"""Operations that act on each element by itself, and those that hand their operands through."""

from __future__ import annotations

from spmd_auto.propagate.factors import Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike, of_names


def elementwise(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Each dimension of the result belongs to that dimension of every operand.

    Scalar operands (a predicate, bounds) and dimensions of size 1 beside larger ones are broadcast: no factor.
    """
    build = RuleBuilder(operands, results)
    for d, size in enumerate(results[0]):
        build.add(
            [(k, d) for k, shape in enumerate(operands) if len(shape) == len(results[0]) and shape[d] == size],
            [(k, d) for k in range(len(results))],
        )
    return build.build()


def handed_through(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """The k-th result is the k-th operand; different operands have nothing in common."""
    build = RuleBuilder(operands, results)
    for k, shape in enumerate(results):
        for d in range(len(shape)):
            build.add([(k, d)], [(k, d)])
    return build.build()


def bitcast(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Between types of different widths a last dimension comes or goes: it is needed and born whole."""
    build = RuleBuilder(operands, results)
    for d in range(min(len(operands[0]), len(results[0]))):
        build.add([(0, d)], [(0, d)])
    return build.build()


RULES: dict[str, RuleLike] = {
    **of_names(elementwise, "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj cos"),
    **of_names(elementwise, "cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma"),
    **of_names(elementwise, "log log1p log2 logistic neg not one_minus_square population_count real round rsqrt"),
    **of_names(
        elementwise, "acospi asinpi atan2pi atanpi cospi exp2m1 fma fmuladd log2p1 sinpi tanpi random_gamma_grad"
    ),
    **of_names(elementwise, "random_gamma_grad sign sin sinh sqrt square tan tanh"),
    **of_names(elementwise, "add add_any and atan2 complex div eq eq_to ge gt igamma igamma_grad_a igammac le"),
    **of_names(elementwise, "le_to lt lt_to max min mul mulhi ne nextafter or polygamma pow rem shift_left"),
    **of_names(elementwise, "shift_right_arithmetic shift_right_logical sub xor zeta"),
    **of_names(elementwise, "clamp polynomial regularized_incomplete_beta select_n convert_element_type copy"),
    **of_names(elementwise, "name reduce_precision stop_gradient tie layout_constraint reshard"),
    **of_names(elementwise, "sharding_constraint shard_alike xla_metadata_value"),
    "with_memory_space_constraint": elementwise,
    **of_names(handed_through, "device_put optimization_barrier"),
    "bitcast_convert_type": bitcast,
}
