"""The studies `networks` and `transfer` of the suite `tuner`: what tuning brings, how long it takes, where it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Setup, goals_told
from benchmarks.scenes.workloads import WORKLOADS
from benchmarks.suites.tuner_asked import Asked, answered, budget, differing
from benchmarks.suites.tuner_cases import INFERENCE, TRAINING, Subjected, Writer, clock_of, say_published, subjects
from benchmarks.suites.tuner_networks import Network, scans_of
from benchmarks.suites.tuner_taken import CONVOLUTIONS, compared
from pumice.errors import OptionError

DEFAULT, TUNED, NATIVE = "default", "tuned", "native"
TRAINED = ("minkunet-nuscenes-1f",)
"""The networks whose training is tuned, too."""
GAIN = 1.05
"""How many times as fast tuned convolutions and maps are to be, in the geometric mean of the seven."""
NOISE = 1.02
LONGEST: Mapping[str, float] = MappingProxyType({"minkunet-kitti-1x": 120.0})
"""Seconds that tuning may take."""
APART = 1.05
"""How many times as long a network may take that was tuned on other scans."""
ABROAD: Mapping[str, str] = MappingProxyType(
    {
        "minkunet-kitti-1x": "minkunet-nuscenes-1f",
        "minkunet-nuscenes-1f": "minkunet-kitti-1x",
        "centerpoint-waymo-1f": "centerpoint-nuscenes-10f",
        "centerpoint-nuscenes-10f": "centerpoint-waymo-1f",
    }
)
"""Whose scans a network is tuned on in place of its own."""


@dataclass
class Gains:
    """By case default over tuned, and the cases that are slower tuned: by more than NOISE, and mostly."""

    ratios: dict[str, float] = field(default_factory=dict)
    slower: list[str] = field(default_factory=list)

    def note(self, row: Row) -> None:
        self.ratios[row.case] = row.peer_value / row.value
        if row.value > NOISE * row.peer_value and row.p20 > row.peer_value:
            self.slower.append(row.case)


def networks(setup: Setup) -> Iterator[Row]:
    """Every network untuned and tuned in inference, some in training too; how long tuning took, and what it chose.

    What is tuned are dataflows; in a thorough run, which takes two minutes a network, tiles as well.
    """
    say_published(setup, "networks")
    gains = Gains()
    inference = subjects(setup, "networks", tuple(WORKLOADS))
    for subject in chain(inference, subjects(setup, "networks", TRAINED, TRAINING)):
        for row in _network(setup, subject):
            if _judged(setup, row) and row.case == subject.case("networks", TUNED) and subject.mode == INFERENCE:
                gains.note(row)
            yield row
    goals_told(setup, "tuned over untuned, convolutions and maps", gains.ratios, GAIN)
    setup.say(f"slower tuned than untuned: {', '.join(gains.slower) or 'none'}")


def _judged(setup: Setup, row: Row) -> bool:
    """Whether a row has what goals are about: convolutions and maps on the device, or without one the wall."""
    return row.metric == (CONVOLUTIONS if setup.device.type == "cuda" else "time") and row.clock == clock_of(setup)


def _network(setup: Setup, subject: Subjected) -> Iterator[Row]:
    network, write = Network.of(setup, subject), Writer(setup, subject, "networks")
    answer = answered(setup, network, Asked(tiles=setup.thorough), budget(setup))
    ways = {DEFAULT: network.all_in(None), TUNED: answer.ran}
    yield from compared(write, network, ways, DEFAULT)
    yield from answer.rows(write, TUNED, LONGEST.get(subject.workload.name))


def transfer(setup: Setup) -> Iterator[Row]:
    """Every network tuned on its own scans and on another's, run on its own."""
    for subject in subjects(setup, "transfer", tuple(ABROAD)):
        say_published(setup, "transfer")
        yield from _transferred(setup, subject)


def _transferred(setup: Setup, subject: Subjected) -> Iterator[Row]:
    name = ABROAD[subject.workload.name]
    foreign = _with_scans_of(subject, name)
    try:
        scans = scans_of(setup, foreign)
    except OptionError as reason:
        setup.say(f"{name} is left out: {reason}")
        return
    network, write = Network.of(setup, subject), Writer(setup, subject, "transfer")
    native = answered(setup, network, Asked(), budget(setup, 2))
    abroad = answered(setup, replace(network, samples=scans), Asked(), budget(setup))
    way = f"from-{name}"
    ways = {NATIVE: native.ran, way: abroad.ran, DEFAULT: network.all_in(None)}
    rows = list(compared(write, network, ways, NATIVE))
    yield from rows
    groups = differing(native, abroad)
    yield write.counted(way, "fact:groups that differ", len(groups), "groups")
    for row in rows:
        if _judged(setup, row) and row.case == subject.case("transfer", way):
            _say_apart(setup, row, groups)
    for held, answer in ((NATIVE, native), (way, abroad)):
        yield from answer.rows(write, held)


def _with_scans_of(subject: Subjected, name: str) -> Subjected:
    """The subject with the scans of another workload, voxelised as it does."""
    other = WORKLOADS[name]
    scans = subject.workload.scans if subject.workload.generated else other.scans
    workload = replace(subject.workload, name=name, scans=scans, grid=other.grid)
    return replace(subject, workload=workload)


def _say_apart(setup: Setup, row: Row, groups: Sequence[str]) -> None:
    apart = row.value / row.peer_value
    verdict = "met" if apart <= APART else f"NOT met; groups that differ: {'; '.join(groups)}"
    setup.say(f"goal {row.case}: at most {APART:.2f} times as long as tuned natively: {apart:.3f}: {verdict}")
