"""Repeated calls of statements on the emulated device: past all checks, but never past a change."""

import sys
from pathlib import Path

import pytest
import torch
from emulated import emulated

import pumice as pm
from pumice.errors import CoordinateError, ShapeError

PACKAGE = str(Path(pm.__file__).parent)
GATHERED = "Y[p,n] = X[E[p],c] * W[c,n]"


@pytest.fixture
def device(tmp_path):
    pytest.importorskip("triton")
    with emulated(tmp_path) as gpu:
        yield gpu


def calls_of(function):
    """The functions of the package that a call runs through."""
    names = []

    def turn(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)

    sys.setprofile(turn)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def repeats(function):
    """Whether the call goes straight to the launch."""
    return "_checked_call" not in calls_of(function)


def gathered():
    e, x, w = torch.randint(0, 50, (90,)), torch.randn(50, 16), torch.randn(16, 32)
    return pm.compile_einsum(GATHERED, lowering="triton"), e, x, w


def agrees(f, e, x, w):
    torch.testing.assert_close(f(X=x, W=w, E=e), x[e] @ w, rtol=1e-4, atol=1e-4)


def test_other_tensors_of_the_same_layouts(device):
    f, e, x, w = gathered()
    for _ in range(2):
        agrees(f, e, x, w)
    other = torch.randn(50, 16)
    agrees(f, e, other, w)
    assert repeats(lambda: f(X=other, W=w, E=e))
    assert not repeats(lambda: f(W=w, X=other[:40], E=e.clamp(max=39)))


def test_index_arrays_are_compared(device):
    f, e, x, w = gathered()
    for change in (lambda e: e, lambda e: e.copy_(e.flip(0)), lambda e: e.flip(0).clone()):
        e = change(e)
        for _ in range(3):
            agrees(f, e, x, w)
        assert repeats(lambda e=e: f(X=x, W=w, E=e))
    e[0] = 50
    with pytest.raises(CoordinateError):
        f(X=x, W=w, E=e)
    with pytest.raises(ShapeError):
        f(X=x, W=w)


def test_gradients_modes_and_settings(device):
    f, e, x, w = gathered()
    for _ in range(3):
        agrees(f, e, x, w)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(f(X=x, W=w, E=e).sum(), x)
    assert grad.abs().sum() > 0
    with torch.no_grad():
        for _ in range(2):
            agrees(f, e, x, w)
        assert repeats(lambda: f(X=x, W=w, E=e))
    assert f(X=x, W=w, E=e).requires_grad
    x = x.detach()
    with torch.inference_mode():
        for _ in range(2):
            agrees(f, e, x, w)
        assert repeats(lambda: f(X=x, W=w, E=e))
    with torch.autocast("cpu", torch.bfloat16):
        assert f(X=x, W=w, E=e).dtype == torch.bfloat16
    assert repeats(lambda: f(X=x, W=w, E=e))
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            agrees(f, e, x, w)
        assert repeats(lambda: f(X=x, W=w, E=e))
    finally:
        torch.use_deterministic_algorithms(False)
    batch = torch.vmap(lambda x: f(X=x, W=w, E=e))(torch.stack([x, x]))
    torch.testing.assert_close(batch[1], x[e] @ w, rtol=1e-4, atol=1e-4)
