"""Peak memory of calls on a GPU: what torch's allocator gives out at most during a call, above what it had given out at
the call's start. Operands, maps and plans that were there before do not count; results that a call returns do.

A library that took memory past torch's allocator would be favoured; those measured here do not. A CPU has no such
counter, and its calls no peak.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak(call: Callable[[], object], device: torch.device) -> float | None:
    """MB (10^6 bytes) that a call takes at most; None on a CPU. A call that did not run before also counts what it
    caches."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6
