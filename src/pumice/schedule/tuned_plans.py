"""Tuned plans, the dataflow of each group of a network's layers, in a file per user (see record_store).

The key of a plan is the device, the dtypes, the mode, the network's shape (not its weights), and the workload: for each
group the rows of its map and the pairs per row. A plan applies to workloads in which each number is within a factor of
sqrt(2) of the plan's. Fixed buckets would not work: with nine maps, one nearly always changes its bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from pumice.env import settings
from pumice.schedule.dataflow import DATAFLOWS, Dataflow
from pumice.schedule.record_store import Entry, RecordType, Store, date_of

VERSION = 1  # of the file format; part of the file name
NEAR = 0.5  # log2 of the factor by which the numbers of a workload may differ from the tuned ones

Workload = tuple[tuple[float, float], ...]  # by group: log2 of (rows of its map, pairs per row)


@dataclass(frozen=True)
class PlanKey:
    """Key of a tuned plan. model: digest of the layers and groups. workload: 2 * log2 of its numbers, rounded."""

    device: str
    dtypes: str
    mode: str
    model: str
    workload: tuple[tuple[int, int], ...]

    @staticmethod
    def of(device: str, dtypes: str, mode: str, model: str, workload: Workload) -> PlanKey:
        return PlanKey(device, dtypes, mode, model, tuple((round(2 * a), round(2 * b)) for a, b in workload))


@dataclass(frozen=True)
class TunedPlan:
    """A tuned plan.

    flows: by group and passes; a missing one is the planner's. before, after: seconds per scene by default and with the
    plan, in total and by part. tuned_groups: completely tuned ones; finished: all are. about: network and scenes.
    """

    flows: Mapping[str, Dataflow]
    workload: Workload
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    tuned_groups: tuple[str, ...] = ()
    finished: bool = True
    about: str = ""
    date: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    def distance(self, workload: Workload) -> float:
        """The largest difference of corresponding numbers, in log2."""
        if len(workload) != len(self.workload):
            return float("inf")
        pairs = zip(self.workload, workload, strict=True)
        return max((abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)), default=0.0)


class Plans(Store[PlanKey, TunedPlan]):
    """The tuned plans of a file; see Store."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, PLANS)

    def near(self, key: PlanKey, workload: Workload) -> tuple[PlanKey, TunedPlan] | None:
        """As `alike`, but only within a distance of NEAR."""
        found = self.alike(key, workload)
        return found if found is not None and found[1].distance(workload) <= NEAR else None

    def alike(self, key: PlanKey, workload: Workload) -> tuple[PlanKey, TunedPlan] | None:
        """The plan with the nearest workload, at any distance, and otherwise equal key."""
        self.refresh()
        alike = {k: p for k, p in self.known().items() if replace(k, workload=key.workload) == key}
        return min(alike.items(), key=lambda item: item[1].distance(workload), default=None)


@lru_cache(maxsize=1)
def plans() -> Plans:
    """The user's tuned plans."""
    return Plans(settings().cache / f"plans-{VERSION}.json")


def _entry(key: PlanKey, plan: TunedPlan) -> Entry:
    fields = {name: value for name, value in vars(plan).items() if name != "flows"}
    flows = {group: _written(flow) for group, flow in plan.flows.items()}
    date = plan.date.isoformat(timespec="microseconds")
    parts = {name: dict(fields[name]) for name in ("before", "after")}
    return {"key": asdict(key), "plan": {**fields, **parts, "flows": flows, "date": date}}


def _written(flow: Dataflow) -> Any:
    return flow.name if flow == DATAFLOWS.get(flow.name) else flow.to_json()


def _flow(entry: Any) -> Dataflow:
    return DATAFLOWS[entry] if isinstance(entry, str) else Dataflow.of_json(entry)


def key_of(entry: Entry) -> PlanKey:
    key = entry["key"]
    device, dtypes, mode, model = (str(key[name]) for name in ("device", "dtypes", "mode", "model"))
    return PlanKey(device, dtypes, mode, model, tuple((int(a), int(b)) for a, b in key["workload"]))


def _plan(entry: Entry) -> TunedPlan:
    """Unreadable with an unknown dataflow or field."""
    fields = dict(entry["plan"])
    flows = {str(group): _flow(flow) for group, flow in fields.pop("flows").items()}
    date = date_of(fields.pop("date"))
    workload = tuple((float(a), float(b)) for a, b in fields.pop("workload"))
    if not all(float(fields[name]["total"]) >= 0 for name in ("before", "after")):
        raise ValueError("times are 0 or more")
    return TunedPlan(flows, workload, date=date, **{**fields, "tuned_groups": tuple(map(str, fields["tuned_groups"]))})


PLANS: RecordType[PlanKey, TunedPlan] = RecordType("plans", VERSION, _entry, key_of, _plan, lambda plan: plan.date)
"""Format of the file of tuned plans."""
