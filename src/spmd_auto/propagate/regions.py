"""Regions: where two dimensions of one value contend for the same mesh axis, and who must decide alike.

A node is a pair of dimensions of a value; operations that keep both dimensions join the nodes of their
operands and results, contractions, gathers and scatters do not.  So an MoE's routing values can keep
batch while its expert buffers take expert, and a scores matrix is decided apart from the queries.
Regions are found before any assignment is known.
"""

from __future__ import annotations

import dataclasses
import itertools

from spmd_auto.propagate.axes import Axes
from spmd_auto.propagate.factors import Kind
from spmd_auto.propagate.graph import Graph
from spmd_auto.propagate.unionfind import ParityUnionFind


@dataclasses.dataclass(slots=True, eq=False)
class Regions:
    """Groups of alike regions.

    Attributes:
      of: for each value id, the region of each pair (i < j) of its dimensions, in the order of
        `itertools.combinations`; -1 where there is none (sizes of 1, values that are not placed).
      pair: for each region the two axis groups that contend (sorted).
      groups_beside: for each region all axis groups that stand on its values.
      turned: for each value id and pair, whether the pair stands the other way round than on the region's first
        value (a transpose between them): "the first dimension" of a region is one and the same through it.
    """

    of: list[tuple[int, ...]]
    pair: list[tuple[int, int]]
    groups_beside: list[frozenset[int]]
    turned: list[tuple[bool, ...]]

    @property
    def count(self) -> int:
        return len(self.pair)


def find_regions(graph: Graph, axes: Axes) -> Regions:
    base, total = [], 0
    for value in graph.values:
        base.append(total)
        rank = len(value.shape)
        total += rank * (rank - 1) // 2
    sets = ParityUnionFind(total)

    def node(value_id: int, rank: int, i: int, j: int) -> int:
        if i > j:
            i, j = j, i
        return base[value_id] + i * rank - i * (i + 1) // 2 + j - i - 1

    for op in graph.ops:
        if op.cuts_regions:
            continue
        arrays = [*op.operands, *op.results]
        offset = len(op.operands)
        where: list[list[tuple[int, int]]] = [[] for _ in arrays]
        for index, factor in enumerate(op.rule):
            if factor.kind is Kind.REPLICATE:
                continue
            for k, d in factor.operands:
                where[k].append((index, d))
            for k, d in factor.results:
                where[offset + k].append((index, d))
        first: dict[tuple[int, int], tuple[int, bool]] = {}
        for value, places in zip(arrays, where, strict=True):
            if not value.depends:
                continue
            rank = len(value.shape)
            places = [(f, d) for f, d in places if value.shape[d] > 1]
            for (f, i), (g, j) in itertools.combinations(places, 2):
                here = node(value.id, rank, i, j)
                key = (f, g)
                if key in first:
                    sets.union(first[key][0], here, first[key][1] ^ (i > j))
                else:
                    first[key] = (here, i > j)
    members: dict[int, list[tuple[int, int, int]]] = {}
    for value in graph.values:
        if not value.depends:
            continue
        for i, j in itertools.combinations(range(len(value.shape)), 2):
            if value.shape[i] > 1 and value.shape[j] > 1:
                root = sets.find(node(value.id, len(value.shape), i, j))
                members.setdefault(root, []).append((value.id, i, j))
    signature_ids: dict[object, int] = {}
    region_of_root: dict[int, int] = {}
    pair: list[tuple[int, int]] = []
    beside: list[set[int]] = []
    for root, nodes in members.items():
        counts: dict[tuple[object, ...], int] = {}
        for v, i, j in nodes:
            key = (axes.of[v], i, j, graph.values[v].itemsize)
            counts[key] = counts.get(key, 0) + 1
        v, i, j = nodes[0]
        a, b = sorted((axes.of[v][i], axes.of[v][j]))
        region = signature_ids.setdefault(((a, b), tuple(sorted(counts.items()))), len(signature_ids))
        region_of_root[root] = region
        if region == len(pair):
            pair.append((a, b))
            beside.append(set())
        for v, _, _ in nodes:
            beside[region].update(axes.of[v])
    of: list[tuple[int, ...]] = []
    turned: list[tuple[bool, ...]] = []
    ahead = {root: sets.parity(node(v, len(graph.values[v].shape), i, j)) for root, ((v, i, j), *_) in members.items()}
    for value in graph.values:
        rank = len(value.shape)
        regions = []
        for i, j in itertools.combinations(range(rank), 2):
            placed = value.depends and value.shape[i] > 1 and value.shape[j] > 1
            regions.append(region_of_root[sets.find(node(value.id, rank, i, j))] if placed else -1)
        of.append(tuple(regions))
        ways = []
        for region, (i, j) in zip(regions, itertools.combinations(range(rank), 2), strict=True):
            here = node(value.id, rank, i, j)
            ways.append(region >= 0 and sets.parity(here) != ahead[sets.find(here)])
        turned.append(tuple(ways))
    return Regions(of, pair, [frozenset(s) for s in beside], turned)
