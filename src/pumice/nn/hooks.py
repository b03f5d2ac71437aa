"""Modules that can be the epilogue of a convolution or linear layer, and checks for hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pumice.nn import layers
from pumice.ops import Epilogue

ACTIVATIONS: Mapping[type[nn.Module], str] = MappingProxyType(
    {layers.ReLU: "relu", nn.ReLU: "relu", layers.SiLU: "silu", nn.SiLU: "silu"}
)
"""Activations without options that change the result."""


def is_known(module: nn.Module) -> bool:
    """True for a batch norm in evaluation with running statistics."""
    return type(module) is layers.BatchNorm and not module.training and module._buffers.get("running_mean") is not None


def epilogue_of(
    next_modules: Sequence[nn.Module], residual: Tensor | None, row_padding: int = 0
) -> tuple[Epilogue | None, int]:
    """(epilogue, number of modules it covers) of the modules after a convolution. residual: features added before the
    last module; row_padding: columns left free behind each row if the epilogue covers all modules."""
    norm = next_modules[0] if next_modules and is_known(next_modules[0]) else None
    taken = 0 if norm is None else 1
    last = len(next_modules) > taken
    activation = ACTIVATIONS.get(type(next_modules[taken]), "") if last else ""
    own = residual if activation and len(next_modules) == taken + 1 else None
    taken += bool(activation)
    row_padding = row_padding if taken == len(next_modules) else 0
    if isinstance(norm, layers.BatchNorm):
        return Epilogue.of_norm(norm.vectors(), norm.eps, own, activation, row_padding), taken
    return (Epilogue(residual=own, activation=activation, row_padding=row_padding), 1) if activation else (None, 0)


def has_no_forward_hooks(modules: Sequence[nn.Module]) -> bool:
    """True if none of the modules has a forward hook."""
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return False
    # A loop: a generator or a list would take half of the time.
    for module in modules:
        own = module.__dict__
        # `forward`: an instance attribute that overrides the class's.
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return False
    return True


def has_no_backward_hooks(modules: Sequence[nn.Module]) -> bool:
    """True if none of the modules has a backward hook."""
    every = nn.modules.module
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        return False
    return not any([module._backward_hooks or module._backward_pre_hooks for module in modules])


TENSOR_GUARDS: Sequence[Callable[[Any], Any]] = (
    torch._C.TensorBase.data_ptr,
    torch._C.TensorBase.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C.TensorBase.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C.TensorBase.stride,
)
"""Guards of a tensor, besides its type; the address implies the device."""
REQUIRES_GRAD: Callable[[Any], bool] = torch._C.TensorBase.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
"""`requires_grad` of a tensor."""
CONVOLUTION_GUARDS = attrgetter("groups", "dataflow", "relation")
OWN = frozenset(("weight", "bias", "forward_with_epilogue", "map_request"))
"""Attributes that the fused path bypasses; if an instance overrides one, fall back to the slow path."""
