"""torchsparse over pumice: this module's names are those of version 2.1; `version("1.4")` has those of 1.4.

Rules: mit-han-lab/torchsparse at v1.4.0 and v2.1.0; see pumice.compat.torchsparse_tensors for the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import pumice.nn as pnn
from pumice.compat import torchsparse_tensors as tensors
from pumice.compat.torchsparse_tensors import (
    V14,
    V21,
    Conv3d,
    Conv3d14,
    ConvConfig,
    ConvWindow,
    Level,
    PointTensor,
    SparseTensor,
    SparseTensor14,
    TensorCache,
    conv3d,
    conv3d_14,
    make_ntuple,
    overlapping_outputs,
    sparse_collate,
)
from pumice.compat.wrapped import call_layer
from pumice.coords import Geometry, kernel_map
from pumice.errors import OptionError
from pumice.ops import cat as joined
from pumice.ops import coalesce, einsum, scatter, to_bev, union


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Channels one after the other."""
    return inputs[0].like(joined([x.sparse for x in inputs]))


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """The sum over the union of the coordinates."""
    sparse = union(a.sparse, b.sparse)
    return a.like(sparse, Level(sparse.geometry, a.spatial_range))


def fapply(input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """The same coordinates with fn(features)."""
    return input.like(input.sparse.replace(fn(input.feats, *args, **kwargs)))


# Layers


class _OnTensors:
    """Mixin: a layer of pumice on torchsparse's tensors."""

    def forward(self, x: Any) -> Any:
        layer: Any = super()
        if not isinstance(x, SparseTensor):
            return layer.forward(x)
        y = call_layer(self, layer.forward, x.sparse)
        return x.like(y) if self.keeps_rows else y

    keeps_rows = True


class BatchNorm(_OnTensors, pnn.BatchNorm):
    """torchsparse.nn.BatchNorm."""


class GroupNorm(_OnTensors, pnn.GroupNorm):
    """torchsparse.nn.GroupNorm: over the voxels of each batch item."""


class ReLU(_OnTensors, pnn.ReLU):
    """torchsparse.nn.ReLU."""


class LeakyReLU(_OnTensors, pnn.LeakyReLU):
    """torchsparse.nn.LeakyReLU."""


class SiLU(_OnTensors, pnn.SiLU):
    """torchsparse.nn.SiLU."""


class InstanceNorm(torch.nn.InstanceNorm1d):
    """torchsparse.nn.InstanceNorm: torch's InstanceNorm1d of features [N, C], which normalises each row."""

    def forward(self, x: SparseTensor) -> SparseTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return fapply(x, super().forward)


class GlobalAvgPool(_OnTensors, pnn.GlobalAvgPool):
    """torchsparse.nn.GlobalAvgPool: [B, C]."""

    keeps_rows = False


class GlobalMaxPool(_OnTensors, pnn.GlobalMaxPool):
    """torchsparse.nn.GlobalMaxPool: [B, C]."""

    keeps_rows = False


class SparseCrop(torch.nn.Module):
    """torchsparse.nn.SparseCrop: see spcrop."""

    def __init__(self, coords_min: Any = None, coords_max: Any = None) -> None:
        super().__init__()
        self.coords_min, self.coords_max = coords_min, coords_max

    def forward(self, x: SparseTensor) -> SparseTensor:
        return spcrop(x, self.coords_min, self.coords_max)


class _ToDense(torch.nn.Module):
    """Base of the layers that make a dense map. shape: cells along (x, y, z); offset: the corner, in finest voxels;
    dim: the axis that is dropped, 0 to 2 for x to z."""

    def __init__(self, shape: Any, offset: Any, dim: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor([[*offset, 0]], dtype=torch.int32))
        self.register_buffer("shape", torch.as_tensor(shape).int())
        self.extents, self.corner, self.dim = tuple(map(int, shape)), tuple(map(int, offset)), dim

    def cells(self, x: SparseTensor) -> Tensor:
        """int32 [N, 4] = (batch, x, y, z): cells of the map."""
        found = x.sparse.coords[:, [0, 3, 2, 1]]
        steps, shift = found.new_tensor((1, *x.stride)), found.new_tensor((0, *self.corner))
        return torch.div(found * steps - shift, steps, rounding_mode="floor") if any(self.corner) else found


class ToDenseBEVConvolution(_ToDense):
    """[B, C_out, ...]: sum over the voxels of a column of features times the kernel of their height."""

    def __init__(
        self, in_channels: int, out_channels: int, shape: Any, offset: Any = (0, 0, 0), dim: int = 1, bias: bool = False
    ) -> None:
        super().__init__(shape, offset, dim)
        bound = 1 / math.sqrt(in_channels)
        kernel = torch.empty(self.extents[dim], in_channels, out_channels).uniform_(-bound, bound)
        self.kernel = torch.nn.Parameter(kernel)
        self.bias = torch.nn.Parameter(torch.zeros(1, out_channels)) if bias else 0

    def forward(self, x: SparseTensor) -> Tensor:
        at, items = self.cells(x).long(), x.sparse.batch_size
        first, second = (axis for axis in range(3) if axis != self.dim)
        rows, columns = self.extents[first], self.extents[second]
        height = x.sparse.coords[:, 3 - self.dim].long()
        feats = einsum("y[n,o] = x[n,c] * k[h[n],c,o]", x=x.feats, k=self.kernel, h=height) + self.bias
        place = (at[:, 0] * rows + at[:, 1 + first]) * columns + at[:, 1 + second]
        dense = scatter(feats, place, 0, dim_size=items * rows * columns)
        return dense.view(items, rows, columns, -1).permute(0, 3, 1, 2).contiguous()


class ToBEVHeightCompression(_ToDense):
    """[B, n * C, ...]: pumice.ops.to_bev, with channel z * C + c for channel c at height z of n."""

    def __init__(self, channels: int, shape: Any, offset: Any = (0, 0, 0), dim: int = 1) -> None:
        super().__init__(shape, offset, dim)
        self.channels = channels

    def forward(self, x: SparseTensor) -> Tensor:
        at, heights = self.cells(x).clone(), self.extents[self.dim]
        at[:, 1 + self.dim] = at[:, 1 + self.dim].clamp(0, heights - 1)
        flat = to_bev(coalesce(x.feats, at, "sum"), self.dim, self.extents)
        return flat.unflatten(1, (-1, heights)).transpose(1, 2).flatten(1, 2)


# Functions


def sphash(coords: Tensor, offsets: Tensor | None = None) -> Tensor:
    """int64 [N], or [K, N] of coords [N, 4] plus offsets [K, 3] in their first columns: FNV-1a over the four int32,
    folded to 60 bits (torchsparse, backend/hash/hash_cpu.cpp)."""
    given = coords.long()
    if offsets is not None:
        given = given + functional.pad(offsets.long(), (0, 1))[:, None]
    found = torch.full_like(given[..., 0], 14695981039346656037 - 2**64)
    for column in given.unbind(-1):
        found = (found ^ (column & 0xFFFFFFFF)) * 1099511628211
    return (found >> 60 & 15) ^ (found & (2**60 - 1))


def sphashquery(queries: Tensor, references: Tensor) -> Tensor:
    """int64, the shape of `queries`: the place of each among `references` [M], -1 if absent."""
    if not len(references):
        return torch.full_like(queries, -1)
    ranked, order = torch.sort(references)
    place = torch.searchsorted(ranked, queries.contiguous()).clamp(max=len(references) - 1)
    return torch.where(ranked[place] == queries, order[place], -1)


def spcount(coords: Tensor, num: Any) -> Tensor:
    """int32 [num]: how often each index occurs; negative ones are left out."""
    counts = torch.zeros(int(num) + 1, dtype=torch.int32, device=coords.device)
    return counts.index_add_(0, coords.long() + 1, torch.ones_like(coords, dtype=torch.int32))[1:]


def spvoxelize(feats: Tensor, coords: Tensor, counts: Tensor) -> Tensor:
    """[M, C]: the mean of the features [P, C] of each voxel. coords: int [P], the voxel of each point, -1 for none;
    counts: int [M], the points of each voxel."""
    sums = scatter(feats, coords.long() + 1, 0, dim_size=len(counts) + 1)[1:]
    return sums / counts.clamp(min=1)[:, None].to(sums.dtype)


def spdevoxelize(feats: Tensor, coords: Tensor, weights: Tensor) -> Tensor:
    """[P, C]: y[p, c] = sum over k of weights[p, k] * feats[coords[p, k], c]; no term for coords -1."""
    text = "y[p,c] = w[p,k] * x[at[p,k],c]"
    return einsum(text, w=weights.to(feats.dtype), x=feats, at=coords.long())


def _ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1, corners_first: bool = False) -> Tensor:
    """Weights of the eight voxels around each point [P, 3], the last axis fastest: [P, 8], or [8, P] in 1.4."""
    with torch.no_grad():
        ahead = coords[:, :3] / scale
        ahead = ahead - torch.floor(ahead)
        sides = torch.stack([1 - ahead, ahead], 1)
        x, y, z = sides.unbind(2)
        weights = (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).flatten(1)
        absent = (idx_query.t() if corners_first else idx_query) == -1
        weights = weights.masked_fill(absent, 0)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-8)
        return weights.t().contiguous() if corners_first else weights


def get_kernel_offsets(size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu") -> Tensor:
    """int32 [K, 3]: the taps in the order of a kernel: x fastest if K is odd, else z fastest."""
    size, stride, dilation = (make_ntuple(value, 3) for value in (size, stride, dilation))
    axes = [torch.arange((1 - k) // 2, k // 2 + 1)[-k:] * s * d for k, s, d in zip(size, stride, dilation, strict=True)]
    if math.prod(size) % 2:
        return torch.cartesian_prod(*reversed(axes)).flip(1).int().to(device)
    return torch.cartesian_prod(*axes).int().to(device)


def _downsampled(x: SparseTensor, window: ConvWindow) -> Tensor:
    relation = window.relation
    if relation.policy == "given":
        geometry = overlapping_outputs(x, window)
    else:
        geometry = kernel_map(x.sparse.geometry, relation)[1]
    stride = tuple(a * b for a, b in zip(x.stride, window.stride, strict=True))
    return x.like(
        tensors.tensor_at(x.feats.new_zeros(len(geometry), 1), geometry), Level(geometry, None), stride
    ).coords


def spdownsample(
    _coords: Tensor,
    stride: Any = 2,
    kernel_size: Any = 2,
    padding: Any = 0,
    spatial_range: Any = None,
    downsample_mode: str = "spconv",
) -> Tensor:
    """int32 [M, 4]: the outputs of a strided convolution of 2.1, in the order of pumice."""
    made = SparseTensor(torch.zeros(len(_coords), 1, device=_coords.device), _coords, 1, spatial_range)
    kernel, stride, padding = (make_ntuple(value, 3) for value in (kernel_size, stride, padding))
    floors = all(s in (1, k) for s, k in zip(stride, kernel, strict=True)) or downsample_mode == "minkowski"
    return _downsampled(made, ConvWindow(kernel, stride, padding, "hashmap minkowski" if floors else V21))


def _spdownsample_14(coords: Tensor, stride: Any = 2, kernel_size: Any = 2, tensor_stride: Any = 1) -> Tensor:
    """int32 [M, 4]: the outputs of a strided convolution of 1.4 on a tensor of stride `tensor_stride`."""
    made = SparseTensor14(torch.zeros(len(coords), 1, device=coords.device), coords, tensor_stride)
    return _downsampled(made, ConvWindow(make_ntuple(kernel_size, 3), make_ntuple(stride, 3), (0, 0, 0), V14))


def spcrop(input: SparseTensor, coords_min: Any = None, coords_max: Any = None) -> SparseTensor:
    """The voxels with coords_min <= (x, y, z) < coords_max, in the units of `coords`; without caches."""
    places = input.coords[:, :3] if input.version == V14 else input.coords[:, 1:]
    inside = torch.ones_like(places, dtype=torch.bool)
    if coords_min is not None:
        inside &= places >= places.new_tensor(coords_min)
    if coords_max is not None:
        inside &= places < places.new_tensor(coords_max)
    rows = inside.all(1)
    return type(input)(input.feats[rows], input.coords[rows], input.stride)


def sparse_quantize(
    coords: Any, voxel_size: Any = 1, *, return_index: bool = False, return_inverse: bool = False
) -> Any:
    """The distinct cells of points [P, 3], int32 arrays ordered by (x, y, z); and the first point of each, and the cell
    of each point."""
    cells = np.floor(np.asarray(coords) / np.asarray(make_ntuple(voxel_size, 3))).astype(np.int32)
    found, index, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    more = [*([index] if return_index else []), *([inverse.reshape(-1)] if return_inverse else [])]
    return [found, *more] if more else found


def sparse_collate_fn(inputs: Sequence[Any]) -> Any:
    """Samples, dictionaries of tensors, arrays and SparseTensors, as one batch."""
    if not isinstance(inputs[0], dict):
        return inputs
    return {name: _collated([sample[name] for sample in inputs]) for name in inputs[0]}


def _collated(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return sparse_collate_fn(values)
    if isinstance(first, SparseTensor):
        return sparse_collate(values)
    return torch.stack([torch.as_tensor(v) for v in values]) if isinstance(first, Tensor | np.ndarray) else values


class GPUHashTable:
    """torchsparse.backend.GPUHashTable; results are places from 1, 0 for what is absent. The arrays are not used."""

    def __init__(self, keys: Tensor, vals: Tensor) -> None:
        self._values: Tensor | None = None
        self._cells: Geometry | None = None

    def insert_vals(self, keys: Tensor) -> None:
        self._values = keys

    def lookup_vals(self, keys: Tensor) -> Tensor:
        assert self._values is not None
        return (sphashquery(keys, self._values) + 1).int()

    def insert_coords(self, coords: Tensor) -> None:
        self._cells = Geometry.checked(coords[:, [3, 0, 1, 2]].int())

    def lookup_coords(self, coords: Tensor, kernel_sizes: Any, strides: Any, kernel_volume: Any) -> Tensor:
        """int32 [N, K]: the places of coords * strides + tap, for coords int [N, 4] = (x, y, z, batch)."""
        assert self._cells is not None
        taps = get_kernel_offsets(kernel_sizes, device=coords.device)
        steps = coords.new_tensor(make_ntuple(strides, 3))
        at = (coords[:, None, :3] * steps + taps).flatten(0, 1)
        items = coords[:, 3:].repeat_interleave(len(taps), 0)
        return (self._cells.find(torch.cat([items, at], 1).int()) + 1).int().view(-1, len(taps))


# Settings: accepted. What changes results is read when a layer or a tensor is made, never in a forward pass.


class Dataflow(Enum):
    """torchsparse.nn.functional.Dataflow: pumice chooses by itself."""

    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


class ConvMode(Enum):
    """torchsparse.nn.functional.ConvMode: no effect."""

    mode0 = 0
    mode1 = 1
    mode2 = 2


class TensorCacheMode(Enum):
    """torchsparse.utils.tensor_cache.TensorCacheMode."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    """Raises OptionError for a global cache."""
    if mode is TensorCacheMode.GLOBAL_TENSOR_CACHE:
        raise OptionError(
            "caches go with tensors: expected SEPARATE_TENSOR_CACHE, found GLOBAL_TENSOR_CACHE; share one "
            "by `y._caches = x._caches`"
        )


def _ignored(*_: Any, **__: Any) -> None:
    """A setting without effect."""


def get_default_conv_config(conv_mode: Any = None, training: bool = False) -> ConvConfig:
    modes = {"kmap_mode": "hashmap_on_the_fly", "downsample_mode": "spconv"}
    return ConvConfig(dataflow=Dataflow.ImplicitGEMM, ifsort=False, **modes)


def set_global_conv_config(conv_config: Any) -> None:
    """The configuration of the layers made from now on."""
    tensors.GLOBAL_CONFIG[:] = [conv_config]


def _set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    SparseTensor.allow_negative = bool(allow_negative_coordinates)


# Import names


def _modules(version: str) -> dict[str, dict[str, Any]]:
    """The modules of a version, by dotted name below the package; "" is the package."""
    new = version == V21
    tensor = {"SparseTensor": SparseTensor if new else SparseTensor14, "PointTensor": PointTensor}
    layers: dict[str, Any] = {each.__name__: each for each in (BatchNorm, GroupNorm, InstanceNorm, ReLU, LeakyReLU)}
    layers |= {each.__name__: each for each in (SiLU, GlobalAvgPool, GlobalMaxPool, SparseCrop)}
    layers |= {each.__name__: each for each in (ToDenseBEVConvolution, ToBEVHeightCompression)}
    layers["Conv3d"] = Conv3d if new else Conv3d14
    functions: dict[str, Any] = {
        each.__name__: each for each in (sphash, sphashquery, spcount, spvoxelize, spdevoxelize, spcrop)
    }
    functions |= {
        "calc_ti_weights": _ti_weights if new else partial(_ti_weights, corners_first=True),
        "conv3d": conv3d if new else conv3d_14,
        "spdownsample": spdownsample if new else _spdownsample_14,
        "global_avg_pool": lambda x: pnn.GlobalAvgPool()(x.sparse),
        "global_max_pool": lambda x: pnn.GlobalMaxPool()(x.sparse),
        "relu": lambda x, inplace=True: fapply(x, functional.relu, inplace=inplace),
        "silu": lambda x, inplace=True: fapply(x, functional.silu, inplace=inplace),
        "leaky_relu": lambda x, negative_slope=0.1, inplace=True: fapply(
            x, functional.leaky_relu, negative_slope, inplace
        ),
    }
    utils = {"get_kernel_offsets": get_kernel_offsets, "fapply": fapply}
    found = {
        "": {**tensor, "cat": cat, "__version__": "2.1.0" if new else "1.4.0"},
        "tensor": tensor,
        "operators": {"cat": cat},
        "nn": layers,
        "nn.modules": layers,
        "nn.functional": functions,
        "nn.utils": utils,
        "utils": {"make_ntuple": make_ntuple},
        "utils.quantize": {"sparse_quantize": sparse_quantize},
        "utils.collate": {"sparse_collate": sparse_collate, "sparse_collate_fn": sparse_collate_fn},
        "backend": {"GPUHashTable": GPUHashTable},
        "backends": {"benchmark": False, "allow_tf32": True, "allow_fp16": True, "hash_rsv_ratio": 2, "init": _ignored},
        "version": {"__version__": "2.1.0" if new else "1.4.0"},
    }
    if new:
        _add_settings(found)
    for child in ("conv", "devoxelize", "voxelize", "count", "hash", "query", "downsample", "crop", "activation"):
        found[f"nn.functional.{child}"] = functions
    for child in ("conv", "norm", "activation", "pooling", "crop", "bev"):
        found[f"nn.modules.{child}"] = layers
    found |= {"nn.utils.kernel": utils, "nn.utils.apply": utils, "utils.utils": found["utils"]}
    return found


def _add_settings(found: dict[str, dict[str, Any]]) -> None:
    """Add what 2.1 has besides."""
    config = {
        "get_default_conv_config": get_default_conv_config,
        "get_global_conv_config": lambda: next(iter(tensors.GLOBAL_CONFIG), None),
        "set_global_conv_config": set_global_conv_config,
        "clear_global_conv_config": tensors.GLOBAL_CONFIG.clear,
        "Dataflow": Dataflow,
    }
    modes = dict.fromkeys(("set_conv_mode", "set_kmap_mode", "set_downsample_mode"), _ignored)
    found["nn.functional"] |= {"Dataflow": Dataflow, "ConvMode": ConvMode, **modes}
    found["nn.functional.conv_config"] = found["nn.functional.conv.conv_config"] = config
    found[""]["generative_add"] = found["operators"]["generative_add"] = generative_add
    found["tensor"] = {
        **found["tensor"],
        "set_allow_negative_coordinates": _set_allow_negative_coordinates,
        "get_allow_negative_coordinates": lambda: SparseTensor.allow_negative,
    }
    found["utils"]["make_tensor"] = lambda x, dtype, device: torch.tensor(x, dtype=dtype, device=device)
    found["utils.tensor_cache"] = {
        "TensorCache": TensorCache,
        "TensorCacheMode": TensorCacheMode,
        "set_tensor_cache_mode": set_tensor_cache_mode,
        "get_tensor_cache_mode": lambda: TensorCacheMode.SEPARATE_TENSOR_CACHE,
        "clear_global_tensor_cache": _ignored,
    }


VERSIONS: Mapping[str, dict[str, dict[str, Any]]] = {V14: _modules(V14), V21: _modules(V21)}

MODULES: dict[str, dict[str, Any]] = {}
"""The modules that pumice.compat.install puts under their import names; `installing` fills it."""


def installing(mode: str | None) -> None:
    """Choose the version that MODULES has: "1.4" or "2.1", which is the default. Raises OptionError for others."""
    modules = _modules_of(V21 if mode is None else mode)
    MODULES.clear()
    MODULES.update({f"torchsparse.{path}".removesuffix("."): names for path, names in modules.items()})


def _modules_of(mode: str) -> dict[str, dict[str, Any]]:
    if mode not in VERSIONS:
        raise OptionError(f"mode is one of {', '.join(VERSIONS)}, found {mode!r}")
    return VERSIONS[mode]


def version(mode: str) -> SimpleNamespace:
    """The names of a version, "1.4" or "2.1", as torchsparse has them: `version("1.4").nn.Conv3d`."""
    made = {path: SimpleNamespace(**names) for path, names in _modules_of(mode).items()}
    for path in sorted(made)[1:]:
        parent, _, child = path.rpartition(".")
        setattr(made[parent], child, made[path])
    return made[""]


installing(None)
nn, utils, backend, backends = (getattr(version(V21), name) for name in ("nn", "utils", "backend", "backends"))
