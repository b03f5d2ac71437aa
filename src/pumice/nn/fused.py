"""What stands behind a convolution: part of its kernel without gradients (pumice.ops.Epilogue), in training one step of
autograd with it (pumice.ops.conv_norm)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from pumice.lower.loops import EIGHT_BITS
from pumice.lower.padding import write_columns
from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import ACTIVATIONS, epilogue_of, has_no_backward_hooks, has_no_forward_hooks, is_known
from pumice.ops import SparseTensor, cat
from pumice.ops.conv import Target, autocast_dtype
from pumice.ops.conv_norm import conv_norm
from pumice.ops.linear import fits_one_kernel, linear_features
from pumice.ops.sets import same_geometry
from pumice.ops.tensor import raw_feats

if TYPE_CHECKING:
    from pumice.nn.prepared import Prepared


def chained(
    modules: Sequence[nn.Module],
    x: SparseTensor,
    residual: SparseTensor | None = None,
    target: Target = None,
    beside: SparseTensor | None = None,
    known: Prepared | None = None,
) -> SparseTensor:
    """Modules one after the other; those of torch.nn (a Linear, a ReLU) are applied to the features.

    residual: what is added before the last one. target: what the first one, a convolution, is called with beside x.
    beside: whose channels stand behind those of the result, as by `cat`. known: what their owner keeps of these modules
    (pumice.nn.prepared), where they may be started straight away.

    Where no gradients are asked for, on a GPU, a batch norm by running statistics, the residual and an activation that
    follow a convolution are worked out in its kernel, in float32, and so is a batch norm that follows a linear map: the
    same but for a rounding after each. Where gradients are asked for, a batch norm by the convolution's results, the
    residual and a ReLU are one step of autograd with it (pumice.ops.conv_norm), and so is a ReLU that follows another
    batch norm while a captured step trains. Modules that hooks listen to are called.
    """
    count, place, spare = len(modules), 0, 0
    if known is not None:
        x, place, spare = known.ahead(x, target, 0 if beside is None else beside.channels)
    fused = place < count and fuses(x, *modules)
    while place < count:
        module, more = modules[place], () if place or target is None else (target,)
        if residual is not None and place == count - 1:
            x, residual = x + residual, None
        if fused and isinstance(module, Convolution) and type(module).__module__ == Convolution.__module__:
            if torch.is_grad_enabled():
                x, taken, residual = _trained(modules[place:], x, residual, *more)
                place += taken
                continue
            # What a residual is added to apart stands before the last module.
            apart = residual is not None and not (
                type(modules[-1]) in ACTIVATIONS and _fits(module, x, residual, *more)
            )
            spare = 0 if beside is None or apart or module.groups > 1 else beside.channels
            own = None if residual is None or apart else residual.feats
            epilogue, taken = epilogue_of(modules[place + 1 : count - apart], own, spare)
            spare = 0 if epilogue is None else epilogue.row_padding
            x = module.forward_with_epilogue(x, epilogue, *more)
            residual = None if epilogue is not None and epilogue.residual is not None else residual
            place += 1 + taken
            continue
        behind = place + 1 < count - (residual is not None)
        if fused and behind and (y := _normed(module, modules[place + 1], x)) is not None:
            x, place = x.replace(y), place + 2
            continue
        if behind and (z := _activated(module, modules[place + 1], x)) is not None:
            x, place = z, place + 2
            continue
        x = module(x, *more) if more else _call(module, x)
        place += 1
    if beside is None:
        return x
    return _joined(x, beside) if spare else cat([x, beside])


def _joined(x: SparseTensor, beside: SparseTensor) -> SparseTensor:
    """cat([x, beside]), where the rows of x may have left room for those of the other: its own are not copied then."""
    feats, other = x.feats, beside.feats
    (rows, channels), width = feats.shape, x.channels + beside.channels
    alike = feats.dtype == other.dtype and other.stride(1) == 1 and same_geometry(x, beside)
    if not alike or feats.stride() != (width, 1):
        return cat([x, beside])
    wide = feats.as_strided((rows, width), (width, 1))
    write_columns(other, wide, channels)
    return x.replace(wide)


def fuses(x: object, *modules: nn.Module) -> bool:
    """Whether kernels may do what these modules do, rather than that they are called."""
    if not _worth(x) or torch.compiler.is_compiling() or not has_no_forward_hooks(modules):
        return False
    return not torch.is_grad_enabled() or has_no_backward_hooks(modules)


def _trained(
    modules: Sequence[nn.Module], x: SparseTensor, residual: SparseTensor | None, target: Target = None
) -> tuple[SparseTensor, int, SparseTensor | None]:
    """A convolution and what stands behind it of a norm by its results, a residual and a ReLU, where gradients are
    asked for; how many of the modules that are, and the residual that is still to be added."""
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
    """Whether it is a batch norm by the statistics of what it is given."""
    return type(norm) is layers.BatchNorm and (norm.training or norm.running_mean is None)


def _normed(module: nn.Module, norm: nn.Module, x: SparseTensor) -> Tensor | None:
    """A linear map with the batch norm behind it, where they are one and one kernel does both."""
    if not isinstance(module, layers.Linear) or type(module) is not layers.Linear or not is_known(norm):
        return None
    epilogue, _ = epilogue_of((norm,), None)
    feats, weight = x.feats, module.weight
    alike = feats.dtype == weight.dtype and feats.dtype not in EIGHT_BITS
    if epilogue is None or not alike or not fits_one_kernel(feats, weight, *epilogue.operands.values()):
        return None
    return linear_features(feats, weight, epilogue.with_bias(module.bias))


def _activated(norm: nn.Module, behind: nn.Module, x: object) -> SparseTensor | None:
    """A batch norm with the ReLU behind it, where one kernel does both: in a captured step of training."""
    if not isinstance(norm, layers.BatchNorm) or type(norm) is not layers.BatchNorm or not isinstance(x, SparseTensor):
        return None
    if not norm.uses_valid_rows(x) or ACTIVATIONS.get(type(behind)) != "relu":
        return None
    both = norm, behind
    return norm.over_valid_rows(x, relu=True) if has_no_forward_hooks(both) and has_no_backward_hooks(both) else None


def _fits(layer: Convolution, x: SparseTensor, residual: SparseTensor, target: Target = None) -> bool:
    """Whether a residual has the rows and the dtype of the layer's result: over other coordinates a sum is over those
    of both, and one of two dtypes has the wider one's."""
    same = target is None and residual.geometry is x.geometry and layer.relation.policy == "same"
    return same and residual.dtype == (autocast_dtype(raw_feats(x)) or x.dtype)


def _worth(x: object) -> bool:
    """On a CPU an epilogue is torch's operators one by one, which are more than those of the modules."""
    return isinstance(x, SparseTensor) and (raw_feats(x).is_cuda or x.geometry.trains)


def _call(module: nn.Module, x: SparseTensor) -> SparseTensor:
    """`module` on features unless it takes sparse tensors."""
    if not isinstance(x, SparseTensor) or _takes_sparse(module):
        return module(x)
    if type(module).forward is nn.Sequential.forward and any(map(_takes_sparse, module.children())):
        return chained([*module.children()], x) if has_no_forward_hooks((module,)) else module(x)
    return x.replace(module(x.feats))


def _takes_sparse(module: nn.Module) -> bool:
    """Whether it is given sparse tensors: it is a layer of ours, has one in it, or says so in its annotations."""
    kind = type(module)
    if kind.forward is nn.Sequential.forward:
        return all(map(_takes_sparse, module.children()))
    return _says_so(kind) or any(_is_ours(type(part)) for part in module.modules())


def _is_ours(kind: type[nn.Module]) -> bool:
    return any(base.__module__.startswith("pumice.") for base in kind.__mro__)


def _says_so(kind: type[nn.Module]) -> bool:
    told = map(str, getattr(kind.forward, "__annotations__", {}).values())
    return _is_ours(kind) or kind.forward is nn.Identity.forward or any("SparseTensor" in each for each in told)
