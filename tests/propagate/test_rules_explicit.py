"""Our rules against JAX's explicit sharding: where it says how results are split, our factor says the same.

JAX answers from the types alone (`eval_shape` under an abstract mesh with explicit axes).  It answers for operations
whose results' split follows from the operands' and refuses the others: a refusal says nothing about a rule.
"""

from __future__ import annotations

import collections

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from spmd_auto import _compat
from spmd_auto.propagate.factors import Factor, Kind

from .applications import CASES, Application, Draw, cycling

MESH = AbstractMesh((2,), ("a",), axis_types=(AxisType.Explicit,))
# These take a mesh or a sharding of their own.
_OWN = {"sharding_constraint", "reshard", "shard_map", "custom_partitioning", "device_put", "layout_constraint"}

# JAX takes the first dimension of a convolution's operand for its batch, wherever the layout has it (the oracle runs
# our answer).
_LAYOUT = "a convolution whose batch is not its first dimension"
DIFFERENT = {
    f"conv_general_dilated/{k}": _LAYOUT for k in ["same_dk", "one_dk", "patches_dk", "valid_dk", "skip_dk", "mixed"]
}


def _spec(places: tuple[tuple[int, int], ...], position: int, rank: int) -> PartitionSpec:
    return PartitionSpec(*["a" if (position, d) in places else None for d in range(rank)])


def theirs(app: Application, factor: Factor) -> list[tuple[int, int]] | None:
    """Where results are split if all operands of a factor are; None where JAX refuses to say."""
    with jax.sharding.use_abstract_mesh(MESH):
        args = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, _spec(factor.operands, k, x.ndim)))
            for k, x in enumerate(app.args)
        ]
        try:
            outs = jax.eval_shape(lambda *args: _compat.bind(app.eqn, list(args)), *args)
        except Exception:  # noqa: BLE001 - refusals have many types
            return None
    found = []
    for k, out in enumerate(outs):
        if out.sharding is None:
            return None
        found += [(k, d) for d, entry in enumerate(out.sharding.spec) if entry == "a" or entry == ("a",)]
    return found


def test_agrees_with_explicit_sharding() -> None:
    answers: collections.Counter[str] = collections.Counter()
    different: dict[str, str] = {}
    for name, case in CASES.items():
        if case.primitive in _OWN:
            continue
        app = case.apply(Draw(cycling(4, 6, 8, 10)))
        for factor in app.rule():
            if factor.kind not in (Kind.PASS, Kind.REDUCE) or not factor.operands:
                continue
            found = theirs(app, factor)
            if found is None:
                answers["refused"] += 1
            elif found == sorted(factor.results):
                answers["same"] += 1
            else:
                different[name] = f"{factor}: JAX splits results {found}"
    assert different.keys() == DIFFERENT.keys(), different
    assert answers["same"] >= 430, answers
