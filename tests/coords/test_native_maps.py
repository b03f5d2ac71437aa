"""Kernel maps in C equal those in plain torch in every entry, on any cloud, with any number of threads."""

import random

import pytest
import torch
from clouds import buffered
from wide import beyond

from benchmarks.harness.timing import on_threads
from pumice.coords import Bounds, CoordBuffer, Geometry, KeySpace, MapSchedule, Relation, kernel_map, native_maps
from pumice.coords.lookup import NativeTable, SortedKeys, default
from pumice.coords.outputs import NativeOutputs, TorchOutputs, make_outputs, site_of
from pumice.runtime import native
from pumice.testing import random_cloud

pytestmark = pytest.mark.skipif(isinstance(native.compiler(), str), reason=f"{native.compiler()}")
SORTED = MapSchedule("sorted")


def cells(chance, dim):
    """Distinct coordinates in random order: few and many, dense and scattered, around 0 and far from it."""
    side, first = chance.choice([2, 6, 20, 3000]), chance.choice([0, -1500, 2 * 10**8, -(2**31)])
    generator = torch.Generator().manual_seed(chance.randrange(10**9))
    coords = torch.randint(0, side, (chance.choice([1, 2, 50, 1500]), dim), generator=generator) + first
    items = torch.randint(0, chance.choice([1, 3, 40]), (len(coords), 1), generator=generator)
    found = torch.cat([items, coords], 1).unique(dim=0)
    return found[torch.randperm(len(found), generator=generator)].int()


def any_relation(chance, dim):
    kernel, stride, dilation, padding = ([chance.choice(of) for _ in range(dim)] for of in _RANGES)
    if chance.random() < 0.3:
        offsets = {tuple(chance.randrange(-7, 8) for _ in range(dim)) for _ in range(chance.randrange(1, 12))}
        return Relation.of_offsets(dim, sorted(offsets), stride=stride, policy=chance.choice(_POLICIES))
    if chance.random() < 0.3:
        return Relation.of(dim, [k | 1 for k in kernel], dilation=dilation)
    how = {"stride": stride, "padding": padding, "dilation": dilation}
    return Relation.of(dim, kernel, policy=chance.choice(_POLICIES), **how)


_RANGES = ([1, 2, 3], [1, 2, 3, 4], [1, 1, 2, 3], [0, 1, 2])
_POLICIES = ("support", "floor_unique", "transposed_support", "given")


def outputs_of(cloud, geometry, relation):
    """Outputs for a search: those of the relation, which are compared, or the rows themselves."""
    if relation.policy in ("same", "given"):
        return cloud
    site = site_of(geometry.site, relation)
    want = TorchOutputs(cloud, relation, site)
    count = int(want.count)
    # An axis that crosses a high power of two has no table of codes.
    if NativeOutputs.available(cloud, relation, site):
        made = NativeOutputs(cloud, relation, site)
        assert int(made.count) == count
        assert torch.equal(made.geometry(count).coords, want.geometry(count).coords)
    return CoordBuffer.of(want.geometry(count).coords, site.bounds)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", beyond(10, range(40)))
def test_random_relations_on_random_clouds(dim, seed):
    chance = random.Random(seed)
    coords, relation = cells(chance, dim), any_relation(chance, dim)
    if relation.policy != "same" and int(coords.min()) < -(2**30):
        # Outputs would exceed int32.
        coords[:, 1:] //= 8
        coords = coords.unique(dim=0)
    geometry = Geometry.checked(coords)
    cloud = buffered(coords, 3) if chance.random() < 0.3 else geometry.cloud
    if NativeTable.refusal(cloud, SORTED) is None:
        outputs = outputs_of(cloud, geometry, relation)
        found, want = (kind(cloud, SORTED).neighbours(outputs, relation).rows for kind in (NativeTable, SortedKeys))
        assert found.dtype == torch.int32 and torch.equal(found, want)


@pytest.mark.parametrize(
    "offsets",
    [
        [(-2, 1), (2, -1)],
        [(-9, 0), (-1, 3), (1, -3), (9, 0)],
        [(0, -1), (0, 0), (0, 1)],
        [(0, 1), (0, 0), (1, 0)],
        [(0, 0)],
    ],
)
@pytest.mark.parametrize("spare", [0, 3])
def test_offsets_whose_negatives_are_offsets_too_and_others(offsets, spare):
    coords = random_cloud(900, 2, extent=40, seed=0)
    cloud = buffered(coords, spare) if spare else Geometry.checked(coords).cloud
    relation = Relation.of_offsets(2, offsets, policy="given")
    found, want = (kind(cloud, SORTED).neighbours(cloud, relation).rows for kind in (NativeTable, SortedKeys))
    assert torch.equal(found, want) and (len(offsets) == 1 or bool((want < 0).any()))


@pytest.mark.parametrize("apart", [1, 64])
def test_tables_grow_with_the_number_of_bricks(apart):
    """As many bricks as rows, in the search and in the outputs; then few."""
    coords = torch.cartesian_prod(*(torch.arange(n) * apart for n in (1, 17, 18, 19))).int()
    geometry, relation = Geometry.checked(coords), Relation.of(3, 3, stride=2, padding=1)
    outputs = outputs_of(geometry.cloud, geometry, relation)
    for reached, one in ((outputs, relation), (geometry.cloud, Relation.of(3, 3, dilation=apart))):
        rows = NativeTable(geometry.cloud, SORTED).neighbours(reached, one).rows
        assert torch.equal(rows, SortedKeys(geometry.cloud, SORTED).neighbours(reached, one).rows)


def test_maps_do_not_depend_on_the_number_of_threads():
    coords, results = random_cloud(5000, 3, extent=40, seed=0), []
    for count in (1, 2, 5):
        with on_threads(count):
            geometry = Geometry.checked(coords)
            found = [kernel_map(geometry, r)[0] for r in (Relation.of(3, 3), Relation.of(3, 2, stride=2))]
            results.append([one.rows() for one in found])
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def test_cpu_maps_use_bricks_and_sorted_keys_without_a_compiler(monkeypatch):
    geometry = Geometry.checked(random_cloud(500, 3, extent=12, seed=0))
    relation = Relation.of(3, 3, stride=2, padding=1)
    want = [kernel_map(geometry, one)[0].rows() for one in (relation, Relation.of(3, 3))]
    assert default(geometry.cloud) == MapSchedule("bricks")
    assert isinstance(make_outputs(geometry.cloud, geometry.site, relation), NativeOutputs)
    monkeypatch.setattr(native_maps, "library", lambda dim: "no C compiler")
    fresh = Geometry.checked(geometry.coords)
    assert default(fresh.cloud) == SORTED
    assert type(make_outputs(fresh.cloud, fresh.site, relation)) is TorchOutputs
    for one, rows in zip((relation, Relation.of(3, 3)), want, strict=True):
        assert torch.equal(kernel_map(fresh, one)[0].rows(), rows)


def test_keys_far_from_zero_wrap_to_the_right_value():
    low = 2**31 - 2**20
    space = KeySpace(Bounds((low,) * 3, (2**31 - 1,) * 3, 1))
    corner = torch.tensor([[0, low, low, low], [0, low, low + 1, low + 2]])
    assert space.keys(corner).tolist() == [0, 2**20 + 2]
