"""Our networks in spconv's layers with the same weights, as a careful user of spconv would write them.

Layers on one set of coordinates share an indice_key, a MinkUNet's decoder has SparseInverseConv3d with the keys of its
encoder, pointwise layers, norms and activations act on the features only, and nothing is folded. As with our networks,
`twin(x)` is a sparse tensor, and parameters come in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.scenes.stream_nets import Encoder, Residual, UNet
from benchmarks.scenes.workloads import ConvPool, Sample
from pumice.errors import OptionError
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.nn import Conv3d, MaxPool3d, ResidualBlock

_ROUNDED = 16
"""Extents for spconv are rounded up to a multiple of MinkUNet's stride, since it drops an odd last slice."""


def twin(net: nn.Module) -> nn.Module:
    """The same network in spconv's layers, with copied weights and statistics, in its dtype and mode, on its device.

    Raises ModuleNotFoundError without spconv, OptionError for a network that has no twin.
    """
    spconv: Any = import_module("spconv.pytorch")
    if type(net) not in TWINS:
        names = ", ".join(kind.__name__ for kind in TWINS)
        raise OptionError(f"{type(net).__name__} has no twin in spconv's layers; there are {names}")
    first = next(net.parameters())
    return TWINS[type(net)](spconv, net).to(first.device, first.dtype).train(net.training)


def tensor_maker(sample: Sample) -> Callable[[], Any]:
    """A function that makes a new spconv tensor of a sample, without cached indices, on each call."""
    spconv: Any = import_module("spconv.pytorch")
    extent = sample.spatial_shape
    if extent is None:
        extent = [-(-e // _ROUNDED) * _ROUNDED for e in (sample.coords[:, 1:].amax(0) + 1).tolist()]
    shape = list(extent)
    return lambda: spconv.SparseConvTensor(sample.feats, sample.coords, shape, sample.batch)


class _Unit(nn.Module):
    """A convolution, then a norm and ReLU on its features."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv, norm, nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        return y.replace_feature(self.act(self.norm(y.features)))


class _Block(nn.Module):
    """A residual block with the weights of pumice.nn.ResidualBlock or stream_nets.Residual."""

    def __init__(self, spconv: Any, block: Any, key: str) -> None:
        super().__init__()
        if isinstance(block, Residual):
            first, norm, second, last = block.conv1, block.norm1, block.conv2, block.norm2
            short: Any = None if block.short is None else (block.short, block.norm3)
        else:
            first, norm, _, second, last = block.body
            short = block.shortcut if isinstance(block.shortcut, nn.Sequential) else None
        self.first, self.norm = _kept(spconv, first, key), _norm(norm)
        self.second, self.last = _kept(spconv, second, key), _norm(last)
        self.short = None if short is None else nn.Sequential(_linear(short[0]), _norm(short[1]))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        y = self.second(y.replace_feature(self.act(self.norm(y.features))))
        short = x.features if self.short is None else self.short(x.features)
        return y.replace_feature(self.act(self.last(y.features) + short))


class _UNet(nn.Module):
    """A U-Net: a stem, levels of (down, blocks) and of (up, blocks), a head."""

    stem: nn.Module
    head: nn.Module

    def levels(self) -> tuple[Iterable[Any], Iterable[Any]]:
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        down, up = self.levels()
        kept = [self.stem(x)]
        for strided, blocks in down:
            kept.append(blocks(strided(kept[-1])))
        y = kept.pop()
        for inverse, blocks in up:
            finer = inverse(y)
            y = blocks(finer.replace_feature(torch.cat([finer.features, kept.pop().features], dim=1)))
        return y.replace_feature(self.head(y.features))


class _MinkUNet(_UNet):
    def __init__(self, spconv: Any, net: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(_Unit(_kept(spconv, unit[0], "same0"), _norm(unit[1])) for unit in net.stem))
        self.encoders, self.decoders = nn.ModuleList(), nn.ModuleList()
        for level, encoder in enumerate(net.encoders):
            down = _Unit(_strided(spconv, encoder.down[0], f"down{level}"), _norm(encoder.down[1]))
            blocks = nn.Sequential(*_blocks(spconv, encoder.blocks, f"same{level + 1}"))
            self.encoders.append(nn.ModuleList([down, blocks]))
        for level, decoder in reversed(list(enumerate(reversed(net.decoders)))):
            up = _Unit(_inverse(spconv, decoder.up, f"down{level}"), _norm(decoder.norm[0]))
            self.decoders.append(nn.ModuleList([up, nn.Sequential(*_blocks(spconv, decoder.blocks, f"same{level}"))]))
        self.head = _linear(net.head)

    def levels(self) -> tuple[Iterable[Any], Iterable[Any]]:
        return self.encoders, self.decoders


def _centerpoint(spconv: Any, net: Any) -> nn.Module:
    stages: list[nn.Module] = []
    for level, stage in enumerate(net.levels):
        # The last level of voxelres8x is a bare unit, the others a sequence of a unit and blocks.
        unit, *blocks = [stage] if isinstance(stage[0], Conv3d) else stage
        make = _kept if level == 0 else _strided
        stages.append(_Unit(make(spconv, unit[0], f"same{level}" if level == 0 else f"down{level}"), _norm(unit[1])))
        stages += _blocks(spconv, blocks, f"same{level}")
    return nn.Sequential(*stages)


def _conv_pool(spconv: Any, net: Any) -> nn.Module:
    layers: list[nn.Module] = []
    level = 0
    for layer in net.layers:
        if isinstance(layer, MaxPool3d):
            # spconv's maximum starts from 0, which includes the ReLU that follows ours.
            level += 1
            layers.append(spconv.SparseMaxPool3d(layer.kernel_size, layer.options["stride"]))
        elif isinstance(layer, Conv3d):
            layers.append(_kept(spconv, layer, f"same{level}"))
    return spconv.SparseSequential(*layers)


class _StreamUNet(_UNet):
    def __init__(self, spconv: Any, net: Any) -> None:
        super().__init__()

        def unit(made: nn.Module, own: Any) -> _Unit:
            return _Unit(made, _norm(own.norm))

        def pair(blocks: Iterable[Any], level: int) -> nn.Sequential:
            return nn.Sequential(*(_Block(spconv, block, f"same{level}") for block in blocks))

        self.stem = nn.Sequential(*(unit(_kept(spconv, own.conv, "same0"), own) for own in net.stem))
        down = enumerate(net.down)
        self.down = nn.ModuleList(unit(_strided(spconv, own.conv, f"down{level}"), own) for level, own in down)
        self.enc = nn.ModuleList(pair(blocks, level + 1) for level, blocks in enumerate(net.enc))
        up = enumerate(net.up)
        self.up = nn.ModuleList(unit(_inverse(spconv, own.conv, f"down{3 - place}"), own) for place, own in up)
        self.dec = nn.ModuleList(pair(blocks, 3 - place) for place, blocks in enumerate(net.dec))
        self.head = _linear(net.head)

    def levels(self) -> tuple[Iterable[Any], Iterable[Any]]:
        return zip(self.down, self.enc, strict=True), zip(self.up, self.dec, strict=True)


def _stream_encoder(spconv: Any, net: Any) -> nn.Module:
    stages: list[nn.Module] = [_Unit(_kept(spconv, net.stem.conv, "same0"), _norm(net.stem.norm))]
    level = 0
    for stage in net.stages:
        if isinstance(stage, Residual):
            stages.append(_Block(spconv, stage, f"same{level}"))
        else:
            level += 1
            stages.append(_Unit(_strided(spconv, stage.conv, f"down{level}"), _norm(stage.norm)))
    return nn.Sequential(*stages)


TWINS: Mapping[type[nn.Module], Callable[[Any, Any], nn.Module]] = {
    MinkUNet: _MinkUNet,
    CenterPointBackbone: _centerpoint,
    ConvPool: _conv_pool,
    UNet: _StreamUNet,
    Encoder: _stream_encoder,
}
"""By type of network, the function that makes its twin from the module spconv.pytorch and the network.

Networks are passed as Any: the static types of their submodules do not declare the attributes read here.
"""


def _blocks(spconv: Any, blocks: Iterable[Any], key: str) -> list[nn.Module]:
    return [_Block(spconv, block, key) for block in blocks if isinstance(block, ResidualBlock)]


def _kept(spconv: Any, conv: Any, key: str) -> nn.Module:
    """A submanifold convolution with the weights of `conv`."""
    made = spconv.SubMConv3d(
        conv.in_channels, conv.out_channels, _window(conv), bias=conv.bias is not None, indice_key=key
    )
    return _copied(made, conv)


def _strided(spconv: Any, conv: Any, key: str) -> nn.Module:
    options = {name: conv.options[name] for name in ("stride", "padding")}
    made = spconv.SparseConv3d(
        conv.in_channels,
        conv.out_channels,
        _window(conv),
        stride=options["stride"],
        padding=options["padding"] or 0,
        bias=conv.bias is not None,
        indice_key=key,
    )
    return _copied(made, conv)


def _inverse(spconv: Any, conv: Any, key: str) -> nn.Module:
    made = spconv.SparseInverseConv3d(
        conv.in_channels, conv.out_channels, _window(conv), indice_key=key, bias=conv.bias is not None
    )
    return _copied(made, conv)


def _window(conv: Any) -> list[int]:
    return list(conv.weight.shape[1:-1])


def _copied(made: nn.Module, conv: Any) -> nn.Module:
    """Copy the weights of `conv`: both layers store [C_out, *kernel, C_in], but spconv reads those of kernel size 1 as
    [C_in, C_out]."""
    with torch.no_grad():
        for name in ("weight", "bias"):
            own, given = getattr(made, name), getattr(conv, name)
            if own is not None:
                alone = given.ndim > 1 and given.shape[0] * given.shape[-1] == given.numel()
                _copy(own, given.flatten(1).T.reshape(given.shape) if alone else given)
    return made


def _copy(own: Tensor, given: Tensor) -> None:
    if own.shape != given.shape:
        raise OptionError(f"spconv's weights are expected as {list(given.shape)}, found {list(own.shape)}")
    own.copy_(given)


def _norm(norm: Any) -> nn.BatchNorm1d:
    made = nn.BatchNorm1d(norm.num_features, norm.eps, norm.momentum)
    made.load_state_dict(norm.state_dict())
    return made


def _linear(linear: Any) -> nn.Linear:
    made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    made.load_state_dict(linear.state_dict())
    return made
