"""Operations that move elements without computing: reshapes, transposes, slices, joins."""

from __future__ import annotations

import math

from spmd_auto.propagate.factors import Kind, Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleFunction, RuleLike


def broadcast_in_dim(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """A dimension of the result that no operand dimension fills is born split: each device makes its own copies."""
    source = {result: operand for operand, result in enumerate(params["broadcast_dimensions"])}
    build = RuleBuilder(operands, results)
    for d, size in enumerate(results[0]):
        filled = d in source and operands[0][source[d]] == size
        build.add([(0, source[d])] if filled else [], [(0, d)])
    return build.build()


def transpose(params: Params, operands: Shapes, results: Shapes) -> Rule:
    build = RuleBuilder(operands, results)
    for d, source in enumerate(params["permutation"]):
        build.add([(0, source)], [(0, d)])
    return build.build()


def reshape(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Both shapes are cut where their running products agree; each piece has one factor, on its first dimensions.

    That factor is the greatest common divisor of the two first dimensions, which is their major part:
    (32,) -> (8, 4) has one of 8, (6, 4) -> (8, 3) one of 2.  The minor parts can't be said and stay whole.
    """
    build = RuleBuilder(operands, results)
    if params.get("dimensions") is not None or math.prod(operands[0]) == 0:
        return ()
    left = [(d, size) for d, size in enumerate(operands[0]) if size != 1]
    right = [(d, size) for d, size in enumerate(results[0]) if size != 1]
    while left and right:
        (a, width), (b, height) = left.pop(0), right.pop(0)
        build.add([(0, a)], [(0, b)], size=math.gcd(width, height))
        while width != height:
            if width < height:
                width *= left.pop(0)[1]
            else:
                height *= right.pop(0)[1]
    return build.build()


def drop_dimensions(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """squeeze, and unstack: the named dimensions go, the others stay in order."""
    gone = params["dimensions"] if "dimensions" in params else (params["axis"],)
    rank = len(operands[0])
    kept = [d for d in range(rank) if d not in {g % rank for g in gone}]
    build = RuleBuilder(operands, results)
    for d in range(rank):
        if d in kept:
            build.add([(0, d)], [(k, kept.index(d)) for k in range(len(results))])
        else:
            build.needed_whole((0, d))
    return build.build()


def add_dimensions(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """expand_dims, and stack: the named dimensions come, the others stay in order."""
    new = params["dimensions"] if "dimensions" in params else (params["axis"],)
    rank = len(results[0])
    kept = [d for d in range(rank) if d not in {n % rank for n in new}]
    build = RuleBuilder(operands, results)
    for source, d in enumerate(kept):
        build.add([(k, source) for k in range(len(operands))], [(0, d)])
    return build.build()


def slice_(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """A dimension taken whole passes; of one that is cut (with stride 1) blocks change places."""
    build = RuleBuilder(operands, results)
    strides = params["strides"] or (1,) * len(results[0])
    for d, size in enumerate(results[0]):
        if operands[0][d] == size:
            build.add([(0, d)], [(0, d)])
        elif strides[d] == 1:
            build.add([(0, d)], [(0, d)], kind=Kind.MOVE, size=math.gcd(operands[0][d], size))
    return build.build()


def joins(key: str) -> RuleFunction:
    """concatenate and split: along the dimension named by a parameter blocks change places, others pass."""

    def rule(params: Params, operands: Shapes, results: Shapes) -> Rule:
        build = RuleBuilder(operands, results)
        for d in range(len(results[0])):
            places = [(k, d) for k in range(len(operands))], [(k, d) for k in range(len(results))]
            if d == params[key]:
                size = math.gcd(*(shape[d] for shape in (*operands, *results)))
                build.add(*places, kind=Kind.MOVE, size=size)
            else:
                build.add(*places)
        return build.build()

    return rule


def rev(params: Params, operands: Shapes, results: Shapes) -> Rule:
    build = RuleBuilder(operands, results)
    for d in range(len(results[0])):
        build.add([(0, d)], [(0, d)], kind=Kind.MOVE if d in params["dimensions"] else Kind.PASS)
    return build.build()


def dynamic_slice(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """A dimension taken whole passes; one that is cut is needed and born whole: who has the piece is not known."""
    build = RuleBuilder(operands, results)
    for d, size in enumerate(results[0]):
        if operands[0][d] == size:
            build.add([(0, d)], [(0, d)])
    return build.build()


def pad(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Dimensions without any padding pass ((1, -1) keeps the size and still shifts); of others blocks change places."""
    build = RuleBuilder(operands, results)
    for d, (low, high, interior) in enumerate(params["padding_config"]):
        if (low, high, interior) == (0, 0, 0):
            build.add([(0, d)], [(0, d)])
        elif not interior and operands[0][d] + min(0, low) + min(0, high) > 0:
            build.add([(0, d)], [(0, d)], kind=Kind.MOVE, size=math.gcd(operands[0][d], results[0][d]))
    return build.build()


def dynamic_update_slice(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """Operand, update, start indices: where the update covers the dimension, start is 0 and all three pass.

    Elsewhere a window may cross a border between devices: whole.  A window of one element could be written by the
    device that holds the place, and XLA does so; but if the start is out of bounds it then drops the update instead
    of clamping the start, on both supported releases.
    """
    build = RuleBuilder(operands, results)
    for d, size in enumerate(results[0]):
        if operands[1][d] == size:
            build.add([(0, d), (1, d)], [(0, d)])
        else:
            build.needed_whole((1, d))
            build.add([(0, d)], [(0, d)], kind=Kind.REPLICATE)
    return build.build()


def tile(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """The copies are the major part of a tiled dimension and are born split; what is copied is needed whole."""
    build = RuleBuilder(operands, results)
    for d, reps in enumerate(params["reps"]):
        if reps == 1:
            build.add([(0, d)], [(0, d)])
        else:
            build.add([], [(0, d)], size=reps)
    return build.build()


RULES: dict[str, RuleLike] = {
    "broadcast_in_dim": broadcast_in_dim,
    "transpose": transpose,
    "reshape": reshape,
    "squeeze": drop_dimensions,
    "unstack": drop_dimensions,
    "expand_dims": add_dimensions,
    "stack": add_dimensions,
    "slice": slice_,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "pad": pad,
    "tile": tile,
    "concatenate": joins("dimension"),
    "split": joins("axis"),
    "rev": rev,
}
