"""Questions to the tuner, as studies ask them, and its answers as rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
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
"""Seconds that the tuner has for a network."""
THOROUGH = 120.0
"""The same in a thorough run, which has tiles timed, too: what pm.tune takes by itself."""
_QUICK = 1.5
_LEAST = 3.0
COMPARED = 30.0
"""Seconds of a study with a limit that are kept for checking and timing what was tuned: on an H200, kernels compiled
anew."""
PLANNED = "planned"
"""How a row calls what the planner picks."""


@dataclass(frozen=True)
class Asked:
    """What may be tried, by name; empty: what the tuner thinks worth it. bind: of training. tiles: time them, too.

    always: every group takes the best that was tried, also where what the planner picks is faster.
    """

    candidates: tuple[str, ...] = ()
    bind: str | None = None
    tiles: bool = False
    always: bool = False


@dataclass(frozen=True, eq=False)
class Answer:
    """What the tuner found, how long it took, in seconds, what each layer then runs by its name, and the network."""

    tuning: Tuning
    seconds: float
    flows: Mapping[str, Flow]
    ran: Ran

    def rows(self, write: Writer, way: str, longest: float | None = None) -> Iterator[Row]:
        """How long it took, against the longest that it may; of each group what was tried and what was chosen."""
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
        """What a group runs, in words."""
        flow = self.flows.get(choice.layers[0])
        return PLANNED if flow is None else str(flow)


def answered(setup: Setup, network: Network, asked: Asked, within: float = math.inf) -> Answer:
    """Ask the tuner; nothing that was kept is taken, and nothing is kept but tiles. The network is left untuned.

    within: seconds that it has at most.
    """
    begin = time.perf_counter()
    with use_tuning_mode(LEDGER if asked.tiles else DEFAULT), network.precision():
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
    flows = _best_tried(tuning) if asked.always else tuning.flows
    ran = network.each_in(flows)
    return Answer(tuning, took, flows, ran.with_tuned_tiles() if asked.tiles else ran)


def differing(here: Answer, there: Answer) -> list[str]:
    """The groups of layers for which two answers differ."""
    others = {choice.group: there.of(choice) for choice in there.tuning.choices}
    both = [(own.group, here.of(own), others.get(own.group, "")) for own in here.tuning.choices]
    return [f"{group}: {own} natively, {other} from there" for group, own, other in both if other not in ("", own)]


def budget(setup: Setup, asks: int = 1, kept: float = COMPARED) -> float:
    """Seconds for the first of so many questions in a study with a limit; kept: what is left for all else.

    The first has most: it compiles what the others find.
    """
    return max(_LEAST, (setup.left - kept) * 2 / (asks + 1))


def _budget(setup: Setup) -> float:
    if setup.quick:
        return _QUICK
    return THOROUGH if setup.thorough else BUDGET


def _without_tiles(step: SearchProgress) -> None:
    """What is asked is which dataflow; an interrupt keeps what was found."""
    if step.candidate == "tiles":
        raise KeyboardInterrupt


def _best_tried(tuning: Tuning) -> Mapping[str, Flow]:
    """The fastest candidate of every group, by the names of its layers."""
    found: dict[str, Flow] = {}
    for choice in tuning.choices:
        best = _fastest(choice)
        if best is not None:
            found.update(dict.fromkeys(choice.layers, best.flow))
    return found


def _fastest(choice: DataflowChoice) -> Trial | None:
    ran = [trial for trial in choice.trials if math.isfinite(trial.seconds)]
    return min(ran, key=lambda trial: trial.seconds / trial.stood, default=None)


def _passes(trial: Trial) -> str:
    return "" if len(trial.passes) == 1 and trial.passes[0] == "forward" else f", {' with '.join(trial.passes)}"
