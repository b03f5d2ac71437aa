"""Runs of equal values in a sorted array, the longest first; long ones in pieces.

Both functions are a kernel where kernels run and runs are few, or their ends are known and none is long, and plain
torch elsewhere (the functions that end in `_twin`), the same bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.runtime.launch import has_triton, integers, kernel

_SIDES = (128, 512, 2048)
"""Runs that one program puts in order, at most: few variants, as each has a sort to compile."""
_LONG = (1 << 20) - 2
"""Entries from which on runs count as equally long: lengths and places of runs make one integer of 31 bits."""
_BINS = 1024
"""Lengths that are counted one by one, at most, where the ends of runs are known."""
_MANY = 1 << 15
"""Runs that are put in order by such counts, at most: every program counts all of them."""
_BLOCK, _CHUNKS = 64, (512, 2048)
"""Runs whose places a program finds, and how many it counts at a time."""
WHOLE = 0
"""In place of how long pieces are: runs are not cut."""
_NEVER = 1 << 30
"""Entries that no run has."""


class Runs(NamedTuple):
    """Entries starts[j] <= p < stops[j] hold the value values[j]; int32 [n] each."""

    values: Tensor
    starts: Tensor
    stops: Tensor


class Pieces(NamedTuple):
    """Parts of runs, int32 [n] each. firsts: where the pieces of the same run begin; numbers: how many there are, 0 of
    what fills up the list."""

    values: Tensor
    starts: Tensor
    stops: Tensor
    firsts: Tensor
    numbers: Tensor


@dataclass(frozen=True, eq=False)
class RunInfo:
    """What is known of an array. version: that it was told of; size: its entries. longest: entries of a run, at most.
    asked: is told how long pieces of its runs are wanted, WHOLE among them. pieces: those that are there, by that."""

    array: weakref.ref[Tensor]
    version: int
    size: int
    ends: Tensor
    longest: int
    asked: set[int]
    pieces: dict[int, Pieces]

    @property
    def count(self) -> int:
        """How many runs there are."""
        return self.ends.shape[0]

    @property
    def counted(self) -> bool:
        """Whether runs can be put in order by counts of their lengths."""
        return 0 < self.count <= _MANY and self.longest + 2 <= _BINS and has_triton(self.ends)

    def numbers(self, most: int) -> tuple[int, int, int, int]:
        """What kernels that cut them are told: entries and runs of the array, how long pieces are, and how many there
        might be."""
        return self.size, self.count, most or _NEVER, self.count + (self.size // most if most else 0)


class RunRegistry:
    """Where the runs of arrays end, known from how the arrays were made: int32 [count], entries up to and with each of
    the values 0 to count - 1; there may be more than the array has room for. Forgotten with the array."""

    def __init__(self) -> None:
        self._told: dict[int, RunInfo] = {}

    def tell(self, array: Tensor, ends: Tensor, longest: int, piece_sizes: set[int] | None = None) -> None:
        """longest, asked: see RunInfo."""
        key = id(array)
        if not array.is_inference():
            known = weakref.ref(array, lambda _: self._told.pop(key, None))
            facts = known, array._version, array.shape[0], ends, longest
            self._told[key] = RunInfo(*facts, set() if piece_sizes is None else piece_sizes, {})

    def told(self, array: Tensor, count: int) -> RunInfo | None:
        """What is known of the runs of so many values."""
        told = self._told.get(id(array))
        if told is None or told.array() is not array or told.version != array._version:
            return None
        return told if told.count == count else None

    def of(self, array: Tensor, count: int) -> Tensor | None:
        told = self.told(array, count)
        return None if told is None else told.ends


RUNS = RunRegistry()


def segments_by_length(array: Tensor, count: int) -> Runs:
    """The runs of the values 0 to count - 1, empty ones too, by falling length, equal ones by their values.

    The array may begin with values below 0 and end with others.
    """
    told = RUNS.told(array, count)
    if told is not None and told.counted:
        return Runs(*_counted(told, WHOLE)[:3])
    if not _fits(array, count):
        return segments_by_length_twin(array, count)
    found = _lists(3, count, array.device)
    _order(array, count, (*found, array, array), (1, count), pieces=False)
    return Runs(*found)


def segments_by_length_twin(array: Tensor, count: int) -> Runs:
    """As by_length, in plain torch."""
    bounds = bounds_of(array, count)
    order = _falling(bounds.diff())
    return Runs(order.int(), bounds[:-1][order], bounds[1:][order])


def in_pieces(array: Tensor, count: int, most: int) -> Pieces:
    """The runs in pieces of about equal length, of at most `most` entries each.

    Longer runs come first, the pieces of one side by side; an empty run is one piece. The list is as long as it might
    have to be, so that nothing is read from a device.
    """
    told = RUNS.told(array, count)
    if told is not None and told.counted:
        return _counted(told, most)
    if not _fits(array, count):
        return in_pieces_twin(array, count, most)
    places = count + array.shape[0] // most
    found = _lists(5, places, array.device)
    _order(array, count, found, (most, places), pieces=True)
    return Pieces(*found)


def pieces_at_hand(array: Tensor, count: int, most: int) -> Pieces | None:
    """What `in_pieces` gives, where it is there; it is noted that it was asked for."""
    told = RUNS.told(array, count)
    if told is None:
        return None
    told.asked.add(most)
    return told.pieces.get(most)


def put_in_pieces(requests: Sequence[tuple[Tensor, int, int]]) -> None:
    """Find by one kernel what `in_pieces` will give for arrays (array, count, most) whose ends are known, and
    `segments_by_length` where most is WHOLE; what cannot be found so is left to them."""
    wanted: list[tuple[RunInfo, int]] = []
    for array, count, most in requests:
        told = RUNS.told(array, count)
        if told is not None and told.counted:
            wanted.append((told, most))
    if not wanted:
        return
    table, layouts, at = [], list[tuple[int, int, int]](), 0
    for told, most in wanted:
        *_, places = numbers = told.numbers(most)
        each = -(-places // 4) * 4
        table += (told.ends.data_ptr(), at, each, *numbers)
        layouts.append((places, each, at))
        at += 5 * each
    device = wanted[0][0].ends.device
    out = torch.empty(at, dtype=torch.int32, device=device)
    count = max(told.count for told, _ in wanted)
    blocks = -(-count // _BLOCK)
    constants = _counting(count, max(told.longest for told, _ in wanted))
    tensors = integers(table, device), out
    kernel("tile_kernels.order_many")(len(wanted) * blocks, tensors, (blocks,), constants)
    begin = out.storage_offset()
    for (told, most), (places, each, at) in zip(wanted, layouts, strict=True):
        told.pieces[most] = Pieces(*out.as_strided((5, places), (each, 1), begin + at).unbind())


def cut_as_asked(array: Tensor, ends: Tensor, longest: int, asked: set[int]) -> None:
    """Tell where the runs of an array end, and find now what `in_pieces` and `segments_by_length` will give for pieces
    as long as passes before asked for; `asked` is told what this one asks for."""
    RUNS.tell(array, ends, longest, asked)
    told = RUNS.told(array, ends.shape[0])
    if told is not None:
        for most in tuple(asked):
            if told.counted:
                told.pieces[most] = _counted(told, most)
            elif most != WHOLE:
                told.pieces[most] = in_pieces(array, told.count, most)


def in_pieces_twin(array: Tensor, count: int, most: int) -> Pieces:
    """As in_pieces, in plain torch."""
    bounds = bounds_of(array, count)
    lengths = bounds.diff()
    order = _falling(lengths)
    lengths = lengths[order]
    numbers = ((lengths + most - 1) // most).clamp_(min=1)
    ends = numbers.cumsum(0, dtype=torch.int32)
    places = torch.arange(count + array.shape[0] // most if count else 0, device=array.device, dtype=torch.int32)
    owner = torch.searchsorted(ends, places, right=True)
    filling = owner >= count
    owner = owner.clamp_(max=count - 1)
    firsts = (ends - numbers)[owner]
    length = -(-lengths // numbers)[owner]
    stops = bounds[1:][order][owner]
    starts = torch.minimum(bounds[:-1][order][owner] + (places - firsts) * length, stops)
    stops = torch.minimum(starts + length, stops)
    found = (order[owner], starts, stops, numbers[owner])
    values, starts, stops, numbers = (x.masked_fill(filling, 0).int() for x in found)
    return Pieces(values, starts, stops, torch.where(filling, places, firsts), numbers)


def bounds_of(array: Tensor, count: int) -> Tensor:
    """int32 [count + 1]: where the entries of each value begin, and where the last ones end."""
    values = torch.arange(count + 1, device=array.device, dtype=array.dtype)
    return torch.searchsorted(array.contiguous(), values, out_int32=True)


def _falling(lengths: Tensor) -> Tensor:
    return lengths.clamp(max=_LONG).argsort(stable=True, descending=True)


def _fits(array: Tensor, count: int) -> bool:
    return 0 < count <= _SIDES[-1] and has_triton(array) and _worth(array)


def _worth(array: Tensor) -> bool:
    """Triton's interpreter takes half a second for a sort."""
    return array.is_cuda


def _lists(number: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """So many lists of so many integers, each aligned to 16 bytes, in one piece of memory."""
    return torch.empty((number, -(-size // 4) * 4), dtype=torch.int32, device=device)[:, :size].unbind()


def _order(array: Tensor, count: int, found: tuple[Tensor, ...], sizes: tuple[int, int], pieces: bool) -> None:
    array = array.contiguous()
    side = next(side for side in _SIDES if count <= side)
    numbers = (array.shape[0], array.shape[0].bit_length(), count, *sizes)
    constants = {"LONG": _LONG, "SIDE": side, "BITS": side.bit_length() - 1, "PIECES": pieces}
    kernel("tile_kernels.order_runs")(1, (array, *found), numbers, constants, warps=max(1, side // 256))


def _counted(told: RunInfo, most: int) -> Pieces:
    """What `in_pieces` gives of runs whose ends are known, and `segments_by_length` where most is WHOLE."""
    *_, places = numbers = told.numbers(most)
    found = _lists(5, places, told.ends.device)
    constants = _counting(told.count, told.longest)
    kernel("tile_kernels.order_counted")(-(-told.count // _BLOCK), (told.ends, *found), numbers, constants)
    return Pieces(*found)


def _counting(count: int, longest: int) -> dict[str, int]:
    """Constants of kernels that count lengths: the last bin is for what is no run."""
    chunk = _CHUNKS[count > _CHUNKS[0]]
    return {"BINS": max(32, 1 << (longest + 1).bit_length()), "BLOCK": _BLOCK, "CHUNK": chunk}
