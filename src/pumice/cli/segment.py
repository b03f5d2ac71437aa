"""End-to-end segmentation: train, evaluate, time and draw a network on scans; a job has the options of a command."""

from __future__ import annotations

import json
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from pumice.cli import evaluate
from pumice.cli.evaluate import LayerTiming, Scores, Timing
from pumice.cli.info import distribution
from pumice.cli.ranks import Ranks
from pumice.cli.report import CloudView, Metrics, Report, RunFacts, class_styles, write_report
from pumice.cli.training import Recipe, TrainingProgress, train
from pumice.data import Scan, align_labels
from pumice.engine import Tuning, compile
from pumice.engine import tune as tune_network
from pumice.errors import DeviceError, FileError, OptionError
from pumice.label import checkpoint
from pumice.label.checkpoint import PRECISIONS, Task, autocast, example
from pumice.label.features import FEATURES, choose_features, fit_to_task
from pumice.label.predictions import FORMATS, write_prediction

Watch = Callable[[TrainingProgress, int], None]


@dataclass(frozen=True, eq=False)
class Result:
    """Result of a run. interrupted: training was stopped by the user; the checkpoint is saved nevertheless.

    scores: None without labels. where: names the scans that were scored. judged_on_training: they were trained on.
    """

    task: Task
    steps: tuple[TrainingProgress, ...]
    checkpoint: Path
    report: Path | None = None
    predictions: Path | None = None
    scores: Scores | None = None
    where: str = ""
    judged_on_training: bool = False
    timing: Timing | None = None
    trivial: dict[str, Scores] = field(default_factory=dict)
    interrupted: bool = False


def run(train_on: Sequence[Scan], judge_on: Sequence[Scan], job: Job, watch: Watch) -> Result:
    """Train on labelled scans (or continue from job.checkpoint), evaluate, time, and write the report. `watch(step,
    total)` is called after each step. Scans without a labelled point are not trained on. KeyboardInterrupt in training
    saves the checkpoint and ends the job; later it propagates. Of several processes all train, and the first writes and
    evaluates."""
    same = len(train_on) == len(judge_on) == 1 and train_on[0] is judge_on[0]
    train_on = [scan for scan in train_on if labelled(scan)]
    if not train_on:
        raise OptionError("no scan to train on has labels: give --labels, or a --checkpoint to run")
    net, task = _network(train_on, job)
    train_on, judge_on = (fit_to_task(scans, task, job.features) for scans in (train_on, judge_on))
    steps: list[TrainingProgress] = []
    total, an_epoch = job.steps(train_on), -(-len(train_on) // job.ranks.count)
    path = job.opened().out / "checkpoint.safetensors"
    try:
        for step in train(net, train_on, task, job.recipe, job.device, job.ranks):
            steps.append(step)
            watch(step, total)
            due = job.save_every and step.number < total and step.number % (job.save_every * an_epoch) == 0
            if due and job.ranks.first:
                _save_early(path, net, task)
    except KeyboardInterrupt:
        saved = checkpoint.save_or_elsewhere(path, net, task) if steps and job.ranks.first else path
        return Result(task, tuple(steps), saved, interrupted=True)
    if not job.ranks.first:
        return Result(task, tuple(steps), path)
    path = checkpoint.save_or_elsewhere(path, net, task)
    if same:
        where = "the training scan itself, none held out"
        plain = Result(task, tuple(steps), path, where=where, judged_on_training=True)
        return _finish(net, task, [(train_on[0], "train")], plain, job)
    trivial = evaluate.trivial_scores(train_on, [s for s in judge_on if labelled(s)], len(task.names))
    views = [(s, "held out") for s in judge_on] + [(train_on[0], "train")]
    where = f"{len(judge_on)} held-out scans" if len(judge_on) > 1 else "1 held-out scan"
    return _finish(net, task, views, Result(task, tuple(steps), path, where=where, trivial=trivial), job)


def _save_early(path: Path, net: nn.Module, task: Task) -> None:
    """Save a checkpoint between epochs; a failure only warns, so that room can be made while training continues."""
    try:
        checkpoint.save(path, net, task)
    except FileError as error:
        warnings.warn(f"{error}; training continues", stacklevel=2)


def apply(scans: Sequence[Scan], job: Job, scored: bool = False) -> Result:
    """Run job.checkpoint on scans; they are scored if they have labels of the checkpoint's classes. Raises OptionError
    if they have none and `scored` is set."""
    if job.checkpoint is None:
        raise OptionError("scans without labels (give --labels), or with --epochs 0, need a --checkpoint")
    net, task = checkpoint.load(job.checkpoint, job.device)
    scans = fit_to_task(scans, task, job.features)
    if scored and not any(map(labelled, scans)):
        raise OptionError(f"no scan has labels of {job.checkpoint}'s classes ({', '.join(task.names)}): give --labels")
    result = Result(task, (), job.checkpoint, where=f"{len(scans)} scans" if len(scans) > 1 else "1 scan")
    return _finish(net, task, [(scan, "") for scan in scans], result, job.opened())


def tune(scans: Sequence[Scan], job: Job, budget: float) -> Tuning:
    """Tune job.checkpoint for scans like these within `budget` seconds; the plan is stored for the user."""
    assert job.checkpoint is not None
    net, task = checkpoint.load(job.checkpoint, job.device)
    samples = [example(scan, task, job.device).x for scan in fit_to_task(scans, task, job.features)]
    with autocast(job.device, job.recipe.precision):
        return tune_network(net.eval(), samples, budget=budget)


def _network(scans: Sequence[Scan], job: Job) -> tuple[nn.Module, Task]:
    labels = scans[0].label_set
    assert labels is not None
    if job.checkpoint is None:
        torch.manual_seed(job.recipe.seed)
        task = Task.of([choose_features(scan, job.features) for scan in scans], labels, job.voxel, job.width)
        return task.network().to(job.device), task
    net, task = checkpoint.load(job.checkpoint, job.device)
    if not set(labels.names) <= set(task.names):
        raise FileError(f"{job.checkpoint}: expected the classes {labels.names}, found {task.names}")
    return net, task


def _finish(net: nn.Module, task: Task, views: Sequence[tuple[Scan, str]], result: Result, job: Job) -> Result:
    precision, program = job.recipe.precision, compile(net.eval())
    predicted = [evaluate.predict(program, scan, task, job.device, precision) for scan, _ in views]
    scores = _scores(views, predicted, task)
    timing, layers = None, []
    if job.timing:
        x = example(views[0][0], task, job.device).x
        timing, layers = evaluate.time_inference(program, x, precision), evaluate.time_layers(net, x, precision)
    folder = job.predictions or job.out / "predictions"
    for (scan, _), classes in zip(views, predicted, strict=True):
        write_prediction(folder, scan, classes, task, job.predictions_as)
    page = job.report or job.out / "report.html"
    done = replace(result, scores=scores, timing=timing, report=page, predictions=folder)
    assert done.report is not None
    write_report(done.report, _report(done, views, predicted, layers, job))
    (job.out / "metrics.json").write_text(json.dumps(_metrics(done), indent=1) + "\n", encoding="utf-8")
    return done


def _scores(views: Sequence[tuple[Scan, str]], predicted: Sequence[np.ndarray], task: Task) -> Scores | None:
    """Scores over the held-out views if there are any, else over all; None if nothing is labelled."""
    splits = {split for _, split in views}
    judged = "held out" if "held out" in splits else next(iter(splits))
    total = np.zeros((len(task.names),) * 2, np.int64)
    for (scan, split), classes in zip(views, predicted, strict=True):
        if split == judged and scan.labels is not None:
            total += evaluate.confusion(scan.labels, classes, len(task.names))
    return Scores(total) if total.any() else None


def _report(
    result: Result,
    views: Sequence[tuple[Scan, str]],
    predicted: Sequence[np.ndarray],
    layers: Sequence[LayerTiming],
    job: Job,
) -> Report:
    task, scores = result.task, result.scores
    return Report(
        title="Semantic segmentation",
        views=[
            CloudView(scan.name, scan.xyz, scan.labels, classes, split)
            for (scan, split), classes in zip(views, predicted, strict=True)
        ],
        classes=class_styles(task.names, task.colors),
        history=result.steps,
        metrics=None
        if scores is None
        else Metrics(scores.accuracy, scores.miou, scores.iou.tolist(), scores.counts.tolist(), result.where),
        timing=result.timing,
        precision=job.recipe.precision,
        layers=[layer for layer in layers if layer.voxels],
        facts=RunFacts(
            device=_device_name(job.device),
            versions={"pumice": distribution("pumice") or "from source", "torch": torch.__version__},
            voxel_size=task.voxel,
            commands=[shlex.join(["pumice", *sys.argv[1:]])],
            extra=_extra(result),
        ),
    )


def _extra(result: Result) -> dict[str, str]:
    rows = {f"baseline mIoU, {name}": f"{scores.miou:.3f}" for name, scores in result.trivial.items()}
    return {"network": f"MinkUNet, width {result.task.width}", "scored on": result.where, **rows}


def _metrics(result: Result) -> dict[str, object]:
    """The metrics of a run in plain numbers."""
    scores, timing = result.scores, result.timing
    figures: dict[str, object] = {"where": result.where, "steps": len(result.steps)}
    if scores is not None:
        iou = {name: None if np.isnan(v) else float(v) for name, v in zip(result.task.names, scores.iou, strict=True)}
        figures |= {"point_accuracy": scores.accuracy, "miou": scores.miou, "iou": iou}
        figures |= {"classes_scored": scores.present, "judged_on_training": result.judged_on_training}
    figures |= {f"baseline miou, {name}": trivial.miou for name, trivial in result.trivial.items()}
    if timing is not None:
        figures["inference_ms"] = {"median": timing.median, "p20": timing.p20, "p80": timing.p80}
    return figures


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


Item = TypeVar("Item")


# The job
@dataclass(frozen=True)
class Job:
    """Options of a run: output folder, device, and training. A checkpoint brings its own task.

    features: one of FEATURES; None: those of the scan. predictions, predictions_as: their folder (default: beside the
    report) and format. timing: measure inference, too. save_every: epochs between checkpoints, 0: only the last.
    ranks: the processes that train.

    Raises OptionError for invalid values.
    """

    out: Path
    device: torch.device
    voxel: float = 0.1
    width: float = 0.5
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=60))
    checkpoint: Path | None = None
    report: Path | None = None
    features: str | None = None
    predictions: Path | None = None
    predictions_as: str = "auto"
    timing: bool = False
    save_every: int = 1
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        OptionError.check("precision", self.recipe.precision, PRECISIONS)
        if self.recipe.epochs < 0 or self.recipe.seed < 0 or self.save_every < 0:
            found = f"{self.recipe.epochs}, {self.recipe.seed} and {self.save_every}"
            raise OptionError(f"epochs, seed and save_every are at least 0, found {found}")
        OptionError.check("features", self.features, (None, *FEATURES))
        OptionError.check("predictions_as", self.predictions_as, FORMATS)
        if not (0 < self.voxel < math.inf and 0 < self.width < math.inf):
            raise OptionError(f"voxel and width are positive and finite, found {self.voxel} and {self.width}")

    def steps(self, train_on: Sequence[Scan]) -> int:
        """Number of training steps: one scan each on every process."""
        return self.recipe.epochs * -(-len(train_on) // self.ranks.count)

    def checked(self) -> Job:
        """The job; loads its checkpoint to raise errors before scans are read."""
        if self.checkpoint is not None:
            checkpoint.load(self.checkpoint, self.device)
        return self

    def opened(self) -> Job:
        """Create the output folders and return the job. Raises FileError early, before any work is lost."""
        for folder in {self.out, (self.report or self.out / "report.html").parent, self.predictions or self.out}:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FileError(f"{folder}: expected a folder to write to, found: {error.strerror}") from None
        return self


def pick_device(name: str) -> torch.device:
    """The device called "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1". Raises DeviceError if missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device {name!r} is unknown; there are auto, cpu, cuda and cuda:0, cuda:1, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name!r} is not supported; there are auto, cpu and cuda")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise DeviceError(f"device {name!r} is not available, torch finds {found} GPUs; see `pumice info`")
    return device


def hold_out(scans: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """(training set, evaluation set): every fifth scan is held out, the last of fewer; a single one is in both."""
    if len(scans) == 1:
        return list(scans), list(scans)
    held = {i for i in range(len(scans)) if i % 5 == 4} | ({len(scans) - 1} if len(scans) < 5 else set())
    return [s for i, s in enumerate(scans) if i not in held], [scans[i] for i in sorted(held)]


def common_labels(scans: Sequence[Scan]) -> list[Scan]:
    """The scans with a common label set. Raises FileError if some have labels and others do not."""
    bare = [scan.name for scan in scans if scan.labels is None]
    if bare and len(bare) < len(scans):
        raise FileError(f"{bare[0]}: expected labels as the other scans have, found none ({len(bare)} of {len(scans)})")
    return list(scans) if bare else list(align_labels(scans))


def labelled(scan: Scan) -> bool:
    """True if some point of the scan has a class."""
    return scan.labels is not None and bool((scan.labels >= 0).any())
