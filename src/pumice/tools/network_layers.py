"""The convolutions of a network as they are met: which map, how many channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pumice.coords import KernelMap
from pumice.nn.conv import Convolution
from pumice.ops import SparseTensor


@dataclass(frozen=True, eq=False)
class Met:
    """A convolution of a network: its name in it, its map, and channels in and out."""

    name: str
    found: KernelMap
    inputs: int
    outputs: int

    @property
    def pairs(self) -> int:
        return len(self.found.pairs().inputs)

    @property
    def flops(self) -> float:
        """Of all pairs, multiply-adds as two."""
        return 2.0 * self.pairs * self.inputs * self.outputs


def layers_of(net: nn.Module, x: SparseTensor) -> list[Met]:
    """The convolutions of a network in the order in which they run on this tensor; pointwise ones are left out."""
    met: list[Met] = []

    def note(name: str, module: Convolution, given: tuple[Any, ...]) -> None:
        found, _ = module.map_of(*given)
        met.append(Met(name, found, module.in_channels, module.out_channels))

    with _watched(net, note), torch.no_grad():
        net(x)
    return met


@contextmanager
def _watched(net: nn.Module, note: Callable[[str, Convolution, tuple[Any, ...]], None]) -> Iterator[None]:
    handles = [
        module.register_forward_pre_hook(partial(_noted, note, name))
        for name, module in net.named_modules()
        if isinstance(module, Convolution)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noted(
    note: Callable[[str, Convolution, tuple[Any, ...]], None], name: str, module: nn.Module, given: tuple[Any, ...]
) -> None:
    assert isinstance(module, Convolution)
    note(name, module, given)
