"""All that differs between JAX releases, and the only importer of private JAX names.

Supported: jax 0.10.2 (Python 3.11) and the 0.12 line (Python >= 3.12).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import config as _config
from jax._src import source_info_util as _source_info_util
from jax._src.core import ShapedArray as _ShapedArray
from jax._src.state.types import AbstractRef as _AbstractRef

Jaxpr: TypeAlias = Any  # open or closed; in jax >= 0.12 there is only one class
Eqn: TypeAlias = Any
Literal = jex_core.Literal


def open_jaxpr(jaxpr: Jaxpr) -> Any:
    """The jaxpr without its constants (`.eqns .invars .outvars .constvars`)."""
    if isinstance(jaxpr, jex_core.ClosedJaxpr) and hasattr(jaxpr, "jaxpr"):
        return jaxpr.jaxpr
    return jaxpr


def consts_of(jaxpr: Jaxpr) -> Sequence[Any]:
    """Constants closed over by a jaxpr; empty for an open one."""
    return getattr(jaxpr, "consts", ())


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, (jex_core.ClosedJaxpr, jex_core.Jaxpr))


def call_jaxpr(eqn: Eqn) -> Jaxpr:
    """The single inner jaxpr of a call-like equation (jit, remat, custom_jvp, custom_vjp, linear_call, ...)."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee", "fwd_jaxpr"):
        if key in eqn.params and is_jaxpr(eqn.params[key]):
            return eqn.params[key]
    raise KeyError(f"{eqn.primitive.name} has no inner jaxpr")


def linear_solve(eqn: Eqn) -> tuple[Jaxpr, list[int]]:
    """The function that solves a `custom_linear_solve`, and which of the equation's operands it takes."""
    lengths = eqn.params["const_lengths"]
    start, total = lengths.matvec + lengths.vecmat, sum(lengths)
    return eqn.params["jaxprs"].solve, [*range(start, start + lengths.solve), *range(total, len(eqn.invars))]


def eqn_parts(eqn: Eqn) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Parameters, operand avals and result avals of an equation."""
    return eqn.params, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]


def is_ref(aval: Any) -> bool:
    """Whether an aval is a mutable array's (`jax.new_ref`)."""
    return isinstance(aval, _AbstractRef)


def is_mutable(x: Any) -> bool:
    """Whether a value is a mutable array itself."""
    return isinstance(x, jax.Ref)


def expand(eqn: Eqn) -> Jaxpr | None:
    """What a `call_hi_primitive` of plain arrays stands for (jnp.searchsorted, frexp and others in jax >= 0.12).

    None for any other equation, and where a type of the user's own is among its operands or results.
    """
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name != "call_hi_primitive" or not all(isinstance(a, _ShapedArray) for a in avals):
        return None
    args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    return jax.make_jaxpr(lambda *xs: eqn.primitive.to_lojax(*xs, **eqn.params))(*args)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def bind(eqn: Eqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Applies an equation's primitive to `args`, with its own or other parameters."""
    made = eqn.primitive.get_bind_params(dict(eqn.params) if params is None else params)
    subfuns, bind_params = made if isinstance(made, tuple) else ([], made)
    out = eqn.primitive.bind(*subfuns, *args, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def eqn_context(eqn: Eqn) -> Iterator[None]:
    """Everything an equation was traced under: name stack, source line, contexts (matmul precision, ...)."""
    info = eqn.source_info
    name_stack = _source_info_util.current_name_stack() + info.name_stack
    with _source_info_util.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


def metadata_context(eqn: Eqn) -> contextlib.AbstractContextManager[Any]:
    """The metadata that an `xla_metadata_call` puts on every operation of its function (jax >= 0.12)."""
    from jax.experimental.xla_metadata import set_xla_metadata

    found = set_xla_metadata(**dict(eqn.params["xla_metadata"]))
    return found if isinstance(found, contextlib.AbstractContextManager) else contextlib.nullcontext()


def name_stack(eqn: Eqn) -> str:
    return str(eqn.source_info.name_stack)


def own_shardings(eqn: Eqn, side: str) -> list[tuple[int, jax.sharding.NamedSharding]]:
    """(position, sharding) of what a call inside a step was told: `in_shardings` or `out_shardings`."""
    shardings = enumerate(eqn.params.get(side) or ())
    return [(k, sharding) for k, sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)]


def is_transposed(eqn: Eqn) -> bool:
    """Whether reverse-mode differentiation made an equation: JAX says so on the name stack."""
    return any(
        isinstance(x, _source_info_util.Transform) and x.name == "transpose" for x in eqn.source_info.name_stack.stack
    )


def source_line(eqn: Eqn) -> str:
    """`file.py:line (function)` of the user's code behind an equation, or "" if unknown."""
    frame = _source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def is_tracer(x: Any) -> bool:
    from jax.core import Tracer

    return isinstance(x, Tracer)


def is_extended(dtype: Any) -> bool:
    """Whether a dtype is opaque to sharding arithmetic (PRNG keys)."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def itemsize(aval: Any) -> int:
    """Bytes per element; PRNG keys count their key data."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    if is_extended(dtype):
        shape = getattr(getattr(dtype, "_impl", None), "key_shape", (2,))
        return 4 * int(np.prod(shape))
    return int(np.dtype(dtype).itemsize)


def buffers(x: jax.Array) -> list[tuple[int, int]]:
    """(device, address) of an array's buffers in this process; none where a backend does not tell."""
    if is_extended(x.dtype):
        return []
    try:
        return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in x.addressable_shards]
    except jax.errors.JaxRuntimeError:
        return []


def is_abstract(x: Any) -> bool:
    """Whether `x` is a shape and a dtype only."""
    return isinstance(x, (jax.ShapeDtypeStruct, _ShapedArray))


def is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def trace_context() -> Hashable:
    """All settings of JAX that a traced program may hang on: precision, promotion, the mesh of the context, ..."""
    return _config.trace_context()


def takes_compiled(dtype: Any) -> bool:
    """Whether a compiled program (`jax.stages.Compiled`) takes arrays of a dtype.

    JAX 0.10.2 doesn't note how elements of less than a byte are packed, and so refuses any such array; its own jit does
    not compare layouts.
    """
    return is_extended(dtype) or jax.dtypes.itemsize_bits(dtype) >= 8


def is_float(aval: Any) -> bool:
    return not is_extended(aval.dtype) and jax.numpy.issubdtype(aval.dtype, jax.numpy.floating)


def has_shape(aval: Any) -> bool:
    return hasattr(aval, "shape") and hasattr(aval, "dtype")


def get_aval(x: Any) -> Any:
    aval = getattr(x, "aval", None)
    return aval if aval is not None else jax.typeof(x)


def axis_types_auto(count: int) -> tuple[Any, ...]:
    return (jax.sharding.AxisType.Auto,) * count


def backend_started() -> bool:
    """Whether JAX already made its devices (then their number can't be changed)."""
    from jax._src import xla_bridge

    return bool(xla_bridge._backends)


def tracers(xs: Sequence[Any]) -> list[Any]:
    from jax.core import Tracer

    return [x for x in xs if isinstance(x, Tracer)]


def are_staged(xs: Sequence[Any]) -> bool:
    """Whether tracers belong to a program being written down (jit, eval_shape, loops), not to grad or vmap."""
    from jax._src.interpreters.partial_eval import DynamicJaxprTracer

    return all(isinstance(x, DynamicJaxprTracer) for x in xs)


def wait_for_processes(name: str, seconds: float, processes: Sequence[int]) -> bool:
    """Waits until all the given processes (by index) are here; whether they came in time.

    Without the service that `jax.distributed.initialize` starts, nobody waits: True.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        return True
    try:
        client.wait_at_barrier(name, int(seconds * 1000), list(processes))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return False
    return True


def is_set(flag: str) -> bool:
    """A switch of JAX's configuration, also as a context manager has set it."""
    return bool(getattr(jax.config, flag))
