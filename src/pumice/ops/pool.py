"""Pooling: the one loop with (+, *) replaced by (max, first) or (mean, first)."""

from __future__ import annotations

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.ops.conv import Size, Target, _target, conv_features
from pumice.ops.tensor import SparseTensor


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
    pairs = found.pairs()
    return SparseTensor(_winners(x.feats, pairs.inputs, pairs.outputs, outputs.coords.shape[0]), outputs)


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
    return SparseTensor(_sums(x.feats, found, outputs), outputs)


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
    wide = x.feats.to(torch.promote_types(x.dtype, torch.float32))
    means = _sums(wide, found, outputs) / found.counts().clamp(min=1)[:, None].to(x.device)
    return SparseTensor(means.to(x.dtype), outputs)


def global_max_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the maximum over each batch item's voxels; 0 for an empty item."""
    rows = torch.arange(len(x), device=x.device)
    return _winners(x.feats, rows, x.items, x.batch_size)


def global_sum_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the sum over each batch item's voxels, accumulated in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = x.feats.new_zeros((x.batch_size, x.channels), dtype=dtype)
    return sums.index_add(0, x.items, x.feats.to(dtype)).to(x.dtype)


def global_avg_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the mean over each batch item's voxels; 0 for an empty item."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    counts = x.item_counts.clamp(min=1)
    sums = global_sum_pool(x.map(lambda feats: feats.to(dtype)))
    return (sums / counts[:, None]).to(x.dtype)


def _window(
    x: SparseTensor, kernel: Size, stride: Size | None, padding: Size | None, dilation: Size, out: Target
) -> tuple[KernelMap, Geometry]:
    policy, target = _target(out)
    step = kernel if stride is None else stride
    relation = Relation.of(x.dim, kernel, stride=step, padding=padding, dilation=dilation, policy=policy)
    return kernel_map(x.geometry, relation, target)


def _sums(x: Tensor, found: KernelMap, outputs: Geometry) -> Tensor:
    """A depthwise convolution with weights of one."""
    ones = x.new_ones((x.shape[1], found.volume, 1))
    return conv_features(x, ones, found, outputs.coords.shape[0], groups=x.shape[1])


def _winners(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o, c] = x[w, c] with w the first listed input whose x[w, c] is the maximum over o's inputs; 0 without one."""
    if x.is_meta:  # maps are being prepared: shapes only
        return x.new_empty(rows, x.shape[1])
    with torch.no_grad():
        winner = _first_maximum(x[inputs], outputs, rows)
        found = winner < inputs.shape[0]
        source = torch.cat([inputs, inputs.new_zeros(1)])[winner]
    if x.shape[0] == 0:
        return x.sum(dim=0).expand(rows, -1)  # zeros, with x's graph
    return torch.where(found, x.gather(0, source), 0)


def _first_maximum(values: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """[rows, C]: the place in the list of the first maximum per output and channel; the list's length where none."""
    places, channels = values.shape
    index = outputs[:, None].expand(-1, channels)
    top = values.new_full((rows, channels), -torch.inf).scatter_reduce(0, index, values, "amax")
    place = torch.arange(places, device=values.device)[:, None].expand(-1, channels)
    # NaN equals nothing: let it win, so that it is seen and not lost.
    attains = (values == top[outputs]) | torch.isnan(values)
    candidate = torch.where(attains, place, places)
    first = torch.full((rows, channels), places, dtype=torch.int64, device=values.device)
    return first.scatter_reduce(0, index, candidate, "amin")
