"""Every snippet of the README and of the pages in docs runs as it stands, and every command that they show exists."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from pumice.cli.main import app
from pumice.engine import tuning
from pumice.language.formats import NAMED
from pumice.lower.dataflow import CONV
from pumice.ops import DATAFLOWS
from pumice.schedule.tuned_plans import Plans

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("guide", "einsum", "maps")),
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/from_*.md")),
]
SCHEDULE = "schedule order m p q e; pack I; vector p 2 q 2;"  # Whatever lanes a vector has
SAID = {
    "docs/guide.md": ["loss ", "accuracy ", "inference on", "voxels"],
    "docs/einsum.md": ["C[A_m[p],n] = A_values[p,q] * B[A_k[p,q],n] ; A_m:sorted", "tl.load", SCHEDULE],
    "docs/maps.md": ["KernelMap(3 -> 3 rows, K=27, 5 pairs, 1.67 per output, policy='same')", "-> "],
}


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plans = Plans(tmp_path / "plans.json")
    monkeypatch.setattr(tuning, "plans", lambda: plans)
    torch.manual_seed(0)
    space: dict[str, object] = {"__name__": "__main__"}
    found = blocks(page)
    assert found
    for number, block in enumerate(found):
        exec(compile(block, f"{page} block {number}", "exec"), space)
    said = capsys.readouterr().out
    assert all(text in said for text in SAID.get(page, [])), said


def test_every_page_with_snippets_is_tested():
    pages = {path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    assert {page for page in pages if blocks(page)} == {*PAGES, "docs/benchmarks.md"}


def commands() -> list[str]:
    """The `pumice` command lines that the pages show, in blocks and between backticks."""
    found = []
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        lines = [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()]
        found += [line.partition("#")[0] for line in lines if line.startswith("pumice ")]
        found += re.findall(r"`(pumice [a-z][^`]*)`", text)
    return sorted({line.strip() for line in found})


@pytest.mark.parametrize("line", commands())
def test_commands_that_the_pages_show_exist(line):
    _, name, *words = shlex.split(line)
    known = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert name in known, line
    options = {option for param in known[name].params for option in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options | {"--help"}, line


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_einsum_page_names_every_format():
    text = (ROOT / "docs" / "einsum.md").read_text(encoding="utf-8")
    assert CONV in text
    assert all(name in text for name in NAMED)


def test_the_guide_names_every_dataflow():
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for name in DATAFLOWS:
        base = name.rpartition("-")[0]
        assert any(f"`{told}`" in text for told in (name, f"{base}-*", f"-{name.rpartition('-')[2]}")), name
