"""FlexGEMM as a peer: a submanifold layer by one of its algorithms.

It is installed from source (JeffreyXiang/FlexGEMM at 6dd94a8, five commits after 1.1.0: its pyproject.toml still says
1.0.0), so that its name has the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.study import Way

PACKAGE, VERSION = "flex_gemm", "1.1.0-5-g6dd94a8"
DEFAULT = "masked_implicit_gemm_splitk"
"""Its default algorithm."""


def way(layer: Any, training: bool = False, anew: bool = False, algorithm: str = DEFAULT) -> Way:
    """FlexGEMM's 3x3x3 submanifold layer, over the operands of `layer`.

    training: the call also returns the gradients of features and weight. anew: every call builds its neighbour map.
    algorithm: a value of flex_gemm.ops.spconv.Algorithm.
    """

    def make() -> Callable[[], Any]:
        module: Any = import_module("flex_gemm.ops.spconv")
        coords, shape = _in_box(layer)
        weight = layer.weight.view(len(layer.weight), 3, 3, 3, -1)
        # Its backward pass reads bias.requires_grad.
        bias = weight.new_zeros(len(weight)) if training else None

        def cache() -> Any:
            module.set_algorithm(algorithm)
            return module.SubMConv3dFunction._compute_neighbor_cache(coords, shape, (3, 3, 3), (1, 1, 1), training)

        known = cache()

        def run(feats: Tensor, weight: Tensor) -> Tensor:
            module.set_algorithm(algorithm)
            found = cache() if anew else known
            return module.sparse_submanifold_conv3d(feats, coords, shape, weight, bias, found)[0]

        def both() -> tuple[Tensor, ...]:
            given = layer.feats.detach().requires_grad_(), weight.detach().requires_grad_()
            y = run(*given)
            dx, dw = torch.autograd.grad(y, given, layer.grad)
            return y.detach(), dx, dw.view_as(layer.weight)

        return both if training else torch.no_grad()(lambda: run(layer.feats, weight))

    return Way(f"FlexGEMM {algorithm} ({VERSION})", make, PACKAGE, slack=2)


def _in_box(layer: Any) -> tuple[Tensor, torch.Size]:
    """(coordinates that begin at 0, shape [batch, C, extents])."""
    least = layer.coords.amin(0)
    least[0] = 0
    coords = (layer.coords - least).int().contiguous()
    batch, *extents = (coords.amax(0) + 1).tolist()
    return coords, torch.Size((batch, layer.feats.shape[1], *extents))
