"""Runs of equal values in a sorted array, longest first, optionally cut into pieces.

Kernels sort few runs, or short runs with known ends; plain torch (`*_torch`) sorts others, bitwise equally."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.runtime.launch import has_triton, kernel

_SIDES = (128, 512, 2048)  # Sizes of order_runs, in runs: few, as each compiles a sort
_LONG = (1 << 20) - 2  # Lengths from here on compare as equal: length and index share 31 bits
_BINS = 1024  # Maximum bins of the counting sort by length
_MANY = 1 << 15  # Maximum runs of the counting sort: every program counts all of them
_BLOCK = 64  # Runs that a program of the counting sort places
RUNS_PER_STEP, _MOST_PER_STEP = 512, 2048  # Runs that it counts per step; the second for more runs than the first
WHOLE = 1 << 30  # Maximum piece length that leaves runs uncut


class Runs(NamedTuple):
    """Runs, int32 [n] each: entries p with starts[j] <= p < stops[j] have the value values[j]."""

    values: Tensor
    starts: Tensor
    stops: Tensor


class Pieces(NamedTuple):
    """Pieces of Runs, int32 [n] each. firsts: index of the run's first piece; numbers: of its pieces, 0 for padding."""

    values: Tensor
    starts: Tensor
    stops: Tensor
    firsts: Tensor
    numbers: Tensor


@dataclass(frozen=True, eq=False)
class RunInfo:
    """Known runs of an array. version: of the array when registered; size: its entries; ends: see RunRegistry; longest:
    upper bound of run lengths; requested: piece lengths requested so far; pieces: those computed, by piece length."""

    array: weakref.ref[Tensor]
    version: int
    size: int
    ends: Tensor
    longest: int
    requested: set[int]
    pieces: dict[int, Pieces]

    @property
    def count(self) -> int:
        """Number of runs."""
        return self.ends.shape[0]

    @property
    def can_count_sort(self) -> bool:
        """True if the counting sort by length applies."""
        return 0 < self.count <= _MANY and self.longest + 2 <= _BINS and has_triton(self.ends)

    def numbers(self, most: int) -> tuple[int, int, int, int]:
        """Kernel arguments: entries, runs, maximum piece length, maximum number of pieces."""
        return self.size, self.count, most, self.count + self.size // most


class RunRegistry:
    """Run ends of sorted arrays. ends int32 [count]: inclusive prefix counts of the values 0 to count - 1, which may
    exceed the array's size. An entry is dropped when its array is freed, and ignored once the array is written."""

    def __init__(self) -> None:
        self._runs: dict[int, RunInfo] = {}

    def register(
        self,
        array: Tensor,
        ends: Tensor,
        longest: int,
        piece_sizes: set[int] | None = None,
        pieces: dict[int, Pieces] | None = None,
    ) -> None:
        """Register an array's run ends, unless it is an inference tensor. piece_sizes: RunInfo.requested."""
        key = id(array)
        if not array.is_inference():
            known = weakref.ref(array, lambda _: self._runs.pop(key, None))
            facts = known, array._version, array.shape[0], ends, longest
            self._runs[key] = RunInfo(*facts, set() if piece_sizes is None else piece_sizes, pieces or {})

    def get(self, array: Tensor, count: int) -> RunInfo | None:
        """The info registered for the array if it has `count` runs, else None."""
        info = self._runs.get(id(array))
        if info is None or info.array() is not array or info.version != array._version:
            return None
        return info if info.count == count else None


RUNS = RunRegistry()


def segments_by_length(array: Tensor, count: int) -> Runs:
    """Runs of the values 0 to count - 1, empty ones too, by decreasing length, then value; other values are ignored."""
    info = RUNS.get(array, count)
    if info is not None and info.can_count_sort:
        return Runs(*_count_sorted(info, WHOLE)[:3])
    if not _fits_sort_kernel(array, count):
        return segments_by_length_torch(array, count)
    found = _aligned_lists(3, count, array.device)
    _order(array, count, (*found, array, array), (1, count), pieces=False)
    return Runs(*found)


def segments_by_length_torch(array: Tensor, count: int) -> Runs:
    bounds = bounds_of(array, count)
    order = _descending_order(bounds.diff())
    return Runs(order.int(), bounds[:-1][order], bounds[1:][order])


def split_runs(array: Tensor, count: int, most: int) -> Pieces:
    """The runs cut into pieces of about equal length, at most `most` entries each; longest runs first, an empty run is
    one piece. Lists are padded to the maximum number of pieces: no host synchronisation."""
    info = RUNS.get(array, count)
    if info is not None and info.can_count_sort:
        return _count_sorted(info, most)
    if not _fits_sort_kernel(array, count):
        return split_runs_torch(array, count, most)
    places = count + array.shape[0] // most
    found = _aligned_lists(5, places, array.device)
    _order(array, count, found, (most, places), pieces=True)
    return Pieces(*found)


def cached_pieces(array: Tensor, count: int, most: int) -> Pieces | None:
    """The cached result of `split_runs`, or None; adds `most` to RunInfo.requested."""
    info = RUNS.get(array, count)
    if info is None:
        return None
    info.requested.add(most)
    return info.pieces.get(most)


def register_and_split(array: Tensor, ends: Tensor, longest: int, requested: set[int]) -> None:
    """Register the run ends of an array and compute its pieces for the lengths that earlier passes requested.
    cached_pieces adds those of this pass to `requested`."""
    RUNS.register(array, ends, longest, requested)
    info = RUNS.get(array, ends.shape[0])
    if info is not None:
        for most in tuple(requested):
            if info.can_count_sort:
                info.pieces[most] = _count_sorted(info, most)
            elif most != WHOLE:
                info.pieces[most] = split_runs(array, info.count, most)


def split_runs_torch(array: Tensor, count: int, most: int) -> Pieces:
    bounds = bounds_of(array, count)
    lengths = bounds.diff()
    order = _descending_order(lengths)
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
    """int32 [count + 1]: start of each value's run in a sorted array, and the end of the last."""
    values = torch.arange(count + 1, device=array.device, dtype=array.dtype)
    return torch.searchsorted(array.contiguous(), values, out_int32=True)


def _descending_order(lengths: Tensor) -> Tensor:
    return lengths.clamp(max=_LONG).argsort(stable=True, descending=True)


def _fits_sort_kernel(array: Tensor, count: int) -> bool:
    return 0 < count <= _SIDES[-1] and has_triton(array) and _is_worthwhile(array)


def _is_worthwhile(array: Tensor) -> bool:
    """False on a CPU: Triton's interpreter takes half a second for a sort."""
    return array.is_cuda


def _aligned_lists(number: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """`number` int32 lists of `size` entries, aligned to 16 bytes, in one allocation."""
    return torch.empty((number, -(-size // 4) * 4), dtype=torch.int32, device=device)[:, :size].unbind()


def _order(array: Tensor, count: int, found: tuple[Tensor, ...], sizes: tuple[int, int], pieces: bool) -> None:
    array = array.contiguous()
    side = next(side for side in _SIDES if count <= side)
    numbers = (array.shape[0], array.shape[0].bit_length(), count, *sizes)
    constants = {"LONG": _LONG, "SIDE": side, "BITS": side.bit_length() - 1, "PIECES": pieces}
    kernel("tile_kernels.order_runs")(1, (array, *found), numbers, constants, warps=max(1, side // 256))


def _count_sorted(info: RunInfo, most: int) -> Pieces:
    """The result of `split_runs` (of `segments_by_length` if most is WHOLE) by counting sort of known runs."""
    *_, places = numbers = info.numbers(most)
    found = _aligned_lists(5, places, info.ends.device)
    constants = count_sort_constants(info.count, info.longest)
    kernel("tile_kernels.order_counted")(-(-info.count // _BLOCK), (info.ends, *found), numbers, constants)
    return Pieces(*found)


def count_sort_constants(count: int, longest: int) -> dict[str, int]:
    """Constants of the counting-sort kernel for `count` runs; the last bin is for lanes without a run."""
    chunk = RUNS_PER_STEP if count <= RUNS_PER_STEP else _MOST_PER_STEP
    return {"BINS": max(32, 1 << (longest + 1).bit_length()), "BLOCK": _BLOCK, "CHUNK": chunk}
