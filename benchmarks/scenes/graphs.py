"""Graphs with typed edges: AIFB and MUTAG of PUMICE_DATA/rgcn with inverse relations, and generated graphs of the sizes
of others, named `-like`.

A generated graph has relation sizes by Zipf's law (exponent 1.2), targets by a power law, and for each relation a range
of nodes at either end, as relations of a knowledge graph join two types of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pumice.env import settings

LIKE = {"BGS-like": (94_806, 672_884, 96), "BIOKG-like": (93_773, 4_762_678, 51), "AM-like": (881_680, 5_668_682, 96)}
"""(nodes, edges, relations) of generated graphs."""
REAL = ("aifb", "mutag")
_ZIPF, _POWER = 1.2, 2.5


@dataclass(frozen=True)
class Edges:
    """edge_index int64 [2, E], edge_type int64 [E]; numbers of nodes and relations."""

    index: Tensor
    kinds: Tensor
    nodes: int
    relations: int

    def to(self, device: torch.device) -> Edges:
        return Edges(self.index.to(device), self.kinds.to(device), self.nodes, self.relations)


def read(name: str) -> Edges | None:
    """AIFB or MUTAG with an inverse of each relation; None without data."""
    folder = settings().data
    if folder is None or not (folder / "rgcn" / f"{name}.npz").exists():
        return None
    sources, kinds, targets = torch.from_numpy(np.load(folder / "rgcn" / f"{name}.npz")["triples"].astype(np.int64)).T
    count, nodes = int(kinds.max()) + 1, int(torch.maximum(sources, targets).max()) + 1
    index = torch.stack([torch.cat([sources, targets]), torch.cat([targets, sources])])
    return Edges(index, torch.cat([kinds, kinds + count]), nodes, 2 * count)


def generated(nodes: int, edges: int, relations: int, seed: int = 0) -> Edges:
    """A graph of these sizes; see the module."""
    chance = np.random.default_rng(seed)
    shares = np.arange(1, relations + 1) ** -_ZIPF
    kinds = np.sort(chance.choice(relations, edges, p=shares / shares.sum()))
    ends = []
    for skewed in (False, True):
        width = (nodes * chance.uniform(0.02, 0.5, relations)).astype(np.int64) + 1
        first = (chance.random(relations) * (nodes - width)).astype(np.int64)
        place = chance.random(edges)
        place = place**_POWER if skewed else place
        ends.append(first[kinds] + (place * width[kinds]).astype(np.int64))
    return Edges(torch.from_numpy(np.stack(ends)), torch.from_numpy(kinds), nodes, relations)
