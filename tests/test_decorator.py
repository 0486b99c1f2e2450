"""`@auto_shard`: plans and compiles once, runs like the plain step, never makes the state whole on one device."""

from __future__ import annotations

import functools
import gc
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import P

import spmd_auto
from spmd_auto.search import SearchOptions
from spmd_auto.trace import Role
from spmd_auto.verify import tree_relative_error

FAST = SearchOptions(states=150)
MEMORY = 24_000.0  # bytes per device: less than the whole state, so that the plan has to split it


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(16)(nn.LayerNorm()(x))


MODEL, TX = Model(), optax.adamw(1e-2)


def create(key):
    return TrainState.create(apply_fn=MODEL.apply, params=MODEL.init(key, jnp.zeros((1, 16)))["params"], tx=TX)


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def data(seed=0, size=16):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, 16)).astype(np.float32) for k in "xy"}


def sharded(fn=train_step, **options):
    options.setdefault("search", FAST)
    return spmd_auto.auto_shard(**options)(fn)


class Counter:
    """Counts what JAX reports of its compilations."""

    def __init__(self):
        self.backend, self.traces = 0, 0

    def __call__(self, event, duration, **_):
        self.backend += event.endswith("backend_compile_duration")
        self.traces += event.endswith("jaxpr_trace_duration")


@pytest.fixture
def compilations():
    counter = Counter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


@pytest.fixture
def traces():
    """A step that counts how often it is traced."""
    calls = []

    def step(state, batch):
        calls.append(1)
        return train_step(state, batch)

    return step, calls


def reference(steps=3):
    state, losses = jax.jit(create)(jax.random.key(0)), []
    step = jax.jit(train_step)
    for i in range(steps):
        state, loss = step(state, data(i))
        losses.append(float(loss))
    return state, losses


# ---- equal to one device ----------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_three_steps_equal_one_device(memory):
    expected_state, expected = reference()
    step = sharded(memory=memory)
    state = step.init(create, jax.random.key(0), batch=data())
    losses = []
    for i in range(3):
        state, loss = step(state, data(i))
        losses.append(float(loss))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert tree_relative_error(jax.device_get(state.params), jax.device_get(expected_state.params)) < 1e-5
    assert int(state.step) == 3


def test_bare_decorator_and_with_options():
    @spmd_auto.auto_shard
    def bare(params, x):
        """Doc."""
        return x @ params["w"]

    @spmd_auto.auto_shard(search=FAST, pins={"w": P("device")}, donate=False)
    def optioned(params, x):
        return x @ params["w"]

    params, x = {"w": np.eye(16, dtype=np.float32)}, np.ones((8, 16), np.float32)
    for step, name in ((bare, "bare"), (optioned, "optioned")):
        assert isinstance(step, spmd_auto.AutoSharded)
        assert step.__name__ == name
        np.testing.assert_array_equal(step(params, x), x)
    assert bare.__doc__ == "Doc."
    with pytest.raises(TypeError):
        spmd_auto.auto_shard(bare, nonsense=1)


# ---- once per signature -----------------------------------------------------------------------------


def test_plans_traces_and_compiles_once(traces, compilations, caplog):
    fn, calls = traces
    step = sharded(fn)
    state = jax.jit(create)(jax.random.key(0)).replace(step=0)  # as TrainState.create makes it: a Python int
    batches = [data(i) for i in range(3)]
    compiled = []
    with caplog.at_level(logging.INFO, logger="spmd_auto"):
        for batch in batches:
            before = compilations.backend
            state, _ = step(state, batch)
            compiled.append(compilations.backend - before)
    assert len(calls) == 1
    assert sum("found in" in record.message for record in caplog.records) == 1
    assert compiled[0] >= 1
    assert compiled[1:] == [0, 0]
    assert len(step._entries) == 1


def test_init_and_plan_and_call_share_one_plan_and_one_executable(traces, compilations):
    fn, calls = traces
    step = sharded(fn)
    plan = step.plan(jax.eval_shape(create, jax.random.key(0)), data())
    state = step.init(create, jax.random.key(0), batch=data())
    executable = step.compile(state, data())
    before = compilations.backend
    for i in range(3):
        state, _ = step(state, data(i))
    assert compilations.backend == before
    assert step.compile(state, data()) is executable
    assert step.plan(state, data()) is plan
    assert len(calls) == 1


def test_another_signature_plans_again_and_leaves_the_state_where_it_is(traces):
    fn, calls = traces
    step = sharded(fn, memory=MEMORY)
    state = step.init(create, jax.random.key(0), batch=data())
    state, _ = step(state, data())
    before = jax.tree.map(lambda x: x.sharding, state)
    state, loss = step(state, data(size=5))  # a ragged last batch
    assert np.isfinite(float(loss))
    assert len(calls) == 2
    equal = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, before)
    assert all(jax.tree.leaves(equal))


def test_plans_from_abstract_arguments_are_those_of_arrays():
    step = sharded()
    abstract = step.plan(jax.eval_shape(create, jax.random.key(0)), jax.tree.map(jax.typeof, data()))
    assert step.plan(jax.jit(create)(jax.random.key(0)), data()) is abstract


# ---- where the state lies -----------------------------------------------------------------------------


def check_lies_as_planned(state, plan):
    whole = 0
    leaves = jax.tree.leaves(state)
    assert len(leaves) <= len(plan.specs)
    for x, (path, spec) in zip(leaves, plan.specs.items(), strict=False):
        assert path.startswith("state/")
        wanted = jax.NamedSharding(plan.mesh.build(), spec)
        assert x.sharding.is_equivalent_to(wanted, x.ndim), path
        assert {s.data.shape for s in x.addressable_shards} == {wanted.shard_shape(x.shape)}, path
        whole += x.size > 1000 and x.sharding.is_fully_replicated
    return whole


def test_state_is_born_sharded(devices):
    step = sharded(memory=MEMORY)
    state = step.init(create, jax.random.key(0), batch=data())
    plan = step.plan(state, data())
    assert check_lies_as_planned(state, plan) == 0
    local = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == devices[0])
    assert local < sum(x.nbytes for x in jax.tree.leaves(state)) / 2
    expected = jax.jit(create)(jax.random.key(0))
    assert tree_relative_error(jax.device_get(state.params), jax.device_get(expected.params)) < 1e-6
    state, _ = step(state, data())
    assert check_lies_as_planned(state, plan) == 0


def test_init_never_makes_a_whole_leaf():
    """jax#19893, flax#3701, optax#548: what the compiled creation returns is already in pieces."""
    step = sharded(memory=MEMORY)
    plan = step.plan(jax.eval_shape(create, jax.random.key(0)), data())
    gc.collect()
    before = jax.live_arrays()  # kept, so that no id is used again
    ids = {id(x) for x in before}
    state = step.init(create, jax.random.key(0))
    made = [x for x in jax.live_arrays() if id(x) not in ids]
    leaves = jax.tree.leaves(state)
    assert len(made) >= len(leaves)
    specs = list(plan.specs.values())[: len(leaves)]
    always_split = {x.shape for x in leaves} - {x.shape for x, spec in zip(leaves, specs, strict=True) if not any(spec)}
    assert len(always_split) > 1
    assert not [x.shape for x in made if x.shape in always_split and x.sharding.is_fully_replicated]
    del before


def test_state_on_one_device_is_moved_once(caplog):
    step = sharded(memory=MEMORY, donate=False)
    state = jax.device_put(jax.jit(create)(jax.random.key(0)), jax.devices()[0])
    with caplog.at_level(logging.INFO, logger="spmd_auto"):
        new, _ = step(state, data())
        new, _ = step(new, data())
    moved = [r.message for r in caplog.records if "moved once" in r.message]
    assert len(moved) == 1
    assert "state/" in moved[0]
    check_lies_as_planned(new, step.plan(new, data()))


def test_placed_arguments_are_passed_on_as_they_are():
    """No copies between steps: a leaf that lies as planned is the very array that the executable gets."""
    step = sharded(memory=MEMORY)
    state, _ = step(step.init(create, jax.random.key(0), batch=data()), data())
    args = (state, data())
    call = step._apart(args, {})
    entry = step._entry(call, args, {})
    lowered = step._lowered(entry)
    for x, placed in zip(jax.tree.leaves(state), step._place(call, entry, lowered), strict=False):
        assert placed is x


def test_donation():
    step = sharded(memory=MEMORY)
    state = step.init(create, jax.random.key(0), batch=data())
    new, _ = step(state, data())
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.ndim)
    keeping = sharded(memory=MEMORY, donate=False)
    state = keeping.init(create, jax.random.key(0), batch=data())
    first, a = keeping(state, data())
    second, b = keeping(state, data())
    assert float(a) == float(b)
    assert tree_relative_error(jax.device_get(first.params), jax.device_get(second.params)) == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_gradient_function_keeps_its_parameters():
    """The gradients look like new parameters, but the caller still needs the old ones."""
    step = sharded(jax.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2)))
    params, x = {"w": jax.random.normal(jax.random.key(0), (16, 16))}, data()["x"]
    _, grads = step(params, x)
    placed = jax.device_put(params, grads["w"].sharding)
    for _ in range(2):
        _, grads = step(placed, x)
    assert tree_relative_error(grads, jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)) < 1e-5
    assert not placed["w"].is_deleted()
    assert step.plan(params, x).program.arguments[0].role is Role.PARAMETER


def test_further_calls_leak_nothing():
    step = sharded(memory=MEMORY)
    state = step.init(create, jax.random.key(0), batch=data())
    batch = data()
    counts = []
    for _ in range(4):
        state, loss = step(state, batch)
        del loss
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[1:] == [counts[0]] * 3


# ---- evaluation ---------------------------------------------------------------------------------------


def eval_state(state, batch):
    return jnp.mean((state.apply_fn({"params": state.params}, batch["x"]) - batch["y"]) ** 2)


def eval_params(params, batch):
    return jnp.mean((MODEL.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def eval_other_name(weights, batch):
    return eval_params(weights, batch)


@pytest.mark.parametrize("fn", [eval_state, eval_params, eval_other_name])
def test_evaluation_follows_the_training_state(fn):
    train = sharded(memory=MEMORY)
    state = train.init(create, jax.random.key(0), batch=data())
    plan = train.plan(state, data())
    evaluate = sharded(fn, like=train)
    argument = state if fn is eval_state else state.params
    other = evaluate.plan(argument, data(size=8))
    assert other.mesh == plan.mesh
    head = "state/params/"
    wanted = {path.removeprefix(head): spec for path, spec in plan.specs.items() if path.startswith(head)}
    found = {
        path.split("params/")[-1].removeprefix("weights/"): s for path, s in other.specs.items() if "batch" not in path
    }
    assert any(spec != P() for spec in wanted.values())
    assert {path: found[path] for path in wanted} == wanted
    loss = evaluate(argument, data(size=8))
    assert float(loss) == pytest.approx(float(eval_state(jax.device_get(state), data(size=8))), rel=1e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("size", [6, 512])
def test_every_further_plan_keeps_the_first_ones_mesh(size):
    """Also where the state is whole, so that its specs would hold on any mesh."""
    train = sharded()
    first = train.plan(jax.eval_shape(create, jax.random.key(0)), data(size=8))
    state = jax.eval_shape(create, jax.random.key(0))
    assert train.plan(state, data(size=size)).mesh == first.mesh
    assert sharded(eval_state, like=train).plan(state, data(size=size)).mesh == first.mesh


# ---- arguments ------------------------------------------------------------------------------------------


def ARRAY(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_keyword_arguments():
    def step(params, *, batch, scale=1.0):
        return (batch["x"] @ params["w"]) * scale

    s = sharded(step)
    params, batch = {"w": ARRAY(16, 16)}, {"x": ARRAY(8, 16)}
    np.testing.assert_allclose(s(params, batch=batch, scale=2.0), batch["x"] @ params["w"] * 2, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(s(params, batch=batch), batch["x"] @ params["w"], rtol=1e-5, atol=1e-5)
    assert "batch/x" in s.plan(params, batch=batch).specs


def by_mode(params, x, mode):
    return x @ params["w"] if mode == "product" else x - 1.0


@pytest.mark.parametrize(
    ("static", "by_keyword"),
    [
        ({"static_argnames": "mode"}, True),
        ({"static_argnames": ("mode",)}, False),
        ({"static_argnums": 2}, False),
        ({"static_argnums": (2,)}, True),
        ({"static_argnums": -1}, False),
    ],
)
def test_static_arguments_as_jit_reads_them(static, by_keyword):
    params, x = {"w": ARRAY(16, 16)}, ARRAY(8, 16)
    step, plain = sharded(by_mode, **static), jax.jit(by_mode, **static)
    for mode in ("product", "other", "product"):
        args, kwargs = ((params, x), {"mode": mode}) if by_keyword else ((params, x, mode), {})
        np.testing.assert_allclose(step(*args, **kwargs), plain(*args, **kwargs), rtol=1e-5, atol=1e-5)
    assert len(step._entries) == 2


def test_static_argument_in_front():
    step = sharded(lambda mode, params, x: by_mode(params, x, mode), static_argnums=0)
    params, x = {"w": ARRAY(16, 16)}, ARRAY(8, 16)
    np.testing.assert_allclose(step("product", params, x), x @ params["w"], rtol=1e-5, atol=1e-5)
    assert list(step.plan("product", params, x).specs) == ["params/w", "x"]


def test_none_leaves_and_auxiliary_results():
    def step(state, batch):
        new = {"w": state["w"] * 0.5, "ema": None, "empty": []}
        return new, {"sum": batch["x"].sum(), "none": None, "pair": (batch["x"][0], 3.0)}

    s = sharded(step)
    state, batch = {"w": ARRAY(16, 16), "ema": None, "empty": []}, {"x": ARRAY(8, 16), "mask": None}
    new, aux = s(state, batch)
    expected_new, expected_aux = jax.jit(step)(state, batch)
    assert jax.tree.structure((new, aux)) == jax.tree.structure((expected_new, expected_aux))
    assert tree_relative_error((new, aux), (expected_new, expected_aux)) < 1e-6
    new, aux = s(new, batch)
    np.testing.assert_allclose(new["w"], state["w"] / 4)


def test_numbers_and_numpy_scalars_and_wide_arrays():
    step = sharded(lambda params, x, rate: params["w"] * rate + x.sum())
    w, x = ARRAY(16, 16), np.ones((8, 16))  # float64: JAX makes it float32
    for rate in (0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5), 2):
        np.testing.assert_allclose(step({"w": w}, x, rate), w * float(rate) + 128, rtol=1e-5)
    assert len(step._entries) == 3  # float, float32 and int: they promote differently


@pytest.mark.parametrize("reverse", [False, True])
def test_numbers_of_python_are_weak_and_others_are_not(reverse):
    """bfloat16 stays bfloat16 beside 0.5, not beside a float32 0.5, in whatever order they come."""

    def plain(params, rate):
        return {"w": params["w"] * rate}

    step = sharded(plain)
    params = {"w": jnp.ones((16, 16), jnp.bfloat16)}
    rates = [0.5, np.float64(0.5), np.float32(0.5), jnp.float32(0.5), 2]
    for rate in reversed(rates) if reverse else rates:
        assert step(params, rate)["w"].dtype == jax.jit(plain)(params, rate)["w"].dtype


def test_keys_as_arguments_and_as_state():
    def step(state, key, batch):
        mine, state_key = jax.random.split(state["key"])
        noise = jax.random.normal(mine, (16, 16)) + jax.random.normal(key, (16, 16))
        return {"key": state_key, "w": state["w"] + noise}, batch.sum()

    s = sharded(step)
    fresh = {"key": jax.random.key(3), "w": jnp.asarray(ARRAY(16, 16))}
    expected = jax.jit(step)(fresh, jax.random.key(1), ARRAY(8))[0]
    expected = jax.jit(step)(expected, jax.random.key(2), ARRAY(8))[0]
    state = s(fresh, jax.random.key(1), ARRAY(8))[0]
    state = s(state, jax.random.key(2), ARRAY(8))[0]
    assert tree_relative_error(state, expected) < 1e-6
    assert len(s._entries) == 1


def test_functions_without_a_name():
    partial = functools.partial(lambda c, state, x: ({"w": state["w"] * c}, x.sum()), 2.0)

    class Callable:
        def __call__(self, state, x):
            return {"w": state["w"] * 2.0}, x.sum()

    for fn, name in ((partial, "partial"), (Callable(), "Callable")):
        step = sharded(fn)
        assert step.__name__ == name
        state, _ = step({"w": ARRAY(16, 16)}, ARRAY(8))
        np.testing.assert_array_equal(state["w"], ARRAY(16, 16) * 2)


def test_mesh_that_the_user_gave_keeps_names_and_devices(devices):
    mesh = jax.sharding.Mesh(np.array(devices[4:]).reshape(2, 2), ("rows", "columns"))
    step = sharded(lambda params, x: x @ params["w"], mesh=mesh, pins={"w": P("rows", "columns")})
    out = step({"w": ARRAY(16, 16)}, ARRAY(8, 16))
    assert out.sharding.device_set == set(devices[4:])
    assert step.plan({"w": ARRAY(16, 16)}, ARRAY(8, 16)).specs["params/w"] == P("rows", "columns")


def test_explicit_axes_of_the_users_mesh_are_used_as_automatic_ones():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    step = sharded(lambda params, x: x @ params["w"], mesh=mesh)
    params, x = {"w": ARRAY(16, 16)}, ARRAY(8, 16)
    np.testing.assert_allclose(step(params, x), x @ params["w"], rtol=1e-5, atol=1e-5)


def test_explain_says_what_was_planned():
    step = sharded(memory=MEMORY)
    text = step.explain(jax.eval_shape(create, jax.random.key(0)), data())
    assert text == step.explain()
    assert "logical axes of train_step" in text
    assert "communication" in text
    leaf = step.explain(path="params/Dense_0/kernel")
    assert leaf.startswith("state/params/Dense_0/kernel: float32[64, 32], parameter")
    assert str(step._first_plan().specs["state/params/Dense_0/kernel"]) in leaf
