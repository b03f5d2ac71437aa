"""Orders and keys of integer coordinates: linear keys to search by, Morton order to store by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pumice.errors import CoordinateError

INT32_MAX = 2**31 - 1
_WORD_BITS = 62  # a Morton word keeps clear of the sign bit


@dataclass(frozen=True)
class Bounds:
    """A box that holds every coordinate: `low <= c <= high` per axis, and batch indices below `batch`.

    The box may be larger than the set; it is known on the host, so that nothing asks the device for it.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    batch: int

    @staticmethod
    def of(coords: Tensor) -> Bounds:
        """The tightest box of `coords` int32 [N, 1+D]; one read from the device."""
        dim = coords.shape[1] - 1
        if coords.shape[0] == 0:
            return Bounds((0,) * dim, (0,) * dim, 0)
        low, high = torch.stack(torch.aminmax(coords, dim=0)).tolist()
        if low[0] < 0:
            raise CoordinateError(f"batch indices start at 0, found {low[0]}")
        return Bounds(tuple(low[1:]), tuple(high[1:]), high[0] + 1)

    def grown(self, margin: Sequence[int]) -> Bounds:
        low = tuple(a - m for a, m in zip(self.low, margin, strict=True))
        high = tuple(a + m for a, m in zip(self.high, margin, strict=True))
        return Bounds(low, high, self.batch)

    def checked(self) -> Bounds:
        """Itself, if int32 can hold it."""
        if min(self.low) < -(2**31) or max(self.high) > INT32_MAX:
            raise CoordinateError(
                f"coordinates would reach {self.low} to {self.high}; int32 holds {-(2**31)} to {INT32_MAX}"
            )
        return self


@dataclass(frozen=True)
class KeySpace:
    """Row-major numbering of a box: key = ((b * E0 + x - low0) * E1 + y - low1) * ... , in int64.

    A constant step between two coordinates of the box is a constant difference between their keys.
    """

    bounds: Bounds

    def __post_init__(self) -> None:
        cells = max(self.bounds.batch, 1) * math.prod(self.extents)
        if cells >= 2**63:
            raise CoordinateError(
                f"the box {self.bounds.low} to {self.bounds.high} with {self.bounds.batch} batch items has "
                f"{cells} cells; 63-bit keys number {2**63 - 1}. Shift or crop outliers, or split the batch"
            )

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(h - a + 1 for a, h in zip(self.bounds.low, self.bounds.high, strict=True))

    @property
    def radix(self) -> tuple[int, ...]:
        """Key difference of a step of one along each axis."""
        return tuple(math.prod(self.extents[axis + 1 :]) for axis in range(len(self.extents)))

    def keys(self, coords: Tensor, scale: Sequence[int] | None = None) -> Tensor:
        """int64 [N] keys of `coords` int [N, 1+D], each axis first multiplied by `scale`."""
        scale = scale or (1,) * len(self.radix)
        key = coords[:, 0].long() * math.prod(self.extents)
        for axis, (radix, factor) in enumerate(zip(self.radix, scale, strict=True)):
            key += coords[:, axis + 1].long() * (factor * radix)
        return key - sum(a * r for a, r in zip(self.bounds.low, self.radix, strict=True))

    def step(self, offset: Sequence[int]) -> int:
        return sum(o * r for o, r in zip(offset, self.radix, strict=True))


def morton_argsort(coords: Tensor, bounds: Bounds) -> Tensor:
    """Rows of `coords` in (batch, Morton) order, int64 [N]; stable.

    Within a batch item the order is that of the Morton code of `c + 2**31` per axis, axis 0 the highest of each
    group of interleaved bits. A cell's parent (`floor(c / 2)`) keeps its place: the parents of a sorted list are
    sorted.
    """
    words = _morton_words(coords, bounds)
    order = torch.argsort(words[-1], stable=True)
    for word in reversed(words[:-1]):
        order = order[torch.argsort(word[order], stable=True)]
    return order


def morton_unique(coords: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Distinct rows of `coords` in (batch, Morton) order [M, 1+D], and for each row its place there, int64 [N]."""
    if coords.shape[0] == 0:
        return coords, torch.zeros(0, dtype=torch.int64, device=coords.device)
    order = morton_argsort(coords, bounds)
    ranked = coords[order]
    first = torch.ones(len(ranked), dtype=torch.bool, device=coords.device)
    first[1:] = (ranked[1:] != ranked[:-1]).any(dim=1)
    place = torch.empty_like(order)
    place[order] = torch.cumsum(first, 0) - 1
    return ranked[first], place


def _morton_words(coords: Tensor, bounds: Bounds) -> list[Tensor]:
    """The Morton code cut into int64 words, most significant first; nearly always one."""
    magnitudes, bias = _axis_bits(bounds)
    places = _bit_places(magnitudes, tuple(b > 0 for b in bias))
    total, batch_bits = sum(map(len, places)), max(bounds.batch - 1, 0).bit_length()
    words = [torch.zeros(len(coords), dtype=torch.int64, device=coords.device)]
    while len(words) * _WORD_BITS < total:
        words.append(torch.zeros_like(words[0]))
    for axis, axis_places in enumerate(places):
        value = coords[:, axis + 1].long() + bias[axis]
        for byte in range(0, len(axis_places), 8):
            digit = (value >> byte) & 255
            for index, table in _spread_tables(axis_places[byte : byte + 8]):
                words[index] += table.to(coords.device)[digit]
    if total + batch_bits <= len(words) * _WORD_BITS:
        words[-1] += coords[:, 0].long() << (total - (len(words) - 1) * _WORD_BITS)
    else:
        words.append(coords[:, 0].long())
    return words[::-1]


def _axis_bits(bounds: Bounds) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Magnitude bits of each axis, and the bias that makes its values non-negative (0 where they are)."""
    magnitudes, bias = [], []
    for low, high in zip(bounds.low, bounds.high, strict=True):
        magnitude = max(high, -low - 1, 0).bit_length()
        magnitudes.append(magnitude)
        bias.append(1 << magnitude if low < 0 else 0)
    return tuple(magnitudes), tuple(bias)


@lru_cache(maxsize=256)
def _bit_places(magnitudes: tuple[int, ...], signed: tuple[bool, ...]) -> tuple[tuple[int, ...], ...]:
    """Place of each bit of each axis in the interleaved code: lowest bits first, an axis without bits left out.

    Sign bits stand on top of all others, as in 32-bit coordinates; the bits between an axis's magnitude and its
    sign repeat the sign and decide nothing.
    """
    places: list[list[int]] = [[] for _ in magnitudes]
    used = 0
    axes = range(len(magnitudes))[::-1]
    for level in range(max(magnitudes, default=0)):
        for axis in (a for a in axes if level < magnitudes[a]):
            places[axis].append(used)
            used += 1
    for axis in (a for a in axes if signed[a]):
        places[axis].append(used)
        used += 1
    return tuple(tuple(p) for p in places)


@lru_cache(maxsize=1024)
def _spread_tables(places: tuple[int, ...]) -> tuple[tuple[int, Tensor], ...]:
    """For each word that one byte of an axis reaches: the byte's 256 values with their bits moved to `places`."""
    digits = torch.arange(256, dtype=torch.int64)
    tables: dict[int, Tensor] = {}
    for bit, place in enumerate(places):
        word, shift = divmod(place, _WORD_BITS)
        tables.setdefault(word, torch.zeros(256, dtype=torch.int64))
        tables[word] += ((digits >> bit) & 1) << shift
    return tuple(tables.items())
