"""Layers with norms behind them, one after the other, as one step of autograd: kernels of both passes are started
without anything in between.

Each layer computes what pumice.ops.conv_norm says, and its gradients are the same. All that a pass makes lies in a few
pieces of memory, weights are cast by one kernel, and gradients of weights are added up in one piece of zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap
from pumice.lower import direct
from pumice.lower import kernel as kernels
from pumice.lower import norm as norms
from pumice.lower.dataflow import CONV
from pumice.lower.direct import Direct
from pumice.lower.norm import Norm
from pumice.ops import autograd, line
from pumice.ops.conv import bound_map, conv_features, differentiable_call
from pumice.ops.line import GIVEN, Found
from pumice.runtime.cache import BoundedCache
from pumice.runtime.workspace import Workspace, workspace

_ALIGNED = 128
"""Values: what begins at a multiple of them is aligned for every kernel."""


class Gradients(NamedTuple):
    """The kernels of the gradients of a weight and, where that is wanted, of the features."""

    weight: Direct
    features: Direct | None


class Products:
    """The kernels of a convolution over a map. Those of its gradients are aimed when they are asked for: until then the
    device has others to run."""

    __slots__ = ("_gradients", "_held", "_like", "_rows", "_shape", "result")

    def __init__(self, result: Direct, like: Sequence[direct.Template], held: direct.Held, of: _Sizes) -> None:
        """like: of the gradients."""
        self.result, self._like, self._held = result, like, held
        self._rows, self._shape = of
        self._gradients: Gradients | None = None

    def gradients(self) -> Gradients | None:
        """None where one is not compiled yet for such numbers of rows."""
        if self._gradients is None:
            (weight, *features), held, rows = self._like, self._held, self._rows
            dw = weight.over(held, rows, self._shape)
            dx = [each.over(held, rows, (rows[0][0], self._shape[2])) for each in features]
            if dw is not None and None not in dx:
                self._gradients = Gradients(dw, *dx or (None,))
        return self._gradients


_Sizes = tuple[Sequence[tuple[int, int]], tuple[int, int, int]]
"""Rows of features, weight and gradient, as direct.counted tells them, and the shape of the weight."""


class StepCall(NamedTuple):
    """What a layer starts over some coordinates; a linear map has no kernels of its own."""

    norm: norms.NormLaunches
    own: Products | None = None


@dataclass(frozen=True, eq=False)
class Unit(line.Layer):
    """A layer and the norm behind it as kernels of both passes.

    shape: C_out, taps, C_in. dtype: of the features; own: of the weight. strides: of the features. settled: the norm
    behind it, whose momentum it is; known: the addresses of its running mean and variance, and count of batches, 0 for
    none; relu: whether a ReLU is behind that. inner: whether a gradient of the features is wanted. keys: what its
    products over a map are kept under, and those with the norm; templates: of the products, by kinds of maps.

    reads, held: whose results features are, and what is added, by number, or GIVEN; weights, vectors: where those of
    this layer begin in a piece of memory with those of all, in values.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    own: torch.dtype
    strides: tuple[int, ...]
    settled: norms.NormKernels
    eps: float
    momentum: float
    relu: bool
    known: tuple[int, ...]
    inner: bool
    keys: tuple[Hashable, Hashable]
    templates: BoundedCache[tuple[direct.Template, ...]]
    reads: int = GIVEN
    held: int = GIVEN
    weights: int = 0
    vectors: int = 0

    @property
    def following(self) -> tuple[int, int]:
        """Where weights and vectors of the next one begin."""
        outputs, taps, channels = self.shape
        return self.weights + _aligned(outputs * taps * channels), self.vectors + _aligned(2 * outputs)

    @property
    def beyond(self) -> int:
        """How much is left free behind two vectors."""
        return _aligned(2 * self.shape[0]) - 2 * self.shape[0]

    def alone(self, outputs: Geometry, rows: int) -> StepCall | None:
        norm = self.settled.launches_for(rows, outputs.cloud.count.data_ptr() & 15) if rows > 1 else None
        return None if norm is None else StepCall(norm)

    def over(self, found: KernelMap, outputs: Geometry, kept: bool) -> StepCall | None:
        # What one row, or none, is normalised by is not its own.
        if (self.adds and not kept) or found.buffered is not None or found.num_outputs < 2:
            return None
        if found.volume != self.shape[1]:
            return None
        beyond = outputs.cloud.count.data_ptr() & 15
        key = self.keys[1], beyond
        call = found.get_cached(key)
        if call is None and (call := self._cast(found, beyond)) is not None:
            found.keep(key, call)
        return call

    def _cast(self, found: KernelMap, beyond: int) -> StepCall | None:
        norm = self.settled.launches_for(found.num_outputs, beyond)
        if norm is None:
            return None
        own = found.get_cached(self.keys[0])
        if own is None and (own := self._products(found)) is not None:
            found.keep(self.keys[0], own)
        return None if own is None else StepCall(norm, own)

    def _products(self, found: KernelMap) -> Products | None:
        """As the calls were carried out that autograd records layer by layer (register.HeldCall)."""
        held = bound_map(found, True)
        like = self.templates.get(held.kind) or self._like(held)
        if like is None:
            return None
        outputs = self.shape[0]
        rows = (found.num_inputs, self.strides[0]), (outputs, 0), (found.num_outputs, outputs)
        result = like[0].over(held, rows[:2], (found.num_outputs, outputs))
        return None if result is None else Products(result, like[1:], held, (rows, self.shape))

    def _like(self, held: direct.Held) -> tuple[direct.Template, ...] | None:
        """Of the result, and of the gradients of weight and, where it is wanted, features: kept for maps of a kind."""
        outputs, taps, channels = self.shape
        wide, strides = self.dtype is torch.float32, (self.strides, (taps * channels, channels, 1), (outputs, 1))
        kind = autograd.call_kind((CONV, ""), held, self.dtype, ((channels,), self.shape))
        asked = [((), strides[:2]), ((1, self.own), strides), *([((0, self.dtype), strides)] if self.inner else [])]
        keys = [(kind, autograd.launch_key(facts, wide, self.dtype, own)) for facts, own in asked]
        found = tuple(one for one in map(direct.TEMPLATES.get, keys) if one is not None)
        if len(found) < len(keys) or found[1].runner.writes is not self.own:
            return None
        return self.templates.keep(held.kind, found)


def placed(layers: Iterable[Unit]) -> Iterator[Unit]:
    """Layers one after the other with their places."""
    reads = held = GIVEN
    weights = vectors = 0
    for number, layer in enumerate(layers):
        held = reads if layer.opens else held
        own = replace(layer, reads=reads, held=held, weights=weights, vectors=vectors)
        yield own
        weights, vectors = own.following
        reads, held = (reads, number) if layer.aside else (number, held)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def started(found: Sequence[Found[Unit]], x: Tensor, own: Sequence[Tensor | None]) -> Tensor | None:
    """The result of these layers one after the other; None where x is not aligned, or not on the current device.

    own: weight, scale and shift of each.
    """
    if x.data_ptr() & 15 or (x.is_cuda and x.get_device() != torch._C._cuda_getDevice()):
        return None
    return _Line.apply(found, x, *own)


class _Line(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Sequence[Found[Unit]], x: Tensor, *own: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with autograd.autocast_disabled((x,)):
            last = found[-1]
            out = x.new_empty((last.rows, last.launch.shape[0]))
            run = _Run.begun(found, x, own, out)
            run.forward()
        ctx.found, ctx.plan, ctx.tiles = found, run.plan, kernels.tuning_mode()
        # Gradients depend on no other result of the last layer, which may be written to.
        read = out if found[-1].launch.adds else None
        ctx.save_for_backward(x, *run.memory._replace(out=read), *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, between, pairs, narrow, out, *own = ctx.saved_tensors
        # Whoever calls backward within autocast has every dtype as it was in the forward pass.
        with autograd.autocast_disabled((grad,)), kernels.tiles_of(ctx.tiles):
            if torch.is_grad_enabled():
                return None, *_recorded(ctx.found, x, own, grad, ctx.needs_input_grad[1:])
            run = _Run(ctx.found, ctx.plan, x, own, _Memory(between, pairs, narrow, out))
            return None, *run.backward(grad, ctx.needs_input_grad[1:])


class _SequencePlan(NamedTuple):
    """Where things begin, in values. taken, results: of all layers, and of all but the last, in one piece of `between`
    values; weights, vectors: how long pieces are with those of all."""

    taken: list[int]
    results: list[int]
    between: int
    weights: int
    vectors: int

    @staticmethod
    def of(found: Sequence[Found[Unit]]) -> _SequencePlan:
        taken, results, end = [], [], 0
        for one in found:
            size = _aligned(one.rows * one.launch.shape[0])
            taken.append(end)
            results.append(end + size)
            end += 2 * size
        # The last result is a tensor of its own.
        return _SequencePlan(taken, results[:-1], results[-1], *found[-1].launch.following)


_copy_each = attrgetter("_foreach_copy_")(torch)


class _Memory(NamedTuple):
    """Of a pass. between: what the norms of all layers take, and the results of all but the last; pairs: what rows were
    normalised by; narrow: the weights in the dtype of the features, where theirs is another; out: the last result,
    where it is read or written."""

    between: Tensor
    pairs: Tensor
    narrow: Tensor | None
    out: Tensor | None


class _Run:
    """Layers with their calls and the memory of a pass. own: weight, scale and shift of each."""

    def __init__(
        self, found: Sequence[Found[Unit]], plan: _SequencePlan, x: Tensor, own: Sequence[Any], memory: _Memory
    ) -> None:
        self.found, self.plan, self.x, self.weights, self.memory = found, plan, x, own[::3], memory
        between, pairs, narrow, out = memory
        size, base, first = x.element_size(), between.data_ptr(), pairs.data_ptr()
        self._taken = [base + size * n for n in plan.taken]
        # Behind all others that of what is given: it is number -1.
        self._at = [*[base + size * n for n in plan.results], 0 if out is None else out.data_ptr(), x.data_ptr()]
        self._pairs = [first + 4 * one.launch.vectors for one in found]
        if narrow is None:
            self._weights = [w.data_ptr() for w in self.weights]
        else:
            begin = narrow.data_ptr()
            self._weights = [begin + size * one.launch.weights for one in found]
        # Where they lie now; a pair stands in for what is not there.
        pairs_for = [pair for pair in self._pairs for _ in range(2)]
        affine = [t for n, t in enumerate(own) if n % 3]
        places = [p if t is None else t.data_ptr() for t, p in zip(affine, pairs_for, strict=True)]
        self._affine = [*zip(places[::2], places[1::2], strict=True)]
        self._counts = [one.outputs.cloud.count.data_ptr() for one in found]

    @staticmethod
    def begun(found: Sequence[Found[Unit]], x: Tensor, own: Sequence[Any], out: Tensor) -> _Run:
        """With memory to be written to, and weights that are cast."""
        plan, weights, narrow = _SequencePlan.of(found), own[::3], None
        if weights[0].dtype is not x.dtype:
            narrow = x.new_empty(plan.weights)
            _copy_each([_like(w, narrow, one.launch) for w, one in zip(weights, found, strict=True)], weights)
        between, pairs = x.new_empty(plan.between), x.new_empty(plan.vectors, dtype=torch.float32)
        return _Run(found, plan, x, own, _Memory(between, pairs, narrow, out))

    def _scratch(self, calls: Iterable[Direct]) -> Workspace:
        """What the programs of each of the kernels of a pass share: these and those of the norms."""
        needs = [one.call.norm.needs for one in self.found]
        needs += [call.aimed.needs for call in calls if call.aimed.slots.scratch is not None]
        return workspace(max([n for n, _ in needs]), max([n for _, n in needs]), self.x.device)

    def forward(self) -> None:
        """The result is put where it belongs."""
        shared = self._scratch([one.call.own.result for one in self.found if one.call.own is not None])
        room = shared.scratch.data_ptr(), shared.counters.data_ptr()
        for n, one in enumerate(self.found):
            layer, norm, h = one.launch, one.call.norm, self._taken[n]
            self._multiplied(n, shared)
            (mean, variance, tracked), pair, count = layer.known, self._pairs[n], self._counts[n]
            norm.moments((h, count, mean, variance, tracked or pair, pair, pair, *room), layer.momentum)
            more = self._at[layer.held] if layer.adds else h
            norm.normalise((h, count, pair, *self._affine[n], more, self._at[n]))

    def _multiplied(self, n: int, shared: Workspace) -> None:
        """What a layer gives to its norm."""
        one, own = self.found[n], self.found[n].call.own
        if own is None:
            torch.mm(self._features(n), self._matrix(n).t(), out=self._of(n))
            return
        given, call = (self._at[one.launch.reads], self._weights[n]), own.result
        if call.runner.writes_result_dtype is self.x.dtype:
            call.aimed.begin(given, call.places, self._taken[n], shared)
            return
        summed = call.runner.allocate_output(self.x, (one.rows, one.launch.shape[0]))
        call.aimed.begin(given, call.places, summed.data_ptr(), shared)
        self._of(n).copy_(summed)

    def backward(self, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of what is given, and of weight, scale and shift of each layer."""
        found, plan, x = self.found, self.plan, self.x
        calls = [None if one.call.own is None else one.call.own.gradients() for one in found]
        shared = self._scratch([call for pair in calls if pair is not None for call in pair if call is not None])
        weights = x.new_zeros(plan.weights, dtype=found[0].launch.own)
        sums = x.new_empty(plan.vectors, dtype=torch.float32)
        (begin, size), first = (weights.data_ptr(), weights.element_size()), sums.data_ptr()
        dh = x.new_empty(max([one.rows * one.launch.shape[0] for one in found]))
        taken, grads, apart = dh.data_ptr(), {len(found) - 1: grad}, {}
        for n in range(len(found) - 1, -1, -1):
            layer, pair = found[n].launch, calls[n]
            self._through_norm(n, grads, (taken, first + 4 * layer.vectors), shared)
            if pair is None:
                apart[n] = self._through_layer(n, grads, dh)
                continue
            given, (weight, features) = (self._at[layer.reads], self._weights[n], taken), pair
            weight.aimed.begin(given, weight.places, begin + size * layer.weights, shared)
            if features is not None:
                rows = x.shape[0] if layer.reads == GIVEN else found[layer.reads].rows
                dx = features.runner.allocate_output(x, (rows, layer.shape[2]))
                features.aimed.begin(given, features.places, dx.data_ptr(), shared)
                _add(grads, layer.reads, dx if dx.dtype is x.dtype else dx.to(x.dtype))
        return [grads.get(GIVEN) if needed[0] else None, *self._own(weights, sums, apart, needed[1:])]

    def _through_norm(self, n: int, grads: dict[int, Tensor], written: tuple[int, int], shared: Workspace) -> None:
        """written: where the gradient of what a norm takes is put, and its sums; that of what is added is one more of
        the grads."""
        one, layer, given, (dh, sums) = self.found[n], self.found[n].launch, grads.pop(n), written
        norm, step = one.call.norm, given.stride(0)
        if step != layer.shape[0] and given.stride(1) == 1:
            # Of a part of a concatenation.
            norm = layer.settled.launches_for(one.rows, self._counts[n] & 15, step)
        if norm is None or given.stride(1) != 1 or given.data_ptr() & 15:
            norm, given = one.call.norm, given.clone(memory_format=torch.contiguous_format)
        h, result = self._taken[n], self._at[n] if layer.adds else self._taken[n]
        told = self._counts[n], self._pairs[n], *self._affine[n], result, sums
        norm.products((given.data_ptr(), h, *told, shared.scratch.data_ptr(), shared.counters.data_ptr()))
        dheld = self.x.new_empty((one.rows, layer.shape[0])) if layer.adds else None
        norm.gradient((given.data_ptr(), h, *told, dh if dheld is None else dheld.data_ptr(), dh))
        if dheld is not None:
            _add(grads, layer.held, dheld)

    def _through_layer(self, n: int, grads: dict[int, Tensor], room: Tensor) -> Tensor:
        """The gradient of the weight of a linear map, or of a convolution whose kernels are still to be compiled; that
        of its features is one more of the grads. room: where the gradient of its result lies."""
        one, layer = self.found[n], self.found[n].launch
        (outputs, _, channels), features = layer.shape, self._features(n)
        dh = room[: one.rows * outputs].view(one.rows, outputs)
        if one.over is None:
            dx = torch.mm(dh, self._matrix(n)) if layer.inner else None
            weight = torch.mm(dh.t(), features).to(layer.own)
        else:
            flat = self._weight(n).view(outputs, -1, channels)
            call = differentiable_call(features, flat, one.over, one.rows)
            dx, weight = call.gradients((features, flat), dh, (self.x.dtype if layer.inner else None, layer.own))
            assert weight is not None
        if dx is not None:
            _add(grads, layer.reads, dx)
        return weight.view_as(self.weights[n])

    def _own(
        self, weights: Tensor, sums: Tensor, apart: Mapping[int, Tensor], needed: Sequence[bool]
    ) -> Iterator[Tensor | None]:
        """The gradients of weight, scale and shift of each layer, of the weights and the sums of all; apart: those
        that are elsewhere."""
        wanted, layers = iter(needed), [one.launch for one in self.found]
        pieces = [n for layer in layers for n in (layer.shape[0], layer.shape[0], layer.beyond)]
        vectors = iter(sums.split(pieces))
        for n, layer in enumerate(layers):
            # `data`: who writes to one of them has not written to the others.
            own = apart[n] if n in apart else _like(self.weights[n], weights, layer).data
            yield own if next(wanted) else None
            dshift, dscale, _ = next(vectors), next(vectors), next(vectors)
            # What is not there needs none.
            yield dscale.data if next(wanted) else None
            yield dshift.data if next(wanted) else None

    def _features(self, n: int) -> Tensor:
        """What a layer is given."""
        place = self.found[n].launch.reads
        if place == GIVEN:
            return self.x
        shape = self.found[place].rows, self.found[place].launch.shape[0]
        return self.memory.between.as_strided(shape, (shape[1], 1), self.plan.results[place])

    def _of(self, n: int) -> Tensor:
        """What a layer gives to its norm."""
        shape = self.found[n].rows, self.found[n].launch.shape[0]
        return self.memory.between.as_strided(shape, (shape[1], 1), self.plan.taken[n])

    def _weight(self, n: int) -> Tensor:
        """In the dtype of the features."""
        narrow = self.memory.narrow
        return self.weights[n] if narrow is None else _like(self.weights[n], narrow, self.found[n].launch)

    def _matrix(self, n: int) -> Tensor:
        outputs, _, channels = self.found[n].launch.shape
        return self._weight(n).view(outputs, channels)


def _like(weight: Tensor, whole: Tensor, layer: Unit) -> Tensor:
    """A tensor like a layer's weight in a piece of memory with those of all."""
    return whole.as_strided(weight.shape, weight.stride(), layer.weights)


def _add(grads: dict[int, Tensor], place: int, grad: Tensor) -> None:
    """One more gradient of what lies at a place: both are nobody else's."""
    grads[place] = grads[place].add_(grad) if place in grads else grad


def _recorded(
    found: Sequence[Found[Unit]], x: Tensor, own: Sequence[Tensor | None], grad: Tensor, needed: Sequence[bool]
) -> list[Any]:
    """The gradients, for gradients of gradients: each is recorded in turn."""
    results, left = [x], iter(own)
    for one in found:
        layer, weight, scale, shift = one.launch, next(left), next(left), next(left)
        assert weight is not None
        outputs, taps, channels = layer.shape
        given, flat = results[layer.reads + 1], weight.reshape(outputs, taps, channels).to(x.dtype)
        held = results[layer.held + 1] if layer.adds else None
        h = given @ flat[:, 0].t() if one.over is None else conv_features(given, flat, one.over, one.rows)
        # Running statistics have followed.
        norm = Norm(scale, shift, norms.Statistics(None, layer.eps), held, layer.relu)
        results.append(norms.batch_norm(h, one.outputs.cloud, norm))
    return norms.gradients_of(results[-1], grad, (x, *own), needed)
