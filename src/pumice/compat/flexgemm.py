"""FlexGEMM over pumice: JeffreyXiang/FlexGEMM at 1.1.0, flex_gemm/ops, and its branch dev/all_triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Geometry, deserialize, serialize
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.ops import SparseTensor, conv, interpolate


@dataclass(frozen=True, eq=False)
class NeighborCache:
    """What calls on the same coordinates share: the coordinates, and their kernel maps of any window."""

    inputs: Geometry
    outputs: Geometry | None = None


class Algorithm:
    """Names that set_algorithm takes; pumice chooses by itself."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


def set_algorithm(algorithm: str) -> None:
    """No effect. Raises OptionError for an unknown name."""
    known = [value for name, value in vars(Algorithm).items() if name.isupper()]
    OptionError.check("algorithm", algorithm, known)


def set_hashmap_ratio(ratio: float) -> None:
    """No effect."""


def sparse_submanifold_conv(
    feats: Tensor,
    coords: Tensor,
    shape: Sequence[int] | None,
    weight: Any,
    bias: Any = None,
    neighbor_cache: Any = None,
    dilation: Any = 1,
    algorithm: str | None = None,
) -> tuple[Tensor, NeighborCache]:
    """(features [N, C_out], cache) of pumice.ops.conv on unchanged coordinates.

    coords: int [N, 1+D] = (batch, axes...); shape: (batch, C, extents...) or None; weight: [C_out, *kernel, C_in];
    neighbor_cache: of an earlier call on the same coordinates. Older forks take (feats, coords, shape, neighbor_cache,
    weight, bias): known by the types. Raises OptionError for even kernels, and as pumice.ops.conv.
    """
    if weight is None or isinstance(weight, NeighborCache):
        weight, bias, neighbor_cache = bias, neighbor_cache, weight
    if any(k % 2 == 0 for k in weight.shape[1:-1]):
        raise OptionError(f"a submanifold convolution takes odd kernels, found {[*weight.shape[1:-1]]}")
    x = _tensor(feats, coords, shape, neighbor_cache)
    return conv(x, weight, bias, dilation=dilation).feats, neighbor_cache or NeighborCache(x.geometry)


def sparse_submanifold_conv_any_offset(
    feats: Tensor,
    coords: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    neighbor_cache: NeighborCache | None = None,
    algorithm: str | None = None,
) -> tuple[Tensor, NeighborCache]:
    """As sparse_submanifold_conv, over offsets int [K, D], with weight [C_out, K, C_in]."""
    x = _tensor(feats, coords, None, neighbor_cache)
    y = conv(x, weight, bias, offsets=offsets.tolist(), out="same")
    return y.feats, neighbor_cache or NeighborCache(x.geometry)


def sparse_conv3d(
    feats: Tensor,
    coords: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None = None,
    neighbor_cache: NeighborCache | None = None,
    out_coords: Tensor | None = None,
    stride: Any = (1, 1, 1),
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
) -> tuple[Tensor, Tensor, NeighborCache]:
    """(features [M, C_out], coordinates int32 [M, 4], cache): the active set of the dense convolution, in the order of
    pumice, or at `out_coords`. Raises as pumice.ops.conv."""
    x = _tensor(feats, coords, shape, neighbor_cache)
    out: Any = "support"
    if neighbor_cache is not None:
        out = neighbor_cache.outputs
        if out is None:
            raise OptionError("neighbor_cache is that of a sparse_conv3d, found one of a submanifold convolution")
    elif out_coords is not None:
        out = Geometry.checked(_integers(out_coords), stride, batch_size=shape[0])
    y = conv(x, weight, bias, stride=stride, padding=padding, dilation=dilation, out=out)
    return y.feats, y.coords, neighbor_cache or NeighborCache(x.geometry, y.geometry)


def _tensor(feats: Tensor, coords: Tensor, shape: Sequence[int] | None, cache: NeighborCache | None) -> SparseTensor:
    if cache is not None:
        return SparseTensor(feats, cache.inputs)
    extents, items = (None, None) if shape is None else (tuple(shape[2:]), int(shape[0]))
    return SparseTensor(feats, _integers(coords), 1, extents, items, dim=coords.shape[1] - 1)


def _integers(coords: Tensor) -> Tensor:
    if coords.is_floating_point():
        raise DtypeError(f"coords are integers, found {coords.dtype}")
    return coords.int()


def grid_sample_3d(
    feats: Tensor, coords: Tensor, shape: Sequence[int], grid: Tensor, mode: str = "trilinear"
) -> Tensor:
    """[B, L, C]: features at positions grid [B, L, 3], in voxels with centres at 1/2; see pumice.ops.interpolate."""
    if grid.shape[2:] != (3,):
        raise ShapeError(f"grid is [B, L, 3], found {[*grid.shape]}")
    x = _tensor(feats, coords, (grid.shape[0], 0, *shape[-3:]), None)
    items = torch.arange(len(grid), device=grid.device, dtype=grid.dtype)[:, None, None].expand(*grid.shape[:2], 1)
    return interpolate(x, torch.cat([items, grid], 2).flatten(0, 1), mode).view(*grid.shape[:2], x.channels)


CURVES = {"z_order": "morton", "hilbert": "hilbert"}


def encode_seq(coords: Tensor, shape: Sequence[int], mode: str = "z_order") -> Tensor:
    """[N]: places of coords int [N, 4] along a curve, see pumice.serialize; int32 if 32 bits hold them, else int64."""
    depth, bits = _bits(shape)
    codes = serialize(_integers(coords), _curve(mode), depth)
    return codes.int() if bits <= 32 else codes


def decode_seq(code: Tensor, shape: Sequence[int], mode: str = "z_order") -> Tensor:
    """int32 [N, 4]: the inverse of encode_seq."""
    wide = code.long() & 0xFFFFFFFF if code.dtype == torch.int32 else code
    return deserialize(wide, 3, _curve(mode), _bits(shape)[0])


def _bits(shape: Sequence[int]) -> tuple[int, int]:
    """(bits of an axis, bits of a code) for shape (batch, C, extents...)."""
    depth = (max(shape[2:]) - 1).bit_length()
    return max(depth, 1), (shape[0] - 1).bit_length() + 3 * depth


def _curve(mode: str) -> str:
    OptionError.check("mode", mode, CURVES)
    return CURVES[mode]


_SPCONV = {
    "Algorithm": Algorithm,
    "set_algorithm": set_algorithm,
    "set_hashmap_ratio": set_hashmap_ratio,
    "sparse_conv3d": sparse_conv3d,
    "sparse_submanifold_conv": sparse_submanifold_conv,
    "sparse_submanifold_conv3d": sparse_submanifold_conv,
    "sparse_submanifold_conv_any_offset": sparse_submanifold_conv_any_offset,
}

MODULES: dict[str, dict[str, Any]] = {
    "flex_gemm": {"__version__": "1.1.0"},
    "flex_gemm.ops": {},
    "flex_gemm.ops.spconv": _SPCONV,
    "flex_gemm.ops.grid_sample": {"grid_sample_3d": grid_sample_3d, "set_hashmap_ratio": set_hashmap_ratio},
    "flex_gemm.ops.serialize": {"encode_seq": encode_seq, "decode_seq": decode_seq},
}
