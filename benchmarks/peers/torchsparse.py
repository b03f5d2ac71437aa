"""torchsparse 2.1 (TorchSparse++) as a peer: a submanifold layer by its implicit GEMM over sorted rows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.study import Way

PACKAGE = "torchsparse"
NAME = "torchsparse 2.1"


def way(layer: Any, training: bool = False, anew: bool = False) -> Way:
    """torchsparse's 3x3x3 submanifold layer, over the operands of `layer`.

    training: the call also returns the gradients of features and weight. anew: every call builds its kernel map.
    Its settings are those of FlexGEMM's benchmark: mode 1 (one split forward, three backward), a hash table of four
    slots per voxel.
    """

    def make() -> Callable[[], Any]:
        library: Any = import_module("torchsparse")
        module = _module(layer).train(training)
        coords, spatial = _in_box(layer)

        def tensor(feats: Tensor) -> Any:
            return library.SparseTensor(feats, coords, spatial_range=spatial)

        with torch.no_grad():
            x = tensor(layer.feats)
            module(x)
            known = x._caches

        def run(feats: Tensor) -> Tensor:
            x = tensor(feats)
            if not anew:
                x._caches = known
            return module(x).feats

        def both() -> tuple[Tensor, ...]:
            feats = layer.feats.detach().requires_grad_()
            y = run(feats)
            dx, dw = torch.autograd.grad(y, (feats, module.kernel), layer.grad)
            return y.detach(), dx, _of_ours(dw, layer.weight)

        return both if training else torch.no_grad()(lambda: run(layer.feats))

    # Its kernels accumulate halves in half precision.
    return Way(NAME, make, PACKAGE, slack=20)


def _module(layer: Any) -> Any:
    library: Any = import_module("torchsparse")
    functional: Any = import_module("torchsparse.nn.functional")
    library.backends.hash_rsv_ratio = 4
    functional.set_kmap_mode("hashmap_on_the_fly")
    functional.set_conv_mode(functional.ConvMode.mode1)
    nn: Any = import_module("torchsparse.nn")
    inputs, outputs = layer.weight.shape[2], layer.weight.shape[0]
    module = nn.Conv3d(inputs, outputs, 3, bias=False).to(layer.feats.device, layer.feats.dtype)
    with torch.no_grad():
        # Its kernel offsets run along the first axis fastest.
        window = layer.weight.view(outputs, 3, 3, 3, inputs)
        module.kernel.copy_(window.permute(3, 2, 1, 4, 0).reshape(module.kernel.shape))
    return module


def _of_ours(kernel: Tensor, like: Tensor) -> Tensor:
    """A kernel [27, C_in, C_out] of torchsparse in the layout of our weight [C_out, 27, C_in]."""
    outputs, _, inputs = like.shape
    return kernel.view(3, 3, 3, inputs, outputs).permute(4, 2, 1, 0, 3).reshape(like.shape)


def _in_box(layer: Any) -> tuple[Tensor, tuple[int, ...]]:
    """(coordinates that begin at 0, extents with the batch size first)."""
    least = layer.coords.amin(0)
    least[0] = 0
    coords = (layer.coords - least).int().contiguous()
    return coords, tuple((coords.amax(0) + 1).tolist())
