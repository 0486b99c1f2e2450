"""Reads a compiled program: its collectives by mesh axes and bytes, its dot FLOPs, its memory.

Works on the optimised HLO of CPU, GPU and TPU. What differs between them, each seen in their output:

- GPU collectives are `-start`/`-done` pairs; combined ones have tuple types, `((operands), (results))`.
- TPU reduce-scatters are a fusion of an all-reduce and a slice (`all-reduce-scatter`).
- A TPU collective that runs beside other work is printed once in each computation it passes through, the first marked
  `AsyncCollectiveStart`, all with one `chain_id`. The channel id doesn't tell: `shard_map` gives all the same.
- CPU never forms reduce-scatters outside of `shard_map` (all-reduce and slice instead) and computes bfloat16 in
  float32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh, NamedSharding

from spmd_auto.errors import VerifyError
from spmd_auto.verify.hlo_flops import dot_flops
from spmd_auto.verify.hlo_groups import DeviceGroups, GroupReader
from spmd_auto.verify.hlo_loops import count_executions
from spmd_auto.verify.hlo_text import Computation, HloArray, HloText, Instruction, parse_arrays, parse_hlo, split_tuple
from spmd_auto.verify.program import KINDS, Collective, MemoryUse, ProgramSummary

_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?')


def read_hlo(
    text: str, axis_names: Sequence[str], axis_sizes: Sequence[int], device_ids: Sequence[int] | None = None
) -> ProgramSummary:
    """Reads the text of one compiled SPMD program.

    Args:
      text: optimised HLO, as `compiled.as_text()` gives it.
      axis_names, axis_sizes: the mesh to describe groups on.
      device_ids: partition id of each place of the mesh, flattened row-major. None: place i is partition i, which
        holds for what `jax.jit` compiles on that mesh, whatever the order or ids of its devices.

    Returns:
      The summary, without memory.

    Raises:
      VerifyError: the text isn't a compiled module, or its collectives don't fit the mesh.
    """
    names, sizes = tuple(axis_names), tuple(int(s) for s in axis_sizes)
    module = parse_hlo(text)
    executions = count_executions(module)
    groups = GroupReader(sizes, device_ids)
    chains = _chains_with_start(module)
    seen_chains: set[str] = set()
    collectives: list[Collective] = []
    flops = 0.0
    for computation in module.computations.values():
        times = executions.times.get(computation.name, 0)
        if not times:
            continue
        for instruction in computation.instructions:
            flops += times * dot_flops(computation, instruction)
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or not _counts(computation, instruction, chains, seen_chains):
                continue
            joined = groups.read(instruction.text)
            if joined.size > 1 and joined.axes:
                collectives.append(
                    replace(
                        _collective(computation, instruction, kind, joined, names),
                        times=times,
                        source=_source(instruction, module),
                        in_branch=computation.name in executions.in_branch,
                    )
                )
    notes = tuple(f"loop {body}: trip count depends on data, counted once" for body in executions.unknown_loops)
    return ProgramSummary(names, sizes, tuple(collectives), flops, notes=notes)


def read_compiled(compiled: Any, mesh: Mesh) -> ProgramSummary:
    """Reads what `jax.jit(f).lower(...).compile()` returned.

    Args:
      compiled: the compiled program, for any platform, with or without devices.
      mesh: the mesh to describe groups on; of the same devices as the program's own, in any order and shape.

    Raises:
      VerifyError: the compiler doesn't give its text, or the mesh is of other devices.
    """
    text = compiled.as_text()
    if not text:
        raise VerifyError(
            "the compiled program has no readable text",
            "its compiler can't print HLO (seen where libtpu is newer than the one jax asks for)",
            ["install the libtpu that fits jax: pip install 'spmd-auto[tpu]'"],
        )
    summary = read_hlo(text, mesh.axis_names, mesh.devices.shape, _partition_ids(compiled, mesh))
    return replace(summary, memory=read_memory(compiled))


def read_memory(compiled: Any) -> MemoryUse | None:
    """Bytes per device as the compiler states them, None where it doesn't."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliases=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak=getattr(stats, "peak_memory_in_bytes", 0) or None,
    )


def _partition_ids(compiled: Any, mesh: Mesh) -> list[int] | None:
    """Partition id of each device of `mesh`, from the mesh of any of the program's shardings; None: in order."""
    inputs, named = compiled.input_shardings
    shardings = _leaves((inputs, named, compiled.output_shardings))
    own = next((s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)), None)
    if own is None or own.devices.size != mesh.devices.size:
        return None
    partition = {device: i for i, device in enumerate(own.devices.flat)}
    missing = [device for device in mesh.devices.flat if device not in partition]
    if missing:
        raise VerifyError(
            f"the program wasn't compiled for device {missing[0]}",
            f"its own mesh {dict(own.shape)} doesn't have it",
            ["pass the mesh of the program's shardings"],
        )
    return [partition[device] for device in mesh.devices.flat]


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def _chains_with_start(module: HloText) -> set[str]:
    return {
        match.group(1)
        for computation in module.computations.values()
        if _starts_chain(computation)
        for instruction in computation.instructions
        if (match := _CHAIN.search(instruction.text))
    }


def _starts_chain(computation: Computation) -> bool:
    return any('"AsyncCollectiveStart"' in i.text for i in computation.instructions if i.opcode == "custom-call")


def _counts(computation: Computation, instruction: Instruction, chains: set[str], seen: set[str]) -> bool:
    """Whether this print of a collective is the one to count: where its chain starts, or the first without a start."""
    match = _CHAIN.search(instruction.text)
    if match is None:
        return True
    chain = match.group(1)
    if chain in chains:
        return _starts_chain(computation)
    first = chain not in seen
    seen.add(chain)
    return first


def _collective(
    computation: Computation, instruction: Instruction, kind: str, joined: DeviceGroups, names: tuple[str, ...]
) -> Collective:
    results = _results(instruction, kind)
    n = joined.size
    payload = sum(a.nbytes for a in results)
    if kind == "reduce-scatter":
        payload *= n
    if kind == "all-reduce" and _is_scattered(computation, instruction, n):
        kind = "reduce-scatter"
    sent = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    op_name = _OP_NAME.search(instruction.text)
    return Collective(
        kind=kind,
        axes=tuple(names[a] for a in joined.axes),
        group_size=n,
        payload_bytes=payload,
        ring_bytes=payload * sent,
        times=1,
        dtypes=tuple(a.dtype for a in results),
        op_name="" if op_name is None else op_name.group(1).replace("\\'", "'").replace('\\"', '"'),
    )


def _results(instruction: Instruction, kind: str) -> tuple[HloArray, ...]:
    """The arrays that a collective produces.

    A start has the type `(operands, results, contexts...)`, its operands one array or a tuple; only the all-reduce
    start of jax 0.10 has the type of its results alone.
    """
    if instruction.opcode.endswith("-start"):
        parts = split_tuple(instruction.type_text)
        if parts[0].startswith("(") or (kind != "all-reduce" and len(parts) > 1):
            return parse_arrays(parts[1])
    return instruction.arrays


def _is_scattered(computation: Computation, all_reduce: Instruction, group_size: int) -> bool:
    """Whether an all-reduce stands in a TPU fusion that keeps only the device's own piece of the sum."""
    if computation.name.startswith("all-reduce-scatter"):
        return True
    if not any(i.opcode == "dynamic-slice" and all_reduce.name in i.operands for i in computation.instructions):
        return False
    whole = sum(a.elements for a in all_reduce.arrays)
    root = computation.root
    is_fused = "fused" in computation.name or "fusion" in computation.name
    return is_fused and root is not None and sum(a.elements for a in root.arrays) * group_size == whole


def _source(instruction: Instruction, module: HloText) -> str:
    if (match := _FRAME.search(instruction.text)) is not None:
        return module.sources.get(int(match.group(1)), "")
    if (match := _SOURCE.search(instruction.text)) is not None:
        return f"{match.group(1)}:{match.group(2) or '?'}"
    return ""
