"""Maps that are found on streams of their own while a CUDA graph is captured: what waits for what, without a GPU."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pumice.coords import (
    Bounds,
    CoordBuffer,
    Geometry,
    GridSpec,
    KernelMap,
    Relation,
    join_side_streams,
    kernel_map,
    on_side_stream,
    tiles,
)
from pumice.coords.capacity import BufferedState, CapacityPlanner
from pumice.engine.static import levels_of, status_words_of
from pumice.lower import maps
from pumice.testing import random_cloud

DOWN, SAME = Relation.of(2, 2, stride=2, policy="support"), Relation.of(2, 3)


class Event:
    """What had been done when it was recorded: by stream, how much."""

    def __init__(self, **_):
        self.clock = {}

    def record(self, stream):
        self.clock = dict(stream.clock)


class Stream:
    """Knows behind how much of the work of others its own comes."""

    numbers: list["Stream"] = []

    def __init__(self, *_, **__):
        self.stream_id = len(self.numbers)
        self.numbers.append(self)
        self.clock = {self.stream_id: 0}

    def work(self):
        self.clock[self.stream_id] += 1
        return self.stream_id, self.clock[self.stream_id]

    def behind(self, work):
        number, count = work
        return self.clock.get(number, -1) >= count

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        for number, count in event.clock.items():
            self.clock[number] = max(count, self.clock.get(number, -1))

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Device:
    """Streams in place of torch's, `main` the one that is captured."""

    def __init__(self):
        Stream.numbers = []
        self.main = self.current = Stream()

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def joined(self):
        """Whether all streams that wait for others' work are waited for by the first."""
        return all(self.main.behind((s.stream_id, s.clock[s.stream_id])) for s in Stream.numbers)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Geometry, "device", property(lambda self: torch.device("cuda", 0)))
    return made


def in_buffer() -> Geometry:
    coords = random_cloud(40, 2, extent=12)
    bounds = Bounds((0, 0), (15, 15), 1 + int(coords[:, 0].max()))
    word = torch.zeros(1, dtype=torch.int32)
    cloud = CoordBuffer(coords, word + len(coords), bounds, word.clone())
    return Geometry.in_buffer(
        cloud, GridSpec((1, 1), None, bounds.batch, bounds), BufferedState(CapacityPlanner(40, 40, 1.5, None))
    )


def find(device: Device, geometry: Geometry, relation: Relation, told) -> tuple[KernelMap, Geometry, tuple[int, int]]:
    """A map and its outputs, and the work that they are there behind."""
    found, outputs = kernel_map(geometry, relation)
    work = device.current.work()
    told(found)
    return found, outputs, work


@pytest.mark.parametrize("what", ["coords", "cloud", "valid_mask"])
def test_coordinates_that_were_found_beside_are_waited_for(what, device):
    """And not what was found after them."""
    first = in_buffer()
    with on_side_stream(first) as told:
        _, level, work = find(device, first, DOWN, told)
        _, _, later = find(device, level, DOWN, told)
    getattr(first, what)
    assert not device.main.behind(work)
    getattr(level, what)
    assert device.main.behind(work) and not device.main.behind(later)


def test_every_stream_waits_for_the_coordinates(device):
    first, other = in_buffer(), Stream()
    with on_side_stream(first) as told:
        _, level, work = find(device, first, DOWN, told)
    assert level.coords is not None and device.main.behind(work)
    with device.on(other):
        assert level.coords is not None and other.behind(work)


def test_a_lookup_comes_behind_all_that_was_found_beside_below(device):
    """Also where deeper levels were prepared by themselves before."""
    first = in_buffer()
    _, level = kernel_map(first, DOWN)
    with on_side_stream(level):
        level.lookup()
        work = device.current.work()
    with on_side_stream(first):
        pass
    assert level.lookup() and device.main.behind(work)


def end(geometry: Geometry) -> None:
    with join_side_streams(geometry):
        status_words_of(geometry, dict(levels_of(geometry)).values())


def test_all_streams_are_joined_at_the_end(device):
    """Also those that found nothing new, and those behind the last map."""
    first = in_buffer()
    for _ in range(2):
        with on_side_stream(first) as told:
            find(device, first, DOWN, told)
            device.current.work()
    assert not device.joined()
    end(first)
    assert device.joined()


def test_nothing_is_waited_for_after_the_end(device):
    """An event of a graph is no longer one when the graph is there."""
    first = in_buffer()
    with on_side_stream(first) as told:
        _, level, _ = find(device, first, DOWN, told)
    end(first)
    assert not first.pending_events and not level.pending_events
    with device.on(Stream()) as _:
        assert level.coords is not None and device.current.clock == {device.current.stream_id: 0}


def test_what_is_laid_out_already_takes_no_stream(device):
    first = in_buffer()
    with on_side_stream(first) as told:
        found, _, _ = find(device, first, SAME, told)
        maps._materialize_on_side_streams([(found, "compacted")])
        maps._materialize_on_side_streams([(found, "compacted")])
    used = [s for s in Stream.numbers if len(s.clock) > 1]
    # The one of the search, and one of the first call.
    assert len(used) == 2


def test_other_streams_wait_for_what_is_made_of_what_was_laid_out(device):
    """Arrays are handed on under other names by whoever comes first: a second stream has to wait all the same."""
    first, other = in_buffer(), Stream()
    with on_side_stream(first) as told:
        found, _, _ = find(device, first, SAME, told)
        maps._materialize_on_side_streams([(found, "compacted")])
        work = next(s for s in Stream.numbers[2:] if len(s.clock) > 1).work()
        maps._materialize_on_side_streams([(found, "unsorted")])
        between: Any = found.buffered
        between.pending_events.register(Stream.numbers[work[0]].record_event(), [(("form", "compacted"), False)])

    def handed_on():
        return found.cached("handed on", lambda m: maps.form_operands(m, "compacted"))

    handed_on()
    assert device.main.behind(work)
    with device.on(other):
        handed_on()
    assert other.behind(work)


@pytest.fixture
def telling(device, monkeypatch):
    """The work that tells whether there was room for what is laid out."""
    works, real = [], tiles.fill_tiles

    def filled(*given):
        works.append(device.current.work())
        return real(*given)

    monkeypatch.setattr(tiles, "fill_tiles", filled)
    return works


def test_what_is_told_of_maps_comes_behind_them_and_not_behind_layers(device, telling):
    """And the end of the program behind it, and behind everything else."""
    first = in_buffer()
    with on_side_stream(first) as told:
        found, _, work = find(device, first, DOWN, told)
        maps._materialize_on_side_streams([(found, "compacted")])
        search = device.current.work()
    layers = device.main.work()
    # A layer reads what was laid out, under another name.
    found.cached("handed on", lambda m: maps.form_operands(m, "compacted"))
    with join_side_streams(first):
        own = device.current
        assert all(map(own.behind, (work, search, *telling))) and telling and not own.behind(layers)
        status_words_of(first, dict(levels_of(first)).values())
        assert not own.behind(layers)
        last = own.work()
    assert device.current is device.main and device.main.behind(last) and device.joined()


def test_what_is_told_comes_behind_layers_that_lay_out_maps(device, telling):
    first = in_buffer()
    with on_side_stream(first) as told:
        found, _, _ = find(device, first, DOWN, told)
    before = device.main.work()
    maps.form_operands(found, "compacted")
    behind = device.main.work()
    with join_side_streams(first):
        own = device.current
        assert own.behind(before) and own.behind(telling[-1]) and not own.behind(behind)
    assert device.joined()


@pytest.mark.parametrize("when", ["before the others", "after the others", "alone", "never"])
def test_what_is_told_comes_behind_maps_that_layers_found_themselves(when, device):
    first = in_buffer()
    if when in ("before the others", "alone"):
        kernel_map(first, SAME)
    if when in ("before the others", "after the others"):
        with on_side_stream(first) as told:
            find(device, first, DOWN, told)
    if when == "after the others":
        kernel_map(first, SAME)
    work = device.main.work()
    with join_side_streams(first):
        assert device.current is device.main and device.current.behind(work)
    assert device.joined()
