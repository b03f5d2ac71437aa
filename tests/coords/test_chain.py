"""Maps of a network that are found together are those that are found one by one."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from chain_cases import case_of, check
from found import agree
from wide import beyond

import pumice as pm
from pumice.coords import Bounds, Geometry, GridSpec, Relation, chain, chain_build, kernel_map
from pumice.coords.box import UNKNOWN
from pumice.coords.chain import DOWN, SAME, UP, ChainRequest, TileRule, refusal
from pumice.coords.chain_build import build_chain
from pumice.errors import CoordinateError
from pumice.lower import dataflow, maps
from pumice.testing import random_cloud

prepare, kernel_maps = (importlib.import_module(f"pumice.{name}") for name in ("ops.prepare", "coords.kernel_map"))
RULE = TileRule(24_000, maps._FEW_TAPS, maps._SORTED, groups=maps._GROUPS_OF)
HALVES = (Relation.of(3, 2, stride=2),) * 2


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})


def request_of(dim, steps, windows=None, rule=RULE, differentiable=False):
    windows = [(Relation.of(dim, 3),)] * (len(steps) + 1) if windows is None else windows
    tiled = [(SAME, level, window) for level, each in enumerate(windows) for window in each]
    for level, step in enumerate(steps):
        tiled += [(DOWN, level + 1, step), (UP, level, step)]
    return ChainRequest(dim, tuple(steps), tuple(windows), tuple(tiled), rule, differentiable)


def one_by_one(geometry, request, differentiable=False):
    """The same as the level-by-level way leaves it."""
    found = list(prepare._maps(geometry, request.steps, request.windows))
    dataflow.materialize([(one, [None]) for one in found], differentiable)
    return found


def laid_out(geometry, request, differentiable=False):
    """Together; what is laid out afterwards needs no size that is not known."""
    for one in build_chain(geometry, request):
        maps.keep_tiles(one)
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_maps, "read", lambda tensors: reads.extend(tensors) or [])
        found = one_by_one(geometry, request, differentiable)
    assert not reads
    return found


def compare(coords, request, differentiable=False, **options):
    got, want = (Geometry.checked(coords, **options) for _ in range(2))
    assert refusal(got, request) is None
    found, expected = laid_out(got, request, differentiable), one_by_one(want, request, differentiable)
    assert agree(got, want) > 0
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.masks(), b.masks()) and torch.equal(a.counts(), b.counts())
        assert torch.equal(a.rows(), b.rows()) and torch.equal(a.valid_count(), b.valid_count())
        assert torch.equal(a.pair_counts(), b.pair_counts())
        assert maps.read_sizes(a, ("compacted",)) == maps.read_sizes(b, ("compacted",))
    return got


def halves(dim):
    return Relation.of(dim, 2, stride=2)


def padded(dim):
    return Relation.of(dim, 3, stride=2, padding=1)


STEPS = {
    "none": lambda dim: [],
    "halved": lambda dim: [halves(dim)] * 3,
    "padded": lambda dim: [padded(dim)] * 3,
    "both": lambda dim: [padded(dim), halves(dim), Relation.of(dim, 3, stride=2)],
    "window of 3 by 3": lambda dim: [Relation.of(dim, 3, stride=3, padding=0), padded(dim)],
    "gaps": lambda dim: [Relation.of(dim, 1, stride=2, padding=0), Relation.of(dim, 2, stride=3, padding=1)],
    "stride 1": lambda dim: [Relation.of(dim, 2, stride=1, padding=0, policy="support"), padded(dim)],
}


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_maps_are_those_one_by_one(name, dim):
    steps = STEPS[name](dim)
    for seed, extent in enumerate((1, 4, 14, 60)):
        coords = random_cloud(max(1, min(300, extent**dim // 2)), dim, seed=seed, extent=extent, batch_size=2)
        compare(coords, request_of(dim, steps), spatial_shape=extent, batch_size=2)
        coords[:, 1:] -= extent // 2
        compare(coords, request_of(dim, steps))


@pytest.mark.parametrize("name", ["halved", "padded"])
def test_gradients_need_no_more_sizes(name):
    coords = random_cloud(300, 3, extent=14, batch_size=2)
    request = request_of(3, STEPS[name](3), differentiable=True)
    together, apart = (Geometry.checked(coords) for _ in range(2))
    found, expected = laid_out(together, request, True), one_by_one(apart, request, True)
    assert agree(together, apart) > 3 * len(together.maps)
    read = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]
    for a, b in zip(found, expected, strict=True):
        mine, theirs = maps.MapArrays.of(a), maps.MapArrays.of(b)
        assert isinstance(mine, maps.LaidArrays) and mine.key == theirs.key
        assert all(map(torch.equal, mine.arrays, theirs.arrays))
        for places in ([(0, 1, 3, 6)] if a.symmetric else []) + read:
            x, y = mine.bound(places), theirs.bound(places)
            assert (x.signature, [*x.rows], x.needs_int64) == (y.signature, y.rows, y.needs_int64)
            assert [*x.addresses] == [mine.arrays[n].data_ptr() for n in places] and x.is_aligned
    names = "compacted", "compacted_t", "grouped", "unsorted", "unsorted_t"
    for a, b in zip(found, expected, strict=True):
        assert all(a.has(("form", name)) for name in names if b.has(("form", name)))


def test_gradients_of_an_even_window():
    """Its transpose is none of the maps that are found: the rest is laid out by itself."""
    window = Relation.of(3, 2, policy="same")
    request, wanted, complete = prepare.chain_of(3, (), ((window,),), None, True, RULE)
    assert wanted == 1 and not complete and prepare.chain_of(3, (), ((window,),), None, False, RULE)[2]
    coords = random_cloud(300, 3, extent=14, batch_size=2)
    together, apart = (Geometry.checked(coords) for _ in range(2))
    for one in build_chain(together, request):
        maps.keep_tiles(one)
    (found,), (expected,) = one_by_one(together, request, True), one_by_one(apart, request, True)
    assert all(map(torch.equal, maps.MapArrays.of(found).arrays, maps.MapArrays.of(expected).arrays))


def test_four_axes():
    coords = random_cloud(200, 4, extent=6, batch_size=2)
    compare(coords, request_of(4, [halves(4)] * 2, [(Relation.of(4, 2, policy="same"),)] * 3))


def test_several_windows():
    odd = (Relation.of(2, 5), Relation.of(2, 3, dilation=2), Relation.of_offsets(2, [(0, 0), (3, -1), (0, 7)]))
    compare(random_cloud(200, 2, extent=30), request_of(2, [padded(2)], [odd, odd[:1]]))


@pytest.mark.parametrize("name", beyond(1, ["nuscenes_1f_10cm", "waymo_1f_10x10x15cm"]))
def test_real_scans_have_the_very_tiles(name, data_folder):
    """Rows that lie in any order; the larger one has large tiles and sorted maps of 8 kernel offsets."""
    path = next(data_folder.glob(f"**/{name}.npz"), None)
    if path is None:
        pytest.skip(f"{name}.npz is not there")
    coords = torch.from_numpy(np.load(path)["coords"])
    coords = torch.cat([torch.zeros_like(coords[:, :1]), coords], dim=1)
    compare(coords, request_of(3, [halves(3)] * 4))


def test_too_little_room_is_enlarged(monkeypatch):
    """Maps are built again where levels have more rows than there was room for, and once more in the room learnt."""
    chain.estimate_of.cache_clear()
    monkeypatch.setattr(chain, "_FIRST_ESTIMATE", 0.01)
    monkeypatch.setattr(chain, "_LEAST", 0)
    seen, found = [], chain_build.find_maps
    monkeypatch.setattr(chain_build, "find_maps", lambda *given: seen.append(given[3]) or found(*given))
    coords = random_cloud(900, 3, extent=60)
    request = request_of(3, [padded(3)] * 2)
    compare(coords, request)
    assert len(seen) > 2 and seen[:-1] == sorted(seen[:-1]) and seen[-1] < seen[-2]
    seen.clear()
    compare(coords, request)
    assert len(seen) == 1


def test_room_is_for_the_cells_of_all_levels_together(monkeypatch):
    """Not for as many on each level as on the largest, but for those of scenes before, and more where these are few."""
    chain.estimate_of.cache_clear()
    monkeypatch.setattr(chain, "_LEAST", 0)
    request, coords = request_of(3, [padded(3)] * 3), random_cloud(900, 3, extent=20)
    estimate = chain.estimate_of(request)
    first = estimate.room(900, chain.Room(0, 0))
    assert 2.8 * first.most < first.cells <= 3 * first.most
    seen, found = [], chain_build.find_maps
    monkeypatch.setattr(chain_build, "find_maps", lambda *given: seen.append(given[3]) or found(*given))
    compare(coords, request)
    learnt = estimate.room(900, chain.Room(0, 0))
    assert seen == [first, learnt] and learnt.cells < 2 * learnt.most and learnt.most < first.most
    seen.clear()
    estimate.cells = 0.01
    compare(coords, request)
    assert len(seen) > 1 and seen[0].most == seen[1].most and seen[0].cells < seen[1].cells
    assert estimate.room(900, chain.Room(0, 0)).cells == learnt.cells


def unread(coords):
    return Geometry(coords, GridSpec((1,) * (coords.shape[1] - 1), None, -1, UNKNOWN), settled=False)


def test_keys_too_short_for_a_scene_are_made_longer(monkeypatch):
    """Maps are built again where cells of coarser levels exceed the keys of all earlier scenes."""
    chain.estimate_of.cache_clear()
    seen, find = [], chain_build.find_maps
    monkeypatch.setattr(chain_build, "find_maps", lambda *given: seen.append(given[4]) or find(*given))
    request, near = request_of(3, [padded(3)] * 2), random_cloud(300, 3, extent=20)
    far, negative, items = near.clone(), near.clone(), near.clone()
    far[:, 1:] *= 9
    negative[:, 2] -= 15
    items[:, 0] += 5
    for coords, times in ((near, 1), (near, 1), (far, 2), (near, 1), (negative, 2), (items, 2), (far, 1), (items, 1)):
        seen.clear()
        got, want = unread(coords), Geometry.checked(coords)
        laid_out(got, request), one_by_one(want, request)
        assert agree(got, want) > 0 and len(seen) == times
    assert seen[0] == chain.KeyLayout(3, 7, True, 3, 1) and seen[0].digits.turns == 4


@pytest.mark.parametrize("seed", range(60))
def test_keys_are_in_the_order_of_rows(seed):
    """Keys of the coarser levels' cells, in their order, ascend: they hold all bits that differ."""
    case = case_of(seed, 60)
    geometry = Geometry.checked(torch.tensor(case.rows, dtype=torch.int32), spatial_shape=case.extent)
    layout, keys = chain.KeyLayout.of(case.request, geometry.bounds), []
    for level, step in enumerate(case.request.steps):
        geometry = kernel_map(geometry, step)[1]
        for item, *cell in geometry.coords.tolist():
            placed = [c + layout.half for c in cell]
            assert item < 1 << layout.items and all(0 <= c < 1 << layout.bits + layout.signed for c in placed)
            code = sum(
                (c >> bit & 1) << bit * len(cell) + len(cell) - 1 - a for a, c in enumerate(placed) for bit in range(33)
            )
            keys.append((level << layout.level_at) + (item << layout.item_at) + code)
    assert keys == sorted({*keys}) and max(keys, default=0) < 1 << 9 * layout.digits.turns


def test_a_box_that_nobody_read_is_found():
    for dim in (2, 3, 4):
        coords, site = random_cloud(90, dim, extent=7, batch_size=3), GridSpec((1,) * dim, None, -1, UNKNOWN)
        coords[:, 1:] -= 11
        got, want = Geometry(coords, site, settled=False), Geometry.checked(coords)
        build_chain(got, request_of(dim, [halves(dim)], [(Relation.of(dim, 2, policy="same"),)]))
        assert got.outline == want.site and got.batch_size == 3


def test_ends_of_the_keys():
    for dim, bits in chain.AXIS_BITS.items():
        margin = chain.MARGIN + 1 if dim > 1 else 0
        low, high = margin - (1 << bits - 1), (1 << bits - 1) - 1 - margin
        ends = torch.cartesian_prod(torch.tensor([0, 7, 1023]), *[torch.tensor([low, low + 1, -1, 0, high])] * dim)
        window = Relation.of(dim, 2, policy="same")
        compare(ends[torch.randperm(len(ends))].int(), request_of(dim, [halves(dim)] * 3, [(window,)] * 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda g: (replace_site(g, low=-(2**16) - 1), HALVES), "exceed the keys"),
        (lambda g: (replace_site(g, batch=1025), HALVES), "exceed the keys"),
        (lambda g: (g, (Relation.of(3, 3, stride=2, padding=2, dilation=2),)), "steps are not"),
        (lambda g: (g, (Relation.of_offsets(3, [(0, 0, 1)], stride=2),)), "steps are not"),
        (lambda g: (g, (Relation.of(3, 9, stride=1, padding=4, policy="support"),)), "too many cells"),
        (lambda g: (g, (Relation.of(3, 5, stride=2, padding=2),)), "125 kernel offsets are not supported"),
        (lambda g: (g, HALVES * 9), "are not supported"),
        (lambda g: (kernel_map(g, HALVES[0]) and g, HALVES), "maps already"),
        (lambda g: (Geometry.checked(g.coords[:0]), HALVES), "0 voxels"),
    ],
)
def test_what_is_not_found_together_is_refused(change, reason):
    geometry, steps = change(Geometry.checked(random_cloud(40, 3)))
    assert reason in refusal(geometry, request_of(3, steps))
    assert refusal(geometry, request_of(3, (), ())) == "there are no maps"


def replace_site(geometry, low=0, batch=1):
    bounds = replace(geometry.bounds, low=(low, 0, 0), batch=batch)
    return Geometry(geometry.coords, replace(geometry.site, bounds=bounds))


@pytest.mark.parametrize(
    ("row", "values", "problem"),
    [(5, None, "duplicates; the first: "), (3, (0, 9, 0, 0), "spatial_shape is"), (3, (2, 0, 0, 0), "batch_size is 1")],
)
def test_what_is_wrong_with_coordinates_is_raised_with_the_counts(row, values, problem):
    coords = random_cloud(60, 3, extent=9)
    coords[row] = coords[20] if values is None else torch.tensor(values, dtype=torch.int32)
    bounds = Bounds((0, 0, 0), (8, 8, 8), 1)
    geometry = Geometry(coords, GridSpec((1, 1, 1), (9, 9, 9), 1, bounds), settled=False)
    with pytest.raises(CoordinateError, match=problem):
        build_chain(geometry, request_of(3, HALVES))
    assert not geometry.maps and not geometry.levels and not geometry.settled


@pytest.fixture
def by_chain(monkeypatch):
    """`prepare` as where kernels run; the number of values in each transfer."""
    reads, read = [], kernel_maps.read
    monkeypatch.setattr(prepare, "has_triton", lambda tensor: True)
    monkeypatch.setattr(prepare.RequestedMaps, "build", staged(prepare.RequestedMaps.build))
    monkeypatch.setattr(kernel_maps, "read", lambda tensors: (reads.append(len(tensors)), read(tensors))[1])
    return reads


def staged(together):
    """Maps are laid out as on a GPU."""

    def build(wanted, geometry):
        together(wanted, geometry)
        dataflow.materialize([*wanted.maps(geometry)], torch.is_grad_enabled())

    return build


class Layer:
    def __init__(self, dataflow=None):
        self.dataflow = dataflow


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", ["windows of 3", "other windows", "some levels", "dataflows", "no layers back"])
def test_prepare_lays_out_what_the_layers_read(case, grad, by_chain, monkeypatch):
    three, plain = Relation.of(3, 3), Layer()
    same, consumers = [[three]] * 3, None
    if case == "other windows":
        same = [[three, Relation.of(3, 5)], [Relation.of(3, 3, dilation=2), three], [Relation.of(3, 1)]]
    if case == "some levels":
        same = [[], [three]]
    if case == "dataflows":
        named = Layer("fetch-on-demand")
        consumers = pm.ops.MapConsumers([[plain], [named]], [[], [plain, named]], [[[plain]], [[named]], [[]]])
    if case == "no layers back":
        consumers = pm.ops.MapConsumers([[plain]] * 2, [[]] * 2, [[[plain]]] * 3)
    coords = random_cloud(200, 3, extent=11)
    x, want = (pm.SparseTensor(torch.zeros(len(coords), 1), coords) for _ in range(2))
    with torch.set_grad_enabled(grad):
        x.prepare(HALVES, same, consumers)
        first, by_chain[:] = list(by_chain), []
        monkeypatch.setattr(prepare.RequestedMaps, "build_chain", lambda *_: False)
        want.prepare(HALVES, same, consumers)
    assert not any(first) or case in ("other windows", "dataflows")
    assert agree(x.geometry, want.geometry) > 0


def test_coordinates_that_were_written_in_place_have_no_chain():
    x = pm.SparseTensor(torch.zeros(2, 1), torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.int32))
    x.coords[1, 1] += 5
    with pytest.raises(CoordinateError, match="written to in place"):
        build_chain(x.geometry, request_of(3, HALVES))


@pytest.mark.parametrize("first", beyond(1, range(0, 240, 40)))
def test_hard_coordinates_against_loops(first):
    """One voxel, ends of the keys, gaps between batch items, many of these, strides larger than kernels and the other
    way round, padding by axis, one to four axes."""
    assert sum(check(case_of(seed, 40)) for seed in range(first, first + 40)) >= 22


def test_duplicates_of_hard_coordinates_are_raised():
    assert not any(check(case_of(seed, 40, ("twice",))) for seed in range(40))
