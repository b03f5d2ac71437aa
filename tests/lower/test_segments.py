"""Segments cut into pieces: every entry once, in order, in pieces of about equal length; and their scratch memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pumice.coords import segments
from pumice.lower.segments import pieces
from pumice.runtime import workspace as room
from pumice.runtime.cache import BoundedCache
from pumice.runtime.workspace import workspace


@given(st.lists(st.integers(-1, 11), max_size=120), st.sampled_from([1, 2, 4, 8, 64]))
def test_pieces_hold_every_entry_once(values, most):
    count = 10
    array = torch.tensor(sorted(values), dtype=torch.int32)
    found = pieces(array, count, most)
    lists = (found.rows, found.starts, found.stops, found.firsts, found.pieces)
    assert all(x.dtype == torch.int32 for x in lists)
    items = list(zip(*(x.tolist() for x in lists), strict=True))
    by_row = {}
    for item, (row, start, stop, first, number) in enumerate(items):
        if not number:
            assert start == stop and 0 <= row < count
            continue
        by_row.setdefault(row, []).append((item, start, stop, first, number))
    assert sorted(by_row) == list(range(count))
    for row, held in by_row.items():
        entries = [place for place, value in enumerate(array.tolist()) if value == row]
        assert [p for _, start, stop, _, _ in held for p in range(start, stop)] == entries
        items_of = [item for item, *_ in held]
        assert items_of == list(range(items_of[0], items_of[0] + len(held)))
        assert {(first, number) for *_, first, number in held} == {(items_of[0], len(held))}
        lengths = [stop - start for _, start, stop, _, _ in held]
        assert max(lengths) <= most and (len(held) == 1 or min(lengths) >= 1)
    # The segments with the most entries come first.
    order = [
        sum(stop - start for _, start, stop, _, _ in by_row[row]) for row in dict.fromkeys(r for r, *_, n in items if n)
    ]
    assert order == sorted(order, reverse=True)


def test_no_segments_have_no_pieces():
    found = pieces(torch.zeros(0, dtype=torch.int32), 0, 4)
    assert found.rows.shape == found.pieces.shape == (0,)


@pytest.mark.parametrize("count", [1, 63, 1000])
def test_counters_are_zero(count):
    found, other = (workspace(count, 48, torch.device("cpu")) for _ in range(2))
    assert found.counters.dtype == torch.int32 and len(found.counters) >= count and not found.counters.any()
    assert found.scratch.numel() >= 48 and not found.counters.is_inference()
    assert other.counters.data_ptr() != found.counters.data_ptr()


@pytest.fixture
def on_gpu(monkeypatch):
    """Memory of the CPU stands for that of a GPU; whether a graph is captured there."""
    capturing = [False]
    monkeypatch.setattr(room, "_zeros", lambda count, device: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(room, "_bytes", lambda size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(room, "_COUNTER_POOLS", BoundedCache(8))
    monkeypatch.setattr(room, "_WORKSPACES", BoundedCache(8))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return lambda value: capturing.__setitem__(0, value)


def test_pieces_that_are_there_are_taken_until_the_array_is_written_to():
    array = torch.arange(40, dtype=torch.int32) // 4
    segments.RUNS.register(array, segments.bounds_of(array, 10)[1:], 4)
    told = segments.RUNS.get(array, 10)
    told.pieces[8] = there = segments.split_runs_torch(array, 10, 8)
    found = pieces(array, 10, 8)
    assert found.rows is there.values and found.pieces is there.numbers and found.firsts is there.firsts
    # Of another length, and of another number of segments, they are another's.
    assert pieces(array, 10, 2).rows is not there.values and told.requested == {2, 8}
    assert pieces(array, 11, 8).rows.shape[0] == 11 + 40 // 8
    array.fill_(3)
    again = pieces(array, 10, 8)
    assert again.rows is not there.values and again.pieces.max() == 5 and told.requested == {2, 8}


def shares(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_what_a_capture_sets_to_zero_is_its_own(on_gpu):
    """Before anything else ran, too: the next graph's counters are no memory of the first one's."""
    gpu = torch.device("cuda", 0)
    on_gpu(True)
    first, second = workspace(100, 48, gpu), workspace(100, 48, gpu)
    assert not shares(first.counters, second.counters)
    on_gpu(False)
    eager = workspace(100, 48, gpu)
    assert workspace(100, 48, gpu) is eager
    on_gpu(True)
    third, fourth = workspace(100, 48, gpu), workspace(100, 48, gpu)
    assert shares(third.counters, fourth.counters) and third.counters.data_ptr() != fourth.counters.data_ptr()
    assert not any(shares(third.counters, other.counters) for other in (first, second, eager))


def test_scratch_of_a_stream_grows(on_gpu, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(room, "_MAX_CACHED_BYTES", 1000)
    small = workspace(100, 48, gpu)
    more = workspace(10, 400, gpu)
    assert more.counters.shape[0] >= 100 and more.scratch.shape[0] >= 400 and more is not small
    assert workspace(128, 512, gpu) is more
    # What is too much to be kept shares the counters alone.
    much = workspace(100, 2000, gpu)
    assert much.scratch.shape[0] >= 2000 and shares(much.counters, more.counters) and workspace(1, 1, gpu) is more
