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


def without_kernels(tensor: Tensor) -> str | None:
    """Why no kernel runs where this tensor lies, or None."""
    return None if runs_kernels(tensor) else "kernels do not run here"


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without a wait for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Compiled:
    """What Triton compiled for a device, started with addresses in place of tensors.

    Triton's own door asks the driver about every tensor, and builds what only a profiler reads: 10 us of the host. It
    is taken while a profiler listens.
    """

    def __init__(self, compiled: Any) -> None:
        from triton import knobs

        self._compiled, self._runtime = compiled, knobs.runtime
        self._run, self._function, self._packed = compiled.run, compiled.function, compiled.packed_metadata

    def __call__(self, programs: int, values: Sequence[Any], device: int) -> None:
        """Run `programs` programs on the current device, which is `device`, and its current stream."""
        hook = self._runtime.launch_enter_hook
        # A chain of hooks that is empty listens to nothing.
        if hook is not None and getattr(hook, "calls", True):
            self._compiled[(programs, 1, 1)](*values)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._run(programs, 1, 1, stream, self._function, self._packed, None, None, None, *values)


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
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

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
        device, addresses = tensors[0].device.index or 0, [t.data_ptr() for t in tensors]
        known = constants.values()
        key = (device, warps, *[a % 16 == 0 for a in addresses], *[t.dtype for t in tensors], *known)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled(programs, (*addresses, *numbers, *known), device)
            return
        made = self.kernel[(programs,)](*tensors, *numbers, *known, num_warps=warps)
        if made is not None:
            self._compiled[key] = Compiled(made)
