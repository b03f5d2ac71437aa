"""Entries of dense arrays, and the levels of sparse operands, on a CPU in C.

The levels of an operand are derived from the coordinates of its entries: per compressed level, the positions of its
coordinates (`pos`) below each position of the level above, and the coordinates (`crd`). Leading levels may be dense.

Source: "Unified Convolution Framework", 4.2.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.formats import KINDS, Format
from pumice.language.iteration import COMPRESSED, DENSE, HASHED, LevelSize
from pumice.lower import nest_c
from pumice.lower.iterate_c import MULTIPLIER
from pumice.runtime.cache import cached_per_tensor

MOST_LEVELS = 16
_DENSE, _EMPTY = 1 << 16, 64  # Positions of a dense level: in any case, and for each entry
_UNSORTED = -1

_LIST = """
/* The number of floating-point values of {bits} bits that are not 0: whose bits but for the sign are not all 0. */
i64 count_{bits}(const {word} *x, i64 n) {{
    i64 found = 0;
    for (i64 i = 0; i < n; i++) found += ({word})(x[i] << 1) != 0;
    return found;
}}
/* z: axes, rows, length of a row (the last axis), address of the values to write, then by axis the extents and the
   addresses of the coordinates to write. There is room for one more than are found. */
void list_{bits}(const {word} *restrict x, const i64 *z) {{
    const i64 axes = z[0], length = z[2], *extents = z + 4, *addresses = extents + axes;
    {word} *restrict values = ({word} *)z[3];
    int *restrict last = (int *)addresses[axes - 1];
    i64 found = 0;
    for (i64 row = 0; row < z[1]; row++, x += length) {{
        const i64 first = found;
        for (i64 i = 0; i < length; i++) {{
            values[found] = x[i];
            last[found] = i;
            found += ({word})(x[i] << 1) != 0;
        }}
        for (i64 axis = axes - 2, rest = row; axis >= 0 && found > first; rest /= extents[axis--]) {{
            int *to = (int *)addresses[axis];
            const int at = rest % extents[axis];
            for (i64 e = first; e < found; e++) to[e] = at;
        }}
    }}
}}
"""
_WORDS = {16: "unsigned short", 32: "unsigned int", 64: "unsigned long long"}
_LEVELS = """
/* z: levels, dense ones, entries, then by level the extents, the addresses of the coordinates, of pos and crd to write,
   and the numbers of positions, which are written. Returns 0, -1 if entries are not sorted, -2 if two are the same. */
static inline __attribute__((always_inline)) i64 split(const i64 count, i64 *z) {
    i64 filled[16] = {0}, nodes[16] = {0}, before[16], *sizes = z + 3, *positions = sizes + 4 * count;
    const i64 dense = z[1], entries = z[2];
    const int *c[16];
    int *pos[16], *crd[16];
    for (i64 d = 0; d < count; d++) {
        before[d] = -1;
        c[d] = (const int *)sizes[count + d];
        pos[d] = (int *)sizes[2 * count + d];
        crd[d] = (int *)sizes[3 * count + d];
    }
    for (i64 e = 0; e < entries; e++) {
        i64 position = 0, fresh = 0;
        #pragma GCC unroll 4
        for (i64 d = 0; d < count; d++) {
            const i64 x = c[d][e];
            if (!fresh && x < before[d]) return -1;
            fresh |= x != before[d];
            before[d] = x;
            if (d < dense) { position = position * sizes[d] + x; continue; }
            if (fresh) {
                while (filled[d] <= position) pos[d][filled[d]++] = nodes[d];
                crd[d][nodes[d]++] = x;
            }
            position = nodes[d] - 1;
        }
        if (!fresh) return -2;
    }
    for (i64 d = 0, above = 1; d < count; above = positions[d++]) {
        positions[d] = d < dense ? above * sizes[d] : nodes[d];
        while (d >= dense && filled[d] <= above) pos[d][filled[d]++] = nodes[d];
    }
    return 0;
}
i64 levels(i64 *z) {
    switch (z[0]) {
        case 1: return split(1, z);
        case 2: return split(2, z);
        case 3: return split(3, z);
        case 4: return split(4, z);
        default: return split(z[0], z);
    }
}
"""


class StoredOperand(NamedTuple):
    """A sparse operand: its format, shape, coordinates of the entries by axis (int32), values [entries, dense...]."""

    format: Format
    shape: tuple[int, ...]
    coordinates: tuple[tuple[int, Tensor], ...]
    values: Tensor | None

    @property
    def entries(self) -> int:
        return len(self.coordinates[0][1])

    @property
    def dense(self) -> tuple[int, ...]:
        """The axes that the values have, as stored."""
        stored = {axis for axis, _ in self.coordinates}
        axes = (self.format.axes.index(name) for name, _ in self.format.coordinates)
        return tuple(axis for axis in axes if axis not in stored)


@dataclass(frozen=True, eq=False)
class Fibers:
    """The levels of a sparse operand. order: entries by position of the last level, None if they are the same; hashes:
    (table, keys) of the levels with a hash, by depth."""

    levels: tuple[LevelSize, ...]
    pos: tuple[Tensor, ...]
    crd: tuple[Tensor, ...]
    order: Tensor | None
    hashes: Mapping[int, tuple[Tensor, Tensor]]


def listed(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """(int32 coordinates by axis, values) of the nonzeros (and NaN) of a dense array, in row-major order. None if there
    is no kernel: there is one for floating-point values on a CPU with a C compiler."""
    if not x.dtype.is_floating_point or x.device.type != "cpu" or not x.ndim or nest_c.unavailable():
        return None
    bits = 8 * x.element_size()
    if bits not in _WORDS:
        return None
    x = x.detach().contiguous()
    count = _library()[f"count_{bits}"]
    count.restype = ctypes.c_int64
    address = ctypes.c_void_p(x.data_ptr())
    found = count(address, ctypes.c_int64(x.numel()))
    values, coords = x.new_empty(found + 1), [torch.empty(found + 1, **_INT32) for _ in x.shape]
    rows = x.numel() // max(1, x.shape[-1])
    numbers = array("q", [x.ndim, rows, x.shape[-1], values.data_ptr(), *x.shape, *(c.data_ptr() for c in coords)])
    _library()[f"list_{bits}"](address, _address(numbers))
    return tuple(c[:found] for c in coords), values[:found]


def fibers(operand: StoredOperand) -> Fibers | None:
    """The levels of an operand; None if two entries have the same coordinates."""
    axes, arrays = (tuple(each) for each in zip(*operand.coordinates, strict=True))
    sizes, kinds, positions = tuple(operand.shape[a] for a in axes), list[str](), 1
    levels = (level for name, level in operand.format.coordinates if operand.format.axes.index(name) in axes)
    for level, size in zip(levels, sizes, strict=True):
        kind, positions = KINDS[level.kind].locate, positions * size
        # Dense are leading levels with few positions, others are searched.
        few = {*kinds} <= {DENSE} and positions <= _DENSE + _EMPTY * operand.entries
        kinds.append(kind if kind != DENSE or few else COMPRESSED)
    return _fibers(arrays[0], axes, sizes, tuple(kinds), *arrays[1:])


@cached_per_tensor
def _fibers(
    first: Tensor, axes: tuple[int, ...], sizes: tuple[int, ...], kinds: tuple[str, ...], *others: Tensor
) -> Fibers | None:
    if kinds[-1] == DENSE:
        return None
    coordinates, order = [x.contiguous() for x in (first, *others)], None
    found = _split(coordinates, sizes, kinds)
    if found == _UNSORTED:
        order = _sorting(coordinates, sizes)
        found = _split([x[order] for x in coordinates], sizes, kinds)
    if isinstance(found, int):
        return None
    positions, pos, crd = found
    levels = tuple(map(LevelSize, axes, sizes, kinds, positions))
    hashes = {depth: _hash(_keys(pos[depth], crd[depth], sizes[depth])) for depth, k in enumerate(kinds) if k == HASHED}
    return Fibers(levels, pos, crd, None if order is None else order.int(), hashes)


def _split(
    coordinates: Sequence[Tensor], sizes: Sequence[int], kinds: Sequence[str]
) -> tuple[list[int], tuple[Tensor, ...], tuple[Tensor, ...]] | int:
    """(positions, pos, crd) by level of sorted coordinates; or that they are not sorted, or not distinct."""
    count, entries, dense = len(sizes), len(coordinates[0]), sum(kind == DENSE for kind in kinds)
    above = math.prod(sizes[:dense])
    pos = [torch.empty(0 if d < dense else 1 + (above if d == dense else entries), **_INT32) for d in range(count)]
    crd = [torch.empty(0 if d < dense else entries, **_INT32) for d in range(count)]
    addresses = (x.data_ptr() for x in (*coordinates, *pos, *crd))
    numbers = array("q", [count, dense, entries, *sizes, *addresses, *[0] * count])
    split = _library()["levels"]
    split.restype = ctypes.c_int64
    if (refused := split(_address(numbers))) != 0:
        return refused
    positions = numbers[-count:].tolist()
    used = [n + 1 if d > dense else len(x) for d, (n, x) in enumerate(zip([1, *positions[:-1]], pos, strict=True))]
    return (
        positions,
        tuple(x[:n] for x, n in zip(pos, used, strict=True)),
        tuple(x[:n] for x, n in zip(crd, positions, strict=True)),
    )


_INT32 = {"dtype": torch.int32, "device": "cpu"}


def _address(numbers: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def _keys(pos: Tensor, crd: Tensor, size: int) -> Tensor:
    """The position above and the coordinate, as one number, of each position of a level."""
    above = torch.arange(len(pos) - 1, device="cpu").repeat_interleave(pos.diff().long())
    return above * size + crd


def _hash(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(int32 table of positions of distinct keys, -1 where it is empty; the keys): open addressing, linear probing."""
    size = 1 << (2 * len(keys)).bit_length()
    table = torch.full((size,), -1, dtype=torch.int32, device="cpu")
    multiplier = MULTIPLIER - (1 << 64)  # As a signed number
    left, slots = torch.arange(len(keys), dtype=torch.int32, device="cpu"), (keys * multiplier >> 32) & (size - 1)
    while len(left):
        free = table[slots] < 0
        table[slots[free]] = left[free]
        kept = table[slots] != left
        left, slots = left[kept], (slots[kept] + 1) & (size - 1)
    return table, keys


def _sorting(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The order of the entries by coordinates, outermost first."""
    keys = coordinates[0].long()
    for x, size in zip(coordinates[1:], sizes[1:], strict=True):
        keys = keys * size + x
    return keys.argsort(stable=True)


@lru_cache(maxsize=1)
def _library() -> CDLL:
    return nest_c.library("".join(_LIST.format(bits=bits, word=word) for bits, word in _WORDS.items()) + _LEVELS)
