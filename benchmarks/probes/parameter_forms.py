"""The forms of a parameter: ZeRO-1, ZeRO-3 and a hybrid (ZeRO over one of two axes), as splits of one group's forms.

Also where the parameter shares no logical axis with the batch's split: a recommender's table that is only looked
up, and the channels of convolutions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from benchmarks.probes.common import GPU, header, logical, row
from spmd_auto.plan import price_strategy
from spmd_auto.plan.make import analyse_for
from spmd_auto.trace import Role, trace

f32 = jnp.float32
NHWC = ("NHWC", "HWIO", "NHWC")
TX = optax.adam(1e-3)


def mlp(params, x):
    for name in ("w1", "w2"):
        x = x + jax.nn.relu(x @ params[name]["up"]) @ params[name]["down"]
    return x


def recommender(params, ids):
    """Only the table is large; its rows and columns meet no split axis of the batch."""
    return (params["table"][ids].mean(1) @ params["out"])[:, 0]


def convolutions(params, x):
    for kernel in params["kernels"]:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC))
    return x


def step_of(model):
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model(p, batch["x"]) - batch["y"]) ** 2))(state["params"])
        updates, opt = TX.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def shape(*dims, dtype=f32):
    return jax.ShapeDtypeStruct(dims, dtype)


def cases():
    layer = {"up": shape(128, 512), "down": shape(512, 128)}
    yield "mlp", mlp, {"w1": layer, "w2": layer}, {"x": shape(256, 128), "y": shape(256, 128)}
    ids = shape(256, 16, dtype=jnp.int32)
    yield "recommender", recommender, {"table": shape(4096, 64), "out": shape(64, 1)}, {"x": ids, "y": shape(256)}
    kernels = [shape(3, 3, 32, 64), shape(3, 3, 64, 32)]
    yield "convolutions", convolutions, {"kernels": kernels}, {"x": shape(16, 8, 8, 32), "y": shape(16, 8, 8, 32)}


def main() -> None:
    header(GPU)
    mesh = logical(GPU, (1e9, 1e10), a=2, b=4)
    print(f"batch over a and b; {mesh.describe()}; b has the faster links")
    for name, model, params, batch in cases():
        state = {"params": params, "opt": jax.eval_shape(TX.init, params)}
        program = trace(step_of(model), state, batch)
        analysis = analyse_for(program, mesh, {})
        whole = sum(leaf.bytes for leaf in program.arguments if leaf.role is not Role.BATCH)
        print(f"-- {name}: state {whole / 1024:.0f} KiB whole")
        kinds = {"data parallel": (0, ""), "ZeRO-1": (1, "ab"), "ZeRO-3": (3, "ab"), "hybrid, ZeRO-3 over b": (3, "b")}
        for label, (stage, axes) in kinds.items():
            split = {"batch": ("a", "b")}
            plan = price_strategy(program, mesh, split, zero=stage, zero_axes=tuple(axes), analysis=analysis)
            summary = row(label, plan, GPU)
            memory = plan.report.memory
            predicted = memory.total - memory.temporaries
            print(f"    argument bytes per device: predicted {predicted:.0f}, compiled {summary.memory.arguments}")
            stored = [f"{p.removeprefix('state/params/')} {s}" for p, s in plan.specs.items() if "/params/" in p]
            print(f"    stored: {'; '.join(stored)}")


if __name__ == "__main__":
    main()
