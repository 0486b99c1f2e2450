"""Replay keeps name stacks, source lines and contexts: a linen step lowered by the package against plain `jax.jit`."""

from __future__ import annotations

import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from benchmarks.probes.common import CPU, GPU, compiled_plan, header, jax_mesh, logical
from spmd_auto.plan import price_strategy
from spmd_auto.trace import trace


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm(name="norm")(x)
        with jax.named_scope("my_scope"):
            y = nn.relu(nn.Dense(4 * x.shape[-1], name="up")(y))
        with jax.default_matmul_precision("highest"), set_xla_metadata(my_note="kept"):
            y = nn.Dense(x.shape[-1], name="down")(y)
        return x + y, None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False)
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(8, name="head")(x)


def step(params, batch):
    def loss(p):
        return jnp.mean((Net().apply({"params": p}, batch["x"]) - batch["y"]) ** 2)

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


LOCATION = re.compile(r"^(#loc\d+) = loc\((.*)\)$", re.M)


def dots(lowered) -> Counter:
    """(name stack, file:line, precision, noted) of each dot of a lowered program, read from its own locations."""
    text = lowered.as_text(debug_info=True)
    table = dict(LOCATION.findall(text))

    def expand(ref: str, depth: int = 0) -> str:
        return re.sub(r"#loc\d+", lambda m: expand(m.group(), depth + 1), table[ref]) if depth < 12 else ""

    found: Counter = Counter()
    for line in text.splitlines():
        if "stablehlo.dot_general" not in line:
            continue
        where = expand(re.search(r"loc\((#loc\d+)\)", line).group(1))
        name = next((n for n in re.findall(r'"([^"]*)"\(', where)), "")
        source = re.search(r"(name_stacks\.py|linear\.py)\":(\d+)", where)
        precision = "HIGHEST" if "HIGHEST" in line else "DEFAULT"
        at = f"{source.group(1)}:{source.group(2)}" if source else "?"
        found[name, at, precision, "noted" if 'my_note = "kept"' in line else "-"] += 1
    return found


def main() -> None:
    header(CPU, GPU)
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    batch = {"x": x, "y": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    params = jax.eval_shape(lambda k: Net().init(k, jnp.zeros(x.shape))["params"], jax.random.key(0))
    plain = dots(jax.jit(step).lower(params, batch))
    mesh = logical(CPU, d=8)
    program = trace(step, params, batch)
    whole = price_strategy(program, mesh, {})
    replayed = dots(whole.lower_step(jax_mesh(mesh, CPU), donate=False).lower())
    print(f"dots: plain {sum(plain.values())}, replayed with nothing split {sum(replayed.values())}")
    for key in sorted({*plain, *replayed}):
        print(f"    plain {plain[key]}, replayed {replayed[key]}: {' | '.join(key)}")
    print(f"equal: {plain == replayed}")
    bare: Counter = Counter()
    for (name, *rest), n in plain.items():
        bare[name.removeprefix("checkpoint/"), *rest] += n
    print(f"equal but for the component `checkpoint` of inlined remat: {bare == replayed}")
    split = price_strategy(program, logical(GPU, d=8), {"batch": "d"}, zero=3, zero_axes=("d",))
    print("ZeRO-3, collectives of the compiled program:")
    for c in sorted(compiled_plan(split, GPU).collectives, key=lambda c: (c.kind, c.op_name)):
        print(f"    {c.kind} x {c.times}: {c.op_name} ({c.source.split('/')[-1]})")


if __name__ == "__main__":
    main()
