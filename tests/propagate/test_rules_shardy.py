"""Our rules against Shardy's own, where the compiler has one.  Private API: skipped where it is absent."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import pytest

from spmd_auto import _compat
from spmd_auto.propagate.factors import Factor, Kind, Rule

from .applications import CASES, Application, Draw, cycling
from .oracle import disagreement, make_mesh

passmanager = pytest.importorskip("jaxlib.mlir.passmanager")
ir = pytest.importorskip("jaxlib.mlir.ir")

# Their operation stands among others that prepare indices, masks or values of an edge.
_OPS = {
    "gather": "gather",
    **dict.fromkeys(["scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"], "scatter"),
    **dict.fromkeys(["clamp"], "clamp"),
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum"], "reduce_window"),
    "cholesky": "custom_call",
}
# No operation of the program, but of a device; and one that only a mesh in scope makes.
_NOT_ONE = {"shard_map", "custom_partitioning", "reshard"}

_BROADCAST = "the lowering broadcasts the scalars first"
_BLOCKS = "each window reads a block of its own; Shardy always speaks of a halo"
_MINOR = "a minor part of a dimension; our factors are major parts"
_HALO = "a sum over pieces that need a halo"

_COLUMNS = "a solve's columns are independent of each other; to Shardy it is a foreign call"
_DIFFERENCES = "updates that are subtracted add up like others; Shardy sees no addition"
_COMPUTATION = "results of a user's own function can't be added up"

# Where we split what Shardy does not; the oracle says that we may.
BOLDER = {
    "clamp/scalar": _BROADCAST,
    **{f"select_and_scatter/{k}": _BLOCKS for k in ["pool", "rest"]},
    "concatenate": "blocks of a join change places; Shardy needs it whole",
    "scatter-sub/rows_drop": _DIFFERENCES,
    **{f"triangular_solve/{side}": _COLUMNS for side in ["left", "right"]},
    **{f"ormqr/{side}": _COLUMNS for side in ["left", "right"]},
}
# Where Shardy splits what we do not (some of it only in jax 0.10).
SHYER = {
    "reduce": _COMPUTATION,
    "reduce/pair": _COMPUTATION,
    "clamp/scalar": _BROADCAST,
    **{f"reshape/{k}": _MINOR for k in ["split", "merge", "flat", "gcd", "coprime", "uneven", "late"]},
    "pad": "it takes padding by (1, -1) for none, for the size stays",
    **{
        f"dynamic_update_slice/{k}": "XLA drops an update whose start is out of bounds"
        for k in ["row", "window", "cell"]
    },
    **{f"conv_general_dilated/{k}": _HALO for k in ["valid_dk", "groups_dk"]},
    **{f"conv_general_dilated/{k}": _MINOR for k in ["patches", "groups", "groups_dx", "batch_groups"]},
}


def shardy_rule(app: Application, op: str | None) -> str | None:
    """The factor rule of the one StableHLO operation (of a name) that the application lowers to, with its operands."""
    module = jax.jit(lambda *args: _compat.bind(app.eqn, list(args))).lower(*app.args).compiler_ir("stablehlo")
    found: list[str] = []

    def walk(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for inner in block:
                    if "sdy.sharding_rule" in inner.operation.attributes:  # what its own regions hold is for scalars
                        if _fits(inner.operation, app, op):
                            found.append(str(inner.operation.attributes["sdy.sharding_rule"]))
                        elif op is None:
                            found.extend(["another"] * 2)
                    else:
                        walk(inner.operation)

    with module.context:
        passes = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        passmanager.PassManager.parse(passes).run(module.operation)
    walk(module.operation)
    return found[0] if len(found) == 1 else None


def _fits(operation: Any, app: Application, op: str | None) -> bool:
    """Whether an operation has the application's operands and results, and the name."""
    if operation.name != f"stablehlo.{op}" if op else not operation.name.startswith("stablehlo."):
        return False
    shapes = [[tuple(ir.ShapedType(v.type).shape) for v in vs] for vs in (operation.operands, operation.results)]
    return shapes == [app.operand_shapes, app.result_shapes] or op in ("clamp", "gather", "scatter", "reduce_window")


Said = set[tuple[frozenset[tuple[str, int, int]], str]]


def read(text: str) -> Said:
    """Places and kinds of the factors that can be split.  A factor counts where it is the major part."""
    body = re.search(r"<(.*)>", text).group(1)  # type: ignore[union-attr]
    sizes = dict(re.findall(r"(\w+)=(\d+)", body))
    named = {
        word: set(re.findall(r"\w+", found.group(1)))
        for word in ("reduction", "need_replication", "permutation", "blocked_propagation")
        for found in [re.search(word + r"=\{([^}]*)\}", body)]
        if found
    }
    places: dict[str, set[tuple[str, int, int]]] = {}
    for side, part in zip(("operands", "results"), body.split("{")[0].split("->"), strict=True):
        for position, group in enumerate(re.findall(r"\[([^\]]*)\]", part)):
            for dim, label in enumerate(filter(None, group.split(", "))):
                major = next((f for f in re.findall(r"[a-z](?:_\d+)?", label) if sizes[f] != "1"), None)
                if major:
                    places.setdefault(major, set()).add((side, position, dim))
    whole = {f for word in ("need_replication", "blocked_propagation") for f in named.get(word, ())}
    kind = {
        f: "reduce" if f in named.get("reduction", ()) else "exchange" if f in named.get("permutation", ()) else "pass"
        for f in places
    }
    if ", custom>" in text:  # a foreign call: what stands on one value only is not split there, but not spoken of
        whole |= {f for f, where in places.items() if len(where) == 1}
    return {(frozenset(where), kind[f]) for f, where in places.items() if f not in whole}


def ours(rule: Rule) -> Said:
    return {
        (
            frozenset([("operands", *p) for p in f.operands] + [("results", *p) for p in f.results]),
            {Kind.REDUCE: "reduce", Kind.PASS: "pass"}.get(f.kind, "exchange"),
        )
        for f in rule
        if f.splittable
    }


COMPARABLE = [name for name, case in CASES.items() if case.primitive not in _NOT_ONE]


@functools.cache
def _both(name: str) -> tuple[Application, str] | None:
    """An application and Shardy's rule for it, if it has one."""
    app = CASES[name].apply(Draw(cycling(4, 6, 8, 10)))
    text = shardy_rule(app, _OPS.get(CASES[name].primitive))
    return None if text is None else (app, text)


@pytest.mark.parametrize("name", COMPARABLE)
def test_agrees_with_shardy(name: str) -> None:
    both = _both(name)
    if both is None:
        assert name not in (*BOLDER, *SHYER)
        pytest.skip("lowers to no operation or to several")
    app, text = both
    mine, theirs = ours(app.rule()), read(text)
    # Shardy's "permutation" is any exchange between devices, from none at all to a gather: where it says so, we may
    # pass or exchange, or need the dimension whole
    places = {where for where, _ in theirs}
    exchanged = {where for where, kind in theirs if kind == "exchange"}
    theirs = {said for said in theirs if said[1] != "exchange"}
    mine = {said for said in mine if not (said[0] in exchanged and said[1] == "pass")}
    mine = {said for said in mine if not (said[0] in places and said[1] == "exchange")}
    assert (name in BOLDER) == (not mine <= theirs), (text, mine - theirs)
    assert name in SHYER or theirs <= mine, (text, theirs - mine)


def test_few_classes_of_differences() -> None:
    assert len({*BOLDER.values(), *SHYER.values()}) <= 10


# What is left of SHYER speaks of minor parts, which are not wrong, but can't be said with one factor per dimension.
WRONG = [name for name, why in SHYER.items() if why not in (_MINOR, _BROADCAST)]


@pytest.mark.parametrize("name", WRONG)
def test_where_shardy_is_bolder_pieces_are_not_enough(name: str) -> None:
    """Executed by hand, each split that Shardy allows and we do not gives other numbers: it leaves a step out."""
    both = _both(name)
    if both is None:
        pytest.skip("lowers to no operation or to several")
    app, text = both
    for where, kind in read(text) - ours(app.rule()):
        if kind == "exchange":
            continue
        operands = tuple(sorted((k, d) for side, k, d in where if side == "operands"))
        results = tuple(sorted((k, d) for side, k, d in where if side == "results"))
        size = math.gcd(*(app.operand_shapes[k][d] for k, d in operands))
        factor = Factor(size, operands, results, Kind.REDUCE if kind == "reduce" else Kind.PASS)
        assert not _gives_the_same(app, factor), factor


def _gives_the_same(app: Application, factor: Factor) -> bool:
    try:
        return disagreement(app, (factor,), [{0: ("a",)}], make_mesh((2,))) is None
    except (TypeError, ValueError, AssertionError):  # the pieces do not even have the right shapes
        return False
