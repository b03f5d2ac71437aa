"""Forward and backward pass of a training stretch: one autograd node, kernels over a few shared buffers.

    h = conv(x, weight)        z = norm(h) + residual        y = activation(z)

for each product. One buffer holds all values that the backward pass reads, another the rest; one holds (mean, 1 / std)
of all norms; one kernel casts all weights; weight gradients accumulate in one zeroed buffer. Padding rows of a captured
step are undefined: kernels do not read them, and they are zeroed before torch sums over rows, as in the gradients of
linear maps and biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.coords import Geometry, KernelMap
from pumice.engine.train_layers import (
    ALIGNED,
    BIAS,
    MEAN,
    NONE,
    SCALE,
    SHIFT,
    TENSORS,
    TRACKED,
    VARIANCE,
    WEIGHT,
    Joined,
    Layer,
    MapCalls,
    TrainPlan,
)
from pumice.lower import kernel as kernels
from pumice.lower import norm as norms
from pumice.lower.call import BoundCall
from pumice.lower.maps import NoMap
from pumice.lower.rows import zero_padding_rows
from pumice.ops import autograd
from pumice.ops.conv import conv_features, differentiable_call
from pumice.runtime.launch import integers
from pumice.runtime.workspace import Workspace, workspace

_foreach = attrgetter("_foreach_copy_", "_foreach_add_", "_foreach_sqrt_", "_foreach_reciprocal_")
_copy_each, _add_each, _root_each, _invert_each = _foreach(torch)
_relu_gradient = torch.ops.aten.threshold_backward
_silu_gradient = torch.ops.aten.silu_backward


class StepCall(NamedTuple):
    """A step bound to its geometry. rows: of the result; inputs: rows of the features; level: index of the result's row
    count in Memory.counts. found, calls: the map and the kernels over it, None for a linear map run by torch; if
    padded, calls of a convolution are looked up at launch."""

    rows: int
    inputs: int
    outputs: Geometry
    level: int
    found: KernelMap | NoMap | None = None
    calls: MapCalls | None = None
    norm: norms.NormLaunches | None = None


class Layout(NamedTuple):
    """Offsets in shared buffers, in elements. places: by step, of the norm's input, the smooth activation's input and
    the result; NONE: absent or a separate tensor. kept, spare: sizes of the buffer saved for backward, of the other."""

    places: list[tuple[int, int, int]]
    kept: int
    spare: int

    @staticmethod
    def of(plan: TrainPlan, calls: Sequence[StepCall]) -> Layout:
        places, ends = [], [0, 0]
        for step, call in zip(plan.steps, calls, strict=True):
            size, h, z, y = -(-call.rows * step.channels // ALIGNED) * ALIGNED, NONE, NONE, NONE
            if isinstance(step, Layer):
                piece = 0 if step.wants.flows else 1
                if step.norm is not None:
                    h = ends[piece]
                    ends[piece] += size
                if step.smooth:
                    z = ends[piece]
                    ends[piece] += size
            if step.wired.y not in plan.outputs:
                piece = 0 if step.keeps else 1
                y = ends[piece]
                ends[piece] += size
            places.append((h, z, y))
        return Layout(places, *ends)


class Memory(NamedTuple):
    """Buffers of a pass. kept, spare: see Layout; spare is None in the backward pass. pairs: (mean, 1 / std) of
    norms; narrow: cast weights; counts: row counts, None if padded; outs: results read outside, by value."""

    kept: Tensor
    spare: Tensor | None
    pairs: Tensor
    narrow: Tensor | None
    counts: Tensor | None
    outs: Mapping[int, Tensor | None]


class Started(NamedTuple):
    """A stretch bound to its maps, before the forward pass. tensors: TENSORS per product; padded: has padding rows."""

    plan: TrainPlan
    calls: list[StepCall]
    tensors: Sequence[Tensor | None]
    padded: bool

    def run(self, feats: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward pass as one autograd node. Returns the plan's outputs, [rows, C] each."""
        plan = self.plan
        trained = [self.tensors[place] for place in plan.trained]
        # Features that no live output depends on get no gradient.
        feats = [x if n in plan.needs or not x.requires_grad else x.detach() for n, x in enumerate(feats)]
        return _Stretch.apply(self, len(feats), *feats, *trained)


class _Stretch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Started, count: int, *given: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, calls, tensors, _ = begun
        feats = given[:count]
        with autograd.autocast_disabled(feats):
            layout = Layout.of(plan, calls)
            memory = _allocated(begun, layout, feats[0])
            _Forward(begun, layout, feats, memory).run()
        outs = [memory.outs[y] for y in plan.outputs]
        ctx.plan, ctx.calls, ctx.layout, ctx.count = plan, calls, layout, count
        ctx.counts, ctx.tiles = memory.counts, kernels.tuning_mode()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[memory.outs[y] for y in plan.outputs if y not in plan.needs])
        kept = {step.wired.y for step in plan.steps if step.keeps}
        # Statistics, and results that backward does not read, are not saved: they may be written to.
        own = [t if n % TENSORS in _OWN else None for n, t in enumerate(tensors)] if plan.needs else []
        read = [out if y in kept else None for y, out in zip(plan.outputs, outs, strict=True)]
        ctx.save_for_backward(*feats, *memory[:1], *memory[2:4], *read, *own)
        return tuple(outs)  # pyright: ignore[reportReturnType]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan: TrainPlan = ctx.plan
        # Read once: saved-tensor hooks unpack at each access.
        saved = ctx.saved_tensors
        feats, left = saved[: ctx.count], iter(saved[ctx.count :])
        kept, pairs, narrow = next(left), next(left), next(left)
        outs = {y: next(left) for y in plan.outputs}
        begun = Started(plan, ctx.calls, [*left], ctx.counts is None)
        given = {y: grad for y, grad in zip(plan.outputs, grads, strict=True) if grad is not None and y in plan.needs}
        # Dtypes are those of the forward pass, also within autocast.
        with autograd.autocast_disabled(feats), kernels.tiles_of(ctx.tiles):
            if torch.is_grad_enabled():
                return None, None, *_recorded(begun, feats, pairs, given)
            memory = Memory(kept, None, pairs, narrow, ctx.counts, outs)
            return None, None, *Backward(begun, ctx.layout, feats, memory).run(given)


_OWN = (WEIGHT, BIAS, SCALE, SHIFT)


def _allocated(begun: Started, layout: Layout, like: Tensor) -> Memory:
    """Allocate the buffers of a forward pass, and cast weights."""
    plan, calls, tensors, padded = begun
    narrow, cast = None, [one for one in plan.layers if one.narrow]
    if cast:
        narrow = like.new_empty(plan.weights)
        own: list[Any] = [tensors[TENSORS * one.number].detach() for one in cast]  # pyright: ignore[reportOptionalMemberAccess]
        _copy_each([_like(w, narrow, one) for w, one in zip(own, cast, strict=True)], own)
    outs = {
        step.wired.y: like.new_empty((call.rows, step.channels))
        for step, call in zip(plan.steps, calls, strict=True)
        if step.wired.y in plan.outputs
    }
    pairs = like.new_empty(plan.vectors, dtype=torch.float32)
    kept, spare, counts = like.new_empty(layout.kept), like.new_empty(layout.spare), None
    if padded:
        _poison(calls[0].outputs, (kept, spare, *outs.values()))
    else:
        rows = {call.level: call.rows for call in calls}
        # One count per 16 bytes: kernels take aligned addresses.
        counts = integers([n for level in range(len(rows)) for n in (rows[level], 0)], like.device)
    return Memory(kept, spare, pairs, narrow, counts, outs)


def _poison(geometry: Geometry, tensors: Sequence[Tensor]) -> None:
    """Fill tensors with NaN if `poison` is set, to expose reads of padding rows."""
    if geometry.buffered is not None and geometry.buffered.poison:
        for one in tensors:
            one.fill_(torch.nan)


def _like(weight: Tensor, whole: Tensor, layer: Layer) -> Tensor:
    """View of `whole`, a buffer for the weights of all layers, with the layout of a layer's weight."""
    return whole.as_strided(weight.shape, weight.stride(), layer.weights)


class _Pass:
    """Base class of both passes: addresses of all values, and tensors that view them."""

    plan: TrainPlan
    calls: list[StepCall]
    tensors: Sequence[Tensor | None]
    padded: bool
    layout: Layout
    feats: Sequence[Tensor]
    memory: Memory
    like: Tensor
    index: int
    at: list[int]
    products: list[int]
    smooth: list[int]
    addresses: list[int]
    pairs: int
    counts: int

    def __init__(self, begun: Started, layout: Layout, feats: Sequence[Tensor], memory: Memory) -> None:
        self.plan, self.calls, self.tensors, self.padded = begun
        self.layout, self.feats, self.memory, self.like = layout, feats, memory, feats[0]
        kept, spare, pairs, narrow, counts, outs = memory
        size, self.index = self.like.element_size(), self.like.device.index or 0
        bases = kept.data_ptr(), 0 if spare is None else spare.data_ptr()
        self.at = [x.data_ptr() for x in feats]
        self.products, self.smooth = [], []
        for step, (h, z, y) in zip(self.plan.steps, layout.places, strict=True):
            base = bases[not (isinstance(step, Layer) and step.wants.flows)]
            out = outs.get(step.wired.y)
            self.products.append(base + size * h)
            self.smooth.append(base + size * z)
            self.at.append(bases[not step.keeps] + size * y if y >= 0 else 0 if out is None else out.data_ptr())
        own = self.tensors
        self.addresses = [0 if t is None else t.data_ptr() for t in own]
        self.pairs, self.counts, narrowed = pairs.data_ptr(), 0 if counts is None else counts.data_ptr(), narrow
        if narrowed is not None:
            begin = narrowed.data_ptr()
            for one in self.plan.layers:
                if one.narrow:
                    self.addresses[TENSORS * one.number] = begin + size * one.weights

    def _workspace(self, calls: Sequence[BoundCall | None]) -> Workspace | None:
        """Workspace that suffices for each kernel of a pass, None if no kernel needs one."""
        needs = [call.norm.needs for call in self.calls if call.norm is not None]
        needs += [call.needs for call in calls if call is not None and call.needs is not None]
        return workspace(max([n for n, _ in needs]), max([n for _, n in needs]), self.like.device) if needs else None

    def _count(self, n: int) -> int:
        """Device address of the number of valid rows of a padded step."""
        count = self.calls[n].outputs.cloud.count
        assert not count.data_ptr() & 15, "kernels take aligned addresses"
        return count.data_ptr()

    def _clear(self, n: int, values: Tensor) -> None:
        """Zero the padding rows, if any, of a step's contiguous values, in place."""
        if self.padded:
            zero_padding_rows(values, self.calls[n].outputs.cloud.count)

    def value(self, number: int) -> Tensor:
        """Features of a value, [rows, C]."""
        place = number - len(self.feats)
        if place < 0:
            return self.feats[number]
        out, step = self.memory.outs.get(number), self.plan.steps[place]
        return self._over(place, 2, step.keeps) if out is None else out

    def _over(self, n: int, which: int, kept: bool) -> Tensor:
        whole, channels = self.memory.kept if kept else self.memory.spare, self.plan.steps[n].channels
        assert whole is not None
        return whole.as_strided((self.calls[n].rows, channels), (channels, 1), self.layout.places[n][which])

    def product(self, n: int) -> Tensor:
        """Input of a layer's norm, [rows, C_out]."""
        return self._over(n, 0, self._flows(n))

    def argument(self, n: int) -> Tensor:
        """Input of a layer's smooth activation, [rows, C_out]."""
        return self._over(n, 1, self._flows(n))

    def _flows(self, n: int) -> bool:
        step = self.plan.steps[n]
        return isinstance(step, Layer) and step.wants.flows

    def weight(self, layer: Layer) -> Tensor:
        """Weight [C_out, K, C_in] in the features' dtype."""
        own, narrow = self.tensors[TENSORS * layer.number], self.memory.narrow
        assert own is not None
        if layer.narrow and narrow is not None:
            return narrow.as_strided(layer.shape, _strides(layer.shape), layer.weights)
        return own.detach().view(layer.shape)

    def matrix(self, layer: Layer) -> Tensor:
        """Weight of a linear map, [C_out, C_in]."""
        return self.weight(layer)[:, 0]

    def pair(self, layer: Layer) -> Tensor:
        """(mean, 1 / std) of a norm, float32 [2, C_out]."""
        return self.memory.pairs.as_strided((2, layer.channels), (layer.channels, 1), layer.vectors)


def _map_of(call: StepCall) -> KernelMap:
    assert isinstance(call.found, KernelMap)
    return call.found


def _strides(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return shape[1] * shape[2], shape[2], 1


class _Forward(_Pass):
    def run(self) -> None:
        """Run all steps in order."""
        self._settle_pairs()
        self.shared = self._workspace([call.calls.result for call in self.calls if call.calls is not None])
        for n, step in enumerate(self.plan.steps):
            if isinstance(step, Joined):
                torch.cat([self.value(part) for part in step.wired.parts], 1, out=self.value(step.wired.y))
                continue
            if step.norm is None:
                self._multiply(n, step, self.smooth[n] if step.smooth else self.at[step.wired.y])
                self._finish(n, step)
            else:
                self._multiply(n, step, self.products[n])
                self._normalise(n, step)
            if step.smooth:
                self.value(step.wired.y).copy_(functional.silu(self.argument(n)))
            elif step.apart:
                self.value(step.wired.y).relu_()

    def _settle_pairs(self) -> None:
        """Fill in `pairs` of norms that use running statistics: (mean - preceding bias, 1 / sqrt(variance + eps))."""
        fixed = [one for one in self.plan.layers if one.norm is not None and not one.by_batch]
        if not fixed:
            return
        own, pairs = self.tensors, [self.pair(one) for one in fixed]
        means, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        tensors: list[Any] = [own[TENSORS * one.number + n] for n in (MEAN, VARIANCE) for one in fixed]
        _copy_each([*means, *scales], tensors)
        _add_each(scales, [one.eps for one in fixed])
        _root_each(scales)
        _invert_each(scales)
        for mean, one in zip(means, fixed, strict=True):
            if (bias := own[TENSORS * one.number + BIAS]) is not None:
                mean.sub_(bias.detach())

    def _multiply(self, n: int, layer: Layer, address: int) -> None:
        """Run a convolution or linear map; its result goes to `address`."""
        call, shared = self.calls[n], self.shared
        found, calls = call.found, call.calls
        if found is None or (layer.relation is None and calls is not None and calls.result is None):
            x = self.value(layer.wired.x)
            # Inputs of the stretch already have zeros in padding rows.
            if self.padded and layer.wants.weight and layer.wired.x >= len(self.feats):
                self._clear(n, x)
            torch.mm(x, self.matrix(layer).t(), out=self._at(n, layer))
            return
        if calls is None:
            calls, shared = self._looked_up(n, layer, _map_of(call))
        own = calls.result
        if own is None:
            x, weight = self.value(layer.wired.x).detach(), self.weight(layer)
            self._at(n, layer).copy_(differentiable_call(x, weight, _map_of(call), call.rows).compute((x, weight)))
            return
        given = self.at[layer.wired.x], self.addresses[TENSORS * layer.number]
        if calls.whole:
            own.launch(given, address, shared)
            return
        summed = own.executor.allocate_output(self.like, (call.rows, layer.channels))
        own.launch(given, summed.data_ptr(), shared)
        self._at(n, layer).copy_(summed)

    def _looked_up(self, n: int, layer: Layer, found: KernelMap) -> tuple[MapCalls, Workspace | None]:
        """(kernels of a padded convolution, workspace of the forward kernel). Waits for the map on the stream."""
        calls: MapCalls = found.get_cached(layer.key) or layer.calls(found)
        self.calls[n] = self.calls[n]._replace(calls=calls)
        own = calls.result
        if own is None or own.needs is None:
            return calls, None
        return calls, workspace(own.needs[0], own.needs[1], self.like.device)

    def _at(self, n: int, layer: Layer) -> Tensor:
        """Tensor for a product's result: the input of the norm or smooth activation, or the step's result."""
        if layer.norm is not None:
            return self.product(n)
        return self.argument(n) if layer.smooth else self.value(layer.wired.y)

    def _normalise(self, n: int, layer: Layer) -> None:
        call, first, shared = self.calls[n], TENSORS * layer.number, self.shared
        launches, own, h = call.norm, self.addresses, self.products[n]
        assert launches is not None and shared is not None
        count = self._count(n) if self.padded else self.counts + 16 * call.level
        pair = self.pairs + 4 * layer.vectors
        if launches.moments is not None:
            if layer.counts:
                several = (call.outputs.cloud.count > 1)[0] if self.padded else 1
                self.tensors[first + TRACKED].add_(several)  # pyright: ignore[reportOptionalMemberAccess]
            _, bias, mean, variance, tracked, _, _ = own[first : first + TENSORS]
            given = h, count, mean or pair, variance or pair, tracked or pair, bias or pair, pair
            kernel, programs, more = launches.moments
            room = shared.scratch.data_ptr(), shared.counters.data_ptr()
            kernel(programs, (*given, *room, *more), self.index)
        kernel, programs, more = launches.normalise
        affine = own[first + SCALE] or pair, own[first + SHIFT] or pair
        added = h if layer.wired.residual == NONE else self.at[layer.wired.residual]
        result = self.smooth[n] if layer.smooth else self.at[layer.wired.y]
        kernel(programs, (h, count, pair, *affine, added, result, *more), self.index)

    def _finish(self, n: int, layer: Layer) -> None:
        """Add bias and residual to the result of a product without a norm, in place."""
        bias, residual = self.tensors[TENSORS * layer.number + BIAS], layer.wired.residual
        if bias is not None:
            self._at(n, layer).add_(bias.detach().to(layer.dtype))
        if residual != NONE:
            self._at(n, layer).add_(self.value(residual))


class Backward(_Pass):
    """The backward pass. grads: gradients so far, by value; own: values whose gradients may be overwritten."""

    grads: dict[int, Tensor]
    own: set[int]
    shared: Workspace | None
    dweights: Tensor
    sums: Tensor
    room: Tensor
    apart: dict[int, Tensor]

    def run(self, given: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Gradients of the input features and of the plan's trained tensors. given: gradients of results, by value."""
        plan, like = self.plan, self.like
        self.grads, self.own = dict(given), set()
        calls = [None if c.calls is None or c.found is None else c.calls.gradients(c.found) for c in self.calls]
        self.shared = self._workspace([one for both in calls if both is not None for one in both])
        self.dweights = like.new_zeros(plan.weights, dtype=torch.float32)
        # After the sums of all norms come zeros, the sums of norms that use running statistics.
        self.sums = like.new_zeros(plan.vectors + 2 * plan.widest, dtype=torch.float32)
        most = max([call.rows * step.channels for step, call in zip(plan.steps, self.calls, strict=True)])
        self.room = like.new_empty(most)
        if self.padded:
            _poison(self.calls[0].outputs, (self.room,))
        self.apart = {}
        reached = set[int]()
        for n in range(len(plan.steps) - 1, -1, -1):
            step = plan.steps[n]
            grad = self.grads.pop(step.wired.y, None)
            if grad is None:
                continue
            owned = step.wired.y in self.own
            if isinstance(step, Joined):
                self._split(step, grad, owned)
            else:
                reached.add(step.number)
                self._layer(n, step, grad, owned, calls[n])
        own = [self.grads.get(n) if x.requires_grad else None for n, x in enumerate(self.feats)]
        return own + self._trained(reached)

    def _split(self, step: Joined, grad: Tensor, owned: bool) -> None:
        """Run the backward pass of a concatenation."""
        for part, begin, channels in step.columns:
            if part in self.plan.needs:
                self._add(part, grad[:, begin : begin + channels], owned)

    def _add(self, value: int, grad: Tensor, owned: bool = True) -> None:
        """Accumulate a gradient of a value. owned: this tensor may be overwritten."""
        before = self.grads.get(value)
        if before is None:
            self.grads[value] = grad
        elif value in self.own:
            before.add_(grad)
            return
        elif owned:
            self.grads[value] = grad.add_(before)
        else:
            self.grads[value], owned = before + grad, True
        if owned:
            self.own.add(value)

    def _layer(self, n: int, layer: Layer, grad: Tensor, owned: bool, calls: Any) -> None:
        """Run the backward pass of a layer. grad: of its result; calls: MapCalls.gradients, or None."""
        wants, residual = layer.wants, layer.wired.residual
        if layer.smooth:
            grad, owned = _silu_gradient(grad, self.argument(n)), True
        elif layer.apart:
            grad, owned = _relu_gradient(grad, self.value(layer.wired.y), 0), True
        if layer.norm is None:
            if self.padded and (wants.bias or (wants.weight and self.calls[n].found is None)):
                grad, owned = self._cleared(n, grad, owned), True
            if wants.bias:
                self.apart[TENSORS * layer.number + BIAS] = grad.sum(0, dtype=torch.float32)
            dh = grad if grad.is_contiguous() and not grad.data_ptr() & 15 else grad.contiguous().clone()
            self._product(n, layer, dh, calls)
            if wants.residual:
                self._add(residual, grad, owned)
            return
        dresidual = self._through_norm(n, layer, grad)
        if layer.inner or (wants.residual and layer.relu):
            rows, channels = self.calls[n].rows, layer.channels
            dh = self.room[: rows * channels].view(rows, channels)
            if self.padded and wants.weight and self.calls[n].found is None:
                self._clear(n, dh)
            self._product(n, layer, dh, calls)
        if wants.bias and (self.padded or not layer.by_batch):
            self.apart[TENSORS * layer.number + BIAS] = self._bias(n, layer)
        if wants.residual:
            self._add(residual, grad if dresidual is None else dresidual, owned or dresidual is not None)

    def _cleared(self, n: int, grad: Tensor, owned: bool) -> Tensor:
        """A gradient with zeros in padding rows, in place if owned."""
        if not owned or not grad.is_contiguous():
            return torch.where(self.calls[n].outputs.valid_mask, grad, 0)
        self._clear(n, grad)
        return grad

    def _through_norm(self, n: int, layer: Layer, grad: Tensor) -> Tensor | None:
        """Run the backward pass of a norm: the gradient of its input goes to `room`, the vectors' gradients to `sums`.
        Returns the residual's gradient, None if it equals `grad`."""
        call, first, shared, wants = self.calls[n], TENSORS * layer.number, self.shared, layer.wants
        launches, own, h = call.norm, self.addresses, self.products[n]
        assert launches is not None and layer.norm is not None and shared is not None
        step = grad.stride(0)
        if grad.stride(1) != 1 or grad.data_ptr() & 15 or (step != layer.channels and step not in layer.steps):
            grad = grad.contiguous() if grad.stride(1) != 1 or step != layer.channels else grad.clone()
        elif step != layer.channels:
            launches = layer.norm.launches(call.rows, step)
        count = self._count(n) if self.padded else self.counts + 16 * call.level
        pair = self.pairs + 4 * layer.vectors
        adds = layer.wired.residual != NONE
        read = self.at[layer.wired.y] if adds and layer.relu else h
        affine = own[first + SCALE] or pair, own[first + SHIFT] or pair
        told = grad.data_ptr(), h, count, pair, *affine, read
        sums = self.sums.data_ptr() + 4 * layer.vectors
        if layer.by_batch or wants.scale or wants.shift or wants.bias:
            kernel, programs, more = launches.products
            room = shared.scratch.data_ptr(), shared.counters.data_ptr()
            kernel(programs, (*told, sums, *room, *more), self.index)
        dresidual = None
        if adds and layer.relu:
            dresidual = self.like.new_empty((call.rows, layer.channels))
        if layer.inner or dresidual is not None:
            kernel, programs, more = launches.gradient
            dh = self.room.data_ptr()
            sums = sums if layer.by_batch else self.sums.data_ptr() + 4 * self.plan.vectors
            kernel(programs, (*told, sums, dh if dresidual is None else dresidual.data_ptr(), dh, *more), self.index)
        return dresidual

    def _product(self, n: int, layer: Layer, dh: Tensor, calls: Any) -> None:
        """Compute weight and feature gradients of a product. dh: gradient of its result."""
        call, wants, x = self.calls[n], layer.wants, layer.wired.x
        if not (wants.x or wants.weight):
            return
        if call.found is None or calls is None:
            self._unprepared(n, layer, dh)
            return
        (weight, features), shared = calls, self.shared
        given = self.at[x], self.addresses[TENSORS * layer.number], dh.data_ptr()
        if weight is not None:
            weight.launch(given, self.dweights.data_ptr() + 4 * layer.weights, shared)
        if features is not None:
            dx = features.executor.allocate_output(self.like, (call.inputs, layer.shape[2]))
            features.launch(given, dx.data_ptr(), shared)
            self._add(x, dx if dx.dtype is layer.dtype else dx.to(layer.dtype))

    def _unprepared(self, n: int, layer: Layer, dh: Tensor) -> None:
        """`_product` for a linear map run by torch, or a convolution whose kernels are not compiled."""
        call, wants = self.calls[n], layer.wants
        # Features are saved only for weight gradients; else only their shape matters.
        x = self.value(layer.wired.x).detach() if wants.weight else self.like.new_empty((call.inputs, layer.shape[2]))
        if layer.relation is None:
            dx = torch.mm(dh, self.matrix(layer)) if wants.x else None
            weight = torch.mm(dh.t(), x) if wants.weight else None
        else:
            flat = self.weight(layer)
            own = differentiable_call(x, flat, _map_of(call), call.rows)
            dx, weight = own.gradients((x, flat), dh, layer.wanted())
        if weight is not None:
            own = self.dweights.as_strided(layer.shape, _strides(layer.shape), layer.weights)
            own.copy_(weight.view(layer.shape))
        if dx is not None:
            self._add(layer.wired.x, dx)

    def _bias(self, n: int, layer: Layer) -> Tensor:
        """Gradient of a bias before a norm: 0 if the norm uses batch statistics, which cancel the bias; with fewer than
        two valid rows a norm uses running statistics."""
        sums, scale = self.sums.narrow(0, layer.vectors, layer.channels), self.tensors[TENSORS * layer.number + SCALE]
        found = sums * self.pair(layer)[1]
        if layer.by_batch:
            found = found * (self.calls[n].outputs.cloud.count < 2)
        return found if scale is None else found * scale.detach()

    def _trained(self, reached: set[int]) -> list[Tensor | None]:
        """Gradients of the trained tensors. They share buffers; `.data` separates their version counters."""
        layers, found = self.plan.layers, list[Tensor | None]()
        for place in self.plan.trained:
            number, which = divmod(place, TENSORS)
            own = self.tensors[place]
            if own is None or number not in reached:
                found.append(None)
                continue
            layer = layers[number]
            if which == WEIGHT:
                grad = _like(own, self.dweights, layer)
            elif place in self.apart:
                grad = self.apart[place]
            else:
                size = layer.channels
                grad = self.sums.as_strided((size,), (1,), layer.vectors + _SUMS[which] * size)
            found.append(grad.data if grad.dtype is own.dtype else grad.to(own.dtype))
        return found


_SUMS = {SHIFT: 0, SCALE: 1, BIAS: 2}
"""Index of a gradient among a layer's three vectors in `sums`. The third stays 0: of a bias before batch statistics."""


# Double backward


def _recorded(
    begun: Started, feats: Sequence[Tensor], pairs: Tensor, given: Mapping[int, Tensor]
) -> list[Tensor | None]:
    """Gradients for double backward: recomputes the forward pass by operators that autograd records."""
    plan, calls, own, _ = begun
    values: list[Tensor] = [*feats]
    for step, call in zip(plan.steps, calls, strict=True):
        if isinstance(step, Joined):
            values.append(torch.cat([values[part] for part in step.wired.parts], 1))
        else:
            values.append(_composed(step, call, own[TENSORS * step.number :][:TENSORS], (values, pairs)))
    sought = [x if x.requires_grad else None for x in feats] + [own[place] for place in plan.trained]
    wanted = [x for x in sought if x is not None]
    roots = [values[y] for y in given]
    found = iter(torch.autograd.grad(roots, wanted, [*given.values()], create_graph=True, allow_unused=True))
    return [None if x is None else next(found) for x in sought]


def _composed(
    layer: Layer, call: StepCall, own: Sequence[Tensor | None], known: tuple[Sequence[Tensor], Tensor]
) -> Tensor:
    """The result of a layer by torch operators. known: (values so far, `pairs`)."""
    (weight, bias, _, _, _, scale, shift), (values, pairs), wired = own, known, layer.wired
    assert weight is not None
    x, flat = values[wired.x], weight.reshape(layer.shape).to(layer.dtype)
    h = x @ flat[:, 0].t() if layer.relation is None else conv_features(x, flat, _map_of(call), call.rows)
    h = _without_padding(h, call)
    held = None if wired.residual == NONE else values[wired.residual]
    if layer.norm is None:
        z = h if bias is None else h + bias.to(layer.dtype)
        z = z if held is None else z + held
    else:
        wide = (h if bias is None else h + (bias - bias.detach())).to(torch.float32)
        pair = pairs.as_strided((2, layer.channels), (layer.channels, 1), layer.vectors)
        state = norms.NormState(pair.detach(), scale, shift, False)
        if layer.by_batch:
            # Running statistics are already updated.
            z = norms.recompute_with_autograd(wide, call.outputs.cloud, state, norms.Statistics(None, layer.eps))
        else:
            z = state.affine(state.centred(wide))
        z = z if held is None else z + held
        z = (z.relu() if layer.relu else z).to(layer.dtype)
    return _without_padding(functional.silu(z) if layer.smooth else z.relu() if layer.apart else z, call)


def _without_padding(values: Tensor, call: StepCall) -> Tensor:
    """Values of a step, with values and gradients of padding rows set to 0."""
    return values if call.outputs.buffered is None else torch.where(call.outputs.valid_mask, values, 0)
