"""Entries of dense arrays, and the levels of sparse operands, on a CPU in C.

The levels of an operand are derived from the coordinates of its entries: per compressed level, the positions of its
coordinates (`pos`) below each position of the level above, and the coordinates (`crd`). Leading levels may be dense.

Source: "Unified Convolution Framework", 4.2.
"""

from __future__ import annotations

import ctypes
import math
import operator
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.formats import KINDS, Format
from pumice.language.iteration import COMPRESSED, DENSE, HASHED, LevelSize
from pumice.lower import nest_c
from pumice.lower.iterate_c import MULTIPLIER

MOST_LEVELS = 16
_DENSE, _EMPTY = 1 << 16, 64  # Positions of a dense level: in any case, and for each entry
_UNSORTED = -1

_LIST = """
typedef {word} w{bits} __attribute__((vector_size(8 * sizeof({word})), aligned(sizeof({word})), may_alias));
/* Marks the floating-point values of {bits} bits that are not 0, whose bits but for the sign are not all 0, by one bit
   each in words of 64; returns their number. */
i64 mark_{bits}(const {word} *x, i64 n, unsigned char *marks) {{
    i64 found = 0;
    for (i64 i = 0; i < n / 8; i++) {{
        w{bits} f = (w{bits})((*(const w{bits} *)(x + 8 * i) << 1) != 0) & (w{bits}){{1, 2, 4, 8, 16, 32, 64, 128}};
        f |= __builtin_shufflevector(f, f, 4, 5, 6, 7, 0, 1, 2, 3);
        f |= __builtin_shufflevector(f, f, 2, 3, 0, 1, 6, 7, 4, 5);
        f |= __builtin_shufflevector(f, f, 1, 0, 3, 2, 5, 4, 7, 6);
        marks[i] = f[0];
        found += __builtin_popcount(marks[i]);
    }}
    for (i64 i = n / 8; i % 8 || i == n / 8; i++) marks[i] = 0;
    for (i64 i = n & ~7ll; i < n; i++) {{
        const int kept = ({word})(x[i] << 1) != 0;
        marks[i / 8] |= kept << i % 8;
        found += kept;
    }}
    return found;
}}
/* z: axes, values, length of a row (the last axis), addresses of the marks, of the values to write and of the first one
   of each row to write, then by axis the extents and the addresses of the coordinates to write. */
static inline __attribute__((always_inline))
void list_of_{bits}(const i64 axes, const {word} *restrict x, const i64 *z) {{
    const i64 length = z[2], *extents = z + 6, *addresses = extents + axes;
    const unsigned long long *marks = (const unsigned long long *)z[3];
    {word} *restrict values = ({word} *)z[4];
    int *first = (int *)z[5], at[16] = {{0}}, *to[16];
    for (i64 d = 0; d < axes; d++) to[d] = (int *)addresses[d];
    i64 found = 0, start = 0;
    *first++ = 0;
    for (i64 n = 0; 64 * n < z[1]; n++) {{
        for (unsigned long long left = marks[n]; left; left &= left - 1) {{
            const i64 i = 64 * n + __builtin_ctzll(left);
            while (i >= start + length) {{
                start += length;
                *first++ = found;
                for (i64 d = axes - 2; d >= 0 && ++at[d] == extents[d]; d--) at[d] = 0;
            }}
            values[found] = x[i];
            #pragma GCC unroll 4
            for (i64 d = 0; d < axes - 1; d++) to[d][found] = at[d];
            to[axes - 1][found++] = i - start;
        }}
    }}
    for (; start < z[1]; start += length) *first++ = found;
}}
void list_{bits}(const {word} *x, const i64 *z) {{
    switch (z[0]) {{
        case 2: return list_of_{bits}(2, x, z);
        case 3: return list_of_{bits}(3, x, z);
        case 4: return list_of_{bits}(4, x, z);
        default: return list_of_{bits}(z[0], x, z);
    }}
}}
"""
_SCATTER = """
/* z: entries, address of the values (0: ones), of the array to add them to, levels, then by level the strides and the
   addresses of the coordinates. */
void scatter_{real}(const i64 *z) {{
    const i64 count = z[3], *strides = z + 4, *addresses = strides + count;
    const {real} *values = (const {real} *)z[1];
    {real} *to = ({real} *)z[2];
    for (i64 e = 0; e < z[0]; e++) {{
        i64 at = 0;
        for (i64 d = 0; d < count; d++) at += strides[d] * ((const int *)addresses[d])[e];
        to[at] += values ? values[e] : 1;
    }}
}}
"""
_REALS = {torch.float32: "float", torch.float64: "double"}
_WORDS = {16: "unsigned short", 32: "unsigned int", 64: "unsigned long long"}
_LEVELS = """
/* z: levels, dense ones, entries, memory for pos and crd of the others, then by level the extents and the addresses of
   the coordinates, and what is written: the addresses of pos and of crd, the numbers of positions, and these rounded to
   powers of two. Returns 0, -1 if entries are not sorted, -2 if two are the same. */
static inline __attribute__((always_inline)) i64 split(const i64 count, i64 *z) {
    i64 filled[16] = {0}, nodes[16] = {0}, before[16], *sizes = z + 4, *written = sizes + 2 * count;
    const i64 dense = z[1], entries = z[2];
    const int *c[16];
    int *pos[16], *crd[16], *free = (int *)z[3];
    for (i64 d = 0, above = 1; d < count; d++) {
        before[d] = -1;
        c[d] = (const int *)sizes[count + d];
        pos[d] = crd[d] = free;
        if (d >= dense) {
            crd[d] += above + 1;
            free = crd[d] + entries;
        }
        above = d < dense ? above * sizes[d] : entries;
        written[d] = (i64)pos[d];
        written[count + d] = (i64)crd[d];
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
    i64 *positions = written + 2 * count;
    for (i64 d = 0, above = 1; d < count; above = positions[d++]) {
        positions[d] = d < dense ? above * sizes[d] : nodes[d];
        while (d >= dense && filled[d] <= above) pos[d][filled[d]++] = nodes[d];
        i64 power = 1;
        while (2 * power * power < positions[d] * positions[d]) power *= 2;
        positions[count + d] = power;
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
_HEAD = 4  # Integers before those by level


@dataclass(frozen=True)
class StoredForm:
    """What the levels of a sparse operand depend on besides its entries. axes: those that have coordinates, outermost
    first; locates: how their levels locate, see formats.KINDS; dense: the axes that the values have, as stored."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    locates: tuple[str, ...]
    dense: tuple[int, ...]

    @staticmethod
    def of(format: Format, shape: tuple[int, ...], names: Collection[str]) -> StoredForm:
        """names: of the axes that have coordinates."""
        every = [(format.axes.index(name), level, name in names) for name, level in format.coordinates]
        axes = tuple(axis for axis, _, given in every if given)
        locates = tuple(KINDS[level.kind].locate for _, level, given in every if given)
        return StoredForm(shape, axes, locates, tuple(axis for axis, _, given in every if not given))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The extents of the levels' axes."""
        return tuple(self.shape[axis] for axis in self.axes)

    @cached_property
    def hashed(self) -> tuple[int, ...]:
        """The levels with a hash."""
        return tuple(depth for depth, kind in enumerate(self.locates) if kind == HASHED)

    @cached_property
    def leading(self) -> list[int]:
        """The numbers of positions of the leading dense levels."""
        count = next((depth for depth, kind in enumerate(self.locates) if kind != DENSE), len(self.axes))
        return [*accumulate(self.sizes[:count], operator.mul)]

    @cached_property
    def numbers(self) -> array[int]:
        """The integers of the C function that splits entries into levels, without those of an operand."""
        return array("q", [len(self.axes), 0, 0, 0, *self.sizes, *[0] * (5 * len(self.axes))])

    @cached_property
    def numbers_of_rows(self) -> array[int]:
        """The same with what is known if all levels are dense but the last."""
        found, count = self.numbers[:], len(self.axes)
        found[1] = count - 1
        for depth, positions in enumerate(self.leading):
            found[_HEAD + 4 * count + depth], found[_HEAD + 5 * count + depth] = positions, _rounded(positions)
        return found

    def place(self, name: str, depth: int) -> int:
        """Where Fibers.numbers has the address of "pos", "crd" or "coordinates" of a level, the "table", the "mask" or
        the "hash_keys" of its hash, or the "order" of all."""
        count = len(self.axes)
        if name in _BY_LEVEL:
            return _HEAD + _BY_LEVEL.index(name) * count + depth
        return _HEAD + 6 * count + (1 + 3 * self.hashed.index(depth) + _OF_HASH.index(name) if name != "order" else 0)


_BY_LEVEL, _OF_HASH = ("sizes", "coordinates", "pos", "crd", "positions"), ("table", "mask", "hash_keys")


class StoredLevels:
    """The coordinates of a sparse operand's entries (int32, by axis of its form), and the levels that they make. rows:
    of ListedEntries, if they were listed in this order and not written since."""

    form: StoredForm
    coordinates: list[Tensor]

    def __init__(self, form: StoredForm, coordinates: list[Tensor], rows: Tensor | None = None) -> None:
        self.form, self.coordinates, self._rows = form, coordinates, rows
        self._versions, self._fibers = list[int](), None

    @property
    def fibers(self) -> Fibers | None:
        """The levels, until the coordinates are written; None if two entries have the same coordinates."""
        try:
            versions = [x._version for x in self.coordinates]
        except RuntimeError:
            # Inference tensors do not tell that they were written.
            return Fibers.of(self.form, self.coordinates)
        if self._versions != versions:
            rows = None if any(versions) else self._rows
            self._versions, self._fibers = versions, Fibers.of(self.form, self.coordinates, rows)
        return self._fibers


class StoredOperand(NamedTuple):
    """A sparse operand: its levels, and values [entries, dense axes...], None if they are ones."""

    levels: StoredLevels
    values: Tensor | None

    @property
    def entries(self) -> int:
        return self.levels.coordinates[0].shape[0]


class Fibers:
    """The levels of a sparse operand.

    dense: number of leading dense levels; coordinates: of the entries; held: pos and crd of the other levels; order:
    entries by position of the last level, None if they are the same; hashes: (table, keys) by level of the form's
    `hashed`; numbers: what a nest reads, at the places of StoredForm.place.
    key: all that a nest depends on, positions rounded to powers of two: similar scenes have one nest."""

    form: StoredForm
    coordinates: Sequence[Tensor]
    order: Tensor | None
    held: Tensor
    numbers: array[int]
    dense: int
    hashes: list[tuple[Tensor, Tensor]]

    def __init__(
        self,
        form: StoredForm,
        coordinates: Sequence[Tensor],
        held: tuple[Tensor, array[int]],
        order: Tensor | None = None,
    ) -> None:
        self.form, self.coordinates, self.order, (self.held, self.numbers) = form, coordinates, order, held
        self.dense, self.hashes = self.numbers[1], list[tuple[Tensor, Tensor]]()
        self.key: tuple[int, bool, bytes] = self.dense, order is None, self.numbers[-len(form.axes) :].tobytes()
        if order is not None:
            # The levels were split from sorted copies.
            for place, x in enumerate(coordinates, form.place("coordinates", 0)):
                self.numbers[place] = x.data_ptr()
        self.numbers.append(0 if order is None else order.data_ptr())
        for depth in form.hashed:
            table, keys = found = _hash(_keys(self.pos[depth], self.crd[depth], form.sizes[depth]))
            self.hashes.append(found)
            self.numbers.extend((table.data_ptr(), len(table) - 1, keys.data_ptr()))

    @staticmethod
    def of(form: StoredForm, coordinates: Sequence[Tensor], rows: Tensor | None = None) -> Fibers | None:
        """The levels of entries with these coordinates; None if two of them are the same."""
        entries = coordinates[0].shape[0]
        dense = bisect_right(form.leading, _DENSE + _EMPTY * entries)
        if dense == len(form.axes):
            return None
        if rows is not None and dense == len(form.axes) - 1 and form.locates[-1] == COMPRESSED:
            return Fibers(form, coordinates, (rows, _of_rows(form, coordinates, rows)))
        listed = [x.contiguous() for x in coordinates]
        found, order = _split(form, listed, dense), None
        if found == _UNSORTED:
            order = _sorting(listed, form.sizes)
            found, order = _split(form, [x[order] for x in listed], dense), order.int()
        return None if isinstance(found, int) else Fibers(form, listed, found, order)

    @property
    def entries(self) -> int:
        return self.coordinates[0].shape[0]

    @property
    def positions(self) -> array[int]:
        """Of each level."""
        first = self.form.place("positions", 0)
        return self.numbers[first : first + len(self.form.axes)]

    @property
    def levels(self) -> tuple[LevelSize, ...]:
        """The levels with rounded positions."""
        form, rounded = self.form, array("q", self.key[2])
        kinds = (COMPRESSED if kind == DENSE and d >= self.dense else kind for d, kind in enumerate(form.locates))
        return tuple(map(LevelSize, form.axes, form.sizes, kinds, rounded))

    @property
    def pos(self) -> list[Tensor]:
        return self._parts("pos", [above + 1 for above in (1, *self.positions[:-1])])

    @property
    def crd(self) -> list[Tensor]:
        return self._parts("crd", self.positions)

    def _parts(self, name: str, sizes: Sequence[int]) -> list[Tensor]:
        first = self.form.place(name, 0)
        places = self.numbers[first : first + len(sizes)]
        return [self._part(at, size) for at, size in zip(places, sizes, strict=True)]

    def _part(self, address: int, size: int) -> Tensor:
        """A part of the memory, nothing for dense levels."""
        for memory in (self.held, self.coordinates[-1]):
            start = (address - memory.data_ptr()) // 4
            if 0 <= start <= memory.numel() - size:
                return memory[start : start + size]
        return self.held[:0]


class ListedEntries(NamedTuple):
    """Entries in row-major order: int32 coordinates by axis, values, and the first entry of each row [rows + 1]."""

    coordinates: tuple[Tensor, ...]
    values: Tensor
    rows: Tensor


def listed(x: Tensor) -> ListedEntries | None:
    """The nonzeros (and NaN) of a dense array, in row-major order. None if there is no kernel: there is one for
    floating-point values on a CPU with a C compiler, where no mode of torch stands between them and their memory."""
    served = x.dtype.is_floating_point and x.device.type == "cpu" and 0 < x.ndim <= MOST_LEVELS
    if not served or torch._C._len_torch_dispatch_stack():
        return None
    bits = 8 * x.element_size()
    if bits not in _WORDS or nest_c.unavailable():
        return None
    x, length = x.detach().contiguous(), x.shape[-1]
    marks = torch.empty(-(-x.numel() // 64) + 1, dtype=torch.int64, device=_CPU)
    mark, address = _library()[f"mark_{bits}"], ctypes.c_void_p(x.data_ptr())
    mark.restype = ctypes.c_int64
    found = mark(address, ctypes.c_int64(x.numel()), ctypes.c_void_p(marks.data_ptr()))
    values, coords = x.new_empty(found), tuple([torch.empty(found, dtype=torch.int32, device=_CPU) for _ in x.shape])
    rows = torch.empty(x.numel() // max(1, length) + 1, dtype=torch.int32, device=_CPU)
    written = marks.data_ptr(), values.data_ptr(), rows.data_ptr()
    numbers = array("q", [x.ndim, x.numel(), length, *written, *x.shape, *(c.data_ptr() for c in coords)])
    _library()[f"list_{bits}"](address, _address(numbers))
    return ListedEntries(coords, values, rows)


def scattered(operand: StoredOperand, dtype: torch.dtype) -> Tensor | None:
    """The dense array of an operand without dense axes, in C; None if there is no kernel."""
    form, coordinates = operand.levels.form, [x.contiguous() for x in operand.levels.coordinates]
    if form.dense or dtype not in _REALS or nest_c.unavailable():
        return None
    found = torch.zeros(form.shape, dtype=dtype, device=_CPU)
    values = None if operand.values is None else operand.values.contiguous()
    addresses = [0 if values is None else values.data_ptr(), found.data_ptr()]
    strides = [found.stride(axis) for axis in form.axes]
    lists = (x.data_ptr() for x in coordinates)
    numbers = array("q", [operand.entries, *addresses, len(strides), *strides, *lists])
    _library()[f"scatter_{_REALS[dtype]}"](_address(numbers))
    return found


def _split(form: StoredForm, coordinates: Sequence[Tensor], dense: int) -> tuple[Tensor, array[int]] | int:
    """Memory with pos and crd of sorted coordinates, and the integers that tell of them; or that coordinates are not
    sorted, or not distinct."""
    count, entries, numbers = len(form.axes), coordinates[0].shape[0], form.numbers[:]
    above, levels = form.leading[dense - 1] if dense else 1, count - dense
    held = torch.empty(above + 1 + (levels - 1) * (entries + 1) + levels * entries, dtype=torch.int32, device=_CPU)
    numbers[1], numbers[2], numbers[3] = dense, entries, held.data_ptr()
    for place, x in enumerate(coordinates, _HEAD + count):
        numbers[place] = x.data_ptr()
    return _splitter()(numbers.buffer_info()[0]) or (held, numbers)


def _of_rows(form: StoredForm, coordinates: Sequence[Tensor], rows: Tensor) -> array[int]:
    """The same integers where all levels are dense but the last, whose pos and crd are known."""
    count, entries, numbers = len(form.axes), coordinates[0].shape[0], form.numbers_of_rows[:]
    for place, x in enumerate(coordinates, _HEAD + count):
        numbers[place] = x.data_ptr()
    last = _HEAD + 3 * count - 1  # The place of pos, before those of crd, of positions, and of rounded ones
    numbers[2], numbers[last], numbers[last + count] = entries, rows.data_ptr(), numbers[_HEAD + 2 * count - 1]
    numbers[last + 2 * count], numbers[last + 3 * count] = entries, _rounded(entries)
    return numbers


def _rounded(count: int) -> int:
    """The nearest power of two."""
    return 1 << round(math.log2(count or 1))


@lru_cache(maxsize=1)
def _splitter() -> Callable[[int], int]:
    split = _library()["levels"]
    split.argtypes, split.restype = (ctypes.c_void_p,), ctypes.c_int64
    return split


_CPU = torch.device("cpu")


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
    lists = (_LIST.format(bits=bits, word=word) for bits, word in _WORDS.items())
    return nest_c.library("".join((*lists, *(_SCATTER.format(real=real) for real in _REALS.values()), _LEVELS)))
