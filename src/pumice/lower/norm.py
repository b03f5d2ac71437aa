"""Batch normalisation over the first rows of a buffer, where the device alone knows how many those are.

    y[n, c] = (x[n, c] - mean[c]) / sqrt(variance[c] + eps) * weight[c] + bias[c]        rows n < count

and, where that is asked for, max(y, 0), whose gradient passes where it is above 0.

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

from pumice.coords import Cloud
from pumice.coords.launch import Launcher, runs_kernels

Affine = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Statistics:
    """running: mean and variance [C], by which fewer than two rows are normalised (without them: by 0 and 1).

    follows: whether they follow those of at least two rows, by `momentum` or (None) as the mean of all so far; then
    tracked, int64 [], counts how often they did.
    """

    running: tuple[Tensor, Tensor] | None
    eps: float
    follows: bool = False
    momentum: float | None = None
    tracked: Tensor | None = None


def batch_norm(x: Tensor, rows: Cloud, affine: Affine, statistics: Statistics, relu: bool = False) -> Tensor:
    """y in the dtype of x [N, C], of whose rows those live that do in the cloud; differentiable in x and affine.

    affine: weight and bias [C]. relu: what is below 0 becomes 0. Running statistics are written where they follow.
    """
    weight, bias = affine
    return _BatchNorm.apply(x, weight, bias, rows, statistics, relu)


@dataclass(frozen=True, eq=False)
class Normed:
    """What the result of a row depends on beside the row: mean and 1 / sqrt(variance + eps), in at least float32."""

    mean: Tensor
    scale: Tensor
    weight: Tensor | None
    bias: Tensor | None
    relu: bool

    def affine(self, apart: Tensor) -> Tensor:
        """In plain torch: (x - mean) * scale, scaled and shifted."""
        y = apart if self.weight is None else apart * self.weight
        return y if self.bias is None else y + self.bias

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For a kernel; `constants` say which of them stand in for none."""
        weight = self.mean if self.weight is None else self.weight
        return self.mean, self.scale, weight, self.mean if self.bias is None else self.bias

    @property
    def constants(self) -> dict[str, bool]:
        return {"WEIGHT": self.weight is not None, "BIAS": self.bias is not None, "RELU": self.relu}


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Cloud,
        statistics: Statistics,
        relu: bool,
    ) -> Tensor:
        x = x.contiguous()
        mean, scale = moments(x, rows, statistics)
        ctx.rows, ctx.relu = rows, relu
        ctx.save_for_backward(x, mean, scale, weight, bias)
        return normalised(x, rows, Normed(mean, scale, weight, bias, relu))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, scale, weight, bias = ctx.saved_tensors
        told, grad = Normed(mean, scale, weight, bias, ctx.relu), grad.contiguous()
        sums, products = sums_of(grad, x, ctx.rows, told)
        dx = gradient(grad, x, ctx.rows, told, (sums, products)) if ctx.needs_input_grad[0] else None
        dweight = products.to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sums.to(bias.dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None


_ROWS = 64
"""Rows that a program looks at in one turn."""
_CHANNELS = 64
"""Channels of a program, at most."""
_PARTS = 512
"""Into how many parts rows are shared for sums, at most."""


def moments(x: Tensor, rows: Cloud, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of the living rows, in at least float32; running statistics follow."""
    if not _by_kernels(x):
        return moments_twin(x, rows, statistics)
    parts, mean, scale = _parts(x), _empty(x), _empty(x)
    halves = torch.empty(2, parts, x.shape[1], dtype=torch.float32, device=x.device)
    _kernel("moments")(parts * _sides(x), (x, rows.count, halves), (parts,), _shape(x))
    follows, tracked = statistics.follows, statistics.tracked
    if follows and statistics.momentum is None and tracked is not None:
        # All programs read what one would write.
        tracked.add_((rows.count > 1)[0])
    known = (mean, mean) if statistics.running is None else statistics.running
    told = (rows.count, halves, *known, mean if tracked is None else tracked, mean, scale)
    constants = _joining(x) | {"ROWS": _ROWS, "EPS": statistics.eps, "KNOWN": statistics.running is not None}
    constants |= {"FOLLOWS": follows, "TRACKED": tracked is not None}
    constants |= {"MOMENTUM": -1.0 if statistics.momentum is None else statistics.momentum}
    _kernel("joined_moments")(-(-x.shape[1] // _LANES), told, (parts,), constants)
    return mean, scale


def moments_twin(x: Tensor, rows: Cloud, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As moments, in plain torch."""
    count, several, alive = rows.count.clamp(min=1), rows.count > 1, rows.live()[:, None]
    wide = torch.where(alive, x.to(torch.promote_types(x.dtype, torch.float32)), 0)
    mean = wide.sum(0) / count
    variance = torch.where(alive, wide - mean, 0).square().sum(0) / count
    known = statistics.running or (torch.zeros_like(mean), torch.ones_like(mean))
    if statistics.follows and statistics.running is not None:
        factor: float | Tensor = statistics.momentum or 0.0
        if statistics.tracked is not None:
            statistics.tracked.add_(several[0])
            if statistics.momentum is None:
                factor = 1.0 / statistics.tracked.clamp(min=1).to(mean.dtype)
        share = several.to(mean.dtype) * factor
        unbiased = variance * count / (count - 1).clamp(min=1)
        for own, found in zip(known, (mean, unbiased), strict=True):
            own.add_(share * (found - own))
    mean = torch.where(several, mean, known[0])
    return mean, (torch.where(several, variance, known[1]) + statistics.eps).rsqrt()


def normalised(x: Tensor, rows: Cloud, told: Normed) -> Tensor:
    """The result in living rows."""
    if not _by_kernels(x):
        y = told.affine((x - told.mean) * told.scale)
        return (y.relu() if told.relu else y).to(x.dtype)
    y = torch.empty_like(x)
    tensors = (x, rows.count, *told.tensors, y)
    _kernel("normalise")(-(-x.shape[0] // _ROWS) * _sides(x), tensors, (), _shape(x) | told.constants)
    return y


def sums_of(grad: Tensor, x: Tensor, rows: Cloud, told: Normed) -> tuple[Tensor, Tensor]:
    """The sums over living rows of the gradient, and of that * (x - mean) * scale, [C] each."""
    if not _by_kernels(x):
        alive, apart = rows.live()[:, None], (x - told.mean) * told.scale
        wide = torch.where(alive, _passed(grad, apart, told), 0)
        return wide.sum(0), torch.where(alive, wide * apart, 0).sum(0)
    parts, sums, products = _parts(x), _empty(x), _empty(x)
    halves = torch.empty(2, parts, x.shape[1], dtype=torch.float32, device=x.device)
    tensors = (grad, x, rows.count, *told.tensors, halves)
    _kernel("products")(parts * _sides(x), tensors, (parts,), _shape(x) | told.constants)
    _kernel("joined_sums")(-(-x.shape[1] // _LANES), (halves, sums, products), (parts,), _joining(x))
    return sums, products


def _passed(grad: Tensor, apart: Tensor, told: Normed) -> Tensor:
    """The gradient of what is normalised; apart: (x - mean) * scale."""
    grad = grad.to(told.mean.dtype)
    return torch.where(told.affine(apart) > 0, grad, 0) if told.relu else grad


def gradient(grad: Tensor, x: Tensor, rows: Cloud, told: Normed, sums: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of x in living rows; sums: what sums_of gives."""
    if not _by_kernels(x):
        # Fewer than two rows were normalised by what does not depend on them.
        share = torch.where(rows.count > 1, 1.0 / rows.count.clamp(min=1).to(told.mean.dtype), 0)
        apart = (x - told.mean) * told.scale
        found = _passed(grad, apart, told) - share * (sums[0] + apart * sums[1])
        return (found * told.scale if told.weight is None else found * told.scale * told.weight).to(x.dtype)
    dx = torch.empty_like(x)
    tensors = (grad, x, rows.count, *told.tensors, *sums, dx)
    _kernel("gradient")(-(-x.shape[0] // _ROWS) * _sides(x), tensors, (), _shape(x) | told.constants)
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
