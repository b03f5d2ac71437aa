"""The studies of the suite `tuner` that compare ways of running a network, and whole networks tuned and untuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Setup, goals_told
from benchmarks.scenes.network_layers import Met, layers_of
from benchmarks.scenes.workloads import WORKLOADS, fresh
from benchmarks.suites.tuner_asked import COMPARED, Answer, Asked, answered, budget, differing
from benchmarks.suites.tuner_cases import INFERENCE, TRAINING, Subjected, Writer, say_published, subjects
from benchmarks.suites.tuner_networks import Network, scans_of
from benchmarks.suites.tuner_passes import CONVOLUTIONS, by_layer, compared, tile_facts, tiles_of
from pumice.errors import OptionError
from pumice.lower.kernel import DEFAULT as DEFAULT_TILES
from pumice.schedule.dataflow import split_dataflow

NETWORKS = ("minkunet-kitti-1x", "minkunet-nuscenes-1f", "centerpoint-waymo-1f")
"""Segmentation on a large and on a small scan, and detection."""
DETECTION = ("centerpoint-waymo-1f", "centerpoint-nuscenes-10f")
PRECISIONS = ("half", "tf32", "fp32")
IMPLICIT = tuple(split_dataflow(n).name for n in range(5))
"""The dataflows with 0 to 4 splits."""
ONLINE = "implicit-gemm-online"
WEIGHT_STATIONARY = (
    "gather-gemm-scatter-fused-adaptive",
    "gather-gemm-scatter-locality-aware-adaptive",
    "fetch-on-demand",
)
"""Gather-scatter and fetch-on-demand dataflows."""
_SUM = 4
"""Bytes of an element of a float32 sum, which is read and written."""

SORTED: Mapping[str, int] = {"no": 0, "yes": 1, "split2": 2}
"""By way, the number of splits of sorted rows in all layers."""
SPLITS: Mapping[str, tuple[int, ...]] = {"1": (1,), "1-2": (1, 2), "0-4": (0, 1, 2, 3, 4)}
"""By way, the numbers of splits among which the tuner chooses for each group of layers."""
BOUND: Mapping[str, str] = {"forward-dgrad": "forward with dgrad", "dgrad-wgrad": "dgrad with wgrad", "all": "all"}
"""By way, the passes of a layer that share a dataflow, in the tuner's names."""
GAINS: Mapping[str, str | None] = {
    "1-gather-gemm-scatter": "gather-gemm-scatter-vectorised-separate",
    "2-grouped": "gather-gemm-scatter-vectorised-adaptive",
    "3-fused": "gather-gemm-scatter-fused-adaptive",
    "4-locality-aware": "gather-gemm-scatter-locality-aware-adaptive",
    "5-fetch-on-demand": "fetch-on-demand",
    "6-implicit-unsorted": IMPLICIT[0],
    "7-implicit-sorted": IMPLICIT[1],
    "8-generator-alone": None,
}
"""Dataflows of all layers, from the plainest on; None: the planner's choice, which is sorted rows without splits."""
ENLARGED: Mapping[str, tuple[str, ...]] = {
    "9-more-splits": IMPLICIT[1:],
    "10-unsorted-too": IMPLICIT,
    "11-fetch-on-demand-too": (*IMPLICIT, "fetch-on-demand"),
}
"""By way, what the tuner chooses from for each group of layers: the design space, enlarged step by step (figure 23)."""


_GAINED = 50.0
"""Seconds of a limit reserved for checking and timing `gains`, whose ways each have their own kernels."""


def splits(setup: Setup) -> Iterator[Row]:
    """The best of several numbers of splits for each group of layers, end to end; costs and benefits of splits."""
    asked = {name: Asked(tuple(IMPLICIT[n] for n in among)) for name, among in SPLITS.items()}
    for network, write in _begun(setup, "splits", NETWORKS, precisions=PRECISIONS):
        yield from _tuned(write, network, asked, "1")
        yield from tile_facts(write, _met(network), {f"all-{n}": n for n in range(len(IMPLICIT))})


def sorted_rows(setup: Setup) -> Iterator[Row]:
    """All layers over unsorted rows, over sorted rows, and over rows sorted in two splits."""
    for network, write in _begun(setup, "sorted", (*NETWORKS[:2], *DETECTION)):
        ways = {name: network.all_in(IMPLICIT[n]) for name, n in SORTED.items()}
        yield from compared(write, network, ways, "no")
        yield from tile_facts(write, _met(network), SORTED)


def hybrid(setup: Setup) -> Iterator[Row]:
    """Networks tuned over implicit GEMM only, over weight-stationary dataflows only, and over all; layer by layer."""
    asked = {
        "implicit-gemm": Asked(IMPLICIT),
        "weight-stationary": Asked(WEIGHT_STATIONARY, always=True),
        "all": Asked(),
    }
    for network, write in _begun(setup, "hybrid", NETWORKS, precisions=("half", "fp32")):
        answers = _answers(write, network, asked)
        yield from _of_answers(write, network, answers, "implicit-gemm")
        yield from by_layer(write, network, {name: one.ran for name, one in answers.items()})
        yield from _moved(write, _met(network))


def reordering(setup: Setup) -> Iterator[Row]:
    """All layers over rows reordered in the map (offline) and in the kernel (online), inference and training."""
    for mode in (INFERENCE, TRAINING):
        for network, write in _begun(setup, "reordering", (NETWORKS[0], NETWORKS[2]), mode, ("half", "fp32")):
            ways = {"offline": network.all_in(IMPLICIT[1]), "online": network.all_in(ONLINE)}
            yield from compared(write, network, ways, "online")


def bindings(setup: Setup) -> Iterator[Row]:
    """Training with the passes of a layer bound to one dataflow, in pairs or all three."""
    asked = {name: Asked(bind=bind) for name, bind in BOUND.items()}
    for network, write in _begun(setup, "bindings", NETWORKS, TRAINING):
        yield from _tuned(write, network, asked, "all")


def gains(setup: Setup) -> Iterator[Row]:
    """From plain gather-GEMM-scatter to the tuned network, step by step."""
    for network, write in _begun(setup, "gains", (NETWORKS[0], NETWORKS[2])):
        ways = {name: network.all_in(flow) for name, flow in GAINS.items()}
        asked = {name: Asked(flows) for name, flows in ENLARGED.items()}
        answers = _answers(write, network, {**asked, "12-tuned": Asked(tiles=setup.thorough)}, _GAINED)
        ways |= {name: replace(one.ran, tiles=DEFAULT_TILES) for name, one in answers.items()}
        if setup.thorough:
            ways["13-with-tuned-tiles"] = answers["12-tuned"].ran
        yield from compared(write, network, ways, next(iter(GAINS)))
        for name, one in answers.items():
            yield from one.rows(write, name)


def _moved(write: Writer, layers: Sequence[Met]) -> Iterator[Row]:
    """Bytes of features between kernels and the L2: rows gathered for tiles, or for pairs with sums kept in memory."""
    size = torch.finfo(write.subject.dtype).bits // 8
    redundancy, _ = tiles_of(layers, 1)
    tiled = sum(size * (redundancy * one.pairs * one.inputs + one.found.num_outputs * one.outputs) for one in layers)
    added = sum(one.pairs * (size * one.inputs + 2 * _SUM * one.outputs) for one in layers)
    for way, volume in (("implicit-gemm", tiled), ("weight-stationary", added)):
        yield write.counted(way, "fact:bytes of features", 1e-9 * volume, "GB")
        write.setup.say(f"  {way}: {1e-9 * volume:.3g} GB of features to and from the L2")


def _begun(
    setup: Setup, study: str, names: Sequence[str], mode: str = INFERENCE, precisions: Sequence[str] = PRECISIONS[:1]
) -> Iterator[tuple[Network, Writer]]:
    """The networks of a study, each with the writer of its rows."""
    for subject in subjects(setup, study, names, mode, precisions):
        say_published(setup, study)
        yield Network.of(setup, subject), Writer(setup, subject, study)


def _met(network: Network) -> list[Met]:
    return layers_of(network.net, fresh(network.samples[0]))


def _tuned(write: Writer, network: Network, asked: Mapping[str, Asked], against: str) -> Iterator[Row]:
    """Tune the network with each set of options, compare the results, and yield rows of the tuner's choices."""
    yield from _of_answers(write, network, _answers(write, network, asked), against)


def _answers(
    write: Writer, network: Network, asked: Mapping[str, Asked], kept: float = COMPARED
) -> Mapping[str, Answer]:
    """The tuner's answers to each set of options. kept: seconds of the limit reserved for other work."""
    left = range(len(asked), 0, -1)
    return {
        name: answered(write.setup, network, one, budget(write.setup, asks, kept))
        for asks, (name, one) in zip(left, asked.items(), strict=True)
    }


def _of_answers(write: Writer, network: Network, answers: Mapping[str, Answer], against: str) -> Iterator[Row]:
    yield from compared(write, network, {name: one.ran for name, one in answers.items()}, against)
    for name, one in answers.items():
        yield from one.rows(write, name)


# Whole networks: gains and time of tuning, and tuning on other scans

DEFAULT, TUNED, NATIVE = "default", "tuned", "native"
TRAINED = ("minkunet-nuscenes-1f",)
"""The networks that are also tuned for training."""
GAIN = 1.05
"""Goal for the speedup of tuned convolutions and maps, geometric mean over the seven networks."""
NOISE = 1.02
LONGEST: Mapping[str, float] = {"minkunet-kitti-1x": 120.0}
"""Goals for the seconds of tuning."""
APART = 1.05
"""Goal for the time of a network tuned on other scans, over the time of one tuned on its own."""
ABROAD: Mapping[str, str] = {
    "minkunet-kitti-1x": "minkunet-nuscenes-1f",
    "minkunet-nuscenes-1f": "minkunet-kitti-1x",
    "centerpoint-waymo-1f": "centerpoint-nuscenes-10f",
    "centerpoint-nuscenes-10f": "centerpoint-waymo-1f",
}
"""By network, the workload on whose scans it is tuned instead of its own."""


@dataclass
class Gains:
    """ratios: by case, default over tuned. slower: cases whose tuned median and 20 % quantile exceed the default's."""

    ratios: dict[str, float] = field(default_factory=dict)
    slower: list[str] = field(default_factory=list)

    def note(self, row: Row) -> None:
        self.ratios[row.case] = row.ratio
        if row.value > NOISE * row.peer_value and row.p20 > row.peer_value:
            self.slower.append(row.case)


def networks(setup: Setup) -> Iterator[Row]:
    """Every network untuned and tuned in inference, some also in training; tuning time, and choices.

    Dataflows are tuned; a thorough run, with two minutes per network, also tunes tiles.
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
    """True if goals apply to the row: device time of convolutions and maps, or without a GPU wall time."""
    return row.metric == (CONVOLUTIONS if setup.device.type == "cuda" else "time") and row.clock == setup.clock


def _network(setup: Setup, subject: Subjected) -> Iterator[Row]:
    network, write = Network.of(setup, subject), Writer(setup, subject, "networks")
    answer = answered(setup, network, Asked(tiles=setup.thorough), budget(setup))
    ways = {DEFAULT: network.all_in(None), TUNED: answer.ran}
    yield from compared(write, network, ways, DEFAULT)
    yield from answer.rows(write, TUNED, LONGEST.get(subject.workload.name))


def transfer(setup: Setup) -> Iterator[Row]:
    """Every network tuned on its own scans and on another workload's, both run on its own."""
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
    """The subject with the scans and the voxelization of another workload."""
    other = WORKLOADS[name]
    scans = subject.workload.scans if subject.workload.generated else other.scans
    workload = replace(subject.workload, name=name, scans=scans, grid=other.grid)
    return replace(subject, workload=workload)


def _say_apart(setup: Setup, row: Row, groups: Sequence[str]) -> None:
    apart = row.value / row.peer_value
    verdict = "met" if apart <= APART else f"NOT met; groups that differ: {'; '.join(groups)}"
    setup.say(f"goal {row.case}: at most {APART:.2f} times as long as tuned natively: {apart:.3f}: {verdict}")
