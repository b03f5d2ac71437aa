"""Containers: Sequential and ResidualBlock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from pumice.nn import conv as convs
from pumice.nn.hooks import has_no_forward_hooks
from pumice.nn.layers import BatchNorm, Identity, Linear, ReLU
from pumice.ops import SparseTensor

CONV: Mapping[int, type[nn.Module]] = {1: convs.Conv1d, 2: convs.Conv2d, 3: convs.Conv3d, 4: convs.Conv4d}
INVERSE_CONV: Mapping[int, type[nn.Module]] = {
    1: convs.InverseConv1d,
    2: convs.InverseConv2d,
    3: convs.InverseConv3d,
    4: convs.InverseConv4d,
}


class Sequential(nn.Sequential):
    """torch.nn.Sequential over SparseTensors.

    A module receives the SparseTensor if it is or contains a layer of pumice, or if its forward is annotated with
    SparseTensor; any other module (torch.nn.Linear, a layer of another library) receives the features.
    """

    def forward(self, x: SparseTensor | Tensor) -> SparseTensor | Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for module in self:
            x = _call(module, x)  # pyright: ignore[reportArgumentType]
        return x


def _call(module: nn.Module, x: SparseTensor) -> SparseTensor:
    """Call `module` on x or, if it takes no SparseTensor, on features; a mixed nn.Sequential child by child."""
    if not isinstance(x, SparseTensor) or _takes_sparse(module):
        return module(x)
    if type(module).forward is nn.Sequential.forward and any(map(_takes_sparse, module.children())):
        if not has_no_forward_hooks((module,)):
            return module(x)
        for child in module.children():
            x = _call(child, x)
        return x
    return x.replace(module(x.feats))


def _takes_sparse(module: nn.Module) -> bool:
    """True if a module receives SparseTensors (see Sequential); for an nn.Sequential, if all children do."""
    kind = type(module)
    if kind.forward is nn.Sequential.forward:
        return all(map(_takes_sparse, module.children()))
    return _says_so(kind) or any(_is_ours(type(part)) for part in module.modules())


def _is_ours(kind: type[nn.Module]) -> bool:
    return any(base.__module__.startswith("pumice.") for base in kind.__mro__)


def _says_so(kind: type[nn.Module]) -> bool:
    """True for layers of pumice, nn.Identity, and a `forward` annotated with SparseTensor."""
    told = map(str, getattr(kind.forward, "__annotations__", {}).values())
    return _is_ours(kind) or kind.forward is nn.Identity.forward or any("SparseTensor" in each for each in told)


class ResidualBlock(nn.Module):
    """Residual block y = act(norm(conv(act(norm(conv(x))))) + shortcut(x)) of two submanifold convolutions.

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
        self.body: Sequential = Sequential(
            conv(in_channels, out_channels, kernel_size, bias=bias),
            norm(out_channels),
            ReLU(),
            conv(out_channels, out_channels, kernel_size, bias=bias),
            norm(out_channels),
        )
        self.shortcut: Identity | Sequential = (
            Identity()
            if in_channels == out_channels
            else Sequential(Linear(in_channels, out_channels, bias=False), norm(out_channels))
        )
        self.act: ReLU = ReLU()

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.act(self.body(x) + self.shortcut(x))
