"""Whether two results of one network are the same within rounding, where they may have been summed in other orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pumice.ops import SparseTensor

_LIMITS: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {torch.float64: (1e-10, 1e-9), torch.float32: (2e-3, 2e-2), torch.float16: (2e-2, 0.2), torch.bfloat16: (1e-1, 1.0)}
)
"""The largest rms error and the largest error of an entry, both over the rms of what is wanted: of whole networks,
whose roundings add up. A row that is wrong has an error of about 1."""
_LABELS = 0.01
"""Of integers, which stand for classes, the share that may differ."""
_SHAKEN = 4
"""Roundings of an entry of what a network is asked again with."""
_NOISE = 8
"""How many times the rms of what these change an rms error may be that is rounding, too."""


def perturb(feats: Tensor, like: Iterable[Any]) -> Tensor:
    """Features some roundings up or down; of the coarsest dtype among them and the tensors in `like`."""
    held = (x.feats if isinstance(x, SparseTensor) else x for x in like)
    kinds = {x.dtype for x in held if isinstance(x, Tensor) and x.is_floating_point()} | {feats.dtype}
    if not feats.is_floating_point():
        return feats
    step = _SHAKEN * max(torch.finfo(kind).eps for kind in kinds)
    up = torch.randint(0, 2, feats.shape, generator=torch.Generator().manual_seed(0)).to(feats.device) * 2 - 1
    return (feats.double() * (1 + step * up)).to(feats.dtype)


def differ(got: Any, want: Any, again: Any = None) -> str | None:
    """How two results differ by more than rounding, or None.

    again: what is wanted for features that are `perturb`. What that changes has no digits that could be compared, as a
    mean over what was normalised, which is 0 but for rounding.
    """
    if isinstance(want, SparseTensor) != isinstance(got, SparseTensor):
        return f"a {type(got).__name__} where there should be a {type(want).__name__}"
    if isinstance(want, SparseTensor):
        if got.coords.shape != want.coords.shape or not bool((got.coords == want.coords).all()):
            return f"{len(got.feats)} voxels, which are not the {len(want.feats)} that there should be"
        return _values(got.feats, want.feats, again.feats if isinstance(again, SparseTensor) else None)
    if isinstance(want, Tensor):
        return _values(got, want, again) if isinstance(got, Tensor) else "no tensor"
    return None if got == want else f"{got!r} where there should be {want!r}"


AMPLIFIED = 16
"""How much more than a rounding of the input all roundings on the way are reckoned to change."""


def steps_differ(names: Sequence[str], steps: Sequence[Sequence[Tensor]], kind: torch.dtype, more: int) -> str | None:
    """How what a step gave (loss, gradients, statistics; of these names) differs by more than rounding; or None.

    steps: as it is, as it should be, and as it would be with inputs that were rounded to `kind` once more, or more
    often: norms of few voxels and sums that cancel make much of that. more: how many times what that changes is
    rounding. A gradient that is 0 but for rounding (of a bias before a norm) is measured by the others.
    """
    got, wanted, *others = steps
    limit = 2 * _LIMITS[kind][0]
    sizes = torch.stack([_size(want) for want in wanted])
    usual = 0.02 * float(sizes.nan_to_num().square().mean().sqrt())
    noise = torch.stack([_apart(other, wanted) for other in others]).amax(0)
    errors = _apart(got, wanted)
    most = limit * sizes.clamp(min=usual + torch.finfo(kind).tiny) + more * noise
    # What is not finite is no rounding, unless it should not be finite.
    wrong = ~(errors <= most) & sizes.isfinite()
    if not bool(wrong.any()):
        return None
    first = int(wrong.int().argmax())
    told = f"rms error {float(errors[first]):.3g} of {float(sizes[first]):.3g}, at most {float(most[first]):.3g}"
    return f"{names[first]}: {told} ({kind})"


def _apart(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([_size(a.double() - b.double()) for a, b in zip(first, second, strict=True)])


def _size(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt() if values.numel() else values.new_zeros((), dtype=torch.float64)


def _values(got: Tensor, want: Tensor, again: Tensor | None) -> str | None:
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
    scale = _rms(b).clamp(min=torch.finfo(want.dtype).tiny)
    if again is not None and again.shape == want.shape:
        scale = torch.maximum(scale, _rms(again.double() - b) * _NOISE / limits[0])
    mean, most = float(error.square().mean().sqrt() / scale), float(error.max() / scale)
    if mean <= limits[0] and most <= limits[1]:
        return None
    return f"rms error {mean:.3g} and largest error {most:.3g}, of {limits[0]:.3g} and {limits[1]:.3g} ({want.dtype})"


def _rms(values: Tensor) -> Tensor:
    """Of those that are finite."""
    return torch.where(values.isfinite(), values, 0.0).square().mean().sqrt()
