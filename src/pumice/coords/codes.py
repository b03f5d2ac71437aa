"""Codes of integer coordinates along space-filling curves: Morton, which is the storage order, and Hilbert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from pumice.coords.box import Bounds, check_form, dtype_of
from pumice.errors import CoordinateError, DtypeError, OptionError, ShapeError
from pumice.runtime.launch import cached_device_constant, to_device_async

Places = tuple[tuple[int, ...], ...]

WORD_BITS = 63  # Bits of a code word: an int64 without its sign
TABLE_ENTRIES = 2**22


@dataclass(frozen=True)
class CodeLayout:
    """Bit layout of Morton codes of the coordinates in a box.

        code(c) = sum over axes a and bits i of  (bit i of c[a] + bias[a]) << places[a][i]
                = sum over axes a of  tables[starts[a] + c[a] + bias[a]]

    places: per axis, positions in the code of the axis's bits, lowest first; () for an axis of one value.
    bias: per axis, added to make values non-negative: a power of two, the top bit, on an axis of both signs; else minus
        the high bits that all values share, so that codes are short far from 0, too.

    Example: x from 0 to 3 and y from -1 to 0 have places ((0, 1), (2,)) and bias (0, 1)."""

    places: Places
    bias: tuple[int, ...]

    @staticmethod
    def of(bounds: Bounds) -> CodeLayout:
        magnitudes, bias, signed = zip(*map(_axis_bits, bounds.low, bounds.high), strict=True)
        return CodeLayout(_bit_places(magnitudes, signed), bias)

    @property
    def bits(self) -> int:
        """Number of bits of all axes; the batch index goes above them."""
        return sum(map(len, self.places))

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of each axis's table in `tables`."""
        return tuple(accumulate((1 << len(p) for p in self.places[:-1]), initial=0))

    def tables(self, device: torch.device | str) -> Tensor:
        """int64 [sum over axes a of 2**len(places[a])]: contribution to the code of each value of each axis.

        tables[starts[a] + v] = sum over bits i of  (bit i of v) << places[a][i]     for v in [0, 2**len(places[a]))

        Cached: do not modify. Raises CoordinateError for an axis of more than 22 bits or a code of more than 63."""
        longest = max(map(len, self.places))
        if 1 << longest > TABLE_ENTRIES:
            raise CoordinateError(f"an axis has a table of {1 << longest} entries, at most {TABLE_ENTRIES} fit")
        if self.bits > WORD_BITS:
            raise CoordinateError(f"the code has {self.bits} bits, a word holds {WORD_BITS}")
        return _tables(self.places, torch.device(device))


def morton_argsort(coords: Tensor, bounds: Bounds) -> Tensor:
    """int64 [N]: stable argsort of `coords` by (batch, Morton code of `c + 2**31` per axis, axis 0 highest).

    `floor(c / 2)` preserves this order: the next coarser level of sorted coordinates is sorted."""
    words = _morton_words(coords, bounds)
    order = torch.argsort(words[-1], stable=True)
    for word in reversed(words[:-1]):
        order = order[torch.argsort(word[order], stable=True)]
    return order


def morton_unique(coords: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """(distinct rows of `coords` in (batch, Morton) order, [M, 1+D]; inverse indices, int64 [N])."""
    if coords.shape[0] == 0:
        return coords, torch.zeros(0, dtype=torch.int64, device=coords.device)
    order = morton_argsort(coords, bounds)
    ranked = coords[order]
    first = torch.ones(len(ranked), dtype=torch.bool, device=coords.device)
    first[1:] = (ranked[1:] != ranked[:-1]).any(dim=1)
    place = torch.empty_like(order)
    place[order] = torch.cumsum(first, 0) - 1
    return ranked[first], place


@lru_cache(maxsize=64)
def serial_places(dim: int, depth: int, words: int) -> Places:
    """Bit positions of (batch, axes...) in a serialized code: axes interleaved, axis 0 highest; batch on top."""
    top = dim * depth
    batch = tuple(range(top, min(top + 31, words * WORD_BITS)))
    return batch, *_bit_places((depth,) * dim, (False,) * dim)


def interleave(values: Sequence[Tensor], places: Places, words: int) -> list[Tensor]:
    """Code words, int64 [N] of 63 bits, lowest word first, with bit i of values[a] int [N] at bit places[a][i]."""
    code = [torch.zeros_like(values[0], dtype=torch.int64) for _ in range(words)]
    for value, axis_places in zip(values, places, strict=True):
        _spread(value.long(), axis_places, code)
    return code


def deinterleave(words: Sequence[Tensor], places: Places) -> list[Tensor]:
    """The values, int64 [N] each: the inverse of interleave()."""
    values = []
    for axis_places in places:
        value = torch.zeros_like(words[0])
        for index, moves in _moves(axis_places).items():
            value |= _move_bits(words[index], ((shift, bit) for bit, shift in moves))
        values.append(value)
    return values


def hilbert_of_axes(axes: Sequence[Tensor], depth: int) -> list[Tensor]:
    """Hilbert index of coordinates, int [N] of `depth` bits per axis, de-interleaved into one value per axis.

    Interleaving these values, axis 0 highest, gives the index. From the coarsest bit down, each octant is rotated onto
    the first; then the Gray code of the bits is decoded.

    Source: J. Skilling, Programming the Hilbert curve, AIP Conference Proceedings 707, 2004."""
    turned = list(axes)
    for bit in range(depth - 1, 0, -1):
        for axis in range(len(turned)):
            _turn(turned, axis, bit)
    for axis in range(1, len(turned)):
        turned[axis] = turned[axis] ^ turned[axis - 1]
    flips = _parity_above(turned[-1])
    return [value ^ flips for value in turned]


def axes_of_hilbert(dealt: Sequence[Tensor], depth: int) -> list[Tensor]:
    """The inverse of hilbert_of_axes()."""
    first = dealt[0] ^ (dealt[-1] >> 1)
    turned = [first, *(dealt[axis] ^ dealt[axis - 1] for axis in range(1, len(dealt)))]
    for bit in range(1, depth):
        for axis in reversed(range(len(turned))):
            _turn(turned, axis, bit)
    return turned


def _turn(axes: list[Tensor], axis: int, bit: int) -> None:
    """Flip the bits of axes[0] below `bit` where axes[axis] has `bit`, else swap them with axes[axis]. Self-inverse."""
    below = (1 << bit) - 1
    flip = -((axes[axis] >> bit) & 1) & below
    swap = (axes[0] ^ axes[axis]) & (below ^ flip)
    axes[0] = axes[0] ^ flip ^ swap
    axes[axis] = axes[axis] ^ swap


def _parity_above(value: Tensor) -> Tensor:
    """Bit k of the result: parity of the bits of `value` above k; for values below 2**32."""
    for step in (1, 2, 4, 8, 16):
        value = value ^ (value >> step)
    return value >> 1


def _morton_words(coords: Tensor, bounds: Bounds) -> list[Tensor]:
    """The (batch, Morton) code as int64 words, most significant first; nearly always one."""
    layout = CodeLayout.of(bounds)
    batch = coords[:, 0].long()
    words = [torch.zeros_like(batch) for _ in range(max(-(-layout.bits // WORD_BITS), 1))]
    for axis, axis_places in enumerate(layout.places):
        _spread(coords[:, axis + 1].long() + layout.bias[axis], axis_places, words)
    if layout.bits + max(bounds.batch - 1, 0).bit_length() <= len(words) * WORD_BITS:
        words[-1] += batch << (layout.bits - (len(words) - 1) * WORD_BITS)
    else:
        words.append(batch)
    return words[::-1]


def _axis_bits(low: int, high: int) -> tuple[int, int, bool]:
    """(number of bits without the sign bit, bias, True if there is a sign bit) of an axis."""
    if low < 0 <= high:
        magnitude = max(high, -low - 1).bit_length()
        return magnitude, 1 << magnitude, True
    magnitude = (low ^ high).bit_length()
    return magnitude, -(low >> magnitude << magnitude), False


@lru_cache(maxsize=256)
def _bit_places(magnitudes: tuple[int, ...], signed: tuple[bool, ...]) -> Places:
    """Position of each bit of each axis in the interleaved code, lowest first. Sign bits are above all others, so that
    the order is that of interleaved 32-bit coordinates."""
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


def _spread(value: Tensor, places: tuple[int, ...], words: list[Tensor]) -> None:
    """Add bit i of `value` int64 [N] to `words` at bit places[i], byte by byte."""
    for byte in range(0, len(places), 8):
        digit = (value >> byte) & 255
        for index, table in _byte_tables(places[byte : byte + 8], value.device):
            words[index] += table[digit]


@cached_device_constant(1024)
def _byte_tables(places: tuple[int, ...], device: torch.device) -> tuple[tuple[int, Tensor], ...]:
    """(word index, int64 [256]: each value of a byte with its bits moved to `places`) for each word affected."""
    digits = torch.arange(256, dtype=torch.int64, device=device)
    return tuple((index, _move_bits(digits, moves)) for index, moves in _moves(places).items())


@cached_device_constant(64)
def _tables(places: Places, device: torch.device) -> Tensor:
    values = [torch.arange(1 << len(p), dtype=torch.int64) for p in places]
    return to_device_async(
        torch.cat([_move_bits(v, enumerate(p)) for v, p in zip(values, places, strict=True)]), device
    )


def _moves(places: tuple[int, ...]) -> dict[int, list[tuple[int, int]]]:
    """(bit of the value, bit of the word) pairs by word index."""
    moves: dict[int, list[tuple[int, int]]] = {}
    for bit, place in enumerate(places):
        word, shift = divmod(place, WORD_BITS)
        moves.setdefault(word, []).append((bit, shift))
    return moves


def _move_bits(values: Tensor, moves: Iterable[tuple[int, int]]) -> Tensor:
    """Move bit `source` of each value to bit `target`, for every (source, target)."""
    moved = torch.zeros_like(values)
    for source, target in moves:
        moved |= ((values >> source) & 1) << target
    return moved


# Serialization
# Default bits per axis, by number of code words and D - 1: at least 15 bits are left for the batch.
_DEPTHS = {1: (31, 24, 16, 12), 2: (31, 31, 31, 27)}
_MAX_DEPTH = 31


class HasCoords(Protocol):
    """A SparseTensor or a Geometry."""

    @property
    def coords(self) -> Tensor: ...


@dataclass(frozen=True)
class Curve:
    """A space-filling curve. deal: transform of coordinates, int [N] per axis, before interleaving; undo: inverse."""

    deal: Callable[[Sequence[Tensor], int], list[Tensor]]
    undo: Callable[[Sequence[Tensor], int], list[Tensor]]


def _as_they_are(axes: Sequence[Tensor], depth: int) -> list[Tensor]:
    return list(axes)


CURVES: dict[str, Curve] = {
    "morton": Curve(_as_they_are, _as_they_are),
    "hilbert": Curve(hilbert_of_axes, axes_of_hilbert),
}


@dataclass(frozen=True)
class _CurveForm:
    """Layout of a serialized code: D axes of `depth` bits each, the batch above them, in words of 63 bits."""

    dim: int
    depth: int
    words: int

    @staticmethod
    def of(dim: int, depth: int | None, words: int) -> _CurveForm:
        if depth is None:
            return _CurveForm(dim, _DEPTHS[words][dim - 1], words)
        if not 1 <= depth <= _MAX_DEPTH:
            raise OptionError(f"depth takes 1 to {_MAX_DEPTH} bits per axis, found {depth}")
        form = _CurveForm(dim, depth, words)
        if form.spare < 0:
            raise CoordinateError(f"{form} take {dim * depth} bits, a code holds {words * WORD_BITS}{form.hint}")
        return form

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        return serial_places(self.dim, self.depth, self.words)

    @property
    def spare(self) -> int:
        """Bits left for the batch."""
        return self.words * WORD_BITS - self.dim * self.depth

    @property
    def hint(self) -> str:
        return "; wide=True doubles them" if self.words == 1 else "; take a smaller depth"

    def __str__(self) -> str:
        return f"{self.dim} axes of {self.depth} bits"


def serialize(
    coords: Tensor | HasCoords,
    order: str = "morton",
    depth: int | None = None,
    *,
    wide: bool = False,
    check: bool = True,
) -> Tensor:
    """Code of each coordinate: its position along a space-filling curve, to be sorted by.

        code = batch << (D * depth) | curve(c)        0 <= c < 2**depth on every axis, 0 <= curve(c) < 2**(D * depth)

    Parameters
    ----------
    coords: int32 [N, 1+D] = (batch, axes...), D from 1 to 4, non-negative; or a SparseTensor or Geometry.
    order: "morton" (interleaved bits, axis 0 highest) or "hilbert" (neighbours on the curve are neighbours in space;
        codes of different depths are not comparable).
    depth: bits per axis, 1 to 31; D * depth plus the bits of the largest batch index must fit in 63. Default:

            D                     1   2   3   4
            depth                31  24  16  12     31, 15, 15, 15 bits are left for the batch
            depth, if wide       31  31  31  27     31, 31, 31, 18

    wide: use codes of two words, 126 bits.
    check: False skips the range check and its host synchronisation, as torch.compile and torch.export need; bits that
        do not fit are then dropped.

    Returns int64 [N]; if wide, int64 [N, 2] = (high, low) words of 63 bits, in lexicographic order.

    Raises CoordinateError (coordinates outside [0, 2**depth), too many bits), OptionError, ShapeError, DtypeError.

    Source: the serialization of X. Wu et al., Point Transformer V3, CVPR 2024, section 4.1."""
    matrix: Any = getattr(coords, "coords", coords)
    curve = _curve_of(order)
    check_form(matrix)
    form = _CurveForm.of(matrix.shape[1] - 1, depth, 2 if wide else 1)
    if check:
        if torch.compiler.is_compiling():
            raise OptionError("serialize reads the range of coords, unknown under torch.compile: pass check=False")
        _check_range(Bounds.of(matrix), form)
    batch, *axes = matrix.unbind(1)
    words = interleave([batch, *curve.deal(axes, form.depth)], form.places, form.words)
    return torch.stack(words[::-1], dim=1) if wide else words[0]


def deserialize(
    codes: Tensor, dim: int, order: str = "morton", depth: int | None = None, *, check: bool = True
) -> Tensor:
    """The coordinates int32 [N, 1+D] of `codes`: the inverse of serialize().

    Parameters
    ----------
    codes: int64 [N], or [N, 2] from serialize(wide=True).
    dim: D. order, depth: as given to serialize(); the default depth depends on D and the width of the codes.
    check: False skips the range check and its host synchronisation.

    Raises CoordinateError (codes with more bits than the layout has), OptionError, ShapeError, DtypeError."""
    curve = _curve_of(order)
    if not isinstance(codes, Tensor) or codes.dtype != torch.int64:
        raise DtypeError(f"codes must be a tensor of torch.int64, found {dtype_of(codes)}")
    if codes.ndim != 1 and (codes.ndim != 2 or codes.shape[1] != 2):
        raise ShapeError(f"codes are [N], or [N, 2] if wide, found shape {list(codes.shape)}")
    if not 1 <= dim <= 4:
        raise ShapeError(f"coordinates have 1 to 4 spatial axes, found dim={dim}")
    words = [codes] if codes.ndim == 1 else [codes[:, 1], codes[:, 0]]
    form = _CurveForm.of(dim, depth, len(words))
    if check:
        _check_codes(words, form)
    batch, *dealt = (value.int() for value in deinterleave(words, form.places))
    return torch.stack([batch, *curve.undo(dealt, form.depth)], dim=1)


def _curve_of(order: str) -> Curve:
    OptionError.check("order", order, CURVES)
    return CURVES[order]


def _check_range(bounds: Bounds, form: _CurveForm) -> None:
    low, high, last = min(bounds.low), max(bounds.high), max(bounds.batch - 1, 0)
    if low < 0 or high >> form.depth:
        raise CoordinateError(
            f"coordinates of {form.depth} bits range from 0 to {2**form.depth - 1}, found {low if low < 0 else high}"
            f"{'; subtract the least along each axis' if low < 0 else ''}"
        )
    if last.bit_length() > form.spare:
        raise CoordinateError(
            f"{form} leave {form.spare} bits of {form.words * WORD_BITS} for the batch, whose index {last} takes "
            f"{last.bit_length()}{form.hint}"
        )


def _check_codes(words: Sequence[Tensor], form: _CurveForm) -> None:
    if len(words[0]) == 0:
        return
    bits = form.dim * form.depth + len(form.places[0])
    ends = torch.stack([end for word in words for end in torch.aminmax(word)]).tolist()
    for index, (low, high) in enumerate(zip(ends[::2], ends[1::2], strict=True)):
        held = min(max(bits - index * WORD_BITS, 0), WORD_BITS)
        if low < 0 or high >> held:
            raise CoordinateError(
                f"code words of {form} and the batch range from 0 to {2**held - 1}, found {low if low < 0 else high}"
            )
