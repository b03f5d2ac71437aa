"""Layers of a group in isolation, to compile their kernels in parallel and to time their tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.engine.groups import EpilogueSpec, LayerCall, recording_calls
from pumice.engine.subject import TuningSubject, fresh
from pumice.lower.dataflow import Pass
from pumice.lower.kernel import tuning
from pumice.ops import conv_features
from pumice.ops.conv import Flow, merge_small_groups
from pumice.schedule.dataflow import DGRAD, FORWARD, PASSES, PLANNED, Dataflow

COMPILERS = 8  # Number of compiler threads


@dataclass(frozen=True, eq=False)
class IsolatedLayer:
    """A layer over its kernel map, with random features. weight: [C_out, K, C_in / groups], random, in the dtype of the
    multiplication. epilogue: fused, bias included."""

    found: KernelMap
    weight: Tensor
    groups: int
    epilogue: EpilogueSpec | None

    def random_operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Operands x, w and y."""
        inner, outer = self.weight.shape[-1] * self.groups, self.weight.shape[0]
        x = _random(self.weight.new_empty(self.found.num_inputs, inner))
        return x, self.weight, _random(self.weight.new_empty(self.found.num_outputs, outer))

    def run_pass(self, name: str, flow: Dataflow) -> None:
        """Run one pass without autograd. Raises PumiceError if it is unsupported."""
        x, w, y = self.random_operands()
        if name == FORWARD:
            conv_features(x, w, self.found, len(y), self.groups, self.epilogue and self.epilogue.like(y), flow)
            return
        w, groups = merge_small_groups(x, w, self.groups)
        Pass(name, flow, self.found, groups)((y, w) if name == DGRAD else (x, y))

    def run(self, flow: Flow, training: bool) -> None:
        """Run the layer as in a network, with both gradients if `training`."""
        x, w, y = self.random_operands()
        if not training:
            with torch.no_grad():
                conv_features(x, w, self.found, len(y), self.groups, self.epilogue and self.epilogue.like(y), flow)
            return
        with torch.enable_grad():
            x, w = x.requires_grad_(), w.clone().requires_grad_()
            result = conv_features(x, w, self.found, len(y), self.groups, None, flow)
            torch.autograd.grad(result, (x, w), y)


def isolated_layer(calls: Sequence[LayerCall], training: bool) -> list[IsolatedLayer]:
    """The distinct layers of these calls. Their maps are copies without cached layouts, so that layouts built for them
    are freed with them."""
    found: dict[object, IsolatedLayer] = {}
    copies: dict[int, KernelMap] = {}
    for call in calls:
        own = copies.setdefault(call.map_key, replace(call.found, _storages={}))
        over = own if own.flipped == call.found.flipped else own.transpose()
        weight, then = _weight(call), None if training else _epilogue_of(call)
        alike = (call.map_key, over.flipped, weight.shape, weight.dtype, call.layer.groups, then)
        if alike not in found:
            found[alike] = IsolatedLayer(over, weight, call.layer.groups, then)
    return list(found.values())


def _weight(call: LayerCall) -> Tensor:
    """Random weights of the layer's shape, in the dtype of the multiplication."""
    own = call.layer.weight
    shape = own.shape[0], call.found.volume, own.shape[-1]
    return _random(torch.empty(shape, dtype=call.compute_dtype, device=own.device))


def _epilogue_of(call: LayerCall) -> EpilogueSpec | None:
    """Fused epilogue of a layer, bias included."""
    if call.layer.bias is None:
        return call.epilogue
    y = torch.empty(0, call.layer.out_channels, dtype=call.compute_dtype)
    return EpilogueSpec.of((call.epilogue or EpilogueSpec()).like(y).with_bias(y.new_zeros(y.shape[1])))


def _random(x: Tensor) -> Tensor:
    # Zeros draw less power, which would make timings too short.
    return x.normal_() if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) else x.zero_()


def compile_in_parallel(
    layers: Sequence[IsolatedLayer],
    passes: Sequence[str],
    flows: Sequence[Dataflow],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Compile the kernels of these dataflows in parallel; errors are ignored, since they recur when measured. No-op on
    a CPU, and for dataflows of library products. stop: called before each kernel; True stops."""
    flows = [flow for flow in flows if flow == PLANNED or flow.devices == ("cuda",)]
    if not layers or layers[0].weight.device.type != "cuda":
        return
    device = layers[0].weight.device
    stream = torch.cuda.current_stream(device)

    def one(task: tuple[Dataflow, IsolatedLayer, str]) -> None:
        flow, layer, name = task
        if stop():
            return
        # Streams and modes are thread-local. An error here recurs when the layer is measured.
        with torch.no_grad(), torch.cuda.stream(stream), suppress(Exception):
            layer.run_pass(name, flow)

    pool = ThreadPoolExecutor(COMPILERS)
    try:
        list(pool.map(one, product(flows, layers, passes)))
    finally:
        # After an interrupt, do not wait for pending tasks.
        pool.shutdown(cancel_futures=True)
    torch.cuda.synchronize(device)


def compile_first(tuned_model: TuningSubject) -> None:
    """Compile the kernels of a network as it is in parallel; its first pass would compile them one by one. Its layers
    are found by a pass without arithmetic. No-op on a CPU, or if that pass fails."""
    if tuned_model.device.type != "cuda":
        return
    with suppress(Exception):
        x = fresh(tuned_model.scenes[0])
        with torch.no_grad(), recording_calls(tuned_model.model, x, arithmetic=False) as calls:
            tuned_model.model(x)
        compile_in_parallel(
            isolated_layer(calls, tuned_model.training), PASSES if tuned_model.training else PASSES[:1], [PLANNED]
        )


def time_tiles(layer: IsolatedLayer, flow: Flow, training: bool) -> None:
    """Time the tiles of a layer's kernels that were not timed before; the tile cache keeps the fastest."""
    with tuning():
        layer.run(flow, training)
