"""Operations that nobody can look into: they keep their operands whole, by decision and not for want of a rule.

Such an operation runs on whole arrays: once where it talks to the host, and on every device alike where it is a kernel
or a foreign function.  It is reported like an unknown primitive, with the reason given here: what it keeps whole is
memory that a user may want to know of.

Mutable arrays (`jax.new_ref`) are kept whole from their making to their freezing: each read and write would have to
agree on one split.
"""

from __future__ import annotations

_HOST = "it hands whole arrays to the host"
_KERNEL = "a kernel's grid and blocks are written for the whole array; wrap the call in shard_map to split it"
_FOREIGN = "a foreign function may do anything with its operands"
_MUTABLE = "a mutable array stays whole from its making to its freezing"
_HIGH = "a type of the user's own, that stands for several arrays"
_ORDERED = "the order of its operations is part of it"
_HOST_SIDE = "it runs on the host, as one"
_CUDNN = "a cuDNN kernel, which brings partitioning of its own"
_EXTENDED = "an element type of the user's own"
_TOKEN = "an order of effects, not an array"


def _of(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


OPAQUE: dict[str, str] = {
    **_of("pure_callback io_callback debug_callback debug_print inspect_sharding", _HOST),
    **_of("pallas_call core_map mpmd_map tpu_custom_call mosaic_gpu_p custom_fusion cudnn_fusion", _KERNEL),
    **_of("ffi_call buffer_callback call_exported", _FOREIGN),
    **_of("new_ref empty_ref freeze free_ref get swap addupdate accum_grad_in_ref", _MUTABLE),
    **_of("run_state create_linear pin unpin", _MUTABLE),
    **_of("call_hi_primitive call_hi_primitive_linearized", _HIGH),
    **_of("scaled_matmul scaled_matmul_wrapper", _CUDNN),
    **{
        f"dot_product_attention_{kind}{wrapper}": _CUDNN
        for kind in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")
        for wrapper in ("", "_wrapper")
    },
    **_of("to_edtype from_edtype", _EXTENDED),
    **_of("create_token after_all dce_sink", _TOKEN),
    "compute_on": _HOST_SIDE,
    "program_order": _ORDERED,
}
