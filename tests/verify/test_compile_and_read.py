"""Programs compiled here and now, on simulated CPUs, and for TPUs and GPUs that are not there."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_auto.errors import VerifyError
from spmd_auto.verify import ProgramSummary, compile_for, parse_target, read_compiled

CPU, TPU, GPU = "cpu:8", "tpu:v5e:4x4", "gpu:h100:2x8"
F32 = 4


def mesh_of(target, shape, names, order=None) -> Mesh:
    devices = np.array(target.devices(math.prod(shape)))
    if order is not None:
        devices = devices[np.asarray(order)]
    return Mesh(devices.reshape(shape), tuple(names), axis_types=(AxisType.Auto,) * len(names))


def read(target, mesh, f, arguments, in_specs, out_specs, **jit_options) -> ProgramSummary:
    shardings = [
        jax.tree.map(lambda s: NamedSharding(mesh, s), s, is_leaf=lambda s: isinstance(s, P)) for s in in_specs
    ]
    outs = jax.tree.map(lambda s: NamedSharding(mesh, s), out_specs, is_leaf=lambda s: isinstance(s, P))
    lowered = jax.jit(f, in_shardings=tuple(shardings), out_shardings=outs, **jit_options).lower(*arguments)
    return read_compiled(compile_for(target, lowered), mesh)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def manual(mesh, body, in_spec, out_spec):
    return jax.shard_map(body, mesh=mesh, in_specs=(in_spec,), out_specs=out_spec, check_vma=False)


COLLECTIVES = {
    # kind: (body over axes, payload of a 32 x 16 float32 shard in a group of n)
    "all-reduce": (lambda x, a: jax.lax.psum(x, a), lambda n: 1),
    "all-gather": (lambda x, a: jax.lax.all_gather(x, a, tiled=True), lambda n: n),
    "reduce-scatter": (lambda x, a: jax.lax.psum_scatter(x, a, tiled=True), lambda n: 1),
    "all-to-all": (lambda x, a: jax.lax.all_to_all(x, a, 0, 1, tiled=True), lambda n: 1),
    "collective-permute": (
        lambda x, a: jax.lax.pshuffle(x, a, np.roll(np.arange(jax.lax.axis_size(a)), 1)),
        lambda n: 1,
    ),
}
ORDERED = [axes for n in (1, 2, 3) for axes in itertools.permutations("abc", n)]


@pytest.mark.parametrize(
    ("kind", "axes"),
    # jax 0.12 wants the axes of a permute in the order of the mesh.
    [(k, a) for k in COLLECTIVES for a in ORDERED if k != "collective-permute" or a == tuple(sorted(a))],
)
def test_each_kind_over_axes_in_every_order_in_a_loop(kind, axes, devices):
    target = parse_target(CPU)
    mesh = mesh_of(target, (2, 2, 2), "abc")
    body, payload = COLLECTIVES[kind]

    def looped(x):
        def step(carry, _):
            return carry + jnp.sin(body(carry, axes)).sum(), None

        return jax.lax.scan(step, x, None, length=3)[0]

    spec = P(("a", "b", "c"))
    summary = read(target, mesh, manual(mesh, looped, spec, spec), [array(8 * 32, 16)], [spec], spec)
    n = 2 ** len(axes)
    (found,) = summary.collectives
    assert (found.kind, found.axes, found.group_size, found.times) == (kind, tuple(sorted(axes)), n, 3)
    shard = 32 * 16 * F32
    assert found.payload_bytes == payload(n) * shard
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
    assert found.ring_bytes == pytest.approx(factor * found.payload_bytes)
    assert summary.count(kind) == summary.count() == summary.count(kind, tuple(sorted(axes))) == 3
    assert summary.bytes_by_axes() == {tuple(sorted(axes)): 3 * found.ring_bytes}
    assert __file__.endswith(found.source.rsplit(":", 1)[0].rsplit("/", 1)[-1])


def test_memory_and_flops_on_cpu(devices):
    target = parse_target(CPU)
    mesh = mesh_of(target, (8,), "d")
    summary = read(
        target, mesh, lambda x, w: (x @ w, w + 1), [array(64, 32), array(32, 128)], [P("d"), P()], (P("d"), P()),
        donate_argnums=(1,),
    )  # fmt: skip
    assert summary.collectives == ()
    assert summary.dot_flops == 2 * 8 * 32 * 128
    assert summary.memory is not None
    assert summary.memory.arguments == (8 * 32 + 32 * 128) * F32
    assert summary.memory.aliases == 32 * 128 * F32
    assert summary.memory.peak is None or summary.memory.peak >= summary.memory.arguments


def test_one_device(devices):
    compiled = jax.jit(lambda x: x @ x).lower(array(8, 8)).compile()
    mesh = mesh_of(parse_target(CPU), (1,), "d")
    summary = read_compiled(compiled, mesh)
    assert (summary.collectives, summary.dot_flops) == ((), 2 * 8**3)


def zero3(mesh: Mesh, layers: int, batch: int, width: int, inner: int):
    """A scanned, rematerialised MLP: weights stored split over `d`, used whole over `d`, always split over `m`."""

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(weights, x):
        def layer(h, w):
            up, down = constrain(w[0], None, "m"), constrain(w[1], "m", None)
            return constrain(h + jnp.dot(jax.nn.relu(h @ up), down), "d", None), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    specs = (P(None, "d", "m"), P(None, "m", "d"))
    weights = (array(layers, width, inner, dtype=jnp.bfloat16), array(layers, inner, width, dtype=jnp.bfloat16))
    return step, [weights, array(batch, width, dtype=jnp.bfloat16)], [specs, P("d")], (P(), specs)


LAYERS, BATCH, WIDTH, INNER = 6, 256, 256, 512


def zero3_summary(text, require_target, order=None) -> ProgramSummary:
    target = require_target(text)
    mesh = mesh_of(target, (4, 4), "dm", order)
    return read(target, mesh, *zero3(mesh, LAYERS, BATCH, WIDTH, INNER), donate_argnums=(0,))


def zero3_expected() -> dict[tuple[str, tuple[str, ...]], float]:
    weight = 2 * WIDTH * INNER / 4  # bytes of a weight that is whole over d, split over m
    activation = 2 * BATCH * WIDTH / 4
    return {
        ("all-gather", ("d",)): LAYERS * 2 * 2 * weight * 3 / 4,  # two weights, forward and backward
        ("reduce-scatter", ("d",)): LAYERS * 2 * weight * 3 / 4,
        ("all-reduce", ("m",)): LAYERS * 2 * activation * 2 * 3 / 4,
        ("all-reduce", ("d",)): 6,  # the loss
    }


@pytest.mark.parametrize("text", [TPU, GPU])
def test_zero3_for_devices_that_are_not_there(text, require_target):
    summary = zero3_summary(text, require_target)
    assert summary.bytes_by_kind_and_axes() == zero3_expected()
    assert summary.dot_flops == LAYERS * 7 * 2 * (BATCH / 4) * WIDTH * (INNER / 4)
    assert summary.memory is not None
    stored = LAYERS * 2 * 2 * WIDTH * INNER / 16
    assert summary.memory.aliases == stored
    assert summary.memory.arguments == stored + 2 * BATCH * WIDTH / 4
    assert summary.notes == ()


@pytest.mark.parametrize("text", [TPU, GPU])
@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_devices_does_not_matter(text, seed, require_target):
    order = np.random.default_rng(seed).permutation(16)
    assert zero3_summary(text, require_target, order).bytes_by_kind_and_axes() == zero3_expected()


def test_tpu_topologies_are_not_in_the_order_of_ids(require_target):
    # What the test above relies on: even in the topology's own order, ids are not 0, 1, 2, ...
    ids = [d.id for d in require_target(TPU).devices()]
    assert ids != sorted(ids)


def axis_walk(mesh: Mesh, sizes):
    """One all-gather in each order of the axes, of a shard whose bytes tell which one it was."""
    orders = [axes for n in (1, 2, 3) for axes in itertools.permutations(mesh.axis_names, n)]
    marks = {axes: 8 * (i + 1) * 128 for i, axes in enumerate(orders)}

    def body(x):
        total = x.sum()
        for axes, rows in marks.items():
            y = jnp.sin(jnp.full((rows,), total))
            total = total + jnp.cos(jax.lax.all_gather(y, axes, tiled=True)).sum()
        return x + total

    expected = {(tuple(sorted(axes)), rows * F32 * math.prod(sizes[a] for a in axes)) for axes, rows in marks.items()}
    return manual(mesh, body, P(mesh.axis_names), P(mesh.axis_names)), expected


@pytest.mark.parametrize("text", [CPU, TPU, GPU])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gathers_over_axes_in_every_order(text, shuffled, require_target):
    target = require_target(text)
    shape = (2, 4, 2) if target.device_count == 16 else (2, 2, 2)
    order = np.random.default_rng(2).permutation(math.prod(shape)) if shuffled else None
    mesh = mesh_of(target, shape, "abc", order)
    f, expected = axis_walk(mesh, dict(zip("abc", shape, strict=True)))
    spec = P(("a", "b", "c"))
    summary = read(target, mesh, f, [array(16, 128)], [spec], spec)
    gathers = [c for c in summary.collectives if c.kind == "all-gather"]
    assert {(c.axes, c.payload_bytes) for c in gathers} == expected
    assert len(gathers) == len(expected)


def test_a_mesh_in_another_order_and_shape_than_the_programs_own(devices):
    target = parse_target(CPU)
    order = np.random.default_rng(3).permutation(8)
    own = mesh_of(target, (2, 4), "xy", order)
    f = manual(own, lambda x: jax.lax.psum(x, "y"), P("x", "y"), P("x"))
    lowered = jax.jit(f, in_shardings=NamedSharding(own, P("x", "y"))).lower(array(8, 8))
    compiled = lowered.compile()
    assert [c.axes for c in read_compiled(compiled, own).collectives] == [("y",)]
    finer = Mesh(own.devices.reshape(2, 2, 2), tuple("abc"), axis_types=(AxisType.Auto,) * 3)
    assert [c.axes for c in read_compiled(compiled, finer).collectives] == [("b", "c")]
    turned = Mesh(own.devices.T, tuple("yx"), axis_types=(AxisType.Auto,) * 2)
    assert [c.axes for c in read_compiled(compiled, turned).collectives] == [("y",)]
    plain = mesh_of(target, (8,), "d")
    assert [(c.axes, c.group_size) for c in read_compiled(compiled, plain).collectives] == [(("d",), 4)]


def test_a_mesh_of_other_devices_is_an_error(devices):
    target = parse_target(CPU)
    own, other = (
        Mesh(np.array(d), ("x",), axis_types=(AxisType.Auto,)) for d in (target.devices()[:4], target.devices()[4:])
    )
    compiled = jax.jit(lambda x: x + 1, in_shardings=NamedSharding(own, P("x"))).lower(array(8)).compile()
    with pytest.raises(VerifyError, match="wasn't compiled for device"):
        read_compiled(compiled, other)


def test_a_smaller_mesh_is_an_error(devices):
    target = parse_target(CPU)
    mesh = mesh_of(target, (8,), "x")
    f = manual(mesh, lambda x: jax.lax.psum(x, "x"), P("x"), P())
    compiled = jax.jit(f, in_shardings=NamedSharding(mesh, P("x"))).lower(array(8)).compile()
    with pytest.raises(VerifyError, match="joins partition 7"):
        read_compiled(compiled, mesh_of(target, (4,), "x"))


def test_branches(devices):
    target = parse_target(CPU)
    mesh = mesh_of(target, (8,), "x")

    def body(x):
        return jax.lax.cond(x[0] > 0, lambda y: jax.lax.psum(y, "x"), lambda y: y * 2, x) + jax.lax.pmax(x, "x")

    summary = read(target, mesh, manual(mesh, body, P("x"), P("x")), [array(64)], [P("x")], P("x"))
    assert sorted(c.in_branch for c in summary.collectives) == [False, True]
