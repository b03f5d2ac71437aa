"""Row-wise layers (norms, activations, linear) and pooling layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pumice.coords import Relation
from pumice.errors import ShapeError
from pumice.lower import direct
from pumice.lower import norm as lowered
from pumice.lower.epilogue import Epilogue
from pumice.ops import autograd, pool
from pumice.ops.conv import Size
from pumice.ops.linear import HALF, differentiable_features, fits_one_kernel, linear_features
from pumice.ops.tensor import (
    SparseTensor,
    from_raw_feats,
    mask_padding,
    not_sparse,
    raw_feats,
    row_by_row,
    unchecked_tensor,
)


def _check(layer: nn.Module, x: object, channels: int | None = None) -> None:
    """Raise DtypeError if x is not a SparseTensor, ShapeError if it has another number of channels."""
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, type(layer).__name__)
    if channels is not None and x.channels != channels:
        raise ShapeError(f"{type(layer).__name__} takes {channels} channels, x has {x.channels}")


class _Featurewise(nn.Module):
    """A torch module applied to the features; coordinates unchanged."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x)
        return x.replace(super().forward(x.feats))


class _Entrywise(_Featurewise):
    """A row-wise torch module without parameters."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        if not isinstance(x, SparseTensor) or torch.compiler.is_compiling():
            return super().forward(x)
        # torch's module on the raw features: padding rows may be undefined.
        y = super(_Featurewise, self).forward(raw_feats(x))
        return from_raw_feats(y, x.geometry) if x.geometry.trains else unchecked_tensor(y, x.geometry)


class BatchNorm(_Featurewise, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d over all voxels: mean and variance per channel.

    Fewer than two voxels have no variance: instead of batch statistics they are normalised by the running statistics,
    which stay unchanged (without running statistics by mean 0 and variance 1).
    """

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x, self.num_features)
        if not x.geometry.trains and (y := self._in_evaluation(raw_feats(x))) is not None:
            return unchecked_tensor(y, x.geometry)
        if self.uses_valid_rows(x) or self._by_kernels(x):
            return self.over_valid_rows(x)
        if torch.compiler.is_compiling():
            # The number of voxels is symbolic while tracing; torch's batch norm branches on it.
            return x.replace(_traced_norm(self, x.feats))
        if self.running_mean is None:
            x.geometry.require_host_size("a BatchNorm without running statistics takes those of all voxels")
        own = self.training or self.running_mean is None
        if not own or len(x) > 1:
            return super().forward(x)
        # Under autocast the features are narrower than the parameters.
        like = x.feats if self.weight is None else self.weight.detach()
        mean = self.running_mean if self.running_mean is not None else like.new_zeros(self.num_features)
        var = self.running_var if self.running_var is not None else like.new_ones(self.num_features)
        return x.replace(functional.batch_norm(x.feats, mean, var, self.weight, self.bias, False, 0.0, self.eps))

    def _in_evaluation(self, feats: Tensor) -> Tensor | None:
        """The result by running statistics in one kernel; None where that is not all: in training, on a CPU, or with
        gradients, autocast or anything else active."""
        vectors = self.vectors()
        if self.training or vectors[0] is None or not direct.starts_kernels(feats) or feats.dtype is torch.float64:
            return None
        there = [t for t in vectors if t is not None]
        if not autograd.is_plain_call([feats, *there]) or not feats.is_contiguous():
            return None
        alike = (self.num_features,), feats.device
        # What does not fit is torch's to refuse.
        if any([(t.shape, t.device) != alike or not t.is_contiguous() for t in there]):
            return None
        return lowered.by_statistics(feats, vectors, self.eps)

    def uses_valid_rows(self, x: SparseTensor) -> bool:
        """True if batch statistics are taken over the valid rows of a captured training step."""
        return x.geometry.trains and (self.training or self.running_mean is None)

    def _by_kernels(self, x: SparseTensor) -> bool:
        """True if our kernels train it: batch statistics on a GPU, with only autograd active."""
        feats, own = raw_feats(x), self.training or self.running_mean is None
        if not own or not torch.is_grad_enabled() or not direct.starts_kernels(feats) or feats.dtype == torch.float64:
            return False
        return autograd.only_reverse_mode_active([feats, *(t for t in self.vectors() if t is not None)])

    def over_valid_rows(self, x: SparseTensor, relu: bool = False) -> SparseTensor:
        """Batch norm over the valid rows, then optionally a ReLU."""
        return from_raw_feats(
            lowered.batch_norm(raw_feats(x), x.geometry.cloud, self.norm_params(relu=relu)), x.geometry
        )

    def norm_params(
        self, residual: Tensor | None = None, relu: bool = False, offset: Tensor | None = None
    ) -> lowered.Norm:
        """Parameters of the batch norm kernels, with the epilogue (residual, relu); offset: see Statistics."""
        mean, var, weight, bias = self.vectors()
        running = None if mean is None or var is None else (mean, var)
        tracked = self._buffers.get("num_batches_tracked")
        follows = self.training and self.track_running_stats
        statistics = lowered.Statistics(running, self.eps, follows, self.momentum, tracked, offset)
        return lowered.Norm(weight, bias, statistics, residual, relu)

    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Mean, variance, scale and shift, read on each call as training code may replace them. Bypasses
        nn.Module.__getattr__, which takes as long as a launch."""
        own, kept = self._parameters, self._buffers
        try:
            return kept["running_mean"], kept["running_var"], own["weight"], own["bias"]
        except KeyError:
            # Some of torch's tools turn parameters into plain attributes.
            return self.running_mean, self.running_var, self.weight, self.bias


def _traced_norm(norm: BatchNorm, x: Tensor) -> Tensor:
    """Batch normalisation for a symbolic number of voxels."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    known = wide.new_zeros(norm.num_features), wide.new_ones(norm.num_features)
    if norm.running_mean is not None and norm.running_var is not None:
        # Copies: training updates the statistics in place while autograd has saved these.
        known = norm.running_mean.to(wide.dtype, copy=True), norm.running_var.to(wide.dtype, copy=True)
    mean, var = _statistics(norm, wide, known) if norm.training or norm.running_mean is None else known
    y = (wide - mean) * torch.rsqrt(var + norm.eps)
    if norm.affine:
        y = y * norm.weight + norm.bias
    return y.to(x.dtype)


def _statistics(norm: BatchNorm, x: Tensor, known: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance over the voxels, or `known` if there are fewer than two; updates the running statistics."""
    count = torch.full((), x.shape[0], dtype=x.dtype, device=x.device)
    many, some = count > 1, count.clamp(min=1)
    mean = x.sum(0) / some
    var = (x - mean).square().sum(0) / some
    if norm.training and norm.track_running_stats and norm.running_mean is not None:
        with torch.no_grad():
            _track(norm, many, (mean.detach(), var.detach() * (some / (some - 1).clamp(min=1))))
    return torch.where(many, mean, known[0]), torch.where(many, var, known[1])


def _track(norm: BatchNorm, many: Tensor, seen: tuple[Tensor, Tensor]) -> None:
    """Update the running statistics from `seen` if `many`."""
    share: float | Tensor = 0.0 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(many)
        share = 1 / norm.num_batches_tracked.clamp(min=1).to(seen[0].dtype) if norm.momentum is None else share
    for kept, new in zip((norm.running_mean, norm.running_var), seen, strict=True):
        assert kept is not None
        kept.copy_(torch.where(many, kept + share * (new - kept), kept))


class SyncBatchNorm(_Featurewise, nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm over all voxels of all processes."""

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every BatchNorm in `module`, ours and torch's, by SyncBatchNorm; parameters and statistics stay."""
        if isinstance(module, BatchNorm):
            return _as_sync(module, process_group)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


def _as_sync(module: BatchNorm, process_group: Any) -> SyncBatchNorm:
    sync = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_group
    )
    sync.weight, sync.bias = module.weight, module.bias
    sync.running_mean, sync.running_var = module.running_mean, module.running_var
    sync.num_batches_tracked = module.num_batches_tracked
    return sync.train(module.training)


class LayerNorm(_Featurewise, nn.LayerNorm):
    """torch.nn.LayerNorm over the channels of each voxel."""


class GroupNorm(nn.Module):
    """Group normalisation (Wu and He, "Group Normalization", ECCV 2018, eq. 1-2) over the voxels of each batch item.

        y[n, c] = (x[n, c] - mean[b, g]) / sqrt(var[b, g] + eps) * weight[c] + bias[c]

    with b the batch item of voxel n, g the group of channel c, mean and biased variance over the item's voxels and
    the group's channels. Statistics are kept in at least float32.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ShapeError(f"num_groups={num_groups} must divide num_channels={num_channels}")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x, self.num_channels)
        y = _normalize(x, self.num_groups, self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.to(y.dtype) + self.bias.to(y.dtype)
        return x.replace(y.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class InstanceNorm(GroupNorm):
    """Instance normalisation: each channel over the voxels of each batch item (Ulyanov et al., 2016, eq. 2)."""

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_features, num_features, eps, affine)


def _normalize(x: SparseTensor, groups: int, eps: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    feats = x.feats.to(dtype).unflatten(1, (groups, x.channels // groups))
    item = x.items
    counts = x.item_counts.clamp(min=1) * feats.shape[2]

    def mean(values: Tensor) -> Tensor:
        sums = values.new_zeros((x.batch_size, groups)).index_add(0, item, mask_padding(x, values.sum(dim=2)))
        return (sums / counts[:, None])[item][:, :, None]

    centred = feats - mean(feats)
    return (centred * torch.rsqrt(mean(centred * centred) + eps)).flatten(1)


class ReLU(_Entrywise, nn.ReLU):
    """max(x, 0)."""


class LeakyReLU(_Entrywise, nn.LeakyReLU):
    """max(x, 0) + negative_slope * min(x, 0)."""


class GELU(_Entrywise, nn.GELU):
    """x * Phi(x)."""


class SiLU(_Entrywise, nn.SiLU):
    """x * sigmoid(x)."""


class ELU(_Entrywise, nn.ELU):
    """x above 0, alpha * (exp(x) - 1) below."""


class Sigmoid(_Entrywise, nn.Sigmoid):
    """1 / (1 + exp(-x))."""


class Tanh(_Entrywise, nn.Tanh):
    """tanh(x)."""


class Softplus(_Entrywise, nn.Softplus):
    """log(1 + exp(beta * x)) / beta."""


class Dropout(_Entrywise, nn.Dropout):
    """Each entry to 0 with probability p in training."""


class Identity(nn.Identity):
    """x."""


class Linear(_Featurewise, nn.Linear):
    """y[n] = x[n] @ weight.T + bias: a convolution with kernel size 1."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        # cuBLAS is slow for 16-bit rows that are not a multiple of 16 bytes (45 us on an H200 for 173,000 rows of 96 to
        # 19 channels), and looks for a kernel anew for each number of rows (660 us of host time).
        _check(self, x, self.in_features)
        odd = self.in_features % 8 or self.out_features % 8
        own = odd or x.geometry.buffered is None
        if own and not x.geometry.trains and (y := self._by_kernel(x)) is not None:
            return x.replace(y)
        return row_by_row(x, self._differentiable if odd and self._worth(x) else super(_Featurewise, self).forward)

    @staticmethod
    def _worth(x: SparseTensor) -> bool:
        """True if our kernels outweigh their host time: many rows, or replay of a graph."""
        # Compiled code takes any number of rows.
        return not torch.compiler.is_compiling() and (x.geometry.trains or len(raw_feats(x)) >= _MANY)

    def _by_kernel(self, x: SparseTensor) -> Tensor | None:
        """The result by our kernel, without gradients; None if it does not apply."""
        feats, weight, bias = x.feats, self.weight, self.bias
        tensors = (feats, weight) if bias is None else (feats, weight, bias)
        if feats.dtype not in HALF or any(t.dtype != feats.dtype for t in tensors):
            return None
        fits = feats.shape[1] == self.in_features and fits_one_kernel(*tensors)
        return linear_features(feats, weight, Epilogue(shift=bias)) if fits else None

    def _differentiable(self, feats: Tensor) -> Tensor:
        y = differentiable_features(feats, self.weight, self.bias)
        return super(_Featurewise, self).forward(feats) if y is None else y


_MANY = 1 << 16
"""Rows from which on unaligned linear layers train by our kernels. H200, 96 to 19 channels, both passes, fp16 autocast,
us of ours and torch: 36,000 rows 34 and 63 (0.1 ms more host time); 346,000: 113 and 245; 2 million: 479 and 1,151."""


class _Pool(nn.Module):
    """Base of window pooling layers; subclasses fix D."""

    dim: ClassVar[int]
    function: ClassVar[Callable[..., SparseTensor]]

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size | None = None,
        dilation: Size = 1,
        out: str | None = None,
    ) -> None:
        super().__init__()
        step = kernel_size if stride is None else stride
        Relation.of(self.dim, kernel_size, stride=step, padding=padding, dilation=dilation)
        self.kernel_size = kernel_size
        self.options = {"stride": stride, "padding": padding, "dilation": dilation, "out": out}

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x)
        if x.spatial_dim != self.dim:
            raise ShapeError(f"{type(self).__name__} takes {self.dim} spatial axes, x has {x.spatial_dim}")
        return type(self).function(x, self.kernel_size, **self.options)

    def extra_repr(self) -> str:
        options = "".join(f", {k}={v}" for k, v in self.options.items() if v is not None)
        return f"kernel_size={self.kernel_size}{options}"


class MaxPool(_Pool):
    """The maximum over the inputs present in each window: pumice.ops.max_pool."""

    function = staticmethod(pool.max_pool)


class AvgPool(_Pool):
    """The mean over the inputs present in each window: pumice.ops.avg_pool."""

    function = staticmethod(pool.avg_pool)


class SumPool(_Pool):
    """The sum over the inputs present in each window: pumice.ops.sum_pool."""

    function = staticmethod(pool.sum_pool)


class GlobalMaxPool(nn.Module):
    """[B, C]: the maximum over each batch item."""

    def forward(self, x: SparseTensor) -> Tensor:
        return pool.global_max_pool(x)


class GlobalAvgPool(nn.Module):
    """[B, C]: the mean over each batch item."""

    def forward(self, x: SparseTensor) -> Tensor:
        return pool.global_avg_pool(x)


class GlobalSumPool(nn.Module):
    """[B, C]: the sum over each batch item."""

    def forward(self, x: SparseTensor) -> Tensor:
        return pool.global_sum_pool(x)


class MaxPool1d(MaxPool):
    """MaxPool over 1 spatial axis."""

    dim = 1


class MaxPool2d(MaxPool):
    """MaxPool over 2 spatial axes."""

    dim = 2


class MaxPool3d(MaxPool):
    """MaxPool over 3 spatial axes."""

    dim = 3


class MaxPool4d(MaxPool):
    """MaxPool over 4 spatial axes."""

    dim = 4


class AvgPool1d(AvgPool):
    """AvgPool over 1 spatial axis."""

    dim = 1


class AvgPool2d(AvgPool):
    """AvgPool over 2 spatial axes."""

    dim = 2


class AvgPool3d(AvgPool):
    """AvgPool over 3 spatial axes."""

    dim = 3


class AvgPool4d(AvgPool):
    """AvgPool over 4 spatial axes."""

    dim = 4


class SumPool1d(SumPool):
    """SumPool over 1 spatial axis."""

    dim = 1


class SumPool2d(SumPool):
    """SumPool over 2 spatial axes."""

    dim = 2


class SumPool3d(SumPool):
    """SumPool over 3 spatial axes."""

    dim = 3


class SumPool4d(SumPool):
    """SumPool over 4 spatial axes."""

    dim = 4
