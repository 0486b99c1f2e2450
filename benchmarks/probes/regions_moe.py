"""Conflicts decided per region: a one-hot MoE block, forward and backward, one mesh axis for batch and experts.

Batch and experts contend on every value that has both.  One order for all values is either "experts first"
or "batch first"; neither is expert parallelism.  A flip of the regions of routing values is.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.probes.common import CPU, GPU, TPU, header, logical, row
from spmd_auto.plan import make_plan, price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.search import strategies
from spmd_auto.trace import trace

GROUPS, TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 16, 64, 128, 512, 8, 16


def moe(params, x):
    x = x @ params["in"]
    probs = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["router"]))
    one_hot = jax.nn.one_hot(jnp.argmax(probs, -1), EXPERTS)
    gate = (probs * one_hot).sum(-1)
    position = (jnp.cumsum(one_hot, 1) * one_hot - 1).astype(jnp.int32)
    dispatch = jax.nn.one_hot(position, CAPACITY) * one_hot[..., None]
    combine = dispatch * gate[..., None, None]
    h = jax.nn.relu(jnp.einsum("egcm,emf->egcf", jnp.einsum("gsec,gsm->egcm", dispatch, x), params["wi"]))
    return x + jnp.einsum("gsec,egcm->gsm", combine, jnp.einsum("egcf,efm->egcm", h, params["wo"]))


def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((moe(p, batch["x"]) - batch["y"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def main() -> None:
    header(GPU, CPU, TPU)

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    params = {"in": shape(WIDTH, WIDTH), "router": shape(WIDTH, EXPERTS), "wi": shape(EXPERTS, WIDTH, HIDDEN)}
    params["wo"] = shape(EXPERTS, HIDDEN, WIDTH)
    data = {"x": shape(GROUPS, TOKENS, WIDTH), "y": shape(GROUPS, TOKENS, WIDTH)}
    program = trace(step, params, data)
    for target in (GPU, CPU, TPU):
        mesh = logical(target, d=8)
        analysis = analyse_for(program, mesh, {})
        batch, experts = analysis.group("batch"), analysis.group("experts")
        pair = tuple(sorted((batch, experts)))
        contested = [r for r, p in enumerate(analysis.regions.pair) if p == pair]
        if target == GPU:
            print(f"regions {analysis.regions.count}, of them contested by batch and experts {len(contested)}:")
            for r in contested:
                beside = sorted(analysis.names[g] for g in analysis.regions.groups_beside[r] if g in analysis.names)
                print(f"    region {r}: values of ({', '.join(beside)})")
        first = strategies.build(analysis, mesh, [("experts", "d"), ("batch", "d")])
        sequence = analysis.group("sequence")
        routing = frozenset((r, 0) for r in contested if sequence in analysis.regions.groups_beside[r])
        strategy = {
            "experts first everywhere": first,
            "batch first everywhere": dataclasses.replace(first, order=first.order[::-1]),
            "experts first, flipped on routing values": dataclasses.replace(first, flips=routing),
        }
        for label, assignment in strategy.items():
            plan = price_strategy(program, mesh, assignment, analysis=analysis)
            row(label, plan, target)
        found = make_plan(program, mesh)
        flipped = sorted(region for region, _ in found.priced.assignment.flips)
        row(f"found by search: {', '.join(found.axis_splits())}; flipped {flipped}", found, target)


if __name__ == "__main__":
    main()
