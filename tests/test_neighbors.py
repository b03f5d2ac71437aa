"""Neighbours of points against all pairs: plain loops, the twins in torch, and C where it is compiled."""

import itertools

import pytest
import torch

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.coords import neighbors, points
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError

KINDS = ("spread", "lattice", "clumps", "equal")


def cloud(kind: str, count: int, dim: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Points: "lattice" has many equal distances, "clumps" densities that differ by far, "equal" one place."""
    found = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "lattice":
        found = (found * 2).round()
    elif kind == "clumps":
        found = found * torch.logspace(-4, 3, count, dtype=torch.float64)[:, None] + (found > 0)
    elif kind == "equal":
        found = found * 0 + 0.7
    return found.to(dtype)


def items(count: int, number: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, number, (count,), generator=torch.Generator().manual_seed(seed))


def all_pairs(x: torch.Tensor, q: torch.Tensor, of: torch.Tensor, query_of: torch.Tensor) -> list[list[tuple]]:
    """By query, (squared distance, point) in ascending order, in plain Python."""
    rows = x.double().tolist()
    found = []
    for query, item in zip(q.double().tolist(), query_of.tolist(), strict=True):
        met = []
        for p, (row, own) in enumerate(zip(rows, of.tolist(), strict=True)):
            if own == item:
                met.append((sum((a - b) ** 2 for a, b in zip(row, query, strict=True)), p))
        found.append(sorted(met))
    return found


def test_knn_is_what_loops_find():
    x, q = cloud("lattice", 60), cloud("lattice", 25, seed=5)
    of, query_of = items(60, 3), items(25, 4)
    index, squared = pm.ops.knn(x, 30, q, batch=of, query_batch=query_of)
    for n, expected in enumerate(all_pairs(x, q, of, query_of)):
        wanted = expected[:30] + [(float("inf"), -1)] * (30 - len(expected))
        assert [*zip(squared[n].tolist(), index[n].tolist(), strict=True)] == wanted


@pytest.mark.parametrize("order", ["distance", "index"])
def test_ball_query_is_what_loops_find(order: str):
    x, q = cloud("lattice", 80, 2), cloud("lattice", 20, 2, seed=5)
    of, query_of = items(80, 2), items(20, 2)
    index, squared = pm.ops.ball_query(x, 2.0, 5, q, batch=of, query_batch=query_of, order=order)
    for n, expected in enumerate(all_pairs(x, q, of, query_of)):
        # The radius itself is outside.
        near = [pair for pair in expected if pair[0] < 4]
        wanted = sorted(near, key=lambda pair: pair[1])[:5] if order == "index" else near[:5]
        wanted += [(float("inf"), -1)] * (5 - len(wanted))
        assert [*zip(squared[n].tolist(), index[n].tolist(), strict=True)] == wanted


def test_radius_graph_is_what_loops_find():
    x, of = cloud("lattice", 70), items(70, 2)
    expected = [
        (p, n) for n, near in enumerate(all_pairs(x, x, of, of)) for p in sorted(p for d, p in near if d < 3) if p != n
    ]
    assert pm.ops.radius_graph(x, 3**0.5, batch=of).T.tolist() == [[*pair] for pair in expected]
    looped = pm.ops.radius_graph(x, 3**0.5, batch=of, loop=True)
    assert looped.shape[1] == len(expected) + 70
    q = x[:9]
    edges = pm.ops.radius_graph(x, 3**0.5, q, batch=of, query_batch=of[:9])
    assert torch.equal(edges, looped[:, looped[1] < 9])


def test_farthest_points_are_what_loops_find():
    x, of = cloud("lattice", 50), items(50, 2)
    counts, start = [6, 9], [int((of == item).nonzero()[3]) for item in (0, 1)]
    expected = []
    for item in (0, 1):
        own = [p for p in range(50) if of[p] == item]
        taken = [start[item]]
        while len(taken) < counts[item]:
            far = {p: min(float((x[p] - x[t]).square().sum()) for t in taken) for p in own if p not in taken}
            taken.append(max(far, key=lambda p: (far[p], -p)))
        expected += taken
    assert pm.ops.farthest_point_sample(x, counts, batch=of, start=start).tolist() == expected


CASES = [*itertools.product(KINDS, (2, 3, 8), (torch.float32, torch.float64))]


@pytest.mark.parametrize(("kind", "dim", "dtype"), CASES)
def test_search_is_that_of_all_pairs(kind: str, dim: int, dtype: torch.dtype):
    x, q = cloud(kind, 300, dim, dtype=dtype), cloud(kind, 150, dim, 7, dtype)
    held, asked = points.PointSet(x, items(300, 3), 3), points.PointSet(q, items(150, 3), 3)
    top = torch.finfo(dtype).max
    for queries in (held, asked):
        for limits in (points.Limits(1, top), points.Limits(17, top), points.Limits(9, 0.5), points.Limits(200, top)):
            found, wanted = neighbors.nearest(held, queries, limits), neighbors.nearest_torch(held, queries, limits)
            assert all(map(torch.equal, found, wanted))
        limits = points.Limits(4, 1.0, by_index=True)
        found, wanted = neighbors.nearest(held, queries, limits), neighbors.nearest_torch(held, queries, limits)
        assert all(map(torch.equal, found, wanted))
        found, wanted = neighbors.within(held, queries, 0.3), neighbors.within_torch(held, queries, 0.3)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("kind", "dim", "dtype"), CASES)
def test_samples_are_those_of_all_points(kind: str, dim: int, dtype: torch.dtype):
    held = points.PointSet(cloud(kind, 300, dim, dtype=dtype), items(300, 3), 3)
    sizes = torch.bincount(held.items).tolist()
    starts = [int((held.items == item).nonzero()[5]) for item in range(3)]
    for counts in ([1, 40, 0], sizes):
        found = neighbors.farthest(held, counts, starts)
        assert torch.equal(found, neighbors.farthest_torch(held, counts, starts))
    # No point is taken twice.
    assert torch.equal(found.sort().values, torch.arange(300))


def test_threads_do_not_matter():
    x = cloud("clumps", 3000)
    with on_threads(1):
        alone = pm.ops.knn(x, 8), pm.ops.radius_graph(x, 0.1)
    with on_threads(3):
        together = pm.ops.knn(x, 8), pm.ops.radius_graph(x, 0.1)
    assert all(map(torch.equal, alone[0], together[0])) and torch.equal(alone[1], together[1])


def test_many_axes():
    x = cloud("spread", 40, 20)
    index, squared = pm.ops.knn(x, 3)
    wanted = torch.cdist(x.double(), x.double()).topk(3, largest=False)
    assert torch.equal(index, wanted.indices)
    torch.testing.assert_close(squared.double(), wanted.values**2, rtol=1e-4, atol=1e-5)


def test_half_precision_is_searched_in_float32():
    x = cloud("spread", 90).half()
    assert torch.equal(pm.ops.knn(x, 4).index, pm.ops.knn(x.float(), 4).index)


def test_nothing_to_search():
    x, none = cloud("spread", 4), torch.zeros(0, 3)
    assert pm.ops.knn(none, 2).index.shape == (0, 2)
    index, squared = pm.ops.knn(none, 2, x)
    assert (index == -1).all() and squared.isinf().all()
    assert pm.ops.knn(x, 2, none).index.shape == (0, 2)
    assert pm.ops.radius_graph(none, 1.0).shape == (2, 0)
    assert pm.ops.farthest_point_sample(none, 5).shape == (0,)
    assert pm.ops.three_interpolate(torch.ones(0, 2), none, x).tolist() == [[0, 0]] * 4
    assert pm.ops.three_interpolate(torch.ones(4, 2), x, none).shape == (0, 2)


def test_samples_of_every_item():
    x, of = cloud("spread", 40), torch.arange(40) % 4
    found = pm.ops.farthest_point_sample(x, 3, batch=of)
    assert of[found].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    # Each begins with the first point of its item.
    assert found[::3].tolist() == [0, 1, 2, 3]


def test_interpolate_and_its_gradient():
    x, q = cloud("spread", 30).double(), cloud("spread", 11, seed=3).double()
    feats = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    y = pm.ops.three_interpolate(feats, x, q)
    for n in range(11):
        apart = (x - q[n]).norm(dim=1)
        near = apart.argsort()[:3]
        weight = 1 / (apart[near] + 1e-8)
        torch.testing.assert_close(y[n], (weight / weight.sum()) @ feats[near])
    assert torch.autograd.gradcheck(lambda f: pm.ops.three_interpolate(f, x, q), (feats,))


def test_interpolate_where_points_are_few():
    feats = torch.tensor([[2.0], [4.0], [8.0]])
    x = torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 0, 0]])
    q, of = torch.tensor([[1.0, 0, 0], [5, 0, 0], [0, 0, 0]]), torch.tensor([0, 1, 2])
    # Item 1 has no points; the only point of item 2 lies at the query.
    y = pm.ops.three_interpolate(feats, x, q, batch=torch.tensor([0, 0, 2]), query_batch=of)
    torch.testing.assert_close(y, torch.tensor([[3.0], [0], [8]]))
    feats[0] = torch.nan
    y = pm.ops.three_interpolate(feats, x, q, batch=torch.tensor([0, 0, 2]), query_batch=of)
    assert y[:, 0].isnan().tolist() == [True, False, False]


def test_any_radius():
    x = cloud("spread", 9)
    for radius in (float("inf"), 1e200, 10**400):
        assert all(map(torch.equal, pm.ops.ball_query(x, radius, 4), pm.ops.knn(x, 4)))
    assert pm.ops.radius_graph(x, 1e-200, loop=True).tolist() == [[*range(9)]] * 2


X = torch.zeros(4, 3)
WRONG = {
    "integers": (DtypeError, lambda: pm.ops.knn(X.int(), 1)),
    "no matrix": (ShapeError, lambda: pm.ops.knn(X[0], 1)),
    "k": (OptionError, lambda: pm.ops.knn(X, 0)),
    "axes": (ShapeError, lambda: pm.ops.knn(X, 1, X[:, :2])),
    "dtype": (DtypeError, lambda: pm.ops.knn(X, 1, X.double())),
    "device": (DeviceError, lambda: pm.ops.knn(X, 1, X.to("meta"))),
    "batch": (ShapeError, lambda: pm.ops.knn(X, 1, batch=torch.zeros(3, dtype=torch.int64))),
    "batch of floats": (DtypeError, lambda: pm.ops.knn(X, 1, batch=torch.zeros(4))),
    "negative items": (CoordinateError, lambda: pm.ops.knn(X, 1, batch=torch.tensor([0, -1, 0, 0]))),
    "no queries": (OptionError, lambda: pm.ops.knn(X, 1, query_batch=torch.zeros(4, dtype=torch.int64))),
    "nan": (CoordinateError, lambda: pm.ops.knn(X + float("nan"), 1)),
    "too far": (CoordinateError, lambda: pm.ops.knn(X + 1e19, 1)),
    "too far on many axes": (CoordinateError, lambda: pm.ops.knn(torch.full((4, 40), 2e18), 1)),
    "radius": (OptionError, lambda: pm.ops.ball_query(X, -1.0, 3)),
    "order": (OptionError, lambda: pm.ops.ball_query(X, 1.0, 3, order="any")),
    "count": (OptionError, lambda: pm.ops.farthest_point_sample(X, 5)),
    "counts": (OptionError, lambda: pm.ops.farthest_point_sample(X, [1, 1])),
    "float counts": (OptionError, lambda: pm.ops.farthest_point_sample(X, 2.0)),  # pyright: ignore
    "start": (OptionError, lambda: pm.ops.farthest_point_sample(X, 1, start=[4])),
    "feats": (ShapeError, lambda: pm.ops.three_interpolate(torch.zeros(3, 1), X, X)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_told(case: str):
    error, call = WRONG[case]
    with pytest.raises(error):
        call()


def test_real_scan(data_folder):
    import numpy as np

    scan = np.fromfile(data_folder / "kitti_seq00" / "000000.bin", dtype=np.float32).reshape(-1, 4)[:20_000, :3]
    x = torch.from_numpy(scan.copy())
    held, some = points.PointSet(x, torch.zeros(len(x), dtype=torch.int64), 1), slice(0, None, 40)
    queries = points.PointSet(x[some].contiguous(), held.items[some].contiguous(), 1)
    limits = points.Limits(16, torch.finfo(torch.float32).max)
    found, wanted = neighbors.nearest(held, held, limits), neighbors.nearest_torch(held, queries, limits)
    assert torch.equal(found[0][some], wanted[0]) and torch.equal(found[1][some], wanted[1])


def test_neighbours_of_an_item_are_not_bounded_by_another_items():
    """The first item's points are close to the queries of both, the second's are far apart."""
    made = torch.Generator().manual_seed(0)
    close, apart = torch.randn(40, 3, generator=made) * 0.01, torch.randn(40, 3, generator=made) * 5
    batch = torch.arange(2).repeat_interleave(40)
    queries = torch.randn(8, 3, generator=made) * 0.01
    asked = torch.arange(2).repeat_interleave(4)
    index, squared = pm.ops.knn(torch.cat([close, apart]), 5, queries, batch=batch, query_batch=asked)
    for query, item, found, distances in zip(queries, asked.tolist(), index, squared, strict=True):
        own = (apart if item else close) - query
        wanted = own.square().sum(1).sort().values[:5]
        torch.testing.assert_close(distances, wanted)
        assert ((found >= 40) == bool(item)).all()
