"""The command line of the benchmarks: python -m benchmarks SUITE, report, profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from benchmarks import run as suites
from benchmarks.harness.results import current, read
from benchmarks.harness.study import Options
from benchmarks.profile import page, profile
from benchmarks.report import report as report_
from benchmarks.report import status
from pumice.cli.segment import pick_device
from pumice.errors import PumiceError


class _Suites(TyperGroup):
    """Command group that inserts `run` if the first argument is not the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if known else ["run", *args])


app = typer.Typer(cls=_Suites, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")]


def main() -> None:
    """Run the command line; a PumiceError is printed in one line, with exit code 1."""
    try:
        app(prog_name="python -m benchmarks")
    except PumiceError as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)


@app.command()
def run(
    suite: Annotated[str, typer.Argument(help="the suite to run; without one they are listed")] = "",
    case: Annotated[str, typer.Option(help="one study of the suite")] = "",
    only: Annotated[str, typer.Option(help="cases whose name contains this text")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes, to see that all of it runs")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="also what takes minutes to tune")] = False,
    device: Device = "auto",
    limit: Annotated[float, typer.Option(help="seconds that a study may take; it runs fewer measurements")] = 0.0,
    count: Annotated[int, typer.Option(help="scans or geometries of a study")] = 0,
    scenes: Annotated[str, typer.Option(help="of stream: folder of scenes (NAME.npz with coords [N, 3])")] = "",
    most: Annotated[int, typer.Option(help="of stream: crop scenes to so many voxels at most")] = 0,
    inline: Annotated[bool, typer.Option("--inline", help="of stream: measure all ways in this process")] = False,
    out: Annotated[Path | None, typer.Option(help="results file that the rows are appended to")] = None,
) -> None:
    """Measure Pumice against its peers in the same run; exit code 1 if a result of Pumice was wrong.

    `python -m benchmarks SUITE` is short for `python -m benchmarks run SUITE`.
    """
    if not suite:
        _say(f"suites: {', '.join(sorted(suites.SUITES))}")
        return
    options = Options(case, only, quick, device, thorough, limit, count, scenes, most, inline)
    suites.record(suites.run(suite, _say, options), out)


@app.command()
def report(
    ledger: Annotated[Path, typer.Option(help="results file")] = Path("bench/results.jsonl"),
    out: Annotated[Path, typer.Option(help="folder for the page and the pictures")] = Path("bench/report"),
    device: Annotated[str, typer.Option(help="rows of devices whose name contains this text")] = "",
    commit: Annotated[list[str] | None, typer.Option(help="rows of commits that begin so; may be repeated")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="write the tables of docs and README")] = False,
) -> None:
    """Write the results file as an HTML page with PNGs, or as Markdown; nothing is measured."""
    if markdown:
        readme = Path("README.md")
        readme.write_text(status.front(readme.read_text(encoding="utf-8"), current(read(ledger))), encoding="utf-8")
        _say(f"pages {status.write(ledger, Path('docs/status.md'))}, {readme}")
        return
    _say(report_.told(report_.write(ledger, out, report_.Choice(device, tuple(commit or ())))))


@app.command("profile")
def profile_(
    model: Annotated[str, typer.Argument(help="minkunet, minkunet-0.5 (its width), centerpoint, or module:factory")],
    scan: Annotated[str, typer.Argument(help="a scan, a scene of PUMICE_DATA, shell_64 (its size), or street")],
    voxel: Annotated[float, typer.Option(help="edge of a voxel in metres, of a scan")] = 0.1,
    passes: Annotated[int, typer.Option(help="passes that are timed, and as many that are traced")] = 20,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16 [default: fp16 on a GPU]")] = "",
    out: Annotated[Path, typer.Option(help="folder for profile.html and profile.png")] = Path("pumice-runs/profile"),
) -> None:
    """Profile the host time of an eager pass: by part, function and layer, and as a flame graph."""
    found = profile.profile(profile.ProfileOptions(model, scan, pick_device(device), precision, voxel, passes))
    written, picture = page.write(found, out)
    _say(page.summary(found))
    for table in page.tables(found):
        console.print(table)
    _say(f"page    {written}\npicture {picture}")


def _say(text: str) -> None:
    # soft_wrap: outside a terminal a path must stay in one piece.
    console.print(text, soft_wrap=True)


if __name__ == "__main__":
    main()
