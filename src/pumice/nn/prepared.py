"""Modules as kernels that are started again: what modules there are, and what their launches depend on, is looked up
once and compared with what there is in each call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pumice.lower import direct
from pumice.lower import kernel as kernels
from pumice.lower.epilogue import NO_EPILOGUE
from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import (
    ACTIVATIONS,
    CONVOLUTION_GUARDS,
    OWN,
    TENSOR_GUARDS,
    epilogue_of,
    has_no_backward_hooks,
    has_no_forward_hooks,
)
from pumice.nn.trained import Step, Trained
from pumice.ops import SparseTensor, autograd, line
from pumice.ops.conv import Target
from pumice.ops.conv import key_of as key_of_conv
from pumice.ops.linear import key_of as key_of_linear
from pumice.ops.tensor import raw_feats, unchecked_tensor

_NAME = "_prepared"
_OURS = "pumice.nn.blocks"


class Parts(NamedTuple):
    """Modules one after the other. shortcut: whose result, of what the first is given, is added before the last one;
    within: what holds some of them."""

    modules: tuple[nn.Module, ...]
    shortcut: nn.Module | None = None
    within: tuple[nn.Module, ...] = ()


class Parted(nn.Module, ABC):
    """A module that does what its parts do, and nothing else."""

    @abstractmethod
    def _parts(self) -> Parts:
        """What they are now."""


def prepared(owner: nn.Module, x: object, parts: Parts) -> Prepared | None:
    """What the owner of these parts keeps of them, where they may be started straight away: on a GPU, where nobody
    watches but autograd. None elsewhere."""
    if torch.compiler.is_compiling() or not isinstance(x, SparseTensor):
        return None
    feats, trains = raw_feats(x), torch.is_grad_enabled()
    if x.geometry.buffered is not None or not direct.starts_kernels(feats):
        return None
    if not (autograd.only_reverse_mode_active((feats,)) if trains else autograd.is_plain_call((feats,))):
        return None
    kept = owner.__dict__.get(_NAME)
    if kept is None or kept.parts != parts or not kept.alike():
        # Past torch's own way, which looks for modules and parameters in whatever is set.
        kept = owner.__dict__[_NAME] = Prepared(parts)
    if not kept.steps or not has_no_forward_hooks(kept.watched) or (trains and not has_no_backward_hooks(kept.watched)):
        return None
    return kept


_OF_NORMS = attrgetter("training", "eps")


class _GuardedLaunches(NamedTuple):
    """Launches, and what they depend on: the types of tensors, whether one is float32 and how that is multiplied, and
    all other facts."""

    types: list[type]
    facts: list[Any]
    wide: bool
    precision: str
    launches: list[line.Launch]


class Prepared:
    """How far parts are kernels, each of a convolution or a linear map and the norm and activation behind it.

    steps: these; watched: all modules that they take the place of. A copy of it begins anew.
    """

    __slots__ = ("_convolutions", "_known", "_nested", "_norms", "_trained", "_types", "parts", "steps", "watched")

    def __init__(self, parts: Parts) -> None:
        self.parts, made = parts, _Plan()
        made.add(parts)
        self.steps, self.watched, self._nested = tuple(made.steps), tuple(made.watched), tuple(made.nested)
        self._types = [*map(type, self.watched)]
        self._norms = [step.norm for step in self.steps if step.norm is not None]
        self._convolutions = [step.layer for step in self.steps if isinstance(step.layer, Convolution)]
        self._known, self._trained = _GuardedLaunches([], [], False, "", []), Trained(self.steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, (Parts(()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return Prepared(Parts(()))

    def alike(self) -> bool:
        """Whether all modules are of the kinds, and those that have parts of the parts, that they were."""
        if [*map(type, self.watched)] != self._types:
            return False
        # As a loop: a generator is half of its time.
        for module, parts in self._nested:  # noqa: SIM110
            if module._parts() != parts:
                return False
        return True

    def whole(self, x: SparseTensor) -> SparseTensor | None:
        """The result of all parts; None where not all of it is kernels that calls before have left."""
        y, taken, _ = self.ahead(x, None, 0)
        return y if taken == len(self.parts.modules) else None

    def ahead(self, x: SparseTensor, target: Target, spare: int) -> tuple[SparseTensor, int, int]:
        """The result of as many of the modules as calls before have left all of, how many they are, and how many
        columns are left free behind its rows.

        target: what the first one is called with beside x; spare: columns to be left free behind the last one's rows.
        """
        layer = self.steps[0].layer
        asked = layer.map_request(target) if target is not None and isinstance(layer, Convolution) else None
        if target is not None and asked is None:
            return x, 0, 0
        if torch.is_grad_enabled():
            return *self._trained.ahead(x, asked), 0
        launches, feats = self._launches(raw_feats(x), spare), raw_feats(x)
        if not launches:
            return x, 0, 0
        found = line.found_of(launches, feats.shape[0], x.geometry, asked)
        y = line.started(found, feats) if found else None
        if y is None:
            return x, 0, 0
        last = found[-1]
        return unchecked_tensor(y, last.outputs), last.launch.ends, last.launch.spare

    def _launches(self, x: Tensor, spare: int) -> list[line.Launch]:
        """Those of the steps, on features like these; none where that cannot be told, or there is none."""
        every: list[Tensor | None] = []
        for step in self.steps:
            own = _tensors_of(step)
            if own is None:
                return []
            every += own
        types, known = [*map(type, every)], self._known
        if types != known.types and not _ORDINARY.issuperset(types):
            return []
        there = [t for t in every if t is not None]
        facts: list[Any] = [spare, x.dtype, x.shape[1], x.stride(), x.get_device(), direct.settings()]
        facts += map(_OF_NORMS, self._norms)
        facts += map(CONVOLUTION_GUARDS, self._convolutions)
        for fact in TENSOR_GUARDS:
            facts += map(fact, there)
        precision = kernels.float32_precision() if known.wide else ""
        if types != known.types or facts != known.facts or precision != known.precision:
            wide = any(t.dtype is torch.float32 for t in (x, *there))
            precision = kernels.float32_precision() if wide else ""
            known = self._known = _GuardedLaunches(
                types, facts, wide, precision, [*line.placed(self._made(every, x, spare))]
            )
        return known.launches

    def _made(self, every: Sequence[Tensor | None], x: Tensor, spare: int) -> Iterator[line.Launch]:
        """The launches, as far as there are any. every: the tensors of all steps, in the order of _tensors_of."""
        held, left = x, iter(every)
        for step in self.steps:
            weight, *others = islice(left, 2 if step.norm is None else 6)
            held = x if step.opens else held
            if weight is None or not _kernel(step, others):
                return
            room = spare if step.ends == len(self.parts.modules) else 0
            epilogue, _ = epilogue_of(step.behind, held if step.adds else None, room)
            more = () if epilogue is None else epilogue.operands.values()
            finish = NO_EPILOGUE if epilogue is None else epilogue.signature
            own = tuple(t.data_ptr() for t in (weight, *more) if t is not held)
            if any(address & 15 for address in own):
                return
            relation = step.layer.relation if isinstance(step.layer, Convolution) else None
            key = (key_of_linear if relation is None else key_of_conv)((x, weight, *more), finish)
            columns, flags = weight.shape[0], (step.opens, step.aside, step.adds, step.ends)
            yield line.Launch(relation, *flags, key, own, columns, finish.row_padding, x.stride(0), x.dtype)
            # Nothing but the layout of what the kernel writes.
            result = x.new_empty((0, columns))
            held, x = (result, x) if step.aside else (held, result)


_ORDINARY = frozenset((Tensor, nn.Parameter, type(None)))


def _tensors_of(step: Step) -> tuple[Tensor | None, ...] | None:
    """Weight and bias, and of a norm mean, variance, scale and shift; looked at for each call, as others may be put in
    their places. None where an attribute of the layer's own stands before what is of its class."""
    layer, norm = step.layer, step.norm
    own = layer._parameters
    if "weight" not in own or "bias" not in own or not layer.__dict__.keys().isdisjoint(OWN):
        return None
    if norm is None:
        return own["weight"], own["bias"]
    kept, more = norm._buffers, norm._parameters
    if "running_mean" not in kept or "running_var" not in kept or "weight" not in more or "bias" not in more:
        return None
    return own["weight"], own["bias"], kept["running_mean"], kept["running_var"], more["weight"], more["bias"]


def _kernel(step: Step, others: Sequence[Tensor | None]) -> bool:
    """Whether a step is one kernel now; others: its tensors but for the weight."""
    bias, *vectors = others
    if bias is not None or (step.norm is not None and (step.norm.training or any(v is None for v in vectors[:2]))):
        return False
    layer = step.layer
    return not isinstance(layer, Convolution) or (layer.groups == 1 and layer.dataflow is None)


class _Plan:
    """Steps as they are found. watched: the modules that they take the place of; nested: those with parts of theirs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.watched: list[nn.Module] = []
        self.nested: list[tuple[Parted, Parts]] = []

    def add(self, parts: Parts) -> bool:
        """The steps of these parts, as far as there are any; whether all of them are steps."""
        self.watched += parts.within
        if parts.shortcut is not None:
            return self._block(parts.modules, parts.shortcut)
        taken = 0
        for taken in self._each(parts.modules):
            self._mark(-1, ends=taken)
        return bool(parts.modules) and taken == len(parts.modules)

    def _block(self, modules: Sequence[nn.Module], shortcut: nn.Module) -> bool:
        """Those of a residual block, or none."""
        first = len(self.steps)
        if type(shortcut) is layers.Identity:
            self.watched.append(shortcut)
        elif [*self._each((shortcut,))] == [1] and len(self.steps) == first + 1:
            self._mark(first, opens=True, aside=True)
        else:
            return self._without(first)
        begin = len(self.steps)
        if [*self._each(modules)][-1:] != [len(modules)] or not self.steps[-1].activated:
            return self._without(first)
        if any(step.opens or step.aside for step in self.steps[begin:]):
            # A block within it holds something of its own.
            return self._without(first)
        self._mark(begin, opens=begin == first)
        self._mark(-1, adds=True, ends=len(modules))
        return True

    def _each(self, modules: Sequence[nn.Module]) -> Iterator[int]:
        """How many modules are steps, behind each that is done."""
        place = 0
        while place < len(modules):
            module, first = modules[place], len(self.steps)
            self.watched.append(module)
            if isinstance(module, Parted) and type(module).__module__ == _OURS:
                self.nested.append((module, module._parts()))
                if not self.add(self.nested[-1][1]):
                    self._without(first)
                    return
                # Within it nothing is done before all is.
                self.steps[first:] = [step._replace(ends=0) for step in self.steps[first:]]
                place += 1
            elif (end := _end(modules, place)) > place:
                behind = tuple(modules[place + 1 : end])
                norm = behind[0] if behind and type(behind[0]) is layers.BatchNorm else None
                self.watched += behind
                self.steps.append(Step(module, norm, behind))  # pyright: ignore[reportArgumentType]
                place = end
            else:
                return
            yield place

    def _mark(self, place: int, **what: Any) -> None:
        self.steps[place] = self.steps[place]._replace(**what)

    def _without(self, first: int) -> bool:
        del self.steps[first:]
        return False


def _end(modules: Sequence[nn.Module], place: int) -> int:
    """Where the modules end that are one kernel with the layer at this place: there, if it is no such layer."""
    layer, end = modules[place], place + 1
    of_ours = isinstance(layer, Convolution) and type(layer).__module__ == Convolution.__module__
    normed = end < len(modules) and type(modules[end]) is layers.BatchNorm
    if not of_ours:
        return end + 1 if normed and type(layer) is layers.Linear else place
    end += normed
    return end + (end < len(modules) and type(modules[end]) in ACTIVATIONS)
