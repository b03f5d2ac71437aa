"""Convolutions that autograd records, by kernels (emulated): dtypes, values and gradients are those of plain torch."""

from importlib import import_module

import pytest
import torch
from emulated import emulated, on_cpu

import pumice as pm
from pumice.testing import random_cloud

conv = import_module("pumice.ops.conv")

KINDS = {
    "half": (torch.float16, torch.float16, None),
    "float": (torch.float32, torch.float32, None),
    "autocast": (torch.float32, torch.float32, torch.bfloat16),
    "autocast of narrow features": (torch.bfloat16, torch.float32, torch.bfloat16),
}


def scene(seed, dtype):
    coords = random_cloud(90, 3, extent=6, seed=seed)
    feats = torch.randn(90, 16, generator=torch.Generator().manual_seed(seed))
    return pm.SparseTensor(feats.to(dtype).requires_grad_(), coords)


def results(layer, x, cast):
    """The result, and the gradients of features and parameters."""
    with torch.autocast("cpu", cast, enabled=cast is not None):
        y = layer(x).feats
    own = [p for p in layer.parameters() if p.requires_grad]
    factor = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * factor).sum(), [x.feats, *own])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_results_and_gradients(tmp_path, kind, bias, trained):
    """On two scenes: the second one has new maps."""
    dtype, own, cast = KINDS[kind]
    torch.manual_seed(0)
    layer = pm.nn.Conv3d(16, 16, 3, bias=bias).to(own)
    layer.weight.requires_grad_(trained)
    with emulated(tmp_path):
        for seed in range(2):
            x = scene(seed, dtype)
            got = results(layer, x, cast)
            with on_cpu():
                want = results(layer, scene(seed, dtype), cast)
            assert [(g.dtype, g.shape) for g in got] == [(w.dtype, w.shape) for w in want]
            for g, w in zip(got, want, strict=True):
                limit = 4 * torch.finfo(cast or dtype).eps * float(w.float().abs().max())
                assert float((g.float() - w.float()).abs().max()) <= limit


def test_what_fits_is_not_checked_again_under_autocast(tmp_path, monkeypatch):
    layer, checks = pm.nn.Conv3d(16, 16, 3), []
    monkeypatch.setattr(conv, "check_layer", lambda *given: checks.append(given))
    with emulated(tmp_path):
        for seed in range(2):
            results(layer, scene(seed, torch.float32), torch.bfloat16)
    assert not checks
