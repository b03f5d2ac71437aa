"""Norms with what stands behind them, in both passes, without autograd."""

from __future__ import annotations

from torch import Tensor

from pumice.coords import CoordBuffer
from pumice.lower import norm


def both_passes(
    x: Tensor, rows: CoordBuffer, wanted: norm.Norm, grad: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]]:
    """The result, and the gradients of x, weight, bias and residual."""
    y, state = norm.normed(x, rows, wanted)
    kept = x, y if state.reads_result else None
    return y, norm.gradients(grad, kept, rows, state, (True, True, True, wanted.residual is not None))
