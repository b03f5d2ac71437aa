"""The layers of a group one by one, apart from the network: their kernels compiled at once, and their tiles timed."""

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
from pumice.engine.subject import MODES, TuningSubject, fresh
from pumice.lower.dataflow import Pass
from pumice.lower.kernel import tuning
from pumice.ops import conv_features
from pumice.ops.conv import Flow, merge_small_groups
from pumice.schedule.dataflow import DGRAD, FORWARD, PASSES, PLANNED, Dataflow

COMPILERS = 8
"""Kernels that are compiled at once."""


@dataclass(frozen=True, eq=False)
class IsolatedLayer:
    """A layer over its map, with random features.

    weight: [C_out, K, C_in / groups], random, in the dtype that is multiplied. then: what follows in its kernel, a bias
    among it.
    """

    found: KernelMap
    weight: Tensor
    groups: int
    then: EpilogueSpec | None

    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and y."""
        inner, outer = self.weight.shape[-1] * self.groups, self.weight.shape[0]
        x = _random(self.weight.new_empty(self.found.num_inputs, inner))
        return x, self.weight, _random(self.weight.new_empty(self.found.num_outputs, outer))

    def one_pass(self, name: str, flow: Dataflow) -> None:
        """One pass of it, without autograd. Raises PumiceError where it cannot be done."""
        x, w, y = self.given()
        if name == FORWARD:
            conv_features(x, w, self.found, len(y), self.groups, self.then and self.then.like(y), flow)
            return
        w, groups = merge_small_groups(x, w, self.groups)
        Pass(name, flow, self.found, groups)((y, w) if name == DGRAD else (x, y))

    def run(self, flow: Flow, training: bool) -> None:
        """The layer as a network runs it, with both gradients or with none."""
        x, w, y = self.given()
        if not training:
            with torch.no_grad():
                conv_features(x, w, self.found, len(y), self.groups, self.then and self.then.like(y), flow)
            return
        with torch.enable_grad():
            x, w = x.requires_grad_(), w.clone().requires_grad_()
            result = conv_features(x, w, self.found, len(y), self.groups, None, flow)
            torch.autograd.grad(result, (x, w), y)


def isolated_layer(calls: Sequence[LayerCall], training: bool) -> list[IsolatedLayer]:
    """The layers of these calls, those that are alike once.

    Their maps hold nothing that was laid out before, and what is laid out for them goes with them.
    """
    found: dict[object, IsolatedLayer] = {}
    copies: dict[int, KernelMap] = {}
    for call in calls:
        own = copies.setdefault(call.map_key, replace(call.found, _storages={}))
        over = own if own.flipped == call.found.flipped else own.transpose()
        weight, then = _weight(call), None if training else _then(call)
        alike = (call.map_key, over.flipped, weight.shape, weight.dtype, call.layer.groups, then)
        if alike not in found:
            found[alike] = IsolatedLayer(over, weight, call.layer.groups, then)
    return list(found.values())


def _weight(call: LayerCall) -> Tensor:
    """Like a layer's weights, as they are multiplied."""
    own = call.layer.weight
    shape = own.shape[0], call.found.volume, own.shape[-1]
    return _random(torch.empty(shape, dtype=call.multiplied, device=own.device))


def _then(call: LayerCall) -> EpilogueSpec | None:
    """What follows a layer in its kernel: of the tensors that there are with its bias, and their dtypes."""
    if call.layer.bias is None:
        return call.then
    y = torch.empty(0, call.layer.out_channels, dtype=call.multiplied)
    return EpilogueSpec.of((call.then or EpilogueSpec()).like(y).with_bias(y.new_zeros(y.shape[1])))


def _random(x: Tensor) -> Tensor:
    # Multipliers that are fed zeros draw less power, and run faster than they will.
    return x.normal_() if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) else x.zero_()


def compile_at_once(
    layers: Sequence[IsolatedLayer],
    passes: Sequence[str],
    flows: Sequence[Dataflow],
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Have the kernels of these dataflows compiled, several at a time; what cannot be done shows when it is measured.

    Nothing happens on a CPU, where nothing is compiled, and for products of torch's libraries. enough: asked before
    each kernel, whether none is begun any more.
    """
    flows = [flow for flow in flows if flow == PLANNED or flow.devices == ("cuda",)]
    if not layers or layers[0].weight.device.type != "cuda":
        return
    device = layers[0].weight.device
    stream = torch.cuda.current_stream(device)

    def one(task: tuple[Dataflow, IsolatedLayer, str]) -> None:
        flow, layer, name = task
        if enough():
            return
        # Each thread has a device, a stream and modes of its own. What fails here fails again where it is counted.
        with torch.no_grad(), torch.cuda.stream(stream), suppress(Exception):
            layer.one_pass(name, flow)

    pool = ThreadPoolExecutor(COMPILERS)
    try:
        list(pool.map(one, product(flows, layers, passes)))
    finally:
        # Who interrupts does not wait for what has not begun.
        pool.shutdown(cancel_futures=True)
    torch.cuda.synchronize(device)


def compile_first(tuned_model: TuningSubject) -> None:
    """Have the kernels compiled that a network starts as it is, several at a time: its first pass would take them one
    by one.

    Its layers are found by a pass without their arithmetic. Where that is not possible, or on a CPU, nothing happens.
    """
    if tuned_model.device.type != "cuda":
        return
    with suppress(Exception):
        with recording_calls(tuned_model.model, arithmetic=False) as calls:
            MODES["inference"](tuned_model, fresh(tuned_model.scenes[0]))
        compile_at_once(
            isolated_layer(calls, tuned_model.training), PASSES if tuned_model.training else PASSES[:1], [PLANNED]
        )


def time_tiles(layer: IsolatedLayer, flow: Flow, training: bool) -> None:
    """Time the tiles of a layer's kernels that were not timed before; the ledger of tiles keeps the fastest."""
    with tuning():
        layer.run(flow, training)
