"""Networks at random, for programs: chains, sums, U-Nets, shared layers and weights, and what cannot be traced."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import pumice as pm
from pumice.testing import random_cloud

CHANNELS = (4, 8, 12)


class Known(NamedTuple):
    """What a value is: its level, told by the strided layers that lead there, and its channels."""

    level: tuple[str, ...]
    channels: int


class Net(nn.Module):
    """Each part on the values of the parts before it, by their places."""

    def __init__(self, parts: Sequence[nn.Module], wires: Sequence[tuple[int, ...]], results: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.wires, self.results = nn.ModuleList(parts), tuple(wires), tuple(results)

    def forward(self, x: pm.SparseTensor) -> Any:
        return through(self, [x])


def through(net: Any, values: list[Any]) -> Any:
    """The results of a network's parts, of which each takes what its wires name of `values` and of earlier results."""
    for part, wire in zip(net.parts, net.wires, strict=True):
        values.append(part(*[values[place] for place in wire]))
    found = [values[place] for place in net.results]
    return found[0] if len(found) == 1 else {"first": found[0], "others": tuple(found[1:])}


class Unit(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.conv, self.rest = parts[0], nn.ModuleList(parts[1:])

    def forward(self, x, *target):
        y = self.conv(x, *target)
        for part in self.rest:
            y = part(y)
        return y


class Residual(nn.Module):
    def __init__(self, channels: int, swapped: bool) -> None:
        super().__init__()
        self.conv, self.norm = pm.nn.Conv3d(channels, channels, 3, bias=False), pm.nn.BatchNorm(channels)
        self.relu, self.swapped = pm.nn.ReLU(inplace=swapped), swapped

    def forward(self, x):
        y = self.norm(self.conv(x))
        return self.relu(x + y if self.swapped else y + x)


class Functional(nn.Module):
    """torch's functions on features."""

    def __init__(self, how: int, channels: int) -> None:
        super().__init__()
        self.conv, self.how = pm.nn.Conv3d(channels, channels, 3), how
        self.scale = nn.Parameter(torch.rand(channels))
        self.register_buffer("shift", torch.rand(channels))

    def forward(self, x):
        y = self.conv(x)
        if self.how == 0:
            return y.replace(functional.relu(y.feats))
        if self.how == 1:
            y.feats.mul_(0.5)
            return y + x
        if self.how == 2:
            z = y.replace(functional.relu(y.feats, inplace=True))
            return z + y
        if self.how == 3:
            return y.replace(y.feats * self.scale + self.shift)
        y += x
        return y.map(torch.tanh)


class Counts(nn.Module):
    """Changes an attribute of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.calls, self.seen = pm.nn.Conv3d(channels, channels, 1), 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.conv(x)


class Branches(nn.Module):
    """Control flow on shapes and on values."""

    def __init__(self, channels: int, how: int) -> None:
        super().__init__()
        self.few, self.many, self.how = pm.nn.Linear(channels, channels), pm.nn.Conv3d(channels, channels, 3), how

    def forward(self, x):
        if self.how == 0:
            return self.few(x) if len(x) < 40 else self.many(x)
        if self.how == 1:
            return self.few(x) if x.feats.mean() > 0 else self.many(x)
        if self.how == 2:
            return self.few(x) if x.spatial_shape is None else self.many(x)
        y = self.many(x)
        return y if isinstance(y.feats, torch.Tensor) and y.feats.dtype is torch.float32 else x


class Pair(nn.Module):
    """Gives a tuple."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = pm.nn.Conv3d(channels, channels, 3, bias=False)

    def forward(self, x):
        y = self.conv(x)
        return y, x.replace(x.feats[:, :1].expand(-1, x.channels) if len(x) else x.feats)


class OfPair(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pair, self.relu = Pair(channels), pm.nn.ReLU()

    def forward(self, x):
        first, second = self.pair(x)
        return self.relu(first) + second


class Maybe(nn.Module):
    """Gives None where there are few voxels."""

    def forward(self, x):
        return None if len(x) < 40 else x


class OfMaybe(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.maybe, self.conv = Maybe(), pm.nn.Conv3d(channels, channels, 3)

    def forward(self, x):
        y = self.maybe(x)
        return self.conv(x) if y is None else x


class Collects(nn.Module):
    """Puts values into a list that it is given, and cannot be traced."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.gate = pm.nn.Conv3d(channels, channels, 3), pm.nn.Linear(channels, channels)

    def forward(self, x, found: list):
        y = self.conv(x)
        found.append(y)
        return self.gate(y) if y.feats.mean() > 0 else y


class OfList(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Collects(channels) for _ in range(2))

    def forward(self, x):
        found: list = []
        for part in self.parts:
            x = part(x, found)
        return x + found[0] + found[-1]


class Dead(nn.Module):
    """Part of it is for nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.dead = pm.nn.Conv3d(channels, channels, 3), pm.nn.Conv3d(channels, channels, 3)
        self.hooked = pm.nn.Linear(channels, channels)
        self.heard: list[int] = []
        self.hooked.register_forward_hook(_hears(self.heard))

    def forward(self, x):
        self.dead(x)
        self.hooked(x)
        return self.conv(x)


def _hears(heard: list[int]) -> Callable[..., None]:
    return lambda module, given, found: heard.append(1)


class Modes(nn.Module):
    """A context of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = pm.nn.Conv3d(channels, channels, 3)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x)
        return y.to(x.dtype)


class Maker:
    """Networks of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.parts: list[nn.Module] = []
        self.wires: list[tuple[int, ...]] = []
        self.known = [Known((), 4)]

    def net(self, length: int) -> nn.Module:
        for _ in range(length):
            self.random.choice(self._ways())()
        last, count = len(self.known) - 1, self.random.choice((1, 1, 1, 2, 3))
        net = Net(self.parts, self.wires, [last, *(self.random.randrange(last + 1) for _ in range(count - 1))])
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
        return net.eval()

    def _ways(self) -> list[Callable[[], None]]:
        plain = [self._unit, self._unit, self._residual, self._block, self._sum, self._cat, self._down, self._up]
        return [*plain, *plain, self._up, self._shared, self._odd, self._odd, self._pool, self._hooked, self._unet]

    def _add(self, part: nn.Module, wire: tuple[int, ...], known: Known) -> int:
        self.parts.append(part)
        self.wires.append(wire)
        self.known.append(known)
        return len(self.known) - 1

    def _recent(self) -> int:
        count = len(self.known)
        return self.random.randrange(max(0, count - 3), count)

    def _behind(self, channels: int) -> list[nn.Module]:
        norms = [pm.nn.BatchNorm, pm.nn.LayerNorm, lambda c: pm.nn.GroupNorm(2, c), pm.nn.BatchNorm, pm.nn.BatchNorm]
        acts = [pm.nn.ReLU, lambda: pm.nn.ReLU(inplace=True), pm.nn.SiLU, pm.nn.GELU, pm.nn.Dropout, pm.nn.Identity]
        found = []
        if self.random.random() < 0.7:
            found.append(self.random.choice(norms)(channels))
        if self.random.random() < 0.7:
            found.append(self.random.choice([*acts, pm.nn.ReLU, pm.nn.ReLU])())
        return found

    def _layer(self, before: int, after: int) -> nn.Module:
        bias, conv = self.random.random() < 0.3, pm.nn.Conv3d
        return self.random.choice(
            (
                lambda: conv(before, after, 3, bias=bias),
                lambda: conv(before, after, 3, bias=bias),
                lambda: conv(before, after, 1, bias=bias),
                lambda: conv(before, after, 3, dilation=2, groups=2, bias=bias),
                lambda: pm.nn.Linear(before, after, bias=bias),
            )
        )()

    def _unit(self) -> None:
        at, after = self._recent(), self.random.choice(CHANNELS)
        level, before = self.known[at]
        layer, behind = self._layer(before, after), self._behind(after)
        way = self.random.randrange(4)
        if way == 0:
            more = [nn.BatchNorm1d(after)] if self.random.random() < 0.5 else []
            behind = [
                *(more or behind),
                self.random.choice((nn.ReLU(), nn.SiLU(inplace=True), nn.Tanh(), nn.Dropout(0.5))),
            ]
            self._add(pm.nn.Sequential(layer, *behind), (at,), Known(level, after))
        else:
            self._add((nn.Sequential, Unit, Unit)[way - 1](layer, *behind), (at,), Known(level, after))

    def _residual(self) -> None:
        at = self._recent()
        self._add(Residual(self.known[at].channels, self.random.random() < 0.5), (at,), self.known[at])

    def _block(self) -> None:
        at, after = self._recent(), self.random.choice(CHANNELS)
        self._add(pm.nn.ResidualBlock(self.known[at].channels, after), (at,), Known(self.known[at].level, after))

    def _alike(self, at: int, channels: bool) -> list[int]:
        own = self.known[at]
        return [n for n, one in enumerate(self.known) if one.level == own.level and (one == own or not channels)]

    def _sum(self) -> None:
        at = self._recent()
        other = self.random.choice(self._alike(at, True))
        self._add(self.random.choice((Sum(), Arithmetic())), (at, other), self.known[at])

    def _cat(self) -> None:
        at = self._recent()
        other = self.random.choice(self._alike(at, False))
        channels = self.known[at].channels + self.known[other].channels
        if channels <= 40:
            self._add(Cat(), (at, other), Known(self.known[at].level, channels))

    def _down(self) -> None:
        at, after = self._recent(), self.random.choice(CHANNELS)
        level, before = self.known[at]
        if len(level) < 3:
            size, padding = self.random.choice(((2, None), (2, None), (3, 1)))
            conv = pm.nn.Conv3d(before, after, size, 2, padding=padding, bias=False)
            self._add(Unit(conv, *self._behind(after)), (at,), Known((*level, f"{size}"), after))

    def _up(self) -> None:
        at, after = self._recent(), self.random.choice(CHANNELS)
        level, before = self.known[at]
        if level:
            size, padding = (2, None) if level[-1] == "2" else (3, 1)
            conv = pm.nn.InverseConv3d(before, after, size, 2, padding=padding, bias=self.random.random() < 0.3)
            targets = [n for n, one in enumerate(self.known) if one.level == level[:-1]]
            wire = (at, self.random.choice(targets)) if self.random.random() < 0.7 else (at,)
            self._add(Unit(conv, *self._behind(after)), wire, Known(level[:-1], after))

    def _unet(self) -> None:
        at = self._recent()
        level, channels = self.known[at]
        skip = self._add(Unit(self._layer(channels, 8), pm.nn.BatchNorm(8), pm.nn.ReLU()), (at,), Known(level, 8))
        down = self._add(Unit(pm.nn.Conv3d(8, 12, 2, 2), pm.nn.ReLU()), (skip,), Known((*level, "2"), 12))
        up = self._add(Unit(pm.nn.InverseConv3d(12, 4, 2, 2, bias=False)), (down, skip), Known(level, 4))
        both = self._add(Cat(), (up, skip), Known(level, 12))
        self._add(pm.nn.ResidualBlock(12, 8), (both,), Known(level, 8))

    def _shared(self) -> None:
        """A part that is there already, or a layer with the weights of another."""
        at = self._recent()
        for part, wire in zip(list(self.parts), list(self.wires), strict=True):
            if len(wire) == 1 and self.known[wire[0]] == self.known[at] == self.known[self.wires.index(wire) + 1]:
                self._add(part, (at,), self.known[at])
                return
        own, other = (pm.nn.Conv3d(self.known[at].channels, self.known[at].channels, 3) for _ in range(2))
        other.weight = own.weight
        self._add(Unit(own, pm.nn.ReLU(), other), (at,), self.known[at])

    def _odd(self) -> None:
        at = self._recent()
        channels = self.known[at].channels
        ways = [Counts, Dead, OfPair, OfMaybe, OfList, Modes]
        ways += [lambda c, n=n: Branches(c, n) for n in range(4)]
        ways += [lambda c, n=n: Functional(n, c) for n in range(5)]
        self._add(self.random.choice(ways)(channels), (at,), self.known[at])

    def _pool(self) -> None:
        at = self._recent()
        level, channels = self.known[at]
        if len(level) < 3:
            kind = self.random.choice((pm.nn.MaxPool3d, pm.nn.AvgPool3d, pm.nn.SumPool3d))
            self._add(kind(2, 2), (at,), Known((*level, "2"), channels))

    def _hooked(self) -> None:
        at = self._recent()
        channels = self.known[at].channels
        part = Unit(pm.nn.Conv3d(channels, channels, 3), pm.nn.BatchNorm(channels), pm.nn.ReLU())
        on = self.random.choice((part, part.conv, part.rest[0]))
        on.register_forward_hook(lambda module, given, found: found * 2)
        self._add(part, (at,), self.known[at])


class Sum(nn.Module):
    def forward(self, x, y):
        return x + y


class Arithmetic(nn.Module):
    def forward(self, x, y):
        return -(x * 2.0 - y) / 3.0 + 1.0


class Cat(nn.Module):
    def forward(self, x, y):
        return pm.cat([x, y])


def in_mixed_modes(net: nn.Module, seed: int, statistics: bool = True) -> nn.Module:
    """The network in training, some norms in evaluation or averaging without decay, some parts frozen; statistics:
    some norms keep none."""
    chance = random.Random(seed)
    for module in net.train().modules():
        if isinstance(module, nn.BatchNorm1d):
            if chance.random() < 0.15:
                module.eval()
            if chance.random() < 0.1:
                module.momentum = None
            if statistics and chance.random() < 0.1:
                module.track_running_stats = False
        if chance.random() < 0.1:
            module.requires_grad_(False)
    return net


def scene(seed: int, channels: int = 4, rows: int | None = None) -> pm.SparseTensor:
    """A scene of one to three items, with an extent or without."""
    chance = random.Random(seed)
    rows = chance.choice((1, 5, 30, 60, 90)) if rows is None else rows
    coords = random_cloud(rows, 3, extent=(12, 12, 6), seed=seed)
    feats = torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(seed))
    shape = (12, 12, 6) if chance.random() < 0.5 else None
    return pm.SparseTensor(feats, coords, spatial_shape=shape)


def flat(value):
    """All tensors of a nested result."""
    if isinstance(value, dict):
        return [one for each in value.values() for one in flat(each)]
    if isinstance(value, tuple | list):
        return [one for each in value for one in flat(each)]
    return [value]


def far(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, by that of the values or 1."""
    one, other = one.detach().double().nan_to_num(), other.detach().double().nan_to_num()
    return float((one - other).norm()) / max(1.0, float(other.norm()))
