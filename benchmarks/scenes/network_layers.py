"""The convolutions of a network with their kernel maps and channels, in order of their calls; and each on its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pumice.coords import KernelMap
from pumice.engine.groups import recording_calls
from pumice.engine.subject import undisturbed
from pumice.lower import reference
from pumice.ops import SparseTensor, conv_features
from pumice.ops.conv import Flow


@dataclass(frozen=True, eq=False)
class Met:
    """A convolution of a network: its name in the network, its kernel map, input and output channels."""

    name: str
    found: KernelMap
    inputs: int
    outputs: int

    @property
    def pairs(self) -> int:
        return len(self.found.pairs().inputs)

    @property
    def flops(self) -> float:
        """FLOP over all pairs, a multiply-add as two."""
        return 2.0 * self.pairs * self.inputs * self.outputs


@dataclass(frozen=True, eq=False)
class Fed:
    """A convolution with operands: features [N_in, C_in], weight [C_out, K, C_in], and the gradient of its result."""

    met: Met
    feats: Tensor
    weight: Tensor
    grad: Tensor

    @staticmethod
    def normal(met: Met, dtype: torch.dtype) -> Fed:
        """With fixed normal random operands, scaled for results of about 1."""
        found, device = met.found, met.found.device
        chance = torch.Generator(device).manual_seed(6)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=chance, device=device)

        feats, grad = drawn(found.num_inputs, met.inputs), drawn(found.num_outputs, met.outputs)
        weight = drawn(met.outputs, found.volume, met.inputs) / math.sqrt(7 * met.inputs)
        return Fed(met, feats.to(dtype), weight.to(dtype), grad.to(dtype))

    @property
    def found(self) -> KernelMap:
        return self.met.found

    def to(self, dtype: torch.dtype) -> Fed:
        return Fed(self.met, self.feats.to(dtype), self.weight.to(dtype), self.grad.to(dtype))

    def forward(self, flow: Flow) -> Tensor:
        return conv_features(self.feats, self.weight, self.found, self.found.num_outputs, dataflow=flow)

    def passes(self, flow: Flow, training: bool) -> list[Tensor]:
        """The result, and in training the gradients of features and weight."""
        if not training:
            with torch.no_grad():
                return [self.forward(flow)]
        given = [x.detach().requires_grad_() for x in (self.feats, self.weight)]
        y = conv_features(given[0], given[1], self.found, self.found.num_outputs, dataflow=flow)
        return [y.detach(), *torch.autograd.grad(y, given, self.grad)]

    def exact(self, training: bool = False) -> list[Tensor]:
        """The same in float64, by the loop over kernel offsets."""
        x, weight, grad = (t.double() for t in (self.feats, self.weight, self.grad))
        y = reference.forward(x, weight, self.found.pairs(), self.found.num_outputs, 1)
        if not training:
            return [y]
        back = self.found.transpose().pairs()
        dx = reference.forward(grad, reference.transposed(weight, 1), back, self.found.num_inputs, 1)
        return [y, dx, reference.weight_gradient(x, grad, self.found.pairs(), 1)]


def layers_of(net: nn.Module, x: SparseTensor) -> list[Met]:
    """The convolutions of a network in the order of their calls on this tensor, except pointwise ones.

    The network runs without its arithmetic, and is left unchanged.
    """
    with undisturbed(net, net.training), recording_calls(net, x, arithmetic=False) as calls, torch.no_grad():
        net(x)
    return [Met(one.name, one.found, one.layer.in_channels, one.layer.out_channels) for one in calls]
