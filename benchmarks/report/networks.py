"""Charts of networks in the report: the parts of a pass's time, and the dataflows chosen.

From rows of networks in the suites `workloads` and `tuner`; times in ms:

    metric             case                          value                           peer and its value
    time               MODEL/PRECISION/MODE          a whole pass                    spconv: its pass, same run
    part:PART          MODEL/PRECISION/MODE/LAYER    one part of one layer, tuned    default: the same, untuned
    part:PART          .../layers-default/LAYER      one part of one layer, untuned  itself
    part:PART          .../networks-tuned            one part of all layers, tuned   default: the same, untuned
    choice:DATAFLOW    MODEL/PRECISION/MODE/GROUP    a candidate of a group          default: the default's time
    chosen:DATAFLOW    MODEL/PRECISION/MODE/GROUP    the candidate that was taken    default: the default's time

PART is map, sort, kernel or other. PRECISION is one of families.PRECISIONS; MODE is inference or training, optionally
followed by "generated", which then becomes part of MODEL (centerpoint-waymo-3f-generated). MODEL may have slashes.
LAYER is a layer or a level. A part whose peer is not "default" is untuned, and its value counts as the default's. If
the peer of a part is spconv, its value is spconv's time of the part. GROUP is a group of layers that share a kernel
map, followed by a comma and the passes of the candidate; studies of the tuner put STUDY-WAY/ before it, and each study
has a chart of its own with a column per way. For each network, only rows of the newest run (date and commit) count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.families import DEFAULT, NETWORK, SAME_RUN
from benchmarks.harness.results import grouped, told
from benchmarks.harness.rows import Row
from benchmarks.report.charts import Chart, Heat, HeatCell, Stacks, stem

PARTS = ("map", "sort", "kernel", "other")
"""Parts of a pass: building maps, ordering rows and laying out tiles, multiplying, everything else."""
WHOLE = "not split up"
"""The time of a pass whose parts are unknown."""
_SUITES = ("workloads", "tuner")
_STUDIES = tuple(
    f"{name}-"
    for name in (
        "breakdown", "splits", "sorted", "hybrid", "reordering", "bindings", "networks", "gains", "transfer"
    )
)
"""Prefixes of ways in the suite tuner, by study."""
_BY_LAYER = "layers-default/"
_GENERATED = "generated"
_TUNED, _SPCONV = "tuned", "spconv"


@dataclass(frozen=True)
class Network:
    """The parsed case of a network's row."""

    model: str
    precision: str
    mode: str
    rest: str = ""

    @staticmethod
    def of(row: Row) -> Network | None:
        """None if the row is not of a network."""
        found = re.fullmatch(NETWORK, row.case) if row.suite in _SUITES else None
        if found is None:
            return None
        model, precision, mode, rest = (text or "" for text in found.groups())
        if rest.partition("/")[0] == _GENERATED:
            # The name used by studies of the suite tuner.
            return Network(f"{model}-{_GENERATED}", precision, mode, rest.partition("/")[2])
        return Network(model, precision, mode, rest)

    @property
    def title(self) -> str:
        return f"{self.model}, {self.precision}, {self.mode}"

    def whole(self) -> Network:
        return Network(self.model, self.precision, self.mode)


Times = dict[tuple[str, str, str], float]
"""Milliseconds by (way, layer, part)."""


Held = dict[Network, list[Row]]
"""Rows by network."""


def parts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each mode and precision: the parts of whole passes, default, tuned and spconv's; then of each layer."""
    own = [row for row in rows if row.metric.startswith("part:") and _part(row) in PARTS and not _asked_apart(row)]
    for suffix, of_device in _by_device(own):
        by_layer = _newest(row for row in of_device if not _is_whole(row))
        held = {**by_layer, **_newest(row for row in of_device if _is_whole(row))}
        for precision, mode in dict.fromkeys((network.precision, network.mode) for network in held):
            found = {n: times for n, times in held.items() if (n.precision, n.mode) == (precision, mode)}
            layered = {n: times for n, times in by_layer.items() if n in found and len({row.case for row in times}) > 1}
            used = [row for each in (found, layered) for times in each.values() for row in times]
            title = f"Where a pass spends its time: {precision}, {mode}"
            note = "Milliseconds of finding maps, ordering rows, multiplying, and the rest; below, layer by layer."
            panels = (_totals(found, rows), *(_layers(network, times) for network, times in layered.items()))
            yield Chart(f"parts-{precision}-{mode}{suffix}", title, note, told(used), panels)


def _asked_apart(row: Row) -> bool:
    """True for a pass, or a layer of one, in a way of a study. The tuned way of the study `networks` is excepted: it is
    shown beside the default, as are the layers of the default."""
    network = Network.of(row)
    rest = network.rest if network else ""
    of_another = rest.startswith("layers-") and not rest.startswith(_BY_LAYER)
    return rest != "networks-tuned" and (rest.startswith(_STUDIES) or of_another)


def _is_whole(row: Row) -> bool:
    """True if the row is of all layers of a pass."""
    network = Network.of(row)
    return network is not None and network.rest.startswith(_STUDIES)


def _part(row: Row) -> str:
    return row.metric.removeprefix("part:")


def _by_device(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows of networks by device and clock, with a suffix for file names, "" if there is one group only."""
    found = grouped(rows, lambda row: (row.device, row.clock) if Network.of(row) else None)
    for place, own in found.items():
        yield f"-{stem(' '.join(place))}" if len(found) > 1 else "", own


def _newest(rows: Iterable[Row]) -> Held:
    """By network, the rows of its newest run: an older run may have layers and choices that no longer exist."""
    found: Held = {}
    for network, own in grouped(rows, lambda row: (of := Network.of(row)) and of.whole()).items():
        last = sorted(own, key=lambda row: row.date)[-1]
        found[network] = [row for row in own if (row.date, row.commit) == (last.date, last.commit)]
    return found


def _totals(found: Held, rows: Sequence[Row]) -> Stacks:
    bars: dict[str, dict[str, float]] = {}
    for network, own in found.items():
        times = _times(own)
        for way in _ways(times):
            total = {part: sum(v for (w, _, p), v in times.items() if (w, p) == (way, part)) for part in PARTS}
            bars[f"{network.model} {way}"] = total
        whole = _whole(network, rows, own[0])
        if whole and _SPCONV not in _ways(times):
            bars[f"{network.model} {_SPCONV}"] = {WHOLE: whole}
    return _stacked("whole passes", bars)


def _layers(network: Network, own: Sequence[Row]) -> Stacks:
    times = _times(own)
    way = _TUNED if _TUNED in _ways(times) else DEFAULT
    layers = dict.fromkeys(layer for w, layer, _ in times if w == way)
    bars = {layer: {part: times.get((way, layer, part), 0.0) for part in PARTS} for layer in layers}
    return _stacked(f"{network.model}, {way}, layer by layer", bars)


def _stacked(title: str, bars: dict[str, dict[str, float]]) -> Stacks:
    used = [part for part in (*PARTS, WHOLE) if any(part in held for held in bars.values())]
    return Stacks(title, "ms", tuple(bars), {part: tuple(held.get(part) for held in bars.values()) for part in used})


def _times(own: Iterable[Row]) -> Times:
    """Times by way, layer and part. Rows that differ only in the peer repeat our time and add the peer's."""
    times: Times = {}
    tuned = {row.case for row in own if row.peer == DEFAULT}
    for row in own:
        network, part = Network.of(row), _part(row)
        layer = network.rest.removeprefix(_BY_LAYER) if network else ""
        times[_TUNED if row.case in tuned else DEFAULT, layer, part] = row.value
        if row.peer_source == SAME_RUN and row.peer in (DEFAULT, _SPCONV):
            times[row.peer, layer, part] = row.peer_value
    return times


def _ways(times: Times) -> list[str]:
    there = {way for way, _, _ in times}
    return [way for way in (DEFAULT, _TUNED, _SPCONV) if way in there]


def _whole(network: Network, rows: Iterable[Row], beside: Row) -> float | None:
    """spconv's time of a whole pass, with the device and clock of the row `beside`; None if unknown."""
    for row in rows:
        fits = row.metric == "time" and row.peer == _SPCONV and row.peer_source == SAME_RUN
        fits = fits and (row.device, row.clock) == (beside.device, beside.clock)
        if fits and (found := Network.of(row)) and found.whole() == network:
            return row.peer_value
    return None


def choices(rows: Sequence[Row]) -> Iterator[Chart]:
    """Charts of layer groups by model, coloured by the dataflow chosen, with its speedup."""
    tried = [row for row in rows if row.metric.startswith(("choice:", "chosen:"))]
    for suffix, of_device in _by_device(tried):
        for study in dict.fromkeys(map(_study, of_device)):
            own = _by_way([row for row in of_device if _study(row) == study])
            groups = {key: _groups(found) for key, found in own.items()}
            kinds = _kinds(groups.values())
            keys = dict.fromkeys((network.precision, network.mode) for network, _ in own)
            used = [row for found in own.values() for row in found]
            name = f"choices-{stem(study)}" if study else "choices"
            title = f"Tuned choices: {study}" if study else "Tuned choices"
            note = (
                "The dataflow chosen for each group of layers, and how many times as fast the network is by it. A "
                "group without a tile had none to choose."
            )
            panels = tuple(_heat(groups, precision, mode, kinds) for precision, mode in keys)
            yield Chart(f"{name}{suffix}", title, note, told(used), panels)


def _study(row: Row) -> str:
    """The study that a choice belongs to; "" for the tuner's own choices."""
    return _asked(row).partition("-")[0]


def _asked(row: Row) -> str:
    """STUDY-WAY of a choice; "" for the tuner's own choices."""
    network = Network.of(row)
    return network.rest.rpartition("/")[0] if network else ""


def _by_way(rows: Sequence[Row]) -> dict[tuple[Network, str], list[Row]]:
    """By network and way of a study, the rows of its newest run."""
    ways = dict.fromkeys(map(_asked, rows))
    found = {}
    for way in ways:
        for network, own in _newest(row for row in rows if _asked(row) == way).items():
            found[network, way.partition("-")[2]] = own
    models = [network.model for network, _ in found]
    return dict(sorted(found.items(), key=lambda item: models.index(item[0][0].model)))


Groups = dict[str, HeatCell | None]
"""By group of layers, the tile of its choice."""


def _groups(found: Iterable[Row]) -> Groups:
    return {group: _tile(own) for group, own in grouped(found, lambda row: _group(row)[0]).items()}


def _kinds(own: Iterable[Groups]) -> tuple[str, ...]:
    """The dataflows chosen, the most frequent first."""
    taken = Counter(tile.kind for groups in own for tile in groups.values() if tile)
    return tuple(kind for kind, _ in taken.most_common())


def _heat(own: dict[tuple[Network, str], Groups], precision: str, mode: str, kinds: tuple[str, ...]) -> Heat:
    here = {key: groups for key, groups in own.items() if (key[0].precision, key[0].mode) == (precision, mode)}
    several = len({way for _, way in here}) > 1
    chosen = {f"{n.model}: {way}" if several else n.model: groups for (n, way), groups in here.items()}
    tiles = {(group, name): tile for name, groups in chosen.items() for group, tile in groups.items() if tile}
    rows = tuple(dict.fromkeys(group for groups in chosen.values() for group in groups))
    return Heat(f"{precision}, {mode}", rows, tuple(chosen), tiles, kinds)


def _tile(found: Sequence[Row]) -> HeatCell | None:
    """The dataflow chosen, with the candidates' times as note; None if no row is marked as chosen."""
    taken = [row for row in found if row.metric.startswith("chosen:")]
    if not taken:
        return None
    candidates = sorted((one for one in found if one.metric.startswith("choice:")), key=lambda one: one.value)
    note = "\n".join(f"{_flow(one)}{_passes(one)} {one.value:.4g} ms" for one in candidates)
    return HeatCell(_flow(taken[-1]), _gain(taken[-1], candidates), note)


def _gain(taken: Row, candidates: Sequence[Row]) -> str:
    """Speedup by the dataflow chosen for a group: of the candidate with this dataflow if there is exactly one, else of
    the whole choice over the default; "" if its peer is not the default."""
    own = [one for one in candidates if _flow(one) == _flow(taken)]
    row = own[0] if len(own) == 1 else taken if taken.peer == DEFAULT else None
    return f"{row.ratio:.2f}x" if row and row.value > 0 else ""


def _passes(row: Row) -> str:
    """The passes of a candidate in parentheses; "" for all."""
    passes = _group(row)[1]
    return f" ({passes})" if passes else ""


def _group(row: Row) -> tuple[str, str]:
    """The group of layers of a choice, and its passes."""
    network = Network.of(row)
    group, _, passes = (network.rest if network else "").rpartition("/")[2].partition(", ")
    return group or "all", passes


def _flow(row: Row) -> str:
    return row.metric.partition(":")[2]
