"""Tuning of networks over graphs: the order of aggregation and transformation of each layer, by timing the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pumice.engine.graph_capture import takes_graph
from pumice.engine.measure import PassTimer
from pumice.engine.subject import MODES, Loss, sum_of_squares_loss, undisturbed
from pumice.engine.tuned_network import plan_key
from pumice.errors import DeviceError, DtypeError, OptionError
from pumice.nn import RelationalConv
from pumice.ops import Graph
from pumice.ops.relational_steps import orders_of
from pumice.schedule.tuned_orders import TunedOrders, orders
from pumice.schedule.tuned_plans import PlanKey
from pumice.schedule.tuner import Assignment, Clock, SearchResult, TuningTask, search


@dataclass(frozen=True)
class GraphTuning:
    """Orders chosen for the layers of a network over graphs, and their effect.

    orders: by layer; None: the cost model's choice is the fastest. before, after: seconds of a pass per sample.
    finished: every layer was tuned; reused: from the user's cache folder."""

    mode: str
    device: str
    orders: Mapping[str, str | None]
    before: float
    after: float
    finished: bool = True
    reused: bool = False

    @property
    def speedup(self) -> float:
        """Speed-up, before / after."""
        return self.before / self.after if self.after else 1.0

    def apply(self, model: nn.Module) -> None:
        """Set the orders of a model with the same layers. Raises OptionError if it lacks one."""
        for name, order in self.orders.items():
            _layer(model, name).order = order

    def remove(self, model: nn.Module) -> None:
        """Leave the orders of these layers to the cost model."""
        for name in self.orders:
            _layer(model, name).order = None

    def __str__(self) -> str:
        state = ", from the tuning cache" if self.reused else "" if self.finished else ", unfinished"
        head = f"{self.mode} on {self.device}: {1e3 * self.before:.3f} -> {1e3 * self.after:.3f} ms a sample{state}"
        return "\n".join([head, *(f"{name}: {order or 'by the cost model'}" for name, order in self.orders.items())])


def _layer(model: nn.Module, name: str) -> RelationalConv:
    layer = dict(model.named_modules()).get(name)
    if not isinstance(layer, RelationalConv):
        raise OptionError(f"{type(model).__name__} has no RelationalConv {name!r}; this tuning is of another model")
    return layer


def tune_graph_network(
    model: nn.Module,
    samples: Sequence[tuple[Any, ...]],
    mode: str,
    loss: Loss | None,
    clock: Clock,
    fresh: bool,
    save: bool,
) -> GraphTuning:
    """pumice.tune of a network over graphs. samples: its arguments."""
    layers = _checked(model, samples, mode)
    with undisturbed(model, mode == "training"):
        calls = [_pass(model, sample, mode, loss or sum_of_squares_loss) for sample in samples]
        able = _able(layers, calls)
        key = _key(layers, samples, mode)
        known = None if fresh else orders().seek(key)
        if known is None:
            found = _search(layers, able, calls, clock)
            kept: Any = found.assignment
            known = TunedOrders(dict(kept), found.before, found.after)
            if save and found.finished:
                orders().keep(key, known)
            finished, reused = found.finished, False
        else:
            finished, reused = True, True
    chosen = {name: known.orders.get(name) for name in able}
    tuning = GraphTuning(mode, key.device, chosen, known.before, known.after, finished, reused)
    tuning.apply(model)
    return tuning


def _checked(model: Any, samples: Any, mode: str) -> dict[str, RelationalConv]:
    """The layers of the model by name."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    OptionError.check("mode", mode, MODES)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RelationalConv)}
    if not layers:
        raise OptionError(f"{type(model).__name__} has no pumice.nn.RelationalConv")
    for number, sample in enumerate(samples):
        if not takes_graph(sample):
            raise DtypeError(
                f"a sample is the arguments of a call with a pumice.Graph, found {type(sample).__name__} at {number}"
            )
        devices = {str(layer.weight.device) for layer in layers.values()} | {str(_graph(sample).device)}
        if len(devices) > 1:
            raise DeviceError(f"model and samples are on one device, found {' and '.join(sorted(devices))}")
    return layers


def _graph(sample: tuple[Any, ...]) -> Graph:
    return next(leaf for leaf in tree_flatten(sample)[0] if isinstance(leaf, Graph))


def _pass(model: nn.Module, sample: tuple[Any, ...], mode: str, loss: Loss) -> Callable[[], object]:
    if mode == "inference":
        return torch.no_grad()(lambda: model(*sample))
    wanted = [p for p in model.parameters() if p.requires_grad]
    run = torch.enable_grad()
    return run(lambda: torch.autograd.grad(loss(model(*sample)), wanted, allow_unused=True))


def _able(layers: Mapping[str, RelationalConv], calls: Sequence[Callable[[], object]]) -> dict[str, tuple[str, ...]]:
    """The orders that each layer has with these samples; of one-hot nodes none."""
    found: dict[str, set[str]] = {}
    with ExitStack() as stack:
        for name, layer in layers.items():

            def see(layer: Any, args: tuple[Any, ...], given: dict[str, Any], name: str = name) -> None:
                x, *others = args
                weighted = given.get("edge_weight") is not None or (len(others) > 2 and others[2] is not None)
                x = x[0] if isinstance(x, tuple) else next(iter(x.values())) if isinstance(x, Mapping) else x
                able = orders_of(layer.aggr, weighted) if isinstance(x, Tensor) and x.is_floating_point() else ()
                found[name] = found.get(name, {*able}) & {*able}

            stack.callback(layer.register_forward_pre_hook(see, with_kwargs=True).remove)
        for call in calls:
            call()
    return {name: tuple(sorted(able)) for name, able in found.items() if len(able) > 1}


def _search(
    layers: Mapping[str, RelationalConv], able: Mapping[str, tuple[str, ...]], calls: Sequence[Any], clock: Clock
) -> SearchResult:
    meter = PassTimer(next(iter(layers.values())).weight.device)
    before = {name: layer.order for name, layer in layers.items()}

    def measure(assignment: Assignment) -> float:
        for name in able:
            layers[name].order = assignment.get(name)  # pyright: ignore[reportAttributeAccessIssue]
        return meter.measure(calls).total

    try:
        return search([TuningTask(name, ways) for name, ways in able.items()], measure, clock)
    finally:
        for name, order in before.items():
            layers[name].order = order


def _key(layers: Mapping[str, RelationalConv], samples: Sequence[tuple[Any, ...]], mode: str) -> PlanKey:
    told = [[name, repr(layer), [*layer.weight.shape]] for name, layer in layers.items()]
    workload = tuple(pair for sample in samples for pair in _work(_graph(sample)))
    return plan_key([layer.weight for layer in layers.values()], mode, told, workload)


def _work(graph: Graph) -> tuple[tuple[float, float], ...]:
    segments = len(graph.map.segments().sizes)
    return tuple((math.log2(1 + a), math.log2(1 + b)) for a, b in ((graph.num_targets, graph.num_edges), (segments, 0)))
