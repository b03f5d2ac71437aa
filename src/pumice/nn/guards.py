"""What kernels that are started again depend on, as it is compared in each call."""

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
"""What tells whether a tensor is what it was, with its type: where it lies tells the device."""
TRAINS: Callable[[Any], bool] = torch._C.TensorBase.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
"""Whether a tensor wants a gradient."""
OF_CONVOLUTIONS = attrgetter("groups", "dataflow", "relation")
OWN = frozenset(("weight", "bias", "forward_with_epilogue", "map_request"))
"""What a line does without looking it up: whoever puts another one on a layer is to be heard."""
