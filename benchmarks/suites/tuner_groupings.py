"""The studies of the suite `tuner` about groups of kernel offsets (TorchSparse, MLSys 2022, sections 4.2 and 6.1):
table 2 (`grouping`), figure 7 (`batching`), figure 12 (`offsets`) and table 1 (`strategies`).

A strategy is epsilon and S of each layer, found by algorithm 5 (pumice.engine.grouping_tuning) on scans of a workload
other than the one that is timed, where there are several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from benchmarks.scenes.network_layers import Fed, layers_of
from benchmarks.scenes.workloads import fresh
from benchmarks.suites.tuner_cases import (
    ITSELF,
    Subjected,
    Writer,
    say_published,
    spent,
    spent_in_pieces,
    subject_of,
    subjects,
)
from benchmarks.suites.tuner_layers import NETWORKS, Run, checked, fed, in_turn, products
from pumice.coords import KernelMap
from pumice.engine.grouping_tuning import DEFAULT, GroupingRun, grouping_flows
from pumice.engine.subject import subject as tuning_subject
from pumice.engine.subject import undisturbed
from pumice.errors import OptionError
from pumice.ops import SparseTensor
from pumice.schedule.dataflow import DATAFLOWS, Dataflow, Grouping, OffsetGroup, padding
from pumice.schedule.predict import DEVICES
from pumice.schedule.tuned_plans import PlanKey, TunedPlan, plans
from pumice.schedule.tuner import Clock

UNTUNED = ("separate", "symmetric", "fixed", "adaptive")
WHOLE = "time with movement"
"""The metric of gather, products and scatter; `time` in the study grouping is that of the products."""
SEARCHED = 2
"""Scans on which strategies are searched, at most."""
_LIMIT = 100.0
"""Seconds of a search."""


# Strategies

Strategy = Mapping[str, Grouping]
"""The grouping of each layer, by its name."""


@dataclass(frozen=True)
class Searched:
    """A strategy and its plan as `pumice.tune` keeps it. seconds: of the search. configurations: products timed."""

    strategy: Strategy
    run: GroupingRun
    seconds: float
    configurations: int

    def groupings(self, layers: Sequence[Fed]) -> list[Grouping]:
        """Those of these layers."""
        return groupings_of(self.strategy, layers)


def groupings_of(strategy: Strategy, layers: Sequence[Fed]) -> list[Grouping]:
    """The grouping of each layer; the default one of layers that the strategy does not know."""
    return [strategy.get(one.met.name, Grouping("adaptive")) for one in layers]


def searched(setup: Setup, subject: Subjected, keep: bool = False) -> Searched:
    """The strategy of a subject, by the times of whole layers on its scans but the first, if there are others.

    keep: keep its plan among those of the user.
    """
    net, scans = subject.net(setup), subject.samples(setup, 1 + SEARCHED)
    samples = [fresh(one) for one in scans[1:] or scans]
    with undisturbed(net, False):
        run = GroupingRun(tuning_subject(net, samples, "inference"), grouping_flows(None), Clock(_limit(setup)))
        tuning = run.result(fresh=True, save=keep)
    found = {layer: _grouping(flow) for layer, flow in tuning.flows.items()}
    tried = sum(len(choice.trials) for choice in tuning.choices) * len(samples)
    told = sorted({str(how) for how in found.values()})
    setup.say(
        f"  {subject.name}: {len(run.found)} of {len(run.kinds)} kinds of layers searched on {len(samples)} scans in "
        f"{tuning.seconds:.1f} s, {tried} measurements; {', '.join(told)}"
    )
    return Searched(found, run, tuning.seconds, tried)


def _limit(setup: Setup) -> float:
    return 1.0 if setup.quick else min(_LIMIT, max(10.0, setup.left / 3))


def _grouping(flow: object) -> Grouping:
    found = DATAFLOWS[flow] if isinstance(flow, str) else flow
    assert isinstance(found, Dataflow) and found.grouping is not None
    return found.grouping


def whole(layers: Sequence[Fed], groupings: Sequence[Grouping]) -> Run:
    """Calls of all layers with gather and scatter, each with its grouping."""
    return in_turn(layers, [replace(DATAFLOWS[DEFAULT], name="grouped", grouping=how) for how in groupings])


# Table 2


def grouping(setup: Setup) -> Iterator[Row]:
    """All convolutions with each kernel offset alone, in pairs, in three groups, and in adaptive groups, untuned and
    tuned for each layer: the matrix products on gathered rows, and with gather and scatter."""
    for subject in subjects(setup, "grouping", NETWORKS):
        say_published(setup, "grouping")
        yield from _groupings(setup, subject)


def _groupings(setup: Setup, subject: Subjected) -> Iterator[Row]:
    layers, found = fed(setup, subject), searched(setup, subject)
    chosen = {**{kind: [Grouping(kind)] * len(layers) for kind in UNTUNED}, "adaptive-tuned": found.groupings(layers)}
    truths, runs = [one.exact()[0] for one in layers], {name: whole(layers, how) for name, how in chosen.items()}
    if not checked(setup, subject.case("grouping", "all"), subject.dtype, truths, runs):
        return
    del truths
    times = spent_in_pieces(setup, {name: products(layers, how) for name, how in chosen.items()})
    moved = spent_in_pieces(setup, runs)
    yield from _grouping_rows(setup, subject, layers, chosen, times, moved)
    write = Writer(setup, subject, "grouping")
    yield write.row("adaptive-tuned", found.seconds, "wall", Peer(ITSELF, found.seconds), "tuning", "s")
    yield write.counted("adaptive-tuned", "fact:measurements of the search", found.configurations, "calls")
    yield _reached(write, "adaptive-tuned", found.run)


def _reached(write: Writer, way: str, run: GroupingRun) -> Row:
    """How many kinds of layers the search had time for."""
    kinds = Peer("all kinds", len(run.kinds))
    return write.counted(way, "fact:kinds of layers searched", len(run.found), "kinds", kinds)


def _grouping_rows(
    setup: Setup,
    subject: Subjected,
    layers: Sequence[Fed],
    chosen: Mapping[str, Sequence[Grouping]],
    times: Mapping[str, Times],
    moved: Mapping[str, Times],
) -> Iterator[Row]:
    write = Writer(setup, subject, "grouping")
    useful = sum(one.met.flops for one in layers)
    ceiling = Peer("dense ceiling", 1e-12 * DEVICES["cuda"].matrix, "recorded")
    separate, before = Peer("separate", times["separate"].median), Peer("separate", moved["separate"].median)
    for name, how in chosen.items():
        rate = 1e-9 * useful / times[name].median
        share, multiplies = padded(layers, how)
        yield write.timed(name, times[name], separate)
        yield write.timed(name, moved[name], before, WHOLE)
        yield write.row(name, rate, setup.clock, ceiling, "rate", "TFLOP/s")
        yield write.counted(name, "fact:padding", share, "share")
        yield write.counted(name, "fact:products", multiplies, "calls")
        yield write.counted(name, "fact:products of the first layer", padded(layers[:1], how[:1])[1], "calls")
        gain = separate.value / times[name].median
        setup.say(
            f"{subject.case('grouping', name)}: products {times[name].median:.4g} ms, {gain:.2f}x, {rate:.4g} TFLOP/s, "
            f"with movement {moved[name].median:.4g} ms, {before.value / moved[name].median:.2f}x; "
            f"{share:.1%} of the rows padding, {multiplies} products"
        )
    least = 1e3 * sum(map(partial(_least, size=layers[0].feats.element_size()), layers))
    yield write.counted("separate", "fact:least", least, "ms", Peer("separate", separate.value))


def padded(layers: Sequence[Fed], how: Sequence[Grouping]) -> tuple[float, int]:
    """The share of padding rows, weighted by work, and the number of matrix products."""
    work = filled = 0.0
    calls = 0
    for one, each in zip(layers, how, strict=True):
        counts, channels = one.found.pairs().sizes.tolist(), one.met.inputs * one.met.outputs
        for group in each.groups(counts):
            rows = sum(counts[tap] for tap in group.taps)
            if not rows:
                continue
            share = padding(counts, group.taps) if group.batched else 0.0
            calls += 1 if group.batched else sum(counts[tap] > 0 for tap in group.taps)
            work += rows / (1 - share) * channels
            filled += rows * share / (1 - share) * channels
    return (filled / work if work else 0.0), calls


def _least(one: Fed, size: int) -> float:
    """Lower bound on an H200 for a layer's products in seconds: multiplied, read and written once."""
    gpu = DEVICES["cuda"]
    moved = one.met.pairs * (one.met.inputs + one.met.outputs) * size + one.weight.numel() * size
    return max(one.met.flops / gpu.matrix, moved / gpu.memory)


# Figure 7

LENGTHS = (1, 2, 4, 6, 8, 13, 26)
"""Kernel offsets in a batched product."""


@dataclass(frozen=True)
class Runs(Grouping):
    """Runs of `length` kernel offsets in a batched product, of a submanifold map offset after mirror image; the centre
    by itself."""

    kind: str = "separate"
    length: int = 1

    def groups(self, counts: Sequence[int]) -> tuple[OffsetGroup, ...]:
        last = len(counts) - 1
        order = [tap for k in range(len(counts) // 2) for tap in (k, last - k)]
        runs = [tuple(sorted(order[at : at + self.length])) for at in range(0, len(order), self.length)]
        return (*(OffsetGroup(run, len(run) > 1) for run in runs), OffsetGroup((len(counts) // 2,), False))


def batching(setup: Setup) -> Iterator[Row]:
    """The products of layers on the first map against the number of kernel offsets in a batched product."""
    for subject in subjects(setup, "batching", NETWORKS):
        say_published(setup, "batching")
        layers = fed(setup, subject)
        first = [one for one in layers if one.found is layers[0].found]
        for one in {(each.met.inputs, each.met.outputs): each for each in reversed(first)}.values():
            yield from _batched(setup, subject, one)


def _batched(setup: Setup, subject: Subjected, one: Fed) -> Iterator[Row]:
    write, place = Writer(setup, subject, "batching"), f"{one.met.inputs}-{one.met.outputs}"
    hows = {f"{length}": Runs(length=length) for length in LENGTHS}
    runs = {name: whole([one], [how]) for name, how in hows.items()}
    if not checked(setup, subject.case("batching", place), subject.dtype, [one.exact()[0]], runs):
        return
    times = spent(setup, {name: products([one], [how])[0] for name, how in hows.items()})
    alone = Peer("1", times["1"].median)
    for name, how in hows.items():
        way, (share, calls) = f"{name}/{place}", padded([one], [how])
        rate = 1e-9 * one.met.flops / times[name].median
        yield write.timed(way, times[name], alone)
        yield write.row(way, rate, setup.clock, Peer("1", 1e-9 * one.met.flops / alone.value), "rate", "TFLOP/s")
        yield write.counted(way, "fact:padding", share, "share")
        yield write.counted(way, "fact:products", calls, "calls")
        setup.say(
            f"{subject.case('batching', way)}: {times[name].median:.4g} ms, {alone.value / times[name].median:.2f}x, "
            f"{rate:.4g} TFLOP/s, {share:.1%} padding"
        )


# Figure 12


def offsets(setup: Setup) -> Iterator[Row]:
    """Pairs per kernel offset of every map of the networks, W0 to the centre of submanifold maps, all of others."""
    for subject in subjects(setup, "offsets", NETWORKS):
        say_published(setup, "offsets")
        write = Writer(setup, subject, "offsets")
        net, sample = subject.net(setup), fresh(subject.samples(setup)[0])
        for name, found in maps_of(net, sample).items():
            counts = found.pairs().sizes.tolist()
            shown = counts[: len(counts) // 2 + 1] if counts == counts[::-1] else counts
            for tap, count in enumerate(shown):
                yield write.counted(f"W{tap}/{name}", "fact:pairs", count, "pairs")
            setup.say(f"{subject.case('offsets', name)}: {', '.join(map(str, shown))}")


def maps_of(net: nn.Module, x: SparseTensor) -> dict[str, KernelMap]:
    """The maps of a network's layers by name: the window, and the stride of the finer level."""
    found: dict[str, KernelMap] = {}
    seen: set[int] = set()
    for met in layers_of(net, x):
        one = met.found
        if id(one.table) in seen:
            continue
        seen.add(id(one.table))
        steps = one.relation.stride
        window, step = "x".join(map(str, one.relation.kernel)), "" if set(steps) == {1} else f" s{steps[0]}"
        found[f"{len(found)} k{window}{step}"] = one
    return found


# Table 1

PAIRS: tuple[tuple[str, str, str], ...] = (
    ("data", "minkunet-kitti-1x", "minkunet-nuscenes-1f"),
    ("width", "minkunet-kitti-1x", "minkunet-kitti-0.5x"),
)
"""What differs, and the two workloads, each run with its own strategy and with the other's."""
OWN = "own"


def strategies(setup: Setup) -> Iterator[Row]:
    """Networks with strategies found for them, for another data set, for another width, and for another device whose
    plan is among those kept, as this study keeps those that it finds; all with gather and scatter."""
    known: dict[str, Searched] = {}
    names = tuple(dict.fromkeys(name for _, *both in PAIRS for name in both))
    if not any(setup.wants(f"{subject_of(setup, name).name}/strategies") for name in names):
        return
    for name in names:
        _known(setup, name, known)
    for subject in subjects(setup, "strategies", names):
        say_published(setup, "strategies")
        own = _known(setup, subject.workload.name, known)
        if own is not None:
            ways = {OWN: own.strategy, **dict(_others(setup, subject, known)), **dict(_of_devices(setup, own))}
            yield from _run_in(setup, subject, ways)
            yield _reached(Writer(setup, subject, "strategies"), OWN, own.run)


def _known(setup: Setup, name: str, known: dict[str, Searched]) -> Searched | None:
    """The strategy of a workload, searched once; None without its scans."""
    if name not in known:
        try:
            known[name] = searched(setup, subject_of(setup, name), keep=not setup.quick)
        except OptionError as reason:
            setup.say(f"{name} is left out: {reason}")
            return None
    return known[name]


def _others(setup: Setup, subject: Subjected, known: dict[str, Searched]) -> Iterator[tuple[str, Strategy]]:
    name = subject.workload.name
    for what, *both in PAIRS:
        if name in both:
            other = both[1 - both.index(name)]
            found = _known(setup, other, known)
            if found is not None:
                yield f"other-{what}", found.strategy


def _of_devices(setup: Setup, own: Searched) -> Iterator[tuple[str, Strategy]]:
    """Strategies that plans of other devices hold for the same network and workload."""
    run, alike = own.run, dict[str, tuple[PlanKey, TunedPlan]]()
    for key, plan in plans().all().items():
        same = replace(key, device=run.key.device, workload=run.key.workload) == run.key
        if same and key.device != run.key.device and plan.distance(run.workload) < 0.5:
            alike[key.device] = key, plan
    if not alike:
        setup.say("  another device: not measured, no plan of one is kept")
    for device, (_, plan) in alike.items():
        flows = {layer: plan.flows.get(kind.name) for kind in run.kinds for layer in kind.layers}
        yield f"from {device}", {layer: _grouping(flow) for layer, flow in flows.items() if flow is not None}


def _run_in(setup: Setup, subject: Subjected, ways: Mapping[str, Strategy]) -> Iterator[Row]:
    layers, write = fed(setup, subject), Writer(setup, subject, "strategies")
    chosen = {name: groupings_of(strategy, layers) for name, strategy in ways.items()}
    chosen["default"] = [Grouping("adaptive")] * len(layers)
    runs = {name: whole(layers, how) for name, how in chosen.items()}
    truths = [one.exact()[0] for one in layers]
    if not checked(setup, subject.case("strategies", "all"), subject.dtype, truths, runs):
        return
    del truths
    times = spent_in_pieces(setup, runs)
    alone = spent_in_pieces(setup, {name: products(layers, how) for name, how in chosen.items()})
    own, own_alone = Peer(OWN, times[OWN].median), Peer(OWN, alone[OWN].median)
    for name, how in chosen.items():
        share, calls = padded(layers, how)
        yield write.timed(name, times[name], own, WHOLE)
        yield write.timed(name, alone[name], own_alone)
        yield write.counted(name, "fact:padding", share, "share")
        yield write.counted(name, "fact:products", calls, "calls")
        differ = sum(a != b for a, b in zip(how, chosen[OWN], strict=True))
        yield write.counted(name, "fact:layers that differ", differ, "layers", Peer("all layers", len(layers)))
        setup.say(
            f"{subject.case('strategies', name)}: {times[name].median:.4g} ms, {times[name].median / own.value:.3f} of "
            f"its own; products {alone[name].median:.4g} ms; {calls} products, {share:.1%} padding, {differ} differ"
        )
