"""Geometry: a set of voxel coordinates with its neighbour search structure and its cache of kernel maps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pumice.coords.box import UNKNOWN, Bounds, check_form
from pumice.coords.buffer import CoordBuffer, read, with_own_storage
from pumice.coords.capacity import BufferedState
from pumice.coords.codes import morton_argsort
from pumice.coords.grid import GridSpec, Stride, VoxelFrame, tidy
from pumice.coords.kernel_map import KernelMap
from pumice.coords.lookup import Lookup, MapSchedule, explain, find, lookup_of
from pumice.coords.relation import Relation, as_axes
from pumice.errors import CoordinateError, DtypeError, GeometryError, ShapeError
from pumice.runtime.launch import outside_inference_mode, unwrapped
from pumice.runtime.streams import PendingEvents


@dataclass(eq=False)
class TraceOrigin:
    """Origin of a geometry made under torch.compile or torch.export: the relations `steps` derive it from `root`, a
    geometry that existed before tracing (None: the coordinates were made in the traced function).

    trace: identifies the trace. given: the input geometry that this one replaces. box: bounding box, int64 [1 + 2D] on
    the CPU, see coords.traced_ops; None until first used."""

    trace: str
    root: Geometry | None = None
    steps: tuple[Any, ...] = ()
    given: Geometry | None = None
    box: Tensor | None = None


class Geometry:
    """Distinct integer coordinates (batch, axes...), int32 [N, 1+D], D from 1 to 4, and their cached kernel maps.

    Immutable and compared by identity: SparseTensors on the same coordinates share one geometry and its maps.
    Coordinates may be negative unless `spatial_shape` bounds them."""

    searched: bool

    def __init__(self, coords: Tensor, site: GridSpec, inverse: Tensor | None = None, settled: bool = True) -> None:
        self._coords = coords = unwrapped(coords)
        self._site = site
        self._inverse = None if inverse is None else unwrapped(inverse)
        # Filled by coords.build. Maps by (relation, target), with their output geometry or None for this geometry (a
        # reference cycle would keep device memory until garbage collection); levels: outputs by outputs.level_key.
        self._maps: dict[Any, tuple[KernelMap, Geometry | None]] = {}
        self.levels: dict[Any, Geometry] = {}
        self._parent: weakref.ref[Geometry] | None = None
        self._cloud: CoordBuffer | None = None
        self._lookup: Lookup | None = None
        self._schedule: MapSchedule | None = None
        self._settled = settled
        # False until `learn` checks the bounding box.
        self._seen = True
        # Version counter, to detect in-place writes. None: not checked (buffers, traced and inference tensors).
        self._version = None if torch.compiler.is_compiling() or coords.is_inference() else coords._version
        # Set by pumice.ops.prepare: compiled code may use the cached maps.
        self.prepared = False
        # Requests whose maps pumice.ops.prepare has built.
        self.prepared_requests: set[Hashable] = set()
        # Set by pumice.ops.prepare: (maps that the network's layers requested, level of this geometry) or None.
        self.asked: Any = None
        self.trail: TraceOrigin | None = None
        self._buffered: BufferedState | None = None
        self._valid_mask: Tensor | None = None
        # True if the status word of a buffer already reports duplicates and out-of-bounds coordinates.
        self.searched = False
        # In a captured network: events after which "coords" and search results ("found") may be read.
        self.pending_events: PendingEvents = PendingEvents(coords.device)

    @staticmethod
    def in_buffer(
        cloud: CoordBuffer, site: GridSpec, buffered: BufferedState, inverse: Tensor | None = None
    ) -> Geometry:
        """A geometry of a buffer's valid rows. len() is the capacity; errors only set bits of the buffer's status."""
        geometry = Geometry(cloud.coords, site, inverse)
        geometry._cloud, geometry._buffered, geometry._version = cloud, buffered, None
        return geometry

    @staticmethod
    def checked(
        coords: Tensor,
        stride: int | Sequence[int] = 1,
        spatial_shape: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        dim: int | None = None,
    ) -> Geometry:
        """A geometry with a checked copy of a user's coordinates. dim: D; None: the number of columns less one.

        On a GPU, if D > 1, there is no host synchronisation: errors for duplicates and out-of-bounds coordinates are
        raised later, when sizes of kernel maps (`settle`) or the bounding box (`site`) are read.

        Raises DtypeError (not int32), ShapeError (not [N, 1+D] with D from 1 to 4, or lengths that do not match),
        CoordinateError (duplicates, negative batch index, outside `spatial_shape` or `batch_size`, 2**31 rows or more).
        Warns if the batch column looks like a coordinate, unless `batch_size` is given.
        """
        coords, strides, shape = described(coords, stride, spatial_shape, dim)
        # Copy: later writes to the caller's tensor must not invalidate cached maps.
        with outside_inference_mode():
            coords = coords.clone(memory_format=torch.contiguous_format)
        items = -1 if batch_size is None else as_axes(batch_size, 1, "batch_size", 0)[0]
        waits = coords.is_cuda and len(coords) > 0 and coords.shape[1] > 2 and (shape is None or batch_size is None)
        bounds = UNKNOWN if waits else bounds_of(coords, shape, batch_size)
        geometry = Geometry(coords, GridSpec(strides, shape, items, UNKNOWN), settled=False)
        geometry._seen = False
        if not waits:
            geometry.learn(bounds)
        if not coords.is_cuda:
            geometry.settle()
        return geometry

    @property
    def maps(self) -> dict[Any, tuple[KernelMap, Geometry | None]]:
        """Cached (kernel map, output geometry) by (relation, target). Raises as `require_unwritten`."""
        # Inlined, as every layer reads this.
        if not is_dynamo_compiling() and self._version is not None and self._version != self._coords._version:
            self.require_unwritten()
        return self._maps

    def require_unwritten(self) -> None:
        """Raise CoordinateError if the coordinates were written to in place: cached maps would be stale."""
        if self._version is None or torch.compiler.is_compiling() or self._version == self._coords._version:
            return
        raise CoordinateError(
            f"the {len(self)} coordinates of a tensor were written to in place; they are constant: write to "
            "x.coords.clone() and make a new SparseTensor of it"
        )

    def keep(self, relation: Relation, target: Geometry | None, kept: tuple[KernelMap, Geometry | None]) -> None:
        """Cache (kernel map, outputs); outputs made without a target get this geometry as `parent`."""
        self._maps[relation, target] = kept
        if target is None and kept[1] is not None:
            kept[1]._parent = weakref.ref(self)

    @property
    def parent(self) -> Geometry | None:
        """The input geometry of the convolution or pooling that made these coordinates, if alive; else None."""
        return None if self._parent is None else self._parent()

    @property
    def start(self) -> Geometry:
        """The root of the trail; the geometry itself without one."""
        return self if self.trail is None or self.trail.root is None else self.trail.root

    @property
    def steps(self) -> tuple[Any, ...]:
        """Relations from `start` to this geometry."""
        return () if self.trail is None else self.trail.steps

    @property
    def coords(self) -> Tensor:
        """int32 [N, 1+D], in units of this level's voxels."""
        if self.pending_events:
            self._wait_for("coords")
        return self._coords

    @property
    def site(self) -> GridSpec:
        """The metadata; an unknown bounding box is read from the device. Raises as `learn`."""
        if self._site.bounds.batch < 0:
            # Not read yet, or tracing.
            self.learn(Bounds.of(self._coords))
        return self._site

    def learn(self, bounds: Bounds) -> None:
        """Store the bounding box. Raises CoordinateError if it exceeds the user's spatial_shape or batch_size; warns if
        the batch column looks like a coordinate, unless batch_size was given."""
        items = self._site.batch_size
        if not self._seen:
            _check_range(bounds, self._site.spatial_shape, None if items < 0 else items)
            if items < 0:
                _warn_of_batch(bounds)
        self._seen = True
        # Faster than dataclasses.replace.
        site = self._site
        self._site = GridSpec(site.stride, site.spatial_shape, bounds.batch if items < 0 else items, bounds, site.frame)

    @property
    def outline(self) -> GridSpec:
        """The metadata without reading the device: bounds may be UNKNOWN, batch_size -1."""
        return self._site

    @property
    def settled(self) -> bool:
        """True if duplicates and bounds were checked, or need no check."""
        return self._settled

    @property
    def stride(self) -> Stride:
        return self._site.stride

    @property
    def spatial_shape(self) -> tuple[int, ...] | None:
        return self._site.spatial_shape

    @property
    def batch_size(self) -> int:
        items = self._site.batch_size
        if items >= 0:
            return items
        return torch.ops.pumice.items(self._coords).shape[0] if torch.compiler.is_compiling() else self.site.batch_size

    @property
    def bounds(self) -> Bounds:
        return self.site.bounds

    @property
    def frame(self) -> VoxelFrame | None:
        return self._site.frame

    @property
    def inverse(self) -> Tensor | None:
        """int64 [P]: voxel row of each voxelised point, -1 for dropped points; None if not made from points."""
        return self._inverse

    @property
    def buffered(self) -> BufferedState | None:
        """State of coordinates in a buffer of fixed capacity (in a captured network), else None."""
        return self._buffered

    @property
    def trains(self) -> bool:
        """True if the coordinates are in a buffer and gradients are required."""
        return self._buffered is not None and self._buffered.trains

    @property
    def valid_mask(self) -> Tensor:
        """bool [N, 1]: True for valid rows; all of them outside captured networks."""
        if self._valid_mask is None:
            with outside_inference_mode():
                self._valid_mask = self.cloud.valid_mask()[:, None]
        return self._valid_mask

    def require_host_size(self, what: str) -> None:
        """Raise GeometryError if only the device knows the number of voxels. what: the caller, for the message."""
        if self._buffered is not None:
            raise GeometryError(f"{what}: the number of voxels is not available on the host in a captured network")

    @property
    def dim(self) -> int:
        return self._coords.shape[1] - 1

    @property
    def device(self) -> torch.device:
        return self._coords.device

    def __len__(self) -> int:
        return self._coords.shape[0]

    def __repr__(self) -> str:
        return (
            f"Geometry({len(self)} voxels, D={self.dim}, stride={self.stride}, batch_size={self.batch_size}, "
            f"spatial_shape={self.spatial_shape}, device={str(self.device)!r}, {len(self._maps)} maps)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Maps are not pickled, but rebuilt on demand.
        self.settle()
        return _rebuild, (with_own_storage(self._coords), *_plain(self.site), self._inverse)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Geometry:
        """The geometry on `device`, with all cached maps and levels."""
        if torch.device(device) == self.device:
            return self
        return _move(self, device, non_blocking, {})

    def pin_memory(self) -> Geometry:
        inverse = None if self._inverse is None else self._inverse.pin_memory()
        return Geometry(self._coords.pin_memory(), self.site, inverse, self._settled)

    @property
    def cloud(self) -> CoordBuffer:
        """The coordinates as a buffer, for kernels."""
        self._wait_for("coords")
        if self._cloud is None:
            with outside_inference_mode():
                self._cloud = CoordBuffer.of(self._coords, self.bounds)
        return self._cloud

    def _wait_for(self, what: str) -> None:
        """Make the current stream wait for "coords" or "found"."""
        if self.pending_events:
            self.pending_events.wait_for(what)

    def wait_for_status(self) -> None:
        """Make the current stream wait for the status words of these coordinates and their maps."""
        self.pending_events.wait_for_status()
        for found, _ in self.maps.values():
            if found.buffered is not None:
                found.buffered.pending_events.wait_for_status()

    def wait_for_all(self) -> None:
        """Make the current stream wait for all side streams at the end of a program, also for maps no layer read."""
        self.pending_events.wait_for_all()
        for found, _ in self.maps.values():
            if found.buffered is not None:
                found.buffered.pending_events.wait_for_all()

    def lookup(self, schedule: MapSchedule | None = None) -> Lookup:
        """The cached search structure from coordinates to rows.

        schedule: replaces the cost model's choice, for later calls too. Raises OptionError if it is not available."""
        self._wait_for("found")
        self.require_unwritten()
        if self._lookup is None or schedule not in (None, self._schedule):
            with outside_inference_mode():
                found = lookup_of(self.cloud, schedule)
            if not self._settled and not self._coords.is_cuda:
                self.settle(int(self.cloud.status))
            self._lookup, self._schedule, self.searched = found, schedule, True
        return self._lookup

    def search(self) -> None:
        """Report duplicates and out-of-bounds coordinates in the status word, unless building a map has done so."""
        if not self.searched:
            self.lookup()

    def explain(self) -> str:
        """Text: the search structures, their estimated costs, and the one chosen."""
        return explain(self.cloud)

    def find(self, coords: Tensor) -> Tensor:
        """int64 [M]: row of each of `coords` int [M, 1+D], -1 if absent."""
        return find(self.lookup(), coords, self.bounds).long()

    def assign_points(self, cells: CoordBuffer) -> Tensor:
        """int64 [P]: voxel row of each of `cells`, -1 for padding and absent cells. Also stored as `inverse`."""
        self._inverse = self.lookup().neighbours(cells, Relation.of(self.dim, 1)).rows[:, 0].long()
        return self._inverse

    @property
    def unsettled(self) -> Tensor | None:
        """The search structure's status word, int32 [1] on the device, or None if the coordinates were checked."""
        if self._settled:
            return None
        self.lookup()
        return None if self._settled else self.cloud.status

    def settle(self, status: int | None = None) -> None:
        """Raise CoordinateError if the coordinates are invalid. status: value of `unsettled`; None: read it here."""
        if status is None:
            waiting = self.unsettled
            status = 0 if waiting is None else read([waiting])[0][0]
        if status and not self._settled:
            self._explain()
        self._settled = True

    def _explain(self) -> None:
        """Raise CoordinateError that names the first violation."""
        _check_range(Bounds.of(self._coords), self.spatial_shape, self.batch_size)
        order = morton_argsort(self._coords, Bounds.of(self._coords))
        ranked = self._coords[order]
        same = (ranked[1:] == ranked[:-1]).all(dim=1)
        at = int(same.nonzero()[0, 0])
        pair = sorted((int(order[at]), int(order[at + 1])))
        raise CoordinateError(
            f"{int(same.sum())} of {len(self)} coordinates are duplicates; the first: "
            f"{self._coords[pair[0]].tolist()} at rows {pair[0]} and {pair[1]}. coalesce() merges them"
        )


def same_geometry(a: Any, b: Any, check: bool = False) -> bool:
    """True if two geometries (or those of tensors) are one object or, with `check=True`, equal in stride and coords."""
    one, two = getattr(a, "geometry", a), getattr(b, "geometry", b)
    if not check or alike(one, two):
        return alike(one, two)
    same = one.stride == two.stride and one.coords.shape == two.coords.shape and one.device == two.device
    return same and bool(torch.equal(one.coords, two.coords))


def alike(one: Geometry, two: Geometry) -> bool:
    """True for the same object or, while tracing, for geometries made in the same steps from the same root."""
    if one is two:
        return True
    if one.trail is None and two.trail is None:
        return False
    same = one.start is two.start and one.steps == two.steps
    if same and torch.compiler.is_compiling():
        torch._check(one.coords.shape[0] == two.coords.shape[0])
    return same


def described(
    coords: Tensor, stride: int | Sequence[int], spatial_shape: int | Sequence[int] | None, dim: int | None = None
) -> tuple[Tensor, Stride, tuple[int, ...] | None]:
    """(coords, stride per axis, spatial shape per axis) after checks of dtype, shape, lengths. Raises as `checked`."""
    check_form(coords, dim)
    dim = coords.shape[1] - 1
    shape = None if spatial_shape is None else as_axes(spatial_shape, dim, "spatial_shape", 1)
    return coords, as_axes(stride, dim, "stride", 1, int | Fraction), shape


def bounds_of(coords: Tensor, shape: tuple[int, ...] | None, batch_size: int | None) -> Bounds:
    """Bounding box of new coordinates: on a GPU from `shape` and `batch_size` if both are given, else read, checked."""
    if coords.is_cuda and shape is not None and batch_size is not None:
        return Bounds((0,) * len(shape), tuple(s - 1 for s in shape), int(batch_size))
    bounds = Bounds.of(coords)
    _check_range(bounds, shape, batch_size)
    return bounds


def _warn_of_batch(bounds: Bounds) -> None:
    """Warn if the batch column looks like a coordinate: too many items, or a last axis that looks like the batch."""
    sides = bounds.extents
    last = len(sides) > 1 and bounds.low[-1] == 0 and 4 * sides[-1] < min(bounds.batch, *sides[:-1])
    if bounds.batch > 2**15 or (last and bounds.batch > 128):
        message = (
            f"coordinates (batch, axes...) have {bounds.batch} batch items and axes of extent {sides}: are they "
            "(x, y, z, batch)? Move the batch column first, or pass batch_size if this is meant"
        )
        warnings.warn(message, stacklevel=6)


def _check_range(bounds: Bounds, shape: tuple[int, ...] | None, batch_size: int | None) -> None:
    if batch_size is not None and bounds.batch > batch_size:
        raise CoordinateError(f"batch indices reach {bounds.batch - 1}, batch_size is {batch_size}")
    if shape is None or bounds.batch == 0:
        return
    if min(bounds.low) < 0 or any(h >= s for h, s in zip(bounds.high, shape, strict=True)):
        raise CoordinateError(f"coordinates reach {bounds.low} to {bounds.high}, spatial_shape is {shape}")


def _plain(site: GridSpec) -> tuple[Any, ...]:
    """A GridSpec as plain values, for pickling."""
    stride = tuple((Fraction(s).numerator, Fraction(s).denominator) for s in site.stride)
    frame = None if site.frame is None else (site.frame.size, site.frame.origin, site.frame.rounding)
    return stride, site.spatial_shape, site.batch_size, frame


def _rebuild(coords: Tensor, stride: Any, shape: Any, batch_size: int, frame: Any, inverse: Tensor | None) -> Geometry:
    """A geometry from unpickled data, which is untrusted. Raises as `Geometry.checked`, but for duplicates only at the
    first neighbour search, so that a data loader's batches are not sorted on the CPU."""
    check_form(coords)
    strides, lengths = tuple(tidy(Fraction(n, d)) for n, d in stride), [len(stride)]
    kept_frame = None if frame is None else VoxelFrame(*frame)
    lengths += [] if shape is None else [len(shape)]
    lengths += [] if kept_frame is None else [len(kept_frame.size), len(kept_frame.origin)]
    if any(length != coords.shape[1] - 1 for length in lengths):
        raise ShapeError(f"coordinates of {coords.shape[1] - 1} axes have stride, spatial_shape, frame of {lengths}")
    bounds = Bounds.of(coords)
    _check_range(bounds, shape, batch_size)
    if inverse is not None:
        _check_inverse(inverse, len(coords))
    return Geometry(coords, GridSpec(strides, shape, batch_size, bounds, kept_frame), inverse, settled=False)


def _check_inverse(inverse: Tensor, rows: int) -> None:
    if inverse.dtype != torch.int64 or inverse.ndim != 1:
        raise DtypeError(f"inverse is int64 [P], found {inverse.dtype} {list(inverse.shape)}")
    low, high = torch.stack(torch.aminmax(inverse)).tolist() if len(inverse) else (-1, -1)
    if low < -1 or high >= rows:
        raise CoordinateError(f"inverse holds rows {low} to {high}, there are {rows} voxels (-1: dropped)")


def _move(
    geometry: Geometry, device: torch.device | str, non_blocking: bool, done: dict[Geometry, Geometry]
) -> Geometry:
    if geometry in done:
        return done[geometry]
    if geometry.maps or geometry.device.type != "cpu":
        geometry.settle()
    inverse = geometry.inverse
    if inverse is not None:
        inverse = inverse.to(device, non_blocking=non_blocking)
    coords = geometry.coords.to(device, non_blocking=non_blocking)
    moved = done[geometry] = Geometry(coords, geometry.site, inverse, geometry.settled)
    moved.prepared = geometry.prepared
    for (relation, target), (kernel_map, outputs) in geometry.maps.items():
        key = (relation, None if target is None else _move(target, device, non_blocking, done))
        far = None if outputs is None else _move(outputs, device, non_blocking, done)
        moved.keep(*key, (kernel_map.to(device, non_blocking), far))
    for key, level in geometry.levels.items():
        moved.levels[key] = _move(level, device, non_blocking, done)
    return moved
