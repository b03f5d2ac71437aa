"""What passes of a network take in each way, as rows: the device in all and by part, convolutions with maps, the wall.

device   the sum over what the device did, as the profiler records it: no wait of the host counts
parts    of it, see PARTS
wall     from an idle device to an idle device, the ways in turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times, together
from benchmarks.scenes.network_layers import Met
from benchmarks.suites.layer_model import walks
from benchmarks.suites.tuner_cases import Writer
from benchmarks.suites.tuner_networks import Network, Ran, checked
from pumice.engine.measure import by_part
from pumice.errors import PumiceError
from pumice.schedule.tile import PROCESSORS

CONVOLUTIONS = "convolutions"
"""The metric of convolutions and of what their maps and orders take, on the device."""
MAP, SORT, KERNEL, OTHER = "map", "sort", "kernel", "other"
PARTS: tuple[str, ...] = (MAP, SORT, KERNEL, OTHER)
"""Of what the device does: finding neighbours; sorting rows and laying forms out; kernels of convolutions, products,
gathers and scatters of libraries (also those of a linear head); copies and the rest."""
CONVOLVING = (MAP, SORT, KERNEL)
_PART_OF = {"map": MAP, "sort": SORT, "conv": KERNEL, "product": KERNEL, "movement": KERNEL}
"""Of the parts of engine.measure."""
_RUNS = 7
_FORMS = ("unsorted", "compacted", "split2", "split3", "split4")
"""Of the map, of 0 to 4 splits."""


@dataclass(frozen=True)
class Taken:
    """Milliseconds of a pass: of the device in all, for convolutions with maps, and by part; and on the wall."""

    device: Times
    convolutions: Times
    parts: Mapping[str, Times]
    wall: Times


def compared(write: Writer, network: Network, ways: Mapping[str, Ran], against: str) -> Iterator[Row]:
    """The rows of the ways that are right, each held against one of them; nothing where that one is wrong."""
    right = checked(write.setup, network, ways, partial(write.subject.case, write.study))
    if against in right:
        yield from rows_of(write, taken(write.setup, network, right), against)


def taken(setup: Setup, network: Network, ways: Mapping[str, Ran]) -> dict[str, Taken]:
    """What a pass takes in each way, in turn; without a GPU on the wall alone."""
    calls = {name: partial(network.run, ran) for name, ran in ways.items()}
    walls = together(list(calls.values()), setup.device, "wall", setup.seconds)
    found = {}
    for (name, call), wall in zip(calls.items(), walls, strict=True):
        if setup.device.type == "cuda":
            found[name] = _on_device(setup, call, wall)
        else:
            found[name] = Taken(wall, wall, {}, wall)
    return found


def _on_device(setup: Setup, call: Callable[[], object], wall: Times) -> Taken:
    call()
    try:
        told, _ = by_part([call] * _RUNS)
        each = [by_our_parts(parts) for parts in told]
    except PumiceError as reason:
        setup.say(f"  no parts, and times between events around a pass: {reason}")
        (whole,) = together([call], setup.device, "events", setup.seconds)
        return Taken(whole, whole, {}, wall)
    parts = {name: _quantiles(one[name] for one in each) for name in PARTS}
    whole = _quantiles(sum(one.values()) for one in each)
    return Taken(whole, _quantiles(sum(one[name] for name in CONVOLVING) for one in each), parts, wall)


def by_our_parts(told: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by our parts, of seconds by those that the profiler's kernels are sorted into."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, seconds in told.items():
        found[_PART_OF.get(name, OTHER)] += 1e3 * seconds
    return found


def _quantiles(found: Iterable[float]) -> Times:
    return Times.of(list(found))


def rows_of(write: Writer, found: Mapping[str, Taken], against: str) -> Iterator[Row]:
    """The rows of every way, held against one of them."""
    peer = found[against]
    for name, own in found.items():
        if write.setup.device.type == "cuda":
            yield write.timed(name, own.convolutions, Peer(against, peer.convolutions.median), CONVOLUTIONS)
            yield write.timed(name, own.device, Peer(against, peer.device.median))
        for part, times in own.parts.items():
            yield write.timed(name, times, Peer(against, peer.parts[part].median), f"part:{part}")
        yield write.timed(name, own.wall, Peer(against, peer.wall.median), clock="wall")
        write.setup.say(f"{write.subject.case(write.study, name)}: {_told(own, peer)}")


def _told(own: Taken, peer: Taken) -> str:
    """A way against another in a line."""
    sides = {"convolutions and maps": (own.convolutions, peer.convolutions), "device": (own.device, peer.device)}
    sides = {**(sides if own.device is not own.wall else {}), "wall": (own.wall, peer.wall)}
    medians = {name: (mine.median, theirs.median) for name, (mine, theirs) in sides.items()}
    each = (f"{name} {mine:.4g} ms ({theirs / mine:.2f}x)" for name, (mine, theirs) in medians.items())
    parts = ", ".join(f"{name} {times.median:.4g}" for name, times in own.parts.items())
    return "   ".join(each) + (f"   of it {parts}" if parts else "")


def tile_facts(write: Writer, layers: Sequence[Met], ways: Mapping[str, int]) -> Iterator[Row]:
    """What splits cost and give, by way: products with absent pairs, and tiles to fill a device with."""
    for name, splits in ways.items():
        redundancy, count = tiles_of(layers, splits)
        yield write.counted(name, "fact:rows multiplied for a wanted one", redundancy, "rows")
        yield write.counted(name, "fact:tiles of a layer", count, "tiles", Peer("multiprocessors", PROCESSORS))
        write.setup.say(f"  {name}: {redundancy:.2f} rows multiplied for one that is wanted, {count:.0f} tiles a layer")


def tiles_of(layers: Sequence[Met], splits: int) -> tuple[float, float]:
    """Rows multiplied for one that is wanted, and tiles of a layer, layers weighed by their products."""
    multiplied = wanted = weighed = 0.0
    known = {id(one.found): walks(one.found, _FORMS[min(splits, one.found.volume)]) for one in layers}
    for one in layers:
        walked, channels = known[id(one.found)], one.inputs * one.outputs
        multiplied += channels * sum(walk.entries * walk.block for walk in walked)
        weighed += channels * one.pairs * sum(walk.tiles for walk in walked)
        wanted += channels * one.pairs
    return (multiplied / wanted, weighed / wanted) if wanted else (0.0, 0.0)
