"""The sparse backbone of CenterPoint and similar detectors, in two published variants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from pumice.coords import Relation
from pumice.errors import DtypeError, OptionError
from pumice.nn import BatchNorm, Conv3d, ReLU, ResidualBlock, Sequential
from pumice.ops import MapConsumers, SparseTensor

Padding = int | tuple[int, ...] | None


def _unit(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, ...] = 3,
    stride: int | tuple[int, ...] = 1,
    padding: Padding = None,
    norm: Callable[[int], nn.Module] = BatchNorm,
) -> Sequential:
    convolution = Conv3d(in_channels, out_channels, kernel, stride, padding, bias=False)
    return Sequential(convolution, norm(out_channels), ReLU())


def resnet21d(in_channels: int) -> nn.ModuleList:
    """SparseResNet21D as in torchsparse: axes (x, y-down, z-forward), 21 convolutions, strides 1, 2, 2, 2, (1, 2, 1).

    Strided convolutions have padding 0 and all outputs with an input (out="support"), as torchsparse's downsampling.
    """
    stages, channels = [], in_channels
    plan = ((3, 16, 3, 1), (3, 32, 3, 2), (3, 64, 3, 2), (3, 128, 3, 2), (1, 128, (1, 3, 1), (1, 2, 1)))
    for blocks, width, kernel, stride in plan:
        first = _unit(channels, width, kernel, stride, None if stride == 1 else 0)
        residual = [ResidualBlock(width, width) for _ in range(blocks - 1)]
        stages.append(Sequential(first, *residual))
        channels = width
    return nn.ModuleList(stages)


def voxelres8x(in_channels: int) -> nn.ModuleList:
    """VoxelResBackBone8x as in OpenPCDet: axes (z, y, x), 21 convolutions, strides 1, 2, 2, 2, (2, 1, 1).

    BatchNorm has eps 1e-3 and momentum 0.01; convolutions of residual blocks have a bias.
    """
    norm = partial(BatchNorm, eps=1e-3, momentum=0.01)
    block = partial(ResidualBlock, norm=norm, bias=True)
    unit = partial(_unit, norm=norm)
    return nn.ModuleList(
        [
            Sequential(unit(in_channels, 16), block(16, 16), block(16, 16)),
            Sequential(unit(16, 32, 3, 2, 1), block(32, 32), block(32, 32)),
            Sequential(unit(32, 64, 3, 2, 1), block(64, 64), block(64, 64)),
            Sequential(unit(64, 128, 3, 2, (0, 1, 1)), block(128, 128), block(128, 128)),
            unit(128, 128, (3, 1, 1), (2, 1, 1), 0),
        ]
    )


def _strided(level: nn.Module, strided: bool = True) -> list[Conv3d]:
    """The level's convolutions that change its coordinates or (strided=False) keep them."""
    layers = [m for m in level.modules() if isinstance(m, Conv3d)]
    return [layer for layer in layers if (layer.relation.policy != "same") == strided]


def _has_blocks(level: nn.Module) -> bool:
    return any(isinstance(m, ResidualBlock) for m in level.modules())


FORMS: dict[str, Callable[[int], nn.ModuleList]] = {"voxelres8x": voxelres8x, "resnet21d": resnet21d}


class CenterPointBackbone(nn.Module):
    """Sparse encoder to 1/8 resolution and 128 channels; `.to_dense()` of the result feeds a bird's-eye-view network.

    Yin, Zhou and Kraehenbuehl, "Center-based 3D Object Detection and Tracking", CVPR 2021, sec. 4, with the sparse
    encoder of Yan, Mao and Li, "SECOND", Sensors 2018.

    Parameters
    ----------
    in_channels: features per voxel (5 for x, y, z, intensity, time).
    form: "voxelres8x" (OpenPCDet; give tensors a spatial_shape, axes z, y, x) or "resnet21d" (torchsparse).

    forward(x) returns the SparseTensor of the last stage, stages(x) those of all.
    """

    windows: list[tuple[Relation] | tuple[()]]

    def __init__(self, in_channels: int = 5, form: str = "voxelres8x") -> None:
        super().__init__()
        OptionError.check("form", form, FORMS)
        self.form = form
        self.levels: nn.ModuleList = FORMS[form](in_channels)
        strided = [layer for level in self.levels for layer in _strided(level)]
        self.steps: list[Relation] = [layer.relation for layer in strided]
        self.windows = [(Relation.of(3, 3),) if _has_blocks(level) else () for level in self.levels]
        kept = [
            [_strided(level, False)] if windows else []
            for level, windows in zip(self.levels, self.windows, strict=True)
        ]
        self.consumers: MapConsumers = MapConsumers([[layer] for layer in strided], [()] * len(strided), kept)

    def stages(self, x: SparseTensor) -> list[SparseTensor]:
        """Results of all stages, finest first."""
        if not isinstance(x, SparseTensor):
            raise DtypeError(f"CenterPointBackbone takes a SparseTensor, found {type(x).__name__}")
        x = x.prepare(self.steps, self.windows, self.consumers)
        results = []
        for level in self.levels:
            x = level(x)
            results.append(x)
        return results

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.stages(x)[-1]
