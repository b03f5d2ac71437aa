"""One network, in one mode and one way, over a stream of scenes; as a program, in a process of its own.

    python -m benchmarks.probes.stream_way '{"net": "unet", "mode": "infer", "way": "eager", "device": "cuda", ...}'

It prints a line of JSON, [name, value], for each thing as it happens: what is known of an interrupted process is what
it had printed. Names are those of `Seen`.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import pumice as pm
from benchmarks.harness.study import TOLERANCE, error
from benchmarks.harness.timing import synchronize
from benchmarks.peers import spconv as spconv_peer
from benchmarks.peers import spconv_nets
from benchmarks.scenes.stream import Source, samples
from benchmarks.scenes.stream_nets import NETS
from benchmarks.scenes.workloads import Sample, exact_copy
from benchmarks.suites.workloads import Side

Tell = Callable[[str, Any], object]

MODES = ("infer", "train")
WAYS = ("spconv", "eager", "compiled", "captured")
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds by clock. The second is that of the process on all threads: on a CPU it does not see what else runs there."""
CHECKED = 3
"""Scenes whose results are compared."""
LOSS = 2.0**-8
"""By which the sum of squares is multiplied, so that its gradients are within float16."""
SLACK: Mapping[str, Mapping[str, float]] = {
    "result": {"cuda": 4, "cpu": 1},
    "loss": {"cuda": 4, "cpu": 1},
    "gradients": {"cuda": 80, "cpu": 100},
}
"""Times the error of the dtype, by what is compared, as in the suite workloads."""


@dataclass(frozen=True)
class Asked:
    """What is measured. limit: seconds after which no further scene is begun. quick: few channels."""

    net: str
    mode: str
    way: str
    device: str
    count: int
    source: Source = Source()
    limit: float = math.inf
    quick: bool = False


@dataclass
class Seen:
    """What a process told.

    calls, again: ms of each scene by each of CLOCKS, and of those scenes a second time. make: the same before the first
    call, of a capture or compilation. voxels: the least and the most. fallbacks: calls of a captured network that ran
    eagerly. errors: relative ones by what was compared. wrong: why its rows are refused, "" if all is right. absent:
    why its library is not there.
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
    """A network that is about to be called. captured: what counts its fallbacks."""

    side: Side
    run: Callable[[Any], Any]
    of_spconv: bool = False
    captured: Any = None

    def maker(self, sample: Sample) -> Callable[[], Any]:
        """What makes a tensor of new coordinates, as a loader gives them: no library has seen them."""
        sample = replace(sample, coords=sample.coords.clone())
        if self.of_spconv:
            return spconv_nets.tensor_maker(sample)
        return lambda: pm.SparseTensor(sample.feats, sample.coords, spatial_shape=sample.spatial_shape)

    def timed(self, sample: Sample) -> list[float]:
        """Milliseconds, by each of CLOCKS, from an idle device with features and coordinates on it to an idle one."""
        make, device = self.maker(sample), sample.coords.device
        synchronize(device)
        begin = _now()
        self.run(make())
        synchronize(device)
        return _since(begin)

    def results(self, sample: Sample, training: bool) -> dict[str, Any]:
        """What is compared."""
        found = self.run(self.maker(sample)())
        if training:
            return {"loss": found, "gradients": self.side.gradients(found)}
        return {"result": self.side.result(found)}


def measure(asked: Asked, tell: Tell) -> None:
    """Makes the network, times all scenes and then all of them again, and compares last: the first call is a first one.

    Raises ModuleNotFoundError where the way is spconv's and it is not installed.
    """
    device = torch.device(asked.device)
    half = device.type == "cuda" and asked.mode == "infer"
    given = samples(asked.source, asked.count, device, torch.float16 if half else torch.float32)
    sizes = [len(one) for one in given]
    tell("voxels", (min(sizes), max(sizes)))
    net = _network(asked, given[0])
    kept = copy.deepcopy(net)
    synchronize(device)
    begin = _now()
    ready = _ready(asked, net, max(given, key=len))
    if asked.way in ("compiled", "captured"):
        tell("make", _since(begin))
    for name in ("calls", "again"):
        for one in given:
            if _since(begin)[0] < 1e3 * asked.limit:
                tell(name, ready.timed(one))
    if ready.captured is not None:
        tell("fallbacks", sum(ready.captured.fallbacks.values()))
    errors = _errors(asked, ready, kept, given[:CHECKED])
    tell("errors", errors)
    tell("wrong", _wrong(errors, device))


def _network(asked: Asked, sample: Sample) -> nn.Module:
    """The network with the same weights each time, in the dtype of the features; random statistics of its norms."""
    torch.manual_seed(0)
    net = NETS[asked.net](asked.quick)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    return net.to(sample.feats.device, sample.feats.dtype).train(asked.mode == "train")


def _now() -> list[float]:
    return [clock() for clock in CLOCKS.values()]


def _since(begin: Sequence[float]) -> list[float]:
    return [1e3 * (now - then) for now, then in zip(_now(), begin, strict=True)]


def _ready(asked: Asked, net: nn.Module, largest: Sample, mixed: bool = True) -> Ready:
    """mixed: on a GPU a training step is under autocast in float16."""
    of_spconv = asked.way == "spconv"
    if of_spconv:
        spconv_peer.train_without_cuda()
    ready = Ready((Side.spconv if of_spconv else Side.ours)(net, largest), lambda x: None, of_spconv)
    if asked.mode == "train":
        return _training(asked, ready, largest, mixed)
    if asked.way == "captured":
        with torch.no_grad():
            captured = pm.capture(net, ready.maker(largest)(), max_voxels=len(largest)).ready()
        return replace(ready, run=torch.no_grad()(captured.__call__), captured=captured)
    return replace(ready, run=torch.no_grad()(_called(asked, ready)))


def _called(asked: Asked, ready: Ready) -> Callable[[Any], Any]:
    if asked.way == "compiled":
        return pm.compile(ready.side.net)  # pyright: ignore[reportAttributeAccessIssue]
    return ready.side.net


def _training(asked: Asked, ready: Ready, largest: Sample, mixed: bool) -> Ready:
    """A step: gradients cleared, forward, the sum of squares, backward, and SGD with a rate of 0, which reads and
    writes every weight and leaves it as it is: what is timed stays what is compared."""
    net, device = ready.side.net, largest.coords.device.type
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    cast = torch.autocast(device, torch.float16, enabled=mixed and device == "cuda")

    def loss(y: Any) -> Tensor:
        return LOSS * ready.side.feats(y).float().square().sum()

    if asked.way == "captured":
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


def _errors(asked: Asked, ready: Ready, net: nn.Module, given: Sequence[Sample]) -> dict[str, float]:
    """Relative errors, the largest over these scenes, against the same weights in float32."""
    exact, training = _exact(asked, net, given[0]), asked.mode == "train"
    errors: dict[str, float] = {}
    for sample in given:
        found = ready.results(sample, training)
        truths = exact.results(replace(sample, feats=sample.feats.float()), training)
        for name, truth in truths.items():
            distance = error(found[name], truth)
            errors[name] = distance if distance != distance else max(distance, errors.get(name, 0.0))
    return errors


def _exact(asked: Asked, net: nn.Module, sample: Sample) -> Ready:
    """spconv's layers, and without spconv ours by plain gathers and products."""
    wide, sample = copy.deepcopy(net).float(), replace(sample, feats=sample.feats.float())
    try:
        return _ready(replace(asked, way="spconv"), wide, sample, mixed=False)
    except ModuleNotFoundError:
        return _ready(replace(asked, way="eager"), exact_copy(wide, torch.float32), sample, mixed=False)


def _wrong(errors: Mapping[str, float], device: torch.device) -> str:
    # What spconv's threads lose of its sums is lost from the truth here.
    lost = spconv_peer.slack(device) if device.type == "cpu" and torch.get_num_threads() > 1 else 1.0
    for name, found in errors.items():
        bound = SLACK[name][device.type] * lost * TOLERANCE[torch.float16 if device.type == "cuda" else torch.float32]
        if not found < bound:
            return f"{name}: relative error {found:.2g}, expected below {bound:g}"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Measures what the JSON asks for."""
    given = json.loads(arguments[0])
    asked = Asked(**{**given, "source": Source(**given["source"])})

    def tell(name: str, value: Any) -> None:
        print(json.dumps([name, value]), flush=True)

    run(asked, tell)


def run(asked: Asked, tell: Tell) -> None:
    """`measure`, whose exceptions are told as `absent` or `wrong`."""
    try:
        measure(asked, tell)
    except ModuleNotFoundError as reason:
        tell("absent" if asked.way == "spconv" else "wrong", str(reason))
    except Exception:  # the other ways are still wanted
        tell("wrong", traceback.format_exc()[-600:])


if __name__ == "__main__":
    main(sys.argv[1:])
