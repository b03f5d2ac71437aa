"""Sparse matrices for benchmarks: real ones from PUMICE_DATA, and seeded stand-ins, named *-like, for public graphs.

A stand-in matches its graph in rows, non-zeros and degrees, and in the locality of neighbours, so that as many tiles of
16 x 8 are non-empty (counts of TC-GNN's logs; see benchmarks/tests/test_matrices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pumice.errors import OptionError

Ints = np.ndarray


@dataclass(frozen=True, eq=False)
class Matrix:
    """The sparsity pattern of a matrix: rows and cols int64 [nnz], sorted by (row, column), without duplicates."""

    name: str
    shape: tuple[int, int]
    rows: Ints
    cols: Ints

    @property
    def nnz(self) -> int:
        return len(self.rows)

    @property
    def occupancy(self) -> Ints:
        """int64 [number of rows]: non-zeros per row."""
        return np.bincount(self.rows, minlength=self.shape[0])

    @property
    def pointers(self) -> Ints:
        """int64 [number of rows + 1]: row pointers as in CSR."""
        return np.concatenate([[0], np.cumsum(self.occupancy)])

    def __str__(self) -> str:
        counts = self.occupancy
        mean = self.nnz / max(1, np.count_nonzero(counts))
        shape = f"{self.shape[0]}x{self.shape[1]}"
        return f"{self.name} ({shape}, nnz {self.nnz}, longest row {counts.max()}, mean {mean:.1f})"


@dataclass(frozen=True)
class Graph:
    """A directed graph with power-law degrees and local edges.

    exponent: of the degrees; row_cap, column_cap: their maxima. near: the share of edges that end within `reach` of
    their row (for rows of high degree, within twice the degree).
    """

    size: int
    edges: int
    exponent: float
    row_cap: int
    column_cap: int
    near: float = 0.0
    reach: int = 0


@dataclass(frozen=True)
class Molecules:
    """Many components with consecutive ids, of `least` to `most` nodes: each node is joined to one of the `branch`
    before it, and random edges are added, a share `near` of them within `reach`."""

    size: int
    edges: int
    least: int
    most: int
    branch: int = 1
    near: float = 0.55
    reach: int = 20


_GRAPHS: Mapping[str, Graph] = {
    "artist-like": Graph(50_515, 1_638_396, 2.1, 1500, 1500),
    "blog-like": Graph(88_784, 2_093_195, 2.1, 9500, 9500, 0.8, 60),
    "amazon0505-like": Graph(410_236, 4_878_875, 2.9, 20, 2760, 0.57, 40),
    "amazon0601-like": Graph(403_394, 3_387_388, 2.9, 20, 2760, 0.63, 32),
    "com-amazon-like": Graph(334_863, 1_851_744, 2.9, 549, 549),
    "ppi-like": Graph(56_944, 818_716, 2.4, 700, 700, 0.84, 90),
}
_MOLECULES: Mapping[str, Molecules] = {
    "dd-like": Molecules(300_000, 1_700_000, 20, 280),
    "proteins-like": Molecules(43_471, 162_088, 10, 68),
    "ovcar-like": Molecules(1_890_931, 3_946_402, 20, 72, 8),
    "yeast-like": Molecules(1_714_644, 3_636_546, 10, 33, 8),
    "yeasth-like": Molecules(3_139_988, 6_487_230, 20, 59, 8),
}


def stand_in(name: str, scale: float = 1.0) -> Matrix:
    """A stand-in by name. scale: factor on rows and non-zeros, so that non-zeros per row are kept."""
    if name not in STAND_INS:
        raise OptionError(f"matrix {name!r} is unknown; there are {', '.join(STAND_INS)}")
    return STAND_INS[name](name, scale)


def real(folder: Path, least: int = 3_000) -> Iterator[Matrix]:
    """The matrices and graphs of PUMICE_DATA with at least `least` non-zeros."""
    for path in sorted((folder / "matrices").glob("*.npz")):
        held = np.load(path)
        if len(held["indices"]) >= least:
            rows = np.repeat(np.arange(held["shape"][0]), np.diff(held["indptr"]))
            keys = rows * int(held["shape"][1]) + held["indices"]
            yield _matrix(path.stem, (int(held["shape"][0]), int(held["shape"][1])), keys)
    for path in sorted((folder / "graphs_musae").glob("*_edges.npz")):
        edges = np.load(path)["edges"].astype(np.int64)
        size = int(edges.max()) + 1
        keys = np.concatenate([edges[:, 0] * size + edges[:, 1], edges[:, 1] * size + edges[:, 0]])
        if len(keys) >= least:
            yield _matrix("musae-" + path.stem.removesuffix("_edges"), (size, size), keys)
    for path in sorted((folder / "planetoid").glob("*.npz")):
        held = np.load(path)
        edges, size = held["edges"].astype(np.int64), int(held["num_nodes"])
        keys = np.unique(np.concatenate([edges[:, 0] * size + edges[:, 1], edges[:, 1] * size + edges[:, 0]]))
        if len(keys) >= least:
            yield _matrix(path.stem, (size, size), keys)


def uniform(name: str, size: int, nnz: int, seed: int) -> Matrix:
    """A size x size matrix with uniformly random entries."""
    keys = np.random.default_rng(seed).integers(0, size * size, nnz)
    return _matrix(name, (size, size), keys)


def blocks(grid: int, sparsity: float, seed: int = 3) -> Matrix:
    """The non-zero blocks of a grid x grid block matrix: uniformly chosen, at least one."""
    count = max(1, round(grid * grid * (1 - sparsity)))
    keys = np.random.default_rng(seed).permutation(grid * grid)[:count]
    return _matrix(f"{sparsity:.0%} block-sparse", (grid, grid), keys)


def _matrix(name: str, shape: tuple[int, int], keys: Ints) -> Matrix:
    keys = np.unique(keys)
    return Matrix(name, shape, keys // shape[1], keys % shape[1])


def _like(name: str, scale: float) -> Matrix:
    graph = _GRAPHS[name]
    size, edges = int(graph.size * scale), int(graph.edges * scale)
    chance = np.random.default_rng(1)
    rows, columns = (
        _Degrees.of(size, edges, graph.exponent, min(cap, size // 4), chance)
        for cap in (graph.row_cap, graph.column_cap)
    )

    def draw(count: int) -> Ints:
        rank = rows.draw(count, chance)
        row, column = rows.order[rank], columns.order[columns.draw(count, chance)]
        width = np.maximum(graph.reach, 2 * rows.weight[rank])
        beside = row // 16 * 16 + 8 + np.floor((2 * chance.random(count) - 1) * width).astype(np.int64)
        column = np.where(chance.random(count) < graph.near, beside % size, column)
        return row * size + column

    return _matrix(name, (size, size), _distinct(draw, edges, chance))


@dataclass(frozen=True, eq=False)
class _Degrees:
    """Nodes in random order with decreasing weights of a capped power law; draws are ranks in that order."""

    order: Ints
    weight: Ints
    total: Ints

    @staticmethod
    def of(size: int, edges: int, exponent: float, cap: float, chance: np.random.Generator) -> _Degrees:
        weight = np.arange(1, size + 1) ** (-1 / (exponent - 1))
        for _ in range(20):  # the weight cut off by the cap goes to the other nodes
            weight = np.minimum(weight / weight.sum() * edges, cap)
        return _Degrees(chance.permutation(size), weight, np.cumsum(weight / weight.sum()))

    def draw(self, count: int, chance: np.random.Generator) -> Ints:
        return np.minimum(np.searchsorted(self.total, chance.random(count)), len(self.total) - 1)


def _distinct(draw: Callable[[int], Ints], count: int, chance: np.random.Generator, first: Ints | None = None) -> Ints:
    """Up to `count` distinct keys, including those of `first`, from at most 14 rounds of draws."""
    keys = np.empty(0, np.int64) if first is None else np.unique(first)
    for _ in range(14):
        if len(keys) >= count:
            break
        keys = np.unique(np.concatenate([keys, draw(int((count - len(keys)) * 1.15) + 16)]))
    return chance.permutation(keys)[:count]


def _stencil5(name: str, scale: float) -> Matrix:
    """A square grid in which each point is adjacent to itself and its four neighbours."""
    side = max(8, int(1000 * scale**0.5))
    y, x = np.divmod(np.arange(side * side), side)
    keys = []
    for dy, dx in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)):
        inside = (y + dy >= 0) & (y + dy < side) & (x + dx >= 0) & (x + dx < side)
        keys.append((np.arange(side * side) * side * side + (y + dy) * side + x + dx)[inside])
    return _matrix(name, (side * side, side * side), np.concatenate(keys))


def _molecules(name: str, scale: float) -> Matrix:
    kind = _MOLECULES[name]
    size, edges = int(kind.size * scale), int(kind.edges * scale)
    chance = np.random.default_rng(1)
    mean = (kind.least + kind.most) // 2
    sizes = chance.integers(kind.least, kind.most + 1, size // (2 * mean // 3) + 50)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    node = np.arange(size)
    component = np.searchsorted(bounds, node, side="right") - 1
    start, stop = bounds[component], np.minimum(bounds[component + 1], size)

    def draw(count: int) -> Ints:
        a = chance.integers(0, size, count // 2)
        near = np.clip(a + chance.integers(-kind.reach, kind.reach + 1, len(a)), start[a], stop[a] - 1)
        anywhere = start[a] + (chance.random(len(a)) * (stop - start)[a]).astype(np.int64)
        return both_ways(a, np.where(chance.random(len(a)) < kind.near, near, anywhere))

    def both_ways(a: Ints, b: Ints) -> Ints:
        a, b = a[a != b], b[a != b]
        return np.concatenate([a * size + b, b * size + a])

    before = chance.integers(1, kind.branch + 1, size) if kind.branch > 1 else 1
    return _matrix(
        name, (size, size), _distinct(draw, edges, chance, both_ways(node, np.maximum(node - before, start)))
    )


TC_GNN = (
    *("citeseer", "cora", "pubmed", "ppi-like", "proteins-like", "ovcar-like", "yeast-like", "dd-like", "yeasth-like"),
    *("amazon0505-like", "artist-like", "com-amazon-like", "blog-like", "amazon0601-like"),
)
"""The graphs of TC-GNN, table 4, from which Insum takes its matrices; the first three are real."""
STAND_INS: Mapping[str, Callable[[str, float], Matrix]] = {
    **{name: _like for name in _GRAPHS},
    "stencil5": _stencil5,
    **{name: _molecules for name in _MOLECULES},
    "uniform": lambda name, scale: uniform(name, int(100_000 * scale), int(1_000_050 * scale), 15),
}
"""Functions (name, scale) that make the stand-ins, by name."""
