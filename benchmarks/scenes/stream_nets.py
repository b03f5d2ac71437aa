"""Two networks as a user writes them plainly: of public layers only, each layer called on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

import pumice as pm

UNET = (32, 32, 64, 128, 256, 256, 128, 96, 96)
ENCODER = (16, 32, 64, 128)


class ConvNormReLU(nn.Module):
    """A convolution, a batch norm, ReLU."""

    def __init__(self, conv: nn.Module, channels: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = conv, pm.nn.BatchNorm(channels), pm.nn.ReLU()

    def forward(self, x: pm.SparseTensor, *target: pm.SparseTensor) -> pm.SparseTensor:
        return self.relu(self.norm(self.conv(x, *target)))


class Residual(nn.Module):
    """A residual block of two convolutions; the shortcut is the identity, or a linear map if the channels change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = pm.nn.Conv3d(inputs, outputs, 3, bias=False), pm.nn.BatchNorm(outputs)
        self.conv2, self.norm2 = pm.nn.Conv3d(outputs, outputs, 3, bias=False), pm.nn.BatchNorm(outputs)
        self.short = None if inputs == outputs else pm.nn.Linear(inputs, outputs, bias=False)
        self.norm3 = None if inputs == outputs else pm.nn.BatchNorm(outputs)
        self.relu = pm.nn.ReLU()

    def forward(self, x: pm.SparseTensor) -> pm.SparseTensor:
        kept = x if self.short is None or self.norm3 is None else self.norm3(self.short(x))
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + kept)


class UNet(nn.Module):
    """A U-Net with MinkUNet's widths: stem, four levels down and up, 42 convolutions; 4 input features, 19 outputs."""

    def __init__(self, widths: Sequence[int] = UNET) -> None:
        super().__init__()
        n, conv = widths, pm.nn.Conv3d
        self.stem = nn.ModuleList(ConvNormReLU(conv(c, n[0], 3, bias=False), n[0]) for c in (4, n[0]))
        self.down = nn.ModuleList(ConvNormReLU(conv(n[k], n[k], 2, 2, bias=False), n[k]) for k in range(4))
        self.enc = nn.ModuleList(_pair(n[k], n[k + 1]) for k in range(4))
        self.up = nn.ModuleList(
            ConvNormReLU(pm.nn.InverseConv3d(n[k + 4], n[k + 5], 2, 2, bias=False), n[k + 5]) for k in range(4)
        )
        self.dec = nn.ModuleList(_pair(n[k + 5] + n[3 - k], n[k + 5]) for k in range(4))
        self.head = pm.nn.Linear(n[8], 19)

    def forward(self, x: pm.SparseTensor) -> pm.SparseTensor:
        for layer in self.stem:
            x = layer(x)
        skips = [x]
        for down, blocks in zip(self.down, self.enc, strict=True):
            x = down(x)
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
            skips.append(x)
        y = skips.pop()
        for up, blocks in zip(self.up, self.dec, strict=True):
            skip = skips.pop()
            y = pm.cat([up(y, skip), skip])
            for block in blocks:  # type: ignore[attr-defined]
                y = block(y)
        return self.head(y)


class Encoder(nn.Module):
    """The backbone of a detector: residual stages, joined by strided convolutions with padding, as in spconv."""

    def __init__(self, widths: Sequence[int] = ENCODER) -> None:
        super().__init__()
        n, conv = widths, pm.nn.Conv3d
        self.stem = ConvNormReLU(conv(4, n[0], 3, bias=False), n[0])
        self.stages = nn.ModuleList(_pair(n[0], n[0]))
        for inputs, outputs in zip(n, n[1:], strict=False):
            self.stages.append(ConvNormReLU(conv(inputs, outputs, 3, 2, padding=1, bias=False), outputs))
            self.stages.extend(_pair(outputs, outputs))

    def forward(self, x: pm.SparseTensor) -> pm.SparseTensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


def _pair(inputs: int, outputs: int) -> nn.ModuleList:
    return nn.ModuleList([Residual(inputs, outputs), Residual(outputs, outputs)])


NETS: Mapping[str, Callable[[bool], nn.Module]] = {
    "unet": lambda quick: UNet([width // 8 for width in UNET] if quick else UNET),
    "encoder": lambda quick: Encoder([width // 4 for width in ENCODER] if quick else ENCODER),
}
"""Networks by name; quick: with fewer channels."""
