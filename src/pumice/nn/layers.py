"""Row-wise layers (norms, activations, linear) and pooling layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pumice.coords import Geometry, Relation
from pumice.errors import ShapeError
from pumice.ops import (
    SparseTensor,
    avg_pool,
    batch_norm,
    channel_to_space,
    global_avg_pool,
    global_max_pool,
    global_sum_pool,
    group_norm,
    linear,
    max_pool,
    space_to_channel,
    sum_pool,
    upsample_nearest,
)
from pumice.ops.ahead import CompiledTogether
from pumice.ops.conv import Size, target_of
from pumice.ops.tensor import not_sparse, row_wise


def _check(layer: nn.Module, x: object, channels: int | None = None) -> None:
    """Raise DtypeError if x is not a SparseTensor, ShapeError if it does not have `channels` channels."""
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, type(layer).__name__)
    if channels is not None and x.channels != channels:
        raise ShapeError(f"{type(layer).__name__} takes {channels} channels, x has {x.channels}")


class _Featurewise(nn.Module):
    """Mixin that applies a torch module to the features."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x)
        return x.replace(super().forward(x.feats))


class _Entrywise(_Featurewise):
    """As _Featurewise, for row-wise modules without parameters."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        return row_wise(x, super(_Featurewise, self).forward)


class BatchNorm(CompiledTogether, _Featurewise, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d over all voxels: mean and variance per channel.

    Fewer than two voxels have no variance: instead of batch statistics, running statistics normalise them and stay
    unchanged (without running statistics: mean 0 and variance 1).
    """

    operation = "batch norm"

    def forward(self, x: SparseTensor) -> SparseTensor:
        return batch_norm(x, self)


class SyncBatchNorm(BatchNorm):
    """BatchNorm over the voxels of all processes of torch.distributed in training, each voxel once.

        y[n, c] = (x[n, c] - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]

    as one process would compute it from all their voxels, on GPUs and CPUs, for any numbers of voxels; running
    statistics are equal on all processes. Gradients of weight and bias are those of the own voxels, which
    DistributedDataParallel and FSDP2 average. In evaluation, and in a single process, it is a BatchNorm.

    process_group: of torch.distributed; None: all processes. Every one of them has to run the layer in each step.
    Differentiable once. torch.nn.SyncBatchNorm.convert_sync_batchnorm makes layers of torch, which take no
    SparseTensor: use the method of this class.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def forward(self, x: SparseTensor) -> SparseTensor:
        return batch_norm(x, self, self._processes())

    def _processes(self) -> dist.ProcessGroup | None:
        """The group to synchronise; None: a single process."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace batch norms of pumice and torch in `module` by SyncBatchNorms, keeping parameters and statistics."""
        if isinstance(module, BatchNorm):
            return _as_sync(module, process_group)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


def _as_sync(module: BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
    sync = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_group
    )
    sync.weight, sync.bias = module.weight, module.bias
    sync.running_mean, sync.running_var = module.running_mean, module.running_var
    sync.num_batches_tracked = module.num_batches_tracked
    return sync.train(module.training)


class LayerNorm(_Featurewise, nn.LayerNorm):
    """torch.nn.LayerNorm over the channels of each voxel."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x, self.normalized_shape[-1])
        return super().forward(x)


class GroupNorm(nn.Module):
    """Group normalisation (Wu and He, "Group Normalization", ECCV 2018, eq. 1-2) over the voxels of each batch item.

        y[n, c] = (x[n, c] - mean[b, g]) / sqrt(var[b, g] + eps) * weight[c] + bias[c]

    with b the batch item of voxel n, g the group of channel c, mean and biased variance over the item's voxels and
    the group's channels. Statistics are computed in at least float32.
    """

    num_groups: int
    num_channels: int
    eps: float

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ShapeError(f"num_groups={num_groups} must divide num_channels={num_channels}")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x, self.num_channels)
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class InstanceNorm(GroupNorm):
    """Instance normalisation: each channel over the voxels of each batch item (Ulyanov et al., 2016, eq. 2)."""

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_features, num_features, eps, affine)


class ReLU(_Entrywise, nn.ReLU):
    """max(x, 0)."""


class LeakyReLU(_Entrywise, nn.LeakyReLU):
    """max(x, 0) + negative_slope * min(x, 0)."""


class GELU(_Entrywise, nn.GELU):
    """x * Phi(x), Phi the normal CDF."""


class SiLU(_Entrywise, nn.SiLU):
    """x * sigmoid(x)."""


class ELU(_Entrywise, nn.ELU):
    """x for x > 0, else alpha * (exp(x) - 1)."""


class Sigmoid(_Entrywise, nn.Sigmoid):
    """1 / (1 + exp(-x))."""


class Tanh(_Entrywise, nn.Tanh):
    """tanh(x)."""


class Softplus(_Entrywise, nn.Softplus):
    """log(1 + exp(beta * x)) / beta."""


class Dropout(_Entrywise, nn.Dropout):
    """In training, zero each entry with probability p, scale others by 1 / (1 - p)."""


class Identity(nn.Identity):
    """Returns x."""


class Linear(CompiledTogether, _Featurewise, nn.Linear):
    """y[n] = x[n] @ weight.T + bias: a convolution with kernel size 1."""

    operation = "linear map"

    def forward(self, x: SparseTensor) -> SparseTensor:
        return linear(x, self.weight, self.bias)


class _Pool(nn.Module):
    """Base of window pooling layers; subclasses fix D."""

    dim: ClassVar[int]
    function: ClassVar[Callable[..., SparseTensor]]

    def __init_subclass__(cls, dim: int | None = None) -> None:
        super().__init_subclass__()
        if dim is not None:
            cls.dim = dim

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size | None = None,
        dilation: Size = 1,
        out: str | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "out": out}
        self.relation()  # Raises for bad options

    def relation(self) -> Relation:
        """The relation between outputs and inputs."""
        kernel, (stride, padding, dilation, out) = self.kernel_size, self.options.values()
        step = kernel if stride is None else stride
        return Relation.of(self.dim, kernel, stride=step, padding=padding, dilation=dilation, policy=target_of(out)[0])

    def forward(self, x: SparseTensor) -> SparseTensor:
        _check(self, x)
        if x.spatial_dim != self.dim:
            raise ShapeError(f"{type(self).__name__} takes {self.dim} spatial axes, x has {x.spatial_dim}")
        return type(self).function(x, self.kernel_size, **self.options)

    def extra_repr(self) -> str:
        options = "".join(f", {k}={v}" for k, v in self.options.items() if v is not None)
        return f"kernel_size={self.kernel_size}{options}"


class MaxPool(_Pool):
    """Maximum of the inputs present in each window: pumice.ops.max_pool."""

    function: ClassVar[Callable[..., SparseTensor]] = staticmethod(max_pool)


class AvgPool(_Pool):
    """Mean of the inputs present in each window: pumice.ops.avg_pool."""

    function: ClassVar[Callable[..., SparseTensor]] = staticmethod(avg_pool)


class SumPool(_Pool):
    """Sum of the inputs present in each window: pumice.ops.sum_pool."""

    function: ClassVar[Callable[..., SparseTensor]] = staticmethod(sum_pool)


class _Resampling(nn.Module):
    """Base of the layers that exchange voxels for channels."""

    def __init__(self, factor: Size = 2) -> None:
        super().__init__()
        self.factor = factor

    def extra_repr(self) -> str:
        return f"{self.factor}"


class SpaceToChannel(_Resampling):
    """Voxels `factor` times as large, with the channels of those within: pumice.ops.space_to_channel."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        return space_to_channel(x, self.factor)


class ChannelToSpace(_Resampling):
    """The inverse, to the coordinates of `out` or all that there may be: pumice.ops.channel_to_space."""

    def forward(self, x: SparseTensor, out: SparseTensor | Geometry | None = None) -> SparseTensor:
        return channel_to_space(x, self.factor, out)


class UpsampleNearest(_Resampling):
    """Each finer voxel's features are those of the one around it: pumice.ops.upsample_nearest."""

    def forward(self, x: SparseTensor, out: SparseTensor | Geometry | None = None) -> SparseTensor:
        return upsample_nearest(x, self.factor, out)


class GlobalMaxPool(nn.Module):
    """Maximum over each batch item's voxels, [B, C]."""

    def forward(self, x: SparseTensor) -> Tensor:
        return global_max_pool(x)


class GlobalAvgPool(nn.Module):
    """Mean over each batch item's voxels, [B, C]."""

    def forward(self, x: SparseTensor) -> Tensor:
        return global_avg_pool(x)


class GlobalSumPool(nn.Module):
    """Sum over each batch item's voxels, [B, C]."""

    def forward(self, x: SparseTensor) -> Tensor:
        return global_sum_pool(x)


class MaxPool1d(MaxPool, dim=1):
    """MaxPool over 1 spatial axis."""


class MaxPool2d(MaxPool, dim=2):
    """MaxPool over 2 spatial axes."""


class MaxPool3d(MaxPool, dim=3):
    """MaxPool over 3 spatial axes."""


class MaxPool4d(MaxPool, dim=4):
    """MaxPool over 4 spatial axes."""


class AvgPool1d(AvgPool, dim=1):
    """AvgPool over 1 spatial axis."""


class AvgPool2d(AvgPool, dim=2):
    """AvgPool over 2 spatial axes."""


class AvgPool3d(AvgPool, dim=3):
    """AvgPool over 3 spatial axes."""


class AvgPool4d(AvgPool, dim=4):
    """AvgPool over 4 spatial axes."""


class SumPool1d(SumPool, dim=1):
    """SumPool over 1 spatial axis."""


class SumPool2d(SumPool, dim=2):
    """SumPool over 2 spatial axes."""


class SumPool3d(SumPool, dim=3):
    """SumPool over 3 spatial axes."""


class SumPool4d(SumPool, dim=4):
    """SumPool over 4 spatial axes."""
