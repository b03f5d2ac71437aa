"""Guards of cached launches, compared on every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

TENSOR_GUARDS: Sequence[Callable[[Any], Any]] = (
    torch._C.TensorBase.data_ptr,
    torch._C.TensorBase.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C.TensorBase.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C.TensorBase.stride,
)
"""Guards of a tensor, besides its type; the address implies the device."""
TRAINS: Callable[[Any], bool] = torch._C.TensorBase.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
"""`requires_grad` of a tensor."""
OF_CONVOLUTIONS = attrgetter("groups", "dataflow", "relation")
OWN = frozenset(("weight", "bias", "forward_with_epilogue", "map_request"))
"""Attributes that the fused path bypasses; if an instance overrides one, fall back to the slow path."""
