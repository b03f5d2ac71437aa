"""Calls over a kernel map started again with nothing looked up but what may have changed, and on maps never seen.

A call that was carried out once leaves a `Direct`, which later ones over the same map and with tensors of the same
shapes start, and a `Template`, from which calls over other maps of about the same sizes get theirs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.lower import triton as kernels
from pumice.lower.epilogue import NOTHING, Finish
from pumice.lower.plan import Kind, Ready, deterministic
from pumice.lower.remember import Bounded
from pumice.schedule.ledger import ledger
from pumice.schedule.tile import about


def starts_kernels(x: Tensor) -> bool:
    """Whether calls with this tensor are kernels."""
    return x.is_cuda


def told(tensors: Sequence[Tensor], *facts: Hashable) -> tuple[Hashable, ...]:
    """What the launch of a call depends on: the tensors but for their addresses, and what is set for all calls."""
    return _told(tensors, [x.shape for x in tensors], facts)


def _told(tensors: Sequence[Tensor], shapes: Sequence[Hashable], facts: Hashable) -> tuple[Hashable, ...]:
    found: list[Hashable] = [facts, deterministic(), ledger().generation, kernels.tile_source()]
    wide = False
    for x, shape in zip(tensors, shapes, strict=True):
        kind = x.dtype
        wide |= kind is torch.float32
        found += (shape, x.stride(), kind, x.get_device())
    if wide:
        found.append(kernels.float32_precision())
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Held:
    """The arrays of a map that a call holds. kind: what the choice of a kernel depends on; far: whether one is so long
    that addresses need 64 bits."""

    arrays: Sequence[Tensor]
    kind: Hashable
    far: bool

    @staticmethod
    def of(tokens: Sequence[str], arrays: Sequence[Tensor], kinds: Sequence[Kind | None]) -> Held:
        strides, places = tuple(x.stride() for x in arrays), [id(x) for x in arrays]
        # Of an array that is there twice, as in a map that is its own transpose, a template knows one place.
        shared = tuple(map(places.index, places))
        return Held(arrays, (tuple(tokens), tuple(kinds), strides, shared), any(map(kernels.is_far, arrays)))


@dataclass(frozen=True, eq=False)
class Direct:
    """A call with its kernel, sizes and held addresses known. order: which of its tensors goes to each slot."""

    aimed: kernels.Aimed
    runner: kernels.Runner
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None where the kernel takes no tensors like these, which nothing but their addresses tells."""
        runner = self.runner
        out = runner.fresh(self.aimed.device, self.shape)
        if not self.aimed.start([tensors[n] for n in self.order], out):
            return None
        return out if out.dtype == runner.dtype else out.to(runner.dtype)


@dataclass(frozen=True, eq=False)
class Template:
    """What calls over maps of one kind have in common. held: which array of a map each held operand is; free: which of
    the call's tensors each other one."""

    mould: kernels.Mould
    runner: kernels.Runner
    held: tuple[tuple[str, int], ...]
    free: Mapping[str, int]

    def at(self, held: Held, shapes: Sequence[Sequence[int]], shape: tuple[int, ...]) -> Direct | None:
        """The call over a map; shapes: of the call's tensors; shape: of the result."""
        given = {name: held.arrays[n] for name, n in self.held}
        every: dict[str, Sequence[int]] = {name: x.shape for name, x in given.items()}
        for name, n in self.free.items():
            every[name] = shapes[n]
        every[""] = shape
        return _direct(self.mould.cast_at(self.runner.bound, given, every), self.runner, shape, self.free)


@dataclass(frozen=True, eq=False)
class Call:
    """A call over a map, as others like it are known.

    tensors: those that no map holds; counting: of which the first axis counts rows. shapes: theirs, as the statement
    has them; shape: the result's. facts: what else a kernel is chosen by.
    """

    tensors: Sequence[Tensor]
    counting: Sequence[bool]
    shapes: Sequence[Sequence[int]]
    shape: tuple[int, ...]
    facts: Hashable

    @property
    def kind(self) -> Hashable:
        """What calls have in common that one template serves: rows count within what rounds alike (tile.about)."""
        shapes = [
            (about(x.shape[0]), *x.shape[1:]) if counts else x.shape
            for x, counts in zip(self.tensors, self.counting, strict=True)
        ]
        return _told(self.tensors, shapes, (about(self.shape[0]), *self.shape[1:], self.facts))

    def from_template(self, held: Held) -> Direct | None:
        """The call as one like it was carried out; its tensors fit but for their rows, which are known to."""
        template = TEMPLATES.get(self.kind)
        far = held.far or math.prod(self.shape) >= kernels.FAR or any(map(kernels.is_far, self.tensors))
        return None if template is None or far else template.at(held, self.shapes, self.shape)

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
    return None if run is None or made is None else _direct(made[0], run.like, ready.shape, order)


def _template(ready: Ready, held: Held, tensors: Mapping[str, Tensor], order: Mapping[str, int]) -> Template | None:
    """The same for other maps; held: the arrays of the call's own."""
    run, places = _alone(ready), {id(x): n for n, x in enumerate(held.arrays)}
    made = None if run is None or held.far else run.made(tensors)
    if run is None or made is None or not all(id(x) in places for x in run.held.values()):
        return None
    return Template(made[1], run.like, tuple((name, places[id(x)]) for name, x in run.held.items()), order)


def _alone(ready: Ready) -> kernels.HeldRunner | None:
    """The one kernel that a call is."""
    run = ready.parts[0].run if len(ready.parts) == 1 else None
    return run if isinstance(run, kernels.HeldRunner) and run.like.dtype == ready.dtype else None


def _direct(
    aimed: kernels.Aimed | None, runner: kernels.Runner, shape: tuple[int, ...], order: Mapping[str, int]
) -> Direct | None:
    return None if aimed is None else Direct(aimed, runner, shape, tuple(order[name] for name in aimed.names))


TEMPLATES: Bounded[Template] = Bounded(2048)
