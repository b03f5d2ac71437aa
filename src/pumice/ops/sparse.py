"""Operands of sparse einsums, stored in a format of levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.language.formats import Coordinate, Format, FormatLayout, layout, parse_format
from pumice.lower import levels
from pumice.ops.convert import GROUP_SIZES, Entries, FormatBucket, arrange, buckets, checked, raveled, strategy

__all__ = ["GROUP_SIZES", "FormatBucket", "Sparse", "buckets", "sparse", "sparse_from_coords"]

_INPUTS = (
    "a dense torch tensor, a torch sparse tensor (coo, csr, csc, bsr, bsc), a numpy array, "
    "a scipy sparse array or matrix, a Sparse"
)


@dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse tensor in a format of levels; created by `sparse`.

    Worked example, [[0, 7, 8, 9], [0, 0, 0, 0], [5, 0, 0, 0]] as "m:C k:G2":

        m      = [0, 0, 2]                      one per group
        k      = [[1, 2], [3, -1], [0, -1]]     -1 is padding
        values = [[7, 8], [9, 0], [5, 0]]

    nnz: stored entries, without padding of groups and blocks. calls: of statements with this operand, by statement.
    Immutable. Values carry gradients; derived storages depend on the coordinates only and are cached.
    """

    format: Format
    shape: tuple[int, ...]
    parts: tuple[FormatBucket, ...]
    nnz: int
    _storages: dict[Any, Any] = field(default_factory=dict, repr=False)
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)
    calls: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    def __getstate__(self) -> dict[str, Any]:
        # What is kept for this operand alone is neither copied nor pickled.
        return {**self.__dict__, "_kept": {}, "calls": {}}

    @property
    def layout(self) -> FormatLayout:
        """Axes and symbols of the arrays of this format."""
        return layout(self.format)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self.named[0][2].device

    @property
    def dtype(self) -> torch.dtype:
        """Values' dtype; bool if a pattern (all ones)."""
        values = self.parts[0].values
        return torch.bool if values is None else values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the format including padding: values, int32 coordinates, row pointers where a level has them."""
        values = (part.values for part in self.parts)
        return self.storage("nbytes", _index_bytes) + sum(v.numel() * v.element_size() for v in values if v is not None)

    @property
    def padding(self) -> float:
        """Fraction of the stored values that is padding."""
        places = sum(math.prod(_extents(self, part)) for part in self.parts)
        return 1 - self.nnz / places if places else 0.0

    @property
    def named(self) -> tuple[tuple[int, str, Tensor], ...]:
        """(part, name, array) of every array: coordinates of levels, then "values" if there are any."""
        found: list[tuple[int, str, Tensor]] = []
        for number, part in enumerate(self.parts):
            found += [(number, name, array) for name, array in part.coords.items()]
            if part.values is not None:
                found.append((number, "values", part.values))
        return tuple(found)

    @property
    def arrays(self) -> list[Tensor]:
        """The arrays in the order of `named`."""
        found = list[Tensor]()
        for part in self.parts:
            found += part.coords.values() if part.values is None else (*part.coords.values(), part.values)
        return found

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        """What plans depend on besides the number of entries: format, shape, number of parts, dtype of the values
        (None: ones) and device. Not for use under torch.compile."""
        part = self.parts[0]
        if (values := part.values) is None:
            return str(self.format), self.shape, len(self.parts), None, self.device
        return str(self.format), self.shape, len(self.parts), values.dtype, values.device

    def storage(self, name: Hashable, build: Callable[[Sparse], Any]) -> Any:
        """`build(self)`, cached as `name` also for `with_values`; must depend on the coordinates only."""
        if name not in self._storages:
            self._storages[name] = build(self)
        return self._storages[name]

    def kept(self, name: Hashable, build: Callable[[Sparse], Any]) -> Any:
        """`build(self)`, cached as `name` for this operand alone."""
        if name not in self._kept:
            self._kept[name] = build(self)
        return self._kept[name]

    def segments(self, part: FormatBucket) -> Tensor:
        """int32 [extent + 1]: first entry of each coordinate (block) of the first flattened axis; CSR: row pointers."""
        number = self.parts.index(part)
        return self.storage(("segments", number), lambda x: _segments(x, x.parts[number]))

    def with_values(self, values: Sequence[Tensor | None]) -> Sparse:
        """The same coordinates with other values, one tensor per part; None means ones."""
        if len(values) != len(self.parts):
            raise ShapeError(f"values are one tensor per part: expected {len(self.parts)}, found {len(values)}")
        for part, new in zip(self.parts, values, strict=True):
            expected = _extents(self, part)
            if new is not None and tuple(new.shape) != expected:
                names = ",".join(self.layout.values)
                raise ShapeError(f"values[{names}] have shape {list(expected)}, found {list(new.shape)}")
            if new is not None and new.device != self.device:
                raise DeviceError(f"the coordinates are on {self.device}, the values on {new.device}")
        return replace(self, parts=tuple(replace(p, values=v) for p, v in zip(self.parts, values, strict=True)))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sparse:
        """Move the arrays to `device` and convert the values to `dtype`; a pattern stays a pattern."""

        def moved(part: FormatBucket) -> FormatBucket:
            coords = {axis: array.to(device=device or array.device) for axis, array in part.coords.items()}
            values = part.values
            return FormatBucket(
                coords, None if values is None else values.to(device or values.device, dtype or values.dtype)
            )

        parts = tuple(map(moved, self.parts))
        stays = device is None or torch.empty(0, device=device).device == self.device
        return replace(self, parts=parts, _storages=self._storages if stays else {})

    def to_dense(self) -> Tensor:
        """The dense tensor, on the same device; differentiable in the values."""
        cells = math.prod(self.shape)
        flat = torch.zeros(cells + 1, dtype=self.dtype, device=self.device)
        for part in self.parts:
            where, inside = _places(self, part)
            # Padding goes to an extra cell at the end.
            where = where if inside is None else torch.where(inside, where, cells)
            flat = flat.index_copy(0, where.reshape(-1), _values(self, part).reshape(-1))
        return flat[:cells].view(self.shape)

    def to_format(self, format: str | Format, *, group: str = "count") -> Sparse:
        """Convert to another format, whose axes are those of the tensor in order; see `sparse`."""
        return _make(self, parse_format(format), group)

    def to_torch(self) -> Tensor:
        """Convert to a torch sparse tensor: csr, csc, bsr or bsc if the format is one, else coo; differentiable."""
        kind = _kind(self)
        if kind == "coo":
            coo = self if _is_coo(self) else self.to_format(_coo(self.ndim))
            (part,) = coo.parts
            coords = torch.stack([part.coords[axis].long() for axis in coo.format.axes])
            # Coalesced in torch's sense only if the format sorts by the logical order of axes.
            ordered = True if coo.format.axes == tuple(a for x in coo.format.levels for a in x.axes) else None
            return torch.sparse_coo_tensor(coords, _values(coo, part), self.shape, is_coalesced=ordered)
        pointers, coords, values = _compressed(self)
        make = getattr(torch, f"sparse_{kind}_tensor")
        return make(pointers.long(), coords.long(), values, self.shape)

    def to_scipy(self) -> Any:
        """Convert a matrix to a scipy sparse array: csr, csc or bsr if the format is one, else coo."""
        import scipy.sparse

        if self.ndim != 2:
            raise ShapeError(f"scipy's sparse arrays are matrices: expected 2 axes, found {self.ndim}")
        if self.dtype in (torch.bfloat16, torch.float16):
            raise DtypeError(f"scipy's sparse arrays hold float32, float64, integers and bools, found {self.dtype}")
        kind = _kind(self)
        if kind in ("csr", "csc", "bsr"):
            pointers, coords, values = (x.detach().cpu().numpy() for x in _compressed(self))
            return getattr(scipy.sparse, f"{kind}_array")((values, coords, pointers), shape=self.shape)
        coo = self if _is_coo(self) else self.to_format(_coo(2))
        (part,) = coo.parts
        coords = tuple(part.coords[axis].cpu().numpy() for axis in coo.format.axes)
        return scipy.sparse.coo_array((_values(coo, part).detach().cpu().numpy(), coords), shape=self.shape)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        grouped = self.format.grouped
        groups = f", groups of {', '.join(map(str, grouped.sizes))}" if grouped else ""
        return (
            f'Sparse("{self.format}", {shape}, nnz={self.nnz}, {self.nbytes} bytes, '
            f"{self.padding:.1%} padding{groups}, {self.dtype})"
        )


def sparse(tensor: Any, format: str | Format = "COO", *, group: str = "count") -> Sparse:
    """Convert a tensor to a sparse format, as an operand of `einsum`.

    Parameters
    ----------
    tensor: a dense torch tensor or numpy array, whose nonzeros (and NaN) are stored; or a torch sparse tensor, scipy
        sparse array or Sparse, whose stored entries are kept, explicit zeros included. COO duplicates are summed.
    format: text, a name or a Format; see pumice.language.formats. Its axes are the tensor's, in order.
    group: strategy for the size of a `G` without one, a name of GROUP_SIZES: "count" minimises gathers + scatters,
        "sqrt" uses the square root of the mean row length: the cheaper of the powers of two "below sqrt" and "above
        sqrt", of which `Einsum.grouped` finds the faster. If rows cannot be split (ELL): the longest row.

    Differentiable in the values. Extents that are not a multiple of their block are padded with zeros. A Sparse
    with blocks keeps all entries of its blocks; one without coordinate arrays, only its nonzeros.
    Raises ShapeError (number of axes, row longer than a fixed group), CoordinateError (too many cells), OptionError
    (type of tensor, strategy), StatementError (format text).
    """
    return _make(tensor, parse_format(format), group)


def sparse_from_coords(
    coords: Tensor, values: Tensor, shape: Sequence[int], format: str | Format = "COO", *, group: str = "count"
) -> Sparse:
    """The sparse tensor of a shape with values [n] at coords, integers [axes, n]; duplicates are summed.

        dense[coords[0, e], coords[1, e], ...] += values[e]

    format, group: as in `sparse`. Differentiable in the values. Raises ShapeError (arrays that do not fit),
    CoordinateError (coordinates outside the shape, too many cells), DtypeError, StatementError (format text).
    """
    shape, format = tuple(shape), parse_format(format)
    if coords.ndim != 2 or values.shape != coords.shape[1:] or coords.shape[0] != len(shape):
        found = f"{[*coords.shape]} and {[*values.shape]}"
        raise ShapeError(f"coords are [{len(shape)}, n] for this shape, and values [n]; found {found}")
    if coords.dtype.is_floating_point or coords.dtype.is_complex or coords.dtype == torch.bool:
        raise DtypeError(f"coords are integers, found {coords.dtype}")
    strategy(group)
    checked(shape, format)
    coords = coords.to(values.device, torch.int64)
    extents = torch.tensor(shape, device=coords.device)[:, None]
    if ((coords < 0) | (coords >= extents)).any():
        raise CoordinateError(f"coords lie within the shape {shape}; some do not")
    cells, place = torch.unique(raveled(coords.unbind(), shape), return_inverse=True)
    summed = values.new_zeros(len(cells)).index_add(0, place, values)
    distinct = coords.new_empty(len(shape), len(cells)).index_copy_(1, place, coords)
    resolved, parts = arrange(Entries(distinct.unbind(), summed, shape), format, group)
    return Sparse(resolved, shape, parts, len(cells))


def _make(tensor: Any, format: Format, group: str) -> Sparse:
    strategy(group)
    if not _readable(tensor):
        raise OptionError(f"sparse takes {_INPUTS}; found {_description(tensor)}")
    shape = checked(tuple(tensor.shape), format)
    if isinstance(tensor, Tensor) and (found := _listed(tensor, format)) is not None:
        part, rows = found
        return Sparse(format, shape, (part,), rows.values.shape[0], {"rows": rows.rows})
    entries = _read(tensor, shape)
    resolved, parts = arrange(entries, format, group)
    return Sparse(resolved, shape, parts, len(entries))


def _readable(tensor: Any) -> bool:
    if isinstance(tensor, Tensor):
        return tensor.layout in (torch.strided, torch.sparse_coo, *_COMPRESSED) and not tensor.is_meta
    return isinstance(tensor, (Sparse, np.ndarray)) or (hasattr(tensor, "tocoo") and hasattr(tensor, "shape"))


def _description(tensor: Any) -> str:
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}".removeprefix("builtins.")
    return f"{kind} of layout {tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else kind


def _read(tensor: Any, shape: tuple[int, ...]) -> Entries:
    if isinstance(tensor, Sparse):
        return _of_sparse(tensor)
    if isinstance(tensor, np.ndarray):
        return _of_dense(_from_numpy(tensor))
    if not isinstance(tensor, Tensor):
        return _of_scipy(tensor, shape)
    if tensor.layout == torch.strided:
        return _of_dense(tensor)
    if tensor.layout == torch.sparse_coo:
        return _of_coo(tensor)
    return _of_compressed(tensor)


def _from_numpy(array: np.ndarray) -> Tensor:
    try:
        return torch.tensor(np.ascontiguousarray(array))
    except TypeError as error:
        raise DtypeError(f"torch has no dtype for numpy's {array.dtype}") from error


def _listed(tensor: Tensor, format: Format) -> tuple[FormatBucket, levels.ListedEntries] | None:
    """The nonzeros of a dense tensor in a format that lists entries in an order of axes, if there is a kernel."""
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    if tensor.layout != torch.strided or tracked or (axes := _listing(str(format))) is None:
        return None
    entries = levels.listed(tensor.permute([format.axes.index(axis) for axis in axes]))
    if entries is None:
        return None
    coords = dict(zip(axes, entries.coordinates, strict=True))
    return FormatBucket({axis: coords[axis] for axis in format.axes}, entries.values), entries


@lru_cache(maxsize=256)
def _listing(text: str) -> tuple[str, ...] | None:
    """The order of the axes in which a format lists entries; None if it does something else."""
    format = parse_format(text)
    found, axes = layout(format), tuple(axis for axis, _ in format.sorting)
    plain = sorted(axes) == sorted(format.axes) and all(divisor == 1 for _, divisor in format.sorting)
    return axes if plain and found.values == (found.position,) else None


def _of_dense(tensor: Tensor) -> Entries:
    coords = tensor.detach().nonzero().unbind(1)
    return Entries(coords, tensor[coords], tuple(tensor.shape))


def _of_scipy(matrix: Any, shape: tuple[int, ...]) -> Entries:
    coo = matrix.tocoo(copy=True)
    coo.sum_duplicates()
    found = coo.coords if hasattr(coo, "coords") else (coo.row, coo.col)
    coords = tuple(torch.tensor(np.asarray(axis, dtype=np.int64)) for axis in found)
    return Entries(coords, _from_numpy(coo.data), shape)


def _of_coo(tensor: Tensor) -> Entries:
    if tensor.dense_dim():
        raise ShapeError(f"all axes of a torch sparse tensor are sparse; found {tensor.dense_dim()} dense ones")
    tensor = tensor.coalesce()
    return Entries(tensor.indices().unbind(0), tensor.values().clone(), tuple(tensor.shape))


_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def _of_compressed(tensor: Tensor) -> Entries:
    if tensor.ndim != 2:
        raise ShapeError(
            f"a {tensor.layout} tensor must have 2 axes, neither batched nor dense; found shape {list(tensor.shape)}"
        )
    return _of_coo(tensor.to_sparse_coo())


def _of_sparse(x: Sparse) -> Entries:
    lists: list[list[Tensor]] = []
    inside: list[Tensor] = []
    padded = False
    for part in x.parts:
        extents = _extents(x, part)
        coords, kept = _coordinates(x, part)
        if x.layout.position is None and x.layout.group is None:  # stored densely
            nonzero = _values(x, part).detach() != 0
            kept = nonzero if kept is None else kept & nonzero
        lists.append([c.expand(extents).reshape(-1) for c in coords])
        padded |= kept is not None
        kept = torch.ones((), dtype=torch.bool, device=x.device) if kept is None else kept
        inside.append(kept.expand(extents).reshape(-1))
    coords = tuple(torch.cat(axis) for axis in zip(*lists, strict=True))
    pattern = all(part.values is None for part in x.parts)
    values = None if pattern else torch.cat([_values(x, part).reshape(-1) for part in x.parts])
    if padded:
        (real,) = torch.cat(inside).nonzero(as_tuple=True)
        coords = tuple(axis[real] for axis in coords)
        values = None if values is None else values.index_select(0, real)
    return Entries(coords, values, x.shape)


def _extents(x: Sparse, part: FormatBucket) -> tuple[int, ...]:
    """The shape of the part's array of values."""
    found: dict[str, int] = {}
    for c, n in zip(x.layout.coordinates, x.shape, strict=True):
        if c.array is not None:
            found.update(zip(c.array, part.coords[c.axis].shape, strict=True))
        elif c.position is not None:
            found[c.position] = -(-n // c.block)
        if c.inner is not None:
            found[c.inner] = c.block
    return tuple(found[symbol] for symbol in x.layout.values)


def _values(x: Sparse, part: FormatBucket) -> Tensor:
    """The part's values; ones for a pattern."""
    if part.values is not None:
        return part.values
    return torch.ones(_extents(x, part), dtype=torch.bool, device=x.device)


def _coordinates(x: Sparse, part: FormatBucket) -> tuple[list[Tensor], Tensor | None]:
    """Per axis int64 coordinates that broadcast to the values' shape, and the mask of values not padding, or None."""
    coords, inside = [], None
    for c, extent in zip(x.layout.coordinates, x.shape, strict=True):
        outer = _outer(x, part, c, extent)
        tests = [outer >= 0] if c.array is not None and x.layout.group in c.array else []
        if c.inner is not None:
            outer = outer * c.block + _spread(x.layout, torch.arange(c.block, device=x.device), (c.inner,))
        tests += [outer < extent] if extent % c.block else []
        for test in tests:
            inside = test if inside is None else inside & test
        coords.append(outer)
    return coords, inside


def _outer(x: Sparse, part: FormatBucket, c: Coordinate, extent: int) -> Tensor:
    if c.array is not None:
        return _spread(x.layout, part.coords[c.axis].long(), c.array)
    assert c.position is not None
    return _spread(x.layout, torch.arange(-(-extent // c.block), device=x.device), (c.position,))


def _spread(layout: FormatLayout, array: Tensor, symbols: tuple[str, ...]) -> Tensor:
    """The array with one dimension per symbol of the values, of extent 1 for symbols that it lacks."""
    sizes = dict(zip(symbols, array.shape, strict=True))
    return array.reshape([sizes.get(symbol, 1) for symbol in layout.values])


def _places(x: Sparse, part: FormatBucket) -> tuple[Tensor, Tensor | None]:
    """Row-major index of each value in the dense tensor, and the mask of values that are not padding, or None."""
    coords, inside = _coordinates(x, part)
    where = torch.zeros((), dtype=torch.int64, device=x.device)
    for c, n in zip(coords, x.shape, strict=True):
        where = where * n + c
    return where.expand(_extents(x, part)), inside


def _segments(x: Sparse, part: FormatBucket) -> Tensor:
    if x.layout.position is None:
        raise CoordinateError(f"format {str(x.format)!r} has no compressed level, and so no segments")
    axis, divisor = x.format.sorting[0]
    if divisor != 1:
        raise CoordinateError(f"format {str(x.format)!r} is sorted by {axis} // {divisor}, and so has no segments")
    extent = -(-x.shape[x.format.axes.index(axis)] // x.format.block(axis))
    coordinates = torch.arange(extent + 1, dtype=torch.int32, device=x.device)
    return torch.searchsorted(part.coords[axis], coordinates, out_int32=True)


def _index_bytes(x: Sparse) -> int:
    """Bytes of all int32 coordinates and pointers of the format."""
    grouped = x.format.grouped.axes if x.format.grouped else ()
    words = sum(part.coords[axis].numel() for part in x.parts for axis in grouped)
    return 4 * (words + sum(_level_words(x, part) for part in x.parts))


def _level_words(x: Sparse, part: FormatBucket) -> int:
    """Number of coordinates (per node and axis), pointers (per parent), slots of hashes and 32-bit words of bitmaps of
    the flattened levels."""
    words, parents, sorting, lists = 0, 1, [*x.format.sorting], list[Tensor]()
    levels = x.format.flattened
    for place, level in enumerate(levels):
        quotients, sorting = sorting[: len(level.axes)], sorting[len(level.axes) :]
        lists += [part.coords[axis] // n if n > 1 else part.coords[axis] for axis, n in quotients]
        if level.kind == "U":
            ((axis, n),) = quotients
            parents *= -(-x.shape[x.format.axes.index(axis)] // (n * x.format.block(axis)))
            continue
        nodes = lists[0].shape[0] if place == len(levels) - 1 else _distinct(lists)
        if level.kind == "M":
            # A bitmap of 64 cells and the position of its first one, per brick.
            words += 3 * parents if levels[place - 1].kind != "M" else 0
        else:
            words += nodes * len(level.axes) + (parents + 1 if place else 0)
            words += 1 << (2 * nodes).bit_length() if level.kind == "H" else 0
        parents = nodes
    return words


def _distinct(coords: list[Tensor]) -> int:
    """Number of distinct tuples in sorted lists."""
    stacked = torch.stack(coords)
    return int((stacked[:, 1:] != stacked[:, :-1]).any(0).sum()) + bool(stacked.shape[1])


def _is_coo(x: Sparse) -> bool:
    """True if each value has its own coordinates, as in torch's and scipy's coo."""
    return x.layout.values == (x.layout.position,)


def _coo(ndim: int) -> str:
    axes = " ".join(f"a{axis}" for axis in range(ndim))
    return f"({axes}):C"


def _kind(x: Sparse) -> str:
    """The torch layout with the same arrays, else "coo"."""
    levels = x.format.levels
    if x.ndim != 2 or [level.kind for level in levels[:2]] != ["U", "C"] or levels[0].sizes:
        return "coo"
    by_rows = levels[0].axes[0] == x.format.axes[0]
    if len(levels) == 2:
        return "csr" if by_rows else "csc"
    # torch's bsr and bsc blocks are row-major and divide extents.
    blocked = [level.axes[0] for level in levels[2:]] == list(x.format.axes)
    if blocked and all(n % x.format.block(axis) == 0 for n, axis in zip(x.shape, x.format.axes, strict=True)):
        return "bsr" if by_rows else "bsc"
    return "coo"


def _compressed(x: Sparse) -> tuple[Tensor, Tensor, Tensor]:
    """(pointers, coordinates, values) of a format that is a compressed torch layout."""
    (part,) = x.parts
    return x.segments(part), part.coords[x.format.levels[1].axes[0]], _values(x, part)
