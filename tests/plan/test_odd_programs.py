"""Programs that nobody would write on purpose: planned on meshes that make splitting pay, run, equal to one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax

import spmd_auto
from spmd_auto.errors import LoweringError
from spmd_auto.search import SearchOptions
from spmd_auto.verify import tree_relative_error
from tests.known_answers.toy import toy_mesh

FAST = SearchOptions(states=200)


def A(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def ints(high, *shape):
    return np.random.default_rng(0).integers(0, high, shape).astype(np.int32)


W = {"w": A(16, 16)}
X = A(8, 16)


def sgd(loss):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def recurrence(p, x):
    _, ys = lax.scan(lambda c, t: (jnp.tanh(t @ p["w"] + c @ p["u"]),) * 2, jnp.zeros((8, 16)), x.transpose(1, 0, 2))
    return (ys**2).mean()


def accumulated(params, x):
    def micro(total, part):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((part @ p["w"]) ** 2))(params)
        return jax.tree.map(jnp.add, total, grads), value

    grads, values = lax.scan(micro, jax.tree.map(jnp.zeros_like, params), x.reshape(4, 2, 16))
    return jax.tree.map(lambda p, g: p - 0.1 * g / 4, params, grads), values.mean()


def contrastive(p, x):
    z = x @ p["w"]
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(8)).mean()


@jax.custom_vjp
def twice(x):
    return jnp.sin(x)


twice.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


# name -> (function, arguments, pins)
PROGRAMS = {
    "prime sizes": (sgd(lambda p, x: jnp.tanh(x @ p["w"]).sum()), ({"w": A(7, 13)}, A(11, 7)), {}),
    "size one": (sgd(lambda p, x: (x @ p["w"]).sum()), ({"w": A(1, 1)}, A(1, 1)), {}),
    "batch of one": (sgd(lambda p, x: jnp.mean((x @ p["w"]) ** 2)), (W, A(1, 16)), {}),
    "prime batch": (sgd(lambda p, x: jnp.mean((x @ p["w"]) ** 2)), (W, A(7, 16)), {}),
    "empty array": (lambda p, x: (x @ p["w"]).sum() + p["e"].sum(), ({**W, "e": A(0, 4)}, X), {}),
    "empty batch": (lambda p, b: ({"w": p["w"] * 2}, p["w"].sum()), (W, {}), {}),
    "small integers and booleans": (
        lambda p, x, m: (jnp.where(m, x.astype(jnp.float32) @ p["w"], 0), x >> 1, ~m),
        (W, ints(9, 8, 16).astype(np.int8), X > 0),
        {},
    ),
    "float8": (lambda p, x: x @ p["w"].astype(jnp.float32), ({"w": jnp.asarray(A(16, 16), jnp.float8_e4m3fn)}, X), {}),
    "complex": (lambda p, x: jnp.fft.fft(x @ p["w"]), (W, X), {}),
    "unused parameters": (sgd(lambda p, x: (x @ p["w"]).sum()), ({**W, "u": A(16, 3), "v": A(5)}, X), {}),
    "unused batch": (lambda p, b: (b["x"] @ p["w"]).sum(), (W, {"x": X, "y": A(3, 3)}), {}),
    "nested jit": (jax.jit(lambda p, x: jax.jit(jnp.sin)(x @ p["w"])), (W, X), {}),
    "cond": (sgd(lambda p, x: lax.cond(x.sum() > 0, lambda y: y @ p["w"], lambda y: y * 2, x).sum()), (W, X), {}),
    "switch": (
        lambda p, x, i: lax.switch(i, [lambda y: y @ p["w"], lambda y: y + 1, jnp.tanh], x),
        (W, X, np.int32(2)),
        {},
    ),
    "while": (
        lambda p, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"])), (0, x))[1],
        (W, X),
        {},
    ),
    "while on data": (
        lambda p, x: lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: jnp.tanh(c @ p["w"]) * 0.05, x),
        (W, X),
        {},
    ),
    "fori loop": (sgd(lambda p, x: lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ p["w"]), x).sum()), (W, X), {}),
    "recurrence": (sgd(recurrence), ({**W, "u": A(16, 16)}, A(8, 8, 16)), {}),
    "custom vjp": (sgd(lambda p, x: twice(x @ p["w"]).sum()), (W, X), {}),
    "vmap of grad": (
        lambda p, x: jax.vmap(jax.grad(lambda q, y: jnp.tanh(y @ q["w"]).sum()), (None, 0))(p, x),
        (W, X),
        {},
    ),
    "jacobian": (lambda p, x: jax.jacrev(lambda w: jnp.tanh(x @ w).sum(-1))(p["w"]), (W, X), {}),
    "forward over reverse": (
        lambda p, x: jax.jvp(jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum()), (p["w"],), (p["w"],))[1],
        (W, X),
        {},
    ),
    "associative scan": (lambda p, x: lax.associative_scan(jnp.multiply, jnp.tanh(x @ p["w"]), axis=0), (W, X), {}),
    "accumulated gradients": (accumulated, (W, X), {}),
    "contrastive loss": (sgd(contrastive), (W, X), {}),
    "one sample beside all": (sgd(lambda p, x: ((x @ p["w"]) * (x[0] @ p["w"])).mean()), (W, X), {}),
    "top k of a split axis": (lambda p, x: lax.top_k(x @ p["w"], 4), (W, X), {"p/w": P(None, "a")}),
    "sort of a split axis": (
        lambda p, x: (jnp.sort(x @ p["w"], -1), jnp.argsort(x @ p["w"], 0)),
        (W, X),
        {"p/w": P(None, "a")},
    ),
    "clamped slices of a split axis": (
        lambda x, u: (lax.dynamic_update_slice(x, u, (7,)), lax.dynamic_slice(x, (7,), (2,))),
        (A(8), A(2)),
        {"x": P("a")},
    ),
    "rows outside a split table": (
        lambda t, i: (t[i], t.at[i].get(mode="fill", fill_value=3.0), t.at[i].get(mode="clip")),
        (A(16, 8), np.array([0, 15, 16, 100, -1, -17, 3, 4])),
        {"t": P("a")},
    ),
    "scatters into a split table": (
        lambda t, i, u: (t.at[i].add(u), t.at[i].max(u), t.at[i].mul(u, mode="drop")),
        (A(16, 8), np.array([0, 15, 16, 100, -1, -17, 3, 3]), A(8, 8)),
        {"t": P("a")},
    ),
    "segment sum": (lambda p, x, i: jax.ops.segment_sum(x @ p["w"], i, 4), (W, X, ints(4, 8)), {}),
    "strided convolution": (
        sgd(lambda p, x: (lax.conv_general_dilated(x, p["w"], (2, 2), ((1, 1), (1, 1))) ** 2).sum()),
        ({"w": A(16, 8, 3, 3)}, A(8, 8, 8, 8)),
        {"*/w": P("a")},
    ),
    "grouped convolution": (
        sgd(
            lambda p, x: (lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", feature_group_count=8) ** 2).sum(),
        ),
        ({"w": A(16, 1, 3, 3)}, A(8, 8, 8, 8)),
        {},
    ),
    "rolls, pads and pieces": (
        lambda p, x: (
            jnp.roll(x @ p["w"], 3, 0),
            jnp.pad(x, ((1, 2), (0, 1))),
            jnp.flip(x, 0),
            jnp.concatenate([x, x @ p["w"]], 0),
            x[::2],
            x[1:],
        ),
        (W, X),
        {},
    ),
    "dimensions of size one": (lambda p, x: (x[:, None, :] @ p["w"]).reshape(8, 1, 1, 16).squeeze(1), (W, X), {}),
    "factorisations": (lambda p, x: jnp.linalg.cholesky(p["w"] @ p["w"].T + jnp.eye(16)) @ x.T, (W, X), {}),
    "random numbers": (
        lambda p, x: x @ p["w"] * jax.random.bernoulli(jax.random.key(0), 0.5, (8, 16)),
        (W, X),
        {},
    ),
}
MESHES = [(8,), (2, 4), (1, 8), (1,)]


def run(plan, args):
    lowered = plan.lower_step(donate=False)
    flat = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves(args), lowered.in_shardings, strict=True)]
    return jax.tree.unflatten(plan.program.out_tree, lowered.compile()(*flat))


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_one_device(name, devices):
    fn, args, pins = PROGRAMS[name]
    expected = jax.jit(fn)(*args)
    for sizes in MESHES[:2]:
        plan = spmd_auto.plan(fn, *args, mesh=toy_mesh(*sizes), pins=pins, search=FAST)
        out = run(plan, args)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
        numbers = [jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in jax.tree.leaves(out)]
        wanted = [jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in jax.tree.leaves(expected)]
        assert tree_relative_error(numbers, wanted) < 1e-5
        assert plan.explain()


def test_enough_of_them_are_split():
    """Else the comparison above would compare one device with itself."""
    split = 0
    for fn, args, pins in PROGRAMS.values():
        plan = spmd_auto.plan(fn, *args, mesh=toy_mesh(2, 4), pins=pins, search=FAST)
        split += any(any(spec) for spec in plan.placements.arguments)
    assert split > len(PROGRAMS) * 0.7


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_meshes_with_axes_of_one_device(sizes, devices):
    fn, args, _ = PROGRAMS["prime batch"]
    plan = spmd_auto.plan(fn, W, A(24, 16), mesh=toy_mesh(*sizes), search=FAST)
    assert tree_relative_error(run(plan, (W, A(24, 16))), jax.jit(fn)(W, A(24, 16))) < 1e-5


NOTHING = {
    "scalars": (lambda p, x: (p["a"] * x, p), ({"a": np.float32(2)}, np.float32(3))),
    "no argument": (lambda: jnp.ones(3), ()),
    "no argument leaf": (lambda b: jnp.ones((8, 8)), ({},)),
    "no result": (lambda x: None, (X,)),
    "identity": (lambda x: x, (X,)),
    "identity of a state": (lambda s, x: s, (W, X)),
    "everything twice": (lambda s, x: (s, s, x), (W, X)),
    "state and sum": (lambda s, x: (s, x.sum()), (W, X)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_programs_of_almost_nothing(name, devices):
    """alpa#509: a scalar or identity function fails."""
    fn, args = NOTHING[name]
    expected = jax.jit(fn)(*args)
    step = spmd_auto.auto_shard(fn, search=FAST, donate=False)
    for _ in range(2):
        out = step(*args)
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        assert tree_relative_error(out, expected) == 0
    assert step.explain()


def test_identity_of_a_donated_state():
    step = spmd_auto.auto_shard(lambda s, x: (s, x.sum()), search=FAST)
    state, _ = step(W, X)
    for _ in range(2):
        state, _ = step(state, X)
    np.testing.assert_array_equal(state["w"], W["w"])


def test_double_precision():
    with jax.enable_x64(True):
        fn = sgd(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
        params, x = {"w": A(16, 16, dtype=np.float64)}, A(8, 16, dtype=np.float64)
        plan = spmd_auto.plan(fn, params, x, mesh=toy_mesh(8), search=FAST)
        out = run(plan, (params, x))
        assert out[0]["w"].dtype == jnp.float64
        assert tree_relative_error(out, jax.jit(fn)(params, x)) < 1e-12


def test_bfloat16_parameters_keep_their_type():
    fn = sgd(lambda p, x: jnp.mean((x @ p["w"]) ** 2).astype(jnp.float32))
    params = {"w": jnp.asarray(A(16, 16), jnp.bfloat16)}
    step = spmd_auto.auto_shard(fn, search=FAST, donate=False)
    (new, _), (expected, _) = step(params, X), jax.jit(fn)(params, X)
    assert new["w"].dtype == expected["w"].dtype


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "several steps": optax.MultiSteps(optax.adam(1e-3), 2),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "by leaf": optax.multi_transform({"a": optax.adam(1e-3), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}),
    "lamb": optax.lamb(1e-3),
    "keeps the last gradient": optax.adan(1e-2),
    "keeps many gradients": optax.chain(optax.scale_by_lbfgs(3), optax.scale(-1e-2)),
    "one number per row and column": optax.sm3(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, devices):
    tx = OPTIMIZERS[name]
    params = {"w": A(16, 16), "b": A(16)}

    def step(state, x):
        def loss(p):
            return jnp.mean((x @ p["w"] + p["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    state = {"params": params, "opt": tx.init(params)}
    plan = spmd_auto.plan(step, state, X, mesh=toy_mesh(2, 4), search=FAST)
    assert all(i is not None for i in plan.program.replaces[:-1])
    assert tree_relative_error(run(plan, (state, X)), jax.jit(step)(state, X)) < 1e-5


# ---- ways to call that have traps ------------------------------------------------------------------------------


def scaled(state, x):
    return jax.tree.map(lambda p: p * 0.5, state), x.sum()


def test_one_array_twice_in_a_donated_state(devices):
    """A buffer can be given away only once; XLA stops the whole process otherwise."""
    step = spmd_auto.auto_shard(scaled, search=FAST)
    state, _ = step({"a": A(16, 16), "ema": A(16, 16)}, X)
    shared = state["a"]
    state, _ = step({"a": shared, "ema": shared}, X)
    np.testing.assert_allclose(state["a"], A(16, 16) / 4)
    np.testing.assert_allclose(state["ema"], A(16, 16) / 4)


def test_an_array_of_the_state_in_the_batch_too(devices):
    step = spmd_auto.auto_shard(lambda s, x: ({"a": s["a"] * 0.5}, (s["a"] * x).sum()), search=FAST)
    state, _ = step({"a": A(16, 16)}, A(16, 16))
    old = np.asarray(state["a"])
    state, total = step(state, state["a"])
    np.testing.assert_allclose(state["a"], old / 2)
    np.testing.assert_allclose(total, (old * old).sum(), rtol=1e-5)


def test_slices_that_differ_only_in_where_they_begin(devices):
    """What devices exchange for one is not what they exchange for another of the same shape."""

    def step(x):
        return (
            x[:32] * 1.0,
            x[8:40] * 2.0,
            x[32:] * 3.0,
            jnp.pad(x[:32], ((0, 32), (0, 0))),
            jnp.pad(x[:32], ((8, 24), (0, 0))),
        )

    x = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)
    sharded = spmd_auto.auto_shard(step, mesh=toy_mesh(8), pins={"x": jax.P("a"), "result/*": jax.P("a")}, search=FAST)
    for found, expected in zip(sharded(x), step(x), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap])
def test_inside_of_a_transformation_that_changes_the_program_is_refused(transform):
    step = spmd_auto.auto_shard(lambda x: (x**2).sum(), search=FAST)
    with pytest.raises(LoweringError, match="inside of grad, vmap or another transformation") as caught:
        transform(lambda x: step(x))(X)
    assert any("auto_shard(jax.grad(" in fix for fix in caught.value.fixes)


nnx = pytest.importorskip("flax.nnx")


class Module(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def module_loss(module, x):
    return jnp.mean((module(x) - 1.0) ** 2)


def train(module, optimizer, x):
    value, grads = nnx.value_and_grad(module_loss)(module, x)
    optimizer.update(module, grads)
    return module, optimizer, value


def build():
    module = Module(nnx.Rngs(0))
    return module, nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)


def test_modules_are_state_if_the_step_returns_them(devices):
    step = spmd_auto.auto_shard(train, search=FAST)
    module, optimizer = build()
    expected_module, expected_optimizer = build()
    reference = nnx.jit(train)
    for _ in range(3):
        module, optimizer, value = step(module, optimizer, X)
        expected_module, expected_optimizer, expected = reference(expected_module, expected_optimizer, X)
        assert float(value) == pytest.approx(float(expected), rel=1e-5)
    ours, theirs = nnx.state(module), nnx.state(expected_module)
    assert tree_relative_error(jax.tree.leaves(ours), jax.tree.leaves(theirs)) < 1e-5


def test_modules_changed_in_place_need_not_be_returned(devices):
    """As under nnx.jit: the caller's module and optimizer are changed, whatever of them is returned."""

    def returns_none(module, optimizer, x):
        return train(module, optimizer, x)[2]

    def returns_one(module, optimizer, x):
        return train(module, optimizer, x)[::2]

    expected_module, expected_optimizer = build()
    expected = [float(nnx.jit(train)(expected_module, expected_optimizer, X)[2]) for _ in range(3)]
    for function in (returns_none, returns_one):
        step = spmd_auto.auto_shard(function, search=FAST)
        module, optimizer = build()
        for value in expected:
            out = step(module, optimizer, X)
            assert float(out[1] if isinstance(out, tuple) else out) == pytest.approx(value, rel=1e-5)
        ours, theirs = nnx.state(module), nnx.state(expected_module)
        assert tree_relative_error(jax.tree.leaves(ours), jax.tree.leaves(theirs)) < 1e-5


def test_modules_that_are_only_read_are_fine():
    def evaluate(module, x):
        module.eval()
        return nnx.value_and_grad(module_loss)(module, x)[0]

    module, _ = build()
    step = spmd_auto.auto_shard(evaluate, search=FAST)
    module.eval()
    assert float(step(module, X)) == pytest.approx(float(module_loss(module, X)), rel=1e-5)


def test_local_changes_of_a_dictionary_are_nobodys_business():
    def step(params, batch):
        x = batch.pop("x")
        batch["y"] = x @ params["w"]
        return batch["y"].sum()

    batch = {"x": X}
    assert np.isfinite(float(spmd_auto.auto_shard(step, search=FAST)(W, batch)))
    assert list(batch) == ["x"]


def test_a_dimension_that_nothing_divides_is_said_to_stay_whole(devices):
    def step(params, tokens):
        h = params["table"][tokens] @ params["head"]
        return jax.nn.logsumexp(h, axis=-1).mean()

    params = {"table": np.ones((57, 16), np.float32), "head": np.ones((16, 57), np.float32)}
    plan = spmd_auto.plan(step, params, np.zeros((8, 12), np.int32), mesh=toy_mesh(2, 4), search=FAST)
    assert (
        "dimension 0 is vocab, whole: no mesh axis divides 57; padded to 58 it could be split over a"
        in plan.explain("params/table")
    )
    (row,) = [line for line in plan.explain().splitlines() if "vocab" in line]
    assert "57" in row
    assert "whole, nothing divides it" in row
