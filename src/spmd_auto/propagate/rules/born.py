"""Values that come from nowhere: iota and random numbers.

A factor that stands on results only is *born split*: each device makes its own piece and none is ever whole.  The
piece depends on its position, not only on its shape, so the local operation is not the same operation on a smaller
shape (an iota needs an offset, threefry a shifted counter).  XLA partitions both so; the numbers don't depend on the
sharding, as `jax_threefry_partitionable` promises.  Other generators (rbg) give the same numbers too, but XLA makes
all of them on every device.
"""

from __future__ import annotations

from spmd_auto.propagate.factors import Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike, leading, of_names
from spmd_auto.propagate.rules.elementwise import elementwise


def born(params: Params, operands: Shapes, results: Shapes) -> Rule:
    build = RuleBuilder(operands, results)
    for d in range(len(results[0])):
        build.add([], [(k, d) for k in range(len(results))])
    return build.build()


def broadcast_to(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """The operand's dimensions are the last ones of the result; copies along the others are born split."""
    new = len(results[0]) - len(operands[0])
    build = RuleBuilder(operands, results)
    for d, size in enumerate(results[0]):
        filled = d >= new and operands[0][d - new] == size
        build.add([(0, d - new)] if filled else [], [(0, d)])
    return build.build()


def per_key(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """What is made from keys, of one or several results: the dimensions of the keys come first, then its own."""
    build = RuleBuilder(operands, results)
    for d in range(len(results[0])):
        made = [(k, d) for k in range(len(results))]
        build.add([(0, d)] if d < len(operands[0]) else [], made)
    return build.build()


def random_gamma(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Keys and shape parameters; the leading dimensions of both agree, and each key is split over the others.

    A device's piece of those others needs its place among them, as with `random_split`.
    """
    build = RuleBuilder(operands, results)
    for d in range(len(results[0])):
        build.add([(0, d), (1, d)] if d < len(operands[0]) else [(1, d)], [(0, d)])
    return build.build()


def unpredictable(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """XLA's own generators carry a state through the whole result."""
    return ()


RULES: dict[str, RuleLike] = {
    **of_names(born, "iota iota_2x32_shape empty empty2 platform_index"),
    "broadcast_to": broadcast_to,
    **of_names(per_key, "random_bits random_split raw_bits"),
    **of_names(elementwise, "random_clone random_fold_in threefry2x32 threefry4x32 philox2x32 philox4x32"),
    "random_gamma": random_gamma,
    "random_poisson": random_gamma,
    "random_seed": leading(lambda params, operands: len(operands[0])),
    "random_unwrap": leading(lambda params, operands: len(operands[0])),
    "random_wrap": leading(lambda params, operands: len(operands[0]) - len(params["impl"].key_shape)),
    **of_names(unpredictable, "rng_bit_generator rng_uniform"),
}
