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
    """The distribution that is installed, or the plain one's name."""
    return next((name for name in _NAMES if distribution(name)), "spconv")


def slack(device: torch.device) -> float:
    """How many times the error of the dtype is good enough: on a CPU its threads add to one output at once and lose
    sums; another mistake would be an error near 1."""
    return 2000 if device.type == "cpu" else 2


def train_without_cuda() -> None:
    """Let spconv's backward run on a CPU where torch has no CUDA: it asks for a stream that it then does not use."""
    if not torch.cuda.is_available():
        operators: Any = import_module("spconv.pytorch.ops")
        operators.get_current_stream = lambda: 0


def way(layer: Any, training: bool = False, anew: bool = False, tf32: bool = False) -> Way:
    """spconv's 3x3x3 layer as a peer of a layer of ours, with its operands.

    training: the result with the gradients of features and weights. anew: each call finds its kernel map.
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
    """What makes spconv's tensor of features; its coordinates begin at 0."""
    spconv: Any = import_module("spconv.pytorch")
    least = layer.coords.amin(0)
    least[0] = 0
    coords = (layer.coords - least).int()
    batch, *shape = (coords.amax(0) + 1).tolist()
    return lambda feats: spconv.SparseConvTensor(feats, coords, shape, batch)


def in_tf32(call: Callable[[], Result], tuner: Any = None) -> Callable[[], Result]:
    """The call with float32 multiplied as tf32, by kernels that were tuned for it: by this tuner, or by a new one."""
    chosen = tuner or new_tuner()

    def run() -> Result:
        with _multiplying(chosen):
            return call()

    return run


def new_tuner() -> Any:
    """A new tuner of kernels; None in a build for CPUs.

    spconv's own remembers a kernel by dtype and channels: what it chose for float32 it would take for tf32, too.
    """
    own = import_module("spconv.pytorch.ops").CONV_CPP
    if own is None:
        return None
    algorithms = import_module("spconv.algo")
    known = map(algorithms.algocore.get_conv_algo_desp_from_param, algorithms.ALL_IMPGEMM_PARAMS)
    return type(own)(list(known))


@contextmanager
def _multiplying(tuner: Any) -> Iterator[None]:
    """Within it spconv multiplies as tf32 where it can, by this tuner."""
    operators: Any = import_module("spconv.pytorch.ops")
    constants: Any = import_module("spconv.constants")
    before = constants.SPCONV_ALLOW_TF32, operators.CONV_CPP
    constants.SPCONV_ALLOW_TF32, operators.CONV_CPP = True, tuner
    try:
        yield
    finally:
        constants.SPCONV_ALLOW_TF32, operators.CONV_CPP = before
