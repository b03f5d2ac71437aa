"""Starting kernels of this room: one convention for all of them, and little time of the host for each."""

from __future__ import annotations

import importlib
import importlib.util
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_triton(tensor: Tensor) -> bool:
    """Whether kernels run where this tensor lies: on a GPU, and anywhere by Triton's interpreter."""
    if not _has_triton():
        return False
    if tensor.is_cuda:
        return True
    from triton import knobs

    return bool(knobs.runtime.interpret)


def triton_unavailable_reason(tensor: Tensor) -> str | None:
    """Why no kernel runs where this tensor lies, or None."""
    return None if has_triton(tensor) else "kernels do not run here"


def outside_inference_mode() -> AbstractContextManager[object]:
    """Within it, what is made in inference serves training afterwards."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


Given = ParamSpec("Given")
Found = TypeVar("Found")
_READ: ContextVar[list[object] | None] = ContextVar("recording_constants", default=None)


def cached_device_constant(maxsize: int) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """What a function makes is made once for its arguments and kept, at most so many; for tensors that are read and
    never written. Whoever reads longer than they are kept holds them: `recording_constants`."""

    def kept(find: Callable[Given, Found]) -> Callable[Given, Found]:
        known = lru_cache(maxsize)(find)

        @wraps(find)
        def asked(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            found = known(*args, **kwargs)
            if (read := _READ.get()) is not None:
                read.append(found)
            return found

        return asked

    return kept


@contextmanager
def recording_constants() -> Iterator[list[object]]:
    """The constants that are asked for within it: a captured graph reads their memory whenever it runs."""
    read: list[object] = []
    token = _READ.set(read)
    try:
        yield read
    finally:
        _READ.reset(token)


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without a wait for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device, without a wait for it: in a third of the time of `to_device_async(torch.tensor(values))`."""
    return to_device_async(torch.frombuffer(array("q", values), dtype=torch.int64), device)


def vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number for each axis, as a constant of the device: nothing waits for it, and a CUDA graph can be captured."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return _vector(values, dtype, device)


@cached_device_constant(256)
def _vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with outside_inference_mode():
        return to_device_async(torch.tensor(values, dtype=dtype), device)


class CompiledKernel:
    """What Triton compiled for a device, started with addresses in place of tensors.

    Triton's own door asks the driver about every tensor, and builds what only a profiler reads: 10 us of the host. It
    is taken while a profiler listens. What it starts kernels with in the end is written in C; the way there looks for
    scratch memory, 1.4 us, and is left out for kernels that have none.
    """

    def __init__(self, compiled: Any) -> None:
        from triton import knobs

        self._compiled, self._runtime = compiled, knobs.runtime
        self._run = _in_c(compiled) or _by_triton(compiled)

    def __call__(self, programs: int, values: Sequence[Any], device: int) -> None:
        """Run `programs` programs on the current device, which is `device`, and its current stream."""
        hook = self._runtime.launch_enter_hook
        # A chain of hooks that is empty listens to nothing.
        if hook is not None and getattr(hook, "calls", True):
            self._compiled[(programs, 1, 1)](*values)
            return
        self._run(programs, torch._C._cuda_getCurrentRawStream(device), values)


Run = Callable[[int, int, Sequence[Any]], object]
"""Starts so many programs on a stream, with these arguments."""


def _by_triton(compiled: Any) -> Run:
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    return lambda programs, stream, values: run(programs, 1, 1, stream, function, packed, None, None, None, *values)


def _in_c(compiled: Any) -> Run | None:
    """The same past what Triton's launcher does in Python: it is asked once what it hands to C. None where it asks
    for memory, or does anything else than to hand on."""
    launch = getattr(compiled.run, "launch", None)
    if launch is None:
        return None
    handed: list[tuple[Any, ...]] = []
    programs, stream, value = object(), object(), object()
    try:
        # A copy is asked: other threads start kernels by the launcher itself.
        run = copy(compiled.run)
        run.launch = lambda *given: handed.append(given)
        # What it works out of them, as how much memory so many programs need, there is none of.
        run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, value)
    except Exception:
        return None
    (given,) = handed if len(handed) == 1 else ((),)
    before, last = [*given[:-1]], given[-1:]
    places = [[n for n, x in enumerate(before) if x is mark] for mark in (programs, stream)]
    if [*map(len, places)] != [1, 1] or not (last == (value,) or last == ((value,),)):
        return None
    (number,), (lane,) = places
    apart = last == (value,)

    def start(programs: int, stream: int, values: Sequence[Any]) -> None:
        told = before.copy()
        told[number], told[lane] = programs, stream
        if apart:
            launch(*told, *values)
        else:
            # As one argument: of Triton 3.7 on.
            launch(*told, tuple(values))

    return start


@lru_cache(maxsize=64)
def kernel(name: str) -> KernelLauncher:
    """The kernel `file.function` of this room. Its file is imported here first: it needs Triton."""
    file, _, function = name.partition(".")
    return KernelLauncher(getattr(importlib.import_module(f"pumice.coords.{file}"), function))


class KernelLauncher:
    """A kernel whose arguments are tensors, then numbers, then constants, in this order.

    Integers are passed as 64 bits and never specialised on, so that sizes of a scan make no new variant; other numbers
    as float32.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._fixed: dict[tuple[Any, ...], BoundKernel] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
        constants: Mapping[str, Any] | None = None,
        warps: int = 4,
    ) -> None:
        """Run `programs` programs, on the tensors' device and its current stream."""
        known = tuple((constants or {}).values())
        key = (warps, *[t.dtype for t in tensors], *known)
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = BoundKernel(self._kernel, known, warps)
        fixed(programs, tensors, numbers)


class BoundKernel:
    """A kernel with its constants, for tensors of the same dtypes at each call: nothing is looked up but where they
    lie. The first launch of a variant goes through Triton's own door; later ones start what it compiled."""

    def __init__(self, kernel: Any, constants: Sequence[Any], warps: int = 4) -> None:
        self.kernel, self.constants, self.warps = kernel, tuple(constants), warps
        self._compiled: dict[tuple[int, ...], CompiledKernel] = {}

    def __call__(self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> None:
        """As KernelLauncher."""
        if programs == 0:
            return
        # -1 on a CPU.
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self._start(device, programs, tensors, numbers)
        self._start(device, programs, tensors, numbers)

    def compiled(self, device: int, beyond: Sequence[int]) -> CompiledKernel | None:
        """What was compiled for tensors that lie so many bytes beyond an alignment to 16; None where that was not
        yet."""
        return self._compiled.get((device, *beyond) if any(beyond) else (device,))

    def _start(self, device: int, programs: int, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        addresses, bits = [tensor.data_ptr() for tensor in tensors], 0
        for address in addresses:
            bits |= address
        # Triton makes another variant where a tensor is not aligned.
        key = (device, *[a % 16 for a in addresses]) if bits % 16 else (device,)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled(programs, (*addresses, *numbers, *self.constants), device)
            return
        made = self.kernel[(programs,)](*tensors, *numbers, *self.constants, num_warps=self.warps)
        if made is not None:
            self._compiled[key] = CompiledKernel(made)
