"""Training steps of at least 1 GiB on each of 16 devices, abstract: the benchmarks compile them and never run them.

`PROGRAMS[name]()` gives (step, abstract state, abstract batch).  Cost models may be tuned on all but `HOLD_OUT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from programs import language, others, vision

Program = tuple[Callable[..., Any], Any, Any]

PROGRAMS: dict[str, Callable[[], Program]] = {
    **language.PROGRAMS,
    **vision.PROGRAMS,
    **others.PROGRAMS,
}

# Nothing is tuned on these: other layers, other libraries, other ways to write the same.
HOLD_OUT = (
    "bert_unroll",
    "encoder_decoder",
    "llama_unroll_remat",
    "moe_unroll",
    "nnx_gpt",
    "vit_scan",
    "convnext",
    "mixer",
    "gru",
)
