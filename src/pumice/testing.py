"""Testing utilities: comparison with tolerances, random point clouds, and a reference convolution.

Public, for tests of other packages; not imported by the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pumice.coords import Geometry, Relation, kernel_map
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.lower import reference
from pumice.ops import SparseTensor

__all__ = ["TOLERANCES", "assert_close", "random_cloud", "random_tensor", "reference_conv"]

_SHOWN = 5

# For low precision 4 ulp and 1 ulp: operands and result rounded once each, with sums in at least float32.
TOLERANCES = MappingProxyType(
    {
        torch.float64: (1e-10, 2e-11),
        torch.float32: (2e-5, 4e-6),
        torch.float16: (4 * 2**-10, 2**-10),
        torch.bfloat16: (4 * 2**-7, 2**-7),
    }
)
"""Tolerances of assert_close by dtype: (largest error, rms error), both relative."""


def assert_close(actual: Any, expected: Any, *, dtype: torch.dtype | None = None, scale: float | None = None) -> None:
    """Raise AssertionError unless `actual` equals `expected` up to the rounding of `dtype`.

        max over i of  |actual_i - expected_i| / max(scale, |expected_i|)   <=  TOLERANCES[dtype][0]
        rms over i of  |actual_i - expected_i| / scale                      <=  TOLERANCES[dtype][1]

    The first detects a single wrong entry, the second a small error everywhere. Both are computed in float64. NaN and
    infinities must be at the same positions. Sparse tensors must also have the same coordinates in the same order.

    Parameters
    ----------
    actual, expected: tensors, arrays, numbers, or two SparseTensors; of equal shape, on any devices.
    dtype: selects the tolerance; default the less precise of both.
    scale: magnitude of the summed values; default the rms of `expected`. Set it if sums cancel.

    The message gives errors, limits, and the worst entries with positions and values.
    Raises DtypeError for a dtype without a tolerance.
    """
    rows = None
    if isinstance(actual, SparseTensor) and isinstance(expected, SparseTensor):
        rows = actual.coords.cpu()
        _check_coords(rows, expected.coords.cpu())
        actual, expected = actual.feats, expected.feats
    got, want = _array(actual), _array(expected)
    dtype = dtype or _coarser(actual, expected)
    if dtype not in TOLERANCES:
        raise DtypeError(f"no tolerance for {dtype}; expected one of {', '.join(map(str, TOLERANCES))}")
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    if not want.size:
        return
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want))
    # A value that is finite on one side only has an infinite error, and is listed first.
    error = np.where(np.isnan(error), np.inf, error)
    finite = want[np.isfinite(want)]
    size = scale if scale is not None else float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    size = max(size, np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        relative = error / np.maximum(size, np.where(np.isfinite(want), np.abs(want), 0))
        rms = float(np.sqrt(np.mean((error / size) ** 2)))
    limits = TOLERANCES[dtype]
    if relative.max() > limits[0] or rms > limits[1]:
        raise AssertionError(_complaint((got, want, relative), rms, limits, dtype, rows))


def random_cloud(
    count: int,
    dim: int = 3,
    *,
    extent: int | Sequence[int] | None = None,
    batch_size: int = 1,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Distinct random coordinates int32 [count, 1+dim] = (batch, axes...) in random order, platform-independent.

    Axes are in [0, extent); by default the box is about a third full, so that neighbours are common. Sizes of batch
    items differ by at most one. Raises OptionError if the box has too few cells.
    """
    shares = [count // batch_size + (item < count % batch_size) for item in range(batch_size)]
    shape = _extent(extent, dim, max(shares))
    cells = math.prod(shape)
    if max(shares) > cells:
        raise OptionError(f"{max(shares)} distinct coordinates per batch item do not fit into {shape} = {cells} cells")
    rng = np.random.default_rng([seed, dim])
    items = []
    for item, share in enumerate(shares):
        chosen = rng.choice(cells, share, replace=False, shuffle=False)
        axes = np.unravel_index(chosen, shape)
        items.append(np.stack([np.full(share, item), *axes], axis=1))
    coords = rng.permutation(np.concatenate(items)).astype(np.int32)
    return torch.from_numpy(coords).to(device)


def random_tensor(
    count: int,
    channels: int,
    dim: int = 3,
    *,
    extent: int | Sequence[int] | None = None,
    batch_size: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> SparseTensor:
    """SparseTensor on random_cloud() with standard normal features [count, channels].

    Features are drawn in float64, then cast to `dtype`: equal for every dtype and device, up to rounding.
    """
    coords = random_cloud(count, dim, extent=extent, batch_size=batch_size, seed=seed, device=device)
    feats = np.random.default_rng([seed, dim, channels]).standard_normal((count, channels))
    return SparseTensor(torch.from_numpy(feats).to(device, dtype), coords, batch_size=batch_size, dim=dim)


def reference_conv(
    x: SparseTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    groups: int = 1,
    out: str | SparseTensor | Geometry | None = None,
    offsets: Sequence[Sequence[int]] | None = None,
    **window: Any,
) -> SparseTensor:
    """Reference for pumice.ops.conv: a loop over kernel offsets in float64 on the CPU.

        y[o, n] = bias[n] + sum over offsets r and inputs i with  in = stride * out + dilation * r - padding  of
                  x[i, c] * weight[n, r, c]

    Arguments as in pumice.ops.conv; `window` is stride, padding and dilation. The kernel map is rebuilt on the CPU from
    the coordinates alone, and values only pass through pumice.lower.reference. Differentiable by torch's autograd;
    gradients of x.feats, weight and bias have the dtype and device of each.

    Returns a SparseTensor of float64 on the CPU, in the row order of pumice.ops.conv.
    """
    geometry = _bare(x)
    target = None if out is None or isinstance(out, str) else geometry if _same(out, x) else _bare(out)
    policy = out if isinstance(out, str) else None if out is None else "given"
    if offsets is None:
        relation = Relation.of(x.spatial_dim, tuple(weight.shape[1:-1]), policy=policy, **window)
    else:
        relation = Relation.of_offsets(x.spatial_dim, offsets, policy=policy, **window)
    found, outputs = kernel_map(geometry, relation, target)
    flat = weight.cpu().double().flatten(1, -2)
    y = reference.forward(x.feats.cpu().double(), flat, found.pairs(), len(outputs), groups)
    return SparseTensor(y if bias is None else y + bias.cpu().double(), outputs)


def _bare(x: SparseTensor | Geometry) -> Geometry:
    """Coordinates on the CPU, without cached kernel maps."""
    geometry = x.geometry if isinstance(x, SparseTensor) else x
    return Geometry(geometry.coords.cpu(), geometry.site)


def _same(out: SparseTensor | Geometry, x: SparseTensor) -> bool:
    return (out.geometry if isinstance(out, SparseTensor) else out) is x.geometry


def _extent(extent: int | Sequence[int] | None, dim: int, count: int) -> tuple[int, ...]:
    if extent is None:
        extent = max(1, math.ceil((3 * count) ** (1 / dim)))
    shape = (extent,) * dim if isinstance(extent, int) else tuple(extent)
    if len(shape) != dim:
        raise ShapeError(f"extent has {len(shape)} entries, the cloud has {dim} axes")
    return shape


def _array(values: Any) -> np.ndarray:
    if isinstance(values, SparseTensor):
        raise ShapeError("a SparseTensor can only be compared with a SparseTensor; compare its feats with a tensor")
    if isinstance(values, Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, np.float64)


def _coarser(actual: Any, expected: Any) -> torch.dtype:
    """The less precise of the floating dtypes of both; float64 if there is none."""
    dtypes = [torch.as_tensor(values).dtype for values in (actual, expected)]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _check_coords(got: Tensor, want: Tensor) -> None:
    if got.shape == want.shape and bool((got == want).all()):
        return
    a, b = ([tuple(row) for row in coords.tolist()] for coords in (got, want))
    missing, extra = sorted(set(b) - set(a)), sorted(set(a) - set(b))
    if missing or extra:
        raise AssertionError(
            f"coordinates: {len(missing)} missing {missing[:_SHOWN]}, {len(extra)} not expected {extra[:_SHOWN]}"
        )
    row = next(i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
    raise AssertionError(f"coordinates: the order differs from row {row} on: {a[row]}, expected {b[row]}")


def _complaint(
    entries: tuple[np.ndarray, np.ndarray, np.ndarray],
    rms: float,
    limits: tuple[float, float],
    dtype: torch.dtype,
    rows: Tensor | None,
) -> str:
    """The message of assert_close: errors over limits, then the worst entries."""
    got, want, relative = entries
    wrong = int((relative > limits[0]).sum())
    lines = [
        f"largest relative error {relative.max():.3g} (limit {limits[0]:.3g}), rms error {rms:.3g} "
        f"(limit {limits[1]:.3g}) for {dtype}; {wrong} of {relative.size} entries beyond the limit; the worst:"
    ]
    for flat in np.argsort(-relative, axis=None, kind="stable")[:_SHOWN]:
        at = tuple(int(i) for i in np.unravel_index(flat, relative.shape))
        voxel = "" if rows is None else f" of voxel {tuple(rows[at[0]].tolist())}"
        lines.append(f"  {list(at)}{voxel}: {got[at]:.9g}, expected {want[at]:.9g} (error {relative[at]:.3g})")
    return "\n".join(lines)
