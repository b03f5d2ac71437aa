"""Emitted kernels on the device: their source in memory, their arguments from tensors, their launch."""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from pumice.errors import OptionError
from pumice.language.bind import BoundStatement, reaches, resizable, resized
from pumice.language.contraction import ContractionRoles, contraction_roles, exchanged, packed, segment_axis, stacked
from pumice.language.nodes import Access, Affine, Index, Statement, accesses_of, arrays_of, indices_of
from pumice.lower.emit import (
    BEFORE,
    FARTHEST,
    SPLITS,
    STACKS,
    Argument,
    Signature,
    Source,
    contiguous,
    depth_of_entry,
    emit,
    grid,
)
from pumice.lower.epilogue import EPILOGUE, NO_EPILOGUE, EpilogueSignature
from pumice.lower.loops import EIGHT_BITS, tops_of
from pumice.lower.segments import Segments
from pumice.lower.stamp import FAR, SCRATCH, Aimed, Mould, segments_of
from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import CompiledKernel
from pumice.runtime.streams import captured
from pumice.runtime.workspace import Workspace, workspace
from pumice.schedule import tile as tiles
from pumice.schedule.tile import Problem, Tile
from pumice.schedule.tuned_tiles import Key, ledger

DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
PRECISIONS = ("ieee", "tf32x3", "bf16x3", "tf32")
"""How float32 values meet in a product, the most exact first: relative errors of 1e-7, 1e-6, 1e-5 and 5e-4."""
_COMPILERS = 8
"""Kernels that are made at once while tuning."""
_STATIC = 1024
"""Extents of reductions and columns up to this are baked into the kernel; longer ones are arguments."""
_STRIDES = 1 << 14
"""The same of the strides of what is read in packs: those of channels and taps, not of rows."""
_FEW = 64
"""The same of the rows of a product whose left side is a product, too."""


@dataclass(frozen=True, eq=False)
class SizedLaunch:
    """A kernel made ready for operands of certain shapes, dtypes and layouts.

    fixed: its arguments, None where a tensor belongs. variant: what Triton makes kernels of their own for: a constant
    that counts, and of each integer that counts whether 16 divides it, it is 1, or needs 64 bits.
    """

    emitted: GeneratedKernel
    programs: int
    fixed: Sequence[Any]
    variant: tuple[int, ...]

    @property
    def source(self) -> Source:
        return self.emitted.source

    @property
    def kernel(self) -> Any:
        return self.emitted.kernel

    @property
    def tile(self) -> Tile:
        return self.emitted.tile

    @property
    def slots(self) -> tuple[tuple[int, str, str], ...]:
        return self.emitted.slots

    @property
    def summed(self) -> torch.dtype:
        return self.emitted.summed

    @property
    def compiled(self) -> dict[tuple[Any, ...], CompiledKernel]:
        return self.emitted.compiled

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages}

    @property
    def constants(self) -> dict[str, Any]:
        """What is known when the kernel is compiled."""
        arguments = enumerate(self.source.arguments)
        return {a.variable: self.fixed[place] for place, a in arguments if a.kind == "constant"}

    def scratch(self, device: torch.device) -> Workspace:
        """Where programs are counted, and leave what they found of a piece."""
        return workspace(self.programs, self.emitted.room(self.programs), device)


@dataclass(frozen=True)
class KernelOptions:
    """How a kernel computes: the precision of float32 products, the programs that share a loop, the epilogue."""

    precision: str = "ieee"
    splits: int = 1
    finish: EpilogueSignature = NO_EPILOGUE


def interpreted() -> bool:
    """Whether Triton runs kernels by its interpreter, on a CPU (TRITON_INTERPRET=1)."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """Why no kernel is made of the statement, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if statement.reduction != "sum" or len(statement.terms) != 1:
        return "a kernel sums one term"
    if not all(isinstance(factor, Access) for factor in statement.terms[0].factors):
        return "a condition (exists, equal) is not loaded"
    used = {a.name for a in accesses_of(*statement.terms)}
    kinds = {t.dtype for name, t in operands.items() if name in used}
    odd = kinds - set(DTYPES)
    if odd:
        return f"{', '.join(map(str, odd))} is not a dtype of kernels; there are {', '.join(map(str, DTYPES))}"
    if not any(map(_is_value, kinds)):
        return "nothing is floating point"
    if torch.float8_e4m3fn in kinds and (why := without_fp8(next(iter(operands.values())).device)):
        return why
    form = contraction_roles(statement, bound.extents)
    if form.adds and torch.are_deterministic_algorithms_enabled():
        return "results are added by atomics, and deterministic algorithms are asked for"
    try:
        _emitted(statement, form, _signature(bound, operands, form, torch.float32, _smallest(form)))
    except OptionError as reason:
        return str(reason)
    return None


def run(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    dtype: torch.dtype,
    tile: Tile | None = None,
    precision: str = "",
) -> Tensor:
    """The result of a statement of one term as one kernel, in `dtype`; a new tensor.

    tile: by default the tuned one, and where nothing was tuned a good guess. precision: of float32 products, one of
    PRECISIONS; by default what torch.set_float32_matmul_precision asks for.
    """
    return runner(bound, dtype, tile, precision)(operands)


def runner(
    bound: BoundStatement,
    dtype: torch.dtype,
    tile: Tile | None = None,
    precision: str = "",
    finish: EpilogueSignature = NO_EPILOGUE,
) -> KernelExecutor:
    """`run` for these sizes: what does not depend on the tensors is done once."""
    key = (bound, dtype, tile, precision, finish, torch.are_deterministic_algorithms_enabled())
    return _RUNNERS.get(key) or _RUNNERS.keep(key, KernelExecutor(bound, dtype, tile, precision, finish))


class KernelExecutor:
    """A statement of one term of certain sizes: called with the operands by name, it gives the result."""

    def __init__(
        self,
        bound: BoundStatement,
        dtype: torch.dtype,
        tile: Tile | None,
        precision: str,
        finish: EpilogueSignature = NO_EPILOGUE,
    ) -> None:
        self.bound, self.dtype, self.tile, self.precision, self.finish = bound, dtype, tile, precision, finish
        self._form, self._used = _form(bound), (*_used(bound), *finish.names)
        self._empty = any(not len(extent) for extent in bound.ranges.values())
        deterministic = torch.are_deterministic_algorithms_enabled()
        self.splits = 1 if self._empty or deterministic else tiles.splits(self._form, bound.extents)
        adds = self._form.adds or self.splits > 1
        self._whole = not self._empty and not adds and _covers(bound, self._form)
        # What is added to is kept in float32 at least.
        self._summed = torch.promote_types(dtype, torch.float32) if adds else dtype
        self._launches: dict[Any, SizedLaunch] = {}
        self._tiles: dict[Any, Tile] = {}
        self._kernels: dict[Any, GeneratedKernel] = {}
        self.moulds: BoundedCache[Mould] = BoundedCache(64)

    @property
    def resizable(self) -> bool:
        """Whether it can be `with_sizes`: not where kernels are made for a number of rows."""
        if self._empty or not resizable(self.bound):
            return False
        return _leading(self.bound).isdisjoint(_static(self.bound, self._form))

    def with_sizes(self, shapes: Mapping[str, Sequence[int]], shape: tuple[int, ...]) -> KernelExecutor:
        """The same for operands of other sizes, and a result of that shape, with the same tiles and kernels."""
        found = copy(self)
        found.bound, found._launches = resized(self.bound, shapes, shape), {}
        found._empty = any(not len(extent) for extent in found.bound.ranges.values())
        return found

    @property
    def finishes(self) -> bool:
        """Whether the kernel can have an epilogue: it writes every entry of the result once."""
        return self._whole and not self._form.folds

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result. before: what earlier steps found, to which this one adds; it may be written to."""
        out, before = self._result(operands, before)
        if before is not None:
            operands = {**operands, BEFORE: before}
        if not self._empty:
            self._cover(operands, out)
        return out if out.dtype == self.dtype else out.to(self.dtype)

    def holding(self, held: Mapping[str, Tensor]) -> BoundExecutor:
        """The same with these operands given once and for all: they are not written to any more."""
        return BoundExecutor(self, held)

    def allocate_output(self, like: Tensor, shape: tuple[int, ...] | None = None, spare: bool = True) -> Tensor:
        """What the kernel writes where nothing was found before, beside a tensor. spare: with the columns that the
        epilogue leaves free."""
        shape = self.bound.shape if shape is None else shape
        if spare and self.finish.row_padding:
            rows, columns = shape
            return like.new_empty((rows, columns + self.finish.row_padding), dtype=self._summed)[:, :columns]
        if self._whole:
            return like.new_empty(shape) if like.dtype is self._summed else like.new_empty(shape, dtype=self._summed)
        return like.new_zeros(shape, dtype=self._summed)

    @property
    def writes_result_dtype(self) -> torch.dtype | None:
        """The dtype of what the kernel writes where that is all of the result, as it is given back; else None."""
        return self.dtype if self._whole and self._summed is self.dtype else None

    @property
    def writes(self) -> torch.dtype:
        """The dtype of what the kernel writes, or adds to."""
        return self._summed

    def is_far(self, shape: tuple[int, ...]) -> bool:
        """Whether addresses of such a result, with the columns that are left free behind it, need 64 bits."""
        return math.prod(shape) + (shape[0] if shape else 1) * self.finish.row_padding >= FAR

    def mould(self, operands: Mapping[str, Tensor]) -> Mould | None:
        """What calls like one with these operands start, which has been run.

        None where it takes more than one kernel; and while a CUDA graph is captured, which has segments of its own.
        """
        if self._empty or self.bound.statement.accumulate or captured(operands[self._used[0]].device):
            return None
        key = self._launch_key(operands)
        tile = self._tiles.get(key)
        part = None if tile is None else _segments(self.bound, operands, self._form, tile)
        if tile is None or (part is not None and part.apart is not None):
            return None
        launch = self._launches.get((-1 if part is None else part.rows.shape[0], tile, *key))
        if launch is None:
            return None
        shapes = {"": self.bound.shape, **{name: x.shape for name, x in operands.items()}}
        return Mould(launch.emitted, self._form, self.bound, shapes, operands[self._used[0]].device)

    def _cover(self, operands: Mapping[str, Tensor], out: Tensor) -> None:
        """All of the result; segments far longer than the others by programs of their own."""
        key = self._launch_key(operands)
        tile = self._tiles.get(key) or self._tiles.setdefault(key, self._tile(operands))
        part = _segments(self.bound, operands, self._form, tile)
        if part is not None and part.apart is not None:
            # On a second stream beside the others they would save 5 %, and cost the host 100 us.
            long = tiles.of_long_segments(self._form, self.bound.extents, tile)
            self._run(operands, out, part.apart, (long, *key))
        self._run(operands, out, part, (tile, *key))

    def _run(self, operands: Mapping[str, Tensor], out: Tensor, part: Segments | None, key: tuple[Any, ...]) -> None:
        """Launch; a default tile that this device has no room for is made smaller. The key begins with the tile."""
        key = (-1 if part is None else part.rows.shape[0], *key)
        while True:
            launch = self._launches.get(key) or self._launches.setdefault(key, self._made(operands, out, part, key[1:]))
            try:
                return _launch(launch, operands, out, part)
            except Exception as problem:
                smaller = launch.tile.smaller()
                if self.tile == key[1] or smaller is None or type(problem).__name__ != "OutOfResources":
                    raise
                self._kernels.pop((key[1:], *_wide(self.bound, operands, out)), None)
                self._launches[key] = self._made(operands, out, part, key[1:], smaller)

    def compile(self, operands: Mapping[str, Tensor]) -> None:
        """Make the kernel without running it, so that several can be made at once; what does not fit shows later."""
        if self._empty or interpreted():
            return
        out, before = self._result(operands, None)
        operands = operands if before is None else {**operands, BEFORE: before}
        key, tile = self._launch_key(operands), self._tile(operands)
        part = _segments(self.bound, operands, self._form, tile)
        key = (-1 if part is None else part.rows.shape[0], tile, *key)
        launch = self._launches.setdefault(key, self._made(operands, out, part, key[1:]))
        with suppress(*_unfit()):
            launch.kernel.warmup(*_values(launch, operands, out, part), grid=(1,), **launch.options)

    def _result(self, operands: Mapping[str, Tensor], before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tensor that the kernel writes, and what it adds to: another one where all is written, else the same."""
        statement = self.bound.statement
        given = before is not None
        if statement.accumulate and not given:
            before = operands[statement.target.name]
        if before is not None and not self._whole:
            out = before.to(self._summed, copy=not given, memory_format=torch.contiguous_format)
            return out, out
        # What is added to lies where the result does.
        out = self.allocate_output(operands[self._used[0]], spare=before is None)
        return out, None if before is None else before.contiguous()

    def _launch_key(self, operands: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What a launch depends on; what was tuned meanwhile counts from the next call on."""
        precision = self.precision or float32_precision()
        used = [operands[name] for name in self._used]
        before = operands.get(BEFORE)
        kind = None if before is None else before.dtype
        return (ledger().generation, tuning_mode(), precision, kind, *[(x.stride(), x.dtype) for x in used])

    def _tile(self, operands: Mapping[str, Tensor]) -> Tile:
        """The tile that was asked for, the tuned one, or the default; tuned now where that is wanted."""
        if self.tile is not None:
            return self.tile
        precision = self.precision or float32_precision()
        on_gpu = operands[self._used[0]].is_cuda
        if tuning_mode() == TIMING and on_gpu and not ledger().look(_key(self.bound, operands, precision)):
            tune(self.bound, operands, self.dtype, measured, precision)
        return tile_of(self.bound, operands, precision)

    def _made(
        self,
        operands: Mapping[str, Tensor],
        out: Tensor,
        part: Segments | None,
        key: tuple[Any, ...],
        tile: Tile | None = None,
    ) -> SizedLaunch:
        """The launch of a kernel that may be there already for other sizes. The key begins with the tile."""
        given = {**operands, "": out}
        known = (key, *_wide(self.bound, operands, out))
        kernel = self._kernels.get(known)
        if kernel is None:
            how = KernelOptions(self.precision or float32_precision(), self.splits, self.finish)
            kernel = self._kernels[known] = generated_kernel(self.bound, given, tile or key[0], how)
        return kernel.sized(self.bound.extents, {name: x.shape for name, x in given.items()}, part)


class BoundExecutor:
    """A runner with some operands given once and for all: their addresses, and what else depends on them alone, are
    not looked up for each call.

    at: the shapes of all operands by name, and that of the result, where they are other ones than the runner's, which
    can be `with_sizes`.
    """

    def __init__(
        self,
        runner: KernelExecutor,
        held: Mapping[str, Tensor],
        at: tuple[Mapping[str, Sequence[int]], tuple[int, ...]] | None = None,
    ) -> None:
        self.like, self.held, self._at = runner, held, at
        self._shape = runner.bound.shape if at is None else at[1]
        self._in_fp32, self._far, laid = False, runner.is_far(self._shape), []
        for x in held.values():
            kind = x.dtype
            laid += (x.stride(), kind)
            self._in_fp32 |= kind is torch.float32
            self._far |= is_far(x)
        self._laid = tuple(laid)
        self._aimed: dict[Any, Aimed] = {}

    @cached_property
    def _runner(self) -> KernelExecutor:
        return self.like if self._at is None else self.like.with_sizes(*self._at)

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result; operands: those that are not held."""
        if before is not None:
            return self._runner({**self.held, **operands}, before)
        like, key = self.like, self._key(operands)
        aimed = self._aimed.get(key)
        if aimed is None:
            aimed = self._cast(key, operands)
        if aimed is not None:
            out = like.allocate_output(next(iter((operands or self.held).values())), self._shape)
            if aimed.start(operands, aimed.slots.free, out):
                return out if out.dtype == like.dtype else out.to(like.dtype)
        together = {**self.held, **operands}
        found = self._runner(together)
        if aimed is None and (mould := self._runner.mould(together)) is not None:
            like.moulds.keep((key, self._laid), mould)
            self._cast(key, operands)
        return found

    def made(self, operands: Mapping[str, Tensor]) -> Aimed | None:
        """The kernel of calls like this one; None before it was called."""
        return self._aimed.get(self._key(operands))

    def _key(self, operands: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What a launch depends on beside what is held."""
        kinds, asked = [], self._in_fp32
        for x in operands.values():
            kind = x.dtype
            asked |= kind is torch.float32
            # A kernel belongs to a device, which calls of one runner do not share.
            kinds += (x.stride(), kind, x.get_device())
        precision = self.like.precision or (float32_precision() if asked else "")
        return (ledger().generation, tuning_mode(), precision, *kinds)

    def _cast(self, key: tuple[Any, ...], operands: Mapping[str, Tensor]) -> Aimed | None:
        """The kernel of calls like this one, which was made for another: with this one's sizes and addresses."""
        mould = self.like.moulds.get((key, self._laid))
        if mould is None or self._far or any(map(is_far, operands.values())):
            return None
        held, slots = self.held, mould.slots(self.held)
        given = {**held, **operands}
        rows = [given[name].shape[0] if name else self._shape[0] for name in mould.rows]
        cut = None if mould.array is None else mould.cut(held.get(mould.array), rows, {})
        if cut is None and mould.array is not None:
            return None
        aimed = mould.cast(slots, [held[name].data_ptr() for _, name in slots.held], rows, cut)
        if aimed is not None:
            if len(self._aimed) >= _AIMED:
                self._aimed.clear()
            self._aimed[key] = aimed
        return aimed


def is_far(x: Tensor) -> bool:
    """Whether addresses of it, whose rows lead, need 64 bits."""
    return x.ndim > 0 and x.shape[0] * x.stride(0) >= FAR


_AIMED = 64
"""Kernels that a runner keeps: for tensors laid out in other ways, and what was tuned meanwhile."""


_TENSORS = ("operand", "before", "result", "segment", *SCRATCH)
"""Arguments that are tensors."""

LEDGER, TIMING, DEFAULT = "ledger", "timing", "default"
"""Where tiles come from: what was tuned, else the default; what is timed now where nothing was; the default always."""


@contextmanager
def use_tuning_mode(source: str) -> Iterator[None]:
    """Within it, the tiles of every kernel that is met come from there; so do those of the gradients."""
    token = _TILES_FROM.set(source)
    try:
        yield
    finally:
        _TILES_FROM.reset(token)


def tiles_of(source: str) -> AbstractContextManager[object]:
    """As tiles_from, for gradients, which are computed in a thread of their own and see nothing of the caller's
    context: at no cost where tiles come from there anyway."""
    return nullcontext() if source == tuning_mode() else use_tuning_mode(source)


def tuning(on: bool = True) -> AbstractContextManager[None]:
    """Within it, the tiles of every kernel that is met and was not tuned are timed, and the fastest is kept on disk.

    The first call takes seconds, later ones and other processes profit. Gradients of what is computed within are tuned
    too. Nothing happens on a CPU.
    """
    return use_tuning_mode(TIMING if on else LEDGER)


def tuning_mode() -> str:
    return _TILES_FROM.get()


_TILES_FROM: ContextVar[str] = ContextVar("use_tuning_mode", default=LEDGER)


def tune(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    dtype: torch.dtype,
    measure: Callable[[Callable[[], object], float], float],
    precision: str = "",
) -> dict[Tile, float]:
    """Time every tile worth it, keep the fastest in the ledger; all times.

    measure(call, best) gives the seconds of a call, and need not be exact far above the best so far.

    A tile that does not fit the device is left out.
    """
    times: dict[Tile, float] = {}
    precision = precision or float32_precision()
    candidates = tiles.candidates(_problem(bound, operands, _form(bound)))
    attempts = {tile: KernelExecutor(bound, dtype, tile, precision) for tile in candidates}
    device = operands[_used(bound)[0]].device
    with _on(device), ThreadPoolExecutor(_COMPILERS) as pool:
        stream = torch.cuda.current_stream() if device.type == "cuda" else None
        list(pool.map(lambda attempt: _compiled_on(stream, attempt, operands), attempts.values()))
        for tile, attempt in attempts.items():
            try:
                best = min(times.values(), default=math.inf)
                times[tile] = measure(lambda attempt=attempt: attempt(operands), best)
            except _unfit() as problem:
                if not _is_unfit(problem):
                    raise
    if times:
        fastest = min(times, key=times.__getitem__)
        ledger().put(_key(bound, operands, precision), fastest, times[fastest])
    return times


def _compiled_on(stream: torch.cuda.Stream | None, attempt: KernelExecutor, operands: Mapping[str, Tensor]) -> None:
    """Each thread has a current device and a current stream of its own; what is found of the operands is kept, and must
    be found behind what they are made by."""
    with torch.cuda.stream(stream) if stream else nullcontext():
        attempt.compile(operands)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _unfit() -> tuple[type[Exception], ...]:
    """What Triton raises where a tile does not fit the device or its compiler; see also _is_unfit."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError, RuntimeError


def _is_unfit(problem: Exception) -> bool:
    """A RuntimeError is only meant where it is the compiler's: what a kernel does to memory is one, too."""
    return not isinstance(problem, RuntimeError) or "PassManager" in str(problem)


def tile_of(bound: BoundStatement, operands: Mapping[str, Tensor], precision: str = "") -> Tile:
    """The tile that `run` takes: the tuned one, or the default. A tuned one that does not fit the statement, as a file
    that many share may hold, is passed over with a warning."""
    found = None if tuning_mode() == DEFAULT else ledger().get(_key(bound, operands, precision or float32_precision()))
    if found is not None:
        try:
            _check_fit(bound, operands, found)
        except OptionError as problem:
            _told_unfit(str(bound.statement), found, str(problem))
            found = None
    return found or tiles.default(_problem(bound, operands, _form(bound)))


def _check_fit(bound: BoundStatement, operands: Mapping[str, Tensor], tile: Tile) -> None:
    """Raises OptionError where no kernel is made of the statement with this tile."""
    form = _form_in(bound, tile)
    # A packed tile takes several entries of few channels as one side.
    sides = min(tile.rows, tile.columns, 16 if tile.packed else tile.reduced)
    if form.product and sides < 16:
        raise OptionError(f"the sides of a matrix product are at least 16, found {sides}")
    kind = next((t.dtype for t in operands.values() if t.dtype.is_floating_point), torch.float32)
    _emitted(bound.statement, form, _signature(bound, operands, form, kind, tile))


@lru_cache(maxsize=256)
def _told_unfit(statement: str, tile: Tile, reason: str) -> None:
    """Said once."""
    warnings.warn(f"the tuned {tile} of {statement} is passed over: {reason}", RuntimeWarning, stacklevel=3)


def source_of(bound: BoundStatement, operands: Mapping[str, Tensor]) -> str:
    """The source of the kernel for these operands; "" where none is made."""
    if refusal(bound.statement, bound, operands):
        return ""
    dtype = next((t.dtype for t in operands.values() if t.dtype.is_floating_point), torch.float32)
    out = torch.empty(bound.shape, dtype=dtype, device="meta")
    shared = tiles.splits(_form(bound), bound.extents)
    return prepare(bound, operands, out, tile_of(bound, operands), how=KernelOptions(splits=shared)).source.text


@lru_cache(maxsize=64)
def without_fp8(device: torch.device) -> str | None:
    """Why float8_e4m3fn is neither multiplied nor written there, or None."""
    if torch.version.hip:
        return "these tensor cores have another 8-bit float than float8_e4m3fn"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "float8_e4m3fn begins with compute capability 8.9"
    return None


Of = TypeVar("Of")


def _per_kind(find: Callable[[BoundStatement], Of]) -> Callable[[BoundStatement], Of]:
    """Remember what follows from a bound, which is the same for all that were resized from it."""
    known = lru_cache(maxsize=4096)(find)
    return wraps(find)(lambda bound: known(bound.like or bound))


@_per_kind
def _form(bound: BoundStatement) -> ContractionRoles:
    return contraction_roles(bound.statement, bound.extents)


@_per_kind
def _packed_form(bound: BoundStatement) -> ContractionRoles | None:
    """The roles of packed tiles: how many points an entry has must be known when a kernel is compiled."""
    found = packed(_form(bound), bound.statement, bound.extents)
    return found if found and _static(bound, found).keys() >= set(found.reduced) else None


@_per_kind
def _used(bound: BoundStatement) -> tuple[str, ...]:
    """The operands that a kernel reads."""
    statement = bound.statement
    return tuple(dict.fromkeys(a.name for a in accesses_of(*statement.terms, *statement.target.indices)))


def prepare(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    out: Tensor,
    tile: Tile,
    part: Segments | None = None,
    how: KernelOptions = KernelOptions(),
) -> SizedLaunch:
    """The kernel for these operands with this tile."""
    given = {**operands, "": out}
    return generated_kernel(bound, given, tile, how).sized(bound.extents, {n: t.shape for n, t in given.items()}, part)


def generated_kernel(
    bound: BoundStatement, operands: Mapping[str, Tensor], tile: Tile, how: KernelOptions
) -> GeneratedKernel:
    """The kernel for operands like these, the result being "", with this tile."""
    form, out = _form_in(bound, tile), operands[""]
    signature = _signature(bound, operands, form, out.dtype, tile)
    thrice = form.within is not None and how.precision == "tf32x3" and _computes_fp32(signature)
    finish = how.finish
    signature = replace(signature, splits=how.splits > 1, thrice=thrice, activation=finish.activation, eps=finish.eps)
    source = _emitted(bound.statement, form, signature)
    return GeneratedKernel(tile, how, form, source, bound.extents, operands)


class GeneratedKernel:
    """A kernel for operands of certain dtypes and layouts, whatever rows and entries they have.

    summed: the dtype in which pieces of segments leave their sums. slots: the places of tensors among its arguments,
    and what belongs there. compiled: by device, variant and which tensors are aligned to 16 bytes, what Triton made of
    it; later launches go there, and those of other sizes.
    """

    def __init__(
        self,
        tile: Tile,
        how: KernelOptions,
        form: ContractionRoles,
        source: Source,
        extents: Mapping[str, int],
        operands: Mapping[str, Tensor],
    ) -> None:
        self.tile, self.how, self.form, self.source = tile, how, form, source
        self.kernel = loaded(source)
        self.summed = torch.float64 if torch.float64 in {t.dtype for t in operands.values()} else torch.float32
        self.slots = tuple((n, a.kind, a.name) for n, a in enumerate(source.arguments) if a.kind in _TENSORS)
        self.compiled: dict[tuple[Any, ...], CompiledKernel] = {}
        # What counts, and the rest, which is the same whatever sizes operands have.
        self._counting = [(n, a) for n, a in enumerate(source.arguments) if a.kind in ("extent", "size")]
        self._blocks = [n for n, a in enumerate(source.arguments) if a.variable == "BLOCKS"]
        constants = self._constants(extents)
        counted = {n for n, _ in self._counting} | {*self._blocks}
        self.steady = [None if n in counted else _fixed(a, operands, constants) for n, a in enumerate(source.arguments)]

    def room(self, programs: int) -> int:
        """Bytes for what so many programs find of a piece."""
        return programs * self.tile.rows * self.tile.columns * self.summed.itemsize

    def sized(
        self, extents: Mapping[str, int], shapes: Mapping[str, Sequence[int]], part: Segments | None
    ) -> SizedLaunch:
        """It made ready for operands of these sizes, the result being ""."""
        tile, form = self.tile, self.form
        count = part.rows.shape[0] if part else 0
        extents = {**extents, SPLITS: self.how.splits, STACKS: count}
        if form.segment:
            extents[form.segment.index] = count
        fixed, told = self.steady.copy(), []
        for place, counts in self._counting:
            value = extents[counts.name] if counts.kind == "extent" else shapes[counts.name][counts.axis]
            fixed[place] = value
            told += (value % 16 == 0, value == 1, value >= FAR)
        if self._blocks:
            tiled = (form.reduced, tile.reduced) if form.product else (form.columns, tile.columns)
            fixed[self._blocks[0]] = blocks = -(-math.prod(extents[n] for n in tiled[0]) // tiled[1])
            told.append(blocks)
        programs = grid(form, extents, (tile.rows, tile.columns), count, tile.segment_threads)
        return SizedLaunch(self, programs, fixed, tuple(told))

    def _constants(self, extents: Mapping[str, int]) -> dict[str, Any]:
        tile, form = self.tile, self.form
        # A tile that was tuned for fewer channels still has room for one entry.
        depth = max(tile.reduced, depth_of_entry(form, extents)) if form.packed else tile.reduced
        return {
            "BY": tile.rows,
            "BX": tile.columns,
            "BR": depth,
            "PRECISION": self.how.precision,
            "STAGES": tile.stages,
        }


def _form_in(bound: BoundStatement, tile: Tile) -> ContractionRoles:
    """The roles that a tile asks for."""
    form = _form(bound)
    if tile.packed and (form := _packed_form(bound)) is None:
        raise OptionError(f"tile {tile}: {bound.statement} has no entries of a segment that fit side by side")
    if tile.stacked and (form := stacked(form, bound.statement)) is None:
        raise OptionError(f"tile {tile}: {bound.statement} has no segments that one matrix product takes")
    if tile.swapped and not form.product:
        raise OptionError(f"tile {tile}: {bound.statement} is no matrix product, whose sides could be swapped")
    if tile.swapped and form.folds:
        raise OptionError(f"tile {tile}: {bound.statement} adds up the columns of the tile, which cannot be its rows")
    if tile.stream_k_chunk and torch.version.hip:
        raise OptionError(f"tile {tile}: on AMD a program cannot tell when all that it has stored is seen")
    return exchanged(form) if tile.swapped else form


@lru_cache(maxsize=1024)
def _emitted(statement: Statement, form: ContractionRoles, signature: Signature) -> Source:
    return emit(statement, form, signature)


@lru_cache(maxsize=1024)
def loaded(source: Source) -> Any:
    """The kernel of a source. Triton asks `inspect` for its text, which is found in `linecache`: no file is executed
    that somebody else may have written."""
    name = f"pumice_kernel_{hashlib.sha256(source.text.encode()).hexdigest()[:24]}"
    file = f"<{name}>"
    # Without a time of change an entry is not compared with a file.
    linecache.cache[file] = len(source.text), None, source.text.splitlines(keepends=True), file
    module = ModuleType(name)
    exec(compile(source.text, file, "exec"), vars(module))
    return getattr(module, source.name)


def _launch(launch: SizedLaunch, operands: Mapping[str, Tensor], out: Tensor, part: Segments | None) -> None:
    if not launch.programs:
        return
    values = _values(launch, operands, out, part)
    if out.is_cuda and out.device.index != torch.cuda.current_device():
        with torch.cuda.device(out.device):
            _start(launch, values, out.device.index or 0)
    else:
        _start(launch, values, out.device.index or 0)


def _values(launch: SizedLaunch, operands: Mapping[str, Tensor], out: Tensor, part: Segments | None) -> list[Any]:
    """The arguments of a launch in their order."""
    values = list(launch.fixed)
    own = launch.scratch(out.device) if any(kind in SCRATCH for _, kind, _ in launch.slots) else None
    for place, kind, name in launch.slots:
        if kind == "segment":
            values[place] = getattr(part, name)
        elif own is not None and kind in SCRATCH:
            values[place] = own.counters if kind == "waiting" else own.room.view(launch.summed)
        else:
            values[place] = out if kind == "result" else operands[name]
    return values


def _start(launch: SizedLaunch, values: list[Any], device: int) -> None:
    """The first launch of a variant goes through Triton's own door.

    A kernel belongs to the device that it was first run on.
    """
    addresses = [(place, values[place].data_ptr()) for place, _, _ in launch.slots]
    key = (device, launch.variant, *[address % 16 == 0 for _, address in addresses])
    compiled = launch.compiled.get(key)
    if compiled is not None:
        bare = values.copy()
        for place, address in addresses:
            bare[place] = address
        # The tensors are held until the kernel is under way: another thread might be given their memory before.
        compiled(launch.programs, bare, device)
        return
    made = launch.kernel[(launch.programs,)](*values, **launch.options)
    if made is not None:
        launch.compiled[key] = CompiledKernel(made)


def _fixed(argument: Argument, given: Mapping[str, Tensor], constants: Mapping[str, Any]) -> Any:
    """The value of an argument that is no tensor and counts nothing."""
    match argument.kind:
        case "stride":
            return given[argument.name].stride(argument.axis)
        case "zero":
            return 0
        case "constant":
            return constants[argument.variable]
    return None


def _signature(
    bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles, dtype: torch.dtype, tile: Tile
) -> Signature:
    names = {*_used(bound), *EPILOGUE, ""}
    used = {name: tensor for name, tensor in operands.items() if name in names}
    fixed = _static(bound, form)
    unit = frozenset((name, axis) for name, t in used.items() for axis, s in enumerate(t.stride()) if s == 1)
    extents = bound.extents
    # Whether a tile divides an axis is known where its extent is, and asked where masks would cut loads to pieces: not
    # of rows or entries, which are others when the kernel is started again.
    settled = {*fixed, *contiguous(bound.statement, unit)} - _leading(bound)
    own = form.segment.index if form.segment else None
    # How many entries a stack has is never known.
    stacked_entries = form.reduced if form.stacked else ()
    even = "".join(
        axis
        for axis, along, side in (
            ("Y", form.rows, tile.rows),
            ("R", form.reduced, depth_of_entry(form, extents) if form.packed else tile.reduced),
            ("X", form.columns, tile.columns),
        )
        if along
        and own not in along
        and along != stacked_entries
        and settled.issuperset(along)
        and math.prod(extents[n] for n in along) % side == 0
    )
    return Signature(
        dtypes=(*((name, DTYPES[t.dtype]) for name, t in sorted(used.items()) if name), ("", DTYPES[dtype])),
        unit=unit,
        wide=frozenset(name for name, t in used.items() if _reach(t) >= 1 << 31),
        far=_far(bound, operands, form),
        static=tuple(sorted(fixed.items())),
        starts=tuple((name, r.start) for name, r in sorted(bound.ranges.items()) if r.start),
        strides=_strides(used) if form.packed else (),
        even=even,
        whole=_whole(form, extents, tile, settled),
        segment_threads=tile.segment_threads,
        column_major_grid=tile.column_major_grid,
        accumulate=BEFORE in operands,
        prefetch_indices=tile.prefetch_indices,
        pieces=tile.stream_k_chunk > 0,
        epilogue_subtiles=tile.epilogue_subtiles,
        hoisted=tile.hoisted,
        padded=tile.padded,
    )


def _strides(used: Mapping[str, Tensor]) -> tuple[tuple[str, int, int], ...]:
    """Those of values that are not as long as a cloud."""
    values = [(name, t) for name, t in sorted(used.items()) if name not in ("", *EPILOGUE) and _is_value(t.dtype)]
    return tuple((name, axis, s) for name, t in values for axis, s in enumerate(t.stride()) if 1 < s <= _STRIDES)


def _computes_fp32(signature: Signature) -> bool:
    kinds = {kind for name, kind in signature.dtypes if name}
    return "fp32" in kinds and "fp64" not in kinds


def _whole(form: ContractionRoles, extents: Mapping[str, int], tile: Tile, settled: set[str]) -> bool:
    """Whether one tile takes all of the reduction; asked where what it reads is read again in every turn."""
    known = form.within is not None and settled.issuperset(form.reduced)
    return known and math.prod(extents[n] for n in form.reduced) <= tile.reduced


def _static(bound: BoundStatement, form: ContractionRoles) -> dict[str, int]:
    """Extents that are baked into a kernel: short ones of reductions and columns.

    Not those of an index that leads every access that it is in: it counts entries or samples, and changes.
    """
    extents, leading = bound.extents, _leading(bound)
    names = (*form.reduced, *form.columns, *form.loops)
    found = {n: extents[n] for n in names if n in extents and extents[n] <= _STATIC and n not in leading}
    if form.within is None:
        return found
    # A product within the left side has few rows, and they are known.
    few = [n for n in form.rows if extents[n] <= _FEW]
    return found | {n: extents[n] for n in (form.within.met, *form.within.summed, *few)}


@_per_kind
def _leading(bound: BoundStatement) -> frozenset[str]:
    """The indices that lead every access that they are in."""
    statement = bound.statement
    leading: dict[str, bool] = {}
    for access in (statement.target, *accesses_of(*statement.terms, *statement.target.indices)):
        for axis, expression in enumerate(access.indices):
            for _, atom in expression.terms:
                if isinstance(atom, Index):
                    leading[atom.name] = leading.get(atom.name, True) and axis == 0
    return frozenset(name for name, leads in leading.items() if leads)


def _problem(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> Problem:
    """What a tile is chosen for: the same of all sizes that are about the same."""
    statement = bound.statement
    segments = 1 if form.segment is None else max(tiles.size_bucket(_count(bound, operands)), 1)
    entries = 1.0 if form.segment is None else tiles.size_bucket(operands[form.segment.array].shape[0]) / segments
    turning = {*form.loops, *form.reduced}
    chained = any(turning & set(indices_of(array)) for array in arrays_of(*statement.terms))
    bits = _bits([operands[name] for name in _used(bound)])
    stacks = _stacks(bound, operands)
    packs, waits = _packed_form(bound), torch.version.hip is None
    longest = _longest(bound, operands, form)
    return Problem(form, _extents_about(bound), entries, bits, chained, stacks, segments, packs, waits, longest)


def _longest(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> int:
    """Entries of the longest segment that is to be expected: no more than there are places along an axis of which each
    entry names one, as a map's taps."""
    entry = set() if form.segment is None else {form.segment.position}
    places = [
        operands[access.name].shape[axis]
        for access in accesses_of(*bound.statement.terms)
        for axis, index in enumerate(access.indices)
        if index.bare is None and any({*indices_of(array)} == entry for array in index.arrays)
    ]
    return min([tiles.LONGEST, *places])


def _extents_about(bound: BoundStatement) -> dict[str, int]:
    leading = _leading(bound)
    return {name: tiles.size_bucket(extent) if name in leading else extent for name, extent in bound.extents.items()}


def _stacks(bound: BoundStatement, operands: Mapping[str, Tensor]) -> bool:
    """Whether segments may be stacked: all values are of one half precision, which tensor cores multiply exactly."""
    kinds = {t.dtype for name in _used(bound) if _is_value((t := operands[name]).dtype)}
    halves = kinds in ({torch.float16}, {torch.bfloat16})
    return halves and stacked(_form(bound), bound.statement) is not None


def _key(bound: BoundStatement, operands: Mapping[str, Tensor], precision: str) -> Key:
    used = [operands[name] for name in _used(bound)]
    device = torch.cuda.get_device_name(used[0].device) if used[0].is_cuda else used[0].device.type
    extents = [*_extents_about(bound).values()]
    if _form(bound).segment:
        extents.append(tiles.size_bucket(_count(bound, operands)))
    sizes = (int(2 * math.log2(max(1, extent))) for extent in extents)
    kinds = tuple(DTYPES[t.dtype] for t in used)
    return Key(device, str(bound.statement), kinds, tuple(sizes), precision if "fp32" in kinds else "")


def _far(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> frozenset[Affine]:
    """The index expressions whose values may need 64 bits. Raises OptionError for those that may need more."""
    shapes = {name: x.shape for name, x in operands.items()}
    found = reaches(bound, form.target, shapes, tops_of(operands))
    if beyond := [expression for expression, (_, high) in found.items() if high >= FARTHEST]:
        raise OptionError(f"the index {beyond[0]} needs more than 64 bits")
    return frozenset(expression for expression, (low, high) in found.items() if low < -FAR or high >= FAR)


def _wide(bound: BoundStatement, operands: Mapping[str, Tensor], out: Tensor) -> tuple[Any, ...]:
    """What a kernel depends on beside tile, dtypes and strides: which tensors need addresses of 64 bits, and which
    index expressions, the result's dtype."""
    return (
        out.dtype,
        _far(bound, operands, _form(bound)),
        *[name for name, t in (*operands.items(), ("", out)) if _reach(t) >= 1 << 31],
    )


def _reach(tensor: Tensor) -> int:
    """The furthest element's distance from the first."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)


def _covers(bound: BoundStatement, form: ContractionRoles) -> bool:
    """Whether every entry of the target is written: each axis by indices of its own that leave nothing out."""
    names = [name for expression in form.target.indices for name in indices_of(expression)]
    if len(set(names)) < len(names):
        return False
    onto = {name for name, fact in bound.statement.facts if fact == "onto"}
    return all(
        _fills(expression, extent, bound, form, onto)
        for extent, expression in zip(bound.shape, form.target.indices, strict=True)
    )


def _fills(expression: Affine, extent: int, bound: BoundStatement, form: ContractionRoles, onto: set[str]) -> bool:
    """Whether an expression takes every value of an axis: digits without gaps, or an array that is onto."""
    own = form.segment.index if form.segment else None
    if expression.arrays:
        ((coefficient, atom), *rest) = expression.terms
        whole = coefficient == 1 and not rest and not expression.constant
        if not whole or not isinstance(atom, Access) or atom.name not in onto:
            return False
        # All of the array is read.
        bare = {e.bare for e in atom.indices}
        read = bare - {own}
        return len(bare) == len(atom.indices) and all(name and not bound.ranges[name].start for name in read)
    reach = 1
    for coefficient, atom in sorted(expression.terms, key=lambda term: term[0]):
        assert isinstance(atom, Index)
        if coefficient != reach or expression.constant:
            return False
        if atom.name == own:
            # Segments are as many as it takes.
            return True
        if bound.ranges[atom.name].start:
            return False
        reach *= len(bound.ranges[atom.name])
    return reach >= extent


def _segments(
    bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles, tile: Tile
) -> Segments | None:
    if form.segment is None:
        return None
    return segments_of(operands[form.segment.array], _count(bound, operands), form, tile)


def _count(bound: BoundStatement, operands: Mapping[str, Tensor]) -> int:
    """How many segments there are, empty ones included."""
    name, axis, coefficient = _counted(bound)
    extent = operands[name].shape[axis] if name else bound.shape[axis]
    return -(-int(extent) // coefficient)


@_per_kind
def _counted(bound: BoundStatement) -> tuple[str, int, int]:
    """The axis that tells how many segments there are; "" is the result."""
    return segment_axis(_form(bound))


def _smallest(form: ContractionRoles) -> Tile:
    return Tile(16, 16, 16) if form.product else Tile(1, 1)


def _bits(operands: Sequence[Tensor]) -> int:
    """Of the widest values."""
    return max(t.dtype.itemsize * 8 for t in operands if _is_value(t.dtype))


def _is_value(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind in EIGHT_BITS


def float32_precision() -> str:
    """How float32 is multiplied: as torch is told to, by its older setting or its newer one.

    "highest" (or "ieee") is three products of tf32 on NVIDIA (relative error 1e-6), which run on tensor cores; AMD has
    none of them, and multiplies exactly.
    """
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"


def measured(call: Callable[[], object], best: float = math.inf, runs: int = 10) -> float:
    """Seconds of a call on the GPU: the median over some runs, each with a cold cache; fewer far above the best."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times: list[float] = []
    for _ in range(runs + 2):
        flush.zero_()
        # The host queues the call meanwhile: what it takes is not the kernel's.
        torch.cuda._sleep(_TIMING_SLEEP_CYCLES)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(1e-3 * start.elapsed_time(stop))
        if len(times) == 3 and times[-1] > 3 * best:
            return times[-1]
    return sorted(times[2:])[runs // 2]


_TIMING_SLEEP_CYCLES = 400_000
"""Cycles, about 0.2 ms."""

_RUNNERS: BoundedCache[KernelExecutor] = BoundedCache(4096)
