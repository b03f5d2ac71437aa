"""spconv as a peer: a submanifold layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.harness.study import Way
from pumice.cli.info import distribution

Result = TypeVar("Result")
_NAMES = ("spconv", "spconv-cu126", "spconv-cu124", "spconv-cu121", "spconv-cu120", "spconv-cu118")


def package() -> str:
    """The installed distribution of spconv; "spconv" if there is none."""
    return next((name for name in _NAMES if distribution(name)), "spconv")


def slack(device: torch.device) -> float:
    """Factor on the tolerance of the dtype. On a CPU spconv's threads race and lose sums; a real mistake would give an
    error near 1."""
    return 2000 if device.type == "cpu" else 2


def train_without_cuda() -> None:
    """Let spconv's backward pass run without CUDA: it asks for a CUDA stream that it does not use on a CPU."""
    if not torch.cuda.is_available():
        operators: Any = import_module("spconv.pytorch.ops")
        operators.get_current_stream = lambda: 0


def way(layer: Any, training: bool = False, anew: bool = False, tf32: bool = False) -> Way:
    """spconv's 3x3x3 submanifold layer as a peer, over the operands of `layer`.

    training: the call also returns the gradients of features and weight. anew: every call builds its kernel map.
    """

    def make() -> Callable[[], Any]:
        module, tensor = _module(layer), _tensor_maker(layer)
        with torch.no_grad():
            known = module(tensor(layer.feats)).indice_dict
        module.train(training)

        def run(feats: Tensor) -> Tensor:
            x = tensor(feats)
            if not anew:
                x.indice_dict = known
            return module(x).features

        def both() -> tuple[Tensor, ...]:
            feats = layer.feats.detach().requires_grad_()
            y = run(feats)
            dx, dw = torch.autograd.grad(y, (feats, module.weight), layer.grad)
            return y.detach(), dx, dw.view_as(layer.weight)

        call = both if training else torch.no_grad()(lambda: run(layer.feats))
        return in_tf32(call) if tf32 else call

    name = "spconv tf32" if tf32 else "spconv"
    return Way(name, make, package(), slack=20 if tf32 else slack(layer.feats.device))


def _module(layer: Any) -> Any:
    spconv: Any = import_module("spconv.pytorch")
    inputs, outputs, feats = layer.weight.shape[2], layer.weight.shape[0], layer.feats
    module = spconv.SubMConv3d(inputs, outputs, 3, bias=False, indice_key="map").to(feats.device, feats.dtype)
    with torch.no_grad():
        module.weight.copy_(layer.weight.view_as(module.weight))
    return module


def _tensor_maker(layer: Any) -> Callable[[Tensor], Any]:
    """A function from features to spconv's tensor, whose coordinates are shifted to begin at 0."""
    spconv: Any = import_module("spconv.pytorch")
    least = layer.coords.amin(0)
    least[0] = 0
    coords = (layer.coords - least).int()
    batch, *shape = (coords.amax(0) + 1).tolist()
    return lambda feats: spconv.SparseConvTensor(feats, coords, shape, batch)


def in_tf32(call: Callable[[], Result], tuner: Any = None) -> Callable[[], Result]:
    """The call with float32 multiplied as tf32, by kernels that this tuner, or a new one, tunes for tf32."""
    chosen = tuner or new_tuner()

    def run() -> Result:
        with multiplying(chosen):
            return call()

    return run


def new_tuner() -> Any:
    """A new tuner of kernels; None in a build for CPUs.

    spconv's global tuner caches kernels by dtype and channels only, so it would reuse float32's choice for tf32.
    """
    own = import_module("spconv.pytorch.ops").CONV_CPP
    if own is None:
        return None
    algorithms = import_module("spconv.algo")
    known = map(algorithms.algocore.get_conv_algo_desp_from_param, algorithms.ALL_IMPGEMM_PARAMS)
    return type(own)(list(known))


@contextmanager
def multiplying(tuner: Any) -> Iterator[None]:
    """Let spconv multiply in tf32, with this tuner, within a block."""
    operators: Any = import_module("spconv.pytorch.ops")
    constants: Any = import_module("spconv.constants")
    before = constants.SPCONV_ALLOW_TF32, operators.CONV_CPP
    constants.SPCONV_ALLOW_TF32, operators.CONV_CPP = True, tuner
    try:
        yield
    finally:
        constants.SPCONV_ALLOW_TF32, operators.CONV_CPP = before
