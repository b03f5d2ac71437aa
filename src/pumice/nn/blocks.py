"""Containers: Sequential and ResidualBlock."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pumice.nn import conv as convs
from pumice.nn.layers import BatchNorm, Identity, Linear, ReLU
from pumice.nn.training_chain import call, training_chain, trains
from pumice.ops.tensor import SparseTensor

CONV = {1: convs.Conv1d, 2: convs.Conv2d, 3: convs.Conv3d, 4: convs.Conv4d}
INVERSE_CONV = {1: convs.InverseConv1d, 2: convs.InverseConv2d, 3: convs.InverseConv3d, 4: convs.InverseConv4d}


class Sequential(nn.Sequential):
    """torch.nn.Sequential over SparseTensors.

    A module receives the SparseTensor if it is or contains a layer of pumice, or if its forward is annotated with
    SparseTensor; any other module (torch.nn.Linear, a layer of another library) receives the features.
    """

    def forward(self, x: SparseTensor | Tensor) -> SparseTensor | Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        modules = [*self]
        if trains(x, *modules):
            return training_chain(modules, x)  # pyright: ignore[reportArgumentType]
        for module in modules:
            x = call(module, x)  # pyright: ignore[reportArgumentType]
        return x


class ResidualBlock(nn.Module):
    """y = act(norm(conv(act(norm(conv(x))))) + shortcut(x)), both convolutions submanifold, of `kernel_size`.

    The shortcut is the identity, or a linear layer and a norm if the channels change. He et al., "Deep Residual
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
        whole = type(self.body) is Sequential and isinstance(self.act, nn.Module)
        modules = (*self.body, self.act) if whole else ()
        if modules and trains(x, self.body, *modules):
            return training_chain(modules, x, self.shortcut(x))
        return self.act(self.body(x) + self.shortcut(x))
