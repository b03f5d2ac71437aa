"""Kernels of all layers, compiled together when the first of them is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from operator import attrgetter
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


def _submit(task: Callable[[], object]) -> None:
    BACKGROUND.submit(task, NEXT)


class Compilation(NamedTuple):
    """A kernel of a layer. key: equal ones are the same kernel; run: what compiles it; back: whether the backward pass
    needs it, not the forward pass; submit: what has it run in the background."""

    key: Hashable
    run: Callable[[], object]
    back: bool = False
    submit: Callable[[Callable[[], object]], object] = _submit


_Find = Callable[[Any, Calls], Iterable[Compilation]]
_COMPILATIONS: dict[str, _Find] = {}
_LOCK = Lock()
_LAYERS = WeakIdKeyDictionary()
"""Layers, with the kinds of calls that their kernels are compiled for."""


def compilations_of(operation: str) -> Callable[[_Find], _Find]:
    """Decorator of what gives, for a layer of an operation and calls, the kernels of such calls; none where the layer
    is on another device."""

    def register(find: _Find) -> _Find:
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


def compilations(layer: CompiledTogether, calls: Calls) -> Iterable[Compilation]:
    """The kernels of calls of a layer."""
    return _COMPILATIONS[layer.operation](layer, calls)


def compile_layers(calls: Calls) -> None:
    """Begin to compile the kernels of all layers for such calls, once for each layer; nothing without a GPU."""
    if not calls.like.is_cuda:
        return
    kind = calls.kind
    with _LOCK:
        layers = [layer for layer, known in _LAYERS.items() if kind not in known]
    found = dict[Hashable, Compilation]()
    for layer in layers:
        # What is wrong with a layer of another network, its own calls tell.
        with suppress(Exception):
            own = [*compilations(layer, calls)]
            found |= {one.key: one for one in own}
            if own:
                _LAYERS[layer].add(kind)
    for one in sorted(found.values(), key=attrgetter("back")):
        one.submit(one.run)
