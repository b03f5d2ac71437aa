"""Inference of a network, kernel maps included, as one CUDA graph per capacity."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pumice.coords import Bounds, GridSpec, check_points, frame_of
from pumice.coords.capacity import Shares
from pumice.coords.chain_build import key_bounds
from pumice.engine.around import around, sparse_in
from pumice.engine.buckets import Buckets, CapacityMargins, CapturedModule, GraphRunner
from pumice.engine.buffers import PointBuffers, PointScene, VoxelBuffers, VoxelGrid, VoxelScene
from pumice.engine.graph_capture import CapturedGraphNet, check_evaluation, check_options, takes_graph
from pumice.engine.program import compile  # noqa: A004
from pumice.engine.static import Autocast, PaddedProgram
from pumice.errors import DeviceError, DtypeError, GeometryError, OptionError, ShapeError
from pumice.ops import SparseTensor
from pumice.runtime.launch import outside_inference_mode


@overload
def capture(model: nn.Module, example: tuple[Any, ...]) -> CapturedGraphNet: ...
@overload
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
) -> Captured: ...
def capture(
    model: nn.Module,
    example: SparseTensor | tuple[Any, ...],
    *,
    max_voxels: int | None = None,
    level_capacity: Shares = None,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    buckets: float | Sequence[int] = 1.5,
    margin: float = 1.5,
) -> Captured | CapturedGraphNet:
    """Capture the inference pass of `model`, kernel maps included, as one CUDA graph per capacity.

        fast = pm.capture(net, x, max_voxels=200_000)
        y = fast(x)

        fast(x) = pm.compile(net)(x)

    bit for bit if the capacity and the scene's own size select the same kernel tiles, else up to rounding of sums.

    The program of the network (pumice.compile) runs on buffers of fixed capacity; padding rows are masked out, so the
    cost depends on the scene's voxels and little on the capacity. The only host synchronisation reads the status word
    and the level sizes, known once the maps are built: a call returns while layers still run on the current
    stream. On a CPU the same calls run without a graph (for tests).

    The example's capacity is captured at once, others by `ready()` or by calls: the first scene of a capacity runs
    eagerly, by the program, and the graph is recorded at the end of that call, or of a later one if kernels have to be
    compiled in the background first. A scene that overflows a level or kernel map also runs eagerly, and the capacity
    is re-planned and recorded again, up to three times.

    Parameters
    ----------
    model: module in evaluation mode that takes one SparseTensor, or its program. Parameters are read in place: values
        written to them take effect in the next call.
    example: typical scene; fixes channels, device and, without `dtype`, the dtype. Coarser capacities derive from it.
        Also an object that holds one SparseTensor, registered with torch.utils._pytree, as those of pumice.compat are;
        then calls take such objects.
    max_voxels: largest capacity; default twice the example's voxels. A larger scene runs eagerly.
    level_capacity: capacity of coarser levels as a share of the first level's, for all or by stride ({2: 0.6, 4: 0.3});
        default: what the example needs times `margin`; kernel maps have half as much room again.
    batch: largest number of batch items; default the example's.
    dtype: cast a copy of the model, and features, to this dtype (see refresh()). In half precision batch norms keep
        their dtype.
    buckets: factor between capacities, or the capacities.

    Scenes must share the example's spatial_shape. Without one, coordinates may lie up to 2^16 voxels from the origin
    along each axis (2^24 with one or two axes, 2^11 with four); scenes beyond run eagerly.

    A network over graphs has its arguments as the example, with a prepared pumice.Graph among them:

        fast = pm.capture(net, (x, graph))
        y = fast(x, graph)

    Tensors are copied into buffers. A graph that is new, or new numbers of rows, are recorded in that call; the eight
    recorded last are kept. Such a network reads no values on the host, and takes no other option.

    Raises OptionError (model in training mode, invalid options), DtypeError and ShapeError (example is no SparseTensor,
    has no voxels, or more than max_voxels), CaptureError (the model reads sizes on the host, or its captured results
    differ from the program's on the example), GeometryError (value-dependent row counts, as of prune()).
    """
    check_evaluation(model)
    if takes_graph(example):
        voxels = (max_voxels, None), (level_capacity, None), (batch, None), (dtype, None), (buckets, 1.5), (margin, 1.5)
        names = "max_voxels", "level_capacity", "batch", "dtype", "buckets", "margin"
        check_options(dict(zip(names, voxels, strict=True)))
        return CapturedGraphNet(model, example)
    model, example = around(model, example)
    example = check_example(example)
    limits = Buckets.of("voxels", (len(example), max_voxels), (example.batch_size, batch), buckets)
    margins = CapacityMargins(margin, level_capacity)
    own = model if dtype is None else cast(model, dtype)
    x = example if dtype is None else example.to(dtype)
    program = _program_of(own, captured_site(example.geometry.site, limits.batch), x.device.type)
    scene = VoxelScene(x.feats, x.coords, x.geometry, x)
    with outside_inference_mode():
        buffers = VoxelBuffers.of(limits.capacities[-1], x)
    return Captured(GraphRunner(program, buffers, scene, limits, margins), None if own is model else model)


def capture_points(
    model: nn.Module,
    points: Tensor,
    feats: Tensor | None = None,
    size: float | Sequence[float] | None = None,
    batch: Tensor | None = None,
    *,
    origin: float | Sequence[float] = 0.0,
    rounding: str = "floor",
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    max_points: int | None = None,
    dtype: torch.dtype | None = None,
    dim: int = 3,
    **options: Any,
) -> CapturedPoints:
    """Like `capture`, but from raw points: the graph also voxelises them and averages the features of each voxel.

        fast = pm.capture_points(net, points, feats, size=0.05, max_points=300_000)
        labels = fast(points, feats).argmax(1)

    points, feats, size, batch, origin, rounding, spatial_shape, dim: example and grid, as in voxelize(); the origin is
    one number or one per axis. batch_size: largest number of batch items. max_points: largest capacity; default twice
    the example's points. Other options as in `capture`: level_capacity (as shares of the points, input voxels
    included), buckets (of points), margin.

    Results with one row per input voxel are returned with one row per point. Limits of coordinates are those of
    `capture`, but points outside a spatial_shape are dropped.

    Raises as `capture` and voxelize() do.
    """
    check_evaluation(model)
    check_points(points, batch, dim)
    if isinstance(origin, str):
        raise OptionError("origin must be numbers in capture_points: a cloud's origin is read from the device")
    if not len(points):
        raise ShapeError("the example has no points, so no capacities can be derived from it")
    frame = frame_of(points, size, origin, rounding)
    limits, margins = _options_of_points(points, batch, max_points, batch_size, options)
    shape = None if spatial_shape is None else tuple(int(n) for n in spatial_shape)
    own = model if dtype is None else cast(model, dtype)
    scene = PointScene(points, feats, batch, VoxelGrid(frame, shape, limits.batch, dtype))
    # Raises if the example is invalid.
    x = scene.tensor()
    program = _program_of(own, captured_site(x.geometry.site, limits.batch), points.device.type)
    with outside_inference_mode():
        buffers = PointBuffers.of(limits.capacities[-1], scene, program.site.bounds)
    return CapturedPoints(GraphRunner(program, buffers, scene, limits, margins), None if own is model else model)


def _program_of(model: nn.Module, site: GridSpec, kind: str) -> PaddedProgram:
    return PaddedProgram(compile(model), model, site, Autocast.current(kind))


def _options_of_points(
    points: Tensor, batch: Tensor | None, most: int | None, items: int | None, options: dict[str, Any]
) -> tuple[Buckets, CapacityMargins]:
    known = {"level_capacity": None, "buckets": 1.5, "margin": 1.5}
    if wrong := options.keys() - known:
        raise TypeError(f"capture_points has no option {', '.join(sorted(wrong))}; expected {', '.join(known)}")
    known |= options
    held = 1 if batch is None else int(batch.max()) + 1
    limits = Buckets.of("points", (len(points), most), (held, items), known["buckets"])
    return limits, CapacityMargins(known["margin"], known["level_capacity"])


class _Base(CapturedModule):
    """Base class of captured inference networks."""

    def __init__(self, engine: GraphRunner, source: nn.Module | None) -> None:
        super().__init__(engine)
        self._source = source

    def refresh(self) -> None:
        """Copy the model's parameters and buffers again; needed after they change if `dtype=` made a copy.

        Without a copy, written values are seen anyway; this drops all graphs, for parameters that were replaced.
        """
        with self._lock:
            if self._source is None:
                self._engine.clear()
                return
            with torch.no_grad():
                for own, other in zip(_held(self._engine.program.model), _held(self._source), strict=True):
                    own.copy_(other)


class Captured(_Base):
    """Captured network; see `capture`."""

    def __call__(self, x: Any, coords: Tensor | None = None) -> Any:
        """Run the model on x, a SparseTensor or what the example was; or on features x [N, C], coords int32 [N, 1+D].

        Results are new tensors without gradients; a sparse result on x's coordinates shares x's geometry. Plain
        features and coordinates form a batch of `batch` items, and are checked inside the graph, without a host
        synchronisation.

        Raises CoordinateError (duplicates, a scene outside the example's spatial_shape), ShapeError, DtypeError,
        DeviceError and GeometryError (input that does not match the example).
        """
        example: SparseTensor = self._engine.example.like  # pyright: ignore[reportAttributeAccessIssue]
        own, x = None, sparse_in(self._engine.program.model, x)
        if isinstance(x, SparseTensor):
            check_scene(x, example)
            feats, coords, own = x.feats, x.coords, x.geometry
        elif isinstance(x, Tensor) and isinstance(coords, Tensor):
            feats = x
        else:
            raise DtypeError(f"a captured network takes a SparseTensor, or feats and coords, found {type(x).__name__}")
        _check_arrays(feats, coords, example)
        if self._source is None and feats.dtype != example.dtype:
            raise DtypeError(f"feats must be {example.dtype} as the example's, found {feats.dtype}; dtype= casts them")
        with self._lock:
            return self._engine.run(VoxelScene(feats, coords, own, example))


class CapturedPoints(_Base):
    """Network captured together with its voxelisation; see `capture_points`."""

    def __call__(self, points: Tensor, feats: Tensor | None = None, batch: Tensor | None = None) -> Any:
        """Run the model on points [P, D] with feats [P, F] and batch indices int [P].

        Results with one row per voxel are returned per point; points outside a spatial_shape get 0 (floats) or -1
        (integers).

        Raises CoordinateError (non-finite points, batch indices out of range), ShapeError, DtypeError and DeviceError
        (input that does not match the example).
        """
        like: PointScene = self._engine.example  # pyright: ignore[reportAssignmentType]
        scene = PointScene(points, feats, batch, like.grid)
        check_points_of(scene, like)
        with self._lock:
            return self._engine.run(scene)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy the model with parameters and buffers cast to `dtype`; batch norms are not cast to half precision."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise DtypeError(f"a network can be cast to a torch.dtype, a float of at least 16 bits, found {dtype!r}")
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


def captured_site(site: GridSpec, batch: int) -> GridSpec:
    """GridSpec of the input, with the bounds of all coordinates that a captured network accepts."""
    shape, bounds = site.spatial_shape, key_bounds(len(site.stride), batch)
    if shape is not None:
        bounds = Bounds((0,) * len(shape), tuple(max(0, n - 1) for n in shape), batch)
    return GridSpec(site.stride, shape, batch, bounds, site.frame)


def check_example(example: Any) -> SparseTensor:
    if not isinstance(example, SparseTensor):
        kind = type(example).__name__
        raise DtypeError(f"the example must be a SparseTensor, or arguments with a prepared pumice.Graph, found {kind}")
    example.geometry.require_host_size("a capture within a capture")
    if not len(example):
        raise ShapeError("the example has no voxels, so no level capacities can be derived from it")
    return example


def check_scene(x: SparseTensor, example: SparseTensor) -> None:
    _check_arrays(x.feats, x.coords, example)
    for name in ("stride", "spatial_shape"):
        if getattr(x, name) != getattr(example, name):
            raise GeometryError(f"x has {name}={getattr(x, name)}, the captured example {getattr(example, name)}")


def _check_arrays(feats: Tensor, coords: Tensor, example: SparseTensor) -> None:
    if feats.ndim != 2 or feats.shape[1] != example.channels:
        raise ShapeError(
            f"feats must be [N, {example.channels}] for this captured network, found shape {list(feats.shape)}"
        )
    if coords.shape != (feats.shape[0], example.spatial_dim + 1):
        raise ShapeError(
            f"coords must be [{feats.shape[0]}, {example.spatial_dim + 1}], found shape {list(coords.shape)}"
        )
    if coords.dtype != torch.int32:
        raise DtypeError(f"coords must be torch.int32, found {coords.dtype}")
    if not feats.is_floating_point():
        raise DtypeError(f"feats must be floating point, found {feats.dtype}")
    for name, tensor in (("feats", feats), ("coords", coords)):
        if tensor.device != example.device:
            raise DeviceError(f"{name} are on {tensor.device}, the captured network on {example.device}")


def check_points_of(scene: PointScene, like: PointScene) -> None:
    """Raise ShapeError, DtypeError or DeviceError if points do not match the example's."""
    check_points(scene.points, scene.items)
    for name in ("points", "feats"):
        mine, theirs = getattr(scene, name), getattr(like, name)
        if (mine is None) != (theirs is None):
            raise ShapeError(f"the example has {'no feats' if theirs is None else 'feats'}, which the scene must match")
        if mine is None:
            continue
        if mine.ndim != 2 or mine.shape[1] != theirs.shape[1] or len(mine) != scene.count:
            raise ShapeError(f"{name} must be [{scene.count}, {theirs.shape[1]}], found shape {list(mine.shape)}")
        if not mine.is_floating_point():
            raise DtypeError(f"{name} must be floating point, found {mine.dtype}")
        if mine.device != theirs.device:
            raise DeviceError(f"{name} are on {mine.device}, the captured network on {theirs.device}")
