"""Checks of the kernels that search among points, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from kernels.interpret import Checks, answering

from pumice.coords import Limits, PointSet, neighbor_search, neighbors
from pumice.coords.neighbor_search import SearchShape

TOP = torch.finfo(torch.float32).max


def point_sets(dim: int, lattice: bool, count: int = 240) -> tuple[PointSet, PointSet]:
    """Points and queries of two items, in many leaves; a lattice has ties."""
    made = torch.Generator().manual_seed(dim)
    both = torch.randn(count + 60, dim, generator=made)
    if lattice:
        both = (both * 4).round() / 2
    items = torch.randint(0, 2, (count + 60,), generator=made)
    parts = slice(None, count), slice(count, None)
    points, queries = (PointSet(both[part].contiguous(), items[part].clone(), 2) for part in parts)
    return points, queries


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    assert all(map(torch.equal, found, wanted))


def check_nearest(dim: int, limits: Limits) -> None:
    points, queries = point_sets(dim, dim == 3)
    for asked in (queries, points):
        found = neighbor_search.nearest(points, asked, limits, SearchShape(16, 8))
        same(found, neighbors.nearest_torch(points, asked, limits))


def check_within(dim: int) -> None:
    points, queries = point_sets(dim, dim == 3)
    found = neighbor_search.within(points, queries, 1.0, SearchShape(16, 8))
    same(found, neighbors.within_torch(points, queries, 1.0))


def check_farthest(dim: int) -> None:
    points, _ = point_sets(dim, dim == 3, 90)
    starts = [int((points.items == item).nonzero()[3]) for item in range(2)]
    for counts in ([6, 0], torch.bincount(points.items).tolist()):
        found = neighbor_search.farthest(points, counts, starts)
        assert torch.equal(found, neighbors.farthest_torch(points, counts, starts))


def check_nothing() -> None:
    points, queries = point_sets(3, False)
    none = PointSet(points.points[:0], points.items[:0], 2)
    index, apart = neighbor_search.nearest(none, queries, Limits(2, TOP))
    assert bool((index == -1).all()) and bool(apart.isinf().all())
    assert neighbor_search.nearest(points, none, Limits(2, TOP))[0].shape == (0, 2)


def checks() -> Checks:
    limits = {
        "5": Limits(5, TOP),
        "3 within": Limits(3, 1.0),
        "4 by index": Limits(4, 1.5, True),
        "40": Limits(40, TOP),
    }
    found: dict[str, Callable[[], None]] = {
        f"nearest {n}": lambda of=of: check_nearest(3, of) for n, of in limits.items()
    }
    found |= {"nearest in 5-D": lambda: check_nearest(5, limits["5"]), "within": lambda: check_within(3)}
    return found | {"farthest": lambda: check_farthest(3), "nothing": check_nothing}


GROUPS: Mapping[str, Callable[[], Checks]] = {"points": checks}

answer = answering(GROUPS)
