"""Compare two results of a network up to rounding; sums may have been taken in different orders."""

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
"""Limits of (rms error, largest error) relative to the expected rms, by dtype; a wrong row has an error near 1."""
_LABELS = 0.01  # Share of integer entries (class labels) that may differ
_SHAKEN = 4  # Size of a perturbation, in roundings (eps)
_NOISE = 8  # Allowed rms error, as a multiple of the rms change caused by the perturbation


def perturb(feats: Tensor, like: Iterable[Any]) -> Tensor:
    """Perturb features by +-_SHAKEN roundings of the coarsest dtype among them and the tensors in `like`."""
    held = (x.feats if isinstance(x, SparseTensor) else x for x in like)
    kinds = {x.dtype for x in held if isinstance(x, Tensor) and x.is_floating_point()} | {feats.dtype}
    if not feats.is_floating_point():
        return feats
    step = _SHAKEN * max(torch.finfo(kind).eps for kind in kinds)
    up = torch.randint(0, 2, feats.shape, generator=torch.Generator().manual_seed(0)).to(feats.device) * 2 - 1
    return (feats.double() * (1 + step * up)).to(feats.dtype)


def differ(got: Any, want: Any, again: Any = None) -> str | None:
    """Description of how two results differ by more than rounding, or None.

    again: the expected result for perturbed features. Values that the perturbation changes much (a mean of normalised
    values, 0 up to rounding) have no significant digits to compare.
    """
    if isinstance(want, SparseTensor) != isinstance(got, SparseTensor):
        return f"found a {type(got).__name__}, expected a {type(want).__name__}"
    if isinstance(want, SparseTensor):
        if got.coords.shape != want.coords.shape or not bool((got.coords == want.coords).all()):
            return f"found {len(got.feats)} voxels, which are not the {len(want.feats)} expected ones"
        return _values(got.feats, want.feats, again.feats if isinstance(again, SparseTensor) else None)
    if isinstance(want, Tensor):
        return _values(got, want, again) if isinstance(got, Tensor) else "found no tensor"
    return None if got == want else f"found {got!r}, expected {want!r}"


AMPLIFIED = 16  # Assumed effect of all intermediate roundings, as a multiple of the effect of rounding the input once


def steps_differ(names: Sequence[str], steps: Sequence[Sequence[Tensor]], kind: torch.dtype, more: int) -> str | None:
    """Description of how a step's results (loss, gradients, statistics; by name) differ by more than rounding, or None.

    steps: actual and expected results, then expected results for inputs with further roundings to `kind`, which norms
    over few voxels and cancelling sums amplify. more: accepted error, as a multiple of the change by those roundings.
    A gradient that is 0 up to rounding (of a bias before a norm) is judged by the scale of the others.
    """
    got, wanted, *others = steps
    limit = 2 * _LIMITS[kind][0]
    sizes = torch.stack([_size(want) for want in wanted])
    usual = 0.02 * float(sizes.nan_to_num().square().mean().sqrt())
    noise = torch.stack([_apart(other, wanted) for other in others]).amax(0)
    errors = _apart(got, wanted)
    most = limit * sizes.clamp(min=usual + torch.finfo(kind).tiny) + more * noise
    # Non-finite values are wrong unless the expected ones are non-finite, too.
    wrong = ~(errors <= most) & sizes.isfinite()
    if not bool(wrong.any()):
        return None
    first = int(wrong.int().argmax())
    error = f"rms error {float(errors[first]):.3g} of {float(sizes[first]):.3g}, at most {float(most[first]):.3g}"
    return f"{names[first]}: {error} ({kind})"


def _apart(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([_size(a.double() - b.double()) for a, b in zip(first, second, strict=True)])


def _size(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt() if values.numel() else values.new_zeros((), dtype=torch.float64)


def _values(got: Tensor, want: Tensor, again: Tensor | None) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"found {list(got.shape)} of {got.dtype}, expected {list(want.shape)} of {want.dtype}"
    if not want.numel():
        return None
    limits = _LIMITS.get(want.dtype)
    if limits is None:
        wrong = int((got != want).sum())
        return f"{wrong} of {want.numel()} entries differ" if wrong > max(1, _LABELS * want.numel()) else None
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs())
    scale = _rms(b).clamp(min=torch.finfo(want.dtype).tiny)
    if again is not None and again.shape == want.shape:
        scale = torch.maximum(scale, _rms(again.double() - b) * _NOISE / limits[0])
    mean, most = float(error.square().mean().sqrt() / scale), float(error.max() / scale)
    if mean <= limits[0] and most <= limits[1]:
        return None
    return f"rms error {mean:.3g}, largest error {most:.3g}, limits {limits[0]:.3g} and {limits[1]:.3g} ({want.dtype})"


def _rms(values: Tensor) -> Tensor:
    """Root mean square of the finite values."""
    return torch.where(values.isfinite(), values, 0.0).square().mean().sqrt()
