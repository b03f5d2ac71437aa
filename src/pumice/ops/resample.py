"""Rearrangement of channels and voxels: space to channel and back, nearest up-sampling, columns as channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pumice.coords import Geometry, Relation, as_axes, kernel_map
from pumice.errors import OptionError, ShapeError
from pumice.ops.conv import Size, target_of
from pumice.ops.points import take
from pumice.ops.sets import to_dense
from pumice.ops.tensor import SparseTensor, arithmetic_feats, not_sparse, one_node


@one_node
def space_to_channel(x: SparseTensor, factor: Size = 2) -> SparseTensor:
    """Voxels `factor` times as large, whose channels are those of the voxels within, one after the other.

        y[o, r * C + c] = x[i, c]   where in = factor * out + r,  0 <= r < factor per axis, r numbered row-major

    0 for absent voxels. x: N voxels x C channels; returns the distinct floor(in / factor) x C * product(factor)
    channels. Differentiable. Raises OptionError and ShapeError for other factors than an int of 1 or more, or one per
    axis. The sparse form of the inverse of pixel shuffle: Shi et al., "Real-Time Single Image and Video
    Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural Network", CVPR 2016, eq. 4.
    """
    found, outputs = kernel_map(x.geometry, _blocks(x, factor))
    rows = found.rows().long()
    feats = take(arithmetic_feats(x), rows.flatten()).view(rows.shape[0], rows.shape[1] * x.channels)
    return SparseTensor(feats, outputs)


@one_node
def channel_to_space(x: SparseTensor, factor: Size = 2, out: SparseTensor | Geometry | None = None) -> SparseTensor:
    """Voxels 1 / `factor` times as large, each with its share of the channels: the inverse of space_to_channel.

        y[o, c] = x[i, r * C + c]   where out = factor * in + r,  0 <= r < factor per axis, r numbered row-major

    x: N voxels x C * product(factor) channels. out: the finer coordinates, from which x's derive, as a SparseTensor or
    Geometry; None: all N * product(factor) of them, in (batch, Morton) order. Differentiable.
    Raises ShapeError if product(factor) does not divide the channels, GeometryError if x's coordinates are known to
    derive from others than `out`, OptionError.
    """
    rows, taps, outputs = _parents(x, factor, out)
    volume = math.prod(as_axes(factor, x.spatial_dim, "factor", 1))
    if x.channels % volume:
        raise ShapeError(f"channel_to_space takes a multiple of {volume} channels, found {x.channels}")
    shares = arithmetic_feats(x).reshape(-1, x.channels // volume)
    return SparseTensor(take(shares, torch.where(rows < 0, -1, rows * volume + taps)), outputs)


@one_node
def upsample_nearest(x: SparseTensor, factor: Size = 2, out: SparseTensor | Geometry | None = None) -> SparseTensor:
    """Voxels 1 / `factor` times as large, each with the features of the voxel that contains it.

        y[o, c] = x[i, c]   where in = floor(out / factor); 0 if absent

    Arguments, result and errors as those of channel_to_space, for any number of channels.
    """
    rows, _, outputs = _parents(x, factor, out)
    return SparseTensor(take(arithmetic_feats(x), rows), outputs)


def to_bev(
    x: SparseTensor, axis: int = 0, spatial_shape: Sequence[int] | None = None, origin: Sequence[int] | None = None
) -> Tensor:
    """The dense tensor seen along an axis, from above for the height: the places along it become channels.

        y[b, c * n + h, p] = dense[b, c, ..h.., p]   with h of n at `axis`

    axis: a spatial axis, 0 to D - 1. spatial_shape, origin: as to_dense(). Returns [batch_size, C * n, *other extents].
    Raises OptionError for another axis, and as to_dense. As the height compression of second.pytorch and OpenPCDet
    (Yan, Mao and Li, "SECOND: Sparsely Embedded Convolutional Detection", Sensors 2018, sec. 3.1.3).
    """
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, "to_bev")
    if axis not in range(x.spatial_dim):
        raise OptionError(f"axis is 0 to {x.spatial_dim - 1}, found {axis!r}")
    return to_dense(x, spatial_shape, origin).movedim(2 + axis, 2).flatten(1, 2)


def _blocks(x: SparseTensor, factor: Size) -> Relation:
    factors = as_axes(factor, x.spatial_dim, "factor", 1)
    return Relation.of(x.spatial_dim, factors, stride=factors, padding=0, policy="floor_unique").shared()


def _parents(x: SparseTensor, factor: Size, out: SparseTensor | Geometry | None) -> tuple[Tensor, Tensor, Geometry]:
    """(row of x that contains each output, int64 [M], -1 for none; its place within; the outputs)."""
    relation = replace(_blocks(x, factor), policy="transposed_support" if out is None else "cached_inverse")
    found, outputs = kernel_map(x.geometry, relation.shared(), target_of(out)[1])
    rows, taps = found.rows().max(1)
    return rows.long(), taps, outputs
