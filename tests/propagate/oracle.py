"""The oracle: executes a rule by hand.

XLA keeps a program's meaning under any constraint, so equal numbers under `jit` say nothing about a rule.  Here the
primitive itself runs on shards inside `shard_map`, followed by exactly the collectives that the factors' kinds claim:

- the dimensions of a split factor are split in the operands and the results; all else is whole on each device;
- the results are combined over the mesh axes of a REDUCE factor.

Every device's piece of every result must then equal that piece of the global result.  What a device does besides
(`_LOCAL`) is little: shapes in parameters become local shapes, an index is shifted and masked, and a scatter's
operand is neutral on all but the first of the devices whose results are combined.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spmd_auto import _compat
from spmd_auto.propagate.factors import Kind, Rule

from . import moves, windows
from .applications import Application

Placement = Mapping[int, tuple[str, ...]]  # factor -> mesh axes, major first
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_mesh(shape: tuple[int, ...]) -> Mesh:
    devices = np.asarray(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple("ab"[: len(shape)]), axis_types=_compat.axis_types_auto(len(shape)))


@dataclasses.dataclass
class Local:
    """One device's view of an application under a placement; made inside `shard_map`."""

    app: Application
    rule: Rule
    placement: Placement
    mesh: Mesh

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.app.eqn.params)

    def axes(self, side: str, position: int, dim: int) -> tuple[str, ...]:
        """The mesh axes over which a dimension is split."""
        for index, axes in self.placement.items():
            if (position, dim) in getattr(self.rule[index], side):
                return axes
        return ()

    def pieces(self, side: str, position: int, dim: int) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axes(side, position, dim))

    def shape(self, side: str, position: int) -> tuple[int, ...]:
        shapes = self.app.operand_shapes if side == "operands" else self.app.result_shapes
        return tuple(n // self.pieces(side, position, d) for d, n in enumerate(shapes[position]))

    def spec(self, side: str, position: int) -> PartitionSpec:
        shapes = self.app.operand_shapes if side == "operands" else self.app.result_shapes
        return PartitionSpec(*[self.axes(side, position, d) or None for d in range(len(shapes[position]))])

    def offset(self, side: str, position: int, dim: int) -> Any:
        """Where this device's piece of a dimension begins."""
        axes = self.axes(side, position, dim)
        return lax.axis_index(axes) * self.shape(side, position)[dim] if axes else jnp.int32(0)

    def first(self) -> Any:
        """Whether this device is the first of those whose results are combined."""
        axes = [a for f, names in self.placement.items() if self.rule[f].kind is Kind.REDUCE for a in names]
        return jnp.all(jnp.stack([lax.axis_index(a) == 0 for a in axes])) if axes else jnp.asarray(True)

    def bind(self, args: list[Any], **params: Any) -> list[Any]:
        return _compat.bind(self.app.eqn, args, self.params | params)

    def own_piece(self, position: int, whole: Any) -> Any:
        """A result's piece on this device, out of the whole of it."""
        shape = self.shape("results", position)
        starts = [
            self.offset("results", position, d) if n != m else jnp.int32(0)
            for d, (n, m) in enumerate(zip(shape, whole.shape, strict=True))
        ]
        return lax.dynamic_slice(whole, starts, shape)


def _plain(local: Local, args: list[Any]) -> list[Any]:
    return local.bind(args)


def _result_shape(key: str) -> Callable[[Local, list[Any]], list[Any]]:
    return lambda local, args: local.bind(args, **{key: local.shape("results", 0)})


def _iota(local: Local, args: list[Any]) -> list[Any]:
    (out,) = local.bind(args, shape=local.shape("results", 0))
    return [out + local.offset("results", 0, local.params["dimension"]).astype(out.dtype)]


def _per_key(local: Local, args: list[Any]) -> list[Any]:
    (whole,) = local.bind(args)  # of these keys; what is made from each is born split
    return [local.own_piece(0, whole)]


def _whole_piece(local: Local, args: list[Any]) -> list[Any]:
    """Values that depend on their places only: made whole, and cut."""
    return [local.own_piece(k, whole) for k, whole in enumerate(local.bind(args))]


def _random_gamma(local: Local, args: list[Any]) -> list[Any]:
    """What each key makes is made whole, from all of its parameters, and cut."""
    keys, parameters = args
    for d in range(keys.ndim, parameters.ndim):
        axes = local.axes("operands", 1, d)
        if axes:
            parameters = lax.all_gather(parameters, axes, axis=d, tiled=True)
    (whole,) = local.bind([keys, parameters])
    return [local.own_piece(0, whole)]


def _same(local: Local, args: list[Any]) -> list[Any]:
    """A hint that names the mesh or the layout of the whole: a device does nothing about it."""
    return args


def _tile(local: Local, args: list[Any]) -> list[Any]:
    pairs = zip(local.shape("results", 0), local.shape("operands", 0), strict=True)
    return local.bind(args, reps=tuple(out // size for out, size in pairs))


def _shifted(local: Local, indices: Any, index_map: Any, clip: bool) -> tuple[Any, Any, Any]:
    """Indices as a device sees them; which are its own; which are outside of the operand on a split dimension."""
    own, outside = jnp.ones(indices.shape[:-1], bool), jnp.zeros(indices.shape[:-1], bool)
    for column, d in enumerate(index_map):
        if local.pieces("operands", 0, d) == 1:
            continue
        size, width = local.app.operand_shapes[0][d], local.shape("operands", 0)[d]
        if width * local.pieces("operands", 0, d) == size and d in _window_dims(local):
            continue  # a window that covers the dimension: the index is 0, or the whole window is outside
        index = indices[..., column]
        index = jnp.clip(index, 0, size - 1) if clip else index
        outside |= (index < 0) | (index >= size)
        index = index - local.offset("operands", 0, d)
        own &= (index >= 0) & (index < width)
        indices = indices.at[..., column].set(index)
    return indices, own, outside


def _window_dims(local: Local) -> set[int]:
    numbers = local.params["dimension_numbers"]
    absent = numbers.collapsed_slice_dims if hasattr(numbers, "collapsed_slice_dims") else numbers.inserted_window_dims
    return set(range(len(local.app.operand_shapes[0]))) - {*absent, *numbers.operand_batching_dims}


def _gather(local: Local, args: list[Any]) -> list[Any]:
    numbers, mode = local.params["dimension_numbers"], local.params["mode"]
    operand, indices = args
    windows = _window_dims(local)
    sizes = tuple(
        operand.shape[d] if d in windows and n == local.app.operand_shapes[0][d] else n
        for d, n in enumerate(local.params["slice_sizes"])
    )
    shifted, own, outside = _shifted(local, indices, numbers.start_index_map, mode == lax.GatherScatterMode.CLIP)
    (out,) = local.bind([operand, shifted], slice_sizes=sizes)

    def per_place(mask: Any) -> Any:
        return jnp.expand_dims(mask, numbers.offset_dims)

    zero = jnp.zeros((), out.dtype)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        (fill,) = local.bind([operand, jnp.full_like(indices, -1)], slice_sizes=sizes)
        zero = jnp.where(per_place(outside) & local.first(), fill, zero)
    return [jnp.where(per_place(own), out, zero)]


def _scatter(local: Local, args: list[Any]) -> list[Any]:
    numbers, mode = local.params["dimension_numbers"], local.params["mode"]
    operand, indices, updates = args
    windows = sorted(_window_dims(local))
    width = {d: updates.shape[at] for d, at in zip(windows, numbers.update_window_dims, strict=True)}
    if mode == lax.GatherScatterMode.CLIP:
        for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
            last = local.app.operand_shapes[0][d] - width.get(d, 1) * (
                local.pieces("operands", 0, d) if d in width else 1
            )
            indices = indices.at[..., column].set(jnp.clip(indices[..., column], 0, last))
    shifted, _, _ = _shifted(local, indices, numbers.scatter_dims_to_operand_dims, clip=False)
    neutral = {"scatter-add": 0, "scatter-sub": 0, "scatter-mul": 1}.get(local.app.eqn.primitive.name)
    if neutral is not None:
        operand = jnp.where(local.first(), operand, jnp.full_like(operand, neutral))
    return local.bind([operand, shifted, updates], mode=lax.GatherScatterMode.FILL_OR_DROP)


def _conv(local: Local, args: list[Any]) -> list[Any]:
    lhs_spec = local.params["dimension_numbers"].lhs_spec
    counts = {}
    for key, dim in (("batch_group_count", lhs_spec[0]), ("feature_group_count", lhs_spec[1])):
        counts[key] = local.params[key] // (local.pieces("operands", 0, dim) if local.params[key] > 1 else 1)
    args, halos = windows.widened(local, args, [0, 0])
    return local.bind(args, **counts, padding=windows.conv_padding(local, args, halos))


_LOCAL: dict[str, Callable[[Local, list[Any]], list[Any]]] = {
    "broadcast_in_dim": _result_shape("shape"),
    "reshape": _result_shape("new_sizes"),
    "dynamic_slice": _result_shape("slice_sizes"),
    "broadcast_to": _result_shape("shape"),
    "empty": _result_shape("shape"),
    "sharding_constraint": _same,
    "layout_constraint": _same,
    "reshard": _same,
    "iota_2x32_shape": _whole_piece,
    "random_gamma": _random_gamma,
    "random_poisson": _random_gamma,
    "iota": _iota,
    "random_bits": _per_key,
    "raw_bits": _whole_piece,
    "random_split": _per_key,
    **dict.fromkeys(("slice", "split", "concatenate", "pad", "rev"), moves.whole_then_cut),
    "tile": _tile,
    "gather": _gather,
    "conv_general_dilated": _conv,
    "select_and_scatter_add": windows.select_and_scatter_add,
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), windows.reduce_window
    ),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}


def _combined(x: Any, combine: str, axes: tuple[str, ...]) -> Any:
    """What a REDUCE factor claims: the results of all devices along `axes`, combined."""
    if combine == "add" and x.dtype != bool:
        return lax.psum(x, axes)
    parts = lax.all_gather(x, axes)
    each = {"add": jnp.any, "max": jnp.max, "min": jnp.min, "mul": jnp.prod}
    if combine in ("and", "or"):
        return lax.reduce(
            parts,
            parts.dtype.type(-1 if combine == "and" and parts.dtype != bool else combine == "and"),
            lax.bitwise_and if combine == "and" else lax.bitwise_or,
            (0,),
        )
    return each[combine](parts, axis=0).astype(x.dtype)


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _compat.is_extended(x.dtype) else x


def _split(app: Application, rule: Rule, placement: Placement, mesh: Mesh) -> Callable[..., Any]:
    """The application as a function of global arrays (keys as their data), split as `placement` says."""
    view = Local(app, rule, placement, mesh)
    is_key = [_compat.is_extended(a.dtype) for a in app.args]

    def on_shard(*shards: Any) -> list[Any]:
        args = [
            jax.random.wrap_key_data(x, impl="threefry2x32") if key else x
            for x, key in zip(shards, is_key, strict=True)
        ]
        outs = _LOCAL.get(app.eqn.primitive.name, _plain)(view, args)
        for k, out in enumerate(outs):
            assert out.shape == view.shape("results", k), f"result {k} is {out.shape}, not {view.shape('results', k)}"
        outs = [_data(x) for x in outs]
        for index, axes in placement.items():
            if rule[index].kind is Kind.REDUCE:
                outs = [_combined(x, rule[index].combine, axes) for x in outs]
        return outs

    in_specs = tuple(view.spec("operands", k) for k in range(len(app.args)))
    out_specs = [view.spec("results", k) for k in range(len(app.result_shapes))]
    return jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _plain_arrays(app: Application) -> list[np.ndarray]:
    """Operands as numpy arrays: putting their pieces on devices compiles nothing."""
    return [np.asarray(_data(a)) for a in app.args]


def disagreement(app: Application, rule: Rule, placements: Sequence[Placement], mesh: Mesh) -> str | None:
    """Runs the application split in each of several ways (one program: compiling is what takes time).

    Returns:
      None if all equal the global result, else what is wrong.

    Raises:
      Exception: whatever JAX says if a local operation can't even be stated.
    """
    ways = [_split(app, rule, placement, mesh) for placement in placements]
    program = jax.jit(lambda *args: [way(*args) for way in ways], compiler_options=QUICK)
    got = program(*_plain_arrays(app))
    want = expected(app)
    for placement, outs in zip(placements, got, strict=True):
        for k, out in enumerate(outs):
            for shard in out.addressable_shards:
                have, should = np.asarray(shard.data), want[k][shard.index]
                if have.shape != should.shape or not _close(have, should):
                    shown = f"{have.ravel()[:4]} instead of {should.ravel()[:4]}"
                    return f"{placement}: result {k} on {shard.device} is {shown}"
    return None


def _close(have: np.ndarray, should: np.ndarray) -> bool:
    if have.dtype.kind in "iub":
        return bool(np.array_equal(have, should))
    loose = have.dtype.itemsize == 2
    kind = np.complex64 if have.dtype.kind == "c" else np.float32
    tolerance = 4e-2 if loose else 2e-5
    return bool(np.allclose(have.astype(kind), should.astype(kind), rtol=tolerance, atol=tolerance, equal_nan=True))


_EXPECTED: dict[int, tuple[Application, list[np.ndarray]]] = {}


def expected(app: Application) -> list[np.ndarray]:
    """The global results, once per application and on one device: beside the split ways XLA would split it too."""
    if id(app) not in _EXPECTED:
        _EXPECTED.clear()
        whole = jax.jit(lambda *args: [_data(x) for x in _compat.bind(app.eqn, args)], compiler_options=QUICK)
        _EXPECTED[id(app)] = (app, [np.asarray(x) for x in whole(*app.args)])
    return _EXPECTED[id(app)][1]


def splittable(rule: Rule, pieces: int) -> list[int]:
    return [index for index, factor in enumerate(rule) if factor.splittable and factor.size % pieces == 0]
