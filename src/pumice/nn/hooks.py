"""Activations that kernels compute, and checks for hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pumice.nn import layers

ACTIVATIONS: Mapping[type[nn.Module], str] = MappingProxyType(
    {layers.ReLU: "relu", nn.ReLU: "relu", layers.SiLU: "silu", nn.SiLU: "silu"}
)
"""Activations without options that change the result."""


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
