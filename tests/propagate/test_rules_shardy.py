"""Our rules against Shardy's own, where the compiler has one.  Private API: skipped where it is absent."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

from spmd_auto import _compat
from spmd_auto.propagate.factors import Kind, Rule

from .applications import CASES, Application, Draw, cycling

passmanager = pytest.importorskip("jaxlib.mlir.passmanager")

_SAME = "dot_general gather reshape transpose broadcast_in_dim concatenate pad slice sort dynamic_slice"
_SAME += " dynamic_update_slice clamp add tanh fft reduce_window"
_OPS = {
    **{name: name for name in _SAME.split()},
    **dict.fromkeys(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"], "reduce"),
    **dict.fromkeys(["scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"], "scatter"),
    "rev": "reverse",
    "select_n": "select",
    "squeeze": "reshape",
    "bitcast_convert_type": "bitcast_convert",
    "conv_general_dilated": "convolution",
}

_BROADCAST = "the lowering broadcasts the scalars first"
_BLOCKS = "each window reads a block of its own; Shardy always speaks of a halo"
_MINOR = "a minor part of a dimension; our factors are major parts"
_HALO = "a sum over pieces that need a halo"

# Where we split what Shardy does not; the oracle says that we may.
BOLDER = {
    "clamp/scalar": _BROADCAST,
    "reduce_window": _BLOCKS,
    **{f"conv_general_dilated/{k}": _BLOCKS for k in ["one", "one_dx", "patches", "patches_dx", "skip", "skip_dx"]},
}
# Where Shardy splits what we do not (some of it only in jax 0.10).
SHYER = {
    "clamp/scalar": _BROADCAST,
    **{f"reshape/{k}": _MINOR for k in ["split", "merge", "flat", "gcd", "coprime", "uneven", "late"]},
    "pad": "it takes padding by (1, -1) for none, for the size stays",
    **{
        f"dynamic_update_slice/{k}": "XLA drops an update whose start is out of bounds"
        for k in ["row", "window", "cell"]
    },
    **{f"conv_general_dilated/{k}": _HALO for k in ["same_dk", "valid_dk", "groups_dk"]},
    **{f"conv_general_dilated/{k}": _MINOR for k in ["patches", "groups", "groups_dx"]},
}


def shardy_rule(app: Application, op: str) -> str | None:
    """The factor rule of the one StableHLO operation of a name that the application lowers to."""
    module = jax.jit(lambda *args: _compat.bind(app.eqn, list(args))).lower(*app.args).compiler_ir("stablehlo")
    found: list[str] = []

    def walk(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for inner in block:
                    if inner.operation.name == f"stablehlo.{op}":
                        found.append(str(inner.operation.attributes["sdy.sharding_rule"]))
                    walk(inner.operation)

    with module.context:
        passes = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        passmanager.PassManager.parse(passes).run(module.operation)
    walk(module.operation)
    return found[0] if len(found) == 1 else None


Said = set[tuple[frozenset[tuple[str, int, int]], str]]


def read(text: str) -> Said:
    """Places and kinds of the factors that can be split.  A factor counts where it is the major part."""
    body = re.search(r"<(.*)>", text).group(1)  # type: ignore[union-attr]
    sizes = dict(re.findall(r"(\w+)=(\d+)", body))
    named = {
        word: set(re.findall(r"\w+", found.group(1)))
        for word in ("reduction", "need_replication", "permutation")
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
    whole = named.get("need_replication", set()) | named.get("permutation", set())
    kind = {f: "reduce" if f in named.get("reduction", set()) else "pass" for f in places}
    return {(frozenset(where), kind[f]) for f, where in places.items() if f not in whole}


def ours(rule: Rule) -> Said:
    return {
        (
            frozenset([("operands", *p) for p in f.operands] + [("results", *p) for p in f.results]),
            "reduce" if f.kind is Kind.REDUCE else "pass",
        )
        for f in rule
        if f.splittable
    }


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.primitive in _OPS])
def test_agrees_with_shardy(name: str) -> None:
    app = CASES[name].apply(Draw(cycling(4, 6, 8, 10)))
    text = shardy_rule(app, _OPS[CASES[name].primitive])
    if text is None:
        pytest.skip("lowers to several operations")
    mine, theirs = ours(app.rule()), read(text)
    assert name in BOLDER or mine <= theirs, (text, mine - theirs)
    assert name in SHYER or theirs <= mine, (text, theirs - mine)
