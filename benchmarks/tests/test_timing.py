"""The clocks: calls take turns, medians lie between quantiles, and on a GPU the marks lie around the call alone."""

import importlib

import pytest
import torch

from benchmarks.harness import timing
from pumice.errors import OptionError

CPU = torch.device("cpu")
measuring = importlib.import_module("pumice.engine.measure")


def test_calls_take_turns():
    order = []
    calls = [lambda name=name: order.append(name) for name in "abc"]
    found = timing.together(calls, CPU, "wall", 0)
    assert order == list("abc") * 9  # twice before, seven times for the clock
    assert all(0 <= times.p20 <= times.median <= times.p80 for times in found)


def test_a_cpu_has_one_clock_and_a_gpu_two():
    assert timing.clocks(CPU) == ("wall",) and timing.clocks(torch.device("cuda")) == ("wall", "gpu")


def test_quantiles_are_those_of_the_samples():
    times = timing.Times.of([1.0, 2.0, 3.0, 4.0, 5.0, 100.0])
    assert (times.median, times.p20, times.p80) == (3.5, 2.0, 5.0)


@pytest.fixture
def stream(monkeypatch):
    """What a GPU's stream is given, in order; events are a millisecond apart."""
    given = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            given.append("mark")

        def elapsed_time(self, other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: given.append(cycles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: given.append("wait"))
    monkeypatch.setattr(timing, "FLUSH", 16)
    return given


def test_on_a_gpu_the_host_is_ahead_before_the_first_mark(stream):
    (times,) = timing.together([lambda: stream.append("call")], CPU, "gpu", 0)
    assert times == timing.Times(1.0, 1.0, 1.0)
    first = stream.index("mark")
    assert isinstance(stream[first - 1], int) and 2e5 * 0.4 < stream[first - 1] <= 2e9 * 20e-3
    assert stream[first : first + 3] == ["mark", "call", "mark"]
    assert stream.count("mark") == 14


def test_pieces_are_added_up_run_by_run(monkeypatch):
    order = []
    spent = [[1.0, 2.0, 3.0], [10.0, 30.0, 50.0], [5.0, 5.0, 7.0]]

    def on_gpu(calls, device, seconds, ahead, cold):
        assert (len(calls), seconds, ahead, cold) == (3, 0.5, True, True)
        return spent

    monkeypatch.setattr(timing, "_on_gpu", on_gpu)
    pieces = [lambda name=name: order.append(name) for name in "abc"]
    first, second = timing.in_pieces([pieces[:2], pieces[2:]], CPU, "gpu", 0.5)
    assert order == list("abcabc") and (first.median, second.median) == (32.0, 5.0)
    assert first == timing.Times.of([11.0, 32.0, 53.0])


def test_every_piece_has_its_own_nap(stream):
    (times,) = timing.in_pieces([[lambda: stream.append("one"), lambda: stream.append("two")]], CPU, "gpu", 0)
    assert times.median == 2.0
    marks = [at for at, what in enumerate(stream) if what == "mark"]
    assert len(marks) == 2 * 2 * 7 and all(isinstance(stream[at - 1], int) for at in marks[::2])
    assert [stream[at + 1] for at in marks[:4:2]] == ["one", "two"]


def test_a_device_is_busy_with_all_that_it_did(monkeypatch):
    mark, ran = "spin_kernel", []
    spans = [(mark, 0, 5), ("b", 30, 2_000), (mark, 9_000, 1), ("a", 9_120, 3_000), ("a", 13_000, 5_000)]
    events = [measuring.Event("before", -9, 9), *(measuring.Event(*span) for span in spans)]
    monkeypatch.setattr(measuring, "profiled", lambda calls: ([call() for call in calls] and events, [1.0, 1.0]))
    found = timing.busy(lambda: ran.append(1), 2)
    assert (found.median, found.p20) == pytest.approx((5e-3, 3.2e-3)) and len(ran) == 2
    # A trace that lacks a run is taken again, and then is no measurement.
    monkeypatch.setattr(measuring, "profiled", lambda calls: (events[3:], [ran.append(2), 1.0]))
    with pytest.raises(OptionError, match="recorded 1 passes, expected 2"):
        timing.busy(lambda: None, 2)
    assert ran.count(2) == 3


def test_a_warm_call_follows_another_and_events_wait_each_time(stream):
    timing.together([lambda: stream.append("call")], CPU, "gpu", 0, cold=False)
    first = stream.index("mark")
    assert stream[first - 2] == "call" and stream.count("call") == 2 + 3 + 2 * 7
    stream.clear()
    timing.together([lambda: stream.append("call")], CPU, "events", 0)
    assert stream[2:6] == ["mark", "call", "mark", "wait"] and not [s for s in stream if isinstance(s, int)]
