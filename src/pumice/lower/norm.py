"""Batch normalisation over the first rows of a buffer, where the device alone knows how many those are.

    y[n, c] = (x[n, c] - mean[c]) / sqrt(variance[c] + eps) * weight[c] + bias[c]        rows n < count

Mean and biased variance of the rows that live, in at least float32, summed in a fixed order (Ioffe and Szegedy, "Batch
Normalization", ICML 2015, algorithm 1; partial sums put together as in Chan, Golub and LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances", 1979). Rows that do not live may hold anything and are not
written.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.coords.launch import Launcher, runs_kernels


@dataclass(frozen=True, eq=False)
class Rows:
    """count int32 [1] on the device: how many rows live; alive bool [N, 1]: which."""

    count: Tensor
    alive: Tensor


def batch_norm(
    x: Tensor, rows: Rows, affine: tuple[Tensor | None, Tensor | None], known: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y in the dtype of x, mean [C], variance [C]) of the living rows of x [N, C]; differentiable in x and affine.

    affine: weight and bias [C]. known: mean and variance by which fewer than two rows are normalised; they are then
    what is returned.
    """
    found = _BatchNorm.apply(x, *affine, rows, known, eps)
    return found[0], found[1], found[2]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Rows,
        known: tuple[Tensor, Tensor],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()
        mean, variance = statistics(x, rows, known)
        scale = (variance + eps).rsqrt()
        y = normalised(x, rows, (mean, scale, weight, bias))
        ctx.rows = rows
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, mean, scale = ctx.saved_tensors
        grad = grad.contiguous()
        sums, products = sums_of(grad, x, ctx.rows, (mean, scale))
        dx = gradient(grad, x, ctx.rows, (mean, scale, weight, sums, products)) if ctx.needs_input_grad[0] else None
        dweight = products.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, sums.to(bias.dtype) if ctx.needs_input_grad[2] else None, None, None, None


_ROWS = 64
"""Rows that a program looks at in one turn."""
_CHANNELS = 64
"""Channels of a program, at most."""
_PARTS = 512
"""Into how many parts rows are shared for sums, at most."""


def statistics(x: Tensor, rows: Rows, known: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the living rows, in at least float32; fewer than two have those that are known."""
    if not _by_kernels(x):
        return statistics_twin(x, rows, known)
    parts, mean, variance = _parts(x), _empty(x), _empty(x)
    halves = torch.empty(2, parts, x.shape[1], dtype=torch.float32, device=x.device)
    _kernel("moments")(parts * _sides(x), (x, rows.count, halves), (parts,), _shape(x))
    told = (rows.count, halves, known[0], known[1], mean, variance)
    _kernel("joined_moments")(-(-x.shape[1] // _LANES), told, (parts,), _joining(x) | {"ROWS": _ROWS})
    return mean, variance


def statistics_twin(x: Tensor, rows: Rows, known: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """As statistics, in plain torch."""
    count, several = rows.count.clamp(min=1), rows.count > 1
    wide = torch.where(rows.alive, x.to(torch.promote_types(x.dtype, torch.float32)), 0)
    mean = wide.sum(0) / count
    variance = torch.where(rows.alive, wide - mean, 0).square().sum(0) / count
    return torch.where(several, mean, known[0]), torch.where(several, variance, known[1])


def normalised(x: Tensor, rows: Rows, told: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> Tensor:
    """(x - mean) * scale * weight + bias in living rows; told: these four."""
    mean, scale, weight, bias = told
    if not _by_kernels(x):
        y = (x - mean) * scale
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(x.dtype)
    y = torch.empty_like(x)
    tensors = (x, rows.count, mean, scale, mean if weight is None else weight, mean if bias is None else bias, y)
    constants = _shape(x) | {"WEIGHT": weight is not None, "BIAS": bias is not None}
    _kernel("normalise")(-(-x.shape[0] // _ROWS) * _sides(x), tensors, (), constants)
    return y


def sums_of(grad: Tensor, x: Tensor, rows: Rows, told: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sums over living rows of grad and of grad * (x - mean) * scale, [C] each; told: mean and scale."""
    if not _by_kernels(x):
        wide = torch.where(rows.alive, grad.to(told[0].dtype), 0)
        return wide.sum(0), torch.where(rows.alive, wide * (x - told[0]) * told[1], 0).sum(0)
    parts, sums, products = _parts(x), _empty(x), _empty(x)
    halves = torch.empty(2, parts, x.shape[1], dtype=torch.float32, device=x.device)
    _kernel("products")(parts * _sides(x), (grad, x, rows.count, *told, halves), (parts,), _shape(x))
    _kernel("joined_sums")(-(-x.shape[1] // _LANES), (halves, sums, products), (parts,), _joining(x))
    return sums, products


def gradient(grad: Tensor, x: Tensor, rows: Rows, told: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]) -> Tensor:
    """The gradient of x in living rows; told: mean, scale, weight, and what sums_of gives."""
    mean, scale, weight, sums, products = told
    if not _by_kernels(x):
        # Fewer than two rows were normalised by what does not depend on them.
        share = torch.where(rows.count > 1, 1.0 / rows.count.clamp(min=1).to(mean.dtype), 0)
        found = grad - share * (sums + (x - mean) * scale * products)
        return (found * scale if weight is None else found * scale * weight).to(x.dtype)
    dx = torch.empty_like(x)
    tensors = (grad, x, rows.count, mean, scale, mean if weight is None else weight, sums, products, dx)
    constants = _shape(x) | {"WEIGHT": weight is not None}
    _kernel("gradient")(-(-x.shape[0] // _ROWS) * _sides(x), tensors, (), constants)
    return dx


_LANES = 16
"""Channels that one program joins the parts of."""


def _by_kernels(x: Tensor) -> bool:
    return x.dtype != torch.float64 and runs_kernels(x)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape[1], dtype=torch.float32, device=x.device)


def _parts(x: Tensor) -> int:
    return max(1, min(_PARTS, -(-x.shape[0] // (2 * _ROWS))))


def _sides(x: Tensor) -> int:
    """Programs side by side over the channels."""
    return -(-x.shape[1] // _lanes(x))


def _lanes(x: Tensor) -> int:
    return min(_CHANNELS, max(16, 1 << (x.shape[1] - 1).bit_length()))


def _shape(x: Tensor) -> dict[str, int]:
    return {"C": x.shape[1], "ROWS": _ROWS, "LANES": _lanes(x)}


def _joining(x: Tensor) -> dict[str, int]:
    return {"C": x.shape[1], "MOST": 1 << (_parts(x) - 1).bit_length(), "LANES": _LANES}


@lru_cache(maxsize=8)
def _kernel(name: str) -> Launcher:
    """Its file is imported here first: it needs Triton."""
    return Launcher(getattr(importlib.import_module("pumice.lower.norm_kernels"), name))
