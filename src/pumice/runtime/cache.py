"""Bounded caches, and results cached per tensor until the tensor is freed or written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from pumice.runtime.launch import outside_inference_mode

Given = ParamSpec("Given")
Found = TypeVar("Found")
_MOST = 16


class BoundedCache(dict[Hashable, Found]):
    """Dict in which `keep` stores at most `most` values, evicting the oldest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Hashable, value: Found) -> Found:
        while len(self) >= self._most:
            # Other threads may change the dict between the lookup and the removal.
            with suppress(RuntimeError, StopIteration):
                self.pop(next(iter(self)), None)
        self[key] = value
        return value


INTERNED: BoundedCache[object] = BoundedCache(1 << 14)


def intern_key(facts: Hashable) -> Hashable:
    """One object for equal facts (while cached), so that later lookups compare by identity."""
    return INTERNED.get(facts) or INTERNED.keep(facts, object())


class PersistentBuffers:
    """Buffers that a captured program rewrites on replay: results derived from them may be cached during capture."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        self._held[key] = weakref.ref(tensor, lambda _: self._held.pop(key, None))

    def __contains__(self, tensor: Tensor) -> bool:
        held = self._held.get(id(tensor))
        return held is not None and held() is tensor


PERSISTENT = PersistentBuffers()


class cached_per_tensor(Generic[Given, Found]):  # noqa: N801 (a decorator)
    """Cache find(tensor, *args) for each tensor and hashable args, until the tensor is freed or written to. Not cached
    if one of them is an inference tensor, which has no version counter, and for fake tensors. Results must not hold the
    tensor."""

    def __init__(self, find: Callable[Concatenate[Tensor, Given], Found]) -> None:
        self._find, self._known = find, dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, Any]]]()
        update_wrapper(self, find)

    def __call__(self, tensor: Tensor, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        given = tensor, *args, *kwargs.values()
        if type(tensor) not in (Tensor, torch.nn.Parameter) or any(map(_is_inference, given)):
            return self._find(tensor, *args, **kwargs)
        results, query = self._results(tensor), tuple(map(_key, (*args, *sorted(kwargs.items()))))
        if query in results:
            return results[query]
        # Cached tensors must be usable under autograd later.
        with outside_inference_mode(), torch.no_grad():
            found = self._find(tensor, *args, **kwargs)
        # Results of a capture have no values until the graph runs.
        if tensor in PERSISTENT or not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(results) >= _MOST:
                results.clear()
            results[query] = found
        return found

    def keep(self, found: Found, tensor: Tensor, *args: Hashable) -> None:
        """Cache a result for (tensor, *args) that is known already."""
        self._results(tensor)[tuple(map(_key, args))] = found

    def _results(self, tensor: Tensor) -> dict[Hashable, Any]:
        key, known = id(tensor), self._known
        entry = known.get(key)
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            entry = (weakref.ref(tensor, lambda _: known.pop(key, None)), tensor._version, {})
            known[key] = entry
        return entry[2]


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _key(value: Any) -> Hashable:
    """Key of an argument: tensors by weak reference and version counter."""
    return (weakref.ref(value), value._version) if isinstance(value, Tensor) else value


_SEEN = 61  # Values that tell whether a large tensor was written
_SMALL = 1 << 12  # Values of a tensor that are all compared


def _sample(tensor: Tensor) -> Tensor:
    """A view of the values that tell whether a tensor was written through `.data`: all of a small one, which
    torch.autograd.gradcheck changes one by one."""
    step = 1 if tensor.numel() <= _SMALL else tensor.numel() // _SEEN + 1
    return tensor.detach().reshape(-1)[::step]


def cached_per_values(find: Callable[Concatenate[Tensor, Given], Found]) -> Callable[Concatenate[Tensor, Given], Found]:
    """As cached_per_tensor, for what is computed of a tensor's values: writes through `.data`, which do not change its
    version, are noticed if they change some of 61 values, or any of a small tensor."""
    kept: Any = cached_per_tensor(lambda tensor, *args, **kwargs: dict[str, Any]())

    def call(tensor: Tensor, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        known = kept(tensor, *args, **kwargs)
        seen = _sample(tensor)
        if "seen" not in known or not torch.equal(known["seen"], seen):
            with outside_inference_mode(), torch.no_grad():
                known["found"] = find(tensor, *args, **kwargs)
            known["seen"] = seen.clone()
        return known["found"]

    return call


class KeptResult(Generic[Found]):
    """find(tensor), computed again after the tensor was written to, as far as cached_per_values notices it. It holds
    the tensor, and so belongs to an object that does."""

    def __init__(self, tensor: Tensor, find: Callable[[Tensor], Found]) -> None:
        self._tensor, self._find = tensor, find
        self._tracked = tensor.is_contiguous() and not tensor.is_inference()
        self._sample = _sample(tensor)
        self._version, self._seen, self._found = -1, self._sample, None

    def get(self) -> Found:
        if not self._tracked:
            return self._find(self._tensor)
        if self._found is None or self._version != self._tensor._version or not torch.equal(self._seen, self._sample):
            with outside_inference_mode(), torch.no_grad():
                self._found = self._find(self._tensor)
            self._version, self._seen = self._tensor._version, self._sample.clone()
        return self._found
