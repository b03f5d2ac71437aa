"""Kernels started again with other operands: what may change from call to call is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement, bare_places, leading_indices
from pumice.language.contraction import ContractionRoles, segment_axis
from pumice.language.nodes import accesses_of
from pumice.lower.emit import SPLITS, STACKS, grid_of
from pumice.lower.segments import Segments, pieces, segments, stacks
from pumice.runtime.cache import PERSISTENT
from pumice.runtime.compile import BACKGROUND
from pumice.runtime.launch import CompiledKernel
from pumice.runtime.streams import is_capturing
from pumice.runtime.workspace import Workspace, workspace
from pumice.schedule.tile import Tile, mean_class, size_class

FAR = 1 << 31
"""Distances of rows, which lead, from which on addresses need 64 bits."""
SCRATCH = ("room", "waiting")
"""Arguments that every launch has of its own."""
_WINDOW = 512
"""Rows that are sorted by length among themselves, where each gathers on its own."""

Known = dict[Any, "Cut"]
"""Segments of arrays that calls hold: what `Mould.cut` has found for others."""
_Factor = tuple[int, tuple[int, ...], int]
"""A number, the places of sizes that it is multiplied with, and what the product is divided by, rounded up."""


def segments_of(array: Tensor, count: int, form: ContractionRoles, tile: Tile) -> Segments:
    """The segments of a sorted array of the values 0 to count - 1, as programs with this tile take them."""
    if tile.stream_k_chunk:
        return pieces(array, count, tile.stream_k_chunk)
    return stacks(array, count, tile.rows) if tile.stacked else segments(array, count, _WINDOW if form.laned else 0)


class Cut:
    """Segments with how many they are and the addresses of their arrays, by name. part: what holds these; apart: True
    if some are among `outliers`, which take a second kernel."""

    __slots__ = ("addresses", "apart", "count", "part")

    def __init__(self, part: Any, count: int, addresses: Mapping[str, int], apart: bool = False) -> None:
        self.part, self.count, self.addresses, self.apart = part, count, addresses, apart

    @staticmethod
    def of(part: Segments) -> Cut:
        addresses = {name: x.data_ptr() for name in _ARRAYS if (x := getattr(part, name)) is not None}
        return Cut(part, part.rows.shape[0], addresses, part.outliers is not None)


class Ways(NamedTuple):
    """What segments depend on beside their array and how many there are: see Tile; laned: whether each lane gathers on
    its own."""

    chunk: int
    stacked: int
    laned: bool


_ARRAYS = ("rows", "starts", "stops", "ends", "firsts", "pieces")


class Slots:
    """Where tensors belong among the arguments of a kernel that holds some of them.

    held, free: (place, name) of operands; segment: the same of the arrays of segments; result: its place; scratch:
    those of counters and of room, where it takes them.
    """

    __slots__ = ("free", "held", "result", "scratch", "segment")

    def __init__(self, slots: Sequence[tuple[int, str, str]], held: Collection[str]) -> None:
        own = {kind: place for place, kind, _ in slots}
        self.result = own["result"]
        self.scratch = (own["waiting"], own["room"]) if "waiting" in own else None
        self.segment = tuple((place, name) for place, kind, name in slots if kind == "segment")
        operands = [(place, name) for place, kind, name in slots if kind not in _OTHERS]
        self.held = tuple((place, name) for place, name in operands if name in held)
        self.free = tuple((place, name) for place, name in operands if name not in held)


_OTHERS = ("result", "segment", *SCRATCH)


SizeKey = tuple[int, float, tuple[int, ...]]
"""What a tile depends on beside shapes and dtypes: size class of the number of segments, entries of a segment on
average, size classes of the leading indices. (0, 1.0, ...) without segments."""


def size_key(segments: int, entries: int, leading: Sequence[int]) -> SizeKey:
    """The size key of a call. segments: 0 for a statement without segments."""
    mean = mean_class(entries, segments) if segments else 1.0
    return size_class(segments) if segments else 0, mean, tuple([size_class(n) for n in leading])


_cached_size_key = lru_cache(maxsize=4096)(size_key)


class Kernels(Protocol):
    """What a family takes its tiles and kernels from (lower.kernel.KernelExecutor)."""

    @property
    def bound(self) -> BoundStatement: ...

    @property
    def roles(self) -> ContractionRoles: ...

    @property
    def resizable(self) -> bool: ...

    def choose(
        self, like: Mapping[str, Tensor], key: SizeKey, device: torch.device, precision: str
    ) -> tuple[Tile, int] | None: ...

    def generate(self, given: Mapping[str, Tensor], tile: Tile, splits: int, precision: str) -> Any: ...


class Holder(Protocol):
    """The arrays of a map that calls hold (lower.direct.Held)."""

    @property
    def cuts(self) -> Known: ...

    @property
    def arrays(self) -> Sequence[Tensor]: ...

    def pieces(self, number: int, ways: Ways) -> Cut | None: ...


class TileFamily:
    """The kernels of one statement for operands with any number of rows: one for each tile that the sizes choose. Other
    axes, dtypes and strides are those of the first call.

    names: the operands in the order in which numbers of rows are given; "" is the result.
    """

    def __init__(
        self, kernels: Kernels, emitted: Any, like: Mapping[str, Tensor], device: torch.device, was_run: bool = True
    ) -> None:
        """emitted: the kernel of the first call; like: its operands and its result as meta tensors; was_run: whether
        its tile is known to fit the device.

        On a GPU, kernels for other sizes are compiled in the background from the first call on.
        """
        self._kernels, self._like, self._device, self._precision = kernels, like, device, emitted.options.precision
        bound = kernels.bound
        self.names = tuple(like)
        self._leading, own = leading_places(bound, self.names), kernels.roles
        self._own, self._entries = own, 0
        self._counted: tuple[int | None, int, int] | None = None
        if own.segment is not None:
            name, axis, coefficient = segment_axis(own)
            place = None if axis else self.names.index(name)
            self._counted = place, like[name].shape[axis], coefficient
            self._entries = self.names.index(own.segment.array)
        self._moulds: dict[SizeKey, Mould | None] = {}
        self._by_tile: dict[tuple[Tile, int], Mould] = {}
        self._pending: set[SizeKey] = set()
        rows = [x.shape[0] if x.ndim else 1 for x in like.values()]
        self._only = None if kernels.resizable else rows
        first = self._made((emitted.tile, emitted.options.splits), emitted)
        if was_run:
            self._moulds[self.key(rows)] = first
        self._to_come: list[list[int]] = []
        if device.type == "cuda" and self._only is None:
            moving = dynamic_rows(bound, self.names)
            self._to_come = [
                [max(1, int(factor * n)) if moves else n for n, moves in zip(rows, moving, strict=True)]
                for factor in _AHEAD
            ]

    def key(self, rows: Sequence[int]) -> SizeKey:
        """The size key of a call with so many rows."""
        leading = tuple([rows[place] if place >= 0 else extent for place, extent in self._leading])
        if self._counted is None:
            return _cached_size_key(0, 0, leading)
        place, count, coefficient = self._counted
        segments = -(-(count if place is None else rows[place]) // coefficient)
        return _cached_size_key(max(segments, 1), rows[self._entries], leading)

    def at(self, rows: list[int], waits: bool = False) -> Mould | None:
        """The compiled kernel for these numbers of rows; None if the planner must run the call, as it does where a tile
        is to be tuned first or where the result is accumulated for some sizes only.

        Unless the caller waits, or algorithms are to be deterministic, a kernel that is not compiled yet is compiled in
        the background on a GPU; until it is there, another one of this family serves."""
        if self._only not in (None, rows):
            return None
        if not waits:
            others, self._to_come = self._to_come, []
            for there in others:
                BACKGROUND.submit(partial(self.at, there, True))
        key = self.key(rows)
        if key not in self._moulds:
            chosen = self._kernels.choose(self._like, key, self._device, self._precision)
            other = None if chosen is None or waits else self._instead_of(chosen)
            if other is not None:
                if key not in self._pending:
                    self._pending.add(key)
                    BACKGROUND.submit(partial(self.at, rows, True))
                return other
            self._moulds[key] = None if chosen is None else self._fitting(*chosen, rows)
        found = self._moulds[key]
        if waits and found is not None:
            found.compile(rows)
        return found

    def _instead_of(self, chosen: tuple[Tile, int]) -> Mould | None:
        """A compiled kernel to use until the chosen one is compiled; None where that one is, or is to be waited for."""
        own = self._by_tile.get(chosen)
        if self._device.type != "cuda" or torch.are_deterministic_algorithms_enabled() or (own and own.is_compiled):
            return None
        return next((one for one in [*self._by_tile.values()] if one.is_compiled), None)

    def is_compiled(self, rows: Sequence[int]) -> bool:
        """True if nothing needs to be compiled for these numbers of rows, or the planner must run the call."""
        key = self.key(rows)
        known = self._moulds.get(key)
        return self._only not in (None, rows) or (key in self._moulds if known is None else known.is_compiled)

    def _fitting(self, tile: Tile, splits: int, rows: Sequence[int]) -> Mould:
        """The compiled kernel with this tile, or with the next smaller one that fits the device."""
        while True:
            mould = self._by_tile.get((tile, splits)) or self._made((tile, splits))
            try:
                mould.compile(rows)
                return mould
            except Exception as problem:
                smaller = tile.smaller()
                if smaller is None or type(problem).__name__ != "OutOfResources":
                    raise
                tile = smaller

    def _made(self, chosen: tuple[Tile, int], emitted: Any = None) -> Mould:
        emitted = emitted or self._kernels.generate(self._like, *chosen, self._precision)
        made = self._by_tile[chosen] = Mould(emitted, self._own, self._kernels.bound, self._like, self._device)
        return made


_AHEAD = (4, 1 / 4, 16, 1 / 16, 64)
"""Sizes for which kernels are compiled ahead, as multiples of those of the first call: the nearest first."""


def dynamic_rows(bound: BoundStatement, names: Sequence[str]) -> list[bool]:
    """Of each operand ("" is the result) whether its number of rows varies between calls of a statement."""
    leading, statement = leading_indices(bound), bound.statement
    moving = {
        access.name
        for access in accesses_of(*statement.terms, *statement.target.indices)
        if access.indices and (access.indices[0].bare is None or access.indices[0].bare in leading)
    }
    first = statement.target.indices[0].bare if statement.target.indices else ""
    return [name in moving if name else first is None or first in leading for name in names]


def leading_places(bound: BoundStatement, names: Sequence[str]) -> list[tuple[int, int]]:
    """Of each leading index the place of an operand that has a row for each of its points, or -1 and its extent."""
    found = _places(bound)
    each = [(found.get(name, ("", 1)), bound.extents[name]) for name in leading_indices(bound)]
    return [(-1 if axis else names.index(operand), extent) for (operand, axis), extent in each]


class Mould:
    """A kernel for calls that differ in how many rows operands have, and in what they hold. Their other axes, their
    dtypes and layouts are those of the call that it is made for.

    array: the operand whose segments it takes.
    """

    def __init__(
        self,
        emitted: Any,
        own: ContractionRoles,
        bound: BoundStatement,
        like: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """bound, like: of one of these calls, and its operands without memory; own: its roles, without what the tile
        makes of them. Row counts are given in the order of `like`."""
        self._emitted, self._own, self._bound, self._like = emitted, own, bound, like
        self._shapes = {name: x.shape for name, x in like.items()}
        self.device, self.index, self.on_cuda = device, device.index or 0, device.type == "cuda"
        self._places = _places(bound)
        self._row_places = {name: n for n, name in enumerate(like)}
        self.array = None if own.segment is None else own.segment.array
        self._counted = None if own.segment is None else self._segments_in(*segment_axis(own))
        # What segments depend on beside their array and how many there are.
        stacked = emitted.tile.rows if emitted.tile.stacked else 0
        self._ways = Ways(emitted.tile.stream_k_chunk, stacked, bool(own.laned))
        self._counting = [n for n, a in enumerate(emitted.source.arguments) if a.kind in ("extent", "size")]
        self._values, self._moving = self._arguments()
        self._blocks = self._blocks_of()
        self._programs, self._grid = self._factors()
        self._compiled: dict[tuple[int, ...], CompiledKernel] = {}
        moving = {place for place, _ in self._moving}
        # Of sizes that need no 64 bits these alone tell variants apart.
        self._telling = [place for place in emitted.source.specialised if place in moving]
        # Bytes for what a program finds of a piece.
        self.room = emitted.workspace_bytes(1)

    @property
    def is_compiled(self) -> bool:
        """True if there is a binary."""
        return bool(self._compiled)

    def slots(self, held: Collection[str]) -> Slots:
        """Where tensors belong for calls that hold these operands."""
        return Slots(self._emitted.slots, held)

    def cut(self, array: Tensor | None, rows: Sequence[int]) -> Cut | None:
        """The segments of a call that holds this array; None where they are not to be had, or take a second kernel."""
        assert self._counted is not None
        found = None if array is None else self._found(array, _value(self._counted, (0, *rows)))
        return None if found is None or found.apart else found

    def cut_of(self, held: Holder, number: int, rows: Sequence[int]) -> Cut | None:
        """As `cut`, of array `number` of a map, found once; -1: none that is held."""
        assert self._counted is not None
        if number < 0:
            return None
        count = _value(self._counted, (0, *rows))
        key = number, count, self._ways
        found = held.cuts.get(key)
        if found is None:
            found = held.pieces(number, self._ways) or self._found(held.arrays[number], count)
            if found is None:
                return None
            held.cuts[key] = found
        return None if found.apart else found

    def _found(self, array: Tensor, count: int) -> Cut | None:
        # Of others than a captured network's buffers nothing can be found while a graph is captured.
        if array not in PERSISTENT and is_capturing(array.device):
            return None
        return Cut.of(segments_of(array, count, self._own, self._emitted.tile))

    def cast(self, slots: Slots, held: Sequence[int], rows: Sequence[int], cut: Cut | None) -> Aimed | None:
        """The kernel of a call that holds what lies at these addresses, which are those of slots.held.

        cut: the segments, where there is an `array`. None where there is nothing to run, Triton interprets kernels, or
        an array is not aligned to 16 bytes.
        """
        sizes, bits, programs = (0 if cut is None else cut.count, *rows), 0, self._programs
        for factor in self._grid:
            programs *= _value(factor, sizes)
        if not programs:
            return None
        values = self._sized(sizes)
        compiled = self._kernel(values, sizes)
        if compiled is None:
            return None
        for (place, _), address in zip(slots.held, held, strict=True):
            values[place] = address
            bits |= address
        if cut is not None:
            for place, name in slots.segment:
                values[place] = address = cut.addresses[name]
                bits |= address
        if bits & 15:
            return None
        return Aimed(self, slots, compiled, programs, values, None if cut is None else cut.part)

    def compile(self, rows: Sequence[int]) -> None:
        """Compile for a call with so many rows. Raises OutOfResources (of Triton) where the tile does not fit."""
        sizes = 0, *rows
        self._kernel(self._sized(sizes), sizes)

    def _sized(self, sizes: Sequence[int]) -> list[Any]:
        """The arguments with these sizes, without addresses."""
        values = self._values.copy()
        for place, which in self._moving:
            values[place] = sizes[which]
        if self._blocks is not None:
            values[self._blocks[0]] = _value(self._blocks[1], sizes)
        return values

    def _kernel(self, values: Sequence[Any], sizes: Sequence[int]) -> CompiledKernel | None:
        """What Triton makes for such sizes."""
        if self._blocks is None and max(sizes) < FAR:
            key = tuple([2 if values[place] == 1 else values[place] % 16 == 0 for place in self._telling])
        else:
            key = self._emitted.variant(values)
        found = self._compiled.get(key)
        if found is None and (found := self._emitted.compile(values, self._like, self.device)) is not None:
            self._compiled[key] = found
        return found

    def _arguments(self) -> tuple[list[Any], list[tuple[int, int]]]:
        """All arguments with what is the same for all calls, and the places of those that are sizes, with which."""
        values, moving = self._emitted.static_sizes.copy(), []
        for place in self._counting:
            told = self._emitted.source.arguments[place]
            fixed, sizes, _ = self._extent(told.name) if told.kind == "extent" else self._size(told.name, told.axis)
            values[place] = fixed
            moving += [(place, which) for which in sizes]
        return values, moving

    def _blocks_of(self) -> tuple[int, _Factor] | None:
        """The place of the number of blocks among the arguments, and how many they are."""
        form, tile = self._emitted.form, self._emitted.tile
        names, by = (form.reduced, tile.reduced) if form.product else (form.columns, tile.columns)
        blocks = [n for n, a in enumerate(self._emitted.source.arguments) if a.variable == "BLOCKS"]
        return (blocks[0], self._product(names, by)) if blocks else None

    def _factors(self) -> tuple[int, list[_Factor]]:
        """Of the number of programs: the product of those that are the same for all calls, and the others."""
        form, tile = self._emitted.form, self._emitted.tile
        factors = [
            self._product(names, by) for names, by in grid_of(form, (tile.rows, tile.columns), tile.segment_threads)
        ]
        same = math.prod(_value(factor, ()) for factor in factors if not factor[1])
        return same, [factor for factor in factors if factor[1]]

    def _segments_in(self, name: str, axis: int, coefficient: int) -> _Factor:
        fixed, sizes, _ = self._size(name, axis)
        return fixed, sizes, coefficient

    def _product(self, names: Sequence[str], by: int) -> _Factor:
        """That of extents."""
        fixed, sizes = 1, ()
        for name in names:
            factor, more, _ = self._extent(name)
            fixed, sizes = fixed * factor, sizes + more
        return fixed, sizes, by

    def _extent(self, name: str) -> _Factor:
        form = self._emitted.form
        if name == STACKS or (form.segment is not None and name == form.segment.index):
            return 1, (0,), 1
        if name == SPLITS:
            return self._emitted.options.splits, (), 1
        place = self._places.get(name)
        return (self._bound.extents[name], (), 1) if place is None else self._size(*place)

    def _size(self, name: str, axis: int) -> _Factor:
        """That of an axis: of rows its place among the sizes, which begin with the number of segments."""
        if axis:
            return self._shapes[name][axis], (), 1
        return 1, (1 + self._row_places[name],), 1


def _value(factor: _Factor, sizes: Sequence[int]) -> int:
    found, places, by = factor
    for place in places:
        found *= sizes[place]
    return -(-found // by)


def _places(bound: BoundStatement) -> Mapping[str, tuple[str, int]]:
    """An axis that tells the extent of each index which stands bare on one, "" being the result: of no rows if it can
    be."""
    statement = bound.statement
    found = {index: (operand, axis) for index, operand, axis in bare_places(bound.like or bound) or ()}
    read = ((a.name, a.indices) for a in accesses_of(*statement.terms, *statement.target.indices))
    for operand, expressions in (*read, ("", statement.target.indices)):
        found |= {e.bare: (operand, n) for n, e in enumerate(expressions) if n and e.bare in found}
    return found


class Aimed:
    """A compiled kernel with the addresses of what stays.

    programs: how many run. values: the arguments; slots: the places of those that are missing. part: the segments whose
    addresses are among them; the operands that are held the caller keeps.
    """

    __slots__ = ("compiled", "mould", "part", "programs", "slots", "values")

    def __init__(
        self,
        mould: Mould,
        slots: Slots,
        compiled: CompiledKernel,
        programs: int,
        values: list[Any],
        part: Any,
    ) -> None:
        self.mould, self.slots, self.compiled = mould, slots, compiled
        self.programs, self.values, self.part = programs, values, part

    def start(self, given: Any, places: Sequence[tuple[int, Any]], out: Tensor) -> bool:
        """Whether the kernel was started: not where a tensor is not aligned, or on another device than the current.

        given: the tensors of slots.free; places: the place of each among the arguments, and which of those it is.
        """
        mould = self.mould
        if mould.on_cuda and mould.index != torch._C._cuda_getDevice():
            return False
        bits = result = out.data_ptr()
        addresses = {}
        for _, which in places:
            addresses[which] = address = given[which].data_ptr()
            bits |= address
        if bits & 15:
            return False
        # Held until the kernel is under way.
        own = None if self.slots.scratch is None else workspace(*self.needs, mould.device)
        self.begin(addresses, places, result, own)
        return True

    @property
    def needs(self) -> tuple[int, int]:
        """Counters, and bytes, that its programs share where slots.scratch tells their places."""
        return self.programs, self.programs * self.mould.room

    def begin(self, addresses: Any, places: Sequence[tuple[int, Any]], result: int, own: Workspace | None) -> None:
        """Start the kernel, on the current device, with addresses that are aligned; own: what its programs share."""
        values, slots = self.values.copy(), self.slots
        values[slots.result] = result
        for place, which in places:
            values[place] = addresses[which]
        if own is not None and slots.scratch is not None:
            waiting, room = slots.scratch
            values[waiting], values[room] = own.counters.data_ptr(), own.scratch.data_ptr()
        self.compiled(self.programs, values, self.mould.index)
