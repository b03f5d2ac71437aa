"""What was found out about a tensor, kept as long as the tensor lives and is not written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from pumice.runtime.launch import outside_inference_mode

Given = ParamSpec("Given")
Found = TypeVar("Found")
_MOST = 16


class BoundedCache(Generic[Found]):
    """Values by key, at most so many: the oldest goes first."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, dict[Hashable, Found]()

    def get(self, key: Hashable) -> Found | None:
        return self._held.get(key)

    def values(self) -> list[Found]:
        """Those that are held, the oldest first."""
        return list(self._held.values())

    def clear(self) -> None:
        self._held.clear()

    def keep(self, key: Hashable, value: Found) -> Found:
        while len(self._held) >= self._most:
            # Other threads may have taken the last one, or put one there, since it was looked for.
            with suppress(RuntimeError, StopIteration):
                self._held.pop(next(iter(self._held)), None)
        self._held[key] = value
        return value


class PersistentBuffers:
    """Tensors of a program that runs again and again, as a captured graph does: what they hold is written by the
    program, so that what it finds of them lasts as long, and nothing waits for it."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        self._held[key] = weakref.ref(tensor, lambda _: self._held.pop(key, None))

    def __contains__(self, tensor: Tensor) -> bool:
        held = self._held.get(id(tensor))
        return held is not None and held() is tensor


PERSISTENT = PersistentBuffers()


def cached_per_tensor(find: Callable[Concatenate[Tensor, Given], Found]) -> Callable[Concatenate[Tensor, Given], Found]:
    """Remember find(tensor, *args) for each living tensor and hashable args; forgotten when the tensor is written to.

    Inference tensors do not count their writes and fake ones hold nothing: for them it is found anew each time.
    """
    known: dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, Any]]] = {}

    @wraps(find)
    def remembered(tensor: Tensor, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_inference():
            return find(tensor, *args, **kwargs)
        key = id(tensor)
        entry = known.get(key)
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            entry = (weakref.ref(tensor, lambda _: known.pop(key, None)), tensor._version, {})
            known[key] = entry
        results = entry[2]
        asked = tuple(map(_key, (*args, *sorted(kwargs.items()))))
        if asked in results:
            return results[asked]
        # What was found in inference serves training afterwards.
        with outside_inference_mode(), torch.no_grad():
            found = find(tensor, *args, **kwargs)
        # What is found while a CUDA graph is captured is not computed until the graph runs.
        if tensor in PERSISTENT or not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(results) >= _MOST:
                results.clear()
            results[asked] = found
        return found

    return remembered


def _key(value: Any) -> Hashable:
    """A tensor among the arguments counts with its writes; what was found does not keep it alive."""
    return (weakref.ref(value), value._version) if isinstance(value, Tensor) else value
