"""Graphs of a static program, one for each of a few capacities, and the way around them for scenes that do not fit."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pumice.coords.buffer import DUPLICATE, RANGE
from pumice.coords.capacity import CapacityPlanner, FixedCapacities, Shares
from pumice.engine.buffers import Buffers, ModelInput, per_point
from pumice.engine.compare import differ, perturb
from pumice.engine.static import CropContext, LevelOutput, OutputCropping, Path, Results
from pumice.errors import CaptureError, CoordinateError, OptionError, PumiceError, ShapeError
from pumice.ops import SparseTensor
from pumice.ops.tensor import is_sparse
from pumice.runtime.launch import outside_inference_mode, recording_constants

_SMALLEST = 1024
"""No capacity is smaller, but for the largest."""
_WIDENED = 3
"""Times that a capacity is planned anew."""
_STEP = 128
"""Capacities are multiples of it, but for the largest."""
_NOT_YET = -1
"""In place of words, none of which is below 0, while the device has not told them."""
_TURNS = 1000
"""Looks at the words behind which the stream is asked whether it still works."""


@dataclass(frozen=True)
class Limits:
    """capacities: rising, of what ("voxels", "points"). batch: items, at most."""

    what: str
    capacities: tuple[int, ...]
    batch: int

    @staticmethod
    def of(
        what: str, counts: tuple[int, int | None], items: tuple[int, int | None], buckets: float | Sequence[int]
    ) -> Limits:
        """counts, items: what the example has, and what is asked for."""
        most = 2 * counts[0] if counts[1] is None else counts[1]
        if most < counts[0]:
            raise ShapeError(f"max_{what}={most}, and the example has {counts[0]} {what}")
        batch = max(items[0], 1) if items[1] is None else items[1]
        if batch < items[0]:
            raise OptionError(f"the batch is of {batch} items, and the example has {items[0]}")
        return Limits(what, _capacities(most, what, buckets), batch)

    def capacity(self, count: int) -> int | None:
        """The smallest that holds so many."""
        return next((capacity for capacity in self.capacities if capacity >= count), None)


def _capacities(most: int, what: str, buckets: float | Sequence[int]) -> tuple[int, ...]:
    if isinstance(buckets, Sequence):
        if not buckets or any(not isinstance(b, int) or not 1 <= b <= most for b in buckets):
            raise OptionError(f"buckets takes capacities from 1 to max_{what}={most}, found {buckets!r}")
        return tuple(sorted({*buckets, most}))
    if not 1 < buckets < math.inf:
        raise OptionError(f"buckets takes a factor above 1, or capacities, found {buckets!r}")
    found = [most]
    while (smaller := -(-int(found[-1] / buckets) // _STEP) * _STEP) >= _SMALLEST and smaller < found[-1]:
        found.append(smaller)
    return tuple(reversed(found))


class ProgramResult(Protocol):
    """What a pass tells of the levels that it went through; words: as those of Results."""

    @property
    def levels(self) -> Mapping[Path, LevelOutput]: ...

    @property
    def status_words(self) -> Tensor: ...


@dataclass(eq=False)
class CapacityBucket:
    """A capacity, made ready. graph: None where there are none, on a CPU. results: those that the graph writes.

    told: where the graph writes the words of the results, pinned, if it does. read: the parameters and buffers that it
    reads, and constants, held so that their memory stays theirs. widened: how often it was planned anew.
    """

    buffers: Buffers
    rooms: FixedCapacities
    graph: torch.cuda.CUDAGraph | None = None
    results: Any = None
    host_words: Tensor | None = None
    read: Sequence[object] = ()
    widened: int = 0

    def run(self, program: Any) -> Any:
        """The results for what is in the buffers; the next call overwrites them."""
        if self.graph is None or self.results is None:
            return program.run(self.buffers, self.rooms)
        if self.host_words is not None:
            if _NOT_YET in self.host_words.tolist():
                # A call broke off: what its graph tells yet is not this one's.
                torch.cuda.current_stream(self.buffers.device).synchronize()
            self.host_words.fill_(_NOT_YET)
        self.graph.replay()
        return self.results

    def status_words(self, results: ProgramResult) -> Sequence[int]:
        """What the device tells of the pass that `run` began: where the graph writes it, layers may still be at work.

        Raises RuntimeError for what went wrong on the device.
        """
        if self.graph is None or self.host_words is None:
            return results.status_words.tolist()
        stream, turns = torch.cuda.current_stream(self.buffers.device), 0
        while _NOT_YET in (words := self.host_words.tolist()):
            turns += 1
            if turns % _TURNS == 0 and stream.query():
                # It is over, or broken, which the query raises.
                return results.status_words.tolist()
            # Other threads have their turn.
            time.sleep(0)
        return words


@dataclass(frozen=True)
class CapacityMargins:
    """Of what an example needs: `margin` times it; shares: room of inner levels that was given."""

    margin: float
    shares: Shares

    def __post_init__(self) -> None:
        if not 1 <= self.margin < math.inf:
            raise OptionError(f"margin is at least 1, found {self.margin}")


class GraphRunner:
    """A program (static.Program, or one that is run as it is) for scenes of one kind: its capacities, the graphs of
    those that were met, and the way around them.

    fallbacks: how many scenes ran eagerly, by reason ("voxels", "points", "box", "batch", "room"). replays: how many
    did not.
    """

    early = True
    """Whether graphs tell their words where the host reads them, before they are over."""

    def __init__(
        self, program: Any, buffers: Buffers, example: ModelInput, limits: Limits, margins: CapacityMargins
    ) -> None:
        self.program, self.example, self.limits = program, example, limits
        self._buffers, self._margins = buffers, margins
        self.buckets: dict[int, CapacityBucket] = {}
        self._reading: OutputCropping | None = None
        self.device = buffers.device
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._told = set[str]()
        self._stream: torch.cuda.Stream | None = None
        self.fallbacks: Counter[str] = Counter()
        self.replays = 0

    @property
    def graphs(self) -> bool:
        """Whether there are graphs."""
        return self._pool is not None

    def run(self, scene: ModelInput) -> Any:
        """The results of a scene, as new tensors."""
        if self.program.model.training:
            raise OptionError("the model is in training; call model.eval(): what was captured is its evaluation")
        if (problem := self._unfit(scene)) is not None:
            return self._eagerly(scene, *problem)
        with on(self.device):
            bucket = self.bucket(scene.count)
            self._follow()
            scene.fill(bucket.buffers)
            results = bucket.run(self.program)
            # Copies are queued before the device is waited for, where their sizes are known.
            found = self._given_back(scene, results, ()) if self._known(scene) else None
            words = bucket.status_words(results)
            if words[0]:
                why, told = self._refused(scene, results, words)
                found = self._eagerly(scene, why, told)
                if why == "room":
                    self._widen(bucket, scene)
                return found
            self.replays += 1
            return self._given_back(scene, results, words) if found is None else found

    def _follow(self) -> None:
        """Let the current stream come behind the call before, which may be at work on another one."""
        if self._pool is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _unfit(self, scene: ModelInput) -> tuple[str, str] | None:
        """Why a scene is not for a graph, as far as the host knows: a word and what it says."""
        most, box, bounds = self.limits.capacities[-1], self.program.site.bounds, scene.bounds
        if scene.count > most:
            what = self.limits.what
            return what, f"of {scene.count} {what}, and the largest capacity is max_{what}={most}"
        items = max(scene.batch or 0, 0 if bounds is None else bounds.batch)
        if items > box.batch:
            return "batch", f"of {items} items, and batch={box.batch}"
        if bounds is None or not scene.count or box.holds(bounds):
            return None
        return "box", f"from {bounds.low} to {bounds.high}, outside {self._box}"

    def _refused(self, scene: ModelInput, results: ProgramResult, words: Sequence[int]) -> tuple[str, str]:
        """Why a graph has not done a scene, which is to run eagerly. Raises what is an error there, too."""
        status = words[0]
        bounded = self.program.site.spatial_shape is not None
        if status & DUPLICATE or (status & RANGE and bounded):
            scene.tensor().geometry.settle()
            raise CoordinateError("coordinates are duplicates, or outside the box that was given for them")
        if status & RANGE:
            return "box", f"outside {self._box}"
        return "room", short(results, words)

    @property
    def _box(self) -> str:
        box = self.program.site.bounds
        return f"the box {box.low} to {box.high} with {box.batch} items"

    def _eagerly(self, scene: ModelInput, why: str, told: str) -> Any:
        self._tell(why, told)
        x = scene.tensor()
        leaves, spec = pytree.tree_flatten(self.program.eager(x), is_sparse)
        return pytree.tree_unflatten(self._with_points(leaves, x), spec)

    def _tell(self, why: str, told: str) -> None:
        """Count a scene that runs eagerly, and say why, once."""
        self.fallbacks[why] += 1
        if why not in self._told:
            self._told.add(why)
            anew = why == "room"
            then = f"and its capacity is planned anew, up to {_WIDENED} times" if anew else "as all such will"
            message = f"a scene {told}: it runs eagerly, {then}; this is said once"
            warnings.warn(message, RuntimeWarning, stacklevel=6)

    def _with_points(self, leaves: Sequence[Any], x: SparseTensor) -> list[Any]:
        """Results of an eager pass with rows of points where those of a graph have them."""
        kinds = () if self._reading is None else self._reading.kinds
        if "taken" not in kinds:
            return list(leaves)
        return [_by_point(leaf, x) if k == "taken" else leaf for leaf, k in zip(leaves, kinds, strict=True)]

    def _known(self, scene: ModelInput) -> bool:
        """Whether the sizes of all results are known before the device tells them."""
        assert self._reading is not None
        return not any(isinstance(kind, tuple) and (kind or not scene.whole) for kind in self._reading.kinds)

    def _given_back(self, scene: ModelInput, results: Results, words: Sequence[int]) -> Any:
        assert self._reading is not None
        given = self._given(scene, results, words)
        leaves = [given.cut(leaf, kind) for leaf, kind in zip(results.leaves, self._reading.kinds, strict=True)]
        return pytree.tree_unflatten(leaves, results.spec)

    def _given(self, scene: ModelInput, results: Results, words: Sequence[int]) -> CropContext:
        site = self.program.site
        own = scene.geometry(site)
        items = site.batch_size if scene.batch is None else scene.batch
        counts = dict(zip(results.levels, words[1:], strict=True)) if words else {(): scene.count}
        return CropContext(own, site if own is None else own.site, items, scene.count, counts, results.levels)

    def explain(self) -> str:
        """The capacities, and those of the levels of each that is captured."""
        how = "CUDA graphs" if self.graphs else "no graphs: there is no GPU"
        what, capacities = self.limits.what, self.limits.capacities
        lines = [f"{len(capacities)} capacities up to {capacities[-1]} {what}, {how}"]
        for capacity in capacities:
            bucket = self.buckets.get(capacity)
            levels = [] if bucket is None else [f"{n} at stride {place[2]}" for place, n in bucket.rooms.levels()]
            lines.append(f"  {capacity}: {'not yet captured' if bucket is None else ', '.join(levels) or 'one level'}")
        lines.append(f"{self.replays} scenes so far, and eagerly {dict(self.fallbacks) or 'none'}")
        return "\n".join(lines)

    # Making ready

    def prepared(self, count: int) -> CapacityBucket:
        """`bucket`, anew where what it was made of is another one."""
        return self.bucket(count)

    def bucket(self, count: int) -> CapacityBucket:
        """The bucket for so many voxels or points, planned, checked and captured where it is new."""
        capacity = self.limits.capacity(count)
        if capacity is None:
            most, what = self.limits.capacities[-1], self.limits.what
            raise ShapeError(f"{count} {what}, and the largest capacity is max_{what}={most}")
        bucket = self.buckets.get(capacity)
        if bucket is None:
            # What is made in inference serves afterwards.
            with on(self.device), outside_inference_mode():
                bucket = self.buckets[capacity] = self._made(capacity)
        return bucket

    def _widen(self, bucket: CapacityBucket, scene: ModelInput) -> None:
        """Plan a capacity anew for a scene that found no room, some times: examples do not tell all that comes."""
        if bucket.widened == _WIDENED:
            return
        capacity = next(n for n, held in self.buckets.items() if held is bucket)
        try:
            with outside_inference_mode():
                wider = self._made(capacity, scene, bucket.rooms.rooms)
        except (PumiceError, torch.cuda.OutOfMemoryError):
            # level_capacity, or the device, holds it as narrow as it is; the scene has its result.
            bucket.widened = _WIDENED
            return
        wider.widened = bucket.widened + 1
        self.buckets[capacity] = wider

    def _made(
        self, capacity: int, scene: ModelInput | None = None, least: Mapping[Any, int] | None = None
    ) -> CapacityBucket:
        """The bucket of a capacity: planned for as much of the example as fits, or for a scene, with these rooms at
        least."""
        buffers, scene = self._buffers.first(capacity), scene or self.example.sample(capacity)
        scene.fill(buffers)
        planner = CapacityPlanner(capacity, scene.count, self._margins.margin, self._margins.shares, least)
        try:
            bucket = self._planned(buffers, planner)
            self._check(bucket, scene)
            if self._pool is not None:
                self._record(bucket)
        except (PumiceError, torch.cuda.OutOfMemoryError):
            raise
        except RuntimeError as problem:
            raise CaptureError(
                f"the network cannot be captured for {capacity} {self.limits.what}: {problem}"
            ) from problem
        return bucket

    def _planned(self, buffers: Buffers, planner: CapacityPlanner) -> CapacityBucket:
        """A bucket with the rooms that a first pass asks for."""
        self.program.run(buffers, planner)
        return CapacityBucket(buffers, planner.settled())

    def _check(self, bucket: CapacityBucket, scene: ModelInput) -> None:
        """Compare with the eager network, with NaN wherever no voxel lives; tell what results are."""
        x = scene.tensor()
        wanted = pytree.tree_leaves(self.program.eager(x), is_sparse)
        bucket.buffers.poison(scene.count)
        results = self.program.run(bucket.buffers, bucket.rooms, poison=True)
        words = results.status_words.tolist()
        if words[0]:
            raise CaptureError(f"the example itself has no room: it is a scene {short(results, words)}")
        reading = OutputCropping.of(results, words, wanted, (self.limits.batch, x.batch_size))
        self._reading = self._reading or reading
        given = replace(self._given(scene, results, words), items=x.batch_size)
        both = zip(results.leaves, reading.kinds, self._with_points(wanted, x), strict=True)
        for number, (leaf, kind, want) in enumerate(both):
            got = given.cut(leaf, kind)
            if differ(got, want) and (told := differ(got, want, self._again(x, wanted)[number])):
                raise CaptureError(
                    f"result {number} of the captured network is not that of its forward pass on the example: {told}. "
                    "What reduces over all rows of feats, or asks for their number, sees those of the buffer: use "
                    "layers of pumice.nn and operators of pumice.ops"
                )

    def _again(self, x: SparseTensor, wanted: Sequence[Any]) -> list[Any]:
        """What the eager network gives for features that are shaken."""
        leaves = pytree.tree_leaves(self.program.eager(x.replace(perturb(x.feats, wanted))), is_sparse)
        return self._with_points(leaves, x)

    def _record(self, bucket: CapacityBucket) -> None:
        """Capture the graph, behind a pass that compiles what it starts and one in which nothing may wait: a capture
        that fails is not to be mended."""
        side = self._side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.program.run(bucket.buffers, bucket.rooms)
            with _no_wait():
                ran: ProgramResult = self.program.run(bucket.buffers, bucket.rooms)
        torch.cuda.current_stream(self.device).wait_stream(side)
        told = torch.zeros(ran.status_words.shape, dtype=torch.int32, pin_memory=True) if self.early else None
        graph = torch.cuda.CUDAGraph()
        with (
            recording_constants() as constants,
            torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
        ):
            more = {} if told is None else {"host_words": told}
            bucket.results = self.program.run(bucket.buffers, bucket.rooms, **more)
        bucket.host_words = told
        model = self.program.model
        bucket.graph = graph
        bucket.read = [*constants, *(t.detach() for t in (*model.parameters(), *model.buffers()))]


_Kind = TypeVar("_Kind", bound="CapturedModule")


class CapturedModule:
    """What stands before an engine. Not for two streams at once."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._lock = engine, Lock()
        engine.prepared(engine.example.count)

    @property
    def capacities(self) -> tuple[int, ...]:
        """All capacities, rising."""
        return self._engine.limits.capacities

    @property
    def prepared(self) -> tuple[int, ...]:
        """Those that are captured."""
        return tuple(sorted(self._engine.buckets))

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How many scenes ran eagerly, by reason: "voxels" or "points" (more than the largest capacity), "box",
        "batch" (more items than those of the capture; of steps, another number), "room" (of an inner level, or of what
        kernels read of maps)."""
        return self._engine.fallbacks

    @property
    def replays(self) -> int:
        """How many did not."""
        return self._engine.replays

    def ready(self: _Kind, *counts: int) -> _Kind:
        """Capture now what scenes of these sizes need; all capacities without any. Returns itself."""
        with self._lock:
            for count in counts or self.capacities:
                self._engine.prepared(count)
        return self

    def explain(self) -> str:
        """The capacities, and those of the levels of each that is captured."""
        return self._engine.explain()

    def __repr__(self) -> str:
        kept, name = ", ".join(map(str, self.prepared)), type(self._engine.program.model).__name__
        return f"{type(self).__name__}({name}, capacities={self.capacities}, captured: {kept})"


@contextmanager
def _no_wait() -> Iterator[None]:
    """An error where anything of torch waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # It is a prototype, says torch.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _by_point(leaf: Any, x: SparseTensor) -> Tensor:
    return per_point(leaf.feats if isinstance(leaf, SparseTensor) else leaf, x.inverse)


def short(results: ProgramResult, words: Sequence[int]) -> str:
    """What there was no room for."""
    named = [
        f"{needed} voxels at stride {level.stride}, where there is room for {level.capacity}"
        for level, needed in zip(results.levels.values(), words[1:], strict=True)
        if needed > level.capacity
    ]
    needs = "; ".join(named) or "more entries of its maps than there is room for"
    return f"that needs {needs} (level_capacity, margin)"


def on(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
