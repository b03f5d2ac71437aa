"""pumice.estimate: memory and time of a network on a scene, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg

from pumice.coords import Geometry, kernel_map
from pumice.engine import dry_stretch
from pumice.engine.dry_run import Machine, Meter, Spent, bytes_held, without_contents
from pumice.engine.groups import maps_below
from pumice.engine.program import INFERENCE, TRAINING, Item, Traced, items, uncompiled
from pumice.engine.rates import clock, rates_of
from pumice.engine.stretch import Stretch
from pumice.engine.subject import Loss, bare, fresh, sum_of_squares_loss
from pumice.engine.text import aligned, first_line
from pumice.engine.trace import CONSTANTS, CallStep, Step
from pumice.engine.train_stretch import TrainStretch
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import maps
from pumice.ops import SparseTensor, autograd
from pumice.ops.tensor import raw_feats
from pumice.runtime.workspace import workspace_bytes
from pumice.schedule.predict import map_seconds

_BACKWARD = "other gradients"
_WRONG = ShapeError, DtypeError  # The network itself would raise them


@dataclass(frozen=True)
class StepEstimate:
    """Of a step: voxels and channels of its result, pairs of its kernel map (0 without one), bytes that it allocates
    and seconds, in training with those of its gradients."""

    name: str
    voxels: int
    channels: int
    pairs: int
    memory: int
    time: float


@dataclass(frozen=True)
class PassEstimate:
    """Of a pass: bytes at its peak, seconds. parts: what the peak consists of; steps: in order."""

    memory: int
    time: float
    parts: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[StepEstimate, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """Memory and time of inference and of a training step. training: None without parameters to train. device: whose
    rates were used. unknown: steps that the figures leave out, with reasons."""

    inference: PassEstimate
    training: PassEstimate | None
    device: str
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A table of passes, then of steps, and what is unknown."""
        passes = {"inference": self.inference} | ({} if self.training is None else {"training": self.training})
        rows = [("pass", "memory", "time", "of which"), *(_told(name, one) for name, one in passes.items())]
        longest = list(passes.values())[-1]
        steps = [("step", "voxels", "channels", "pairs", "memory", "time"), *map(_told_step, longest.steps)]
        numbers = range(1, len(steps[0]))
        left_out = [f"not known: {name}" for name in self.unknown]
        return "\n".join([f"on {self.device}", *aligned(rows, numbers), "", *aligned(steps, numbers), *left_out])


def estimate(net: nn.Module, x: SparseTensor, *, loss: Loss | None = None) -> Estimate:
    """Memory and time of inference and of a training step of pumice.compile(net) on x, without running it.

        memory = parameters + x + kernel maps + peak of features and gradients
        time = kernel maps + sum over steps of the cost model (on a GPU: of kernels, not of the host)

    The kernel maps of the scene are built, on x's device, as all sizes follow from them; features are not computed. The
    network's steps run on tensors without contents, whose allocations are counted, gradients included, and stretches
    that are fused on a GPU by their own plans of memory. Times are those of pumice.engine.measure: wall-clock time on a
    CPU, kernel time on a GPU. The device's rates are measured at the first call (some 0.1 s) and kept.

    net: any torch.nn.Module that takes x, or a program of one; unchanged. x: features may require gradients. loss:
    scalar function of the result; default: the mean squares of every tensor in it. On a GPU autocast is the caller's.
    Optimizer states are not counted, nor what torch's allocator keeps beyond the tensors, nor the workspace that cuBLAS
    keeps for each thread (32 MiB on Hopper).

    Steps whose results depend on the features' values, such as pruning or control flow within a module that is called
    as it is, cannot be followed: they and the steps behind them are left out, and told in `unknown`.

    Raises DtypeError if net is no Module or x no SparseTensor, DeviceError if they are on different devices,
    OptionError for a module wrapped by torch.compile, for buffers of a captured network and for a loss that is no
    function, and the ShapeError and DtypeError of net(x); other errors of net for such an x are told in `unknown`.
    """
    net = _checked(net, x)
    if loss is not None and not callable(loss):
        raise OptionError(f"loss takes a function of the network's result, found {type(loss).__name__}")
    x.geometry.settle()
    trains = any(p.requires_grad for p in net.parameters())
    inference = _DryRun(net, x, False).run(None)
    training = _DryRun(net, x, True).run(loss or sum_of_squares_loss) if trains else None
    found = [inference] if training is None else [inference, training]
    unknown = dict.fromkeys(name for one in found for name in one[1])
    device = rates_of(x.device).name
    return Estimate(inference[0], None if training is None else training[0], device, tuple(unknown))


def _checked(net: Any, x: Any) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise DtypeError(f"estimate takes a torch.nn.Module, found {type(net).__name__}")
    if not isinstance(x, SparseTensor):
        raise DtypeError(f"estimate takes a SparseTensor, found {type(x).__name__}")
    if x.geometry.buffered is not None:
        raise OptionError("estimate takes a scene, found buffers of a captured network, whose sizes are not known")
    net = bare(net)
    homes = {str(t.device) for t in (*net.parameters(), *net.buffers())} - {str(x.device)}
    if homes:
        raise DeviceError(f"x is on {x.device}, the network on {', '.join(sorted(homes))}")
    return uncompiled(net)


class _DryRun:
    """A pass of a network over a new geometry on the coordinates of x."""

    def __init__(self, net: nn.Module, x: SparseTensor, training: bool) -> None:
        self.training = training
        self.net = without_contents(net)
        if training != self.net.training:
            # A network in training mode may have frozen layers: they stay so.
            self.net.train(training)
        x = fresh(x)
        feats = torch.empty_like(raw_feats(x), device="meta").requires_grad_(x.requires_grad)
        self.given, self.x = x, SparseTensor(feats, x.geometry)
        self.machine = Machine(rates_of(x.device), autograd.uses_gpu(raw_feats(x)))
        own = *self.net.parameters(), *self.net.buffers()
        self.meter = Meter(self.machine, (*own, feats))
        self.unknown: list[str] = []

    def run(self, loss: Loss | None) -> tuple[PassEstimate, list[str]]:
        """(estimate, what is unknown)"""
        with torch.set_grad_enabled(self.training), self.meter:
            result = self._forward()
            if loss is not None:
                self.meter.step = _BACKWARD
                self._backward(result, loss)
        del result
        return self._told(), self.unknown

    def _forward(self) -> list[Any]:
        """Known results, and values that unknown steps read."""
        traced = Traced(self.net, (self.x,), {}, {}, 0, CONSTANTS)
        if traced.graph is None:
            self.meter.step = type(self.net).__name__
            try:
                return [self.net(self.x)]
            except _WRONG:
                raise
            except Exception as error:
                self.unknown.append(f"{self.meter.step}: {_reason(error)}")
                return []
        graph = traced.graph
        env: dict[Any, Any] = {graph.placeholders[0]: self.x}
        way = TRAINING if self.training else INFERENCE
        size = self.dtype.itemsize if self.machine.on_gpu else None
        if self.machine.on_gpu and traced.pyramid is not None and traced.pyramid.node in env:
            traced.pyramid.prepare(env, lambda: None)
        ends: list[Any] = []
        for item in items(graph, (way, size), {"net": self.net}):
            ends += self._run(item, env)
            for node in item.last:
                env.pop(node, None)
        known: list[Any] = []
        map_arg(graph.result, lambda node: known.append(env[node]) if node in env else None)
        return [*known, *ends]

    @property
    def dtype(self) -> torch.dtype:
        """Of products."""
        return self._autocast or self.x.dtype

    @property
    def _autocast(self) -> torch.dtype | None:
        kind = self.given.device.type
        return torch.get_autocast_dtype(kind) if kind == "cuda" and torch.is_autocast_enabled(kind) else None

    def _run(self, item: Item, env: dict[Any, Any]) -> list[Any]:
        """Run an item in env. Returns nothing if it is known, else the values that it reads."""
        self.meter.step = _name(item.part)
        missing = [node for node in item.reads if node not in env]
        try:
            if missing:
                raise LookupError("it reads what is not known")
            self._run_part(item, env)
        except _WRONG:
            raise
        except Exception as error:  # of whatever the network calls
            self.unknown.append(f"{self.meter.step}: {_reason(error)}")
            return [env[node] for node in item.reads if node in env]
        made = [env[node] for node in item.makes]
        feats = [raw_feats(y) if isinstance(y, SparseTensor) else y for y in made]
        self.meter.mark([y for y in feats if isinstance(y, Tensor)])
        if len(feats) == 1 and isinstance(feats[0], Tensor) and not isinstance(item.part, Stretch | TrainStretch):
            shape = feats[0].shape
            self.meter.spent.rows, self.meter.spent.channels = (*shape, 1)[:2] if shape else (0, 0)
        return []

    def _run_part(self, item: Item, env: dict[Any, Any]) -> None:
        part = item.part
        if isinstance(part, Stretch):
            dry_stretch.infer(part, env, self.meter, self._autocast)
        elif not isinstance(part, TrainStretch) or not dry_stretch.train(part, env, self.meter, self._autocast):
            item.begin(env)()

    def _backward(self, result: Sequence[Any], loss: Loss) -> None:
        """The backward pass, of what is known if some steps are not."""
        if not self.unknown:
            return loss(result[0] if len(result) == 1 else result).backward()
        feats = [raw_feats(y) if isinstance(y, SparseTensor) else y for y in result]
        known = [y for y in feats if isinstance(y, Tensor) and y.requires_grad]
        if known:
            sum_of_squares_loss(known).backward()
        return None

    def _told(self) -> PassEstimate:
        own = sum(t.nbytes for t in (*self.net.parameters(), *self.net.buffers()))
        given = raw_feats(self.given).nbytes + self.given.coords.nbytes
        held = bytes_held(self.given.geometry) - self.given.coords.nbytes
        parts = {
            "parameters": own,
            "input": given,
            "maps": held,
            **({"workspace": workspace_bytes(*self.meter.needs)} if self.machine.on_gpu else {}),
            "features" + " and gradients" * self.training: self.meter.peak,
        }
        steps = [_step(name, one) for name, one in self.meter.steps.items() if one.allocated or one.time]
        building = StepEstimate("kernel maps", len(self.given), 0, 0, held, self._building())
        every = building, *steps
        return PassEstimate(sum(parts.values()), sum(one.time for one in every), MappingProxyType(parts), every)

    def _building(self) -> float:
        """Seconds to build the kernel maps: on a CPU measured, since they are built anyway."""
        if self.machine.on_gpu:
            found = {id(one.table): one for one in maps_below(self.given.geometry, set())}
            return sum(map_seconds(max(one.num_inputs, one.num_outputs), self.training) for one in found.values())
        x = fresh(self.given)
        now = clock()
        begin = now()
        _build(self.given.geometry, x.geometry, self.training)
        return now() - begin


def _build(known: Geometry, geometry: Geometry, training: bool) -> None:
    """Build the maps of one geometry for another one on the same coordinates."""
    for (relation, target), (_, below) in [*known.maps.items()]:
        if target is None:
            # Also under None: a geometry as its own target.
            found, outputs = kernel_map(geometry, relation, geometry if relation.policy == "given" else None)
            maps.planner_operands(found, training)
            if below is not None and outputs is not geometry:
                _build(below, outputs, training)


def _step(name: str, one: Spent) -> StepEstimate:
    return StepEstimate(name, one.rows, one.channels, one.pairs, one.allocated, one.time)


def _name(part: Step | Stretch | TrainStretch) -> str:
    if isinstance(part, Stretch | TrainStretch):
        return part.steps[0].names[0]
    called = isinstance(part, CallStep) and part.module is None
    return str(part.node) if called else part.names[0]


def _reason(error: Exception) -> str:
    if isinstance(error, NotImplementedError):  # of torch, for tensors without contents
        return "its result depends on the values of features"
    return first_line(error)


# Text


def _told(name: str, one: PassEstimate) -> tuple[str, str, str, str]:
    parts = ", ".join(f"{part} {_bytes(size)}" for part, size in one.parts.items())
    return name, _bytes(one.memory), _milliseconds(one.time), parts


def _told_step(one: StepEstimate) -> tuple[str, ...]:
    return one.name, str(one.voxels), str(one.channels), str(one.pairs), _bytes(one.memory), _milliseconds(one.time)


def _bytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _milliseconds(spent: float) -> str:
    return f"{1e3 * spent:.2f} ms"
