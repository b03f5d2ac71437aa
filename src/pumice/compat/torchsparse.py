"""torchsparse over pumice: this module's names are those of version 2.1; `version("1.4")` has those of 1.4.

Rules: mit-han-lab/torchsparse at v1.4.0 and v2.1.0; see pumice.compat.torchsparse_tensors for the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
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
    PointTensor,
    SparseTensor,
    SparseTensor14,
    TensorCache,
    conv3d,
    conv3d_14,
    make_ntuple,
    sparse_collate,
)
from pumice.compat.wrapped import call_layer
from pumice.coords import Geometry
from pumice.errors import OptionError
from pumice.ops import cat as joined
from pumice.ops import einsum, scatter


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Channels one after the other."""
    return inputs[0].like(joined([x.sparse for x in inputs]))


def fapply(input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """The same coordinates with fn(features)."""
    return input.like(input.sparse.replace(fn(input.feats, *args, **kwargs)))


# Layers


class _OnTensors:
    """Mixin: a layer of pumice on torchsparse's tensors."""

    keeps_rows: bool

    def forward(self, x: Any) -> Any:
        layer: Any = super()
        if not isinstance(x, SparseTensor):
            return layer.forward(x)
        y = call_layer(self, layer.forward, x.sparse)
        return x.like(y) if self.keeps_rows else y


def _on_tensors(base: type, keeps_rows: bool = True) -> Any:
    """The class of torchsparse.nn with the name of a layer of pumice."""
    own = {"__module__": __name__, "__doc__": base.__doc__, "keeps_rows": keeps_rows}
    return type(base.__name__, (_OnTensors, base), own)


BatchNorm, GroupNorm = _on_tensors(pnn.BatchNorm), _on_tensors(pnn.GroupNorm)
ReLU, LeakyReLU, SiLU = _on_tensors(pnn.ReLU), _on_tensors(pnn.LeakyReLU), _on_tensors(pnn.SiLU)
GlobalAvgPool, GlobalMaxPool = _on_tensors(pnn.GlobalAvgPool, False), _on_tensors(pnn.GlobalMaxPool, False)


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


def calc_ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """[P, 8]: weights of the eight voxels around each point [P, 3], the last axis fastest; 0 for those of index -1."""
    with torch.no_grad():
        ahead = coords[:, :3] / scale
        ahead = ahead - torch.floor(ahead)
        x, y, z = torch.stack([1 - ahead, ahead], 1).unbind(2)
        weights = (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).flatten(1)
        weights = weights.masked_fill(idx_query == -1, 0)
        return weights / (weights.sum(1, keepdim=True) + 1e-8)


def _ti_weights_14(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """[8, P]: those of 1.4, whose idx_query is [8, P], too."""
    return calc_ti_weights(coords, idx_query.t(), scale).t().contiguous()


def get_kernel_offsets(size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu") -> Tensor:
    """int32 [K, 3]: the taps in the order of a kernel: x fastest if K is odd, else z fastest."""
    size, stride, dilation = (make_ntuple(value, 3) for value in (size, stride, dilation))
    axes = [torch.arange((1 - k) // 2, k // 2 + 1)[-k:] * s * d for k, s, d in zip(size, stride, dilation, strict=True)]
    if math.prod(size) % 2:
        return torch.cartesian_prod(*reversed(axes)).flip(1).int().to(device)
    return torch.cartesian_prod(*axes).int().to(device)


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
    """torchsparse.backend.GPUHashTable of coordinates int [N, 4] = (x, y, z, batch). Its arrays are not used."""

    _cells: Geometry | None = None

    def __init__(self, keys: Tensor, vals: Tensor) -> None: ...

    def insert_coords(self, coords: Tensor) -> None:
        self._cells = Geometry.checked(coords[:, [3, 0, 1, 2]].int())

    def lookup_coords(self, coords: Tensor, kernel_sizes: Any, strides: Any, kernel_volume: Any) -> Tensor:
        """int32 [N, K]: the places of coords * strides + tap, from 1; 0 for what is absent."""
        assert self._cells is not None
        taps = get_kernel_offsets(kernel_sizes, device=coords.device)
        steps = coords.new_tensor(make_ntuple(strides, 3))
        at = (coords[:, None, :3] * steps + taps).flatten(0, 1)
        items = coords[:, 3:].repeat_interleave(len(taps), 0)
        return (self._cells.find(torch.cat([items, at], 1).int()) + 1).int().view(-1, len(taps))


# Settings: accepted. What changes results is read when a layer or a tensor is made, never in a forward pass.


Dataflow = Enum("Dataflow", ("ImplicitGEMM", "GatherScatter", "FetchOnDemand", "CodedCSR"), start=0)
ConvMode = Enum("ConvMode", ("mode0", "mode1", "mode2"), start=0)


def _ignored(*_: Any, **__: Any) -> None:
    """A setting without effect."""


def get_default_conv_config(conv_mode: Any = None, training: bool = False) -> ConvConfig:
    """A configuration; kmap_mode and downsample_mode count."""
    modes = {"kmap_mode": "hashmap_on_the_fly", "downsample_mode": "spconv"}
    return ConvConfig(dataflow=Dataflow(0), ifsort=False, **modes)


def set_global_conv_config(conv_config: Any) -> None:
    """The configuration of the layers made from now on."""
    tensors.GLOBAL_CONFIG[:] = [conv_config]


def _set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    SparseTensor.allow_negative = bool(allow_negative_coordinates)


# Import names


def _by_name(*each: Any) -> dict[str, Any]:
    return {found.__name__: found for found in each}


def _modules(version: str) -> dict[str, dict[str, Any]]:
    """The modules of a version, by dotted name below the package; "" is the package."""
    new = version == V21
    tensor = {"SparseTensor": SparseTensor if new else SparseTensor14, "PointTensor": PointTensor}
    layers = _by_name(BatchNorm, GroupNorm, ReLU, LeakyReLU, SiLU, GlobalAvgPool, GlobalMaxPool)
    layers["Conv3d"] = Conv3d if new else Conv3d14
    functions = _by_name(sphash, sphashquery, spcount, spvoxelize, spdevoxelize) | {
        "calc_ti_weights": calc_ti_weights if new else _ti_weights_14,
        "conv3d": conv3d if new else conv3d_14,
    }
    utils, release = _by_name(get_kernel_offsets, fapply), {"__version__": f"{version}.0"}
    found = {
        "": {**tensor, **release, "cat": cat},
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
        "version": release,
    }
    if new:
        _add_settings(found)
    for child in ("conv", "devoxelize", "voxelize", "count", "hash", "query"):
        found[f"nn.functional.{child}"] = functions
    for child in ("conv", "norm", "activation", "pooling"):
        found[f"nn.modules.{child}"] = layers
    return found | {"nn.utils.kernel": utils, "nn.utils.apply": utils, "utils.utils": found["utils"]}


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
    found["tensor"] = {
        **found["tensor"],
        "set_allow_negative_coordinates": _set_allow_negative_coordinates,
        "get_allow_negative_coordinates": lambda: SparseTensor.allow_negative,
    }
    found["utils"]["make_tensor"] = lambda x, dtype, device: torch.tensor(x, dtype=dtype, device=device)
    found["utils.tensor_cache"] = {"TensorCache": TensorCache}


VERSIONS: Mapping[str, dict[str, dict[str, Any]]] = {V14: _modules(V14), V21: _modules(V21)}


def modules_of(mode: str | None) -> Mapping[str, Mapping[str, Any]]:
    """MODULES of other stand-ins, of version "1.4" or "2.1" (the default). Raises OptionError for others."""
    return {f"torchsparse.{path}".removesuffix("."): names for path, names in _named(mode or V21).items()}


def _named(mode: str) -> dict[str, dict[str, Any]]:
    OptionError.check("mode", mode, VERSIONS)
    return VERSIONS[mode]


def version(mode: str) -> SimpleNamespace:
    """The names of a version, "1.4" or "2.1", as torchsparse has them: `version("1.4").nn.Conv3d`."""
    made = {path: SimpleNamespace(**names) for path, names in _named(mode).items()}
    for path in sorted(made)[1:]:
        parent, _, child = path.rpartition(".")
        setattr(made[parent], child, made[path])
    return made[""]


nn, utils, backend, backends = (getattr(version(V21), name) for name in ("nn", "utils", "backend", "backends"))
