"""Maps that are found beside layers: who waits for what, and which pieces are there already."""

import sys
from typing import Any

import pytest
import torch
from streams import Streams, pretend, watch

from pumice.coords import CoordBuffer, Geometry, GridSpec, Relation, join_side_streams, kernel_map, on_side_stream
from pumice.coords import segments as segments_module
from pumice.coords.capacity import BufferedMapState, BufferedState, CapacityPlanner, FixedCapacities
from pumice.engine.static import status_words_of
from pumice.lower import maps, segments
from pumice.testing import random_cloud

prepare = sys.modules["pumice.ops.prepare"]

WINDOW, STEP = Relation.of(3, 3), Relation.of(3, 2, stride=2)
STEPS, SAME = (STEP, STEP), ((WINDOW,), (WINDOW,), (WINDOW,))
BLOCK, MOST = 16, 4


@pytest.fixture
def streams(monkeypatch):
    """Those of a capture, in which maps are laid out side by side in the forms that a GPU has."""
    made = Streams()
    pretend(monkeypatch, made)
    watch(monkeypatch, made)
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
    monkeypatch.setattr(
        maps,
        "materialize",
        lambda asked: maps._materialize_on_side_streams((m, name) for m, names in asked for name in names),
    )
    return made


def inside(count=80, seed=0, extent=7, rooms=None, capacity=120):
    """Coordinates in a buffer, and the rooms of what is made of them."""
    whole = Geometry.checked(random_cloud(count, 3, extent=extent, seed=seed))
    coords = torch.zeros(capacity, 4, dtype=torch.int32)
    coords[:count] = whole.coords
    bounds = Geometry.checked(torch.tensor([[0, 0, 0, 0], [0, 9, 9, 9]], dtype=torch.int32)).bounds
    living, status = torch.tensor([count], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rooms = rooms or CapacityPlanner(capacity, count, 1.5, None)
    site = GridSpec((1, 1, 1), None, 1, bounds)
    return Geometry.in_buffer(CoordBuffer(coords, living, bounds, status), site, BufferedState(rooms)), rooms


def levels_of(geometry):
    """It, and what its steps lead to."""
    yield geometry
    for relation, _ in list(geometry.maps):
        if relation == STEP:
            yield from levels_of(geometry.maps[relation, None][1])


def maps_of(geometry):
    return [found for level in levels_of(geometry) for found, _ in level.maps.values()]


def prepared(geometry, steps=STEPS, same=SAME, differentiable=False):
    prepare.RequestedMaps(steps, same, None).build_in_buffers(geometry, differentiable)


# Who waits for what


def test_readers_wait_for_all_that_they_read_and_for_no_more(streams):
    """What layers read of maps is there before they do, on whichever stream it was made."""
    geometry, _ = inside()
    main, done = streams.main, set(streams.main.done)
    prepared(geometry)
    assert not main.waits and main.done == done, "nothing has read, and the first layers need not wait"
    assert len(streams.made) > 2 and {one.priority for one in streams.made[1:]} == {-1}
    found = maps_of(geometry)
    for one in (*found, *(one.transpose() for one in found)):
        (name,) = maps.names_of(one, False)
        before = len(main.waits)
        maps.form_operands(one, name)
        assert len(main.waits) <= before + 1
        maps.planner_operands(one, False)
        # It is made of forms, which are there, and of the map.
        assert len(main.waits) <= before + 2
    assert not streams.early
    made = set().union(*(one.done for one in streams.made[1:]))
    assert made <= main.done


def test_a_reader_waits_for_its_own_map(streams):
    """The maps of inner levels are found meanwhile."""
    geometry, _ = inside()
    prepared(geometry)
    first, *others = maps_of(geometry)
    maps.form_operands(first, maps.names_of(first, False)[0])
    here = streams.main.done
    assert here and not streams.early
    for one in others:
        late = {what for what in set().union(*(s.done for s in streams.made[1:])) if what[0] == id(one._storages)}
        assert late and not late & here


def test_what_was_not_laid_out_is_made_of_the_map(streams):
    """Another form, and the way back: the map itself was found on another stream."""
    geometry, _ = inside()
    found_beside(geometry)
    for found in maps_of(geometry):
        found.transpose().rows(), found.split(BLOCK, 2), found.pair_counts()
    assert not streams.early and streams.main.waits


def found_beside(geometry, relations=(WINDOW, STEP)):
    """The maps of these relations, each of which is told."""
    with on_side_stream(geometry) as told:
        found = [kernel_map(geometry, relation)[0] for relation in relations]
        for one in found:
            told(one)
    return found


def test_lookups_wait_for_the_end_of_the_search(streams):
    """Of all levels: a network may interpolate in any, or find maps that nobody asked for before."""
    geometry, _ = inside()
    prepared(geometry)
    finest, *inner = levels_of(geometry)
    assert len(inner) == 2
    for level in (*inner, finest):
        assert level.pending_events
        level.lookup()
        assert streams.main.waits[-1] is level.pending_events["found"]
    kernel_map(inner[0], Relation.of(3, 3, dilation=2))[0].rows()
    assert not streams.early
    # Coordinates of which nothing was found beside wait for nothing.
    other, _ = inside(seed=1)
    waits = len(streams.main.waits)
    other.lookup()
    assert not other.pending_events and len(streams.main.waits) == waits


def test_a_second_search_comes_behind_the_first(streams):
    """It starts from lookups that the first one made, and leaves the events of the maps that it finds again."""
    geometry, _ = inside()
    prepared(geometry, STEPS[:1], SAME[:2])
    late = geometry.pending_events.get("found")
    found = maps_of(geometry)
    events = [dict(one.buffered.pending_events) for one in found]
    prepared(geometry)
    assert any(late in one.waits for one in streams.made[1:]) and geometry.pending_events["found"] is not late
    assert [
        {key: one.buffered.pending_events[key] for key in was} for one, was in zip(found, events, strict=True)
    ] == events
    assert len(maps_of(geometry)) == len(found) + 2
    for found in maps_of(geometry):
        maps.planner_operands(found, False)
    for level in levels_of(geometry):
        level.lookup()
    assert not streams.early


def test_a_search_comes_behind_what_there_is(streams):
    """Behind the coordinates themselves, and all that a search before has made, whatever this one reads of it."""
    geometry, _ = inside()
    streams.make("coordinates")
    for _ in range(2):
        late = geometry.pending_events.get("found")
        with on_side_stream(geometry):
            assert "coordinates" in streams.current.done and streams.current.waits == [late] * (late is not None)
            streams.make(("found", late))
    assert streams.made[-1].done >= {("found", None)} and "found" not in str(streams.main.done)


def test_maps_that_were_found_before_are_laid_out_behind(streams):
    """Also where nothing tells of them: they were found on the stream of layers."""
    geometry, _ = inside()
    found, _ = kernel_map(geometry, WINDOW)
    maps.materialize([(found, ("compacted",))])
    assert len(streams.made) > 1 and not streams.early
    maps.form_operands(found, "compacted")
    assert not streams.early and len(streams.main.waits) == 1


def test_a_search_from_an_inner_level_waits_for_the_first(streams):
    geometry, _ = inside()
    prepared(geometry, STEPS[:1], SAME[:2])
    _, inner = levels_of(geometry)
    prepared(inner)
    for found in maps_of(geometry):
        maps.planner_operands(found, False)
    assert not streams.early


def test_gradients_read_what_was_laid_out_for_them(streams):
    geometry, _ = inside()
    prepared(geometry, differentiable=True)
    for found in maps_of(geometry):
        maps.planner_operands(found, True)
        maps.planner_operands(found.transpose(), True)
    assert not streams.early


def test_the_end_of_a_program_waits_for_all(streams):
    """Also for what no layer has read: a graph in whose capture a stream is left alone is none."""
    geometry, _ = inside()
    prepared(geometry)
    with join_side_streams(geometry):
        status_words_of(geometry, levels_of(geometry))
    # Behind the last map nothing is made on the stream of the search.
    assert all(one.done <= streams.main.done for one in streams.made)
    assert all(not found.buffered.pending_events for found in maps_of(geometry))
    waits = len(streams.main.waits)
    for found in maps_of(geometry):
        found.rows(), found.get_cached("rows")
    assert len(streams.main.waits) == waits


def test_nothing_is_beside_where_no_graph_is_captured(streams, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    geometry, _ = inside()
    (window, _) = found_beside(geometry)
    assert len(streams.made) == 1 and not geometry.pending_events and not window.buffered.pending_events
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Geometry, "device", property(lambda one: one.coords.device))
    geometry, _ = inside()
    found_beside(geometry)
    assert len(streams.made) == 1 and not geometry.pending_events


def test_an_error_leaves_nothing(streams):
    """No stream that is the current one, no event that readers of something else would wait for."""
    geometry, _ = inside()
    with pytest.raises(KeyError), on_side_stream(geometry):
        assert streams.current is not streams.main
        raise KeyError
    assert streams.current is streams.main and not geometry.pending_events
    found = kernel_map(geometry, WINDOW)[0]
    found.rows()
    assert not streams.main.waits and not found.buffered.pending_events


def test_maps_that_were_told_before_an_error_are_waited_for(streams):
    geometry, _ = inside()
    with pytest.raises(KeyError), on_side_stream(geometry) as told:
        found, _ = kernel_map(geometry, WINDOW)
        told(found)
        raise KeyError
    found.rows()
    assert not streams.early and streams.main.waits


def test_events_are_those_of_keys():
    """One that replaces another is waited for though it may have the number of one that is gone."""
    word: Any = torch.zeros(1, dtype=torch.int32)
    between = BufferedMapState(word, word, word, FixedCapacities({}), "here")
    first, second, third = object(), object(), object()
    waits = []

    class Fake:
        stream_id = 7

        def wait_event(self, event):
            waits.append(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: Fake())
        between.pending_events.register(first, ["a", "b"])
        between.pending_events.register(second, ["c"])
        between.pending_events.wait_for("d")
        assert waits == []
        for key, want in (("a", [first]), ("b", [first]), ("c", [first, second]), ("a", [first, second])):
            between.pending_events.wait_for(key)
            assert waits == want
        between.pending_events.register(third, ["a", None])
        for key in ("a", "d", "b"):
            between.pending_events.wait_for(key)
        assert waits == [first, second, third, first]
        between.pending_events.wait_for_all()
        assert waits == [first, second, third, first, second] and not between.pending_events


# Pieces that are there already


@pytest.fixture
def cut(monkeypatch):
    """How often readers cut runs themselves."""
    calls = []
    real = segments.split_runs
    monkeypatch.setattr(segments, "split_runs", lambda *given: calls.append(given[1:]) or real(*given))
    return calls


def cut_by_readers(geometry, most=MOST):
    """What kernels read of the tiles of a map, and the tiles: as segments in pieces."""
    found, _ = kernel_map(geometry, WINDOW)
    made = found.compacted(BLOCK)
    count = len(made.rows)
    return segments.pieces(made.tiles, count, most), made.tiles, count


def equals_twin(got, array, count, most=MOST):
    want = segments_module.split_runs_torch(array, count, most)
    assert want.starts.shape[0] > count, "nothing would be cut"
    assert torch.equal(got.rows, want.values) and torch.equal(got.firsts, want.firsts)
    assert torch.equal(got.starts, want.starts) and torch.equal(got.stops, want.stops)
    assert torch.equal(got.pieces, want.numbers)


def test_pieces_that_a_pass_asked_for_are_there_in_the_next(cut):
    geometry, planner = inside()
    equals_twin(*cut_by_readers(geometry))
    assert cut == [(8, MOST)]
    rooms = planner.to_fixed()
    for seed, count in enumerate((80, 30, 111)):
        cut.clear()
        geometry, _ = inside(count, seed, rooms=rooms)
        equals_twin(*cut_by_readers(geometry))
        assert cut == []
    # Another length is cut where it is read, once.
    for calls in (1, 0):
        cut.clear()
        got, tiles, count = cut_by_readers(inside(rooms=rooms)[0], 3)
        equals_twin(got, tiles, count, 3)
        assert len(cut) == calls
    assert list(rooms.lengths_by_key.values()) == [{3, MOST}]


def test_what_a_pass_asks_for_is_kept_by_its_rooms():
    """Also of a place that the pass that planned did not cut."""
    for rooms in (FixedCapacities({}), CapacityPlanner(64, 64, 1.0, None)):
        rooms.piece_lengths("here").add(8)
        assert rooms.piece_lengths("here") == {8} and rooms.piece_lengths("there") == set()


def test_pieces_are_of_their_own_tiles(cut):
    """Of each order, block and map there are others."""
    geometry, planner = inside()

    def read(geometry):
        for relation in (WINDOW, STEP):
            found, _ = kernel_map(geometry, relation)
            for splits in (0, 1, 2):
                for block in (8, 16):
                    for number, part in enumerate(found.split(block, splits)):
                        most = 2 + number + splits
                        got = segments.pieces(part.tiles, len(part.rows), most)
                        want = segments_module.split_runs_torch(part.tiles, len(part.rows), most)
                        assert torch.equal(got.rows, want.values) and torch.equal(got.stops, want.stops)

    read(geometry)
    rooms = planner.to_fixed()
    assert len(rooms.lengths_by_key) == 16 and set().union(*rooms.lengths_by_key.values()) == {2, 3, 4, 5}
    cut.clear()
    read(inside(seed=3, rooms=rooms)[0])
    assert cut == []


def test_rooms_that_were_widened_have_pieces_of_their_own(cut):
    """What they hold is longer, and what was asked for before is asked for again."""
    geometry, planner = inside(40, extent=9)
    _, narrow, _ = cut_by_readers(geometry)
    before = planner.to_fixed()
    least = {place: 2 * room if place[0] == "entries" else room for place, room in before.capacities.items()}
    geometry, wider = inside(111, 1, rooms=CapacityPlanner(120, 111, 1.0, None, least))
    cut.clear()
    got, tiles, count = cut_by_readers(geometry)
    equals_twin(got, tiles, count)
    assert len(cut) == 1 and wider.capacities.keys() == before.capacities.keys()
    assert before.lengths_by_key is not wider.to_fixed().lengths_by_key
    cut.clear()
    got, tiles, count = cut_by_readers(inside(111, 1, rooms=wider.to_fixed())[0])
    equals_twin(got, tiles, count)
    assert cut == [] and len(tiles) > len(narrow)


def test_pieces_are_made_where_maps_are_laid_out(streams, cut, monkeypatch):
    """Not on the stream of their readers, nor behind the event that these wait for."""
    made_on = []
    real = segments_module.split_runs
    monkeypatch.setattr(segments_module, "split_runs", lambda *given: made_on.append(streams.current) or real(*given))
    geometry, planner = inside()
    prepared(geometry)
    for found in maps_of(geometry):
        for part in found.split(maps.tile_rows_for(found.num_outputs), 1 if found.volume > 8 else 0):
            segments.pieces(part.tiles, len(part.rows), MOST)
    assert made_on == [] and cut
    cut.clear()
    geometry, _ = inside(60, 2, rooms=planner.to_fixed())
    prepared(geometry)
    assert len(made_on) == len(maps_of(geometry)) and streams.main not in made_on
    for found in maps_of(geometry):
        for part in found.split(maps.tile_rows_for(found.num_outputs), 1 if found.volume > 8 else 0):
            segments.pieces(part.tiles, len(part.rows), MOST)
    assert cut == [] and not streams.early


# What tells whether there was room


class Word(torch.Tensor):
    """A status that notes on which stream it is written, as ("told", n)."""

    streams: Any = None
    written = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.bitwise_or_, torch.Tensor.copy_, torch.Tensor.fill_) and isinstance(args[0], Word):
            cls.streams.make(("told", cls.written))
            cls.written += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def told(streams, monkeypatch):
    """Coordinates in a buffer, of whose status every write is noted."""
    monkeypatch.setattr(Word, "streams", streams)
    monkeypatch.setattr(Word, "written", 0)
    given, rooms = inside()
    cloud = given.cloud
    word = torch.zeros(1, dtype=torch.int32).as_subclass(Word)
    geometry = Geometry.in_buffer(
        CoordBuffer(cloud.coords, cloud.count, cloud.bounds, word), given.site, BufferedState(rooms)
    )
    geometry.lookup()
    assert Word.written, "no write is seen"
    return geometry


LATER: dict[str, Any] = {
    "nothing": lambda geometry: None,
    "another form": lambda geometry: [found.split(BLOCK, 2) for found in maps_of(geometry)],
    "groups": lambda geometry: [maps.form_operands(found, "grouped") for found in maps_of(geometry)],
    "the way back": lambda geometry: [maps.form_operands(found.transpose(), "split2") for found in maps_of(geometry)],
    "a map that nobody told of": lambda geometry: kernel_map(geometry, Relation.of(3, 3, dilation=2))[0].split(
        BLOCK, 1
    ),
    "coordinates that nobody told of": lambda geometry: kernel_map(geometry, Relation.of(3, 3, stride=3))[0].rows(),
    "a second search": lambda geometry: prepared(geometry, (STEP, STEP, STEP), (*SAME, (WINDOW,))),
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("later", LATER)
def test_words_come_behind_whatever_writes_the_status(told, streams, later, differentiable):
    """And behind no more, where all maps were found beside the layers."""
    prepared(told, differentiable=differentiable)
    before = Word.written
    for found in maps_of(told):
        maps.planner_operands(found, differentiable)
    LATER[later](told)
    there = later == "nothing" or (differentiable and later == "groups")
    assert (Word.written == before) == there
    streams.make("layers")
    assert streams.current is streams.main
    with join_side_streams(told):
        writes = {("told", number) for number in range(Word.written)}
        assert writes <= streams.current.done
        assert ("layers" in streams.current.done) == ("nobody told of" in later)
        status_words_of(told, levels_of(told))
    assert streams.current is streams.main and not streams.early
    assert all(one.done <= streams.main.done for one in streams.made)
