"""Measures one network in one mode and one way over a stream of scenes; as a program, in a process of its own.

    python -m benchmarks.probes.stream_way '{"net": "unet", "mode": "infer", "way": "eager", "device": "cuda", ...}'

It prints a line of JSON, [name, value], per measurement as it is made, so that an interrupted process loses nothing
printed before. Names are the fields of `Seen`.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import pumice as pm
from benchmarks.harness.study import TOLERANCE, error
from benchmarks.harness.timing import synchronize
from benchmarks.harness.whole import multiplying
from benchmarks.peers import spconv as spconv_peer
from benchmarks.peers import spconv_nets
from benchmarks.scenes.stream import Source, samples
from benchmarks.scenes.stream_nets import NETS
from benchmarks.scenes.workloads import Sample, exact_copy
from benchmarks.suites.workloads import Side
from pumice.compat import install, uninstall

Tell = Callable[[str, Any], object]


@dataclass(frozen=True)
class Mode:
    """training: a step of it. On a GPU: precision: of products; dtype: of features and weights, before autocast."""

    precision: str = "fp16"
    dtype: torch.dtype = torch.float16
    training: bool = False

    @property
    def allowed(self) -> float:
        """Relative errors of results on a GPU that come of the precision."""
        return TOLERANCE[torch.float32 if self.precision == "fp32" else torch.float16]


MODES: Mapping[str, Mode] = {
    "infer": Mode(),
    "infer-tf32": Mode("tf32", torch.float32),
    "infer-fp32": Mode("fp32", torch.float32),
    "train": Mode(dtype=torch.float32, training=True),
}
"""By name; on a CPU, where all is float32, the first and the last."""
WAYS = ("spconv", "eager", "compiled", "captured", "compat-eager", "compat-compiled", "compat-captured")
"""compat-: the network in spconv's layers, unchanged, on pumice.compat."""
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Clocks in seconds. "cpu" is the time of this process over all threads, so other processes do not disturb it."""
CHECKED = 3
"""Number of scenes whose results are compared."""
LOSS = 2.0**-8
"""Factor on the sum of squares that keeps its gradients within float16."""
SLACK: Mapping[str, Mapping[str, float]] = {
    "result": {"cuda": 4, "cpu": 1},
    "loss": {"cuda": 4, "cpu": 1},
    "gradients": {"cuda": 80, "cpu": 100},
}
"""Factors on the tolerance of the dtype, by result and device, as in the suite workloads."""


@dataclass(frozen=True)
class Asked:
    """What to measure. limit: seconds after which no further scene is started. quick: few channels."""

    net: str
    mode: str
    way: str
    device: str
    count: int
    source: Source = Source()
    limit: float = math.inf
    quick: bool = False

    @property
    def training(self) -> bool:
        return MODES[self.mode].training

    @property
    def compat(self) -> bool:
        return self.way.startswith("compat-")

    @property
    def form(self) -> str:
        """How the network is called: eager, compiled or captured."""
        return "eager" if self.way == "spconv" else self.way.removeprefix("compat-")


@dataclass
class Seen:
    """What a process reported.

    calls, again: milliseconds per scene, by each of CLOCKS, in the first and second round. make: the same, of capture
    or compilation before the first call. voxels: minimum and maximum. fallbacks: calls of a captured network that ran
    eagerly. errors: relative errors by result. wrong: why the rows are rejected, or "". absent: the import error.
    """

    calls: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)
    make: list[float] | None = None
    voxels: tuple[int, int] = (0, 0)
    fallbacks: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    wrong: str = "it ended before its results were compared"
    absent: str = ""

    def add(self, name: str, value: Any) -> None:
        if name in ("calls", "again"):
            getattr(self, name).append(value)
        else:
            setattr(self, name, value)


@dataclass(frozen=True, eq=False)
class Ready:
    """A network ready to be called. captured: the captured program, which counts its fallbacks."""

    side: Side
    run: Callable[[Any], Any]
    of_spconv: bool = False
    captured: Any = None

    def maker(self, sample: Sample) -> Callable[[], Any]:
        """A function that makes a tensor of copied coordinates, so that no library has cached maps of them."""
        sample = replace(sample, coords=sample.coords.clone())
        if self.of_spconv:
            return spconv_nets.tensor_maker(sample)
        return lambda: pm.SparseTensor(sample.feats, sample.coords, spatial_shape=sample.spatial_shape)

    def timed(self, sample: Sample) -> list[float]:
        """Milliseconds of a call by each of CLOCKS, from an idle device with the sample on it to an idle device."""
        make, device = self.maker(sample), sample.coords.device
        synchronize(device)
        begin = _now()
        self.run(make())
        synchronize(device)
        return _since(begin)

    def results(self, sample: Sample, training: bool) -> dict[str, Any]:
        """The tensors to compare: the loss and gradients, or the result."""
        found = self.run(self.maker(sample)())
        if training:
            return {"loss": found.clone(), "gradients": self.side.gradients(found)}
        return {"result": self.side.result(found)}


def measure(asked: Asked, tell: Tell) -> None:
    """Make the network, time all scenes in two rounds, then compare results, so that the first timed call is the first.

    Raises ModuleNotFoundError if the way is spconv's and spconv is not installed.
    """
    with _stand_in() if asked.compat else nullcontext():
        _measure(asked, tell)


@contextmanager
def _stand_in() -> Iterator[None]:
    """pumice.compat is spconv, meanwhile."""
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "spconv"}
    install("spconv")
    try:
        yield
    finally:
        uninstall("spconv")
        sys.modules.update(known)


def _measure(asked: Asked, tell: Tell) -> None:
    device = torch.device(asked.device)
    dtype = MODES[asked.mode].dtype if device.type == "cuda" else torch.float32
    given = samples(asked.source, asked.count, device, dtype)
    sizes = [len(one) for one in given]
    tell("voxels", (min(sizes), max(sizes)))
    net = _network(asked, given[0])
    kept = copy.deepcopy(net)
    with _multiplying(asked):
        ready = _timed(asked, net, given, tell)
        found = [ready.results(one, asked.training) for one in given[:CHECKED]]
    errors = _errors(asked, found, kept, given[:CHECKED])
    tell("errors", errors)
    tell("wrong", _wrong(errors, asked))


@contextmanager
def _multiplying(asked: Asked) -> Iterator[None]:
    """The precision of the mode is that of float32 products meanwhile, in torch, Pumice and spconv."""
    if MODES[asked.mode].precision != "tf32":
        yield
        return
    theirs = spconv_peer.multiplying(spconv_peer.new_tuner()) if asked.way == "spconv" else nullcontext()
    with multiplying("tf32"), theirs:
        yield


def _timed(asked: Asked, net: nn.Module, given: Sequence[Sample], tell: Tell) -> Ready:
    """The network made ready, and called on all scenes in two rounds."""
    synchronize(given[0].coords.device)
    begin = _now()
    ready = _ready(asked, net, max(given, key=len))
    if asked.form != "eager":
        tell("make", _since(begin))
    for name in ("calls", "again"):
        for one in given:
            if _since(begin)[0] < 1e3 * asked.limit:
                tell(name, ready.timed(one))
    if ready.captured is not None:
        tell("fallbacks", sum(ready.captured.fallbacks.values()))
    return ready


def _network(asked: Asked, sample: Sample) -> nn.Module:
    """The network with fixed random weights and norm statistics, in the dtype of the features."""
    torch.manual_seed(0)
    net = NETS[asked.net](asked.quick)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    return net.to(sample.feats.device, sample.feats.dtype).train(asked.training)


def _now() -> list[float]:
    return [clock() for clock in CLOCKS.values()]


def _since(begin: Sequence[float]) -> list[float]:
    return [1e3 * (now - then) for now, then in zip(_now(), begin, strict=True)]


def _ready(asked: Asked, net: nn.Module, largest: Sample, mixed: bool = True) -> Ready:
    """Prepare the way asked for. mixed: run training steps on a GPU under float16 autocast."""
    of_spconv = asked.way == "spconv" or asked.compat
    if of_spconv and not asked.compat:
        spconv_peer.train_without_cuda()
    ready = Ready((Side.spconv if of_spconv else Side.ours)(net, largest), lambda x: None, of_spconv)
    if asked.training:
        return _training(asked, ready, largest, mixed)
    if asked.form == "captured":
        with torch.no_grad():
            captured = pm.capture(ready.side.net, ready.maker(largest)(), max_voxels=len(largest)).ready()
        return replace(ready, run=torch.no_grad()(captured.__call__), captured=captured)
    return replace(ready, run=torch.no_grad()(_called(asked, ready)))


def _called(asked: Asked, ready: Ready) -> Callable[[Any], Any]:
    if asked.form == "compiled":
        return pm.compile(ready.side.net)  # pyright: ignore[reportAttributeAccessIssue]
    return ready.side.net


def _training(asked: Asked, ready: Ready, largest: Sample, mixed: bool) -> Ready:
    """A training step: clear gradients, forward, sum of squares, backward, SGD. With a rate of 0, SGD reads and writes
    every weight but keeps its value, so that the network timed is the one compared."""
    net, device = ready.side.net, largest.coords.device.type
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    cast = torch.autocast(device, torch.float16, enabled=mixed and device == "cuda")

    def loss(y: Any) -> Tensor:
        return LOSS * ready.side.feats(y).float().square().sum()

    if asked.form == "captured":
        with cast:
            captured = pm.capture_step(net, loss, optimizer, ready.maker(largest)(), max_voxels=len(largest)).ready()
        return replace(ready, run=captured.__call__, captured=captured)
    call = _called(asked, ready)

    def step(x: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with cast:
            value = loss(call(x))
        value.backward()
        optimizer.step()
        return value.detach()

    return replace(ready, run=step)


def _errors(
    asked: Asked, found: Sequence[Mapping[str, Any]], net: nn.Module, given: Sequence[Sample]
) -> dict[str, float]:
    """Relative errors of these results, the largest over the scenes, against the same weights in float32."""
    exact = _exact(asked, net, given[0])
    errors: dict[str, float] = {}
    for own, sample in zip(found, given, strict=True):
        truths = exact.results(replace(sample, feats=sample.feats.float()), asked.training)
        for name, truth in truths.items():
            distance = error(own[name], truth)
            errors[name] = distance if distance != distance else max(distance, errors.get(name, 0.0))
    return errors


def _exact(asked: Asked, net: nn.Module, sample: Sample) -> Ready:
    """The reference network in float32: spconv's layers, or without spconv ours by plain gathers and products."""
    wide, sample = copy.deepcopy(net).float(), replace(sample, feats=sample.feats.float())
    if asked.compat:
        return _ready(replace(asked, way="eager"), exact_copy(wide, torch.float32), sample, mixed=False)
    try:
        return _ready(replace(asked, way="spconv"), wide, sample, mixed=False)
    except ModuleNotFoundError:
        return _ready(replace(asked, way="eager"), exact_copy(wide, torch.float32), sample, mixed=False)


def _wrong(errors: Mapping[str, float], asked: Asked) -> str:
    device = torch.device(asked.device)
    allowed = MODES[asked.mode].allowed if device.type == "cuda" else TOLERANCE[torch.float32]
    # The reference is spconv's result, with the sums that its threads lose on a CPU.
    lost = spconv_peer.slack(device) if device.type == "cpu" and torch.get_num_threads() > 1 else 1.0
    for name, found in errors.items():
        bound = SLACK[name][device.type] * lost * allowed
        if not found < bound:
            return f"{name}: relative error {found:.2g}, expected below {bound:g}"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Measure what the JSON argument asks for."""
    given = json.loads(arguments[0])
    asked = Asked(**{**given, "source": Source(**given["source"])})

    def tell(name: str, value: Any) -> None:
        print(json.dumps([name, value]), flush=True)

    run(asked, tell)


def run(asked: Asked, tell: Tell) -> None:
    """Run `measure`; exceptions are reported as `absent` or `wrong`."""
    try:
        measure(asked, tell)
    except ModuleNotFoundError as reason:
        tell("absent" if asked.way == "spconv" else "wrong", str(reason))
    except Exception:  # the other ways still run
        tell("wrong", traceback.format_exc()[-600:])


if __name__ == "__main__":
    main(sys.argv[1:])
