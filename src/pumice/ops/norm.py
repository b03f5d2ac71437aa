"""Batch norms and group norms over the voxels of sparse tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pumice.coords import CoordBuffer
from pumice.coords.box import UNKNOWN
from pumice.errors import OptionError, ShapeError
from pumice.lower import norm as lowered
from pumice.lower.synced_norm import synced_batch_norm
from pumice.ops import autograd
from pumice.ops.ahead import Calls, Compilation, compilations_of
from pumice.ops.pool import broadcast, item_sums
from pumice.ops.tensor import SparseTensor, from_raw_feats, not_sparse, one_node, raw_feats, unchecked_tensor

Vectors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def batch_norm(x: SparseTensor, norm: nn.BatchNorm1d, group: dist.ProcessGroup | None = None) -> SparseTensor:
    """Batch norm over all voxels, with the parameters, statistics and mode of a torch.nn.BatchNorm1d.

        y[n, c] = (x[n, c] - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]

    mean and (biased) var are those of the voxels in training mode or without running statistics, else the running ones.
    Running statistics are updated as in torch. Fewer than two voxels are normalised by the running statistics, which
    stay unchanged, or without them by mean 0 and variance 1.

    group: in training mode, statistics are those of the voxels of all its processes, with one collective forward and
    one backward; every process has to call it. It is differentiable once then.

    Raises DtypeError if x is not a SparseTensor, ShapeError for another number of channels.
    """
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, type(norm).__name__)
    feats, geometry, vectors = raw_feats(x), x.geometry, _vectors(norm)
    if feats.shape[1] != norm.num_features:
        raise ShapeError(f"{type(norm).__name__} takes {norm.num_features} channels, x has {feats.shape[1]}")
    own = norm.training or vectors[0] is None
    if group is not None and norm.training:
        return _over_processes(x, norm, vectors, group)
    if not geometry.trains and (y := _in_evaluation(feats, norm, vectors)) is not None:
        return unchecked_tensor(y, geometry)
    if own and (geometry.trains or _by_kernels(feats, vectors)):
        return _over_valid_rows(x, norm, vectors)
    if torch.compiler.is_compiling():
        # The number of voxels is symbolic while tracing; torch's batch norm branches on it.
        return x.replace(_traced(norm, x.feats))
    if norm.running_mean is None:
        geometry.require_host_size("a BatchNorm without running statistics takes those of all voxels")
    if not own or len(x) > 1:
        return x.replace(nn.BatchNorm1d.forward(norm, x.feats))
    # Under autocast the features are narrower than the parameters.
    like = x.feats if norm.weight is None else norm.weight.detach()
    mean = norm.running_mean if norm.running_mean is not None else like.new_zeros(norm.num_features)
    var = norm.running_var if norm.running_var is not None else like.new_ones(norm.num_features)
    return x.replace(functional.batch_norm(x.feats, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps))


def _in_evaluation(feats: Tensor, norm: nn.BatchNorm1d, vectors: Vectors) -> Tensor | None:
    """The result from running statistics in one kernel; None without them, in training mode, on a CPU, in float64, or
    unless the call is plain and the operands match."""
    if norm.training or vectors[0] is None or not autograd.uses_gpu(feats) or feats.dtype is torch.float64:
        return None
    there = [t for t in vectors if t is not None]
    if not autograd.is_plain_call([feats, *there]) or not feats.is_contiguous():
        return None
    shape, device = (norm.num_features,), feats.device
    for t in there:
        # torch raises for mismatched operands.
        if t.shape != shape or t.device != device or not t.is_contiguous():
            return None
    return lowered.by_statistics(feats, vectors, norm.eps)


@compilations_of("batch norm")
def _layer_compilations(norm: nn.BatchNorm1d, calls: Calls) -> Iterator[Compilation]:
    """Compilations of a batch norm by running statistics or, in training, by batch statistics."""
    like, (mean, variance, weight, bias) = calls.like, _vectors(norm)
    if any([t is not None and t.device != like.device for t in (mean, variance, weight, bias)]):
        return
    if calls.training and (norm.training or mean is None):
        facts = weight is not None, bias is not None, False, False
        dtypes = [torch.float32 if t is None else t.dtype for t in (weight, bias)]
        of = like.new_empty((0, norm.num_features))
        kernels = lowered.NormKernels(_statistics_of(norm), facts, of, (dtypes[0], dtypes[1]))
        for key, task in kernels.compilations().items():
            yield Compilation(key, task)
        for key, task in kernels.gradient_compilations().items():
            yield Compilation(key, task, back=True)
    elif not (calls.training or norm.training) and mean is not None:
        yield Compilation(*lowered.compilation(like, (mean, variance, weight, bias), norm.eps))


def _by_kernels(feats: Tensor, vectors: Vectors) -> bool:
    """True if our kernels compute batch statistics and gradients: on a GPU, not float64, only autograd active."""
    if not torch.is_grad_enabled() or not autograd.uses_gpu(feats) or feats.dtype == torch.float64:
        return False
    return autograd.only_reverse_mode_active([feats, *(t for t in vectors if t is not None)])


def _over_valid_rows(x: SparseTensor, norm: nn.BatchNorm1d, vectors: Vectors) -> SparseTensor:
    """Batch norm over valid rows, also in a captured training step."""
    found = lowered.batch_norm(raw_feats(x), x.geometry.cloud, vectors[2:], _statistics_of(norm))
    return from_raw_feats(found, x.geometry)


def _over_processes(x: SparseTensor, norm: nn.BatchNorm1d, vectors: Vectors, group: dist.ProcessGroup) -> SparseTensor:
    """Batch norm over the valid rows of all processes of a group."""
    if torch.compiler.is_compiling():
        # torch.compile calls the layer as it is then; with fullgraph=True it tells the message.
        raise OptionError("a norm over several processes cannot be traced")
    found = synced_batch_norm(raw_feats(x), x.geometry.cloud, vectors[2:], _statistics_of(norm), group)
    return from_raw_feats(found, x.geometry)


def _statistics_of(norm: nn.BatchNorm1d) -> lowered.Statistics:
    mean, variance, _, _ = _vectors(norm)
    running = None if mean is None or variance is None else (mean, variance)
    follows = norm.training and norm.track_running_stats
    tracked = norm._buffers.get("num_batches_tracked")
    return lowered.Statistics(running, norm.eps, follows, norm.momentum, tracked)


def _vectors(norm: nn.BatchNorm1d) -> Vectors:
    """Running mean and variance, weight, bias: read on each call, as training code may replace them. Bypasses
    nn.Module.__getattr__, which takes as long as a launch."""
    own, kept = norm._parameters, norm._buffers
    try:
        return kept["running_mean"], kept["running_var"], own["weight"], own["bias"]
    except KeyError:
        # Some torch tools turn parameters into plain attributes.
        return norm.running_mean, norm.running_var, norm.weight, norm.bias


def _traced(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Batch norm for a symbolic number of voxels, by the plain-torch versions of the kernels."""
    statistics, (_, _, weight, bias) = _statistics_of(norm), _vectors(norm)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm.training or statistics.running is None:
        count = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        pair = lowered.moments_torch(wide, CoordBuffer(x, count, UNKNOWN, count), statistics)
    else:
        mean, variance = (t.to(wide.dtype) for t in statistics.running)
        pair = torch.stack([mean, torch.rsqrt(variance + norm.eps)])
    state = lowered.NormState(pair, weight, bias, False)
    return state.affine(state.centred(wide)).to(x.dtype)


@one_node
def group_norm(
    x: SparseTensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> SparseTensor:
    """Group normalisation over the voxels of each batch item; groups = C is instance normalisation.

        y[n, c] = (x[n, c] - mean[b, g]) / sqrt(var[b, g] + eps) * weight[c] + bias[c]

    with b the batch item of voxel n, g the group of channel c, mean and biased variance over the item's voxels and the
    group's channels, in at least float32. weight, bias: [C], both or neither.
    Raises ShapeError if groups does not divide the channels.
    """
    if x.channels % groups:
        raise ShapeError(f"groups={groups} must divide the {x.channels} channels of x")
    y = _normalize(x, groups, eps)
    if weight is not None and bias is not None:
        y = y * weight.to(y.dtype) + bias.to(y.dtype)
    return x.replace(y.to(x.dtype))


def _normalize(x: SparseTensor, groups: int, eps: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    feats = x.feats.to(dtype).unflatten(1, (groups, x.channels // groups))
    counts = x.item_counts.clamp(min=1)[:, None] * feats.shape[2]

    def mean(values: Tensor) -> Tensor:
        return broadcast(x, item_sums(x, values.sum(dim=2)) / counts)[:, :, None]

    centred = feats - mean(feats)
    return (centred * torch.rsqrt(mean(centred * centred) + eps)).flatten(1)
