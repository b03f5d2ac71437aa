"""Kernels of all layers, compiled together when the first of them is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from threading import Lock
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pumice.runtime.compile import BACKGROUND, NEXT


class Calls(NamedTuple):
    """What the calls of a network have in common. like: features, of any shape; rows: about how many a scene has;
    training: whether autograd records them."""

    like: Tensor
    rows: int
    training: bool = False

    @property
    def kind(self) -> Hashable:
        """What kernels depend on."""
        return self.like.dtype, self.like.device, self.training


Tasks = Iterable[tuple[Hashable, Callable[[], object]]]
"""What compiles each kernel; equal keys of two layers: it is the same."""
_COMPILATIONS: dict[str, Callable[[Any, Calls], Tasks]] = {}
_LOCK = Lock()
_LAYERS = WeakIdKeyDictionary()
"""Layers, with the kinds of calls that their kernels are compiled for."""


def compilations_of(operation: str) -> Callable[[Callable[[Any, Calls], Tasks]], Callable[[Any, Calls], Tasks]]:
    """Decorator of what gives, for a layer of an operation and calls, Tasks for the kernels of such calls; nothing
    where there is none, or where the layer is on another device."""

    def register(find: Callable[[Any, Calls], Tasks]) -> Callable[[Any, Calls], Tasks]:
        _COMPILATIONS[operation] = find
        return find

    return register


class CompiledTogether:
    """Base of layers with kernels. operation: what they compute.

    A layer that is called for the first time waits until its kernels are compiled, some 0.5 s each. No layer knows its
    network: with the first one the kernels of all layers of the process are compiled in parallel.
    """

    operation: ClassVar[str]

    def __new__(cls, *_: Any, **__: Any) -> Any:
        # Copies and pickles of modules are made without __init__.
        made = super().__new__(cls)
        with _LOCK:
            _LAYERS[made] = set()
        return made


def compilations(layer: CompiledTogether, calls: Calls) -> Tasks:
    """Tasks for the kernels of calls of a layer."""
    return _COMPILATIONS[layer.operation](layer, calls)


def compile_layers(calls: Calls) -> None:
    """Begin to compile the kernels of all layers for such calls, once for each layer; nothing without a GPU."""
    if not calls.like.is_cuda:
        return
    kind = calls.kind
    with _LOCK:
        layers = [layer for layer, known in _LAYERS.items() if kind not in known]
    begun = set[Hashable]()
    for layer in layers:
        tasks = []
        # What is wrong with a layer of another network, its own calls tell.
        with suppress(Exception):
            tasks = [*compilations(layer, calls)]
        if tasks:
            _LAYERS[layer].add(kind)
        for key, task in tasks:
            # Threads that wait for each other compile nothing.
            if key not in begun:
                begun.add(key)
                BACKGROUND.submit(task, NEXT)
