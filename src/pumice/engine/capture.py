"""A network with its kernel maps as one CUDA graph for each capacity: coordinates and features in, results out."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pumice.coords import Bounds, Geometry, Site
from pumice.coords.cloud import DUPLICATE, RANGE
from pumice.coords.keys import INT32_MAX
from pumice.engine.compare import differ
from pumice.engine.static import (
    Autocast,
    Given,
    Inputs,
    Planner,
    Program,
    Reading,
    Results,
    Rows,
    Settled,
    Shares,
)
from pumice.errors import (
    CaptureError,
    CoordinateError,
    DeviceError,
    DtypeError,
    GeometryError,
    OptionError,
    PumiceError,
    ShapeError,
)
from pumice.ops import SparseTensor

Box = tuple[Sequence[int], Sequence[int]]
"""The least and the greatest coordinate along each axis."""
_SMALLEST = 1024
"""No capacity is smaller, but for the largest."""
_STEP = 128
"""Capacities are multiples of it, but for the largest."""


def capture(
    model: nn.Module,
    example: SparseTensor,
    *,
    max_voxels: int | None = None,
    level_capacity: Shares = None,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    buckets: float | Sequence[int] = 1.5,
    margin: float = 1.5,
    box: Box | None = None,
) -> Captured:
    """`model` in evaluation, its kernel maps included, as one CUDA graph for each of a few capacities.

        fast = pm.capture(net, x, max_voxels=200_000)
        y = fast(x)

    The network's own forward pass runs on buffers: rows past the scene's voxels do not live, and meet nothing. What it
    costs then depends on the scene's voxels and little on the capacity. Nothing waits for the device but one transfer
    of a few numbers behind the graph. On a CPU the same calls run one by one, without a graph, which is for tests.

    Parameters
    ----------
    model: a module in evaluation that takes one SparseTensor. Its parameters are read where they lie: what is written
        into them shows in the next call.
    example: a typical scene with features as they will come. Capacities of inner levels are derived from it.
    max_voxels: the largest capacity; twice the example's voxels without it. A larger scene runs eagerly.
    level_capacity: room of inner levels as a share of the first one's, for all, or by stride ({2: 0.6, 4: 0.3}); by
        default what the example needs, times `margin`, as is the room of what kernels read of the maps. A scene that
        needs more runs eagerly.
    batch: items of a batch, at most; by default the example's.
    dtype: what parameters and features are cast to, in a copy of the model: see refresh(). Beside a half precision
        batch norms stay as they are.
    buckets: the factor between capacities, or the capacities themselves. Each is captured when a scene first needs it,
        or by `ready()`.
    box: the least and the greatest coordinates; a scene outside runs eagerly. By default the example's spatial_shape,
        which later scenes then share, or its own box, half as long again along each axis.

    Raises
    ------
    OptionError (a model in training, options that are not known), DtypeError and ShapeError (no sparse tensor, an
    example without voxels or with more than max_voxels), CaptureError (a model that asks the host for sizes, or whose
    results in buffers are not those of its forward pass on the example), GeometryError (operations whose results have
    as many rows as their values say, such as prune()).
    """
    _check_model(model)
    _check_example(example, max_voxels)
    limits = Limits.of(example, max_voxels, batch, buckets)
    if margin < 1:
        raise OptionError(f"margin is at least 1, found {margin}")
    own = model if dtype is None else cast(model, dtype)
    x = example if dtype is None else example.to(dtype)
    site = _site(example.geometry.site, limits.batch, box)
    program = Program(own, site, Autocast.now(x.device.type))
    found = Captured(program, x, limits, (margin, level_capacity), None if own is model else model)
    found.prepare(len(example))
    return found


@dataclass(frozen=True)
class Limits:
    """capacities: rising. batch: items, at most."""

    capacities: tuple[int, ...]
    batch: int

    @staticmethod
    def of(example: SparseTensor, most: int | None, batch: int | None, buckets: float | Sequence[int]) -> Limits:
        most = max(most or 2 * len(example), 1)
        batch = max(example.batch_size, 1) if batch is None else batch
        if batch < example.batch_size:
            raise OptionError(f"batch={batch}, and the example has {example.batch_size} items")
        return Limits(_capacities(most, buckets), batch)

    def capacity(self, count: int) -> int | None:
        """The smallest that holds so many voxels."""
        return next((capacity for capacity in self.capacities if capacity >= count), None)


def _capacities(most: int, buckets: float | Sequence[int]) -> tuple[int, ...]:
    if isinstance(buckets, Sequence):
        if not buckets or any(not isinstance(b, int) or not 1 <= b <= most for b in buckets):
            raise OptionError(f"buckets takes capacities from 1 to max_voxels={most}, found {buckets!r}")
        return tuple(sorted({*buckets, most}))
    if not 1 < buckets < math.inf:
        raise OptionError(f"buckets takes a factor above 1, or capacities, found {buckets!r}")
    found = [most]
    while (smaller := -(-int(found[-1] / buckets) // _STEP) * _STEP) >= _SMALLEST and smaller < found[-1]:
        found.append(smaller)
    return tuple(reversed(found))


@dataclass(eq=False)
class Bucket:
    """A capacity, made ready. graph: None where there are none, on a CPU. results: those that the graph writes."""

    inputs: Inputs
    rooms: Settled
    graph: torch.cuda.CUDAGraph | None = None
    results: Results | None = None

    def run(self, program: Program) -> Results:
        """The results for what is in the buffers; the next call overwrites them."""
        if self.graph is None or self.results is None:
            return program.run(self.inputs, self.rooms)
        self.graph.replay()
        return self.results


class Captured:
    """A captured network: see `capture`. Not for two threads or two streams at once.

    fallbacks: how many scenes ran eagerly, by reason ("voxels", "box", "batch", "room"). replays: how many did not.
    """

    def __init__(
        self,
        program: Program,
        example: SparseTensor,
        limits: Limits,
        room: tuple[float, Shares],
        source: nn.Module | None,
    ) -> None:
        self._program, self._example, self._limits, self._room, self._source = program, example, limits, room, source
        self._inputs = Inputs.empty(limits.capacities[-1], example.dim, example.channels, example.feats)
        self._buckets: dict[int, Bucket] = {}
        self._reading: Reading | None = None
        self._pool = torch.cuda.graph_pool_handle() if example.device.type == "cuda" else None
        self._lock, self._told = Lock(), set[str]()
        self.fallbacks: Counter[str] = Counter()
        self.replays = 0

    @property
    def capacities(self) -> tuple[int, ...]:
        """All capacities, rising."""
        return self._limits.capacities

    @property
    def prepared(self) -> tuple[int, ...]:
        """Those that are captured."""
        return tuple(sorted(self._buckets))

    def __call__(self, x: SparseTensor | Tensor, coords: Tensor | None = None) -> Any:
        """What the model gives for x, or for features x [N, C] on coords int32 [N, 1+D].

        Results are new tensors; a sparse one on x's coordinates shares x's geometry. No gradients. Features and
        coordinates without a SparseTensor around them are checked by the graph: nothing is read before.

        Raises CoordinateError (duplicates, a scene outside the example's spatial_shape), ShapeError, DtypeError,
        DeviceError and GeometryError for what does not fit the example.
        """
        if self._program.model.training:
            raise OptionError("the model is in training; call model.eval(): what was captured is its evaluation")
        with self._lock:
            if isinstance(x, SparseTensor):
                _check_scene(x, self._example)
                return self._called(x.feats, x.coords, x.geometry)
            if coords is None:
                raise DtypeError(f"a captured network takes a SparseTensor, or feats and coords, found {type(x)}")
            _check_arrays(x, coords, self._example)
            return self._called(x, coords, None)

    def ready(self, *counts: int) -> Captured:
        """Capture now what scenes of these numbers of voxels need; all capacities without any. Returns itself."""
        with self._lock:
            for count in counts or self.capacities:
                self.prepare(count)
        return self

    def refresh(self) -> None:
        """Take the model's parameters and buffers anew: needed after `dtype=`, which made a copy, when they changed.

        Without a copy what is written into them is seen anyway; this captures anew, for parameters that were replaced.
        """
        with self._lock:
            if self._source is None:
                self._buckets.clear()
                return
            mine, theirs = self._program.model, self._source
            with torch.no_grad():
                for own, other in zip(_held(mine), _held(theirs), strict=True):
                    own.copy_(other)

    def explain(self) -> str:
        """The capacities, and those of the levels of each that is captured."""
        how = "CUDA graphs" if self._pool is not None else "no graphs: there is no GPU"
        lines = [f"{len(self.capacities)} capacities up to {self.capacities[-1]} voxels, {how}"]
        for capacity in self.capacities:
            bucket = self._buckets.get(capacity)
            rooms = {} if bucket is None else bucket.rooms.rooms
            levels = [f"{room} at stride {place[2]}" for place, room in rooms.items() if place[0] == "rows"]  # pyright: ignore[reportIndexIssue]
            lines.append(f"  {capacity}: {'not yet captured' if bucket is None else ', '.join(levels) or 'one level'}")
        lines.append(f"{self.replays} scenes so far, and eagerly {dict(self.fallbacks) or 'none'}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        kept = ", ".join(map(str, self.prepared))
        return f"Captured({type(self._program.model).__name__}, capacities={self.capacities}, captured: {kept})"

    # A call

    def _called(self, feats: Tensor, coords: Tensor, geometry: Geometry | None) -> Any:
        count = coords.shape[0]
        problem = self._unfit(count, None if geometry is None else geometry.bounds)
        if problem is not None:
            return self._eagerly(feats, coords, geometry, *problem)
        bucket = self.prepare(count)
        with _on(self._example.device):
            bucket.inputs.fill(feats, coords)
            results = bucket.run(self._program)
            status, *counts = results.words.tolist()
        if geometry is None:
            geometry = Geometry(coords.contiguous(), self._program.site)
        if status & DUPLICATE:
            return self._wrong(geometry)
        if status & RANGE:
            if self._example.spatial_shape is not None:
                return self._wrong(geometry)
            return self._eagerly(feats, coords, None, "box", f"outside {self._box}")
        given = Given(geometry, dict(zip(results.levels, [count, *counts[1:]], strict=True)), results.levels)
        if status:
            return self._eagerly(feats, coords, geometry, "room", _short(given))
        self.replays += 1
        return self._given_back(results, given)

    def _unfit(self, count: int, bounds: Bounds | None) -> tuple[str, str] | None:
        """Why a scene is not for a graph, as far as the host knows: a word and what it says."""
        most, box = self.capacities[-1], self._program.site.bounds
        if count > most:
            return "voxels", f"of {count} voxels, and the largest capacity is max_voxels={most}"
        if bounds is None or not count:
            return None
        if bounds.batch > box.batch:
            return "batch", f"of {bounds.batch} items, and batch={box.batch}"
        if any(a < b for a, b in zip(bounds.low, box.low, strict=True)) or any(
            a > b for a, b in zip(bounds.high, box.high, strict=True)
        ):
            return "box", f"from {bounds.low} to {bounds.high}, outside {self._box}"
        return None

    @property
    def _box(self) -> str:
        box = self._program.site.bounds
        return f"the box {box.low} to {box.high} with {box.batch} items"

    def _eagerly(self, feats: Tensor, coords: Tensor, geometry: Geometry | None, why: str, told: str) -> Any:
        self.fallbacks[why] += 1
        if why not in self._told:
            self._told.add(why)
            message = f"a scene {told}: it runs eagerly, as all such will; this is said once"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        if geometry is None:
            site = self._example.geometry.site
            geometry = Geometry.checked(coords, site.stride, site.spatial_shape)  # pyright: ignore[reportArgumentType]
        return self._program.eager(SparseTensor(feats.to(self._example.dtype), geometry))

    def _wrong(self, geometry: Geometry) -> Any:
        """Raise what is wrong with coordinates, as the eager network does."""
        site = geometry.site
        checked = Geometry.checked(geometry.coords, site.stride, site.spatial_shape, site.batch_size)  # pyright: ignore[reportArgumentType]
        checked.settle()
        raise CoordinateError("coordinates are duplicates, or lie outside the box that was given for them")

    def _given_back(self, results: Results, given: Given) -> Any:
        assert self._reading is not None
        batch = given.geometry.batch_size
        leaves = [
            self._cut(leaf, kind, given, batch) for leaf, kind in zip(results.leaves, self._reading.kinds, strict=True)
        ]
        return pytree.tree_unflatten(leaves, results.spec)

    @staticmethod
    def _cut(leaf: Any, kind: Any, given: Given, batch: int) -> Any:
        """A copy of a result's rows that live."""
        if isinstance(leaf, Rows):
            return SparseTensor(leaf.feats[: given.counts[kind]].clone(), given.level(kind))
        if not isinstance(leaf, Tensor):
            return leaf
        rows = leaf if kind == "whole" else leaf[:batch] if kind == "items" else leaf[: given.counts[kind]]
        return rows.clone()

    # Making ready

    def prepare(self, count: int) -> Bucket:
        """The bucket for so many voxels, planned, checked and captured where it is new."""
        capacity = self._limits.capacity(count)
        if capacity is None:
            raise ShapeError(f"{count} voxels, and the largest capacity is max_voxels={self.capacities[-1]}")
        bucket = self._buckets.get(capacity)
        if bucket is None:
            with _on(self._example.device):
                bucket = self._buckets[capacity] = self._made(capacity)
        return bucket

    def _made(self, capacity: int) -> Bucket:
        inputs, x = self._inputs.first(capacity), _sample(self._example, capacity)
        inputs.fill(x.feats, x.coords)
        margin, shares = self._room
        planner = Planner(capacity, len(x), margin, shares)
        try:
            self._program.run(inputs, planner)
            bucket = Bucket(inputs, Settled(planner.rooms))
            self._check(bucket, x)
            if self._pool is not None:
                self._record(bucket)
        except PumiceError:
            raise
        except RuntimeError as problem:
            raise CaptureError(f"the network cannot be captured for {capacity} voxels: {problem}") from problem
        return bucket

    def _check(self, bucket: Bucket, x: SparseTensor) -> None:
        """Compare with the eager network, with NaN wherever no voxel lives; tell what results are."""
        wanted = pytree.tree_leaves(self._program.eager(x))
        bucket.inputs.feats[len(x) :].fill_(torch.nan)
        results = self._program.run(bucket.inputs, bucket.rooms, poison=True)
        words = results.words.tolist()
        given = Given(x.geometry, dict(zip(results.levels, words[1:], strict=True)), results.levels)
        if words[0]:
            raise CaptureError(f"the example itself has no room: it is a scene {_short(given)}")
        batch = (self._limits.batch, x.batch_size)
        reading = Reading.of(results, words, wanted, batch)
        for number, (leaf, kind, want) in enumerate(zip(results.leaves, reading.kinds, wanted, strict=True)):
            got = self._cut(leaf, kind, given, x.batch_size)
            if told := differ(got, want):
                raise CaptureError(
                    f"result {number} of the captured network is not that of its forward pass on the example: {told}. "
                    "What reduces over all rows of feats, or asks for their number, sees those of the buffer: use layers "
                    "of pumice.nn and operators of pumice.ops"
                )
        self._reading = self._reading or reading

    def _record(self, bucket: Bucket) -> None:
        """Capture the graph, behind a pass that compiles what it starts."""
        device = self._example.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._program.run(bucket.inputs, bucket.rooms)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            bucket.results = self._program.run(bucket.inputs, bucket.rooms)
        bucket.graph = graph


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with parameters and buffers in another dtype; those of batch norms stay wide beside a half precision."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise DtypeError(f"a network is cast to a wider float, found {dtype}")
    found = copy.deepcopy(model)
    for module in found.modules():
        if isinstance(module, _BatchNorm) and dtype.itemsize < 4:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return found


def _held(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _sample(x: SparseTensor, most: int) -> SparseTensor:
    """x, or so many of its voxels at random where it has more, in their order."""
    if len(x) <= most:
        return x
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:most].sort()[0].to(x.device)
    return SparseTensor(x.feats[chosen], Geometry(x.coords[chosen], x.geometry.site))


def _site(site: Site, batch: int, box: Box | None) -> Site:
    """Of the first coordinates: a box that all scenes are expected in."""
    bounds = site.bounds
    if site.spatial_shape is not None:
        if box is not None:
            raise OptionError(f"the example has spatial_shape={site.spatial_shape}, which is the box; leave box out")
        low, high = (0,) * len(bounds.low), tuple(max(0, n - 1) for n in site.spatial_shape)
    elif box is not None:
        low, high = (tuple(int(c) for c in side) for side in box)
        if len(low) != len(bounds.low) or len(high) != len(low) or any(a > b for a, b in zip(low, high, strict=True)):
            raise OptionError(f"box takes the least and the greatest coordinate of each axis, found {box!r}")
    else:
        room = [extent // 4 + 8 for extent in bounds.extents]
        low = tuple(max(-(2**31), a - r) for a, r in zip(bounds.low, room, strict=True))
        high = tuple(min(INT32_MAX, b + r) for b, r in zip(bounds.high, room, strict=True))
    return Site(site.stride, site.spatial_shape, batch, Bounds(low, high, batch))


def _short(given: Given) -> str:
    """What there was no room for."""
    named = [
        f"{needed} voxels at stride {given.levels[path].stride}, where there is room for {given.levels[path].capacity}"
        for path, needed in given.counts.items()
        if needed > given.levels[path].capacity
    ]
    needs = "; ".join(named) or "more entries of its maps than there is room for"
    return f"that needs {needs} (level_capacity, margin)"


def _on(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"capture takes a torch.nn.Module, found {type(model).__name__}")
    training = [name or type(m).__name__ for name, m in model.named_modules() if m.training]
    if training:
        raise OptionError(f"capture is of a model in evaluation, call model.eval(); in training are {training[:3]}")


def _check_example(example: SparseTensor, most: int | None) -> None:
    if not isinstance(example, SparseTensor):
        raise DtypeError(f"the example is a SparseTensor, found {type(example).__name__}")
    example.geometry.known("a capture within a capture")
    if not len(example):
        raise ShapeError("the example has no voxels: it says nothing of how large inner levels are")
    if most is not None and most < len(example):
        raise ShapeError(f"max_voxels={most}, and the example has {len(example)} voxels")


def _check_scene(x: SparseTensor, example: SparseTensor) -> None:
    _check_arrays(x.feats, x.coords, example)
    for name in ("stride", "spatial_shape"):
        if getattr(x, name) != getattr(example, name):
            raise GeometryError(f"x has {name}={getattr(x, name)}, what was captured has {getattr(example, name)}")


def _check_arrays(feats: Tensor, coords: Tensor, example: SparseTensor) -> None:
    if feats.ndim != 2 or feats.shape[1] != example.channels:
        raise ShapeError(
            f"feats are [N, {example.channels}] for this captured network, found shape {list(feats.shape)}"
        )
    if coords.shape != (feats.shape[0], example.dim + 1):
        raise ShapeError(f"coords are [{feats.shape[0]}, {example.dim + 1}], found shape {list(coords.shape)}")
    if coords.dtype != torch.int32:
        raise DtypeError(f"coords are torch.int32, found {coords.dtype}")
    if not feats.is_floating_point():
        raise DtypeError(f"feats are floating point, found {feats.dtype}")
    for name, tensor in (("feats", feats), ("coords", coords)):
        if tensor.device != example.device:
            raise DeviceError(f"{name} are on {tensor.device}, the captured network on {example.device}")
