"""The suite `workloads` in tiny on the CPU: whole networks and shells are checked, timed, told, and kept as rows."""

import os
from dataclasses import replace

import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness import timing
from benchmarks.harness import whole as whole_calls
from benchmarks.harness.families import ALGORITHMS, FAMILIES, VARIED
from benchmarks.harness.rows import Row
from benchmarks.harness.study import Ready, Setup
from benchmarks.peers import spconv_nets
from benchmarks.scenes.workloads import SPCONV_NET, WORKLOADS, samples, stand_in
from benchmarks.suites import shells as bench_shells
from benchmarks.suites import workloads as bench_workloads
from benchmarks.suites.workloads import GOALS, ON_CPU, ON_GPU, RECORDED, Found, Side
from benchmarks.tests.ledgers import made
from pumice.errors import OptionError, PumiceError
from pumice.schedule.dataflow import DATAFLOWS

ONE = "minkunet-nuscenes-1f"


@pytest.fixture
def suite(measured):
    """`suite("networks", only="...")`: what it says, and its rows."""

    def suite(case, *more):
        ran, rows = measured("workloads", "--case", case, *more)
        assert ran.code == 0, ran.out + ran.err
        assert all(row["suite"] == "workloads" and row["value"] > 0 for row in rows)
        return ran.out, rows

    return suite


def setup_of(said, **more):
    return Setup(torch.device("cpu"), True, said.append, suite="workloads", **more)


# estimates


def test_estimates_stand_beside_what_is_measured(suite):
    case = "tiny/estimates/centerpoint-nuscenes-10f/fp32/inference"
    out, rows = suite("estimates", "--only", "centerpoint-nuscenes-10f/fp32/inference")
    memory, time = rows
    assert (memory["metric"], time["metric"]) == ("estimated memory", "estimated time")
    assert {row["case"] for row in rows} == {case} and {row["peer"] for row in rows} == {"measured"}
    assert memory["value"] == pytest.approx(memory["peer_value"], rel=0.15) and f"{case} memory: " in out


# networks


@pytest.mark.wide
def test_all_seven_networks(suite):
    out, _ = suite("networks")
    for name, workload in WORKLOADS.items():
        for mode in ("inference", "training"):
            lines = [line for line in out.splitlines() if line.startswith(f"tiny/{name}/fp32/{mode}")]
            assert len(lines) == 1 + (mode == "inference") and all("pumice " in line for line in lines), out
            assert all("error" in line and ("/generated" in line or not workload.generated) for line in lines)
            assert ["/over-" in line for line in lines] == [False, True][: len(lines)]


@pytest.mark.parametrize("name", [ONE, "centerpoint-waymo-3f"])
def test_networks_by_name(suite, name):
    out, rows = suite("networks", "--only", f"{name}/fp32")
    assert f"tiny/{name}/fp32/training" in out and "minkunet-kitti" not in out
    assert all(row["case"].startswith(f"tiny/{name}/fp32/") and row["peer"] == "spconv" for row in rows)


def test_one_mode_alone(suite):
    out, _ = suite("networks", "--only", f"{ONE}/fp32/inference")
    assert f"{ONE}/fp32/inference" in out and "training" not in out


def test_without_scans_a_tiny_run_has_streets(monkeypatch):
    real = bench_workloads.samples

    def absent(workload, *args, **options):
        if not workload.generated:
            raise OptionError("PUMICE_DATA is not there")
        return real(workload, *args, **options)

    monkeypatch.setattr(bench_workloads, "samples", absent)
    said = []
    list(bench_workloads.networks(setup_of(said, only=f"{ONE}/fp32/inference")))
    assert any(line.startswith(f"tiny/{ONE}/fp32/inference/generated wall") for line in said), said
    said.clear()
    list(bench_workloads.networks(replace(setup_of(said, only=f"{ONE}/fp32/inference"), quick=False)))
    assert said == [f"{ONE} is left out: PUMICE_DATA is not there"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_wrong_network_is_not_timed(monkeypatch, mode):
    """As if kernels dropped the last tap: our calls see other weights than the float64 run."""
    right = bench_workloads._truths

    def other(net, sample, how):
        truths = right(net, sample, how)
        with torch.no_grad():
            next(net.parameters())[:, -1] += 1
        return truths

    monkeypatch.setattr(bench_workloads, "_truths", other)
    monkeypatch.setattr(bench_workloads, "_at_hand", lambda setup, workload: stand_in(workload))
    with pytest.raises(PumiceError, match=f"{ONE}/fp32/{mode}.*: pumice: relative error"):
        list(bench.run("workloads", print, bench.Options("networks", f"{ONE}/fp32/{mode}", True, "cpu")))


def test_gradients_are_checked(monkeypatch):
    """A result that is right does not excuse gradients that are not."""
    monkeypatch.setattr(bench_workloads, "_at_hand", lambda setup, workload: stand_in(workload))
    whole = Side.gradients

    def doubled(side, y):
        grads = whole(side, y)
        return grads if next(side.net.parameters()).dtype == torch.float64 else 2 * grads

    monkeypatch.setattr(Side, "gradients", doubled)
    with pytest.raises(PumiceError, match=r"pumice: relative error 1, expected below 0\.01"):
        list(bench.run("workloads", print, bench.Options("networks", f"{ONE}/fp32/training", True, "cpu")))


def test_modes_and_goals():
    names = {mode.name for mode in ON_GPU}
    assert names == {"fp16/inference", "tf32/inference", "fp32/inference", "fp16/training"}
    assert {mode.partition(",")[0] for mode, _ in GOALS} <= names
    assert [mode.name for mode in (*ON_GPU, *ON_CPU) if mode.varied] == ["fp16/inference", "fp32/inference"]
    assert [mode.batch for mode in (*ON_GPU, *ON_CPU) if mode.training] == [2, 2]
    assert all(len(mode.slack) == 1 + mode.training for mode in (*ON_GPU, *ON_CPU))
    assert all(case.rpartition("/")[0].rpartition("/")[0] in WORKLOADS for case in RECORDED)


def test_what_is_reached_is_told():
    found, said = Found(), []
    found.ratios = {("fp16/inference", "wall"): {"a": 1.0, "b": 9.0}, ("fp16/inference", "gpu"): {"a": 2.0}}
    found.tell(replace(setup_of(said), quick=False))
    assert said == [
        "goal fp16/inference over spconv, wall, 2x: 3.00x (geometric mean of 2), least 1.00x at a: met",
        "fp16/inference over spconv, gpu: 2.00x (geometric mean of 1), least 2.00x at a",
    ]


def test_scans_take_turns_and_each_is_checked(monkeypatch):
    """The calls of both clocks meet the same scans in their order; one wrong result is enough."""
    monkeypatch.setattr(bench_workloads, "_at_hand", lambda setup, workload: stand_in(workload))
    met, said = [], []
    right = bench_workloads.fresh
    monkeypatch.setattr(bench_workloads, "fresh", lambda sample: met.append(sample.name) or right(sample))
    options = bench.Options("networks", f"{ONE}/fp32/inference", True, "cpu")
    rows = list(bench.run("workloads", said.append, options))
    (told,) = (line for line in said if "over-2-scans-5-turned wall" in line)
    assert f"tiny/{ONE}/fp32/inference/generated/over-2-scans-5-turned wall: pumice" in told
    assert all(row.metric == VARIED for row in rows if "/over-" in row.case)
    assert len(set(met[-7:])) == 7 and met[-7:] == met[-14:-7]

    truths = bench_workloads._truths
    monkeypatch.setattr(bench_workloads, "_truths", lambda net, one, how: [
        (feats * (2 if "turned 2" in one.name else 1), coords) for feats, coords in truths(net, one, how)
    ])  # fmt: skip
    with pytest.raises(PumiceError, match=r"over-2-scans-5-turned: pumice: relative error 0\.5"):
        list(bench.run("workloads", print, options))


def test_what_is_varied_is_a_family_of_its_own():
    sample = dict(value=1.0, unit="ms", p20=1.0, p80=1.0, dtype="fp16", clock="wall", peer="spconv", peer_value=2.0,
                  peer_source="same run", device="a GPU", versions={}, commit="x", date="2026-01-01")  # fmt: skip
    case = f"{ONE}/fp16/inference"
    same, other = Row("workloads", case, "time", **sample), Row("workloads", f"{case}/over-2-scans", VARIED, **sample)
    families = [[family.name for family in FAMILIES if family.place(row)] for row in (same, other)]
    assert families == [["inference"], ["inference, varied scans"]]
    made = FAMILIES[[family.name for family in FAMILIES].index("inference, varied scans")]
    place = made.place(replace(other, case=f"{case}/generated/tuned/over-2-scans-5-turned"))
    assert (place.group, place.way) == (f"{ONE}-generated", "tuned")


def test_a_network_is_the_same_each_time():
    workload = stand_in(WORKLOADS["centerpoint-waymo-1f"])
    sample = samples(workload, "cpu", count=1, most=200)[0]
    before = torch.random.get_rng_state()
    first, second = (bench_workloads.network(workload, sample) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    norm = first.levels[0][0][1]
    assert norm.momentum == 0.01 and not first.training and float(norm.running_var.min()) != 1.0


# spconv's twins


@pytest.fixture(scope="module")
def spconv():
    found = pytest.importorskip("spconv.pytorch", reason="spconv is not installed: pip install pumice[bench]")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, its CPU build loses sums
    yield found
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", [ONE, "centerpoint-waymo-3f", "spconv-net"])
def test_twins_give_the_same(spconv, name, training):
    if name.startswith("centerpoint") and not training:
        pytest.skip("spconv's CPU build has no bias in evaluation")
    workload = stand_in({**WORKLOADS, SPCONV_NET.name: SPCONV_NET}[name])
    if name == "spconv-net":
        workload = replace(workload, grid=replace(workload.grid, most=500))
    sample = samples(workload, "cpu", batch=2, count=1, most=500)[0]
    net = bench_workloads.network(workload, sample).train(training)
    ours, theirs = Side.ours(net, sample), Side.spconv(net, sample)
    with torch.no_grad():
        (mine, at), (peer, there) = (side.result(side.net(side.tensor())) for side in (ours, theirs))
    assert torch.equal(at, there)
    assert float((mine - peer).norm() / mine.norm()) < 2e-5
    shapes = [[p.shape for p in side.net.parameters()] for side in (ours, theirs)]
    assert shapes[0] == shapes[1] and theirs.net.training == training
    with torch.no_grad():
        next(theirs.net.parameters()).zero_()
    assert bool(next(net.parameters()).any())  # weights are copies


def test_a_network_without_a_twin(spconv):
    with pytest.raises(OptionError, match="Linear has no twin in spconv's layers; there are MinkUNet"):
        spconv_nets.twin(torch.nn.Linear(1, 1))


# shells


def test_shells(suite):
    out, rows = suite("shells", "--only", "shell_8")
    for kind in ("fwd", "map+fwd", "fwd+bwd", "map+fwd+bwd"):
        assert f"shell_8/B2/k3/C16/fp32/{kind} wall: pumice" in out
    assert "shell_16" not in out and all(row["case"].startswith("shell_8/") for row in rows)


def test_algorithms_on_shells(suite):
    """Every algorithm of FlexGEMM's article by a dataflow of ours, forward and training."""
    out, rows = suite("shell-algorithms")
    for passed in ("fwd", "fwd+bwd"):
        (line,) = (
            text for text in out.splitlines() if text.startswith(f"algorithms/shell_8/B2/k3/C16/fp32/{passed} fp32 w")
        )
        assert all(f"{flow} " in line for flow in ALGORITHMS) and "FAILED" not in out
    assert set(ALGORITHMS) < set(DATAFLOWS)
    places = {f.name for row in rows for f in FAMILIES if f.place(Row(**row))}
    assert not rows or {f"{flow} on shells, training" for flow in ALGORITHMS} <= places


@pytest.mark.parametrize(
    "case, name, way",
    [
        ("shell_8/B16/k3/C1024/fp16/fwd", "a layer on shells, forward", ""),
        (
            "shell_1024/B2/k3/C64/fp16/map+fwd+bwd/tuned",
            "a layer on shells, the first, with its map, training",
            "tuned",
        ),
        ("algorithms/shell_1024/B1/k3/C64/fp16/fwd/implicit-gemm-table", "implicit-gemm-table on shells, forward", ""),
    ],
)
def test_families_of_shells(case, name, way):
    found = {family.name: family.place(made(suite="workloads", case=case)) for family in FAMILIES}
    assert [(n, place.way, place.precision) for n, place in found.items() if place] == [(name, way, "fp16")]


@pytest.mark.parametrize("size, batch", [(8, 2), (32, 1)])
def test_cells_of_a_shell(size, batch):
    coords = bench_shells.shell_coords(size, batch, torch.device("cpu"))
    assert coords.dtype == torch.int32 and torch.equal(coords, coords.unique(dim=0))
    far = (coords[:, 1:].double() - (size - 1) / 2).norm(dim=1)
    assert float(far.max()) <= size / 2 and float(far.min()) >= size / 2 - 1.25
    cube = torch.cartesian_prod(*[torch.arange(size, dtype=torch.double)] * 3)
    every = (cube - (size - 1) / 2).norm(dim=1)
    assert len(coords) == batch * int(((every <= size / 2) & (every >= size / 2 - 1.25)).sum())


def test_a_wrong_layer_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_shells, "_ours", lambda layer, kind: lambda: torch.zeros_like(layer.feats))
    with pytest.raises(PumiceError, match="shell_8/B2/k3/C16/fp32/fwd: pumice: relative error 1"):
        list(bench.run("workloads", print, bench.Options("shells", "shell_8/B2/k3/C16/fp32/fwd", True, "cpu")))


def test_studies_that_are_known():
    with pytest.raises(OptionError, match="unknown; there are networks, estimates, shells, shell-algorithms"):
        list(bench.run("workloads", print, bench.Options(case="shell", device="cpu")))


# the clocks


def test_a_clock_that_is_not_there_is_left_out(monkeypatch):
    def missing(call):
        raise PumiceError("no profiler")

    monkeypatch.setattr(whole_calls, "busy", missing)
    monkeypatch.setattr(whole_calls, "clocks", lambda device: ("wall", "gpu"))
    said = []
    setup = setup_of(said)
    mine, peer = (Ready(name, lambda: None, "", 0.0) for name in ("pumice", "spconv"))
    rows = list(whole_calls.compared(setup, "x", mine, [peer]))
    assert [row.clock for row in rows] == ["wall"] and said[-1] == "x gpu is left out: no profiler"
    assert not setup.failures


def test_tf32_is_for_the_call_alone():
    before = torch.backends.cuda.matmul.fp32_precision
    assert whole_calls.in_tf32(lambda: torch.backends.cuda.matmul.fp32_precision)() == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False")
def test_device_time_leaves_waits_out():
    a = torch.randn(1024, 1024, device="cuda")

    def call():
        (a @ a).sum().item()
        os.sched_yield()
        (a @ a).sum().item()

    call()
    spent = timing.busy(call, runs=5)
    assert 0 < spent.p20 <= spent.median <= spent.p80 < 50
