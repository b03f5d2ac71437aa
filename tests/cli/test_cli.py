"""The command line: whole jobs on files, what it prints, exit codes, and that a failure leaves everything alone."""

import gc
import json
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import pumice as package
from pumice.cli import main as cli
from pumice.cli import segment
from pumice.data import SEMANTIC_KITTI, Scan
from pumice.errors import OptionError
from pumice.label import checkpoint
from pumice.label.checkpoint import Task
from pumice.label.predictions import write_prediction

CPU = torch.device("cpu")
SMALL = ("--voxel", 0.5, "--width", 0.1, "--device", "cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, quick):
    """Default output folders lie in the test's own folder; lines are not folded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 400)
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def trained(write, scenes, pumice, tmp_path):
    """A checkpoint of one epoch."""
    ran = pumice("segment", write("train/a.npz", scenes(1)[0]), *SMALL, "--epochs", 1, "--out", tmp_path / "trained")
    assert ran.code == 0, ran.err
    return tmp_path / "trained" / "checkpoint.safetensors"


@pytest.fixture
def kept(tmp_path):
    """An output folder that holds results already; calling the fixture checks that they are as they were."""
    folder = tmp_path / "out"
    folder.mkdir()
    files = {name: f"old {name}".encode() for name in ("checkpoint.safetensors", "report.html", "metrics.json")}
    for name, content in files.items():
        (folder / name).write_bytes(content)

    def unchanged():
        return {p.name: p.read_bytes() for p in folder.iterdir()} == files

    return unchanged


def refused(ran, *parts):
    """Exit code 1, one message on stderr with all the parts, no traceback."""
    assert ran.code == 1, f"exit code {ran.code}: {ran.out} {ran.err}"
    assert ran.err.startswith("error: ") and "Traceback" not in ran.err + ran.out
    missing = [part for part in parts if str(part) not in ran.err]
    assert not missing, f"{missing} not in {ran.err}"
    return True


# What works
def test_a_labelled_scan(write, scenes, pumice, tmp_path):
    ran = pumice("segment", write("scan.npz", scenes(1)[0]), *SMALL, "--epochs", 3, "--timing")
    assert ran.code == 0, ran.err
    assert ran.err == "warning: evaluated on its training points: expect lower scores on new scans\n"
    out = tmp_path / "pumice-runs" / "scan"
    files = ["checkpoint.safetensors", "metrics.json", "predictions", "report.html"]
    assert sorted(p.name for p in out.iterdir()) == files
    expected = [f"read  scan: {len(scenes(1)[0])} points", "train 1/3", "train 3/3", "mIoU", "point accuracy"]
    expected += [
        "on the training scan itself, none held out",
        "mIoU over 6 of 6 classes",
        "kernel maps included",
        "report.html",
        "checkpoint.safetensors",
    ]
    assert [part for part in expected if part not in ran.out] == []
    figures = json.loads((out / "metrics.json").read_text())
    assert figures["judged_on_training"] and figures["classes_scored"] == 6
    assert figures["steps"] == 3 and 0 < figures["point_accuracy"] <= 1
    assert f"{figures['miou']:.3f}" in ran.out
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "scan" in page and "report-data" in page
    checkpoint.load(out / "checkpoint.safetensors", CPU)


def test_a_folder_of_scans(write, scenes, pumice, tmp_path):
    for i, scan in enumerate(scenes(5)):
        path = write(f"scans/{i}.npz", scan)
    ran = pumice(
        "segment", path.parent, *SMALL, "--epochs", 1, "--out", tmp_path / "o", "--report", tmp_path / "r.html"
    )
    assert ran.code == 0, ran.err
    assert not ran.err and "inference" not in ran.out
    assert "train 4/4" in ran.out and "on 1 held-out scan" in ran.out and "baseline mIoU, majority class" in ran.out
    assert (tmp_path / "r.html").is_file() and not (tmp_path / "o" / "report.html").exists()


def test_labels_beside_the_scan_and_named(scenes, pumice, tmp_path):
    scan = scenes(1)[0]
    (tmp_path / "labels").mkdir()
    path = tmp_path / "0.bin"
    np.concatenate([scan.xyz, scan.feats], axis=1).astype("<f4").tofile(path)
    raw = np.array([40, 50, 10, 80, 70, 30], np.uint32)[scan.labels]
    raw.tofile(tmp_path / "labels" / "0.label")
    for more in (("--labels", tmp_path / "labels"), ("--labels", tmp_path / "labels" / "0.label")):
        ran = pumice("segment", path, *SMALL, "--epochs", 1, "--columns", 4, *more)
        assert ran.code == 0, ran.err
        assert "road" in ran.out and "building" in ran.out and "mIoU over 6 of 19 classes" in ran.out
    # Labels beside a scan are what it is trained on, but do not keep a checkpoint from being run.
    (tmp_path / "labels" / "0.label").rename(tmp_path / "0.label")
    ran = pumice("segment", path, *SMALL, "--epochs", 1, "--columns", 4, "--out", tmp_path / "o")
    assert ran.code == 0 and "road" in ran.out, ran.err
    run = ("--checkpoint", tmp_path / "o" / "checkpoint.safetensors", "--device", "cpu", "--columns", 4)
    ran = pumice("segment", path, *run)
    assert ran.code == 0 and "train" not in ran.out and "mIoU" not in ran.out, ran.err
    found = np.fromfile(tmp_path / "pumice-runs" / "0-applied" / "predictions" / "0.label", "<u4")
    assert len(found) == len(scan) and set(found.tolist()) <= {r for r, c in SEMANTIC_KITTI.raw if c >= 0}


def test_a_checkpoint_runs_on_scans_without_labels(write, scenes, pumice, trained, tmp_path):
    path = write("new/b.npz", scenes(2)[1], labels=False)
    before = trained.read_bytes()
    ran = pumice("segment", path, "--checkpoint", trained, "--device", "cpu", "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "inference" not in ran.out and "mIoU" not in ran.out and "train" not in ran.out.replace(str(trained), "")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["metrics.json", "predictions", "report.html"]
    assert trained.read_bytes() == before


def test_labels_can_be_ignored(write, scenes, pumice, trained, kept, tmp_path):
    path = write("b.npz", scenes(2)[1])
    run = ("segment", path, "--no-labels", "--device", "cpu", "--out", tmp_path / "run")
    ran = pumice(*run, "--checkpoint", trained)
    assert ran.code == 0 and "mIoU" not in ran.out and "train" not in ran.out.replace(str(trained), ""), ran.err
    assert refused(pumice(*run), "--no-labels", "--checkpoint")
    assert refused(pumice(*run, "--checkpoint", trained, "--labels", tmp_path), "--no-labels", "--labels")


# Commands that run a checkpoint
def test_predictions_of_a_file_with_lost_points_keep_its_rows(scenes, tmp_path):
    task = Task(SEMANTIC_KITTI.names, SEMANTIC_KITTI.colors, 0.1, 1, (0.0,) * 3, (1.0,) * 3)
    xyz = np.arange(15.0).reshape(5, 3)
    xyz[2] = np.nan
    scan = Scan(xyz, np.zeros((5, 1)), name="a")
    path = write_prediction(tmp_path, scan, np.array([0, 8, 18, 4]), task, "auto")
    assert np.fromfile(path, "<u4").tolist() == [10, 40, 0, 81, 13]
    other = replace(task, names=("a", "b"))
    with pytest.raises(OptionError, match="SemanticKITTI, found a, b"):
        write_prediction(tmp_path, scan, np.zeros(4, int), other, "label")


def test_evaluate(write, scenes, pumice, trained, tmp_path):
    path = write("b.npz", scenes(2)[1])
    ran = pumice("evaluate", trained, path, "--device", "cpu", "--predictions", tmp_path / "p")
    assert ran.code == 0 and not ran.err, ran.err
    assert "mIoU over 6 of 6 classes" in ran.out and "on 1 scan" in ran.out
    out = tmp_path / "pumice-runs" / "b-evaluated"
    assert sorted(p.name for p in out.iterdir()) == ["metrics.json", "report.html"]
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["b.npz"]
    bare = write("c.npz", scenes(2)[1], labels=False)
    ran = pumice("evaluate", trained, bare, "--device", "cpu")
    assert refused(ran, "no scan has labels", "class 0", "--labels")


def test_features_that_a_checkpoint_does_not_know(write, scenes, pumice, trained, tmp_path):
    scan = scenes(1)[0]
    paths = [write(f"{n}.npz", replace(scan, feats=np.repeat(scan.feats, n, axis=1)), labels=False) for n in (0, 3, 4)]
    run = ("--checkpoint", trained, "--device", "cpu", "--out", tmp_path / "run", "--no-labels")
    for path, remedy in zip(paths, ("constant", "constant", "intensity or constant"), strict=True):
        ran = pumice("segment", path, *run)
        assert refused(ran, "expected 1 features per point (intensity)", f"give --features {remedy} ("), ran.err
        for choice in remedy.split(" or "):
            assert pumice("segment", path, *run, "--features", choice).code == 0
    assert refused(pumice("segment", paths[0], *run, "--features", "rgb"), "expected rgb", "0 features")
    ran = pumice("segment", paths[0], *run, "--features", "all")
    assert refused(ran, "features='all'", "intensity, rgb, none, constant")
    plain = write("plain.npz", scan)
    ran = pumice("segment", plain, *SMALL, "--epochs", 1, "--features", "none", "--out", tmp_path / "none")
    assert ran.code == 0 and checkpoint.load(tmp_path / "none" / "checkpoint.safetensors", CPU)[1].features == 0


def test_options_are_checked_before_scans_are_read(write, scenes, pumice, monkeypatch, tmp_path):
    path = write("a.npz", scenes(1)[0])
    monkeypatch.setattr(cli, "read_scan", None)
    wrong = {"--precision": "fp8", "--epochs": -1, "--features": "x", "--predictions-as": "x", "--save-every": -1}
    for option, value in (*wrong.items(), ("--checkpoint", tmp_path / "gone"), ("--checkpoint", ".")):
        assert refused(pumice("segment", path, option, value), value if option != "--checkpoint" else "found")


def test_a_demo_without_scenes(pumice):
    assert refused(pumice("demo", "--scenes", 0), "--scenes is at least 1, found 0")


def test_version(pumice):
    ran = pumice("--version")
    assert ran.code == 0 and ran.out == f"pumice {package.__version__}\n"


def test_a_warning_is_one_line(scenes, pumice, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "find_scans", lambda path: warnings.warn("mind the gap", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(cli, "hold_out", lambda files: sys.exit(3))
        ran = pumice("segment", tmp_path)
    assert ran.code == 3 and ran.err == "warning: mind the gap\n"


def test_no_epochs_judge_a_checkpoint(write, scenes, pumice, trained, tmp_path):
    path = write("b.npz", scenes(2)[1])
    ran = pumice("segment", path, "--checkpoint", trained, "--epochs", 0, "--device", "cpu", "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "point accuracy" in ran.out and not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_training_goes_on(write, scenes, pumice, trained, tmp_path):
    path = write("a.npz", scenes(1)[0])
    for _ in range(2):  # onto itself, too
        ran = pumice(
            "segment", path, "--checkpoint", trained, "--epochs", 2, "--device", "cpu", "--out", trained.parent
        )
        assert ran.code == 0, ran.err
    checkpoint.load(trained, CPU)


def test_points_that_are_not_finite_are_counted(scenes, pumice, tmp_path):
    scan = scenes(1)[0]
    xyz = scan.xyz.copy()
    xyz[[3, 5, 8]] = np.nan
    np.savez(tmp_path / "holes.npz", xyz=xyz, feats=scan.feats, labels=scan.labels)
    ran = pumice("segment", tmp_path / "holes.npz", *SMALL, "--epochs", 1)
    assert ran.code == 0, ran.err
    assert f"{len(scan) - 3} points, 3 dropped (not finite or too far)" in ran.out


def test_a_scan_of_one_point(pumice, tmp_path):
    np.savez(tmp_path / "one.npz", xyz=np.ones((1, 3), np.float32), labels=np.zeros(1, np.int64))
    ran = pumice("segment", tmp_path / "one.npz", *SMALL, "--epochs", 2)
    assert ran.code == 0, ran.err
    assert "1 points" in ran.out


def test_a_demo(pumice, tmp_path, monkeypatch, scenes):
    monkeypatch.setattr(cli, "street_scene", lambda seed, **more: scenes(4)[seed % 1000 + 2 * (seed >= 1000)])
    ran = pumice("demo", "--scenes", 2, "--epochs", 1, *SMALL)
    assert ran.code == 0, ran.err
    assert "made  2 street scenes" in ran.out and "baseline mIoU, majority class at each height" in ran.out
    assert (tmp_path / "pumice-runs" / "demo" / "report.html").is_file()


def test_help_and_unknown_options(pumice):
    ran = pumice("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in ("segment", "label", "evaluate", "demo", "info", "tune"))
    for option in ("--labels", "--checkpoint", "--epochs", "--voxel", "--device", "--precision", "--report"):
        assert option in pumice("segment", "--help").out
    assert pumice("segment").code == 2
    assert pumice("segment", "x", "--nonsense").code == 2
    assert pumice("segment", "x", "--epochs", "many").code == 2


def test_info(pumice):
    ran = pumice("info")
    assert ran.code == 0 and torch.__version__ in ran.out


# What is refused
def garbage(folder, scan):
    (folder / "bad.npz").write_bytes(b"this is no archive" * 10)


def truncated(folder, scan):
    np.savez(folder / "bad.npz", xyz=scan.xyz, labels=scan.labels)
    data = (folder / "bad.npz").read_bytes()
    (folder / "bad.npz").write_bytes(data[: len(data) // 2])


def empty(folder, scan):
    (folder / "bad.npz").write_bytes(b"")


def without_points(folder, scan):
    np.savez(folder / "bad.npz", other=scan.xyz)


def no_rows(folder, scan):
    np.savez(folder / "bad.npz", xyz=scan.xyz[:0], labels=scan.labels[:0])


def nothing_finite(folder, scan):
    np.savez(folder / "bad.npz", xyz=np.full_like(scan.xyz, np.nan), labels=scan.labels)


def too_few_labels(folder, scan):
    np.savez(folder / "bad.npz", xyz=scan.xyz, labels=scan.labels[:-1])


def labels_as_floats(folder, scan):
    np.savez(folder / "bad.npz", xyz=scan.xyz, labels=scan.labels + 0.5)


BAD_FILES = {
    garbage: ("a numpy .npz file",),
    truncated: ("a numpy .npz file",),
    empty: ("data", "0 bytes"),
    without_points: ("an array called points", "other"),
    no_rows: ("points", "none"),
    nothing_finite: ("finite", "none of them finite"),
    too_few_labels: ("labels, one per point",),
    labels_as_floats: ("labels of integers", "float64"),
}


# numpy leaves a file open that turns out to be no archive.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", BAD_FILES, ids=lambda f: f.__name__)
def test_a_bad_file(make, write, scenes, pumice, kept, tmp_path):
    """Alone and last in a folder of good ones: named, with what was expected and found; old results stay."""
    write("scans/0.npz", scenes(1)[0])
    make(tmp_path / "scans", scenes(1)[0])
    bad = tmp_path / "scans" / "bad.npz"
    # In a folder, an archive without points is taken for something else and passed over.
    for path in (bad, tmp_path / "scans")[: 1 if make is without_points else 2]:
        ran = pumice("segment", path, *SMALL, "--epochs", 1, "--out", tmp_path / "out")
        assert refused(ran, bad, "expected", "found", *BAD_FILES[make]) and kept()
    gc.collect()


def test_a_truncated_scan_of_raw_numbers(scenes, pumice, kept, tmp_path):
    path = tmp_path / "cut.bin"
    data = np.concatenate([scenes(1)[0].xyz, scenes(1)[0].feats], axis=1).astype("<f4").tobytes()
    path.write_bytes(data[:-3])
    ran = pumice("segment", path, *SMALL, "--out", tmp_path / "out")
    assert refused(ran, path, "expected", "found", len(data) - 3) and kept()


def test_paths_that_are_not_there(pumice, kept, tmp_path):
    (tmp_path / "void").mkdir()
    (tmp_path / "notes.md").write_text("no scan")
    for name, *parts in (("gone", "nothing"), ("void", "scans with one of the suffixes", ".pcd.bin", "0 other files"),
                         ("notes.md", "one of the suffixes", ".md")):  # fmt: skip
        ran = pumice("segment", tmp_path / name, *SMALL, "--out", tmp_path / "out")
        assert refused(ran, tmp_path / name, "expected", "found", *parts) and kept()


def test_labels_that_are_not_there(write, scenes, pumice, kept, tmp_path):
    path = write("scans/a.npz", scenes(1)[0], labels=False)
    ran = pumice("segment", path, *SMALL, "--out", tmp_path / "out")
    assert refused(ran, "--checkpoint", "labels") and kept()
    (tmp_path / "empty").mkdir()
    for labels in (tmp_path / "empty", tmp_path / "gone.label"):
        ran = pumice("segment", path, *SMALL, "--labels", labels, "--out", tmp_path / "out")
        assert refused(ran, labels, "expected", "found") and kept()


def test_labels_on_some_scans_only(write, scenes, pumice, kept, tmp_path):
    write("scans/a.npz", scenes(2)[0])
    write("scans/b.npz", scenes(2)[1], labels=False)
    ran = pumice("segment", tmp_path / "scans", *SMALL, "--out", tmp_path / "out")
    assert refused(ran, "b: expected labels as the other scans have, found none (1 of 2)") and kept()


@pytest.mark.parametrize("option, value, parts", [
    ("--device", "gpu", ("'gpu'", "auto, cpu")),
    ("--device", "cuda:99", ("'cuda:99'", "GPUs")),
    ("--precision", "fp8", ("'fp8'", "fp32, bf16, fp16")),
    ("--epochs", "-1", ("epochs", "-1")),
    ("--voxel", "0", ("voxel", "0")),
    ("--voxel", "nan", ("nan",)),
    ("--width", "-1", ("width", "-1")),
    ("--columns", "4", ("columns", ".npz")),
    ("--seed", "-1", ("seed", "-1")),
])  # fmt: skip
def test_options_that_make_no_sense(write, scenes, pumice, kept, tmp_path, option, value, parts):
    path = write("a.npz", scenes(1)[0])
    ran = pumice("segment", path, *SMALL, "--epochs", 1, "--out", tmp_path / "out", option, value)
    assert refused(ran, *parts) and kept()


def test_a_checkpoint_brings_its_voxel_and_width(write, scenes, pumice, trained, kept, tmp_path):
    ran = pumice("segment", write("a.npz", scenes(1)[0]), *SMALL, "--checkpoint", trained, "--out", tmp_path / "out")
    assert refused(ran, "--checkpoint", "--voxel", "--width") and kept()


def test_voxels_too_small_for_int32(write, scenes, pumice, kept, tmp_path):
    ran = pumice("segment", write("a.npz", scenes(1)[0]), *SMALL, "--voxel", 1e-9, "--out", tmp_path / "out")
    assert refused(ran, "int32", "larger size") and kept()


def test_an_output_folder_that_is_a_file(write, scenes, pumice, tmp_path):
    (tmp_path / "file").write_text("precious")
    ran = pumice("segment", write("a.npz", scenes(1)[0]), *SMALL, "--epochs", 1, "--out", tmp_path / "file")
    assert refused(ran, tmp_path / "file") and (tmp_path / "file").read_text() == "precious"


def test_a_damaged_checkpoint(write, scenes, pumice, trained, kept, tmp_path):
    labelled, bare = write("l.npz", scenes(1)[0]), write("b.npz", scenes(1)[0], labels=False)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(trained.read_bytes()[:-100])
    for path in (labelled, bare):
        for file in (cut, tmp_path / "gone.safetensors", labelled):
            ran = pumice(
                "segment", path, "--checkpoint", file, "--device", "cpu", "--epochs", 1, "--out", tmp_path / "out"
            )
            assert refused(ran, file, "expected", "found") and kept()


def test_a_checkpoint_of_other_classes(write, scenes, pumice, trained, kept, tmp_path):
    scan = scenes(1)[0]
    path = tmp_path / "other.npz"
    np.savez(path, xyz=scan.xyz, feats=scan.feats, labels=scan.labels + 10)
    ran = pumice("segment", path, "--checkpoint", trained, "--epochs", 1, "--device", "cpu", "--out", tmp_path / "out")
    assert refused(ran, trained, "expected the classes", "class 10", "found", "class 0") and kept()


def test_features_differ_in_number(write, scenes, pumice, trained, kept, tmp_path):
    scan = scenes(1)[0]
    wide = replace(scan, feats=np.repeat(scan.feats, 3, axis=1))
    path = write("scans/wide.npz", wide)
    for more in (SMALL, ("--device", "cpu", "--checkpoint", trained)):
        write("scans/a.npz", scan)
        write("scans/b.npz", scan)
        ran = pumice("segment", path.parent, *more, "--epochs", 1, "--out", tmp_path / "out")
        assert refused(ran, "features per point", "1", "3") and kept()
    ran = pumice("segment", path, "--checkpoint", trained, "--device", "cpu", "--epochs", 0, "--out", tmp_path / "out")
    found = "expected 1 features per point (intensity) as in training, found 3 features per point (rgb)"
    assert refused(ran, f"wide: {found}: give --features constant") and kept()


# Interruption
def test_ctrl_c(write, scenes, pumice, monkeypatch, tmp_path):
    def interrupting(progress, bar):
        def watch(step, total):
            if step.number == 2:
                raise KeyboardInterrupt

        return watch

    monkeypatch.setattr(cli, "_watch", interrupting)
    ran = pumice("segment", write("a.npz", scenes(1)[0]), *SMALL, "--epochs", 50, "--out", tmp_path / "o")
    path = tmp_path / "o" / "checkpoint.safetensors"
    assert ran.code == 130
    assert f"stopped after 2 steps; the current network is in {path}" in ran.out and f"--checkpoint {path}" in ran.out
    monkeypatch.undo()
    checkpoint.load(path, CPU)


def test_ctrl_c_after_training_is_not_hidden(write, scenes, pumice, monkeypatch, tmp_path):
    """The checkpoint is complete by then; the command ends as interrupted, without a traceback."""

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(segment.evaluate, "predict", interrupted)
    ran = pumice("segment", write("a.npz", scenes(1)[0]), *SMALL, "--epochs", 1, "--out", tmp_path / "o")
    assert ran.code == 130 and "Traceback" not in ran.err
    checkpoint.load(tmp_path / "o" / "checkpoint.safetensors", CPU)


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal(write, scenes, tmp_path, sent):
    script = "from pumice.cli.main import main; main()"
    path = write("a.npz", scenes(1)[0])
    command = [sys.executable, "-c", script, "segment", path, *SMALL, "--epochs", 100_000, "--out", tmp_path / "o"]
    source = os.path.dirname(os.path.dirname(package.__file__))
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": source, "COLUMNS": "400"},
        # A shell starts its background jobs, and the tests may be one, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        seen = ""
        while "train 1/" not in seen:
            line = process.stdout.readline()
            assert line, f"it ended before the first step: {seen} {process.stderr.read()}"
            seen += line
        time.sleep(0.3)
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    saved = tmp_path / "o" / "checkpoint.safetensors"
    assert process.returncode == 130, err
    assert "stopped" in out and str(saved) in out and "Traceback" not in err
    net, task = checkpoint.load(saved, CPU)
    assert len(task.names) == 6 and all(torch.isfinite(p).all() for p in net.parameters())
    assert struct.unpack("<Q", saved.read_bytes()[:8])[0] < saved.stat().st_size
