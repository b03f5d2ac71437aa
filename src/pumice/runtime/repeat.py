"""Kernels that are launched again on other tensors of the same layouts, each launch with a new result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from pumice.runtime.launch import BoundKernel, PreparedLaunch
from pumice.runtime.workspace import workspace


def like_these(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many objects: True if each is a tensor of the type, dtype, device, shape, strides and
    requires_grad of its counterpart here, and if autocast, inference mode, torch.func's transforms and dispatch modes
    are on or off as now. One call of torch's C code."""
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


Repeated = Callable[[Sequence[Tensor]], "Tensor | None"]
"""A call as a function of its open tensors. Its result is None if it launched nothing, since it does not fit."""


class NewTensor(NamedTuple):
    """What a launch allocates for its result, contiguous; zeroed: the kernel adds to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: bool = False

    @property
    def make(self) -> Callable[[], Tensor]:
        """A function that allocates it; a tensor on a GPU is allocated on the current one."""
        shape, dtype, device, zeroed = self
        if zeroed or device.type != "cuda":
            return partial(torch.zeros if zeroed else torch.empty, shape, dtype=dtype, device=device)
        strides, step = list[int](), 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= max(1, size)
        # As Inductor does: a third of the time of torch.empty.
        return partial(guards._empty_strided_cuda, shape, tuple(strides), dtype)  # pyright: ignore[reportAttributeAccessIssue]


class OpenArguments(NamedTuple):
    """The positions of arguments that differ between launches. tensors: of each, and the number of its tensor; result;
    counters, scratch: of a workspace of the sizes `needs`, if there is one."""

    tensors: tuple[tuple[int, int], ...]
    result: int
    workspace: tuple[int, int] = (-1, -1)
    needs: tuple[int, int] | None = None

    @staticmethod
    def of(names: Sequence[str], read: Sequence[str], result: int) -> OpenArguments | None:
        """Of a kernel that is given the tensors `names`, in this order, and reads these first; None if it does not read
        one of them."""
        found = tuple([(place, names.index(name)) for place, name in enumerate(read) if name in names])
        return OpenArguments(found, result) if {number for _, number in found} == {*range(len(names))} else None


Arguments = tuple[int, Sequence[Tensor], Sequence[float]]
"""The programs, tensors and numbers of a launch."""


class RepeatedLaunch:
    """A launch of a compiled kernel on the current stream as a function of the tensors that are open, of the layouts
    that it was made for; the others are aligned to 16 bytes, and alive. kept: what else it reads."""

    __slots__ = (
        *("_arguments", "_before", "_device", "_given", "_kept", "_launch", "_make", "_needs", "_on", "_only"),
        *("_result", "_runtime", "_shared", "_stream_at"),
    )

    def __init__(self, launch: PreparedLaunch, open: OpenArguments, result: NewTensor, kept: object) -> None:
        first, self._kept = launch.first, kept
        self._launch, self._runtime, self._before, self._arguments, _, self._stream_at = launch
        self._given = tuple([(first + place, number) for place, number in open.tensors])
        self._result, self._needs = first + open.result, open.needs
        self._shared = tuple([first + place for place in open.workspace])
        self._make, self._on, self._device = result.make, result.device, result.device.index or 0
        # Then it is always the current one.
        self._only = result.device.type != "cuda" or torch.cuda.device_count() == 1

    @staticmethod
    def of(
        kernel: BoundKernel, arguments: Arguments, open: OpenArguments, result: NewTensor, kept: object
    ) -> RepeatedLaunch | None:
        """Of a kernel with bound constants; None if it is not compiled, or a tensor that stays is not aligned."""
        programs, tensors, numbers = arguments
        compiled, addresses = kernel.compiled(result.device.index or 0, ()), [x.data_ptr() for x in tensors]
        moving = {open.result, *(place for place, _ in open.tensors), *open.workspace}
        if compiled is None or any(address & 15 for n, address in enumerate(addresses) if n not in moving):
            return None
        launch = compiled.prepared(programs, [*addresses, *numbers, *kernel.constants])
        return RepeatedLaunch(launch, open, result, kept)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None, without a launch, if a tensor is not aligned, another device is current or a hook listens
        to Triton's launches."""
        arguments, bits = self._arguments.copy(), 0
        for place, number in self._given:
            arguments[place] = address = tensors[number].data_ptr()
            bits |= address
        hook = self._runtime.launch_enter_hook
        if bits & 15 or (hook is not None and getattr(hook, "calls", True)):
            return None
        if not self._only and self._device != torch._C._cuda_getDevice():
            return None
        if self._needs is not None:
            # Keeps the memory until the launch.
            own = workspace(*self._needs, self._on)
            arguments[self._shared[0]], arguments[self._shared[1]] = own.addresses
        y = self._make()
        arguments[self._result] = y.data_ptr()
        stream, before = torch._C._cuda_getCurrentRawStream(self._device), self._before
        if before is None:
            arguments[self._stream_at] = stream
            self._launch(*arguments)
        else:
            before = before.copy()
            before[self._stream_at] = stream
            self._launch(*before, tuple(arguments))
        return y
