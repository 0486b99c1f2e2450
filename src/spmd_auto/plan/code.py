"""A plan as plain JAX: the text of a module that needs only jax and the user's own step."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmd_auto.errors import LoweringError
from spmd_auto.mesh.logical import Spec
from spmd_auto.plan.plan import Plan
from spmd_auto.propagate.graph import Op
from spmd_auto.trace import Leaf
from spmd_auto.trace.calls import join

_MODULE = '''\
"""How {name} is split over {count} devices: {mesh}.

Written by spmd_auto with jax {jax}; it needs jax only.

    from {module} import place, shard

    sharded = shard({name}{example})  # traces it; nothing is computed
    {names} = place({name}{example})  # once: brings the arguments to where they belong
    sharded({call})  # as {name} is called

{donation}
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {axes}  # outermost first
NAMES = {arguments_names}  # of the arguments by position
{devices}
# Path and PartitionSpec of every array of the arguments, in the order of jax.tree.leaves((args, kwargs)).
ARGUMENTS = {arguments}

# Path and PartitionSpec of every array of the result; DONATED: ARGUMENTS whose buffers the results take over.
RESULTS = {results}
DONATED = {donated}

{constraints}

def make_mesh(devices=None):
    """The mesh over the given devices (default: all that JAX has)."""
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(AXES.values())
    count = int(np.prod(shape))
    if len(devices) < count:
        raise ValueError(f"this plan is for {{count}} devices, {{len(devices)}} are there")
{ordered}    grid = np.array(devices[:count], dtype=object).reshape(shape)
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def shardings(step, *args, mesh=None, **kwargs):
    """NamedShardings of `(args, kwargs)` and of the result; `args` are arrays or ShapeDtypeStructs."""
    mesh = make_mesh() if mesh is None else mesh
    ins = _with_specs("argument", ARGUMENTS, (args, kwargs), mesh)
    out = jax.eval_shape(step, *args, **kwargs)
    return ins, _with_specs("result", RESULTS, out, mesh)


def place(step, *args, mesh=None, **kwargs):
    """The arguments, moved to where the plan has them: a tuple, one alone, or with keywords `(args, kwargs)`."""
    ins, _ = shardings(step, *args, mesh=mesh, **kwargs)
    args, kwargs = jax.device_put((args, kwargs), ins)
    return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args


def shard(step, *args, mesh=None, **kwargs):
    """`step`, jitted for the mesh and called as before; `args` and `kwargs` are examples, or ShapeDtypeStructs."""
    (in_args, in_kwargs), outs = shardings(step, *args, mesh=mesh, **kwargs)
    if not kwargs:
        heads = [path.split("/")[0] for path, _ in ARGUMENTS]
        donated = tuple(i for i, name in enumerate(NAMES) if any(heads[k] == name for k in DONATED))
        return jax.jit(step, in_shardings=in_args, out_shardings=outs, donate_argnums=donated)
    # jit takes shardings by position only: all arrays are passed flat
    flat_ins, tree = jax.tree.flatten((in_args, in_kwargs))

    def flat_step(*leaves):
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return step(*args, **kwargs)

    jitted = jax.jit(flat_step, in_shardings=tuple(flat_ins), out_shardings=outs, donate_argnums=DONATED)
    return lambda *args, **kwargs: jitted(*jax.tree.leaves((args, kwargs)))


def _with_specs(side, table, tree, mesh):
    """`tree` with NamedShardings for its arrays, after a look at their paths."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = []
    for path, _ in leaves:
        head = ""
        if side == "argument":
            head = (*NAMES, *("?",) * len(leaves))[path[1].idx] if path[0].idx == 0 else str(path[1].key)
            path = path[2:]
        tail = jax.tree_util.keystr(path, simple=True, separator="/")
        paths.append("/".join(part for part in (head, tail) if part))
    for path, (_, leaf) in zip(paths, leaves):
        if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
            kind = type(leaf).__name__
            raise ValueError(f"{{side}} {{path!r}} is a {{kind}}, no array: bind it with functools.partial")
    wanted = [path for path, _ in table]
    if paths != wanted:
        here, there = set(paths), set(wanted)
        odd = next((p for p in (*paths, *wanted) if (p in here) != (p in there)), "their order")
        raise ValueError(f"this plan is for another step: {{side}} {{odd!r}} differs; plan again")
    return jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for _, spec in table])
'''


def plan_to_code(plan: Plan, module: str = "plan") -> str:
    """The text of a module of plain JAX that runs the step as planned.

    Its `shard(step, *example_args)` gives a jitted step with the plan's shardings of arguments and results, called as
    the step is.  What the plan does inside the step stands there as comments: XLA decides it anew from the outside,
    unless the constraints are written into the step.

    Args:
      plan: any plan; static arguments of its step have to be bound by `functools.partial`.
      module: the name that the usage in its docstring imports.

    Raises:
      LoweringError: a step that changes objects in place, or returns objects: plain `jax.jit` takes no such step.
    """
    program, mesh, placements = plan.program, plan.mesh, plan.placements
    if program.returned.has_objects or len(program.results) > program.out_tree.num_leaves:
        raise LoweringError(
            f"{program.name} works on objects: there is no plain JAX for it",
            "jax.jit takes and returns arrays only",
            ["a step of arrays: nnx.split before it, nnx.merge in it", "plan.save keeps the plan for this package"],
        )
    outs = [
        placements.arguments[i] if i is not None else spec
        for i, spec in zip(program.replaces, placements.results, strict=True)
    ]
    tree = jax.tree_util.tree_unflatten(program.in_tree, [leaf.path for leaf in program.arguments])
    args, kwargs = tree
    names = [_head(arg, i) for i, arg in enumerate(args)]
    out = jax.tree_util.tree_unflatten(program.out_tree, [leaf.path for leaf in program.results])
    call = ", ".join([*names, *(f"{key}={key}" for key in kwargs)])
    donated = tuple(sorted(i for i in program.replaces if i is not None))
    heads = sorted({program.arguments[i].path.split("/")[0] for i in donated})
    ids = [d.id for d in plan.devices] if plan.devices is not None else []
    reordered = ids and ids != sorted(ids)
    return _MODULE.format(
        name=_identifier(program.name),
        count=mesh.device_count,
        mesh=", ".join(f"{n}={k}" for n, k in zip(mesh.names, mesh.sizes, strict=True)),
        jax=jax.__version__,
        module=module,
        example=f", {call}" if call else "",
        names=f"({', '.join(names)}), kwargs" if kwargs else ", ".join(names) or "_",
        call=call,
        arguments_names=repr(tuple(names)),
        donation=f"The buffers of {', '.join(heads)} are given to the result: use what the step returns."
        if heads
        else "Nothing is donated.",
        axes=repr(dict(zip(mesh.names, mesh.sizes, strict=True))),
        devices=f"DEVICE_IDS = {ids}  # in the order of the mesh that the plan was made for\n" if reordered else "",
        ordered="    devices = sorted(devices, key=lambda d: DEVICE_IDS.index(d.id))\n" if reordered else "",
        arguments=_table(plan, _paths(tree, names), program.arguments, placements.arguments),
        results=_table(plan, _paths(out, None), program.results, outs),
        donated=repr(donated),
        constraints="\n".join(f"# {line}" for line in _constraints(plan)) + "\n",
    )


def _paths(tree: Any, names: Sequence[str] | None) -> list[str]:
    """Paths of a tree's leaves as the module finds them: a leaf in a box of flax has a longer one than `Leaf.path`."""
    paths = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if names is None:
            paths.append(join("", path))
        else:
            paths.append(join(str(names[path[1].idx] if path[0].idx == 0 else path[1].key), path[2:]))
    return paths


def _table(plan: Plan, paths: Sequence[str], leaves: Sequence[Leaf], specs: Sequence[Spec]) -> str:
    if not leaves:
        return "()"
    rows = []
    for path, leaf, spec in zip(paths, leaves, specs, strict=True):
        rows.append(f"    ({path!r}, {_spec(plan.mesh.partition_spec(spec))}),  # {leaf.dtype}{list(leaf.shape)}")
    return "(\n" + "\n".join(rows) + "\n)"


def _spec(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def _constraints(plan: Plan) -> list[str]:
    """What the plan does inside the step, by source line: where an operation's operands or results change their layout,
    and how results of contractions lie."""
    graph, pricer = plan.analysis.graph, plan.pricer
    placed = {value.id: spec for value, spec in _own_specs(plan)}
    lines: dict[str, None] = {}
    for op in graph.ops:
        index = plan.analysis.classes.of_op[op.id]
        form = plan.priced.forms[index] if index is not None else None
        if form is None or op.backward or op.eqn is None:
            continue
        at = _place(op)
        for k, (value, target) in enumerate(zip(op.operands, form.targets, strict=True)):
            stored = placed.get(value.id)
            if value.placed and stored is not None and pricer.reshards.price(value.bytes, stored, target).transfers:
                name = value.path or f"operand {k} of {op.name} {list(value.shape)}"
                lines[f"at {at}: with_sharding_constraint({name}, {_spec(plan.mesh.partition_spec(target))})"] = None
        for value, raw in zip(op.results, form.raws, strict=True):
            stored = placed.get(value.id, ())
            if value.placed and any(stored) and (op.flops or raw != stored):
                spec = _spec(plan.mesh.partition_spec(stored))
                lines[f"at {at}: with_sharding_constraint(result of {op.name} {list(value.shape)}, {spec})"] = None
    if not lines:
        return ["Inside the step the plan splits nothing that does not follow from the arguments."]
    return ["What the plan does inside the step, in its forward pass (jax.lax.with_sharding_constraint):", *lines]


def _own_specs(plan: Plan) -> list[tuple[Any, Spec]]:
    classes = plan.analysis.classes
    return [(v, plan.priced.specs[classes.of_value[v.id]]) for v in plan.analysis.graph.values]


def _place(op: Op) -> str:
    """`model.py:42`: without folders, which are of another machine."""
    found = re.match(r"(.*):(\d+) \(", op.source)
    return f"{os.path.basename(found[1])}:{found[2]}" if found else "an unknown line"


def _head(argument: Any, i: int) -> str:
    paths = jax.tree_util.tree_leaves(argument)
    return paths[0].split("/")[0] if paths else f"arg{i}"


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "step"
