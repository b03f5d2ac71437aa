"""Maps of scene after scene that are found over buffers are those that are found without, in memory of their own.

Without a GPU the same program runs without a graph, or with what stands in the place of one (Replayed).
"""

import copy
import importlib
import pickle
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from found import agree, forms_of

import pumice as pm
from pumice.coords import Bounds, Geometry, GridSpec, Relation
from pumice.coords.buffer import Packer
from pumice.engine.subject import undisturbed
from pumice.env import settings
from pumice.errors import CoordinateError
from pumice.lower import dataflow, direct, maps
from pumice.runtime.cache import BoundedCache
from pumice.testing import random_cloud

prepare, recorded = (importlib.import_module(f"pumice.ops.{name}") for name in ("prepare", "recorded"))
HALF, WINDOW = Relation.of(3, 2, stride=2), Relation.of(3, 3)
PADDED = Relation.of(3, 3, stride=2, padding=1, policy="support")
SERVES = recorded._serves


class Replayed:
    """In the place of a CUDA graph: each run writes where the one before wrote; behind that lies what is no scene's."""

    def __init__(self, made):
        self._made = made
        first = made.run(made.rooms)
        levels = [replace(level, coords=_spare(level.coords)) for level in first.levels]
        self.left = replace(first, arrays=[*map(_spare, first.arrays)], levels=levels, words=first.words.clone())

    def replay(self):
        found = self._made.run(self._made.rooms)
        assert found.lengths == self.left.lengths
        self.left.words.copy_(found.words)
        for array, new in zip(self.left.arrays, found.arrays, strict=True):
            array.fill_(7)[: len(new)] = new[: len(array)]
        for level, new in zip(self.left.levels, found.levels, strict=True):
            assert (level.length, level.above, level.relation) == (new.length, new.above, new.relation)
            level.coords.fill_(7)[: len(new.coords)] = new.coords[: len(level.coords)]


def _spare(array):
    """Room for more rows than there are."""
    rows = 3 * len(array) + min(2048, 2**18 // max(1, array[:1].numel()))
    return array.new_full((rows, *array.shape[1:]), 7)


class Watch:
    """What became of scenes that were prepared: `told`, whether by a graph; `made`, what was recorded."""

    def __init__(self):
        self.told, self.made = [], []

    @property
    def shelf(self):
        return recorded._SHELVES.get(torch.device("cpu"))

    def last(self, count):
        found, self.told = self.told, []
        assert len(found) == count, "each scene is asked for once"
        return found


@pytest.fixture
def watch(monkeypatch):
    """Maps are found over buffers on the CPU, from the first scene on, and laid out as on a GPU."""
    watch, record, together = Watch(), recorded.Shelf._recorded, prepare._RequestedMaps.build

    def by_graph(geometry, asked):
        watch.told.append(recorded.by_graph(geometry, asked))
        return watch.told[-1]

    def recording(shelf, *given):
        watch.made.append(made := record(shelf, *given))
        return made

    def laid_out(wanted, geometry):
        together(wanted, geometry)
        dataflow.materialize(found := list(wanted.maps(geometry)), torch.is_grad_enabled())
        for one in (one for one, flows in found if None in flows):
            maps.planner_operands(one, torch.is_grad_enabled())

    monkeypatch.setattr(prepare._RequestedMaps, "build", laid_out)
    monkeypatch.setattr(recorded, "_serves", lambda g: not g.maps and not g.levels and len(g) > 0)
    monkeypatch.setattr(recorded, "_SHELVES", BoundedCache(8))
    monkeypatch.setattr(recorded, "_BEFORE", 0)
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
    monkeypatch.setattr(prepare, "by_graph", by_graph)
    monkeypatch.setattr(recorded.Shelf, "_recorded", recording)
    return watch


@pytest.fixture
def replays(watch, monkeypatch):
    """What is recorded is replayed into the same memory."""
    record = recorded.Shelf._recorded

    def recording(shelf, *given):
        made = record(shelf, *given)
        graph = Replayed(made)
        return replace(made, graph=graph, left=(graph.left, Packer.of(graph.left.arrays)))

    monkeypatch.setattr(recorded.Shelf, "_recorded", recording)


def scene(count, seed=0, dim=3, low=0, **options):
    """Coordinates of a random cloud; low: what is added to each."""
    coords = random_cloud(count, dim, seed=seed, **options)
    coords[:, 1:] += low
    return coords


def on(coords, **options):
    """A tensor of 4 channels."""
    generator = torch.Generator().manual_seed(1)
    return pm.SparseTensor(torch.randn(len(coords), 4, generator=generator), coords, **options)


def without(x, steps, same=(), users=None):
    """Another tensor of these coordinates, prepared where nothing is recorded."""
    plain = pm.SparseTensor(x.feats, Geometry(x.coords, x.geometry.site))
    wanted = prepare._RequestedMaps(
        tuple(steps), tuple(map(tuple, same)), users and prepare._flows_over(steps, same, users)
    )
    wanted.build(plain.geometry)
    return plain


@dataclass(frozen=True)
class Case:
    """Levels and windows; scenes: of random_tensor. given: what is told of their coordinates."""

    steps: tuple[Relation, ...] = (HALF,) * 2
    same: tuple[tuple[Relation, ...], ...] = ((WINDOW,),) * 3
    dim: int = 3
    low: int = 0
    counts: tuple[int, ...] = (300, 260, 330)
    batch_size: int = 1
    extent: int = 12
    shape: tuple[int, ...] | None = None

    def scenes(self):
        given = {"batch_size": self.batch_size} | ({"spatial_shape": self.shape} if self.shape else {})
        options = {"extent": self.extent, "batch_size": self.batch_size}
        for seed, count in enumerate(self.counts):
            yield on(scene(count, seed, self.dim, self.low, **options), dim=self.dim, **given)


WIDE, TURNED = Relation.of(3, 3, dilation=2), Relation.of_transposed(3, 2, stride=2)
TAPS = Relation.of_offsets(3, ((0, 0, 0), (2, 0, -1), (-1, 1, 0)))
CASES = {
    "floor": Case((HALF,) * 3, ((WINDOW,),) * 4),
    "support with padding, dilated": Case((PADDED, HALF), ((WINDOW,), (), (WIDE,))),
    "support of a support": Case((PADDED, PADDED), ((), (WINDOW,))),
    "no windows": Case(same=()),
    "no windows of some levels": Case(same=((), (), (WINDOW,))),
    "windows alone": Case((), ((WINDOW, WIDE),)),
    "a window twice, and any offsets": Case((HALF,), ((WINDOW, TAPS, WINDOW), (TAPS,))),
    "windows that lead elsewhere": Case((HALF,), ((Relation.of(3, 3, stride=2), PADDED, WINDOW),)),
    "finer levels": Case((HALF, TURNED), ((WINDOW,), (), (WINDOW,)), counts=(300, 280)),
    "finer at once": Case((TURNED,), ((), (WINDOW,)), counts=(100, 90)),
    "one window of one tap": Case((Relation.of(3, 1, stride=3),), ((Relation.of(3, 1),),)),
    "batch items": Case(batch_size=3),
    "below zero": Case(low=-7),
    "far below zero": Case((PADDED,), ((WINDOW,), (WINDOW,)), low=-100_000),
    "1-D": Case((Relation.of(1, 3, stride=2),), ((Relation.of(1, 5),),), 1, -40, extent=600),
    "2-D": Case((Relation.of(2, 2, stride=2),) * 2, ((Relation.of(2, 3),),) * 3, 2, -9, extent=25),
    "4-D": Case((Relation.of(4, 2, stride=2),), ((), (Relation.of(4, 3),)), 4, -3, (160, 150), extent=6),
    "bounded": Case((HALF, PADDED), shape=(12, 13, 15)),
    "bounded batch items": Case((PADDED, TURNED), ((WINDOW,),), shape=(12, 12, 12), batch_size=2),
    "a few voxels": Case(counts=(5, 1, 8, 3), extent=3),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_that_is_found_is_what_is_found_without(case, grad, watch, replays):
    with torch.set_grad_enabled(grad):
        for x in case.scenes():
            assert x.prepare(case.steps, case.same) is x
            assert agree(x.geometry, without(x, case.steps, case.same).geometry)
    assert all(watch.last(len(case.counts)))
    assert len(watch.made) == 1 or case.counts[0] < 10


def calls_of(geometry):
    """Tokens and arrays of what calls over its maps are passed, and over those of coarser levels; what is held of
    them, and of which map."""
    for found, outputs in geometry.maps.values():
        for (name, flipped), (tokens, arrays) in forms_of(found).items():
            if name[0] == "passed":
                own = found if flipped == found.flipped else found.transpose()
                yield tokens, arrays, found._storages[("held", name[1]), flipped], own
        yield from calls_of(outputs) if outputs is not None else ()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_known_of_the_arrays_beforehand_is_what_they_are(case, grad, watch, replays):
    """Kernels are told sizes, layouts and addresses by it."""
    with torch.set_grad_enabled(grad):
        for x in case.scenes():
            x.prepare(case.steps, case.same)
            told = list(calls_of(x.geometry))
            assert len(told) >= len(case.steps)
            for tokens, arrays, held, _ in told:
                own = direct.Held.of(arrays, direct.Pattern(tokens, arrays))
                assert (held.kind, held.rows, held.addresses, held.far) == (own.kind, own.rows, own.addresses, False)
                assert held.kind is own.kind and all(a is b for a, b in zip(held.arrays, arrays, strict=True))


def test_without_a_graph_the_program_runs_anew(watch):
    for x in CASES["floor"].scenes():
        x.prepare([HALF], [[WINDOW]])
        assert agree(x.geometry, without(x, [HALF], [[WINDOW]]).geometry)
    assert watch.last(3) == [True] * 3 and watch.made[0].graph is None


def test_in_inference_mode_nothing_is_laid_out_for_gradients(watch, replays):
    with torch.inference_mode():
        for x in CASES["floor"].scenes():
            x.prepare([HALF], [[WINDOW]])
            assert agree(x.geometry, without(x, [HALF], [[WINDOW]]).geometry)
            assert not any(level.coords.is_inference() for level in x.geometry.levels.values()), "it serves training"
    assert all(watch.last(3))


def test_nothing_that_is_asked_for_is_nothing(watch):
    x = next(CASES["floor"].scenes())
    x.prepare([], [])
    x.prepare([], [[]])
    assert watch.last(2) == [False, False] and not x.geometry.maps


# Dataflows


def layers(*flows):
    return [pm.nn.Conv3d(4, 4, 3, dataflow=flow) for flow in flows]


FLOWS = {
    "planned": (None, None, None),
    "tiles": ("implicit-gemm-unsorted", "implicit-gemm-split2", None),
    "of each pass": (pm.ops.Dataflows("implicit-gemm-split3", "planned", "implicit-gemm-sorted"), None, None),
    "libraries": ("gather-gemm-scatter-fused-fixed", "implicit-gemm-sorted", "explicit-gemm"),
}


def users(down, fine, coarse):
    """Of one step and a window of either level; the layer on the fine level that is planned reads with the other."""
    return pm.ops.MapConsumers([layers(down)], [layers(coarse)], [[layers(fine, None)], [layers(coarse)]])


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("flows", FLOWS.values(), ids=FLOWS)
def test_layers_of_named_dataflows(flows, grad, watch, replays):
    asked = [HALF], [[WINDOW], [WINDOW]], users(*flows)
    with torch.set_grad_enabled(grad):
        for x in CASES["floor"].scenes():
            x.prepare(*asked)
            assert agree(x.geometry, without(x, *asked).geometry)
    assert all(watch.last(3)) and len(watch.made) == 1


def test_forms_of_unknown_length_are_refused(watch):
    asked = [HALF], [[WINDOW], [WINDOW]], users(None, "implicit-gemm-table", None)
    for x in CASES["floor"].scenes():
        x.prepare(*asked)
        plain = without(x, *asked).geometry
        assert torch.equal(x.geometry.maps[WINDOW, None][0].rows(), plain.maps[WINDOW, None][0].rows())
        assert set(x.geometry.maps) == set(plain.maps)
    assert not any(watch.last(3)) and not watch.made and len(watch.shelf._refused._held) == 1


def test_what_cannot_be_packed_is_refused():
    for array in (torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(4, 6, dtype=torch.int32)[:, :3]):
        with pytest.raises(pm.errors.DtypeError, match="contiguous torch.int32 is packed"):
            Packer.of([torch.zeros(2, dtype=torch.int32), array])


# Networks


def ends(net, coords, feats):
    """The result and all gradients."""
    feats = feats.clone().requires_grad_()
    net.zero_grad()
    y = net(pm.SparseTensor(feats, coords))
    y.feats.square().sum().backward()
    return [y.feats.detach(), feats.grad, *(p.grad for p in net.parameters())]


def test_a_network_gives_the_same_and_so_do_its_gradients(watch, replays, monkeypatch):
    torch.manual_seed(0)
    net = pm.models.MinkUNet(4, 5, width=0.125)
    pairs = []
    for seed, count in enumerate((220, 180)):
        coords = scene(count, seed, low=-6, extent=12, batch_size=2)
        feats = torch.randn(count, 4)
        torch.manual_seed(seed)
        found = ends(net, coords, feats)
        with monkeypatch.context() as context:
            context.setattr(prepare, "by_graph", lambda *_: False)
            pairs.append((found, ends(net, coords, feats)))
    assert all(watch.last(2)) and len(watch.made) == 1
    for found, wanted in pairs:
        for got, want in zip(found, wanted, strict=True):
            assert want.abs().max() > 0 and torch.equal(got, want)


class Down(torch.nn.Module):
    """Layers of named dataflows and planned ones over one step."""

    def __init__(self):
        super().__init__()
        self.stem = pm.nn.Conv3d(4, 6, 3, dataflow="implicit-gemm-split2")
        self.down = pm.nn.Conv3d(6, 8, 2, stride=2)
        self.up = pm.nn.InverseConv3d(8, 3, 2, stride=2, dataflow="implicit-gemm-unsorted")
        self.users = pm.ops.MapConsumers([[self.down]], [[self.up]], [[[self.stem]]])

    def forward(self, x):
        x = x.prepare([HALF], [[WINDOW]], self.users)
        fine = self.stem(x)
        return self.up(self.down(fine), fine)


def test_layers_read_what_was_laid_out_for_them(watch, replays, monkeypatch):
    net = Down()
    coords, feats = scene(300, extent=12), torch.randn(300, 4)
    found = ends(net, coords, feats)
    monkeypatch.setattr(prepare, "by_graph", lambda *_: False)
    assert watch.last(1) == [True]
    for got, want in zip(found, ends(net, coords, feats), strict=True):
        assert want.abs().max() > 0 and torch.equal(got, want)


# Scene after scene

ASKED = [HALF, HALF], [[WINDOW], [WINDOW]]


def prepared(coords, **options):
    """A scene that agrees with itself."""
    x = on(coords, **options).prepare(*ASKED)
    assert agree(x.geometry, without(x, *ASKED).geometry)
    return x


def test_scenes_of_many_sizes_share_a_recording(watch, replays):
    prepared(scene(1000, 0, extent=14))
    for seed, count in enumerate((1, 1024, 900, 17, 640, 1010), 1):
        prepared(scene(count, seed, extent=14))
    assert all(watch.last(7)) and len(watch.made) == 1
    prepared(scene(1025, 9, extent=14))
    assert watch.last(1) == [True] and len(watch.made) == 2, "of another capacity"
    assert [place[1] for place in watch.shelf._held] == [1024, recorded._capacity(1025)]


def test_a_scene_outside_of_the_box_is_recorded_with_those_before(watch, replays):
    prepared(scene(200, 0, extent=8))
    prepared(scene(200, 1, extent=8, low=300))
    assert len(watch.made) == 2 and len(watch.shelf._held) == 1
    box = watch.made[1].site.bounds
    for low in (0, 150, 300):
        assert max(box.low) <= low and min(box.high) >= low + 7
        prepared(scene(200, 2, extent=8, low=low))
    assert len(watch.made) == 2
    prepared(scene(200, 3, extent=8, batch_size=4))
    assert len(watch.made) == 3 and watch.made[2].site.bounds.batch == 4
    assert all(watch.last(6)) and watch.shelf._times.values() == [3]


def test_a_scene_without_room_is_recorded_with_more(watch, replays):
    """Voxels side by side have few parents; those that lie apart have one each."""
    corner = torch.cartesian_prod(torch.zeros(1), *[torch.arange(9.0)] * 3).int()
    apart = scene(700, 5, extent=9)
    apart[:, 1:] *= 8
    far = torch.tensor([[0, 71, 71, 71]], dtype=torch.int32)
    prepared(torch.cat([corner, far]))
    prepared(apart)
    assert len(watch.made) == 2, "the levels had no room"
    rooms = [dict(made.rooms.levels()) for made in watch.made]
    assert all(rooms[0][place] < 700 <= rooms[1][place] for place in rooms[0])
    prepared(torch.cat([corner, far]))
    prepared(apart)
    assert len(watch.made) == 2 and all(watch.last(4))


def test_a_capacity_is_recorded_so_many_times_and_no_more(watch, replays):
    for step in range(recorded._TIMES + 3):
        prepared(scene(200, step, extent=8, low=1000 * step))
    assert watch.last(recorded._TIMES + 3) == [True] * recorded._TIMES + [False] * 3
    assert len(watch.made) == recorded._TIMES
    prepared(scene(210, 7, extent=8, low=1000))
    assert watch.last(1) == [True], "what there is goes on serving scenes that fit"
    prepared(scene(1100, extent=12))
    assert watch.last(1) == [True], "another capacity is not refused"


@pytest.mark.parametrize("problem", [torch.cuda.OutOfMemoryError, pm.errors.GeometryError, CoordinateError])
def test_where_another_cannot_be_recorded_the_one_before_stays(problem, watch, replays, monkeypatch):
    """Of an outlier, whose box with those before is too large for kernels."""
    prepared(scene(200, 0, extent=8))
    with monkeypatch.context() as context:

        def failing(*_):
            raise problem("too large")

        context.setattr(recorded.Shelf, "_recorded", failing)
        prepared(scene(200, 1, extent=8, low=5000))
    for low, told in ((0, True), (5000, False), (0, True)):
        prepared(scene(200, 2, extent=8, low=low))
        assert watch.told[-1] == told
    assert watch.last(5)[:2] == [True, False] and len(watch.made) == 1


def test_what_a_scene_was_given_stays_its_own(watch, replays):
    x = prepared(scene(900, 0, extent=14))
    kept = {place: array.clone() for place, array in arrays_of(x.geometry)}
    assert len(kept) > 20
    for seed in (1, 2):
        prepared(scene(1000, seed, extent=14))
    for place, array in arrays_of(x.geometry):
        assert torch.equal(array, kept[place]), place
    other = prepared(scene(900, 0, extent=14))
    mine, others = ({array.untyped_storage().data_ptr() for _, array in arrays_of(y.geometry)} for y in (x, other))
    assert mine.isdisjoint(others)


def test_what_is_pickled_or_copied_is_a_level_or_a_map_and_nothing_else(watch, replays):
    """A scene's maps lie in one block."""
    x = prepared(scene(900, 0, extent=14))
    (level,), found = x.geometry.levels.values(), x.geometry.maps[HALF, None][0]
    for whole, part, block in ((level, "coords", False), (found, "table", True)):
        array = getattr(whole, part)
        assert (array.untyped_storage().nbytes() > 10 * array.nbytes) == block
        assert block or array.untyped_storage().nbytes() == array.nbytes
        assert len(pickle.dumps(whole)) < array.nbytes + 4096
        for other in (pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole)):
            mine = getattr(other, part)
            assert torch.equal(mine, array) and mine.untyped_storage().nbytes() == array.nbytes


def arrays_of(geometry, path=()):
    """All arrays that a scene was given, with their places."""
    for (relation, _), (found, outputs) in geometry.maps.items():
        here = (*path, relation)
        yield (*here, "table"), found.table
        for name, (tokens, arrays) in forms_of(found).items():
            yield from (((*here, name, t), x) for t, x in zip(tokens, arrays, strict=True))
        if outputs is not None:
            yield (*here, "coords"), outputs.coords
            yield from arrays_of(outputs, here)


# Scenes that will not do


def unread(coords, shape=(20, 20, 20), items=1):
    """A tensor of coordinates that were not looked at, as on a GPU where their box is told."""
    site = GridSpec((1,) * len(shape), shape, items, Bounds((0,) * len(shape), tuple(s - 1 for s in shape), items))
    geometry = Geometry(coords, site)
    geometry._settled = False
    return pm.SparseTensor(torch.zeros(len(coords), 1), geometry)


def wrong(coords, monkeypatch, **told):
    """What is said of a scene with and without; it is asked for a graph first."""
    said = []
    for refused in (False, True):
        with monkeypatch.context() as context, pytest.raises(CoordinateError) as raised:
            if refused:
                context.setattr(prepare, "by_graph", lambda *_: False)
            unread(coords, **told).prepare(*ASKED)
        said.append(str(raised.value))
    return said


def twice(coords):
    return torch.cat([coords, coords[7:9]])


def outside(coords):
    return torch.cat([coords, torch.tensor([[0, 3, 20, 3]], dtype=torch.int32)])


@pytest.mark.parametrize("spoil", [twice, outside])
@pytest.mark.parametrize("first", [True, False], ids=["the one that is recorded", "a later one"])
def test_what_is_wrong_is_told_as_without(spoil, first, watch, replays, monkeypatch):
    good = scene(200, extent=9)
    if not first:
        unread(good).prepare(*ASKED)
    got, want = wrong(spoil(good), monkeypatch)
    assert got == want and ("duplicates" in got) == (spoil is twice)
    x = unread(good).prepare(*ASKED)
    assert x.geometry.settled and agree(x.geometry, without(x, *ASKED).geometry)
    assert watch.told == [True] * (2 - first), "a scene that will not do refuses nothing to others"
    assert watch.shelf._times.values() == [1]


def test_a_wrong_scene_outside_of_the_box_leaves_the_others_their_recording(watch, replays, monkeypatch):
    prepared(scene(200, extent=8))
    far = pm.SparseTensor(torch.zeros(202, 1), Geometry(twice(scene(200, extent=8, low=500)), site_of(500, 507)))
    far.geometry._settled = False
    with pytest.raises(CoordinateError, match="duplicates"):
        far.prepare(*ASKED)
    prepared(scene(200, 1, extent=8))
    assert watch.told == [True, True] and len(watch.made) == 1


def site_of(low, high):
    return GridSpec((1,) * 3, None, 1, Bounds((low,) * 3, (high,) * 3, 1))


def test_batch_items_that_were_not_told_are_outside(watch, replays, monkeypatch):
    """Also where what was recorded has room for more of them."""
    coords = scene(200, extent=6, batch_size=4)
    unread(coords, items=4).prepare(*ASKED)
    assert watch.told == [True]
    got, want = wrong(coords, monkeypatch, items=2)
    assert got == want and "batch_size is 2" in got


def test_boxes_that_are_told_hold_all_scenes(watch, replays):
    """Those of a spatial_shape need no union."""
    for low in (0, 9, 4):
        prepared(scene(150, 0, extent=6, low=low), spatial_shape=(15, 15, 15))
    assert len(watch.made) == 1 and all(watch.last(3))


# When


def test_the_first_scenes_are_found_without(watch, monkeypatch):
    monkeypatch.setattr(recorded, "_BEFORE", 2)
    for seed in range(4):
        prepared(scene(200, seed, extent=8))
        assert len(watch.made) == (seed >= 2)
    assert watch.last(4) == [False, False, True, True]


def test_recordings_are_of_what_is_asked_for(watch):
    coords = scene(200, extent=8)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            prepared(coords)
            on(coords).prepare([HALF])
            on(coords, stride=2).prepare([HALF])
            on(coords, spatial_shape=(8, 8, 8)).prepare([HALF])
    assert all(watch.last(8)) and len(watch.made) == len(watch.shelf._held) == 8
    prepared(coords)
    assert len(watch.made) == 8


def test_a_geometry_with_maps_is_left_alone(watch):
    x = on(scene(200, extent=8))
    found, _ = pm.kernel_map(x.geometry, WINDOW)
    x.prepare(*ASKED)
    assert watch.last(1) == [False] and not watch.made
    assert pm.kernel_map(x.geometry, WINDOW)[0] is found
    y = prepared(scene(200, extent=8))
    kept = dict(y.geometry.maps)
    y.prepare(*ASKED)
    assert watch.last(1) == [True] and y.geometry.maps == kept
    y.prepare((HALF,))
    assert watch.last(1) == [False] and y.geometry.maps == kept


class OnGPU(SimpleNamespace):
    """What _serves looks at."""

    def __init__(self, **changes):
        super().__init__(**{"maps": {}, "levels": {}, "device": torch.device("cuda", 0), "count": 9, **changes})

    def __len__(self):
        return self.count


@pytest.fixture
def unread_settings():
    yield
    settings.cache_clear()


def graphs(monkeypatch, value):
    monkeypatch.setenv("PUMICE_MAP_GRAPHS", value)
    settings.cache_clear()


def test_whom_graphs_serve(monkeypatch, unread_settings):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    graphs(monkeypatch, "1")
    assert SERVES(OnGPU()) and SERVES(OnGPU(device=torch.device("cuda")))
    for other in ({"maps": {1: 2}}, {"levels": {1: 2}}, {"count": 0}):
        assert not SERVES(OnGPU(**other)), other
    for device in ("cpu", "cuda:1"):
        assert not SERVES(OnGPU(device=torch.device(device)))
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not SERVES(OnGPU())
    with undisturbed(torch.nn.Identity(), False):
        assert not SERVES(OnGPU()), "what is measured"
    assert SERVES(OnGPU())
    graphs(monkeypatch, "0")
    assert not SERVES(OnGPU())


def test_on_a_cpu_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(recorded, "_SHELVES", BoundedCache(8))
    monkeypatch.setattr(recorded, "_BEFORE", 0)
    x = on(scene(50, extent=5)).prepare(*ASKED)
    assert len(x.geometry.maps) == 2 and recorded._SHELVES.get(x.geometry.device) is None


# Memory


@pytest.fixture
def of_size(watch, monkeypatch):
    """A device of 8 * 100 bytes, of which graphs may take 100; a recording takes as many as its example has voxels."""
    record = recorded.Shelf._recorded

    def recording(shelf, asked, geometry, *rest):
        shelf._pool = object()
        return replace(record(shelf, asked, geometry, *rest), nbytes=len(geometry))

    monkeypatch.setattr(recorded.Shelf, "_recorded", recording)
    monkeypatch.setattr(recorded, "_SHARE", 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=800))


def strides(watch):
    return [place[0][1][0] for place in watch.shelf._held]


def test_the_recording_used_longest_ago_goes_first(watch, of_size):
    def use(stride, count=30):
        prepared(scene(count, extent=8), stride=stride)

    for stride in (1, 2, 3):
        use(stride)
    use(1)
    assert strides(watch) == [2, 3, 1] and len(watch.made) == 3
    use(4)
    assert strides(watch) == [3, 1, 4], "30 bytes more are too many"
    use(5, 70)
    assert strides(watch) == [4, 5], "two have to go"
    use(3)
    assert strides(watch) == [5, 3] and len(watch.made) == 6, "what went is recorded again"
    assert all(watch.last(7))


def test_what_takes_more_than_there_is_for_all_is_refused(watch, of_size):
    prepared(scene(40, extent=8))
    prepared(scene(101, extent=8), stride=2)
    prepared(scene(40, extent=8), stride=2)
    assert watch.last(3) == [True, False, False] and len(watch.made) == 2
    assert strides(watch) == []


# Graphs


class Graph:
    """As torch's: once the last graph of a pool is gone, no other can be captured into it."""

    def __init__(self, living):
        self._living, self._pool = living, None

    def capture_begin(self, pool, capture_error_mode):
        assert self._living.get(pool) != 0, "use_count > 0"
        self._living[pool] = self._living.get(pool, 0) + 1
        self._pool = pool

    def capture_end(self):
        pass

    def replay(self):
        pass

    def __del__(self):
        if self._pool is not None:
            self._living[self._pool] -= 1


class Here(SimpleNamespace):
    """A stream that notes for which others it waited."""

    def __init__(self):
        super().__init__(waited=[], wait_event=lambda _: None, synchronize=lambda: None)

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def captured(watch, monkeypatch):
    """Where a GPU would be: the stream, another one, and [reserved, allocated] bytes before and behind captures."""
    here, side, memory, living = Here(), Here(), [(0, 0), (0, 0)], {}
    made = recorded.Shelf.__init__

    def init(shelf, device):
        made(shelf, device)
        shelf._pool, shelf._side = object(), side

    monkeypatch.setattr(recorded.Shelf, "__init__", init)
    monkeypatch.setattr(recorded, "_memory", lambda _, turns=[]: turns.append(1) or memory[(len(turns) - 1) % 2])
    for name, value in {
        "CUDAGraph": lambda: Graph(living),
        "Event": lambda: SimpleNamespace(record=lambda _: None),
        "graph_pool_handle": object,
        "current_stream": lambda _: here,
        "stream": lambda _: nullcontext(),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=800),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return SimpleNamespace(here=here, side=side, memory=memory, living=living)


@pytest.mark.filterwarnings("error")
def test_where_no_graph_is_left_the_next_has_a_pool_of_its_own(watch, captured):
    captured.memory[1] = 101, 0
    prepared(scene(40, extent=8))
    watch.made.clear()
    assert watch.last(1) == [False] and list(captured.living.values()) == [0], "too large, and gone"
    captured.memory[1] = 40, 0
    for stride in (2, 3):
        prepared(scene(40, extent=8), stride=stride)
    assert watch.last(2) == [True, True] and sorted(captured.living.values()) == [0, 2]


@pytest.mark.filterwarnings("error")
def test_a_capture_that_fails_leaves_nothing_behind(watch, captured, monkeypatch):
    run, turns = recorded.Recorded.run, []

    def failing(made, rooms):
        turns.append(made)
        if len(turns) in (2, 8):
            raise pm.errors.CaptureError("once as it is compiled, once as it is captured")
        return run(made, rooms)

    monkeypatch.setattr(recorded.Recorded, "run", failing)
    for stride, waits in ((1, 1), (2, 2), (3, 3)):
        prepared(scene(40, extent=8), stride=stride)
        assert captured.here.waited == [captured.side] * waits
    assert watch.last(3) == [False, True, False] and len(turns) == 8


def test_memory_that_a_pool_had_counts_for_those_that_take_it(watch, captured):
    for stride, counts in enumerate([(90, 30), (0, 60), (20, 50)], 1):
        captured.memory[1] = counts
        prepared(scene(40, extent=8), stride=stride)
        found = [(place[0][1][0], held.nbytes) for place, held in watch.shelf._held.items()]
        assert found == {1: [(1, 90)], 2: [(2, 60)], 3: [(3, 50)]}[stride]
