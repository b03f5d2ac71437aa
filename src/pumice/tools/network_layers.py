"""The convolutions of a network as they are met: which map, how many channels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pumice.coords import KernelMap, Relation, kernel_map
from pumice.nn.conv import Conv, InverseConv
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

    def note(name: str, module: Conv | InverseConv, given: tuple[Any, ...], result: SparseTensor) -> None:
        found = _map_of(module, given[0], result)
        met.append(Met(name, found, module.in_channels, module.out_channels))

    with _watched(net, note), torch.no_grad():
        net(x)
    return met


@contextmanager
def _watched(net: nn.Module, note: Any) -> Iterator[None]:
    handles = [
        module.register_forward_hook(lambda m, given, result, name=name: note(name, m, given, result))
        for name, module in net.named_modules()
        if isinstance(module, Conv | InverseConv)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _map_of(module: Conv | InverseConv, x: SparseTensor, y: SparseTensor) -> KernelMap:
    """The map that the module has just used: it is kept with the coordinates."""
    if isinstance(module, Conv):
        return kernel_map(x.geometry, module.relation)[0]
    window: Tensor = module.weight
    relation = Relation.of(x.dim, tuple(window.shape[1:-1]), policy="cached_inverse", **module.options)
    return kernel_map(x.geometry, relation, y.geometry)[0]
