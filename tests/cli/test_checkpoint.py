"""Checkpoints: what was saved comes back, and a file that cannot be used says what is wrong with it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from pumice.data import STREET
from pumice.errors import FileError
from pumice.label import checkpoint
from pumice.label.checkpoint import Task, example

CPU = torch.device("cpu")


@pytest.fixture
def task(scenes):
    return Task.of(scenes(1), STREET, 0.5, 0.1)


def test_round_trip(task, scenes, tmp_path):
    torch.manual_seed(0)
    net = task.network()
    sample = example(scenes(1)[0], task, CPU)
    net(sample.x)  # statistics that are not those of a fresh network
    path = checkpoint.save(tmp_path / "a" / "b" / "net.safetensors", net, task)
    other, read = checkpoint.load(path, CPU)
    assert read == task
    assert net.state_dict().keys() == other.state_dict().keys()
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(net.eval()(sample.x).feats, other.eval()(sample.x).feats)
    assert [p.name for p in path.parent.iterdir()] == ["net.safetensors"]


def test_a_failed_save_leaves_the_old_file(task, tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path / "net.safetensors", task.network(), task)
    before = path.read_bytes()

    def full_disk(state, target, metadata):
        target.write_bytes(before[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(FileError, match="net.safetensors: expected a checkpoint that can be written, .*no space"):
        checkpoint.save(path, task.network(), task)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]


def test_where_nothing_can_be_written_the_weights_go_elsewhere(task, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(checkpoint.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match=r"file.net.safetensors: expected .*; the weights are in .* instead"):
        path = checkpoint.save_or_elsewhere(tmp_path / "file" / "net.safetensors", task.network(), task)
    assert path.parent.parent == tmp_path and checkpoint.load(path, CPU)[1] == task


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:50])


def empty(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("these are not weights\n")


def flipped_header(path):
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(bytes(data))


def of_others(path):
    save_file({"w": torch.zeros(3)}, path, metadata={"format": "pt"})


def without_metadata(path):
    save_file({"w": torch.zeros(3)}, path)


def without_task(path):
    save_file({"w": torch.zeros(3)}, path, metadata={"format": checkpoint.FORMAT})


def broken_task(path):
    save_file({"w": torch.zeros(3)}, path, metadata={"format": checkpoint.FORMAT, "task": "{"})


def half_a_task(path):
    save_file({"w": torch.zeros(3)}, path, metadata={"format": checkpoint.FORMAT, "task": json.dumps({"voxel": 1})})


def gone(path):
    path.unlink()


def a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    cut: "safetensors checkpoint",
    cut_in_the_header: "safetensors checkpoint",
    empty: "safetensors checkpoint",
    text: "safetensors checkpoint",
    flipped_header: "safetensors checkpoint",
    of_others: "expected format 'pumice-segmentation-1', found 'pt'",
    without_metadata: "expected format 'pumice-segmentation-1', found None",
    without_task: "expected the task in the header",
    broken_task: "expected the task in the header",
    half_a_task: "expected the task in the header",
    gone: "found no such file",
    a_folder: "expected a checkpoint written by pumice, found a folder",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_file_that_cannot_be_used(task, tmp_path, damage):
    path = checkpoint.save(tmp_path / "net.safetensors", task.network(), task)
    damage(path)
    with pytest.raises(FileError) as caught:
        checkpoint.load(path, CPU)
    assert str(caught.value).startswith(f"{path}: expected ") and "found" in str(caught.value)
    assert DAMAGE[damage] in str(caught.value)


def test_weights_of_another_network(task, tmp_path):
    wide = Task(task.names, task.colors, task.voxel, 0.2, task.mean, task.std)
    path = checkpoint.save(tmp_path / "net.safetensors", wide.network(), task)
    with pytest.raises(FileError, match="expected the weights of its own network"):
        checkpoint.load(path, CPU)


@pytest.mark.parametrize("change", [{"width": -1}, {"mean": [0.0]}, {"names": ["a", "b"]}, {"voxel": None}], ids=str)
def test_a_header_that_does_not_fit_the_weights(task, tmp_path, change):
    state = {k: v.contiguous() for k, v in task.network().state_dict().items()}
    path = tmp_path / "net.safetensors"
    header = {"format": checkpoint.FORMAT, "task": json.dumps({**task.as_dict(), **change})}
    save_file(state, path, metadata=header)
    with pytest.raises(FileError, match="expected"):
        checkpoint.load(path, CPU)
