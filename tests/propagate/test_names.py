"""Names of logical axes are those that a person would write."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from spmd_auto.propagate.analysis import analyse
from spmd_auto.trace import trace
from tests.models import gpt, mlp

SIZES = {"layers": 3, "width": 32, "sequence": 16, "vocab": 64, "heads": 4, "batch": 6}
MODELS = {
    "scan": {},
    "unrolled": {"scan": False, "remat": False},
    "remat unrolled": {"scan": False},
    "dropout": {"dropout": 0.1},
    "moe": {"experts": 2},
    "moe unrolled": {"experts": 2, "scan": False, "remat": False},
}
ATTENTION = {
    "query/kernel": ("embed", "heads", "head_dim"),
    "key/kernel": ("embed", "heads", "head_dim"),
    "value/kernel": ("embed", "heads", "head_dim_2"),
    "out/kernel": ("heads", "head_dim_2", "embed"),
    "ln1/scale": ("embed",),
}
FEED_FORWARD = {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"), "up/bias": ("mlp",)}
EXPERTS = {
    "router/kernel": ("embed", "experts"),
    "moe/wi": ("experts", "embed", "mlp"),
    "moe/wo": ("experts", "mlp", "embed"),
}
OUTSIDE = {
    "Embed_0/embedding": ("vocab", "embed"),
    "params/positions": ("sequence", "embed"),
    "batch/x": ("batch", "sequence"),
    "batch/y": ("batch", "sequence"),
}


@functools.cache
def analysis(model):
    _, step, state, batch = gpt.make(**SIZES, **MODELS[model])
    return analyse(trace(step, state, batch))


def leaf_names(a):
    """Path -> names of the leaf's dimensions."""
    return {
        leaf.path: tuple(a.names[g] for g in a.axes.of[value.id])
        for leaf, value in zip(a.program.arguments, a.graph.arguments, strict=True)
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_dimension_of_a_transformer_has_the_name_that_people_give_it(model):
    names = leaf_names(analysis(model))
    inside = ATTENTION | (EXPERTS if "moe" in model else FEED_FORWARD)
    stacked = () if "unrolled" in model else ("layers",)
    seen = dict.fromkeys([*inside, *OUTSIDE], 0)
    for path, found in names.items():
        for end, wanted in OUTSIDE.items():
            if path.endswith(end):
                assert found == wanted, path
                seen[end] += 1
        for end, wanted in inside.items():
            if path.endswith(end):
                assert found == (*stacked, *wanted), path
                seen[end] += 1
    assert min(seen.values()) > 0, seen
    # parameters and both moments are named alike
    assert seen["query/kernel"] == 3 * (1 if stacked else SIZES["layers"])


@pytest.mark.parametrize("model", MODELS)
def test_sizes_belong_to_their_names(model):
    a = analysis(model)
    sizes = {name: a.axes.size[group] for group, name in a.names.items()}
    expected = {"batch": 6, "sequence": 16, "embed": 32, "heads": 4, "mlp": 128, "vocab": 64, "head_dim": 8}
    if "unrolled" not in model:
        expected["layers"] = 3
    if "moe" in model:
        expected["experts"] = 2
    assert {name: sizes[name] for name in expected} == expected
    assert all(a.group(name) is not None for name in expected)
    assert a.group("nonsense") is None


@pytest.mark.parametrize("model", MODELS)
def test_names_are_unique_but_for_stacks_and_never_of_size_one(model):
    a = analysis(model)
    ordinary = [name for group, name in a.names.items() if group not in a.stacked]
    assert len(set(ordinary)) == len(ordinary)
    assert all(a.axes.size[group] > 1 for group in a.names)
    assert all(a.names[group] == "layers" for group in a.stacked if group in a.names)
    assert ("layers" in a.names.values()) == ("unrolled" not in model)


def test_depth_changes_no_name_and_no_group():
    def shape(layers, scan):
        _, step, state, batch = gpt.make(**{**SIZES, "layers": layers}, scan=scan, remat=scan)
        a = analyse(trace(step, state, batch))
        return sorted(a.names.values()), len(a.classes.values), len(a.classes.ops), a.regions.count

    for scan in (True, False):
        assert shape(3, scan) == shape(6, scan)


def test_plain_layers():
    a = analyse(trace(*mlp.make(3, 8, 16, bias=True, relu=True)))
    names = leaf_names(a)
    assert names["batch/x"][0] == names["batch/y"][0] == "batch"
    # what one layer makes the next one contracts
    assert names["params/0/w"][1] == names["params/1/w"][0] == names["params/0/b"][0]
    assert names["params/0/w"][0] == names["batch/x"][1] == "features"
    assert len({n for found in names.values() for n in found}) == 5


def test_many_alike_square_layers_alternate():
    """Split by column, then by row: two groups, whatever the depth."""
    for layers in (8, 16):
        names = leaf_names(analyse(trace(*mlp.make(layers, 8, 16))))
        inner = [names[f"params/{i}/w"] for i in range(4, layers - 4)] or [names["params/3/w"], names["params/4/w"]]
        assert all(a != b for a, b in inner)
        assert all(first[1] == second[0] for first, second in zip(inner, inner[1:], strict=False))


def test_convolution_and_pooling():
    def step(params, image):
        y = jax.lax.conv_general_dilated(image, params["w"], (1, 1), "SAME")
        return jnp.tanh(y).mean((2, 3)) @ params["head"]

    f32 = jnp.float32
    params = {"w": jax.ShapeDtypeStruct((16, 4, 3, 3), f32), "head": jax.ShapeDtypeStruct((16, 10), f32)}
    a = analyse(trace(step, params, jax.ShapeDtypeStruct((8, 4, 32, 32), f32)))
    names = leaf_names(a)
    assert names["image"][0] == "batch"
    assert names["params/w"][0] == names["params/head"][0]
    assert names["params/w"][1] == names["image"][1]


def test_batch_is_where_the_work_is():
    """A mask is larger than the data and has a leading dimension that no contraction reads."""

    def step(params, mask, x):
        lengths = jnp.zeros(16, jnp.int32).at[jnp.arange(16)].set(mask.sum(1))
        return jnp.tanh(x @ params["w"]).sum() * lengths.sum()

    f32 = jnp.float32
    mask, x = jax.ShapeDtypeStruct((16, 64), jnp.int32), jax.ShapeDtypeStruct((16, 32), f32)
    names = leaf_names(analyse(trace(step, {"w": jax.ShapeDtypeStruct((32, 8), f32)}, mask, x)))
    assert names["x"][0] == "batch"
    assert names["mask"][0] == "batch_2"


@pytest.mark.parametrize(("words", "name"), [(64, "vocab_3"), (10, "classes")])
def test_what_is_indexed_into(words, name):
    """The larger table is the vocabulary, whichever comes first; labels pick from words (an untied head) or classes."""

    def step(params, tokens, labels):
        x = params["a_positions"][jnp.arange(8) % 4] + params["words"][tokens]
        logits = jnp.tanh(x @ params["up"]) @ params["head"]
        return jax.grad(lambda z: optax.softmax_cross_entropy_with_integer_labels(z, labels).sum())(logits)

    shapes = {"a_positions": (4, 16), "words": (64, 16), "up": (16, 32), "head": (32, words)}
    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    names = leaf_names(analyse(trace(step, params, ids, ids)))
    assert names["params/words"][0] == "vocab"
    assert names["params/a_positions"][0] == "vocab_2"
    assert names["params/head"][1] == name


CHILD = """
from tests.propagate.test_names import MODELS, analysis, leaf_names
for model in ("scan", "moe unrolled"):
    print(analysis(model).names)
    print(leaf_names(analysis(model)))
"""


@pytest.mark.parametrize("seed", ["0", "99"])
def test_names_are_the_same_in_every_run(seed):
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = []
    for model in ("scan", "moe unrolled"):
        here += [str(analysis(model).names), str(leaf_names(analysis(model)))]
    assert done.stdout.splitlines() == here


def test_a_recurrence_over_words_is_a_sequence():
    def step(params, words):
        def cell(carry, x):
            carry = jnp.tanh(x @ params["kernel"] + carry @ params["recurrent"])
            return carry, carry

        x = jnp.swapaxes(params["table"][words], 0, 1)
        return jax.lax.scan(cell, jnp.zeros((8, 32)), x)[1].sum()

    shapes = {"table": (64, 16), "kernel": (16, 32), "recurrent": (32, 32)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    a = analyse(trace(jax.value_and_grad(step), params, jax.ShapeDtypeStruct((8, 12), jnp.int32)))
    assert leaf_names(a)["words"] == ("batch", "sequence")
    assert "layers" not in a.names.values()
