"""The suite `maps`: kernel maps from coordinates on the device to rows, plans, and whole networks of plans.

All results are compared with those of plain torch before timing, eager and replayed by a CUDA graph. The clock `gpu`
times replays of the graph, `wall` the eager call. Bounds of the coordinates are known beforehand, as if an extent were
given. Cases of a warm L2 end in /warm; for all others it is flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.harness import study
from benchmarks.harness.rows import Peer, Row, device_name
from benchmarks.harness.study import Setup, one_line
from benchmarks.harness.timing import Times, busy, captured, together
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.clouds import KNOWN, Known, Voxels, published, scenes, surface
from benchmarks.suites import map_work
from benchmarks.suites.map_work import HALVED, LEVELS, SUPPORT, WINDOW, Mapped, Planned, Room, Truth, Work
from pumice.coords import Geometry
from pumice.coords.lookup import STRUCTURES, MapSchedule, default
from pumice.coords.relation import Relation
from pumice.coords.tiles import TileList
from pumice.runtime.launch import has_triton

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 20_000_000)
MANY = 10_000_000
GOAL_OF_MANY = 5.0  # milliseconds
PLAN_OVER_MAP, FROM = 2.0, 100_000  # goal: a plan's time over its map's, from this many voxels on
OUTPUTS = {"k2s2": (HALVED, 1.5), "k3s2": (SUPPORT, 3.0)}
"""Strided maps: relation, and the goal for their time over a submanifold map's."""

Clocks = Mapping[str, Mapping[str, Times]]
"""Times by clock ("wall", "gpu", "warm", "events"), then by name."""


@dataclass(frozen=True)
class Ready:
    """A checked call. graph: its captured version, or the call itself."""

    name: str
    call: Callable[[], Any]
    graph: Callable[[], Any]


def _say_least(setup: Setup) -> None:
    """Report the time of a minimal graph, which every time of the clock gpu includes."""
    if setup.device.type == "cuda":
        least = captured(lambda: torch.zeros(1, device=setup.device), setup.device)
        setup.say(f"a graph of one kernel that does next to nothing: {_clocked(setup, 'gpu', [least])[0]}")


# the studies


def submanifold(setup: Setup) -> Iterator[Row]:
    """3x3x3 maps as rows, in random order and in the file's, against spconv in the same run and recorded peers."""
    _say_least(setup)
    for name, load in scenes(setup):
        case = f"map/{name}/k3"
        if not setup.wants(case):
            continue
        filed = load()
        orders = {"shuffled": filed.shuffled(), "file-order": filed}
        truths = {order: map_work.truth_of(voxels, WINDOW) for order, voxels in orders.items()}
        done = ready(setup, case, [_map_work(order, orders[order], truth) for order, truth in truths.items()])
        peer = spconv_ready(setup, case, orders["shuffled"], int((truths["shuffled"].rows >= 0).sum()))
        found = _spent(setup, done, peer)
        setup.say(f"{case}: {len(filed)} voxels, {default(filed.cloud()).structure}")
        for one in done:
            yield from _map_rows(setup, case, one.name, found, KNOWN.get(name, Known()))
        yield from _memory_rows(setup, case, done, peer)


def _map_work(name: str, voxels: Voxels, truth: Truth, schedule: MapSchedule | None = None) -> Work:
    graph = schedule is None or schedule.structure != "sorted"
    return Work(name, partial(map_work.submanifold, voxels, schedule), partial(map_work.wrong_map, truth=truth), graph)


def _map_rows(setup: Setup, case: str, name: str, found: Clocks, known: Known) -> Iterator[Row]:
    for clock, times in found.items():
        if clock == "events" or name not in times:
            continue
        peers = [Peer(f"its {other}", t.median) for other, t in times.items() if other not in (name, "spconv")]
        if clock == "warm":
            peers = [Peer("a flushed L2", found["gpu"][name].median)]
        elif "spconv" in times:
            peers.append(Peer("spconv", times["spconv"].median, package=spconv_peer.package()))
        if clock == "gpu":
            peers += _recorded(setup, found, known)
        yield from rows_of(setup, f"{case}/{name}", clock, times[name], peers or [Peer("itself", times[name].median)])


def _memory_rows(setup: Setup, case: str, done: Sequence[Ready], peers: Sequence[Ready]) -> Iterator[Row]:
    """Peak memory of eager calls."""
    ours = {f"{case}/{one.name}": study.Ready(one.name, one.call, "", 0.0) for one in done}
    theirs = [study.Ready(one.name, one.call, spconv_peer.package(), 0.0) for one in peers]
    yield from study.memory_rows(setup, ours, theirs, "int32")


def _recorded(setup: Setup, found: Clocks, known: Known) -> Iterator[Peer]:
    """Recorded peers, as recorded and scaled by spconv's time now over its recorded time; and the goal."""
    if "H200" not in device_name(setup.device):
        return
    live = found.get("events", {}).get("spconv")
    scale = None if live is None or "spconv" not in known.peers else live.median / known.peers["spconv"]
    if scale is not None:
        setup.say(f"  spconv takes {scale:.2f} times what was recorded of it; recorded peers are scaled by that")
    for name, value in known.peers.items():
        yield Peer(name, value, "recorded")
        if scale is not None and name != "spconv":
            yield Peer(f"{name} scaled by spconv", value * scale, "recorded")
    yield from _goals(known, "map")


def _goals(known: Known, study: str) -> list[Peer]:
    return [Peer("goal", known.goals[study], "goal")] if study in known.goals else []


def plans(setup: Setup) -> Iterator[Row]:
    """Map, masks, order, tiles and entries at a fixed capacity; and the bytes of tiles over int32 [N, 27]."""
    for name, load in scenes(setup):
        case = f"plan/{name}/k3"
        if not setup.wants(case):
            continue
        voxels, known = load().shuffled(), KNOWN.get(name, Known())
        truth = map_work.truth_of(voxels, WINDOW)
        room = Room.of(truth)
        whole = Work("plan", partial(_plan, voxels, room), partial(map_work.wrong_plan, truth=truth))
        done = ready(setup, case, [_map_work("map", voxels, truth), whole])
        found = _spent(setup, done)
        for clock, times in found.items():
            if {"map", "plan"} <= set(times):
                yield from rows_of(setup, case, clock, times["plan"], _plan_peers(times["map"], clock, voxels, known))
        yield from _memory(setup, case, truth, room, known)


def _plan(voxels: Voxels, room: Room) -> Planned:
    return map_work.planned(map_work.submanifold(voxels), room)


def _plan_peers(bare: Times, clock: str, voxels: Voxels, known: Known) -> list[Peer]:
    peers = [Peer("its map", bare.median)]
    if clock != "gpu":
        return peers
    twice = [Peer(f"goal: {PLAN_OVER_MAP:g} of its map", PLAN_OVER_MAP * bare.median, "goal")]
    return [*peers, *_goals(known, "plan"), *(twice if len(voxels) >= FROM else [])]


def _memory(setup: Setup, case: str, truth: Truth, room: Room, known: Known) -> Iterator[Row]:
    tiles: TileList = map_work.compacted(truth, room.block)
    problem = map_work.wrong_tiles(tiles, truth.rows)
    if problem:
        setup.failed(f"{case}: the tiles in exact room: {problem}")
        return
    share = tiles.nbytes / (4 * truth.rows.numel())
    setup.say(f"{case}: tiles of {room.block} outputs take {share:.1%} of int32 [N, 27], {len(tiles.tiles)} entries")
    for peer in (Peer("int32 [N, 27]", 1.0), *([Peer("goal", 0.5, "goal")] if known.lidar else [])):
        yield setup.row(case, share, "count", peer, "memory", "share", "int32")


def strided(setup: Setup) -> Iterator[Row]:
    """Outputs of k2s2 and k3s2 and the maps to them, at a fixed capacity, against a submanifold map."""
    for name, load in scenes(setup):
        case = f"outputs/{name}"
        if not setup.wants(case):
            continue
        voxels = load().shuffled()
        works = [_outputs_work(kind, voxels, relation) for kind, (relation, _) in OUTPUTS.items()]
        bare = _map_work("map", voxels, map_work.truth_of(voxels, WINDOW))
        found = _spent(setup, ready(setup, case, [bare, *works]))
        for clock, times in found.items():
            for kind, (_, factor) in OUTPUTS.items():
                if {"map", kind} <= set(times):
                    spent = times["map"].median
                    peers = [Peer("submanifold map", spent)]
                    peers += [Peer(f"goal: {factor:g} of it", factor * spent, "goal")] if clock == "gpu" else []
                    yield from rows_of(setup, f"{case}/{kind}", clock, times[kind], peers)


def _outputs_work(name: str, voxels: Voxels, relation: Relation, schedule: MapSchedule | None = None) -> Work:
    truth = map_work.truth_of(voxels, relation)
    capacity = Room.of(truth).outputs

    def call() -> Mapped:
        return map_work.strided(voxels.cloud(), voxels.site, relation, capacity, schedule)

    return Work(name, call, partial(map_work.wrong_map, truth=truth))


def networks(setup: Setup) -> Iterator[Row]:
    """The nine plans of a MinkUNet in one graph: on one stream, and with plans on side streams."""
    for name, load in scenes(setup):
        case = f"network/{name}"
        if not setup.wants(case):
            continue
        voxels = load().shuffled()
        truths = map_work.truths_of_network(voxels)
        works = [_map_work("map", voxels, truths[0]), *_network_works(setup, voxels, truths)]
        found = _spent(setup, ready(setup, case, works))
        for clock, times in found.items():
            for way in (work.name for work in works[1:]):
                if {"map", way} <= set(times):
                    goals = _goals(KNOWN.get(name, Known()), "network") if clock == "gpu" else []
                    peers = [Peer("the finest map", times["map"].median), *goals]
                    yield from rows_of(setup, f"{case}/{way}", clock, times[way], peers)


def _network_works(setup: Setup, voxels: Voxels, truths: Sequence[Truth]) -> list[Work]:
    rooms = [Room.of(truth) for truth in truths]
    counts = ", ".join(str(len(truth.outputs)) for truth in truths[::2])
    setup.say(f"{LEVELS} levels of {counts} voxels, {len(truths)} plans")

    wrong = partial(map_work.wrong_network, truths=truths)
    works = [Work("one-stream", partial(map_work.network, voxels, rooms), wrong)]
    if setup.device.type == "cuda":
        streams = [torch.cuda.Stream(setup.device) for _ in range(3)]
        works.append(Work("four-streams", partial(map_work.network, voxels, rooms, streams), wrong))
    return works


def pyramids(setup: Setup) -> Iterator[Row]:
    """The maps of a U-Net by `prepare`, for a new scene in each call, against building level by level.

    host: until `prepare` returns, which is before the device is done; gpu: the device's working time.
    """
    for name, load in scenes(setup):
        case = f"pyramid/{name}"
        if not setup.wants(case):
            continue
        voxels = load().shuffled()
        truths = map_work.truths_of_network(voxels)
        ways = {"chain": map_work.prepared, "level-by-level": map_work.level_by_level}
        works = [Work(way, partial(call, voxels), partial(_wrong_pyramid, truths), False) for way, call in ways.items()]
        done = [one.name for one in ready(setup, case, works)]
        pool = map_work.thinned(voxels, 2 if setup.quick else 40)
        calls = [_in_turn(ways[way], pool) for way in done]
        for clock, times in _new_scenes(setup, calls).items():
            for way, spent in zip(done, times, strict=True):
                peers = [Peer(f"its {other}", t.median) for other, t in zip(done, times, strict=True) if other != way]
                place = f"{case}/{way}/host" if clock == "host" else f"{case}/{way}"
                yield from rows_of(setup, place, "wall" if clock == "host" else clock, spent, peers)


def _wrong_pyramid(truths: Sequence[Truth], found: Geometry) -> str:
    return map_work.wrong_pyramid(found, truths)


def _in_turn(call: Callable[[Voxels], Any], pool: Sequence[Voxels]) -> Callable[[], Any]:
    """The call on one scene after the other, in a cycle."""
    scene = cycle(pool)
    return lambda: call(next(scene))


def _new_scenes(setup: Setup, calls: Sequence[Callable[[], Any]]) -> Mapping[str, Sequence[Times]]:
    """Times of the calls by clock: wall, host, gpu."""
    if not calls:
        return {}
    found = {"wall": _clocked(setup, "wall", calls), "host": [_host(call, setup) for call in calls]}
    if setup.device.type == "cuda":
        found["gpu"] = [busy(call, 20) for call in calls]
    return found


def _host(call: Callable[[], Any], setup: Setup) -> Times:
    """Milliseconds until the call returns, from an idle device."""
    spent = []
    for _ in range(7 if setup.quick else 60):
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
        begin = perf_counter()
        call()
        spent.append(1e3 * (perf_counter() - begin))
    return Times.of(spent)


def scaling(setup: Setup) -> Iterator[Row]:
    """Time of a map by number of voxels of a rough landscape, up to 20 million, and its slope."""
    times: dict[int, float] = {}
    for count in _sizes(setup):
        case = f"scaling/surface_{count}/k3"
        if not setup.wants(case):
            continue
        voxels = surface(count, setup.device).shuffled()
        truth = map_work.truth_of(voxels, WINDOW)
        works = [_map_work("map", voxels, truth), _map_work("sorted", voxels, truth, MapSchedule("sorted"))]
        found = _spent(setup, ready(setup, case, works), warm=False)
        for clock, by_name in found.items():
            if {"map", "sorted"} <= set(by_name):
                times[count] = by_name["map"].median  # the last clock: gpu where there is one
                goal = [Peer("goal", GOAL_OF_MANY, "goal")] if count == MANY and clock == "gpu" else []
                peers = [Peer("sorted keys in torch", by_name["sorted"].median), *goal]
                yield from rows_of(setup, case, clock, by_name["map"], peers)
    yield from _slopes(setup, times)


def _sizes(setup: Setup) -> Sequence[int]:
    if setup.quick:
        return (200, 400, 800)
    return SIZES if setup.device.type == "cuda" else SIZES[:4]


def _slopes(setup: Setup, times: Mapping[int, float]) -> Iterator[Row]:
    """Exponents of time = N ** exponent, over all sizes and over the larger half; 1 is linear."""
    sizes = sorted(times)
    for part, chosen in {"all": sizes, "large": sizes[len(sizes) // 2 :]}.items():
        if len(chosen) < 2:
            continue
        slope = float(np.polyfit(np.log(chosen), np.log([times[n] for n in chosen]), 1)[0])
        setup.say(f"scaling, {chosen[0]} to {chosen[-1]} voxels: time = N ** {slope:.3f}")
        yield setup.row(
            f"scaling/{part}", slope, setup.clock, Peer("linear", 1.0, "bound"), "slope", "exponent", "int32"
        )


def ablation(setup: Setup) -> Iterator[Row]:
    """The gains of a lookup structure, of one fused kernel, and of computing half of the kernel offsets.

    It follows figure 13 of TorchSparse (MLSys 2022), which starts from a hash table and separate kernels.
    """
    for name, load in chain(scenes(setup), published(setup)):
        case = f"ablation/{name}"
        if not setup.wants(case):
            continue
        voxels = load().shuffled()
        setup.say(f"{case}, {len(voxels)} voxels: ms, times as fast as the first of its kind")
        yield from _table(setup, f"{case}/k3", list(_lookups(setup, voxels)))
        ways = {"staged": False, "fused": True} if has_triton(voxels.coords) else {"listed": True}
        for kind, (relation, _) in OUTPUTS.items():
            works = [_outputs_work(way, voxels, relation, MapSchedule(fused=fused)) for way, fused in ways.items()]
            yield from _table(setup, f"{case}/{kind}", works)


def _lookups(setup: Setup, voxels: Voxels) -> Iterator[Work]:
    """The submanifold map by every available structure, the plainest first."""
    truth = map_work.truth_of(voxels, WINDOW)
    for structure in ("hash", *(name for name in STRUCTURES if name != "hash")):
        schedule = MapSchedule(structure)
        reason = STRUCTURES[structure].refusal(voxels.cloud(), schedule)
        if reason is not None:
            setup.say(f"  {structure} is left out: {reason}")
            continue
        yield _map_work(f"{structure}-staged", voxels, truth, replace(schedule, fused=False))
        yield _map_work(structure, voxels, truth, schedule)
        if structure in ("hash", "grid"):
            yield _map_work(f"{structure}-mirrored", voxels, truth, replace(schedule, mirrored=True))


def _table(setup: Setup, case: str, works: Sequence[Work]) -> Iterator[Row]:
    """Times by the device's own clock (wall on a CPU), against the first work's."""
    done = ready(setup, case, works)
    times = _named(done, _clocked(setup, setup.clock, [r.graph for r in done]))
    first = next(iter(times), "")
    for name, spent in times.items():
        setup.say(
            f"  {case.rpartition('/')[2]:<5}{name:<16} {spent.median:10.4g} {times[first].median / spent.median:8.2f}x"
        )
        yield setup.row(f"{case}/{name}", spent, setup.clock, Peer(first, times[first].median), dtype="int32")


# checked, then timed


def ready(setup: Setup, case: str, works: Sequence[Work]) -> list[Ready]:
    """The works whose results are right, eagerly and as a graph; others are recorded as failures."""
    done = []
    for work in works:
        try:
            problem, graph = work.wrong(work.call()), work.call
            if not problem and work.graph and setup.device.type == "cuda":
                graph = captured(work.call, setup.device)
                problem = work.wrong(graph())
                problem = problem and f"captured: {problem}"
        except Exception as reason:  # the other calls still run
            problem, graph = one_line(reason), work.call
        if problem:
            setup.failed(f"{case}: {work.name}: {problem}; not timed")
        else:
            done.append(Ready(work.name, work.call, graph))
    return done


def spconv_ready(setup: Setup, case: str, voxels: Voxels, expected: int) -> list[Ready]:
    """spconv, if it is installed and finds the expected number of pairs."""
    if "spconv" in setup.absent:
        return []
    try:
        call = map_work.spconv_map(voxels)
        pairs = int((call() >= 0).sum())
    except ImportError as reason:
        setup.absent.add("spconv")
        setup.say(f"spconv is left out: {one_line(reason)}")
        return []
    except Exception as reason:  # peers may raise anything
        setup.say(f"  {case}: spconv: {one_line(reason)}")
        return []
    if pairs != expected:
        setup.say(f"  {case}: spconv finds {pairs} pairs, there are {expected}; not timed")
        return []
    return [Ready("spconv", call, call)]


def _spent(setup: Setup, done: Sequence[Ready], peers: Sequence[Ready] = (), warm: bool = True) -> Clocks:
    """Time calls in turn: eager calls by the wall clock; on a GPU also graphs, with the L2 flushed and warm.

    "events": peers, by the clock with which they were recorded.
    """
    if not done:
        return {}
    everyone = (*done, *peers)
    found = {"wall": _named(everyone, _clocked(setup, "wall", [r.call for r in everyone]))}
    if setup.device.type == "cuda":
        if warm:
            found["warm"] = _named(done, _clocked(setup, "gpu", [r.graph for r in done], cold=False))
        if peers:
            found["events"] = _named(peers, _clocked(setup, "events", [r.call for r in peers]))
        found["gpu"] = _named(everyone, _clocked(setup, "gpu", [r.graph for r in everyone]))
    return found


def _clocked(setup: Setup, clock: str, calls: Sequence[Callable[[], Any]], cold: bool = True) -> list[Times]:
    return together(calls, setup.device, clock, setup.seconds, cold) if calls else []


def _named(done: Sequence[Ready], times: Sequence[Times]) -> dict[str, Times]:
    return dict(zip((r.name for r in done), times, strict=True))


def rows_of(setup: Setup, case: str, clock: str, times: Times, peers: Sequence[Peer]) -> Iterator[Row]:
    """Report the times in a line, and yield a row per peer."""
    told = ", ".join(f"{peer.name} {peer.value:.4g} ({peer.value / times.median:.2f}x)" for peer in peers)
    setup.say(f"{case} {clock}: {times}; {told}")
    name = f"{case}/warm" if clock == "warm" else case
    for peer in peers:
        yield setup.row(name, times, "gpu" if clock == "warm" else clock, peer, dtype="int32")
