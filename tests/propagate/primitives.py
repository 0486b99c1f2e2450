"""Primitives without a rule, each with the reason why a traced training step does not hold it, and how to list all."""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import sys
import warnings


def _of(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


_AXIS = "it names a mesh axis: it stands only inside a shard_map, which is not looked into"
_DONE = "tracing, batching or differentiation replace it before a jaxpr is handed out"
_POLYMORPHIC = "it stands only in programs exported with sizes left open; a step is planned for sizes that are known"
_CHECK = "checkify turns it into arrays; what is left over JAX itself refuses to lower"
_BOXES = "boxes and logs of types of the user's own: JAX replaces them when it lowers"
_THUNKS = "it stands only in programs written in XLA's own thunks"

# fmt: off
CANNOT_STAND: dict[str, str] = {
    **_of("all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start", _AXIS),
    **_of("all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done", _AXIS),
    **_of("pbroadcast_start pbroadcast_dynamic pmax pmin ppermute ppermute_done ppermute_start precv preduced", _AXIS),
    **_of("psend psum psum_done psum_invariant psum_invariant_start psum_start pvary ragged_all_to_all", _AXIS),
    **_of("reduce_scatter reduce_scatter_done reduce_scatter_start reduced_vary_cast_p reduced_vary_cast", _AXIS),
    **_of("unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start", _AXIS),
    **_of("unreduced_pmax unreduced_pmin vary_unreduced_cast_p vary_unreduced_cast", _AXIS),
    **_of("pmax_scatter pmin_scatter pxor", _AXIS),
    **_of("custom_jvp_call_jaxpr custom_lin eval_jaxpr stage unreachable zeros_like", _DONE),
    **_of("relayout", "it stands only where layouts in types are switched on, which is an experiment"),
    **_of("dim_as_value dimension_size shape_assertion", _POLYMORPHIC),
    **_of("check", _CHECK),
    **_of("box_get box_set new_box log_extend log_read new_log", _BOXES),
    **_of("thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start", _THUNKS),
    **_of("thunky.call_jax thunky.call_thunky_nested thunky.collective_group thunky.collective_permute", _THUNKS),
    **_of("thunky.cond thunky.copy thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero", _THUNKS),
    **_of("thunky.ptx_kernel thunky.reduce_scatter thunky.while", _THUNKS),
}
# fmt: on


# Modules whose primitives stand only inside a kernel, which is not looked into; but for the calls of kernels.
KERNELS = "jax._src.pallas."


def all_primitives() -> dict[str, str]:
    """Names of all primitives of the installed JAX, each with a module that holds it (outside Pallas if there is one).

    Imports every module of JAX: for a process of its own.
    """
    import jax._src
    from jax._src import core

    for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
        if "test" in module.name.rsplit(".", 1)[-1]:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(module.name)
            except ImportError:  # of an accelerator that is not installed
                continue
    found = {x.name: "" for x in gc.get_objects() if isinstance(x, core.Primitive)}
    modules = [(name, module) for name, module in sorted(sys.modules.items()) if name.startswith("jax.")]
    for name, module in sorted(modules, key=lambda pair: not pair[0].startswith(KERNELS)):
        found |= {x.name: name for x in list(vars(module).values()) if isinstance(x, core.Primitive)}
    return found


if __name__ == "__main__":
    print(json.dumps(all_primitives()))
