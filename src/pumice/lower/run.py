"""Which machine runs an operator: the back ends by device, and the flat form in which maps reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.coords import KernelMap, Pairs
from pumice.lower import reference
from pumice.lower.reference import transposed

__all__ = ["BACKENDS", "Backend", "forward", "tables", "transposed", "weight_gradient"]


@dataclass(frozen=True)
class Backend:
    """What a device needs to run the operators.

    tables: the flat tensors of a map, at least (inputs, outputs, sizes). forward and weight_gradient take them back.
    """

    tables: Callable[[KernelMap], tuple[Tensor, ...]]
    forward: Callable[[Tensor, Tensor, Sequence[Tensor], int, int], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Sequence[Tensor], int], Tensor]


BACKENDS: dict[str, Backend] = {
    "loop": Backend(
        tables=lambda kernel_map: tuple(kernel_map.pairs()),
        forward=lambda x, w, t, rows, groups: reference.forward(x, w, Pairs(*t[:3]), rows, groups),
        weight_gradient=lambda x, g, t, groups: reference.weight_gradient(x, g, Pairs(*t[:3]), groups),
    ),
}
BY_DEVICE = {"cpu": "loop"}


def _backend(device_type: str) -> Backend:
    return BACKENDS[BY_DEVICE.get(device_type, "loop")]


def tables(kernel_map: KernelMap) -> tuple[Tensor, ...]:
    """The flat tensors of `kernel_map` that its device's back end reads; made once."""
    device_type = kernel_map.forward.inputs.device.type
    return kernel_map.storage(f"tables/{device_type}", _backend(device_type).tables)


def forward(x: Tensor, weight: Tensor, tables: Sequence[Tensor], rows: int, groups: int) -> Tensor:
    with _as_given(x.device.type):
        return _backend(x.device.type).forward(x, weight, tables, rows, groups)


def weight_gradient(x: Tensor, grad: Tensor, tables: Sequence[Tensor], groups: int) -> Tensor:
    with _as_given(x.device.type):
        return _backend(x.device.type).weight_gradient(x, grad, tables, groups)


def _as_given(device_type: str) -> AbstractContextManager[object]:
    """Back ends choose their dtypes themselves: autocast was applied at the door and must not act again inside."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
