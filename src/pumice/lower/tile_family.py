"""Generated kernels for any row count, and their families: one kernel per tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pumice.coords.segments import WHOLE
from pumice.language.bind import BoundStatement, bare_places, leading_indices
from pumice.language.contraction import ContractionRoles, segment_axis
from pumice.language.nodes import accesses_of
from pumice.lower.emit import SPLITS, STACKS, Argument, Source, depth_of_entry, grid_of
from pumice.lower.epilogue import NO_EPILOGUE, EpilogueSignature
from pumice.lower.segments import SegmentRule, Segments
from pumice.runtime.compile import BACKGROUND, TritonKernel
from pumice.runtime.launch import CompiledKernel, on_device
from pumice.schedule.tile import WHOLE_SEGMENTS, Problem, Tile, mean_class, segment_class, size_class

INT32_LIMIT = 1 << 31
"""Sizes and offsets from which on addressing needs 64 bits."""
WORKSPACE = ("room", "waiting")
"""Kinds of arguments that are the workspace of a launch: partial sums, and counters of finished programs."""
_TENSORS = ("operand", "before", "result", "segment", *WORKSPACE)
"""Kinds of arguments that are tensors."""
_Product = tuple[int, tuple[int, ...], int]
"""(factor, positions among a call's sizes, divisor): ceil(factor * product of these sizes / divisor)."""


@lru_cache(maxsize=256)
def segment_rule(roles: ContractionRoles, tile: Tile) -> SegmentRule:
    """How programs with this tile take segments. roles: of the statement."""
    return SegmentRule(_chunk(tile), tile.rows if tile.stacked else 0, bool(roles.laned))


def _chunk(tile: Tile) -> int:
    return WHOLE if tile.stream_k_chunk == WHOLE_SEGMENTS else tile.stream_k_chunk


@dataclass(frozen=True)
class KernelOptions:
    """Options of a kernel: float32 precision, number of split-K programs, epilogue."""

    precision: str = "ieee"
    splits: int = 1
    finish: EpilogueSignature = NO_EPILOGUE


class SizedLaunch(NamedTuple):
    """A generated kernel for one call. values: its arguments, None for tensors; variant: of GeneratedKernel.variant."""

    generated: GeneratedKernel
    programs: int
    values: list[Any]
    variant: tuple[int, ...]


class GeneratedKernel:
    """A generated kernel for operands of fixed dtypes, strides and trailing shapes; row counts vary per call.

    sizes of a call: (number of segments, rows of each of `names`). names: operands, then "" for the result and BEFORE
    for the old result to add to. segmented: the index array whose segments are assigned to programs, or None. slots:
    (position, kind, name) of tensor arguments. partial_dtype: of partial sums. compiled: Triton's binaries by device,
    variant and 16-byte alignment of each tensor.
    """

    kernel: TritonKernel
    source: Source
    tile: Tile
    options: KernelOptions
    form: ContractionRoles
    partial_dtype: torch.dtype
    slots: tuple[tuple[int, str, str], ...]

    def __init__(
        self,
        kernel: TritonKernel,
        source: Source,
        tile: Tile,
        options: KernelOptions,
        roles: tuple[ContractionRoles, ContractionRoles],
        call: tuple[BoundStatement, Mapping[str, Tensor], Sequence[str]],
    ) -> None:
        """roles: (of the statement, as changed by the tile). call: an example: (statement, operands, names)."""
        self.kernel, self.source, self.tile, self.options = kernel, source, tile, options
        (own, self.form), (self._bound, operands, names) = roles, call
        self.names: tuple[str, ...] = tuple(names)
        # Layouts alone: no memory.
        self._like = {n: without_memory(operands[n]) for n in names}
        self.segmented: str | None = None if own.segment is None else own.segment.array
        self.segment_rule: SegmentRule = segment_rule(own, tile)
        self.partial_dtype = torch.float64 if torch.float64 in {t.dtype for t in operands.values()} else torch.float32
        self.slots = tuple((n, a.kind, a.name) for n, a in enumerate(source.arguments) if a.kind in _TENSORS)
        self.compiled: dict[tuple[Any, ...], CompiledKernel] = {}
        self._lock = Lock()
        self._axes = _axes(self._bound)
        self._segments = None if own.segment is None else self._segment_count(*segment_axis(own))
        self._set_arguments()
        # Binaries for aligned tensors by (device, size key); `only`: by device, if one serves all int32 sizes.
        self._aligned: dict[tuple[int, ...], CompiledKernel] = {}
        self.only: dict[int, CompiledKernel] = {}

    def _set_arguments(self) -> None:
        """Split arguments and program count into constants and factors that depend on a call's sizes."""
        arguments = self.source.arguments
        constants = self._constants(self._bound.extents)
        self._values = [_fixed(a, self._like, constants) for a in arguments]
        self._sizes = [n for n, a in enumerate(arguments) if a.kind in ("extent", "size")]
        self._dynamic: list[tuple[int, int]] = []
        for place in self._sizes:
            given = arguments[place]
            number, sizes, _ = (
                self._extent(given.name) if given.kind == "extent" else self._size(given.name, given.axis)
            )
            self._values[place] = number
            self._dynamic += [(place, size) for size in sizes]
        blocks = [n for n, a in enumerate(arguments) if a.variable == "BLOCKS"]
        form, tile = self.form, self.tile
        tiled = (form.reduced, tile.reduced) if form.product else (form.columns, tile.columns)
        self._blocks = (blocks[0], self._product(*tiled)) if blocks else None
        if self._blocks is not None and not self._blocks[1][1]:
            # Blocks of static axes are the same in all calls.
            self._values[self._blocks[0]], self._blocks = _value(self._blocks[1], ()), None
        moving = {place for place, _ in self._dynamic}
        # Below INT32_LIMIT only these distinguish variants.
        self._specialised = [place for place in self.source.specialised if place in moving]
        factors = [self._product(*of) for of in grid_of(form, (tile.rows, tile.columns), tile.segment_threads)]
        self._programs = math.prod(_value(factor, ()) for factor in factors if not factor[1])
        self._grid = [factor for factor in factors if factor[1]]

    def for_tile(self, tile: Tile) -> GeneratedKernel:
        """A copy for a tile with the same generated code; shares the binaries."""
        other = copy(self)
        other.tile, other.segment_rule = tile, self.segment_rule._replace(chunk=_chunk(tile))
        return other

    @property
    def triton_options(self) -> dict[str, int]:
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages}

    @property
    def is_compiled(self) -> bool:
        """True if there is a binary for aligned tensors."""
        return bool(self._aligned)

    def workspace_bytes(self, programs: int) -> int:
        """Bytes of the partial sums of that many programs."""
        if self.tile.stream_k_chunk == WHOLE_SEGMENTS:
            return 0
        return programs * self.tile.rows * self.tile.columns * self.partial_dtype.itemsize

    def segment_count(self, rows: Sequence[int]) -> int:
        """The number of segments of a call, empty ones included. rows: of its operands."""
        assert self._segments is not None
        return _value(self._segments, (0, *rows))

    def programs(self, sizes: Sequence[int]) -> int:
        """The number of programs of a call."""
        found = self._programs
        # As _value, without a call.
        for number, places, divisor in self._grid:
            for place in places:
                number *= sizes[place]  # noqa: PLW2901
            found *= -(-number // divisor)
        return found

    def arguments(self, sizes: Sequence[int]) -> list[Any]:
        """The arguments of a call, without addresses."""
        values = self._values.copy()
        for place, size in self._dynamic:
            values[place] = sizes[size]
        if self._blocks is not None:
            place, blocks = self._blocks
            values[place] = _value(blocks, sizes)
        return values

    def sized(self, given: Mapping[str, Tensor], part: Segments | None) -> SizedLaunch:
        """The launch on these operands; key "" is the result."""
        rows = [x.shape[0] if x.ndim else 1 for x in map(given.__getitem__, self.names)]
        sizes = (0 if part is None else part.rows.shape[0], *rows)
        values = self.arguments(sizes)
        return SizedLaunch(self, self.programs(sizes), values, self.variant(values))

    def variant(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Triton's specialisation key of these arguments: which sizes need 64 bits; which sizes in masks of contiguous
        elements are divisible by 16, and which are 1; a constexpr BLOCKS that depends on sizes."""
        key = [values[place] >= INT32_LIMIT for place in self._sizes]
        for place in self.source.specialised:
            key += (values[place] % 16 == 0, values[place] == 1)
        return (*key, values[self._blocks[0]]) if self._blocks else tuple(key)

    def compile(self, rows: Sequence[int], device: torch.device) -> None:
        """Compile for calls with so many rows of aligned operands. Raises OutOfResources (of Triton) where the tile
        does not fit."""
        sizes = 0, *rows
        self.binary(self.arguments(sizes), sizes, device)

    def binary(self, values: Sequence[Any], sizes: Sequence[int], device: torch.device) -> CompiledKernel | None:
        """The binary for these arguments of aligned tensors, which is compiled if there is none; None if Triton
        interprets kernels."""
        small = self._blocks is None and max(sizes) < INT32_LIMIT
        if small:
            key = tuple([2 if values[place] == 1 else values[place] % 16 == 0 for place in self._specialised])
        else:
            key = self.variant(values)
        key = device.index or 0, *key
        found = self._aligned.get(key)
        if found is None and (found := self._compiled(values, device)) is not None:
            self._aligned[key] = found
            if small and not self._specialised:
                self.only[device.index or 0] = found
        return found

    def _compiled(self, values: Sequence[Any], device: torch.device) -> CompiledKernel | None:
        key = (device.index or 0, self.variant(values), *[True] * len(self.slots))
        with self._lock:
            found = self.compiled.get(key)
            if found is not None:
                # Another thread has compiled it, or it was launched before.
                return found
            given = list(values)
            for place, kind, name in self.slots:
                own = name if kind == "operand" else "" if kind == "result" else None
                given[place] = self._workspace_like(kind) if own is None else self._like[own]
            with on_device(device):
                made = self.kernel.warmup(*given, grid=(1,), **self.triton_options)
                return None if made is None else self.compiled.setdefault(key, CompiledKernel(made))

    def _workspace_like(self, kind: str) -> Tensor:
        """A tensor like those of a launch's own, without memory."""
        return torch.empty(1, dtype=self.partial_dtype if kind == "room" else torch.int32, device="meta")

    def _constants(self, extents: Mapping[str, int]) -> dict[str, Any]:
        tile, form = self.tile, self.form
        # A tile that was tuned for fewer channels must still hold one entry.
        depth = max(tile.reduced, depth_of_entry(form, extents)) if form.packed else tile.reduced
        return {
            "BY": tile.rows,
            "BX": tile.columns,
            "BR": depth,
            "PRECISION": self.options.precision,
            "STAGES": tile.stages,
        }

    def _segment_count(self, name: str, axis: int, coefficient: int) -> _Product:
        number, sizes, _ = self._size(name, axis)
        return number, sizes, coefficient

    def _product(self, names: Sequence[str], divisor: int) -> _Product:
        """The product of index extents."""
        number, sizes = 1, ()
        for name in names:
            factor, more, _ = self._extent(name)
            number, sizes = number * factor, sizes + more
        return number, sizes, divisor

    def _extent(self, name: str) -> _Product:
        """The extent of an index."""
        if name == STACKS or (self.form.segment is not None and name == self.form.segment.index):
            return 1, (0,), 1
        if name == SPLITS:
            return self.options.splits, (), 1
        axis = self._axes.get(name)
        return (self._bound.extents[name], (), 1) if axis is None else self._size(*axis)

    def _size(self, name: str, axis: int) -> _Product:
        """The size of an axis of an operand."""
        if axis:
            return self._like[name].shape[axis], (), 1
        return 1, (1 + self.names.index(name),), 1


def _value(product: _Product, sizes: Sequence[int]) -> int:
    found, places, divisor = product
    for place in places:
        found *= sizes[place]
    return -(-found // divisor)


def without_memory(x: Tensor) -> Tensor:
    """The dtype and the layout of a tensor."""
    return x if x.is_meta else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _fixed(argument: Argument, like: Mapping[str, Tensor], constants: Mapping[str, Any]) -> Any:
    """The value of an argument that is neither a tensor nor a size."""
    match argument.kind:
        case "stride":
            return like[argument.name].stride(argument.axis)
        case "zero":
            return 0
        case "constant":
            return constants.get(argument.variable)
    return None


def _axes(bound: BoundStatement) -> Mapping[str, tuple[str, int]]:
    """By index that occurs bare: (operand, axis) whose size is its extent, if possible not axis 0. "" is the result."""
    statement = bound.statement
    found = {index: (operand, axis) for index, operand, axis in bare_places(bound.like or bound) or ()}
    read = ((a.name, a.indices) for a in accesses_of(*statement.terms, *statement.target.indices))
    for operand, expressions in (*read, ("", statement.target.indices)):
        found |= {e.bare: (operand, n) for n, e in enumerate(expressions) if n and e.bare in found}
    return found


# Tiles by sizes

SizeKey = tuple[int, float, tuple[int, ...]]
"""Sizes that select a tile: (size class of the number of segments, mean entries per segment, size classes of the
leading indices). (0, 1.0, ...) without segments."""


def size_key(segments: int, entries: int, leading: Sequence[int]) -> SizeKey:
    """The size key of a call. segments: 0 for a statement without segments."""
    mean = mean_class(entries, segments) if segments else 1.0
    return segment_class(segments) if segments else 0, mean, tuple([size_class(n) for n in leading])


_cached_size_key = lru_cache(maxsize=4096)(size_key)
"""Of the calls over one map most have the same."""


def leading_axes(bound: BoundStatement, names: Sequence[str]) -> list[tuple[int, int]]:
    """By leading index: (position of an operand with that many rows, or -1; extent)."""
    found = _axes(bound)
    each = [(found.get(name, ("", 1)), bound.extents[name]) for name in leading_indices(bound)]
    return [(-1 if axis else names.index(operand), extent) for (operand, axis), extent in each]


class KernelSource(Protocol):
    """What a family takes its tiles and kernels from (lower.kernel.KernelExecutor)."""

    @property
    def bound(self) -> BoundStatement: ...

    @property
    def roles(self) -> ContractionRoles: ...

    @property
    def resizable(self) -> bool: ...

    def problem(self, like: Mapping[str, Tensor]) -> Problem: ...

    def choose(
        self, like: Mapping[str, Tensor], key: SizeKey, device: torch.device, precision: str, problem: Problem
    ) -> tuple[Tile, int] | None: ...

    def generate(self, given: Mapping[str, Tensor], tile: Tile, splits: int, precision: str) -> GeneratedKernel: ...


_OFTEN = 3
"""Calls of one size class before its own kernel is compiled: compilation slows concurrent calls."""


class TileFamily:
    """The kernels of one statement for any row counts: one for each tile that the sizes select. Trailing shapes, dtypes
    and strides are those of the first call.

    names: operands in the order of every `rows` argument; "" is the result.
    """

    device: torch.device

    def __init__(
        self,
        source: KernelSource,
        first: GeneratedKernel,
        like: Mapping[str, Tensor],
        device: torch.device,
        was_run: bool = True,
    ) -> None:
        """first: the kernel of the first call; like: its operands and its result as meta tensors; was_run: whether its
        tile is known to fit the device."""
        self._source, self._like, self.device, self._precision = source, like, device, first.options.precision
        bound, own = source.bound, source.roles
        self.names: tuple[str, ...] = tuple(like)
        self._leading, self._entries = leading_axes(bound, self.names), 0
        self._segments: tuple[int | None, int, int] | None = None
        if own.segment is not None:
            name, axis, coefficient = segment_axis(own)
            self._segments = None if axis else self.names.index(name), like[name].shape[axis], coefficient
            self._entries = self.names.index(own.segment.array)
        self._by_size: dict[SizeKey, GeneratedKernel | None] = {}
        self._by_tile = {(first.tile, first.options.splits): first}
        # Until a size key's kernel is compiled: ((tile, split-K factor) or None, number of requests).
        self._waiting: dict[SizeKey, tuple[tuple[Tile, int] | None, int]] = {}
        rows = [x.shape[0] if x.ndim else 1 for x in like.values()]
        self._only = None if source.resizable else rows
        if was_run:
            self._by_size[self.key(rows)] = first

    def key(self, rows: Sequence[int]) -> SizeKey:
        """The size key of a call with so many rows."""
        leading = tuple([rows[place] if place >= 0 else extent for place, extent in self._leading])
        if self._segments is None:
            return _cached_size_key(0, 0, leading)
        place, count, coefficient = self._segments
        segments = -(-(count if place is None else rows[place]) // coefficient)
        return _cached_size_key(max(segments, 1), rows[self._entries], leading)

    def at(self, rows: list[int], waits: bool = False) -> GeneratedKernel | None:
        """The compiled kernel for these row counts; None if the planner must run the call: its tile has to be tuned
        first, or the result is accumulated for some sizes only.

        On a GPU, another compiled kernel of the family, if any, replaces a missing one, which is compiled in the
        background after _OFTEN calls; not if the caller `waits` or deterministic algorithms are on."""
        if self._only not in (None, rows):
            return None
        key = self.key(rows)
        found = self._by_size.get(key)
        if found is not None and not waits:
            return found
        if key not in self._by_size:
            # Choosing a tile costs several launches: cached while the kernel compiles, which takes seconds.
            known = self._waiting.get(key)
            chosen, asked = known or (self._chosen(key), 0)
            other = None if chosen is None or waits else self._instead_of(chosen)
            if other is not None:
                self._waiting[key] = chosen, asked + 1
                if asked + 1 == _OFTEN:
                    BACKGROUND.submit(partial(self.at, rows, True))
                return other
            self._by_size[key] = None if chosen is None else self._fitting(*chosen, rows)
        found = self._by_size[key]
        if waits and found is not None:
            found.compile(rows, self.device)
        return found

    def _instead_of(self, chosen: tuple[Tile, int]) -> GeneratedKernel | None:
        """A compiled kernel to use until the chosen one is; None if that is compiled, or must be waited for."""
        if self.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
            return None
        (tile, splits), other = chosen, None
        for (known, parts), one in [*self._by_tile.items()]:
            if one.is_compiled:
                if parts == splits and known.has_code_of(tile):
                    return None
                other = other or one
        return other

    def is_compiled(self, rows: Sequence[int]) -> bool:
        """True if nothing needs to be compiled for these numbers of rows, or the planner must run the call."""
        key = self.key(rows)
        known = self._by_size.get(key)
        return self._only not in (None, rows) or (key in self._by_size if known is None else known.is_compiled)

    def _fitting(self, tile: Tile, splits: int, rows: Sequence[int]) -> GeneratedKernel:
        """The compiled kernel with this tile, or with the next smaller one that fits the device."""
        while True:
            kernel = self._by_tile.get((tile, splits))
            if kernel is None:
                kernel = self._by_tile[tile, splits] = self._generated(tile, splits)
            try:
                kernel.compile(rows, self.device)
                return kernel
            except Exception as problem:
                smaller = tile.smaller()
                if smaller is None or type(problem).__name__ != "OutOfResources":
                    raise
                tile = smaller

    def _chosen(self, key: SizeKey) -> tuple[Tile, int] | None:
        return self._source.choose(self._like, key, self.device, self._precision, self._problem)

    @cached_property
    def _problem(self) -> Problem:
        """What all sizes share: most of the time of choosing a tile."""
        return self._source.problem(self._like)

    def _generated(self, tile: Tile, splits: int) -> GeneratedKernel:
        """The kernel for a tile. Reuses equal code of another tile: generating takes milliseconds."""
        for (known, parts), kernel in [*self._by_tile.items()]:
            if parts == splits and known.has_code_of(tile):
                return kernel.for_tile(tile)
        return self._source.generate(self._like, tile, splits, self._precision)
