"""CUDA streams and events that are not there: what each has behind it, and what is read before it is."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch

from pumice.coords import Geometry, KernelMap


@dataclass(eq=False)
class Event:
    """What came before it on its stream."""

    behind: frozenset = frozenset()

    def record(self, stream):
        self.behind = frozenset(stream.done)


@dataclass(eq=False)
class Stream:
    """done: what was started on it, or waited for; waits: the events."""

    device: object = None
    priority: int = 0
    stream_id: int = field(default_factory=count().__next__)
    done: set = field(default_factory=set)
    waits: list = field(default_factory=list)

    def wait_event(self, event):
        self.waits.append(event)
        self.done |= event.behind

    def wait_stream(self, other):
        self.done |= other.done

    def record_event(self):
        return Event(frozenset(self.done))


class Streams:
    """The streams of a capture. made: all, the first one's first; early: what was read on a stream that had not waited
    for it, as (what, number of the stream). kept: what numbers stand for."""

    def __init__(self):
        self.main = Stream()
        self.made, self.early, self.kept = [self.main], [], []
        self._now = [self.main]

    @property
    def current(self):
        return self._now[-1]

    def new(self, *given, **named):
        self.made.append(Stream(*given, **named))
        return self.made[-1]

    @contextmanager
    def on(self, stream):
        self._now.append(stream)
        try:
            yield
        finally:
            self._now.pop()

    def keep(self, thing):
        """Its number, which is no other thing's from now on."""
        self.kept.append(thing)
        return id(thing)

    def make(self, what):
        self.current.done.add(what)

    def read(self, what):
        if what not in self.current.done:
            self.early.append((what, self.made.index(self.current)))


def pretend(monkeypatch, streams):
    """A graph is captured, on a GPU whose memory is that of the CPU."""
    monkeypatch.setattr(torch.cuda, "Stream", streams.new)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Geometry, "device", property(lambda _: torch.device("cuda")))


def watch(monkeypatch, streams):
    """Note on which stream tables, storages and lookups are made, and where they are read."""
    of_found, storage, lookup = KernelMap.from_neighbours, KernelMap.cached, Geometry.lookup

    def found(*given):
        made = of_found(*given)
        streams.make(("table", streams.keep(made._storages)))
        return made

    def stored(one, name, build):
        held = id(one._storages)
        key = held, name, one.flipped

        def built(like):
            streams.read(("table", held))
            value = build(like)
            streams.make(key)
            return value

        given = one.has(name)
        value = storage(one, name, built)
        if given and name not in ("valid_count", "masks"):
            streams.read(key)
        elif given:
            streams.read(("table", held))
        return value

    def looked_up(one, schedule=None):
        new = one._lookup is None
        value = lookup(one, schedule)
        (streams.make if new else streams.read)(("lookup", streams.keep(one)))
        return value

    monkeypatch.setattr(KernelMap, "from_neighbours", staticmethod(found))
    monkeypatch.setattr(KernelMap, "cached", stored)
    monkeypatch.setattr(Geometry, "lookup", looked_up)
