"""Counters on a device that are 0 whenever nobody counts: a kernel that raises one puts it back."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from pumice.lower.remember import Bounded

_SPARE = 1 << 20
"""Counters of a device that captured graphs get theirs from: 4 MiB, enough for a thousand kernels."""
_ALIGNED = 64


def counters(size: int, device: torch.device) -> Tensor:
    """int32 [at least size], all 0, that no kernel has which may run at the same time.

    The kernels of one stream run one after another and share theirs. A captured graph runs on any stream, beside any
    kernel: each of its kernels gets some of its own, for good.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.int32, device=device)
    index = device.index or 0
    spare = _SPARES.get(index) or _spare(index, device)
    if torch.cuda.is_current_stream_capturing():
        return spare.taken(size)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    held = _SHARED.get(key)
    if held is None or held.shape[0] < size:
        held = _SHARED.keep(key, _zeros(max(_ALIGNED, 1 << (size - 1).bit_length()), device))
    return held


class _Spare:
    """Counters to be given away."""

    def __init__(self, device: torch.device) -> None:
        self._left, self._lock, self._device = _zeros(_SPARE, device), Lock(), device

    def taken(self, size: int) -> Tensor:
        """The next ones; where none are left, new ones that the graph itself sets to 0."""
        size = -(-size // _ALIGNED) * _ALIGNED
        with self._lock:
            if size > self._left.shape[0]:
                return _zeros(size, self._device)
            found, self._left = self._left[:size], self._left[size:]
            return found


def _spare(index: int, device: torch.device) -> _Spare:
    return _SPARES.keep(index, _Spare(device))


def _zeros(size: int, device: torch.device) -> Tensor:
    # What was made in inference serves training afterwards.
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.int32, device=device)


_SPARES: Bounded[_Spare] = Bounded(64)
_SHARED: Bounded[Tensor] = Bounded(256)
