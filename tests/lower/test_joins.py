"""Joins of rows: repeated launches have the arguments of the first; the transposed is the gradient's."""

import pytest
import torch

from pumice.lower import joins
from pumice.lower.joins import BoundJoin, Joins
from pumice.runtime import launch


def made(sizes, indexed):
    outputs = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = 9 if indexed else len(outputs)
    inputs = torch.randint(0, rows, (len(outputs),)) if indexed else None
    return Joins.of(inputs, outputs, (rows, len(sizes)), torch.rand(len(outputs)))


@pytest.fixture
def launched(monkeypatch):
    """(programs, arguments) of the kernels launched, which compute nothing."""
    seen = []

    class Bound(launch.BoundKernel):
        def __init__(self, *given):
            super().__init__(*given)
            self._compiled[-1,] = lambda programs, values, device: seen.append((programs, tuple(values)))

    monkeypatch.setattr(launch, "BoundKernel", Bound)
    launcher = launch.KernelLauncher(None)
    monkeypatch.setattr(joins, "kernel", lambda name, room: launcher)
    monkeypatch.setattr(joins, "_SHORT", 4)
    return seen


@pytest.mark.parametrize("sizes", [[3, 1, 0, 9, 70], [1, 2]])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("how", [joins._How("sum"), joins._How("max"), joins._How("sum", adds=True)])
def test_repeated_launches(launched, sizes, indexed, how):
    found = made(sizes, indexed)
    x, y = torch.randn(found.sources, 16), torch.empty(found.count, 16)
    joins._run(x, found, (y, y), how)
    first = launched.copy()
    launched.clear()
    other = torch.randn(found.sources + 1, 16)[:-1], torch.empty(found.count, 16)
    bound = BoundJoin.of(*other, found, how.how, how.adds)
    assert bound is not None and bound(x, y) and not bound(x[:, 1:], y)
    for (programs, values), (others, again) in zip(first, launched, strict=True):
        # Of the arguments only the address of parts may differ.
        apart = {(a, b) for a, b in zip(values, again, strict=True) if a != b}
        assert programs == others and len(apart) <= (found.parts > 0)


@pytest.mark.parametrize("indexed", [False, True])
def test_the_transposed_is_the_gradient(indexed):
    found = made([3, 1, 0, 9], indexed)
    x = torch.randn(found.sources, 5, requires_grad=True)
    y, _ = joins.join_torch(x, found, "sum")
    up = torch.randn(y.shape)
    torch.testing.assert_close(joins.join_torch(up, found.transposed, "sum")[0], torch.autograd.grad(y, x, up)[0])
