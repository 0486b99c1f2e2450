"""Functions that bring their own partitioning: `shard_map` and `custom_partitioning`.

Neither is looked into.  What they say about their operands and results is read as a rule.
"""

from __future__ import annotations

from typing import Any

from spmd_auto.propagate.factors import Kind, Rule, Shapes
from spmd_auto.propagate.rules.build import Params, RuleBuilder, RuleLike


def shard_map(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """One factor per mesh axis of the user's: it stands on the dimensions that the specs split over that axis.

    The factor has as many elements as the axis has devices and is the *major* part of its dimensions.  An axis that
    splits operands only (they are combined inside), or the minor part of a dimension, has no factor: such operands
    count as needed whole, which is an upper bound.  Lowering puts no constraint here: the specs are constraints.
    """
    sizes = dict(params["mesh"].shape)
    build = RuleBuilder(operands, results)
    places: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for side, specs in enumerate((params["in_specs"], params["out_specs"])):
        for position, spec in enumerate(specs):
            for dim, entry in enumerate(spec):
                axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
                if axes:
                    places.setdefault(axes[0], ([], []))[side].append((position, dim))
    for axis, (ops, res) in places.items():
        if ops and res:
            build.add(ops, res, size=sizes[axis])
    return build.build()


def custom_partitioning(params: Params, operands: Shapes, results: Shapes) -> Rule:
    """The user's own Shardy rule, if one was given; without it everything is needed whole.

    Of a dimension with several labels the first is the major part.
    """
    rule: Any = params.get("sharding_rule")
    if rule is None or isinstance(rule, str):
        return ()
    kinds = {
        label: kind
        for key, kind in (("reduction_factors", Kind.REDUCE), ("need_replication_factors", Kind.REPLICATE))
        for label in getattr(rule, key, ()) or ()
    }
    kinds |= dict.fromkeys(getattr(rule, "permutation_factors", ()) or (), Kind.REPLICATE)
    sizes: dict[str, int] = dict(rule.factor_sizes)
    places: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    minor: set[str] = set()
    for side, (mappings, shapes) in enumerate(((rule.operand_mappings, operands), (rule.result_mappings, results))):
        for position, (mapping, shape) in enumerate(zip(mappings, shapes, strict=True)):
            if any(isinstance(label, str) and label.startswith("…") for label in mapping):
                return ()  # leading dimensions of any number: which ones belong together can't be read off
            for dim, (label, size) in enumerate(zip(mapping, shape, strict=True)):
                if isinstance(label, str):
                    sizes.setdefault(label, size)
                else:
                    minor.update(label[1:])
                    label = label[0]
                places.setdefault(label, ([], []))[side].append((position, dim))
    build = RuleBuilder(operands, results)
    for label, (ops, res) in places.items():
        kind = Kind.REPLICATE if label in minor else kinds.get(label, Kind.PASS)
        if kind is Kind.REDUCE and res:
            kind = Kind.REPLICATE
        build.add(ops, res, kind=kind, size=sizes[label])
    return build.build()


RULES: dict[str, RuleLike] = {"shard_map": shard_map, "custom_partitioning": custom_partitioning}
