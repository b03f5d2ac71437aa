"""A second oracle, for whole networks: torch's dense convolutions in float64, masked to the active sites.

It imports nothing of the library: what it shares with a network under test is the state_dict and the layouts of
weights, [C_out, *kernel, C_in]. A grid is a dense tensor [B, C, X, Y, Z] that is zero off its mask [B, 1, X, Y, Z].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

State = dict[str, Tensor]


@dataclass(frozen=True)
class Grid:
    """Values [B, C, X, Y, Z] and the mask [B, 1, X, Y, Z] (1.0 at active sites)."""

    values: Tensor
    mask: Tensor

    def at(self, coords: Tensor, origin: Sequence[int]) -> Tensor:
        """[N, C] at the sites `coords` - `origin`; all of them active, and all active ones among them."""
        where = (coords.long() - torch.tensor([0, *origin])).unbind(1)
        assert self.mask[where[0], 0, where[1], where[2], where[3]].all(), "a site that the oracle does not have"
        assert int(self.mask.sum()) == len(coords), f"{int(self.mask.sum())} active sites, expected {len(coords)}"
        return self.values[where[0], :, where[1], where[2], where[3]]


def scatter(coords: Tensor, feats: Tensor, batches: int, shape: Sequence[int], origin: Sequence[int]) -> Grid:
    """Rows [N, C] at coords int [N, 4] put into a grid whose corner is `origin`."""
    where = (coords.long() - torch.tensor([0, *origin])).unbind(1)
    values = feats.new_zeros(batches, *shape, feats.shape[1]).index_put(where, feats)
    mask = feats.new_zeros(batches, *shape, 1).index_put(where, feats.new_ones(len(feats), 1))
    return Grid(values.movedim(-1, 1), mask.movedim(-1, 1))


def same(x: Grid, weight: Tensor, bias: Tensor | None = None) -> Grid:
    """Submanifold convolution, odd kernel: the dense one, on the sites of x."""
    kernel = weight.shape[1:-1]
    y = functional.conv3d(x.values, weight.movedim(-1, 1), bias, padding=[k // 2 for k in kernel])
    return Grid(y * x.mask, x.mask)


def strided(x: Grid, weight: Tensor, stride: Sequence[int], padding: Sequence[int] = (0, 0, 0)) -> Grid:
    """Strided convolution on the support: wherever the dense window meets an active site."""
    window = torch.ones(1, 1, *weight.shape[1:-1], dtype=x.mask.dtype)
    mask = (functional.conv3d(x.mask, window, stride=stride, padding=padding) > 0).to(x.mask.dtype)
    y = functional.conv3d(x.values, weight.movedim(-1, 1), stride=tuple(stride), padding=tuple(padding))
    return Grid(y * mask, mask)


def back(x: Grid, weight: Tensor, stride: int, target: Grid) -> Grid:
    """Transposed convolution, kernel = stride, on the sites of `target`."""
    y = functional.conv_transpose3d(x.values, weight.permute(4, 0, 1, 2, 3), stride=stride)
    return Grid(y * target.mask, target.mask)


def norm(x: Grid, state: State, name: str, training: bool, eps: float = 1e-5) -> Grid:
    """Batch normalisation over the active sites, written out."""
    if training:
        count = x.mask.sum()
        mean = x.values.sum((0, 2, 3, 4)) / count
        spread = (x.values - mean[:, None, None, None]) * x.mask
        var = spread.pow(2).sum((0, 2, 3, 4)) / count
    else:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    scale = state[f"{name}.weight"] / torch.sqrt(var + eps)
    y = (x.values - mean[:, None, None, None]) * scale[:, None, None, None]
    return Grid((y + state[f"{name}.bias"][:, None, None, None]) * x.mask, x.mask)


def relu(x: Grid) -> Grid:
    """max(x, 0)."""
    return Grid(x.values.clamp(min=0), x.mask)


def residual(x: Grid, state: State, name: str, training: bool, eps: float = 1e-5) -> Grid:
    """Two convolutions and norms, plus the input (through a pointwise map and a norm where there is one)."""
    y = same(x, state[f"{name}.body.0.weight"], state.get(f"{name}.body.0.bias"))
    y = relu(norm(y, state, f"{name}.body.1", training, eps))
    y = same(y, state[f"{name}.body.3.weight"], state.get(f"{name}.body.3.bias"))
    y = norm(y, state, f"{name}.body.4", training, eps)
    if f"{name}.shortcut.0.weight" in state:
        pointwise = state[f"{name}.shortcut.0.weight"][:, None, None, None]
        x = norm(same(x, pointwise), state, f"{name}.shortcut.1", training, eps)
    return relu(Grid(x.values + y.values, x.mask))


def join(x: Grid, y: Grid) -> Grid:
    """Channels of x, then those of y."""
    return Grid(torch.cat([x.values, y.values], dim=1), x.mask)
