"""spconv 2.3's names: `import pumice.compat.spconv as spconv`, or `pumice.compat.install("spconv")`.

Semantics of spconv 2.3.8 (pytorch/core.py, conv.py, pool.py, modules.py): coordinates (batch, axes...) in units of each
level, taps row-major, weights [C_out, *kernel, C_in]. Indices made by a layer come in (batch, Morton) order. A tensor's
`indice_dict` holds, by indice key, the coordinates before and after a layer; kernel maps are cached by coordinates.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from types import SimpleNamespace, new_class
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from pumice.compat import spconv_utils as utils
from pumice.compat.wrapped import LinearMap, Wrapped, call_layer
from pumice.coords import Geometry, KernelMap, Relation, as_axes, kernel_map
from pumice.env import settings
from pumice.errors import DtypeError, GeometryError, MissingAttributeError, OptionError, PumiceError, ShapeError
from pumice.nn import layers
from pumice.nn.conv import Conv, ConvTranspose, InverseConv
from pumice.ops import SparseTensor, from_dense, global_avg_pool, global_max_pool, linear, union
from pumice.ops.tensor import coordinates_of, one_node

__version__ = "2.3.8"
Size = int | Sequence[int]


class ConvAlgo(Enum):
    """Names of spconv's algorithms; accepted everywhere, without effect."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


# Tensors


@one_node
def made_tensor(features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> SparseTensor:
    """The SparseTensor of features [N, C] at integer indices [N, 1+D]. Raises as SparseTensor."""
    if indices.dtype == torch.int64:
        indices = indices.int()
    return SparseTensor(features, indices, 1, spatial_shape, batch_size, dim=len(spatial_shape))


class SparseConvTensor(Wrapped):
    """Features [N, C] at indices int [N, 1+D] = (batch, axes...) within a spatial shape: spconv's sparse tensor.

    Attributes may be read and set. Features that no layer takes (more axes, integers, another number of rows) are kept
    until indices that fit are set; a layer then raises ShapeError or DtypeError. benchmark, timers and allocators are
    kept, without effect. Raises ShapeError, DtypeError, DeviceError and CoordinateError as SparseTensor does.
    """

    _sparse: Any
    _raw: Any

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[Any, Any] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        self._spatial_shape, self._batch_size = [int(v) for v in spatial_shape], int(batch_size)
        self.indice_dict = {} if indice_dict is None else indice_dict
        self.grid, self.voxel_num, self.benchmark, self.force_algo = grid, voxel_num, benchmark, force_algo
        self.benchmark_record: dict[str, Any] = {}
        self.thrust_allocator = self._timer = self.int8_scale = None
        if not _traced(features) and features.ndim != 2:
            raise ShapeError(f"features must be [N, C], found shape {[*features.shape]}")
        self._set(features, indices)
        if _traced(features) or features.is_floating_point():
            self._sparse, self._raw = self._made(), None

    def _set(self, features: Any, indices: Any) -> None:
        """Keep both as they are; the SparseTensor is made when it is needed."""
        if self._spatial_shape is None:
            self._spatial_shape = self.spatial_shape
        self._sparse, self._raw = None, (features, indices)

    def _made(self) -> SparseTensor:
        features, indices = self._raw
        for data in self.indice_dict.values():
            for known in (data.inputs, data.outputs) if isinstance(data, IndiceData) else ():
                # Indices of a tensor of this network: its kernel maps are kept.
                if isinstance(known, Geometry) and known.coords is indices and _describes(known, self):
                    return SparseTensor(features, known)
        return made_tensor(features, indices, tuple(self._spatial_shape), self._batch_size)

    @property
    def sparse(self) -> SparseTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The SparseTensor of these features and indices."""
        if self._sparse is None:
            self._sparse, self._raw = self._made(), None
        return self._sparse

    @property
    def features(self) -> Tensor:
        """[N, C]; may be set, as in spconv 1."""
        return self._raw[0] if self._sparse is None else self._sparse.feats

    @features.setter
    def features(self, value: Tensor) -> None:
        try:
            # Checks that they fit.
            self._sparse = self.sparse.replace(value)
        except PumiceError:
            self._set(value, self.indices)

    _features = features

    @property
    def indices(self) -> Tensor:
        """int32 [N, 1+D]; may be set."""
        return self._raw[1] if self._sparse is None else self._sparse.coords

    @indices.setter
    def indices(self, value: Tensor) -> None:
        if value is not self.indices:
            self._set(self.features, value)

    @property
    def spatial_shape(self) -> list[int]:
        if self._spatial_shape is None:
            self._spatial_shape = _shape_on(self._sparse)
        return self._spatial_shape

    @spatial_shape.setter
    def spatial_shape(self, value: Sequence[int]) -> None:
        shape = [int(v) for v in value]
        if shape != self.spatial_shape:
            self._set(self.features, self.indices)
        self._spatial_shape = shape

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        if value != self._batch_size:
            self._set(self.features, self.indices)
        self._batch_size = int(value)

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """These indices with other features."""
        found = self.shadow_copy()
        found.features = feature
        return found

    def shadow_copy(self) -> SparseConvTensor:
        """A tensor with the same members."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def _after(self, sparse: SparseTensor, shape: Any, key: Any = None, data: Any = None) -> SparseConvTensor:
        """The result of a layer. shape: None for that of sparse; data: what its indice key names."""
        found = self.shadow_copy()
        found._sparse, found._spatial_shape = sparse, shape
        # A copy: keys of a branch are not seen by others.
        found.indice_dict = keys = self.indice_dict.copy()
        if key is not None:
            keys[key] = data
        return found

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """The rows that a mask or index selects, without indice keys."""
        found = self.shadow_copy()
        found._set(self.features[valid_indices], self.indices[valid_indices])
        found.indice_dict = {}
        return found

    def minus(self) -> SparseConvTensor:
        return self.replace_feature(-self.features)

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """The entries of a dense [B, *spatial, C] of which some channel is not 0."""
        sparse = from_dense(x.movedim(-1, 1))
        return cls(sparse.feats, sparse.coords, x.shape[1:-1], len(x))

    def dense(self, channels_first: bool = True) -> Tensor:
        """[B, C, *spatial], or [B, *spatial, C]; 0 without a voxel."""
        found = self.sparse.to_dense()
        return (found if channels_first else found.movedim(1, -1)).contiguous()

    @property
    def is_quantized(self) -> bool:
        return self.features.dtype == torch.qint8

    def q_scale(self) -> float:
        if not self.is_quantized:
            raise DtypeError(f"features must be torch.qint8, found {self.features.dtype}")
        return self.features.q_scale()

    def dequantize(self) -> SparseConvTensor:
        return self.replace_feature(self.features.dequantize())

    @property
    def spatial_size(self) -> int:
        return math.prod(self.spatial_shape)

    def find_indice_pair(self, key: Any) -> IndiceData | None:
        """What an indice key names, None if nothing."""
        return None if key is None else self.indice_dict.get(key)

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        """Sum with a tensor, or with features on the same indices in the same order."""
        if issubclass(type(other), SparseConvTensor) and _alike(self._sparse, other._sparse):  # pyright: ignore
            found = self.shadow_copy()
            found._sparse = self.sparse + other.sparse  # pyright: ignore[reportAttributeAccessIssue]
            return found
        return self.replace_feature(self.features + _features_of(other))

    __radd__ = __add__

    def __iadd__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        self.features = (self + other).features
        return self

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self.features.shape}]"

    def parts(self) -> tuple[list[Any], Any]:
        """Tensors: that of the features, and empty ones on the coordinates of each key that an inverse needs."""
        named = [(k, data) for k, data in self.indice_dict.items() if isinstance(data, IndiceData) and not data.is_subm]
        ends = [_empty_on(end) for _, data in named for end in (data.inputs, data.outputs)]
        facts = tuple((key, data.facts) for key, data in named)
        # Spatial shapes are those of the tensors: a program holds for all.
        return [self.sparse, *ends], (self._batch_size, facts)

    @classmethod
    def joined(cls, tensors: Iterable[Any], rest: Any) -> SparseConvTensor:
        (sparse, *ends), (batch_size, facts) = tensors, rest
        found = cls.__new__(cls)
        found.__dict__.update(
            _PLAIN, benchmark=False, _spatial_shape=None, _batch_size=batch_size, _sparse=sparse, _raw=None
        )
        pairs = zip(facts, ends[::2], ends[1::2], strict=True)
        found.indice_dict = {key: IndiceData(_anchor(a), _anchor(b), *own) for (key, own), a, b in pairs}
        found.benchmark_record = {}
        return found


_PLAIN: dict[str, Any] = dict.fromkeys(("grid", "voxel_num", "force_algo", "thrust_allocator", "_timer", "int8_scale"))


def _features_of(value: Any) -> Any:
    return value.features if issubclass(type(value), SparseConvTensor) else value


def _traced(value: Any) -> bool:
    """True for a proxy of pumice.compile, which answers isinstance in its own way."""
    return issubclass(type(value), Proxy)


def _alike(one: Any, two: Any) -> bool:
    """True if `one + two` adds row by row: tensors on one geometry, or proxies."""
    if _traced(one) or _traced(two):
        return _traced(one) and _traced(two)
    return one is not None and two is not None and one.geometry is two.geometry


def _describes(known: Geometry, x: SparseConvTensor) -> bool:
    return known.spatial_shape == tuple(x.spatial_shape) and known.batch_size == x.batch_size


def _anchor(sparse: SparseTensor) -> Any:
    """What to keep of a tensor's coordinates; the features would keep memory alive."""
    return sparse if _traced(sparse) else sparse.geometry


def _shape_on(end: Any) -> list[int]:
    """The spatial shape of a SparseTensor or Geometry. Raises TraceError for a proxy: it may differ between calls."""
    if _traced(end):
        raise TraceError("the spatial shape of an argument")
    return [*end.spatial_shape]


def _empty_on(end: Any) -> Any:
    """A tensor without channels on the coordinates of an `_anchor`."""
    return coordinates_of(end) if _traced(end) else SparseTensor(torch.empty(len(end), 0, device=end.device), end)


# Indice keys


class IndiceData:
    """What an indice key names: the coordinates before and after a layer, and its kernel map.

    inputs, outputs: Geometry (proxies of tensors while pumice.compile traces). spatial_shape, out_spatial_shape: lists.
    ksize, stride, padding, dilation: lists, of the layer. Pair lists are made from the kernel map when they are read.
    """

    def __init__(self, inputs: Any, outputs: Any, relation: Relation, algo: ConvAlgo | None) -> None:
        self.inputs, self.outputs, self.relation, self.algo = inputs, outputs, relation, algo
        self.is_subm, self.voxel_num = relation.policy == "same", None

    def __getattr__(self, name: str) -> list[int]:
        """ksize, stride, padding, dilation, spatial_shape and out_spatial_shape: lists, made when they are read."""
        ends = {"spatial_shape": "inputs", "out_spatial_shape": "outputs"}
        if name in ends:
            return _shape_on(getattr(self, ends[name]))
        if name in (fields := {"ksize": "kernel", "stride": "stride", "padding": "padding", "dilation": "dilation"}):
            return [*getattr(self.relation, fields[name])]
        raise MissingAttributeError(f"indice data have no {name!r}", name=name, obj=self)

    @property
    def facts(self) -> Any:
        """The arguments after `inputs` and `outputs`."""
        return self.relation, self.algo

    @property
    def indices(self) -> Tensor:
        """int32 [N, 1+D] before the layer."""
        return self.inputs.coords

    @property
    def out_indices(self) -> Tensor:
        """int32 [M, 1+D] after the layer."""
        return self.outputs.coords

    @property
    def _map(self) -> KernelMap:
        return kernel_map(self.inputs, self.relation)[0]

    @cached_property
    def indice_pairs(self) -> Tensor:
        """int32 [2, K, N]: rows before and after the layer of the pairs of each tap, from the front; then -1."""
        inputs, outputs, sizes = self._map.pairs()
        taps, sizes = self._map.taps(), sizes.to(inputs.device)
        places = torch.arange(len(taps), device=taps.device) - (sizes.cumsum(0) - sizes)[taps]
        found = inputs.new_full((2, len(sizes), len(self.indices)), -1, dtype=torch.int32)
        found[:, taps, places] = torch.stack([inputs, outputs]).int()
        return found

    @property
    def indice_pair_num(self) -> Tensor:
        """int32 [K]: number of pairs of each tap."""
        return self._map.pairs().sizes.int().to(self.indices.device)

    def __getitem__(self, place: int) -> Any:
        """The entry of spconv 1's tuple."""
        names = ("out_indices", "indices", "indice_pairs", "indice_pair_num", "spatial_shape")
        return getattr(self, names[place])

    @cached_property
    def inverse(self) -> Relation:
        """The relation from `outputs` back to `inputs`."""
        if self.relation.policy == "transposed_support":
            return replace(self.relation, policy="given", output_padding=None).shared()
        return replace(self.relation, policy="cached_inverse").shared()


def _reused(data: IndiceData, layer: SparseConvolution, x: SparseConvTensor) -> SparseTensor:
    """x for a submanifold layer whose key names `data`: on the coordinates whose maps exist. Raises OptionError for
    another window, GeometryError for other coordinates."""
    key = layer.indice_key
    if not (data.is_subm and layer.subm):
        raise OptionError(
            f"indice key {key!r} exists in this tensor: only submanifold convolutions share a key, and an inverse "
            f"convolution uses that of a strided one; found {type(layer).__name__}"
        )
    if (data.ksize, data.dilation) != (layer.kernel_size, layer.dilation):
        raise OptionError(
            f"indice key {key!r} names kernel_size={data.ksize}, dilation={data.dilation}; found "
            f"kernel_size={layer.kernel_size}, dilation={layer.dilation}"
        )
    return _on_coordinates(x, data.inputs, key)


def _on_coordinates(x: SparseConvTensor, wanted: Any, key: Any) -> SparseTensor:
    """x on the coordinates `wanted` of an indice key. Raises GeometryError if its own differ."""
    sparse = x.sparse
    if _traced(sparse) or _traced(wanted) or sparse.geometry is wanted:
        return sparse
    if sparse.spatial_shape != wanted.spatial_shape:
        raise GeometryError(f"indice key {key!r} names spatial shape {wanted.spatial_shape}, found {x.spatial_shape}")
    if sparse.coords.shape != wanted.coords.shape or not torch.equal(sparse.coords, wanted.coords):
        raise GeometryError(
            f"indice key {key!r} names {len(wanted)} voxels, found {len(sparse.coords)} others, or in another order; "
            "use another key for other coordinates"
        )
    return SparseTensor(sparse.feats, wanted)


# Layers


def _class(name: str, bases: tuple[type, ...], options: dict[str, Any] | None = None, **names: Any) -> Any:
    """A class of this module."""
    own = {"__module__": __name__, "__doc__": bases[-1].__doc__, **names}
    return new_class(name, bases, options or {}, lambda space: space.update(own))


def _by_dim(name: str, base: type) -> tuple[Any, Any, Any, Any]:
    """`base` for 1 to 4 axes, as name1d to name4d."""
    return tuple(_class(f"{name}{dim}d", (base,), {"dim": dim}) for dim in range(1, 5))  # pyright: ignore


class SparseModule(nn.Module):
    """Base of modules that take a SparseConvTensor in a SparseSequential."""

    # As spconv 2: hooks of others permute weights of version 1.
    _version = 2

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name, self._sparse_unique_name = name, ""


class SparseConvolution(SparseModule):
    """Base of convolutions: weight [C_out, *kernel, C_in], of which a kernel of size 1 (unless strided) computes
    features @ weight.view(C_in, C_out), as spconv does. groups=1 there; more are an extension."""

    dim: int
    subm = transposed = inverse = False
    weight: nn.Parameter
    bias: nn.Parameter | None
    relation: Relation
    kernel_size: list[int]
    in_channels: int
    out_channels: int
    groups: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: Any = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        self._build(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self._describe(stride, padding, dilation, indice_key)
        self.algo, self.fp32_accum, self.name = algo or ConvAlgo.MaskImplicitGemm, fp32_accum, name
        self.record_voxel_count = record_voxel_count and not self.subm
        if self.record_voxel_count:
            self.register_buffer("max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32))

    def _build(self, *window: Any) -> None:
        """Initialise the layer of pumice.nn that computes this one. window: the arguments up to `bias`."""
        raise NotImplementedError

    def _describe(self, stride: Size, padding: Size, dilation: Size, key: Any) -> None:
        """Set spconv's attributes."""
        self.ndim, self.indice_key, self._sparse_unique_name = self.dim, key, ""
        self.kernel_size, self.stride = [*self.weight.shape[1:-1]], [*as_axes(stride, self.dim, "stride", 1)]
        self.padding = [*as_axes(padding, self.dim, "padding", 0)]
        self.dilation, self.output_padding = [*as_axes(dilation, self.dim, "dilation", 1)], [0] * self.dim
        self.conv1x1 = math.prod(self.kernel_size) == self.groups == 1 and (self.subm or math.prod(self.stride) == 1)
        if self.conv1x1:
            self.linear_map = LinearMap(self)
        if self.conv1x1 and not self.subm and any(self.padding):
            raise OptionError(f"a convolution of kernel size 1 and stride 1 has padding 0, found {self.padding}")
        self._register_load_state_dict_pre_hook(self._convert_saved)

    def forward(self, input: Any, add_input: Any = None) -> Any:  # noqa: A002
        """Convolve a SparseConvTensor; add_input: a SparseConvTensor to add to the result."""
        if not issubclass(type(input), SparseConvTensor):
            # A program passes the SparseTensor of a traced call, and the target of an inverse convolution.
            return self._convolved(input, *(() if add_input is None else (add_input,)))
        y = self._over(input)
        return y if add_input is None else y + add_input

    def _convolved(self, x: SparseTensor, *target: Any) -> SparseTensor:
        return linear(x, self.matrix(), self.bias) if self.conv1x1 else super().forward(x, *target)

    def matrix(self) -> Tensor:
        """[C_out, C_in] of a kernel of size 1, in spconv's reading of the weight."""
        return self.weight.view(self.in_channels, self.out_channels).t()

    def _over(self, x: SparseConvTensor) -> SparseConvTensor:
        sparse, key = x.sparse, self.indice_key
        if self.conv1x1:
            return x._after(call_layer(self, self._convolved, sparse), x._spatial_shape)
        data = None if key is None else x.indice_dict.get(key)
        alike = data is not None and data.relation is self.relation and self.subm
        if data is not None and not (alike and data.inputs is sparse.geometry):
            sparse = _reused(data, self, x)
        y, shape = call_layer(self, super().forward, sparse), x._spatial_shape if self.subm else None
        if self.subm and (data is not None or key is None):
            return x._after(y, shape)
        return x._after(y, shape, key, _data_of(self, sparse, y))

    def _convert_saved(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Hook of load_state_dict: weights of older layouts, RSCK (spconv 1, mmcv) and RSKC (spconv 2.0, Native)."""
        errors, key = rest[-1], prefix + "weight"
        if self.record_voxel_count:
            state.setdefault(prefix + "max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32))
        # mmdetection3d gives SparseModule a loader of its own, which converts.
        others = "_load_from_state_dict" in vars(SparseModule)
        if others or (saved := state.get(key)) is None or saved.ndim != self.weight.ndim:
            return
        layout = settings().spconv_layout or _layout_of(self, tuple(saved.shape))
        if layout is None:
            errors.append(
                f"{key} of shape {[*saved.shape]} may be RSCK (spconv 1) or RSKC (spconv 2.0): set "
                "SPCONV_SAVED_WEIGHT_LAYOUT, or convert the checkpoint by pm.convert"
            )
        elif layout != "KRSC" and self.conv1x1:
            # All versions multiply by weight.view(C_in, C_out).
            state[key] = saved.reshape(self.weight.shape)
        elif layout != "KRSC":
            state[key] = saved.movedim(-1 if layout == "RSCK" else -2, 0)

    def is_inverseable(self) -> bool:
        return self.indice_key is not None and not self.subm

    def get_max_num_voxels(self) -> Tensor | None:
        return getattr(self, "max_num_voxels_during_training", None)


def _layout_of(layer: SparseConvolution, shape: tuple[int, ...]) -> str | None:
    """The layout of a saved weight by its shape; None if two fit. An unknown shape is KRSC: loading then raises."""
    window, (outer, inner) = layer.weight.shape[1:-1], (layer.out_channels, layer.in_channels)
    if shape == tuple(layer.weight.shape) or shape[:-2] != window:
        return "KRSC"
    if outer == inner:
        return "RSCK" if layer.conv1x1 else None
    return {(inner, outer): "RSCK", (outer, inner): "RSKC"}.get((shape[-2], shape[-1]), "KRSC")


def _data_of(layer: Any, x: SparseTensor, y: SparseTensor) -> IndiceData | None:
    """What the key of a layer from x to y names; None without a key."""
    if layer.indice_key is None:
        return None
    relation = layer.window if isinstance(layer, _SparsePool) else layer.relation
    return IndiceData(_anchor(x), _anchor(y), relation, layer.algo)


class _SubM(SparseConvolution, Conv):
    """Convolution that keeps the coordinates; stride and padding have no effect, kernels are odd."""

    subm = True

    def _build(self, *window: Any) -> None:
        inside, outside, kernel, _, _, dilation, groups, bias = window
        Conv.__init__(self, inside, outside, kernel, 1, None, dilation, groups, bias, out="same")
        if any(k % 2 == 0 for k in self.relation.kernel):
            raise OptionError(f"a submanifold convolution takes odd kernel sizes, found {self.relation.kernel}")


class _Strided(SparseConvolution, Conv):
    """Convolution to every output that has an input, also at stride 1."""

    def _build(self, *window: Any) -> None:
        Conv.__init__(self, *window, out="support")


class _Transposed(SparseConvolution, ConvTranspose):
    """Transposed convolution, to every output that is reached."""

    transposed = True

    def _build(self, *window: Any) -> None:
        ConvTranspose.__init__(self, *window)
        # spconv's extent, (S - 1) * stride - 2 * padding + k, has no dilation.
        own = self.relation
        less = tuple((k - 1) * (1 - d) for k, d in zip(own.kernel, own.dilation, strict=True))
        self.relation = replace(own, output_padding=less).shared()


class _Inverse(SparseConvolution, InverseConv):
    """Inverse of the convolution or pooling of the same indice key: to its input coordinates, in their order."""

    inverse = True
    _known: SimpleNamespace

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        indice_key: Any = None,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        # The relation is that of the key, known in a call: within an object, as forward changes no attributes.
        self.__dict__["_known"] = SimpleNamespace()
        window = (in_channels, out_channels, kernel_size, 1, 0, 1, 1, bias)
        super().__init__(*window, indice_key, algo, fp32_accum, name=name)

    def _build(self, *window: Any) -> None:
        InverseConv.__init__(self, *window)

    @property
    def relation(self) -> Relation:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._known.relation

    @relation.setter
    def relation(self, value: Relation) -> None:
        self._known.relation = value

    def _over(self, x: SparseConvTensor) -> SparseConvTensor:
        if self.conv1x1:
            return super()._over(x)
        key, data = self.indice_key, x.find_indice_pair(self.indice_key)
        if data is None or data.is_subm:
            has = "nothing" if data is None else "a submanifold layer"
            raise OptionError(f"{type(self).__name__} needs the key of a strided layer, {key!r} names {has}")
        if data.ksize != self.kernel_size:
            raise OptionError(f"indice key {key!r} names kernel_size={data.ksize}, found {self.kernel_size}")
        sparse = _on_coordinates(x, data.outputs, key)
        self._known.relation = data.inverse
        return x._after(call_layer(self, self._convolved, sparse, data.inputs), None)


SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d = _by_dim("SubMConv", _SubM)
SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d = _by_dim("SparseConv", _Strided)
SparseConvTranspose1d, SparseConvTranspose2d, SparseConvTranspose3d, SparseConvTranspose4d = _by_dim(
    "SparseConvTranspose", _Transposed
)
SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d, SparseInverseConv4d = _by_dim(
    "SparseInverseConv", _Inverse
)


class _SparsePool(SparseModule):
    """Base of pools: over windows that hold an input or, with subm=True, around each voxel."""

    dim: int
    relation: Callable[[], Relation]
    window: Relation

    def __init__(
        self,
        kernel_size: Size = 3,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        indice_key: Any = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        subm: bool = False,
    ) -> None:
        window = (1, None, dilation, "same") if subm else (stride, padding, dilation, "support")
        layers._Pool.__init__(self, kernel_size, *window)  # pyright: ignore[reportArgumentType]
        self.window = found = self.relation().shared()
        self.kernel_size, self.stride = [*found.kernel], [*found.stride]
        self.padding, self.dilation = [*found.padding], [*found.dilation]
        self.ndim, self.subm, self.indice_key, self.algo = self.dim, subm, indice_key, algo
        self.name, self._sparse_unique_name = name, ""
        if record_voxel_count:
            self.register_buffer("max_num_voxels_during_training", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Any) -> Any:
        if not issubclass(type(x), SparseConvTensor):
            return super().forward(x)
        key, sparse = self.indice_key, x.sparse
        if key is not None and key in x.indice_dict:
            raise OptionError(f"indice key {key!r} exists in this tensor; a pool needs its own")
        y = self._finished(call_layer(self, super().forward, sparse))
        return x._after(y, None, key, _data_of(self, sparse, y))

    def _finished(self, y: SparseTensor) -> SparseTensor:
        return y


class _MaxPool(_SparsePool, layers.MaxPool):
    """Maximum over 0 and the inputs of each window: spconv starts from 0 (csrc/sparse/maxpool.py, indice_maxpool)."""

    def _finished(self, y: SparseTensor) -> SparseTensor:
        return y.replace(torch.relu(y.feats))


class _AvgPool(_SparsePool, layers.AvgPool):
    """Mean over the inputs of each window."""


SparseMaxPool1d, SparseMaxPool2d, SparseMaxPool3d, SparseMaxPool4d = _by_dim("SparseMaxPool", _MaxPool)
SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d, SparseAvgPool4d = _by_dim("SparseAvgPool", _AvgPool)


# Containers and dense modules


class SparseSequential(SparseModule):
    """Modules in a row, from arguments, an OrderedDict or keywords. One that is no SparseModule receives the features,
    unless there are no voxels."""

    def __init__(self, *modules: Any, **named: nn.Module) -> None:
        super().__init__()
        first = modules[0].items() if len(modules) == 1 and isinstance(modules[0], OrderedDict) else None
        for name, module in first if first is not None else enumerate(modules):
            self.add_module(str(name), module)
        for name, module in named.items():
            self.add(module, name)

    def __getitem__(self, place: int) -> nn.Module:
        return [*self._modules.values()][place]  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module. Raises OptionError for a name that is taken."""
        name = str(len(self)) if name is None else name
        if name in self._modules:
            raise OptionError(f"a module named {name!r} exists already")
        self.add_module(name, module)

    def forward(self, input: Any) -> Any:  # noqa: A002
        for module in self._modules.values():
            if is_spconv_module(module) or not issubclass(type(input), SparseConvTensor):
                input = module(input)  # pyright: ignore[reportOptionalCall]
            elif _traced(input._sparse) or len(input.indices):
                input = input.replace_feature(module(input.features))  # pyright: ignore[reportOptionalCall]
        return input


class _OnFeatures(nn.Module):
    """Mixin: a module of torch on the features of a SparseConvTensor, or on a tensor."""

    def forward(self, x: Any) -> Any:
        if not issubclass(type(x), SparseConvTensor):
            return super().forward(x)
        return x.replace_feature(super().forward(x.features))


def _on_features(base: type, name: str = "") -> Any:
    return _class(f"Sparse{name or base.__name__}", (_OnFeatures, base))


SparseBatchNorm, SparseSyncBatchNorm = _on_features(nn.BatchNorm1d, "BatchNorm"), _on_features(nn.SyncBatchNorm)
SparseReLU, SparseIdentity = _on_features(nn.ReLU), _on_features(nn.Identity)


Identity = _class("Identity", (nn.Identity,), input_spatial_size=lambda self, out_size: out_size)


class ConcatTable(SparseModule):
    """The list of what each module makes of x."""

    def forward(self, x: Any) -> list[Any]:
        return [module(x) for module in self.children()]

    def add(self, module: nn.Module) -> ConcatTable:
        self.add_module(str(len(self._modules)), module)
        return self


def _without_grid(x: SparseConvTensor) -> SparseConvTensor:
    x.grid = None
    return x


def _joined(tensors: Sequence[SparseConvTensor]) -> SparseConvTensor:
    return tensors[0].replace_feature(torch.cat([x.features for x in tensors], 1))


def _stateless(name: str, doc: str, function: Callable[[Any], Any]) -> Any:
    """A module class whose forward is a function."""
    return _class(name, (SparseModule,), __doc__=doc, forward=lambda self, x: function(x))


ToDense = _stateless("ToDense", "x.dense().", lambda x: x.dense())
RemoveGrid = _stateless("RemoveGrid", "Sets x.grid to None.", _without_grid)
AddTable = _stateless("AddTable", "Sum of tensors on the same indices.", lambda xs: sum(xs[1:], xs[0]))
JoinTable = _stateless("JoinTable", "Tensors on the same indices, their channels side by side.", _joined)
AddTableMisaligned = _stateless("AddTableMisaligned", "sparse_add of tensors.", lambda xs: sparse_add(*xs))
RemoveDuplicate = _stateless(
    "RemoveDuplicate",
    "The first row of each of the indices, in (batch, Morton) order.",
    lambda x: x.select_by_index(utils.first_rows(x.indices)),
)
SparseGlobalMaxPool = _stateless(
    "SparseGlobalMaxPool", "Maximum over each batch item's voxels, [B, C].", lambda x: global_max_pool(x.sparse)
)
SparseGlobalAvgPool = _stateless(
    "SparseGlobalAvgPool", "Mean over each batch item's voxels, [B, C].", lambda x: global_avg_pool(x.sparse)
)


def is_spconv_module(module: Any) -> bool:
    """True if a SparseSequential passes the tensor, not its features."""
    return isinstance(module, SparseModule | SparseBatchNorm | SparseReLU)


def is_sparse_conv(module: Any) -> bool:
    return isinstance(module, SparseConvolution)


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, SparseModule):
            part._sparse_unique_name = name


def sparse_add(*tensors: SparseConvTensor) -> SparseConvTensor:
    """Sum over the union of the indices, in (batch, Morton) order; indice keys are dropped unless the result has as
    many rows as the first tensor with most. Raises ShapeError for other spatial shapes, channels or batch sizes."""
    first, *more = tensors
    total = first.sparse
    for x in more:
        if (x.spatial_shape, x.batch_size) != (first.spatial_shape, first.batch_size):
            raise ShapeError(f"sparse_add takes one spatial shape, found {first.spatial_shape} and {x.spatial_shape}")
        own = x.sparse
        if own.stride != total.stride:
            own = SparseTensor(
                own.feats, own.coords, total.stride, own.spatial_shape, own.batch_size, dim=own.spatial_dim
            )
        total = union(total, own)
    found = first._after(total, first.spatial_shape)
    found.indice_dict = {}
    return found


# Module paths

_PLUS = ("SpatialGroupConv", "FocalsConv")
_BOXES = (
    "rbbox_iou", "rbbox_intersection", "rbbox_iou_loss", "nms", "non_max_suppression", "non_max_suppression_cpu",
    "rotate_non_max_suppression_cpu",
)  # fmt: skip


def _refused(name: str, advice: str) -> type:
    """A class or function of spconv that raises OptionError when it is called."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:
        raise OptionError(f"{name} is not offered: {advice}")

    return type(name, (), {"__init__": __init__, "__doc__": advice})


def _absent(path: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        raise MissingAttributeError(f"pumice's stand-in for {path} has no {name!r}", name=name)

    return __getattr__


_NAMES = {
    name: value
    for name, value in globals().items()
    if not name.startswith("_") and getattr(value, "__module__", None) in (__name__, utils.__name__)
}
_NAMES |= {"ImplicitGemmIndiceData": IndiceData, "sparse_add_hash_based": sparse_add, "__version__": __version__}
_NAMES |= {"SPCONV_VERSION_NUMBERS": [*map(int, __version__.split("."))], "IS_SPCONV2_AVAILABLE": True}
_OF_UTILS = {name: value for name, value in vars(utils).items() if getattr(value, "__module__", "") == utils.__name__}
_GROUPED = "it is of spconv-plus; a SubMConv3d with groups=, or pumice.nn.Conv3d with offsets=, has such kernels"
_NAMES |= {f"{kind}{dim}d": _refused(f"{kind}{dim}d", _GROUPED) for kind in _PLUS for dim in (2, 3)}
_DENSE = "operators on boxes are no sparse operators; take torchvision's or your framework's"
_OF_BOXES = {name: _refused(name, _DENSE) for name in _BOXES}
_CONSTANTS = {
    "SPCONV_USE_DIRECT_TABLE": True,
    "SPCONV_ALLOW_TF32": False,
    "SPCONV_DO_SORT": True,
    "SPCONV_FX_TRACE_MODE": False,
    "ALL_WEIGHT_IS_KRSC": True,
    "FILTER_HWIO": False,
    "SAVED_WEIGHT_LAYOUT": settings().spconv_layout,
}
_PATHS: dict[str, Any] = {"cumm": {}, "cumm.tensorview": {"from_numpy": torch.from_numpy, "Tensor": Tensor}}
for _root in ("spconv", "spconv.pytorch"):
    _PATHS |= {_root: _NAMES, f"{_root}.constants": _CONSTANTS}
    for _part in ("conv", "modules", "core", "functional", "pool", "spatial", "tables", "identity"):
        _PATHS[f"{_root}.{_part}"] = _NAMES
    for _part in ("ops", "utils", "hash"):
        _PATHS[f"{_root}.{_part}"] = {**_NAMES, **_OF_UTILS, **_OF_BOXES}
MODULES: Mapping[str, Mapping[str, Any]] = {
    path: {**names, "__getattr__": _absent(path)} for path, names in _PATHS.items()
}
"""Names by module path. All paths of spconv hold all names of layers."""
conv = modules = core = functional = pool = ops = SimpleNamespace(**_NAMES)
constants = SimpleNamespace(**_CONSTANTS)


def installing() -> None:
    """Register the layers with mmcv and mmdet3d, where these are imported."""
    starts = ("SubMConv", "Sparse")
    utils.register({name: value for name, value in _NAMES.items() if name.startswith(starts)})
