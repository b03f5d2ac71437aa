"""`python -m benchmarks profile`: the tree of calls, its parts, the page and the picture, on the CPU."""

import re
import time

import pytest
import torch
from pages import data_of
from torch import nn

import pumice as pm
from benchmarks import __main__ as cli
from benchmarks.profile import page as host_page
from benchmarks.profile import parts as host_parts
from benchmarks.profile.parts import MAPS, MODULES, OTHER, PARTS, STARTING, WAITING, part_of, part_of_file, shares
from benchmarks.profile.profile import Profiled, ProfileOptions, network, profile, scene
from benchmarks.profile.trace import Costs, Node, Traced, Tracer, traced
from pumice.cli import page
from pumice.errors import FileError, OptionError
from pumice.ops import SparseTensor
from pumice.testing import random_cloud

CPU = torch.device("cpu")


def short():
    time.sleep(0.002)


def long():
    time.sleep(0.006)
    short()


class Half(nn.Module):
    def forward(self, x):
        time.sleep(0.003)
        return x


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Half(), Half()

    def forward(self, x):
        return self.second(self.first(x))


def place(node, *names):
    """The node below by names of functions."""
    for name in names:
        node = next(child for child in node.children.values() if child.name == name)
    return node


# the tree


def test_time_belongs_to_who_spends_it():
    found = traced(long, nn.Identity(), 4, lambda: None)
    outer, inner = place(found.root, "long"), place(found.root, "long", "short")
    assert (outer.calls, inner.calls) == (4, 4)
    assert inner.total / 4 == pytest.approx(0.002, rel=0.4) and outer.total / 4 == pytest.approx(0.008, rel=0.4)
    assert found.wall == pytest.approx(0.008, rel=0.4) and found.root.total / 4 == pytest.approx(found.wall, rel=0.4)
    assert all(node.own >= 0 for node in found.root.walk())
    assert not any(node.file.endswith("host_trace.py") for node in found.root.walk())


def test_many_small_calls_cost_what_they_cost():
    """Without the trace's own time: sums of untraced passes and of the tree agree."""

    def leaf(value):
        return value + 1

    def many():
        total = 0
        for _ in range(3000):
            total = leaf(total)
        return [].append(total)

    many()
    found = traced(many, nn.Identity(), 10, lambda: None)
    (node,) = (one for one in found.root.walk() if one.name.endswith("leaf"))
    assert node.calls == 30_000
    assert 0.3 * found.wall < found.root.total / 10 < 1.5 * found.wall


def test_errors_and_generators_leave_the_tree_whole():
    def raises():
        raise ValueError

    def call():
        for _ in range(3):
            try:
                raises()
            except ValueError:
                list(n for n in range(4))
        with pytest.raises(TypeError):
            len(3)
        short()

    found = traced(call, nn.Identity(), 2, lambda: None)
    top = next(iter(found.root.children.values()))
    # The call, and the wait behind it.
    assert [node.calls for node in found.root.children.values()] == [2, 2]
    assert place(top, "short").calls == 2


def test_the_profile_function_of_before_comes_back():
    import sys

    seen = []

    def mine(*args):
        seen.append(args)

    sys.setprofile(mine)
    try:
        with Tracer({}, Costs()):
            short()
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert sys.getprofile() is None


def test_layers_are_told_apart():
    net = Whole()
    with torch.no_grad():
        found = traced(lambda: net(1), net, 3, lambda: None)
    held = {one.name: one for one in shares(found).layers}
    assert {"first Half", "second Half", "Whole"} <= set(held)
    assert held["first Half"].total == pytest.approx(3000, rel=0.5) and held["Whole"].total < 1500
    assert held["first Half"].calls == held["Whole"].calls == 1


# parts


def test_a_place_belongs_to_the_first_that_is_known():
    launch = Node("KernelLauncher.__call__", "/x/pumice/runtime/launch.py")
    torch_call = Node("empty_strided_like", "", parent=launch)
    assert part_of(torch_call) == STARTING
    search = Node("find", "/x/pumice/coords/lookup.py", parent=launch)
    assert part_of(Node("relu", "", parent=Node("f", "/elsewhere/own.py", parent=search))) == MAPS
    assert part_of(Node("tolist", "", parent=search)) == WAITING
    assert part_of(Node("forward", "/home/net.py", layer="net")) == MODULES and part_of(Node("pass")) == OTHER
    assert part_of_file("C:\\lib\\torch\\nn\\modules\\module.py") == MODULES and part_of_file("/x/y.py") is None


def test_every_file_that_is_named_is_there():
    from pathlib import Path

    here = Path(pm.__file__).parent.parent
    for name in host_parts._BY_FILE:
        if name.startswith("pumice/"):
            assert (here / name).exists(), name


def test_a_network_in_parts():
    net = pm.models.MinkUNet(4, 19, 0.125).eval()
    coords, feats = random_cloud(60, 3, extent=8), torch.randn(60, 4)

    def call():
        with torch.no_grad():
            net(SparseTensor(feats, coords))

    call()
    found = traced(call, net, 2, lambda: None)
    held = shares(found)
    assert set(held.parts) <= set(PARTS) and held.total == pytest.approx(1e6 * found.root.total / 2)
    for whole in (held.functions, held.layers):
        assert sum(one.total for one in whole) == pytest.approx(held.total)
        assert [one.total for one in whole] == sorted((one.total for one in whole), reverse=True)
    assert held.parts[MAPS] > 0.02 * held.total and held.parts.get(OTHER, 0.0) < 0.1 * held.total
    layers = {one.name for one in held.layers}
    assert sum(name.endswith(("Conv3d", "InverseConv3d")) for name in layers) == 42 and "head Linear" in layers


# what is asked


@pytest.mark.parametrize(
    "name, told",
    [
        ("resnet", "model 'resnet' is unknown; there are minkunet, centerpoint, minkunet-WIDTH, module:factory"),
        ("centerpoint-2", "'centerpoint-2' is unknown"),
        ("minkunet-wide", "a width is a number, as in minkunet-0.5, found 'wide'"),
        ("no_such_module:make", "expected module:factory, found: No module named"),
        ("math:nothing", "module 'math' has no attribute 'nothing'"),
        ("builtins:dict", "expected a torch.nn.Module, found dict"),
    ],
)
def test_models_that_are_none(name, told):
    with pytest.raises(OptionError, match=re.escape(told)):
        network(name)


def test_models_by_name(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text("import pumice as pm\n\ndef make():\n    return pm.nn.Conv3d(2, 3, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert network("own_network:make").out_channels == 3
    assert network("minkunet-0.5").head.out_features == 19
    assert type(network("centerpoint")).__name__ == "CenterPointBackbone"


def test_scans_by_name(write, scenes):
    shell, coords = scene(ProfileOptions("minkunet", "shell_8", CPU), 3)
    assert shell.shape == (len(coords), 3) and len(coords) > 50
    path = write("one.npz", scenes(1)[0])
    feats, coords = scene(ProfileOptions("minkunet", str(path), CPU, voxel=0.5), 7)
    assert feats.shape == (len(coords), 7) and not feats[:, 4:].any() and feats[:, 3].any()
    with pytest.raises(FileError, match="expected a scan, a scene of PUMICE_DATA, shell_SIZE or street"):
        scene(ProfileOptions("minkunet", "nowhere", CPU), 4)
    with pytest.raises(OptionError, match="precision='int8' is unknown"):
        ProfileOptions("minkunet", "street", CPU, "int8")
    with pytest.raises(OptionError, match="passes and voxel are above 0"):
        ProfileOptions("minkunet", "street", CPU, passes=0)


def test_what_has_no_convolution():
    with pytest.raises(OptionError, match="Identity has no convolution"):
        profile(ProfileOptions("torch.nn:Identity", "shell_8", CPU))


# what is told


def tree():
    """pass 10: net 9 (itself 0) -> first 6 (itself 1) -> bmm 5; -> second 3; and 1 of its own; thin: 0.001."""
    root = Node("pass", own=1.0)

    def below(parent, name, own, **more):
        node = Node(name, parent=parent, own=own, calls=2, **more)
        parent.children[name] = node
        return node

    call = below(root, "call", 0.0, file="torch/nn/modules/module.py", layer="Net")
    forward = below(call, "forward", 0.0, file="own.py", layer="Net")
    first = below(forward, "first", 1.0, file="own.py", layer="block.first Conv3d")
    below(first, "bmm", 5.0)
    below(forward, "second", 3.0, file="pumice/coords/lookup.py")
    below(forward, "thin", 0.001)
    return root


def profiled():
    found = Traced(tree(), passes=2, wall=5.0)
    return Profiled(ProfileOptions("net", "a/scan.bin", CPU), 1, 7, found, shares(found), 2.0)


def test_blocks_hang_together():
    made = host_page.blocks(profiled())
    assert [(block.label, block.depth) for block in made] == [
        ("pass", 0), ("Net", 1), ("block.first Conv3d", 2), ("bmm", 3), ("second", 2)
    ]  # fmt: skip
    whole, net, first, bmm, second = made
    assert whole.width == pytest.approx(10.001e6 / 2) and bmm.width == pytest.approx(2.5e6)
    assert (first.start, second.start) == (net.start, pytest.approx(first.start + first.width))
    assert [block.above for block in made] == [-1, 0, 1, 2, 1]
    assert second.part == MAPS and bmm.part == MODULES and "2 calls" not in bmm.told and "1 calls" in bmm.told
    values = host_page._icicle(made)["data"][0]["values"]
    assert sum(values) == pytest.approx(whole.width, rel=1e-4) and values[2] == pytest.approx(0.5e6)


def test_the_command(command, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plotly_source", lambda: "/* plotly */")
    # On a busy host what tracing takes may be measured as more than short functions take.
    monkeypatch.setattr("benchmarks.profile.trace._SETTLED", 0)
    monkeypatch.setattr(cli.console, "width", 300)
    out = tmp_path / "out"
    ran = command("profile", "minkunet-0.125", "shell_8", "--passes", 2, "--device", "cpu", "--out", out)
    assert ran.code == 0, ran.out + ran.err
    assert "42 convolutions, fp32" in ran.out and "on a CPU the arithmetic is the host's" in ran.out
    for title in ("by part", "by function, itself", "by layer, without the layers within it", "finding maps"):
        assert title in ran.out
    text = (out / "profile.html").read_text(encoding="utf-8")
    held = data_of(text)
    (trace,) = held["flame"]["data"]
    assert trace["type"] == "icicle" and "MinkUNet" in trace["labels"] and len(set(trace["ids"])) == len(trace["ids"])
    assert set(trace["parents"]) <= {"", *trace["ids"]} and min(trace["values"]) >= 0
    assert text.count("Conv3d</td>") >= 42 and 'id="flame"' in text
    assert (out / "profile.png").stat().st_size > 10_000


def test_a_device_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plotly_source", lambda: "/* plotly */")
    found = profiled()
    written, _ = host_page.write(found, tmp_path)
    text = written.read_text(encoding="utf-8")
    assert "busy with kernels" in text and "waits for the device" not in text
    assert "the device busy 2000.000 ms" in host_page.summary(found)
    slow = Profiled(found.asked, 1, 7, Traced(tree(), 2, 8.0), found.shares, None, "no profiler")
    assert slow.hidden == pytest.approx(8e6 - 10.001e6 / 2)
    assert "no profiler" in host_page.summary(slow)
    parts, *_ = host_page.tables(slow)
    assert "not traced: more waiting" in str(list(parts.columns[0].cells))
    written, _ = host_page.write(slow, tmp_path)
    assert "are missing: waits for the device" in written.read_text(encoding="utf-8")
