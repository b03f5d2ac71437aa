"""Layers with pruned weights agree with dense layers of the same weights: outputs, gradients, states, refusals."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.nn.pruned import Blocks


def pruned(conv: Any, share: float = 0.3, seed: int = 0) -> torch.Tensor:
    """Set random weights to zero; returns the mask of those kept."""
    mask = torch.rand(conv.weight.shape, generator=torch.Generator().manual_seed(seed)) < share
    with torch.no_grad():
        conv.weight.mul_(mask)
    return mask


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (1, 5), "padding": (2, 3), "dilation": (1, 2), "stride": (1, 2)},
    {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 4, "bias": False},
    {"kernel_size": 3, "padding": "same", "groups": 8},
    {"kernel_size": 2, "padding": "valid"},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("size", [(2, 8, 17, 20), (8, 9, 7)], ids=str)
def test_a_pruned_convolution_equals_the_dense_one(options, size):
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 16, **options).double()
    pruned(conv)
    layer = pm.nn.PrunedConv2d.from_dense(conv)
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    wanted, got = conv(x), layer(x)
    torch.testing.assert_close(got, wanted)
    grad = torch.randn_like(wanted)
    parameters = [x, *layer.parameters()]
    ours = torch.autograd.grad(got, parameters, grad)
    theirs = torch.autograd.grad(wanted, [x, *conv.parameters()], grad)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1][layer.mask])
    torch.testing.assert_close(ours[2:], theirs[2:])
    layer.way = "dense"
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(torch.autograd.grad(layer(x), [layer.values], grad)[0], ours[1])


@pytest.mark.parametrize("size", [(5, 12), (12,), (2, 3, 12)], ids=str)
def test_a_pruned_linear_layer_equals_the_dense_one(size):
    linear = nn.Linear(12, 7)
    pruned(linear)
    x = torch.randn(size)
    layer = pm.nn.PrunedLinear.from_dense(linear)
    torch.testing.assert_close(layer(x), linear(x))
    layer.way = "dense"
    torch.testing.assert_close(layer(x), linear(x))


def blocked(conv: Any, outputs: int, channels: int, share: float = 0.4) -> torch.Tensor:
    """Set random blocks of weights, of each tap, to zero; returns the mask of those kept."""
    count, depth, *taps = conv.weight.shape
    blocks = torch.rand(count // outputs, depth // channels, *taps, generator=torch.Generator().manual_seed(0)) < share
    mask = blocks.repeat_interleave(outputs, 0).repeat_interleave(channels, 1)
    with torch.no_grad():
        conv.weight.mul_(mask)
    return mask


@pytest.mark.parametrize("sides", [(16, 16), (32, 16), (16, 32), (32, 32)], ids=str)
def test_blocks_of_a_mask_are_found(sides):
    conv = nn.Conv2d(256, 256, 3)
    mask = blocked(conv, *sides)
    layer = pm.nn.PrunedConv2d.from_dense(conv)
    assert layer.blocks == sides and f"in blocks of {sides[0]} x {sides[1]}, sparse" in repr(layer)
    apart = layer.values.view(-1, *sides)
    first = mask[:: sides[0], :: sides[1]][0].permute(1, 2, 0).nonzero()[0].tolist()
    start = first[2] * sides[1]
    assert torch.equal(apart[0], conv.weight[: sides[0], start : start + sides[1], first[0], first[1]])
    assert torch.equal(layer.weight, conv.weight)
    mask[5, 7] = ~mask[5, 7]
    assert Blocks.of(mask) is None


def test_few_zeros_in_blocks_are_kept_without_a_mask():
    conv = nn.Conv2d(64, 64, 3)
    mask = blocked(conv, 32, 32)
    first = mask.nonzero()[0].tolist()
    with torch.no_grad():
        conv.weight[tuple(first)] = 0
    layer = pm.nn.PrunedConv2d.from_dense(conv)
    assert layer.blocks == (32, 32) and torch.equal(layer.mask, mask) and torch.equal(layer.weight, conv.weight)
    given = mask.clone()
    given[tuple(first)] = False
    assert pm.nn.PrunedConv2d.from_dense(conv, given).blocks is None


def test_masks_without_blocks():
    weight = torch.zeros(32, 48, 3, 3, dtype=torch.bool)
    assert Blocks.of(weight) is None
    for outputs, channels in ((16, 1), (1, 16), (8, 8)):
        conv = nn.Conv2d(48, 32, 3)
        assert Blocks.of(blocked(conv, outputs, channels)) is None
    weight[:, :, 1, 1] = True
    assert Blocks.of(weight) == (32, 16) and Blocks.of(weight, groups=2) == (16, 16) and Blocks.of(weight, 4) is None


BLOCKED = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 1, "bias": False},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (1, 3), "padding": (2, 1), "stride": (1, 2)},
    {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2},
]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["entries", "blocks"])
@pytest.mark.parametrize("options", BLOCKED, ids=str)
@pytest.mark.parametrize("size", [(2, 64, 7, 10), (64, 9, 7)], ids=str)
def test_a_convolution_in_blocks_equals_the_dense_one(options, size, on_gpu, monkeypatch):
    """As a list of entries, and as a GPU has it, in blocks."""
    monkeypatch.setattr(pm.nn.PrunedConv2d, "_in_blocks", on_gpu)
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, **options)
    mask = blocked(conv, 16, 16)
    layer, x = pm.nn.PrunedConv2d.from_dense(conv), torch.randn(size, requires_grad=True)
    assert layer.blocks == (16, 16)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(layer(x), conv(x), rtol=1e-4, atol=1e-4)
        layer.values.mul_(2)
        torch.testing.assert_close(layer(x), nn.functional.conv2d(x, layer.weight, layer.bias, *step(conv)))
        layer.values.data = layer.values.data / 2
    for _ in range(2):
        wanted, got = conv(x), layer(x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        grad = torch.randn_like(wanted)
        ours = torch.autograd.grad(got, [x, *layer.parameters()], grad)
        theirs = torch.autograd.grad(wanted, [x, *conv.parameters()], grad)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
        kept = layer.blocks.split(theirs[1])[layer.blocks.split(mask)]
        torch.testing.assert_close(ours[1], kept, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(ours[2:], theirs[2:])
    layer.way = "dense"
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(layer(x), layer.values, grad)[0], kept, rtol=1e-4, atol=1e-3)


def step(conv: nn.Conv2d) -> tuple[Any, ...]:
    return conv.stride, conv.padding, conv.dilation, conv.groups


def test_images_in_blocks_stay_channels_last(monkeypatch):
    monkeypatch.setattr(pm.nn.PrunedConv2d, "_in_blocks", True)
    conv = nn.Conv2d(32, 32, 3)
    blocked(conv, 16, 16)
    layer = pm.nn.PrunedConv2d.from_dense(conv)
    for x in (torch.randn(2, 32, 6, 6), torch.randn(2, 32, 6, 6).to(memory_format=torch.channels_last)):
        assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["entries", "blocks"])
def test_a_linear_layer_in_blocks_equals_the_dense_one(on_gpu, monkeypatch):
    monkeypatch.setattr(pm.nn.PrunedLinear, "_in_blocks", on_gpu)
    linear = nn.Linear(64, 48)
    mask = blocked(linear, 16, 32)
    layer, x = pm.nn.PrunedLinear.from_dense(linear), torch.randn(2, 3, 64)
    assert layer.blocks == (16, 32)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(one(x).square().sum(), [*one.parameters()]) for one in (layer, linear))
    torch.testing.assert_close(ours[0], layer.blocks.split(theirs[0])[layer.blocks.split(mask)], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_states_of_layers_in_blocks_are_loaded_with_other_masks():
    torch.manual_seed(0)
    convs, x = [nn.Conv2d(32, 32, 3) for _ in range(2)], torch.randn(1, 32, 6, 6)
    masks = [blocked(conv, 16, 16, 0.5) for conv in convs]
    one = pm.nn.PrunedConv2d.from_dense(convs[0], masks[0])
    other = pm.nn.PrunedConv2d.from_dense(convs[1], masks[0].flip(1))
    other(x)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other(x), convs[0](x), rtol=1e-4, atol=1e-4)


def test_a_mask_keeps_weights_that_are_zero():
    conv = nn.Conv2d(2, 2, 3)
    mask = pruned(conv)
    with torch.no_grad():
        conv.weight[mask.nonzero()[0].tolist()[0]] = 0
    layer = pm.nn.PrunedConv2d.from_dense(conv, mask)
    assert layer.values.numel() == int(mask.sum()) and layer.density == mask.float().mean()
    torch.testing.assert_close(layer.weight, conv.weight)


def test_a_filter_without_weights_gives_the_bias():
    conv = nn.Conv2d(2, 3, 3)
    layer = pm.nn.PrunedConv2d.from_dense(conv, torch.zeros_like(conv.weight))
    torch.testing.assert_close(layer(torch.randn(1, 2, 5, 5)), layer.bias[:, None, None].expand(1, 3, 3, 3))


def test_states_copies_and_pickles_have_the_mask_and_the_values():
    conv = nn.Conv2d(4, 6, 3)
    pruned(conv)
    layer, x = pm.nn.PrunedConv2d.from_dense(conv), torch.randn(1, 4, 6, 6)
    wanted = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x), wanted)
    other = pm.nn.PrunedConv2d.from_dense(nn.Conv2d(4, 6, 3), torch.roll(layer.mask, 1, 0))
    other(x)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), wanted)


def test_a_network_is_pruned_in_place_and_trains():
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    masks = {"2": pruned(net[2]), "4.weight": pruned(net[4])}
    x, wanted = torch.randn(2, 3, 10, 10), None
    wanted = net(x)
    assert pm.prune_model(net, masks) is net
    assert [type(layer).__name__ for layer in net] == ["Conv2d", "ReLU", "PrunedConv2d", "Flatten", "PrunedLinear"]
    torch.testing.assert_close(net(x), wanted)
    step = torch.optim.SGD(net.parameters(), 0.1)
    before = net(x).square().sum()
    before.backward()
    step.step()
    assert net(x).square().sum() < before
    assert torch.equal(net[2].weight != 0, masks["2"])


def test_layers_with_many_zeros_are_pruned_and_the_faster_way_is_measured():
    net: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).train()
    pruned(net[2], 0.1)
    x = torch.randn(1, 3, 12, 12)
    statistics = net[1].running_mean.clone()
    pm.prune_model(net, example=x)
    assert type(net[0]) is nn.Conv2d and isinstance(net[2], pm.nn.PrunedConv2d) and net[2].way in ("sparse", "dense")
    assert net.training and net[2].training and torch.equal(net[1].running_mean, statistics)
    assert not net[2]._forward_pre_hooks


def test_a_layer_of_two_names_stays_one():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    pruned(conv)
    net: Any = nn.Sequential(conv, nn.ReLU(), conv)
    x = torch.randn(1, 3, 8, 8)
    wanted = net(x)
    pm.prune_model(net, {"2": conv.weight})
    assert isinstance(net[0], pm.nn.PrunedConv2d) and net[0] is net[2]
    torch.testing.assert_close(net(x), wanted)


def test_an_empty_batch_and_other_dtypes():
    layer = pm.nn.PrunedConv2d.from_dense(nn.Conv2d(4, 6, 3))
    assert layer(torch.randn(0, 4, 8, 8)).shape == (0, 6, 6, 6)
    with pytest.raises(DtypeError, match="float64"):
        layer(torch.randn(1, 4, 8, 8, dtype=torch.float64))


def test_refusals():
    conv = nn.Conv2d(4, 6, 3)
    for given in (pm.nn.PrunedConv2d.from_dense(conv), pm.nn.PrunedLinear.from_dense(nn.Linear(4, 2))):
        with pytest.raises(DtypeError, match="input is a tensor, found list"):
            given([1, 2])
        with pytest.raises(DeviceError, match="the layer is on cpu, the input on meta"):
            given(torch.empty(1, 4, 8, 4, device="meta"))
    with pytest.raises(DtypeError, match="a network is a torch.nn.Module, found int"):
        pm.prune_model(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DtypeError, match="a mask is a tensor, found list"):
        pm.nn.PrunedConv2d.from_dense(conv, [1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"mask has shape \[4\], the weight \[6, 4, 3, 3\]"):
        pm.nn.PrunedConv2d.from_dense(conv, torch.ones(4))
    with pytest.raises(DtypeError, match=r"a torch.nn.Conv2d is expected, found Linear"):
        pm.nn.PrunedConv2d.from_dense(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(DtypeError, match=r"a torch.nn.Linear is expected, found Conv2d"):
        pm.nn.PrunedLinear.from_dense(conv)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="padding_mode is 'zeros', found 'reflect'"):
        pm.nn.PrunedConv2d.from_dense(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(OptionError, match=r"of \[2, 2\] is not symmetric"):
        pm.nn.PrunedConv2d.from_dense(nn.Conv2d(4, 6, 2, padding="same"))
    layer = pm.nn.PrunedConv2d.from_dense(conv)
    with pytest.raises(ShapeError, match=r"\[N, 4, H, W\] or \[4, H, W\], found \[1, 3, 8, 8\]"):
        layer(torch.randn(1, 3, 8, 8))
    with pytest.raises(ShapeError, match=r"a kernel of \[3, 3\] with dilation \[1, 1\] exceeds \[2, 8\]"):
        layer(torch.randn(1, 4, 2, 8))
    with pytest.raises(ShapeError, match=r"input is \[..., 12\], found \[2, 3\]"):
        pm.nn.PrunedLinear.from_dense(nn.Linear(12, 2))(torch.randn(2, 3))
    with pytest.raises(OptionError, match="no Conv2d or Linear is named 1, x; there are 0"):
        pm.prune_model(nn.Sequential(conv, nn.ReLU()), {"1": torch.ones(1), "x": torch.ones(1)})
    with pytest.raises(OptionError, match="the network is one layer"):
        pm.prune_model(conv, {"": torch.ones(6, 4, 3, 3)})


def test_prepared_calls_follow_the_layer_and_its_input():
    """Repeated calls without gradients are prepared: not for other sizes, layouts, dtypes, devices, values or masks."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 16, 3, padding=1)
    pruned(conv)
    layer, x = pm.nn.PrunedConv2d.from_dense(conv), torch.randn(2, 8, 14, 14)

    def agrees(x):
        for _ in range(2):
            wanted = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)
            torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        for _ in range(2):
            for given in (x, torch.randn(1, 8, 7, 9), x.to(memory_format=torch.channels_last), x[:, :, ::2], x[1:]):
                agrees(given)
        layer.values.mul_(2)
        agrees(x)
        layer.values.data = torch.randn_like(layer.values)
        agrees(x)
        layer.mask.copy_(layer.mask.flip(0))
        agrees(x)
        layer.double()
        agrees(x.double())
        layer.float()
        agrees(x)
        with pytest.raises(DeviceError):
            layer(x.to("meta"))
        layer.way = "dense"
        agrees(x)
    layer.way = "sparse"
    grad = torch.autograd.grad(layer(x).sum(), layer.values)[0]
    assert grad.abs().sum() > 0
    with torch.inference_mode():
        agrees(torch.randn(2, 8, 14, 14))
    layer.bias = None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "dense", "shape"),
    [
        (pm.nn.PrunedConv2d.from_dense, nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 7)),
        (pm.nn.PrunedLinear.from_dense, nn.Linear(8, 5), (3, 8)),
    ],
    ids=["convolution", "linear"],
)
def test_training_after_inference_mode(make, dense, shape):
    pruned(dense)
    layer, x = make(dense), torch.randn(*shape)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), dense(x))
    layer(x.requires_grad_()).square().sum().backward()
    (wanted,) = torch.autograd.grad(dense(x).square().sum(), x)
    torch.testing.assert_close(x.grad, wanted)


def test_prepared_calls_run_on_any_number_of_threads():
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 24, 1, stride=2, bias=False)
    pruned(conv)
    layer, x = pm.nn.PrunedConv2d.from_dense(conv), torch.randn(2, 16, 28, 28)
    for count in (1, 2, 3, 1):
        with torch.no_grad(), on_threads(count):
            torch.testing.assert_close(layer(x), conv(x), rtol=1e-4, atol=1e-4)
