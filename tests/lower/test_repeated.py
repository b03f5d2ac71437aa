"""Repeated calls of statements on the emulated device: past all checks, but never past a change."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulated import emulated
from modes import deterministic

import pumice as pm
from pumice.errors import CoordinateError, ShapeError
from pumice.runtime.launch import PreparedLaunch
from pumice.runtime.repeat import NewTensor, OpenArguments, RepeatedLaunch

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
    with deterministic():
        for _ in range(2):
            agrees(f, e, x, w)
        assert repeats(lambda: f(X=x, W=w, E=e))
    batch = torch.vmap(lambda x: f(X=x, W=w, E=e))(torch.stack([x, x]))
    torch.testing.assert_close(batch[1], x[e] @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packs", [False, True])
def test_a_launch_is_given_addresses_stream_and_a_new_result(monkeypatch, packs):
    """As Triton's launcher takes a kernel's arguments, one by one, or from 3.7 on as a tuple."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    seen, runtime = [], SimpleNamespace(launch_enter_hook=None)
    before, values = [5, 1, 1, None, "function"], [0, "kept", 0, 42]
    arguments = values if packs else [*before, *values]
    launch = PreparedLaunch(
        lambda *given: seen.append(given), runtime, before if packs else None, arguments, 0 if packs else 5, 3
    )
    x, kind = torch.randn(8, 4), torch.float32
    call = RepeatedLaunch(launch, OpenArguments(((0, 1),), 2), NewTensor((3, 4), kind, x.device), None)
    y = call([None, x])
    given = (x.data_ptr(), "kept", y.data_ptr(), 42)
    assert seen == [(5, 1, 1, 7, "function", *((given,) if packs else given))] and y.shape == (3, 4)
    assert call([None, x.view(-1)[1:]]) is None and len(seen) == 1, "not aligned to 16 bytes"
    runtime.launch_enter_hook = print
    assert call([None, x]) is None and len(seen) == 1, "a hook listens"
