"""Wrong input: each kind has its own error class, and says what, why and the nearest fixes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import spmd_auto
from spmd_auto import errors
from spmd_auto.errors import (
    BatchError,
    LoweringError,
    MemoryBudgetError,
    MeshError,
    PinError,
    ProfileError,
    SpmdAutoError,
    StrategyError,
    TraceError,
    VerifyError,
)
from spmd_auto.mesh import registry
from spmd_auto.search import SearchOptions
from tests.known_answers.toy import toy_mesh
from tests.models import gpt
from tests.refused import LIST, refused, title

FAST = SearchOptions(states=60)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def step(state, batch):
    def loss(params):
        return jnp.mean((batch["x"] @ params["up"]["kernel"] @ params["down"]["kernel"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


def state(width=16, hidden=24):
    return {"params": {"up": {"kernel": struct(width, hidden)}, "down": {"kernel": struct(hidden, width)}}}


def batch(size=8, width=16):
    return {"x": struct(size, width)}


def planned(mesh=None, pins=None, **options):
    options.setdefault("search", FAST)
    return spmd_auto.plan(step, state(), batch(), mesh=mesh or toy_mesh(2, 4), pins=pins, **options)


def test_every_error_has_the_family_and_the_form():
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(found) > 10
    for cls in found:
        assert issubclass(cls, SpmdAutoError)
        assert inspect.getdoc(cls)
        error = cls("what", "why", ["one", "two"])
        assert str(error) == "what\n  why: why\n  fix: one\n  fix: two"
    assert str(SpmdAutoError("only what")) == "only what"


# ---- pins --------------------------------------------------------------------------------------


def test_pin_that_does_not_divide_names_leaf_dimension_and_nearest_fixes():
    with refused(
        PinError,
        what=("up/kernel", "dimension 1", "state/params/up/kernel", "(16, 24)", "in 16"),
        why=("24 is not divisible by", "a=2", "b=8"),
        fixes=(
            "'a' divides dimension 1",
            "'b' divides dimension 1",
            "dimension 0 (size 16) is divisible by 16",
            "to 32",
        ),
    ):
        planned(toy_mesh(2, 8), {"up/kernel": P(None, ("a", "b"))})


@pytest.mark.parametrize("shape", [(17, 16), (16, 17)])
def test_seventeen_over_eight_is_never_silently_replicated(shape):
    """jax#26946."""
    dim = shape.index(17)
    spec = P("a") if dim == 0 else P(None, "a")
    with refused(PinError, what=("x", f"dimension {dim}", "can't be split in 8"), fixes="pad dimension"):
        spmd_auto.plan(lambda x: x * 2, struct(*shape), mesh=toy_mesh(8), pins={"x": spec})


def test_pin_of_an_unknown_mesh_axis():
    with refused(
        PinError, what=("up/kernel", "'model'", "state/params/up/kernel"), why=("'a'", "'b'"), fixes="('a', 'b')"
    ):
        planned(pins={"up/kernel": P("model")})


def test_pin_of_one_axis_twice():
    with refused(PinError, what=("up/kernel", "'a' twice")):
        planned(pins={"up/kernel": P("a", "a")})


def test_pin_with_more_entries_than_dimensions():
    with refused(PinError, what=("up/kernel", "3 entries", "rank 2")):
        planned(pins={"up/kernel": P(None, None, "a")})


def test_pin_of_no_leaf_offers_the_nearest_path():
    with refused(
        PinError,
        what=("state/params/up/kernl", "no argument leaf of step"),
        why="3 leaves",
        fixes="did you mean 'state/params/up/kernel'?",
    ):
        planned(pins={"state/params/up/kernl": P("a")})


@pytest.mark.parametrize("wrong", ["a", None, 3, P.UNCONSTRAINED])
def test_pin_that_is_no_partition_spec(wrong):
    with refused(PinError, what=("up/kernel", type(wrong).__name__), why="PartitionSpec", fixes="jax.P()"):
        planned(pins={"up/kernel": wrong})


def test_pin_with_an_entry_that_is_no_axis():
    with refused(PinError, what=("up/kernel", "has the entry 3"), fixes="('a', 'b'), or None"):
        planned(pins={"up/kernel": (3, "a")})


def test_pins_that_are_no_dictionary():
    with refused(PinError, what="pins is a list", fixes="a dict of path -> PartitionSpec"):
        planned(pins=[("up/kernel", P("a"))])


# ---- strategies ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer():
    _, train, train_state, data = gpt.make(width=32, sequence=16, vocab=64)
    return train, train_state, data


def priced(transformer, assignment, mesh=None, **options):
    return spmd_auto.price(*transformer, mesh=mesh or toy_mesh(2, 4), assignment=assignment, **options)


def test_logical_axis_that_does_not_exist_offers_the_nearest(transformer):
    with refused(
        StrategyError, what=("'head'", "step"), why=("batch", "heads", "vocab"), fixes="did you mean 'heads'?"
    ):
        priced(transformer, {"head": "b"})


def test_mesh_axis_that_does_not_exist_offers_the_nearest(transformer):
    with refused(StrategyError, what="'aa'", why="a=2, b=4", fixes="use 'a'"):
        priced(transformer, {"batch": "aa"})


def test_stacking_axis_of_a_scan_is_never_split(transformer):
    with refused(StrategyError, what="'layers'", why="stacking dimension of a scan is never split"):
        priced(transformer, {"layers": "a"})


def test_zero_over_an_unknown_mesh_axis(transformer):
    with refused(StrategyError, what="'data'", fixes="use 'a'"):
        priced(transformer, {"batch": "a"}, zero=3, zero_axes=("data",))


@pytest.mark.parametrize(
    ("stage", "axes"), [(4, ("a",)), (-1, ("a",)), (3, ()), (1, 3), (1, ("a", "a")), (True, "a"), ("3", "a")]
)
def test_zero_that_does_not_exist_or_has_no_axes(transformer, stage, axes):
    """maxtext#5104: a ZeRO flag that does nothing."""
    with refused(StrategyError, what=f"zero={stage!r}", why="stages 0 to 3", fixes="zero_axes="):
        priced(transformer, {"batch": "a"}, zero=stage, zero_axes=axes)


def test_batch_smaller_than_the_mesh_axis_it_is_given_to():
    """alpa#543: data parallel must not "succeed" at batch 1."""
    mesh = toy_mesh(4)
    for size, why in ((1, "no logical axis"), (2, "smaller than the mesh axis"), (6, "6 is not divisible by 4")):
        if size == 1:  # a dimension of size 1 is no axis at all
            with refused(StrategyError, what="'batch'"):
                spmd_auto.price(step, state(), batch(1), mesh=mesh, assignment={"batch": "a"})
            continue
        with refused(
            BatchError, what=("'batch'", f"of size {size}", "'a'", "4 devices"), why=why, fixes="leave the axis whole"
        ):
            spmd_auto.price(step, state(), batch(size), mesh=mesh, assignment={"batch": "a"})


# ---- memory -------------------------------------------------------------------------------------


def test_memory_that_can_not_suffice_says_by_how_much_and_what_came_nearest():
    with pytest.raises(MemoryBudgetError) as caught:
        planned(memory=300.0)
    error = caught.value
    assert "no plan of step fits 3e-07 GB per device" in error.what
    for part in (
        "the nearest needs",
        "parameters",
        "optimizer state",
        "temporaries",
        "are missing",
        "the whole state is",
    ):
        assert part in error.why
    words = error.why.split()
    needs, missing = float(words[3]), float(words[words.index("missing") - 3])
    assert needs - missing == pytest.approx(3e-7, rel=0.05)
    assert any("devices of this size" in fix for fix in error.fixes)
    # the plan that it names is real: with that much memory it is found
    wanted = float(next(fix for fix in error.fixes if fix.startswith("memory=")).split("=")[1].split()[0])
    assert planned(memory=wanted * 1.01).memory <= wanted * 1.01


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), "16GB"])
def test_memory_must_be_positive(memory):
    with refused(MemoryBudgetError, what="memory=", fixes="memory=16e9"):
        planned(memory=memory)


# ---- meshes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["8", (2, 4), 8, ["a", "b"]])
def test_mesh_of_a_wrong_type(mesh):
    with refused(MeshError, what=f"mesh is a {type(mesh).__name__}", why="jax Mesh", fixes=("cluster(", "make_mesh")):
        spmd_auto.plan(step, state(), batch(), mesh=mesh)


def test_more_devices_than_present():
    plan = planned(spmd_auto.cluster("h100", hosts=2))
    with refused(MeshError, what=("16 devices", "8 are there"), fixes=("plan again for 8", "simulate_devices(16)")):
        plan.lower_step()


def test_devices_of_several_kinds():
    class Device:
        def __init__(self, kind):
            self.device_kind = kind

    with refused(MeshError, what=("several kinds", "A100", "H100")):
        toy_mesh(2).build([Device("A100"), Device("H100")])


def test_simulate_devices_too_late_says_how_many_there_are(devices):
    with refused(MeshError, what=("simulate_devices(9)", "too late", "8 CPU"), fixes="JAX_NUM_CPU_DEVICES=9"):
        spmd_auto.simulate_devices(9)
    with refused(MeshError, what="simulate_devices(0)"):
        spmd_auto.simulate_devices(0)
    spmd_auto.simulate_devices(8)


# ---- tracing ------------------------------------------------------------------------------------


def test_step_that_can_not_be_traced_keeps_the_original_error_as_its_cause():
    def bad(params, x):
        if x.sum() > 0:
            return params
        return {"w": params["w"] * 2}

    with refused(TraceError, what=("bad cannot be traced", "TracerBoolConversionError"), fixes="jax.make_jaxpr"):
        spmd_auto.plan(bad, {"w": struct(8, 8)}, struct(8), mesh=toy_mesh(4))
    with pytest.raises(TraceError) as caught:
        spmd_auto.plan(bad, {"w": struct(8, 8)}, struct(8), mesh=toy_mesh(4))
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


@pytest.mark.parametrize(
    ("leaf", "kind"), [("adam", "str"), (object(), "object"), (print, "builtin_function_or_method")]
)
def test_argument_leaf_that_is_no_array(leaf, kind):
    with refused(TraceError, what=("'batch/mode'", kind), why="only arrays", fixes="static_argnames"):
        spmd_auto.plan(lambda batch: batch["x"], {"x": struct(8), "mode": leaf}, mesh=toy_mesh(4))


def test_wrong_number_of_arguments_is_a_trace_error():
    with refused(TraceError, what=("step cannot be traced", "TypeError", "batch")):
        spmd_auto.plan(step, state(), mesh=toy_mesh(4))


def test_static_arguments_that_do_not_exist():
    def f(x, mode):
        return x

    with refused(TraceError, what=("'mod'", "f has no such argument"), fixes="did you mean 'mode'?"):
        spmd_auto.auto_shard(f, static_argnames="mod")
    with refused(TraceError, what=("static_argnums has 2", "2 positional arguments"), fixes="0, 1"):
        spmd_auto.auto_shard(f, static_argnums=2)


def test_static_argument_that_can_not_be_hashed():
    decorated = spmd_auto.auto_shard(lambda x, sizes: x, static_argnames="sizes")
    with refused(TraceError, what=("can't be hashed", "list"), fixes="tuple"):
        decorated.plan(struct(8), sizes=[1, 2])


# ---- plans and the decorator ----------------------------------------------------------------------


def test_explain_of_an_unknown_leaf_offers_the_nearest():
    with refused(StrategyError, what="'params/up/kernal'", fixes="did you mean 'state/params/up/kernel'?"):
        planned().explain("params/up/kernal")


def test_explain_before_any_plan():
    with refused(LoweringError, what="step has no plan yet", fixes="pass the arguments"):
        spmd_auto.auto_shard(step).explain()


def test_init_without_plan_or_batch():
    decorated = spmd_auto.auto_shard(step, search=FAST)
    with refused(
        LoweringError, what="step.init has no plan", why="depends on the batch", fixes=("batch=", ".plan(state, batch)")
    ):
        decorated.init(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape), state()))


def test_init_of_another_state_than_planned():
    decorated = spmd_auto.auto_shard(step, search=FAST)
    decorated.plan(state(), batch())
    with refused(
        LoweringError, what=("state/params/down/kernel", "(32, 16)"), fixes="the state that the step was planned for"
    ):
        decorated.init(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape), state(hidden=32)))


def test_init_of_a_state_that_can_not_be_traced():
    decorated = spmd_auto.auto_shard(step, search=FAST)
    with refused(TraceError, what=("step.init", "TypeError"), fixes="functools.partial(create"):
        decorated.init(lambda n: {"params": {"w": jnp.zeros((n, n))}}, 16, batch=batch())


def test_donated_state_used_again():
    decorated = spmd_auto.auto_shard(step, search=FAST)
    old = jax.tree.map(lambda s: jnp.ones(s.shape), state())
    data = {"x": np.ones((8, 16), np.float32)}
    decorated(old, data)  # the first call moves the state to where it is planned
    new, _ = decorated(jax.tree.map(lambda s: jnp.ones(s.shape), state()), data)
    decorated(new, data)
    with refused(
        LoweringError,
        what=("state/params/down/kernel", "donated"),
        fixes=("use the state that the step returned", "auto_shard(donate=False)"),
    ):
        decorated(new, data)


def test_user_constraint_on_another_mesh_than_the_plan(devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("other",))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, jax.NamedSharding(mesh, P("other")))

    with refused(PinError, what=("test_errors.py", "['other']"), why=("'a'", "'other'"), fixes="auto_shard(mesh=mesh)"):
        spmd_auto.plan(constrained, struct(8, 8), mesh=toy_mesh(8), search=FAST)


# ---- runs ---------------------------------------------------------------------------------------


def test_a_decorated_step_inside_of_grad():
    decorated = spmd_auto.auto_shard(search=FAST)(lambda p: jnp.sum(p**2))
    with refused(LoweringError, what="inside of grad, vmap", why="nothing is differentiated", fixes="transform first"):
        jax.grad(decorated)(jnp.ones(8))


@pytest.mark.parametrize("x", [struct(16), jax.typeof(jnp.ones(16))])
def test_a_call_with_shapes_only(x):
    decorated = spmd_auto.auto_shard(search=FAST)(lambda x: x.sum())
    with refused(LoweringError, what=f"'x' is a {type(x).__name__}", why="runs the step", fixes=("plan", "eval_shape")):
        decorated(x)


def test_a_ragged_batch_that_is_not_wanted():
    decorated = spmd_auto.auto_shard(step, search=FAST, ragged="refuse")
    decorated.plan(state(), batch(8192))
    with refused(BatchError, what=("'batch/x'", "has 5"), why="the first batch was split", fixes="drop the last batch"):
        decorated.plan(state(), batch(5))


def test_an_unknown_treatment_of_ragged_batches():
    with refused(BatchError, what="ragged='pad'", fixes=('"replicate"', '"refuse"')):
        spmd_auto.auto_shard(step, ragged="pad")


def test_an_object_of_the_users_changed_in_place_and_not_returned():
    @jax.tree_util.register_pytree_node_class
    class Box:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    def changes(box, x):
        box.w = box.w + x.sum()
        return x.sum()

    with refused(TraceError, what=("changes", "in place"), why="only what it returns lasts", fixes="return box too"):
        spmd_auto.plan(changes, Box(jnp.ones(8)), jnp.ones(8), mesh=toy_mesh(2))


# ---- options of the decorator -------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3, jax.P("a"), dict])
def test_decorating_what_is_no_function(wrong):
    with refused(TraceError, what=f"auto_shard of a {type(wrong).__name__}", why="a step", fixes="auto_shard(step)"):
        spmd_auto.auto_shard(wrong)


@pytest.mark.parametrize("mesh", [jax.sharding.AbstractMesh((2,), ("a",)), toy_mesh(2), spmd_auto.cluster("h100")])
def test_a_mesh_given_as_the_function(mesh):
    with refused(TraceError, what=f"auto_shard of a {type(mesh).__name__}", fixes="auto_shard(mesh=...)(step)"):
        spmd_auto.auto_shard(mesh)


def test_a_jax_mesh_given_as_the_function(devices):
    """It can be called: it is a decorator itself."""
    with refused(TraceError, what="auto_shard of a Mesh", fixes="auto_shard(mesh=...)(step)"):
        spmd_auto.auto_shard(jax.sharding.Mesh(devices, ("a",)))


@pytest.mark.parametrize("donate", [0, "state", (0,), None])
def test_donating_named_arguments(donate):
    with refused(StrategyError, what=f"donate={donate!r}", why="is found", fixes=("donate=True", "donate=False")):
        spmd_auto.auto_shard(step, donate=donate)


@pytest.mark.parametrize("option", ["quiet", "cache"])
def test_a_switch_that_is_neither_on_nor_off(option):
    with refused(StrategyError, what=f"{option}='no'", why="on or off", fixes=f"{option}=False"):
        spmd_auto.auto_shard(step, **{option: "no"})


@pytest.mark.parametrize("option", ["donate_argnums", "donate_argnames", "in_shardings", "out_shardings"])
def test_options_of_jit(option):
    fix = "pins=" if "shardings" in option else "donate=True"
    with refused(StrategyError, what=f"auto_shard has no {option}", why="jax.jit", fixes=fix):
        spmd_auto.auto_shard(**{option: None})


def test_limits_of_a_search_that_are_none():
    with refused(StrategyError, what="search=500 is a int", fixes="SearchOptions(states=500)"):
        spmd_auto.auto_shard(step, search=500)


@pytest.mark.parametrize("option", [{"static_argnums": "batch"}, {"static_argnums": 1.5}, {"static_argnames": 1}])
def test_static_arguments_named_by_something_else(option):
    [(name, value)] = option.items()
    with refused(TraceError, what=f"{name}={value!r}", why="as in jit", fixes=f"{name}="):
        spmd_auto.auto_shard(step, **option)


def test_a_local_argument_named_by_something_else():
    with refused(TraceError, what="local=1", why="names", fixes='local="batch"'):
        spmd_auto.auto_shard(step, local=1)


def test_pins_of_a_decorated_step_that_are_no_dictionary():
    with refused(PinError, what="pins is a str", fixes="pins={"):
        spmd_auto.auto_shard(step, pins="model")


@pytest.mark.parametrize("like", [step, 3, jax.jit(step)])
def test_following_what_is_no_decorated_step(like):
    with refused(StrategyError, what=f"is a {type(like).__name__}", why="known to that step", fixes="like=train_step"):
        spmd_auto.auto_shard(step, like=like)


def test_following_a_step_on_another_mesh(devices):
    """Its state lies there: the devices could not even run one program on both."""
    theirs = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    ours = jax.sharding.Mesh(devices[:4], ("data",))
    train = spmd_auto.auto_shard(step, mesh=theirs)

    def evaluate(state, batch):
        return jnp.mean(batch["x"])

    with refused(MeshError, what="evaluate has a mesh of its own", why="mesh of step (Mesh(", fixes="leave mesh= out"):
        spmd_auto.auto_shard(evaluate, like=train, mesh=ours)
    with refused(MeshError, why="mesh of step (none", fixes="give step the mesh"):
        spmd_auto.auto_shard(evaluate, like=spmd_auto.auto_shard(step), mesh=ours)
    follows = spmd_auto.auto_shard(evaluate, like=train)
    with refused(MeshError, what="like=evaluate", why="mesh of evaluate (Mesh("):
        spmd_auto.auto_shard(lambda state, batch: 0.0, like=follows, mesh=ours)


def test_an_abstract_mesh_of_hosts_that_are_not_full():
    with refused(
        MeshError,
        what=("AbstractMesh of 12 devices", "a=3, b=4", "8 cpu"),
        why="12 do not fill hosts",
        fixes='spmd_auto.cluster("cpu", per_host=12).mesh(a=3, b=4)',
    ):
        spmd_auto.plan(step, state(), batch(), mesh=jax.sharding.AbstractMesh((3, 4), ("a", "b")))


def test_a_logical_axis_given_a_mesh_axis_twice():
    with refused(StrategyError, what="'batch' is given the mesh axis 'a' twice", why="once", fixes="once"):
        spmd_auto.price(step, state(), batch(), mesh=toy_mesh(2, 4), assignment={"batch": ("a", "a")})


@pytest.mark.parametrize("assignment", [{"batch": 3}, {"batch": (0, 1)}, {3: "a"}])
def test_an_assignment_that_names_nothing(assignment):
    with refused(StrategyError, what="assignment=", why="by name", fixes="'batch': 'data'"):
        spmd_auto.price(step, state(), batch(), mesh=toy_mesh(2, 4), assignment=assignment)


@pytest.mark.parametrize("assignment", [["batch"], None])
def test_an_assignment_that_is_no_dictionary(assignment):
    with refused(StrategyError, what="assignment=", why="by name", fixes="'batch': 'data'"):
        spmd_auto.price(step, state(), batch(), mesh=toy_mesh(2, 4), assignment=assignment)


@pytest.mark.parametrize("limit", [{"beam_width": 0}, {"patience": -1}, {"states": 0}, {"depth": 1.5}, {"seconds": -1}])
def test_limits_under_which_nothing_is_searched(limit):
    ((name, value),) = limit.items()
    with refused(StrategyError, what=f"SearchOptions({name}={value!r})", fixes=f"{name}="):
        spmd_auto.SearchOptions(**limit)


@pytest.mark.parametrize("target", [8, None])
def test_a_target_that_is_no_text(target):
    plan = spmd_auto.plan(step, state(), batch(), mesh=toy_mesh(8), search=FAST)
    with refused(VerifyError, what=repr(target), why="not a text", fixes="cpu"):
        spmd_auto.verify(plan, target)


def test_pins_whose_keys_are_no_paths():
    with refused(PinError, what="pins has the key 0, a int", why="by its path", fixes="'*/kernel'"):
        spmd_auto.plan(step, state(), batch(), mesh=toy_mesh(8), pins={0: jax.P("a")})


def test_a_pin_on_a_result_that_is_not_there():
    with refused(PinError, what="pin 'result/7' matches no result leaf", why="look like 'result/", fixes="result/"):
        spmd_auto.plan(step, state(), batch(), mesh=toy_mesh(8), pins={"result/7": jax.P("a")})


def test_verifying_what_is_no_plan():
    with refused(VerifyError, what="was given a function", why="a plan", fixes="verify(step.plan(*args))"):
        spmd_auto.verify(step)


@pytest.mark.parametrize("path", ["xyzzy", 3])
def test_explaining_what_is_no_leaf(path):
    plan = spmd_auto.plan(step, state(), batch(), mesh=toy_mesh(8), search=FAST)
    with refused(StrategyError, what=f"no argument leaf {path!r}", fixes="did you mean 'state/"):
        plan.explain(path)


# ---- hardware profiles, and plans that are compiled ------------------------------------------------

PROFILE = {
    "platform": "gpu",
    "source": "a test",
    "memory": 8e10,
    "memory_bandwidth": 3e12,
    "flops": {"2": 1e15},
    "inside": {"bandwidth": 4e11, "latency": 3e-6},
}


def test_a_profile_with_a_figure_that_is_not_known():
    with refused(ProfileError, what="'memroy'", why="a profile has platform", fixes="did you mean 'memory'?"):
        spmd_auto.register_profile({"memroy": 8e10, **PROFILE}, name="mine")


def test_a_profile_in_another_unit():
    with refused(ProfileError, what="memory = 80", why="another unit may be meant", fixes="memory in bytes"):
        spmd_auto.register_profile({**PROFILE, "memory": 80}, name="mine")


@pytest.mark.parametrize("profile", [3, None, ["h100"]])
def test_a_profile_that_is_neither_a_file_nor_figures(profile):
    with refused(ProfileError, what=repr(profile), why="neither a file", fixes="register_profile("):
        spmd_auto.register_profile(profile)


def test_hosts_of_a_chip_without_links_between_them(monkeypatch):
    monkeypatch.setattr(registry, "_ADDED", {})
    spmd_auto.register_profile(PROFILE, "alone", replace=True)
    with refused(MeshError, what="hosts=2", why="no [between]", fixes="bandwidth"):
        spmd_auto.cluster("alone", hosts=2, per_host=4)


def test_a_cluster_of_a_number_alone():
    with refused(MeshError, what="what is 4?", why="may mean either", fixes=("hosts=4", "per_host=4")):
        spmd_auto.cluster("h100", 4)


def test_verifying_on_devices_that_are_not_there():
    mesh = spmd_auto.cluster("v5e", topology="2x2").mesh(a=4)
    with refused(VerifyError, what="no tpu devices here", why="the plan is for", fixes='verify="tpu:v5e:4x4"'):
        spmd_auto.plan(step, state(), batch(), mesh=mesh, search=FAST, verify=True)


# ---- the list -----------------------------------------------------------------------------------


def test_the_list_of_errors_is_whole():
    """docs/errors.md has an entry for each test here that meets an error (write it anew with --write-errors)."""
    tests = [node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    kinds = [
        f"## {title(node.name)}"
        for node in tests
        if "with refused" in ast.unparse(node) and node.name != "test_the_list_of_errors_is_whole"
    ]
    listed = [line for line in LIST.read_text().splitlines() if line.startswith("## ")]
    assert len(kinds) >= 25
    assert sorted(listed) == sorted(kinds)
