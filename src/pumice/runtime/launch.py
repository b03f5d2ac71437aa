"""Kernel launches with one calling convention and little host overhead."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from functools import lru_cache, partial, wraps
from threading import RLock
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from pumice.runtime.compile import BACKGROUND, LOADING, TritonKernel

_ALIGNED = 4
"""Elements: arrays begin at multiples of it, 16 bytes of int32."""


class Part:
    """A contiguous array within the tensor `memory`, from element `start` on."""

    __slots__ = ("_tensor", "address", "dtype", "memory", "shape", "start")
    memory: Tensor
    address: int
    start: int
    shape: tuple[int, ...]

    def __init__(self, memory: Tensor, address: int, start: int, shape: tuple[int, ...]) -> None:
        self.memory, self.address, self.start, self.shape = memory, address, start, shape
        self.dtype: torch.dtype = memory.dtype
        self._tensor: Tensor | None = None

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.memory.get_device()

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def tensor(self) -> Tensor:
        """The array as a tensor, created once."""
        if self._tensor is None:
            shape, strides = self.shape, [1] * len(self.shape)
            for axis in range(len(shape) - 1, 0, -1):
                strides[axis - 1] = strides[axis] * shape[axis]
            begin = self.memory.storage_offset() + self.start
            self._tensor = self.memory.as_strided(shape, strides, begin)
        return self._tensor

    def cut(self, start: int, shape: tuple[int, ...]) -> Part:
        """An array of the same memory that begins `start` elements after this one."""
        return Part(self.memory, self.address + start * self.memory.element_size(), self.start + start, shape)


Array = Tensor | Part


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of _ALIGNED."""
    return -(-count // _ALIGNED) * _ALIGNED


def begins_of(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """(offsets of consecutive aligned arrays of these shapes, end of the last one), in elements."""
    begins, end = [], 0
    for shape in shapes:
        begins.append(end)
        # `aligned`, inlined, as there are many arrays.
        end += -(-(shape[0] if len(shape) == 1 else math.prod(shape)) // _ALIGNED) * _ALIGNED
    return begins, end


def carve(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Part]:
    """Arrays of these shapes within an allocation; see `begins_of`."""
    return _placed(memory, shapes, begins_of(shapes)[0])


def allocate(
    device: torch.device, shapes: Sequence[tuple[int, ...]], make: Callable[..., Tensor] = torch.empty
) -> list[Part]:
    """int32 arrays of these shapes in one allocation by `make`."""
    begins, end = begins_of(shapes)
    return _placed(make(end, dtype=torch.int32, device=device), shapes, begins)


def _placed(memory: Tensor, shapes: Sequence[tuple[int, ...]], begins: Sequence[int]) -> list[Part]:
    base, size = memory.data_ptr(), memory.element_size()
    return [Part(memory, base + size * begin, begin, shape) for begin, shape in zip(begins, shapes, strict=True)]


def tensor_of(array: Array | Any) -> Any:
    """The tensor of a Part; anything else unchanged."""
    return array.tensor() if type(array) is Part else array


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_triton(tensor: Tensor) -> bool:
    """True if Triton kernels run on the tensor's device: a GPU, or any device under Triton's interpreter."""
    if not _has_triton():
        return False
    if tensor.is_cuda:
        return True
    from triton import knobs

    return bool(knobs.runtime.interpret)


def triton_unavailable_reason(tensor: Tensor) -> str | None:
    """Reason why Triton kernels do not run on the tensor's device, or None."""
    return None if has_triton(tensor) else "kernels do not run here"


def outside_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode and transforms of torch.func, so that tensors created here can be used later, under autograd
    and without the transform."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return _outside_transforms()
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def unwrapped(x: Tensor) -> Tensor:
    """Unwrap an integer tensor that was created within gradient transforms of torch.func."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(x):  # pyright: ignore[reportAttributeAccessIssue]
        x = torch._C._functorch.get_unwrapped(x)  # pyright: ignore[reportAttributeAccessIssue]
    return x


@contextmanager
def _outside_transforms() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        yield


Given = ParamSpec("Given")
Found = TypeVar("Found")
_RECORDED: ContextVar[list[object] | None] = ContextVar("recording_constants", default=None)
recorded_constants: Callable[[], list[object] | None] = _RECORDED.get
"""What was recorded so far within `recording_constants`, None outside."""


def cached_device_constant(maxsize: int) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """lru_cache for read-only device tensors, created outside inference mode and torch.func transforms. A captured
    graph must hold those it reads (`recording_constants`). While torch traces they have no values, and are not kept."""

    def decorate(find: Callable[Given, Found]) -> Callable[Given, Found]:
        def make(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            with outside_inference_mode():
                return find(*args, **kwargs)

        known = lru_cache(maxsize)(make)

        @wraps(find)
        def cached(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                return find(*args, **kwargs)
            return keep_for_graph(known(*args, **kwargs))

        return cached

    return decorate


def keep_for_graph(found: Found) -> Found:
    """Record `found` as read by the graph under capture, if any; returns it."""
    if (read := _RECORDED.get()) is not None:
        read.append(found)
    return found


@contextmanager
def recording_constants() -> Iterator[list[object]]:
    """Record the cached constants used in the context, since a captured graph reads them on every replay."""
    read: list[object] = []
    token = _RECORDED.set(read)
    try:
        yield read
    finally:
        _RECORDED.reset(token)


_CAPTURING = RLock()
"""Held while a graph is captured: whether the garbage collector runs is one setting for all threads."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Python's garbage collector does not run: a graph that it freed would end the capture of another."""
    with _CAPTURING:
        ran = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if ran:
                gc.enable()


def record_graph(
    work: Callable[[], Found], stream: torch.cuda.Stream, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Found, list[object]]:
    """Capture the CUDA graph of `work` on a stream: (graph, result, cached constants that the graph reads). pool:
    memory pool shared with other graphs.

    Other threads may launch kernels meanwhile, but not draw random numbers on the device. torch.cuda.graph would also
    synchronise the device and free all cached memory, which takes tens of milliseconds."""
    graph = torch.cuda.CUDAGraph()
    with without_collection(), recording_constants() as constants, torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result, constants


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without host synchronisation (pinned, non-blocking)."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a GPU is the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    """True for an NVIDIA GPU of compute capability 9.0 or above. Cached: the question takes as long as a launch."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 tensor on the device, as `to_device_async(torch.tensor(values))` in a third of the time."""
    return to_device_async(torch.frombuffer(array("q", values), dtype=torch.int64), device)


def vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached device constant of one number per axis; no host synchronisation, so usable in CUDA graph capture."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return _vector(values, dtype, device)


@cached_device_constant(256)
def _vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device_async(torch.tensor(values, dtype=dtype), device)


class CompiledKernel:
    """Kernel compiled by Triton for a device, launched with addresses instead of tensors.

    Triton's launch path, used here only while a launch hook is set, queries the driver for every tensor and builds
    profiler metadata: 10 us of host time. Its Python launcher also checks for scratch memory (1.4 us); kernels that
    need none call its C launcher directly.
    """

    def __init__(self, compiled: Any) -> None:
        from triton import knobs

        self._compiled, self._runtime = compiled, knobs.runtime
        with LOADING:
            found = _in_c(compiled) or _by_triton(compiled)
        self._launch, self._before, self._programs_at, self._stream_at, self._packs = found

    def __call__(self, programs: int, values: Sequence[Any], device: int) -> None:
        """Launch `programs` programs on `device`, which must be the current device, and its current stream."""
        hook = self._runtime.launch_enter_hook
        # An empty hook chain counts as no hook.
        if hook is not None and getattr(hook, "calls", True):
            self._compiled[(programs, 1, 1)](*values)
            return
        before = self._before.copy()
        before[self._programs_at], before[self._stream_at] = programs, torch._C._cuda_getCurrentRawStream(device)
        if self._packs:
            self._launch(*before, tuple(values))
        else:
            self._launch(*before, *values)

    def prepared(self, programs: int, values: Sequence[Any]) -> PreparedLaunch:
        """The launcher, with the arguments of a launch of so many programs."""
        before = self._before.copy()
        before[self._programs_at] = programs
        first = 0 if self._packs else len(before)
        arguments = [*values] if self._packs else [*before, *values]
        return PreparedLaunch(
            self._launch, self._runtime, before if self._packs else None, arguments, first, self._stream_at
        )


class PreparedLaunch(NamedTuple):
    """A launcher and its arguments, in which the stream, at `stream_at`, is missing. before: the arguments before the
    kernel's own, if the launcher takes these as a tuple; first: position of the kernel's in `arguments`."""

    launch: Callable[..., object]
    runtime: Any
    before: list[Any] | None
    arguments: list[Any]
    first: int
    stream_at: int


class _Launcher(NamedTuple):
    """A function that launches a kernel. before: its arguments before the kernel's own; programs_at, stream_at:
    positions in `before` of the number of programs and the stream; packs: True if it takes the kernel's as a tuple."""

    launch: Callable[..., object]
    before: list[Any]
    programs_at: int
    stream_at: int
    packs: bool


def _by_triton(compiled: Any) -> _Launcher:
    """Triton's Python launcher."""
    before = [1, 1, 1, None, compiled.function, compiled.packed_metadata, None, None, None]
    return _Launcher(compiled.run, before, 0, 3, False)


def _in_c(compiled: Any) -> _Launcher | None:
    """Triton's C launcher: a dry run of its Python launcher records the arguments passed to C. None if that does more
    than pass arguments on, such as allocating memory."""
    launch = getattr(compiled.run, "launch", None)
    if launch is None:
        return None
    handed: list[tuple[Any, ...]] = []
    programs, stream, value = object(), object(), object()
    try:
        # Patch a copy: other threads use the launcher.
        run = copy(compiled.run)
        run.launch = lambda *given: handed.append(given)
        # Placeholders: any computation on them (such as scratch sizes) raises.
        run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, value)
    except Exception:
        return None
    (given,) = handed if len(handed) == 1 else ((),)
    before, last = [*given[:-1]], given[-1:]
    places = [[n for n, x in enumerate(before) if x is mark] for mark in (programs, stream)]
    # Triton >= 3.7 takes the values as one tuple.
    packs = last == ((value,),)
    if [*map(len, places)] != [1, 1] or not (last == (value,) or packs):
        return None
    return _Launcher(launch, before, places[0][0], places[1][0], packs)


@lru_cache(maxsize=64)
def kernel(name: str, room: str = "coords") -> KernelLauncher:
    """Launcher of the kernel `name` = "file.function" of the subpackage `room`."""
    return KernelLauncher(jitted(name, room))


def jitted(name: str, room: str) -> TritonKernel:
    """The kernel `name` = "file.function" of the subpackage `room`."""
    file, _, function = name.partition(".")
    return TritonKernel.of(f"pumice.{room}.{file}", function)


class KernelLauncher:
    """Kernel whose arguments are tensors, then numbers, then constexprs, in this order. Integers are passed as int64
    and never specialised on, so that sizes cause no recompilation; other numbers are float32."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._fixed: dict[tuple[Any, ...], BoundKernel] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Array],
        numbers: Sequence[float] = (),
        constants: Mapping[str, Any] = MappingProxyType({}),
        warps: int = 4,
        overlapped: bool = False,
        fused: bool = True,
    ) -> None:
        """Launch `programs` programs on the tensors' device and its current stream. overlapped: they may start before
        the kernel in front has ended (programmatic dependent launch, from Hopper on), for which they wait themselves.
        fused: products may be added without being rounded before.
        """
        fixed = self.bound(tensors, constants, warps, overlapped, fused)
        if (recorded := _LAUNCHES.get()) is None:
            fixed(programs, tensors, numbers)
        else:
            recorded[fixed] = partial(fixed.compile, tensors[0].device, [t.dtype for t in tensors], numbers)

    def bound(
        self,
        tensors: Sequence[Array],
        constants: Mapping[str, Any] = MappingProxyType({}),
        warps: int = 4,
        overlapped: bool = False,
        fused: bool = True,
    ) -> BoundKernel:
        """The kernel with these constants for tensors of these dtypes."""
        known = tuple(constants.values())
        key = (warps, overlapped, fused, known, *[t.dtype for t in tensors])
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = BoundKernel(self._kernel, known, warps, overlapped, fused)
        return fixed


_LAUNCHES: ContextVar[dict[BoundKernel, Callable[[], object]] | None] = ContextVar("compiling_launches", default=None)


@contextmanager
def compiling_launches() -> Iterator[Mapping[BoundKernel, Callable[[], object]]]:
    """Context in which KernelLaunchers only record kernels; on exit those not compiled yet are compiled in parallel.
    Yields {kernel: task that compiles it}."""
    recorded: dict[BoundKernel, Callable[[], object]] = {}
    token = _LAUNCHES.set(recorded)
    try:
        yield recorded
    finally:
        _LAUNCHES.reset(token)
    BACKGROUND.run([task for kernel, task in recorded.items() if not kernel.known])


class BoundKernel:
    """Kernel with bound constexprs, for tensors of fixed dtypes; has a compiled variant per alignment of them."""

    kernel: Any
    constants: tuple[Any, ...]
    warps: int

    def __init__(
        self, kernel: Any, constants: Sequence[Any], warps: int = 4, overlapped: bool = False, fused: bool = True
    ) -> None:
        self.kernel, self.constants, self.warps = kernel, tuple(constants), warps
        self._options = {"num_warps": warps, **({"launch_pdl": True} if overlapped else {})}
        self._options |= {} if fused else {"enable_fp_fusion": False}
        self._compiled: dict[tuple[int, ...], CompiledKernel] = {}

    def __call__(
        self, programs: int, tensors: Sequence[Array], numbers: Sequence[float] = (), current: bool = False
    ) -> None:
        """As KernelLauncher.__call__; sets the current device if necessary. current: it is that of the tensors."""
        if programs == 0:
            return
        # -1 on a CPU.
        device = tensors[0].get_device()
        if device >= 0 and not current and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(programs, tensors, numbers, True)
        # Inlined, as there are several for each launch.
        addresses = [each.address if type(each) is Part else each.data_ptr() for each in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        # Triton specialises on 16-byte alignment.
        key = (device, *[a % 16 for a in addresses]) if bits % 16 else (device,)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled(programs, (*addresses, *numbers, *self.constants), device)
            return
        made = self.kernel[(programs,)](*map(tensor_of, tensors), *numbers, *self.constants, **self._options)
        if made is not None:
            self._compiled[key] = CompiledKernel(made)

    @property
    def known(self) -> bool:
        """True if a variant was compiled in this process."""
        return bool(self._compiled)

    def compile(self, device: torch.device, dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> None:
        """Compile for aligned tensors of these dtypes, without running; in a worker process if possible."""
        values = [*(torch.empty(1, dtype=dtype, device="meta") for dtype in dtypes), *numbers, *self.constants]
        with on_device(device):
            made = self.kernel.warmup(*values, grid=(1,), **self._options)
            if made is not None:
                # Loaded here, onto the current device.
                self._compiled[(device.index or 0,)] = CompiledKernel(made)

    def compiled(self, device: int, beyond: Sequence[int]) -> CompiledKernel | None:
        """Compiled variant for tensors at these offsets from 16-byte alignment, or None."""
        return self._compiled.get((device, *beyond) if any(beyond) else (device,))
