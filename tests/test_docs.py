"""Every snippet of the README and of the pages in docs runs as it stands, and every command that they show exists.

A block ```python runs; ```python not-run: REASON, such as the code of another library, is skipped with its reason.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import pumice
from pumice.cli.main import app
from pumice.engine import tuned_network
from pumice.language.formats import NAMED
from pumice.lower.dataflow import CONV
from pumice.ops import DATAFLOWS
from pumice.schedule.tuned_plans import Plans

ROOT = Path(__file__).parents[1]
MADE = ROOT / "docs" / "pictures"  # by the site's build
FILES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if MADE not in path.parents)]
ELSEWHERE = {"docs/benchmarks.md"}  # in benchmarks/tests
SCHEDULE = "schedule order m p q e; pack I; vector p 2 q 2;"  # Whatever lanes a vector has
SAID = {
    "docs/tutorial.md": ["loss ", "accuracy ", "voxels"],
    "docs/guide/compile.md": ["convolution + norm + relu", "capacities up to"],
    "docs/guide/tuning.md": ["inference on"],
    "docs/einsum.md": ["C[A_m[p],n] = A_values[p,q] * B[A_k[p,q],n] ; A_m:sorted", "tl.load", SCHEDULE],
    "docs/how/coords.md": ["KernelMap(3 -> 3 rows, K=27, 5 pairs, 1.67 per output, policy='same')", "-> "],
}


def blocks(path: Path) -> list[tuple[str, str]]:
    """(reason not to be run or "", code) of each Python block of a page."""
    found = re.findall(r"^```python(.*)\n((?:.*\n)*?)```$", path.read_text(encoding="utf-8"), re.M)
    return [(re.fullmatch(r"(?: not-run: (.+))?", rest)[1] or "", code) for rest, code in found]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = [named(path) for path in FILES if any(not reason for reason, _ in blocks(path))]
NOT_RUN = [(named(path), number, reason) for path in FILES for number, (reason, _) in enumerate(blocks(path)) if reason]


@pytest.mark.parametrize("page", sorted({*PAGES} - ELSEWHERE))
def test_every_snippet_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plans = Plans(tmp_path / "plans.json")
    monkeypatch.setattr(tuned_network, "plans", lambda: plans)
    torch.manual_seed(0)
    space: dict[str, object] = {"__name__": "__main__"}
    for number, (reason, code) in enumerate(blocks(ROOT / page)):
        if not reason:
            exec(compile(code, f"{page} block {number}", "exec"), space)
    said = capsys.readouterr().out
    assert all(text in said for text in SAID.get(page, [])), said


@pytest.mark.parametrize("page, number, reason", NOT_RUN)
def test_snippets_that_are_not_run_parse(page, number, reason):
    compile(blocks(ROOT / page)[number][1], f"{page} block {number}", "exec")
    pytest.skip(f"{page} block {number}: {reason}")


def test_the_pages_with_snippets_are_known():
    assert {*SAID} | ELSEWHERE | {"README.md", "docs/guide/network.md"} <= {*PAGES}


def commands() -> list[str]:
    """The `pumice` command lines that the pages show, in blocks and between backticks."""
    found = []
    for path in FILES:
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


def test_targets_of_make_that_the_pages_show_exist():
    made = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*FILES, ROOT / "CONTRIBUTING.md"])
    shown = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)
    assert made and shown and {*shown} <= {*made[1].split()}


def test_the_readme_is_short_and_counts_right():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and f"{len(DATAFLOWS)} named dataflows" in text


def test_every_command_is_listed():
    commands = {name for name, command in get_command(app).commands.items() if not command.hidden}
    for page in ("README.md", "docs/install.md"):
        (told,) = re.findall(r"the command line: pumice ([a-z, ]+)", (ROOT / page).read_text(encoding="utf-8"))
        assert {*told.split(", ")} == commands, page
    text = (ROOT / "docs" / "guide" / "command-line.md").read_text(encoding="utf-8")
    assert all(f"| `pumice {name}" in text for name in commands)


def test_the_einsum_page_names_every_format():
    text = (ROOT / "docs" / "einsum.md").read_text(encoding="utf-8")
    assert CONV in text
    assert all(name in text for name in NAMED)


def test_the_guide_names_every_dataflow():
    text = (ROOT / "docs" / "guide" / "tuning.md").read_text(encoding="utf-8")
    for name in DATAFLOWS:
        base = name.rpartition("-")[0]
        assert any(f"`{told}`" in text for told in (name, f"{base}-*", f"-{name.rpartition('-')[2]}")), name


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["version"] == pumice.__version__
    assert len(found["references"]) == 5 and all(each["authors"] and each["title"] for each in found["references"])
