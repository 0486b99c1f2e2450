"""Union-find over consecutive integers."""

from __future__ import annotations


class UnionFind:
    """Disjoint sets of 0..n-1; the smallest member represents its set, so results are deterministic."""

    __slots__ = ("parent",)

    def __init__(self, n: int):
        self.parent = list(range(n))

    def find(self, x: int) -> int:
        parent = self.parent
        root = x
        while parent[root] != root:
            root = parent[root]
        while parent[x] != root:
            parent[x], x = root, parent[x]
        return root

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a < b:
            self.parent[b] = a
        elif b < a:
            self.parent[a] = b


class ParityUnionFind:
    """Disjoint sets of 0..n-1 whose members stand one way round or the other, relative to each other."""

    __slots__ = ("parent", "turned")

    def __init__(self, n: int):
        self.parent = list(range(n))
        self.turned = [False] * n  # relative to the parent

    def find(self, x: int) -> int:
        path = []
        while self.parent[x] != x:
            path.append(x)
            x = self.parent[x]
        turned = False
        for member in reversed(path):
            turned ^= self.turned[member]
            self.parent[member], self.turned[member] = x, turned
        return x

    def parity(self, x: int) -> bool:
        """Whether `x` stands the other way round than its set's representative."""
        self.find(x)
        return self.turned[x]

    def union(self, a: int, b: int, turned: bool = False) -> None:
        """Unites two sets; `turned` says whether `a` and `b` stand opposite ways. The first union of two decides."""
        root_a, root_b = self.find(a), self.find(b)
        if root_a == root_b:
            return
        turned ^= self.turned[a] ^ self.turned[b]
        if root_b < root_a:
            root_a, root_b = root_b, root_a
        self.parent[root_b], self.turned[root_b] = root_a, turned
