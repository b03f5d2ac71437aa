"""Starting kernels of this room: one convention for all of them, and little time of the host for each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(tensor: Tensor) -> bool:
    """Whether kernels run where this tensor lies: on a GPU, and anywhere by Triton's interpreter."""
    if not _has_triton():
        return False
    if tensor.is_cuda:
        return True
    from triton import knobs

    return bool(knobs.runtime.interpret)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without a wait for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=64)
def kernel(name: str) -> Launcher:
    """The kernel `file.function` of this room. Its file is imported here first: it needs Triton."""
    file, _, function = name.partition(".")
    return Launcher(getattr(importlib.import_module(f"pumice.coords.{file}"), function))


class Launcher:
    """A kernel whose arguments are tensors, then integers, then constants, in this order.

    Integers are passed as 64 bits and never specialised on, so that sizes of a scan make no new variant. The first
    launch of a variant goes through Triton's own door; later ones start what it compiled.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[int] = (),
        constants: Mapping[str, Any] | None = None,
        warps: int = 4,
    ) -> None:
        """Run `programs` programs, on the tensors' device and its current stream."""
        if programs == 0:
            return
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._start(programs, tensors, numbers, constants or {}, warps)
        self._start(programs, tensors, numbers, constants or {}, warps)

    def _start(
        self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int], constants: Mapping[str, Any], warps: int
    ) -> None:
        aligned = tuple(t.data_ptr() % 16 == 0 for t in tensors)
        key = (tensors[0].device.index, warps, aligned, *(t.dtype for t in tensors), *constants.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(programs, 1, 1)](*tensors, *numbers, *constants.values())
            return
        compiled = self.kernel[(programs,)](*tensors, *numbers, *constants.values(), num_warps=warps)
        if compiled is not None:
            self._compiled[key] = compiled
