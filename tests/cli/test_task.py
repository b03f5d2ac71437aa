"""The segmentation task: inputs of the network, classes of voxels, what a task says about itself."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import pumice as pm
from pumice.data import STREET, Scan
from pumice.errors import OptionError
from pumice.label.checkpoint import Task, example, voxel_labels

CPU = torch.device("cpu")


def naive_majority(inverse, labels, voxels, classes):
    """The commonest class of each voxel, the lowest of equals; -1 where no point has one."""
    out = []
    for voxel in range(voxels):
        votes = [0] * classes
        for place, label in zip(inverse, labels, strict=True):
            if place == voxel and 0 <= label < classes:
                votes[label] += 1
        out.append(votes.index(max(votes)) if any(votes) else -1)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_voxel_labels_are_the_majority(seed):
    rng = torch.Generator().manual_seed(seed)
    x = pm.voxelize(torch.rand(200, 3, generator=rng), size=0.4)
    labels = torch.randint(-1, 5, (200,), generator=rng)
    got = voxel_labels(x, labels, 4)  # 4 is no class of the task
    assert got.dtype == torch.int64
    assert got.tolist() == naive_majority(x.inverse.tolist(), labels.tolist(), len(x), 4)


def test_voxel_labels_of_equals_and_of_none():
    x = pm.voxelize(torch.tensor([[0.1], [0.2], [1.1], [1.2], [1.3], [2.5]]), size=1.0, dim=1)
    assert voxel_labels(x, torch.tensor([3, 1, -1, 2, -1, -1]), 4).tolist() == [1, 2, -1]
    assert voxel_labels(x, torch.full((6,), -1), 4).tolist() == [-1] * 3


def test_the_inputs_are_normalised(scenes):
    scans = scenes(2)
    task = Task.of(scans, STREET, 0.3, 0.1)
    assert task.in_channels == 4 and task.names == STREET.names and (task.voxel, task.width) == (0.3, 0.1)
    height = np.concatenate([s.xyz[:, 2] - np.percentile(s.xyz[:, 2], 2) for s in scans])
    distance = np.concatenate([np.hypot(s.xyz[:, 0], s.xyz[:, 1]) for s in scans])
    light = np.concatenate([s.feats[:, 0] for s in scans])
    np.testing.assert_allclose(task.mean, [v.mean() for v in (height, distance, light)], rtol=1e-4)
    np.testing.assert_allclose(task.std, [v.std() for v in (height, distance, light)], rtol=1e-4)


def test_an_example(scenes):
    scan = scenes(1)[0]
    task = Task.of([scan], STREET, 0.3, 0.1)
    sample = example(scan, task, CPU)
    assert sample.x.channels == task.in_channels and len(sample.x) < len(scan)
    cells = np.floor((scan.xyz.astype(float) - scan.xyz.astype(float).min(0)) / 0.3).astype(int)
    assert np.array_equal(sample.x.coords[sample.x.inverse][:, 1:].numpy(), cells)
    assert torch.all(sample.x.feats[:, -1] == 1)
    members = sample.x.inverse == 7
    height = scan.xyz[:, 2] - np.percentile(scan.xyz[:, 2], 2)
    want = ((height[members.numpy()] - task.mean[0]) / task.std[0]).mean()
    assert abs(sample.x.feats[7, 0].item() - want) < 1e-4
    assert example(replace(scan, labels=None), task, CPU).labels is None


def test_turning_keeps_features_and_labels(scenes):
    scan = scenes(1)[0]
    task = Task.of([scan], STREET, 1e-3, 0.1)  # voxels so small that nearly every point has its own
    plain = example(scan, task, CPU)
    turned = example(scan, task, CPU, np.random.default_rng(0))
    assert not torch.equal(plain.x.coords, turned.x.coords)
    per_point = [s.labels[s.x.inverse] for s in (plain, turned)]
    assert (per_point[0] == per_point[1]).double().mean() > 0.999
    torch.testing.assert_close(plain.x.feats[plain.x.inverse].mean(0), turned.x.feats[turned.x.inverse].mean(0))
    again = example(scan, task, CPU, np.random.default_rng(0))
    assert torch.equal(turned.x.coords, again.x.coords)


def test_features_must_agree_in_number(scenes):
    scan = scenes(1)[0]
    wide = Scan(scan.xyz, np.repeat(scan.feats, 3, axis=1), scan.labels, "wide", STREET)
    with pytest.raises(OptionError, match=r"\[1, 3\]"):
        Task.of([scan, wide], STREET, 0.3, 0.1)
    task = Task.of([scan], STREET, 0.3, 0.1)
    with pytest.raises(OptionError, match="wide: the network takes 1 features per point, the scan has 3"):
        example(wide, task, CPU)


def test_a_constant_feature_divides_by_no_zero():
    scan = Scan(np.zeros((5, 3)), np.ones((5, 2)), np.zeros(5, int), "flat")
    task = Task.of([scan], scan.label_set, 0.5, 0.1)
    assert torch.isfinite(example(scan, task, CPU).x.feats).all()


@pytest.mark.parametrize("count", [0, 1])
def test_no_point_and_one(scenes, count):
    task = Task.of(scenes(1), STREET, 0.3, 0.1)
    scan = scenes(1)[0].select(np.arange(count))
    sample = example(scan, task, CPU)
    assert len(sample.x) == count and sample.labels.tolist() == scan.labels.tolist()
    assert task.network().eval()(sample.x).feats.shape == (count, len(STREET))


def test_a_task_is_plain_json(scenes):
    task = Task.of(scenes(1), STREET, 0.3, 0.1)
    fields = json.loads(json.dumps(task.as_dict()))
    assert fields["names"] == list(STREET.names) and fields["voxel"] == 0.3 and len(fields["mean"]) == 3
