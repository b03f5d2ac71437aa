"""Modules in training as kernels that are started again: what launches depend on is compared in each call, as
pumice.nn.prepared does without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pumice.coords import Geometry, Relation
from pumice.lower import direct
from pumice.lower import kernel as kernels
from pumice.lower.norm import NormKernels, Statistics
from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import ACTIVATIONS, CONVOLUTION_GUARDS, OWN, REQUIRES_GRAD, TENSOR_GUARDS
from pumice.ops import SparseTensor, autograd, trained
from pumice.ops.conv import autocast_dtype
from pumice.ops.line import found_of
from pumice.ops.tensor import raw_feats, unchecked_tensor
from pumice.runtime.cache import BoundedCache

_OF_NORMS = attrgetter("training", "eps", "momentum", "track_running_stats")
_EACH = 7
"""Tensors of a step: weight and bias, and of the norm mean, variance, count of batches, scale and shift."""


class Step(NamedTuple):
    """A layer with the norm by known statistics and the activation behind it, as one kernel. behind: these modules;
    opens to ends: as in line.Layer."""

    layer: Convolution | layers.Linear
    norm: layers.BatchNorm | None
    behind: tuple[nn.Module, ...]
    opens: bool = False
    aside: bool = False
    adds: bool = False
    ends: int = 0

    @property
    def activated(self) -> bool:
        """Whether an activation is behind all else."""
        return bool(self.behind) and type(self.behind[-1]) in ACTIVATIONS


class _Known(NamedTuple):
    """Layers, and what they depend on: the types of tensors, and all other facts."""

    types: list[type]
    facts: list[Any]
    layers: list[trained.Unit]


class Trained:
    """How far steps of modules (pumice.nn.prepared) are layers whose kernels are known, while they train."""

    __slots__ = ("_convolutions", "_known", "_norms", "_steps")

    def __init__(self, steps: Sequence[Step]) -> None:
        count = next((n for n, step in enumerate(steps) if not _trains(step)), len(steps))
        self._steps = steps[:count]
        self._norms = [step.norm for step in self._steps]
        self._convolutions = [step.layer for step in self._steps if isinstance(step.layer, Convolution)]
        self._known = _Known([], [], [])

    def ahead(self, x: SparseTensor, asked: tuple[Relation, Geometry | None] | None) -> tuple[SparseTensor, int]:
        """The result of as many of the modules as calls before, with their gradients, have left all of, and how many
        they are. asked: what the first one asks for, where it names a target."""
        dtype = autocast_dtype(raw_feats(x)) or x.dtype
        feats, every = raw_feats(x), self._tensors()
        if every is None or not self._steps or dtype not in _DTYPES:
            return x, 0
        # Whoever keeps tensors elsewhere sees as many of them as layers one by one keep, in each call.
        if _hooks_of_saved_tensors(True) is not None:
            return x, 0
        layers = self._layers(every, feats, dtype)
        found = found_of(layers, feats.shape[0], x.geometry, asked)
        own = [every[_EACH * n + place] for n in range(len(found)) for place in (0, 5, 6)]
        y = trained.started(found, feats if feats.dtype is dtype else feats.to(dtype), own) if found else None
        return (x, 0) if y is None else (unchecked_tensor(y, found[-1].outputs), found[-1].launch.ends)

    def _tensors(self) -> list[Tensor | None] | None:
        """Those of all steps, as they are now; None where that cannot be told."""
        every: list[Tensor | None] = []
        for layer, norm in ((step.layer, step.norm) for step in self._steps):
            assert norm is not None
            own, kept, more = layer._parameters, norm._buffers, norm._parameters
            try:
                every += own["weight"], own["bias"], kept["running_mean"], kept["running_var"]
                every += kept["num_batches_tracked"], more["weight"], more["bias"]
            except KeyError:
                return None
            if not layer.__dict__.keys().isdisjoint(OWN):
                return None
        return every

    def _layers(self, every: Sequence[Tensor | None], x: Tensor, dtype: torch.dtype) -> list[trained.Unit]:
        """Those of the steps, on features like these; none where that cannot be told, or there is none."""
        types, known = [*map(type, every)], self._known
        there = [t for t in every if t is not None]
        if types != known.types and not autograd.only_autograd_active((x, *there)):
            return []
        facts: list[Any] = [
            dtype,
            autocast_dtype(x),
            x.dtype,
            x.requires_grad,
            x.shape[1],
            x.stride(),
            x.get_device(),
            direct.settings(),
        ]
        facts += [kernels.float32_precision()] if dtype is torch.float32 else []
        facts += map(_OF_NORMS, self._norms)
        facts += map(CONVOLUTION_GUARDS, self._convolutions)
        for fact in (*TENSOR_GUARDS, REQUIRES_GRAD):
            facts += map(fact, there)
        if types != known.types or facts != known.facts:
            made = [*trained.placed(self._made(every, x, dtype))]
            known = self._known = _Known(types, facts, made)
        return known.layers

    def _made(self, every: Sequence[Tensor | None], x: Tensor, dtype: torch.dtype) -> Iterator[trained.Unit]:
        """The layers, as far as there are any."""
        left, own = iter(every), every[0]
        cast = x.dtype is not dtype
        # Channels and strides of what the next one is given, and of what is added; whether there is a gradient, and
        # whether it was rounded for the line alone.
        given = x.shape[1], (x.shape[1], 1) if cast else x.stride(), x.requires_grad, cast
        held = given
        # Without autocast weights are of the dtype of the features.
        narrowed = autocast_dtype(x) is not None and own is not None and own.dtype is torch.float32
        if own is None or not (own.dtype is dtype or narrowed):
            return
        for step in self._steps:
            tensors = [*islice(left, _EACH)]
            weight, norm = tensors[0], step.norm
            held = given if step.opens else held
            # Kernels take addresses as they are.
            if weight is None or norm is None or weight.dtype is not own.dtype or weight.device != x.device:
                return
            if not _kernel(step, tensors, given[0]):
                return
            result = weight.shape[0], (weight.shape[0], 1), True, False
            if step.adds and (held[:2] != result[:2] or held[3]):
                return
            relation = step.layer.relation if isinstance(step.layer, Convolution) else None
            shape = weight.shape[0], weight[0].numel() // weight.shape[-1], weight.shape[-1]
            _, _, mean, variance, tracked, scale, shift = tensors
            assert mean is not None and variance is not None
            flags = scale is not None, shift is not None, step.adds, step.activated
            told = Statistics((mean, variance), norm.eps, True, norm.momentum, tracked)
            settled = NormKernels(told, flags, (shape[0], dtype, x.get_device()))
            precision = kernels.float32_precision() if dtype is torch.float32 else ""
            facts = "trained", shape, dtype, own.dtype, *given[1:3], precision, direct.settings()
            ends_in = flags, norm.eps, tracked is None or tracked.dtype
            keys = direct.interned(facts), direct.interned((*facts, *ends_in))
            written = tuple(0 if t is None else t.data_ptr() for t in tensors[2:5])
            ends = step.opens, step.aside, step.adds, step.ends
            known = settled, norm.eps, float(norm.momentum or 0.0), step.activated, written
            yield trained.Unit(
                relation, *ends, shape, dtype, own.dtype, given[1], *known, given[2], keys, BoundedCache(64)
            )
            held, given = (result, given) if step.aside else (held, result)


def _trains(step: Step) -> bool:
    """Whether a step may be one of training: a norm, with nothing behind it but a ReLU, or nothing."""
    behind = step.behind[1:]
    relu = bool(behind) and ACTIVATIONS.get(type(behind[0])) == "relu"
    return step.norm is not None and (relu or not (behind or step.adds))


def _kernel(step: Step, tensors: Sequence[Tensor | None], channels: int) -> bool:
    """Whether a step is known kernels now, on so many channels; all of its parameters are trained."""
    weight, bias, mean, variance, tracked, *affine = tensors
    norm, layer = step.norm, step.layer
    assert norm is not None and weight is not None
    if bias is not None or not (norm.training and norm.track_running_stats) or norm.momentum is None:
        return False
    if isinstance(layer, Convolution) and (layer.groups > 1 or layer.dataflow is not None):
        return False
    vectors = [mean, variance, *(t for t in affine if t is not None)]
    if any(t is None or t.dtype is not torch.float32 or not t.is_contiguous() for t in vectors):
        return False
    if any(t is not None and not t.requires_grad for t in (weight, *affine)):
        return False
    there = [t for t in (weight, *vectors, tracked) if t is not None]
    if weight.ndim != _axes(layer) or weight.shape[-1] != channels or any(v.shape != weight.shape[:1] for v in vectors):
        return False
    if any(t.device != weight.device or t.is_meta for t in there):
        return False
    return weight.is_contiguous() and not any(t.data_ptr() & 15 for t in there)


def _axes(layer: nn.Module) -> int:
    """Of its weight."""
    if not isinstance(layer, Convolution):
        return 2
    return 3 if layer.relation.custom is not None else layer.relation.dim + 2


_hooks_of_saved_tensors = attrgetter("_autograd._top_saved_tensors_default_hooks")(torch._C)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
