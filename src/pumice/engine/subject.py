"""Passes of a network on sample scenes without side effects on the network, for timing and tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pumice.coords import Geometry
from pumice.engine.program import Program, compile  # noqa: A004
from pumice.errors import DeviceError, DtypeError, OptionError
from pumice.nn.conv import Convolution, convolutions
from pumice.ops import SparseTensor

Loss = Callable[[Any], Tensor]
Scene = SparseTensor | tuple[Tensor, Tensor]
"""SparseTensor, or coordinates int32 [N, 1+D] and features [N, C]."""


@dataclass(frozen=True, eq=False)
class TuningSubject:
    """Validated network and scenes. mode: key of MODES. loss: function of the network's result."""

    model: nn.Module
    scenes: tuple[SparseTensor, ...]
    mode: str
    loss: Loss

    @cached_property
    def program(self) -> Program:
        """The compiled network, which runs in inference."""
        return compile(self.model)

    @property
    def training(self) -> bool:
        return self.mode == "training"

    @property
    def device(self) -> torch.device:
        return self.scenes[0].device

    def calls(self) -> list[Callable[[], object]]:
        """A function per scene that runs a pass on a geometry without kernel maps."""
        return [lambda x=x: MODES[self.mode](self, fresh(x)) for x in self.scenes]


def subject(model: nn.Module, samples: Sequence[Scene], mode: str, loss: Loss | None = None) -> TuningSubject:
    """TuningSubject of the arguments, validated.

    Raises OptionError (unknown mode, no samples, a model without convolutions of pumice.nn or wrapped by
    torch.compile), DtypeError (wrong type of model or sample), DeviceError (samples and model on different devices).
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    OptionError.check("mode", mode, MODES)
    if isinstance(samples, SparseTensor | Tensor) or not isinstance(samples, Sequence):
        raise DtypeError(f"samples must be a list of SparseTensors, found {type(samples).__name__}")
    if not samples:
        raise OptionError("samples has no scene, expected at least one")
    model = bare(model)
    layers = convolutions(model)
    if not layers:
        hint = "a network over graphs takes samples of its arguments, [(x, graph)]"
        raise OptionError(f"{type(model).__name__} has no convolution of pumice.nn; {hint}")
    scenes = tuple(_scene(sample, number) for number, sample in enumerate(samples))
    _check_devices(layers, scenes)
    if mode == "training" and not any(p.requires_grad for p in model.parameters()):
        raise OptionError("mode 'training' needs parameters that require gradients, found none")
    return TuningSubject(model, scenes, mode, loss or sum_of_squares_loss)


def bare(model: nn.Module) -> nn.Module:
    """Unwrap DataParallel and DistributedDataParallel; raises OptionError for a compiled module."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return model.module
    if hasattr(model, "_orig_mod"):
        raise OptionError("named dataflows do not run under torch.compile: tune takes the model that was compiled")
    return model


def _scene(sample: Any, number: int) -> SparseTensor:
    if isinstance(sample, tuple | list) and len(sample) == 2 and all(isinstance(part, Tensor) for part in sample):
        coords, feats = sample
        sample = SparseTensor(feats, coords)
    if not isinstance(sample, SparseTensor):
        raise DtypeError(
            f"a sample must be a SparseTensor or a pair (coords, feats), found {type(sample).__name__} at {number}"
        )
    sample.geometry.settle()
    return sample


def _check_devices(layers: Sequence[Convolution], scenes: Sequence[SparseTensor]) -> None:
    homes = sorted({str(layer.weight.device) for layer in layers})
    if len(homes) > 1:
        raise DeviceError(f"the model must be on one device, found convolutions on {' and '.join(homes)}")
    for number, scene in enumerate(scenes):
        if str(scene.device) != homes[0]:
            raise DeviceError(f"the model is on {homes[0]}, sample {number} on {scene.device}")


def fresh(x: SparseTensor) -> SparseTensor:
    """Copy of x on a new geometry without kernel maps."""
    feats = x.feats.detach().requires_grad_(x.requires_grad)
    return SparseTensor(feats, Geometry(x.coords, x.geometry.site, x.geometry.inverse))


@contextmanager
def undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode; restore modes, buffers and torch's random state on exit."""
    home = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng([home] if home.type == "cuda" else []), _restored(model):
        if not training:
            model.eval()
        elif not model.training:
            # A model already in training mode may have frozen layers: keep them.
            model.train()
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore modes and buffers on exit."""
    flags = {module: module.training for module in model.modules()}
    buffers = [(module._buffers, name, held) for module in model.modules() for name, held in module._buffers.items()]
    values = [None if held is None else held.detach().clone() for _, _, held in buffers]
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        with torch.no_grad():
            for (own, name, held), value in zip(buffers, values, strict=True):
                own[name] = held if value is None or held is None else held.copy_(value)


def sum_of_squares_loss(found: Any) -> Tensor:
    """Sum over all floating-point tensors of a network's result of their mean square. Raises OptionError if none
    depends on parameters."""
    parts = [x.float().square().mean() for x in _tensors(found) if x.requires_grad and x.is_floating_point()]
    if not parts:
        kind = type(found).__name__
        raise OptionError(f"the model returns {kind} without a tensor that has gradients; give a loss=")
    return torch.stack(parts).sum()


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, SparseTensor):
        yield found.feats
    elif isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from _tensors(list(found.values()))
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _tensors(part)


def _infer(tuned_model: TuningSubject, x: SparseTensor) -> object:
    with torch.no_grad():
        return tuned_model.program(x)


def _train(tuned_model: TuningSubject, x: SparseTensor) -> object:
    wanted = [p for p in tuned_model.model.parameters() if p.requires_grad]
    with torch.enable_grad():
        loss = tuned_model.loss(tuned_model.model(x))
        # autograd.grad leaves the parameters' `grad` unchanged.
        return torch.autograd.grad(loss, wanted + ([x.feats] if x.requires_grad else []), allow_unused=True)


MODES: Mapping[str, Callable[[TuningSubject, SparseTensor], object]] = MappingProxyType(
    {"inference": _infer, "training": _train}
)
"""Functions that run a pass, by mode."""
