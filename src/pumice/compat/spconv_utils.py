"""spconv's voxelisers and hash table, and registries of other packages that name its layers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from pumice.compat.install import module_of
from pumice.coords import as_axes, as_tensor, unique_coords
from pumice.errors import DeviceError, OptionError, ShapeError


def first_rows(coords: Tensor) -> Tensor:
    """int64 [N]: the lowest row of each of the distinct `coords` int [P, 1+D], in (batch, Morton) order."""
    return _lowest(unique_coords(coords.int(), dim=coords.shape[1] - 1).inverse)


def _lowest(inverse: Tensor | None) -> Tensor:
    assert inverse is not None
    rows = torch.arange(len(inverse), device=inverse.device)
    count = int(inverse.max()) + 1 if len(inverse) else 0
    return rows.new_full((count,), len(inverse)).scatter_reduce(0, inverse, rows, "amin")


class PointToVoxel:
    """Groups points [P, F] by voxel, as spconv.pytorch.utils.PointToVoxel:

        voxel of p = floor((p[:D] - low) / size), dropped outside the range or once max_num_voxels are taken

    Voxels come in the order of their first points, and hold the first max_num_points_per_voxel points of theirs.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ndim, self.device = len(vsize_xyz), torch.device(device)
        if len(coors_range_xyz) != 2 * self.ndim:
            raise ShapeError(f"the range has {2 * self.ndim} numbers, low and high, found {len(coors_range_xyz)}")
        self.num_point_features, self.max_num_voxels = num_point_features, max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel
        low, high, size = coors_range_xyz[: self.ndim], coors_range_xyz[self.ndim :], vsize_xyz
        cells = [round((h - a) / s) for a, h, s in zip(low, high, size, strict=True)]
        # spconv keeps the axes in the order of its indices, last first.
        self.vsize, self.grid_size, self.coors_range = [*size][::-1], cells[::-1], [*low[::-1], *high[::-1]]

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(voxels [V, max points, F], indices int32 [V, D] with the last axis of the points first, points per voxel
        int32 [V]). Unused places hold 0 or, with empty_mean, the mean of the voxel's points."""
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a call, and int64 [P]: the voxel of each point, -1 if dropped."""
        if pc.device.type != self.device.type:
            raise DeviceError(f"this object voxelises points on {self.device}, found {pc.device}")
        if pc.ndim != 2 or pc.shape[1] != self.num_point_features:
            raise ShapeError(f"points are [P, {self.num_point_features}], found {[*pc.shape]}")
        with torch.no_grad():
            return self._voxels(pc, empty_mean)

    def _voxels(self, pc: Tensor, empty_mean: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cells, kept = self._cells(pc)
        geometry = unique_coords(torch.cat([cells.new_zeros(len(cells), 1), cells], 1), dim=self.ndim)
        first, inverse = _lowest(geometry.inverse), geometry.inverse
        order = first.argsort()[: self.max_num_voxels]
        rank = torch.full_like(first, -1)
        rank[order] = torch.arange(len(order), device=pc.device)
        ids = torch.full((len(pc),), -1, device=pc.device)
        ids[kept] = rank[inverse]
        points = (ids >= 0).nonzero()[:, 0]
        points, place = self._places(points, ids[points], len(order))
        voxels = pc.new_zeros(len(order), self.max_num_points_per_voxel, pc.shape[1])
        voxels[ids[points], place] = pc[points]
        counts = torch.bincount(ids[points], minlength=len(order))
        if empty_mean:
            free = torch.arange(voxels.shape[1], device=pc.device) >= counts[:, None]
            voxels = torch.where(free[:, :, None], (voxels.sum(1) / counts[:, None])[:, None], voxels)
        return voxels, cells[first[order]], counts.int(), ids

    def _cells(self, pc: Tensor) -> tuple[Tensor, Tensor]:
        """(cells int32 [Q, D], last axis first, of the points within the range, bool [P]: which these are)."""
        low, size = pc.new_tensor(self.coors_range[: self.ndim]), pc.new_tensor(self.vsize)
        cells = torch.floor((pc[:, : self.ndim].flip(1) - low) / size)
        kept = ((cells >= 0) & (cells < cells.new_tensor(self.grid_size))).all(1)
        return cells[kept].int(), kept

    def _places(self, points: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(points that find a place, place of each among its voxel's, in the order of points)."""
        order = ids.argsort(stable=True)
        begin = torch.bincount(ids, minlength=count).cumsum(0).roll(1)
        begin[:1] = 0
        place = torch.empty_like(ids)
        place[order] = torch.arange(len(ids), device=ids.device) - begin[ids[order]]
        kept = place < self.max_num_points_per_voxel
        return points[kept], place[kept]


class Point2VoxelCPU3d(PointToVoxel):
    """spconv.utils.Point2VoxelCPU3d; torch tensors take the place of cumm's, and have `numpy()` too."""

    def point_to_voxel(self, pc: Any, clear_voxels: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """(voxels, indices, points per voxel), see PointToVoxel."""
        return self(as_tensor(pc, "pc"), clear_voxels)

    def point_to_voxel_empty_mean(self, pc: Any, clear_voxels: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """point_to_voxel with the mean of a voxel's points in unused places."""
        return self(as_tensor(pc, "pc"), clear_voxels, True)


class Point2VoxelCPU1d(Point2VoxelCPU3d): ...


class Point2VoxelCPU2d(Point2VoxelCPU3d): ...


class Point2VoxelCPU4d(Point2VoxelCPU3d): ...


class VoxelGenerator:
    """spconv 1's voxeliser of NumPy points [P, F]; `generate` returns (voxels, coordinates zyx, points per voxel)."""

    def __init__(
        self,
        voxel_size: Sequence[float],
        point_cloud_range: Sequence[float],
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
        **options: Any,
    ) -> None:
        if options.get("block_filtering"):
            raise OptionError("block_filtering=True is not offered; found it set: filter the points before")
        self.voxel_size, self.point_cloud_range = (
            np.array(voxel_size, np.float32),
            np.array(point_cloud_range, np.float32),
        )
        self.max_num_points_per_voxel, self._max_voxels, self._full_mean = max_num_points, max_voxels, full_mean
        low, high = self.point_cloud_range[:3], self.point_cloud_range[3:]
        self.grid_size = np.round((high - low) / self.voxel_size).astype(np.int64)

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> Any:
        limits = max_voxels or self._max_voxels, self.max_num_points_per_voxel
        size, span = self.voxel_size.tolist(), self.point_cloud_range.tolist()
        made = PointToVoxel(size, span, points.shape[1], *limits)
        return tuple(each.numpy() for each in made(torch.from_numpy(points), empty_mean=self._full_mean))


class VoxelGeneratorV2(VoxelGenerator):
    """VoxelGenerator whose `generate` returns a dictionary."""

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> dict[str, Any]:
        voxels, coordinates, counts = super().generate(points, max_voxels)
        used = np.arange(voxels.shape[1]) < counts[:, None]
        return {
            "voxels": voxels,
            "coordinates": coordinates,
            "num_points_per_voxel": counts,
            "voxel_point_mask": used[..., None].astype(voxels.dtype),
            "voxel_num": len(voxels),
        }


def gather_features_by_pc_voxel_id(features: Tensor, pc_voxel_id: Tensor, invalid_value: float = 0) -> Tensor:
    """features[pc_voxel_id], invalid_value where it is -1."""
    ids = pc_voxel_id.to(features.device)
    found = features.new_full((len(ids), *features.shape[1:]), invalid_value)
    kept = ids != -1
    found[kept] = features[ids[kept]]
    return found


def expand_nd(ndim: int, value: Any) -> list[int]:
    """`value`, an integer or one per axis, as a list."""
    return [*as_axes(value, ndim, "value", -(2**31))]


class HashTable:
    """Integer keys and their values on the host, as spconv.pytorch.hash.HashTable; of equal keys the last counts."""

    def __init__(
        self, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype, max_size: int = -1
    ) -> None:
        self.device, self.key_dtype, self.value_dtype, self.max_size = device, key_dtype, value_dtype, max_size
        self._kept: dict[int, Any] = {}

    def insert(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Add keys, with values or 0."""
        self._kept.update(zip(keys.tolist(), [0] * len(keys) if values is None else values.tolist(), strict=True))

    def query(self, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(values, written to `values` if given; bool: the key is absent)."""
        found = self._tensor([self._kept.get(key, 0) for key in keys.tolist()], self.value_dtype)
        absent = self._tensor([key not in self._kept for key in keys.tolist()], torch.bool)
        return (found if values is None else values.copy_(torch.where(absent, values, found))), absent

    def insert_exist_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Set values of keys that exist; uint8: 1 for those that do not."""
        absent = self.query(keys)[1]
        self.insert(keys[~absent], values[~absent])
        return absent.to(torch.uint8)

    def assign_arange_(self) -> Tensor:
        """Set the values to 0, 1, ...; returns their number, [1]."""
        self._kept = {key: place for place, key in enumerate(self._kept)}
        return self._tensor([len(self._kept)], torch.int64)

    def items(self, max_size: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """(keys, values, their number [1])."""
        end = len(self._kept) if max_size < 0 else max_size
        keys = self._tensor([*self._kept][:end], self.key_dtype)
        return keys, self.query(keys)[0], self._tensor([len(self._kept)], torch.int64)

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


# Other packages


def register(names: Mapping[str, Any]) -> None:
    """Put layers, by name, where mmcv and mmdet3d look for spconv's: into mmcv.ops and mmdet3d.ops.spconv, which they
    bring compiled, and into their registries of layers, under the names of configurations."""
    sys.modules["mmdet3d.ops.spconv"] = module_of("spconv", "mmdet3d.ops.spconv", names)
    if _imported("mmcv") is None:
        sys.modules["mmcv"] = module_of("spconv", "mmcv", {})
    if (operators := _imported("mmcv.ops")) is not None:
        vars(operators).update(names)
    else:
        sys.modules["mmcv.ops"] = sys.modules["mmcv"].ops = module_of("spconv", "mmcv.ops", names)  # pyright: ignore
    for path, kept in (("mmengine.registry", "MODELS"), ("mmcv.cnn", "CONV_LAYERS")):
        registry: Any = getattr(_imported(path), kept, None)
        for name, layer in names.items():
            if registry is not None and isinstance(layer, type) and issubclass(layer, Module):
                registry.register_module(name=name, module=layer, force=True)


def _imported(path: str) -> Any:
    """The module, None if it cannot be imported: not installed, or installed without its compiled parts."""
    try:
        return importlib.import_module(path)
    except ImportError:
        return None
