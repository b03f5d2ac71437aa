"""The command line: pumice segment, demo, info, tune."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pumice.cli import info as info_
from pumice.cli import segment as segment_
from pumice.cli import tuned as tuned_
from pumice.cli.job import Job, common_labels, hold_out, labelled, pick_device
from pumice.cli.segment import Result
from pumice.cli.training import Recipe, Step
from pumice.data import Scan, find_scans, read_scan, street_scene
from pumice.errors import OptionError, PumiceError
from pumice.schedule.ledger import ledger
from pumice.schedule.plans import plans

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(highlight=False)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 or fp16 (autocast)")]
OutFolder = Annotated[Path, typer.Option("--out", help="folder for the checkpoint, the report and metrics.json")]
ReportFile = Annotated[Path | None, typer.Option(help="where to write the report [default: OUT/report.html]")]


def main() -> None:
    """Run the command line; the library's own errors become one line and exit code 1."""
    try:
        app()
    except PumiceError as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)


@app.command()
def segment(
    path: Annotated[Path, typer.Argument(help="a scan, or a folder of scans (.bin .pcd.bin .ply .pcd .las .npz ...)")],
    labels: Annotated[Path | None, typer.Option(help="label file, or folder of label files")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="go on from this checkpoint, or run it")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the training scans [default: 60, or 20]")] = None,
    voxel: Annotated[float | None, typer.Option(help="edge of a voxel in metres [default: 0.1]")] = None,
    width: Annotated[float | None, typer.Option(help="factor on MinkUNet's channels [default: 0.5]")] = None,
    columns: Annotated[int | None, typer.Option(help="numbers per point in .bin files, if the guess is wrong")] = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    seed: int = 0,
    out: OutFolder | None = None,
    report: ReportFile = None,
) -> None:
    """Train MinkUNet on labelled scans, evaluate, time and draw it; without labels, run a checkpoint.

    Every fifth scan of a folder is held out for the evaluation; a single scan is evaluated on itself.
    """
    chosen = pick_device(device)
    files = find_scans(path)
    if checkpoint is not None and (voxel is not None or width is not None):
        raise OptionError("a --checkpoint brings its own voxel and width: leave --voxel and --width out")
    scans = common_labels([read_scan(file, labels, columns=columns) for file in files])
    for scan in scans:
        _say(f"read  {scan.name}: {_told(scan)}")
    train_on, judge_on = hold_out(scans)
    default = 60 if len(train_on) == 1 else 20
    recipe = Recipe(default if epochs is None else epochs, augment=len(train_on) > 1, precision=precision, seed=seed)
    training = scans[0].labels is not None and recipe.epochs > 0
    # Running a checkpoint must not overwrite what training it left.
    folder = out or Path("pumice-runs") / (path.stem + ("" if training else "-applied"))
    job = Job(
        folder, chosen, 0.1 if voxel is None else voxel, 0.5 if width is None else width, recipe, checkpoint, report
    )
    _tell(_train(train_on, judge_on, job) if training else segment_.apply(scans, job))


@app.command()
def demo(
    scenes: Annotated[int, typer.Option(help="street scenes to train on")] = 12,
    epochs: int = 12,
    voxel: float = 0.15,
    width: float = 0.25,
    device: Device = "auto",
    precision: Precision = "fp32",
    seed: int = 0,
    out: OutFolder = Path("pumice-runs/demo"),
    report: ReportFile = None,
) -> None:
    """The main job on generated street scenes: train on some, evaluate on others. About two minutes on two cores."""
    chosen = pick_device(device)
    train_on = [street_scene(seed + i, azimuths=720) for i in range(scenes)]
    judge_on = [street_scene(seed + 1000 + i, azimuths=720) for i in range(2)]
    points = sum(map(len, train_on))
    _say(f"made  {scenes} street scenes with {points} points to train on, 2 others to be judged on")
    job = Job(out, chosen, voxel, width, Recipe(epochs, precision=precision, seed=seed), None, report)
    _tell(_train(train_on, judge_on, job))


@app.command()
def info() -> None:
    """Versions, devices and compilers: what is usable, and why not."""
    console.print(info_.render(info_.collect()))


@app.command()
def tune(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--show", help="print them as a table")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="remove all of them")] = False,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="write them to this file")] = None,
    merge: Annotated[Path | None, typer.Option(metavar="FILE", help="take what is new or newer from an export")] = None,
) -> None:
    """What was tuned on this machine, or wherever the cache folder is shared: tiles of kernels, plans of networks."""
    if show + clear + (export is not None) + (merge is not None) > 1:
        raise OptionError("expected one of --show, --clear, --export and --merge, found several")
    kept = tuned_.Kept(ledger(), plans())
    if show:
        tables = kept.tables()
        for table in tables:
            console.print(table)
        if not tables:
            _say(kept.nothing())
    elif clear:
        _say(kept.clear())
    elif export is not None:
        _say(kept.export(export))
    elif merge is not None:
        _say(kept.merge(merge))
    else:
        typer.echo(context.get_help())


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench() -> None:
    """Benchmarks are run from a clone of the repository."""
    raise OptionError("benchmarks are not installed: run `python -m benchmarks SUITE` in a clone of the repository")


def _say(text: str) -> None:
    # Outside a terminal a path must stay in one piece.
    console.print(text, soft_wrap=True)


def _told(scan: Scan) -> str:
    lost = f", [yellow]{scan.dropped} not finite, left out[/]" if scan.dropped else ""
    bare = ", [yellow]no labelled point, not trained on[/]" if scan.labels is not None and not labelled(scan) else ""
    return f"{len(scan)} points{lost}{bare}"


def _train(train_on: Sequence[Scan], judge_on: Sequence[Scan], job: Job) -> Result:
    progress = Progress(
        TextColumn("train"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        _Figures(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    # Where nobody watches a terminal, a line now and then says more than a bar.
    shown = progress if console.is_terminal else nullcontext()
    bar = progress.add_task("train", total=job.recipe.epochs * len(train_on))
    with shown:
        result = segment_.run(train_on, judge_on, job, _watch(progress, bar))
    return result


def _watch(progress: Progress, bar: object) -> Callable[[Step, int], None]:
    def watch(step: Step, total: int) -> None:
        if console.is_terminal:
            progress.update(bar, completed=step.number, figures=_figures(step))  # type: ignore[arg-type]
            if step.number == total:
                progress.stop()
                console.print("judge [dim]evaluate, time, draw[/]")
        elif step.number in (1, total) or step.number % max(1, total // 10) == 0:
            console.print(f"train {step.number}/{total}  {_figures(step)}")

    return watch


def _figures(step: Step) -> str:
    return f"loss {step.loss:.3f}  accuracy {step.accuracy:.3f}  {step.speed / 1e3:.1f}k voxels/s"


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""), style="cyan")


def _tell(result: Result) -> None:
    if result.interrupted:
        kept = f"the network so far is in {result.checkpoint}\ngo on with --checkpoint {result.checkpoint}"
        _say(f"[yellow]stopped[/] after {len(result.steps)} steps; {kept if result.steps else 'nothing to save yet'}")
        raise typer.Exit(130)
    if result.scores is not None:
        console.print(_score_table(result))
    if result.timing is not None:
        t = result.timing
        _say(
            f"inference {t.median:.1f} ms (20 %: {t.p20:.1f}, 80 %: {t.p80:.1f}; {t.runs} runs, {t.voxels} voxels, "
            "kernel maps included)"
        )
    _say(f"checkpoint {result.checkpoint}\nreport     {result.report}")


def _score_table(result: Result) -> Table:
    assert result.scores is not None
    scores = result.scores
    table = Table(title=f"on {result.where}", title_justify="left", box=None, padding=(0, 2))
    table.add_column("class")
    table.add_column("IoU", justify="right")
    table.add_column("points", justify="right")
    for name, iou, count in zip(result.task.names, scores.iou, scores.counts, strict=True):
        if count:
            table.add_row(name, f"{iou:.3f}", str(count))
    table.add_row("[bold]mIoU[/]", f"[bold]{scores.miou:.3f}[/]", str(int(scores.counts.sum())))
    table.add_row("[bold]point accuracy[/]", f"[bold]{scores.accuracy:.3f}[/]", "")
    for name, trivial in result.trivial.items():
        table.add_row(f"[dim]mIoU of the {name}[/]", f"[dim]{trivial.miou:.3f}[/]", "")
    return table
