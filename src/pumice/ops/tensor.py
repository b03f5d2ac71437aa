"""SparseTensor: features on voxel coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, make_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from pumice.coords import Geometry, checked_geometry, same_geometry
from pumice.errors import DeviceError, DtypeError, GeometryError, MissingAttributeError, ShapeError
from pumice.lower.reference import EIGHT_BITS
from pumice.lower.rows import sum_items, sum_items_torch, zero_padding_rows
from pumice.ops.autograd import only_reverse_mode_active

Given = ParamSpec("Given")
Found = TypeVar("Found")


class SparseTensor:
    """A tensor that is zero except at N voxels: feats [N, C] at coords int32 [N, 1+D] = (batch, axes...).

        dense[b, :, x, y, z] = feats[n]   where coords[n] = (b, x, y, z)

    Rows keep their order. Immutable: operations return new tensors, which share the geometry and its cached kernel
    maps if the coordinates are unchanged.

    Parameters
    ----------
    feats: floating point (or int8: ops.quantize) [N, C], on the device of coords.
    coords: int32 [N, 1+D], distinct rows, the batch first, in units of this tensor's own voxels; may be negative
        unless `spatial_shape` is given.
    stride: voxel size in units of the finest voxels, an int or one per axis.
    spatial_shape: extent of the grid per axis, which bounds the outputs of convolutions; None: unbounded.
    batch_size: number of batch items; None: the largest batch index + 1. Needed if the last items may be empty.
    geometry: the geometry of another tensor, instead of all arguments but feats.
    dim: D of `coords`, from 1 to 4.
    Raises ShapeError, DtypeError, DeviceError, CoordinateError (duplicates, out of range, too many voxels). Warns if
    the batch column looks like a coordinate and there is no `batch_size`. On a GPU, where construction does not
    synchronise, errors and warnings about coordinates come with the first kernel map.
    """

    # FSDP2 and DistributedDataParallel find the tensors of inputs and outputs through dataclass fields (torch 2.13
    # without pytree nodes), and rebuild them by `type(x)(feats=..., geometry=...)`.
    __dataclass_fields__: dict[str, Any] = {f.name: f for f in fields(make_dataclass("_Fields", ["feats", "geometry"]))}

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor | Geometry | None = None,
        stride: int | Sequence[int] = 1,
        spatial_shape: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        *,
        geometry: Geometry | None = None,
        dim: int = 3,
    ) -> None:
        coords = geometry if coords is None else coords
        if not isinstance(coords, Geometry):
            coords = checked_geometry(_checked_pair(feats, coords), stride, spatial_shape, batch_size, dim)
        _check_feats(feats, coords)
        self._open = False
        if coords.buffered is not None and feats.dtype not in EIGHT_BITS:
            if coords.buffered.trains:
                # Padding rows contribute neither features nor gradients.
                feats = torch.where(coords.valid_mask, feats, 0.0)
            elif coords.buffered.poison:
                feats = torch.where(coords.valid_mask, feats, torch.nan)
        self._feats = feats
        self._geometry = coords

    @property
    def feats(self) -> Tensor:
        """[N, C] features."""
        if self._open:
            self._feats, self._open = torch.where(self._geometry.valid_mask, self._feats, 0.0), False
        return self._feats

    @property
    def geometry(self) -> Geometry:
        """The coordinates and their kernel maps, shared among tensors."""
        return self._geometry

    @property
    def coords(self) -> Tensor:
        """int32 [N, 1+D] = (batch, axes...), in units of this tensor's own voxels."""
        return self._geometry.coords

    @property
    def items(self) -> Tensor:
        """int64 [N]: batch item of each voxel, on the features' device; 0 in padding rows of a captured network."""
        found = self.coords[:, 0].to(self.device, torch.int64)
        if self._geometry.buffered is None:
            return found
        # The status reports batch indices that are too large; until it is read they must not index anything.
        return torch.where(self._geometry.cloud.valid_mask(), found.clamp(0, self.batch_size - 1), 0)

    @property
    def item_counts(self) -> Tensor:
        """int64 [B]: number of voxels per batch item."""
        items = self.items
        ones = torch.ones_like(items) if self._geometry.buffered is None else self._geometry.cloud.valid_mask().long()
        run = sum_items if only_reverse_mode_active((ones,)) else sum_items_torch
        return run(ones[:, None], items, self.batch_size)[:, 0]

    @property
    def valid_mask(self) -> Tensor:
        """bool [N]: True for valid rows. Only the buffers of a captured network have padding rows."""
        return self._geometry.valid_mask[:, 0]

    @property
    def stride(self) -> tuple[Any, ...]:
        """Voxel size in units of the finest voxels, per axis."""
        return self._geometry.stride

    @property
    def spatial_shape(self) -> tuple[int, ...] | None:
        return self._geometry.spatial_shape

    @property
    def batch_size(self) -> int:
        return self._geometry.batch_size

    @property
    def inverse(self) -> Tensor:
        """int64 [P]: row of each voxelised point, so that `feats[inverse]` is per point; -1: outside spatial_shape."""
        if self._geometry.inverse is None:
            raise GeometryError("these coordinates were not made by voxelize() or coalesce(), they have no inverse")
        return self._geometry.inverse

    @property
    def spatial_dim(self) -> int:
        """D, the number of spatial axes."""
        return self._geometry.dim

    @property
    def channels(self) -> int:
        return self._feats.shape[1]

    @property
    def device(self) -> torch.device:
        return self._feats.device

    @property
    def dtype(self) -> torch.dtype:
        return self._feats.dtype

    @property
    def requires_grad(self) -> bool:
        return self._feats.requires_grad

    def __len__(self) -> int:
        self._geometry.require_host_size("len(x)")
        return self._feats.shape[0]

    def __repr__(self) -> str:
        cells = ""
        if self.spatial_shape is not None:
            total = max(self.batch_size, 1)
            for extent in self.spatial_shape:
                total *= max(extent, 1)
            cells = f", spatial_shape={self.spatial_shape}, {100 * self._feats.shape[0] / total:.3g} % full"
        grad = ", requires_grad=True" if self.requires_grad else ""
        rows = self._feats.shape[0]
        return (
            f"SparseTensor({rows} voxels x {self.channels} channels, D={self.spatial_dim}, stride={self.stride}, "
            f"batch_size={self.batch_size}{cells}, dtype={self.dtype}, device={str(self.device)!r}{grad})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SparseTensor, (self._feats, self._geometry)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseTensor:
        # Coordinates are immutable: the copy shares them.
        import copy

        copied = SparseTensor(copy.deepcopy(self._feats, memo), self._geometry)
        memo[id(self)] = copied
        return copied

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f"; use {_CALLED[name]} instead" if name in _CALLED else ""
            raise MissingAttributeError(f"a SparseTensor has no attribute {name!r}{hint}", name=name, obj=self)

    # same coordinates, other features

    def replace(self, feats: Tensor) -> SparseTensor:
        """These coordinates with other features [N, C']."""
        return SparseTensor(feats, self._geometry)

    def map(self, function: Callable[[Tensor], Tensor]) -> SparseTensor:
        """`replace(function(feats))` for a row-preserving function such as a torch.nn module."""
        return self.replace(function(self._feats))

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """As torch.Tensor.to: change dtype, device or both; coordinates and kernel maps move with the features."""
        feats = self._feats.to(*args, **kwargs)
        return SparseTensor(feats, self._geometry.to(feats.device, bool(kwargs.get("non_blocking", False))))

    def cpu(self) -> SparseTensor:
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device = "cuda", non_blocking: bool = False) -> SparseTensor:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return self.to(target, non_blocking=non_blocking)

    def half(self) -> SparseTensor:
        return self.map(Tensor.half)

    def bfloat16(self) -> SparseTensor:
        return self.map(Tensor.bfloat16)

    def float(self) -> SparseTensor:
        return self.map(Tensor.float)

    def double(self) -> SparseTensor:
        return self.map(Tensor.double)

    def detach(self) -> SparseTensor:
        return self.map(Tensor.detach)

    def clone(self) -> SparseTensor:
        return self.map(Tensor.clone)

    def requires_grad_(self, requires_grad: bool = True) -> SparseTensor:
        self._feats.requires_grad_(requires_grad)
        return self

    def pin_memory(self) -> SparseTensor:
        """A copy in page-locked memory, from which copies to a GPU can be asynchronous."""
        return SparseTensor(self._feats.pin_memory(), self._geometry.pin_memory())

    def is_pinned(self) -> bool:
        return self._feats.is_pinned() and self.coords.is_pinned()

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this tensor, as torch.Tensor.record_stream."""
        self._feats.record_stream(stream)
        self.coords.record_stream(stream)

    # arithmetic

    def __add__(self, other: Any) -> SparseTensor:
        """Row-wise sum on one geometry, sum over the union of two geometries, or sum with a scalar, [N, C] or [C]."""
        if (y := _sum_of_like(self, other)) is not None:
            return y
        if isinstance(other, SparseTensor) and not same_geometry(self, other):
            return self._union(other)
        if self._geometry.trains and isinstance(other, SparseTensor):
            _check_operand(self, other, "+")
            return from_raw_feats(raw_feats(self) + raw_feats(other), self._geometry)
        return self.replace(arithmetic_feats(self) + _operand(self, other, "+"))

    __radd__ = __add__

    def __sub__(self, other: Any) -> SparseTensor:
        if isinstance(other, SparseTensor):
            return self + (-other)
        return self.replace(arithmetic_feats(self) - _operand(self, other, "-"))

    def __mul__(self, other: Any) -> SparseTensor:
        return self.replace(arithmetic_feats(self) * _operand(self, other, "*"))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> SparseTensor:
        return self.replace(arithmetic_feats(self) / _operand(self, other, "/"))

    def __neg__(self) -> SparseTensor:
        return self.replace(-self._feats)

    # Functions that need this class; ops/__init__.py binds them as methods.
    prepare: Callable[..., SparseTensor]
    to_dense: Callable[..., Tensor]
    prune: Callable[..., SparseTensor]
    split: Callable[..., list[SparseTensor]]
    _union: Callable[..., SparseTensor]


def _sum_of_like(x: SparseTensor, other: Any) -> SparseTensor | None:
    """x + other without checks if both have one geometry, shape and dtype; else None."""
    if type(other) is not SparseTensor or other._geometry is not x._geometry or x._geometry.trains:
        return None
    a, b = x._feats, other._feats
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype.itemsize < 2 or torch.compiler.is_compiling():
        return None
    return unchecked_tensor(a + b, x._geometry)


_CALLED = {
    "features": "x.feats",
    "F": "x.feats",
    "indices": "x.coords",
    "C": "x.coords",
    "coordinates": "x.coords",
    "tensor_stride": "x.stride",
    "s": "x.stride",
    "grad": "x.feats.grad",
    "dense": "x.to_dense()",
    "replace_feature": "x.replace(feats)",
    "shape": "x.feats.shape or x.spatial_shape",
    "size": "x.feats.size() or x.spatial_shape",
    # Called by torch.nn modules such as BatchNorm1d.
    "dim": "x.spatial_dim, or for torch.nn's modules x.map(module), pm.nn.Sequential(module) or pm.nn.BatchNorm",
}
"""Attribute names of spconv, MinkowskiEngine and torch, and what to use instead."""


def not_sparse(x: object, taker: str) -> DtypeError:
    """The error to raise if x is not a SparseTensor; taker: name of the function."""
    return DtypeError(f"{taker} takes a SparseTensor, found {type(x).__name__}; torch.nn's modules take features")


def _operand(x: SparseTensor, other: Any, sign: str) -> Any:
    if not isinstance(other, SparseTensor):
        if isinstance(other, Tensor) and not _broadcasts(other.shape, x._feats.shape):
            wide, found = list(x._feats.shape), list(other.shape)
            raise ShapeError(f"'{sign}' takes a number, or a tensor that broadcasts to features {wide}, found {found}")
        return other
    _check_operand(x, other, sign)
    return other.feats


def _broadcasts(shape: Sequence[int], wide: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(wide), strict=False)
    return len(shape) <= len(wide) and all(a == b or a == 1 for a, b in pairs)


def _check_operand(x: SparseTensor, other: SparseTensor, sign: str) -> None:
    if not same_geometry(x, other):
        raise GeometryError(
            f"'{sign}' needs one geometry; the tensors have {len(x.feats)} and {len(other.feats)} voxels of two "
            "geometries"
        )
    if other.channels != x.channels:
        raise ShapeError(f"'{sign}' needs equal numbers of channels, found {x.channels} and {other.channels}")


def raw_feats(x: SparseTensor) -> Tensor:
    """Features of x whose padding rows, and their gradients, are undefined in a captured training step. For callers
    that read valid rows only and do not reduce gradients over padding rows."""
    return x._feats


def from_raw_feats(feats: Tensor, geometry: Geometry) -> SparseTensor:
    """SparseTensor of features whose padding rows, and their gradients, are undefined in a captured training step: its
    backward must not reduce over rows. Functions that do reduce use `x.feats` and `x.replace`."""
    if not geometry.trains:
        return SparseTensor(feats, geometry)
    _check_feats(feats, geometry)
    if geometry.buffered is not None and geometry.buffered.poison:
        feats = _Poisoned.apply(feats, geometry.valid_mask)
    return unchecked_tensor(feats, geometry, True)


def unchecked_tensor(feats: Tensor, geometry: Geometry, open_: bool = False) -> SparseTensor:
    """SparseTensor without checks of feats; open_: the padding rows of feats are undefined."""
    found = SparseTensor.__new__(SparseTensor)
    found._feats, found._geometry, found._open = feats, geometry, open_
    return found


def is_sparse(value: Any) -> bool:
    """True if value is a SparseTensor; `is_leaf` for pytrees of dense and sparse tensors."""
    return isinstance(value, SparseTensor)


# DistributedDataParallel, and FSDP2 before torch 2.13, find the tensors of inputs and outputs through pytrees.
pytree.register_pytree_node(
    SparseTensor,
    lambda x: ([x._feats], (x._geometry, x._open)),
    lambda leaves, rest: unchecked_tensor(*leaves, *rest),
    serialized_type_name="pumice.SparseTensor",
)


NODES: dict[Any, str] = {}
"""Functions that pumice.compile records as one step, without side effects; and the type that each returns."""


def one_node(function: Callable[Concatenate[Any, Given], Found]) -> Callable[Concatenate[Any, Given], Found]:
    """Decorator: torch.fx, by which pumice.compile traces, records a call on proxies as one node. The function's first
    argument is a SparseTensor, or a list of them; annotations tell which, and whether it returns one. Raises DtypeError
    for anything else than the one SparseTensor."""
    takes_one = next(iter(function.__annotations__.values())) == SparseTensor.__name__

    @wraps(function)
    def call(x: Any, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        # By type: a proxy answers isinstance in its own way.
        given = x if issubclass(type(x), list | tuple) else (x,)
        if not all([type(each) is SparseTensor for each in given]):
            if has_torch_function(given):
                return handle_torch_function(call, given, x, *args, **kwargs)
            if takes_one and not isinstance(x, SparseTensor):
                raise not_sparse(x, function.__name__)
        return function(x, *args, **kwargs)

    NODES[call] = function.__annotations__["return"]
    return call


@one_node
def coordinates_of(x: SparseTensor) -> SparseTensor:
    """The coordinates of x with no features, [N, 0]."""
    return unchecked_tensor(x._feats.new_empty(x._feats.shape[0], 0), x.geometry)


def row_wise(x: SparseTensor, function: Callable[[Tensor], Tensor]) -> SparseTensor:
    """Apply a row-wise `function` without parameters. Raises DtypeError if x is not a SparseTensor."""
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, type(getattr(function, "__self__", function)).__name__)
    if torch.compiler.is_compiling():
        return x.replace(function(x.feats))
    # Padding rows may be undefined.
    y = function(raw_feats(x))
    return from_raw_feats(y, x.geometry) if x.geometry.trains else unchecked_tensor(y, x.geometry)


def row_by_row(x: SparseTensor, function: Callable[[Tensor], Tensor]) -> SparseTensor:
    """Apply a row-wise `function` with parameters, whose gradients sum over rows. In a captured training step these
    sums exclude padding rows: their features and gradients are zeroed."""
    if not x.geometry.trains:
        return x.replace(function(x.feats))
    rows, geometry = raw_feats(x), x.geometry
    # In place only for the fresh result of an operation: views and leaves may be read elsewhere.
    if rows.grad_fn is not None and not rows._is_view() and rows.is_contiguous():
        zero_padding_rows(rows, geometry.cloud.count)
    else:
        rows = torch.where(geometry.valid_mask, rows, 0.0)
    return from_raw_feats(_ZeroPaddingGrad.apply(function(rows), geometry), geometry)


class _ZeroPaddingGrad(torch.autograd.Function):
    """Zero the gradients of padding rows."""

    @staticmethod
    def forward(ctx: Any, feats: Tensor, geometry: Geometry) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.geometry = geometry
        # Not a view: the next operation may write to it, as an in-place ReLU does.
        ctx.mark_dirty(feats)
        return feats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad.requires_grad or not grad.is_contiguous():
            return torch.where(ctx.geometry.valid_mask, grad, 0.0), None
        # In place: every reader of the gradient accepts any value in padding rows.
        zero_padding_rows(grad, ctx.geometry.cloud.count)
        return grad, None


class _Poisoned(torch.autograd.Function):
    """Set padding rows to NaN, in features and gradients."""

    @staticmethod
    def forward(ctx: Any, feats: Tensor, alive: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(alive)
        return torch.where(alive, feats, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (alive,) = ctx.saved_tensors
        return torch.where(alive, grad, torch.nan), None


def mask_padding(x: SparseTensor, feats: Tensor) -> Tensor:
    """Features [N, ...] of x for sums over all rows: padding rows of a captured network are set to 0."""
    if x.geometry.buffered is None:
        return feats
    return torch.where(x.geometry.cloud.valid_mask().view(-1, *(1,) * (feats.ndim - 1)), feats, 0.0)


def arithmetic_feats(x: SparseTensor) -> Tensor:
    """The features of x for arithmetic. Raises DtypeError for 8-bit features, which are meaningless without a scale."""
    if x.dtype in EIGHT_BITS:
        raise DtypeError(f"x is {x.dtype}: only convolutions take 8 bits, with scales; convert it: x.to(torch.float32)")
    return x.feats


def _checked_pair(feats: Tensor, coords: Tensor | None) -> Tensor:
    if not isinstance(feats, Tensor) or not isinstance(coords, Tensor):
        raise DtypeError(f"feats and coords must be torch tensors, found {type(feats)} and {type(coords)}")
    if feats.ndim == 2 and coords.ndim == 2 and feats.shape[0] != coords.shape[0]:
        raise ShapeError(f"feats have {feats.shape[0]} rows, coords have {coords.shape[0]}")
    if feats.device != coords.device:
        raise DeviceError(f"feats are on {feats.device}, coords on {coords.device}")
    return coords


def _check_feats(feats: Tensor, geometry: Geometry) -> None:
    if not isinstance(feats, Tensor) or feats.layout != torch.strided:
        found = f"layout {feats.layout}" if isinstance(feats, Tensor) else type(feats).__name__
        raise DtypeError(f"feats must be a dense torch tensor, found {found}")
    if not feats.is_floating_point() and feats.dtype != torch.int8:
        raise DtypeError(f"feats must be floating point, or int8 once quantized, found {feats.dtype}")
    if feats.ndim != 2:
        raise ShapeError(f"feats must be [N, C], found shape {list(feats.shape)}")
    if feats.shape[0] != geometry.coords.shape[0]:
        raise ShapeError(f"feats have {feats.shape[0]} rows, the coordinates have {geometry.coords.shape[0]}")
    # Meta features on real coordinates: `prepare` builds maps without arithmetic.
    if feats.device != geometry.device and feats.device.type != "meta":
        raise DeviceError(f"feats are on {feats.device}, the coordinates on {geometry.device}")
