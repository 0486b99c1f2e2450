"""What the compilers do with memory: which results become buffers, and how large a buffer is.

Each habit was seen in the buffer assignments of compiled programs (`benchmarks/memory.py`); none depends on a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """One compiler.

    Attributes:
      operands_stored: contractions read their operands from buffers (a library call); else they fuse what makes them.
      recomputes: a fusion computes again what another one stored as an operand, if it stands on one large buffer.
      stores_slow: results of slow elementwise functions that are used twice are stored.
      hoists_casts: casts of stacked weights to fewer bytes are done once, before the loop that reads them.
      tiles: (minor, second minor) dimensions of an array are padded to multiples of these; None: not at all.
      least: bytes of the smallest buffer.
    """

    operands_stored: bool
    recomputes: bool
    stores_slow: bool
    hoists_casts: bool
    tiles: tuple[int, int] | None
    least: int

    def buffer_bytes(self, shape: Sequence[int], itemsize: float) -> float:
        """Bytes of a buffer for an array of one device.

        The compiler picks the two tiled dimensions that waste least.
        """
        size = math.prod(shape) * itemsize
        if self.tiles is None or not size:
            return size
        if size < 4096:
            return max(size, self.least)
        minor, second = self.tiles
        if len(shape) < 2:
            return math.ceil(size / self.least) * self.least
        whole = math.prod(shape)
        # packed types: two bfloat16 share a sublane, so the second minor dimension is padded to twice as many
        best = math.inf
        for i, a in enumerate(shape):
            for j, b in enumerate(shape):
                if i != j:
                    padded = whole // (a * b) * (-(-a // minor) * minor) * (-(-b // second) * second)
                    best = min(best, padded)
        return best * itemsize


HABITS = {
    "gpu": Habits(True, True, True, False, None, 0),
    "tpu": Habits(False, False, False, True, (128, 8), 512),
    "cpu": Habits(True, True, True, False, None, 0),
}

# Slow elementwise functions: worth a buffer where they are used twice.
SLOW = frozenset({"tanh", "erf", "logistic", "pow", "erf_inv"})

# Operations of one array that change no element's value beyond what a fusion can redo while reading.
_ELEMENTWISE = (
    "acospi asinpi atan2pi atanpi cospi exp2m1 fma fmuladd log2p1 sinpi tanpi "
    "abs acos acosh asin asinh atan atanh atan2 add add_any and bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min "
    "mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt square stop_gradient sub tan tanh xor zeta"
)
_RELABELLED = (
    "broadcast_in_dim concatenate dynamic_slice expand_dims iota pad random_bits random_seed random_split "
    "random_fold_in random_wrap random_unwrap reshape rev sharding_constraint slice split squeeze transpose unstack "
    "result branch"
)
FUSED = frozenset((_ELEMENTWISE + " " + _RELABELLED).split())
