"""A network with its kernel maps as one CUDA graph for each capacity: coordinates and features in, results out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pumice.coords import Bounds, GridSpec, check_points, frame_of
from pumice.coords.box import INT32_MAX
from pumice.coords.capacity import Shares
from pumice.engine.buckets import CapacityMargins, CapturedModule, GraphRunner, Limits
from pumice.engine.buffers import PointBuffers, PointScene, VoxelBuffers, VoxelGrid, VoxelScene
from pumice.engine.static import Autocast, PaddedProgram
from pumice.errors import DeviceError, DtypeError, GeometryError, OptionError, ShapeError
from pumice.ops import SparseTensor
from pumice.runtime.launch import outside_inference_mode

Box = tuple[Sequence[int], Sequence[int]]
"""The least and the greatest coordinate along each axis."""
_CELLS = 32
"""Extents of boxes are multiples of it."""


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
    costs then depends on the scene's voxels and little on the capacity. Nothing waits for the device but for a few
    numbers: where the network finds its maps beside its layers (SparseTensor.prepare) the device tells them once these
    are there, and a call returns while the layers are still at work, as any operation of torch on the current stream.
    On a CPU the same calls run one by one, without a graph, which is for tests.

    Parameters
    ----------
    model: a module in evaluation that takes one SparseTensor. Its parameters are read where they lie: what is written
        into them shows in the next call.
    example: a typical scene with features as they will come. Capacities of inner levels are derived from it.
    max_voxels: the largest capacity; twice the example's voxels without it. A larger scene runs eagerly.
    level_capacity: room of inner levels as a share of the first one's, for all, or by stride ({2: 0.6, 4: 0.3}); by
        default what the example needs, times `margin`, as is the room of what kernels read of the maps. A scene that
        needs more runs eagerly, and its capacity is planned and captured anew for it, up to three times.
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
    check_example(example)
    limits = Limits.of("voxels", (len(example), max_voxels), (example.batch_size, batch), buckets)
    margins = CapacityMargins(margin, level_capacity)
    own = model if dtype is None else cast(model, dtype)
    x = example if dtype is None else example.to(dtype)
    program = PaddedProgram(own, site_within(example.geometry.site, limits.batch, box), Autocast.now(x.device.type))
    scene = VoxelScene(x.feats, x.coords, x.geometry, x)
    with outside_inference_mode():
        buffers = VoxelBuffers.of(limits.capacities[-1], x)
    return Captured(GraphRunner(program, buffers, scene, limits, margins), None if own is model else model)


def capture_points(
    model: nn.Module,
    points: Tensor,
    feats: Tensor | None = None,
    size: float | Sequence[float] = 1.0,
    batch: Tensor | None = None,
    *,
    origin: float | Sequence[float] = 0.0,
    rounding: str = "floor",
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    max_points: int | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> CapturedPoints:
    """As `capture`, from raw points on: they are voxelised, with the mean of their features, within the graph.

        fast = pm.capture_points(net, points, feats, size=0.05, max_points=300_000)
        labels = fast(points, feats).argmax(1)

    points, feats, size, batch, origin, rounding, spatial_shape: an example, and the grid, as in voxelize(); the origin
    is a number or one per axis. batch_size: items of a batch, at most. max_points: the largest capacity; twice the
    example's without it. Other options as in `capture`: level_capacity (of the first voxels, too, in shares of the
    points), buckets (of points), margin, box.

    Results with a row for each of the first voxels come back with one for each point. Points outside the box, but for
    a spatial_shape's, make the scene run eagerly.

    Raises as `capture` and voxelize() do.
    """
    _check_model(model)
    check_points(points, batch)
    if isinstance(origin, str):
        raise OptionError("the origin of captured points is given in numbers: that of a cloud is read from the device")
    if not len(points):
        raise ShapeError("the example has no points: it says nothing of how many voxels there are")
    frame = frame_of(points, size, origin, rounding)
    limits, margins, box = _options_of_points(points, batch, max_points, batch_size, options)
    shape = None if spatial_shape is None else tuple(int(n) for n in spatial_shape)
    own = model if dtype is None else cast(model, dtype)
    scene = PointScene(points, feats, batch, VoxelGrid(frame, shape, limits.batch, dtype))
    # It raises what is wrong with the example.
    x = scene.tensor()
    program = PaddedProgram(own, site_within(x.geometry.site, limits.batch, box), Autocast.now(points.device.type))
    with outside_inference_mode():
        buffers = PointBuffers.of(limits.capacities[-1], scene, program.site.bounds)
    return CapturedPoints(GraphRunner(program, buffers, scene, limits, margins), None if own is model else model)


def _options_of_points(
    points: Tensor, batch: Tensor | None, most: int | None, items: int | None, options: dict[str, Any]
) -> tuple[Limits, CapacityMargins, Box | None]:
    known = {"level_capacity": None, "buckets": 1.5, "margin": 1.5, "box": None}
    if wrong := options.keys() - known:
        raise TypeError(f"capture_points has no {', '.join(sorted(wrong))}; there are {', '.join(known)}")
    known |= options
    held = 1 if batch is None else int(batch.max()) + 1
    limits = Limits.of("points", (len(points), most), (held, items), known["buckets"])
    return limits, CapacityMargins(known["margin"], known["level_capacity"]), known["box"]


class _Base(CapturedModule):
    """What captured networks share."""

    def __init__(self, engine: GraphRunner, source: nn.Module | None) -> None:
        super().__init__(engine)
        self._source = source

    def refresh(self) -> None:
        """Take the model's parameters and buffers anew: needed after `dtype=`, which made a copy, when they changed.

        Without a copy what is written into them is seen anyway; this captures anew, for parameters that were replaced.
        """
        with self._lock:
            if self._source is None:
                self._engine.buckets.clear()
                return
            with torch.no_grad():
                for own, other in zip(_held(self._engine.program.model), _held(self._source), strict=True):
                    own.copy_(other)


class Captured(_Base):
    """A captured network: see `capture`."""

    def __call__(self, x: SparseTensor | Tensor, coords: Tensor | None = None) -> Any:
        """What the model gives for x, or for features x [N, C] on coords int32 [N, 1+D].

        Results are new tensors; a sparse one on x's coordinates shares x's geometry. No gradients. Features and
        coordinates without a SparseTensor around them are a batch of `batch` items, and are checked by the graph:
        nothing is read before.

        Raises CoordinateError (duplicates, a scene outside the example's spatial_shape), ShapeError, DtypeError,
        DeviceError and GeometryError for what does not fit the example.
        """
        example: SparseTensor = self._engine.example.like  # pyright: ignore[reportAttributeAccessIssue]
        own = None
        if isinstance(x, SparseTensor):
            check_scene(x, example)
            feats, coords, own = x.feats, x.coords, x.geometry
        elif isinstance(x, Tensor) and isinstance(coords, Tensor):
            feats = x
        else:
            raise DtypeError(f"a captured network takes a SparseTensor, or feats and coords, found {type(x).__name__}")
        _check_arrays(feats, coords, example)
        if self._source is None and feats.dtype != example.dtype:
            raise DtypeError(f"feats are {feats.dtype}, the example's {example.dtype}; dtype= would cast them")
        with self._lock:
            return self._engine.run(VoxelScene(feats, coords, own, example))


class CapturedPoints(_Base):
    """A network captured from points on: see `capture_points`."""

    def __call__(self, points: Tensor, feats: Tensor | None = None, batch: Tensor | None = None) -> Any:
        """What the model gives for points [P, D] with feats [P, F], of batch items int [P]; rows of points where the
        model's have one for each voxel: of floats 0, of integers -1 for a point outside a spatial_shape.

        Raises CoordinateError (points that are not finite, items that are not there), ShapeError, DtypeError and
        DeviceError for what does not fit the example.
        """
        like: PointScene = self._engine.example  # pyright: ignore[reportAssignmentType]
        scene = PointScene(points, feats, batch, like.grid)
        check_points_of(scene, like)
        with self._lock:
            return self._engine.run(scene)


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


def site_within(site: GridSpec, batch: int, box: Box | None) -> GridSpec:
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
        ends = [_roomier(a, b) for a, b in zip(bounds.low, bounds.high, strict=True)]
        low, high = tuple(a for a, _ in ends), tuple(b for _, b in ends)
    return GridSpec(site.stride, site.spatial_shape, batch, Bounds(low, high, batch), site.frame)


def _roomier(low: int, high: int) -> tuple[int, int]:
    """An axis half as long again, and then to the next multiple of _CELLS."""
    extent = high - low + 1
    room = -(-(extent + 2 * (extent // 4 + 8)) // _CELLS) * _CELLS - extent
    return max(-(2**31), low - room // 2), min(INT32_MAX, high + room - room // 2)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"capture takes a torch.nn.Module, found {type(model).__name__}")
    training = [name or type(m).__name__ for name, m in model.named_modules() if m.training]
    if training:
        raise OptionError(f"capture is of a model in evaluation, call model.eval(); in training are {training[:3]}")


def check_example(example: SparseTensor) -> None:
    if not isinstance(example, SparseTensor):
        raise DtypeError(f"the example is a SparseTensor, found {type(example).__name__}")
    example.geometry.require_host_size("a capture within a capture")
    if not len(example):
        raise ShapeError("the example has no voxels: it says nothing of how large inner levels are")


def check_scene(x: SparseTensor, example: SparseTensor) -> None:
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


def check_points_of(scene: PointScene, like: PointScene) -> None:
    """Raise where points do not fit the example's."""
    check_points(scene.points, scene.items)
    for name in ("points", "feats"):
        mine, theirs = getattr(scene, name), getattr(like, name)
        if (mine is None) != (theirs is None):
            raise ShapeError(f"the example has {'no ' if theirs is None else ''}feats beside its points")
        if mine is None:
            continue
        if mine.ndim != 2 or mine.shape[1] != theirs.shape[1] or len(mine) != scene.count:
            raise ShapeError(f"{name} are [{scene.count}, {theirs.shape[1]}], found shape {list(mine.shape)}")
        if not mine.is_floating_point():
            raise DtypeError(f"{name} are floating point, found {mine.dtype}")
        if mine.device != theirs.device:
            raise DeviceError(f"{name} are on {mine.device}, the captured network on {theirs.device}")
