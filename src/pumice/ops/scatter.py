"""Reductions of rows by an index, and their inverse: what graph and point networks take from torch_scatter.

    scatter          y[index[p], c] = join of x[p, c]          any index
    segment_reduce   the same over segments: sorted indices, or pointers to their starts
    gather           y[p, c] = x[index[p], c]

Axes before the reduced one are folded into the index, axes after it are channels: one kernel serves every shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from pumice.coords.box import check_integers
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import rows as lowered
from pumice.ops import autograd
from pumice.runtime.cache import cached_per_tensor


@overload
def scatter(
    src: Tensor, index: Tensor, dim: int = -1, *, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor: ...
@overload
def scatter(
    src: Tensor, index: Tensor, dim: int = -1, *, dim_size: int | None = None, reduce: str, places: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def scatter(
    src: Tensor, index: Tensor, dim: int = -1, *, dim_size: int | None = None, reduce: str = "sum", places: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Join the entries of `src` along `dim` that have the same index.

        y[index[p], c] = join of src[p, c] over p          shown for dim 0; 0 for an index that does not occur

    index: int32 or int64, in any order, 1-D or of a shape that broadcasts to src's. dim_size: size of the result along
    dim, default: the largest index + 1 (read on the host). reduce: a name of REDUCTIONS; "softmax" and "log_softmax"
    normalise the entries of each index, in the shape of src. places: for "max" and "min" return (y, arg) with the first
    position along dim that attains each, src.shape[dim] for none.

    Sums are in float32 at least and in a fixed order; a NaN is the maximum, and the minimum. Gradients of any order;
    that of a maximum goes to its place. Names and meaning are those of torch_scatter's scatter_sum, scatter_max and so
    on. Raises ShapeError, DtypeError, DeviceError, OptionError, and CoordinateError for an index out of range; the
    range of an index tensor is read once.
    """
    dim = _axis(src, dim)
    _check_reduction(src, reduce, places)
    _check_index(src, index)
    lowest, highest, _ = _extent(index)
    size = _size(lowest, highest, dim_size)
    return _reduced(_rows_of(src, index, dim, size, False), reduce, places)


@overload
def segment_reduce(
    src: Tensor,
    index: Tensor | None = None,
    *,
    indptr: Tensor | None = None,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor: ...
@overload
def segment_reduce(
    src: Tensor,
    index: Tensor | None = None,
    *,
    indptr: Tensor | None = None,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str,
    places: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def segment_reduce(
    src: Tensor,
    index: Tensor | None = None,
    *,
    indptr: Tensor | None = None,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
    places: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Join the entries of each segment of `src` along `dim`.

        y[s, c] = join of src[p, c] over indptr[s] <= p < indptr[s + 1], or over index[p] = s with a sorted index

    Give index [src.shape[dim]] or indptr [segments + 1], int32 or int64, as to torch_scatter's segment_coo and
    segment_csr; entries outside of the pointers are left out. Otherwise as `scatter`, whose order of additions it
    shares. Also raises CoordinateError for an index or pointers that are not sorted.
    """
    dim = _axis(src, dim)
    _check_reduction(src, reduce, places)
    name, given = _one_of(index, indptr)
    _check_index(src, given, name)
    lowest, highest, is_sorted = _extent(given)
    if given.ndim != 1 or not is_sorted:
        raise CoordinateError(f"{name} is 1-D and in ascending order; use scatter for other indices")
    if indptr is not None:
        if not len(indptr) or lowest < 0 or highest > src.shape[dim]:
            raise CoordinateError(f"pointers are 0 to {src.shape[dim]}, the size of src; found {lowest} to {highest}")
        size, index = len(indptr) - 1, _segment_of(indptr, src.shape[dim])
    else:
        size = _size(lowest, highest, dim_size)
    assert index is not None
    return _reduced(_rows_of(src, index, dim, size, dim == 0 and indptr is None), reduce, places)


def gather(src: Tensor, index: Tensor | None = None, *, indptr: Tensor | None = None, dim: int = 0) -> Tensor:
    """Entries of `src` along `dim` at a 1-D index, or each repeated over its segment: the inverse of segment_reduce.

        y[p, c] = src[index[p], c], or src[s, c] with indptr[s] <= p < indptr[s + 1]

    As torch_scatter's gather_coo and gather_csr. The gradient is a sum in a fixed order, in float32 at least. Raises
    as segment_reduce; an index need not be sorted, pointers begin with 0.
    """
    dim = _axis(src, dim)
    name, given = _one_of(index, indptr)
    _check_index(src, given, name, whole=False)
    lowest, highest, is_sorted = _extent(given)
    if indptr is not None:
        if len(indptr) != src.shape[dim] + 1 or lowest or not is_sorted:
            raise CoordinateError(f"pointers are {src.shape[dim] + 1} in ascending order from 0, found {len(indptr)}")
        index = _segment_of(indptr, highest)
    elif lowest < 0 or highest >= src.shape[dim]:
        raise CoordinateError(f"an index is 0 to {src.shape[dim] - 1}, the size of src; found {lowest} to {highest}")
    assert index is not None
    front = src.movedim(dim, 0)
    found = _spread(front.reshape(len(front), math.prod(front.shape[1:])), _int64(index))
    return found.reshape(len(found), *front.shape[1:]).movedim(0, dim)


class _Folded(NamedTuple):
    """src as rows [R, C]. index: int64 [R], -1 for rows that are left out; count: of results, reshaped to `shape`;
    axis: (size of the reduced axis, size of the axes after it that are not channels)."""

    values: Tensor
    index: Tensor
    count: int
    shape: tuple[int, ...]
    of: Tensor
    axis: tuple[int, int]
    is_sorted: bool

    def sums(self, values: Tensor) -> Tensor:
        run = lowered.sum_items if _kernels_run(values) else None
        if run is None:
            return lowered.sum_items_torch(values, self.index, self.count)
        return run(values, self.index, self.count, self.is_sorted)

    def spread(self, values: Tensor) -> Tensor:
        return _spread(values, self.index)

    @property
    def wide(self) -> Tensor:
        return self.values.to(torch.promote_types(self.values.dtype, torch.float32))


def _rows_of(src: Tensor, index: Tensor, dim: int, size: int, is_sorted: bool) -> _Folded:
    before, after, entries = src.shape[:dim], src.shape[dim + 1 :], src.shape[dim]
    whole = index.reshape(*[1] * (dim if index.ndim == 1 else 0), *index.shape)
    whole = whole.reshape(*whole.shape, *[1] * (src.ndim - whole.ndim))
    _check_shape(src, index, whole, dim)
    varies = any(n > 1 for n in whole.shape[dim + 1 :])
    lead, tail, channels = math.prod(before), *((math.prod(after), 1) if varies else (1, math.prod(after)))
    if index.ndim == 1 and not before:
        # The tensor itself, of which facts are cached.
        flat = _int64(index)
    else:
        wanted = *before, entries, *(after if varies else [1] * len(after))
        flat = _folded(whole.expand(wanted).reshape(lead, entries, tail), size)
    values = src.reshape(lead * entries * tail, channels)
    return _Folded(values, flat, lead * size * tail, (*before, size, *after), src, (entries, tail), is_sorted)


def _folded(index: Tensor, size: int) -> Tensor:
    """Index of each entry among the results of [before, size, tail]."""
    before, _, tail = index.shape
    lead = torch.arange(before, device=index.device)[:, None, None] * size
    found = (lead + index) * tail + torch.arange(tail, device=index.device)
    return torch.where(index < 0, -1, found).reshape(-1)


# Reductions


def _reduced(rows: _Folded, reduce: str, places: bool) -> Tensor | tuple[Tensor, Tensor]:
    if places:
        values, first = _extreme(rows, reduce == "min", True)
        assert first is not None
        return values.reshape(rows.shape), _place(rows, first).reshape(rows.shape)
    found = REDUCTIONS[reduce](rows).to(rows.values.dtype)
    return found.reshape(rows.of.shape if "softmax" in reduce else rows.shape)


def _sum(rows: _Folded) -> Tensor:
    return rows.sums(rows.values)


def _mean(rows: _Folded) -> Tensor:
    counts, total = _counts(rows.index, rows.count)[:, None], rows.sums(rows.values)
    return total.div_(counts) if total.is_floating_point() else total.div(counts, rounding_mode="floor")


def _extreme(rows: _Folded, least: bool, places: bool) -> tuple[Tensor, Tensor | None]:
    """(values, their first rows)."""
    if not _kernels_run(rows.values):
        return lowered.extreme_items_torch(rows.values, rows.index, rows.count, least, places)
    return lowered.extreme_items(rows.values, rows.index, rows.count, least, places, rows.is_sorted)


def _place(rows: _Folded, first: Tensor) -> Tensor:
    """Position along the reduced axis of a row, its size for row -1."""
    (entries, tail), first = rows.axis, first.long()
    place = first if len(rows.values) == entries else first // tail % max(1, entries)
    return torch.where(first < 0, entries, place)


def _softmax(rows: _Folded, log: bool) -> Tensor:
    wide = rows.wide
    top, _ = _extreme(rows._replace(values=wide.detach()), False, False)
    apart = wide - rows.spread(top)
    grown = apart.exp()
    total = rows.sums(grown)
    return apart - rows.spread(total.log()) if log else grown / rows.spread(total)


REDUCTIONS: Mapping[str, Callable[[_Folded], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "max": lambda rows: _extreme(rows, False, False)[0],
    "min": lambda rows: _extreme(rows, True, False)[0],
    "softmax": partial(_softmax, log=False),
    "log_softmax": partial(_softmax, log=True),
}
"""The reductions of `scatter` and `segment_reduce`."""


def _spread(values: Tensor, index: Tensor) -> Tensor:
    if _kernels_run(values):
        return lowered.spread_items(values, index)
    return lowered.spread_items_torch(values, index)


def _kernels_run(values: Tensor) -> bool:
    return autograd.only_reverse_mode_active((values,))


# Facts of an index, read once


@cached_per_tensor
def _extent(index: Tensor) -> tuple[int, int, bool]:
    """(lowest, highest, whether a 1-D index ascends); (0, -1, True) for none."""
    if not index.numel():
        return 0, -1, True
    facts = [*index.aminmax()]
    if index.ndim == 1:
        facts.append((index[1:] < index[:-1]).any().to(index.dtype))
    lowest, highest, *falls = torch.stack(facts).tolist()
    return lowest, highest, falls == [0]


@cached_per_tensor
def _int64_copy(index: Tensor) -> Tensor:
    return index.long()


def _int64(index: Tensor) -> Tensor:
    return index if index.dtype == torch.int64 else _int64_copy(index)


@cached_per_tensor
def _counts(index: Tensor, count: int) -> Tensor:
    """int64 [count]: rows of each result, 1 for none."""
    return torch.bincount(index + 1, minlength=count + 1)[1:].clamp_(min=1)


@cached_per_tensor
def _segment_of(indptr: Tensor, entries: int) -> Tensor:
    """int64 [entries]: the segment of each entry, -1 outside of the pointers."""
    places = torch.arange(entries, device=indptr.device, dtype=indptr.dtype)
    found = torch.searchsorted(indptr[1:].contiguous(), places, right=True)
    return torch.where((places < indptr[0]) | (found >= len(indptr) - 1), -1, found)


# Checks


def _axis(src: Tensor, dim: int) -> int:
    if not isinstance(src, Tensor):
        raise DtypeError(f"src must be a Tensor, found {type(src).__name__}")
    if not -src.ndim <= dim < src.ndim:
        raise ShapeError(f"dim is {-src.ndim} to {src.ndim - 1} for src of {src.ndim} axes, found {dim}")
    return dim % src.ndim


def _check_reduction(src: Tensor, reduce: str, places: bool) -> None:
    OptionError.check("reduce", reduce, REDUCTIONS)
    if src.dtype == torch.bool or src.is_complex() or ("softmax" in reduce and not src.is_floating_point()):
        raise DtypeError(
            f"{reduce} takes {'floats' if 'softmax' in reduce else 'floats or integers'}, src is {src.dtype}"
        )
    if places and reduce not in ("max", "min"):
        raise OptionError(f"places are those of max and min, found reduce={reduce!r}")


def _size(lowest: int, highest: int, dim_size: int | None) -> int:
    """Rows of the result: dim_size, if an index from lowest to highest fits."""
    size = highest + 1 if dim_size is None else dim_size
    if lowest < 0 or highest >= size:
        raise CoordinateError(f"an index is 0 to {size - 1}, dim_size - 1; found {lowest} to {highest}")
    return size


def _check_index(src: Tensor, index: Tensor, name: str = "index", whole: bool = True) -> None:
    check_integers(index, name)
    if index.device != src.device:
        raise DeviceError(f"{name} is on {index.device}, src is on {src.device}")
    if not whole and index.ndim != 1:
        raise ShapeError(f"{name} is 1-D, found shape {list(index.shape)}")


def _check_shape(src: Tensor, index: Tensor, whole: Tensor, dim: int) -> None:
    each = zip(whole.shape, src.shape, strict=False)
    if whole.ndim != src.ndim or whole.shape[dim] != src.shape[dim] or any(n not in (1, m) for n, m in each):
        raise ShapeError(
            f"an index is [{src.shape[dim]}], the size of src along dim {dim}, or broadcasts to {list(src.shape)}; "
            f"found shape {list(index.shape)}"
        )


def _one_of(index: Tensor | None, indptr: Tensor | None) -> tuple[str, Tensor]:
    if (index is None) == (indptr is None):
        raise OptionError("give one of index and indptr")
    return ("indptr", indptr) if index is None else ("index", index)  # pyright: ignore[reportReturnType]
