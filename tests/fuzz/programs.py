"""A random program: what it is as data, as a function, and how it is cut smaller."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz import arithmetic, flow, movement
from tests.fuzz.draft import Argument, Call, Draft

RECIPES = {**arithmetic.RECIPES, **movement.RECIPES, **flow.RECIPES}


@dataclasses.dataclass(frozen=True, slots=True)
class FuzzProgram:
    """Nodes in order of evaluation, and which values are returned.

    `gradient`: a step of gradient descent on the mean of the squares of the (float) outputs instead of these.
    """

    nodes: tuple[Argument | Call, ...]
    outputs: tuple[int, ...]
    gradient: bool = False

    @property
    def arguments(self) -> list[Argument]:
        return [node for node in self.nodes if isinstance(node, Argument)]

    def evaluate(self, *args: Any) -> list[Any]:
        """All values."""
        given = iter(args)
        values: list[Any] = []
        for node in self.nodes:
            if isinstance(node, Argument):
                values.append(next(given))
                continue
            out = RECIPES[node.recipe].apply(*(values[v] for v in node.operands), **dict(node.params))
            values += out if isinstance(out, tuple) else (out,)
        return values

    def function(self) -> Callable[..., Any]:
        """Of flat arguments, or (if differentiated) of a dict of the float ones and the others: (new floats, loss)."""

        def forward(*args: Any) -> list[Any]:
            values = self.evaluate(*args)
            return [values[v] for v in self.outputs]

        if not self.gradient:
            return forward
        floats = [k for k, a in enumerate(self.arguments) if a.kind == "f"]

        def step(params: dict[str, Any], *rest: Any) -> Any:
            def loss(params: dict[str, Any]) -> Any:
                others = iter(rest)
                args = [params[f"p{k}"] if k in floats else next(others) for k in range(len(self.arguments))]
                outs = [x for x in forward(*args) if jnp.issubdtype(x.dtype, jnp.floating)]
                return sum(jnp.mean(x * x) for x in outs)

            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

        return step

    def inputs(self, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of `function`: floats around 0.5 in size, indices of which one in eight is outside."""
        rng = np.random.default_rng(seed)
        flat = []
        for a in self.arguments:
            if a.kind == "f":
                flat.append(rng.normal(size=a.shape) * 0.5)
            else:
                low, high = (0, max(1, a.high)) if rng.random() < 0.6 else (-a.high - 2, 2 * a.high + 3)
                flat.append(rng.integers(low, high, a.shape).astype(np.int32))
        if not self.gradient:
            return tuple(flat)
        params = {f"p{k}": x for k, (a, x) in enumerate(zip(self.arguments, flat, strict=True)) if a.kind == "f"}
        return (params, *(x for a, x in zip(self.arguments, flat, strict=True) if a.kind != "f"))

    def starts(self) -> list[int]:
        """Number of the first value of each node."""
        out, total = [], 0
        for node in self.nodes:
            out.append(total)
            total += 1 if isinstance(node, Argument) else node.results
        return out

    def __str__(self) -> str:
        starts = self.starts()
        lines = []
        for start, node in zip(starts, self.nodes, strict=True):
            if isinstance(node, Argument):
                text = f"argument {node.kind}{list(node.shape)}" + (f" below {node.high}" if node.kind == "i" else "")
            else:
                params = ", ".join(f"{k}={v!r}" for k, v in node.params)
                text = f"{node.recipe}({', '.join(f'v{v}' for v in node.operands)}{', ' if params else ''}{params})"
            lines.append(f"v{start} = {text}")
        return "\n".join([*lines, f"return {list(self.outputs)}" + (" (gradient)" if self.gradient else "")])


def generate(seed: int, most: int = 8) -> FuzzProgram:
    """A program of 2 to `most` calls; two of five are differentiated."""
    rng = random.Random(seed)
    gradient = rng.random() < 0.4
    able = [name for name, recipe in RECIPES.items() if recipe.smooth or not gradient]
    weights = [3 if name in ("dot", "reshape", "binary", "unary") else 1 for name in able]
    draft = Draft(rng)
    draft.argument(draft.dims(2, 3))
    wanted = rng.randint(2, most)
    with jax.enable_x64(True):
        for _ in range(10 * wanted):
            name = rng.choices(able, weights)[0]
            wanted -= draft.add(name, RECIPES[name])
            if wanted == 0:
                break
    used = {v for node in draft.nodes if isinstance(node, Call) for v in node.operands}
    made = [v for v in range(len(draft.avals)) if v not in used]
    floats = [v for v, (_, kind) in enumerate(draft.avals) if kind == "f"]
    outputs = dict.fromkeys([*made, *rng.sample(floats, min(len(floats), rng.choice((0, 0, 1))))])
    if gradient and not any(draft.avals[v][1] == "f" for v in outputs):
        outputs = dict.fromkeys([*outputs, floats[-1]])
    return pruned(FuzzProgram(tuple(draft.nodes), tuple(outputs), gradient))


def pruned(program: FuzzProgram) -> FuzzProgram:
    """Without what no output needs."""
    starts = program.starts()
    needed, keep = set(program.outputs), []
    for start, node in reversed(list(zip(starts, program.nodes, strict=True))):
        count = 1 if isinstance(node, Argument) else node.results
        if needed.isdisjoint(range(start, start + count)):
            continue
        keep.append((start, node, count))
        if isinstance(node, Call):
            needed.update(node.operands)
    number: dict[int, int] = {}
    nodes = []
    for start, node, count in reversed(keep):
        for k in range(count):
            number[start + k] = len(number)
        if isinstance(node, Call):
            node = dataclasses.replace(node, operands=tuple(number[v] for v in node.operands))
        nodes.append(node)
    return FuzzProgram(tuple(nodes), tuple(number[v] for v in program.outputs), program.gradient)


def smaller(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Programs with something less: no gradient, one output, a call replaced by an argument."""
    if program.gradient:
        yield dataclasses.replace(program, gradient=False)
    if len(program.outputs) > 1:
        for v in program.outputs:
            yield pruned(dataclasses.replace(program, outputs=(v,)))
        for v in program.outputs:
            yield pruned(dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o != v)))
    with jax.enable_x64(True):
        flat = dataclasses.replace(program, gradient=False)
        values = jax.eval_shape(flat.evaluate, *flat.inputs())
    starts = program.starts()
    calls = [k for k, node in enumerate(program.nodes) if isinstance(node, Call)]
    for k in reversed(calls):
        node = program.nodes[k]
        assert isinstance(node, Call)
        if starts[k] in program.outputs and len(calls) == 1:
            continue
        stand_ins = [
            Argument(v.shape, "f" if jnp.issubdtype(v.dtype, jnp.floating) else "i", 8)
            for v in values[starts[k] : starts[k] + node.results]
        ]
        yield pruned(dataclasses.replace(program, nodes=(*program.nodes[:k], *stand_ins, *program.nodes[k + 1 :])))
