"""A small mixer of Equinox learns to write Python: next bytes of the standard library's source."""

import sysconfig
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax

BATCH, LENGTH, WIDTH, STEPS = 16, 32, 64, 5


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    hidden: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(256, WIDTH, key=a)
        self.hidden = eqx.nn.MLP(LENGTH * WIDTH, WIDTH, 4 * WIDTH, 2, activation=jax.nn.gelu, key=b)
        self.head = eqx.nn.Linear(WIDTH, 256, key=c)

    def __call__(self, tokens):
        return self.head(self.hidden(jax.vmap(self.embed)(tokens).reshape(-1)))


def batches():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = np.concatenate([np.frombuffer(p.read_bytes(), np.uint8) for p in sorted(stdlib.glob("a*.py"))])
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        yield np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)


tx = optax.adamw(3e-3)


@eqx.filter_jit
def train_step(model, opt_state, tokens):
    def loss_fn(model):
        logits = jax.vmap(model)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


model = Model(jax.random.key(0))
opt_state = tx.init(eqx.filter(model, eqx.is_array))
data = batches()
for step in range(STEPS):
    model, opt_state, loss = train_step(model, opt_state, next(data))
    print(f"step {step} loss {loss:.4f}")
