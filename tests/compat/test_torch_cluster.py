"""pumice.compat.torch_cluster against all pairs."""

import pytest
import torch

from pumice.compat import torch_cluster as tc
from pumice.errors import OptionError

torch.manual_seed(0)
X, Y = (torch.randn(40, 3) * 2).round(), (torch.randn(15, 3) * 2).round()
BX, BY = torch.arange(40) // 20, torch.arange(15) // 8


def squared(x: torch.Tensor, y: torch.Tensor, bx: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """[y, x], inf between items."""
    apart = (x[None] - y[:, None]).square().sum(-1)
    return apart.masked_fill(bx[None] != by[:, None], torch.inf)


def test_knn():
    order = squared(X, Y, BX, BY).sort(dim=1, stable=True).indices[:, :3]
    wanted = torch.stack([torch.arange(15).repeat_interleave(3), order.flatten()])
    assert torch.equal(tc.knn(X, Y, 3, BX, BY), wanted)
    assert torch.equal(tc.nearest(Y, X, BY, BX), order[:, 0])
    # Fewer than k: those that are there.
    assert tc.knn(X[:2], Y[:1], 5).shape == (2, 2)
    assert tc.knn(X[:0], Y, 5).shape == tc.radius(X, Y[:0], 5.0).shape == (2, 0)


def test_knn_by_angle():
    x, y = torch.randn(30, 3), torch.randn(4, 3)
    near = torch.nn.functional.cosine_similarity(x[None], y[:, None], dim=-1).argmax(1)
    assert torch.equal(tc.knn(x, y, 1, cosine=True)[1], near)


def test_radius():
    near = squared(X, Y, BX, BY) < 6.25
    assert torch.equal(tc.radius(X, Y, 2.5, BX, BY, max_num_neighbors=40), near.nonzero().T)
    few = tc.radius(X, Y, 2.5, BX, BY, max_num_neighbors=2)
    assert torch.equal(few, (near & (near.cumsum(1) <= 2)).nonzero().T)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_graphs(flow: str):
    apart, at = squared(X, X, BX, BX), 1 if flow == "source_to_target" else 0
    edges = tc.radius_graph(X, 2.5, BX, max_num_neighbors=40, flow=flow)
    wanted = ((apart < 6.25) & ~torch.eye(40, dtype=torch.bool)).nonzero().T
    assert torch.equal(edges, wanted.flip(0) if at else wanted)
    assert tc.radius_graph(X, 2.5, BX, True, 40).shape[1] == 40 + wanted.shape[1]
    few = tc.radius_graph(X, 2.5, BX, max_num_neighbors=2, flow=flow)
    assert (few[0] != few[1]).all() and torch.bincount(few[at]).max() == 2
    x = torch.randn(40, 3)
    edges = tc.knn_graph(x, 2, BX, flow=flow)
    order = squared(x, x, BX, BX).argsort(1)[:, 1:3]
    assert torch.equal(edges[at], torch.arange(40).repeat_interleave(2))
    assert torch.equal(edges[1 - at], order.flatten())
    with pytest.raises(OptionError):
        tc.knn_graph(x, 2, flow="both")


def test_fps():
    found = tc.fps(X, BX, ratio=0.3, random_start=False)
    assert BX[found].tolist() == [0] * 6 + [1] * 6 and found[0] == 0 and found[6] == 20
    assert torch.equal(tc.fps(X, ptr=[0, 20, 40], ratio=0.3, random_start=False), found)
    assert len(tc.fps(X)) == 20 and len(tc.fps(X, BX, torch.tensor([0.1, 0.5]))) == 12
    assert len({int(tc.fps(X, BX, 0.05)[0]) for _ in range(30)}) > 3


def test_grid_cluster():
    pos = torch.tensor([[0.0, 0], [11, 9], [2, 8], [2, 2], [8, 3]])
    # The example of the library's documentation.
    assert tc.grid_cluster(pos, torch.tensor([5.0, 5])).tolist() == [0, 5, 3, 0, 1]


def test_what_is_not_there_is_told():
    with pytest.raises(OptionError, match="install torch_cluster"):
        tc.MODULES["torch_cluster"]["random_walk"]()
