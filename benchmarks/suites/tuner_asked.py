"""Runs of the tuner for studies, and their results as rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.scenes.workloads import fresh
from benchmarks.suites.tuner_cases import ITSELF, Writer
from benchmarks.suites.tuner_networks import Network, Ran
from pumice.engine import DataflowChoice, Trial, Tuning, tune
from pumice.lower.kernel import DEFAULT, LEDGER, use_tuning_mode
from pumice.ops.conv import Flow
from pumice.schedule.tuner import SearchProgress

BUDGET = 60.0
"""Seconds of tuning per network."""
THOROUGH = 120.0
"""The same in a thorough run, which also times tiles."""
_QUICK = 1.5
_LEAST = 3.0
COMPARED = 30.0
"""Seconds of a study's limit reserved for checking and timing tuned networks, including compilation (on an H200)."""
PLANNED = "planned"
"""The name in rows of the planner's choice."""


@dataclass(frozen=True)
class Asked:
    """Options of a tuner run. candidates: names of dataflows to try; empty: the tuner's default. bind: as for training
    in pm.tune. tiles: also time tiles. always: every group takes the best candidate tried, even if the planner's choice
    is faster.
    """

    candidates: tuple[str, ...] = ()
    bind: str | None = None
    tiles: bool = False
    always: bool = False


@dataclass(frozen=True, eq=False)
class Answer:
    """The tuner's result, its seconds, the dataflow of each layer by name, and the network's way of running."""

    tuning: Tuning
    seconds: float
    flows: Mapping[str, Flow]
    ran: Ran

    def rows(self, write: Writer, way: str, longest: float | None = None) -> Iterator[Row]:
        """Tuning time against its goal `longest`, and for each group the candidates tried and the choice."""
        goal = Peer("goal", longest, "goal") if longest else Peer(ITSELF, self.seconds)
        took = "tuning" if self.tuning.finished else "tuning, cut short"
        yield write.row(way, self.seconds, "wall", goal, took, "s")
        own = [one for one in self.tuning.choices if self.of(one) != PLANNED]
        groups = Peer("all groups", len(self.tuning.choices))
        if not self.tuning.finished:
            reached = sum(one.asked for one in self.tuning.choices)
            yield write.counted(way, "fact:groups asked", reached, "groups", groups)
        yield write.counted(way, "fact:groups not as planned", len(own), "groups", groups)
        before, after = 1e3 * self.tuning.before.total, 1e3 * self.tuning.after.total
        for choice in self.tuning.choices:
            place = f"{way}/{choice.group}"
            for trial in choice.trials:
                if math.isfinite(trial.seconds):
                    peer, metric = Peer(PLANNED, 1e3 * trial.stood), f"choice:{trial.flow}"
                    yield write.timed(f"{place}{_passes(trial)}", 1e3 * trial.seconds, peer, metric)
            yield write.timed(place, after, Peer(PLANNED, before), f"chosen:{self.of(choice)}")

    def of(self, choice: DataflowChoice) -> str:
        """The dataflow of a group as text."""
        flow = self.flows.get(choice.layers[0])
        return PLANNED if flow is None else str(flow)


def answered(setup: Setup, network: Network, asked: Asked, within: float = math.inf) -> Answer:
    """Run the tuner without earlier results and without saving any but tiles; the network is left untuned.

    within: maximum seconds.
    """
    begin = time.perf_counter()
    with use_tuning_mode(LEDGER if asked.tiles else DEFAULT), network.autocast(), network.subject.multiplying():
        tuning = tune(
            network.net,
            [fresh(sample) for sample in network.samples],
            network.subject.mode,
            min(within, _budget(setup)),
            bind=asked.bind,
            candidates=asked.candidates or None,
            fresh=True,
            save=False,
            progress=(lambda step: None) if asked.tiles else _without_tiles,
        )
    took = time.perf_counter() - begin
    tuning.remove(network.net)
    setup.say("\n".join(f"  {line}" for line in str(tuning).splitlines()))
    flows = _best_tried(tuning, asked.candidates) if asked.always else tuning.flows
    ran = network.each_in(flows)
    return Answer(tuning, took, flows, ran.with_tuned_tiles() if asked.tiles else ran)


def differing(here: Answer, there: Answer) -> list[str]:
    """Descriptions of the groups of layers for which two answers differ."""
    others = {choice.group: there.of(choice) for choice in there.tuning.choices}
    both = [(own.group, here.of(own), others.get(own.group, "")) for own in here.tuning.choices]
    return [f"{group}: {own} natively, {other} from there" for group, own, other in both if other not in ("", own)]


def budget(setup: Setup, asks: int = 1, kept: float = COMPARED) -> float:
    """Seconds for the next of `asks` tuner runs in a study with a limit. kept: seconds reserved for other work.

    The first run gets most, since it compiles kernels that the others reuse.
    """
    return max(_LEAST, (setup.left - kept) * 2 / (asks + 1))


def _budget(setup: Setup) -> float:
    if setup.quick:
        return _QUICK
    return THOROUGH if setup.thorough else BUDGET


def _without_tiles(step: SearchProgress) -> None:
    """Interrupt the tuner before it times tiles; the dataflows found so far are kept."""
    if step.candidate == "tiles":
        raise KeyboardInterrupt


def _best_tried(tuning: Tuning, candidates: Sequence[str]) -> Mapping[str, Flow]:
    """By layer name, the fastest of the candidates of its group."""
    found: dict[str, Flow] = {}
    for choice in tuning.choices:
        ratios = {trial.flow: trial.seconds / trial.stood for trial in choice.trials if math.isfinite(trial.seconds)}
        # Against the planner's choice only what a group began with, which the others are compared with, is not tried.
        if ratios.pop(PLANNED, None) is not None:
            ratios |= dict.fromkeys({*candidates}.difference(trial.flow for trial in choice.trials), 1.0)
        if ratios:
            found.update(dict.fromkeys(choice.layers, min(ratios, key=lambda flow: ratios[flow])))
    return found


def _passes(trial: Trial) -> str:
    return "" if len(trial.passes) == 1 and trial.passes[0] == "forward" else f", {' with '.join(trial.passes)}"
