"""A decorated step beside the rest of JAX: transformations, debugging, threads, meshes of the user's."""

from __future__ import annotations

import io
import logging
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import spmd_auto
from spmd_auto.errors import BatchError, LoweringError
from spmd_auto.runtime import report
from spmd_auto.search import SearchOptions

FAST = SearchOptions(states=100)


def params():
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(16, 16)).astype(np.float32) * 0.1 for k in ("up", "down")}


def x(size=16, seed=1):
    return np.random.default_rng(seed).normal(size=(size, 16)).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def sharded(fn=step, **options):
    return spmd_auto.auto_shard(search=FAST, **options)(fn)


# ---- transformations --------------------------------------------------------------------------------


def test_inside_of_jit_it_is_a_part_of_the_program():
    ours = sharded()

    @jax.jit
    def twice(params, x):
        params, a = ours(params, x)
        params, b = ours(params, x * 2)
        return params, a + b

    got, loss = twice(params(), x())
    once, a = step(params(), x())
    expected, b = step(once, x() * 2)
    assert float(loss) == pytest.approx(float(a + b), rel=1e-5)
    np.testing.assert_allclose(got["up"], expected["up"], rtol=1e-5, atol=1e-6)
    assert len(ours._entries) == 1


def test_in_a_loop_of_jax():
    ours = sharded()
    many = np.stack([x(seed=i) for i in range(3)])
    _, losses = jax.jit(lambda p, xs: jax.lax.scan(ours, p, xs))(params(), many)
    state, expected = params(), []
    for one in many:
        state, loss = step(state, one)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_shapes_without_computing():
    new, loss = jax.eval_shape(sharded(), params(), x())
    assert loss.shape == ()
    assert new["up"].shape == (16, 16)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x))])
def test_nothing_is_differentiated_or_batched_through_it(transform):
    ours = sharded(loss_fn)
    args = (params(), x()) if transform is not jax.vmap else (jax.tree.map(lambda a: a[None], params()), x()[None])
    with pytest.raises(LoweringError, match=r"auto_shard\(jax.grad\(loss_fn\)\)"):
        transform(ours)(*args)


def test_without_jit_the_lines_of_the_step_run():
    seen = []

    def spied(params, x):
        seen.append(type(x))
        return step(params, x)

    ours = sharded(spied)
    with jax.disable_jit():
        _, loss = ours(params(), x())
    assert seen == [np.ndarray]
    assert not ours._entries
    assert float(loss) == pytest.approx(float(loss_fn(params(), x())), rel=1e-5)


# ---- debugging ----------------------------------------------------------------------------------------


def test_nans_are_found():
    ours = sharded(lambda params, x: jnp.log(x - 100.0) @ params["up"])
    assert np.isnan(np.asarray(ours(params(), x()))).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        ours(params(), x())


def test_prints_survive(capfd):
    def noisy(params, x):
        jax.debug.print("mean {m:.3f}", m=x.mean())
        return step(params, x)

    ours = sharded(noisy)
    for _ in range(2):
        ours(params(), x())
    jax.effects_barrier()
    assert capfd.readouterr().out.count(f"mean {x().mean():.3f}") == 2


def test_named_scopes_reach_the_compiled_program():
    def named(params, x):
        with jax.named_scope("my_block"):
            return x @ params["up"]

    assert "my_block" in sharded(named).compile(params(), x()).as_text()


# ---- threads ------------------------------------------------------------------------------------------


def test_two_threads_plan_once():
    calls, results = [], []

    def counted(params, x):
        calls.append(1)
        return step(params, x)

    ours = sharded(counted, donate=False)

    def work():
        results.append(float(ours(params(), x())[1]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1
    assert len(set(results)) == 1
    assert len(results) == 4


def test_interrupted_planning_can_be_done_again(monkeypatch):
    import spmd_auto.decorator as module

    ours, find = sharded(), module.find_plan

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "find_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours(params(), x())
    monkeypatch.setattr(module, "find_plan", find)
    assert np.isfinite(float(ours(params(), x())[1]))


# ---- what is said ---------------------------------------------------------------------------------------


def test_large_arrays_closed_over_are_reported(caplog):
    table = np.ones((512, 1024), np.float32)
    ours = sharded(lambda x: jnp.take(jnp.asarray(table), x, axis=0).sum(1))
    with caplog.at_level(logging.WARNING, logger="spmd_auto"):
        ours(np.arange(16))
    [message] = [r.message for r in caplog.records if "closes over" in r.message]
    assert f"{table.nbytes} bytes" in message
    assert "[512, 1024]" in message


def test_a_step_planned_for_each_call_is_reported(caplog):
    ours = sharded(lambda x, f: f(x), static_argnames="f")
    with caplog.at_level(logging.WARNING, logger="spmd_auto"):
        for _ in range(5):
            ours(x(), f=lambda a: a + 1)
    assert sum("planned 4 times" in r.message for r in caplog.records) == 1


def test_one_line_per_plan_or_none(caplog):
    with caplog.at_level(logging.INFO, logger="spmd_auto"):
        ours = sharded()
        for _ in range(3):
            ours(params(), x())
        assert len(caplog.records) == 1
        caplog.clear()
        sharded(quiet=True)(params(), x())
        assert not caplog.records


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_progress_is_shown_on_a_terminal_only(monkeypatch, terminal, quiet):
    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    monkeypatch.setattr("sys.stderr", screen := Screen())
    monkeypatch.setenv("TERM", "xterm")
    lines = []
    with report.progress("my_step", quiet) as progress:
        if progress is not None:
            progress("half way")
            lines.append(screen.getvalue())
    assert (progress is not None) == (terminal and not quiet)
    assert bool(screen.getvalue()) == (terminal and not quiet)
    if lines:
        assert "planning my_step" in screen.getvalue()


def test_a_search_that_is_interrupted_leaves_nothing_behind(monkeypatch):
    """Ctrl-C in the middle of a search: the next call plans as if nothing had been."""
    from spmd_auto.plan import make

    expected = sharded(cache=False).plan(params(), x(8192))
    ours, search = sharded(cache=False), make.search_mesh

    def interrupted(*args, **kwargs):
        search(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(make, "search_mesh", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours(params(), x(8192))
    assert not ours._entries
    monkeypatch.setattr(make, "search_mesh", search)
    assert ours.plan(params(), x(8192)).specs == expected.specs
    assert not ours._lock._is_owned()


# ---- a ragged last batch ----------------------------------------------------------------------------------


def test_a_batch_that_can_not_be_split_is_computed_whole_and_said_so(caplog):
    ours = sharded(donate=False)
    first = ours.plan(params(), x(8192))
    assert any(first.specs["x"])
    with caplog.at_level(logging.WARNING, logger="spmd_auto"):
        _, loss = ours(params(), x(5))
        ours(params(), x(5))
    assert float(loss) == pytest.approx(float(loss_fn(params(), x(5))), rel=1e-5)
    [message] = [r.message for r in caplog.records]
    assert "'x' of step has 5 in dimension 0" in message


def test_a_batch_that_can_not_be_split_is_refused():
    ours = sharded(ragged="refuse")
    ours.plan(params(), x(8192))
    with pytest.raises(BatchError, match="not divisible by 8"):
        ours(params(), x(5))
    ours.plan(params(), x(24))
    with pytest.raises(BatchError, match="ragged='pad'"):
        sharded(ragged="pad")


# ---- meshes -------------------------------------------------------------------------------------------------


def test_a_mesh_of_explicit_axes_is_used_with_automatic_ones(devices):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    ours = sharded(mesh=mesh)
    typed = jax.device_put(x(), jax.NamedSharding(mesh, P("data", None)))
    expected, loss = step(params(), x())
    with jax.set_mesh(mesh):
        new, got = ours(jax.device_put(params(), jax.NamedSharding(mesh, P())), typed)
    assert float(got) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(new["up"], expected["up"], rtol=1e-5, atol=1e-6)
    assert set(new["up"].sharding.mesh.axis_types) == {AxisType.Auto}


def test_one_device_has_no_constraints():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
    ours = sharded(mesh=mesh)
    text = ours.lower(params(), x()).as_text()
    assert "sharding_constraint" not in text
    assert "custom_call @Sharding" not in text
    _, loss = ours(params(), x())
    assert float(loss) == pytest.approx(float(loss_fn(params(), x())), rel=1e-6)


# ---- methods ------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, rate):
        self.rate, self.calls = rate, 0

    @spmd_auto.auto_shard(search=FAST)
    def step(self, params, x):
        """Doc."""
        self.calls += 1
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - self.rate * g, params, grads), loss

    @spmd_auto.auto_shard(search=FAST, static_argnums=3)
    def scaled(self, params, x, mode):
        return x @ params["up"] if mode == "up" else x @ params["down"]


def test_methods_of_plain_objects():
    a, b = Trainer(0.1), Trainer(0.5)
    for _ in range(2):
        new_a, _ = a.step(params(), x())
        new_b, _ = b.step(params(), x())
    assert (a.calls, b.calls) == (1, 1)
    assert a.step == a.step != b.step
    assert a.step.__doc__ == "Doc."
    _, grads = jax.value_and_grad(loss_fn)(params(), x())
    np.testing.assert_allclose(new_a["up"], params()["up"] - 0.1 * grads["up"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(new_b["up"], params()["up"] - 0.5 * grads["up"], rtol=1e-4, atol=1e-6)
    assert isinstance(Trainer.step, spmd_auto.AutoSharded)
    np.testing.assert_allclose(a.scaled(params(), x(), "down"), x() @ params()["down"], rtol=1e-4, atol=1e-5)
    assert list(a.step.plan(params(), x()).specs) == ["params/down", "params/up", "x"]
