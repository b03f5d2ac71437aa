"""Convolution layers: weights and options for pumice.ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from inspect import cleandoc
from typing import Any, ClassVar

import torch
from torch import nn

from pumice.coords import Geometry, KernelMap, Relation, as_axes, kernel_map
from pumice.errors import OptionError, ShapeError
from pumice.ops import SparseTensor
from pumice.ops.ahead import CompiledTogether
from pumice.ops.conv import Flow, Size, Target, convolve, target_of
from pumice.schedule.dataflow import chosen


class Convolution(CompiledTogether, nn.Module):
    """Base of convolution layers: weight [C_out, *kernel, C_in / groups], bias [C_out], relation of the kernel map.
    Initialised as in torch.nn: weight and bias ~ U(-b, b) with b = 1 / sqrt(fan_in), fan_in = K * C_in / groups
    (kaiming_uniform with a = sqrt 5). dataflow: as in pumice.ops.conv; may be changed between calls. tuned: dataflow
    set by pumice.tune, None without; a `dataflow` that differs from it was set by the user. linear_map: an
    object with the weight [C_out, C_in] and bias of a linear map that computes the same, if there is one."""

    operation = "convolution"
    dim: ClassVar[int]
    weight: nn.Parameter
    bias: nn.Parameter | None
    relation: Relation
    dataflow: Flow = None
    tuned: Flow = None
    linear_map: Any = None
    groups: int
    options: dict[str, Any]
    in_channels: int
    out_channels: int

    def __init_subclass__(cls, dim: int | None = None) -> None:
        super().__init_subclass__()
        if dim is not None:
            cls.dim = dim
            # Conv1d to Conv4d inherit the docstring of Conv, which is not public.
            line, _, _ = (cls.__doc__ or "").partition(";")
            cls.__doc__ = f"{line}.\n\n{cleandoc(cls.__bases__[0].__doc__ or '')}"

    def __init__(
        self,
        channels: tuple[int, int],
        window: tuple[int, ...],
        groups: int,
        bias: bool,
        options: dict[str, Any],
        dataflow: Flow,
    ) -> None:
        super().__init__()
        self.groups, self.options, self.dataflow = groups, options, dataflow
        if dataflow is not None:
            chosen(dataflow)
        self.in_channels, self.out_channels = channels
        for name, number in (("in_channels", channels[0]), ("out_channels", channels[1]), ("groups", groups)):
            as_axes(number, 1, name, 1)
        if channels[0] % groups or channels[1] % groups:
            raise ShapeError(f"groups={groups} must divide in_channels={channels[0]} and out_channels={channels[1]}")
        self.weight = nn.Parameter(torch.empty(channels[1], *window, channels[0] // groups))
        # As in torch, None is registered.
        self.register_parameter("bias", nn.Parameter(torch.empty(channels[1])) if bias else None)
        self.reset_parameters()

    def map_request(self, target: Target = None) -> tuple[Relation, Geometry | None]:
        """(relation of a call, geometry of its target or None)."""
        return self.relation, target_of(target)[1]

    def map_of(self, x: SparseTensor, target: Target = None) -> tuple[KernelMap, Geometry]:
        """(kernel map, output geometry) of a call on x."""
        relation, geometry = self.map_request(target)
        return kernel_map(x.geometry, relation, geometry)

    def convolve(self, x: SparseTensor, target: Target = None) -> SparseTensor:
        """Convolve x, for `forward` of subclasses."""
        return convolve(x, self.weight, self.bias, self.groups, self.map_request(target), self.dataflow)

    def reset_parameters(self) -> None:
        """Reinitialise weight and bias."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        window = tuple(self.weight.shape[1:-1])
        shown = {k: v for k, v in self.options.items() if k != "offsets"}
        if "out" in shown and max(self.relation.stride) > 1:
            shown |= {"padding": self.relation.padding, "out": self.relation.policy}
        shown = {k: v for k, v in shown.items() if v is not None}
        shown |= {} if self.dataflow is None else {"dataflow": self.dataflow}
        rest = "".join(f", {name}={value}" for name, value in shown.items())
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.in_channels}, {self.out_channels}, kernel_size={window}{rest}{groups}{bias}"


def convolutions(*modules: nn.Module) -> list[Convolution]:
    """The convolution layers in these modules, in order."""
    return [layer for module in modules for layer in module.modules() if isinstance(layer, Convolution)]


class Conv(Convolution):
    """Sparse convolution over D axes, see pumice.ops.conv; Conv1d to Conv4d fix D.

    Defaults differ from torch and spconv, which pad by 0 and use out="support": padding is centred,
    `dilation * (kernel_size // 2)` (0 for even kernels), stride 1 keeps the coordinates (out="same", submanifold), and
    larger strides give the distinct floor(in / stride) (out="floor_unique"; with explicit padding out="support").
    `layer(x, out=target)` sets the outputs of one call.

    Parameters
    ----------
    in_channels, out_channels: int.
    kernel_size, stride, padding, dilation: an int or one per axis; padding None means centred.
    groups: channel groups. bias: True to add a bias.
    out: output policy. offsets: [K][D] integers instead of a kernel window (then kernel_size is K or None).
    dataflow: as in pumice.ops.conv; None: automatic.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size | None,
        stride: Size = 1,
        padding: Size | None = None,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        out: str | None = None,
        offsets: Sequence[Sequence[int]] | None = None,
        dataflow: Flow = None,
    ) -> None:
        options = {"stride": stride, "padding": padding, "dilation": dilation, "out": out, "offsets": offsets}
        if offsets is not None and not len(offsets):
            raise OptionError("offsets takes at least one offset, found none")
        window = _window(kernel_size, self.dim) if offsets is None else (len(offsets),)
        super().__init__((in_channels, out_channels), window, groups, bias, options, dataflow)
        spread = {"stride": stride, "dilation": dilation, "policy": target_of(out)[0]}
        if offsets is None:
            self.relation: Relation = Relation.of(self.dim, window, padding=padding, **spread).shared()
        else:
            self.relation = Relation.of_offsets(self.dim, offsets, **spread).shared()

    def forward(self, x: SparseTensor, out: Target = None) -> SparseTensor:
        """Convolve x, N voxels x in_channels, to out_channels. out: overrides the layer's for this call."""
        return self.convolve(x, out)

    def map_request(self, target: Target = None) -> tuple[Relation, Geometry | None]:
        if target is None:
            return self.relation, None
        policy, geometry = target_of(target)
        return replace(self.relation, policy=policy), geometry


class ConvTranspose(Convolution):
    """Transposed sparse convolution, which generates new coordinates; see pumice.ops.conv_transpose."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | None = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        output_padding: Size = 0,
        dataflow: Flow = None,
    ) -> None:
        options = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
        window = _window(kernel_size, self.dim)
        super().__init__((in_channels, out_channels), window, groups, bias, options, dataflow)
        self.relation: Relation = Relation.of_transposed(self.dim, window, **options).shared()

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.convolve(x)


class GenerativeConvTranspose(Convolution):
    """Transposed convolution to all coordinates that are reached, also outside spatial_shape; odd kernels are centred.

    As MinkowskiGenerativeConvolutionTranspose: Gwak, Choy and Savarese, "Generative Sparse Detection Networks",
    ECCV 2020, sec. 3. Follow it with prune().
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dataflow: Flow = None,
    ) -> None:
        options = {"stride": stride, "padding": None, "dilation": dilation, "bounded": False}
        window = _window(kernel_size, self.dim)
        super().__init__((in_channels, out_channels), window, groups, bias, options, dataflow)
        self.relation: Relation = Relation.of_transposed(self.dim, window, **options).shared()

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.convolve(x)


class InverseConv(Convolution):
    """Inverse of a strided convolution, to known finer coordinates; see pumice.ops.conv_inverse.

    `forward(x, target)`: target, a SparseTensor or Geometry, has the input coordinates of the convolution of the same
    kernel, stride, padding and dilation that made x's. None (as in a Sequential): that convolution's input, if alive.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | None = None,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dataflow: Flow = None,
    ) -> None:
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        window = _window(kernel_size, self.dim)
        super().__init__((in_channels, out_channels), window, groups, bias, options, dataflow)
        self.relation: Relation = Relation.of(self.dim, window, policy="cached_inverse", **options).shared()

    def forward(self, x: SparseTensor, target: SparseTensor | Geometry | None = None) -> SparseTensor:
        return self.convolve(x, target)


def _window(kernel_size: Size | None, dim: int) -> tuple[int, ...]:
    if kernel_size is None:
        raise OptionError("kernel_size is an int or one per axis, found None")
    return as_axes(kernel_size, dim, "kernel_size", 1)


class Conv1d(Conv, dim=1):
    """Conv over 1 spatial axis; see Conv for the arguments."""


class Conv2d(Conv, dim=2):
    """Conv over 2 spatial axes; see Conv for the arguments."""


class Conv3d(Conv, dim=3):
    """Conv over 3 spatial axes; see Conv for the arguments."""


class Conv4d(Conv, dim=4):
    """Conv over 4 spatial axes; see Conv for the arguments."""


class ConvTranspose1d(ConvTranspose, dim=1):
    """ConvTranspose over 1 spatial axis; see ConvTranspose for the arguments."""


class ConvTranspose2d(ConvTranspose, dim=2):
    """ConvTranspose over 2 spatial axes; see ConvTranspose for the arguments."""


class ConvTranspose3d(ConvTranspose, dim=3):
    """ConvTranspose over 3 spatial axes; see ConvTranspose for the arguments."""


class ConvTranspose4d(ConvTranspose, dim=4):
    """ConvTranspose over 4 spatial axes; see ConvTranspose for the arguments."""


class GenerativeConvTranspose1d(GenerativeConvTranspose, dim=1):
    """GenerativeConvTranspose over 1 spatial axis; see GenerativeConvTranspose for the arguments."""


class GenerativeConvTranspose2d(GenerativeConvTranspose, dim=2):
    """GenerativeConvTranspose over 2 spatial axes; see GenerativeConvTranspose for the arguments."""


class GenerativeConvTranspose3d(GenerativeConvTranspose, dim=3):
    """GenerativeConvTranspose over 3 spatial axes; see GenerativeConvTranspose for the arguments."""


class GenerativeConvTranspose4d(GenerativeConvTranspose, dim=4):
    """GenerativeConvTranspose over 4 spatial axes; see GenerativeConvTranspose for the arguments."""


class InverseConv1d(InverseConv, dim=1):
    """InverseConv over 1 spatial axis; see InverseConv for the arguments."""


class InverseConv2d(InverseConv, dim=2):
    """InverseConv over 2 spatial axes; see InverseConv for the arguments."""


class InverseConv3d(InverseConv, dim=3):
    """InverseConv over 3 spatial axes; see InverseConv for the arguments."""


class InverseConv4d(InverseConv, dim=4):
    """InverseConv over 4 spatial axes; see InverseConv for the arguments."""
