"""Which machine runs an operator: the back ends by device, and the flat form in which maps reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.coords import KernelMap, Pairs
from pumice.errors import DeviceError
from pumice.lower import cpu, reference
from pumice.lower.reference import transposed

__all__ = ["BACKENDS", "Backend", "forward", "tables", "transposed", "weight_gradient"]


@dataclass(frozen=True)
class Backend:
    """What a device needs to run the operators.

    tables: the flat tensors of a map for channels (in, out), at least (inputs, outputs, sizes); forward and
    weight_gradient take them back, and make do with the first three.
    """

    tables: Callable[[KernelMap, tuple[int, int]], tuple[Tensor, ...]]
    forward: Callable[[Tensor, Tensor, Sequence[Tensor], int, int], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Sequence[Tensor], int], Tensor]


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(cpu.tables, cpu.forward, cpu.weight_gradient),
    "cuda": Backend(
        tables=lambda kernel_map, channels: tuple(kernel_map.pairs()),
        forward=lambda x, w, t, rows, groups: reference.forward(x, w, Pairs(*t[:3]), rows, groups),
        weight_gradient=lambda x, g, t, groups: reference.weight_gradient(x, g, Pairs(*t[:3]), groups),
    ),
}


def _backend(device_type: str) -> Backend:
    if device_type not in BACKENDS:
        raise DeviceError(f"no back end computes on {device_type!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[device_type]


def tables(kernel_map: KernelMap, channels: tuple[int, int]) -> tuple[Tensor, ...]:
    """The flat tensors of `kernel_map` that its device's back end reads for channels (in, out); made once.

    While torch.compile traces, what is not there yet stays unmade: the pairs alone serve too.
    """
    key = ("tables", channels)
    if torch.compiler.is_compiling() and not kernel_map.has(key):
        return tuple(kernel_map.pairs())
    backend = _backend(kernel_map.forward.inputs.device.type)
    return kernel_map.storage(key, lambda m: backend.tables(m, channels))


def forward(x: Tensor, weight: Tensor, tables: Sequence[Tensor], rows: int, groups: int) -> Tensor:
    with _as_given(x.device.type):
        return _backend(x.device.type).forward(x, weight, tables, rows, groups)


def weight_gradient(x: Tensor, grad: Tensor, tables: Sequence[Tensor], groups: int) -> Tensor:
    with _as_given(x.device.type):
        return _backend(x.device.type).weight_gradient(x, grad, tables, groups)


def _as_given(device_type: str) -> AbstractContextManager[object]:
    """Back ends choose their dtypes themselves: autocast was applied at the door and must not act again inside."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
