"""Pooling over windows and over batch items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.errors import DeviceError, OptionError, ShapeError
from pumice.lower import rows as lowered
from pumice.ops import autograd
from pumice.ops.conv import Size, Target, conv_features, target_of
from pumice.ops.prepare import layer_map
from pumice.ops.tensor import SparseTensor, arithmetic_feats, mask_padding, one_node
from pumice.runtime.launch import has_triton

Offsets = Sequence[Sequence[int]] | None


@one_node
def max_pool(
    x: SparseTensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    out: Target = None,
    offsets: Offsets = None,
) -> SparseTensor:
    """y[o, c] = max of x[i, c] over the inputs present in the window of o; 0 if there are none.

    The gradient goes to the first input that attains the maximum, in the order of kernel offsets. Arguments as in
    conv(); stride defaults to kernel_size. offsets: [K][D] integers instead of a window, as in conv() (then kernel_size
    only is the default stride).
    """
    found, outputs = _window(x, (kernel_size, stride, padding, dilation, offsets), out)
    feats = arithmetic_feats(x)
    # Maps between buffers have no pair counts on the host.
    if found.buffered is not None or (_kernels_run(feats) and has_triton(feats)):
        return SparseTensor(lowered.max_pool_rows(feats, found), outputs)
    pairs = found.pairs()
    return SparseTensor(maximum(feats, pairs.inputs, pairs.outputs, outputs.coords.shape[0]), outputs)


@one_node
def sum_pool(
    x: SparseTensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    out: Target = None,
    offsets: Offsets = None,
) -> SparseTensor:
    """y[o, c] = sum of x[i, c] over the inputs present in the window of o. Arguments as in max_pool()."""
    found, outputs = _window(x, (kernel_size, stride, padding, dilation, offsets), out)
    return SparseTensor(_sums(arithmetic_feats(x), found, outputs), outputs)


@one_node
def avg_pool(
    x: SparseTensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    out: Target = None,
    offsets: Offsets = None,
) -> SparseTensor:
    """y[o, c] = mean of x[i, c] over the inputs present in the window of o. Arguments as in max_pool()."""
    found, outputs = _window(x, (kernel_size, stride, padding, dilation, offsets), out)
    return SparseTensor(_means(arithmetic_feats(x), found, outputs), outputs)


@one_node
def unpool(
    x: SparseTensor,
    kernel_size: Size,
    target: SparseTensor | Geometry | None = None,
    *,
    stride: Size | None = None,
    padding: Size | None = None,
    dilation: Size = 1,
    offsets: Offsets = None,
    reduce: str = "sum",
) -> SparseTensor:
    """The transpose of a pool: features go back to the finer voxels of their windows.

        y[o, c] = sum or mean of x[i, c] over the inputs i with  out = stride * in + dilation * r - padding

    target: the finer coordinates, a SparseTensor or Geometry; None: all that are reached. Arguments otherwise as in
    max_pool(). With windows that do not overlap (kernel_size = stride, padding 0) every voxel takes the features of its
    coarser voxel: upsample_nearest() is then faster. Raises OptionError for another `reduce` than "sum" and "mean", and
    as conv_inverse() does, but takes any target whose stride times `stride` is that of x.
    """
    if reduce not in ("sum", "mean"):
        raise OptionError(f"reduce is 'sum' or 'mean', found {reduce!r}")
    policy = "transposed_support" if target is None else "given_inverse"
    relation = _relation(x.spatial_dim, kernel_size, stride, padding, dilation, offsets, policy)
    found, outputs = kernel_map(x.geometry, relation, target_of(target)[1])
    run = _means if reduce == "mean" else _sums
    return SparseTensor(run(arithmetic_feats(x), found, outputs), outputs)


@one_node
def global_max_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the maximum over each batch item's voxels; 0 for an empty item."""
    feats = arithmetic_feats(x)
    with torch.no_grad():
        first = (lowered.max_items if _kernels_run(feats) else lowered.max_items_torch)(feats, _items(x), x.batch_size)
    return _rows_of(feats, first)


@one_node
def global_sum_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the sum over each batch item's voxels, accumulated in at least float32."""
    return item_sums(x, arithmetic_feats(x)).to(x.dtype)


@one_node
def global_avg_pool(x: SparseTensor) -> Tensor:
    """[B, C]: the mean over each batch item's voxels; 0 for an empty item."""
    # Divided before rounding to x's dtype: the sum may overflow half precision where the mean does not.
    return (item_sums(x, arithmetic_feats(x)) / x.item_counts.clamp(min=1)[:, None]).to(x.dtype)


@one_node
def broadcast(x: SparseTensor, values: Tensor) -> Tensor:
    """[N, C]: the row of `values` [B, C] of each voxel's batch item, 0 in padding rows of a captured network.

        y[n, c] = values[b, c]   with b the batch item of voxel n

    Scales channels by what a network makes of pooled features, as squeeze-and-excitation does:

        gate = torch.sigmoid(linear(pm.ops.global_avg_pool(x)))
        y = x.replace(x.feats * pm.ops.broadcast(x, gate))

    Its gradient is a sum over each item's voxels in a fixed order; that of values[x.items] is many times slower on a
    GPU. Raises DtypeError if x is not a SparseTensor, DeviceError for another device, and ShapeError unless values has
    a row for each batch item.
    """
    if values.device != x.device:
        raise DeviceError(f"values are on {values.device}, x is on {x.device}")
    if values.ndim != 2 or len(values) != x.batch_size:
        raise ShapeError(f"values must be [{x.batch_size}, C], a row per batch item, found {list(values.shape)}")
    run = lowered.spread_items if _kernels_run(values) else lowered.spread_items_torch
    return run(values, _items(x))


def item_sums(x: SparseTensor, values: Tensor) -> Tensor:
    """[B, C]: sums of values [N, C] over the voxels of each batch item, in at least float32."""
    run = lowered.sum_items if _kernels_run(values) else lowered.sum_items_torch
    return run(values, _items(x), x.batch_size)


def _kernels_run(values: Tensor) -> bool:
    """True if kernels of ours, with their gradients, may run: at most autograd's reverse mode is active."""
    return autograd.only_reverse_mode_active((values,))


def _items(x: SparseTensor) -> Tensor:
    """int64 [N]: batch item of each voxel, -1 in padding rows."""
    return x.items if x.geometry.buffered is None else torch.where(x.valid_mask, x.items, -1)


@one_node
def row_sum(x: SparseTensor, values: Tensor) -> Tensor:
    """The sum [...] of values [N, ...] over the voxels of x; padding rows of a captured network are excluded."""
    _check_rows(x, values)
    return mask_padding(x, values).sum(0)


@one_node
def row_mean(x: SparseTensor, values: Tensor) -> Tensor:
    """The mean [...] of values [N, ...] over the voxels of x; padding rows of a captured network are excluded.

    NaN if x is empty, as in torch. Turns a loss per voxel into a scalar:

        row_mean(y, functional.mse_loss(y.feats, wanted, reduction="none").mean(1))

    Raises ShapeError unless values have one row per row of x.
    """
    _check_rows(x, values)
    if x.geometry.buffered is None:
        return values.mean(0)
    # As torch's mean: sum in at least float32 and divide before rounding, as the sum may overflow half precision.
    total = mask_padding(x, values).sum(0, dtype=torch.promote_types(values.dtype, torch.float32))
    return (total / x.geometry.cloud.count[0]).to(values.dtype)


def _check_rows(x: SparseTensor, values: Tensor) -> None:
    rows = x.feats.shape[0]
    if not values.ndim or values.shape[0] != rows:
        raise ShapeError(f"values must have a row for each of {rows} voxels, found shape {list(values.shape)}")


def _window(
    x: SparseTensor, rule: tuple[Size, Size | None, Size | None, Size, Offsets], out: Target
) -> tuple[KernelMap, Geometry]:
    policy, target = target_of(out)
    return layer_map(x.geometry, _relation(x.spatial_dim, *rule, policy), target)


def _relation(
    dim: int,
    kernel: Size,
    stride: Size | None,
    padding: Size | None,
    dilation: Size,
    offsets: Offsets,
    policy: str | None,
) -> Relation:
    step = kernel if stride is None else stride
    if offsets is None:
        return Relation.of(dim, kernel, stride=step, padding=padding, dilation=dilation, policy=policy)
    if padding is not None:
        raise OptionError(f"offsets cannot be combined with padding, found padding={padding!r}")
    return Relation.of_offsets(dim, offsets, stride=step, dilation=dilation, policy=policy)


def _sums(x: Tensor, found: KernelMap, outputs: Geometry) -> Tensor:
    """Sums over windows, as a depthwise convolution with weights of one."""
    ones = x.new_ones((x.shape[1], found.volume, 1))
    return conv_features(x, ones, found, outputs.coords.shape[0], groups=x.shape[1])


def _means(x: Tensor, found: KernelMap, outputs: Geometry) -> Tensor:
    # Divide before rounding to x's dtype: the sum may overflow half precision where the mean does not.
    sums = _sums(x.to(torch.promote_types(x.dtype, torch.float32)), found, outputs)
    return (sums / found.counts().clamp(min=1)[:, None].to(x.device)).to(x.dtype)


def maximum(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o, c] = max of x[i, c] over o's inputs, 0 without any; the gradient goes to the first listed maximum."""
    if x.is_meta:  # `prepare`: shapes only
        return x.new_empty(rows, x.shape[1])
    with torch.no_grad():
        place = lowered.max_items_torch(x[inputs], outputs, rows)
        source = torch.cat([inputs, inputs.new_full((1,), -1)])[place]
    return _rows_of(x, source)


def _rows_of(x: Tensor, source: Tensor) -> Tensor:
    """out[o, c] = x[source[o, c], c], 0 for row -1."""
    if torch.compiler.is_compiling():
        # The number of rows is symbolic and may be 0: append a row to index.
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    elif x.shape[0] == 0:
        return x.sum(dim=0).expand(len(source), -1)  # zeros, with x's graph
    channels = torch.arange(x.shape[1], device=x.device)
    return torch.where(source >= 0, pick(x, (source.clamp(min=0), channels)), 0)


def pick(x: Tensor, index: Tensor | tuple[Tensor, ...]) -> Tensor:
    """x[index], with a gradient summed in at least float32 and in a fixed order, unlike gather and index_select."""
    return x.to(torch.promote_types(x.dtype, torch.float32))[index].to(x.dtype)


def total(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o] = sum of x[i] over o's inputs."""
    return _wide_sum(x, inputs, outputs, rows).to(x.dtype)


def mean(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o] = mean of x[i] over o's inputs; 0 if there are none."""
    counts = torch.bincount(outputs, minlength=rows).clamp(min=1)
    return (_wide_sum(x, inputs, outputs, rows) / counts[:, None]).to(x.dtype)


def first(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o] = x[i] of the lowest i among o's inputs; every output has one."""
    lowest = outputs.new_full((rows,), len(x)).scatter_reduce(0, outputs, inputs, "amin")
    return x[lowest]


def _wide_sum(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """Sums in at least float32: sums of half precision may overflow."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros((rows, x.shape[1]), dtype=dtype).index_add(0, outputs, x[inputs].to(dtype))


REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "mean": mean,
    "sum": total,
    "max": maximum,
    "first": first,
}
