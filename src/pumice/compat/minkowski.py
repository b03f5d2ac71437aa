"""MinkowskiEngine's layers, functions and utilities over pumice, and its importable modules.

Names, arguments, attributes and parameter layouts are those of MinkowskiEngine 0.5.4, with the spellings of 0.4.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial, reduce
from operator import add, mul
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pumice import nn as ours
from pumice import ops
from pumice.compat import minkowski_tensor as tensors
from pumice.compat.minkowski_tensor import FeatureTensor, KernelGenerator, SparseTensor, TensorField, distinct
from pumice.compat.wrapped import LinearMap, call_layer
from pumice.coords import Geometry, Relation, as_axes, kernel_map
from pumice.errors import OptionError, ShapeError
from pumice.nn.conv import Convolution
from pumice.ops.conv import Target, target_of

MinkowskiAlgorithm = IntEnum("MinkowskiAlgorithm", "DEFAULT MEMORY_EFFICIENT SPEED_OPTIMIZED", start=0)
CoordinateMapType = IntEnum("CoordinateMapType", "CPU CUDA", start=0)
GPUMemoryAllocatorType = IntEnum("GPUMemoryAllocatorType", "PYTORCH CUDA", start=0)
_MODES = ("LOCAL_{}_POOLING", *(f"GLOBAL_{{}}_POOLING_{how}" for how in ("DEFAULT", "KERNEL", "PYTORCH_INDEX")))
_NAMES = [mode.format(each) for mode in _MODES for each in ("SUM", "AVG", "MAX")]
PoolingMode: Any = IntEnum("PoolingMode", _NAMES, start=0)


class MinkowskiModuleBase(nn.Module):
    """Base class of layers."""


def _classes(base: type, **own: Mapping[str, Any]) -> dict[str, Any]:
    """{"MinkowskiX": subclass of `base` with the attributes of X}."""
    made = {f"Minkowski{name}": {"__module__": __name__, **attributes} for name, attributes in own.items()}
    return {name: type(name, (base,), attributes) for name, attributes in made.items()}


class MinkowskiNetwork(nn.Module, ABC):
    """Base class of networks over D axes."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.D = D

    @abstractmethod
    def forward(self, x: Any) -> Any: ...


# Layers with kernels


def _outputs(layer: Any, x: SparseTensor, coordinates: Any) -> tensors.Choice:
    """(key of a layer's outputs, its target or nothing)."""
    manager, key, window = x.coordinate_manager, x.coordinate_map_key, layer.kernel_generator
    steps = window.kernel_stride
    if window.dimension != manager.D:
        raise ShapeError(f"dimension={window.dimension} takes tensors of as many spatial axes, found {manager.D}")
    if coordinates is not None:
        sizes = zip(key.stride, steps, strict=True)
        return manager.on(coordinates, [t // s if layer.is_transpose else t * s for t, s in sizes])
    if layer.is_transpose:
        return manager.finer(key, steps, layer.expand_coordinates)
    if layer.expand_coordinates:
        if max(steps) > 1:
            raise OptionError(f"expand_coordinates takes stride 1, found {[*steps]}")
        reached = kernel_map(x.sparse.geometry, window.relation("transposed_support"))[1]
        return manager.free_key(key.stride), (reached,)
    return manager.coarser(key, steps)


class _Convolution(Convolution):
    """Base of convolutions: `kernel` [K, C_in, C_out] ([C_in, C_out] of one offset at stride 1; [K, C] of each channel
    by itself), `bias` [1, C_out]; `weight` and `bias` are views of these in our layout."""

    is_transpose: ClassVar[bool] = False
    generative: ClassVar[bool] = False
    channelwise: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: Any = None,  # noqa: ARG002
        dimension: int = -1,
        has_bias: bool | None = None,
        generate_new_coords: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        window = kernel_generator or KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        self.kernel_generator, self.dimension = window, window.dimension
        self.expand_coordinates = self.generative or bool(generate_new_coords) or expand_coordinates
        self.in_channels, self.out_channels, self.options = in_channels, out_channels, {}
        self.groups = in_channels if self.channelwise else 1
        self.relation = window.relation("transposed_support" if self.is_transpose else None)
        self.onto = window.relation("given_inverse" if self.is_transpose else "given")
        self.use_mm = not self.channelwise and window.kernel_volume == 1 and window.requires_strided_coordinates
        channels = (in_channels,) if self.channelwise else (in_channels, out_channels)
        self.kernel = nn.Parameter(torch.empty(*() if self.use_mm else (window.kernel_volume,), *channels))
        with_bias = bias if has_bias is None else has_bias
        self.register_parameter("bias", nn.Parameter(torch.empty(1, out_channels)) if with_bias else None)
        self.reset_parameters()
        if self.use_mm:
            # Not a submodule: its parameters are this layer's.
            self.__dict__["linear_map"] = LinearMap(self)

    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[C_out, *window, C_in / groups], a view."""
        kernel: Any = self._parameters["kernel"]
        window = self.kernel_generator.window
        return kernel.view(*window, self.in_channels // self.groups, self.out_channels).movedim(-1, 0)

    @property
    def bias(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[C_out], a view, or None."""
        if "bias" not in self._parameters:
            raise AttributeError("bias")
        found = self._parameters["bias"]
        return None if found is None else found.view(-1)

    def reset_parameters(self) -> None:
        channels = self.out_channels if self.is_transpose else self.in_channels
        bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
        for each in self.parameters():
            nn.init.uniform_(each, -bound, bound)

    def map_request(self, target: Target = None) -> tuple[Relation, Geometry | None]:
        return (self.relation, None) if target is None else (self.onto, target_of(target)[1])

    def forward(self, x: Any, coordinates: Any = None) -> Any:
        """Convolve a SparseTensor, onto `coordinates` (a SparseTensor, a key, or [N, 1+D]) if given."""
        # By type: a proxy answers isinstance in its own way.
        if not issubclass(type(x), SparseTensor):
            # A program calls layers with tensors of ours.
            return self._convolved(x, coordinates)
        if self.use_mm:
            return x.like(call_layer(self, self._convolved, x.sparse))
        key, target = _outputs(self, x, coordinates)
        return SparseTensor.of(call_layer(self, self._convolved, x.sparse, *target), key, x.coordinate_manager)

    def _convolved(self, x: Any, target: Any = None) -> Any:
        return ops.linear(x, self.matrix(), self.bias) if self.use_mm else self.convolve(x, target)

    def matrix(self) -> Tensor:
        """[C_out, C_in] of a kernel of one offset."""
        return self.kernel.t()

    def extra_repr(self) -> str:
        return f"in={self.in_channels}, out={self.out_channels}, {self.kernel_generator}"


class MinkowskiConvolution(_Convolution):
    """Convolution; outputs at floor(in / stride), at stride 1 the input's coordinates."""


class MinkowskiConvolutionTranspose(_Convolution):
    """Transposed convolution, to known coordinates of tensor stride / stride if there are some, else to new ones."""

    is_transpose = True


class MinkowskiGenerativeConvolutionTranspose(_Convolution):
    """Transposed convolution to all coordinates that are reached."""

    is_transpose, generative = True, True


class MinkowskiChannelwiseConvolution(_Convolution):
    """Convolution of each channel by itself: `kernel` [K, C]."""

    channelwise = True

    def __init__(self, in_channels: int, *args: Any, **more: Any) -> None:
        super().__init__(in_channels, in_channels, *args, **more)


class _Pooling(MinkowskiModuleBase):
    """Base of pools over windows; windows of the length of the stride begin at the output."""

    function: ClassVar[Callable[..., Any]]
    is_transpose: ClassVar[bool] = False

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        window = kernel_generator or KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        self.kernel_generator, self.dimension, self.expand_coordinates = window, window.dimension, expand_coordinates
        self.size, self.options = window.kernel_size[::-1], window.options(pool=True)

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        key, target = _outputs(self, input, coordinates)
        if self.is_transpose:
            onto = {"target": target[0] if target else None}
        else:
            strided = max(self.kernel_generator.kernel_stride) > 1
            onto = {"out": target[0] if target else "floor_unique" if strided else "same"}
        y = type(self).function(input.sparse, self.size, **self.options, **onto)
        return SparseTensor.of(y, key, input.coordinate_manager)

    def extra_repr(self) -> str:
        return str(self.kernel_generator)


# Transposed ones sum (or average) over the windows that hold a voxel; without overlaps, the row of its one window.
_POOLS = _classes(
    _Pooling,
    MaxPooling={"function": staticmethod(ops.max_pool)},
    AvgPooling={"function": staticmethod(ops.avg_pool)},
    SumPooling={"function": staticmethod(ops.sum_pool)},
    PoolingTranspose={"function": staticmethod(ops.unpool), "is_transpose": True},
    AvgUnpooling={"function": staticmethod(partial(ops.unpool, reduce="mean")), "is_transpose": True},
)
_GLOBAL: Mapping[str, tuple[Callable[..., Any], str]] = {
    "AVG": (ops.global_avg_pool, "mean"),
    "SUM": (ops.global_sum_pool, "sum"),
    "MAX": (ops.global_max_pool, "max"),
}


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """One row per batch item, a SparseTensor at tensor stride 0."""

    reduce: ClassVar[str] = "AVG"

    def __init__(self, mode: Any = None, average: bool = True, dimension: int = -1) -> None:  # noqa: ARG002
        super().__init__()
        # The first argument of 0.4 is `average`.
        average = mode if isinstance(mode, bool) else average
        named = PoolingMode(mode).name.split("_")[1] if isinstance(mode, PoolingMode) else self.reduce
        self.reduction = named if average else "SUM"

    def forward(self, input: Any, coordinates: Any = None) -> SparseTensor:  # noqa: ARG002
        pool, reduce = _GLOBAL[self.reduction]
        if isinstance(input, TensorField):
            values, x = ops.scatter(input.F, input.C[:, 0].long(), 0, reduce=reduce), input.sparse().sparse
        else:
            values, x = pool(input.sparse), input.sparse
        return input.coordinate_manager.at_origin(x, values)


_GLOBAL_POOLS = _classes(MinkowskiGlobalPooling, **{f"Global{n.title()}Pooling": {"reduce": n} for n in _GLOBAL})


class MinkowskiBroadcast(MinkowskiModuleBase):
    """The row of the batch item, of a tensor from a global pool, at each voxel: alone, or joined with the features."""

    join: ClassVar[Callable[..., Any]] = staticmethod(lambda feats, spread: spread)  # noqa: ARG005

    def __init__(self, dimension: int = -1) -> None:  # noqa: ARG002
        super().__init__()

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        return input.with_features(self.join(input.F, ops.broadcast(input.sparse, input_glob.F)))


_BROADCASTS = _classes(
    MinkowskiBroadcast,
    BroadcastAddition={"join": staticmethod(add)},
    BroadcastMultiplication={"join": staticmethod(mul)},
    BroadcastConcatenation={"join": staticmethod(lambda feats, spread: torch.cat([feats, spread], 1))},
)


# Layers on rows


class MinkowskiLinear(MinkowskiModuleBase):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = ours.Linear(in_features, out_features, bias)

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseTensor):
            return input.like(self.linear(input.sparse))
        return input.with_features(functional.linear(input.F, self.linear.weight, self.linear.bias))


class MinkowskiBatchNorm(MinkowskiModuleBase):
    norm: ClassVar[Any] = ours.BatchNorm
    of_rows: ClassVar[Callable[..., Any]] = staticmethod(nn.BatchNorm1d.forward)

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, *args: Any, **more: Any) -> None:
        super().__init__()
        self.bn = self.norm(num_features, eps, momentum, *args, **more)

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseTensor):
            return input.like(self.bn(input.sparse))
        return input.with_features(self.of_rows(self.bn, input.F))


def _synced_rows(norm: ours.SyncBatchNorm, feats: Tensor) -> Tensor:
    """The norm of plain rows, as voxels on a line."""
    places = torch.arange(len(feats), dtype=torch.int32, device=feats.device)
    return norm(ops.SparseTensor(feats, torch.stack([torch.zeros_like(places), places], 1), batch_size=1, dim=1)).feats


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    norm, of_rows = ours.SyncBatchNorm, staticmethod(_synced_rows)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every MinkowskiBatchNorm in `module`, keeping parameters and statistics."""
        if isinstance(module, MinkowskiBatchNorm):
            made = cls.__new__(cls)
            nn.Module.__init__(made)
            made.bn = ours.SyncBatchNorm.convert_sync_batchnorm(module.bn, process_group)
            return made.train(module.training)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    def __init__(self, num_features: int, dimension: int = -1, D: int = -1) -> None:  # noqa: ARG002
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.ones(1, num_features))
        self.bias = nn.Parameter(torch.zeros(1, num_features))

    def forward(self, input: SparseTensor) -> SparseTensor:
        affine = self.weight.view(-1), self.bias.view(-1)
        return input.like(ops.group_norm(input.sparse, self.num_features, *affine, 1e-8))


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    """A layer of torch.nn on the features. `inplace` is accepted, and ignored."""

    MODULE: ClassVar[Any] = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__()
        self.module = self.MODULE(*args, **more)
        if hasattr(self.module, "inplace"):
            self.module.inplace = False

    def forward(self, input: FeatureTensor) -> Any:
        return input.with_features(self.module(input.F))


_NONLINEARITIES = (
    "ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6 RReLU SELU CELU GELU Sigmoid "
    "SiLU Softplus Softshrink Softsign Tanh Tanhshrink Threshold Softmin Softmax LogSoftmax Dropout AlphaDropout"
)
NONLINEARITIES = _classes(
    MinkowskiNonlinearityBase, **{name: {"MODULE": getattr(nn, name)} for name in _NONLINEARITIES.split()}
)


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """sin(x @ kernel + bias) * coef."""

    def __init__(self, in_channel: int, out_channel: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias, self.coef = (nn.Parameter(torch.rand(1, out_channel)) for _ in range(2))

    def forward(self, input: FeatureTensor) -> Any:
        return input.with_features(torch.sin(input.F @ self.kernel + self.bias) * self.coef)


# Tensors to tensors


def _pruned(_: Any, input: SparseTensor, mask: Tensor) -> SparseTensor:
    key = input.coordinate_manager.free_key(input.coordinate_map_key.stride, "pruned")
    return SparseTensor.of(input.sparse.prune(mask), key, input.coordinate_manager)


_FUNCTIONAL = _classes(
    MinkowskiModuleBase,
    Pruning={"forward": _pruned},
    Union={"forward": lambda self, *inputs: reduce(add, inputs)},  # noqa: ARG005
    Interpolation={"forward": lambda self, input, tfield: input.features_at_coordinates(tfield)},  # noqa: ARG005
    ToFeature={"forward": lambda self, x: x.F},  # noqa: ARG005
)


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    def __init__(self, remove_zeros: bool = True, coordinates: Tensor | None = None) -> None:
        super().__init__()
        self.remove_zeros, self.coordinates = remove_zeros, coordinates

    def forward(self, input: Any) -> SparseTensor:
        if isinstance(input, TensorField):
            return input.sparse()
        every = not self.remove_zeros or self.coordinates is not None
        return to_sparse_all(input, self.coordinates) if every else to_sparse(input)


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    def __init__(self, shape: Any = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> Tensor:
        return input.dense(self.shape)[0]


def _tensors(given: Sequence[Any]) -> Sequence[Any]:
    """Tensors passed one by one, or as one list."""
    return given[0] if len(given) == 1 else given


def cat(*sparse_tensors: Any) -> Any:
    """Channels of tensors on the same coordinates, one after the other."""
    given = _tensors(sparse_tensors)
    if isinstance(given[0], TensorField):
        return given[0].with_features(torch.cat([x.F for x in given], -1))
    return given[0].like(ops.cat([x.sparse for x in given]))


def sum(*sparse_tensors: Any) -> Any:  # noqa: A001
    return reduce(add, _tensors(sparse_tensors))


class MinkowskiStackSum(nn.Sequential):
    """The sum of what each module makes of the input."""

    def forward(self, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum([module(x) for module in self])


def dense_coordinates(shape: Sequence[int]) -> Tensor:
    """int32 [B * cells, 1+D]: every coordinate of a dense [B, C, axes...]."""
    return torch.cartesian_prod(*(torch.arange(n, dtype=torch.int32) for n in (shape[0], *shape[2:])))


def to_sparse(x: Tensor, format: str | None = None, coordinates: Any = None, device: Any = None) -> SparseTensor:  # noqa: ARG001
    """The cells of a dense tensor that are not all zero. format: as "BCXX", with the channels at C."""
    rows = x.movedim((format or "BC").index("C"), -1)
    coords = rows.detach().ne(0).any(-1).nonzero()
    return SparseTensor(rows[tuple(coords.unbind(1))], coords.int(), device=device)


def to_sparse_all(dense_tensor: Tensor, coordinates: Tensor | None = None) -> SparseTensor:
    """Every cell of a dense [B, C, axes...]."""
    coords = dense_coordinates(dense_tensor.shape) if coordinates is None else coordinates
    feats = dense_tensor.movedim(1, -1).flatten(0, -2)
    return SparseTensor(feats, coords.to(dense_tensor.device))


def _functional(name: str) -> Callable[..., Any]:
    """torch.nn.functional's function on features; of a loss, its value."""
    function: Any = getattr(functional, name)
    loss = "loss" in name or "entropy" in name or name == "kl_div"

    def call(input: FeatureTensor, *args: Any, **more: Any) -> Any:
        found = function(input.F, *args, **{k: v for k, v in more.items() if k != "inplace"})
        return found if loss else input.with_features(found)

    return call


# modules


class BasicBlock(nn.Module):
    """Residual block of two convolutions 3^D."""

    expansion: ClassVar[int] = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        middle = (3, stride, dilation)
        sizes = [middle, (3, 1, dilation)] if self.expansion == 1 else [(1, 1, 1), middle, (1, 1, 1)]
        for number, (size, step, spread) in enumerate(sizes, 1):
            out = planes * self.expansion if number == len(sizes) else planes
            conv = MinkowskiConvolution(inplanes, out, size, step, spread, dimension=dimension)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"norm{number}", MinkowskiBatchNorm(out, momentum=bn_momentum))
            inplanes = out
        self.relu, self.downsample, self.depth = NONLINEARITIES["MinkowskiReLU"](), downsample, len(sizes)

    def branch(self, x: Any) -> Any:
        for number in range(1, self.depth + 1):
            x = getattr(self, f"norm{number}")(getattr(self, f"conv{number}")(x))
            x = self.relu(x) if number < self.depth else x
        return x

    def forward(self, x: Any) -> Any:
        return self.relu(self.branch(x) + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(BasicBlock):
    """Residual block of convolutions 1, 3^D, 1."""

    expansion = 4


# utils


def kaiming_normal_(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu") -> Tensor:
    """torch's kaiming_normal_ for a kernel [K, C_in, C_out]; of a matrix, the fan-in is its second axis."""
    if mode.lower() not in ("fan_in", "fan_out"):
        raise OptionError(f"mode is fan_in or fan_out, found {mode!r}")
    taps, *channels = tensor.shape if tensor.ndim == 3 else (1, *tensor.shape[::-1])
    gain = nn.init.calculate_gain(nonlinearity, a)
    with torch.no_grad():
        return tensor.normal_(0, gain / math.sqrt(taps * channels[mode.lower() == "fan_out"]))


def batched_coordinates(coords: Sequence[Any], dtype: torch.dtype = torch.int32, device: Any = None) -> Tensor:
    """[N, 1+D]: the coordinates of all items, each with its number in front; int32 are floored."""
    parts = []
    for item, each in enumerate(map(torch.as_tensor, coords)):
        whole = each.floor() if each.is_floating_point() and dtype == torch.int32 else each
        parts.append(functional.pad(whole.to(dtype), (1, 0), value=item))
    return torch.cat(parts).to(device)


def sparse_collate(
    coords: Sequence[Any], feats: Sequence[Any], labels: Any = None, dtype: Any = torch.int32, device: Any = None
) -> tuple[Any, ...]:
    """(batched coordinates, features) of several items, and their labels if given."""
    found = batched_coordinates(coords, dtype, device), torch.cat([*map(torch.as_tensor, feats)])
    if labels is None:
        return found
    whole = all(isinstance(each, Tensor | np.ndarray) for each in labels)
    return (*found, torch.cat([*map(torch.as_tensor, labels)]) if whole else [*labels])


def batch_sparse_collate(data: Sequence[Any], dtype: Any = torch.int32, device: Any = None) -> tuple[Any, ...]:
    return sparse_collate(*zip(*data, strict=True), dtype=dtype, device=device)


class SparseCollation:
    """Collate function that leaves out the items from where limit_numpoints would be exceeded."""

    def __init__(self, limit_numpoints: int = -1, dtype: Any = torch.int32, device: Any = None) -> None:
        self.limit_numpoints, self.options = limit_numpoints, {"dtype": dtype, "device": device}

    def __call__(self, list_data: Sequence[Any]) -> tuple[Any, ...]:
        points = np.cumsum([len(item[0]) for item in list_data])
        kept = len(points) if self.limit_numpoints <= 0 else int((points <= self.limit_numpoints).sum())
        if kept < len(points):
            logging.getLogger("pumice.compat").warning("a batch keeps %d of %d items", kept, len(points))
        return batch_sparse_collate(list_data[:kept], **self.options)


def sparse_quantize(
    coordinates: Any,
    features: Any = None,
    labels: Any = None,
    ignore_label: int = -100,
    return_index: bool = False,
    return_inverse: bool = False,
    return_maps_only: bool = False,
    quantization_size: Any = None,
    device: Any = "cpu",
) -> Any:
    """The distinct voxels floor(coordinates / quantization_size), in order of first occurrence. Then, if given or
    requested: features of the first point of each voxel, labels (ignore_label where points differ), the index of the
    first point of each voxel, the voxel of each point."""
    if return_inverse and not return_index:
        raise OptionError("return_inverse takes return_index=True, found False")
    # Each library divides by a number in its own precision.
    given, listed = (
        (coordinates, torch.tensor) if isinstance(coordinates, Tensor) else (np.asarray(coordinates), np.array)
    )
    size = 1 if quantization_size is None else quantization_size
    cells = torch.floor(torch.as_tensor(given / (listed([*size]) if isinstance(size, Iterable) else size)))
    cells = cells.int().to(device)
    _, rows, inverse = distinct(functional.pad(cells, (1, 0)), (1,) * cells.shape[1])
    maps = (rows, inverse)[: 1 + return_inverse]
    if return_maps_only:
        return maps if return_inverse else rows
    host = rows.cpu()
    found: list[Any] = [cells[rows]] + ([] if features is None else [features[host]])
    if labels is not None:
        own = torch.as_tensor(labels).to(device)
        mixed = ops.scatter((own != own[rows][inverse]).float(), inverse, 0, dim_size=len(rows), reduce="max") > 0
        found.append(own[rows].masked_fill(mixed, ignore_label))
    found += maps if return_index else ()
    if labels is not None and isinstance(coordinates, np.ndarray):
        found = [x.numpy() if isinstance(x, Tensor) else x for x in found]
    return found[0] if len(found) == 1 else tuple(found)


def fnv_hash_vec(arr: np.ndarray) -> np.ndarray:
    """FNV-1 hash of each row, 64 bits (Fowler, Noll, Vo)."""
    found = np.full(len(arr), 14695981039346656037, np.uint64)
    for column in arr.astype(np.uint64).T:
        found = found * np.uint64(1099511628211) ^ column
    return found


# The names of each module


globals().update(_POOLS | _GLOBAL_POOLS | _BROADCASTS | NONLINEARITIES | _FUNCTIONAL)


def _named(*values: Any) -> dict[str, Any]:
    return {value.__name__: value for value in values}


_FUNCTIONS = {
    name: _functional(name) for name, each in vars(functional).items() if callable(each) and name[0].islower()
}
_UTILS = _named(
    kaiming_normal_, batched_coordinates, sparse_collate, batch_sparse_collate, SparseCollation, sparse_quantize,
    fnv_hash_vec,
)  # fmt: skip
_TENSORS = _named(
    SparseTensor, TensorField, KernelGenerator, tensors.CoordinateManager, tensors.CoordinateMapKey, tensors.RegionType,
    tensors.SparseTensorQuantizationMode, tensors.SparseTensorOperationMode, tensors.clear_global_coordinate_manager,
    tensors.set_sparse_tensor_operation_mode,
)  # fmt: skip
_TOP = {
    **{name: value for name, value in globals().items() if name.startswith("Minkowski")},
    **_named(CoordinateMapType, GPUMemoryAllocatorType, PoolingMode),
    **_named(cat, sum, to_sparse, to_sparse_all, dense_coordinates),
    **_TENSORS,
    "CoordsManager": tensors.CoordinateManager,
    "CoordsKey": tensors.CoordinateMapKey,
    "is_cuda_available": torch.cuda.is_available,
    "convert_to_int_list": lambda arg, dimension: [*as_axes(arg, dimension, "arg", -(2**31))],
    "__version__": "0.5.4",
}
_FILES = (
    "SparseTensor Tensor TensorField CoordinateManager KernelGenerator Common Convolution ChannelwiseConvolution "
    "Pooling Broadcast Nonlinearity Normalization Pruning Union Interpolation Network Ops"
)

MODULES: Mapping[str, Mapping[str, Any]] = {
    "MinkowskiEngine": _TOP,
    **{f"MinkowskiEngine.Minkowski{name}": _TOP for name in _FILES.split()},
    **{f"Minkowski{name}": _TOP for name in _FILES.split()},
    "MinkowskiEngine.MinkowskiFunctional": _FUNCTIONS,
    "MinkowskiEngine.utils": _UTILS,
    **{f"MinkowskiEngine.utils.{name}": _UTILS for name in ("quantization", "collation", "init")},
    "MinkowskiEngine.modules": {},
    "MinkowskiEngine.modules.resnet_block": _named(BasicBlock, Bottleneck),
}
