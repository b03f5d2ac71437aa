"""The memory of a device, asked before an allocation whose size a text or a format decides."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from pumice.errors import ShapeError


def require_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: str, copies: int = 1) -> None:
    """Raise ShapeError, on behalf of `what`, if the device's whole memory is smaller than `copies` such tensors."""
    needed, held = math.prod(shape) * dtype.itemsize, _memory(device)
    if copies * needed > held:
        times = f", and is held {copies} times" if copies > 1 else ""
        raise ShapeError(
            f"{what} has {math.prod(shape)} entries (shape {list(shape)}), {needed / 2**30:.1f} GiB of {dtype}{times}; "
            f"the device {device} has {held / 2**30:.1f} GiB"
        )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "meta" or not hasattr(os, "sysconf"):
        return 2**63 - 1  # what torch can count
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
