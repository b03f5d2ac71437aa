"""Tuned orders of the layers of networks over graphs, in a file per user (see record_store).

The key is the device, the dtypes, the mode, the network's shape (not its weights), and the workload: the nodes, edges
and (target, relation) pairs of each graph, as powers of sqrt(2), rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import lru_cache

from pumice.env import settings
from pumice.schedule.record_store import Entry, RecordType, Store, date_of
from pumice.schedule.tuned_plans import PlanKey, key_of

VERSION = 1


@dataclass(frozen=True)
class TunedOrders:
    """orders: by layer, a missing one is the cost model's; before, after: seconds of the network by default and so."""

    orders: Mapping[str, str]
    before: float
    after: float
    date: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


@lru_cache(maxsize=1)
def orders() -> Store[PlanKey, TunedOrders]:
    """The user's tuned orders."""
    return Store(settings().cache / f"orders-{VERSION}.json", ORDERS)


def _entry(key: PlanKey, value: TunedOrders) -> Entry:
    return {"key": asdict(key), **vars(value), "orders": dict(value.orders), "date": value.date.isoformat()}


def _value(entry: Entry) -> TunedOrders:
    kept = {str(layer): str(order) for layer, order in entry["orders"].items()}
    return TunedOrders(kept, float(entry["before"]), float(entry["after"]), date_of(entry["date"]))


ORDERS: RecordType[PlanKey, TunedOrders] = RecordType(
    "orders", VERSION, _entry, key_of, _value, lambda value: value.date
)
"""Format of the file of tuned orders."""
