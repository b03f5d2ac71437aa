"""The studies `inference` and `training` of the suite `engine`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.families import RECORDED, SAME_RUN
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import DTYPES, Case, Ready, Setup, Way, by_choice, mean_told, ready, recover
from benchmarks.harness.timing import Times, clocks
from benchmarks.harness.whole import checked, spent
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.engine import BEST, INFERENCE, TRAINING, Known, net_for, scenes
from benchmarks.scenes.workloads import Sample, exact_copy, fresh
from benchmarks.suites.workloads import LOSS, Side, loss_of, step_of
from pumice.engine import Captured, capture, capture_step
from pumice.ops import row_mean

SLACK = 4.0
"""Factor on the tolerance of the dtype for whole networks, whose roundings add up (workloads.Mode)."""
_SECONDS = {"inference": 4.0, "training": 6.0}
"""Factors on the seconds of other studies: calls of a millisecond need many runs."""


def inference(setup: Setup) -> Iterator[Row]:
    """Every wanted scene, in three ways of ours.

        captured          fast(feats, coords)
        captured-tensor   fast(SparseTensor(feats, coords))
        eager             net(SparseTensor(feats, coords))

    A call begins with coordinates and features on the device and ends with logits, including kernel maps. Each way's
    result is compared with a float64 run by torch's products before it is timed.
    """
    return by_scene(setup, scenes(setup, INFERENCE), "inference", _inferred)


def _inferred(setup: Setup, sample: Sample) -> Timed | None:
    setup.say(f"{sample.name}: {len(sample)} voxels")
    net = net_for(setup, sample)
    wide = Side.ours(exact_copy(net), replace(sample, feats=sample.feats.double()))
    with torch.no_grad():
        truth = wide.result(wide.net(wide.tensor()))
    told = Case(case_of(setup, sample.name, "inference"), setup.half, truth)
    own, given = net.to(setup.half), replace(sample, feats=sample.feats.to(setup.half))
    made: list[Captured] = []
    ways = [one for one in (ready(setup, told, way, not way.package) for way in _ways(setup, own, given, made)) if one]
    if all(way.name == SPCONV for way in ways):
        return None

    def check() -> None:
        if made and made[0].fallbacks:
            # Captured calls must not have run eagerly.
            setup.failed(f"{told.name}: captured calls ran eagerly: {dict(made[0].fallbacks)}")

    known = INFERENCE.get(sample.name)
    return Timed(setup, sample.name, "inference", ways, known, check)


def _ways(setup: Setup, net: nn.Module, sample: Sample, made: list[Captured]) -> Iterator[Way]:
    """Our ways and spconv's. made: receives the captured network when it is first needed."""
    ours = Side.ours(net, sample)

    def fast() -> Captured:
        if not made:
            begin = time.perf_counter()
            made.append(by_choice(setup, lambda: capture(net, fresh(sample), max_voxels=len(sample)))())
            setup.say(f"  captured in {time.perf_counter() - begin:.1f} s")
        return made[0]

    eager = torch.no_grad()(lambda: net(ours.tensor()))
    yield Way(EAGER, lambda: by_choice(setup, eager), view=ours.result, slack=SLACK)
    yield Way(CAPTURED, lambda: partial(fast(), sample.feats, sample.coords), view=ours.result, slack=SLACK)
    yield Way(f"{CAPTURED}-tensor", lambda: partial(_of_tensor, fast(), sample), view=ours.result, slack=SLACK)
    yield _twin(setup, net, sample)


def _of_tensor(fast: Captured, sample: Sample) -> Any:
    return fast(fresh(sample))


def _twin(setup: Setup, net: nn.Module, sample: Sample) -> Way:
    sides: list[Side] = []

    def make() -> Callable[[], Any]:
        sides.append(Side.spconv(net, sample))
        side = sides[0]
        return torch.no_grad()(lambda: side.net(side.tensor()))

    slack = SLACK * (2.0 if setup.device.type == "cuda" else spconv_peer.slack(setup.device))
    return Way(SPCONV, make, spconv_peer.package(), lambda y: sides[0].result(y), slack)


CAPTURED, EAGER, SPCONV = "captured", "eager", "spconv"
OURS_EAGER = "our eager pass"
"""The peer name of our eager pass in rows of captured ways."""


@dataclass(frozen=True)
class Timed:
    """The correct ways of one scene. mode: inference or training; check: called after timing."""

    setup: Setup
    scene: str
    mode: str
    ways: Sequence[Ready]
    known: Known | None
    check: Callable[[], None] = lambda: None

    @property
    def case(self) -> str:
        return case_of(self.setup, self.scene, self.mode)

    @property
    def ours(self) -> list[Ready]:
        return [way for way in self.ways if way.name != SPCONV]

    def rows(self, clock: str) -> Iterator[Row]:
        """A row for each of our ways and peers by this clock."""
        times = spent(self.setup, self.case, clock, self.ways, _SECONDS[self.mode] * self.setup.seconds)
        if not times:
            return
        if self.known and clock == "wall":
            goals = (_goal(self.known, way.name, times[way.name].median) for way in self.ours)
            self.setup.say("  " + ", ".join(goals))
        self.check()
        for way in self.ours:
            for peer in self._peers(way, clock, times):
                yield self.setup.row(f"{self.case}/{way.name}", times[way.name], clock, peer)

    def _peers(self, way: Ready, clock: str, times: Mapping[str, Times]) -> Iterator[Peer]:
        if SPCONV in times:
            yield Peer(SPCONV, times[SPCONV].median, package=spconv_peer.package())
        if EAGER in times and way.name != EAGER:
            yield Peer(OURS_EAGER, times[EAGER].median)
        if self.known and clock == "wall" and self.setup.device.type == "cuda":
            yield from self.known.peers(way.name == EAGER)
        if way.name == EAGER and SPCONV not in times:
            yield Peer("itself", times[EAGER].median)


def _goal(known: Known, way: str, value: float) -> str:
    best, goal = known.peers(way == EAGER)
    met = "met" if value <= goal.value else "NOT met"
    return f"{way}: goal {goal.value:g} {met}, best recorded peer {best.value:g} ({best.value / value:.2f}x)"


def case_of(setup: Setup, scene: str, mode: str) -> str:
    """The case name of a scene, without the way."""
    tuned = "/tuned" if setup.thorough else ""
    return f"{'tiny/' * setup.quick}{scene}/{DTYPES[setup.half]}/{mode}{tuned}"


def in_time(setup: Setup, samples: Iterator[Sample], mode: str) -> Iterator[Sample]:
    """The wanted samples, skipping any once less time is left than the longest sample took."""
    longest = 0.0
    for sample in samples:
        if not any(setup.wants(f"{case_of(setup, sample.name, mode)}/{way}") for way in (CAPTURED, EAGER)):
            continue
        if longest and setup.left < longest:
            setup.say(f"{sample.name} is left out: {max(0.0, setup.left):.0f} s are left, and one took {longest:.0f}")
            continue
        begin = time.perf_counter()
        yield sample
        took = time.perf_counter() - begin
        setup.say(f"{sample.name}: {took:.1f} s in all")
        longest = max(longest, took)


@dataclass
class Reached:
    """Speedups of our ways over peers: by way, peer and clock, then by scene."""

    ratios: dict[tuple[str, str, str], dict[str, float]] = field(default_factory=dict)

    def add(self, made: Row) -> None:
        wanted = made.peer_source == SAME_RUN or (made.peer_source == RECORDED and made.peer == BEST)
        if wanted and made.value > 0 and made.peer != "itself":
            scene = made.case.removeprefix("tiny/").partition("/")[0]
            way = made.case.rpartition("/")[2]
            self.ratios.setdefault((way, made.peer, made.clock), {})[scene] = made.ratio

    def of(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Add rows and pass them on."""
        for made in rows:
            self.add(made)
            yield made

    def tell(self, setup: Setup) -> None:
        for (way, peer, clock), found in self.ratios.items():
            setup.say(f"{way} over {peer}, {clock}: {mean_told(found)}")


def by_scene(
    setup: Setup, samples: Iterator[Sample], mode: str, one: Callable[[Setup, Sample], Timed | None]
) -> Iterator[Row]:
    """The rows of every wanted sample for which there is time; then report the speedups.

    All samples are timed by the wall clock first: after a profiler's trace, which measures device time, each graph
    launch takes 0.07 to 0.1 ms more in that process (H200, CUDA 13).
    """
    found, timed, (first, *others) = Reached(), [], clocks(setup.device)
    for sample in in_time(setup, samples, mode):
        ready = one(setup, sample)
        if ready is not None:
            timed.append(ready)
            yield from found.of(ready.rows(first))
        recover(setup)
    for ready in timed:
        for clock in others:
            yield from found.of(ready.rows(clock))
    found.tell(setup)


BATCH = 2
RATE = 1e-8 / LOSS
_SLACKS = (4.0, 80.0)
"""Factors on the tolerance of the dtype: for results, and for all gradients together (workloads.Mode)."""
_ON_CPU = (1.0, 100.0)
Step = Callable[[], Any]
"""Returns the network's result, or the loss of a captured step; leaves gradients in the parameters."""


def training(setup: Setup) -> Iterator[Row]:
    """Every wanted scene: whole training steps on batches of two, eager and captured.

    A step: a new tensor, forward in mixed precision (float16 autocast), a loss over all voxels, backward, SGD. Results
    and gradients of the first step are compared with those of torch's products, in float64, or on a GPU in float32 for
    lack of memory; a captured step returns no result, so its loss is compared. The learning rate is so small that the
    network timed remains the one checked.
    """
    return by_scene(setup, scenes(setup, TRAINING, BATCH), "training", _trained)


def _trained(setup: Setup, sample: Sample) -> Timed | None:
    setup.say(f"{sample.name}: {len(sample)} voxels in {sample.batch} items")
    net = net_for(setup, sample).train()
    truths = _truths(net, sample)
    ways = [one for one in (_checked(setup, way, sample, net, truths) for way in WAYS) if one]
    if all(way.name != EAGER for way in ways):
        return None
    known = TRAINING.get(sample.name)
    return Timed(setup, sample.name, "training", ways, known)


def _truths(net: nn.Module, sample: Sample) -> dict[str, Any]:
    """Result, loss and gradients of an exact step."""
    dtype = torch.float32 if sample.coords.is_cuda else torch.float64
    side = Side.ours(exact_copy(net, dtype), replace(sample, feats=sample.feats.to(dtype)))
    y = step_of(side, mixed=False)()
    return {"result": side.result(y), "loss": loss_of(y.feats).detach(), "gradients": side.gradients(y)}


VIEWS: Mapping[str, Callable[[Side, Any], Any]] = {
    "result": lambda side, y: side.result(y),
    "loss": lambda side, value: value,
    "gradients": lambda side, y: side.gradients(y),
}
"""What to compare, as functions of a side and the value of its step. result: (feats, coords) sorted by coordinates."""


def _checked(setup: Setup, way: str, sample: Sample, net: nn.Module, truths: Mapping[str, Any]) -> Ready | None:
    sides: list[Side] = []

    def make() -> Step:
        made, step = WAYS[way](setup, copy.deepcopy(net), sample)
        sides.append(made)
        return step

    package, lent = "", 1.0
    if way == SPCONV:
        package, lent = spconv_peer.package(), spconv_peer.slack(setup.device)
    slacks = _SLACKS if setup.device.type == "cuda" else _ON_CPU
    case = case_of(setup, sample.name, "training")
    names = ("loss" if way == CAPTURED else "result", "gradients")
    cases = [
        (
            Case(case, setup.half, truths[name]),
            Way("", make, view=lambda y, name=name: VIEWS[name](sides[0], y), slack=slack * lent),
        )
        for name, slack in zip(names, slacks, strict=True)
    ]
    return checked(setup, Way(way, make, package), cases, ours=not package)


def _eager(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side = Side.ours(net, sample)
    return side, by_choice(setup, step_of(side, setup.device.type == "cuda", _sgd(net)))


def _spconv(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side = Side.spconv(net, sample)
    return side, step_of(side, setup.device.type == "cuda", _sgd(side.net))


def _captured(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side, device = Side.ours(net, sample), setup.device.type
    begin = time.perf_counter()
    with torch.autocast(device, torch.float16, enabled=device == "cuda"):
        made = partial(capture_step, net, _mean_loss, _sgd(net), side.tensor(), max_voxels=len(sample))
        fast = by_choice(setup, made)()
    setup.say(f"  captured in {time.perf_counter() - begin:.1f} s")
    return side, lambda: fast(side.tensor())


def _mean_loss(y: Any) -> Tensor:
    """The mean loss over valid voxels."""
    return LOSS * row_mean(y, y.feats.float().logsumexp(1))


WAYS: Mapping[str, Callable[[Setup, nn.Module, Sample], tuple[Side, Step]]] = {
    EAGER: _eager,
    CAPTURED: _captured,
    SPCONV: _spconv,
}
"""By way, the function that makes the side and the step of a network, which it owns."""


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), RATE)
