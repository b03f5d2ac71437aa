"""`pumice segment` as torchrun starts it: two processes (gloo) with its environment variables."""

import json
import os
import signal
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from commands import scene, write_scan
from processes import fork

from pumice.cli import main
from pumice.cli import ranks as ranks_
from pumice.env import launch
from pumice.errors import OptionError
from pumice.label import checkpoint

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
OPTIONS = ("--voxel", "0.6", "--width", "0.1", "--device", "cpu", "--epochs", "2")


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def run_as_torchrun(rank, folder, port, signalled):
    """The command line in this process; its output and exit code are left in files. signalled: the process that gets
    SIGINT after the second step, -1: none."""
    torch.set_num_threads(1)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watched, end = main._watch, os._exit

    def watch(*shown):
        def each(step, total):
            watched(*shown)(step, total)
            if step.number == 2 and rank == signalled:
                os.kill(os.getpid(), signal.SIGINT)

        return each

    def ended(code):
        (folder / f"code{rank}").write_text(str(code))
        end(0)

    main._watch, os._exit = watch, ended
    sys.argv = ["pumice", "segment", str(folder / "scans"), *OPTIONS, "--out", str(folder / "out")]
    with (folder / f"out{rank}").open("w") as out, redirect_stdout(out), redirect_stderr(out):
        main.main()


def run(folder, signalled):
    """(exit codes, outputs) of two processes, for five scans, of which four are trained on."""
    for seed in range(5):
        write_scan(folder / "scans", f"{seed}.npz", scene(seed))
    fork(run_as_torchrun, 2, (folder, free_port(), signalled))
    return [[(folder / f"{name}{rank}").read_text() for rank in range(2)] for name in ("code", "out")]


def test_two_processes_train(tmp_path):
    codes, outputs = run(tmp_path, -1)
    assert codes == ["0", "0"], outputs
    # Two scans on each, twice.
    assert "train 4/4" in outputs[0] and "mIoU" in outputs[0] and outputs[1] == ""
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["steps"] == 4
    net, _ = checkpoint.load(tmp_path / "out" / "checkpoint.safetensors", torch.device("cpu"))
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_a_signal_to_one_process_ends_both_after_the_same_step(tmp_path):
    codes, outputs = run(tmp_path, 1)
    assert codes == ["130", "130"], outputs
    assert "stopped after 2 steps" in outputs[0] and outputs[1] == ""
    checkpoint.load(tmp_path / "out" / "checkpoint.safetensors", torch.device("cpu"))


@pytest.fixture
def told(monkeypatch):
    def tell(*values):
        for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), values, strict=True):
            monkeypatch.setenv(name, value)
        launch.cache_clear()

    yield tell
    monkeypatch.undo()
    launch.cache_clear()


def test_one_process_of_torchrun_needs_no_group(told):
    told("0", "1", "0")
    assert ranks_.Ranks.start(torch.device("cpu")) == (ranks_.Ranks(), torch.device("cpu"))
    assert ranks_.named() == "" and not dist.is_initialized()


def test_refuses(told):
    told("1", "2", "1")
    assert ranks_.named() == "process 1: "
    with pytest.raises(OptionError, match="--device cuda, found cuda:1"):
        ranks_.Ranks.start(torch.device("cuda:1"))
    told("1", "two", "1")
    with pytest.raises(OptionError, match="numbers from 0.*two"):
        launch()
