"""Runs of equal values in a sorted array, the longest first; long ones in pieces.

Both functions are a kernel where kernels run and runs are few, and plain torch elsewhere (the functions that end in
`_twin`), the same bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords.launch import kernel, runs_kernels, sent

_SIDES = (128, 512, 2048)
"""Runs that one program puts in order, at most: few variants, as each has a sort to compile."""
_LONG = (1 << 20) - 2
"""Entries from which on runs count as equally long: lengths and places of runs make one integer of 31 bits."""


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
class Told:
    """What is known of an array. version: that it was told of. asked: is told how long pieces of its runs are wanted.
    pieces: those that are there, by that."""

    array: weakref.ref[Tensor]
    version: int
    ends: Tensor
    asked: set[int]
    pieces: dict[int, Pieces]


class Ends:
    """Where the runs of arrays end, known from how the arrays were made: int32 [count], entries up to and with each of
    the values 0 to count - 1; there may be more than the array has room for. Forgotten with the array."""

    def __init__(self) -> None:
        self._told: dict[int, Told] = {}

    def tell(self, array: Tensor, ends: Tensor, asked: set[int] | None = None) -> None:
        """asked: see Told."""
        key = id(array)
        if not array.is_inference():
            known = weakref.ref(array, lambda _: self._told.pop(key, None))
            self._told[key] = Told(known, array._version, ends, set() if asked is None else asked, {})

    def told(self, array: Tensor, count: int) -> Told | None:
        """What is known of the runs of so many values."""
        told = self._told.get(id(array))
        if told is None or told.array() is not array or told.version != array._version:
            return None
        return told if told.ends.shape[0] == count else None

    def of(self, array: Tensor, count: int) -> Tensor | None:
        told = self.told(array, count)
        return None if told is None else told.ends


ENDS = Ends()


def by_length(array: Tensor, count: int) -> Runs:
    """The runs of the values 0 to count - 1, empty ones too, by falling length, equal ones by their values.

    The array may begin with values below 0 and end with others.
    """
    if not _fits(array, count):
        return by_length_twin(array, count)
    found = _lists(3, count, array.device)
    _order(array, count, (*found, array, array), (1, count), pieces=False)
    return Runs(*found)


def by_length_twin(array: Tensor, count: int) -> Runs:
    """As by_length, in plain torch."""
    bounds = bounds_of(array, count)
    order = _falling(bounds.diff())
    return Runs(order.int(), bounds[:-1][order], bounds[1:][order])


def in_pieces(array: Tensor, count: int, most: int) -> Pieces:
    """The runs in pieces of about equal length, of at most `most` entries each.

    Longer runs come first, the pieces of one side by side; an empty run is one piece. The list is as long as it might
    have to be, so that nothing is read from a device.
    """
    if (kept := pieces_at_hand(array, count, most)) is not None:
        return kept
    if not _fits(array, count):
        return in_pieces_twin(array, count, most)
    places = count + array.shape[0] // most
    found = _lists(5, places, array.device)
    _order(array, count, found, (most, places), pieces=True)
    return Pieces(*found)


def pieces_at_hand(array: Tensor, count: int, most: int) -> Pieces | None:
    """What `in_pieces` gives, where it is there; it is noted that it was asked for."""
    told = ENDS.told(array, count)
    if told is None:
        return None
    told.asked.add(most)
    return told.pieces.get(most)


def put_in_pieces(asked: Sequence[tuple[Tensor, int, int]]) -> None:
    """Find by one kernel what `in_pieces` will give for arrays (array, count, most) whose ends are known; what cannot
    be found so is left to it."""
    wanted: list[tuple[Told, Tensor, int, int]] = []
    for array, count, most in asked:
        told = ENDS.told(array, count)
        if told is not None and _fits(array, count):
            wanted.append((told, array, count, most))
    if not wanted:
        return
    table, sizes, at = [], [], 0
    for told, array, count, most in wanted:
        places = count + array.shape[0] // most
        each = -(-places // 4) * 4
        table.append((told.ends.data_ptr(), at, each, places, array.shape[0], count, most))
        sizes += 5 * [places, each - places]
        at += 5 * each
    device = wanted[0][1].device
    out = torch.empty(at, dtype=torch.int32, device=device)
    side = next(side for side in _SIDES if max(count for _, _, count, _ in wanted) <= side)
    constants = {"LONG": _LONG, "SIDE": side, "BITS": side.bit_length() - 1}
    tensors = sent(torch.tensor(table), device), out
    kernel("tiling.order_many")(len(wanted), tensors, (), constants, max(1, side // 256))
    lists = iter(out.split_with_sizes(sizes)[::2])
    for told, _, _, most in wanted:
        told.pieces[most] = Pieces(*islice(lists, 5))


def cut_as_asked(array: Tensor, ends: Tensor, asked: set[int]) -> None:
    """Tell where the runs of an array end, and find now what `in_pieces` will give for pieces as long as passes before
    asked for; `asked` is told what this one asks for."""
    ENDS.tell(array, ends, asked)
    told = ENDS.told(array, ends.shape[0])
    if told is not None:
        for most in tuple(asked):
            told.pieces[most] = in_pieces(array, ends.shape[0], most)


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
    firsts = torch.where(filling, places, (ends - numbers)[owner])
    length = -(-lengths // numbers)[owner]
    stops = bounds[1:][order][owner]
    starts = torch.minimum(bounds[:-1][order][owner] + (places - firsts) * length, stops)
    stops = torch.where(filling, starts, torch.minimum(starts + length, stops))
    return Pieces(order.int()[owner], starts, stops, firsts, torch.where(filling, 0, numbers[owner]).int())


def bounds_of(array: Tensor, count: int) -> Tensor:
    """int32 [count + 1]: where the entries of each value begin, and where the last ones end."""
    values = torch.arange(count + 1, device=array.device, dtype=array.dtype)
    return torch.searchsorted(array.contiguous(), values, out_int32=True)


def _falling(lengths: Tensor) -> Tensor:
    return lengths.clamp(max=_LONG).argsort(stable=True, descending=True)


def _fits(array: Tensor, count: int) -> bool:
    return 0 < count <= _SIDES[-1] and runs_kernels(array) and _worth(array)


def _worth(array: Tensor) -> bool:
    """Triton's interpreter takes half a second for a sort."""
    return array.is_cuda


def _lists(number: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """So many lists of so many integers, each aligned to 16 bytes, in one piece of memory."""
    return torch.empty((number, -(-size // 4) * 4), dtype=torch.int32, device=device)[:, :size].unbind()


def _order(array: Tensor, count: int, found: tuple[Tensor, ...], sizes: tuple[int, int], pieces: bool) -> None:
    ends, array = ENDS.of(array, count), array.contiguous()
    side = next(side for side in _SIDES if count <= side)
    numbers = (array.shape[0], array.shape[0].bit_length(), count, *sizes)
    constants = {"LONG": _LONG, "SIDE": side, "BITS": side.bit_length() - 1, "PIECES": pieces}
    constants["KNOWN"] = ends is not None
    tensors = (array, array if ends is None else ends, *found)
    kernel("tiling.order_runs")(1, tensors, numbers, constants, warps=max(1, side // 256))
