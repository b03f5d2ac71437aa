"""The guides' code runs."""

import re
from pathlib import Path

import torch

import pumice
from pumice.engine import tuning
from pumice.ops import DATAFLOWS, conv
from pumice.schedule.plans import Plans
from pumice.testing import random_tensor

DOCS = Path(__file__).parents[1] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.S)


def test_the_einsum_guide_runs(capsys):
    torch.manual_seed(0)
    space: dict[str, object] = {}
    for number, block in enumerate(blocks("einsum.md")):
        exec(compile(block, f"einsum.md block {number}", "exec"), space)
    said = capsys.readouterr().out
    assert "C[A_m[p],n] = A_values[p,q] * B[A_k[p,q],n] ; A_m:sorted" in said
    assert "tl.load" in said


def test_the_forms_it_quotes_are_those_found():
    text = (DOCS / "einsum.md").read_text(encoding="utf-8")
    from pumice.language.formats import NAMED
    from pumice.lower.dataflow import CONV

    assert CONV in text
    assert all(name in text for name in NAMED)


def test_the_guide_to_kernel_maps_runs(capsys):
    space: dict[str, object] = {}
    for number, block in enumerate(blocks("maps.md")):
        exec(compile(block, f"maps.md block {number}", "exec"), space)
    said = capsys.readouterr().out
    assert "KernelMap(3 -> 3 rows, K=27, 5 pairs, 1.67 per output, policy='same')" in said
    assert "-> sorted" in said
    assert said.endswith("\n2\n")


def test_the_epilogues_of_the_guide_run():
    fused, bytes_ = (block for block in blocks("guide.md") if "Epilogue" in block)
    x = random_tensor(20, 4, 3)
    space = {"x": x, "weight": torch.randn(4, 3, 3, 3, 4), "scale": torch.ones(4), "shift": torch.zeros(4)}
    exec(compile(fused, "guide.md", "exec"), space)
    plain = conv(x, space["weight"]).feats
    torch.testing.assert_close(space["y"].feats, (plain + x.feats).relu())
    space["bias"] = torch.randn(4)
    exec(compile(bytes_, "guide.md", "exec"), space)
    wanted = plain + space["bias"]
    assert (space["y"].feats - wanted).norm() < 0.02 * wanted.norm()


def test_the_tuning_of_the_guide(tmp_path, monkeypatch, capsys):
    plans = Plans(tmp_path / "plans.json")
    monkeypatch.setattr(tuning, "plans", lambda: plans)
    (block,) = (block for block in blocks("guide.md") if "pm.tune" in block)
    net = torch.nn.Sequential(pumice.nn.Conv3d(4, 4, 3), pumice.nn.Conv3d(4, 4, 2, stride=2))
    exec(compile(block, "guide.md", "exec"), {"net": net, "samples": [random_tensor(50, 4)], "pm": pumice})
    said = capsys.readouterr().out
    assert "inference on cpu" in said and "k2 s2 at 1" in said and len(plans.all()) == 1


def test_the_captured_network_of_the_guide(capsys):
    (block,) = (block for block in blocks("guide.md") if "pm.capture(" in block)
    space = {"net": pumice.nn.Conv3d(4, 4, 3).eval(), "x": random_tensor(50, 4), "pm": pumice}
    exec(compile(block, "guide.md", "exec"), space)
    torch.testing.assert_close(space["y"].feats, space["net"](space["x"]).feats.detach())
    assert "up to 200 voxels" in capsys.readouterr().out


def test_the_captured_step_of_the_guide():
    (block,) = (block for block in blocks("guide.md") if "pm.capture_step(" in block)
    x, labels = random_tensor(60, 4, 3), torch.randint(0, 3, (60,))
    net = pumice.nn.Sequential(pumice.nn.Conv3d(4, 8, 3), pumice.nn.BatchNorm(8), pumice.nn.Conv3d(8, 3, 3))
    space = {"net": net, "x": x, "labels": labels, "loader": [(x, labels)] * 3, "torch": torch, "pm": pumice}
    block = block.replace("cuda", "cpu").replace(", capturable=True", "")
    exec(compile(block, "guide.md", "exec"), {**space, "F": torch.nn.functional}, space)
    assert space["step"].replays == 3 and float(space["value"]) > 0  # pyright: ignore[reportAttributeAccessIssue]


def test_the_dataflows_of_the_guide():
    text = (DOCS / "guide.md").read_text(encoding="utf-8")
    for name in DATAFLOWS:
        base = name.rpartition("-")[0]
        assert any(f"`{told}`" in text for told in (name, f"{base}-*", f"-{name.rpartition('-')[2]}")), name
    (block,) = (block for block in blocks("guide.md") if "Dataflows" in block)
    space = {"x": random_tensor(20, 4, 3), "weight": torch.randn(4, 3, 3, 3, 4), "pm": pumice}
    exec(compile(block, "guide.md", "exec"), space)
    torch.testing.assert_close(space["y"].feats, conv(space["x"], space["weight"]).feats)


def test_the_exported_network_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, x = pumice.nn.Sequential(pumice.nn.Conv3d(4, 4, 3), pumice.nn.Conv3d(4, 4, 2, stride=2)), random_tensor(50, 4)
    space: dict[str, object] = {"net": net, "x": x, "pm": pumice, "torch": torch}
    for block in (block for block in blocks("guide.md") if "torch.export" in block):
        exec(compile(block, "guide.md", "exec"), space)
    torch.testing.assert_close(space["feats"], net(x).feats)


def test_the_workloads_of_the_benchmarks():
    from benchmarks.scenes.workloads import WORKLOADS

    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for name in WORKLOADS:
        assert f"`{name}`" in text or f"`-{name.rpartition('-')[2]}`" in text, name
    (block,) = blocks("benchmarks.md")
    space: dict[str, object] = {}
    exec(compile(block, "benchmarks.md", "exec"), space)
    assert space["logits"].feats.shape == (300, 19) and len(space["other"]) == 300
