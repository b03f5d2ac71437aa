"""Parallel compilation of the kernels of all layers, started by the first call of any layer."""

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
    """Common properties of the calls of a network. like: features, of any shape; rows: of a scene, approximately;
    training: True if autograd records the calls."""

    like: Tensor
    rows: int
    training: bool = False

    @property
    def kind(self) -> Hashable:
        """Cache key: a layer is compiled once per kind."""
        return self.like.dtype, self.like.device, self.training


def _submit(task: Callable[[], object]) -> None:
    BACKGROUND.submit(task, NEXT)


class Compilation(NamedTuple):
    """A task, `run`, that compiles kernels of a layer. key: equal for the same kernels; back: True if only the backward
    pass needs them; submit: runs the task in the background."""

    key: Hashable
    run: Callable[[], object]
    back: bool = False
    submit: Callable[[Callable[[], object]], object] = _submit


_Find = Callable[[Any, Calls], Iterable[Compilation]]
_COMPILATIONS: dict[str, _Find] = {}
_LOCK = Lock()
_LAYERS = WeakIdKeyDictionary()
"""By layer: the Calls.kind values for which its compilations were submitted."""


def compilations_of(operation: str) -> Callable[[_Find], _Find]:
    """Decorator that registers the function (layer, calls) -> compilations needed by such calls of a layer of an
    operation; none if the layer is on another device."""

    def register(find: _Find) -> _Find:
        _COMPILATIONS[operation] = find
        return find

    return register


class CompiledTogether:
    """Base class of layers with kernels. operation: the name given to `compilations_of`.

    The first call of a layer waits for its kernels to compile, about 0.5 s each. As a layer does not know its network,
    the first call of any layer starts to compile the kernels of all layers in the process, in parallel.
    """

    operation: ClassVar[str]

    def __new__(cls, *_: Any, **__: Any) -> Any:
        # Not in __init__, which copies and unpickled modules skip.
        made = super().__new__(cls)
        with _LOCK:
            _LAYERS[made] = set()
        return made


def compilations(layer: CompiledTogether, calls: Calls) -> Iterable[Compilation]:
    """The compilations that such calls of a layer need."""
    return _COMPILATIONS[layer.operation](layer, calls)


def compile_layers(calls: Calls) -> None:
    """Start to compile the kernels of all layers for such calls, once per layer and kind; no effect without a GPU."""
    if not calls.like.is_cuda:
        return
    kind = calls.kind
    with _LOCK:
        layers = [layer for layer, known in _LAYERS.items() if kind not in known]
    found = dict[Hashable, Compilation]()
    for layer in layers:
        # An invalid layer, perhaps of another network, raises in its own calls.
        with suppress(Exception):
            own = [*compilations(layer, calls)]
            found |= {one.key: one for one in own}
            if own:
                _LAYERS[layer].add(kind)
    for one in sorted(found.values(), key=attrgetter("back")):
        one.submit(one.run)
