"""Serialization of coordinates along a space-filling curve, and its inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.codes import WORD_BITS, axes_of_hilbert, deinterleave, hilbert_of_axes, interleave, serial_places
from pumice.coords.geometry import check_form
from pumice.errors import CoordinateError, DtypeError, OptionError, ShapeError

# Default bits per axis by words of the code and by D: at least 15 bits are left for the batch.
_DEPTHS = {1: (31, 24, 16, 12), 2: (31, 31, 31, 27)}
_MAX_DEPTH = 31


class HasCoords(Protocol):
    """A SparseTensor or a Geometry."""

    @property
    def coords(self) -> Tensor: ...


@dataclass(frozen=True)
class Curve:
    """A space-filling curve: the transform of coordinates int [N] per axis before bit interleaving, and its inverse."""

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
    """Layout of a code: D axes of `depth` bits each, the batch above them, in words of 63 bits."""

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
    """Position of each coordinate along a space-filling curve; argsort it to follow the curve.

        code = batch << (D * depth) | curve(c)        0 <= c < 2**depth on every axis, 0 <= curve(c) < 2**(D * depth)

    Parameters
    ----------
    coords: int32 [N, 1+D] = (batch, axes...), D from 1 to 4, non-negative; or a SparseTensor or Geometry.
    order: "morton" (interleaved bits, axis 0 the highest of each group) or "hilbert" (neighbours on the curve are
        neighbours in space; codes of different depths are not comparable).
    depth: bits per axis, 1 to 31; D * depth plus the bits of the largest batch index must fit in 63. Default:

            D                     1   2   3   4
            depth                31  24  16  12     with 32, 15, 15, 15 bits for the batch
            depth, if wide       31  31  31  27     with 31, 31, 31, 18

    wide: codes of two words, 126 bits.
    check: False skips the range check and its host synchronisation; bits that do not fit are then dropped.

    Returns int64 [N], or if wide [N, 2] = (high, low) words of 63 bits, in lexicographic order.

    Raises CoordinateError (coordinates outside [0, 2**depth), too many bits), OptionError, ShapeError, DtypeError.

    Source: the serialization of X. Wu et al., Point Transformer V3, CVPR 2024, section 4.1."""
    matrix = coords if isinstance(coords, Tensor) else coords.coords
    curve = _curve_of(order)
    check_form(matrix)
    form = _CurveForm.of(matrix.shape[1] - 1, depth, 2 if wide else 1)
    if check:
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
    dim, order, depth: D, and the arguments of serialize(); the default depth is that of the codes' width.
    check: False skips the range check and its host synchronisation.

    Raises CoordinateError (codes beyond D axes and an int32 batch), OptionError, ShapeError, DtypeError."""
    curve = _curve_of(order)
    if codes.dtype != torch.int64:
        raise DtypeError(f"codes are torch.int64, found {codes.dtype}")
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
    if order not in CURVES:
        raise OptionError(f"order={order!r} is unknown; there are {', '.join(CURVES)}")
    return CURVES[order]


def _check_range(bounds: Bounds, form: _CurveForm) -> None:
    low, high, last = min(bounds.low), max(bounds.high), max(bounds.batch - 1, 0)
    if low < 0 or high >> form.depth:
        raise CoordinateError(
            f"coordinates of {form.depth} bits are 0 to {2**form.depth - 1}, found {low if low < 0 else high}"
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
                f"words of codes of {form} and the batch are 0 to {2**held - 1}, found {low if low < 0 else high}"
            )
