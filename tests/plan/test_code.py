"""A plan as the text of a plain JAX module, run where this package can't be imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import P

import spmd_auto
from spmd_auto.errors import LoweringError
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh
from tests.models import gpt
from tests.strategies import priced
from tests.test_errors import batch, refused, state, step

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 1, "width": 16, "heads": 4, "vocab": 32, "batch": 8, "sequence": 8, "remat": False, "scan": False}

ALONE = """
import json, sys
sys.modules["spmd_auto"] = None  # any import of it fails
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_threefry_partitionable", True)
import optax
from tests.models import gpt

text, sizes = json.load(sys.stdin)
plan = {}
exec(text, plan)
create, step, state, batch = gpt.make(**sizes, dtype=jnp.float32, tx=optax.adamw(1e-2))
tokens = jax.random.randint(jax.random.key(1), batch["x"].shape, 0, sizes["vocab"])
batch = {"x": tokens, "y": tokens}
sharded = plan["shard"](step, state, batch)
state, batch = plan["place"](step, jax.jit(create)(jax.random.key(0)), batch)
losses = []
for _ in range(3):
    old = state
    state, loss = sharded(state, batch)
    losses.append(float(loss))
leaves = jax.tree_util.tree_leaves_with_path(state)
shards = {jax.tree_util.keystr(p, simple=True, separator="/"): x.sharding.shard_shape(x.shape) for p, x in leaves}
gone = all(x.is_deleted() for x in jax.tree.leaves(old))
print(json.dumps({"losses": losses, "shards": shards, "gone": gone, "devices": jax.device_count()}))
"""


def test_three_steps_alone_give_the_losses_of_one_device():
    create, model_step, abstract, data = gpt.make(**SIZES, dtype=jnp.float32, tx=optax.adamw(1e-2))
    mesh = spmd_auto.cluster("h100").mesh(a=2, b=4)
    plan = priced(trace(model_step, abstract, data), mesh, "megatron+sequence+zero3")
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=json.dumps([plan.to_code(), SIZES]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    tokens = jax.random.randint(jax.random.key(1), data["x"].shape, 0, SIZES["vocab"])
    one, losses, jitted = jax.jit(create)(jax.random.key(0)), [], jax.jit(model_step)
    for _ in range(3):
        one, loss = jitted(one, {"x": tokens, "y": tokens})
        losses.append(float(loss))
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    assert losses[2] < losses[0]
    assert found["devices"] == 8
    assert found["gone"]
    jax_mesh = plan.mesh.build()
    want = {
        path.split("/", 1)[1]: list(jax.NamedSharding(jax_mesh, spec).shard_shape(plan.program.find(path).shape))
        for path, spec in plan.specs.items()
        if path.startswith("state/")
    }
    assert found["shards"] == want
    assert any(np.prod(v) * 8 == np.prod(plan.program.find("state/" + k).shape) for k, v in want.items())


def module(plan):
    found: dict = {}
    exec(plan.to_code(), found)
    return found


ASSIGNMENT = {"batch": "a", "mlp": "b"}


def hand(fn=step, args=None, mesh=None, **options):
    args = (state(), batch()) if args is None else args
    return spmd_auto.price(fn, *args, mesh=mesh or toy_mesh(2, 4), assignment=ASSIGNMENT, **options)


def real(tree):
    return jax.tree.map(lambda s: jnp.asarray(np.random.default_rng(0).standard_normal(s.shape), s.dtype), tree)


def test_the_text_names_what_it_is_and_what_the_step_does_inside():
    text = hand(zero=3, zero_axes=("a",)).to_code(module="split")
    assert "from split import place, shard" in text
    assert "import spmd_auto" not in text
    assert "('state/params/up/kernel', P(None, ('b', 'a'))),  # float32[16, 24]" in text
    inside = re.findall(r"# at test_errors\.py:\d+: with_sharding_constraint\((.*)\)", text)
    assert inside == [  # of the forward pass
        "batch/x, P()",
        "result of dot_general [8, 24], P('a', 'b')",
        "state/params/down/kernel, P('b')",
        "result of dot_general [8, 16], P('a')",
    ]
    assert str(ROOT) not in text
    nothing = spmd_auto.price(step, state(), batch(), mesh=toy_mesh(2, 4), assignment={}).to_code()
    assert "splits nothing that does not follow" in nothing


def test_keywords_are_passed_as_before():
    def with_keywords(params, *, x, scale):
        return {"w": params["w"] - scale * x.T @ x}, (x @ params["w"]).sum()

    abstract = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    plan = spmd_auto.plan(with_keywords, abstract[0], **abstract[1], scale=2.0, mesh=toy_mesh(8), pins={"x": P("a")})
    code = module(plan)
    params, keywords = real(abstract)
    want = with_keywords(params, **keywords, scale=2.0)
    sharded = code["shard"](with_keywords, params, **keywords, scale=2.0)
    (params,), placed = code["place"](with_keywords, params, **keywords, scale=2.0)
    assert placed["x"].sharding.spec == P("a")
    got = sharded(params, **placed)
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-4, atol=1e-4)
    assert params["w"].is_deleted()


def test_one_argument_alone_and_no_state():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    plan = spmd_auto.plan(lambda x: x * 2, x, mesh=toy_mesh(8), pins={"x": P("a")})
    assert "Nothing is donated" in plan.to_code()
    code = module(plan)
    x = code["place"](lambda x: x * 2, jnp.ones(8))
    assert x.sharding.spec == P("a")
    np.testing.assert_array_equal(code["shard"](lambda x: x * 2, x)(x), 2 * np.ones(8))
    assert not x.is_deleted()


def test_the_order_of_the_users_devices_is_kept(devices):
    turned = list(reversed(devices))
    mesh = jax.sharding.Mesh(np.array(turned).reshape(2, 4), ("a", "b"))
    code = module(hand(mesh=mesh))
    assert list(code["make_mesh"]().devices.flat) == turned
    assert code["make_mesh"]().axis_names == ("a", "b")
    assert list(module(hand())["make_mesh"]().devices.flat) == devices


def test_another_step_is_refused_by_the_leaf_that_differs():
    code = module(hand())
    other = {"params": {**state()["params"], "more": {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}}}
    with pytest.raises(ValueError, match="argument 'state/params/more/kernel' differs"):
        code["shard"](step, other, batch())
    with pytest.raises(ValueError, match="result '1' differs"):
        code["shard"](lambda state, batch: step(state, batch)[:1], state(), batch())
    with pytest.raises(ValueError, match="for 8 devices, 4 are there"):
        code["make_mesh"](jax.devices()[:4])


def test_leaves_in_boxes_of_flax():
    def scaled(params):
        return jax.tree.map(lambda x: x * 2, params)

    boxed = {"w": nn.Partitioned(jax.ShapeDtypeStruct((8, 4), jnp.float32), ("a", None))}
    code = module(spmd_auto.plan(scaled, boxed, mesh=toy_mesh(8)))
    params = code["place"](scaled, real(boxed))
    assert params["w"].value.sharding.spec == P("a")
    want = 2 * np.asarray(params["w"].value)
    np.testing.assert_array_equal(code["shard"](scaled, params)(params)["w"].value, want)


def test_what_plain_jax_can_not_take():
    def train(model):
        model.scale[...] = model.scale[...] * 2

    class Model(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(8))

    with refused(LoweringError, what="train works on objects", why="arrays only", fixes="nnx.split"):
        spmd_auto.plan(train, Model(), mesh=toy_mesh(8)).to_code()
    code = module(hand())
    with pytest.raises(ValueError, match="argument 'batch/x' is a str, no array"):
        code["shard"](step, state(), {"x": "text"})
