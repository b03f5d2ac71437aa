"""pm.convert and `pumice convert`: equal outputs of the other library's network and of one written with pumice.nn."""

import logging
import pickle
from functools import partial

import pytest
import torch
from commands import run_command
from safetensors.torch import load_file, save_file

import pumice as pm
from pumice.cli import main
from pumice.compat import flexgemm, spconv
from pumice.compat import torchsparse as ts
from pumice.errors import DtypeError, OptionError

pytestmark = pytest.mark.usefixtures("seeded")

EXTENT = 8


def cloud(channels: int = 4):
    coords = torch.unique(torch.cat([torch.randint(0, 2, (150, 1)), torch.randint(0, EXTENT, (150, 3))], 1), dim=0)
    return torch.randn(len(coords), channels), coords.int()


def randomized(net: torch.nn.Module) -> torch.nn.Module:
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            torch.nn.init.uniform_(module.weight, 0.5, 2)
            torch.nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net.eval()


class Net(torch.nn.Module):
    """A U-Net of one level. layers: name -> module; up takes the finer tensor as its target, if not None."""

    def __init__(self, layers, cat) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.cat, self.targets = cat, isinstance(layers["up"], pm.nn.InverseConv3d)

    def forward(self, x):
        a = self.stem(x)
        b = self.deep(self.down(a))
        up = self.up(b, a) if self.targets else self.up(b)
        return self.head(self.cat([up, a]))


def of_torchsparse(spnn, **strided) -> dict[str, torch.nn.Module]:
    return {
        "stem": torch.nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.ReLU(True)),
        "down": spnn.Conv3d(8, 8, 2, 2, **strided),
        "deep": torch.nn.Sequential(spnn.Conv3d(8, 8, (3, 1, 1), bias=True), spnn.BatchNorm(8)),
        "up": spnn.Conv3d(8, 8, 2, stride=2, transposed=True),
        "head": spnn.Conv3d(16, 3, 1, bias=True),
    }


def of_pumice(out: str) -> dict[str, torch.nn.Module]:
    nn, plain = pm.nn, {"bias": False}
    return {
        "stem": nn.Sequential(nn.Conv3d(4, 8, 3, **plain), nn.BatchNorm(8), nn.ReLU()),
        "down": nn.Conv3d(8, 8, 2, stride=2, padding=0, out=out, **plain),
        "deep": nn.Sequential(nn.Conv3d(8, 8, (3, 1, 1)), nn.BatchNorm(8)),
        "up": nn.InverseConv3d(8, 8, 2, stride=2, padding=0, **plain),
        "head": nn.Conv3d(16, 3, 1),
    }


@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_torchsparse(mode: str):
    v = ts.version(mode)
    net = randomized(Net(of_torchsparse(v.nn), v.cat))
    ours = Net(of_pumice("floor_unique" if mode == "1.4" else "support"), pm.cat).eval()
    found = pm.convert.torchsparse(net.state_dict(), kernels={"deep.0": (3, 1, 1)})
    ours.load_state_dict(found)
    feats, coords = cloud()
    x = v.SparseTensor(feats, coords if mode == "2.1" else coords.roll(-1, 1))
    y = ours(pm.SparseTensor(feats, coords, spatial_shape=(EXTENT,) * 3))
    torch.testing.assert_close(net(x).F, y.feats, rtol=1e-5, atol=1e-5)
    assert "torchsparse: kernels, first axis fastest, to weights [3, 3, 3]: 1" in found.report
    assert "torchsparse: kernels, last axis fastest, to weights [2, 2, 2]: 2" in found.report


def test_a_kernel_of_unknown_size_is_named():
    net = Net(of_torchsparse(ts.nn), ts.cat)
    with pytest.raises(OptionError, match=r"deep\.0\.kernel has 3 taps, no 3-dimensional cube"):
        pm.convert.torchsparse(net.state_dict())
    with pytest.raises(OptionError, match=r"deep\.0\.kernel has 3 taps, the kernel size given is \(3, 3, 1\)"):
        pm.convert.torchsparse(net.state_dict(), kernels={"deep.0": (3, 3, 1)})


def test_reversed_taps_of_stride_one():
    feats, coords = cloud()
    theirs = ts.Conv3d(4, 6, 3, transposed=True)
    ours = pm.nn.Conv3d(4, 6, 3, bias=False)
    ours.load_state_dict(pm.convert.torchsparse({"kernel": theirs.kernel.detach()}, flipped="kernel"))
    found = ours(pm.SparseTensor(feats, coords)).feats
    torch.testing.assert_close(theirs(ts.SparseTensor(feats, coords)).F, found, rtol=1e-5, atol=1e-5)


def of_spconv() -> dict[str, torch.nn.Module]:
    plain = {"bias": False}
    stem = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3, **plain), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    return {
        "stem": stem,
        "down": spconv.SparseConv3d(8, 8, 2, 2, indice_key="down", **plain),
        "deep": spconv.SparseSequential(spconv.SubMConv3d(8, 8, (3, 1, 1)), torch.nn.BatchNorm1d(8)),
        "up": spconv.SparseInverseConv3d(8, 8, 2, "down", **plain),
        "head": spconv.SubMConv3d(16, 3, 1),
    }


def _joined(tensors):
    return tensors[0].replace_feature(torch.cat([t.features for t in tensors], 1))


@pytest.mark.parametrize("layout", ["KRSC", "RSKC", "RSCK"])
def test_spconv(layout: str):
    torch.manual_seed(0)
    net = randomized(Net(of_spconv(), _joined))
    ours = Net(of_pumice("support"), pm.cat).eval()
    state = {}
    for key, value in net.state_dict().items():
        if value.ndim == 5 and layout != "KRSC":
            kernel = value.shape[1:-1]
            if kernel.numel() > 1:
                value = value.permute(1, 2, 3, 0, 4) if layout == "RSKC" else value.permute(1, 2, 3, 4, 0)
            else:
                # One memory, read as [C_in, C_out].
                outputs, inputs = value.shape[0], value.shape[-1]
                value = value.reshape(*kernel, *((outputs, inputs) if layout == "RSKC" else (inputs, outputs)))
        state[key] = value
    state["down.max_num_voxels_during_training"] = torch.zeros(1)
    found = pm.convert.spconv(state)
    ours.load_state_dict(found)
    feats, coords = cloud()
    y = net(spconv.SparseConvTensor(feats, coords, [EXTENT] * 3, 2))
    z = ours(pm.SparseTensor(feats, coords, spatial_shape=(EXTENT,) * 3))
    torch.testing.assert_close(y.features, z.feats, rtol=1e-5, atol=1e-5)
    count = 5 if layout == "RSCK" else 4
    assert f"spconv: weights from {layout}: {count}" in found.report and "spconv: buffers dropped: 1" in found.report


def test_spconv_leaves_dense_weights_and_asks():
    state = {"a.weight": torch.zeros(16, 3, 3, 3, 4), "dense.weight": torch.zeros(32, 16, 3, 3, 3)}
    found = pm.convert.spconv(state)
    assert found["dense.weight"].shape == (32, 16, 3, 3, 3) and "spconv: left, no sparse weight: 1" in found.report
    with pytest.raises(
        OptionError, match=r"\['KRSC', 'RSCK', 'RSKC'\] fit all weights, as a\.weight \[3, 3, 3, 3, 3\]"
    ):
        pm.convert.spconv({"a.weight": torch.zeros(3, 3, 3, 3, 3)})
    assert pm.convert.spconv({"a.weight": torch.zeros(3, 3, 3, 3, 3)}, layout="RSCK")
    with pytest.raises(OptionError, match="layout='SRCK' is unknown; there are KRSC, RSKC, RSCK"):
        pm.convert.spconv(state, layout="SRCK")
    two = {"sparse.weight": torch.arange(4.0 * 9 * 5).view(3, 3, 5, 4), "head.weight": torch.zeros(4, 5, 3, 3)}
    found = pm.convert.spconv(two, dim=2, only="^sparse", layout="RSCK")
    assert torch.equal(found["sparse.weight"], two["sparse.weight"].permute(3, 0, 1, 2))
    assert torch.equal(found["head.weight"], two["head.weight"])


def test_strided_pointwise_weights_of_spconv():
    theirs = spconv.SparseConv3d(4, 6, 1, 2, bias=False)
    ours = pm.nn.Conv3d(4, 6, 1, stride=2, padding=0, out="support", bias=False)
    ours.load_state_dict(pm.convert.spconv({"weight": theirs.weight.detach()}, layout="KRSC", strided="weight"))
    feats, coords = cloud()
    y = theirs(spconv.SparseConvTensor(feats, coords, [EXTENT] * 3, 2))
    z = ours(pm.SparseTensor(feats, coords, spatial_shape=(EXTENT,) * 3))
    torch.testing.assert_close(y.features, z.feats, rtol=1e-5, atol=1e-5)


def minkowski_convolution(cells, kernel, taps, stride):
    """Scalar: outputs floor(in / stride), taps in the order given."""
    found = {}
    for b, *at in {(b, *(c // stride for c in at)) for b, *at in cells}:
        total = torch.zeros(kernel.shape[-1])
        for tap, weight in zip(taps, kernel, strict=True):
            given = cells.get((b, *(stride * c + t for c, t in zip(at, tap, strict=True))))
            total = total if given is None else total + given @ weight
        found[(b, *at)] = total
    return found


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (2, 2), (3, 2)])
def test_minkowski_kernels(size: int, stride: int):
    feats, coords = cloud()
    state = {"net.0.kernel": torch.randn(size**3, 4, 5), "net.0.bias": torch.randn(1, 5)}
    ours = torch.nn.ModuleDict({"net": torch.nn.ModuleList([pm.nn.Conv3d(4, 5, size, stride=stride)])})
    ours.load_state_dict(pm.convert.minkowski(state))
    start = size // 2 if size % 2 else 0
    axis = [t - start for t in range(size)]
    taps = [(x, y, z) for z in axis for y in axis for x in axis]
    cells = dict(zip(map(tuple, coords.tolist()), feats, strict=True))
    expected = minkowski_convolution(cells, state["net.0.kernel"], taps, stride)
    y = ours["net"][0](pm.SparseTensor(feats, coords))
    assert {*map(tuple, y.coords.tolist())} == expected.keys()
    for cell, value in zip(y.coords.tolist(), y.feats, strict=True):
        torch.testing.assert_close(value, expected[tuple(cell)] + state["net.0.bias"][0], rtol=1e-4, atol=1e-5)


def test_minkowski_names_and_offsets():
    cross = [[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]]
    state = {
        "block.conv.kernel": torch.randn(7, 4, 4),
        "block.norm.bn.weight": torch.randn(4),
        "block.norm.bn.running_mean": torch.randn(4),
        "final.linear.weight": torch.randn(3, 4),
        "final.linear.bias": torch.randn(3),
        "point.kernel": torch.randn(4, 4),
    }
    with pytest.raises(OptionError, match=r"block\.conv\.kernel has 7 taps"):
        pm.convert.minkowski(state)
    found = pm.convert.minkowski(state, kernels={"block.conv": 7})
    assert {*found} == {
        "block.conv.weight", "block.norm.weight", "block.norm.running_mean", "final.weight", "final.bias",
        "point.weight",
    }  # fmt: skip
    assert found["point.weight"].shape == (4, 1, 1, 1, 4)
    feats, coords = cloud()
    conv = pm.nn.Conv3d(4, 4, None, offsets=cross, bias=False)
    conv.load_state_dict({"weight": found["block.conv.weight"]})
    cells = dict(zip(map(tuple, coords.tolist()), feats, strict=True))
    expected = minkowski_convolution(cells, state["block.conv.kernel"], cross, 1)
    for cell, value in zip(coords.tolist(), conv(pm.SparseTensor(feats, coords)).feats, strict=True):
        torch.testing.assert_close(value, expected[tuple(cell)], rtol=1e-4, atol=1e-5)


def test_flexgemm():
    feats, coords = cloud()
    state = {"conv.weight": torch.randn(6, 3, 3, 3, 4), "conv.bias": torch.randn(6)}
    ours = torch.nn.ModuleDict({"conv": pm.nn.Conv3d(4, 6, 3)})
    ours.load_state_dict(pm.convert.flexgemm(state))
    y, _ = flexgemm.sparse_submanifold_conv(feats, coords, (2, 4, 8, 8, 8), state["conv.weight"], state["conv.bias"])
    torch.testing.assert_close(ours["conv"](pm.SparseTensor(feats, coords)).feats, y, rtol=1e-5, atol=1e-5)


def test_nested_checkpoints(caplog):
    weight = torch.randn(8, 4, 4)
    for wrapped in ({"state_dict": {"module.a.kernel": weight}, "epoch": 3}, {"model": {"a.kernel": weight}}):
        with caplog.at_level(logging.INFO, "pumice.compat"):
            found = pm.convert.torchsparse(wrapped)
        assert {*found} == {"a.weight"} and "torchsparse: kernels, last axis fastest" in caplog.text
    with pytest.raises(DtypeError, match="found dict without any"):
        pm.convert.torchsparse({"epoch": 3})


@pytest.fixture
def pumice(monkeypatch, capsys):
    return partial(run_command, main.main, "pumice", monkeypatch, capsys)


def test_command(pumice, tmp_path):
    state = {"a.kernel": torch.randn(27, 4, 5), "b.kernel": torch.randn(3, 5, 4), "b.bias": torch.zeros(4)}
    torch.save({"state_dict": state, "epoch": 1}, tmp_path / "in.pth")
    save_file(state, tmp_path / "in.safetensors")
    for name in ("in.pth", "in.safetensors"):
        ran = pumice("convert", tmp_path / name, tmp_path / "out.safetensors", "--from", "torchsparse",
                     "--kernel", "b=3,1,1")  # fmt: skip
        assert ran.code == 0, ran.err
        assert "kernels, first axis fastest, to weights [3, 3, 3]: 1" in ran.out
        found = load_file(tmp_path / "out.safetensors")
        expected = pm.convert.torchsparse(state, kernels={"b": (3, 1, 1)})
        assert {*found} == {*expected} and all(torch.equal(found[k], v) for k, v in expected.items())


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_command_with_bad_input(pumice, tmp_path):
    out = tmp_path / "out.safetensors"
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "noise.pth").write_bytes(b"noise")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"epoch": 1}, tmp_path / "none.pth")
    torch.save({"a.kernel": torch.zeros(3, 2, 2)}, tmp_path / "odd.pth")
    names = {"missing.pth": "no such file", "evil.pth": "", "noise.pth": "", "noise.safetensors": "", "empty.pt": "",
             "none.pth": "without any", "odd.pth": "a.kernel has 3 taps"}  # fmt: skip
    for name, text in names.items():
        ran = pumice("convert", tmp_path / name, out, "--from", "torchsparse")
        assert ran.code == 1 and "unpickled" not in ran.out
        assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
        assert ran.err.count(name) == 1 and text in ran.err
    torch.save({"a.kernel": torch.zeros(8, 2, 2)}, tmp_path / "good.pth")
    for arguments, text in ((("--from", "fvdb"), "'fvdb' is unknown; there are spconv, torchsparse, minkowski"),
                            (("--from", "torchsparse", "--layout", "KRSC"), "--from torchsparse takes other options"),
                            (("--from", "torchsparse", "--kernel", "a=x"), "--kernel takes LAYER=3,3,1, found 'a=x'"),
                            ):  # fmt: skip
        ran = pumice("convert", tmp_path / "good.pth", out, *arguments)
        assert ran.code == 1 and text in ran.err and ran.err.count("\n") == 1
    ran = pumice("convert", tmp_path / "good.pth", tmp_path / "none" / "out.safetensors", "--from", "torchsparse")
    assert ran.code == 1 and "expected a file that can be written" in ran.err
