"""pumice label and pm.Labeller: the classes, names, resuming, killed runs, bad inputs, and Ray."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import scene, write_scan

import pumice as pm
from pumice.cli import evaluate
from pumice.cli import label as command
from pumice.data import SEMANTIC_KITTI, Scan, read_scan
from pumice.env import launch
from pumice.errors import FileError, OptionError
from pumice.label import checkpoint, classify, slots, sources, work
from pumice.label.checkpoint import Task, network_inputs
from pumice.label.predictions import remove_leftovers, whole_file, write_prediction
from pumice.label.sources import find_sources

CPU = torch.device("cpu")
PUMICE = "import warnings; warnings.simplefilter('ignore'); from pumice.cli import start; start()"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of random weights, for SemanticKITTI's classes."""
    return _trained(tmp_path_factory.mktemp("trained") / "net.safetensors", seed=0)


def _trained(path, seed):
    torch.manual_seed(seed)
    labels = replace(scene().label_set, names=SEMANTIC_KITTI.names, colors=SEMANTIC_KITTI.colors)
    task = Task.of([scene()], labels, 0.5, 0.1)
    net = task.network()
    with torch.no_grad():
        # Untrained, it would find one class everywhere.
        for weight in net.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return checkpoint.save(path, net, task)


def fleet(count, folder="scans"):
    """Small scans of different contents in two folders, with the same names in both."""
    return [write_scan(Path(folder), f"{i % 2}/{i // 2}.npz", scene(i % 4), labels=False) for i in range(count)]


def expected(trained, path):
    """The classes of a scan, as SemanticKITTI's ids."""
    net, task = checkpoint.load(trained, CPU)
    scan = read_scan(path, False)
    classes = evaluate.predict(net, scan, task, CPU, "fp32")
    ids = {c: raw for raw, c in reversed(SEMANTIC_KITTI.raw)}
    return np.array([ids[c] for c in classes])


def inputs(scan, task):
    """The network's input of a scan: its points, and what it takes of each."""
    return torch.from_numpy(scan.xyz), torch.from_numpy(network_inputs(scan, task))


def stamps(folder):
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(Path(folder).rglob("*.*"))}


def run(pumice, trained, *inputs, out="out", more=("--readers", 0)):
    return pumice("label", *inputs, "--checkpoint", trained, "--out", out, "--device", "cpu", *more)


def refused(ran, *parts):
    assert ran.code == 1 and ran.err.startswith("error: "), f"{ran.code} {ran.err}"
    assert [part for part in parts if str(part) not in ran.err] == [], ran.err
    return True


# What is written
def test_the_classes_are_those_of_evaluation(pumice, trained):
    """By a reading process, of scans of the same names in two folders, and of one with lost points."""
    paths = fleet(3)
    xyz = scene(3).xyz.copy()
    xyz[5] = np.nan
    np.savez("scans/lost.npz", xyz=xyz, feats=scene(3).feats)
    paths.append(Path("scans/lost.npz"))
    ran = run(pumice, trained, "scans", more=())
    assert ran.code == 0 and "label 4/4" in ran.err and "scans/s into out" in ran.err and not ran.out
    for path in paths:
        found = np.fromfile(Path("out") / path.relative_to("scans").with_suffix(".label"), "<u4")
        want = expected(trained, path)
        if path.name == "lost.npz":
            assert found[5] == 0 and len(found) == len(want) + 1
            found = np.delete(found, 5)
        assert np.array_equal(found, want)
    assert len(set(want)) > 1


@pytest.mark.parametrize("kind", ["npz", "ply", "parquet"])
def test_formats_can_be_read_back(pumice, trained, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    (path,) = fleet(1)
    assert run(pumice, trained, path, more=("--as", kind, "--readers", 0)).code == 0
    found, (net, task) = read_scan(f"out/0.{kind}"), checkpoint.load(trained, CPU)
    want = evaluate.predict(net, scene(0), task, CPU, "fp32")
    raw = np.array([int(name.split()[1]) for name in found.label_set.names])
    assert np.array_equal(found.xyz, scene(0).xyz) and np.array_equal(raw[found.labels], want)


def test_parquet_names_points_and_classes(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    xyz = np.arange(15.0).reshape(5, 3) + 1e7
    xyz[2] = np.nan
    task = Task(("road", "car"), ("#000", "#111"), 0.1, 1, (0.0,) * 3, (1.0,) * 3)
    path = write_prediction(tmp_path, Scan(xyz, np.zeros((5, 0)), name="a/b"), np.array([0, 1, 1, 0]), task, "parquet")
    found = parquet.read_table(path).to_pydict()
    assert path == tmp_path / "a" / "b.parquet" and list(found) == ["point", "x", "y", "z", "label", "class"]
    assert found["point"] == [0, 1, 3, 4] and found["label"] == [0, 1, 1, 0]
    assert found["class"] == ["road", "car", "car", "road"] and found["y"][2] == 1e7 + 10


def test_captured_from_points_as_compiled(trained):
    """Points in float64 relative to the low corner fall into the same voxels; a larger scene is captured anew."""
    net, task = checkpoint.load(trained, CPU)
    net = net.eval()
    fast, plain = classify._Captured(net, task.voxel, 1), classify._Compiled(net, task.voxel)
    for scan in (scene(0).select(np.arange(400)), scene(1)):
        with torch.no_grad():
            found, want = (each(*inputs(scan, task), [len(scan)]) for each in (fast, plain))
        assert (found == want).float().mean() > 0.999
        assert np.array_equal(want, evaluate.predict(net, scan, task, CPU, "fp32"))
    assert fast._most == 2 * len(scene(1))


@pytest.mark.parametrize("readers", [0, 1])
def test_a_folder_that_cannot_be_written(pumice, trained, readers):
    """The error is that of the file, from whichever process."""
    fleet(3)
    Path("out").mkdir()
    Path("out/1").write_text("a file where a folder is needed")
    ran = run(pumice, trained, "scans", more=("--readers", readers))
    assert ran.code == 1 and "out/1" in ran.err and "DataLoader" not in ran.err, ran.err


@pytest.mark.parametrize("room", [200_000, 100], ids=["in slots", "larger than a slot"])
@pytest.mark.parametrize("readers", [0, 2])
def test_scans_are_whole_while_others_are_read(trained, monkeypatch, room, readers):
    """Each written as it was read, although slots are used again; and told in their order, with one that failed."""
    write = work.write_prediction

    def slow(*args):
        time.sleep(0.02)
        return write(*args)

    monkeypatch.setattr(slots, "_POINTS", room)
    monkeypatch.setattr(work, "write_prediction", slow)
    monkeypatch.setattr(pm.Labeller, "_together", 4)
    xyz = np.random.default_rng(0).normal(size=(60, 500, 3)).astype(np.float32)
    xyz[:, 7] = np.nan
    Path("scans").mkdir()
    for i, points in enumerate(xyz):
        np.savez(f"scans/{i:02d}.npz", xyz=points, feats=np.zeros((500, 1)))
    Path("scans/30.npz").write_bytes(b"")
    labeller = pm.Labeller(trained, "out", "scans", kind="npz", device="cpu", readers=readers)
    vars(labeller)["_classifier"] = _first_digits
    labels = list(labeller.label(sorted(Path("scans").glob("*"))))
    assert [Path(one.source).stem for one in labels] == [f"{i:02d}" for i in range(60)]
    assert [one.state for one in labels] == ["labelled"] * 30 + ["failed"] + ["labelled"] * 29
    for i, points in enumerate(xyz):
        if i != 30:
            found, points = np.load(f"out/{i:02d}.npz"), np.delete(points, 7, axis=0)
            assert np.array_equal(found["xyz"], points)
            assert np.array_equal(found["labels"], np.abs((np.float32(1e6) * points[:, 0]).astype(np.int32)) % 19)


def _first_digits(scans):
    """Stands for a classifier."""
    for scan in scans:
        scan.classes.copy_((1e6 * scan.points[:, 0]).int().abs() % 19)


def test_scans_together_have_the_classes_that_each_has_alone(trained):
    """Of a captured network; other numbers of points fit, too."""
    net, task = checkpoint.load(trained, CPU)
    fast, plain = classify._Captured(net.eval(), task.voxel, 3), classify._Compiled(net, task.voxel)
    for numbers in ((0, 1, 2), (3,), (2, 1)):
        given = [inputs(scene(i), task) for i in numbers]
        counts = [len(points) for points, _ in given]
        both = [torch.cat(each) for each in zip(*given, strict=True)]
        with torch.no_grad():
            found, want = fast(*both, counts), plain(*both, counts)
        assert (found == want).float().mean() > 0.999
    assert fast._fast.fallbacks == {}


def test_one_scan_does_not_fail_the_others_of_its_call(trained, monkeypatch):
    fleet(4)
    labeller = pm.Labeller(trained, "out", "scans", device="cpu", readers=0)
    monkeypatch.setattr(pm.Labeller, "_together", 4)
    whole, calls = labeller._classifier, []

    def classifier(scans):
        calls.append(len(scans))
        if any(len(scan.points) == len(scene(1)) for scan in scans):
            raise torch.OutOfMemoryError("too large")
        return whole(scans)

    vars(labeller)["_classifier"] = classifier
    Path("scans/broken.npz").touch()
    found = list(labeller.label([f"scans/{name}" for name in ("0/0.npz", "1/0.npz", "broken.npz", "0/1.npz")]))
    assert [one.state for one in found] == ["labelled", "failed", "failed", "labelled"]
    assert "too large" in found[1].reason and calls == [3, 1, 1, 1]
    assert np.array_equal(np.fromfile("out/0/1.label", "<u4"), expected(trained, Path("scans/0/1.npz")))


# Resuming
def test_finished_scans_are_not_done_again(pumice, trained):
    fleet(4)
    assert run(pumice, trained, "scans").code == 0
    before = stamps("out")
    Path("out/1/0.label").unlink()
    ran = run(pumice, trained, "scans")
    after = stamps("out")
    assert ran.code == 0 and "label 4/4" in ran.err and "3 were there" in ran.err
    assert {name for name in after if after[name] != before[name]} == {"1/0.label"}
    # A part of them has the names that it had.
    assert "1/1  0.0 scans/s, 1 were there" in run(pumice, trained, "scans/1/0.npz").err
    assert stamps("out") == after


def test_a_folder_is_of_one_checkpoint(pumice, trained, tmp_path):
    fleet(1), fleet(1, "other")
    assert run(pumice, trained, "scans").code == 0
    second = _trained(tmp_path / "second.safetensors", seed=1)
    assert refused(run(pumice, second, "scans"), trained, "second.safetensors", "another folder")
    assert refused(run(pumice, trained, "scans", more=("--as", "ply")), "kind label", "kind ply")
    assert refused(run(pumice, trained, "other"), "root", tmp_path / "scans", tmp_path / "other")
    assert refused(run(pumice, trained, "scans", more=("--precision", "fp8")), "fp8", "bf16")
    Path("out/labels.json").write_text("{")
    assert refused(run(pumice, trained, "scans"), "labels.json", "damaged")


def test_a_folder_without_labels_takes_other_options(pumice, trained):
    Path("scans").mkdir()
    Path("scans/0.bin").write_bytes(np.ones((40, 3), np.float32).tobytes())
    failed = run(pumice, trained, "scans", more=("--readers", 0, "--columns", 3))
    assert failed.code == 3 and "give --features constant" in failed.err
    assert run(pumice, trained, "scans", more=("--readers", 0, "--columns", 3, "--features", "constant")).code == 0
    assert "columns is at least 3" in run(pumice, trained, "scans", more=("--columns", 0)).err


def test_a_killed_run_loses_nothing(pumice, trained):
    paths = fleet(40)
    line = [sys.executable, "-c", PUMICE, "label", "scans", "--checkpoint", trained, "--out", "out", "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(Path(pm.__file__).parents[1])}
    started = subprocess.Popen(list(map(str, line)), stderr=subprocess.DEVNULL, env=env)
    while started.poll() is None and len(list(Path("out").rglob("*.label"))) < 3:
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    kept = stamps("out")
    done = [name for name in kept if name.endswith(".label")]
    assert 3 <= len(done) < 40
    ran = run(pumice, trained, "scans")
    assert ran.code == 0 and f"{len(done)} were there" in ran.err
    assert {name: stamp for name, stamp in stamps("out").items() if name in done} == {name: kept[name] for name in done}
    wants = {i: expected(trained, paths[i]) for i in range(4)}
    for i, path in enumerate(paths):
        found = np.fromfile(Path("out") / path.relative_to("scans").with_suffix(".label"), "<u4")
        assert np.array_equal(found, wants[i % 4])
    assert len(list(Path("out").rglob("*.*"))) == 41


def test_leftovers(tmp_path):
    """Of an ended process they go; those of one at work, and of another machine's, stay for a day."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    names = [f"a/.0.{host}-{ended.pid}.partial", f".1.{host}-{os.getpid()}.partial"]
    names += [f".2.other-{ended.pid}.partial", ".3.other-1.partial", "4.label"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.utime(tmp_path / names[3], (0, 0))
    assert remove_leftovers(tmp_path) == 2
    assert [name for name in names if (tmp_path / name).exists()] == [names[1], names[2], names[4]]
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "5.label") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert partial.parent == tmp_path and not partial.exists() and not (tmp_path / "5.label").exists()


# Bad inputs
def test_bad_files_are_listed_and_skipped(pumice, trained, monkeypatch):
    (good,) = fleet(1)
    folder, cloud = Path("scans"), scene(0)
    np.savez(folder / "nan.npz", xyz=np.full((9, 3), np.nan), feats=np.zeros((9, 1)))
    np.save(folder / "text.npy", np.array([["a", "b", "c"]]))
    np.savez(folder / "bare.npz", xyz=cloud.xyz)
    np.savez(folder / "pickled.npz", xyz=np.array([{}], dtype=object))
    np.savez_compressed(folder / "bomb.npz", xyz=np.zeros((200_000, 3)), feats=np.zeros((200_000, 1)))
    (folder / "empty.bin").touch()
    (folder / "short.npz").write_bytes(good.read_bytes()[:500])
    monkeypatch.setattr(sources, "_LARGEST", 2**22)
    ran = run(pumice, trained, "scans")
    assert ran.code == command.SOME_FAILED == 3 and "label 8/8" in ran.err and "7 failed" in ran.err
    reasons = {
        "nan.npz": "points with finite coordinates, found 9 points, none of them finite",
        "text.npy": "found <U1",
        "bare.npz": "found 0 features per point",
        "pickled.npz": "a readable array xyz",
        "bomb.npz": "expected at most 4194304 bytes, found",
        "empty.bin": "an empty file (0 bytes)",
        "short.npz": "found BadZipFile",
    }
    told = {Path(line.split()[1].rstrip(":")).name: line for line in ran.err.splitlines() if line.startswith("failed ")}
    assert told.keys() == reasons.keys()
    assert [name for name, reason in reasons.items() if reason not in told[name]] == [], told
    assert {path.name for path in Path("out").rglob("*.*")} == {"0.label", "labels.json"}


def test_a_killed_reader_is_told(pumice, trained, monkeypatch):
    fleet(3)
    read = work.read_scan

    def fatal(path, *args, **options):
        if path.parent.name == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return read(path, *args, **options)

    monkeypatch.setattr(work, "read_scan", fatal)
    ran = run(pumice, trained, "scans", more=("--readers", 1))
    assert refused(ran, "soon after it, ended the process that read it", "DataLoader worker (pid")
    assert not Path("out/1/0.label").exists()


# Sources and names
def test_names_do_not_collide(trained, tmp_path):
    fleet(4)
    cloud = scene(0)
    np.save("scans/0/0.npy", np.concatenate([cloud.xyz, cloud.feats], axis=1))
    Path("scans/list").write_text("# three\n0/1.npz\n\nnot-there.npz\nmemory://far/0.npz\n")
    found = find_sources(["scans", "scans/*/0.np*", "scans/0/0.npz"], Path("scans/1"))
    assert found.root == str(tmp_path / "scans")
    names = {Path(one.source).name + " " + one.name for one in found.named(found.root)}
    assert names == {"0.npy 0/0.npy", "0.npz 0/0.npz", "1.npz 0/1"}
    listed = find_sources(["@scans/list"], Path("out"))
    assert listed.paths == (
        str(tmp_path / "scans/0/1.npz"),
        str(tmp_path / "scans/not-there.npz"),
        "memory://far/0.npz",
    )
    assert listed.root == "" and listed.named("")[2].name == "memory/far/0"
    assert listed.named("")[0].name == f"{tmp_path}/scans/0/1".lstrip("/")
    for wrong, reason in {"no*.npz": "found none", "no": "found nothing", "what://a.npz": "what://"}.items():
        with pytest.raises((FileError, OptionError), match=reason):
            find_sources([wrong], Path("out"))
    with pytest.raises(OptionError, match="without .."):
        sources.output_name("s3://bucket/../../a.npz", "")


def test_urls(pumice, trained):
    import fsspec

    files = fsspec.filesystem("memory")
    paths = fleet(3)
    for path in paths:
        files.pipe(f"/fleet/{path}", path.read_bytes())
    assert find_sources(["memory://fleet/scans/*/0.npz"], Path("out")).paths == tuple(
        f"memory:///fleet/scans/{i}/0.npz" for i in range(2)
    )
    ran = run(pumice, trained, "memory://fleet/scans", "memory://fleet/scans/gone.npz")
    assert ran.code == 3 and "gone.npz: expected a file that can be read" in ran.err and "1 failed" in ran.err
    for path in paths:
        found = np.fromfile(Path("out") / path.relative_to("scans").with_suffix(".label"), "<u4")
        assert np.array_equal(found, expected(trained, path))


# In Python, under torchrun, on Ray
def test_a_labeller_is_pickled_without_its_network(trained):
    paths = fleet(3)
    labeller = pm.Labeller(trained, "out", "scans", device="cpu", readers=0)
    assert [one.state for one in labeller.label(paths[:1])] == ["labelled"]
    again = pickle.loads(kept := pickle.dumps(labeller))
    assert len(kept) < 1000 and "_net" in vars(labeller) and "_net" not in vars(again)
    Path("scans/broken.npz").touch()
    batch = again({"path": np.array([*map(str, paths), "scans/broken.npz"])})
    assert batch["output"].tolist()[:3] == ["out/0/0.label", "out/1/0.label", "out/0/1.label"]
    assert batch["state"].tolist() == ["kept", "labelled", "labelled", "failed"]
    assert batch["points"].tolist() == [0, len(scene(1)), len(scene(2)), 0] and "0 bytes" in batch["reason"][3]
    assert np.array_equal(np.fromfile(batch["output"][2], "<u4"), expected(trained, paths[2]))
    with pytest.raises(OptionError, match="kind='x'"):
        pm.Labeller(trained, "out", kind="x")


def test_ranks_share_the_scans(pumice, trained, monkeypatch):
    fleet(5)
    for rank, share in ((0, 3), (1, 2)):
        launch.cache_clear()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        ran = run(pumice, trained, "scans")
        assert ran.code == 0 and f"process {rank}: {share}/{share}" in ran.err and "were there" not in ran.err
    assert refused(run(pumice, trained, "scans", more=("--ray", "local")), "torchrun")
    launch.cache_clear()


def test_progress_outside_a_terminal(pumice, trained, monkeypatch):
    fleet(3)
    monkeypatch.setattr(command, "_EVERY", 0.0)
    told = [line.split("  ")[0] for line in run(pumice, trained, "scans").err.splitlines()]
    assert told == ["label 1/3", "label 2/3", "label 3/3", "label 3/3"]


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_of_ray(trained):
    """Two workers, one killed after the first scan: every scan is told once, and all files are whole."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install .[ray]")
    from pumice.label.ray_data import label_on_ray

    paths = fleet(24)
    found = find_sources(["scans"], Path("out"))
    labeller = pm.Labeller(trained, Path("out").absolute(), found.root, device="cpu")
    ray.init(address="local", num_cpus=2, log_to_driver=False)
    try:
        labels, killed = [], []
        for one in label_on_ray(labeller, found.named(found.root), "auto"):
            labels.append(one)
            if not killed:
                killed = _workers()
                os.kill(killed[0], signal.SIGKILL)
    finally:
        ray.shutdown()
    assert len(killed) == 2 and not Path(f"/proc/{killed[0]}").exists()
    assert sorted(one.source for one in labels) == sorted(found.paths)
    assert {one.state for one in labels} <= {"labelled", "kept"}
    wants = {i: expected(trained, paths[i]) for i in range(4)}
    for i, path in enumerate(paths):
        got = np.fromfile(Path("out") / path.relative_to("scans").with_suffix(".label"), "<u4")
        assert np.array_equal(got, wants[i % 4])
    assert len(list(Path("out").rglob("*.*"))) == 25


def _workers():
    """The processes of Ray Data's workers below this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title, above = (folder / "cmdline").read_bytes(), int(folder.name)
            while above > 1 and above != os.getpid():
                above = int((Path("/proc") / str(above) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"Labeller" in title and title.startswith(b"ray::") and above == os.getpid():
            found.append(int(folder.name))
    return found
