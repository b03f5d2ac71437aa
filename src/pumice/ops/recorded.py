"""The maps of a network found by one CUDA graph, in place of some hundred launches from the host.

When a network asks for the same levels and maps of scene after scene, finding them is recorded, for scenes of about one
size, over buffers of which nothing is read (coords.capacity). A later scene is copied there, the graph runs, all sizes
are read in one transfer, and one kernel copies what is the scene's of each array: its maps are like those that would
have been found without a graph, in memory of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from pumice.coords import Bounds, CoordBuffer, Geometry, GridSpec, KernelMap
from pumice.coords.box import INT32_MAX
from pumice.coords.buffer import DUPLICATE, RANGE, Packer, new_status, put_first
from pumice.coords.capacity import BufferedState, Capacities, CapacityPlanner, FixedCapacities
from pumice.env import settings
from pumice.errors import CoordinateError, PumiceError
from pumice.ops.contents import Contents, Reader
from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import outside_inference_mode, recording_constants

_BEFORE = 2
"""Scenes of about a size that are done without a graph before one is recorded."""
_RATIO, _SMALLEST = 1.125, 1024
"""Of capacities: from one to the next, and the smallest."""
_MARGIN = 1.125
"""Room of inner levels and of maps, over what a scene needs that fills the capacity."""
_BEYOND = 8
"""The box goes beyond the scene by this part of it on each side."""
_TIMES = 8
"""How often a capacity is recorded, at most: for larger boxes, and for scenes with more of anything."""
_SHARE = 8
"""Graphs take this part of a device's memory, at most; the one that was used longest ago goes first."""

Place = tuple[Hashable, int]
"""What is asked for, and a capacity."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What is found of scene after scene.

    find: finds the maps of a geometry and lays them out; those of them that are read as the planner picks.
    differentiable: for gradients, too. key: tells it from what else is asked for.
    """

    key: Hashable
    find: Callable[[Geometry], Iterable[KernelMap]]
    differentiable: bool


def by_graph(geometry: Geometry, asked: Asked) -> bool:
    """Whether the maps are there now, by a graph: where one is at hand, or worth it.

    Raises CoordinateError for duplicates, and for coordinates outside their spatial_shape.
    """
    if not _serves(geometry):
        return False
    device = geometry.device
    with outside_inference_mode():
        shelf = _SHELVES.get(device) or _SHELVES.keep(device, Shelf(device))
        with shelf.lock:
            return shelf.find(geometry, asked)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Within it no graph finds maps, and none is recorded: for passes that are measured."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


_PAUSED: ContextVar[bool] = ContextVar("without_graphs", default=False)


def _serves(geometry: Geometry) -> bool:
    """Whether a graph may find maps of it: there are none yet, and nothing else is being recorded."""
    if geometry.maps or geometry.levels or not len(geometry) or _PAUSED.get() or not settings().map_graphs:
        return False
    if geometry.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    return geometry.device.index in (None, torch.cuda.current_device())


def _capacity(count: int) -> int:
    found = _SMALLEST
    while found < count:
        found = int(found * _RATIO) // 64 * 64
    return found


def _box(site: GridSpec) -> Bounds:
    """Where scenes are expected: all of a spatial_shape, or around this one."""
    if site.spatial_shape is None:
        return _beyond(site.bounds)
    return Bounds((0,) * len(site.spatial_shape), tuple(s - 1 for s in site.spatial_shape), site.bounds.batch)


@dataclass(frozen=True, eq=False)
class Recorded:
    """Finding maps, recorded. site: its bounds are a box that scenes lie in. coords int32 [capacity, 1+D] and count
    int32 [1]: where a scene is copied to. graph: None where there are none, on a CPU. read: what the graph reads.

    nbytes: of the device's memory that it took.
    """

    asked: Asked
    site: GridSpec
    coords: Tensor
    count: Tensor
    rooms: FixedCapacities
    graph: torch.cuda.CUDAGraph | None = None
    left: tuple[Contents, Packer] | None = None
    read: Sequence[object] = ()
    nbytes: int = 0

    def holds(self, bounds: Bounds) -> bool:
        """Whether the box does."""
        return self.site.bounds.holds(bounds) and bounds.batch <= self.site.bounds.batch

    def fill(self, geometry: Geometry) -> None:
        put_first((self.coords,), (geometry.coords,), self.count)

    def run(self, rooms: Capacities) -> Contents:
        """What is found of the coordinates in the buffer."""
        cloud = CoordBuffer(self.coords, self.count, self.site.bounds, new_status(self.coords.device))
        geometry = Geometry.in_buffer(cloud, self.site, BufferedState(rooms))
        # It tells duplicates, also where nothing asks for neighbours.
        geometry.lookup()
        laid = list(self.asked.find(geometry))
        return Reader(geometry, laid, self.asked.differentiable).contents()

    def give(self, geometry: Geometry) -> int:
        """Find the maps of a scene, unless the status that is given back is not 0."""
        self.fill(geometry)
        if self.graph is None or self.left is None:
            contents = self.run(self.rooms)
            packer = Packer.of(contents.arrays)
        else:
            self.graph.replay()
            contents, packer = self.left
        words = contents.words.tolist()
        if not words[0]:
            contents.give(geometry, words, packer)
        return words[0]


class Shelf:
    """What is recorded on a device. Graphs share memory, so that one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.lock = Lock()
        self._device = device
        self._missed: BoundedCache[int] = BoundedCache(1024)
        # How often each was recorded.
        self._times: BoundedCache[int] = BoundedCache(1024)
        self._held: dict[Place, Recorded] = {}
        self._refused: BoundedCache[bool] = BoundedCache(1024)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None

    def find(self, geometry: Geometry, asked: Asked) -> bool:
        """See by_graph."""
        site = geometry.site
        capacity = _capacity(len(geometry))
        # What lies outside of a box that was told is found by the way, in that very box.
        told = None if site.spatial_shape is None else (site.spatial_shape, site.bounds.batch)
        place = (asked.key, site.stride, told, geometry.dim), capacity
        if self._refused.get(place):
            return False
        held = self._held.get(place)
        if held is None or not held.holds(site.bounds):
            missed = self._missed.keep(place, (self._missed.get(place) or 0) + 1)
            if missed <= _BEFORE:
                return False
            held = self._record(place, asked, geometry, held)
        status = None if held is None else self._given(place, held, geometry)
        if held is not None and status and not status & (DUPLICATE | RANGE):
            held = self._record(place, asked, geometry, held)
            status = None if held is None else self._given(place, held, geometry)
        if status is not None and (not status or status & (DUPLICATE | RANGE)):
            geometry.settle(status)
        return status == 0

    def _given(self, place: Place, held: Recorded, geometry: Geometry) -> int:
        """A scene's maps, in the order in which streams ask for them."""
        # The last to go is the one that was used last.
        self._held[place] = self._held.pop(place)
        if self._done is None:
            return held.give(geometry)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        try:
            return held.give(geometry)
        finally:
            self._done.record(stream)

    def _record(self, place: Place, asked: Asked, geometry: Geometry, before: Recorded | None) -> Recorded | None:
        """A graph for a scene and those like it, in place of the one before; None where there can be none."""
        times = (self._times.get(place) or 0) + 1
        if times > _TIMES:
            # What is there goes on serving the scenes that fit.
            return None
        try:
            made = self._recorded(asked, geometry, place[1], before)
        except CoordinateError:
            # A scene that will not do is told so, and nothing is refused to others; else the box is too large.
            geometry.settle()
            made = None
        except (PumiceError, torch.cuda.OutOfMemoryError):
            made = None
        except RuntimeError as problem:
            warnings.warn(f"kernel maps are found without a CUDA graph: {problem}", RuntimeWarning, stacklevel=7)
            made = None
        if made is None and before is not None:
            # As above, and no other is tried.
            self._times.keep(place, _TIMES)
            return None
        if made is None:
            self._refused.keep(place, True)
            return None
        self._held.pop(place, None)
        self._times.keep(place, times)
        self._held[place] = made
        return self._fitted(place)

    def _fitted(self, place: Place) -> Recorded | None:
        """What was recorded last, when others have made room for it."""
        if self._pool is None:
            return self._held[place]
        most = torch.cuda.get_device_properties(self._device).total_memory // _SHARE
        while sum(one.nbytes for one in self._held.values()) > most:
            oldest = next(iter(self._held))
            del self._held[oldest]
            if oldest == place:
                self._refused.keep(place, True)
        return self._held.get(place)

    def _recorded(self, asked: Asked, geometry: Geometry, capacity: int, before: Recorded | None) -> Recorded:
        site, device = geometry.site, self._device
        box = _box(site)
        if before is not None:
            box = box.with_(before.site.bounds)
        coords = torch.full((capacity, 1 + geometry.dim), -1, dtype=torch.int32, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        planner = CapacityPlanner(
            capacity, len(geometry), _MARGIN, None, None if before is None else before.rooms.capacities
        )
        within = replace(site, bounds=box, batch_size=box.batch)
        made = Recorded(asked, within, coords, count, planner.to_fixed())
        made.fill(geometry)
        status = made.run(planner).words[0]
        if int(status) & (DUPLICATE | RANGE):
            geometry.settle(int(status))
        return made if self._side is None else self._captured(made, self._side)

    def _captured(self, made: Recorded, side: torch.cuda.Stream) -> Recorded:
        """With its graph, behind a pass that compiles what it starts."""
        here = torch.cuda.current_stream(self._device)
        if self._done is None:
            self._done = torch.cuda.Event()
        else:
            here.wait_event(self._done)
        side.wait_stream(here)
        if not self._held:
            # A pool goes with the last of its graphs: no other can be captured into it.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side), recording_constants() as constants:
                made.run(made.rooms)
                side.synchronize()
                before = _memory(self._device)
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    contents = made.run(made.rooms)
                finally:
                    graph.capture_end()
        finally:
            # Also of a pass that failed: the buffers that it reads are this stream's.
            here.wait_stream(side)
        # What the pool had room for is not reserved anew.
        nbytes = max(now - then for now, then in zip(_memory(self._device), before, strict=True))
        return replace(made, graph=graph, left=(contents, Packer.of(contents.arrays)), read=constants, nbytes=nbytes)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory that are reserved, and those that tensors take."""
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


def _beyond(bounds: Bounds) -> Bounds:
    """A box that later scenes are expected in."""
    margins = [extent // _BEYOND + 8 for extent in bounds.extents]
    low = tuple(max(-(2**31), a - m) for a, m in zip(bounds.low, margins, strict=True))
    high = tuple(min(INT32_MAX, b + m) for b, m in zip(bounds.high, margins, strict=True))
    return Bounds(low, high, bounds.batch)


_SHELVES: BoundedCache[Shelf] = BoundedCache(64)
