"""The suite `workloads`: whole networks on scans, inference and training, beside spconv in the same run.

A call makes a new tensor and runs the network, including kernel maps. Both libraries run eagerly, with nothing folded,
from the same weights; before timing, results are compared with a float64 run of our network by plain gathers and
products.

A case repeats one scan, so everything cached for known sizes serves every call. In half-precision inference (float32 on
a CPU) the network also runs over several scans in turn, all of them checked; the metric is then VARIED, and the case
names the scans, as in minkunet-nuscenes-1f/fp16/inference/over-2-scans-5-turned (scenes.workloads.varied).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.families import PEAK, VARIED
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Ready, Setup, Way, by_choice, goals_told, mean_told
from benchmarks.harness.whole import checked, compared, in_tf32
from benchmarks.peers import spconv as spconv_peer
from benchmarks.peers import spconv_nets
from benchmarks.scenes.workloads import (
    WORKLOADS,
    Sample,
    Workload,
    exact_copy,
    fresh,
    narrow,
    network,
    samples,
    stand_in,
    varied,
)
from pumice.errors import OptionError

TINY = 150  # maximum voxels of a scan in a quick run
SCANS = 7
"""Number of scans run in turn, at most the minimum runs of a clock, so that each is timed."""
LOSS = 2.0**10
"""Scale of the loss, as a gradient scaler's: gradients of a mean over all voxels underflow in float16."""


@dataclass(frozen=True)
class Mode:
    """A mode of running networks. dtype: of products. batch: scans. tf32: multiply float32 as tf32. varied: also run
    over several scans.

    slack: factors on the tolerance of the dtype, for the result and, in training, for all gradients together. On crops
    of 4,000 voxels float16 had errors of 0.2 to 0.9 percent in results and 8 to 12 in gradients, accumulated over tens
    of norms; real mistakes cause tens of percent or 100.
    """

    name: str
    dtype: torch.dtype
    training: bool = False
    tf32: bool = False
    batch: int = 1
    slack: tuple[float, ...] = (1.0,)
    varied: bool = False

    @property
    def label(self) -> str:
        """fp16, tf32 or fp32."""
        return self.name.partition("/")[0]

    @property
    def kept(self) -> torch.dtype:
        """The dtype of weights and features, which is float32 in mixed precision."""
        return torch.float32 if self.training else self.dtype


ON_GPU = (
    Mode("fp16/inference", torch.float16, slack=(4.0,), varied=True),
    Mode("tf32/inference", torch.float32, tf32=True, slack=(200.0,)),
    Mode("fp32/inference", torch.float32),
    Mode("fp16/training", torch.float16, training=True, batch=2, slack=(4.0, 80.0)),
)
ON_CPU = (
    Mode("fp32/inference", torch.float32, varied=True),
    Mode("fp32/training", torch.float32, training=True, batch=2, slack=(1.0, 100.0)),
)
GOALS: Mapping[tuple[str, str], float] = {
    ("fp16/inference", "wall"): 2.0,
    (f"fp16/inference, {VARIED}", "wall"): 2.0,
    ("fp16/training", "wall"): 1.5,
}
"""Goals for the speedup over spconv, geometric mean over the networks."""

RECORDED: Mapping[str, tuple[Peer, ...]] = {
    "minkunet-nuscenes-1f/fp16/inference": (
        Peer("spconv 2.3.8", 13.5, "recorded"),
        Peer("torchsparse 2.1", 11.8, "recorded"),
        Peer("warpconvnet 1.8.1", 37.6, "recorded"),
    )
}
"""Wall milliseconds on an H200, 2026-11-20, torch 2.11: the same sweep, voxelized by floor (17,856 voxels, not 17,890).

spconv's time then and now indicates how to scale the other figures.
"""


@dataclass(frozen=True, eq=False)
class Side:
    """A library's network, a function that makes its input, and accessors of the result's features and coordinates.

    With several samples, each call makes the next one.
    """

    net: nn.Module
    tensor: Callable[[], Any]
    feats: Callable[[Any], Tensor]
    coords: Callable[[Any], Tensor]

    @staticmethod
    def ours(net: nn.Module, *given: Sample) -> Side:
        made = [partial(fresh, sample) for sample in given]
        return Side(net, _in_turn(made), lambda y: y.feats, lambda y: y.coords)

    @staticmethod
    def spconv(net: nn.Module, *given: Sample) -> Side:
        made = [spconv_nets.tensor_maker(sample) for sample in given]
        return Side(spconv_nets.twin(net), _in_turn(made), lambda y: y.features, lambda y: y.indices)

    def result(self, y: Any) -> tuple[Tensor, Tensor]:
        """Features and coordinates sorted by coordinates, since libraries order new voxels differently."""
        coords = self.coords(y).long()
        order = (((coords[:, 0] << 15 | coords[:, 1]) << 15 | coords[:, 2]) << 15 | coords[:, 3]).argsort()
        return self.feats(y).detach()[order], coords[order].double()

    def gradients(self, y: Any) -> Tensor:
        """Gradients of all parameters in order, as one float64 vector."""
        return torch.cat([p.grad.flatten().double() for p in self.net.parameters() if p.grad is not None])


def _in_turn(makers: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turns = cycle(makers)
    return lambda: next(turns)()


Truth = tuple[Callable[[Side, Any], Any], Any, float]
"""A view of a result, its reference value, and the factor on the tolerance of the dtype."""
_VIEWS = (lambda side, y: side.result(y), lambda side, y: side.gradients(y))


@dataclass
class Found:
    """Speedups over spconv by mode and clock, then by workload."""

    ratios: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def add(self, mode: Mode, workload: Workload, made: Row) -> None:
        if made.peer_source == "same run" and made.metric != PEAK:
            name = f"{mode.name}, {VARIED}" if made.metric == VARIED else mode.name
            self.ratios.setdefault((name, made.clock), {})[workload.name] = made.ratio

    def tell(self, setup: Setup) -> None:
        for (mode, clock), ratios in self.ratios.items():
            name = f"{mode} over spconv, {clock}"
            if (mode, clock) in GOALS and not setup.quick:
                goals_told(setup, name, ratios, GOALS[mode, clock])
            else:
                setup.say(f"{name}: {mean_told(ratios)}")


def networks(setup: Setup, given: Mapping[str, Workload] = WORKLOADS, batch: int = 2) -> Iterator[Row]:
    """Every network in every mode; batch: scans per training step."""
    found = Found()
    modes = ON_GPU if setup.device.type == "cuda" else ON_CPU
    for workload in given.values():
        begin = time.perf_counter()
        wanted = [replace(m, batch=batch) if m.training else m for m in modes if setup.wants(_case(setup, workload, m))]
        chosen = _at_hand(setup, workload) if wanted else None
        if chosen is None:
            continue
        net = network(narrow(chosen) if setup.quick else chosen, _samples(setup, chosen, torch.float32, 1))
        for mode in wanted:
            for made in _mode(setup, chosen, mode, net):
                found.add(mode, chosen, made)
                yield made
        setup.say(f"{workload.name}: {time.perf_counter() - begin:.1f} s in all")
    found.tell(setup)


def _case(setup: Setup, workload: Workload, mode: Mode) -> str:
    """The name of a case, with marks for tiny, generated and tuned ones."""
    marks = ("generated", workload.generated), ("tuned", setup.thorough)
    tiny = "tiny/" if setup.quick else ""
    return tiny + "/".join([workload.name, mode.name, *(mark for mark, so in marks if so)])


def _at_hand(setup: Setup, workload: Workload) -> Workload | None:
    """The workload if its scans are available, else in a quick run one with generated scans, or None."""
    try:
        first = _samples(setup, workload, torch.float32, 1)
    except OptionError as reason:
        if setup.quick:
            setup.say(f"{workload.name}: generated streets, for {reason}")
            return stand_in(workload)
        setup.say(f"{workload.name} is left out: {reason}")
        return None
    generated = ", generated" if workload.generated else ""
    setup.say(f"{workload.name}: {len(first)} voxels of {first.name}{generated} ({workload.source})")
    return workload


def _samples(setup: Setup, workload: Workload, dtype: torch.dtype, batch: int) -> Sample:
    """The first sample of `batch` scans."""
    return samples(workload, setup.device, dtype, batch, count=1, most=TINY if setup.quick else 0)[0]


def _mode(setup: Setup, workload: Workload, mode: Mode, net: nn.Module) -> Iterator[Row]:
    """The rows of a network in one mode, checked and timed, and of recorded peers."""
    case, sample = _case(setup, workload, mode), _samples(setup, workload, mode.kept, mode.batch)
    own = copy.deepcopy(net).to(mode.kept).train(mode.training)
    truths = list(zip(_VIEWS, _truths(own, sample, mode), mode.slack, strict=False))
    failed = len(setup.failures)
    rows = list(_against_spconv(setup, mode, (case, "time"), own, truths, sample))
    yield from rows
    on_wall = [made for made in rows if made.clock == "wall"][:1]
    for peer in RECORDED.get(case, ()) if setup.device.type == "cuda" else ():
        setup.say(f"  recorded on an H200, the same sweep by floor: {peer.name} {peer.value} ms")
        yield from (replace(made, peer=peer.name, peer_value=peer.value, peer_source=peer.source) for made in on_wall)
    if mode.varied and len(setup.failures) == failed:
        yield from _over_scans(setup, workload, mode, case, own)


def _against_spconv(
    setup: Setup, mode: Mode, about: tuple[str, str], net: nn.Module, truths: Sequence[Truth], *given: Sample
) -> Iterator[Row]:
    """Both libraries' calls over these samples in turn, checked and timed; no rows if ours is wrong.

    about: case and metric.
    """
    case, metric = about
    ours = _checked(setup, mode, case, truths, partial(Side.ours, net, *given))
    if ours is None:
        return
    theirs = _checked(setup, mode, case, truths, partial(Side.spconv, net, *given), spconv_peer.package())
    yield from compared(setup, case, ours, [theirs] if theirs else [], metric=metric, dtype=mode.label)


def _over_scans(setup: Setup, workload: Workload, mode: Mode, case: str, net: nn.Module) -> Iterator[Row]:
    """The network over several scans in turn, each of them checked."""
    real = samples(workload, setup.device, mode.kept, count=SCANS, most=TINY if setup.quick else 0)
    given = varied(real, SCANS)
    turned = f"-{SCANS - len(real)}-turned" if len(real) < SCANS else ""
    plural = "s" if len(real) > 1 else ""
    case = f"{case}/over-{len(real)}-scan{plural}{turned}"
    truths = [(Side.result, _truths(net, one, mode)[0], mode.slack[0]) for one in given]
    sizes = [len(one) for one in given]
    setup.say(f"  {case}: {min(sizes)} to {max(sizes)} voxels")
    yield from _against_spconv(setup, mode, (case, VARIED), net, truths, *given)


def _truths(net: nn.Module, sample: Sample, mode: Mode) -> list[Any]:
    """The result in float64, sorted by coordinates, and in training all gradients."""
    side = Side.ours(exact_copy(net), replace(sample, feats=sample.feats.double()))
    y = _call(side, replace(mode, dtype=torch.float64, tf32=False))()
    return [side.result(y), side.gradients(y)] if mode.training else [side.result(y)]


def _checked(
    setup: Setup, mode: Mode, case: str, truths: Sequence[Truth], make: Callable[[], Side], package: str = ""
) -> Ready | None:
    """One library's call, or None if it is wrong or fails. It is called once per truth, in order."""
    sides: list[Side] = []

    def call() -> Callable[[], Any]:
        sides.append(make())
        run = _call(sides[0], mode)
        if not package:
            run = by_choice(setup, run)
        elif mode.tf32:
            run = spconv_peer.in_tf32(run, _tf32_tuner())
        return in_tf32(run) if mode.tf32 else run

    lent = (2.0 if setup.device.type == "cuda" else spconv_peer.slack(setup.device)) if package else 1.0
    cases = [
        (Case(case, mode.dtype, truth), Way("", call, view=lambda y, view=view: view(sides[0], y), slack=slack * lent))
        for view, truth, slack in truths
    ]
    way = Way("spconv" if package else "pumice", call, package)
    return checked(setup, way, cases, ours=not package)


@lru_cache(maxsize=1)
def _tf32_tuner() -> Any:
    """One tuner for all networks, as spconv's own serves all networks of a dtype."""
    return spconv_peer.new_tuner()


def _call(side: Side, mode: Mode) -> Callable[[], Any]:
    if mode.training:
        return step_of(side, mode.dtype == torch.float16)
    return torch.no_grad()(lambda: side.net(side.tensor()))


def loss_of(feats: Tensor) -> Tensor:
    """A loss over all voxels."""
    wide = feats if feats.dtype == torch.float64 else feats.float()
    return LOSS * wide.logsumexp(1).mean()


def step_of(side: Side, mixed: bool, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], Any]:
    """A call of forward, backward and, if given, the optimizer's step. mixed: under float16 autocast."""
    device = next(side.net.parameters()).device.type

    def step() -> Any:
        side.net.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.float16, enabled=mixed):
            y = side.net(side.tensor())
        loss_of(side.feats(y)).backward()
        if optimizer is not None:
            optimizer.step()
        return y

    return step
