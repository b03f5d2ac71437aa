"""The command line: pumice segment, label, evaluate, demo, convert, info, tune, warmup."""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import pumice
from pumice.cli import convert as convert_
from pumice.cli import info as info_
from pumice.cli import kept as kept_
from pumice.cli import label as label_
from pumice.cli import ranks as ranks_
from pumice.cli import segment as segment_
from pumice.cli.segment import Job, Result, common_labels, hold_out, labelled, pick_device
from pumice.cli.training import Recipe, TrainingProgress
from pumice.data import READERS, Scan, find_scans, read_scan, street_scene
from pumice.errors import OptionError, PumiceError
from pumice.label import Labeller
from pumice.schedule.tuned_plans import plans
from pumice.schedule.tuned_tiles import ledger

app: typer.Typer = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console: Console = Console(highlight=False)
# Scans for tuning; more of them add little.
_SAMPLES = 4

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 or fp16 (autocast)")]
OutFolder = Annotated[Path, typer.Option("--out", help="folder for the checkpoint, the report and metrics.json")]
ReportFile = Annotated[Path | None, typer.Option(help="where to write the report [default: OUT/report.html]")]
Labels = Annotated[Path | None, typer.Option(help="label file, or folder of them [default: the scan's, or ../labels]")]
Columns = Annotated[int | None, typer.Option(help="numbers per point in .bin files, if the guess is wrong")]
Features = Annotated[str | None, typer.Option(help="features of each point: intensity, rgb, none or constant")]
Predictions = Annotated[Path | None, typer.Option(help="folder for each point's class [default: OUT/predictions]")]
PredictionsAs = Annotated[
    str, typer.Option(help="label, npz, ply, or auto: label for SemanticKITTI's classes, else npz")
]
Timing = Annotated[bool, typer.Option("--timing", help="time inference and its layers, too")]
Readers = Annotated[
    int | None, typer.Option(help="processes that read ahead and write [default: 1, or up to 12 for a GPU]")
]
Scans = Annotated[Path, typer.Argument(help=f"a scan, or a folder of scans ({' '.join(READERS)})")]
Trained = Annotated[Path, typer.Argument(help="a checkpoint of `pumice segment`")]


def main() -> None:
    """Run the command line; warnings and the library's own errors become one line each; errors exit with code 1."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            app()
        except (PumiceError, OSError) as error:
            _aside("error", "bold red", f"{ranks_.named()}{error}")
            ranks_.end(1)
            sys.exit(1)
        except SystemExit as done:
            ranks_.end(int(done.code or 0))
            raise


def _aside(kind: str, style: str, text: str) -> None:
    Console(stderr=True, highlight=False).print(Text.assemble((f"{kind}: ", style), text), soft_wrap=True)


def _warn(message: Warning | str, *_: object) -> None:
    if not console.quiet:
        _aside("warning", "yellow", str(message))


def _print_version(shown: bool) -> None:
    if shown:
        typer.echo(f"pumice {pumice.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="show it")] = False,
) -> None:
    """Sparse convolution on point clouds: train, run and evaluate a network on scans."""


@app.command()
def segment(
    path: Scans,
    labels: Labels = None,
    no_labels: Annotated[bool, typer.Option("--no-labels", help="ignore labels: run a checkpoint")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="continue from this checkpoint, or run it")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the training scans [default: 60, or 20]")] = None,
    voxel: Annotated[float | None, typer.Option(help="edge of a voxel in metres [default: 0.1]")] = None,
    width: Annotated[float | None, typer.Option(help="factor on MinkUNet's channels [default: 0.5]")] = None,
    columns: Columns = None,
    features: Features = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    seed: int = 0,
    save_every: Annotated[int, typer.Option(help="epochs between checkpoints; 0: only the last")] = 1,
    out: OutFolder | None = None,
    report: ReportFile = None,
    predictions: Predictions = None,
    predictions_as: PredictionsAs = "auto",
    timing: Timing = False,
) -> None:
    """Train MinkUNet on labelled scans, evaluate and draw it; without labels, run a checkpoint.

    Every fifth scan of a folder is held out for evaluation; a single scan is evaluated on itself. With a --checkpoint,
    labels beside the scans are used only if --labels names them. Started by torchrun, each process trains on its own
    scans, on a GPU of its own, and the first evaluates and writes.
    """
    sizes: dict[str, Any] = {name: size for name, size in (("voxel", voxel), ("width", width)) if size is not None}
    if checkpoint is not None and sizes:
        raise OptionError("a --checkpoint has its own voxel and width: omit --voxel and --width")
    if no_labels and (labels is not None or checkpoint is None):
        raise OptionError("--no-labels needs a --checkpoint and excludes --labels")
    ranks, home = _started(device)
    files = find_scans(path)
    single = len(hold_out(files)[0]) == 1
    epochs = (60 if single else 20) if epochs is None else epochs
    recipe = Recipe(epochs, augment=not single, precision=precision, seed=seed)
    job = Job(out or Path("pumice-runs") / path.stem, home, recipe=recipe, report=report, ranks=ranks, **sizes)
    job = replace(job, checkpoint=checkpoint, features=features, save_every=save_every, timing=timing)
    job = replace(job, predictions=predictions, predictions_as=predictions_as).checked()
    wanted = False if no_labels else labels or (True if checkpoint is None else None)
    scans = common_labels(list(_read(files, path, wanted, columns)))
    if scans[0].labels is not None and recipe.epochs > 0:
        _print_result(_train(*hold_out(scans), job))
        return
    if not ranks.first:
        return
    # Running a checkpoint must not overwrite the results of its training.
    _print_result(segment_.apply(scans, job if out else replace(job, out=job.out.with_name(job.out.name + "-applied"))))


@app.command()
def label(
    inputs: Annotated[list[str], typer.Argument(help="scans, folders, patterns, @LIST of paths, URLs of fsspec")],
    checkpoint: Annotated[Path, typer.Option(help="a checkpoint of `pumice segment`")],
    out: Annotated[Path, typer.Option(help="folder for the class of every point")],
    kind: Annotated[str, typer.Option("--as", help="label, npz, ply, parquet, or auto: label or npz")] = "auto",
    columns: Columns = None,
    features: Features = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    readers: Readers = None,
    ray: Annotated[str | None, typer.Option(help="address of a Ray cluster to run on; local starts one")] = None,
) -> None:
    """Write a checkpoint's class of every point of many scans. Scans whose files are there are not done again.

    Exit code 3: some scans could not be labelled; they are listed at the end.
    """
    place = None if device == "auto" else str(pick_device(device))
    options = {"precision": precision, "features": features, "columns": columns, "readers": readers}
    labeller = Labeller(checkpoint, out, "", kind, place, **options)
    if label_.label(inputs, labeller, ray, Console(stderr=True, highlight=False)):
        raise typer.Exit(label_.SOME_FAILED)


@app.command()
def evaluate(
    checkpoint: Trained,
    path: Scans,
    labels: Labels = None,
    columns: Columns = None,
    features: Features = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    out: OutFolder | None = None,
    report: ReportFile = None,
    predictions: Predictions = None,
    predictions_as: PredictionsAs = "auto",
    timing: Timing = False,
) -> None:
    """Evaluate a checkpoint on labelled scans: IoU per class, a report, and the class of every point."""
    folder = out or Path("pumice-runs") / f"{path.stem}-evaluated"
    job = _applied(checkpoint, folder, device, precision, features)
    job = replace(job, report=report, predictions=predictions, predictions_as=predictions_as, timing=timing)
    scans = common_labels(list(_read(find_scans(path), path, labels or True, columns)))
    _print_result(segment_.apply(scans, job, scored=True))


def _started(device: str) -> tuple[ranks_.Ranks, torch.device]:
    """The processes of the run, and the device of this one. All but the first are silent."""
    ranks, home = ranks_.Ranks.start(pick_device(device))
    console.quiet = not ranks.first
    return ranks, home


def _applied(checkpoint: Path, out: Path, device: str, precision: str, features: str | None) -> Job:
    recipe = Recipe(0, precision=precision)
    return Job(out, pick_device(device), recipe=recipe, checkpoint=checkpoint, features=features).checked()


def _read(files: Sequence[Path], root: Path, labels: Path | bool | None, columns: int | None) -> Iterator[Scan]:
    """Read the files and print a line for each; scans of the same name are named by their path below `root`."""
    stems = {file: file.name.partition(".")[0] for file in files}
    names, places = Counter(stems.values()), Counter((file.parent, stem) for file, stem in stems.items())
    for file, stem in stems.items():
        scan = read_scan(file, labels, columns=columns)
        if names[stem] > 1:
            below = file.with_name(scan.name if places[file.parent, stem] == 1 else file.name)
            scan = replace(scan, name=below.relative_to(root).as_posix())
        _say(f"read  {scan.name}: {_described(scan)}")
        yield scan


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
    timing: Timing = False,
) -> None:
    """Train on some generated street scenes, evaluate on others. Takes about two minutes on two cores."""
    if scenes < 1:
        raise OptionError(f"--scenes is at least 1, found {scenes}")
    recipe = Recipe(epochs, precision=precision, seed=seed)
    ranks, home = _started(device)
    job = Job(out, home, voxel, width, recipe, None, report, timing=timing, ranks=ranks)
    train_on = [street_scene(seed + i, azimuths=720) for i in range(scenes)]
    judge_on = [street_scene(seed + 1000 + i, azimuths=720) for i in range(2)]
    points = sum(map(len, train_on))
    _say(f"made  {scenes} street scenes with {points} points to train on, 2 others to evaluate on")
    _print_result(_train(train_on, judge_on, job))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="a checkpoint: .pth, .pt or .safetensors")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="the state dict for pumice.nn, as .safetensors")],
    library: Annotated[str, typer.Option("--from", help="spconv, torchsparse, minkowski or flexgemm")],
    layout: Annotated[str | None, typer.Option(help="KRSC, RSKC or RSCK, of spconv [default: what fits]")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="LAYER=3,3,1: size of a kernel that is no cube")] = None,
    flipped: Annotated[str | None, typer.Option(help="expression for transposed layers of stride 1")] = None,
    only: Annotated[str | None, typer.Option(help="expression for the sparse layers, of spconv")] = None,
    strided: Annotated[str | None, typer.Option(help="expression for kernels of size 1 with a stride")] = None,
    dim: Annotated[int, typer.Option(help="number of spatial axes")] = 3,
) -> None:
    """Convert a checkpoint of another library for the same network written with pumice.nn; tells what was done."""
    options = {"layout": layout, "flipped": flipped, "only": only, "strided": strided, "dim": 0 if dim == 3 else dim}
    for line in convert_.convert_file(
        source, target, library, {**options, "kernels": convert_.kernel_sizes(kernel or [])}
    ):
        _say(line)
    _say(f"wrote {target}")


@app.command()
def info() -> None:
    """Versions, devices and compilers: what is usable, and why not."""
    console.print(info_.render(info_.collect()))


@app.command()
def tune(
    context: typer.Context,
    checkpoint: Annotated[Path | None, typer.Argument(help="tune this checkpoint of `pumice segment`")] = None,
    path: Annotated[Path | None, typer.Argument(help="for scans like this one, or those in this folder")] = None,
    show: Annotated[bool, typer.Option("--show", help="print them as a table")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="remove all of them")] = False,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="write them to this file")] = None,
    merge: Annotated[Path | None, typer.Option(metavar="FILE", help="add new or newer records of an export")] = None,
    budget: Annotated[float, typer.Option(help="seconds that tuning may take")] = 120.0,
    columns: Columns = None,
    features: Features = None,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Tune a checkpoint for scans, or manage the tuning cache: tiles of kernels, plans of networks."""
    if (checkpoint is not None) + show + clear + (export is not None) + (merge is not None) > 1:
        raise OptionError("expected one of CHECKPOINT SCANS, --show, --clear, --export and --merge, found several")
    if checkpoint is not None:
        if path is None:
            raise OptionError(f"tuning needs a checkpoint and representative scans, found only {checkpoint}")
        job = _applied(checkpoint, Path(), device, precision, features)
        scans = _read(find_scans(path)[:_SAMPLES], path, False, columns)
        console.print(str(segment_.tune(list(scans), job, budget)), markup=False, soft_wrap=True)
        return
    cache = kept_.Kept(ledger(), plans())
    if show:
        tables = cache.tables()
        for table in tables:
            console.print(table)
        if not tables:
            _say(cache.nothing())
    elif clear:
        _say(cache.clear())
    elif export is not None:
        _say(cache.export(export))
    elif merge is not None:
        _say(cache.merge(merge))
    else:
        typer.echo(context.get_help())


@app.command()
def warmup(
    model: Annotated[str, typer.Argument(help="a checkpoint, minkunet, centerpoint, or MODULE:FUNCTION")],
    channels: Annotated[int | None, typer.Option(help="features per voxel [default: those of the first layer]")] = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16: dtype of the network")] = "fp32",
) -> None:
    """Compile the kernels of a network's inference ahead, and keep them on disk: its first scene waits for none."""
    net = kept_.network(model)
    count = kept_.channels_of(net) if channels is None else channels
    with Progress(TextColumn("compile"), TextColumn("{task.description}"), console=console, transient=True) as shown:
        bar = shown.add_task("first kernels", total=None)
        watch = lambda left: shown.update(bar, description=f"{left} kernels left")  # noqa: E731
        most, seconds = kept_.warm(net, count, pick_device(device), precision, watch)
    _say(f"ready for scenes like streets of up to {most} voxels, after {seconds:.1f} s")


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench() -> None:
    """Benchmarks are run from a clone of the repository."""
    raise OptionError("benchmarks are not installed: run `python -m benchmarks SUITE` in a clone of the repository")


def _say(text: str) -> None:
    # Do not wrap: outside a terminal a path must stay in one piece.
    console.print(text, soft_wrap=True)


def _described(scan: Scan) -> str:
    lost = f", [yellow]{scan.dropped} dropped (not finite or too far)[/]" if scan.dropped else ""
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
    # Without a terminal, an occasional line replaces the bar.
    shown = progress if console.is_terminal else nullcontext()
    bar = progress.add_task("train", total=job.steps(train_on))
    # SIGTERM of a batch system saves the checkpoint, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with shown:
            return segment_.run(train_on, judge_on, job, _watch(progress, bar))
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(progress: Progress, bar: object) -> Callable[[TrainingProgress, int], None]:
    def watch(step: TrainingProgress, total: int) -> None:
        if console.is_terminal:
            progress.update(bar, completed=step.number, figures=_figures(step))  # type: ignore[arg-type]
            if step.number == total:
                progress.stop()
                console.print("eval  [dim]evaluate, time, draw[/]")
        elif step.number in (1, total) or step.number % max(1, total // 10) == 0:
            console.print(f"train {step.number}/{total}  {_figures(step)}")

    return watch


def _figures(step: TrainingProgress) -> str:
    return f"loss {step.loss:.3f}  accuracy {step.accuracy:.3f}  {step.speed / 1e3:.1f}k voxels/s"


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""), style="cyan")


def _print_result(result: Result) -> None:
    if result.interrupted:
        rest = f"the current network is in {result.checkpoint}\ncontinue with --checkpoint {result.checkpoint}"
        _say(f"[yellow]stopped[/] after {len(result.steps)} steps; {rest if result.steps else 'nothing to save yet'}")
        raise typer.Exit(130)
    if result.scores is not None:
        console.print(_score_table(result))
        if result.judged_on_training:
            _aside("warning", "yellow", "evaluated on its training points: expect lower scores on new scans")
    if result.timing is not None:
        t = result.timing
        _say(
            f"inference {t.median:.1f} ms (20 %: {t.p20:.1f}, 80 %: {t.p80:.1f}; {t.runs} runs, {t.voxels} voxels, "
            "kernel maps included)"
        )
    _say(f"checkpoint {result.checkpoint}\nreport     {result.report}\npredicted  {result.predictions}")


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
    over = f"over {scores.present} of {len(scores.iou)} classes"
    table.add_row(f"[bold]mIoU[/] {over}", f"[bold]{scores.miou:.3f}[/]", str(int(scores.counts.sum())))
    table.add_row("[bold]point accuracy[/]", f"[bold]{scores.accuracy:.3f}[/]", "")
    for name, trivial in result.trivial.items():
        table.add_row(f"[dim]baseline mIoU, {name}[/]", f"[dim]{trivial.miou:.3f}[/]", "")
    return table
