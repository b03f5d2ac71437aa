"""Common parts of studies of whole networks: a network with its scans, run with different dataflows of its layers.

A pass builds every kernel map, as for a new scan. Before a way is timed, each layer is compared with float64 by the
tolerance of the dtype, and the whole network with torch's products in float32 (float64 if the dtype is float32): its
error may reach the tolerance or FAIR times the untuned network's, since deep networks and their gradients accumulate
roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.study import Setup, error
from benchmarks.scenes.network_layers import Fed, Met, layers_of
from benchmarks.scenes.workloads import Sample, fresh
from benchmarks.suites.tuner_cases import TRAINING, Subjected
from pumice.engine.groups import recording_calls
from pumice.engine.measure import compile_in_parallel, isolated_layer
from pumice.engine.subject import undisturbed
from pumice.lower.kernel import DEFAULT, LEDGER, use_tuning_mode
from pumice.nn.conv import Convolution, convolutions
from pumice.ops.conv import Flow
from pumice.schedule.dataflow import PASSES, PLANNED, Dataflow, chosen

FAIR = 3.0
LIBRARY = "explicit-gemm"
"""A dataflow without any of our kernels."""


@dataclass(frozen=True)
class Ran:
    """A way of running a network: the dataflow of each convolution. tiles: LEDGER uses tuned tiles where they exist."""

    flows: tuple[Flow, ...]
    tiles: str = DEFAULT

    def with_tuned_tiles(self) -> Ran:
        return replace(self, tiles=LEDGER)


@dataclass(frozen=True, eq=False)
class Network:
    """A subject's network and samples on the device. Training uses normal random gradients of the results."""

    subject: Subjected
    net: nn.Module
    samples: Sequence[Sample]

    @staticmethod
    def of(setup: Setup, subject: Subjected) -> Network:
        return Network(subject, subject.net(setup), scans_of(setup, subject))

    @property
    def training(self) -> bool:
        return self.subject.mode == TRAINING

    @property
    def names(self) -> list[str]:
        """Names of the convolutions."""
        return [name for name, layer in self.net.named_modules() if isinstance(layer, Convolution)]

    def all_in(self, flow: Flow) -> Ran:
        """All layers in one dataflow; None: the planner's choice."""
        return Ran((flow,) * len(self.names))

    def each_in(self, flows: Mapping[str, Flow]) -> Ran:
        """Layers by name; the planner's choice for the others."""
        return Ran(tuple(flows.get(name) for name in self.names))

    def run(self, ran: Ran) -> list[Tensor]:
        """Run each sample and build its maps: the results, and in training the gradients of all parameters."""
        with self.having(ran), self.subject.multiplying():
            each = [self._trained(one) if self.training else self._inferred(one) for one in self.samples]
        return [x for found in each for x in found]

    @contextmanager
    def having(self, ran: Ran) -> Iterator[None]:
        """Within this context the layers have the dataflows and tiles of `ran`."""
        layers = convolutions(self.net)
        before = [layer.dataflow for layer in layers]
        _assign(layers, ran.flows)
        try:
            with use_tuning_mode(ran.tiles):
                yield
        finally:
            _assign(layers, before)

    def autocast(self) -> AbstractContextManager[object]:
        """The context of training passes: autocast for half precision."""
        device = self.samples[0].coords.device.type
        half = self.subject.dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(device, self.subject.dtype) if half and self.training else nullcontext()

    def exact(self) -> list[Tensor]:
        """The results of `run` by torch's products in a wider dtype."""
        wide = torch.float64 if self.subject.dtype == torch.float32 else torch.float32
        net = self.subject.workload.model().to(self.samples[0].coords.device)
        net.load_state_dict(self.net.state_dict())
        net = net.train(self.net.training).to(wide)
        samples = [replace(one, feats=one.feats.to(wide)) for one in self.samples]
        other = Network(replace(self.subject, dtype=wide, tf32=False), net, samples)
        return other.run(other.all_in(LIBRARY))

    def _inferred(self, sample: Sample) -> list[Tensor]:
        with torch.no_grad():
            return [self.net(fresh(sample)).feats]

    def _trained(self, sample: Sample) -> list[Tensor]:
        with self.autocast():
            y = self.net(fresh(sample)).feats
        chance = torch.Generator(y.device).manual_seed(9)
        grad = torch.randn(y.shape, generator=chance, device=y.device).to(y.dtype)
        grads = torch.autograd.grad(y, list(self.net.parameters()), grad)
        return [y.detach(), torch.cat([one.flatten() for one in grads])]


def compiled(network: Network, ways: Iterable[Ran]) -> None:
    """Compile, in parallel, the kernels that passes and checks of these ways need."""
    with network.autocast(), network.subject.multiplying(), torch.no_grad():
        x = fresh(network.samples[0])
        with undisturbed(network.net, network.training), recording_calls(network.net, x, arithmetic=False) as calls:
            network.net(x)
        for (name, flow), users in used(network, ways).items():
            layers = isolated_layer([call for call in calls if call.name in users], network.training)
            # Checks run layers without their epilogues.
            bare = {
                (id(one.found.table), one.found.flipped, one.weight.shape): replace(one, epilogue=None)
                for one in layers
            }
            compile_in_parallel(
                [*bare.values(), *(one for one in layers if one.epilogue is not None)], (name,), (flow,)
            )


def used(network: Network, ways: Iterable[Ran]) -> dict[tuple[str, Dataflow], set[str]]:
    """By pass and dataflow, the layers that use it in any of the ways."""
    found: dict[tuple[str, Dataflow], set[str]] = {}
    for ran in ways:
        for layer, asked in zip(network.names, ran.flows, strict=True):
            flows = dict(zip(PASSES, chosen(asked or PLANNED), strict=True))
            for name in PASSES if network.training else PASSES[:1]:
                found.setdefault((name, flows[name]), set()).add(layer)
    return found


def scans_of(setup: Setup, subject: Subjected) -> list[Sample]:
    """A single sample of one scan, or in training of two."""
    return subject.samples(setup, 1, 2 if subject.mode == TRAINING else 1)


def _assign(layers: Sequence[Convolution], flows: Sequence[Flow]) -> None:
    for layer, flow in zip(layers, flows, strict=True):
        layer.dataflow = flow


def checked(setup: Setup, network: Network, ways: Mapping[str, Ran], case: Callable[[str], str]) -> dict[str, Ran]:
    """The ways for which every layer and the whole network are right; others are recorded as failures."""
    compiled(network, ways.values())
    truths, layers = network.exact(), Layers(network)
    least = error(network.run(network.all_in(None)), truths)
    bound = max(network.subject.tolerance, FAIR * least)
    setup.say(f"  {network.subject.name}: relative error untuned {least:.1e}, bound {bound:.1e}")
    found = {}
    for name, ran in ways.items():
        wrong = layers.wrong(ran)
        distance = error(network.run(ran), truths)
        if wrong:
            setup.failed(f"{case(name)}: {wrong}; not timed")
        elif not distance < bound:
            setup.failed(f"{case(name)}: relative error {distance:.2g}, expected below {bound:.2g}; not timed")
        else:
            found[name] = ran
    return found


class Layers:
    """Checks single layers of a network on normal random features against float64; equal layers are checked once."""

    def __init__(self, network: Network) -> None:
        self.training, self.subject, self.names = network.training, network.subject, network.names
        with network.having(network.all_in(None)):
            self.met = {one.name: one for one in layers_of(network.net, fresh(network.samples[0]))}
        self.errors: dict[Any, float] = {}
        self.truths: dict[Any, tuple[Fed, list[Tensor]]] = {}

    def wrong(self, ran: Ran) -> str:
        """The error of the first wrong layer as text; "" if none is wrong."""
        bound = self.subject.tolerance
        for name, flow in zip(self.names, ran.flows, strict=True):
            distance = self._error(self.met[name], flow, ran.tiles)
            if not distance < bound:
                return f"layer {name} in {flow}: relative error {distance:.2g}, expected below {bound:g}"
        return ""

    def _error(self, met: Met, flow: Flow, tiles: str) -> float:
        alike = id(met.found), met.inputs, met.outputs
        if alike not in self.truths:
            fed = Fed.normal(met, self.subject.dtype)
            self.truths[alike] = fed, fed.exact(self.training)
        if (alike, flow, tiles) not in self.errors:
            fed, truth = self.truths[alike]
            with use_tuning_mode(tiles), self.subject.multiplying():
                self.errors[alike, flow, tiles] = error(fed.passes(flow, self.training), truth)
        return self.errors[alike, flow, tiles]
