"""Kernels of all layers, compiled together when the first of them is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pumice.runtime.compile import BACKGROUND, NEXT

Kind = tuple[torch.dtype, torch.device]
_LOCK = Lock()
_LAYERS = WeakIdKeyDictionary()
"""Layers, with the kinds of the features that their kernels are compiled for."""


class CompiledTogether:
    """Base of layers with kernels.

    A layer that is called for the first time waits until its kernel is compiled, some 0.5 s. No layer knows its
    network: with the first one the kernels of all layers of the process are compiled in parallel.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        # Copies and pickles of modules are made without __init__.
        made = super().__new__(cls)
        with _LOCK:
            _LAYERS[made] = set()
        return made

    def compilations(self, like: Tensor, rows: int) -> Iterable[Callable[[], object]]:
        """What compiles each kernel of a call in evaluation; none where the layer has no kernel for such features, or
        is on another device. like: features of any shape; rows: about how many there are."""
        raise NotImplementedError


def compile_layers(like: Tensor, rows: int) -> None:
    """Begin to compile the kernels of all layers for features of the dtype and on the device of `like`, once for each
    layer; nothing without a GPU. rows: voxels of the scene."""
    if not like.is_cuda:
        return
    kind = like.dtype, like.device
    with _LOCK:
        layers = [layer for layer, known in _LAYERS.items() if kind not in known]
    for layer in layers:
        tasks = [*layer.compilations(like, rows)]
        if tasks:
            _LAYERS[layer].add(kind)
        for task in tasks:
            BACKGROUND.submit(task, NEXT)
