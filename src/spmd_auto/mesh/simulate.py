"""More CPU devices than the machine has, to run sharded programs anywhere."""

from __future__ import annotations

import jax

from spmd_auto import _compat
from spmd_auto.errors import MeshError


def simulate_devices(count: int) -> None:
    """Lets JAX see `count` CPU devices. Call it before anything that makes JAX look for devices.

    Calling it again is fine as long as there are enough devices; a started backend keeps the number that it has, which
    may be larger.

    Raises:
      MeshError: `count` is not positive, or JAX has already started with fewer devices.
    """
    if count < 1:
        raise MeshError(f"simulate_devices({count})", "a program needs at least one device", ["simulate_devices(8)"])
    if not _compat.backend_started():
        # Never shrink what an earlier call, or the user, asked for.
        jax.config.update("jax_num_cpu_devices", max(count, getattr(jax.config, "jax_num_cpu_devices", 0)))
        return
    have = len(jax.devices("cpu"))
    if have < count:
        raise MeshError(
            f"simulate_devices({count}) comes too late: JAX has already started with {have} CPU device(s)",
            "the number of devices is fixed when JAX first looks for them (any array, any jax.devices())",
            [
                f"call simulate_devices({count}) right after the imports",
                f"or start Python with JAX_NUM_CPU_DEVICES={count}",
            ],
        )
