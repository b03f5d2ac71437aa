"""What layers and sparse tensors say to those who come from other libraries, and what Sequential hands to a module."""

from __future__ import annotations

import copy
import pickle
from inspect import cleandoc

import pytest
import torch
from torch.nn import functional

import pumice as pm
from pumice import nn
from pumice.errors import DtypeError, MissingAttributeError, OptionError, ShapeError
from pumice.testing import random_cloud

ROWS = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
COORDS = random_cloud(30, 3, extent=8, seed=1)


@pytest.fixture
def x():
    return pm.SparseTensor(ROWS.clone(), COORDS)


class Activation(torch.nn.ReLU):
    """A user's, without a forward of its own."""


class OfFeatures(torch.nn.Module):
    """Of another library."""

    def forward(self, feats):
        return functional.relu(feats)


class OfSparse(torch.nn.Module):
    def forward(self, x: pm.SparseTensor) -> pm.SparseTensor:
        return x.replace(x.feats.relu())


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Own(nn.ReLU):
    """A subclass of a layer of ours."""


TAKEN = {
    "torch's": torch.nn.ReLU,
    "a subclass of torch's": Activation,
    "another library's": OfFeatures,
    "torch's Sequential": lambda: torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()),
    "torch's Sequential of ours": lambda: torch.nn.Sequential(nn.ReLU()),
    "torch's Sequential of both": lambda: torch.nn.Sequential(nn.ReLU(), torch.nn.Sequential(Activation())),
    "torch's identity": lambda: torch.nn.Sequential(torch.nn.Identity(), nn.ReLU()),
    "ours": nn.ReLU,
    "a subclass of ours": Own,
    "a module with ours in it": lambda: Block(nn.ReLU()),
    "a module with torch's in it": lambda: Block(torch.nn.ReLU()),
    "annotated": OfSparse,
}


@pytest.mark.parametrize("name", TAKEN)
def test_sequential_gives_modules_what_they_take(x, name):
    y = nn.Sequential(TAKEN[name]())(x)
    assert isinstance(y, pm.SparseTensor) and torch.equal(y.feats, ROWS.relu()) and y.geometry is x.geometry


def test_hooks_of_a_sequential_within_are_heard(x):
    heard, inner = [], torch.nn.Sequential(nn.ReLU())
    inner.register_forward_hook(lambda *given: heard.append(given))
    nn.Sequential(inner)(x)
    assert len(heard) == 1


LAYERS = {
    "BatchNorm": lambda: nn.BatchNorm(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "InstanceNorm": lambda: nn.InstanceNorm(8),
    "ReLU": nn.ReLU,
    "Linear": lambda: nn.Linear(8, 4),
    "Conv3d": lambda: nn.Conv3d(8, 8, 3),
    "MaxPool3d": lambda: nn.MaxPool3d(2),
    "GlobalMaxPool": nn.GlobalMaxPool,
    "GlobalAvgPool": nn.GlobalAvgPool,
    "GlobalSumPool": nn.GlobalSumPool,
    "MinkUNet": lambda: pm.models.MinkUNet(8, 3, width=0.125),
    "CenterPointBackbone": lambda: pm.models.CenterPointBackbone(8),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_plain_tensor_is_no_sparse_one(name):
    with pytest.raises(DtypeError, match="SparseTensor, found Tensor"):
        LAYERS[name]()(ROWS)


@pytest.mark.parametrize("function", [pm.collate, pm.cat])
def test_plain_tensors_are_not_joined(function, x):
    with pytest.raises(DtypeError, match=f"{function.__name__} takes a SparseTensor, found Tensor"):
        function([x, ROWS])


@pytest.mark.parametrize("layer", [nn.Linear(4, 8), nn.BatchNorm(4), nn.GroupNorm(2, 4)])
def test_channels_that_do_not_fit(layer, x):
    with pytest.raises(ShapeError, match="takes 4 channels, x has 8"):
        layer(x)


NAMES = {"features": "x.feats", "F": "x.feats", "indices": "x.coords", "C": "x.coords", "dense": r"x.to_dense\(\)"}
NAMES |= {"replace_feature": r"x.replace\(feats\)", "shape": "x.feats.shape", "dim": "x.spatial_dim"}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries(name, x):
    assert not hasattr(x, name)
    with pytest.raises(MissingAttributeError, match=f"no attribute {name!r}; use {NAMES[name]}"):
        getattr(x, name)


def test_modules_of_torch_take_features(x):
    norm = torch.nn.BatchNorm1d(8)
    with pytest.raises(MissingAttributeError, match=r"x.map\(module\), pm.nn.Sequential\(module\) or pm.nn.BatchNorm"):
        norm(x)
    torch.testing.assert_close(nn.Sequential(norm)(x).feats, x.map(norm).feats)


def test_copies_ask_for_no_names(x):
    for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(other.feats, x.feats)


@pytest.mark.parametrize("shape", [(7, 8), (30, 4), (1, 30, 8), (30,)])
@pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
def test_tensors_that_do_not_broadcast(x, shape, sign):
    ways = {"+": lambda y: x + y, "-": lambda y: x - y, "*": lambda y: x * y, "/": lambda y: x / y}
    with pytest.raises(ShapeError, match=r"broadcasts to features \[30, 8\], found"):
        ways[sign](torch.ones(shape))
    assert torch.equal(ways[sign](torch.ones(30, 1)).feats, ways[sign](1.0).feats)


@pytest.mark.parametrize("made", [
    lambda: nn.Conv3d(8, 8, 2.5),
    lambda: nn.Conv3d(8, 8, 3, padding="same"),
    lambda: nn.Conv3d(8, 8, 3, stride=0),
    lambda: nn.MaxPool3d(0),
    lambda: nn.AvgPool3d(2, stride=0),
    lambda: nn.SumPool3d(2.5),
])  # fmt: skip
def test_windows_that_are_none(made):
    with pytest.raises(OptionError, match=r"(kernel_size|padding|stride) takes (an integer or|integers)"):
        made()


def test_the_documentation_of_a_convolution_is_its_own():
    for layer in (nn.Conv3d, nn.ConvTranspose2d, nn.InverseConv1d, nn.GenerativeConvTranspose4d):
        first, _, *rest = layer.__doc__.splitlines()
        assert "see" not in first and rest == cleandoc(layer.__bases__[0].__doc__).splitlines()
    assert "kernel_size, stride, padding, dilation: an int or one per axis" in nn.Conv3d.__doc__
