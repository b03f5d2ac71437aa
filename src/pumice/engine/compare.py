"""Whether two results of one network are the same within rounding, where they may have been summed in other orders."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pumice.ops import SparseTensor

_LIMITS: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {
        torch.float64: (1e-10, 1e-9),
        torch.float32: (2e-3, 2e-2),
        torch.float16: (2e-2, 0.2),
        torch.bfloat16: (1e-1, 1.0),
    }
)
"""The largest rms error and the largest error of an entry, both over the rms of what is wanted: of whole networks,
whose roundings add up. A row that is wrong has an error of about 1."""
_LABELS = 0.01
"""Of integers, which stand for classes, the share that may differ."""


def differ(got: Any, want: Any) -> str | None:
    """How two results differ by more than rounding, or None."""
    if isinstance(want, SparseTensor) != isinstance(got, SparseTensor):
        return f"a {type(got).__name__} where there should be a {type(want).__name__}"
    if isinstance(want, SparseTensor):
        if got.coords.shape != want.coords.shape or not bool((got.coords == want.coords).all()):
            return f"{len(got.feats)} voxels, which are not the {len(want.feats)} that there should be"
        return _values(got.feats, want.feats)
    if isinstance(want, Tensor):
        return _values(got, want) if isinstance(got, Tensor) else "no tensor"
    return None if got == want else f"{got!r} where there should be {want!r}"


def _values(got: Tensor, want: Tensor) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{list(got.shape)} of {got.dtype} where there should be {list(want.shape)} of {want.dtype}"
    if not want.numel():
        return None
    limits = _LIMITS.get(want.dtype)
    if limits is None:
        wrong = int((got != want).sum())
        return f"{wrong} of {want.numel()} entries" if wrong > max(1, _LABELS * want.numel()) else None
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs())
    finite = torch.where(b.isfinite(), b, 0.0)
    scale = finite.square().mean().sqrt().clamp(min=torch.finfo(want.dtype).tiny)
    mean, most = float(error.square().mean().sqrt() / scale), float(error.max() / scale)
    if mean <= limits[0] and most <= limits[1]:
        return None
    return f"rms error {mean:.3g} and largest error {most:.3g}, of {limits[0]:.3g} and {limits[1]:.3g} ({want.dtype})"
