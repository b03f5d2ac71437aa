"""Labelling of many scans: this process's share of them, progress on stderr, and what could not be labelled."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import distributed

from pumice.cli.ranks import named
from pumice.env import launch
from pumice.errors import OptionError
from pumice.label import Labelled, Labeller
from pumice.label.ray_data import label_on_ray
from pumice.label.record import read_record
from pumice.label.sources import Input, find_sources

SOME_FAILED = 3
"""Exit code: finished, but some scans could not be labelled."""
_EVERY = 10.0
_PATIENCE = timedelta(days=30)
"""Seconds between lines of progress outside a terminal, and how long ranks wait for the last one."""


def label(arguments: Sequence[str], labeller: Labeller, address: str | None, console: Console) -> int:
    """Label this process's share of the scans that arguments name, and tell of it on `console`. Returns the number of
    scans that failed, under torchrun of all processes."""
    if address is not None and launch().ranks > 1:
        raise OptionError("--ray starts its own processes: omit torchrun, or --ray")
    labeller, inputs = _share(arguments, labeller)
    labels = labeller.label(inputs) if address is None else label_on_ray(labeller, inputs, address)
    tally = Tally(len(inputs))
    for one in _shown(labels, tally, console):
        tally.add(one)
    for one in tally.failed:
        console.print(f"failed  {one.source}: {one.reason}", soft_wrap=True, markup=False)
    console.print(f"label {named()}{tally} into {labeller.out}", soft_wrap=True, markup=False)
    return _over_ranks(len(tally.failed))


def _share(arguments: Sequence[str], labeller: Labeller) -> tuple[Labeller, list[Input]]:
    """The labeller with the root of names, and this process's scans: every WORLD_SIZE-th under torchrun."""
    out = Path(labeller.out)
    sources, record = find_sources(arguments, out), read_record(out)
    # A part of the same scans keeps the names that they had.
    root = record.root if record is not None and sources.below(record.root) else sources.root
    env = launch()
    if env.ranks > 1 and labeller.device is None and torch.cuda.is_available():
        labeller = replace(labeller, device=f"cuda:{env.local_rank % torch.cuda.device_count()}")
    return replace(labeller, root=root), sources.named(root)[env.rank :: env.ranks]


@dataclass(eq=False)
class Tally:
    """Counts of what became of `total` scans, and those that failed."""

    total: int
    start: float = field(default_factory=time.perf_counter)
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Labelled] = field(default_factory=list)

    def add(self, one: Labelled) -> None:
        self.counts[one.state] += 1
        if one.state == "failed":
            self.failed.append(one)

    @property
    def done(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        rate = self.counts["labelled"] / max(1e-9, time.perf_counter() - self.start)
        there = f", {self.counts['kept']} were there" if self.counts["kept"] else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.done}/{self.total}  {rate:.1f} scans/s{there}{failed}"


def _shown(labels: Iterator[Labelled], tally: Tally, console: Console) -> Iterator[Labelled]:
    """The labels, with a bar on a terminal and else a line now and then."""
    parts = TextColumn("label"), BarColumn(bar_width=30), TextColumn("{task.description}")
    progress = Progress(*parts, TimeRemainingColumn(compact=True), console=console, transient=True)
    bar, told = progress.add_task("", total=tally.total), time.perf_counter()
    with progress if console.is_terminal else nullcontext():
        for one in labels:
            yield one
            if console.is_terminal:
                progress.update(bar, completed=tally.done, description=str(tally))
            elif time.perf_counter() - told > _EVERY:
                told = time.perf_counter()
                console.print(f"label {tally}", soft_wrap=True, markup=False)


def _over_ranks(failed: int) -> int:
    """The sum over torchrun's processes. It also keeps one that ends with an error from stopping the others, as
    torchrun would do."""
    if launch().ranks == 1 or not distributed.is_torchelastic_launched():
        return failed
    distributed.init_process_group("gloo", timeout=_PATIENCE)
    total = torch.tensor(failed)
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return int(total)
