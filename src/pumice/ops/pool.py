"""Pooling: the one loop with (+, *) replaced by (max, first) or (mean, first)."""

from __future__ import annotations

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.errors import ShapeError
from pumice.lower.max_pool import max_pool_rows
from pumice.ops import autograd
from pumice.ops.conv import Size, Target, conv_features, target_of
from pumice.ops.reduce import maximum
from pumice.ops.tensor import SparseTensor, living, numbers
from pumice.runtime.launch import has_triton


def max_pool(
    x: SparseTensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    out: Target = None,
) -> SparseTensor:
    """y[o, c] = max of x[i, c] over the inputs present in the window of o; 0 where a given output has none.

    The gradient goes to the first input that attains the maximum, in the order of taps. Arguments as in conv();
    stride defaults to kernel_size.
    """
    found, outputs = _window(x, kernel_size, stride, padding, dilation, out)
    feats = numbers(x)
    # Of a map between buffers no pairs are counted.
    if found.between is not None or _by_kernel(feats):
        return SparseTensor(max_pool_rows(feats, found), outputs)
    pairs = found.pairs()
    return SparseTensor(maximum(feats, pairs.inputs, pairs.outputs, outputs.coords.shape[0]), outputs)


def _by_kernel(x: Tensor) -> bool:
    """Whether kernels run there, and nobody but torch's autograd watches."""
    return autograd.only_autograd_active((x,)) and has_triton(x)


def sum_pool(
    x: SparseTensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    out: Target = None,
) -> SparseTensor:
    """y[o, c] = sum of x[i, c] over the inputs present in the window of o. Arguments as in max_pool()."""
    found, outputs = _window(x, kernel_size, stride, padding, dilation, out)
    return SparseTensor(_sums(numbers(x), found, outputs), outputs)


def avg_pool(
    x: SparseTensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    out: Target = None,
) -> SparseTensor:
    """y[o, c] = mean of x[i, c] over the inputs present in the window of o (absent ones do not count)."""
    found, outputs = _window(x, kernel_size, stride, padding, dilation, out)
    # Divided before it is rounded to x's dtype: a sum may overflow a half where the mean does not.
    wide = numbers(x).to(torch.promote_types(x.dtype, torch.float32))
    means = _sums(wide, found, outputs) / found.counts().clamp(min=1)[:, None].to(x.device)
    return SparseTensor(means.to(x.dtype), outputs)


def global_max_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the maximum over each batch item's voxels; 0 for an empty item."""
    feats, items, batch = numbers(x), x.items, x.batch_size
    if x.geometry.buffered is not None:
        # Rows that do not live are of an item of their own.
        items = torch.where(x.geometry.cloud.valid_mask(), items, batch)
        return maximum(feats, torch.arange(feats.shape[0], device=x.device), items, batch + 1)[:batch]
    return maximum(feats, torch.arange(feats.shape[0], device=x.device), items, batch)


def global_sum_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the sum over each batch item's voxels, accumulated in at least float32."""
    feats = numbers(x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = feats.new_zeros((x.batch_size, x.channels), dtype=dtype)
    return sums.index_add(0, x.items, living(x, feats.to(dtype))).to(x.dtype)


def global_avg_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the mean over each batch item's voxels; 0 for an empty item."""
    feats = numbers(x)
    wide = x.replace(feats.to(torch.promote_types(x.dtype, torch.float32)))
    counts = x.item_counts.clamp(min=1)
    sums = global_sum_pool(wide)
    return (sums / counts[:, None]).to(x.dtype)


def row_sum(x: SparseTensor, values: Tensor) -> Tensor:
    """[...]: the sum of values [N, ...] over the voxels of x: in a captured network over living rows alone."""
    _check_rows(x, values)
    return living(x, values).sum(0)


def row_mean(x: SparseTensor, values: Tensor) -> Tensor:
    """[...]: the mean of values [N, ...] over the voxels of x: in a captured network over living rows alone.

    Of none NaN, as torch's. A loss of each voxel's becomes that of all by it:

        row_mean(y, functional.mse_loss(y.feats, wanted, reduction="none").mean(1))

    Raises ShapeError where values have not a row for each of x's.
    """
    _check_rows(x, values)
    if x.geometry.buffered is None:
        return values.mean(0)
    # As torch's: summed in at least float32, and divided before it is rounded, for a sum may overflow a half.
    total = living(x, values).sum(0, dtype=torch.promote_types(values.dtype, torch.float32))
    return (total / x.geometry.cloud.count[0]).to(values.dtype)


def _check_rows(x: SparseTensor, values: Tensor) -> None:
    if not values.ndim or len(values) != len(x.feats):
        raise ShapeError(f"values have a row for each of {len(x.feats)} voxels, found shape {list(values.shape)}")


def _window(
    x: SparseTensor, kernel: Size, stride: Size | None, padding: Size | None, dilation: Size, out: Target
) -> tuple[KernelMap, Geometry]:
    policy, target = target_of(out)
    step = kernel if stride is None else stride
    relation = Relation.of(x.dim, kernel, stride=step, padding=padding, dilation=dilation, policy=policy)
    return kernel_map(x.geometry, relation, target)


def _sums(x: Tensor, found: KernelMap, outputs: Geometry) -> Tensor:
    """A depthwise convolution with weights of one."""
    ones = x.new_ones((x.shape[1], found.volume, 1))
    return conv_features(x, ones, found, outputs.coords.shape[0], groups=x.shape[1])
