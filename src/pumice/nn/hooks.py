"""Activations that kernels compute, checks for hooks, and guards of tensors."""

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
"""Activations that kernels compute, by module class: those without options that change the result."""


def has_no_forward_hooks(modules: Sequence[nn.Module]) -> bool:
    """True if no module has a forward hook (own or global) or an instance attribute `forward`."""
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return False
    # A loop is faster than any() over a generator or list.
    for module in modules:
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return False
    return True


def has_no_backward_hooks(modules: Sequence[nn.Module]) -> bool:
    """True if no module has a backward hook (own or global)."""
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
"""Getters of tensor properties that guard cached plans; the address implies the device."""
REQUIRES_GRAD: Callable[[Any], bool] = torch._C.TensorBase.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
"""Getter of a tensor's `requires_grad`."""
