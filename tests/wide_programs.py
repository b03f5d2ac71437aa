"""Networks at random that are wider than those of `programs`: 1 to 4 axes, one or two inputs, relations of every kind,
writes in place, shared parts, and values that are dense."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from programs import Arithmetic, Cat, Sum, Unit, through
from torch import nn
from torch.nn import functional

import pumice as pm
from pumice.testing import random_cloud

CHANNELS = (4, 8, 12)
EXTENTS = {1: (60,), 2: (16, 10), 3: (12, 12, 6), 4: (6, 6, 4, 3)}
INPUTS = ("one", "one", "one", "two", "same", "dense")
"""What a network takes: a scene, two scenes, two tensors on the coordinates of one, a scene and factors [C]."""

Step = tuple[int, int, int | None]
"""Kernel, stride and padding of a strided layer."""
STEPS: tuple[Step, ...] = ((2, 2, None), (2, 2, None), (3, 2, 1), (3, 2, None), (1, 2, None), (2, 3, None), (3, 3, 0))


class Known(NamedTuple):
    """What a value is: its coordinates, told by what made them, its channels, and the voxel size."""

    level: tuple[Any, ...]
    channels: int
    size: int


def layer(name: str, dim: int) -> Any:
    return getattr(pm.nn, f"{name}{dim}d")


class WideNet(nn.Module):
    """Each part on the values of the parts before it, by their places; results: the last one, or a dictionary."""

    def __init__(self, dim: int, takes: str) -> None:
        super().__init__()
        self.dim, self.takes = dim, takes
        self.parts = nn.ModuleList()
        self.wires: list[tuple[int, ...]] = []
        self.results: list[int] = []

    def forward(self, x: pm.SparseTensor, other: Any = None) -> Any:
        return through(self, [x] if other is None else [x, x * other if self.takes == "dense" else other])


# Parts


class Block(nn.Module):
    """A residual unit whose norm is that of another layer too, or whose weight is."""

    def __init__(self, dim: int, channels: int, how: int) -> None:
        super().__init__()
        conv = layer("Conv", dim)
        self.one, self.two = conv(channels, channels, 3, bias=how == 1), conv(channels, channels, 3, bias=False)
        self.norm, self.relu, self.how = pm.nn.BatchNorm(channels), pm.nn.ReLU(inplace=how == 2), how
        if how == 3:
            self.two.weight = self.one.weight

    def forward(self, x):
        y = self.relu(self.norm(self.one(x)))
        y = self.norm(self.two(y)) if self.how < 3 else self.two(y)
        return self.relu(x + y if self.how == 2 else y + x)


class Writes(nn.Module):
    """Writes in place: to a result, to what is read again, and to its argument."""

    def __init__(self, dim: int, channels: int, how: int) -> None:
        super().__init__()
        self.conv, self.norm, self.how = layer("Conv", dim)(channels, channels, 3), pm.nn.BatchNorm(channels), how
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x):
        return getattr(self, f"_{self.how}")(x)

    def _0(self, x):
        y = self.conv(x)
        y.feats.add_(1.0).mul_(0.5)
        return self.norm(y)

    def _1(self, x):
        y = self.norm(self.conv(x))
        y.feats.clamp_(min=-0.5)
        return y + x

    def _2(self, x):
        y = self.conv(x)
        z = self.norm(y)
        z.feats.mul_(self.scale)
        return z + y

    def _3(self, x):
        y = self.conv(x)
        kept = y.replace(y.feats.clone())
        torch.relu_(y.feats)
        return self.norm(y) + kept

    def _4(self, x):
        y = x.replace(x.feats.clone())
        y.feats.mul_(2.0)
        return self.conv(x) + y

    def _5(self, x):
        # A write to what a convolution read: its gradient asks for the values of before.
        y = self.conv(x.clone())
        functional.silu(y.feats, inplace=True)
        return y * self.scale

    def _6(self, x):
        y = self.conv(x)
        y.feats[:, 0] = 0.0
        return y

    def _7(self, x):
        y = self.conv(x)
        with torch.no_grad():
            y.feats.mul_(0.5)
        return self.norm(y)


class Dense(nn.Module):
    """Features by torch's modules and functions."""

    def __init__(self, dim: int, channels: int, how: int) -> None:
        super().__init__()
        self.conv, self.how = layer("Conv", dim)(channels, channels, 3), how
        self.norm, self.linear = nn.LayerNorm(channels), nn.Linear(channels, channels)
        self.gate = pm.nn.Sequential(pm.nn.GlobalAvgPool(), nn.Linear(channels, channels), nn.Sigmoid())

    def forward(self, x):
        y = self.conv(x)
        if self.how == 0:
            return y.map(self.norm)
        if self.how == 1:
            return y.replace(functional.gelu(self.linear(y.feats)) + x.feats)
        if self.how == 2:
            gate = self.gate(y)
            return y * pm.ops.broadcast(y, gate) + gate[y.items]
        if self.how == 3:
            return y.replace(torch.cat([y.feats[:, 1:], x.feats[:, :1]], 1))
        return y.replace(y.feats.softmax(1)).detach() + y


class Pick(nn.Module):
    """Voxels by their coordinates: perhaps none."""

    def forward(self, x):
        return pm.ops.prune(x, x.coords[:, -1] % 3 < 2)


class Quiet(nn.Module):
    """Without gradients within."""

    def __init__(self, dim: int, channels: int) -> None:
        super().__init__()
        self.conv, self.other = (layer("Conv", dim)(channels, channels, 3) for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            y = self.conv(x)
        return self.other(x) + y


class Onto(nn.Module):
    """A convolution to the coordinates of another tensor."""

    def __init__(self, conv: nn.Module, named: bool) -> None:
        super().__init__()
        self.conv, self.named = conv, named

    def forward(self, x, target):
        return self.conv(x, out=target) if self.named else self.conv(x, target)


class WideMaker:
    """Networks of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.dim = self.random.choice((1, 2, 2, 3, 3, 3, 3, 4))
        self.net = WideNet(self.dim, self.random.choice(INPUTS))
        self.known = [Known((), 4, 1)]
        if self.net.takes != "one":
            self.known.append(Known(("other",) if self.net.takes == "two" else (), 4, 1))
        self.ends: list[int] = []
        self.grown = 0

    def made(self, length: int) -> WideNet:
        for _ in range(length):
            self.random.choice(self._ways())()
        values = [n for n in range(len(self.known)) if n not in self.ends]
        count = self.random.choice((1, 1, 2, 3))
        more = [self.random.choice(range(len(self.known))) for _ in range(count - 1)]
        self.net.results = [values[-1], *more]
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
        return self.net.eval()

    def _ways(self) -> list[Callable[[], None]]:
        often = [self._unit, self._unit, self._unit, self._sum, self._cat, self._down, self._up, self._block]
        rare = [self._shared, self._writes, self._writes, self._dense, self._pool, self._transposed, self._onto]
        return [*often, *often, *rare, self._wider, self._part, self._end]

    # Values

    def _add(self, part: nn.Module, wire: tuple[int, ...], known: Known) -> int:
        self.net.parts.append(part)
        self.net.wires.append(wire)
        self.known.append(known)
        return len(self.known) - 1

    def _recent(self) -> int:
        values = [n for n in range(len(self.known)) if n not in self.ends]
        return self.random.choice(values[-3:])

    def _others(self, fits: Callable[[Known], bool]) -> list[int]:
        return [n for n, one in enumerate(self.known) if n not in self.ends and fits(one)]

    def _grows(self, factor: int) -> bool:
        """True if there may be so many times as many voxels."""
        if self.grown + factor > 3**4 * 2:
            return False
        self.grown += factor
        return True

    def _after(self) -> int:
        return self.random.choice(CHANNELS)

    # Layers

    def _conv(self, before: int, after: int) -> nn.Module:
        conv, chance = layer("Conv", self.dim), self.random
        bias, groups = chance.random() < 0.4, chance.choice((1, 1, 1, 1, 2, 4))
        size = chance.choice((3, 3, 3, 1, 2, (3,) + (1,) * (self.dim - 1)))
        way = chance.randrange(8)
        if way == 0:
            return pm.nn.Linear(before, after, bias=bias)
        if way == 1:
            offsets = [[0] * self.dim, [1] * self.dim, [-2] + [0] * (self.dim - 1)]
            return conv(before, after, None, offsets=offsets, bias=bias)
        if way == 2:
            return conv(before, after, size, dilation=chance.choice((2, 3)), groups=groups, bias=bias)
        if way == 3:
            flow = chance.choice(("fetch-on-demand", "implicit-gemm-unsorted", "explicit-gemm"))
            return conv(before, after, size, bias=bias, dataflow=flow)
        return conv(before, after, size, groups=groups if way == 4 else 1, bias=bias)

    def _behind(self, channels: int) -> list[nn.Module]:
        norms = (
            lambda: pm.nn.BatchNorm(channels),
            lambda: pm.nn.BatchNorm(channels),
            lambda: pm.nn.BatchNorm(channels, affine=False),
            lambda: pm.nn.BatchNorm(channels, track_running_stats=False),
            lambda: pm.nn.BatchNorm(channels, eps=1e-2, momentum=0.5),
            lambda: pm.nn.LayerNorm(channels),
            lambda: pm.nn.GroupNorm(2, channels),
            lambda: pm.nn.InstanceNorm(channels),
        )
        acts = (
            pm.nn.ReLU,
            pm.nn.ReLU,
            lambda: pm.nn.ReLU(inplace=True),
            pm.nn.SiLU,
            lambda: pm.nn.SiLU(inplace=True),
            lambda: pm.nn.LeakyReLU(0.1, inplace=True),
            pm.nn.Tanh,
            pm.nn.Dropout,
            lambda: pm.nn.Dropout(0.3, inplace=True),
            pm.nn.Identity,
        )
        found = [self.random.choice(norms)()] if self.random.random() < 0.6 else []
        found += [self.random.choice(acts)() for _ in range(self.random.choice((0, 1, 1, 1, 2)))]
        if len(found) > 1 and getattr(found[-1], "inplace", False) and hasattr(found[-2], "inplace"):
            # Autograd refuses a write to the result of a ReLU.
            found[-1].inplace = False
        return found

    def _wrapped(self, conv: nn.Module, channels: int) -> nn.Module:
        behind = self._behind(channels)
        return self.random.choice((Unit, Unit, pm.nn.Sequential, nn.Sequential))(conv, *behind)

    # Ways

    def _unit(self) -> None:
        at, after = self._recent(), self._after()
        level, before, size = self.known[at]
        self._add(self._wrapped(self._conv(before, after), after), (at,), Known(level, after, size))

    def _block(self) -> None:
        at = self._recent()
        channels = self.known[at].channels
        if self.random.random() < 0.5:
            part = Block(self.dim, channels, self.random.randrange(4))
            self._add(part, (at,), self.known[at])
        else:
            after, norm = self._after(), self.random.choice((pm.nn.BatchNorm, pm.nn.InstanceNorm))
            part = pm.nn.ResidualBlock(channels, after, dim=self.dim, norm=norm, bias=self.random.random() < 0.3)
            self._add(part, (at,), self.known[at]._replace(channels=after))

    def _sum(self) -> None:
        at = self._recent()
        own = self.known[at]
        alike = self._others(lambda one: one == own)
        apart = self._others(lambda one: one[1:] == own[1:] and one.level != own.level)
        if apart and self.random.random() < 0.3:
            # Over the coordinates of both.
            level = "union", len(self.known)
            self._add(Sum(), (at, self.random.choice(apart)), own._replace(level=(level,)))
        else:
            self._add(self.random.choice((Sum(), Sum(), Arithmetic())), (at, self.random.choice(alike)), own)

    def _cat(self) -> None:
        at = self._recent()
        own = self.known[at]
        other = self.random.choice(self._others(lambda one: one.level == own.level))
        channels = own.channels + self.known[other].channels
        if channels <= 40:
            self._add(Cat(), (at, other), own._replace(channels=channels))

    def _down(self) -> None:
        at, after = self._recent(), self._after()
        level, before, size = self.known[at]
        if size < 8:
            kernel, stride, padding = step = self.random.choice(STEPS)
            groups = self.random.choice((1, 1, 1, 2))
            options = {"padding": padding, "groups": groups, "bias": self.random.random() < 0.3}
            conv = layer("Conv", self.dim)(before, after, kernel, stride, **options)
            self._add(self._wrapped(conv, after), (at,), Known((*level, step), after, size * stride))

    def _up(self) -> None:
        at, after = self._recent(), self._after()
        level, before, size = self.known[at]
        if level and level[-1] in STEPS:
            kernel, stride, padding = level[-1]
            groups, bias = self.random.choice((1, 1, 1, 2)), self.random.random() < 0.3
            conv = layer("InverseConv", self.dim)(before, after, kernel, stride, padding, groups=groups, bias=bias)
            targets = self._others(lambda one: one.level == level[:-1])
            known = Known(level[:-1], after, size // stride)
            if self.random.random() < 0.7:
                self._add(Unit(conv, *self._behind(after)), (at, self.random.choice(targets)), known)
            else:
                self._add(self._wrapped(conv, after), (at,), known)

    def _transposed(self) -> None:
        """Transposed and generative convolutions, and those to all that their window reaches."""
        at, after = self._recent(), self._after()
        level, before, size = self.known[at]
        way, kernel = self.random.randrange(3), self.random.choice((2, 3))
        if not self._grows(kernel**self.dim):
            return
        grown = (*level, ("grown", len(self.known)))
        if way == 0:
            conv = layer("Conv", self.dim)(before, after, kernel, out="support", padding=kernel // 2)
            self._add(self._wrapped(conv, after), (at,), Known(grown, after, size))
        elif size % 2 == 0:
            name = "ConvTranspose" if way == 1 else "GenerativeConvTranspose"
            conv = layer(name, self.dim)(before, after, kernel, 2, bias=self.random.random() < 0.5)
            self._add(self._wrapped(conv, after), (at,), Known(grown, after, size // 2))

    def _onto(self) -> None:
        at, after = self._recent(), self._after()
        _, before, size = self.known[at]
        stride = self.random.choice((1, 1, 2))
        fits = self._others(lambda one: one.size == size * stride)
        if fits:
            target, named = self.random.choice(fits), self.random.random() < 0.5
            kernel = self.random.choice((1, 2, 3))
            conv = layer("Conv", self.dim)(before, after, kernel, stride, bias=self.random.random() < 0.3)
            self._add(Onto(conv, named), (at, target), self.known[target]._replace(channels=after))

    def _shared(self) -> None:
        """A part that is there already."""
        at = self._recent()
        places = range(len(self.net.parts))
        first = len(self.known) - len(self.net.parts)
        alike = [
            n
            for n in places
            if len(wire := self.net.wires[n]) == 1
            and first + n not in self.ends
            and self.known[wire[0]] == self.known[at] == self.known[first + n]
        ]
        if alike:
            self._add(self.net.parts[self.random.choice(alike)], (at,), self.known[at])

    def _writes(self) -> None:
        at = self._recent()
        part = Writes(self.dim, self.known[at].channels, self.random.randrange(8))
        self._add(part, (at,), self.known[at])

    def _dense(self) -> None:
        at = self._recent()
        part = Dense(self.dim, self.known[at].channels, self.random.randrange(5))
        self._add(part, (at,), self.known[at])

    def _pool(self) -> None:
        at = self._recent()
        level, channels, size = self.known[at]
        pool = layer(self.random.choice(("MaxPool", "AvgPool", "SumPool")), self.dim)
        if self.random.random() < 0.4:
            self._add(pool(3, 1), (at,), self.known[at])
        elif size < 8:
            kernel, stride, padding = step = self.random.choice(STEPS)
            self._add(pool(kernel, stride, padding), (at,), Known((*level, step), channels, size * stride))

    def _wider(self) -> None:
        """To voxels that are not those of before."""
        at = self._recent()
        self._add(Pick(), (at,), self.known[at]._replace(level=(("picked", len(self.known)),)))

    def _part(self) -> None:
        at = self._recent()
        self._add(Quiet(self.dim, self.known[at].channels), (at,), self.known[at])

    def _end(self) -> None:
        """A dense value, which may be a result."""
        at = self._recent()
        pool = self.random.choice((pm.nn.GlobalMaxPool, pm.nn.GlobalAvgPool, pm.nn.GlobalSumPool))()
        self.ends.append(self._add(pool, (at,), self.known[at]))


def wide_scene(net: WideNet, seed: int, rows: int | None = None) -> tuple[Any, ...]:
    """Arguments of a network: scenes of one to three items, with an extent, or with negative coordinates."""
    chance = random.Random(seed)
    rows = chance.choice((1, 2, 5, 30, 60, 60)) if rows is None else rows
    x = _cloud(net.dim, rows, seed, chance)
    generator = torch.Generator().manual_seed(seed + 1)
    if net.takes == "two":
        return x, _cloud(net.dim, max(1, rows // 2), seed + 7, chance, x.spatial_shape, x.batch_size)
    if net.takes == "same":
        return x, x.replace(torch.randn(x.feats.shape, generator=generator))
    return (x, torch.randn(4, generator=generator)) if net.takes == "dense" else (x,)


def _cloud(
    dim: int, rows: int, seed: int, chance: random.Random, shape: Any = "", batch: int | None = None
) -> pm.SparseTensor:
    items = min(rows, chance.choice((1, 1, 2, 3)))
    coords = random_cloud(rows, dim, extent=EXTENTS[dim], batch_size=items, seed=seed)
    if shape == "":
        shape = EXTENTS[dim] if chance.random() < 0.4 else None
        batch = 3
    if shape is None:
        coords[:, 1:] -= 5
    feats = torch.randn(len(coords), 4, generator=torch.Generator().manual_seed(seed))
    return pm.SparseTensor(feats, coords, spatial_shape=shape, batch_size=batch, dim=dim)
