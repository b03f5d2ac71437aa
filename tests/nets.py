"""Small networks that use every kind of layer, for what treats a network as a whole."""

from __future__ import annotations

import torch
from torch import nn

import pumice as pm
from pumice.nn import (
    ELU,
    AvgPool3d,
    BatchNorm,
    Conv3d,
    ConvTranspose3d,
    GenerativeConvTranspose3d,
    GlobalAvgPool,
    GlobalMaxPool,
    GlobalSumPool,
    GroupNorm,
    InstanceNorm,
    InverseConv3d,
    LayerNorm,
    Linear,
    MaxPool3d,
    ReLU,
    ResidualBlock,
    Sequential,
    SiLU,
    SumPool3d,
)
from pumice.ops.tensor import raw_feats


class Levels(nn.Module):
    """Up and down by every relation; a list of what each level gives."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = Sequential(Conv3d(4, width, 3), BatchNorm(width), ReLU())
        self.floor = Conv3d(width, width, 2, stride=2)
        self.wide = Conv3d(width, width, 3, stride=2)
        self.support = Conv3d(width, width, 3, stride=2, padding=1)
        self.dilating = Conv3d(width, width, (3, 1, 1), out="support")
        self.spread = Conv3d(width, width, 3, dilation=2)
        self.up = ConvTranspose3d(width, width, 2, stride=2)
        self.generative = GenerativeConvTranspose3d(width, width, 3, stride=2)
        self.back = InverseConv3d(width, width, 2, stride=2)
        self.odd = Conv3d(width, width, None, offsets=[[0, 0, 0], [1, 0, 2], [-1, 1, 0]])

    def forward(self, x):
        x = self.stem(x)
        a, b, c = self.floor(x), self.wide(x), self.support(x)
        finer = self.up(self.spread(a))
        return [self.back(a + b, x), self.dilating(a), self.odd(c), finer, self.generative(c)]


class Gate(nn.Module):
    """Channels scaled by what a linear map makes of their means over each item."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool, self.linear = GlobalAvgPool(), nn.Linear(width, width)

    def forward(self, x):
        gate = torch.sigmoid(self.linear(self.pool(x)))
        return x.replace(x.feats * pm.ops.broadcast(x, gate))


class Layers(nn.Module):
    """Norms, groups, pools, and what reduces over items; a dictionary of what each gives."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = Sequential(Conv3d(4, width, 3, groups=2), GroupNorm(2, width), SiLU())
        self.depthwise = Sequential(Conv3d(width, width, 3, groups=width), InstanceNorm(width))
        self.pools = nn.ModuleList(pool(2, stride=2) for pool in (MaxPool3d, AvgPool3d, SumPool3d))
        self.same = nn.Sequential(MaxPool3d(3, stride=1), Gate(width))
        self.whole = nn.ModuleList((GlobalMaxPool(), GlobalAvgPool(), GlobalSumPool()))
        self.block = ResidualBlock(width, 2 * width)
        self.head = Sequential(LayerNorm(2 * width), Linear(2 * width, 3), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        y = self.depthwise(x)
        coarse = [pool(y) for pool in self.pools]
        return {
            "coarse": pm.cat(coarse),
            "same": self.same(x),
            "items": [pool(coarse[0]) for pool in self.whole],
            "head": self.head(self.block(y)).feats.argmax(1),
            "number": 7,
        }


class OneLevel(nn.Module):
    """A U-Net of one level below its first; three classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = Sequential(Conv3d(4, width, 3, bias=False), BatchNorm(width), ReLU())
        self.down = Sequential(Conv3d(width, width, 2, stride=2, bias=False), BatchNorm(width))
        self.deep = ResidualBlock(width, 2 * width)
        self.up = InverseConv3d(2 * width, width, 2, stride=2)
        self.head = Sequential(ResidualBlock(2 * width, width), Linear(width, 3))

    def forward(self, x):
        x = self.stem(x)
        return self.head(pm.cat([self.up(self.deep(self.down(x)), x), x]))


class Dense(nn.Module):
    """A dense map behind a strided level, as a bird's-eye view takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Conv3d(4, 8, 3, stride=2, padding=1)
        self.head = nn.Conv3d(8, 2, 3, padding=1)

    def forward(self, x):
        return self.head(self.down(x).to_dense())


def strange(net: nn.Module, seed: int = 0) -> nn.Module:
    """In evaluation, with statistics of norms that are not those of a new one."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)  # pyright: ignore[reportOptionalMemberAccess]
    for module in net.modules():
        if isinstance(module, InstanceNorm) and module.bias is not None:
            # Without it a mean over all voxels is 0 but for rounding.
            nn.init.normal_(module.bias, 0, 0.5, generator=generator)
    return net.eval()


def with_norms(net: nn.Module) -> nn.Module:
    """With statistics and affine maps of norms that are not ones and zeros."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            nn.init.normal_(module.running_mean, 0, 0.2)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(module.running_var, 0.3, 1)  # pyright: ignore[reportArgumentType]
    return net


def smooth(net):
    """The network with an ELU for each ReLU. What half a precision rounds moves values over the kink of a ReLU and
    changes gradients there by all they are: by tens of percent behind forty layers; of smooth ones, by roundings."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, ReLU):
                setattr(module, name, ELU())
    return net


def check_casts(nets, loss, given, dtype, margin):
    """A captured step of the first network casts where an eager one of the second does. given: x and labels."""
    net, other = nets
    other.load_state_dict(net.state_dict())
    mine, theirs = Casts(net), Casts(other)
    with torch.autocast(given[0].device.type, dtype):
        step = pm.capture_step(net, loss, torch.optim.SGD(net.parameters()), *given, margin=margin)
        value = loss(other(given[0]), given[1])
    value.backward()
    step(*given)
    assert step.replays == 1
    assert mine.captured == theirs.eager and not theirs.captured
    assert any(("gradient", dtype) in seen for seen in mine.captured.values())
    kinds = [[p.grad is not None and p.grad.dtype for p in n.parameters()] for n in nets]
    assert kinds[0] == kinds[1]


class Casts:
    """Of the modules of a network, by name: the dtypes of what they take, of what they give, and of its gradients.

    captured: in captured passes; eager: in all others.
    """

    def __init__(self, net):
        self.captured, self.eager = {}, {}
        for name, module in net.named_modules():
            module.register_forward_hook(lambda module, given, found, name=name: self._see(name, given[0], found))

    def _see(self, name, given, found):
        if not isinstance(given, pm.SparseTensor) or not isinstance(found, pm.SparseTensor | torch.Tensor):
            return
        held = self.eager if given.geometry.buffered is None else self.captured
        seen = held.setdefault(name, set())
        seen.add(("takes", given.dtype, "gives", found.dtype))
        if found.requires_grad:
            # What a hook gives, but None, replaces the gradient.
            values = raw_feats(found) if isinstance(found, pm.SparseTensor) else found
            values.register_hook(lambda grad: seen.add(("gradient", grad.dtype)))


def stirred(module: nn.Module) -> nn.Module:
    """Norms whose statistics and weights are not those of a new one."""
    torch.manual_seed(3)
    for part in module.modules():
        if isinstance(part, BatchNorm):
            for values in (part.running_mean, part.running_var, part.weight, part.bias):
                if values is not None:
                    values.data.uniform_(0.5, 2)
    return module.eval()


class Asks(nn.Module):
    """Does anything with the result of a convolution of 4 channels."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what, self.conv = what, pm.nn.Conv3d(4, 4, 3)

    def forward(self, x):
        return self.what(self.conv(x))
