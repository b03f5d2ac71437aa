"""Kernels that are launched again on other tensors of the same layouts, each launch with a new result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from pumice.runtime.launch import BoundKernel, PreparedLaunch
from pumice.runtime.workspace import workspace


def like_these(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many objects: True if each is a tensor of the type, dtype, device, shape, strides and
    requires_grad of its counterpart here, and if autocast, inference mode, torch.func's transforms and dispatch modes
    are on or off as now. One call of torch's C code."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


Repeated = Callable[[Sequence[Tensor]], "Tensor | None"]
"""A call that ran as a function of the tensors that are open; None: it was not carried out."""


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
        return partial(torch._C._dynamo.guards._empty_strided_cuda, shape, tuple(strides), dtype)


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


Arguments = tuple[Sequence[Tensor], Sequence[float]]
"""The tensors and the numbers of a launch."""


class RepeatedLaunch:
    """A launch of a compiled kernel on the current stream as a function of the tensors that are open, of the layouts
    that it was made for; the others are aligned to 16 bytes. values: all arguments of the kernel; kept: keeps what they
    point to alive."""

    __slots__ = ("_kept", "_launch", "_make", "_on", "_open", "_values")

    def __init__(
        self, launch: PreparedLaunch, values: Sequence[Any], open: OpenArguments, result: NewTensor, kept: object
    ) -> None:
        self._launch, self._values, self._open, self._kept = launch, [*values], open, kept
        self._make, self._on = result.make, result.device

    @staticmethod
    def of(
        kernel: BoundKernel, programs: int, arguments: Arguments, open: OpenArguments, result: NewTensor
    ) -> RepeatedLaunch | None:
        """Of a kernel with bound constants; None if it is not compiled, or a tensor that stays is not aligned."""
        tensors, numbers = arguments
        index = result.device.index or 0
        compiled, addresses = kernel.compiled(index, ()), [x.data_ptr() for x in tensors]
        moving = {open.result, *(place for place, _ in open.tensors), *open.workspace}
        kept = [x for n, x in enumerate(tensors) if n not in moving]
        if compiled is None or any(x.data_ptr() & 15 for x in kept):
            return None
        values = [*addresses, *numbers, *kernel.constants]
        return RepeatedLaunch(compiled.prepared(programs, index), values, open, result, kept)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None, without a launch, if a tensor is not aligned or as PreparedLaunch answers False."""
        values, (given, result, shared, needs) = self._values.copy(), self._open
        bits = 0
        for place, number in given:
            values[place] = address = tensors[number].data_ptr()
            bits |= address
        if bits & 15:
            return None
        if needs is not None:
            # Keeps the memory until the launch.
            own = workspace(*needs, self._on)
            values[shared[0]], values[shared[1]] = own.addresses
        y = self._make()
        values[result] = y.data_ptr()
        return y if self._launch(values) else None
