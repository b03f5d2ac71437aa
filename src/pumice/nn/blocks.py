"""Modules made of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pumice.nn import conv as convs
from pumice.nn.fused import chained, fuses
from pumice.nn.layers import BatchNorm, Identity, Linear, ReLU
from pumice.nn.prepared import Parted, Parts, prepared
from pumice.ops.tensor import SparseTensor

CONV = {1: convs.Conv1d, 2: convs.Conv2d, 3: convs.Conv3d, 4: convs.Conv4d}
INVERSE_CONV = {
    1: convs.InverseConv1d,
    2: convs.InverseConv2d,
    3: convs.InverseConv3d,
    4: convs.InverseConv4d,
}


class Sequential(Parted, nn.Sequential):
    """Modules one after the other.

    A module is given the SparseTensor if it is a layer of pumice, has one in it, or its forward is annotated with
    SparseTensor; any other (torch.nn.Linear, a subclass of it, a layer of another library) is applied to the features.

    On a GPU a batch norm and an activation behind a convolution are part of its kernel without gradients, and of its
    step of autograd in training (pumice.nn.fused).
    """

    def forward(self, x: SparseTensor | Tensor) -> SparseTensor | Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = self._parts()
        return chained(parts.modules, x, known=prepared(self, x, parts))  # pyright: ignore[reportArgumentType]

    def _parts(self) -> Parts:
        return Parts(tuple(self._modules.values()))  # pyright: ignore[reportArgumentType]


_CHAINS = (Sequential.forward, nn.Sequential.forward)


class ResidualBlock(Parted):
    """y = act(norm(conv(act(norm(conv(x))))) + shortcut(x)), both convolutions of `kernel_size`, coordinates kept.

    The shortcut is the identity, or a pointwise map and a norm where the channels change. He et al., "Deep Residual
    Learning for Image Recognition", CVPR 2016, fig. 2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        *,
        dim: int = 3,
        norm: Callable[[int], nn.Module] = BatchNorm,
        bias: bool = False,
    ) -> None:
        super().__init__()
        conv = CONV[dim]
        self.body = Sequential(
            conv(in_channels, out_channels, kernel_size, bias=bias),
            norm(out_channels),
            ReLU(),
            conv(out_channels, out_channels, kernel_size, bias=bias),
            norm(out_channels),
        )
        self.shortcut = (
            Identity()
            if in_channels == out_channels
            else Sequential(Linear(in_channels, out_channels, bias=False), norm(out_channels))
        )
        self.act = ReLU()

    def forward(self, x: SparseTensor) -> SparseTensor:
        parts = self._parts()
        known = prepared(self, x, parts)
        if known is not None and (y := known.whole(x)) is not None:
            return y
        if parts.modules and fuses(x, self.body, *parts.modules):
            return chained(parts.modules, x, self.shortcut(x))
        return self.act(self.body(x) + self.shortcut(x))

    def _parts(self) -> Parts:
        own: dict[str, Any] = self._modules
        body, act, shortcut = own.get("body"), own.get("act"), own.get("shortcut")
        # A function, or None, may be in the place of one, and the body may do something else than what is in it.
        if body is None or act is None or shortcut is None or type(body).forward not in _CHAINS:
            return Parts(())
        return Parts((*body, act), shortcut, (body,))
