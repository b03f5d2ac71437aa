"""The main job in this process: training, what is held out, scores, interruption, going on from a checkpoint."""

import json
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

import pumice as pm
from pumice.cli import evaluate, segment
from pumice.cli import training as train
from pumice.cli.evaluate import Scores, confusion, trivial_scores
from pumice.cli.segment import Job, hold_out
from pumice.cli.training import Recipe, class_weights
from pumice.data import STREET, Scan
from pumice.errors import DeviceError, FileError, OptionError
from pumice.label import checkpoint
from pumice.label.checkpoint import Task, example

CPU = torch.device("cpu")


@pytest.fixture
def job(tmp_path, quick):
    """`job(epochs=2, ...)`: a small job into the test's own folder."""

    def job(epochs=2, precision="fp32", rate=4e-3, **more):
        return Job(tmp_path / "out", CPU, 0.5, 0.1, Recipe(epochs, rate, augment=False, precision=precision), **more)

    return job


def ignore(step, total):
    """Watch nothing."""


def strict(text):
    """JSON as other readers take it: no NaN, no Infinity."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


# Scores
def naive_confusion(labels, predicted, classes):
    out = [[0] * classes for _ in range(classes)]
    for a, b in zip(labels, predicted, strict=True):
        if 0 <= a < classes:
            out[a][b] += 1
    return out


@pytest.mark.parametrize("seed", range(4))
def test_confusion_and_scores_are_those_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    classes = 5
    labels, predicted = rng.integers(-1, classes - 1, 300), rng.integers(0, classes, 300)  # the last class never occurs
    matrix = confusion(labels, predicted, classes)
    assert matrix.tolist() == naive_confusion(labels, predicted, classes)
    scores = Scores(matrix)
    counted = [(a, b) for a, b in zip(labels, predicted, strict=True) if a >= 0]
    assert scores.accuracy == pytest.approx(sum(a == b for a, b in counted) / len(counted))
    assert scores.counts.tolist() == [sum(a == c for a, _ in counted) for c in range(classes)]
    ious = []
    for c in range(classes):
        hit = sum(a == c == b for a, b in counted)
        joint = sum(c in (a, b) for a, b in counted)
        present = any(a == c for a, _ in counted)
        assert math.isnan(scores.iou[c]) if not present else scores.iou[c] == pytest.approx(hit / joint)
        ious += [hit / joint] if present else []
    assert scores.miou == pytest.approx(sum(ious) / len(ious))


def test_scores_of_nothing_and_of_everything():
    assert (Scores(np.zeros((3, 3), int)).accuracy, Scores(np.zeros((3, 3), int)).miou) == (0, 0)
    perfect = Scores(np.diag([5, 0, 2]))
    assert (perfect.accuracy, perfect.miou) == (1, 1)


def test_trivial_scores_are_those_of_a_loop(scenes):
    train_on, last = scenes(2), scenes(3)[2]
    held = [replace(last, labels=np.where(np.arange(len(last)) % 7, last.labels, -1))]

    def bin_of(scan):
        low = np.percentile(scan.xyz[:, 2], 2)
        return [min(max(int((z - low + 2) / 0.25), 0), 119) for z in scan.xyz[:, 2]]

    votes = {}
    for scan in train_on:
        for height, label in zip(bin_of(scan), scan.labels, strict=True):
            votes.setdefault(height, []).append(label)
    pooled = [label for labels in votes.values() for label in labels]
    commonest = max(range(len(STREET)), key=pooled.count)
    by_height = {h: max(range(len(STREET)), key=labels.count) for h, labels in votes.items()}
    got = trivial_scores(train_on, held, len(STREET))
    labels = held[0].labels
    want = naive_confusion(labels, [commonest] * len(labels), len(STREET))
    assert got["majority class"].confusion.tolist() == want
    guess = [by_height.get(h, commonest) for h in bin_of(held[0])]
    assert got["majority class at each height"].confusion.tolist() == naive_confusion(labels, guess, len(STREET))


def test_class_weights(scenes):
    scan = scenes(1)[0]
    task = Task.of([scan], STREET, 0.5, 0.1)
    weights = class_weights([scan], task)
    share = np.bincount(scan.labels, minlength=len(STREET)) / len(scan)
    want = 1 / np.sqrt(share)
    np.testing.assert_allclose(weights.numpy(), want / want.mean(), rtol=1e-5)
    none = replace(scan, labels=np.where(scan.labels == 3, -1, scan.labels))
    assert class_weights([none], task)[3] == 0 and torch.isfinite(class_weights([none], task)).all()


# What is held
@pytest.mark.parametrize("count, held", [(2, [1]), (3, [2]), (4, [3]), (5, [4]), (6, [4]), (9, [4]), (10, [4, 9]),
                                         (14, [4, 9])])  # fmt: skip
def test_every_fifth_scan_is_held_out(count, held):
    scans = [Scan(np.zeros((1, 3)), np.zeros((1, 1)), name=str(i)) for i in range(count)]
    train_on, judge_on = hold_out(scans)
    assert [int(s.name) for s in judge_on] == held
    assert [int(s.name) for s in train_on] == [i for i in range(count) if i not in held]


def test_a_single_scan_is_judged_on_itself():
    scan = Scan(np.zeros((1, 3)), np.zeros((1, 1)))
    train_on, judge_on = hold_out([scan])
    assert train_on[0] is judge_on[0] is scan and len(train_on) == len(judge_on) == 1


def test_labels_in_common(scenes):
    one, two = scenes(2)
    assert segment.common_labels([one, two])[1] is two
    bare = replace(two, labels=None, name="bare")
    with pytest.raises(FileError, match=r"bare: expected labels .* found none \(1 of 2\)"):
        segment.common_labels([one, bare])
    generic = [Scan(s.xyz, s.feats, np.where(s.labels == k, k + 1, s.labels)) for k, s in enumerate((one, two))]
    first, second = segment.common_labels(generic)
    assert first.label_set == second.label_set and len(first.label_set) == 6


# Whole runs
def test_a_whole_run(scenes, job, tmp_path):
    seen = []
    train_on, judge_on = scenes(3)[:2], scenes(3)[2:]
    result = segment.run(train_on, judge_on, job(4, timing=True), lambda step, total: seen.append((step.number, total)))
    assert seen == [(i, 8) for i in range(1, 9)]
    assert [s.number for s in result.steps] == list(range(1, 9)) and not result.interrupted
    assert result.steps[-1].loss < result.steps[0].loss
    assert all(0 <= s.accuracy <= 1 and s.speed > 0 and math.isfinite(s.loss) for s in result.steps)
    assert int(result.scores.counts.sum()) == len(judge_on[0]) and result.where == "1 held-out scan"
    assert set(result.trivial) == {"majority class", "majority class at each height"}
    assert result.timing.p20 <= result.timing.median <= result.timing.p80 and result.timing.runs == 2
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "checkpoint.safetensors",
        "metrics.json",
        "predictions",
        "report.html",
    ]
    figures = strict((out / "metrics.json").read_text())
    assert figures["point_accuracy"] == result.scores.accuracy and figures["steps"] == 8
    net, task = checkpoint.load(result.checkpoint, CPU)
    assert task == result.task
    classes = evaluate.predict(net, judge_on[0], task, CPU, "fp32")
    assert np.array_equal(confusion(judge_on[0].labels, classes, 6), result.scores.confusion)


def test_the_same_seed_gives_the_same_network(scenes, job):
    states = []
    for _ in range(2):
        result = segment.run(scenes(1), scenes(1), job(2), ignore)
        states.append(checkpoint.load(result.checkpoint, CPU)[0].state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(scenes, job, precision):
    result = segment.run(scenes(1), scenes(1), job(4, precision), ignore)
    assert result.steps[-1].loss < result.steps[0].loss
    net, _ = checkpoint.load(result.checkpoint, CPU)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in net.parameters())


def test_precision_does_not_change_what_is_predicted_much(scenes, job):
    result = segment.run(scenes(1), scenes(1), job(8), ignore)
    net, task = checkpoint.load(result.checkpoint, CPU)
    full, half = (evaluate.predict(net, scenes(1)[0], task, CPU, p) for p in ("fp32", "bf16"))
    assert (full == half).mean() > 0.95


def test_time_of_the_layers(scenes, job):
    task = Task.of(scenes(1), STREET, 0.5, 0.1)
    net, x = task.network(), example(scenes(1)[0], task, CPU).x
    layers = evaluate.time_layers(net, x, "fp32", runs=2)
    convs = [a for a in layers if isinstance(net.get_submodule(a.name), pm.nn.Conv3d | pm.nn.InverseConv3d)]
    assert len(convs) == 42 and all(a.ms > 0 and a.voxels > 0 for a in convs)
    assert convs[0].name == "stem.0.0" and convs[0].channels == "4 to 3"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_inference_is_timed_with_new_maps(scenes):
    task = Task.of(scenes(1), STREET, 0.5, 0.1)
    x = example(scenes(1)[0], task, CPU).x
    timing = evaluate.time_inference(task.network(), x, "fp32", runs=3)
    assert (timing.runs, timing.voxels) == (3, len(x)) and 0 < timing.p20 <= timing.median <= timing.p80
    assert not x.geometry.maps


# Interruption
@pytest.mark.parametrize("at", [1, 3])
def test_ctrl_c_saves_a_checkpoint(scenes, job, tmp_path, at):
    def watch(step, total):
        if step.number == at:
            raise KeyboardInterrupt

    result = segment.run(scenes(1), scenes(1), job(50), watch)
    assert result.interrupted and len(result.steps) == at and result.report is None
    net, task = checkpoint.load(result.checkpoint, CPU)
    assert task == result.task
    assert len(evaluate.predict(net, scenes(1)[0], task, CPU, "fp32")) == len(scenes(1)[0])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["checkpoint.safetensors"]


def test_ctrl_c_within_a_step_saves_a_checkpoint(scenes, job, monkeypatch):
    calls = []

    def step(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args)

    plain = train._step
    monkeypatch.setattr(train, "_step", step)
    result = segment.run(scenes(1), scenes(1), job(50), ignore)
    assert result.interrupted and len(result.steps) == 2
    checkpoint.load(result.checkpoint, CPU)


def test_going_on_from_a_checkpoint(scenes, job):
    first = segment.run(scenes(1), scenes(1), job(6), ignore)
    weights = checkpoint.load(first.checkpoint, CPU)[0].state_dict()
    seen = []

    def watch(step, total):
        seen.append(step)

    second = segment.run(scenes(1), scenes(1), job(2, rate=1e-5, checkpoint=first.checkpoint), watch)
    assert second.task == first.task
    # The first loss is that of a trained network, and the weights are those of the first run, a little moved.
    assert seen[0].loss < 0.9 * first.steps[0].loss
    moved = checkpoint.load(second.checkpoint, CPU)[0].state_dict()
    change = max(float((moved[n] - weights[n]).abs().max()) for n in weights if n.endswith("weight"))
    assert 0 < change < 1e-3


def test_a_checkpoint_of_other_classes(scenes, job):
    first = segment.run(scenes(1), scenes(1), job(1), ignore)
    scan = scenes(1)[0]
    other = Scan(scan.xyz, scan.feats, scan.labels % 3, "other")
    with pytest.raises(FileError, match="checkpoint.safetensors: expected the classes .*class 0.* found .*ground"):
        segment.run([other], [other], job(1, checkpoint=first.checkpoint), ignore)


# Running a checkpoint
def test_a_checkpoint_on_scans_without_labels(scenes, job, tmp_path):
    first = segment.run(scenes(1), scenes(1), job(2), ignore)
    before = first.checkpoint.read_bytes()
    bare = [replace(s, labels=None, label_set=None) for s in scenes(3)[1:]]
    result = segment.apply(bare, job(0, checkpoint=first.checkpoint, timing=True))
    assert result.scores is None and result.steps == () and result.where == "2 scans"
    assert result.checkpoint == first.checkpoint and first.checkpoint.read_bytes() == before
    figures = strict((tmp_path / "out" / "metrics.json").read_text())
    assert "point_accuracy" not in figures and figures["inference_ms"]["median"] > 0


def test_a_checkpoint_on_scans_with_labels_is_scored(scenes, job):
    first = segment.run(scenes(1), scenes(1), job(2), ignore)
    result = segment.apply(scenes(2), job(0, checkpoint=first.checkpoint))
    assert int(result.scores.counts.sum()) == sum(map(len, scenes(2)))
    other = [Scan(s.xyz, s.feats, s.labels % 3) for s in scenes(2)]
    assert segment.apply(other, job(0, checkpoint=first.checkpoint)).scores is None


def test_a_network_is_traced_once_for_all_scans(scenes, job, monkeypatch):
    first = segment.run(scenes(1), scenes(1), job(2), ignore)
    programs, traced = import_module("pumice.engine.program"), []
    trace = programs.trace
    monkeypatch.setattr(programs, "trace", lambda *given: traced.append(given[0]) or trace(*given))
    segment.apply(scenes(3), job(0, checkpoint=first.checkpoint, timing=True))
    assert len(traced) == 1


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_checkpoint_on_hardly_any_point(scenes, job, count):
    first = segment.run(scenes(1), scenes(1), job(1), ignore)
    few = replace(scenes(1)[0].select(np.arange(count)), labels=None)
    result = segment.apply([few], job(0, checkpoint=first.checkpoint, timing=True))
    assert result.timing.voxels == count and result.report.is_file()


def test_features_that_do_not_fit_the_checkpoint(scenes, job):
    first = segment.run(scenes(1), scenes(1), job(1), ignore)
    scan = scenes(1)[0]
    wide = Scan(scan.xyz, np.repeat(scan.feats, 3, axis=1), name="wide")
    with pytest.raises(FileError, match="wide: expected 1 features per point .intensity. as in training, found 3 "):
        segment.apply([wide], job(0, checkpoint=first.checkpoint))


# Odd training data
@pytest.mark.parametrize("count", [1, 2, 5])
def test_training_on_hardly_any_point(scenes, job, count):
    few = scenes(1)[0].select(np.arange(count))
    result = segment.run([few], [few], job(2), ignore)
    assert all(math.isfinite(s.loss) for s in result.steps) and int(result.scores.counts.sum()) == count
    net, _ = checkpoint.load(result.checkpoint, CPU)
    assert all(torch.isfinite(p).all() for p in net.state_dict().values())


def test_a_scan_without_a_labelled_point_among_others(scenes, job):
    blank = replace(scenes(2)[1], labels=np.full(len(scenes(2)[1]), -1))
    result = segment.run([scenes(1)[0], blank], [scenes(1)[0]], job(3), ignore)
    net, _ = checkpoint.load(result.checkpoint, CPU)
    assert all(torch.isfinite(p).all() for p in net.state_dict().values()), "weights are not finite"
    assert all(math.isfinite(s.loss) and math.isfinite(s.accuracy) for s in result.steps)


def test_one_class_only(scenes, job):
    one = replace(scenes(1)[0], labels=np.zeros(len(scenes(1)[0]), int))
    result = segment.run([one], [one], job(3), ignore)
    assert result.scores.accuracy == 1 and result.scores.miou == 1


def test_no_labels_at_all(scenes, job):
    blank = replace(scenes(1)[0], labels=np.full(len(scenes(1)[0]), -1))
    for scan in (blank, replace(blank, labels=None)):
        with pytest.raises(OptionError, match="no scan to train on has labels: give --labels, or a --checkpoint"):
            segment.run([scan], [scan], job(1), ignore)
    with pytest.raises(OptionError, match="give --labels.*need a --checkpoint"):
        segment.apply([blank], job(1))


# Arguments
SENSELESS = [{"recipe": Recipe(-1)}, {"voxel": 0}, {"width": -0.5}, {"voxel": math.nan}, {"width": math.inf}]


@pytest.mark.parametrize("arguments", SENSELESS, ids=str)
def test_jobs_that_make_no_sense(tmp_path, arguments):
    with pytest.raises(
        OptionError, match="epochs, seed and save_every are at least 0|voxel and width are positive and finite"
    ):
        Job(tmp_path, CPU, **arguments)


def test_an_unknown_precision(tmp_path):
    with pytest.raises(OptionError, match="precision='fp8' is unknown; there are fp32, bf16, fp16"):
        Job(tmp_path, CPU, recipe=Recipe(1, precision="fp8"))


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "tpu", "cpu:x", "mps", "meta", "cuda:99", ""])
def test_devices_that_are_not_there(name):
    with pytest.raises(DeviceError, match=f"device {name!r}"):
        segment.pick_device(name)


def test_devices_that_are_there():
    assert segment.pick_device("cpu") == CPU
    assert segment.pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# Nothing is lost
@pytest.mark.parametrize("every, saves", [(0, 1), (1, 4), (2, 2), (3, 2)])
def test_checkpoints_between_epochs(scenes, job, monkeypatch, every, saves):
    """Every so many epochs of two scans, and at the end."""
    done, seen = [], []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: done.append(len(seen)) or save(*args))
    segment.run(scenes(2), scenes(3)[2:], job(4, save_every=every), lambda step, total: seen.append(step))
    assert done == [2 * epoch for epoch in range(1, 4) if every and epoch % every == 0] + [8] and len(done) == saves


def test_a_failed_save_between_epochs_is_warned_of(scenes, job, monkeypatch):
    save, calls = checkpoint.save, []

    def full_disk(*args):
        calls.append(1)
        if len(calls) == 1:
            raise FileError("no space left")
        return save(*args)

    monkeypatch.setattr(checkpoint, "save", full_disk)
    with pytest.warns(UserWarning, match="no space left; training continues"):
        result = segment.run(scenes(1), scenes(1), job(2), ignore)
    assert result.checkpoint.is_file() and len(calls) == 2


def test_a_failed_save_tells_where_the_weights_are(scenes, job, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "out" / "checkpoint.safetensors").mkdir(parents=True)
    with pytest.warns(UserWarning, match="the weights are in"):
        result = segment.run(scenes(1), scenes(1), job(1), ignore)
    assert result.checkpoint.parent != tmp_path / "out" and checkpoint.load(result.checkpoint, CPU)[1] == result.task


def test_stopped_before_the_first_step_keeps_the_older_checkpoint(scenes, job, monkeypatch):
    first = segment.run(scenes(1), scenes(1), job(1), ignore)
    before = first.checkpoint.read_bytes()

    def stopped(*args):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(segment, "train", stopped)
    result = segment.run(scenes(1), scenes(1), job(1), ignore)
    assert result.interrupted and not result.steps and first.checkpoint.read_bytes() == before


def test_fewer_classes_than_the_checkpoint_are_renumbered(scenes, job):
    scan = scenes(1)[0]
    everything = Scan(scan.xyz, scan.feats, scan.labels, "everything")  # generic classes: class 0, class 1, ...
    first = segment.run([everything], [everything], job(1), ignore)
    kept = scan.labels != 1
    fewer = Scan(scan.xyz[kept], scan.feats[kept], scan.labels[kept], "fewer")
    assert len(fewer.label_set) == 5
    result = segment.apply([fewer], job(0, checkpoint=first.checkpoint))
    assert result.scores.counts.tolist() == np.bincount(scan.labels[kept], minlength=6).tolist()
