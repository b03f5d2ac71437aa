"""The layers that are timed: 3x3x3 submanifold convolutions over ready maps. A cell is a scene and a width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.study import Setup
from benchmarks.scenes.clouds import Voxels, layer_scenes
from pumice.coords import KernelMap, Relation, kernel_map
from pumice.lower import reference
from pumice.lower.dataflow import CONV
from pumice.ops import SparseTensor, conv_features
from pumice.ops.autograd import einsum

CHANNELS = (32, 64, 128, 256)
WINDOW = Relation.of(3, 3)


@dataclass(frozen=True)
class Width:
    """Input channels, output channels and groups; as text 64, 3-32 or 64g2."""

    inputs: int
    outputs: int
    groups: int = 1

    @staticmethod
    def square(channels: int) -> Width:
        return Width(channels, channels)

    def __str__(self) -> str:
        sides = f"{self.inputs}" if self.inputs == self.outputs else f"{self.inputs}-{self.outputs}"
        return f"{sides}g{self.groups}" if self.groups > 1 else sides


@dataclass(frozen=True)
class Choice:
    """The cells of a study, and the names of their cases: before/scene/k3/C64/after.

    scenes: all if empty. widths: replace channels if given. Quick runs have their own scenes and channels, but use
    widths.
    """

    before: str = ""
    after: str = ""
    scenes: tuple[str, ...] = ()
    channels: tuple[int, ...] = CHANNELS
    widths: tuple[Width, ...] = ()

    def case(self, scene: str, width: Width) -> str:
        return "/".join(part for part in (self.before, scene, "k3", f"C{width}", self.after) if part)


@dataclass(frozen=True, eq=False)
class Cell:
    """A scene with its kernel map, and a width."""

    case: str
    scene: str
    width: Width
    found: KernelMap
    voxels: Voxels

    @property
    def channels(self) -> int:
        """The input channels."""
        return self.width.inputs


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution with its kernel map and operands. weight: [C_out, 27, C_in / groups]."""

    found: KernelMap
    feats: Tensor
    weight: Tensor
    coords: Tensor

    @property
    def rows(self) -> int:
        return len(self.coords)

    @property
    def groups(self) -> int:
        return self.feats.shape[1] // self.weight.shape[2]


@dataclass(frozen=True, eq=False)
class Trained(Layer):
    """A layer with the gradient of its result."""

    grad: Tensor


@dataclass(frozen=True)
class Pass:
    """A pass of a layer to be timed. exact: its float64 reference."""

    name: str
    run: Callable[[Trained], Any]
    exact: Callable[[Trained], Tensor | tuple[Tensor, ...]]


def cells(setup: Setup, choice: Choice) -> Iterator[Cell]:
    """The wanted cells; each scene's map is built once and reported."""
    for scene, load in layer_scenes(setup):
        if choice.scenes and not setup.quick and scene not in choice.scenes:
            continue
        widths = choice.widths or tuple(map(Width.square, (8, 16) if setup.quick else choice.channels))
        cases = {width: choice.case(scene, width) for width in widths}
        wanted = {width: case for width, case in cases.items() if setup.wants(case)}
        if not wanted:
            continue
        voxels = load()
        found = map_of(voxels.coords)
        setup.say(f"{scene}: {found}")
        for width, case in wanted.items():
            yield Cell(case, scene, width, found, voxels)


def map_of(coords: Tensor) -> KernelMap:
    """The submanifold kernel map of coordinates int32 [N, 4]."""
    found, _ = kernel_map(SparseTensor(torch.zeros(len(coords), 1, device=coords.device), coords).geometry, WINDOW)
    return found


def layer_of(setup: Setup, cell: Cell, dtype: torch.dtype | None = None) -> Trained:
    """The cell's layer with normal random operands, by default in the dtype setup.half."""
    return layer_on(setup, cell.found, cell.voxels.coords, cell.width, dtype)


def layer_on(setup: Setup, found: KernelMap, coords: Tensor, width: Width, dtype: torch.dtype | None = None) -> Trained:
    """A layer over a map, with normal random features, weights and gradient of the result."""
    rows, dtype, each = len(coords), dtype or setup.half, width.inputs // width.groups
    feats = setup.filled(rows, width.inputs, dtype=dtype, seed=6)
    grad = setup.filled(rows, width.outputs, dtype=dtype, seed=8)
    weight = setup.filled(width.outputs, 27, each, seed=7) / math.sqrt(7 * each)
    return Trained(found, feats, weight.to(dtype), coords, grad)


def exact(layer: Layer) -> Tensor:
    """The result in float64."""
    x, weight = layer.feats.double(), layer.weight.double()
    return reference.forward(x, weight, layer.found.pairs(), layer.rows, layer.groups)


def forward(layer: Layer) -> Tensor:
    """The result, without gradients."""
    with torch.no_grad():
        return conv_features(layer.feats, layer.weight, layer.found, layer.rows, layer.groups)


def statement(
    layer: Layer, arrays: tuple[Sequence[str], Sequence[Tensor]], text: str = CONV, lowering: str = ""
) -> Callable[[], Tensor]:
    """The layer in inference as an einsum statement over index arrays. arrays: names in the statement, tensors."""
    names, held = "|".join(("x", "w", *arrays[0])), arrays[1]
    operands, shape = [layer.feats, layer.weight, *held], (layer.rows, layer.weight.shape[0])
    return torch.no_grad()(lambda: einsum(operands, names, text, shape, lowering))


def both(layer: Trained) -> tuple[Tensor, ...]:
    """The result, and the gradients of features and weights."""
    given = [x.detach().requires_grad_() for x in (layer.feats, layer.weight)]
    y = conv_features(given[0], given[1], layer.found, layer.rows, layer.groups)
    return y.detach(), *torch.autograd.grad(y, given, layer.grad)


def exact_both(layer: Trained) -> tuple[Tensor, ...]:
    """`both` in float64, by the loop over kernel offsets."""
    x, weight, grad = (t.double() for t in (layer.feats, layer.weight, layer.grad))
    back = layer.found.transpose().pairs()
    dx = reference.forward(grad, reference.transposed(weight, layer.groups), back, layer.rows, layer.groups)
    return exact(layer), dx, reference.weight_gradient(x, grad, layer.found.pairs(), layer.groups)


FORWARD = Pass("fwd", forward, exact)
TRAINING = Pass("fwd+bwd", both, exact_both)
