"""Blocks that change places between devices: slices, splits, joins and paddings of a split dimension.

Pieces of operands land somewhere in the results; cut into equal blocks and spread over `n` devices, every block has a
sender and a receiver.  That is a bipartite multigraph whose edges can be coloured with as many colours as its largest
degree (König 1916): so many rounds of one permute each are enough, and no more bytes travel than must.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_BLOCKS = 4096  # of one operation; finer ones are not worth their latency


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`length` elements from `start` of an operand land at `at` of a result (along one dimension)."""

    operand: int
    start: int
    result: int
    at: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One block for each device that takes part: sent along `pairs`, or kept where that is empty.

    Attributes:
      pairs: (sender, receiver).
      source, target: per device where a block begins among its operands' shards (joined), and where one arrives
        among its results' shards (joined); None: none.
    """

    pairs: tuple[tuple[int, int], ...]
    source: tuple[int | None, ...]
    target: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Blocks of `block` elements that change places in rounds; the first `sent` rounds between devices."""

    block: int
    rounds: tuple[Round, ...]
    sent: int


def pieces_of(
    name: str, params: Mapping[str, Any], operand_sizes: Sequence[int], result_sizes: Sequence[int], dim: int
) -> tuple[Piece, ...] | None:
    """What lands where along a dimension; None for other operations.

    Args:
      operand_sizes, result_sizes: elements of each operand and result along the dimension.
    """
    if name == "slice":
        return (Piece(0, params["start_indices"][dim], 0, 0, result_sizes[0]),)
    if name == "pad":
        low, high, _ = params["padding_config"][dim]
        start, end = max(0, -low), operand_sizes[0] - max(0, -high)
        return (Piece(0, start, 0, max(0, low), end - start),)
    if name == "split":
        starts = [sum(result_sizes[:k]) for k in range(len(result_sizes))]
        return tuple(Piece(0, starts[k], k, 0, size) for k, size in enumerate(result_sizes))
    if name == "concatenate":
        starts = [sum(operand_sizes[:k]) for k in range(len(operand_sizes))]
        return tuple(Piece(k, 0, 0, starts[k], size) for k, size in enumerate(operand_sizes))
    return None


@functools.lru_cache(maxsize=4096)
def exchange(
    pieces: tuple[Piece, ...], operand_sizes: tuple[int, ...], result_sizes: tuple[int, ...], devices: int
) -> Exchange | None:
    """The rounds that bring all pieces home; None if there would be too many blocks.

    Args:
      operand_sizes, result_sizes: elements along the dimension; `devices` divides them.
    """
    local_in = [n // devices for n in operand_sizes]
    local_out = [n // devices for n in result_sizes]
    numbers = [n for p in pieces for n in (p.start, p.at, p.length)]
    block = math.gcd(*local_in, *local_out, *numbers)
    if not block or sum(p.length for p in pieces) > MOST_BLOCKS * block:
        return None
    before_in = [sum(local_in[:k]) for k in range(len(local_in))]
    before_out = [sum(local_out[:k]) for k in range(len(local_out))]
    kept: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
    moved: list[tuple[int, int, int, int]] = []  # sender, offset there, receiver, offset there
    for piece in pieces:
        for i in range(0, piece.length, block):
            sender, start = divmod(piece.start + i, local_in[piece.operand])
            receiver, at = divmod(piece.at + i, local_out[piece.result])
            start, at = start + before_in[piece.operand], at + before_out[piece.result]
            if sender == receiver:
                kept[sender].append((start, at))
            else:
                moved.append((sender, start, receiver, at))
    colours = colour([(s, r) for s, _, r, _ in moved])
    rounds: list[Round] = []
    for c in range(max(colours, default=-1) + 1):
        chosen = [move for move, own in zip(moved, colours, strict=True) if own == c]
        source: list[int | None] = [None] * devices
        target: list[int | None] = [None] * devices
        for sender, start, receiver, at in chosen:
            source[sender], target[receiver] = start, at
        rounds.append(Round(tuple((s, r) for s, _, r, _ in chosen), tuple(source), tuple(target)))
    sent = len(rounds)
    for i in range(max(map(len, kept), default=0)):
        own = [blocks[i] if i < len(blocks) else (None, None) for blocks in kept]
        rounds.append(Round((), tuple(s for s, _ in own), tuple(t for _, t in own)))
    return Exchange(block, tuple(rounds), sent)


def colour(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Colours of the edges of a bipartite multigraph such that none meet at a vertex; as few as its largest degree.

    Each edge takes the first colour that is free at both of its ends; if there is none, the path of two colours that
    stands in the way is turned round.
    """
    left: dict[int, dict[int, int]] = {}  # sender -> colour -> edge
    right: dict[int, dict[int, int]] = {}
    found = [-1] * len(edges)

    def first_free(used: dict[int, int]) -> int:
        c = 0
        while c in used:
            c += 1
        return c

    for edge, (u, v) in enumerate(edges):
        at_u, at_v = left.setdefault(u, {}), right.setdefault(v, {})
        a, b = first_free(at_u), first_free(at_v)
        if a != b and a in at_v:
            # from v along colours a, b, a, ...: it can't end in u, where a is free
            path, on_right, vertex, c = [], True, v, a
            while c in (right if on_right else left)[vertex]:
                step = (right if on_right else left)[vertex][c]
                path.append(step)
                vertex = edges[step][0 if on_right else 1]
                on_right, c = not on_right, a + b - c
            for step in path:
                s, r = edges[step]
                del left[s][found[step]], right[r][found[step]]
            for step in path:
                s, r = edges[step]
                found[step] = a + b - found[step]
                left[s][found[step]] = right[r][found[step]] = step
        found[edge] = a
        at_u[a] = at_v[a] = edge
    return found
