"""What stands behind a convolution in its kernel: the same results, and nothing that listens is passed by."""

import pytest
import torch

import pumice as pm
from pumice import nn
from pumice.errors import DeviceError, DtypeError, ShapeError
from pumice.lower import epilogue as epilogues
from pumice.nn import fused
from pumice.testing import random_tensor


@pytest.fixture
def finished(monkeypatch):
    """As on a GPU; the epilogues of the calls."""
    seen = []
    monkeypatch.setattr(fused, "_worth", lambda x: isinstance(x, pm.SparseTensor))
    whole = nn.Conv3d.finished
    monkeypatch.setattr(
        "pumice.nn.conv.Convolution.finished",
        lambda self, x, epilogue, *more: seen.append(epilogue) or whole(self, x, epilogue, *more),
    )
    return seen


def stirred(module):
    """Norms whose statistics and weights are not those of a new one."""
    torch.manual_seed(3)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm):
            for values in (part.running_mean, part.running_var, part.weight, part.bias):
                if values is not None:
                    values.data.uniform_(0.5, 2)
    return module.eval()


CHAINS = {
    "norm and activation": lambda: nn.Sequential(nn.Conv3d(8, 16, 3), nn.BatchNorm(16, eps=0.3), nn.ReLU()),
    "norm": lambda: nn.Sequential(nn.Conv3d(8, 16, 3, bias=False), nn.BatchNorm(16, affine=False)),
    "activation": lambda: nn.Sequential(nn.Conv3d(8, 16, 3, stride=2), nn.SiLU(), nn.ReLU()),
    "two": lambda: nn.Sequential(
        nn.Conv3d(8, 16, 3, groups=2), nn.BatchNorm(16), torch.nn.ReLU(), nn.Conv3d(16, 8, 1), nn.BatchNorm(8)
    ),
    "nothing known": lambda: nn.Sequential(nn.Conv3d(8, 16, 3), nn.LayerNorm(16), nn.LeakyReLU(0.3)),
    "no statistics": lambda: nn.Sequential(nn.Conv3d(8, 16, 3), nn.BatchNorm(16, track_running_stats=False), nn.ReLU()),
    "residual": lambda: nn.ResidualBlock(8, 8),
    "residual, other channels": lambda: nn.ResidualBlock(8, 16, bias=True),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_as_modules_one_by_one(name, finished):
    module, x = stirred(CHAINS[name]()).double(), random_tensor(200, 8, 3, dtype=torch.float64)
    expected = module(x)
    assert all(epilogue is None for epilogue in finished)
    finished.clear()
    with torch.no_grad():
        y = module(x)
    torch.testing.assert_close(y.feats, expected.feats.detach(), rtol=1e-10, atol=1e-10)
    done = sum(epilogue is not None for epilogue in finished)
    assert done == {"nothing known": 0, "no statistics": 0, "two": 2}.get(name, 2 if "residual" in name else 1)
    if "residual" in name:
        assert finished[-1].residual is not None and finished[-1].activation == "relu"


def test_networks_are_the_same(finished):
    for net, channels in ((pm.models.MinkUNet(4, 5, 0.25), 4), (pm.models.CenterPointBackbone(5), 5)):
        net, x = stirred(net).double(), random_tensor(300, channels, 3, dtype=torch.float64)
        expected = net(x).feats.detach()
        finished.clear()
        with torch.no_grad():
            y = net(x)
        torch.testing.assert_close(y.feats, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
        assert len(finished) == len([m for m in net.modules() if isinstance(m, fused.Convolution)])
        assert all(epilogue is not None for epilogue in finished)


@pytest.fixture
def joined(finished, monkeypatch):
    """As on a GPU, linear maps too; the epilogues of their calls."""
    seen, whole = [], fused.linear_features
    monkeypatch.setattr(fused, "takes", lambda *tensors: not torch.is_grad_enabled())
    monkeypatch.setattr(fused, "linear_features", lambda x, w, end: seen.append(end) or whole(x, w, end))
    return seen


LINEAR = {
    "norm": lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm(16, eps=0.3)),
    "bias": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm(16), nn.ReLU()),
    "plain norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm(16, affine=False), nn.Linear(16, 4)),
    "shortcut": lambda: nn.ResidualBlock(8, 16),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("count", [0, 1, 200])
def test_a_linear_map_with_the_norm_behind_it(name, count, joined):
    module, x = stirred(LINEAR[name]()).double(), random_tensor(count, 8, 3, dtype=torch.float64)
    expected = module(x)
    assert not joined
    with torch.no_grad():
        y = module(x)
    torch.testing.assert_close(y.feats, expected.feats.detach(), rtol=1e-10, atol=1e-10)
    assert len(joined) == 1 and joined[0].variance is not None


def test_a_residual_between_a_linear_map_and_its_norm(joined):
    """It is added before the last module, which is the norm."""
    modules, x = (
        [nn.Linear(8, 8).double(), stirred(nn.BatchNorm(8)).double()],
        random_tensor(50, 8, 3).to(torch.float64),
    )
    with torch.no_grad():
        y = fused.chained(modules, x, x)
        expected = modules[1](modules[0](x) + x)
    assert not joined
    torch.testing.assert_close(y.feats, expected.feats)


def test_what_linear_maps_do_not_take():
    weight, end = torch.zeros(4, 8), pm.ops.Epilogue(activation="relu")
    with pytest.raises(DtypeError, match="of one floating point dtype, found torch.float64 and torch.float32"):
        fused.linear_features(torch.zeros(3, 8).double(), weight, end)
    with pytest.raises(ShapeError, match="found \\[3, 7\\] and \\[4, 8\\]"):
        fused.linear_features(torch.zeros(3, 7), weight, end)
    with pytest.raises(DeviceError, match="weight is on meta, x is on cpu"):
        fused.linear_features(torch.zeros(3, 8), weight.to("meta"), end)
    with pytest.raises(DeviceError, match="scale of the epilogue is on meta"):
        fused.linear_features(torch.zeros(3, 8), weight, pm.ops.Epilogue(torch.zeros(4, device="meta")))
    with pytest.raises(ShapeError, match="shift of the epilogue is \\[4\\], found shape \\[8\\]"):
        fused.linear_features(torch.zeros(3, 8), weight, pm.ops.Epilogue(shift=torch.zeros(8)))


@pytest.mark.parametrize("where", [0, 1, 2])
def test_hooks_hear_what_they_listen_to(where, finished):
    module, x, heard = stirred(CHAINS["norm and activation"]()), random_tensor(50, 8, 3), []
    module[where].register_forward_hook(lambda *given: heard.append(given))
    with torch.no_grad():
        module(x)
    assert len(heard) == 1 and finished == [None]


def test_a_hook_of_a_part_of_a_block_is_heard(finished):
    block, x, heard = stirred(CHAINS["residual"]()), random_tensor(50, 8, 3), []
    block.body.register_forward_hook(lambda *given: heard.append(given))
    with torch.no_grad():
        block(x)
    assert len(heard) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_under_autocast_are_those_of_modules_one_by_one(dtype, finished):
    """A sum of two dtypes has the wider one's."""
    block, x = stirred(CHAINS["residual"]()), random_tensor(60, 8, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(x)
        with torch.no_grad():
            y = block(x)
    assert y.dtype == expected.dtype == dtype
    assert (finished[-1].residual is not None) == (dtype == torch.bfloat16)
    torch.testing.assert_close(y.feats.float(), expected.feats.float(), rtol=0.05, atol=0.3)


def test_training_statistics_are_taken(finished):
    module, x = stirred(CHAINS["norm and activation"]()).train(), random_tensor(50, 8, 3)
    before = module[1].running_mean.clone()
    with torch.no_grad():
        module(x)
    assert not torch.equal(module[1].running_mean, before) and finished == [None]


def test_an_epilogue_with_statistics():
    """(y - mean) / sqrt(variance + eps) * scale + shift + residual, and a bias before all of it."""
    torch.manual_seed(1)
    x, w, b = random_tensor(60, 4, 3, dtype=torch.float64), torch.randn(6, 3, 3, 3, 4).double(), torch.randn(6).double()
    mean, variance, scale, shift = torch.rand(4, 6).double()
    y = pm.ops.conv(x, w, b).feats
    residual = torch.randn_like(y)
    told = pm.ops.Epilogue(scale, shift, residual, "relu", mean=mean, variance=variance, eps=0.1)
    expected = ((y - mean) / (variance + 0.1).sqrt() * scale + shift + residual).relu()
    torch.testing.assert_close(pm.ops.conv(x, w, b, epilogue=told).feats, expected)
    assert told.finish.eps == 0.1 and set(told.operands) == set(epilogues.EPILOGUE)
    with pytest.raises(ShapeError, match=r"mean of the epilogue is \[6\]"):
        pm.ops.conv(x, w, epilogue=pm.ops.Epilogue(mean=mean[:3]))
