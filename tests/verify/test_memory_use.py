"""What a device needs, from what compilers state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from spmd_auto.verify import MemoryUse, read_memory


@pytest.mark.parametrize(
    ("peak", "needed"),
    [
        pytest.param(None, 180, id="not stated"),
        pytest.param(100, 180, id="arguments alone, as on CPU"),
        pytest.param(120, 180, id="hardly any temporaries, as on CPU"),
        pytest.param(40, 180, id="on-chip memory, as on TPU"),
        pytest.param(150, 150, id="a peak: not all temporaries are live at once"),
        pytest.param(400, 180, id="more than there is"),
    ],
)
def test_the_peak_counts_where_it_can_be_one(peak, needed):
    use = MemoryUse(arguments=100, outputs=60, aliases=50, temporaries=70, peak=peak)
    assert use.needed == needed


def test_temporaries_count_on_a_cpu():
    def step(x):
        return jnp.sum(jnp.sort(x @ x, axis=0) @ jnp.sort(x @ x.T, axis=1))

    use = read_memory(jax.jit(step).lower(jnp.ones((256, 256))).compile())
    assert use is not None
    assert use.temporaries > 0
    assert use.arguments + use.temporaries <= use.needed <= use.arguments + use.temporaries + use.outputs
