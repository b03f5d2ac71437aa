"""Groups of processes (gloo) for tests."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_IMPORTED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "pumice", "pumice.cli.main"]


def spawn(function: Callable[..., None], ranks: int, folder: Path) -> None:
    """Run function(rank, ranks, folder) in each process of a group."""
    fork(_begin, ranks, (ranks, function, folder))


def fork(function: Callable[..., None], count: int, args: tuple[Any, ...]) -> None:
    """Run function(number, *args) in `count` processes: forks of one that has imported what they need, which takes
    longer than most tests."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    torch.multiprocessing.start_processes(function, args, count, start_method="forkserver")


def _begin(rank: int, ranks: int, function: Callable[..., None], folder: Path) -> None:
    torch.set_num_threads(1)
    # Who waits for the other processes in vain fails.
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    function(rank, ranks, folder)
    # The end of a process, at once: the last reference to a group joins threads of gloo while it holds Python's lock,
    # which these may wait for (torch 2.13).
    dist.barrier()
    os._exit(0)
