"""Batch normalisation by the statistics of the valid rows of all processes of a group of torch.distributed.

    y[n, c] = (x[n, c] - mean[c]) / sqrt(variance[c] + eps) * weight[c] + bias[c]   n < count

mean and biased variance are those of all processes' valid rows, each row once: a process gathers mean, variance and
number of rows of every process and merges them (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm
for Computing Sample Variances", 1979), in the same order everywhere, so that all have equal bits. The backward pass
sums the two sums of a norm's gradient. One collective in each direction, whatever the numbers of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pumice.coords import CoordBuffer
from pumice.lower.norm import NormState, Statistics, gradient, moments, normalised, pair_of, sums_of

_TINY = 1e-30
"""In place of eps: the reciprocal square of a scale is the variance then."""


def synced_batch_norm(
    x: Tensor,
    rows: CoordBuffer,
    affine: tuple[Tensor | None, Tensor | None],
    statistics: Statistics,
    group: dist.ProcessGroup,
) -> Tensor:
    """x [N, C] -> y [N, C] in x's dtype; updates running statistics in place. rows: holds the number of valid rows;
    affine: weight, bias. Every process of the group has to call it, forward and backward, in the same order; gradients
    of weight and bias are those of the own rows. Differentiable once."""
    return _SyncedBatchNorm.apply(x, *affine, rows, statistics, group)


class _SyncedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: CoordBuffer,
        statistics: Statistics,
        group: dist.ProcessGroup,
    ) -> Tensor:
        x = x.contiguous()
        mean, variance, total = _merged(_own_moments(x, rows), group)
        pair = pair_of(mean, variance, total, statistics)
        ctx.rows, ctx.group = rows, group
        ctx.save_for_backward(x, weight, bias, pair, total)
        return normalised(x, rows, NormState(pair, weight, bias, False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, pair, total = ctx.saved_tensors
        state, grad = NormState(pair, weight, bias, False), grad if grad.stride(1) == 1 else grad.contiguous()
        sums = sums_of(grad, (x, None), ctx.rows, state)
        dweight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sums[0].to(bias.dtype) if ctx.needs_input_grad[2] else None
        dx = _gradient(grad, x, ctx, state, sums, total) if ctx.needs_input_grad[0] else None
        return dx, dweight, dbias, None, None, None


def _own_moments(x: Tensor, rows: CoordBuffer) -> Tensor:
    """Mean and biased variance of this process's valid rows, and their number, [2C + 1]."""
    mean, scale = moments(x, rows, Statistics(None, _TINY))
    several = rows.count > 1
    # Moments of fewer than two rows are 0 and 1.
    only = torch.where(rows.count == 1, x[:1].to(mean.dtype).sum(0), 0)
    return torch.cat(
        [
            torch.where(several, mean, only),
            torch.where(several, scale.square().reciprocal(), 0),
            rows.count.to(mean.dtype),
        ]
    )


def _merged(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [C], biased variance [C], number of rows [1]) over all processes."""
    every = own.new_zeros((dist.get_world_size(group), len(own)))
    every[dist.get_rank(group)] = own
    # A gather: sums with zeros are exact.
    dist.all_reduce(every, group=group)
    counts, (means, variances) = every[:, -1:], every[:, :-1].chunk(2, 1)
    total = counts.sum(0)
    share = counts / total.clamp(min=1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0), total


def _gradient(grad: Tensor, x: Tensor, ctx: Any, state: NormState, sums: Tensor, total: Tensor) -> Tensor:
    """The gradient of x, from the sums of all processes. total: number of their rows, [1]."""
    every = sums.clone()
    dist.all_reduce(every, group=ctx.group)
    # The statistics of fewer than two rows are constants.
    every *= torch.where(total > 1, 1 / total.clamp(min=1), 0)
    count = ctx.rows.count
    dx, _ = gradient(grad, (x, None), ctx.rows, state, every * count)
    assert dx is not None
    # gradient() takes a process's only row to have constant statistics.
    shared = (every[0] + state.centred(x[:1]) * every[1]) * state.pair[1]
    shared = shared if state.weight is None else shared * state.weight
    dx[:1] -= torch.where(count == 1, shared, 0).to(dx.dtype)
    return dx
