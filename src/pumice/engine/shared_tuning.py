"""Tuning by one process for all of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pumice.engine.graph_tuning import GraphTuning
from pumice.engine.ranks import by_first, waits_for_others
from pumice.engine.result import Tuning
from pumice.engine.subject import bare
from pumice.errors import FileError, OptionError
from pumice.nn import SyncBatchNorm
from pumice.schedule.record_store import Store
from pumice.schedule.tuned_orders import orders
from pumice.schedule.tuned_plans import plans
from pumice.schedule.tuned_tiles import ledger


def tuned_by_first(
    tune: Callable[[], Tuning | GraphTuning], model: nn.Module, mode: str, budget: float
) -> Tuning | GraphTuning:
    """The result of tune() of process 0, applied to the model and saved on all. Raises OptionError if a pass of the
    model waits for other processes."""
    _check(model, mode)
    made: list[Tuning | GraphTuning] = []

    def told() -> dict[str, Any]:
        found = tune()
        made.append(found)
        own = vars(found) | {"orders": dict(found.orders)} if isinstance(found, GraphTuning) else found.to_json()
        return {"of graphs": isinstance(found, GraphTuning), "result": own, "records": [_records(s) for s in _stores()]}

    heard = by_first(told, "tuning", budget)
    if made:
        return made[0]
    for store, records in zip(_stores(), heard["records"], strict=True):
        # Another host has a folder of its own; a folder that cannot be written to keeps nobody from training.
        with suppress(FileError):
            if records is not None:
                store.merge(records)
    result = GraphTuning(**heard["result"]) if heard["of graphs"] else Tuning.of_json(heard["result"])
    result.apply(model)
    return result


def _stores() -> Sequence[Store[Any, Any]]:
    return plans(), ledger(), orders()


def _records(store: Store[Any, Any]) -> str | None:
    with suppress(FileError):
        return store.export()
    return None


def _check(model: nn.Module, mode: str) -> None:
    if not isinstance(model, nn.Module):
        return
    # In evaluation, each process runs these by itself.
    alone = (SyncBatchNorm, nn.SyncBatchNorm, DistributedDataParallel) if mode != "training" else ()
    every = model, *bare(model).modules()
    waiting = [type(m).__name__ for m in every if waits_for_others(m) and not isinstance(m, alone)]
    if waiting:
        raise OptionError(
            f"one process tunes for all, and {waiting[0]} waits for the others: tune the network before it is wrapped "
            "and its norms are synchronised"
        )
