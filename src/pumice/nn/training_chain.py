"""Modules one after the other in a captured training step: a convolution, the batch norm by its results behind it, a
residual and a ReLU are one step of autograd (pumice.ops.conv_norm)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import ACTIVATIONS, has_no_backward_hooks, has_no_forward_hooks
from pumice.ops import SparseTensor
from pumice.ops.conv import Target, autocast_dtype
from pumice.ops.conv_norm import conv_norm
from pumice.ops.tensor import raw_feats


def training_chain(
    modules: Sequence[nn.Module],
    x: SparseTensor,
    residual: SparseTensor | None = None,
    target: Target = None,
) -> SparseTensor:
    """The result of modules that `trains` is true of. residual: what is added before the last one. target: what the
    first one, a convolution, is called with beside x.

    Modules that are no part of such a step are called; those of torch.nn are given the features.
    """
    count, place = len(modules), 0
    while place < count:
        module, more = modules[place], () if place or target is None else (target,)
        if residual is not None and place == count - 1:
            x, residual = x + residual, None
        if isinstance(module, Convolution) and type(module).__module__ == Convolution.__module__:
            x, taken, residual = _step(modules[place:], x, residual, *more)
            place += taken
            continue
        behind = place + 1 < count - (residual is not None)
        if behind and (z := _activated(module, modules[place + 1], x)) is not None:
            x, place = z, place + 2
            continue
        x = module(x, *more) if more else call(module, x)
        place += 1
    return x


def trains(x: object, *modules: nn.Module) -> bool:
    """True in a captured training step, where no hook listens to the modules."""
    if not torch.is_grad_enabled() or not _is_captured(x) or torch.compiler.is_compiling():
        return False
    return has_no_forward_hooks(modules) and has_no_backward_hooks(modules)


def call(module: nn.Module, x: SparseTensor) -> SparseTensor:
    """`module` on features unless it takes sparse tensors."""
    if not isinstance(x, SparseTensor) or _takes_sparse(module):
        return module(x)
    if type(module).forward is nn.Sequential.forward and any(map(_takes_sparse, module.children())):
        if not has_no_forward_hooks((module,)):
            return module(x)
        for child in module.children():
            x = call(child, x)
        return x
    return x.replace(module(x.feats))


def _step(
    modules: Sequence[nn.Module], x: SparseTensor, residual: SparseTensor | None, target: Target = None
) -> tuple[SparseTensor, int, SparseTensor | None]:
    """A convolution and what follows it of a norm by its results, a residual and a ReLU; how many of the modules
    that are, and the residual that is still to be added."""
    layer, *behind = modules
    norm = behind[0] if behind else None
    assert isinstance(layer, Convolution)
    plain = layer.groups == 1 and layer.dataflow is None
    # What is added before the norm is no part of it.
    if not plain or not _takes_statistics(norm) or (residual is not None and len(behind) == 1):
        return _called(layer, x, target), 1, residual
    last = len(behind) == 2
    own = residual if last and residual is not None and _fits(layer, x, residual, target) else None
    relu = len(behind) > 1 and ACTIVATIONS.get(type(behind[1])) == "relu"
    if not relu or (last and residual is not None and own is None):
        relu, own = False, None
    wanted = norm.norm_params(None if own is None else raw_feats(own), relu, layer.bias)
    y = conv_norm(x, layer.weight, layer.map_request(target), wanted)
    if y is None:
        return _called(layer, x, target), 1, residual
    return y, 2 + relu, residual if own is None else None


def _called(layer: Convolution, x: SparseTensor, target: Target) -> SparseTensor:
    return layer(x) if target is None else layer(x, target)


def _takes_statistics(norm: nn.Module | None) -> TypeGuard[layers.BatchNorm]:
    """True for a batch norm by the statistics of what it is given."""
    return type(norm) is layers.BatchNorm and (norm.training or norm.running_mean is None)


def _activated(norm: nn.Module, behind: nn.Module, x: object) -> SparseTensor | None:
    """A batch norm with the ReLU behind it, where one kernel does both."""
    if not isinstance(norm, layers.BatchNorm) or type(norm) is not layers.BatchNorm or type(x) is not SparseTensor:
        return None
    if not norm.uses_valid_rows(x) or ACTIVATIONS.get(type(behind)) != "relu":
        return None
    both = norm, behind
    return norm.over_valid_rows(x, relu=True) if has_no_forward_hooks(both) and has_no_backward_hooks(both) else None


def _fits(layer: Convolution, x: SparseTensor, residual: SparseTensor, target: Target = None) -> bool:
    """True if a residual has the rows and the dtype of the layer's result: over other coordinates a sum is over those
    of both, and one of two dtypes has the wider one's."""
    same = target is None and residual.geometry is x.geometry and layer.relation.policy == "same"
    return same and residual.dtype == (autocast_dtype(raw_feats(x)) or x.dtype)


def _is_captured(x: object) -> bool:
    # By type: a proxy of torch.fx passes isinstance.
    return type(x) is SparseTensor and x.geometry.trains


def _takes_sparse(module: nn.Module) -> bool:
    """True if it is given sparse tensors: it is a layer of ours, has one in it, or says so in its annotations."""
    kind = type(module)
    if kind.forward is nn.Sequential.forward:
        return all(map(_takes_sparse, module.children()))
    return _says_so(kind) or any(_is_ours(type(part)) for part in module.modules())


def _is_ours(kind: type[nn.Module]) -> bool:
    return any(base.__module__.startswith("pumice.") for base in kind.__mro__)


def _says_so(kind: type[nn.Module]) -> bool:
    """True for a layer of ours, and where the annotations of `forward` name SparseTensor."""
    told = map(str, getattr(kind.forward, "__annotations__", {}).values())
    return _is_ours(kind) or kind.forward is nn.Identity.forward or any("SparseTensor" in each for each in told)
