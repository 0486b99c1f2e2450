"""Traced steps: paths, roles, what replaces what, fingerprints."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState

from spmd_auto import _compat
from spmd_auto.errors import TraceError
from spmd_auto.trace import Role, abstract, reach, static_arguments, trace
from tests.models import gpt


def S(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"w": S(8, 4), "b": S(4)}
TX = optax.adam(1e-2)


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def update(params, opt_state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


OPT_STATE = jax.eval_shape(TX.init, PARAMS)


def roles(program):
    return {leaf.path: leaf.role for leaf in program.arguments}


def replaced(program):
    """Result path -> path of the argument that it replaces."""
    return {
        leaf.path: program.arguments[i].path
        for leaf, i in zip(program.results, program.replaces, strict=True)
        if i is not None
    }


P, M, C, B, K = Role.PARAMETER, Role.OPTIMIZER, Role.COUNTER, Role.BATCH, Role.KEY


# ---- where the state is ----------------------------------------------------------------------------------


def test_train_state():
    def step(state, batch):
        grads = jax.grad(loss)(state.params, batch["x"])
        return state.apply_gradients(grads=grads), {"loss": loss(state.params, batch["x"])}

    state = jax.eval_shape(
        lambda: TrainState.create(apply_fn=loss, params={"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, tx=TX)
    )
    program = trace(step, state, {"x": S(16, 8)})
    assert roles(program) == {
        "state/step": C,
        "state/params/b": P,
        "state/params/w": P,
        "state/opt_state/0/count": C,
        "state/opt_state/0/mu/b": M,
        "state/opt_state/0/mu/w": M,
        "state/opt_state/0/nu/b": M,
        "state/opt_state/0/nu/w": M,
        "batch/x": B,
    }
    assert replaced(program) == {f"0/{p.removeprefix('state/')}": p for p in roles(program) if p != "batch/x"}
    assert program.find("state/params/w").shape == (8, 4)
    assert program.find("state/params/w").bytes == 128


def test_dictionary_state():
    def step(state, x):
        params, opt_state, value = update(state["params"], state["opt_state"], x)
        return {"params": params, "opt_state": opt_state}, value

    program = trace(step, {"params": PARAMS, "opt_state": OPT_STATE}, S(16, 8))
    found = roles(program)
    assert found["state/params/w"] == found["state/params/b"] == P
    assert found["state/opt_state/0/mu/w"] == found["state/opt_state/0/nu/w"] == M
    assert found["x"] == B
    assert len(replaced(program)) == len(found) - 1


def test_step_that_returns_only_the_state():
    """Nothing says what the state is for, but the paths."""

    def step(state, x):
        params, opt_state, _ = update(state["params"], state["opt_state"], x)
        return {"params": params, "opt_state": opt_state}

    program = trace(step, {"params": PARAMS, "opt_state": OPT_STATE}, S(16, 8))
    found = roles(program)
    assert found["state/params/w"] == P
    assert found["state/opt_state/0/mu/w"] == M
    assert found["state/opt_state/0/count"] == C
    assert replaced(program)["params/w"] == "state/params/w"


@pytest.mark.parametrize(
    "order", ["params opt value", "value params opt", "value (params opt)", "opt value params", "dict"]
)
def test_parameters_and_optimizer_state_as_arguments_of_their_own(order):
    def step(params, opt_state, x):
        params, opt_state, value = update(params, opt_state, x)
        return {
            "params opt value": (params, opt_state, value),
            "value params opt": (value, params, opt_state),
            "value (params opt)": (value, (params, opt_state)),
            "opt value params": (opt_state, value, params),
            "dict": {"new": params, "opt": opt_state, "loss": value},
        }[order]

    program = trace(step, PARAMS, OPT_STATE, S(16, 8))
    assert set(replaced(program).values()) == set(roles(program)) - {"x"}
    found = roles(program)
    assert found["params/w"] == P
    assert found["opt_state/0/mu/w"] == M


def test_two_states():
    def step(generator, critic, x):
        return (
            jax.tree.map(lambda p: p * 0.9, generator),
            jax.tree.map(lambda p: p * 0.8, critic),
            loss(generator, x) + loss(critic, x),
        )

    program = trace(step, PARAMS, PARAMS, S(16, 8))
    assert replaced(program) == {
        "0/b": "generator/b",
        "0/w": "generator/w",
        "1/b": "critic/b",
        "1/w": "critic/w",
    }
    assert set(roles(program).values()) == {P, B}


def test_state_of_a_flax_dataclass_and_running_statistics():
    @struct.dataclass
    class State:
        weights: dict
        average: jax.Array
        name: str = struct.field(pytree_node=False, default="x")

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state.weights, x)
        new = jax.tree.map(lambda p, g: p - g, state.weights, grads)
        return state.replace(weights=new, average=0.9 * state.average + 0.1 * x.mean(0)), value

    program = trace(step, State(PARAMS, S(8)), S(16, 8))
    assert roles(program) == {"state/weights/b": P, "state/weights/w": P, "state/average": M, "x": B}


def test_unused_parameters_are_state():
    """autoparallel#384, #368."""

    def step(state, x):
        return {"used": state["used"] * 0.9, "unused": state["unused"]}, (x * state["used"]).sum()

    program = trace(step, {"used": S(8), "unused": S(4, 4)}, S(8))
    assert replaced(program) == {"0/unused": "state/unused", "0/used": "state/used"}
    assert roles(program)["state/used"] == P


def test_scan_and_jit_are_looked_through():
    @jax.jit
    def inner(params, x):
        def body(carry, w):
            return jnp.tanh(carry @ w), carry.sum()

        out, sums = jax.lax.scan(body, x, params["stack"])
        return out.sum(), sums

    def step(state, x):
        (value, sums), grads = jax.value_and_grad(inner, has_aux=True)(state["params"], x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    stack = {"stack": S(3, 8, 8)}
    program = trace(step, {"params": stack, "momentum": stack}, S(4, 8))
    assert roles(program) == {"state/momentum/stack": M, "state/params/stack": P, "x": B}


def test_carries_are_followed_round_by_round():
    """The result is `a`, which is yesterday's `b`, which is the day before's `c`, which the weights make."""

    def step(state, x):
        def body(carry, _):
            a, b, c = carry
            return (b, c, jnp.tanh(c * state["w"])), None

        (a, _, _), _ = jax.lax.scan(body, (x, x, x), None, length=5)
        return {"w": state["w"] * 0.9, "m": state["m"] * 0.9}, a.sum()

    assert roles(trace(step, {"w": S(8), "m": S(8)}, S(8))) == {"state/m": M, "state/w": P, "x": B}


# ---- what is no state ------------------------------------------------------------------------------------


def test_bare_arrays_are_never_state():
    for fn in (lambda x: x * 2, lambda x: (x * 2, x.sum()), lambda x: [x], lambda x: {"x": x}):
        assert not replaced(trace(fn, S(8, 8)))
    assert roles(trace(lambda x: x, S(8, 8))) == {"x": B}


def test_batch_of_another_shape_or_dtype_is_no_state():
    def half(batch):
        return {"x": batch["x"][:4]}

    def cast(batch):
        return {"x": batch["x"].astype(jnp.bfloat16)}

    def renamed(batch):
        return {"y": batch["x"]}

    for fn in (half, cast, renamed):
        assert not replaced(trace(fn, {"x": S(8, 8)}))


def test_trees_of_scalars_are_no_state():
    assert not replaced(trace(lambda m: {"loss": m["loss"] * 2}, {"loss": S()}))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.jit(f))])
def test_gradients_are_no_new_state_but_make_parameters(wrap):
    for fn in (jax.grad(loss), jax.value_and_grad(loss)):
        program = trace(wrap(fn), PARAMS, S(16, 8))
        assert not replaced(program)
        assert roles(program) == {"params/b": P, "params/w": P, "x": B}


def test_casts_are_elementwise():
    """bfloat16 parameters under float32 updates, and rounded ones."""

    def step(state, x):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"].astype(jnp.float32)) ** 2))(state)
        new = state["w"].astype(jnp.float32) - 0.1 * grads["w"].astype(jnp.float32)
        return {"w": jax.lax.reduce_precision(new, 8, 7).astype(jnp.bfloat16)}, value

    program = trace(step, {"w": S(8, 4, dtype=jnp.bfloat16)}, S(16, 8))
    assert replaced(program) == {"0/w": "state/w"}
    assert roles(program) == {"state/w": P, "x": B}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("params", P),
        ("ema_params", P),
        ("frozen", P),
        ("model_2", P),
        ("model_state", P),
        ("model_inputs", B),
        ("frozen_batch", B),
        ("parameters_of_the_noise", B),
    ],
)
def test_the_last_word_of_a_name_says_what_it_is(name, role):
    step = eval(f"lambda {name}, x: (x @ {name}['w']).sum()")
    assert roles(trace(step, {"w": S(8, 4)}, S(16, 8))) == {f"{name}/w": role, "x": B}


def test_a_users_scope_is_no_transposition():
    def f(x):
        with jax.named_scope("transpose(heads)"):
            return (jnp.sin(x) * x).sum()

    eqns = jax.make_jaxpr(jax.grad(f))(S(3)).jaxpr.eqns
    backward = [eqn.primitive.name for eqn in eqns if _compat.is_transposed(eqn)]
    assert 0 < len(backward) < len(eqns)
    assert not {"sin", "cos"} & set(backward)


def test_evaluation_function_knows_parameters_by_their_name():
    def evaluate(params, batch):
        return loss(params, batch["x"])

    assert roles(trace(evaluate, PARAMS, {"x": S(16, 8)})) == {"params/b": P, "params/w": P, "batch/x": B}

    def apply(variables, x):
        return loss(variables["params"], x)

    found = roles(trace(apply, {"params": PARAMS}, S(16, 8)))
    assert found["variables/params/w"] == P
    assert found["x"] == B


def test_keys():
    def step(state, key, raw, x):
        key, _ = jax.random.split(key)
        noise = jax.random.normal(key, (8, 4)) + jax.random.normal(raw, (8, 4))
        return {"w": state["w"] + noise, "key": state["key"]}, (x @ state["w"]).sum()

    key = jax.random.key(0)
    program = trace(step, {"w": S(8, 4), "key": key}, key, S(2, dtype=jnp.uint32), S(16, 8))
    assert roles(program) == {"state/key": K, "state/w": P, "key": K, "raw": B, "x": B}
    assert replaced(program)["0/key"] == "state/key"
    leaf = program.find("key")
    assert (leaf.shape, leaf.itemsize) == ((), 8)


# ---- paths -----------------------------------------------------------------------------------------------


def test_paths_of_keywords_defaults_and_star_arguments():
    def named(a, b=None, *, c, d=1.0):
        return a + c + d

    assert list(roles(trace(named, S(4), c=S(4)))) == ["a", "c"]
    assert list(roles(trace(named, S(4), None, c=S(4), d=2.0))) == ["a", "c", "d"]
    assert list(roles(trace(lambda *args: args[0], S(4), [S(4), {"k": S(2)}]))) == ["arg0", "arg1/0", "arg1/1/k"]
    assert list(roles(trace(functools.partial(named, c=3.0), S(4)))) == ["a"]
    assert list(roles(trace(jnp.sin, S(4)))) == ["x"]


def test_paths_of_nested_trees():
    tree = {"a": {"b": S(2)}, "c": [S(2), (S(2),)], "d": None}
    program = trace(lambda t: t, tree)
    paths = [leaf.path for leaf in program.arguments]
    assert paths == ["t/a/b", "t/c/0", "t/c/1/0"]


def test_results_carry_their_path_and_role():
    program = trace(lambda state, x: ({"w": state["w"] * 2}, {"a": [x, x + state["w"]]}), {"w": S(4)}, S(4))
    assert [(leaf.path, leaf.role) for leaf in program.results] == [("0/w", P), ("1/a/0", None), ("1/a/1", None)]


# ---- abstract values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "shape", "dtype", "weak"),
    [
        (1, (), "int32", True),
        (1.0, (), "float32", True),
        (True, (), "bool", True),
        (1j, (), "complex64", True),
        (np.float64(1), (), "float32", False),
        (np.ones((2, 3)), (2, 3), "float32", False),
        (np.ones(2, np.int64), (2,), "int32", False),
        (jnp.ones((2,), jnp.bfloat16), (2,), "bfloat16", False),
        (jax.ShapeDtypeStruct((5,), jnp.int8), (5,), "int8", False),
        (jnp.array(2.0), (), "float32", True),  # JAX made it of nothing but a number
        (jax.ShapeDtypeStruct((), jnp.float32, weak_type=True), (), "float32", True),
    ],
)
def test_abstract(x, shape, dtype, weak):
    a = abstract(x)
    assert (a.shape, str(a.dtype), a.weak_type) == (shape, dtype, weak)


def test_abstract_keeps_sixty_four_bits_only_where_jax_does():
    assert abstract(np.ones(2)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert abstract(np.ones(2)).dtype == jnp.float64
        assert abstract(1).dtype == jnp.int64


def test_abstract_of_a_key_keeps_its_kind():
    key = jax.random.key(0)
    assert abstract(key).dtype == key.dtype


def test_arrays_and_structs_trace_to_one_program():
    x = np.ones((16, 8), np.float32)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), PARAMS)
    assert trace(loss, params, x).fingerprint == trace(loss, PARAMS, S(16, 8)).fingerprint


def test_nothing_is_computed():
    calls = []

    def fn(x):
        jax.debug.callback(lambda: calls.append(1))
        return x

    trace(fn, np.ones(4, np.float32))
    jax.effects_barrier()
    assert not calls


# ---- static arguments ------------------------------------------------------------------------------------


def by_mode(x, mode, /, y, *, flag=False):
    return x


@pytest.mark.parametrize(
    ("numbers", "names", "expected"),
    [
        ((), (), ((), ())),
        (1, (), ((1,), ())),  # positional only: it has no name
        (2, (), ((2,), ("y",))),
        (-1, (), ((2,), ("y",))),
        ((), "y", ((2,), ("y",))),
        ((), "flag", ((), ("flag",))),
        ((1, 2), ("flag",), ((1, 2), ("flag", "y"))),
        ([2], ["y"], ((2,), ("y",))),
    ],
)
def test_static_arguments(numbers, names, expected):
    assert static_arguments(by_mode, numbers, names) == expected


def test_static_arguments_of_functions_that_take_anything():
    assert static_arguments(lambda *args, **kwargs: 0, 7, "anything") == ((7,), ("anything",))


@pytest.mark.parametrize(
    ("numbers", "names", "word"), [(3, (), "3"), (-4, (), "-4"), ((), "mode", "mode"), ((), "fag", "flag")]
)
def test_static_arguments_that_do_not_exist(numbers, names, word):
    with pytest.raises(TraceError, match=word):
        static_arguments(by_mode, numbers, names)


# ---- fingerprints ----------------------------------------------------------------------------------------

CHILD = """
import jax
from tests.models import gpt
from spmd_auto.trace import trace
_, step, state, batch = gpt.make(width=16, sequence=8, vocab=32, dropout=0.1)
print(trace(step, state, batch).fingerprint)
"""


@pytest.mark.parametrize("seed", ["0", "777"])
def test_fingerprint_is_equal_in_another_process(seed):
    _, step, state, batch = gpt.make(width=16, sequence=8, vocab=32, dropout=0.1)
    here = trace(step, state, batch).fingerprint
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == here


def test_fingerprint_tells_programs_apart():
    def fingerprint(fn, *args):
        return trace(fn, *args).fingerprint

    base = fingerprint(lambda x: jnp.sin(x), S(4))
    assert fingerprint(lambda x: jnp.sin(x), S(4)) == base
    assert fingerprint(lambda x: jnp.cos(x), S(4)) != base
    assert fingerprint(lambda x: jnp.sin(x), S(5)) != base
    assert fingerprint(lambda x: jnp.sin(x), S(4, dtype=jnp.bfloat16)) != base
    assert fingerprint(lambda y: jnp.sin(y), S(4)) != base  # another path
    assert fingerprint(lambda x: {"r": jnp.sin(x)}, S(4)) != base
    assert fingerprint(lambda x: jnp.sin(x) * 2, S(4)) != fingerprint(lambda x: jnp.sin(x) * 3, S(4))


def test_fingerprint_is_that_of_the_program_not_of_its_data():
    """A closed-over table may have other values in the next run: the plan still holds."""

    def make(table):
        return lambda x: x + table

    a, b, c = (trace(make(jnp.full(shape, v)), S(4)).fingerprint for shape, v in ((4, 1.0), (4, 2.0), ((2, 4), 1.0)))
    assert a == b != c


def test_the_way_back_from_results_is_looked_up_once():
    """Every leaf of a state asks for it; made anew for each, 150 leaves of a 7,000-equation step took 22 seconds."""
    jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, y * 2))(1.0, 2.0)
    assert reach.updates(jaxpr, 0) == {0}
    kept = weakref.ref(_compat.open_jaxpr(jaxpr))
    assert reach._origins(kept()) is reach._origins(kept())
    del jaxpr
    jax.clear_caches()
    gc.collect()
    assert kept() is None, "a traced program is kept alive"
