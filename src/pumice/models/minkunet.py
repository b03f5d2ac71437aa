"""MinkUNet: a sparse residual U-Net for semantic segmentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pumice.coords import Relation
from pumice.errors import DtypeError
from pumice.nn import (
    BatchNorm,
    Conv1d,
    Conv2d,
    Conv3d,
    Conv4d,
    InverseConv1d,
    InverseConv2d,
    InverseConv3d,
    InverseConv4d,
    Linear,
    ReLU,
    ResidualBlock,
    Sequential,
)
from pumice.ops import MapConsumers, SparseTensor, cat

WIDTHS = (32, 32, 64, 128, 256, 256, 128, 96, 96)
CONV: Mapping[int, type[nn.Module]] = {1: Conv1d, 2: Conv2d, 3: Conv3d, 4: Conv4d}
INVERSE_CONV: Mapping[int, type[nn.Module]] = {1: InverseConv1d, 2: InverseConv2d, 3: InverseConv3d, 4: InverseConv4d}


def _unit(convolution: nn.Module, channels: int) -> Sequential:
    return Sequential(convolution, BatchNorm(channels), ReLU())


def _convolutions(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, (*CONV.values(), *INVERSE_CONV.values()))]


class Encoder(nn.Module):
    """A convolution of kernel 2 and stride 2, then two residual blocks."""

    def __init__(self, in_channels: int, out_channels: int, dim: int) -> None:
        super().__init__()
        self.down: Sequential = _unit(CONV[dim](in_channels, in_channels, 2, stride=2, bias=False), in_channels)
        self.blocks: Sequential = Sequential(
            ResidualBlock(in_channels, out_channels, dim=dim), ResidualBlock(out_channels, out_channels, dim=dim)
        )

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.blocks(self.down(x))


class Decoder(nn.Module):
    """Upsample x to the coordinates of `skip`, concatenate both, then two residual blocks."""

    def __init__(self, in_channels: int, out_channels: int, skip_channels: int, dim: int) -> None:
        super().__init__()
        self.up: nn.Module = INVERSE_CONV[dim](in_channels, out_channels, 2, stride=2, bias=False)
        self.norm: Sequential = Sequential(BatchNorm(out_channels), ReLU())
        self.blocks: Sequential = Sequential(
            ResidualBlock(out_channels + skip_channels, out_channels, dim=dim),
            ResidualBlock(out_channels, out_channels, dim=dim),
        )

    def forward(self, x: SparseTensor, skip: SparseTensor) -> SparseTensor:
        return self.blocks(cat([self.norm(self.up(x, skip)), skip]))


class MinkUNet(nn.Module):
    """SparseResUNet42: 42 convolutions over 9 kernel maps, 7 linear shortcuts and a linear head.

    Choy, Gwak and Savarese, "4D Spatio-Temporal ConvNets", CVPR 2019, sec. 4; in the form and widths of Tang et al.,
    "Searching Efficient 3D Architectures with Sparse Point-Voxel Convolution", ECCV 2020.

    Parameters
    ----------
    in_channels: features per voxel. num_classes: logits per voxel. width: factor on all channels. dim: spatial axes.

    forward(x): SparseTensor, N voxels x in_channels -> SparseTensor of logits on the same voxels, N x num_classes.
    """

    decoders: nn.ModuleList

    def __init__(self, in_channels: int = 4, num_classes: int = 19, width: float = 1.0, dim: int = 3) -> None:
        super().__init__()
        widths = [max(1, int(width * c)) for c in WIDTHS]
        stem, *down = widths[:5]
        conv = CONV[dim]
        self.stem: Sequential = Sequential(
            _unit(conv(in_channels, stem, 3, bias=False), stem), _unit(conv(stem, stem, 3, bias=False), stem)
        )
        self.encoders: nn.ModuleList = nn.ModuleList(
            Encoder(before, after, dim) for before, after in zip(widths[:4], down, strict=True)
        )
        before, skips = widths[4:8], widths[3::-1]
        self.decoders = nn.ModuleList(Decoder(b, a, s, dim) for b, a, s in zip(before, widths[5:], skips, strict=True))
        self.head: Any = Linear(widths[-1], num_classes)
        self.steps: tuple[Relation, ...] = (Relation.of(dim, 2, stride=2).shared(),) * len(self.encoders)
        self.windows: tuple[tuple[Relation], ...] = ((Relation.of(dim, 3).shared(),),) * (len(self.encoders) + 1)
        self.consumers: MapConsumers = self._consumers()

    def _consumers(self) -> MapConsumers:
        """The convolution layers by kernel map, finest level first."""
        down = [_convolutions(encoder)[:1] for encoder in self.encoders]
        back = [_convolutions(decoder)[:1] for decoder in reversed(self.decoders)]
        same = [_convolutions(self.stem), *(_convolutions(encoder)[1:] for encoder in self.encoders)]
        for level, decoder in zip(same, reversed(self.decoders), strict=False):
            level += _convolutions(decoder)[1:]
        return MapConsumers(down, back, [[level] for level in same])

    def forward(self, x: SparseTensor) -> SparseTensor:
        if not isinstance(x, SparseTensor):
            raise DtypeError(f"MinkUNet takes a SparseTensor, found {type(x).__name__}")
        known = x.prepare(self.steps, self.windows, self.consumers)
        levels = [self.stem(known)]
        for encoder in self.encoders:
            levels.append(encoder(levels[-1]))
        y = levels.pop()
        for decoder in self.decoders:
            y = decoder(y, levels.pop())
        return x.replace(self.head(y).feats)

    @torch.no_grad()
    def predict(self, x: SparseTensor) -> torch.Tensor:
        """Class labels, int64: [P], one per point, if x was voxelised from points; else [N], one per voxel."""
        labels = self(x).feats.argmax(dim=1)
        return labels if x.geometry.inverse is None else labels[x.inverse]
