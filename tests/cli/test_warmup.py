"""`pumice warmup`: networks by name, scenes of several sizes, kernels that are waited for."""

import threading

import pytest
import torch

import pumice as pm
from pumice.cli import kept
from pumice.errors import OptionError
from pumice.label import checkpoint
from pumice.label.checkpoint import Task
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.runtime.compile import Background

CPU = torch.device("cpu")


@pytest.fixture
def coarse(monkeypatch):
    monkeypatch.setattr(kept, "VOXELS", (4.0, 2.0))


def test_networks_by_name(tmp_path):
    assert isinstance(kept.network("minkunet"), MinkUNet)
    assert isinstance(kept.network("centerpoint"), CenterPointBackbone)
    assert isinstance(kept.network("torch.nn:Identity"), torch.nn.Identity)
    task = Task(("road", "car"), ("#000", "#fff"), 0.5, 0.1, (0.0,) * 3, (1.0,) * 3)
    saved = checkpoint.save(tmp_path / "net.safetensors", task.network(), task)
    assert isinstance(kept.network(str(saved)), MinkUNet)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("unet", "'unet' is no file, and no model; there are minkunet, centerpoint, and MODULE:FUNCTION"),
        ("no_such_module:net", "cannot be imported: No module named"),
        ("torch.nn:NoSuch", "cannot be imported"),
        ("builtins:dict", "should return a torch.nn.Module, found dict"),
    ],
)
def test_other_names_are_refused(name, told):
    with pytest.raises(OptionError, match=told):
        kept.network(name)


def test_channels_are_those_of_the_first_layer():
    assert kept.channels_of(torch.nn.Sequential(pm.nn.ReLU(), pm.nn.Conv3d(5, 8, 3))) == 5
    with pytest.raises(OptionError, match="no layer with a weight"):
        kept.channels_of(torch.nn.ReLU())
    with pytest.raises(OptionError, match="precision='int8' is unknown"):
        kept.warm(pm.nn.Conv3d(4, 8, 3), 4, CPU, "int8", print)


def test_a_network_runs_on_streets_of_several_sizes(coarse, monkeypatch):
    seen, sizes = [], []
    background, ends = Background(1), threading.Event()
    monkeypatch.setattr(kept, "BACKGROUND", background)
    monkeypatch.setattr(kept, "_REPORT", 0.01)
    net = torch.nn.Sequential(pm.nn.Conv3d(4, 8, 3, stride=2), pm.nn.BatchNorm(8), pm.nn.ReLU())
    net[2].register_forward_hook(lambda module, given, y: sizes.append(len(y)))
    background.submit(lambda: ends.wait(30))

    def watch(left):
        seen.append(left)
        ends.set()

    most, seconds = kept.warm(net, 4, CPU, "bf16", watch)
    assert len(sizes) == 2 and sizes[0] < sizes[1] < most and seconds > 0
    assert seen[0] == 1 and background.left == 0 and not net.training
    background.close()


def test_the_command(coarse, pumice):
    done = pumice("warmup", "minkunet", "--device", "cpu")
    assert done.code == 0 and "ready for scenes like streets of up to" in done.out
    wrong = pumice("warmup", "nothing")
    assert wrong.code == 1 and "no model" in wrong.err
