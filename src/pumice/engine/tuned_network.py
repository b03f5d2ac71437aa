"""A network that is tuned: its saved plans, and its layers without earlier choices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from pumice.engine.groups import Observed
from pumice.engine.measure import PassTiming
from pumice.engine.result import DataflowChoice, Tuning
from pumice.engine.subject import TuningSubject
from pumice.errors import OptionError
from pumice.nn.conv import Convolution, convolutions
from pumice.schedule.tuned_plans import PlanKey, TunedPlan, Workload, plans
from pumice.schedule.tuner import Clock


@contextmanager
def released(model: nn.Module) -> Iterator[list[str]]:
    """Reset tuned layers to the default dataflow; yields the names of layers set by hand. Restores all on exception."""
    layers = convolutions(model)
    before = [(layer, layer.dataflow, layer.tuned) for layer in layers]
    for layer in layers:
        if layer.dataflow is not None and layer.dataflow == layer.tuned:
            layer.dataflow = layer.tuned = None
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, Convolution))
    try:
        yield [name for name, layer in named if layer.dataflow is not None]
    except BaseException:
        for layer, flow, tuned in before:
            layer.dataflow, layer.tuned = flow, tuned
        raise


class TuningRun:
    """Tuning of a network whose layer groups are known. details: of the mode, a part of the plan's key."""

    tuned_model: TuningSubject
    observed: Observed
    clock: Clock
    mode: str

    def __init__(self, tuned_model: TuningSubject, observed: Observed, clock: Clock, mode: str, details: str) -> None:
        if not observed.groups:
            raise OptionError(f"nothing to tune: {'; '.join(observed.notes) or 'no layer ran'}")
        self.tuned_model, self.observed, self.clock, self.mode = tuned_model, observed, clock, mode
        self.notes: list[str] = []
        self.began: float = clock.now()
        self.workload: Workload = tuple(group.workload for group in observed.groups)
        layers = [
            [name, type(m).__name__, [*m.weight.shape], m.groups, m.bias is not None, str(m.relation), str(m.dataflow)]
            for name, m in tuned_model.model.named_modules()
            if isinstance(m, Convolution)
        ]
        groups = [[group.name, *group.layers] for group in observed.groups]
        weights = [layer.weight for layer in convolutions(tuned_model.model)]
        asked = f"{tuned_model.mode}, {details}" if details else tuned_model.mode
        self.key: PlanKey = plan_key(weights, asked, [layers, groups], self.workload)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.clock.budget - (self.clock.now() - self.began)

    def near(self) -> TunedPlan | None:
        """The saved plan for this workload."""
        found = plans().near(self.key, self.workload)
        return found and found[1]

    def alike(self) -> TunedPlan | None:
        """The saved plan with the nearest workload, at any distance."""
        found = plans().alike(self.key, self.workload)
        return found and found[1]

    def known(self, plan: TunedPlan, choices: Sequence[DataflowChoice]) -> Tuning:
        """The result of an earlier tuning."""
        before, after = (PassTiming(**spent) for spent in (plan.before, plan.after))
        notes = (*self.notes, *self.observed.notes)
        return Tuning(self.mode, self.key.device, tuple(choices), before, after, (), notes, plan.finished, True)

    def save(
        self, flows: Any, timings: tuple[PassTiming, PassTiming], done: tuple[str, ...], finished: bool, about: str
    ) -> None:
        """Save a plan, in place of the one for this workload."""
        before, after = ({**asdict(each), "parts": dict(each.parts)} for each in timings)
        near = plans().near(self.key, self.workload)
        if near is not None and near[0] != self.key:
            plans().forget([near[0]])
        about = f"{type(self.tuned_model.model).__name__}, {about}"
        plans().keep(self.key, TunedPlan(flows, self.workload, before, after, done, finished, about))


def date_of(plan: TunedPlan) -> str:
    """As text, in the local time."""
    return plan.date.astimezone().strftime("%Y-%m-%d %H:%M")


def plan_key(weights: Sequence[Tensor], mode: str, layers: Any, workload: Workload) -> PlanKey:
    """Key of a network: device and dtypes of its weights, mode, a digest of its layers as JSON, not of weights."""
    home = weights[0].device
    kind = home.type
    device = torch.cuda.get_device_name(home) if kind == "cuda" else f"{kind}, {torch.get_num_threads()} threads"
    dtypes = sorted({_dtype(weight.dtype) for weight in weights})
    if torch.is_autocast_enabled(kind):
        dtypes.append(f"autocast to {_dtype(torch.get_autocast_dtype(kind))}")
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtypes.append("tf32")
    digest = hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:16]
    return PlanKey.of(device, " ".join(dtypes), mode, digest, workload)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
