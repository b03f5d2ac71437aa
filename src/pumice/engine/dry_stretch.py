"""Dry runs of fused stretches: their own plans of memory, without kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from pumice.coords import KernelMap
from pumice.engine.dry_run import Meter
from pumice.engine.groups import map_stats
from pumice.engine.stretch import Env, Stretch, StretchRun, is_one_kernel
from pumice.engine.trace import Product
from pumice.engine.train_layers import Joined, Layer, TrainPlan
from pumice.engine.train_pass import Backward, Layout, Memory, Started
from pumice.engine.train_stretch import TrainStretch
from pumice.lower import kernel as kernels
from pumice.lower import maps
from pumice.lower import parts as weight_parts
from pumice.lower.dataflow import Pass, planned_tile
from pumice.lower.maps import NoMap
from pumice.nn.conv import Convolution
from pumice.ops.tensor import raw_feats, unchecked_tensor
from pumice.schedule.dataflow import DGRAD, FORWARD, PLANNED, WGRAD
from pumice.schedule.predict import LayerWork, MapStats, Work, norm_seconds, seconds_on_gpu
from pumice.schedule.tile import WHOLE_SEGMENTS, Tile

_FORWARD_SHARE = 0.4  # of the time of a norm in training
_SHARED = "shared buffers"
"""Step to which the buffers of a stretch are ascribed."""


def infer(stretch: Stretch, env: Env, meter: Meter, dtype: torch.dtype | None) -> None:
    """Allocate what an inference stretch does, and put the values of its outputs into env. dtype: of autocast."""
    meter.step = _SHARED
    own = _narrowed(stretch.features, env, dtype)
    if dtype is not None:
        # Narrow copies of weights stay for later calls.
        meter.keep(sum(step.layer.weight.numel() * dtype.itemsize for step in stretch.products))
    parts = _parts(meter) if dtype is None else 0
    stored = [step.layer.weight for step in stretch.products if parts and _is_in_parts(step)]
    # And so do weights in parts, which every call fills.
    size = sum(w.numel() for w in stored) * (parts * weight_parts.DTYPES[parts].itemsize if parts else 0)
    meter.keep(size)
    meter.work(Work(memory=size + sum(w.nbytes for w in stored)))
    going = StretchRun(stretch, own, [None] * len(stretch.wired), ())
    found = going.find_maps()
    going.allocate([one for one in stretch.wired if one.starts is not None])
    for step, over, one in zip(stretch.products, found, stretch.wired, strict=True):
        meter.step = step.names[0]
        place, rows = stretch.places[step.node], going.rows(one.y)
        meter.spent.rows, meter.spent.channels = rows, place.channels
        meter.spent.allocated += rows * place.channels * going.like.element_size()
        own = parts if _is_in_parts(step) else 0
        _multiply(meter, step, over, (rows, going.like.element_size()), (FORWARD,), own)
    for node in stretch.outputs:
        env[node] = going.value(node)


def _parts(meter: Meter) -> int:
    """The number of parts in which weights of float32 products are stored."""
    return weight_parts.number_of_parts(kernels.float32_precision()) if meter.machine.on_gpu else 0


def _is_in_parts(step: Product) -> bool:
    return is_one_kernel(step.layer) and weight_parts.fits_parts(step.layer.weight)


def _narrowed(nodes: Sequence[Node], env: Env, dtype: torch.dtype | None) -> Env:
    """The values of env; of these nodes cast to dtype, if any."""
    cast = {n: raw_feats(env[n]).to(dtype) for n in nodes} if dtype is not None else {}
    return {**env, **{n: unchecked_tensor(x, env[n].geometry) for n, x in cast.items()}}


def _multiply(
    meter: Meter,
    step: Product,
    found: KernelMap | NoMap | None,
    size: tuple[int, int],
    passes: Sequence[str],
    parts: int = 0,
) -> None:
    """Add the time of passes of a convolution or linear map. size: rows of the result, bytes per value; parts: in which
    its weight is stored, or 0."""
    layer, (rows, itemsize) = step.layer, size
    outer, inner = layer.weight.shape[0], layer.weight.shape[-1]
    if not isinstance(layer, Convolution) or not isinstance(found, KernelMap):
        moved = itemsize * (rows * (inner + outer) + inner * outer)
        meter.work(Work(2 * rows * inner * outer * len(passes), moved * len(passes), 0, 0, itemsize < 4))
        return
    maps.planner_operands(found, torch.is_grad_enabled() or FORWARD not in passes)
    side = _stats(found)
    turned = _stats(found.transpose()) if DGRAD in passes else side
    work = LayerWork(side, turned, (inner * layer.groups, outer), layer.groups, itemsize, parts)
    meter.spent.pairs = side.pairs
    for name in passes:
        tile = _tile(Pass(name, PLANNED, found, layer.groups), work)
        meter.time(seconds_on_gpu(PLANNED, work, name, meter.machine.rates, tile))
        if name != WGRAD:
            meter.shared(*_shared(side if name == FORWARD else turned, tile, inner if name == DGRAD else outer))


_FORMS = {FORWARD: "compacted", DGRAD: "compacted_t", WGRAD: "grouped"}
_DTYPES = {2: torch.float16, 4: torch.float32}


def _tile(one: Pass, work: LayerWork) -> Tile:
    """The tile of a pass of a layer."""
    (inner, outer), found, dtype = work.channels, one.found, _DTYPES[work.itemsize]
    # These tensors are none of the network's.
    with _disable_current_modes():
        x = torch.empty(found.num_inputs, inner, dtype=dtype, device="meta")
        y = x.new_empty(found.num_outputs, outer)
        stored = weight_parts.DTYPES.get(work.parts, dtype)
        weight = x.new_empty(outer, found.volume, inner // one.groups, dtype=stored)
        given = {FORWARD: (x, weight), DGRAD: (y, weight), WGRAD: (x, y)}
        return planned_tile(one, maps.preferred_form(found, _FORMS[one.name]), given[one.name])


def _shared(side: MapStats, tile: Tile, columns: int) -> tuple[int, int]:
    """(counters, bytes) of the workspace of a kernel whose programs share tiles of a map (Tile.stream_k_chunk)."""
    piece = tile.stream_k_chunk
    if not piece:
        return 0, 0
    width = tile.rows if tile.swapped else tile.columns
    tiles = -(-side.outputs // side.block) + sum(side.parts("compacted")) // piece
    programs = tiles * -(-columns // width)
    return programs, 0 if piece == WHOLE_SEGMENTS else programs * tile.rows * tile.columns * torch.float32.itemsize


def _stats(found: KernelMap) -> MapStats:
    """Statistics of a map with the entries of its default tiles."""
    name = maps.preferred_form(found, "compacted")
    stats = map_stats(found, (name,))
    return replace(stats, entries={"compacted": stats.entries[name]})


# Training


def train(stretch: TrainStretch, env: Env, meter: Meter, dtype: torch.dtype | None) -> bool:
    """Run a training stretch: an autograd node that keeps and allocates what the real one does. dtype: of autocast.
    False: kernels do not support its tensors, the modules run instead."""
    feats = [raw_feats(env[node]) for node in stretch.features]
    feats = [x if dtype is None else x.to(dtype) for x in feats]
    begun = stretch.begin_dry(env, feats)
    if begun is None:
        return False
    trained = [begun.tensors[place] for place in begun.plan.trained]
    outs = _DryStretch.apply(begun, meter, len(feats), *feats, *trained)
    for node, y in zip(stretch.outputs, outs, strict=True):
        env[node] = unchecked_tensor(y, begun.calls[stretch.number_of(node) - len(feats)].outputs)
    return True


class _DryStretch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Started, meter: Meter, count: int, *given: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, calls, _, _ = begun
        feats, layout = given[:count], Layout.of(plan, calls)
        meter.step = _SHARED
        memory = _allocated(plan, begun, layout, feats[0])
        for step, call in zip(plan.steps, calls, strict=True):
            _forward(meter, step, call)
        ctx.begun, ctx.meter, ctx.layout, ctx.count, ctx.outs = begun, meter, layout, count, list(memory.outs)
        kept = {step.wired.y for step in plan.steps if step.keeps}
        read = [out if y in kept else None for y, out in memory.outs.items()]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*feats, memory.kept, memory.pairs, memory.narrow, *read)
        return tuple(memory.outs.values())  # pyright: ignore[reportReturnType]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, begun = ctx.saved_tensors, ctx.begun
        feats, (kept, pairs, narrow, *outs) = saved[: ctx.count], saved[ctx.count :]
        memory = Memory(kept, None, pairs, narrow, None, dict(zip(ctx.outs, outs, strict=True)))
        given = {y: g for y, g in zip(ctx.outs, grads, strict=True) if g is not None and y in begun.plan.needs}
        return None, None, None, *_DryBackward(begun, ctx.layout, feats, memory, ctx.meter).run(given)


def _allocated(plan: TrainPlan, begun: Started, layout: Layout, like: Tensor) -> Memory:
    """The buffers of a forward pass."""
    outs: Mapping[int, Tensor] = {
        step.wired.y: like.new_empty((call.rows, step.channels))
        for step, call in zip(plan.steps, begun.calls, strict=True)
        if step.wired.y in plan.outputs
    }
    narrow = like.new_empty(plan.weights) if any(one.narrow for one in plan.layers) else None
    pairs = like.new_empty(plan.vectors, dtype=torch.float32)
    return Memory(like.new_empty(layout.kept), like.new_empty(layout.spare), pairs, narrow, None, outs)


def _forward(meter: Meter, step: Layer | Joined, call: Any) -> None:
    """Add the time of a step's forward pass."""
    size = call.rows * step.channels
    meter.step = step.wired.step.names[0]
    meter.spent.rows, meter.spent.channels = call.rows, step.channels
    if isinstance(step, Joined):
        return
    itemsize, product = step.dtype.itemsize, step.wired.step
    assert isinstance(product, Product)
    meter.spent.allocated += size * itemsize * (1 + (step.norm is not None) + step.smooth)
    _multiply(meter, product, call.found, (call.rows, itemsize), (FORWARD,))
    if step.norm is not None:
        meter.shared(1, 0)
        meter.time(_FORWARD_SHARE * norm_seconds(size * itemsize, meter.machine.rates))


class _DryBackward(Backward):
    """A backward pass that allocates gradients, and computes none."""

    def __init__(self, begun: Started, layout: Layout, feats: Sequence[Tensor], memory: Memory, meter: Meter) -> None:
        super().__init__(begun, layout, feats, memory)
        self.meter = meter

    def _through_norm(self, n: int, layer: Layer, grad: Tensor) -> Tensor | None:
        self.meter.step = layer.wired.step.names[0]
        adds = layer.wired.residual >= 0 and layer.relu
        size = self.calls[n].rows * layer.channels * layer.dtype.itemsize
        self.meter.time((1 - _FORWARD_SHARE) * norm_seconds(size, self.meter.machine.rates))
        return self.like.new_empty((self.calls[n].rows, layer.channels)) if adds else None

    def _bias(self, n: int, layer: Layer) -> Tensor:
        return self.like.new_empty(layer.channels, dtype=torch.float32)

    def _product(self, n: int, layer: Layer, dh: Tensor, calls: Any) -> None:
        step, call = layer.wired.step, self.calls[n]
        assert isinstance(step, Product)
        self.meter.step = step.names[0]
        passes = [name for name, wanted in ((DGRAD, layer.wants.x), (WGRAD, layer.wants.weight)) if wanted]
        _multiply(self.meter, step, call.found, (call.rows, layer.dtype.itemsize), passes)
        if layer.wants.x:
            self._add(layer.wired.x, self.like.new_empty((call.inputs, layer.shape[2])))
