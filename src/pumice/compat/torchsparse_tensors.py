"""Tensors and convolutions of torchsparse over pumice, in the behaviour of versions 1.4 and 2.1.

The rules are those of mit-han-lab/torchsparse at v1.4.0 and v2.1.0: torchsparse/tensor.py, nn/modules/conv.py,
nn/functional/conv (2.1: kmap/build_kmap.py, kmap/downsample.py), nn/utils/kernel.py.

                       1.4                                      2.1
    coordinates        (x, y, z, batch), in finest voxels       (batch, x, y, z), divided by the stride
    stride 1           keeps the coordinates                    keeps the coordinates
    strided outputs    distinct floor(in / stride) if each      active set of the dense convolution with `padding`, in
                       axis has stride 1 or the kernel size     `spatial_range` (else 0 to the largest coordinate)
    taps               odd number: x fastest; even: z fastest

The SparseTensor within has its axes reversed, (batch, z, y, x): odd kernels are then a view of pumice's layout.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pumice.compat.layouts import from_taps
from pumice.compat.wrapped import Wrapped, call_layer
from pumice.coords import Bounds, Geometry, Relation, as_axes, kernel_map
from pumice.errors import CoordinateError, DtypeError, GeometryError, OptionError, ShapeError
from pumice.nn.conv import Convolution
from pumice.ops import SparseTensor as PumiceTensor
from pumice.ops import to_dense
from pumice.ops.conv import convolve
from pumice.ops.tensor import one_node

Axes = tuple[int, ...]
V14, V21 = "1.4", "2.1"


def make_ntuple(x: Any, ndim: int) -> tuple[Any, ...]:
    """x, a number, a sequence or a tensor, as a tuple of length ndim. Raises ShapeError for another length."""
    if isinstance(x, Tensor):
        x = x.flatten().tolist()
    found = (x,) * ndim if isinstance(x, int | float) else tuple(x)
    if len(found) != ndim:
        raise ShapeError(f"expected {ndim} numbers, found {found}")
    return found


@dataclass(eq=False)
class CoordSet:
    """One set of coordinates. coords: as the library lays them out, and their version; None until asked for."""

    geometry: Geometry
    spatial_range: Axes | None
    coords: Tensor | None = None
    version: int = 0

    def of(self, coords: Any) -> CoordSet:
        """This level, laid out as `coords`."""
        self.coords, self.version = coords, getattr(coords, "_version", 0)
        return self

    def holds(self, coords: Any) -> bool:
        """True if these are the coordinates, the very tensor, unwritten."""
        return self.coords is not None and self.coords is coords and self.version == coords._version


@dataclass(eq=False)
class Strided:
    """A strided convolution that was run: its coordinates, and the relation that inverts it."""

    fine: CoordSet
    coarse: CoordSet
    inverse: Relation


class CoordMaps(dict[Any, Any]):
    """`cmaps` of tensors: a dictionary for the user, which also carries the levels by stride."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: dict[Axes, CoordSet] = {}


class TensorCache:
    """What the tensors of one forward pass share, by assignment: transposed convolutions find their outputs here."""

    def __init__(self) -> None:
        self.cmaps, self.kmaps, self.hashmaps = CoordMaps(), dict[Any, Any](), dict[Any, Any]()


@one_node
def made_tensor(feats: Tensor, coords: Tensor, stride: Axes, box: Axes | None, version: str) -> PumiceTensor:
    """The tensor of features at coordinates of a version. box: the 2.1 `spatial_range`; () for none, unbounded.

    Raises CoordinateError for negative coordinates in 2.1, unless unbounded: torchsparse would silently lose them."""
    if not _is_built_of(coords):
        found = f"{getattr(coords, 'dtype', type(coords))} {[*getattr(coords, 'shape', ())]}"
        raise DtypeError(f"coords are a tensor of integers [N, 4], found {found}")
    if version == V14:
        inner = coords.int().flip(1)
        if max(stride) > 1:
            units = inner.new_tensor((1, *reversed(stride)))
            inner = torch.div(inner, units, rounding_mode="floor")
        return PumiceTensor(feats, inner, tuple(reversed(stride)))
    inner = coords.int()[:, [0, 3, 2, 1]]
    if box:
        return PumiceTensor(feats, inner, tuple(reversed(stride)), tuple(reversed(box[1:])), box[0])
    shape = None
    if box is None:
        bounds = Bounds.of(inner)
        if min(bounds.low) < 0:
            raise CoordinateError(
                f"torchsparse 2.1 loses negative coordinates, found {tuple(reversed(bounds.low))}: shift them to 0 or "
                "more, or call torchsparse.tensor.set_allow_negative_coordinates(True)"
            )
        shape = tuple(high + 1 for high in bounds.high)
    return PumiceTensor(feats, inner, tuple(reversed(stride)), shape)


@one_node
def tensor_at(feats: Tensor, geometry: Geometry) -> PumiceTensor:
    """Features on known coordinates."""
    return PumiceTensor(feats, geometry)


@one_node
def _at(x: PumiceTensor, y: PumiceTensor) -> PumiceTensor:
    """y's features at x's coordinates, row by row."""
    return PumiceTensor(y.feats, x.geometry)


class SparseTensor(Wrapped):
    """torchsparse.SparseTensor of 2.1. feats [N, C]; coords int [N, 4] = (batch, x, y, z), divided by the stride;
    spatial_range: (batch, X, Y, Z). Attributes may be set; `to`, `cuda` and so on change the tensor itself.

    Raises ShapeError, DtypeError, DeviceError and CoordinateError as pumice.SparseTensor, at the first use.
    """

    version: ClassVar[str] = V21
    allow_negative: ClassVar[bool] = False

    def __init__(self, feats: Any, coords: Any, stride: Any = 1, spatial_range: Any = None) -> None:
        # Data sets hold arrays, and single scenes without a batch: nothing is checked before its use.
        self._feats: Any = feats
        self._coords: Any = coords
        self._sparse: PumiceTensor | None = None
        self._level: CoordSet | None = None
        self._stride = make_ntuple(stride, 3)
        self.spatial_range = None if spatial_range is None else tuple(spatial_range)
        self._caches = TensorCache()

    @property
    def sparse(self) -> PumiceTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The pumice tensor, with axes (batch, z, y, x)."""
        if self._sparse is None:
            self._sparse = self._made()
        elif self._feats is not None:
            self._sparse = self._sparse.replace(self._feats)
        self._feats = None
        return self._sparse

    @property
    def level(self) -> CoordSet:
        """The coordinates."""
        if self._level is None:
            _ = self.sparse
        assert self._level is not None
        return self._level

    def _made(self) -> PumiceTensor:
        levels = self._caches.cmaps.levels
        known = levels.get(self._stride)
        if known is not None and known.holds(self._coords):
            self._level = known
            return tensor_at(self._feats, known.geometry)
        box = () if self.allow_negative and self.spatial_range is None else self.spatial_range
        made = made_tensor(self._feats, self._coords, self._stride, box, self.version)
        self._level = levels[self._stride] = CoordSet(made.geometry, self.spatial_range).of(self._coords)
        return made

    def like(self, sparse: PumiceTensor, level: CoordSet | None = None, stride: Axes | None = None) -> SparseTensor:
        """A tensor of this version with other features, or at another level, and with these caches."""
        made = object.__new__(SparseTensor14 if self.version == V14 else SparseTensor)
        made._feats, made._coords, made._sparse, made._caches = None, None, sparse, self._caches
        made._level = self.level if level is None else level
        made._stride = self._stride if stride is None else stride
        made.spatial_range = made._level.spatial_range
        return made

    @property
    def feats(self) -> Any:
        return self._feats if self._feats is not None else self.sparse.feats

    @feats.setter
    def feats(self, feats: Any) -> None:
        self._feats = feats

    @property
    def coords(self) -> Any:
        if self._coords is None:
            if self.level.coords is None:
                self.level.of(self._laid_out(self.sparse.coords))
            self._coords = self.level.coords
        return self._coords

    @coords.setter
    def coords(self, coords: Any) -> None:
        self._feats, self._coords, self._sparse, self._level = self.feats, coords, None, None

    def _laid_out(self, inner: Tensor) -> Tensor:
        return inner[:, [0, 3, 2, 1]]

    @property
    def stride(self) -> Axes:
        return self._stride

    @stride.setter
    def stride(self, stride: Any) -> None:
        self.coords = self.coords
        self._stride = make_ntuple(stride, 3)

    F, C, s = feats, coords, stride

    def to(self, device: Any, non_blocking: bool = True) -> SparseTensor:
        coords, feats = (t.to(device, non_blocking=non_blocking) for t in (self.coords, self.feats))
        if coords is not self.coords:
            self.coords, self._caches = coords, TensorCache()
        self.feats = feats
        return self

    def cpu(self) -> SparseTensor:
        return self.to("cpu")

    def cuda(self) -> SparseTensor:
        return self.to("cuda")

    def half(self) -> SparseTensor:
        self.feats = self.feats.half()
        return self

    def detach(self) -> SparseTensor:
        self.feats = self.feats.detach()
        return self

    def dense(self) -> Tensor:
        """[*spatial_range, C]: channels last."""
        if self.spatial_range is None:
            raise OptionError("dense() takes the extents from spatial_range, found None")
        dense = to_dense(self.sparse, tuple(reversed(self.spatial_range[1:])))
        return dense.permute(0, 4, 3, 2, 1)

    def __add__(self, other: SparseTensor) -> SparseTensor:
        # Row by row, as in torchsparse; pumice's sum of two geometries is over their union.
        return self.like(self.sparse + (other.sparse if other.level is self.level else _at(self.sparse, other.sparse)))

    def parts(self) -> tuple[list[Any], Any]:
        rest = (self._stride, self.spatial_range)
        if self._sparse is None and not _is_built_of(self._coords):
            return [self._feats, self._coords], (*rest, False)
        return [self.sparse], (*rest, True)

    @classmethod
    def joined(cls, tensors: list[Any], rest: Any) -> SparseTensor:
        made = cls.__new__(cls)
        stride, spatial_range, built = rest
        SparseTensor.__init__(made, tensors[0], None if built else tensors[1], stride, spatial_range)
        if built:
            made._feats, made._sparse = None, tensors[0]
            made._level = CoordSet(tensors[0].geometry, spatial_range)
            made._caches.cmaps.levels[stride] = made._level
        return made


def _is_built_of(coords: Any) -> bool:
    """True for coordinates of a batch, as against points' or a data set's."""
    return isinstance(coords, Tensor) and not coords.is_floating_point() and coords.shape[1:] == (4,)


def _of_caches(name: str) -> property:
    """An attribute of the caches as one of the tensor, which may be set."""
    return property(lambda x: getattr(x._caches, name), lambda x, value: setattr(x._caches, name, value))


class SparseTensor14(SparseTensor):
    """torchsparse.SparseTensor of 1.4: coords int [N, 4] = (x, y, z, batch), multiples of the stride."""

    version: ClassVar[str] = V14

    def __init__(self, feats: Any, coords: Any, stride: Any = 1) -> None:
        super().__init__(feats, coords, stride)

    def _laid_out(self, inner: Tensor) -> Tensor:
        outer = inner.flip(1)
        return outer * outer.new_tensor((*self._stride, 1)) if max(self._stride) > 1 else outer

    cmaps, kmaps = _of_caches("cmaps"), _of_caches("kmaps")


class PointTensor:
    """torchsparse.PointTensor: features and positions of points, and what users remember of their voxels."""

    def __init__(self, feats: Any, coords: Any, idx_query: Any = None, weights: Any = None) -> None:
        self.F, self.C = feats, coords
        self.idx_query = {} if idx_query is None else idx_query
        self.weights = {} if weights is None else weights
        self.additional_features: dict[str, Any] = {"idx_query": {}, "counts": {}}

    def to(self, device: Any, non_blocking: bool = True) -> PointTensor:
        self.F, self.C = (t.to(device, non_blocking=non_blocking) for t in (self.F, self.C))
        return self

    def cuda(self) -> PointTensor:
        return self.to("cuda")

    def detach(self) -> PointTensor:
        self.F, self.C = self.F.detach(), self.C.detach()
        return self

    def __add__(self, other: PointTensor) -> PointTensor:
        made = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        made.additional_features = self.additional_features
        return made


@dataclass(frozen=True)
class ConvWindow:
    """A convolution's kernel, stride, padding (x, y, z), and rule: "1.4", "2.1", or 2.1 with kmap_mode "hashmap" and a
    downsample_mode, "hashmap spconv" or "hashmap minkowski"."""

    kernel: Axes
    stride: Axes
    padding: Axes
    rule: str = V21
    transposed: bool = False

    @cached_property
    def keeps(self) -> bool:
        """True if the coordinates are kept."""
        return max(self.stride) == 1

    @cached_property
    def even(self) -> bool:
        """True if the number of taps is even: z is then the fastest axis along K."""
        return math.prod(self.kernel) % 2 == 0

    def key(self, stride: Axes) -> tuple[Axes, ...]:
        """The key in `kmaps` of the strided convolution from a tensor of this stride."""
        return stride, self.kernel, self.stride

    @cached_property
    def relation(self) -> Relation:
        """The relation of pumice, on axes (z, y, x); policy "given": the outputs are to be passed."""
        kernel, stride, padding = self.kernel[::-1], self.stride[::-1], self.padding[::-1]
        centre = tuple((k - 1) // 2 for k in kernel)
        if self.keeps:
            return _kept(self, kernel, centre).shared()
        if self.rule == V21:
            policy, start = "support", padding
        elif all(s in (1, k) for s, k in zip(stride, kernel, strict=True)) or self.rule == "hashmap minkowski":
            policy, start = "floor_unique", centre
        else:
            policy, start = "given" if self.rule == V14 else "support", centre
            if self.rule != V14 and padding != centre:
                found = f"{self.padding} of a kernel of {self.kernel}"
                raise OptionError(f"kmap_mode='hashmap' centres by padding {centre[::-1]}, found {found}")
        found = Relation.of(3, kernel, stride=stride, padding=start, policy=policy)
        return (replace(found, policy="cached_inverse") if self.transposed else found).shared()

    def weight(self, kernel: Tensor) -> Tensor:
        """kernel [K, C_in, C_out] or [C_in, C_out] as pumice's weight of `relation`."""
        if self.even:
            # As of odd kernels, x fastest: one copy, of whole [C_in, C_out].
            kernel = kernel.unflatten(0, self.kernel).transpose(0, 2).flatten(0, 2)
        weight = from_taps(kernel, self.kernel[::-1], False)
        if self.transposed and self.keeps:
            # The pairs of the same taps, in and out exchanged.
            weight = weight.flip(1, 2, 3)
        return weight if self.relation.custom is None else weight.flatten(1, 3)


def _kept(window: ConvWindow, kernel: Axes, centre: Axes) -> Relation:
    """The relation at stride 1. The kernels of 2.1 start at the voxel itself if their number of taps is even."""
    if window.rule == V21 and math.prod(kernel) % 2 == 0:
        centre = (0, 0, 0)
    if window.transposed and any(k % 2 == 0 for k in kernel):
        raise OptionError(f"a transposed convolution of stride 1 takes odd kernels, found {window.kernel}")
    if centre == tuple(k // 2 if k % 2 else 0 for k in kernel):
        return Relation.of(3, kernel)
    taps = [[t - c for t, c in zip(tap, centre, strict=True)] for tap in product(*map(range, kernel))]
    return Relation.of_offsets(3, taps, policy="same")


Call = Callable[[PumiceTensor, Geometry | None, Relation], PumiceTensor]


def convolved(x: SparseTensor, window: ConvWindow, call: Call) -> SparseTensor:
    """x through a convolution; call(tensor, outputs or None, relation) computes it.

    Raises GeometryError for a transposed convolution without the strided one that it inverts."""
    if window.keeps:
        return x.like(call(x.sparse, None, window.relation))
    if window.transposed:
        return _inverted(x, window, call)
    relation, fine, caches = window.relation, x.level, x._caches
    outputs = overlapping_outputs(x, window) if relation.policy == "given" else None
    y = call(x.sparse, outputs, relation)
    stride = tuple(a * b for a, b in zip(x.stride, window.stride, strict=True))
    kept, inverse = caches.kmaps.get(window.key(x.stride)), replace(relation, policy="cached_inverse").shared()
    if kept is None or kept.fine is not fine or kept.inverse is not inverse:
        kept = Strided(fine, CoordSet(y.geometry, _range_after(fine.spatial_range, window)), inverse)
        caches.kmaps.setdefault(window.key(x.stride), kept)
        caches.cmaps.levels.setdefault(stride, kept.coarse)
    return x.like(y, kept.coarse, stride)


def _inverted(x: SparseTensor, window: ConvWindow, call: Call) -> SparseTensor:
    stride = tuple(a // b for a, b in zip(x.stride, window.stride, strict=True))
    step = x._caches.kmaps.get(window.key(stride))
    if step is None:
        raise GeometryError(
            f"a transposed convolution of kernel_size={window.kernel}, stride={window.stride} on a tensor of stride "
            f"{x.stride} inverts one of the same kernel and stride that made it from stride {stride}; found "
            f"{[key for key in x._caches.kmaps]}"
        )
    return x.like(call(x.sparse, step.fine.geometry, step.inverse), step.fine, stride)


def _range_after(box: Axes | None, window: ConvWindow) -> Axes | None:
    if box is None:
        return None
    axes = zip(box[1:], window.kernel, window.stride, window.padding, strict=True)
    return (box[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in axes))


def overlapping_outputs(x: SparseTensor, window: ConvWindow) -> Geometry:
    """The outputs of a 1.4 convolution whose stride is neither 1 nor the kernel size, on axes (z, y, x): every o with
    stride * o = in + tap for some input and tap, and stride * o at least the smallest coordinate of any input."""
    given = x.sparse
    kernel, stride = window.kernel[::-1], window.stride[::-1]
    taps = [[(k - 1) // 2 - t for t, k in zip(tap, kernel, strict=True)] for tap in product(*map(range, kernel))]
    _, wider = kernel_map(given.geometry, Relation.of_offsets(3, taps, stride=stride, policy="support"))
    cells = wider.coords[:, 1:] * wider.coords.new_tensor(stride)
    kept = (cells >= given.coords[:, 1:].amin(0)).all(1) if len(cells) else slice(0)
    strides = tuple(a * b for a, b in zip(x.stride[::-1], stride, strict=True))
    return Geometry.checked(wider.coords[kept], strides, batch_size=given.batch_size)


class Conv3d(Convolution, dim=3):
    """torchsparse.nn.Conv3d of 2.1; `kernel` is [K, C_in, C_out], [C_in, C_out] for kernel and stride 1.

    As there, dilation has no effect (torchsparse issue 302); a warning says so. config: a mapping, of which kmap_mode
    and downsample_mode count; None: the global one at construction. Raises OptionError for generative=True.
    """

    version: ClassVar[str] = V21

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: Any = None,
    ) -> None:
        if generative:
            raise OptionError("generative=True: use pumice.nn.GenerativeConvTranspose3d, found it in a Conv3d")
        if min(in_channels, out_channels) < 1:
            raise OptionError(f"channels are at least 1, found {(in_channels, out_channels)}")
        nn.Module.__init__(self)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, 1
        self.dilation, self.transposed, self.generative = dilation, transposed, generative
        if make_ntuple(dilation, 3) != (1, 1, 1):
            warnings.warn(f"torchsparse ignores dilation, found {dilation}: so does this layer", stacklevel=2)
        self.window = window_of(kernel_size, stride, padding, self.version, transposed, config)
        self.kernel_size, self.stride, self.padding = self.window.kernel, self.window.stride, self.window.padding
        self.kernel_volume = math.prod(self.kernel_size)
        self.relation = self.window.relation
        self.options = {"stride": self.relation.stride, "padding": self.relation.padding}
        flat = self.kernel_volume == 1 and (self.version == V14 or self.window.keeps)
        self.kernel = nn.Parameter(torch.zeros(*(() if flat else (self.kernel_volume,)), in_channels, out_channels))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_channels)) if bias else None)
        self.reset_parameters()

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`kernel` in the layout of pumice, [C_out, z, y, x, C_in]."""
        return self.window.weight(self.kernel)

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt((self.out_channels if self.transposed else self.in_channels) * self.kernel_volume)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Any, target: Geometry | None = None) -> Any:
        if not isinstance(x, SparseTensor):
            return self.convolve(x, target)
        return convolved(x, self.window, self._call)

    def _call(self, x: PumiceTensor, outputs: Geometry | None, relation: Relation) -> PumiceTensor:
        # torchsparse finds the strided convolution to invert by kernel and stride: its padding is learnt here.
        if relation is not self.relation:
            self.relation = relation
        return call_layer(self, self.convolve, x, *(() if outputs is None else (outputs,)))

    def extra_repr(self) -> str:
        shown = {"stride": self.stride, "bias": self.bias is not None, "transposed": self.transposed}
        plain = {"stride": (1, 1, 1), "bias": True, "transposed": False}
        rest = "".join(f", {name}={value}" for name, value in shown.items() if value != plain[name])
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{rest}"


class Conv3d14(Conv3d, dim=3):
    """torchsparse.nn.Conv3d of 1.4: no padding, dilation (without effect, as there) fifth."""

    version: ClassVar[str] = V14

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, 0, dilation, bias, transposed)


class ConvConfig(dict[str, Any]):
    """torchsparse's configuration of a convolution: a dictionary with its keys as attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


GLOBAL_CONFIG: list[Any] = []
"""The configuration that layers of 2.1 take at construction if they are given none; at most one entry."""


def window_of(kernel: Any, stride: Any, padding: Any, version: str, transposed: bool, config: Any) -> ConvWindow:
    """The window of a convolution's arguments. Odd kernels of stride 1 are centred, axis by axis."""
    kernel, stride, padding = (
        as_axes(value, 3, name, least)
        for value, name, least in ((kernel, "kernel_size", 1), (stride, "stride", 1), (padding, "padding", 0))
    )
    padding = tuple((k - 1) // 2 if k % 2 and s == 1 else p for k, s, p in zip(kernel, stride, padding, strict=True))
    rule = version
    config = config if config is not None or version == V14 else next(iter(GLOBAL_CONFIG), None)
    if config is not None and config.get("kmap_mode") == "hashmap":
        rule = f"hashmap {config.get('downsample_mode', 'spconv')}"
    return ConvWindow(kernel, stride, padding, rule, transposed)


def conv3d(
    input: SparseTensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    config: Any = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
) -> SparseTensor:
    """torchsparse.nn.functional.conv3d of 2.1: weight is a kernel [K, C_in, C_out]."""
    if generative:
        raise OptionError("generative=True: use pumice.ops.conv_transpose(bounded=False), found it in conv3d")
    window = window_of(kernel_size, stride, padding, input.version, transposed, config)

    def call(x: PumiceTensor, outputs: Geometry | None, relation: Relation) -> PumiceTensor:
        return convolve(x, window.weight(weight), bias, 1, (relation, outputs))

    return convolved(input, window, call)


def conv3d_14(
    input: SparseTensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    dilation: Any = 1,
    transposed: bool = False,
) -> SparseTensor:
    """torchsparse.nn.functional.conv3d of 1.4."""
    return conv3d(input, weight, kernel_size, bias, stride, 0, dilation, None, transposed)


def sparse_collate(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Single scenes, coordinates (x, y, z) and features as arrays or tensors, as one tensor of a batch."""
    first = inputs[0]
    if any(x.stride != first.stride for x in inputs):
        raise GeometryError(f"sparse_collate takes tensors of one stride, found {[x.stride for x in inputs]}")
    coords = [torch.as_tensor(x.coords).int() for x in inputs]
    items = [torch.full_like(c[:, :1], item) for item, c in enumerate(coords)]
    pairs = [(b, c) if first.version == V21 else (c, b) for b, c in zip(items, coords, strict=True)]
    made = SparseTensor14 if first.version == V14 else SparseTensor
    feats = torch.cat([torch.as_tensor(x.feats) for x in inputs])
    return made(feats, torch.cat([torch.cat(pair, 1) for pair in pairs]), first.stride)
