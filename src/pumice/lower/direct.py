"""Calls over a kernel map started again with nothing looked up but what may have changed, and on maps never seen.

A call that was carried out once leaves a `Direct`, which later ones over the same map and with tensors of the same
shapes start, and a `Template`, from which calls over other maps of about the same sizes get theirs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.lower import stamp
from pumice.lower import triton as kernels
from pumice.lower.epilogue import NOTHING, RESIDUAL, Finish
from pumice.lower.plan import Kind, Ready, deterministic
from pumice.lower.remember import Bounded
from pumice.lower.segments import Segments
from pumice.schedule.ledger import ledger


def starts_kernels(x: Tensor) -> bool:
    """Whether calls with this tensor are kernels."""
    return x.is_cuda


def told(tensors: Sequence[Tensor], counting: Sequence[bool], *facts: Hashable) -> tuple[Hashable, ...]:
    """What the launch of a call depends on: the tensors but for their addresses, and what is set for all calls.

    counting: of which tensors the first axis counts rows. How many is left out: a map, or whoever asks, knows it.
    """
    found: list[Hashable] = [facts, deterministic(), ledger().generation, kernels.tile_source()]
    wide = False
    for x, counts in zip(tensors, counting, strict=True):
        kind, shape = x.dtype, x.shape
        wide |= kind is torch.float32
        found += (shape[1:] if counts else shape, x.stride(), kind, x.get_device())
    if wide:
        found.append(kernels.float32_precision())
    return tuple(found)


@lru_cache(maxsize=256)
def counting(finish: Finish) -> tuple[bool, ...]:
    """Of features, a weight and the tensors of an epilogue: which count rows."""
    return (True, False, *[name == RESIDUAL for name in finish.names])


def residual_fits(tensors: Sequence[Tensor], finish: Finish, shape: tuple[int, ...]) -> bool:
    """Whether the residual among the tensors of a call, whose rows no key tells, has the result's shape."""
    if RESIDUAL not in finish.names:
        return True
    return tensors[finish.names.index(RESIDUAL) - len(finish.names)].shape == shape


class Held:
    """The arrays of a map that a call holds. kind: what the choice of a kernel depends on, equal where it is the same;
    far: whether one is so long that addresses need 64 bits. segments: those of arrays, once they are found."""

    def __init__(self, arrays: Sequence[Tensor], facts: Hashable) -> None:
        self.arrays, self.far = arrays, any(map(kernels.is_far, arrays))
        # An object of its own stands for long facts, which are compared here alone.
        self.kind: Hashable = _KINDS.get(facts) or _KINDS.keep(facts, object())
        self.segments: dict[Any, Segments] = {}
        self._named: dict[Any, tuple[dict[str, Tensor], dict[str, Sequence[int]]]] = {}

    @staticmethod
    def of(tokens: Sequence[str], arrays: Sequence[Tensor], kinds: Sequence[Kind | None], *facts: Hashable) -> Held:
        strides, places = tuple(x.stride() for x in arrays), [id(x) for x in arrays]
        # Of an array that is there twice, as in a map that is its own transpose, a template knows one place.
        shared = tuple(map(places.index, places))
        return Held(arrays, (tuple(tokens), tuple(kinds), strides, shared, *facts))

    def named(self, places: tuple[tuple[str, int], ...]) -> tuple[dict[str, Tensor], dict[str, Sequence[int]]]:
        """The arrays, and their shapes, by the names that operands have at these places."""
        found = self._named.get(places)
        if found is None:
            given = {name: self.arrays[n] for name, n in places}
            found = self._named[places] = given, {name: x.shape for name, x in given.items()}
        return found


class Direct:
    """A call with its kernel, sizes and held addresses known. order: which of its tensors goes to each slot."""

    __slots__ = ("aimed", "order", "runner", "shape")

    def __init__(
        self, aimed: stamp.Aimed, runner: kernels.Runner, shape: tuple[int, ...], order: tuple[int, ...]
    ) -> None:
        self.aimed, self.runner, self.shape, self.order = aimed, runner, shape, order

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None where the kernel takes no tensors like these, which nothing but their addresses tells."""
        runner, aimed = self.runner, self.aimed
        out = runner.fresh(aimed.device, self.shape)
        if not aimed.start([tensors[n] for n in self.order], out):
            return None
        return out if out.dtype == runner.dtype else out.to(runner.dtype)


@dataclass(frozen=True, eq=False)
class Template:
    """What calls over maps of one kind have in common. held: which array of a map each held operand is; free: which of
    the call's tensors each other one; order: those in the order of the kernel's slots."""

    mould: stamp.Mould
    runner: kernels.Runner
    held: tuple[tuple[str, int], ...]
    free: tuple[tuple[str, int], ...]
    order: tuple[int, ...]

    def at(self, held: Held, shapes: Sequence[Sequence[int]], shape: tuple[int, ...]) -> Direct | None:
        """The call over a map; shapes: of the call's tensors; shape: of the result."""
        given, every = held.named(self.held)
        every = every.copy()
        for name, n in self.free:
            every[name] = shapes[n]
        every[""] = shape
        aimed = self.mould.cast(given, every, held.segments)
        return None if aimed is None else Direct(aimed, self.runner, shape, self.order)


@dataclass(frozen=True, eq=False)
class Call:
    """A call over a map, as others like it are known.

    tensors: those that no map holds; counting: which of them count rows. shapes: theirs, as the statement has them;
    shape: the result's. kind: what calls have in common that one template serves: rows count within what rounds alike
    (tile.about).
    """

    tensors: Sequence[Tensor]
    counting: Sequence[bool]
    shapes: Sequence[Sequence[int]]
    shape: tuple[int, ...]
    kind: Hashable

    def from_template(self, held: Held) -> Direct | None:
        """The call as one like it was carried out; its tensors fit but for their rows, which are known to."""
        template = TEMPLATES.get(self.kind)
        if template is None or held.far or math.prod(self.shape) >= kernels.FAR:
            return None
        for x, counts in zip(self.tensors, self.counting, strict=True):
            # Of the others it is as it was.
            if counts and kernels.is_far(x):
                return None
        return template.at(held, self.shapes, self.shape)

    def leave(
        self, ready: Ready, held: Held, tensors: Sequence[Tensor], numbers: Sequence[int], finish: Finish = NOTHING
    ) -> Direct | None:
        """Keep the template of a call that was carried out; the call for others like it.

        tensors: the call's, with those of the epilogue last; numbers: which of them each one is that `ready` takes.
        """
        if len(ready.parts) != 1 or (finish != NOTHING and not ready.finishes):
            return None
        order = {name: numbers[n] for name, n in ready.parts[0].places}
        order |= {name: n for n, name in enumerate(finish.names, len(tensors) - len(finish.names))}
        given = {name: tensors[n] for name, n in order.items()}
        template = _template(ready, held, given, order)
        if template is not None:
            TEMPLATES.keep(self.kind, template)
        return _of_ready(ready, given, order)


def _of_ready(ready: Ready, tensors: Mapping[str, Tensor], order: Mapping[str, int]) -> Direct | None:
    """What a call that was carried out leaves where it is one kernel, which holds all but these tensors.

    order: the places of the tensors, by their names, among those of later calls.
    """
    run = _alone(ready)
    made = None if run is None else run.made(tensors)
    if run is None or made is None:
        return None
    return Direct(made[0], run.like, ready.shape, tuple(order[name] for name in made[0].names))


def _template(ready: Ready, held: Held, tensors: Mapping[str, Tensor], order: Mapping[str, int]) -> Template | None:
    """The same for other maps; held: the arrays of the call's own."""
    run, places = _alone(ready), {id(x): n for n, x in enumerate(held.arrays)}
    made = None if run is None or held.far else run.made(tensors)
    if run is None or made is None or not all(id(x) in places for x in run.held.values()):
        return None
    aimed, mould = made
    held_at = tuple((name, places[id(x)]) for name, x in run.held.items())
    return Template(mould, run.like, held_at, tuple(order.items()), tuple(order[name] for name in aimed.names))


def _alone(ready: Ready) -> kernels.HeldRunner | None:
    """The one kernel that a call is."""
    run = ready.parts[0].run if len(ready.parts) == 1 else None
    return run if isinstance(run, kernels.HeldRunner) and run.like.dtype == ready.dtype else None


TEMPLATES: Bounded[Template] = Bounded(2048)
_KINDS: Bounded[object] = Bounded(4096)
