"""Plans kept for later runs: found again for the same question only, never trusted blindly, never in the way."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import spmd_auto
from spmd_auto.plan import make, make_plan, question
from spmd_auto.plan.cache import PlanCache
from spmd_auto.plan.question import ask
from spmd_auto.propagate.rules import registry
from spmd_auto.runtime.find import find_plan
from spmd_auto.search import SearchOptions
from spmd_auto.trace import trace
from tests.known_answers.toy import toy_mesh
from tests.models import gpt

MESH = toy_mesh(2, 4)
SEARCH = SearchOptions(states=200)


def step(state, batch):
    def loss(w):
        return jnp.mean((jnp.tanh(batch @ w["up"]) @ w["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments(width=16, hidden=32, rows=16):
    struct = jax.ShapeDtypeStruct
    state = {"up": struct((width, hidden), jnp.float32), "down": struct((hidden, width), jnp.float32)}
    return state, struct((rows, width), jnp.float32)


@pytest.fixture
def searches(monkeypatch):
    """Counts searches of one mesh; `forbid` makes them fail."""
    count = {"n": 0, "forbid": False}
    real = make.search_mesh

    def counting(*args, **kwargs):
        assert not count["forbid"], "searched"
        count["n"] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(make, "search_mesh", counting)
    return count


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """The files kept."""
    monkeypatch.setenv("SPMD_AUTO_CACHE", str(tmp_path / "kept"))

    def list_them():
        return sorted((tmp_path / "kept" / "plans").glob("*"))

    return list_them


def find(program, mesh=MESH, pins=None, **options):
    options.setdefault("search", SEARCH)
    return find_plan(program, mesh, pins=pins or {}, **options)


def test_a_hit_does_not_search_and_is_the_same_plan(searches, entries, devices):
    _, gpt_step, state, batch = gpt.make(width=32, sequence=16, vocab=64)
    pins = {"positions": P(None, P.UNCONSTRAINED)}
    first = find(trace(gpt_step, state, batch), pins=pins)
    assert first.search.origin == ""
    assert len(entries()) == 1
    searches["forbid"] = True
    again = find(trace(gpt_step, state, batch), pins=pins)
    assert again.search.origin == "cache"
    assert again.search == first.search
    assert again.lowered_hash(MESH.build(devices)) == first.lowered_hash(MESH.build(devices))
    assert (again.seconds, again.memory, again.specs) == (first.seconds, first.memory, first.specs)
    assert again.report == first.report
    assert {pin.source for pin in again.pinned.values()} == {pin.source for pin in first.pinned.values()}
    assert "not searched again: an earlier run found it" in again.explain()
    assert "not searched again" not in first.explain()


def test_a_decorated_step_takes_the_kept_plan(searches, entries, caplog):
    caplog.set_level(logging.INFO, "spmd_auto")
    state, batch = jax.tree.map(lambda s: np.full(s.shape, 0.1, np.float32), arguments())
    one = spmd_auto.auto_shard(search=SEARCH)(step)
    _, loss = one(state, batch)
    assert "not searched again" not in caplog.text
    searches["forbid"] = True
    two = spmd_auto.auto_shard(search=SEARCH)(step)
    _, again = two(state, batch)
    assert float(loss) == float(again)
    assert "not searched again: an earlier run found it, and kept it" in caplog.text


def test_it_can_be_turned_off(searches, entries, monkeypatch):
    program = trace(step, *arguments())
    find(program, cache=False)
    monkeypatch.setenv("SPMD_AUTO_PLAN_CACHE", "off")
    find(program)
    spmd_auto.auto_shard(search=SEARCH)(step).plan(*arguments())
    assert entries() == []
    monkeypatch.delenv("SPMD_AUTO_PLAN_CACHE")
    spmd_auto.auto_shard(search=SEARCH, cache=False)(step).plan(*arguments())
    assert entries() == []


def test_every_part_of_the_question_counts(monkeypatch):
    program = trace(step, *arguments())

    def key(program=program, meshes=(MESH,), pins=None, memory=None, search=None):
        return ask(program, meshes, pins or {}, memory, search).key

    keys = [
        key(),
        key(trace(step, *arguments(rows=32))),
        key(trace(lambda state, batch: step(state, batch * 2), *arguments())),
        key(dataclasses.replace(program, declared=(question_declared(), None, None))),
        key(meshes=(MESH, toy_mesh(4, 2))),
        key(meshes=(toy_mesh(4, 2),)),
        key(pins={"up": P("a")}),
        key(pins={"up": P()}),
        key(pins={"up": P("a"), "down": P()}),
        key(pins={"down": P(), "up": P("a")}),
        key(memory=1e9),
        key(search=SearchOptions(states=7)),
    ]
    spmd_auto.register_rule("my_norm", "(i k),(k)->(i k) need_replication={k}")
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    try:
        keys.append(key())
        for size in (1, 2):
            spmd_auto.register_rule("my_norm", lambda params, operands, results, size=size: None)
            keys.append(key())
    finally:
        monkeypatch.undo()
        del registry._TABLE["my_norm"]
    monkeypatch.setattr(jax, "__version__", "0.0.0")
    question.versions.cache_clear()
    keys.append(key())
    question.versions.cache_clear()
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key() == keys[0]


def question_declared():
    from spmd_auto.trace.declared import Declared

    return Declared(("a", None), "Partitioned")


def test_what_does_not_count():
    program = trace(step, *arguments())
    key = ask(program, [MESH], {"up": P("a")}, None, None).key
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    assert ask(program, [MESH], {"up": P("a", None)}, None, SearchOptions()).key == key
    assert ask(program, [MESH], {"up": P(("a",))}, None, SearchOptions(seconds=3.0)).key == key
    assert ask(program, [MESH], {"up": jax.sharding.NamedSharding(mesh, P("a"))}, None, None).key == key
    assert ask(trace(step, *arguments()), [MESH], {"up": P("a")}, None, None).key == key


def test_a_rule_without_text_is_no_question_for_later(entries, monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))

    class Rule:
        def __call__(self, params, operands, results):
            return "(i)->(i)"

    spmd_auto.register_rule("my_own", Rule())
    assert not ask(trace(step, *arguments()), [MESH], {}, None, None).lasting
    find(trace(step, *arguments()))
    assert entries() == []


@pytest.mark.parametrize("damage", ["empty", "cut", "list", "number", "other", "strategy", "version", "binary"])
def test_a_damaged_entry_is_ignored_with_one_warning_and_written_anew(damage, searches, entries, caplog):
    program = trace(step, *arguments())
    plan = find(program)
    (path,) = entries()
    text = path.read_text()
    entry = json.loads(text)
    if damage == "strategy":
        entry["plan"]["assignment"] = []
    if damage == "number":
        entry["plan"]["price"]["seconds"] *= 2
    if damage == "version":
        entry["format"] = "spmd_auto kept plan 0"
    changed = {"empty": "", "cut": text[: len(text) // 2], "list": "[]", "other": "{}"}.get(damage, json.dumps(entry))
    path.write_bytes(b"\xff\xfe\x00" if damage == "binary" else changed.encode())
    before = searches["n"]
    again = find(program)
    assert searches["n"] == before + 1
    assert again.specs == plan.specs
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert "planned anew" in caplog.text
    assert find(program).search.origin == "cache"
    assert searches["n"] == before + 1


def test_an_entry_of_another_program_under_this_name_is_ignored(searches, entries):
    other = find(trace(step, *arguments(rows=64)))
    assert other.search.origin == ""
    (path,) = entries()
    program = trace(step, *arguments())
    mine = PlanCache().path(ask(program, [MESH], {}, None, SEARCH))
    assert mine is not None
    mine.write_text(path.read_text())
    assert find(program).search.origin == ""
    assert find(program).search.origin == "cache"


def test_a_directory_that_refuses_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPMD_AUTO_CACHE", str(tmp_path / "file"))
    program = trace(step, *arguments())
    plan = find(program)
    assert not PlanCache().put(ask(program, [MESH], {}, None, SEARCH), plan)
    monkeypatch.delenv("SPMD_AUTO_CACHE")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert PlanCache().path(ask(program, [MESH], {}, None, SEARCH)) is None
    assert find(program).specs == plan.specs


def test_what_a_limit_cut_short_is_not_kept(entries):
    program = trace(step, *arguments())
    cut = find(program, search=SearchOptions(seconds=0.0))
    assert cut.search.stopped == "time limit"
    assert entries() == []
    counted = find(program, search=SearchOptions(states=3))
    assert counted.search.stopped == "state budget"  # the same in any run
    assert len(entries()) == 1


def test_the_memory_and_the_devices_are_those_of_the_call(entries, devices):
    grid = np.array(devices[::-1]).reshape(2, 4)
    mesh = jax.sharding.Mesh(grid, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    program = trace(step, *arguments())
    plan = find(program, mesh, memory=1e9)
    again = find(program, mesh, memory=1e9)
    assert again.search.origin == "cache"
    assert again.pricer.budget == plan.pricer.budget == 1e9
    assert again.devices == plan.devices == list(devices[::-1])


def test_many_writers_and_readers_at_once(entries):
    program = trace(step, *arguments())
    asked = ask(program, [MESH], {}, None, SEARCH)
    plan = make_plan(program, MESH, search=SEARCH)
    store, seen = PlanCache(), []

    def write():
        for _ in range(20):
            store.put(asked, plan)

    def read():
        for _ in range(10):
            seen.append(store.get(asked, program, pins={}))

    store.put(asked, plan)
    threads = [threading.Thread(target=f) for f in (write, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 10
    assert all(found is not None for found in seen)
    assert len(entries()) == 1


RUN = """
import collections, jax, numpy as np, spmd_auto
from spmd_auto.plan import make
spmd_auto.simulate_devices(8)
jax.config.update("jax_compilation_cache_dir", {compiled!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from tests.plan.test_cache import SEARCH, arguments, step
searches, real = [], make.search_mesh
make.search_mesh = lambda *a, **k: (searches.append(1), real(*a, **k))[1]
state, batch = jax.tree.map(lambda s: np.full(s.shape, 0.1, np.float32), arguments())
sharded = spmd_auto.auto_shard(search=SEARCH)(step)
compiled = sharded.plan(state, batch)
count = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: count.update([event.rsplit("/", 1)[-1]]))
sharded.compile(state, batch)
state, loss = sharded(state, batch)
print(len(searches), count["cache_hits"], count["cache_misses"], sharded.plan(state, batch).lowered_hash(), float(loss))
"""


def test_a_second_run_neither_searches_nor_compiles(tmp_path):
    """Beside the compilation cache of JAX itself."""
    env = {**os.environ, "SPMD_AUTO_CACHE": str(tmp_path / "kept"), "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])])
    code = RUN.format(compiled=str(tmp_path / "compiled"))
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.split())
    (searches, hits, misses, digest, loss), (searches2, hits2, misses2, digest2, loss2) = runs
    assert int(searches) > 0
    assert (hits, int(misses) > 0) == ("0", True)
    assert (searches2, misses2) == ("0", "0")
    assert hits2 == misses
    assert (digest, loss) == (digest2, loss2)
