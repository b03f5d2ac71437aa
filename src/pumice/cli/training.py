"""Training as an iterator over steps, so that the caller may stop after any step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pumice.cli.ranks import Ranks
from pumice.data import BalancedBatchSampler, Scan
from pumice.engine import compile
from pumice.label.checkpoint import IGNORE, LabelledScan, Task, autocast, example


@dataclass(frozen=True)
class Recipe:
    """Training options. precision: "fp32", "bf16" or "fp16" (autocast). augment: random rotation, mirror and scale."""

    epochs: int
    rate: float = 4e-3
    decay: float = 1e-2
    augment: bool = True
    precision: str = "fp32"
    seed: int = 0


@dataclass(frozen=True)
class TrainingProgress:
    """One optimiser step: its number from 1, loss, accuracy over labelled voxels (0..1), voxels per second."""

    number: int
    loss: float
    accuracy: float
    speed: float


ALONE = Ranks()


def train(
    net: nn.Module, scans: Sequence[Scan], task: Task, recipe: Recipe, device: torch.device, ranks: Ranks = ALONE
) -> Iterator[TrainingProgress]:
    """Train `net` in place, one scan a step on each process, and yield each step: `recipe.epochs` times as many as
    there are scans for a process. Cross entropy over labelled voxels, weighted by one over the square root of the class
    frequency; AdamW with a one-cycle learning rate. Loss and accuracy are means over the processes."""
    with ranks.noting_signals():
        yield from _steps(net, scans, task, recipe, device, ranks)


def _steps(
    net: nn.Module, scans: Sequence[Scan], task: Task, recipe: Recipe, device: torch.device, ranks: Ranks
) -> Iterator[TrainingProgress]:
    chance = np.random.default_rng([recipe.seed, ranks.rank])
    sampler = BalancedBatchSampler([len(scan) for scan in scans], 1, ranks.count, ranks.rank, seed=recipe.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    total = max(1, recipe.epochs * len(sampler))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=total, pct_start=0.2)
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
    fixed = None if recipe.augment else [example(scan, task, device) for scan in scans]
    loss_of = nn.CrossEntropyLoss(weight=class_weights(scans, task).to(device), ignore_index=IGNORE)
    program, number = ranks.replicate(compile(net.train())), 0
    for epoch in range(recipe.epochs):
        sampler.set_epoch(epoch)
        for (index,) in sampler:
            start = time.perf_counter()
            sample = example(scans[index], task, device, chance) if fixed is None else fixed[index]
            loss, right = _step(program, sample, loss_of, optimizer, scaler, recipe.precision)
            schedule.step()
            number += 1
            loss, right, voxels = ranks.sums((loss, right, len(sample.x)), device)
            speed = voxels / (time.perf_counter() - start)
            yield TrainingProgress(number, loss / ranks.count, right / ranks.count, speed)


def _step(
    net: nn.Module,
    sample: LabelledScan,
    loss_of: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    precision: str,
) -> tuple[float, float]:
    assert sample.labels is not None
    with autocast(sample.x.device, precision):
        logits = net(sample.x).feats
    loss = loss_of(logits.float(), sample.labels)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    counted = sample.labels != IGNORE
    right = (logits.argmax(dim=1) == sample.labels)[counted].float().mean()
    return loss.item(), right.item()


def class_weights(scans: Sequence[Scan], task: Task) -> Tensor:
    """float32 [classes]: 1 / sqrt(share of the points), scaled to a mean of 1 over the classes present."""
    counts = np.zeros(len(task.names))
    for scan in scans:
        if scan.labels is not None:
            counts += np.bincount(scan.labels[scan.labels >= 0], minlength=len(counts))[: len(counts)]
    weights = np.where(counts > 0, 1 / np.sqrt(np.maximum(counts, 1) / max(counts.sum(), 1)), 0)
    return torch.tensor(weights / max(weights[weights > 0].mean(), 1e-9) if weights.any() else weights).float()
