"""`pumice tune`: the tuned tiles shown, removed, carried away and brought in."""

import json
from dataclasses import replace

import pytest

from pumice.cli import main as cli
from pumice.cli import segment
from pumice.schedule.dataflow import DATAFLOWS
from pumice.schedule.tile import Tile
from pumice.schedule.tuned_plans import PlanKey, Plans, TunedPlan
from pumice.schedule.tuned_tiles import Key, Ledger

LONG = "O[o,n] = map[o,k,i] * x[i,c] * w[n,k,c] * " + " * ".join(f"v{i}[c]" for i in range(20))
KEYS = (
    Key("some GPU", "C[m,n] = A[m,k] * B[k,n]", ("fp32", "fp32"), (18, 14, 12), "tf32x3"),
    Key("some GPU", LONG, ("fp16",), (3,)),
)


@pytest.fixture
def own(monkeypatch, tmp_path):
    """The user's ledger, without tiles, and no plans."""
    found = Ledger(tmp_path / "own" / "tiles.json")
    monkeypatch.setattr(cli, "ledger", lambda: found)
    monkeypatch.setattr(cli, "plans", lambda: Plans(found.path.with_name("plans.json")))
    monkeypatch.setattr(cli.console, "width", 400)
    monkeypatch.setenv("COLUMNS", "400")
    return found


@pytest.fixture
def filled(own):
    """The same with two."""
    own.put(KEYS[0], Tile(64, 32, 16, packed=True), seconds=1.234e-4)
    own.put(KEYS[1], Tile(16, 16))
    return own


def refused(ran, *parts):
    assert ran.code == 1 and ran.err.startswith("error: ") and ran.err.count("\n") == 1, ran
    return all(str(part) in ran.err for part in parts)


def test_show(pumice, filled):
    ran = pumice("tune", "--show")
    assert ran.code == 0, ran.err
    title, head, first, sizes, second, _ = (line.strip() for line in ran.out.splitlines())
    assert title == "tiles of some GPU"
    assert head.split() == ["statement,", "dtypes,", "sizes", "from", "tile", "ms", "tuned"]
    date = filled.all()[KEYS[0]].date.astimezone().strftime("%Y-%m-%d")
    assert [part for part in (KEYS[0].statement, "64x32x16", "packed", "0.1234", date) if part not in first] == []
    assert sizes == "fp32 fp32 (tf32x3), from 512 128 64"
    assert "O[o,n] = map" in second and " ... " in second and LONG not in second


def test_show_in_80_columns(pumice, filled, monkeypatch):
    """Numbers and dates stay in one piece, and text is folded in its own column."""
    monkeypatch.setattr(cli.console, "width", 80)
    filled.put(
        replace(KEYS[1], sizes=(36, 14, 14, 10)), Tile(128, 256, 64, warps=8, stages=4, prefetch_indices=True), 12.3456
    )
    own = Plans(filled.path.with_name("plans.json"))
    about = "MinkUNet, 9 maps, k3 at 1: 12 layers, 109467 rows, 9.9 pairs a row"
    flows = {f"k3x1x1 s2x1x1 at {n}": DATAFLOWS["gather-gemm-scatter-locality-aware-adaptive"] for n in (1, 2, 4, 8)}
    own.keep(
        replace(PLAN_KEY, dtypes="float32 autocast to float16", mode="training, dgrad with wgrad"),
        replace(PLAN, about=about, flows=flows, before={"total": 0.0123456}),
    )
    lines = pumice("tune", "--show").out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 30, lines
    shown = "\n".join(lines)
    dates = [line for line in lines if line.rstrip().endswith(PLAN.date.astimezone().strftime("%Y-%m-%d"))]
    assert len(dates) == 4, "one for each tile and plan"
    for told in (
        "12345.6000",
        "12.3456",
        "128x256x64 w8 s4 prefetch",
        "0.1234",
        "plans of some GPU",
        "tiles of some GPU",
    ):
        assert told in shown
    # Nothing is lost by folding.
    joined = "".join(shown.split())
    for text in ("9.9 pairs a row (unfinished)", *(f"{group}: {flow}" for group, flow in flows.items())):
        assert "".join(text.split()) in joined


def test_clear(pumice, filled):
    ran = pumice("tune", "--clear")
    assert (ran.code, ran.out) == (0, f"removed 2 tuned tiles from {filled.path}\n")
    assert Ledger(filled.path).all() == {}


def test_export_and_merge(pumice, filled, tmp_path, monkeypatch):
    file, other = tmp_path / "out.json", Ledger(tmp_path / "other.json")
    ran = pumice("tune", "--export", file)
    assert (ran.code, ran.out) == (0, f"wrote 2 tuned tiles to {file}\n")
    assert json.loads(file.read_text())["version"] == 2
    monkeypatch.setattr(cli, "ledger", lambda: other)
    for count in ("2 tuned tiles", "0 tuned tiles"):
        ran = pumice("tune", "--merge", file)
        assert (ran.code, ran.out) == (0, f"added {count} from {file}\n")
    assert Ledger(other.path).all() == filled.all()


FLOWS = {"k3 at 1": DATAFLOWS["implicit-gemm-unsorted"]}
PLAN_KEY = PlanKey.of("some GPU", "float16", "inference", "0123", ((14.1, 2.2),))
PLAN = TunedPlan(FLOWS, ((14.1, 2.2),), {"total": 2e-3}, {"total": 1.5e-3}, ("k3 at 1",), False, "MinkUNet, 9 maps")


def test_plans_go_along(pumice, filled, tmp_path, monkeypatch):
    own = Plans(filled.path.with_name("plans.json"))
    own.keep(PLAN_KEY, PLAN)
    shown = pumice("tune", "--show").out
    assert all(
        told in shown for told in ("MinkUNet, 9 maps (unfinished)", "2.0000", "1.5000", "k3 at 1: implicit-gemm")
    )
    file, other = tmp_path / "out.json", tmp_path / "other" / "tiles.json"
    assert pumice("tune", "--export", file).out == f"wrote 2 tuned tiles and 1 tuned plan to {file}\n"
    monkeypatch.setattr(cli, "ledger", lambda: Ledger(other))
    monkeypatch.setattr(cli, "plans", lambda: Plans(other.with_name("plans.json")))
    assert "added 2 tuned tiles and 1 tuned plan from" in pumice("tune", "--merge", file).out
    assert Ledger(other).all() == filled.all() and Plans(other.with_name("plans.json")).all() == {PLAN_KEY: PLAN}
    assert Ledger(tmp_path / "third.json").merge(file) == 2, "as before there were plans"
    assert pumice("tune", "--clear").out.count("removed 2 tuned tiles from") == 1
    assert "added 0 tuned tiles and 1 tuned plan" in pumice("tune", "--merge", own.path).out
    file.write_text(file.read_text().replace('"plans": {"version": 1', '"plans": {"version": 99'))
    assert refused(pumice("tune", "--merge", file), "tuning cache of plans of version 99, expected 1")


@pytest.mark.parametrize("option", [("--show",), ("--clear",), ("--export", "out.json")])
def test_nothing_there(pumice, own, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = pumice("tune", *option)
    assert ran.code == 0 and f"no tuned tiles in {own.path}" in ran.out
    assert list(tmp_path.iterdir()) == []


def test_without_an_option_help(pumice, filled):
    ran = pumice("tune")
    assert ran.code == 0 and len(filled.all()) == 2
    assert all(option in ran.out for option in ("--show", "--clear", "--export", "--merge"))
    assert "tune" in pumice("--help").out


def test_what_is_refused(pumice, filled, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("no ledger")
    assert refused(pumice("tune", "--merge", bad), bad, "is not a tuning cache of tiles")
    assert refused(pumice("tune", "--merge", tmp_path / "gone.json"), "gone.json", "No such file")
    assert refused(pumice("tune", "--export", tmp_path / "no" / "folder.json"), "folder.json", "cannot be written")
    assert refused(
        pumice("tune", "--show", "--clear"), "one of CHECKPOINT SCANS, --show, --clear, --export and --merge"
    )
    assert len(filled.all()) == 2
    filled.path.write_text('{"version": 3, "tiles": []}')
    for option in (["--show"], ["--clear"], ["--export", tmp_path / "x"], ["--merge", bad]):
        assert refused(pumice("tune", *option), "error")
    assert refused(pumice("tune", "--show"), filled.path, "version 3, expected 2")
    assert filled.path.read_text() == '{"version": 3, "tiles": []}'


def test_a_checkpoint_is_tuned_for_scans(pumice, own, write, scenes, quick, tmp_path, monkeypatch):
    """What the command hands to pumice.tune, and that its result is shown."""
    monkeypatch.chdir(tmp_path)
    path = write("scans/a.npz", scenes(1)[0])
    ran = pumice("segment", path, "--voxel", 0.5, "--width", 0.1, "--epochs", 1, "--device", "cpu", "--out", "o")
    assert ran.code == 0, ran.err
    asked = []
    monkeypatch.setattr(segment, "tune_network", lambda *args, **more: asked.append((*args, more)) or "[all] is tuned")
    run = ("tune", "o/checkpoint.safetensors")
    ran = pumice(*run, path.parent, "--device", "cpu", "--budget", 3)
    assert ran.code == 0 and ran.out.endswith("[all] is tuned\n"), ran.err
    ((net, (sample,), more),) = asked
    assert not net.training and more == {"budget": 3} and sample.channels == 4
    assert refused(pumice(*run), "scans", "found only o/checkpoint.safetensors")
    assert refused(pumice(*run, path, "--show"), "expected one of", "found several")
