"""Eight CPU devices for the oracle; must be set before the backend starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
