"""The layers of a group one by one, apart from the network: their kernels compiled at once, and their tiles timed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.engine.groups import Call, Group
from pumice.lower.dataflow import Pass
from pumice.lower.triton import tuning
from pumice.ops import Epilogue, conv_features
from pumice.ops.conv import Flow, joined
from pumice.schedule.dataflow import DGRAD, FORWARD, Dataflow

COMPILERS = 8
"""Kernels that are compiled at once."""


@dataclass(frozen=True, eq=False)
class Alone:
    """A layer over its map, with features and weights that say nothing.

    weight: [C_out, K, C_in / groups] in the dtype that is multiplied. biased: whether there is a bias.
    """

    found: KernelMap
    weight: Tensor
    groups: int
    biased: bool

    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and y."""
        rows = self.found.num_inputs, self.weight.shape[-1] * self.groups
        x, y = self.weight.new_zeros(rows), self.weight.new_zeros(self.found.num_outputs, self.weight.shape[0])
        return x, self.weight, y

    def one_pass(self, name: str, flow: Dataflow) -> None:
        """One pass of it, without autograd. Raises PumiceError where it cannot be done."""
        x, w, y = self.given()
        if name == FORWARD:
            conv_features(x, w, self.found, len(y), self.groups, self._then(), flow)
            return
        w, groups = joined(x, w, self.groups)
        Pass(name, flow, self.found, groups)((y, w) if name == DGRAD else (x, y))

    def run(self, flow: Flow, training: bool) -> None:
        """The layer as a network runs it, with both gradients or with none."""
        x, w, y = self.given()
        if not training:
            with torch.no_grad():
                conv_features(x, w, self.found, len(y), self.groups, self._then(), flow)
            return
        with torch.enable_grad():
            x, w = x.requires_grad_(), w.clone().requires_grad_()
            result = conv_features(x, w, self.found, len(y), self.groups, None, flow)
            torch.autograd.grad(result, (x, w), y)

    def _then(self) -> Epilogue | None:
        return Epilogue(shift=self.weight.new_zeros(self.weight.shape[0])) if self.biased else None


def alone(group: Group, training: bool) -> list[Alone]:
    """The layers of a group, those that are alike once.

    Their maps hold nothing that was laid out before, and what is laid out for them goes with them.
    """
    found: dict[object, Alone] = {}
    copies: dict[int, KernelMap] = {}
    for call in group.calls:
        own = copies.setdefault(call.map_key, replace(call.found, _storages={}))
        over = own if own.flipped == call.found.flipped else own.transpose()
        weight, biased = _weight(call), call.layer.bias is not None and not training
        alike = (call.map_key, over.flipped, weight.shape, weight.dtype, call.layer.groups, biased)
        if alike not in found:
            found[alike] = Alone(over, weight, call.layer.groups, biased)
    return list(found.values())


def _weight(call: Call) -> Tensor:
    """Zeros like a layer's weights, as they are multiplied."""
    own, kind = call.layer.weight, call.geometry.device.type
    cast = torch.is_autocast_enabled(kind) and call.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if cast else own.dtype
    return torch.zeros(own.shape[0], call.found.volume, own.shape[-1], dtype=dtype, device=own.device)


def compile_at_once(layers: Sequence[Alone], passes: Sequence[str], flows: Sequence[Dataflow]) -> None:
    """Have the kernels of these dataflows compiled, several at a time; what cannot be done shows when it is measured.

    Nothing happens on a CPU, where nothing is compiled, and for products of torch's libraries.
    """
    flows = [flow for flow in flows if flow.devices == ("cuda",)]
    if not layers or layers[0].weight.device.type != "cuda":
        return
    device = layers[0].weight.device
    stream = torch.cuda.current_stream(device)

    def one(task: tuple[Dataflow, Alone, str]) -> None:
        flow, layer, name = task
        # Each thread has a device, a stream and modes of its own. What fails here fails again where it is counted.
        with torch.no_grad(), torch.cuda.stream(stream), suppress(Exception):
            layer.one_pass(name, flow)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(one, product(flows, layers, passes)))
    torch.cuda.synchronize(device)


def time_tiles(layer: Alone, flow: Flow, training: bool) -> None:
    """Time the tiles of a layer's kernels that were not timed before; the ledger of tiles keeps the fastest."""
    with tuning():
        layer.run(flow, training)
