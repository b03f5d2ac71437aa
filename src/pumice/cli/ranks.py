"""Several processes that run one command, as torchrun starts them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pumice.env import launch
from pumice.errors import OptionError


@dataclass(frozen=True)
class Ranks:
    """The processes of a run: the number of this one, and how many there are. Process 0 writes files and tells."""

    rank: int = 0
    count: int = 1
    signals: list[int] = field(default_factory=list)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @staticmethod
    def start(device: torch.device) -> tuple[Ranks, torch.device]:
        """(the processes that torchrun started, or this one alone; the device of this process)."""
        told = launch()
        if told.ranks == 1:
            return Ranks(), device
        if device.type == "cuda":
            if device.index is not None:
                raise OptionError(f"torchrun gives each process its own GPU: expected --device cuda, found {device}")
            device = torch.device("cuda", told.local_rank)
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return Ranks(told.rank, told.ranks), device

    def replicate(self, net: nn.Module) -> nn.Module:
        """The network, with gradients averaged over the processes."""
        return net if self.count == 1 else DistributedDataParallel(net)

    def sums(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The sums over all processes. Raises KeyboardInterrupt in all if one got a signal: they end after the same
        step, none waits for another in vain."""
        if self.count == 1:
            return [*values]
        told = torch.tensor([*values, len(self.signals)], dtype=torch.float64, device=device)
        dist.all_reduce(told)
        *found, stopped = told.tolist()
        if stopped:
            raise KeyboardInterrupt
        return found

    @contextmanager
    def noting_signals(self) -> Iterator[None]:
        """Of several processes, each notes SIGINT and SIGTERM for `sums`, meanwhile."""
        kinds = (signal.SIGINT, signal.SIGTERM) if self.count > 1 else ()
        before = [signal.signal(kind, self._note) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _note(self, kind: int, _: Any) -> None:
        self.signals.append(kind)


def named() -> str:
    """ "process 3: " in front of messages, if there are several."""
    told = launch()
    return f"process {told.rank}: " if told.ranks > 1 else ""


def end(code: int) -> None:
    """End a process of a group at once: the last reference to a group joins threads of gloo while it holds Python's
    lock, which these may wait for (torch 2.13). No effect without a group."""
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
