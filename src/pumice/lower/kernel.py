"""Runtime of generated kernels: load the source, build arguments from tensors, choose and tune tiles, launch."""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from pumice.errors import OptionError
from pumice.language.bind import BoundStatement, leading_indices, reaches, resizable, resized
from pumice.language.contraction import ContractionRoles, contraction_roles, exchanged, packed, segment_axis, stacked
from pumice.language.nodes import Access, Affine, Index, Statement, accesses_of, arrays_of, indices_of
from pumice.lower.emit import BEFORE, FARTHEST, Signature, Source, contiguous, depth_of_entry, emit
from pumice.lower.epilogue import EPILOGUE, NO_EPILOGUE, EpilogueSignature
from pumice.lower.reference import EIGHT_BITS, tops_of
from pumice.lower.segments import Segments
from pumice.lower.tile_family import (
    INT32_LIMIT,
    WORKSPACE,
    GeneratedKernel,
    KernelOptions,
    SizedLaunch,
    SizeKey,
    TileFamily,
    segment_rule,
    size_key,
    without_memory,
)
from pumice.runtime.cache import BoundedCache
from pumice.runtime.compile import Parameter, TritonKernel, digest
from pumice.runtime.launch import CompiledKernel, on_device
from pumice.runtime.streams import is_capturing
from pumice.runtime.workspace import workspace
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
PRECISIONS = ("ieee", "tf32x3", "bf16x6", "bf16x3", "tf32")
"""Precisions of float32 products, most exact first: relative errors of 1e-7, 1e-6, 1e-6, 1e-5 and 5e-4."""
_COMPILERS = 8
"""Threads that compile kernels while tuning."""
_STATIC = 1024
"""Extents of reductions and columns up to this are compile-time constants; larger ones are arguments."""
_STRIDES = 1 << 14
"""Strides of operands of packed tiles up to this are constants, too: of channels and kernel offsets, not of rows."""
_FEW = 64
"""Extents of rows up to this are constants, too, in a product whose left side is itself a product."""


def interpreted() -> bool:
    """True if Triton runs kernels in its CPU interpreter (TRITON_INTERPRET=1)."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why no kernel can be generated for the statement, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if statement.reduction != "sum" or len(statement.terms) != 1:
        return "kernels support only sums of one term"
    if not all(isinstance(factor, Access) for factor in statement.terms[0].factors):
        return "kernels do not support conditions (exists, equal)"
    used = {a.name for a in accesses_of(*statement.terms)}
    kinds = {t.dtype for name, t in operands.items() if name in used}
    odd = kinds - set(DTYPES)
    if odd:
        return f"kernels do not support {', '.join(map(str, odd))}; there are {', '.join(map(str, DTYPES))}"
    if not any(map(_is_value, kinds)):
        return "no operand is floating point"
    if torch.float8_e4m3fn in kinds and (why := without_fp8(next(iter(operands.values())).device)):
        return why
    form = contraction_roles(statement, bound.extents)
    if form.atomic and torch.are_deterministic_algorithms_enabled():
        return "results are accumulated by atomics, which deterministic algorithms forbid"
    smallest = Tile(16, 16, 16) if form.product else Tile(1, 1)
    try:
        _emitted(statement, form, _signature(bound, operands, form, torch.float32, smallest))
    except OptionError as reason:
        return str(reason)
    return None


def runner(
    bound: BoundStatement,
    dtype: torch.dtype,
    tile: Tile | None = None,
    precision: str = "",
    finish: EpilogueSignature = NO_EPILOGUE,
) -> KernelExecutor:
    """The cached executor of a statement of one term. tile: default: the tuned one, else a heuristic one. precision: of
    float32 products, one of PRECISIONS; default: that of torch.set_float32_matmul_precision. finish: the epilogue."""
    key = (bound, dtype, tile, precision, finish, torch.are_deterministic_algorithms_enabled())
    return _RUNNERS.get(key) or _RUNNERS.keep(key, KernelExecutor(bound, dtype, tile, precision, finish))


class KernelExecutor:
    """Executor of a statement of one term with fixed sizes; call it with the operands by name. adds: the kernel adds to
    what is in the result, by atomics."""

    dtype: torch.dtype
    tile: Tile | None
    precision: str
    finish: EpilogueSignature

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
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._kernels: dict[Any, GeneratedKernel] = {}
        # Of lower.call, by layout.
        self.templates: BoundedCache[Any] = BoundedCache(64)
        self._at(bound)

    def _at(self, bound: BoundStatement) -> None:
        self.bound: BoundStatement = bound
        self._empty = any(not len(extent) for extent in bound.ranges.values())
        self.splits: int = 1 if self._empty else self.splits_at(None)
        self.adds: bool = self._form.atomic or self.splits > 1
        self._whole = not self._empty and not self.adds and _writes_every_entry(bound, self._form)
        # Accumulate in float32 at least.
        self._summed = torch.promote_types(self.dtype, torch.float32) if self.adds else self.dtype
        self._launches: dict[Any, SizedLaunch] = {}
        self._tiles: dict[Any, Tile] = {}

    @property
    def roles(self) -> ContractionRoles:
        """The roles of the indices before a tile changes them."""
        return self._form

    def splits_at(self, key: SizeKey | None) -> int:
        """Split-K factor at the sizes of a key, default: the statement's."""
        return 1 if self._deterministic else splits_at(self.bound, key)

    @property
    def resizable(self) -> bool:
        """True if `with_sizes` applies: no kernel is specialised on a leading extent (rows, entries)."""
        if self._empty or not resizable(self.bound):
            return False
        return _static(self.bound, self._form).keys().isdisjoint(leading_indices(self.bound))

    def with_sizes(self, shapes: Mapping[str, Sequence[int]], shape: tuple[int, ...]) -> KernelExecutor:
        """A copy for operands of other shapes, by name, and a result of that shape; it shares the kernels."""
        found = copy(self)
        found._at(resized(self.bound, shapes, shape))
        return found

    @property
    def applies_epilogue(self) -> bool:
        """True if the kernel can apply an epilogue: it writes every entry of the result exactly once."""
        return self._whole and not self._form.folds

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result, with `before`, the sum of earlier steps, added; `before` may be overwritten."""
        out, before = self._result(operands, before)
        if before is not None:
            operands = {**operands, BEFORE: before}
        if not self._empty:
            self._compute_all(operands, out)
        return out if out.dtype == self.dtype else out.to(self.dtype)

    def allocate_output(self, like: Tensor, shape: tuple[int, ...] | None = None, spare: bool = True) -> Tensor:
        """Allocate the output, zeroed if the kernel accumulates, on the device of `like`. spare: with row padding."""
        shape = self.bound.shape if shape is None else shape
        if spare and self.finish.row_padding:
            rows, columns = shape
            return like.new_empty((rows, columns + self.finish.row_padding), dtype=self._summed)[:, :columns]
        if self._whole:
            return like.new_empty(shape) if like.dtype is self._summed else like.new_empty(shape, dtype=self._summed)
        return like.new_zeros(shape, dtype=self._summed)

    @property
    def writes_result_dtype(self) -> torch.dtype | None:
        """The result dtype if the kernel writes the complete result itself, else None."""
        return self.dtype if self._whole and self._summed is self.dtype else None

    @property
    def writes_all(self) -> bool:
        """True if the kernel writes every entry of the result, else it needs one of zeros."""
        return self._whole

    @property
    def writes(self) -> torch.dtype:
        """The dtype that the kernel writes or accumulates in."""
        return self._summed

    @property
    def row_stride(self) -> int:
        """Row stride of the result in elements, with row padding."""
        return math.prod(self.bound.shape[1:]) + self.finish.row_padding

    def needs_int64(self, shape: tuple[int, ...]) -> bool:
        """True if a result of this shape, with row padding, needs 64-bit addressing."""
        return math.prod(shape) + (shape[0] if shape else 1) * self.finish.row_padding >= INT32_LIMIT

    def family(self, operands: Mapping[str, Tensor]) -> TileFamily | None:
        """The kernel family of a call that was run: for all sizes, or for its own if kernels are specialised on them.
        None for calls of no or several kernels, for accumulation, and during CUDA graph capture."""
        device = operands[self._used[0]].device
        if self._empty or self.bound.statement.accumulate or is_capturing(device):
            return None
        key = self._launch_key(operands)
        tile = self._tiles.get(key)
        part = None if tile is None else _segments(self.bound, operands, self._form, tile)
        if tile is None or (part is not None and part.outliers is not None):
            return None
        launch = self._launches.get((-1 if part is None else part.rows.shape[0], tile, *key))
        if launch is None:
            return None
        return TileFamily(self, launch.generated, self._like(operands), device)

    def make_family(self, operands: Mapping[str, Tensor]) -> TileFamily | None:
        """The `family` of a call that was not run; None also if tiles are tuned now (TIMING)."""
        device, statement = operands[self._used[0]].device, self.bound.statement
        if self._empty or statement.accumulate or is_capturing(device) or tuning_mode() == TIMING:
            return None
        precision = self.precision or default_precision(self.bound)
        generated = self.generate(self._like(operands), self._tile(operands), self.splits, precision)
        return TileFamily(self, generated, self._like(operands), device, False)

    def _like(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Operands and result ("") as meta tensors."""
        like = {name: without_memory(operands[name]) for name in self._used}
        return {**like, "": self.allocate_output(like[self._used[0]])}

    def problem(self, like: Mapping[str, Tensor]) -> Problem:
        """Input of the tile heuristics for operands like these, of any sizes."""
        return _sizeless(self.bound, like, self._form)

    def choose(
        self, like: Mapping[str, Tensor], key: SizeKey, device: torch.device, precision: str, problem: Problem
    ) -> tuple[Tile, int] | None:
        """Tile and split-K factor for sizes of this key. None if the tile has to be tuned first, or if split-K would be
        used here and not by this executor, or the reverse. problem: self.problem(like)."""
        splits = self.splits_at(key)
        if (splits > 1) != (self.splits > 1):
            return None
        if self.tile is not None:
            return self.tile, splits
        if tuning_mode() == TIMING and not ledger().look(_key(self.bound, like, precision, key, device)):
            return None
        return tile_of(self.bound, like, precision, key, device, problem), splits

    def _compute_all(self, operands: Mapping[str, Tensor], out: Tensor) -> None:
        """Compute the whole result; outlier segments get a launch of their own."""
        key = self._launch_key(operands)
        tile = self._tiles.get(key) or self._tiles.setdefault(key, self._tile(operands))
        part = _segments(self.bound, operands, self._form, tile)
        if part is not None and part.outliers is not None:
            # A second stream would save 5 % of GPU time and cost 100 us of host time.
            long = tiles.of_long_segments(self._form, self.bound.extents, tile)
            self._run(operands, out, part.outliers, (long, *key))
        self._run(operands, out, part, (tile, *key))

    def _run(self, operands: Mapping[str, Tensor], out: Tensor, part: Segments | None, key: tuple[Any, ...]) -> None:
        """Launch; shrink a default tile that exceeds the device's resources. key[0] is the tile."""
        key = (-1 if part is None else part.rows.shape[0], *key)
        while True:
            launch = self._launches.get(key) or self._launches.setdefault(
                key, self._sized_launch(operands, out, part, key[1:])
            )
            try:
                return _launch(launch, operands, out, part)
            except Exception as problem:
                smaller = launch.generated.tile.smaller()
                if self.tile == key[1] or smaller is None or type(problem).__name__ != "OutOfResources":
                    raise
                self._kernels.pop((key[1:], self.splits, *_wide(self.bound, operands, out)), None)
                self._launches[key] = self._sized_launch(operands, out, part, key[1:], smaller)

    def compile(self, operands: Mapping[str, Tensor]) -> None:
        """Compile without running, to compile kernels in parallel; errors of tiles that do not fit are left to runs."""
        if self._empty or interpreted():
            return
        out, before = self._result(operands, None)
        operands = operands if before is None else {**operands, BEFORE: before}
        key, tile = self._launch_key(operands), self._tile(operands)
        part = _segments(self.bound, operands, self._form, tile)
        key = (-1 if part is None else part.rows.shape[0], tile, *key)
        launch = self._launches.setdefault(key, self._sized_launch(operands, out, part, key[1:]))
        with suppress(*_resource_errors()):
            launch.generated.kernel.warmup(
                *_values(launch, operands, out, part), grid=(1,), **launch.generated.triton_options
            )

    def _result(self, operands: Mapping[str, Tensor], before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(output, earlier result): distinct tensors if the kernel writes the whole result, else one tensor."""
        statement = self.bound.statement
        given = before is not None
        if statement.accumulate and not given:
            before = operands[statement.target.name]
        if before is not None and not self._whole:
            out = before.to(self._summed, copy=not given, memory_format=torch.contiguous_format)
            return out, out
        # The earlier result has the layout of the result.
        out = self.allocate_output(operands[self._used[0]], spare=before is None)
        return out, None if before is None else before.contiguous()

    def _launch_key(self, operands: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Cache key of a launch; with the generation of tuned tiles, so that new ones apply from the next call on."""
        precision = self.precision or default_precision(self.bound)
        used = [operands[name] for name in self._used]
        before = operands.get(BEFORE)
        kind = None if before is None else before.dtype
        return (ledger().generation, tuning_mode(), precision, kind, *[(x.stride(), x.dtype) for x in used])

    def _tile(self, operands: Mapping[str, Tensor]) -> Tile:
        """The explicit tile, the tuned one, or the default; autotunes first in TIMING mode."""
        if self.tile is not None:
            return self.tile
        precision = self.precision or default_precision(self.bound)
        on_gpu = operands[self._used[0]].is_cuda
        if tuning_mode() == TIMING and on_gpu and not ledger().look(_key(self.bound, operands, precision)):
            tune(self.bound, operands, self.dtype, measured, precision)
        return tile_of(self.bound, operands, precision)

    def _sized_launch(
        self,
        operands: Mapping[str, Tensor],
        out: Tensor,
        part: Segments | None,
        key: tuple[Any, ...],
        tile: Tile | None = None,
    ) -> SizedLaunch:
        """The launch of a call; sizes share the kernel. key[0]: the tile by default."""
        given = {**operands, "": out}
        known = (key, self.splits, *_wide(self.bound, operands, out))
        kernel = self._kernels.get(known)
        if kernel is None:
            kernel = self._kernels[known] = self.generate(
                given, tile or key[0], self.splits, self.precision or default_precision(self.bound)
            )
        return kernel.sized(given, part)

    def generate(self, given: Mapping[str, Tensor], tile: Tile, splits: int, precision: str) -> GeneratedKernel:
        """The kernel with this tile for operands like these; given[""] is the result."""
        return generated_kernel(self.bound, given, tile, KernelOptions(precision, splits, self.finish))


LEDGER, TIMING, DEFAULT = "ledger", "timing", "default"
"""Tuning modes: the tuned tile, else the default; autotune if no tuned tile is stored; always the default."""


_TILES_FROM: ContextVar[str] = ContextVar("use_tuning_mode", default=LEDGER)
tuning_mode: Callable[[], str] = _TILES_FROM.get
"""The tuning mode that is set."""


@contextmanager
def use_tuning_mode(source: str) -> Iterator[None]:
    """Context that sets the tuning mode of all kernels, gradients included."""
    token = _TILES_FROM.set(source)
    try:
        yield
    finally:
        _TILES_FROM.reset(token)


def tiles_of(source: str) -> AbstractContextManager[object]:
    """`use_tuning_mode` for the backward pass, whose thread has another context; free if the mode is already set."""
    return nullcontext() if source == tuning_mode() else use_tuning_mode(source)


def tuning(on: bool = True) -> AbstractContextManager[None]:
    """Context that autotunes every kernel without a tuned tile and stores the fastest tile on disk.

    The first call takes seconds; later calls and other processes reuse the result. Gradients of calls made within are
    tuned too. No effect on a CPU.
    """
    return use_tuning_mode(TIMING if on else LEDGER)


def tune(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    dtype: torch.dtype,
    measure: Callable[[Callable[[], object], float], float],
    precision: str = "",
) -> dict[Tile, float]:
    """Time all candidate tiles, store the fastest in the cache of tuned tiles, return the seconds by tile.

    measure(call, best) returns the seconds of a call; it may be inexact far above the best so far. Tiles that do not
    fit the device are skipped.
    """
    times: dict[Tile, float] = {}
    precision = precision or default_precision(bound)
    candidates = tiles.candidates(_problem(bound, operands, _form(bound)))
    attempts = {tile: KernelExecutor(bound, dtype, tile, precision) for tile in candidates}
    device = operands[_used(bound)[0]].device
    with on_device(device), ThreadPoolExecutor(_COMPILERS) as pool:
        stream = torch.cuda.current_stream() if device.type == "cuda" else None
        list(pool.map(lambda attempt: _compiled_on(stream, attempt, operands), attempts.values()))
        for tile, attempt in attempts.items():
            try:
                best = min(times.values(), default=math.inf)
                times[tile] = measure(lambda attempt=attempt: attempt(operands), best)
            except _resource_errors() as problem:
                if not _is_unfit(problem):
                    raise
    if times:
        fastest = min(times, key=times.__getitem__)
        ledger().put(_key(bound, operands, precision), fastest, times[fastest])
    return times


def _compiled_on(stream: torch.cuda.Stream | None, attempt: KernelExecutor, operands: Mapping[str, Tensor]) -> None:
    """Compile on the caller's stream: properties of the operands are computed there, after the operands."""
    with torch.cuda.stream(stream) if stream else nullcontext():
        attempt.compile(operands)


def _resource_errors() -> tuple[type[Exception], ...]:
    """Exceptions of Triton for tiles that exceed the device or fail to compile, and others: see _is_unfit."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError, RuntimeError


def _is_unfit(problem: Exception) -> bool:
    """True if one of _resource_errors shows that a tile does not fit: of RuntimeErrors, only the compiler's."""
    return not isinstance(problem, RuntimeError) or "PassManager" in str(problem)


def tile_of(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    precision: str = "",
    key: SizeKey | None = None,
    device: torch.device | None = None,
    problem: Problem | None = None,
) -> Tile:
    """The tile of `run`: the tuned one, or the default. Warns if the tuned one does not fit: its file may be shared.

    key, device: sizes and device to use instead of the operands'; problem: _sizeless of them, if it is known.
    """
    found = None
    # Most users have no tuned tiles, and a key takes longer than all else here.
    if tuning_mode() != DEFAULT and not ledger().is_empty:
        found = ledger().get(_key(bound, operands, precision or default_precision(bound), key, device))
    if found is not None:
        try:
            _check_fit(bound, operands, found)
        except OptionError as reason:
            _warn_unfit(str(bound.statement), found, str(reason))
            found = None
    if found is not None:
        return found
    form = _form(bound)
    problem = problem or _sizeless(bound, operands, form)
    return tiles.default(_problem_at(problem, bound, key or _size_key(bound, operands, form)))


def _check_fit(bound: BoundStatement, operands: Mapping[str, Tensor], tile: Tile) -> None:
    """Raise OptionError if no kernel can be generated for the statement with this tile."""
    form = _form_in(bound, tile)
    # The reduction side of a packed tile holds several entries of few channels each.
    sides = min(tile.rows, tile.columns, 16 if tile.packed else tile.reduced)
    if form.product and sides < 16:
        raise OptionError(f"expected tile sides of a matrix product of at least 16, found {sides}")
    kind = next((t.dtype for t in operands.values() if t.dtype.is_floating_point), torch.float32)
    _emitted(bound.statement, form, _signature(bound, operands, form, kind, tile))


@lru_cache(maxsize=256)
def _warn_unfit(statement: str, tile: Tile, reason: str) -> None:
    warnings.warn(f"the tuned {tile} of {statement} is ignored: {reason}", RuntimeWarning, stacklevel=3)


def source_of(bound: BoundStatement, operands: Mapping[str, Tensor]) -> str:
    """The source of the kernel for these operands; "" if none can be generated."""
    if refusal(bound.statement, bound, operands):
        return ""
    dtype = next((t.dtype for t in operands.values() if t.dtype.is_floating_point), torch.float32)
    out = torch.empty(bound.shape, dtype=dtype, device="meta")
    shared = splits_at(bound, None)
    given = {**operands, "": out}
    source, _ = _generate(bound, given, tile_of(bound, operands), KernelOptions(splits=shared))
    return source.text


@lru_cache(maxsize=64)
def without_fp8(device: torch.device) -> str | None:
    """The reason why kernels on this device cannot use float8_e4m3fn, or None."""
    if torch.version.hip:
        return "these tensor cores use another 8-bit format than float8_e4m3fn"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "float8_e4m3fn requires compute capability 8.9"
    return None


Of = TypeVar("Of")


def _cached_per_statement(find: Callable[[BoundStatement], Of]) -> Callable[[BoundStatement], Of]:
    """Cache a function of a bound statement; statements resized from another one share its result."""
    known = lru_cache(maxsize=4096)(find)
    return wraps(find)(lambda bound: known(bound.like or bound))


@_cached_per_statement
def _form(bound: BoundStatement) -> ContractionRoles:
    return contraction_roles(bound.statement, bound.extents)


@_cached_per_statement
def _text(bound: BoundStatement) -> str:
    return str(bound.statement)


@_cached_per_statement
def _packed_form(bound: BoundStatement) -> ContractionRoles | None:
    """Roles for packed tiles; None if impossible or if an entry's extents are no compile-time constants."""
    found = packed(_form(bound), bound.statement, bound.extents)
    return found if found and _static(bound, found).keys() >= set(found.reduced) else None


@_cached_per_statement
def _used(bound: BoundStatement) -> tuple[str, ...]:
    """The operands that a kernel reads."""
    statement = bound.statement
    return tuple(dict.fromkeys(a.name for a in accesses_of(*statement.terms, *statement.target.indices)))


def generated_kernel(
    bound: BoundStatement, operands: Mapping[str, Tensor], tile: Tile, options: KernelOptions
) -> GeneratedKernel:
    """The kernel with this tile for operands like these; operands[""] is the result."""
    # A weight in parts is the right side.
    tile = replace(tile, swapped=False) if options.finish.weight_parts else tile
    source, form = _generate(bound, operands, tile, options)
    names = (*_used(bound), *options.finish.names, "", *[BEFORE] * (BEFORE in operands))
    roles, call = (_form(bound), form), (bound, operands, names)
    return GeneratedKernel(loaded(source), source, tile, options, roles, call)


def _generate(
    bound: BoundStatement, operands: Mapping[str, Tensor], tile: Tile, options: KernelOptions
) -> tuple[Source, ContractionRoles]:
    """(source of `generated_kernel`, roles of the indices for the tile)."""
    form, out = _form_in(bound, tile), operands[""]
    signature = _signature(bound, operands, form, out.dtype, tile)
    thrice = form.within is not None and options.precision == "tf32x3" and _computes_fp32(signature)
    finish = options.finish
    signature = replace(
        signature,
        splits=options.splits > 1,
        split_float32=thrice,
        parts=finish.weight_parts,
        in_tf32=finish.in_tf32,
        activation=finish.activation,
        eps=finish.eps,
    )
    return _emitted(bound.statement, form, signature), form


def _form_in(bound: BoundStatement, tile: Tile) -> ContractionRoles:
    """Roles of the indices for this tile. Raises OptionError if the statement does not allow it."""
    form = _form(bound)
    if tile.packed and (form := _packed_form(bound)) is None:
        raise OptionError(f"tile {tile}: the entries of a segment of {bound.statement} cannot be packed")
    if tile.stacked and (form := stacked(form, bound.statement)) is None:
        raise OptionError(f"tile {tile}: the segments of {bound.statement} cannot be stacked in one matrix product")
    if tile.swapped and not form.product:
        raise OptionError(f"tile {tile}: {bound.statement} is not a matrix product, sides cannot be swapped")
    if tile.swapped and form.folds:
        raise OptionError(f"tile {tile}: {bound.statement} sums the columns of the tile, sides cannot be swapped")
    if tile.stream_k_chunk and torch.version.hip:
        raise OptionError(f"tile {tile}: not on AMD, where a program cannot know that its stores are visible")
    return exchanged(form) if tile.swapped else form


def can_share_segments(bound: BoundStatement, tile: Tile) -> bool:
    """True if programs with this tile may share segments (Tile.stream_k_chunk)."""
    form = _form_in(bound, tile)
    return form.segment is not None and not form.laned and not form.stacked and not torch.version.hip


@lru_cache(maxsize=1024)
def _emitted(statement: Statement, form: ContractionRoles, signature: Signature) -> Source:
    return emit(statement, form, signature)


@lru_cache(maxsize=1024)
def loaded(source: Source) -> TritonKernel:
    """The Triton kernel of a source."""
    code = digest(source.text)
    name = f"pumice_kernel_{code[:24]}"
    sizes = ("size", "zero", "extent")
    parameters = [
        Parameter(a.variable, a.kind == "constant", a.kind not in sizes or place in source.specialised)
        for place, a in enumerate(source.arguments)
    ]
    return TritonKernel((name, f"<{name}>", source.name), source.text, code, parameters)


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
    """The arguments of a launch, tensors included."""
    values, generated, own = launch.values.copy(), launch.generated, None
    if any([kind in WORKSPACE for _, kind, _ in generated.slots]):
        own = workspace(launch.programs, generated.workspace_bytes(launch.programs), out.device)
    for place, kind, name in generated.slots:
        if kind == "segment":
            values[place] = getattr(part, name)
        elif own is not None and kind in WORKSPACE:
            values[place] = own.counters if kind == "waiting" else own.scratch.view(generated.partial_dtype)
        else:
            values[place] = out if kind == "result" else operands[name]
    return values


def _start(launch: SizedLaunch, values: list[Any], device: int) -> None:
    """Launch. The first launch of a variant on a device goes through Triton, which compiles it."""
    generated = launch.generated
    addresses = [(place, values[place].data_ptr()) for place, _, _ in generated.slots]
    key = (device, launch.variant, *[address % 16 == 0 for _, address in addresses])
    compiled = generated.compiled.get(key)
    if compiled is not None:
        bare = values.copy()
        for place, address in addresses:
            bare[place] = address
        # `values` keeps the tensors alive until the launch: their memory could go to another thread.
        compiled(launch.programs, bare, device)
        return
    made = generated.kernel[(launch.programs,)](*values, **generated.triton_options)
    if made is not None:
        generated.compiled[key] = CompiledKernel(made)


def _signature(
    bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles, dtype: torch.dtype, tile: Tile
) -> Signature:
    names = {*_used(bound), *EPILOGUE, ""}
    used = {name: tensor for name, tensor in operands.items() if name in names}
    fixed = _static(bound, form)
    unit = frozenset((name, axis) for name, t in used.items() for axis, s in enumerate(t.stride()) if s == 1)
    extents = bound.extents
    # Specialise on axes divisible by the tile if the extent is static or masks contiguous loads; never for leading
    # indices, which vary between launches.
    settled = {*fixed, *contiguous(bound.statement, unit)} - {*leading_indices(bound)}
    own = form.segment.index if form.segment else None
    # Stacks differ in their number of entries.
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
        int64_operands=frozenset(name for name, t in used.items() if _reach(t) >= INT32_LIMIT),
        int64_expressions=_far(bound, operands, form),
        static=tuple(sorted(fixed.items())),
        starts=tuple((name, r.start) for name, r in sorted(bound.ranges.items()) if r.start),
        strides=_strides(used) if form.packed else (),
        even=even,
        single_iteration=_whole(form, extents, tile, settled),
        segment_threads=tile.segment_threads,
        slow_axis="" if not tile.column_major_grid else "Y" if tile.swapped else "X",
        accumulate=BEFORE in operands,
        prefetch_indices=tile.prefetch_indices,
        stream_k=tile.stream_k_chunk > 0,
        epilogue_subtiles=tile.epilogue_subtiles,
        hoisted=tile.hoisted,
        padded=tile.padded,
        lazy=tile.lazy,
    )


def _strides(used: Mapping[str, Tensor]) -> tuple[tuple[str, int, int], ...]:
    """Compile-time (operand, axis, stride) of values: strides up to _STRIDES."""
    values = [(name, t) for name, t in sorted(used.items()) if name not in ("", *EPILOGUE) and _is_value(t.dtype)]
    return tuple((name, axis, s) for name, t in values for axis, s in enumerate(t.stride()) if 1 < s <= _STRIDES)


def _computes_fp32(signature: Signature) -> bool:
    kinds = {kind for name, kind in signature.dtypes if name}
    return "fp32" in kinds and "fp64" not in kinds


def _whole(form: ContractionRoles, extents: Mapping[str, int], tile: Tile, settled: set[str]) -> bool:
    """True if one tile covers the reduction of a nested product, which would be reloaded in each iteration."""
    known = form.within is not None and settled.issuperset(form.reduced)
    return known and math.prod(extents[n] for n in form.reduced) <= tile.reduced


def _static(bound: BoundStatement, form: ContractionRoles) -> dict[str, int]:
    """Compile-time extents: short ones of reductions and columns, but not of leading indices (entries, samples)."""
    extents, leading = bound.extents, leading_indices(bound)
    names = (*form.reduced, *form.columns, *form.loops)
    found = {n: extents[n] for n in names if n in extents and extents[n] <= _STATIC and n not in leading}
    if form.within is None:
        return found
    # With a nested product, few rows are static, too.
    few = [n for n in form.rows if extents[n] <= _FEW]
    return found | {n: extents[n] for n in (form.within.shared, *form.within.summed, *few)}


def _size_key(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> SizeKey:
    leading = [bound.extents[name] for name in leading_indices(bound)]
    if form.segment is None:
        return size_key(0, 0, leading)
    return size_key(max(_count(bound, operands), 1), operands[form.segment.array].shape[0], leading)


def splits_at(bound: BoundStatement, key: SizeKey | None) -> int:
    """Split-K factor at the sizes of a key, default: the statement's."""
    key = key or size_key(0, 0, [bound.extents[name] for name in leading_indices(bound)])
    return tiles.splits(_form(bound), _extents_at(bound, key))


def _problem(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> Problem:
    """Input of the tile heuristics."""
    return _problem_at(_sizeless(bound, operands, form), bound, _size_key(bound, operands, form))


def _sizeless(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> Problem:
    """The problem but for what depends on a size key."""
    chained = _is_chained(bound, form)
    kinds = {t.dtype for name in _used(bound) if _is_value((t := operands[name]).dtype)}
    bits, stacks, mixed = _bits(kinds), _can_stack(bound, kinds), len(kinds) > 1
    packs, waits = _packed_form(bound), torch.version.hip is None
    longest = _longest(bound, operands, form)
    across = _runs_along(bound, operands, form.left, form.reduced)
    across &= _runs_along(bound, operands, form.right, form.columns)
    return Problem(form, bound.extents, 1.0, bits, chained, stacks, 1, packs, waits, longest, mixed, across)


def _problem_at(problem: Problem, bound: BoundStatement, key: SizeKey) -> Problem:
    """The problem at the sizes of a key."""
    (segments, mean, _), longest = key, problem.longest
    mean = min(mean, longest) if mean < 2 * longest else mean
    return problem._replace(extents=_extents_at(bound, key), mean=mean, segments=max(segments, 1))


def _runs_along(
    bound: BoundStatement, operands: Mapping[str, Tensor], places: Sequence[int], names: Sequence[str]
) -> bool:
    """True if the factor at the only place is contiguous along one of these indices."""
    factors = bound.statement.terms[0].factors
    access = factors[places[0]] if len(places) == 1 else None
    if not isinstance(access, Access):
        return False
    strides = operands[access.name].stride()
    return any(stride == 1 and e.bare in names for e, stride in zip(access.indices, strides, strict=True))


def _is_chained(bound: BoundStatement, form: ContractionRoles) -> bool:
    """True if index arrays have indices that a program loops over: loads use loaded indices."""
    turning = {*form.loops, *form.reduced}
    return any(turning & set(indices_of(array)) for array in arrays_of(*bound.statement.terms))


def _longest(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> int:
    """Upper bound of a segment's entries: the extent of an axis indexed by an array over entries (kernel offsets)."""
    entry = set() if form.segment is None else {form.segment.position}
    places = [
        operands[access.name].shape[axis]
        for access in accesses_of(*bound.statement.terms)
        for axis, index in enumerate(access.indices)
        if index.bare is None and any({*indices_of(array)} == entry for array in index.arrays)
    ]
    return min([tiles.LONGEST, *places])


def _extents_at(bound: BoundStatement, key: SizeKey) -> dict[str, int]:
    """The extents of a statement, with the key's size classes for leading indices."""
    return {**bound.extents, **dict(zip(leading_indices(bound), key[2], strict=True))}


def _can_stack(bound: BoundStatement, kinds: Set[torch.dtype]) -> bool:
    """True if segments may be stacked: all values have one half precision, which tensor cores multiply exactly. kinds:
    of the values."""
    halves = kinds in ({torch.float16}, {torch.bfloat16})
    return halves and stacked(_form(bound), bound.statement) is not None


def _key(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    precision: str,
    key: SizeKey | None = None,
    on: torch.device | None = None,
) -> Key:
    used = [operands[name] for name in _used(bound)]
    on = on or used[0].device
    device = torch.cuda.get_device_name(on) if on.type == "cuda" else on.type
    key = key or _size_key(bound, operands, _form(bound))
    extents = [*_extents_at(bound, key).values()]
    if _form(bound).segment:
        extents.append(key[0])
    sizes = (int(2 * math.log2(max(1, extent))) for extent in extents)
    kinds = tuple(DTYPES[t.dtype] for t in used)
    return Key(device, _text(bound), kinds, tuple(sizes), precision if "fp32" in kinds else "")


def _far(bound: BoundStatement, operands: Mapping[str, Tensor], form: ContractionRoles) -> frozenset[Affine]:
    """The index expressions whose values may need 64 bits. Raises OptionError for those that may need more."""
    shapes = {name: x.shape for name, x in operands.items()}
    found = reaches(bound, form.target, shapes, tops_of(operands))
    if beyond := [expression for expression, (_, high) in found.items() if high >= FARTHEST]:
        raise OptionError(f"the index {beyond[0]} needs more than 64 bits")
    return frozenset(
        expression for expression, (low, high) in found.items() if low < -INT32_LIMIT or high >= INT32_LIMIT
    )


def _wide(bound: BoundStatement, operands: Mapping[str, Tensor], out: Tensor) -> tuple[Any, ...]:
    """Part of a kernel's cache key: dtype of the result, expressions and tensors that need 64 bits."""
    return (
        out.dtype,
        _far(bound, operands, _form(bound)),
        *[name for name, t in (*operands.items(), ("", out)) if _reach(t) >= INT32_LIMIT],
    )


def _reach(tensor: Tensor) -> int:
    """Offset of the last element in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)


def _writes_every_entry(bound: BoundStatement, form: ContractionRoles) -> bool:
    """True if every entry of the target is written: each axis is covered by indices of its own."""
    names = [name for expression in form.target.indices for name in indices_of(expression)]
    if len(set(names)) < len(names):
        return False
    onto = {name for name, fact in bound.statement.facts if fact == "onto"}
    return all(
        _takes_every_value(expression, extent, bound, form, onto)
        for extent, expression in zip(bound.shape, form.target.indices, strict=True)
    )


def _takes_every_value(
    expression: Affine, extent: int, bound: BoundStatement, form: ContractionRoles, onto: set[str]
) -> bool:
    """True if an expression takes every value of an axis: mixed-radix digits without gaps, or all of an onto array."""
    own = form.segment.index if form.segment else None
    if expression.arrays:
        ((coefficient, atom), *rest) = expression.terms
        whole = coefficient == 1 and not rest and not expression.constant
        if not whole or not isinstance(atom, Access) or atom.name not in onto:
            return False
        # The whole array is read.
        bare = {e.bare for e in atom.indices}
        read = bare - {own}
        return len(bare) == len(atom.indices) and all(name and not bound.ranges[name].start for name in read)
    reach = 1
    for coefficient, atom in sorted(expression.terms, key=lambda term: term[0]):
        assert isinstance(atom, Index)
        if coefficient != reach or expression.constant:
            return False
        if atom.name == own:
            # The number of segments follows from the extent.
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
    return segment_rule(form, tile).find(operands[form.segment.array], _count(bound, operands))


def _count(bound: BoundStatement, operands: Mapping[str, Tensor]) -> int:
    """The number of segments, including empty ones."""
    name, axis, coefficient = _counted(bound)
    extent = operands[name].shape[axis] if name else bound.shape[axis]
    return -(-int(extent) // coefficient)


@_cached_per_statement
def _counted(bound: BoundStatement) -> tuple[str, int, int]:
    """(operand, axis, coefficient) that determine the number of segments; operand "" is the result."""
    return segment_axis(_form(bound))


def _bits(kinds: Set[torch.dtype]) -> int:
    return max(kind.itemsize * 8 for kind in kinds)


def _is_value(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind in EIGHT_BITS


def float32_precision() -> str:
    """Precision of float32 products according to torch's setting (the older or the newer one).

    "highest" (or "ieee") is three tf32 products on NVIDIA's tensor cores (relative error 1e-6), and exact on AMD.
    """
    # torch.backends.cuda.matmul.fp32_precision, without 0.8 us of Python.
    if torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32":
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"


def default_precision(bound: BoundStatement) -> str:
    """`float32_precision` of a statement. A product that is added to its result, as a weight gradient, with 64 or more
    rows and columns is faster as six products of bfloat16 than as three of tf32 (see tile._tile_of_wide_sums)."""
    setting, form = float32_precision(), _form(bound)
    if setting != "tf32x3" or not form.atomic or form.folds or form.within or not _is_chained(bound, form):
        return setting
    # A segment index has no extent.
    sides = (math.prod(bound.extents.get(name, 1) for name in names) for names in (form.rows, form.columns))
    return "bf16x6" if min(sides) >= 64 else setting


def measured(call: Callable[[], object], best: float = math.inf, runs: int = 10) -> float:
    """Median GPU seconds of `runs` calls with a cold cache; stops early if far slower than `best`."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times, nap = list[float](), _TIMING_SLEEP_CYCLES
    for number in range(runs + 2):
        flush.zero_()
        # The GPU sleeps while the host enqueues the call, so that launch overhead is not timed.
        torch.cuda._sleep(nap)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        call()
        if number == 1:
            nap = max(nap, int(2 * _CYCLES_PER_SECOND * (time.perf_counter() - begin)))
        stop.record()
        stop.synchronize()
        times.append(1e-3 * start.elapsed_time(stop))
        if len(times) == 3 and times[-1] > 3 * best:
            return times[-1]
    return sorted(times[2:])[runs // 2]


_CYCLES_PER_SECOND = 2e9  # Of a GPU, at most
_TIMING_SLEEP_CYCLES = 400_000
"""GPU clock cycles, about 0.2 ms; more for a call of many kernels."""

_RUNNERS: BoundedCache[KernelExecutor] = BoundedCache(4096)
