"""MinkowskiEngine's tensors, keys, kernel generators and coordinate managers over pumice's SparseTensor.

`sparse` of a tensor has its spatial axes reversed and coordinates divided by the tensor stride: kernel offsets, of
which the first axis is fastest, are then in our order, and a kernel [K, C_in, C_out] is a strided view of our weight.
Rules: MinkowskiEngine 0.5.4, coordinate_map_manager.cpp, kernel_region.hpp, MinkowskiSparseTensor.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.utils import _pytree as pytree

from pumice import ops
from pumice.compat.wrapped import Wrapped
from pumice.coords import Geometry, Relation, as_axes, kernel_map, same_geometry, unique_coords
from pumice.errors import CoordinateError, GeometryError, OptionError, ShapeError
from pumice.ops.tensor import coordinates_of, one_node

SparseTensorQuantizationMode = IntEnum(
    "SparseTensorQuantizationMode",
    "RANDOM_SUBSAMPLE UNWEIGHTED_AVERAGE UNWEIGHTED_SUM NO_QUANTIZATION MAX_POOL SPLAT_LINEAR_INTERPOLATION",
    start=0,
)
SparseTensorOperationMode = IntEnum(
    "SparseTensorOperationMode", "SEPARATE_COORDINATE_MANAGER SHARE_COORDINATE_MANAGER", start=0
)
FIRST, MEAN, SUM, DISTINCT, MAX, _ = SparseTensorQuantizationMode
_REDUCE = {MEAN: "mean", SUM: "sum", MAX: "max"}


class RegionType(IntEnum):
    """Shapes of kernels, with the names of 0.4."""

    HYPER_CUBE = HYPERCUBE = 0
    HYPER_CROSS = HYPERCROSS = 1
    CUSTOM = 2
    HYBRID = 3


def _traced(value: Any) -> bool:
    return issubclass(type(value), Proxy)


def _no_features(coordinates: Tensor) -> Tensor:
    return coordinates.new_empty((len(coordinates), 0), dtype=torch.float32)


def _turned(coordinates: Tensor) -> Tensor:
    """(batch, axes...) with the axes in reverse order."""
    return torch.cat([coordinates[:, :1], coordinates[:, 1:].flip(1)], 1)


def _units(coordinates: Tensor, stride: Sequence[int], exact: bool) -> Tensor:
    """Coordinates of theirs as ours: floor(c / stride), axes reversed. exact: raise unless multiples of the stride."""
    found = (coordinates.floor() if coordinates.is_floating_point() else coordinates).int()
    if max(stride) > 1:
        steps, fine = found.new_tensor([1, *stride]), found
        found = torch.div(fine, steps, rounding_mode="floor")
        if exact and not torch.equal(found * steps, fine):
            raise CoordinateError(f"coordinates of tensor stride {[*stride]} are multiples of it, found others")
    return _turned(found)


def first_rows(inverse: Tensor, rows: int) -> Tensor:
    """int64 [rows]: the lowest index of each value of `inverse`."""
    every = torch.arange(len(inverse), device=inverse.device)
    return every.new_full((rows,), len(inverse)).scatter_reduce(0, inverse, every, "amin")


def distinct(coords: Tensor, stride: Sequence[int]) -> tuple[Geometry, Tensor, Tensor]:
    """(distinct rows of int32 coords in order of first occurrence, the rows taken, inverse)."""
    found = unique_coords(coords, stride, dim=coords.shape[1] - 1)
    assert found.inverse is not None
    rows, order = first_rows(found.inverse, len(found)).sort()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))[found.inverse]
    return Geometry(coords[rows], found.site, inverse), rows, inverse


@one_node
def voxels(feats: Tensor, coordinates: Tensor, stride: tuple[int, ...], mode: Any, field: bool) -> ops.SparseTensor:
    """The inner tensor of features at coordinates, duplicates joined by `mode`. field: of points, which are floored to
    the stride and always get an inverse."""
    coords = _units(coordinates, stride, exact=not field)
    if not field:
        try:
            x = ops.SparseTensor(feats, coords, stride[::-1], dim=len(stride))
            x.geometry.settle()
            return x
        except CoordinateError:
            if mode == DISTINCT:
                raise
    geometry, rows, inverse = distinct(coords, stride[::-1])
    if mode not in _REDUCE:
        return ops.SparseTensor(feats[rows], geometry)
    return ops.SparseTensor(ops.scatter(feats, inverse, 0, dim_size=len(rows), reduce=_REDUCE[mode]), geometry)


@one_node
def _origin(x: ops.SparseTensor, values: Tensor) -> ops.SparseTensor:
    """values [B, C] at the origin of each batch item."""
    coords = torch.zeros(len(values), x.spatial_dim + 1, dtype=torch.int32, device=values.device)
    coords[:, 0] = torch.arange(len(values), device=values.device)
    return ops.SparseTensor(values, coords, batch_size=len(values), dim=x.spatial_dim)


class KernelGenerator:
    """A region of kernel offsets with stride and dilation. offsets: in our order of axes, None for a cube. Whether to
    transpose or expand is the layer's; axis_types are ignored."""

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        is_transpose: bool = False,  # noqa: ARG002
        region_type: Any = RegionType.HYPER_CUBE,
        region_offsets: Any = None,
        expand_coordinates: bool = False,  # noqa: ARG002
        axis_types: Any = None,  # noqa: ARG002
        dimension: int = -1,
    ) -> None:
        if dimension < 1:
            raise OptionError(f"dimension is the number of spatial axes, found {dimension}")
        self.dimension, self.region_type, self.region_offsets = dimension, RegionType(region_type), region_offsets
        self.kernel_size = as_axes(kernel_size, dimension, "kernel_size", -1)
        self.kernel_stride = as_axes(stride, dimension, "stride", 1)
        self.kernel_dilation = as_axes(dilation, dimension, "dilation", 1)
        self.offsets = self._offsets()
        if self.offsets is None and min(self.kernel_size) < 1:
            raise OptionError(f"kernel_size takes integers of at least 1, found {kernel_size}")
        self.window = self.kernel_size[::-1] if self.offsets is None else (len(self.offsets),)
        self.kernel_volume = torch.Size(self.window).numel()
        self.requires_strided_coordinates = set(self.kernel_stride) == {1}

    def __str__(self) -> str:
        size, stride, dilation = ([*each] for each in (self.kernel_size, self.kernel_stride, self.kernel_dilation))
        return f"kernel_size={size}, stride={stride}, dilation={dilation}, region={self.region_type.name}"

    def _offsets(self) -> list[list[int]] | None:
        if self.region_type == RegionType.HYPER_CUBE:
            return None
        if self.region_type == RegionType.CUSTOM and self.region_offsets is not None:
            return [[int(o) for o in offset][::-1] for offset in self.region_offsets]
        if self.region_type != RegionType.HYPER_CROSS or any(k % 2 == 0 for k in self.kernel_size):
            raise OptionError(
                "regions are HYPER_CUBE, HYPER_CROSS of odd sizes, and CUSTOM with region_offsets; found "
                f"{self.region_type.name} of size {[*self.kernel_size]}, offsets {self.region_offsets}"
            )
        found = [[0] * self.dimension]
        for axis, size in enumerate(self.kernel_size):
            for step in (*range(1, size // 2 + 1), *range(-(size // 2), 0)):
                found.append([step * (at == axis) for at in range(self.dimension)][::-1])
        return found

    def options(self, pool: bool = False) -> dict[str, Any]:
        """Stride, padding, dilation, offsets of ours. pool: windows of the length of the stride begin at the output."""
        stride = self.kernel_stride[::-1]
        if pool and self.kernel_size == self.kernel_stride:
            return {"stride": stride, "padding": 0}
        options: dict[str, Any] = {"stride": stride, "dilation": self.kernel_dilation[::-1]}
        return options if self.offsets is None else options | {"offsets": self.offsets}

    def relation(self, policy: str | None, pool: bool = False) -> Relation:
        options = self.options(pool)
        if "offsets" in options:
            return Relation.of_offsets(self.dimension, policy=policy, **options).shared()
        return Relation.of(self.dimension, self.kernel_size[::-1], policy=policy, **options).shared()


@dataclass(frozen=True)
class CoordinateMapKey:
    """The name of coordinates in a manager: tensor stride and a string."""

    stride: Sequence[int]
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", tuple(map(int, self.stride)))

    def get_key(self) -> tuple[list[int], str]:
        return [*self.stride], self.name

    def get_tensor_stride(self) -> list[int]:
        return [*self.stride]


Choice = tuple[CoordinateMapKey, tuple[Any, ...]]
"""The key of a layer's outputs, and their coordinates as its target unless the layer makes them."""


class CoordinateManager:
    """Coordinates by key, which related tensors share.

    levels: a Geometry by key; while pumice.compile traces, the newest tensor there, a proxy. given: keys of coordinates
    from users. sources: (key of in, stride) of those that are floor(in / stride). fields, inverses: points, and their
    voxels by (field, key). voxelised: the key of a field's own voxels by (field, tensor stride).
    """

    def __init__(self, D: int = 0, *_: Any, **__: Any) -> None:
        self.D = D
        self.levels: dict[CoordinateMapKey, Any] = {}
        self.given: set[CoordinateMapKey] = set()
        self.sources: dict[CoordinateMapKey, tuple[CoordinateMapKey, tuple[int, ...]]] = {}
        self.fields: dict[CoordinateMapKey, Tensor] = {}
        self.inverses: dict[tuple[CoordinateMapKey, CoordinateMapKey], Tensor] = {}
        self.voxelised: dict[tuple[CoordinateMapKey, tuple[int, ...]], CoordinateMapKey] = {}

    def keep(self, key: CoordinateMapKey, sparse: Any) -> None:
        """Register the coordinates of a tensor under a key, unless there are some."""
        if _traced(sparse):
            self.levels[key] = sparse
        elif key not in self.levels:
            self.levels[key] = sparse.geometry

    def level(self, key: CoordinateMapKey) -> Any:
        if key not in self.levels:
            raise GeometryError(f"this manager has coordinates of {[*self.levels]}, none of {key}")
        return self.levels[key]

    def tensor(self, feats: Tensor, key: CoordinateMapKey) -> Any:
        """The inner tensor of features on a key's coordinates."""
        level = self.level(key)
        return level.replace(feats) if _traced(level) else ops.SparseTensor(feats, level)

    def free_key(self, stride: Sequence[int], name: str = "", among: Any = None) -> CoordinateMapKey:
        """A key of this stride that has no coordinates yet; among: or no fields."""
        taken = self.levels if among is None else among
        names = (name, *(f"{name}-{number}" for number in range(1, len(taken) + 1)))
        return next(key for key in (CoordinateMapKey(stride, each) for each in names) if key not in taken)

    def coarser(self, key: CoordinateMapKey, stride: tuple[int, ...]) -> Choice:
        """floor(in / stride)."""
        if max(stride) == 1:
            return key, ()
        found = CoordinateMapKey([t * s for t, s in zip(key.stride, stride, strict=True)], key.name)
        source = key, stride
        if found not in self.levels:
            self.sources[found] = source
        return found, () if self.sources.get(found) == source else (self.levels[found],)

    def finer(self, key: CoordinateMapKey, stride: tuple[int, ...], expand: bool) -> Choice:
        """Known coordinates of tensor stride / stride if there are some, unless `expand`; else new ones."""
        if any(t % s for t, s in zip(key.stride, stride, strict=True)):
            raise OptionError(f"a stride divides the tensor stride, found {[*stride]} for {[*key.stride]}")
        found = CoordinateMapKey([t // s for t, s in zip(key.stride, stride, strict=True)])
        known = found in self.levels and not expand
        return (found, (self.levels[found],)) if known else (self.free_key(found.stride), ())

    def on(self, coordinates: Any, stride: Sequence[int]) -> Choice:
        """Outputs that the user passes: a SparseTensor, a key, or coordinates [N, 1+D]."""
        if isinstance(coordinates, CoordinateMapKey):
            key, target = coordinates, self.level(coordinates)
        elif isinstance(coordinates, SparseTensor):
            key, target = coordinates.coordinate_map_key, coordinates.sparse
            if coordinates.coordinate_manager is not self:
                key = self.free_key(key.stride, key.name)
                self.keep(key, target)
        else:
            key, target = self.insert(_no_features(coordinates), coordinates, stride)
        if key.stride != tuple(stride):
            raise GeometryError(f"these outputs have tensor stride {[*stride]}, found coordinates of {[*key.stride]}")
        return key, (target,)

    def insert(
        self, feats: Tensor, coordinates: Tensor, stride: Sequence[int], mode: Any = FIRST, name: str = ""
    ) -> tuple[CoordinateMapKey, Any]:
        """(key, inner tensor) of a user's features and coordinates."""
        sparse, key = voxels(feats, coordinates, tuple(stride), mode, False), self.free_key(stride, name)
        self.give(key, sparse)
        return key, sparse

    def give(self, key: CoordinateMapKey, sparse: Any) -> None:
        """Register a user's coordinates under a free key."""
        self.keep(key, sparse)
        self.given.add(key)
        self.sources.pop(key, None)

    def at_origin(self, x: Any, values: Tensor) -> SparseTensor:
        """values [B, C] as a tensor at the origin of each item of x."""
        key = CoordinateMapKey((0,) * self.D)
        return SparseTensor.of(self.tensor(values, key) if key in self.levels else _origin(x, values), key, self)

    # For users

    def _get_coordinate_map_key(self, key_or_stride: Any) -> CoordinateMapKey:
        if isinstance(key_or_stride, CoordinateMapKey):
            return key_or_stride
        stride = as_axes(key_or_stride, self.D, "tensor_stride", 1)
        return next((key for key in self.levels if key.stride == stride), CoordinateMapKey(stride))

    def insert_and_map(
        self, coordinates: Tensor, tensor_stride: Any = 1, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[Tensor, Tensor]]:
        """(key, (rows of the distinct coordinates, voxel of each row))."""
        stride = as_axes(tensor_stride, self.D, "tensor_stride", 1)
        key, x = self.insert(_no_features(coordinates), coordinates, stride, name=string_id)
        return key, (first_rows(_inverse_of(x), len(x)), _inverse_of(x))

    def insert_field(self, coordinates: Tensor, tensor_stride: Any = 1, string_id: str = "") -> CoordinateMapKey:
        key = self.free_key(as_axes(tensor_stride, self.D, "tensor_stride", 1), string_id, self.fields)
        self.fields[key] = coordinates
        return key

    def stride(self, coordinate_map_key: CoordinateMapKey, stride: Any) -> CoordinateMapKey:
        """The key of floor(in / stride), made if missing."""
        steps = as_axes(stride, self.D, "stride", 1)
        found, _ = self.coarser(coordinate_map_key, steps)
        if found not in self.levels:
            relation = Relation.of(self.D, 1, stride=steps[::-1], policy="floor_unique")
            self.levels[found] = kernel_map(self.level(coordinate_map_key), relation)[1]
        return found

    def get_coordinates(self, key_or_stride: Any) -> Tensor:
        key = self._get_coordinate_map_key(key_or_stride)
        return _theirs(self.level(key).coords, key)

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        return len(self.level(coordinate_map_key))

    def kernel_map(
        self,
        in_key: Any,
        out_key: Any,
        stride: Any = 1,
        kernel_size: Any = 3,
        dilation: Any = 1,
        region_type: Any = RegionType.HYPER_CUBE,
        region_offset: Any = None,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, Tensor]:
        """{kernel offset: int64 [2, n], rows of inputs and outputs} between two keys (or tensor strides), where any."""
        window = KernelGenerator(kernel_size, stride, dilation, False, region_type, region_offset, dimension=self.D)
        inputs, outputs = (self.level(self._get_coordinate_map_key(key)) for key in (in_key, out_key))
        relation = window.relation("given_inverse" if is_transpose else "given", is_pool)
        pairs = kernel_map(inputs, relation, outputs)[0].pairs()
        lists = torch.stack([pairs.inputs, pairs.outputs]).split(pairs.sizes.tolist(), 1)
        return {k: each for k, each in enumerate(lists) if each.shape[1]}

    get_kernel_map = kernel_map


def _theirs(coords: Tensor, key: CoordinateMapKey) -> Tensor:
    """Coordinates of ours as theirs, in finest units."""
    found = _turned(coords)
    return found if max(key.stride) <= 1 else found * found.new_tensor([1, *key.stride])


class _Shared:
    """The operation mode of the process, and the manager that its tensors share."""

    mode: Any = SparseTensorOperationMode(0)
    manager: CoordinateManager | None = None

    def manager_for(self, coordinates: Tensor) -> CoordinateManager:
        if coordinates.ndim != 2 or coordinates.shape[1] < 2:
            raise ShapeError(f"coordinates are [N, 1+D] = (batch, axes...), found {[*coordinates.shape]}")
        if self.mode == SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER:
            return CoordinateManager(coordinates.shape[1] - 1)
        self.manager = self.manager or CoordinateManager(coordinates.shape[1] - 1)
        return self.manager


_SHARED = _Shared()


def set_sparse_tensor_operation_mode(operation_mode: Any) -> None:
    _SHARED.mode = SparseTensorOperationMode(operation_mode)


def clear_global_coordinate_manager() -> None:
    _SHARED.manager = None


def _inverse_of(x: Any) -> Tensor:
    """The voxel of each row that a tensor was made of."""
    try:
        return x.inverse
    except GeometryError:
        return torch.arange(len(x.feats), device=x.device)


def _operator(function: Callable[..., Any]) -> Any:
    return lambda self, other: self._binary(function, other)


class FeatureTensor:
    """What sparse tensors and tensor fields have in common. _F: the features."""

    _F: Any
    C: Any
    coordinate_manager: CoordinateManager
    with_features: Any

    F = features = feats = property(lambda self: self._F)
    coordinates = coords = property(lambda self: self.C)
    D = dimension = property(lambda self: self.coordinate_manager.D)
    _manager = coords_man = property(lambda self: self.coordinate_manager)
    device = property(lambda self: self._F.device)
    dtype = property(lambda self: self._F.dtype)
    shape = property(lambda self: self._F.shape)
    requires_grad = property(lambda self: self._F.requires_grad)

    def size(self) -> torch.Size:
        return self._F.size()

    def __len__(self) -> int:
        return len(self._F)

    def requires_grad_(self, requires_grad: bool = True) -> None:
        self._F.requires_grad_(requires_grad)

    def _changed(self, method: str) -> Any:
        self._F = getattr(self._F, method)()
        return self

    float = partialmethod(_changed, "float")
    double = partialmethod(_changed, "double")
    detach = partialmethod(_changed, "detach")

    def _batch(self) -> tuple[Tensor, int]:
        """(batch item of each row, number of items or 0 if unknown)."""
        return self.C[:, 0].long(), 0

    @property
    def decomposition_permutations(self) -> list[Tensor]:
        """The rows of each batch item."""
        items, count = self._batch()
        return [*items.argsort(stable=True).split(torch.bincount(items, minlength=count).tolist())]

    _batchwise_row_indices = decomposition_permutations

    decomposed_coordinates = property(lambda self: [self.C[rows, 1:] for rows in self.decomposition_permutations])
    decomposed_features = property(lambda self: [self._F[rows] for rows in self.decomposition_permutations])
    decomposed_coordinates_and_features = property(lambda self: (self.decomposed_coordinates, self.decomposed_features))

    def coordinates_at(self, batch_index: int) -> Tensor:
        return self.C[self.C[:, 0] == batch_index, 1:]

    def features_at(self, batch_index: int) -> Tensor:
        return self._F[self.C[:, 0] == batch_index]

    def _binary(self, function: Callable[..., Any], other: Any) -> Any:
        return self.with_features(function(self._F, other._F if isinstance(other, FeatureTensor) else other))

    __add__ = _operator(operator.add)
    __sub__ = _operator(operator.sub)
    __mul__ = _operator(operator.mul)
    __truediv__ = _operator(operator.truediv)
    __pow__ = _operator(operator.pow)


_OLD_NAMES: Mapping[str, str] = {
    "features": "feats",
    "coordinates": "coords",
    "coordinate_map_key": "coords_key",
    "coordinate_manager": "coords_manager",
}
_IGNORED = {"allocator_type", "minkowski_algorithm", "force_creation", "allow_duplicate_coords", "D"}


def _check_names(given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := given.keys() - known - _IGNORED:
        raise OptionError(f"a tensor takes {', '.join(_OLD_NAMES)}; found {', '.join(sorted(unknown))}")


def _on_device(device: Any, *tensors: Any) -> list[Any]:
    return [each if device is None or each is None else each.to(device) for each in tensors]


class SparseTensor(FeatureTensor, Wrapped):
    """Features at distinct int32 coordinates (batch, axes...), in units of the finest voxels.

    Duplicates are joined by quantization_mode (RANDOM_SUBSAMPLE: the first of each); rows keep their order."""

    coordinate_map_key: CoordinateMapKey
    quantization_mode: Any = FIRST

    def __init__(
        self,
        features: Any = None,
        coordinates: Any = None,
        tensor_stride: Any = 1,
        coordinate_map_key: Any = None,
        coordinate_manager: Any = None,
        quantization_mode: Any = FIRST,
        *_: Any,
        requires_grad: bool | None = None,
        device: Any = None,
        **old: Any,
    ) -> None:
        _check_names(old, {*_OLD_NAMES.values()})
        given = features, coordinates, coordinate_map_key, coordinate_manager
        features, coordinates, key, manager = (old.get(*each) for each in zip(_OLD_NAMES.values(), given, strict=True))
        features, coordinates = _on_device(device, features, coordinates)
        if features is None or (coordinates is None and (key is None or manager is None)):
            raise OptionError("give features and either coordinates, or coordinate_map_key and coordinate_manager")
        if coordinates is None:
            sparse = manager.tensor(features, key)
        else:
            manager = manager or _SHARED.manager_for(coordinates)
            stride = as_axes(tensor_stride, manager.D, "tensor_stride", 1)
            key, sparse = manager.insert(features, coordinates, stride, quantization_mode)
        self.sparse, self.coordinate_map_key, self.coordinate_manager = sparse, key, manager
        self.quantization_mode = quantization_mode
        if requires_grad is not None:
            self.requires_grad_(requires_grad)

    @classmethod
    def of(cls, sparse: Any, key: CoordinateMapKey, manager: CoordinateManager) -> SparseTensor:
        """A tensor around an inner one, whose coordinates the manager keeps."""
        made = cls.__new__(cls)
        made.sparse, made.coordinate_map_key, made.coordinate_manager = sparse, key, manager
        manager.keep(key, sparse)
        return made

    def parts(self) -> tuple[list[Any], Any]:
        key, manager = self.coordinate_map_key, self.coordinate_manager
        tensors = {key: self.sparse}
        # Besides, coordinates that layers may go back to; others they make again.
        for other, level in manager.levels.items():
            finer = all(o <= t for o, t in zip(other.stride, key.stride, strict=True))
            if other != key and (finer or other in manager.given):
                level = level if _traced(level) else ops.SparseTensor(_no_features(level.coords), level)
                tensors[other] = coordinates_of(level)
        return [*tensors.values()], (manager.D, (*tensors,))

    @classmethod
    def joined(cls, tensors: list[Any], rest: Any) -> SparseTensor:
        manager = CoordinateManager(rest[0])
        for key, each in zip(rest[1], tensors, strict=True):
            manager.keep(key, each)
        manager.given.update(rest[1])
        return cls.of(tensors[0], rest[1][0], manager)

    def like(self, sparse: Any) -> SparseTensor:
        """A tensor on these coordinates around another inner one."""
        return SparseTensor.of(sparse, self.coordinate_map_key, self.coordinate_manager)

    def with_features(self, feats: Any) -> SparseTensor:
        return self.like(self.sparse.replace(feats))

    def _batch(self) -> tuple[Tensor, int]:
        return self.sparse.items, self.sparse.batch_size

    _F = property(lambda self: self.sparse.feats, lambda self, f: setattr(self, "sparse", self.sparse.replace(f)))
    C = property(lambda self: _theirs(self.sparse.coords, self.coordinate_map_key))
    coordinate_key = coords_key = property(lambda self: self.coordinate_map_key)
    tensor_stride = property(lambda self: self.coordinate_map_key.get_tensor_stride())
    inverse_mapping = property(lambda self: _inverse_of(self.sparse))
    unique_index = property(lambda self: first_rows(self.inverse_mapping, len(self)))

    def _binary(self, function: Callable[..., Any], other: Any, same: bool = False) -> Any:
        if not isinstance(other, SparseTensor):
            return super()._binary(function, other)
        manager, key = self.coordinate_manager, self.coordinate_map_key
        if key == other.coordinate_map_key and manager is other.coordinate_manager:
            try:
                return self.like(function(self.sparse, other.sparse))
            except ShapeError:  # one channel to many
                return self.with_features(function(self._F, other._F))
        if same_geometry(self.sparse, other.sparse, check=True):
            return self.with_features(function(self._F, other._F))
        if same or manager is not other.coordinate_manager:
            raise GeometryError(
                f"tensors share a coordinate_manager, and in-place forms a coordinate_map_key; found {key} and "
                f"{other.coordinate_map_key} of {'one' if manager is other.coordinate_manager else 'two'}"
            )
        joint = _over_union(self.sparse, other.sparse, function)
        return SparseTensor.of(joint, manager.free_key(key.stride, "union"), manager)

    def _in_place(self, function: Callable[..., Any], other: Any) -> SparseTensor:
        self.sparse = self._binary(function, other, same=True).sparse
        return self

    __iadd__ = partialmethod(_in_place, operator.add)
    __isub__ = partialmethod(_in_place, operator.sub)
    __imul__ = partialmethod(_in_place, operator.mul)
    __itruediv__ = partialmethod(_in_place, operator.truediv)

    def features_at_coordinates(self, query_coordinates: Tensor) -> Tensor:
        """[P, C]: multilinear interpolation at (batch, axes...) in finest units. The place of a voxel is its
        coordinate; absent voxels count as 0."""
        places = query_coordinates if query_coordinates.is_floating_point() else query_coordinates.float()
        # Ours have their places at centres.
        shift = places.new_tensor([0, *(s / 2 for s in self.coordinate_map_key.stride)])
        return ops.interpolate(self.sparse, _turned(places + shift), normalize=False)

    def interpolate(self, X: TensorField) -> TensorField:
        return X.with_features(self.features_at_coordinates(X.C))

    def slice(self, X: Any) -> TensorField:
        """The features at the points of X, a TensorField or the SparseTensor made of them."""
        if isinstance(X, TensorField):
            return X.with_features(ops.gather(self._F, X.inverse_mapping(self.coordinate_map_key), dim=0))
        if X.coordinate_map_key != self.coordinate_map_key:
            raise GeometryError(f"slice takes a tensor of {self.coordinate_map_key}, found {X.coordinate_map_key}")
        rows = X.inverse_mapping
        return TensorField(self._F[rows], self.C[rows], coordinate_manager=self.coordinate_manager)

    def cat_slice(self, X: Any) -> TensorField:
        """slice(X), followed by the features of X."""
        found, own = self.slice(X), X._F if isinstance(X, TensorField) else X._F[X.inverse_mapping]
        return found.with_features(torch.cat([found._F, own], 1))

    def dense(self, shape: Any = None, min_coordinate: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """(dense [B, C, axes...], least coordinate, tensor stride). Index 0 is min_coordinate, by default 0."""
        stride = self.sparse.coords.new_tensor(self.tensor_stride)
        if not len(self):
            if shape is None:
                raise ShapeError("a tensor without voxels takes a shape, found None")
            return self._F.new_zeros([*shape]), torch.zeros_like(stride), stride.cpu()
        places = self.sparse.coords[:, 1:].flip(1)
        least = places.amin(0, keepdim=True) * stride if min_coordinate is None else torch.as_tensor(min_coordinate)
        first = (torch.zeros_like(stride) if min_coordinate is None else least.reshape(-1).to(stride)) // stride
        if bool((places < first).any()):
            raise CoordinateError(f"min_coordinate is at most the coordinates', found {(first * stride).tolist()}")
        extent = (places.amax(0) - first + 1).tolist() if shape is None else shape[2:]
        found = ops.to_dense(self.sparse, extent[::-1], first.flip(0).tolist())
        found = found.permute(0, 1, *range(self.D + 1, 1, -1))
        if shape is not None and shape[0] > len(found):
            found = torch.cat([found, found.new_zeros(shape[0] - len(found), *found.shape[1:])])
        return found, least, stride.cpu()


def _over_union(x: Any, y: Any, function: Callable[..., Any]) -> Any:
    """function(x, y) where both have a voxel, function(0, y) where y alone has one, x where x alone has one."""
    if function in (operator.add, operator.sub):
        return function(x, y)
    both = ops.union(x.detach(), y.detach())
    rows, others = both.geometry.find(x.coords), both.geometry.find(y.coords)
    left = x.feats.new_zeros(both.feats.shape).index_copy(0, rows, x.feats)
    return both.replace(left.index_copy(0, others, function(left[others], y.feats)))


class TensorField(FeatureTensor):
    """Features at points (batch, axes...), which `sparse()` voxelises and a SparseTensor's `slice` returns to."""

    def __init__(
        self,
        features: Any,
        coordinates: Any = None,
        tensor_stride: Any = 1,
        coordinate_field_map_key: Any = None,
        coordinate_manager: Any = None,
        quantization_mode: Any = MEAN,
        *_: Any,
        requires_grad: bool | None = None,
        device: Any = None,
        **old: Any,
    ) -> None:
        _check_names(old, set())
        if quantization_mode not in (FIRST, *_REDUCE):
            raise OptionError(f"a TensorField has the mode FIRST, MEAN, SUM or MAX, found {quantization_mode!r}")
        if coordinates is None and (coordinate_field_map_key is None or coordinate_manager is None):
            raise OptionError("give either coordinates, or coordinate_field_map_key and coordinate_manager")
        self._F, coordinates = _on_device(device, features, coordinates)
        if coordinates is not None:
            coordinate_manager = coordinate_manager or _SHARED.manager_for(coordinates)
            coordinate_field_map_key = coordinate_manager.insert_field(coordinates, tensor_stride)
        if requires_grad is not None:
            self.requires_grad_(requires_grad)
        self.coordinate_manager: Any = coordinate_manager
        self.coordinate_field_map_key, self.quantization_mode = coordinate_field_map_key, quantization_mode

    C = property(lambda self: self.coordinate_manager.fields[self.coordinate_field_map_key])
    coordinate_key = property(lambda self: self.coordinate_field_map_key)

    def with_features(self, feats: Any) -> TensorField:
        made = TensorField.__new__(TensorField)
        made.__dict__.update(self.__dict__, _F=feats)
        return made

    def sparse(
        self, tensor_stride: Any = 1, coordinate_map_key: Any = None, quantization_mode: Any = None
    ) -> SparseTensor:
        """The voxels of the points, or of those within the voxels of a key."""
        mode = self.quantization_mode if quantization_mode is None else quantization_mode
        manager, field, key = self.coordinate_manager, self.coordinate_field_map_key, coordinate_map_key
        if key is not None:
            place, rows = self.inverse_mapping(key), len(manager.level(key))
            inside = (place >= 0).nonzero()[:, 0]
            feats = ops.scatter(self._F[inside], place[inside], 0, dim_size=rows, reduce=_REDUCE.get(mode, "mean"))
            return SparseTensor.of(manager.tensor(feats, key), key, manager)
        stride = as_axes(tensor_stride, self.D, "tensor_stride", 1)
        found = voxels(self._F, self.C, stride, mode, True)
        key = manager.voxelised.get((field, stride))
        if key is not None:
            return SparseTensor.of(manager.tensor(found.feats, key), key, manager)
        key = manager.voxelised[field, stride] = manager.free_key(stride)
        manager.inverses[field, key] = found.inverse
        manager.give(key, found)
        return SparseTensor.of(found, key, manager)

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> Tensor:
        """int64 [P]: the row of each point's voxel, -1 if absent."""
        manager, key = self.coordinate_manager, sparse_tensor_map_key
        if (self.coordinate_field_map_key, key) not in manager.inverses:
            place = manager.level(key).find(_units(self.C, key.stride, exact=False))
            manager.inverses[self.coordinate_field_map_key, key] = place
        return manager.inverses[self.coordinate_field_map_key, key]


def _field_of(tensors: Any, rest: Any) -> TensorField:
    manager = CoordinateManager(rest[0])
    manager.fields[rest[1]] = tensors[1]
    return TensorField(tensors[0], None, 1, rest[1], manager, rest[2])


pytree.register_pytree_node(
    TensorField, lambda x: ([x._F, x.C], (x.D, x.coordinate_field_map_key, x.quantization_mode)), _field_of
)
