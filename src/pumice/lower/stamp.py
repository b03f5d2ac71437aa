"""Kernels started again with other operands: what may change from call to call is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pumice.coords.launch import Compiled
from pumice.language.bind import Bound, bare_places
from pumice.language.roles import Roles, segment_axis
from pumice.lower.emit import SPLITS, STACKS, grid
from pumice.lower.remember import OWN
from pumice.lower.scratch import scratch
from pumice.lower.segments import Segments, pieces, segments, stacks
from pumice.schedule.tile import Tile

if TYPE_CHECKING:
    from pumice.lower.triton import Emitted

FAR = 1 << 31
"""Distances of rows, which lead, from which on addresses need 64 bits."""
SCRATCH = ("room", "waiting")
"""Arguments that every launch has of its own."""
_WINDOW = 512
"""Rows that are sorted by length among themselves, where each gathers on its own."""

Source = int | tuple[str, int] | None
"""A number that is the same for all calls; an axis of an operand, the result being ""; None: how many segments."""
Shapes = Mapping[str, Sequence[int]]
"""Of operands by name, and of the result, ""."""


def segments_of(array: Tensor, count: int, form: Roles, tile: Tile) -> Segments:
    """The segments of a sorted array of the values 0 to count - 1, as programs with this tile take them."""
    if tile.piece:
        return pieces(array, count, tile.piece)
    return stacks(array, count, tile.rows) if tile.stacked else segments(array, count, _WINDOW if form.laned else 0)


class Mould:
    """A kernel for calls that differ in their sizes and in what they hold."""

    def __init__(self, emitted: Emitted, own: Roles, bound: Bound, device: torch.device) -> None:
        """bound: of one of these calls; own: its roles, without what the tile makes of them."""
        self._emitted, self._device, self._own = emitted, device, own
        form, tile, arguments = emitted.form, emitted.tile, emitted.source.arguments
        self._form, self._tile = form, tile
        self._counted = None if own.segment is None else segment_axis(own)
        self._places = {index: (operand, axis) for index, operand, axis in bare_places(bound.like or bound) or ()}
        self._extents = bound.extents
        self._counting = [
            (n, self._source(a.name) if a.kind == "extent" else (a.name, a.axis))
            for n, a in enumerate(arguments)
            if a.kind in ("extent", "size")
        ]
        self._grid = {name: self._source(name) for name in (*form.columns, *form.rows, *form.batch)}
        names, self._block = (form.reduced, tile.reduced) if form.product else (form.columns, tile.columns)
        blocks = [n for n, a in enumerate(arguments) if a.variable == "BLOCKS"]
        self._blocks = (blocks[0], [self._source(name) for name in names]) if blocks else None
        self._aligned = (True,) * len(emitted.slots)

    def _source(self, name: str) -> Source:
        if name == STACKS or (self._form.segment is not None and name == self._form.segment.index):
            return None
        if name == SPLITS:
            return self._emitted.how.splits
        return self._places.get(name) or self._extents[name]

    def cast(
        self, held: Mapping[str, Tensor], shapes: Shapes, known: dict[Any, Segments] | None = None
    ) -> Aimed | None:
        """The kernel of a call that holds these operands; known: segments of theirs that were found for other calls.

        None where it was not yet run with all tensors aligned to 16 bytes, or takes more than this kernel.
        """
        part, count = None, 0
        if self._counted is not None:
            part = self._segments(held, shapes, {} if known is None else known)
            # Those that are apart take a second kernel.
            if part is None or part.apart is not None:
                return None
            count = part.rows.shape[0]
        values, told = self._emitted.steady.copy(), []
        for place, source in self._counting:
            values[place] = value = _value(source, shapes, count)
            told += (value % 16 == 0, value == 1, value >= FAR)
        if self._blocks is not None:
            place, sources = self._blocks
            values[place] = blocks = -(-math.prod(_value(s, shapes, count) for s in sources) // self._block)
            told.append(blocks)
        compiled = self._emitted.compiled.get((self._device.index or 0, tuple(told), *self._aligned))
        if compiled is None:
            return None
        extents = {name: _value(source, shapes, count) for name, source in self._grid.items()}
        extents[SPLITS] = self._emitted.how.splits
        tile = self._tile
        programs = grid(self._form, extents, (tile.rows, tile.columns), count, tile.lanes)
        return Aimed.of(self._emitted, compiled, programs, values, (held, part, self._device))

    def _segments(self, held: Mapping[str, Tensor], shapes: Shapes, known: dict[Any, Segments]) -> Segments | None:
        assert self._own.segment is not None and self._counted is not None
        name, axis, coefficient = self._counted
        array = held.get(self._own.segment.array)
        if array is None:
            return None
        tile, count = self._tile, -(-shapes[name][axis] // coefficient)
        key = id(array), count, tile.piece, tile.stacked and tile.rows, self._own.laned
        found = known.get(key)
        # Passes of a program that is to be captured all go one way: the one before compiles what it starts.
        if found is None and array not in OWN and not captured(array.device):
            found = known[key] = segments_of(array, count, self._own, tile)
        return found


def _value(source: Source, shapes: Shapes, count: int) -> int:
    if source is None:
        return count
    return source if isinstance(source, int) else shapes[source[0]][source[1]]


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Aimed:
    """A compiled kernel with the addresses of what stays; it takes the other operands, which are `names`.

    programs: how many run. values: the arguments; slots: the places of those operands, result: that of the result.
    part: the segments whose addresses are among them; the operands that are held the caller keeps. scratch: the places
    of counters and of room, where it takes them, and how much room.
    """

    __slots__ = ("compiled", "device", "index", "names", "part", "programs", "result", "scratch", "slots", "values")

    def __init__(self, compiled: Compiled, programs: int, values: list[Any], device: torch.device) -> None:
        self.compiled, self.programs, self.values, self.device = compiled, programs, values, device
        self.index = device.index or 0
        self.slots: tuple[int, ...] = ()
        self.names: tuple[str, ...] = ()
        self.result = 0
        self.part: Segments | None = None
        self.scratch: tuple[int, int, int] | None = None

    @staticmethod
    def of(
        emitted: Emitted,
        compiled: Compiled,
        programs: int,
        values: list[Any],
        given: tuple[Mapping[str, Tensor], Segments | None, torch.device],
    ) -> Aimed | None:
        """given: what is held, the segments and the device. None where what is held is not aligned to 16 bytes."""
        held, part, device = given
        made, slots, names, own = Aimed(compiled, programs, values, device), [], [], {}
        for place, kind, name in emitted.slots:
            if kind == "result":
                made.result = place
            elif kind == "segment" or name in held:
                values[place] = address = (getattr(part, name) if kind == "segment" else held[name]).data_ptr()
                if address % 16:
                    return None
            elif kind in SCRATCH:
                own[kind] = place
            else:
                slots.append(place)
                names.append(name)
        made.slots, made.names, made.part = tuple(slots), tuple(names), part
        if own:
            made.scratch = own["waiting"], own["room"], emitted.room(programs)
        return made

    def start(self, tensors: Sequence[Tensor], out: Tensor) -> bool:
        """Whether the kernel was started: not where a tensor is not aligned, or on another device than the current.

        tensors: those of `names`.
        """
        if self.device.type == "cuda" and self.index != torch._C._cuda_getDevice():
            return False
        values = self.values.copy()
        values[self.result] = bits = out.data_ptr()
        for place, tensor in zip(self.slots, tensors, strict=True):
            values[place] = address = tensor.data_ptr()
            bits |= address
        if bits % 16:
            return False
        if self.scratch is not None:
            # Held until the kernel is under way.
            waiting, room, size = self.scratch
            own = scratch(self.programs, size, self.device)
            values[waiting], values[room] = own.counters.data_ptr(), own.room.data_ptr()
        self.compiled(self.programs, values, self.index)
        return True
