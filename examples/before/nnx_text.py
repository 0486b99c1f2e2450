"""A small recurrent network of flax.nnx learns to write Python: next bytes of the standard library's source."""

import sysconfig
from pathlib import Path

import numpy as np
import optax
from flax import nnx

BATCH, LENGTH, WIDTH, STEPS = 16, 64, 64, 5


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, 2 * WIDTH, rngs=rngs))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.drop(self.rnn(self.embed(tokens))))


def batches():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = np.concatenate([np.frombuffer(p.read_bytes(), np.uint8) for p in sorted(stdlib.glob("a*.py"))])
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        yield np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
data = batches()
for step in range(STEPS):
    loss = train_step(model, optimizer, next(data))
    print(f"step {step} loss {loss:.4f}")
