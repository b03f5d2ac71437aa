"""What stands behind a convolution in its kernel: the same results, and nothing that listens is passed by."""

import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.utils.prune

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


CHANGES = {
    "a parameter": lambda norm, conv: setattr(norm, "weight", torch.nn.Parameter(torch.rand(16).double() + 0.5)),
    "values of a parameter": lambda norm, conv: setattr(norm.bias, "data", torch.rand(16).double()),
    "a buffer": lambda norm, conv: norm.register_buffer("running_mean", torch.rand(16).double()),
    "a buffer by its name": lambda norm, conv: setattr(norm, "running_var", torch.rand(16).double() + 0.5),
    "eps": lambda norm, conv: setattr(norm, "eps", 0.7),
    "no scale": lambda norm, conv: setattr(norm, "weight", None),
    "no shift": lambda norm, conv: setattr(norm, "bias", None),
    "a plain attribute": lambda norm, conv: (delattr(norm, "weight"), setattr(norm, "weight", torch.rand(16).double())),
    "a weight": lambda norm, conv: setattr(conv, "weight", torch.nn.Parameter(torch.randn(16, 3, 3, 3, 8).double())),
    "a plain weight": lambda norm, conv: (
        delattr(conv, "weight"),
        setattr(conv, "weight", torch.randn(16, 3, 3, 3, 8).double()),
    ),
    "a bias": lambda norm, conv: setattr(conv, "bias", torch.nn.Parameter(torch.randn(16).double())),
    "pruned": lambda norm, conv: torch.nn.utils.prune.random_unstructured(norm, "weight", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_put_there_since_the_last_call_is_read(change, finished):
    """Nothing of a module is kept from call to call."""
    torch.manual_seed(5)
    module, x = stirred(CHAINS["norm and activation"]()).double(), random_tensor(100, 8, 3, dtype=torch.float64)
    with torch.no_grad():
        before = module(x).feats
        CHANGES[change](module[1], module[0])
        y = module(x).feats
        expected = x
        for part in module:
            expected = part(expected) if part is not module[2] else expected.replace(expected.feats.relu())
    torch.testing.assert_close(y, expected.feats.detach(), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(y, before)


class Adapted(nn.Conv3d):
    """A layer whose class was exchanged, as adapters of few weights do."""

    @property
    def weight(self):
        return self._parameters["weight"] + self.more


def test_a_property_stands_before_a_parameter():
    layer, x = nn.Conv3d(8, 16, 3), random_tensor(50, 8, 3)
    own, bias = layer.weight.detach(), layer.bias.detach()
    layer.__class__, layer.more = Adapted, torch.rand(16, 3, 3, 3, 8)
    torch.testing.assert_close(layer(x).feats, pm.ops.conv(x, own + layer.more, bias).feats)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_without_a_bias_has_none_among_its_parameters(bias):
    """Where it is not, whoever asks for it searches the module in vain at every call."""
    layer = nn.Conv3d(8, 16, 3, bias=bias)
    assert (layer._parameters["bias"] is not None) == bias and set(layer.state_dict()) == {"weight", "bias"} - (
        set() if bias else {"bias"}
    )
    older = nn.Conv3d(8, 16, 3, bias=False)
    # As it was pickled before.
    del older._parameters["bias"]
    older.__dict__["bias"] = None
    older.load_state_dict({"weight": layer.weight})
    x = random_tensor(50, 8, 3)
    torch.testing.assert_close(older(x).feats + (layer.bias if bias else 0.0), layer(x).feats)


@pytest.mark.parametrize(
    "last", [nn.BatchNorm, lambda n: nn.ReLU(), lambda n: nn.LeakyReLU(0.3)], ids=["norm", "relu", "other"]
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_residual_is_added_before_the_last_module_whatever_that_is(last, normed, finished):
    body = nn.Sequential(nn.Conv3d(8, 8, 3), *([nn.BatchNorm(8)] if normed else []))
    block, x = nn.ResidualBlock(8, 8), random_tensor(60, 8, 3, dtype=torch.float64)
    block.body, block.act = body, last(8)
    block = stirred(block).double()
    with torch.no_grad():
        expected = block.act(block.body(x) + x)
        torch.testing.assert_close(block(x).feats, expected.feats, rtol=1e-10, atol=1e-10)


def test_a_module_in_other_floats_is_read_in_those(finished):
    module, x = stirred(CHAINS["norm and activation"]()), random_tensor(100, 8, 3)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16):
            y = module.to(dtype)(x.to(dtype))
            assert y.dtype == dtype and {t.dtype for t in finished[-1].operands.values()} == {dtype}


def test_parts_of_a_block_that_were_exchanged_are_called(finished):
    block, x = stirred(CHAINS["residual"]()).double(), random_tensor(60, 8, 3, dtype=torch.float64)
    with torch.no_grad():
        for name, part in (
            ("act", nn.SiLU()),
            ("shortcut", nn.Linear(8, 8).double()),
            ("body", nn.Sequential(nn.Conv3d(8, 8, 1))),
        ):
            setattr(block, name, part.double())
            expected = block.act(block.body(x) + block.shortcut(x))
            torch.testing.assert_close(block(x).feats, expected.feats, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_the_epilogue_of_a_norm_is_that_of_its_fields(affine, ended):
    mean, variance, *more = torch.rand(4, 6)
    scale, shift = more if affine else (None, None)
    residual = torch.rand(5, 6) if ended else None
    made = pm.ops.Epilogue.of_norm((mean, variance, scale, shift), 0.1, residual, "relu")
    told = pm.ops.Epilogue(scale, shift, residual, "relu", None, mean, variance, 0.1)
    assert made.finish == told.finish and [*made.operands] == [*told.operands]
    assert all(made.operands[name] is x for name, x in told.operands.items())
    for one in (made, made.with_bias(torch.rand(6)), pickle.loads(pickle.dumps(made))):
        assert (one.activation, one.dtype, one.eps, one.residual is None) == ("relu", None, 0.1, not ended)
    assert all(getattr(made, name) is getattr(told, name) for name in epilogues.TENSORS)


def test_a_finish_takes_no_hash_to_other_processes():
    """Names hash otherwise there."""
    told = pm.ops.Epilogue(torch.rand(3), activation="relu").finish
    assert hash(told) == hash(replace(told)) != hash(replace(told, eps=1.0))
    there = pickle.loads(pickle.dumps(told))
    assert there == told and not there.__dict__.keys() - {"names", "activation", "dtype", "eps"}
