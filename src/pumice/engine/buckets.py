"""CUDA graphs of a static program, one per capacity; scenes that do not fit run eagerly.

A graph is recorded in the caller's thread, at the end of a call that found none and ran eagerly. Recording in another
thread is unsafe: while torch captures a graph, random numbers on the device raise in all other threads. Kernels are
compiled in the background.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pumice.coords import as_axes
from pumice.coords.buffer import DUPLICATE, RANGE
from pumice.coords.capacity import CapacityPlanner, FixedCapacities, Shares
from pumice.engine.buffers import Buffers, ModelInput, per_point
from pumice.engine.compare import differ, perturb
from pumice.engine.static import CropContext, Kind, Results, kinds_of
from pumice.errors import CaptureError, CoordinateError, OptionError, PumiceError, ShapeError
from pumice.ops import SparseTensor
from pumice.ops.tensor import is_sparse
from pumice.runtime.compile import CompiledBeside
from pumice.runtime.launch import outside_inference_mode, record_graph

_SMALLEST = 1024  # Smallest capacity, unless the largest is below it
_MAX_REPLANS = 3  # How often a capacity may be re-planned
_STEP = 128  # Capacities are multiples of this, except the largest
_PENDING = -1  # Placeholder for status words that the device has not written yet; written words are >= 0
_POLLS_PER_QUERY = 1000  # Polls of the status words between two checks that the stream is still running


@dataclass(frozen=True)
class Buckets:
    """Limits of input. capacities: ascending, in `what` ("voxels" or "points"). batch: largest number of items."""

    what: str
    capacities: tuple[int, ...]
    batch: int

    @staticmethod
    def of(
        what: str, counts: tuple[int, int | None], items: tuple[int, int | None], buckets: float | Sequence[int]
    ) -> Buckets:
        """counts, items: (the example's, requested limit or None)."""
        most = 2 * counts[0] if counts[1] is None else as_axes(counts[1], 1, f"max_{what}", 0)[0]
        if most < counts[0]:
            raise ShapeError(f"max_{what}={most}, but the example has {counts[0]} {what}")
        batch = max(items[0], 1) if items[1] is None else as_axes(items[1], 1, "batch", 0)[0]
        if batch < items[0]:
            raise OptionError(f"batch={batch} allows {batch} items, but the example has {items[0]}")
        return Buckets(what, _capacities(most, what, buckets), batch)

    def capacity(self, count: int) -> int | None:
        """Smallest capacity that holds `count`, or None."""
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


@dataclass(eq=False)
class CapacityBucket:
    """One planned capacity. graph: the captured graph, None on a CPU. results: the graph's output buffers.

    host_words: pinned copy of the status words, written by the graph, or None. kept_alive: parameters, buffers and
    constants that the graph reads. replans: number of re-plannings so far.
    """

    buffers: Buffers
    capacities: FixedCapacities
    graph: torch.cuda.CUDAGraph | None = None
    results: Any = None
    host_words: Tensor | None = None
    kept_alive: Sequence[object] = ()
    replans: int = 0

    def run(self, program: Any) -> Any:
        """Results for the scene in the buffers; overwritten by the next call."""
        if self.graph is None or self.results is None:
            return program.run(self.buffers, self.capacities)
        if self.host_words is not None:
            if _PENDING in self.host_words.tolist():
                # An interrupted call's graph may still write its own status words.
                torch.cuda.current_stream(self.buffers.device).synchronize()
            self.host_words.fill_(_PENDING)
        self.graph.replay()
        return self.results

    def status_words(self, results: Any) -> Sequence[int]:
        """Status words of the pass started by `run`; with host_words, layers may still be running on return. Raises
        RuntimeError for an error on the device."""
        if self.graph is None or self.host_words is None:
            return results.status_words.tolist()
        stream, turns = torch.cuda.current_stream(self.buffers.device), 0
        while _PENDING in (words := self.host_words.tolist()):
            turns += 1
            if turns % _POLLS_PER_QUERY == 0 and stream.query():
                # The stream has finished; query() raises if it failed.
                return results.status_words.tolist()
            # Yield to other threads.
            time.sleep(0)
        return words


@dataclass(frozen=True)
class CapacityMargins:
    """Margins of capacities. margin: factor on what the example needs. shares: level capacities set by the user."""

    margin: float
    shares: Shares

    def __post_init__(self) -> None:
        if not 1 <= self.margin < math.inf:
            raise OptionError(f"margin must be at least 1, found {self.margin}")
        if not isinstance(self.shares, Mapping | int | float | None):
            raise OptionError(f"level_capacity takes a share, or shares by stride, found {self.shares!r}")


class GraphRunner:
    """Runs a static program on scenes: by the graph of a scene's capacity, or eagerly. fallbacks: eager scenes by
    reason ("voxels", "points", "range", "batch", "room", "capture"). replays: scenes by graphs."""

    early_status = True
    """True if graphs write their status words to the host before they finish."""
    program: Any
    example: ModelInput
    limits: Buckets
    replays: int

    def __init__(
        self, program: Any, buffers: Buffers, example: ModelInput, limits: Buckets, margins: CapacityMargins
    ) -> None:
        self.program, self.example, self.limits = program, example, limits
        self._buffers, self._margins = buffers, margins
        self.buckets: dict[int, CapacityBucket] = {}
        # How results are cropped to a scene, one for each.
        self._kinds: tuple[Kind, ...] = ()
        # True once one capacity's results were compared: all capacities run one program.
        self._checked = False
        self.device: torch.device = buffers.device
        self._pool: Any = None
        self.clear()
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._warned = set[str]()
        # Shape of the status words, once a capacity was captured.
        self._words: torch.Size | None = None
        self._stream: torch.cuda.Stream | None = None
        self._beside = CompiledBeside()
        # Capacities that cannot be captured.
        self._refused = set[int]()
        self.fallbacks: Counter[str] = Counter()
        self.replays = 0

    def clear(self) -> None:
        """Drop all graphs."""
        self.buckets.clear()
        # torch rejects a pool whose graphs are all freed until their memory is released.
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def graphs(self) -> bool:
        """True if CUDA graphs are used."""
        return self._pool is not None

    def run(self, scene: ModelInput) -> Any:
        """Results of a scene, as new tensors."""
        if self.program.model.training:
            raise OptionError("the model was captured in evaluation mode and is in training mode; call model.eval()")
        if (problem := self._host_rejection(scene)) is not None:
            self._warn_once(*problem)
            return self._run_eagerly(scene)
        with device_context(self.device):
            capacity = self.limits.capacity(scene.count)
            assert capacity is not None
            bucket = self.buckets.get(capacity)
            self._wait_for_previous_call()
            if bucket is None:
                self.fallbacks["capture"] += 1
                found = self._run_eagerly(scene)
                self._make_ready(capacity, self._bucket_for)
                return found
            scene.fill(bucket.buffers)
            results = bucket.run(self.program)
            # If all result sizes are known, queue the copies before the host synchronisation.
            found = self._cropped_results(scene, results, ()) if self._sizes_known(scene) else None
            words = bucket.status_words(results)
            if words[0]:
                why, detail = self._device_rejection(scene, results, words)
                self._warn_once(why, detail)
                found = self._run_eagerly(scene)
                if why == "room":
                    self._make_ready(capacity, lambda _: self._replan(bucket, scene))
                return found
            self.replays += 1
            return self._cropped_results(scene, results, words) if found is None else found

    def _make_ready(self, capacity: int, build: Callable[[int], object]) -> None:
        """Build a bucket at the end of a call. If kernels are missing, they are compiled in the background, and a later
        call builds the bucket."""
        if capacity in self._refused:
            return
        try:
            self._beside.run(capacity, partial(build, capacity))
        except (PumiceError, torch.cuda.OutOfMemoryError) as problem:
            self._refused.add(capacity)
            warnings.warn(f"scenes of this size run eagerly: {problem}", RuntimeWarning, stacklevel=4)

    def _wait_for_previous_call(self) -> None:
        """Make the current stream wait for the previous call, which may run on another stream."""
        if self._pool is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _host_rejection(self, scene: ModelInput) -> tuple[str, str] | None:
        """Reason (key, description) why a scene cannot use a graph, as far as the host knows, or None."""
        most = self.limits.capacities[-1]
        if scene.count > most:
            what = self.limits.what
            return what, f"of {scene.count} {what} exceeds the largest capacity max_{what}={most}"
        return self._batch_rejection(scene.batch if self._reads_batch() else scene.known_batch)

    def _reads_batch(self) -> bool:
        """True if results depend on the number of batch items. It is then read before the graph runs: a later read
        would wait for the graph's layers."""
        return any(kind == "items" or (isinstance(kind, tuple) and len(kind) > 0) for kind in self._kinds)

    def _batch_rejection(self, items: int | None) -> tuple[str, str] | None:
        most = self.program.site.batch_size
        return None if items is None or items <= most else ("batch", f"of {items} items exceeds batch={most}")

    def _device_rejection(self, scene: ModelInput, results: Any, words: Sequence[int]) -> tuple[str, str]:
        """Reason (key, description) why the graph rejected a scene. Raises if it is invalid in eager mode, too."""
        status = words[0]
        bounded = self.program.site.spatial_shape is not None
        if status & DUPLICATE or (status & RANGE and bounded):
            scene.tensor().geometry.settle()
        if status & RANGE:
            return self._batch_rejection(scene.batch) or ("range", self._range_message)
        if status & DUPLICATE:
            raise CoordinateError("coordinates are duplicated")
        return "room", overflow_message(results, words)

    @property
    def _range_message(self) -> str:
        bounds = self.program.site.bounds
        return f"has coordinates beyond {bounds.low} to {bounds.high}, or items beyond batch={bounds.batch}"

    def _run_eagerly(self, scene: ModelInput) -> Any:
        x = scene.tensor()
        leaves, spec = pytree.tree_flatten(self.program.forward(x), is_sparse)
        return pytree.tree_unflatten(self._gathered_to_points(leaves, x), spec)

    def _warn_once(self, why: str, detail: str) -> None:
        """Count an eager scene; warn once per reason."""
        self.fallbacks[why] += 1
        if why not in self._warned:
            self._warned.add(why)
            widens = why == "room"
            then = (
                f"and its capacity is re-planned, up to {_MAX_REPLANS} times" if widens else "as will all such scenes"
            )
            message = f"a scene {detail}: it runs eagerly, {then}; this warning is shown once"
            warnings.warn(message, RuntimeWarning, stacklevel=6)

    def _gathered_to_points(self, leaves: Sequence[Any], x: SparseTensor) -> list[Any]:
        """Eager results, gathered to one row per point where the graph returns rows per point."""
        if "taken" not in self._kinds:
            return list(leaves)
        return [_by_point(leaf, x) if k == "taken" else leaf for leaf, k in zip(leaves, self._kinds, strict=True)]

    def _sizes_known(self, scene: ModelInput) -> bool:
        """True if the sizes of all results are known without a host synchronisation."""
        return not any(isinstance(kind, tuple) and (kind or not scene.whole) for kind in self._kinds)

    def _cropped_results(self, scene: ModelInput, results: Results, words: Sequence[int]) -> Any:
        given = self._crop_context(scene, results, words)
        leaves = [given.crop(leaf, kind) for leaf, kind in zip(results.leaves, self._kinds, strict=True)]
        return pytree.tree_unflatten(leaves, results.spec)

    def _crop_context(self, scene: ModelInput, results: Results, words: Sequence[int]) -> CropContext:
        site = self.program.site
        own = scene.geometry(site)
        # Read from the device only where a result depends on it.
        items = scene.batch if "items" in self._kinds else None
        items = site.batch_size if items is None else items
        counts = dict(zip(results.levels, words[1:], strict=True)) if words else {(): scene.count}
        return CropContext(own, site, items, scene.count, counts, results.levels)

    def explain(self) -> str:
        """Text: the capacities, with the level capacities of captured ones."""
        how = "CUDA graphs" if self.graphs else "no graphs: there is no GPU"
        what, capacities = self.limits.what, self.limits.capacities
        lines = [f"{len(capacities)} capacities up to {capacities[-1]} {what}, {how}"]
        for capacity in capacities:
            bucket = self.buckets.get(capacity)
            levels = [] if bucket is None else [f"{n} at stride {place[2]}" for place, n in bucket.capacities.levels()]
            lines.append(f"  {capacity}: {'not yet captured' if bucket is None else ', '.join(levels) or 'one level'}")
        lines.append(f"{self.replays} scenes by graphs; without: {dict(self.fallbacks) or 'none'}")
        return "\n".join(lines)

    def prepared(self, count: int) -> CapacityBucket:
        """Like `bucket`; subclasses first drop graphs that are out of date."""
        return self.bucket(count)

    def bucket(self, count: int) -> CapacityBucket:
        """Bucket for `count` voxels or points, built if missing."""
        capacity = self.limits.capacity(count)
        if capacity is None:
            most, what = self.limits.capacities[-1], self.limits.what
            raise ShapeError(f"{count} {what} exceed the largest capacity max_{what}={most}")
        return self._bucket_for(capacity)

    def _bucket_for(self, capacity: int) -> CapacityBucket:
        bucket = self.buckets.get(capacity)
        if bucket is None:
            # The buffers must be usable outside inference mode later.
            with device_context(self.device), outside_inference_mode():
                bucket = self.buckets[capacity] = self._build_bucket(capacity)
        return bucket

    def _replan(self, bucket: CapacityBucket, scene: ModelInput) -> None:
        """Re-plan a capacity for a scene that overflowed it, at most _MAX_REPLANS times."""
        if bucket.replans == _MAX_REPLANS:
            return
        capacity = next(n for n, held in self.buckets.items() if held is bucket)
        try:
            with outside_inference_mode():
                wider = self._build_bucket(capacity, scene, bucket.capacities.capacities)
        except (PumiceError, torch.cuda.OutOfMemoryError):
            # level_capacity or device memory forbids more; the scene itself still runs eagerly.
            bucket.replans = _MAX_REPLANS
            return
        wider.replans = bucket.replans + 1
        self.buckets[capacity] = wider

    def _build_bucket(
        self, capacity: int, scene: ModelInput | None = None, least: Mapping[Any, int] | None = None
    ) -> CapacityBucket:
        """Build a bucket, planned for `scene` or parts of the example that fit; least: lower bounds by buffer."""
        buffers = self._buffers.first(capacity)
        try:
            bucket = None
            for each in self._examples(capacity) if scene is None else [scene]:
                least = least if bucket is None else bucket.capacities.capacities
                each.fill(buffers)
                planner = CapacityPlanner(capacity, each.count, self._margins.margin, self._margins.shares, least)
                bucket, scene = self._plan_bucket(buffers, planner), each
            assert bucket is not None and scene is not None
            if not self._checked:
                self._check(bucket, scene)
                self._checked = True
            if self._pool is not None:
                self._capture(bucket)
        except (PumiceError, torch.cuda.OutOfMemoryError):
            raise
        except RuntimeError as problem:
            raise CaptureError(
                f"the network cannot be captured for {capacity} {self.limits.what}: {problem}"
            ) from problem
        return bucket

    def _examples(self, capacity: int) -> list[ModelInput]:
        """The example if it fits, else two subsets: a dense one, which has most neighbours, and a thin one, which has
        most voxels on coarser levels."""
        dense = self.example.sample(capacity, near=True)
        return [dense] if dense is self.example else [dense, self.example.sample(capacity)]

    def _plan_bucket(self, buffers: Buffers, planner: CapacityPlanner) -> CapacityBucket:
        """Bucket with the buffer capacities that a first pass requests."""
        self.program.run(buffers, planner)
        return CapacityBucket(buffers, planner.to_fixed())

    def _check(self, bucket: CapacityBucket, scene: ModelInput) -> None:
        """Compare the results with eager ones, padding rows filled with NaN, and classify the results' axes. Raises
        CaptureError."""
        x = scene.tensor()
        wanted = pytree.tree_leaves(self.program.forward(x), is_sparse)
        bucket.buffers.poison(scene.count)
        results = self.program.run(bucket.buffers, bucket.capacities, poison=True)
        words = results.status_words.tolist()
        if words[0]:
            if words[0] & RANGE:
                raise CaptureError(f"the example {self._range_message}")
            raise CaptureError(f"the example exceeds the capacity: it {overflow_message(results, words)}")
        self._kinds = kinds_of(results, words, wanted, (self.limits.batch, x.batch_size))
        given = replace(self._crop_context(scene, results, words), items=x.batch_size)
        both = zip(results.leaves, self._kinds, self._gathered_to_points(wanted, x), strict=True)
        for number, (leaf, kind, want) in enumerate(both):
            got = given.crop(leaf, kind)
            if differ(got, want) and (detail := differ(got, want, self._perturbed_results(x, wanted)[number])):
                raise CaptureError(
                    f"result {number} of the captured network differs from its forward pass on the example: {detail}. "
                    "Operations that reduce over the rows of feats, or read their number, include padding rows: use "
                    "layers of pumice.nn and operators of pumice.ops"
                )

    def _perturbed_results(self, x: SparseTensor, wanted: Sequence[Any]) -> list[Any]:
        """Eager results for perturbed features."""
        leaves = pytree.tree_leaves(self.program.forward(x.replace(perturb(x.feats, wanted))), is_sparse)
        return self._gathered_to_points(leaves, x)

    def _capture(self, bucket: CapacityBucket) -> None:
        """Capture the graph; the first one after a pass that forbids host synchronisation."""
        side = self._side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream(self.device))
        if self._words is None:
            with torch.cuda.stream(side), forbid_synchronisation():
                ran: Results = self.program.run(bucket.buffers, bucket.capacities)
            self._words = ran.status_words.shape
        host = torch.zeros(self._words, dtype=torch.int32, pin_memory=True) if self.early_status else None
        more = {} if host is None else {"host_words": host}
        bucket.graph, bucket.results, constants = record_graph(
            lambda: self.program.run(bucket.buffers, bucket.capacities, **more), side, self._pool
        )
        torch.cuda.current_stream(self.device).wait_stream(side)
        bucket.host_words = host
        model = self.program.model
        bucket.kept_alive = [*constants, *(t.detach() for t in (*model.parameters(), *model.buffers()))]


_Kind = TypeVar("_Kind", bound="CapturedModule")


class CapturedModule:
    """Base class of captured models. Not safe to call from two streams at once."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._lock = engine, Lock()
        engine.prepared(engine.example.count)

    @property
    def capacities(self) -> tuple[int, ...]:
        """All capacities, ascending."""
        return self._engine.limits.capacities

    @property
    def prepared(self) -> tuple[int, ...]:
        """Captured capacities, ascending."""
        return tuple(sorted(self._engine.buckets))

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of scenes that ran without a graph, by reason: "voxels" or "points" (above the largest capacity),
        "range" (coordinates too far from the origin), "batch" (too many items; for steps, another number of items),
        "room" (a coarser level or a kernel map overflowed its capacity), "capture" (the capacity was not captured
        yet)."""
        return self._engine.fallbacks

    @property
    def replays(self) -> int:
        """Number of scenes that ran by a graph."""
        return self._engine.replays

    def ready(self: _Kind, *counts: int) -> _Kind:
        """Capture the capacities for scenes of these sizes now, by default all capacities. Returns self."""
        with self._lock:
            for count in counts or self.capacities:
                self._engine.prepared(count)
        return self

    def explain(self) -> str:
        """Text: the capacities, with the level capacities of captured ones."""
        return self._engine.explain()

    def __repr__(self) -> str:
        kept, name = ", ".join(map(str, self.prepared)), type(self._engine.program.model).__name__
        return f"{type(self).__name__}({name}, capacities={self.capacities}, captured: {kept})"


@contextmanager
def forbid_synchronisation() -> Iterator[None]:
    """Raise on any host synchronisation by torch."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that this mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _by_point(leaf: Any, x: SparseTensor) -> Tensor:
    return per_point(leaf.feats if isinstance(leaf, SparseTensor) else leaf, x.inverse)


def overflow_message(results: Any, words: Sequence[int]) -> str:
    """Message naming the capacities that overflowed."""
    named = [
        f"{needed} voxels at stride {level.stride}, above the capacity of {level.capacity}"
        for level, needed in zip(results.levels.values(), words[1:], strict=True)
        if needed > level.capacity
    ]
    needs = "; ".join(named) or "more kernel map entries than the capacity"
    return f"needs {needs} (see level_capacity, margin)"


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
