"""One of several processes of `test_processes.py`: does everything that is asked there, and writes down what came out.

python -m tests.runtime.worker RANK PORT OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh

import spmd_auto
from spmd_auto.errors import SpmdAutoError
from spmd_auto.plan import make
from spmd_auto.runtime import find
from tests.test_decorator import FAST, create, data, train_step

SEARCHES = []
STEPS = 4


def sharded(fn=train_step, **options):
    options.setdefault("search", FAST)
    return spmd_auto.auto_shard(**options)(fn)


def mine(batch):
    """This process' rows."""
    rank, count = jax.process_index(), jax.process_count()
    return {k: np.split(x, count)[rank] for k, x in batch.items()}


def train(step, part=lambda batch: batch, state=None):
    losses = []
    if state is None:
        state = step.init(create, jax.random.key(0), batch=part(data()))
    for i in range(STEPS):
        state, loss = step(state, part(data(i)))
        losses.append(float(loss))
    return losses


def interleaved():
    """A mesh by whose first axis the rows of neighbours lie on different processes."""
    grid = np.array(jax.devices()).reshape(2, -1).T
    return Mesh(grid, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def whole_batch():
    step = sharded()
    losses = train(step)
    plan = step.plan(create(jax.random.key(0)), data())
    return {
        "losses": losses,
        "searches": len(SEARCHES),
        "origin": plan.search.origin,
        "mesh": plan.mesh.names,
        "hash": plan.lowered_hash(),
        "explained": "not searched again" in plan.explain(),
    }


def plan_kept():
    before = len(SEARCHES)
    step = sharded()
    plan = step.plan(create(jax.random.key(0)), data())
    return {"searches": len(SEARCHES) - before, "origin": plan.search.origin, "hash": plan.lowered_hash()}


def state_of_each():
    return train(sharded(), state=create(jax.random.key(0)))


def local_rows():
    step = sharded(local="batch")
    losses = train(step, mine)
    first = next(iter(step._entries.values())).plan
    return {"losses": losses, "rows": first.program.find("batch/x").shape[0], "spec": str(first.specs["batch/x"])}


def rows_in_place():
    step = sharded(local="batch", pins={"batch/*": P(("host", "device"))})
    return {"losses": train(step, mine), "moved": step._moved}


def rows_elsewhere():
    step = sharded(local=("batch",), mesh=interleaved(), pins={"batch/*": P("a")})
    return {"losses": train(step, mine), "moved": step._moved}


def rows_whole():
    step = sharded(local="batch", pins={"batch/*": P()})
    return {"losses": train(step, mine), "moved": step._moved}


def loader():
    """Each process loads its rows, and JAX makes the batch of them as the plan wants it."""
    step = sharded(pins={"batch/*": P(("host", "device"))})
    state = step.init(create, jax.random.key(0), batch=data())
    (_, shardings), _ = step.plan(state, data()).shardings()
    losses = []
    for i in range(STEPS):
        batch = jax.tree.map(jax.make_array_from_process_local_data, shardings, mine(data(i)))
        state, loss = step(state, batch)
        losses.append(float(loss))
    return {"losses": losses, "moved": step._moved}


def evaluation():
    """A step that follows the state of another one, and gets arrays that are on all processes already."""
    step = sharded(local="batch")
    evaluate = sharded(lambda state, batch: train_step(state, batch)[1], local="batch", like=step)
    state = step.init(create, jax.random.key(0), batch=mine(data()))
    rows = jax.sharding.NamedSharding(Mesh(np.array(jax.devices()), "r", axis_types=(AxisType.Auto,)), P("r"))
    whole = {k: jax.make_array_from_callback(x.shape, rows, lambda i, x=x: x[i]) for k, x in data().items()}
    return [float(evaluate(state, mine(data()))), float(evaluate(state, whole))]


def less_than_a_byte():
    def scaled(q, x):
        return jnp.mean(x @ q.astype(jnp.float32))

    return float(sharded(scaled)(np.full((16, 8), 3, jnp.int4), np.ones((8, 16), np.float32)))


def inside_of_jit():
    whole = jax.sharding.NamedSharding(interleaved(), P())
    x, w = (
        jax.make_array_from_callback(x.shape, whole, lambda i, x=x: x[i])
        for x in (np.ones((16, 8), np.float32), np.ones((8, 8), np.float32))
    )
    step = sharded(lambda w, x: jnp.mean(x @ w), mesh=interleaved())
    return float(jax.jit(lambda w, x: step(w, x) + 1)(w, x))


def keys_and_callbacks():
    def noisy(w, x, key, scale):
        y = jax.pure_callback(lambda v: np.asarray(v) + 1, jax.ShapeDtypeStruct((), np.float32), scale)
        return jnp.mean((x @ w + jax.random.normal(key, x.shape)) ** 2) * y

    step = sharded(noisy)
    return float(step(np.ones((8, 8), np.float32), np.ones((16, 8), np.float32), jax.random.key(3), np.float32(1)))


# ---- what has to be refused --------------------------------------------------------------------


def other_program():
    scale = 1.0 + jax.process_index()
    sharded(lambda w, x: jnp.mean(x @ w) * scale).plan(np.ones((8, 8)), np.ones((16, 8)))


def other_shape():
    rows = 8 * (1 + jax.process_index())
    sharded(lambda state, batch: jnp.mean(batch["x"] @ state), local="batch")(
        np.ones((8, 8)), {"x": np.ones((rows, 8))}
    )


def other_pins():
    pins = {"w": P("device")} if jax.process_index() else {}
    sharded(lambda w, x: jnp.mean(x @ w), pins=pins).plan(np.ones((8, 8)), np.ones((16, 8)))


def other_constant():
    table = np.full((8,), 1.0 + jax.process_index(), np.float32)
    sharded(lambda w, x: jnp.mean(x @ w) * jnp.asarray(table).sum())(np.ones((8, 8)), np.ones((16, 8)))


def other_values():
    sharded(lambda w, x: jnp.mean(x @ w))(np.ones((8, 8)), np.full((16, 8), float(jax.process_index())))


def other_seed():
    sharded().init(create, jax.random.key(jax.process_index()), batch=data())


def no_memory():
    sharded(memory=100.0).plan(create(jax.random.key(0)), data())


def trace_fails_on_one():
    def step(w, x):
        if jax.process_index():
            raise ValueError("only here")
        return jnp.mean(x @ w)

    sharded(step).plan(np.ones((8, 8)), np.ones((16, 8)))


def planning_breaks():
    real, find.make_plan = find.make_plan, lambda *_, **__: {}["no plan"]
    try:
        sharded(cache=False).plan(create(jax.random.key(0)), data())
    finally:
        find.make_plan = real


def applying_breaks():
    real, find.plan_from_json = find.plan_from_json, lambda *_, **__: {}["no plan"]
    try:
        sharded(cache=False).plan(create(jax.random.key(0)), data())
    finally:
        find.plan_from_json = real


def mesh_of_one_process():
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Auto,))
    return float(sharded(lambda w, x: jnp.mean(x @ w), mesh=mesh)(np.ones((8, 8)), np.ones((16, 8))))


def one_does_not_come():
    os.environ["SPMD_AUTO_PROCESS_WAIT"] = "1"
    try:
        if jax.process_index() == 0:
            sharded(lambda w, x: jnp.mean(x @ w) + 7).plan(np.ones((8, 8)), np.ones((16, 8)))
        else:
            time.sleep(3)
    finally:
        del os.environ["SPMD_AUTO_PROCESS_WAIT"]


SCENES = [
    whole_batch,
    plan_kept,
    state_of_each,
    local_rows,
    rows_in_place,
    rows_elsewhere,
    rows_whole,
    loader,
    less_than_a_byte,
    evaluation,
    inside_of_jit,
    keys_and_callbacks,
    other_program,
    other_shape,
    other_pins,
    other_constant,
    other_values,
    other_seed,
    no_memory,
    trace_fails_on_one,
    planning_breaks,
    applying_breaks,
    mesh_of_one_process,
    one_does_not_come,
]


def main(rank: int, port: int, output: str) -> None:
    spmd_auto.simulate_devices(4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    real = make.search_mesh
    make.search_mesh = lambda *args, **kwargs: (SEARCHES.append(1), real(*args, **kwargs))[1]
    out = {}
    for scene in SCENES:
        try:
            out[scene.__name__] = {"result": scene()}
        except SpmdAutoError as error:
            notes = getattr(error, "__notes__", [])
            out[scene.__name__] = {"error": type(error).__name__, "text": "\n".join([str(error), *notes])}
        except Exception as error:
            out[scene.__name__] = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
        Path(output).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
