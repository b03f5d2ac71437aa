"""Work that one process of torch.distributed does for all.

The others wait at the group's key-value store and not in a collective: a collective that starts minutes late exceeds
the group's timeout, and ends the job.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pumice import errors
from pumice.env import launch
from pumice.errors import DeviceError, PumiceError
from pumice.nn import SyncBatchNorm

_PATIENCE = 3600.0
"""Seconds that processes wait for the one that works; with a budget, longer than that."""
_PAUSE = 0.2  # Seconds between questions to the store


def in_group() -> bool:
    """True in a process group of several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def waits_for_others(module: nn.Module) -> bool:
    """True if a pass of the module (not of its submodules) communicates with other processes or devices."""
    # Its import takes two seconds; a network sharded by it has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FSDPModule,)
    kinds = DataParallel, DistributedDataParallel, nn.SyncBatchNorm, SyncBatchNorm, *sharded
    return isinstance(module, kinds)


def by_first(make: Callable[[], Any], what: str, seconds: float = 0.0) -> Any:
    """make() of process 0, called there only; others get its result, in JSON, or raise its PumiceError. what: names the
    work, in messages; seconds: that it may take, beside an hour. Raises DeviceError if nothing comes by then."""
    store, key = _place(what, dist.get_rank())
    if dist.get_rank():
        return _received(store, key, what, seconds + _PATIENCE)
    try:
        value = make()
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, PumiceError) else DeviceError.__name__
        store.set(key, json.dumps({"error": kind, "told": f"process 0: {error or type(error).__name__}"}))
        raise
    store.set(key, json.dumps({"value": value}))
    return value


@contextmanager
def first_on_each_host() -> Iterator[None]:
    """Let the first process of each host run a block before the others of that host do.

        with pm.engine.first_on_each_host():
            program(example)  # compiles the kernels; the other processes find them on disk

    The block must not communicate: run the network itself, not its DistributedDataParallel. In a single process it is
    run at once. Every process has to enter it. Raises DeviceError in those that have waited an hour, or if the first
    process raises.
    """
    if not in_group():
        yield
        return
    started = launch()
    alone = started.ranks == 1
    first = (dist.get_rank() if alone else started.local_rank) == 0
    where = "this program" if alone else socket.gethostname()
    store, key = _place(f"a block on {where}", dist.get_rank())
    if not first:
        _received(store, key, "a block", _PATIENCE)
        yield
        return
    told = {"error": DeviceError.__name__, "told": f"process {dist.get_rank()} has raised"}
    try:
        yield
        told = {"value": None}
    finally:
        store.set(key, json.dumps(told))


def _place(what: str, rank: int) -> tuple[Any, str]:
    """The group's store, and the key of the next work of this kind: every process counts its own calls."""
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore("pumice", c10d._get_default_store())
    return store, f"{what}/{store.add(f'{what}/calls of {rank}', 1)}"


def _received(store: Any, key: str, what: str, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end:
            raise DeviceError(f"waited {seconds:.0f} s for {what} by process 0; does every process call it?")
        time.sleep(_PAUSE)
    told = json.loads(store.get(key))
    if "error" in told:
        raise getattr(errors, told["error"])(told["told"])
    return told["value"]
