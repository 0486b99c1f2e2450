"""A small transformer of flax.linen learns to write Python: next bytes of the standard library's source."""

import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

BATCH, LENGTH, WIDTH, STEPS = 16, 64, 64, 5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, deterministic=True)(h, h, mask=mask)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        position = self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(256, WIDTH)(tokens) + position
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = Block()(x, mask)
        return nn.Dense(256)(nn.LayerNorm()(x))


def batches():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = np.concatenate([np.frombuffer(p.read_bytes(), np.uint8) for p in sorted(stdlib.glob("a*.py"))])
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        yield np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)


@jax.jit
def train_step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = Model()
params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3))
data = batches()
for step in range(STEPS):
    state, loss = train_step(state, next(data))
    print(f"step {step} loss {loss:.4f}")
