"""Whether two results of one network are the same within rounding, where they may have been summed in other orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


_AMPLIFIED = 16
"""How much more than a rounding of the input all roundings on the way are reckoned to change."""


def steps_differ(
    names: Sequence[str], steps: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], kind: torch.dtype
) -> str | None:
    """How what a step gave (loss, gradients, statistics; of these names) differs by more than rounding; or None.

    steps: as it is, as it should be, and as it would be with an input that was rounded to `kind` once more: norms of
    few voxels and sums that cancel make much of that. A gradient that is 0 but for rounding (of a bias before a norm)
    is measured by the others.
    """
    limit = 2 * _LIMITS[kind][0]
    sizes = torch.stack([_rms(want) for want in steps[1]])
    usual = 0.02 * float(sizes.nan_to_num().square().mean().sqrt())
    noise = torch.stack([_rms(a.double() - b.double()) for a, b in zip(steps[2], steps[1], strict=True)])
    errors = torch.stack([_rms(a.double() - b.double()) for a, b in zip(steps[0], steps[1], strict=True)])
    most = limit * sizes.clamp(min=usual + torch.finfo(kind).tiny) + _AMPLIFIED * noise
    # What is not finite is no rounding, unless it should not be finite.
    wrong = ~(errors <= most) & sizes.isfinite()
    if not bool(wrong.any()):
        return None
    first = int(wrong.int().argmax())
    told = f"rms error {float(errors[first]):.3g} of {float(sizes[first]):.3g}, at most {float(most[first]):.3g}"
    return f"{names[first]}: {told} ({kind})"


def _rms(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt() if values.numel() else values.new_zeros((), dtype=torch.float64)


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
