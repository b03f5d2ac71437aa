"""Planning of a training stretch: its layers, their kernels in both passes, and the gradients needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pumice.coords import KernelMap, Relation
from pumice.engine.stretch import held_by
from pumice.engine.trace import Product, Step
from pumice.lower.call import (
    ARRAYS_READ,
    BoundCall,
    MapCall,
    call_over,
    call_signature,
    find_arrays_read,
    find_template,
    product_signature,
)
from pumice.lower.dataflow import CONV
from pumice.lower.epilogue import NO_EPILOGUE
from pumice.lower.maps import BoundMap, MapArrays, NoMap, bound_map, no_map
from pumice.lower.norm import NormKernels, Statistics
from pumice.nn.conv import Convolution
from pumice.ops.conv import (
    AUTOCAST_DTYPES,
    autocast_dtype,
    compilation,
    differentiable_call,
    plan_for_other_tiles,
    plan_gradient_for_other_tiles,
)
from pumice.ops.linear import HALF, LINEAR, compilations_of_passes
from pumice.runtime.cache import intern_key

NONE = -1
ALIGNED = 128
"""Alignment of offsets in shared buffers, in elements."""
TENSORS = 7
"""Tensors per product: weight, bias of the layer; mean, variance, num_batches_tracked, weight, bias of the norm."""
WEIGHT, BIAS, MEAN, VARIANCE, TRACKED, SCALE, SHIFT = range(TENSORS)


@dataclass(frozen=True, eq=False)
class WiredStep:
    """A product or a concatenation of `parts`; operands as value numbers, NONE if absent."""

    step: Step
    x: int
    y: int
    residual: int
    target: int
    parts: tuple[int, ...] = ()

    @property
    def reads(self) -> list[int]:
        """The values whose features the step reads."""
        return [n for n in (self.x, self.residual, *self.parts) if n != NONE]


@dataclass(frozen=True)
class Wants:
    """Which gradients are needed: of the result (flows), x, the residual, the layer's weight and bias, the norm's
    scale and shift."""

    flows: bool
    x: bool
    residual: bool
    weight: bool
    bias: bool
    scale: bool
    shift: bool


@dataclass(frozen=True, eq=False)
class Joined:
    """A concatenation. columns: by part, (value, first column, channels); keeps: the backward pass reads the result."""

    wired: WiredStep
    channels: int
    columns: tuple[tuple[int, int, int], ...]
    keeps: bool


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution or linear map, with the norm, residual sum and activation that follow.

    number: index among the products. shape: (C_out, kernel offsets, C_in). norm: its kernels, or None; by_batch:
    uses batch statistics; counts: increments num_batches_tracked before the norm, for a cumulative mean.

    relu: fused into the norm kernel. apart: activation run by torch, or ""; smooth: its gradient needs its input, which
    is stored separately. narrow: the weight is cast to the features' dtype. inner: the product's own gradient is
    needed. keeps: the result is saved for backward. steps: non-contiguous row strides that the result's gradient may
    have (slices of a concatenation). weights, vectors: element offsets of its weight and vectors in buffers shared by
    all layers. by_torch: a linear map run by torch, which selects a kernel per row count. key: cache key of its kernels
    on a map. forward, gradients: signatures of the forward call and of the (feature, weight) gradients. known: see
    is_known.
    """

    wired: WiredStep
    number: int
    relation: Relation | None
    shape: tuple[int, int, int]
    channels: int
    dtype: torch.dtype
    wants: Wants
    norm: NormKernels | None
    by_batch: bool
    counts: bool
    eps: float
    relu: bool
    apart: str
    smooth: bool
    narrow: bool
    inner: bool
    keeps: bool
    steps: tuple[int, ...]
    weights: int
    vectors: int
    by_torch: bool
    key: Hashable
    forward: Hashable
    gradients: tuple[Hashable, Hashable]
    known: set[Hashable] = field(default_factory=set)

    def wanted(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Dtypes of the feature and weight (float32) gradients, None if not needed."""
        return self.dtype if self.wants.x else None, torch.float32 if self.wants.weight else None

    def map_of(self, rows: int) -> NoMap | None:
        """Placeholder map of a linear map; None if torch runs it."""
        return None if self.by_torch else no_map(rows)

    def gradient(self, found: KernelMap | NoMap, number: int) -> BoundCall | None:
        """The kernel of the feature (0) or weight (1) gradient; None without a template."""
        on = find_arrays_read(self.gradients[number], MapArrays.of(found))
        return None if on is None else self._gradient_call(found, number, on).instantiate()

    def _gradient_call(self, found: KernelMap | NoMap, number: int, on: BoundMap) -> MapCall:
        """The gradient of the features (0) or the weight (1) over the arrays of a map that it reads."""
        outputs, _, channels = self.shape
        inputs = found.num_inputs
        rows = inputs, outputs, found.num_outputs
        shape = self.shape if self.relation is not None else (outputs, channels)
        return MapCall(self.gradients[number], on, rows, shape if number else (inputs, channels))

    def is_known(self, found: KernelMap | NoMap) -> bool:
        """True if all kernels for this kind of map have templates or cannot have one."""
        kind = self.kind_of(found)
        if kind in self.known:
            return True
        if find_template(self.forward, bound_map(found)) is None:
            return False
        known = all([dtype is None or self._knows(found, number) for number, dtype in enumerate(self.wanted())])
        if known:
            self.known.add(kind)
        return known

    def kind_of(self, found: KernelMap | NoMap) -> Hashable:
        """Equivalence key of a map: equal keys share the same kernels."""
        return bound_map(found).signature, MapArrays.of(found).kind

    def _knows(self, found: KernelMap | NoMap, number: int) -> bool:
        signature, arrays = self.gradients[number], MapArrays.of(found)
        on = find_arrays_read(signature, arrays)
        # A multi-kernel call has no template.
        return (signature, arrays.key) in ARRAYS_READ if on is None else find_template(signature, on) is not None

    def compilations(self, like: Tensor, found: KernelMap | NoMap) -> list[Callable[[], object]]:
        """Cache templates of both passes' kernels over a map. Returns tasks that compile those without a template and,
        if padded, those not compiled for the map's own sizes. like: features of any shape."""
        if isinstance(found, NoMap):
            return [*compilations_of_passes(like.new_empty((self.shape[0], self.shape[2])), self.wanted())]
        outputs, _, channels = self.shape
        x, weight = like.new_empty((found.num_inputs, channels)), like.new_empty(self.shape)
        grad = like.new_empty((found.num_outputs, outputs))
        tasks = [] if found.buffered is None else self._known_compilations(found)
        tasks.append(compilation(x, weight, found, None))
        for number, dtype in enumerate(self.wanted()):
            if dtype is not None and not self._knows(found, number):
                call = differentiable_call(x, weight, found, found.num_outputs)
                tasks.append(call.compilation((x, weight, grad), (number, dtype)))
        return [task for task in tasks if task is not None]

    def plan_for_other_tiles(self, like: Tensor, found: KernelMap) -> list[Callable[[], object]]:
        """Plan kernels for maps with the other tile height. Returns callables that start compiling."""
        x, weight = like.new_empty((1, self.shape[2])), like.new_empty(self.shape)
        begin = [plan_for_other_tiles(x, weight, found, None)]
        for number, dtype in enumerate(self.wanted()):
            if dtype is not None:
                begin.append(plan_gradient_for_other_tiles(weight, found, (number, dtype)))
        return [one for one in begin if one is not None]

    def _known_compilations(self, found: KernelMap) -> list[Callable[[], object] | None]:
        """Tasks to compile the kernels that have a template."""
        outputs = self.shape[0]
        rows = found.num_inputs, outputs
        known = [MapCall(self.forward, bound_map(found), rows, (found.num_outputs, outputs))]
        for number, dtype in enumerate(self.wanted()):
            on = None if dtype is None else find_arrays_read(self.gradients[number], MapArrays.of(found))
            if on is not None:
                known.append(self._gradient_call(found, number, on))
        return [c.template.compilation(c.on, c.rows, c.shape) for c in known if c.template is not None]

    def calls(self, found: KernelMap | NoMap) -> MapCalls:
        """The kernels over a map, cached with the map once all are known."""
        calls = MapCalls(self, found)
        return found.keep(self.key, calls) if calls.known and not isinstance(found, NoMap) else calls


class MapCalls:
    """The kernels of a convolution over a map, or of a linear map. result: forward kernel, None if not a known single
    kernel; whole: it writes the complete result in the features' dtype. known: Layer.is_known."""

    __slots__ = ("_gradients", "_layer", "known", "result", "whole")

    def __init__(self, layer: Layer, found: KernelMap | NoMap) -> None:
        self._layer = layer
        outputs = layer.shape[0]
        rows = found.num_inputs, outputs
        self._gradients: tuple[BoundCall | None, BoundCall | None] | None = None
        self.result: BoundCall | None = call_over(found, layer.forward, rows, outputs)
        self.known: bool = layer.is_known(found)
        self.whole: bool = self.result is not None and self.result.executor.writes_result_dtype is layer.dtype

    def gradients(self, found: KernelMap | NoMap) -> tuple[BoundCall | None, BoundCall | None] | None:
        """(weight, feature) gradient kernels, each None if not needed; None while one of them is not compiled. Looked
        up lazily in backward, while the GPU is still busy with the forward pass."""
        if self._gradients is None:
            layer = self._layer
            weight = layer.gradient(found, 1) if layer.wants.weight else None
            features = layer.gradient(found, 0) if layer.wants.x else None
            if (weight is None and layer.wants.weight) or (features is None and layer.wants.x):
                return None
            if weight is not None and weight.executor.writes is not torch.float32:
                return None
            self._gradients = weight, features
        return self._gradients


@dataclass(frozen=True, eq=False)
class TrainPlan:
    """The plan of a stretch for one set of tensor guards. layers: the Layers among its steps.

    trained: positions, among the tensors of all products, that need gradients. outputs: values read outside; needs:
    values that need gradients. weights, vectors: elements of the buffers for all weights and vectors;
    widest: maximum channels of a step.
    """

    steps: tuple[Layer | Joined, ...]
    layers: tuple[Layer, ...]
    dtype: torch.dtype
    trained: tuple[int, ...]
    outputs: tuple[int, ...]
    needs: frozenset[int]
    weights: int
    vectors: int
    widest: int


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class Planner:
    """Plans wired steps. outputs: (values read outside, the subset that results depend on); feats: input features;
    tensors: TENSORS of each product."""

    def __init__(
        self,
        wired: Sequence[WiredStep],
        outputs: tuple[Sequence[int], Collection[int]],
        feats: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
    ) -> None:
        self._wired, self._feats = wired, feats
        self._outputs, self._live = tuple(outputs[0]), outputs[1]
        self._own = {
            one.y: tensors[TENSORS * n : TENSORS * (n + 1)]
            for n, one in enumerate(each for each in wired if not each.parts)
        }
        self._channels = {n: x.shape[1] for n, x in enumerate(feats) if x.ndim == 2}
        self._like = feats[0]
        self._count = self._weights = self._vectors = 0

    def plan(self) -> TrainPlan | None:
        """Plan the steps; None if kernels do not support them."""
        if not self._fits():
            return None
        needs = self._needs()
        steps = tuple(self._joined(one, needs) if one.parts else self._layer(one, needs) for one in self._wired)
        layers, trained = tuple(one for one in steps if isinstance(one, Layer)), []
        for n, layer in enumerate(layers):
            wants = layer.wants
            of = ((WEIGHT, wants.weight), (BIAS, wants.bias), (SCALE, wants.scale), (SHIFT, wants.shift))
            trained += [TENSORS * n + slot for slot, needed in of if needed]
        sizes = self._weights, self._vectors, max(one.channels for one in steps)
        return TrainPlan(steps, layers, self._like.dtype, tuple(trained), self._outputs, frozenset(needs), *sizes)

    def _fits(self) -> bool:
        """True if kernels support the steps; fills _channels."""
        like, known = self._like, self._channels
        cast = autocast_dtype(like)
        if (
            like.dtype not in AUTOCAST_DTYPES
            or len(known) < len(self._feats)
            or (cast is not None and cast is not like.dtype)
        ):
            return False
        if any(x.dtype is not like.dtype or x.device != like.device for x in self._feats):
            return False
        for one in self._wired:
            if one.parts:
                known[one.y] = sum(known[part] for part in one.parts)
                continue
            weight = self._own[one.y][WEIGHT]
            if weight is None or not self._fits_product(one):
                return False
            known[one.y] = weight.shape[0]
            if one.residual != NONE and known[one.residual] != known[one.y]:
                return False
        return True

    def _fits_product(self, one: WiredStep) -> bool:
        step, (weight, *vectors) = one.step, self._own[one.y]
        assert isinstance(step, Product) and weight is not None
        layer, like = step.layer, self._like
        axes = 2
        if isinstance(layer, Convolution):
            axes = 3 if layer.relation.custom is not None else layer.relation.dim + 2
        if weight.ndim != axes or weight.shape[-1] != self._channels[one.x] or not weight.numel():
            return False
        # Meta features stand for features on a GPU.
        cast = torch.is_autocast_enabled("cuda" if like.is_meta else like.device.type)
        if weight.dtype is not like.dtype and not (cast and weight.dtype in AUTOCAST_DTYPES):
            return False
        bias, _, _, tracked, *_ = vectors
        if bias is not None and not cast and bias.dtype is not like.dtype:
            return False
        there = [t for t in vectors if t is not None and t is not tracked]
        if any(t.shape != weight.shape[:1] or t.dtype not in AUTOCAST_DTYPES for t in there):
            return False
        if (vectors[1] is None) != (vectors[2] is None):
            return False
        every = [t for t in (weight, *vectors) if t is not None]
        return all(t.device == like.device and t.is_contiguous() for t in every)

    def _needs(self) -> set[int]:
        """Values that need gradients: they depend on a tensor that requires one, and a live output on them."""
        if not torch.is_grad_enabled():
            return set()
        depend = {n for n, x in enumerate(self._feats) if x.requires_grad}
        for one in self._wired:
            own = any(t is not None and t.requires_grad for t in self._own.get(one.y, ()))
            if own or not depend.isdisjoint(one.reads):
                depend.add(one.y)
        read = {*self._live}
        for one in reversed(self._wired):
            if one.y in read:
                read.update(one.reads)
        return depend & read

    def _joined(self, one: WiredStep, needs: set[int]) -> Joined:
        columns, begin = [], 0
        for part in one.parts:
            columns.append((part, begin, self._channels[part]))
            begin += self._channels[part]
        return Joined(one, begin, tuple(columns), self._is_multiplied(one.y, needs))

    def _is_multiplied(self, value: int, needs: set[int]) -> bool:
        """True if a weight gradient reads the value."""
        return any(one.x == value and self._wants(one, needs).weight for one in self._wired)

    def _wants(self, one: WiredStep, needs: set[int]) -> Wants:
        flows = one.y in needs
        trained = [flows and t is not None and t.requires_grad for t in self._own[one.y]] if not one.parts else [False]
        if one.parts:
            return Wants(flows, *(False,) * 6)
        own = trained[WEIGHT], trained[BIAS], trained[SCALE], trained[SHIFT]
        return Wants(flows, flows and one.x in needs, flows and one.residual in needs, *own)

    def _layer(self, one: WiredStep, needs: set[int]) -> Layer:
        step, (weight, bias, mean, variance, tracked, scale, shift) = one.step, self._own[one.y]
        assert isinstance(step, Product) and weight is not None
        norm, wants, dtype = step.norm, self._wants(one, needs), self._like.dtype
        shape = weight.shape[0], weight[0].numel() // weight.shape[-1], weight.shape[-1]
        relu = norm is not None and step.activation == "relu"
        apart = "" if relu else step.activation
        by_batch = norm is not None and (norm.training or mean is None)
        statistics = None
        if norm is not None and by_batch:
            running = None if mean is None or variance is None else (mean, variance)
            follows = norm.training and norm.track_running_stats and running is not None
            statistics = Statistics(running, norm.eps, follows, norm.momentum, tracked, bias)
        made = None if norm is None else self._norm(statistics, (scale, shift), (one.residual != NONE, relu), shape[0])
        counts = statistics is not None and statistics.momentum is None and statistics.update_running_stats
        reads_result = (relu and one.residual != NONE) or apart == "relu"
        widths = {sum(self._channels[p] for p in each.parts) for each in self._wired if one.y in each.parts}
        relation = step.layer.relation if isinstance(step.layer, Convolution) else None
        forward, gradients = self._signatures(shape, relation is not None)
        found = Layer(
            wired=one,
            number=self._count,
            relation=relation,
            shape=shape,
            channels=shape[0],
            dtype=dtype,
            wants=wants,
            norm=made,
            by_batch=by_batch,
            counts=counts and tracked is not None,
            eps=0.0 if norm is None else norm.eps,
            relu=relu,
            apart=apart,
            smooth=apart == "silu",
            narrow=weight.dtype is not dtype,
            inner=wants.x or wants.weight or wants.bias,
            keeps=(wants.flows and reads_result) or self._is_multiplied(one.y, needs),
            steps=tuple(sorted(widths)),
            weights=self._weights,
            vectors=self._vectors,
            # Kernels sum weight gradients in no fixed order.
            by_torch=relation is None and (dtype not in HALF or torch.are_deterministic_algorithms_enabled()),
            key=intern_key((forward, gradients, wants.x, wants.weight)),
            forward=forward,
            gradients=gradients,
        )
        self._count += 1
        self._weights += aligned(weight.numel())
        self._vectors += aligned(3 * shape[0])
        return found

    def _norm(
        self,
        statistics: Statistics | None,
        affine: tuple[Tensor | None, Tensor | None],
        behind: tuple[bool, bool],
        channels: int,
    ) -> NormKernels:
        weight, bias = (torch.float32 if t is None else t.dtype for t in affine)
        facts = affine[0] is not None, affine[1] is not None, *behind
        return NormKernels(statistics, facts, self._like.new_empty((0, channels)), (weight, bias))

    def _signatures(self, shape: tuple[int, int, int], conv: bool) -> tuple[Hashable, tuple[Hashable, Hashable]]:
        """Call signatures: forward, (feature gradient, weight gradient)."""
        sizes = (0, shape[2]), shape if conv else (shape[0], shape[2]), (0, shape[0])
        text = CONV if conv else LINEAR
        x, weight, grad = map(self._like.new_empty, sizes)
        everything, dynamic = (x, weight, grad), (True, False, True)
        # Must equal the signatures of DifferentiableCall.
        of_x = call_signature(everything, dynamic, text, (0, x.dtype))
        of_weight = call_signature(everything, dynamic, text, (1, torch.float32))
        return product_signature((x, weight), NO_EPILOGUE), (of_x, of_weight)


def tensors_of(step: Product) -> list[tuple[Any, str]]:
    """(dict, key) of each tensor of a product."""
    layer: Any = step.layer
    norm: Any = step.norm
    held = held_by(layer)
    own = [(held, "weight"), (held, "bias")]
    if norm is None:
        return own + [({}, "")] * (TENSORS - len(own))
    kept = [(norm._buffers, name) for name in ("running_mean", "running_var", "num_batches_tracked")]
    return [*own, *kept, (norm._parameters, "weight"), (norm._parameters, "bias")]
