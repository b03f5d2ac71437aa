"""What was found out about a tensor, kept as long as the tensor lives and is not written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Found = TypeVar("Found")
_MOST = 16


def per_tensor(find: Callable[Concatenate[Tensor, Given], Found]) -> Callable[Concatenate[Tensor, Given], Found]:
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
        if asked not in results:
            if len(results) >= _MOST:
                results.clear()
            results[asked] = find(tensor, *args, **kwargs)
        return results[asked]

    return remembered


def _key(value: Any) -> Hashable:
    """A tensor among the arguments counts with its writes."""
    return (value, value._version) if isinstance(value, Tensor) else value
