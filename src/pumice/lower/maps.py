"""Storage forms of a kernel map as sparse operand map[o, k, i].

pairs        lists of pairs per kernel offset (weight-stationary)
compacted    tiles of outputs with the offsets that occur in each (output-stationary), rows sorted by their offset masks
unsorted     compacted, with rows in their original order
splitN       compacted, in N parts, from 2 on: each has a range of kernel offsets and rows sorted by their masks
online       as compacted, but a kernel looks up in the map's table what a row meets, instead of reading it by tile
table        the input of every output and kernel offset, -1 if none: all offsets are computed
..._t        the form of the transposed map
..._w        a tiled form by kernel offset, for weight gradients (weight-stationary): outputs and inputs of each tile of
             the first offset, then of the next, those of all parts together
grouped      groups of pairs of one kernel offset
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import KernelMap, MultiMap, SortSpec, read_pending_sizes
from pumice.coords.chain import LARGE, SMALL, TileRule
from pumice.coords.chain_build import TiledMap
from pumice.coords.chain_tiles import GroupedPairs, PieceLists, Tiled
from pumice.coords.kernel_map import Deferred, pair_capacity
from pumice.coords.segments import WHOLE
from pumice.coords.traced_ops import RELATION, dynamic, own, register, relation_of
from pumice.coords.tracing import relation_fields
from pumice.errors import OptionError
from pumice.language.parse import parse
from pumice.language.rewrite import StorageForm
from pumice.lower import cpu, maps
from pumice.lower.segments import SegmentArgs, SegmentRule
from pumice.lower.tile_family import INT32_LIMIT
from pumice.runtime.cache import PERSISTENT, BoundedCache, intern_key
from pumice.runtime.compile import BACKGROUND
from pumice.runtime.streams import MAP_STREAM_PRIORITY, is_capturing, record_event
from pumice.schedule.dataflow import number_after
from pumice.schedule.tile import SHARED_CHUNK

_PAIRS = "map[o[p], k[p], i[p]] = 1 ; k:sorted"
_TILES = "map[rows[tile[e],b], k[e], met[e,b]] = 1 ; tile:sorted, rows:distinct, rows:onto"
_ONLINE = "map[rows[tile[e],b], k[e], met[rows[tile[e],b],k[e]]] = 1 ; tile:sorted, rows:distinct, rows:onto"
_ONLINE_T = "map[met[rows[tile[e],b],k[e]], k[e], rows[tile[e],b]] = 1 ; tile:sorted, rows:distinct, rows:onto"
_ONLINE_W = "map[rows[tile[e],b], k[e], met[rows[tile[e],b],k[e]]] = 1 ; k:sorted"
_TILES_W = "map[o[e,b], k[e], i[e,b]] = 1 ; k:sorted"
_TILES_T = "map[met[e,b], k[e], rows[tile[e],b]] = 1 ; tile:sorted, rows:distinct, rows:onto"
_GROUPS = "map[o[g,q], k[g], i[g,q]] = 1"
_TABLE = "map[o, k, met[o,k]] = 1"
_TABLE_T = "map[met[i,k], k, i] = 1"
_TILE_ARRAYS = ("rows", "tile", "k", "met")
_SPLITS = {"unsorted": 0, "compacted": 1, "split2": 2, "split3": 3, "split4": 4}
"""Parts into which the usual tiled forms split the kernel offsets; 0: rows are not sorted."""

_FORMS_OF: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("pairs",), ("pairs",)),
    "cuda": (("compacted",), ("compacted", "compacted_t", "grouped")),
}
"""Forms passed to the planner by device type: (inference, training)."""
_FORMS_OF_MULTI: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("pairs",), ("pairs",)),
    "cuda": (("grouped",), ("grouped",)),
}
"""The same for a MultiMap, which has no tiles."""

_FEW_TAPS, _SORTED = 8, 1 << 15
"""Rows stay unsorted at up to so many kernel offsets and below so many outputs (2 x 2 x 2, 18k voxels, H200)."""
_FEW_ROWS = 50_000
"""Maps with fewer outputs have small tiles."""
_USUAL_ROWS = 4096
"""Outputs assumed for small tiles when kernels are compiled ahead of use."""
_UNSORTED = {"compacted": "unsorted", "compacted_t": "unsorted_t"}


def form(name: str) -> StorageForm:
    """The storage form of that name."""
    return FORMS[name].storage_form


Arrays = Mapping[str, Tensor]
Sizes = Sequence[tuple[KernelMap, int, SortSpec | None]]


@dataclass(frozen=True)
class MapForm:
    """A form and the function that builds its arrays, part by part. sizes: arguments of coords.read_pending_sizes.

    axes: for forms that torch.ops.pumice.form builds under torch.compile: axes of each int32 array, a letter per size.
    """

    storage_form: StorageForm
    arrays: Callable[[KernelMap], Sequence[Arrays]]
    sizes: Callable[[KernelMap], Sizes] = lambda _: ()
    axes: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=16)
def _stored(text: str, parts: int = 1) -> StorageForm:
    statement = parse(text)
    return StorageForm(statement.target.indices, facts=statement.facts, parts=parts, ones=True)


def _pairs(found: KernelMap) -> Sequence[Arrays]:
    if not torch.compiler.is_compiling() and (listed := cpu.listed(found)) is not None:
        return [listed]
    inputs, outputs, taps = found.listed()
    return [{"o": outputs, "k": taps, "i": inputs}]


def _tiles(found: KernelMap, splits: int) -> Sequence[Arrays]:
    parts = found.split(tile_rows_for(found.num_outputs), splits)
    return [dict(zip(_TILE_ARRAYS, part, strict=True)) for part in parts]


def _grouped(found: KernelMap) -> Sequence[Arrays]:
    taps, inputs, outputs = found.grouped(group_of(found))
    return [{"o": outputs, "k": taps, "i": inputs}]


def planner_operands(found: KernelMap, differentiable: bool) -> tuple[tuple[str, ...], list[Tensor]]:
    """(tokens, arrays) of a map in its default forms; under torch.compile in those already built, if any."""
    if torch.compiler.is_compiling():
        liked = _preferred_forms(found, differentiable)
        # Without duplicates: "grouped" has no unsorted variant.
        either = dict.fromkeys(name for each in liked for name in (each, _UNSORTED.get(each, each)))
        return _all_forms(found, tuple(name for name in either if found.has(("form", name))) or liked)
    return found.cached(("default forms", differentiable), lambda m: _all_forms(m, names_of(m, differentiable)))


def _all_forms(found: KernelMap, names: Iterable[str]) -> tuple[tuple[str, ...], list[Tensor]]:
    each = [form_operands(found, name) for name in names]
    return tuple(t for tokens, _ in each for t in tokens), [x for _, arrays in each for x in arrays]


def form_operands(found: KernelMap, name: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """(tokens, arrays) of a map in one form, cached with the map."""
    return found.cached(("form", name), lambda m: build_form(m, name))


def keep_tiles(one: TiledMap) -> None:
    """Cache the arrays of a map built with others (coords.chain) as its forms; tensors are created when read."""
    found, turned, groups = one.found, one.turned, one.groups
    name = _keep_form(found, one.tiled, "")
    found.keep("laid out", (name, one.tiled))
    if groups is None:
        return
    found.keep(("form", "grouped"), Deferred(partial(_form_of_groups, groups)))
    if turned is not None:
        tokens = _TILE_TOKENS[name], _TILE_TOKENS[_keep_form(found, turned, "_t")]
        found.keep(("arrays", True), LaidArrays(tokens, found, (one.tiled, turned, groups)))


def _keep_form(found: KernelMap, tiled: Tiled, side: str) -> str:
    """Cache tiles as a form of a map, and return the form's name. side: "_t" for tiles of the transpose."""
    name = ("compacted" if tiled.sorted else "unsorted") + side
    # Does not hold the map: no reference cycle.
    found.keep(("form", name), Deferred(partial(_form_of_tiles, tiled, name)))
    return name


def _form_of_tiles(tiled: Tiled, name: str) -> tuple[tuple[str, ...], list[Tensor]]:
    return _TILE_TOKENS[name], [*tiled.tiles()]


def _form_of_groups(groups: GroupedPairs) -> tuple[tuple[str, ...], list[Tensor]]:
    taps, inputs, outputs = groups.pairs()
    return _GROUP_TOKENS, [outputs, taps, inputs]


def laid_out(found: KernelMap) -> tuple[tuple[str, ...], Tiled] | None:
    """(tokens, tiles) of the default inference form of a map built with others (coords.chain), else None."""
    kept = found.get_cached("laid out")
    return None if kept is None else (_TILE_TOKENS[kept[0]], kept[1])


_TILE_TOKENS = {
    name: tuple(f"map@{name}@0@{local}" for local in _TILE_ARRAYS)
    for name in ("compacted", "unsorted", "compacted_t", "unsorted_t")
}
_GROUP_TOKENS = tuple(f"map@grouped@0@{local}" for local in "oki")


def names_of(found: KernelMap, differentiable: bool) -> tuple[str, ...]:
    """The default forms of a map, from which the planner chooses."""
    names = _preferred_forms(found, differentiable)
    return names if found.volume > _FEW_TAPS else tuple(preferred_form(found, name) for name in names)


def _preferred_forms(found: KernelMap, differentiable: bool) -> tuple[str, ...]:
    known = _FORMS_OF_MULTI if isinstance(found, MultiMap) else _FORMS_OF
    inference, training = known.get(found.device.type, known["cpu"])
    return training if differentiable else inference


def preferred_form(found: KernelMap, name: str) -> str:
    """The name of the form, or of its unsorted variant if sorting costs more than it saves."""
    outputs = {"compacted": found.num_outputs, "compacted_t": found.num_inputs}.get(name, _SORTED)
    return _UNSORTED[name] if found.volume <= _FEW_TAPS and outputs < _SORTED else name


@lru_cache(maxsize=256)
def read_alike(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The tokens without the distinction of sorted and unsorted tiles, which the same kernels read."""
    return tuple(token.replace("@unsorted", "@compacted") for token in tokens)


class UsualTiles(NamedTuple):
    """Assumed sizes of a map, to compile its kernels ahead. block: rows per tile; mean: entries per tile."""

    outputs: int
    block: int
    mean: int

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens of the tile arrays."""
        return _TILE_TOKENS["compacted"]

    def arrays(self, device: torch.device) -> list[Tensor]:
        """Uninitialised tile arrays."""
        tiles = -(-self.outputs // self.block)
        entries = tiles * self.mean
        return _without_contents(device, (tiles, self.block), (entries,), (entries,), (entries, self.block))

    def arrays_of_passes(self, volume: int, symmetric: bool, device: torch.device) -> MapArrays:
        """Uninitialised arrays of all training forms. volume: kernel offsets; symmetric: the map equals its transpose
        up to the order of the offsets."""
        forward, group = self.arrays(device), _GROUPS_OF[0][1]
        back = self.arrays(device)
        if symmetric:
            # The same arrays but the offsets, as in KernelMap.split.
            back = [forward[0], forward[1], back[2], forward[3]]
        groups = volume + self.outputs * self.mean // group
        grouped = _without_contents(device, (groups, group), (groups,), (groups, group))
        return MapArrays(_TOKENS_OF_PASSES, volume, [*forward, *back, *grouped])


def _without_contents(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


_TOKENS_OF_PASSES = (*_TILE_TOKENS["compacted"], *_TILE_TOKENS["compacted_t"], *_GROUP_TOKENS)


def other_tiles(found: KernelMap) -> UsualTiles:
    """Typical tiles of the other height than the map's, with as many entries per tile."""
    laid, rule = laid_out(found), tile_rule()
    arrays = planner_operands(found, False)[1] if laid is None else laid[1].tiles()
    (tiles, height), entries = arrays[0].shape, arrays[1].shape[0]
    outputs = _FEW_ROWS if height == rule.block(0) else _FEW_ROWS - 1
    return UsualTiles(outputs, rule.block(outputs), max(1, round(entries / max(tiles, 1))))


def usual_tiles(volume: int, rows: int) -> Iterator[UsualTiles]:
    """Typical tiles of each height that occurs on the levels of a scene of `rows` voxels. volume: kernel offsets."""
    yield _usual_tiles(volume, min(rows, _USUAL_ROWS))
    if rows >= _FEW_ROWS:
        yield _usual_tiles(volume, _FEW_ROWS)


def tiles_of_larger_scenes(volume: int, rows: int) -> Iterator[UsualTiles]:
    """Typical tiles of a height that occurs only in larger scenes than one of `rows` voxels."""
    if rows < _FEW_ROWS:
        yield _usual_tiles(volume, _FEW_ROWS)


def _usual_tiles(volume: int, outputs: int) -> UsualTiles:
    return UsualTiles(outputs, tile_rule().block(outputs), -(-volume // 2))


def materialize(wanted: Iterable[tuple[KernelMap, Sequence[str]]]) -> None:
    """Materialise maps in these forms, with one host synchronisation for all sizes.

    During CUDA graph capture they are built on side streams, concurrently with all work before their first reader.
    """
    asked = dict.fromkeys((found, name) for found, names in wanted for name in names)
    missing = [(found, name) for found, name in asked if found.buffered is not None or not found.has(("form", name))]
    read_pending_sizes([size for found, name in missing for size in FORMS[name].sizes(found)])
    if missing and missing[0][0].table.is_cuda and torch.cuda.is_current_stream_capturing():
        return _materialize_on_side_streams(missing)
    for found, name in missing:
        form_operands(found, name)


_STREAMS = 4


def _materialize_on_side_streams(wanted: Iterable[tuple[KernelMap, str]]) -> None:
    """Materialise maps on high-priority side streams, one per table: each takes a series of small kernels."""
    main = torch.cuda.current_stream()
    # No more streams than tables: torch has 32 per priority and assigns them round-robin.
    streams: list[torch.cuda.Stream] = []
    turns: dict[int, torch.cuda.Stream] = {}
    for found, name in wanted:
        if found.has(("form", name)):
            # Takes no stream: an idle one would be waited for, too.
            continue
        stream = turns.get(id(found.table))
        if stream is None:
            if len(streams) < _STREAMS:
                streams.append(torch.cuda.Stream(priority=MAP_STREAM_PRIORITY))
            stream = turns[id(found.table)] = streams[len(turns) % _STREAMS]
            stream.wait_stream(main)
        before = found.cached_keys()
        with torch.cuda.stream(stream):
            form_operands(found, name)
        event = record_event(stream)
        if found.buffered is None:
            main.wait_event(event)
        else:
            found.buffered.pending_events.register(event, found.cached_keys() - before)


def read_sizes(found: KernelMap, names: Iterable[str] = ()) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """(pairs per kernel offset, by form the (tile, offset) entries of each part); one host synchronisation."""
    pending: dict[str, Sizes] = {name: FORMS[name].sizes(found) for name in names}
    own = found.transpose() if found.flipped else found
    read_pending_sizes([(own, 0, None), *(size for sizes in pending.values() for size in sizes)])
    totals = own.cached("totals", _missing)
    entries = {
        name: tuple(sum(one.cached(("entries", block, how), _missing)) for one, block, how in sizes)
        for name, sizes in pending.items()
    }
    return tuple(totals), entries


def tile_forms(found: KernelMap) -> tuple[str, ...]:
    """The tiled forms with at most as many parts as the map has kernel offsets."""
    return tuple(name for name, splits in _SPLITS.items() if splits <= max(1, found.volume))


def _missing(found: KernelMap) -> Sequence[int]:
    raise AssertionError("read_pending_sizes() has not cached it")


def build_form(found: KernelMap, name: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """Build (tokens, arrays) of a map in one form."""
    form = FORMS[name]
    traced = form.axes and torch.compiler.is_compiling() and not isinstance(found, MultiMap)
    parts = _traced(found, name) if traced else form.arrays(found)
    named = [(f"map@{name}@{number}@{local}", x) for number, part in enumerate(parts) for local, x in part.items()]
    if found.buffered is not None:
        for _, x in named:
            PERSISTENT.add(x)
    return tuple(token for token, _ in named), [x for _, x in named]


def _traced(found: KernelMap, name: str) -> Sequence[Arrays]:
    """The arrays of a form, built by a custom operator."""
    inputs, axes = (found.num_outputs if found.flipped else found.num_inputs), FORMS[name].axes
    arrays = torch.ops.pumice.form(found.table, inputs, found.flipped, *relation_fields(found.relation), name)
    return [dict(zip(axes, arrays[at:], strict=False)) for at in range(0, len(arrays), len(axes))]


def tile_rows_for(outputs: int) -> int:
    """Rows per tile for this many outputs: small tiles where large ones are too few to fill a GPU.

    Time with 64 rows relative to 128 (H100, fp16, scans; 256, 96 and 128 channels): 42,000 outputs 0.70, 0.85 and 0.98;
    136,000 outputs 1.40, 1.06 and 1.33. A U-Net: 0.90 at 42,000 voxels, 1.03 at 70,000, 1.08 at 100,000.
    """
    return tile_rule().block(outputs)


def tile_rule() -> TileRule:
    """The usual sizes of tiles and groups, by the size of a map."""
    return TileRule(_FEW_ROWS, _FEW_TAPS, _SORTED, (SHARED_CHUNK,), _GROUPS_OF)


class TileHeights:
    """Counts background compilations per tile height. While one height is being compiled, new maps get tiles of the
    other height, whose kernels are ready."""

    def __init__(self) -> None:
        self._lock, self._pending = Lock(), Counter[int]()

    def compile(self, height: int, task: Callable[[], object]) -> None:
        """Run a task that compiles a kernel for tiles of this height in the background."""
        with self._lock:
            self._pending[height] += 1
        BACKGROUND.submit(partial(self._run, height, task))

    def _run(self, height: int, task: Callable[[], object]) -> None:
        try:
            task()
        finally:
            with self._lock:
                self._pending[height] -= 1

    def rule(self) -> TileRule:
        """The tile rule for new maps."""
        usual = tile_rule()
        small, large = (self._pending[height] > 0 for height in (SMALL, LARGE))
        if small == large:
            return usual
        return replace(usual, few_rows=_ANY if large else 0)


_ANY = 1 << 30
"""More outputs than any map has."""
TILE_HEIGHTS = TileHeights()

_GROUPS_OF = ((4_000_000, 1024), (math.inf, 2048))
"""(upper bound of the number of pairs, pairs per group): few group sizes, since each has a kernel of its own.

Weight gradients in us by pairs per group (fp16, H200):
pairs, channels       1024   2048   4096   8192
0.5 million, 128        57     76     90     94
1.2 million, 96        100    105    125    176
1.8 million, 128       150    148    147    192
7.4 million, 96        508    483    462    477
29.5 million, 96      2114   1951   1896   1950
"""


def group_of(found: KernelMap) -> int:
    """Pairs per group, by the number of pairs (one host synchronisation), or by the capacity of a buffered map. Of a
    MultiMap at most about those of a mean kernel offset: many have few."""
    own = found.transpose() if found.flipped else found
    pairs = sum(read_sizes(found)[0]) if own.buffered is None else pair_capacity(own, own.buffered)
    usual = tile_rule().group(pairs)
    if not isinstance(own, MultiMap):
        return usual
    return min(usual, max(_FEWEST, 1 << (pairs // max(1, own.volume)).bit_length()))


_FEWEST = 64
"""Pairs per group at least."""


def _tile_sizes(found: KernelMap, splits: int) -> Sizes:
    if found.flipped and found.symmetric:
        # The transpose's tiles serve both (KernelMap.split).
        found = found.transpose()
    return [(found, tile_rows_for(found.num_outputs), how) for how in SortSpec.splits(found.volume, splits)]


def _group_sizes(found: KernelMap) -> Sizes:
    return [(found.transpose() if found.flipped else found, 0, None)]


_TILE_AXES = {"rows": "tb", "tile": "e", "k": "e", "met": "eb"}
_TEXTS = {"": _TILES, "_t": _TILES_T}
"""The tiled forms of a map and of its transpose, by the end of their names."""


@lru_cache(maxsize=256)
def _tiled(splits: int, end: str = "") -> MapForm:
    """A tiled form of so many parts, named with this end: of the map, its transpose, or by kernel offset."""
    if end == "_w":
        stored, axes = _stored(_TILES_W), {"o": "eb", "k": "e", "i": "eb"}
        return MapForm(stored, partial(_by_offset, splits), lambda found: _tile_sizes(found, splits), axes)

    def side(found: KernelMap) -> KernelMap:
        return found.transpose() if end == "_t" else found

    stored = _stored(_TEXTS[end], max(1, splits))
    return MapForm(
        stored, lambda found: _tiles(side(found), splits), lambda found: _tile_sizes(side(found), splits), _TILE_AXES
    )


def _by_offset(splits: int, found: KernelMap) -> Sequence[Arrays]:
    """The tiles of all splits, sorted by kernel offset; padding entries come first, with offset -1."""
    parts = found.split(tile_rows_for(found.num_outputs), splits)
    taps = _joined([torch.where(part.tiles < part.rows.shape[0], part.taps, -1) for part in parts])
    taps, order = taps.sort(stable=True)
    inputs = _joined([part.inputs for part in parts])[order]
    outputs = _joined([part.rows[part.tiles.clamp(max=part.rows.shape[0] - 1)] for part in parts])[order]
    return [{"o": torch.where(inputs < 0, -1, outputs), "k": taps, "i": inputs}]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def splits_in_a_row(found: KernelMap, splits: int) -> list[Tensor]:
    """The tile arrays of all splits one after the other, for one kernel over all; rows and tiles are counted through.
    Cached with the map."""
    return found.cached(("splits in a row", splits), partial(_in_a_row, splits))


def _in_a_row(splits: int, found: KernelMap) -> list[Tensor]:
    parts = found.split(tile_rows_for(found.num_outputs), splits)
    tiles = parts[0].rows.shape[0]
    # A padding entry of a part counts as one of the next part's first tile, without inputs.
    rows = [torch.where(part.rows < 0, -1, part.rows + n * found.num_outputs) for n, part in enumerate(parts)]
    each = (
        rows,
        [p.tiles + n * tiles for n, p in enumerate(parts)],
        [p.taps for p in parts],
        [p.inputs for p in parts],
    )
    made = [_joined(arrays) for arrays in each]
    if found.buffered is not None:
        for x in made:
            PERSISTENT.add(x)
    return made


def _online(found: KernelMap) -> Sequence[Arrays]:
    """Tiles of rows sorted by their offsets, and the map's table."""
    own = found.transpose() if found.flipped and found.symmetric else found
    if own.buffered is not None:
        raise OptionError("form 'online' counts entries on the host, which is not allowed in capture")
    (how,) = SortSpec.splits(own.volume, 1)
    tiling = own.tiling(tile_rows_for(own.num_outputs), how)
    tile, taps = tiling.active.nonzero().int().t().contiguous()
    taps = taps if own is found else own.volume - 1 - taps
    return [{"rows": tiling.slots, "tile": tile, "k": taps, "met": found.rows()}]


def _online_by_offset(found: KernelMap) -> Sequence[Arrays]:
    ((rows, tile, taps, met),) = [part.values() for part in _online(found)]
    taps, order = taps.sort(stable=True)
    return [{"rows": rows, "tile": tile[order], "k": taps, "met": met}]


class _Forms(Mapping[str, MapForm]):
    """The forms by name: the usual ones, which it lists, and tiled ones of any number of parts, by the rule splitN."""

    def __init__(self, usual: Mapping[str, MapForm]) -> None:
        self._usual = usual

    def __getitem__(self, name: str) -> MapForm:
        found = self._usual.get(name)
        if found is not None:
            return found
        base, side = (name[:-2], name[-2:]) if name.endswith(("_t", "_w")) else (name, "")
        count = number_after("split", base)
        if count is None:
            raise KeyError(name)
        return _tiled(count, side)

    def __iter__(self) -> Iterator[str]:
        return iter(self._usual)

    def __len__(self) -> int:
        return len(self._usual)


FORMS: Mapping[str, MapForm] = _Forms(
    {
        "pairs": MapForm(_stored(_PAIRS), _pairs),
        "grouped": MapForm(_stored(_GROUPS), _grouped, _group_sizes, {"o": "gq", "k": "g", "i": "gq"}),
        "table": MapForm(_stored(_TABLE), lambda found: [{"met": found.rows()}]),
        "table_t": MapForm(_stored(_TABLE_T), lambda found: [{"met": found.transpose().rows()}]),
        "online": MapForm(_stored(_ONLINE), _online),
        "online_t": MapForm(_stored(_ONLINE_T), lambda found: _online(found.transpose())),
        "online_w": MapForm(_stored(_ONLINE_W), _online_by_offset),
        **{name + end: _tiled(splits, end) for end in (*_TEXTS, "_w") for name, splits in _SPLITS.items()},
    }
)


# Arrays of a map as arguments of calls


class MapSignature(NamedTuple):
    """Layout of a map's arrays without row counts; maps of equal keys share call templates. key: interned;
    row_strides: of each array."""

    key: Hashable
    row_strides: Sequence[int]

    @staticmethod
    def of(tokens: tuple[str, ...], volume: int, arrays: Sequence[Tensor]) -> MapSignature:
        """tokens: of the arrays; volume: kernel offsets of the map."""
        places = [id(x) for x in arrays]
        # A template knows one position of an array that occurs twice, as in symmetric maps.
        each = tuple([(x.shape[1:], x.stride(), x.dtype, x.device, places.index(id(x))) for x in arrays])
        return MapSignature(intern_key((read_alike(tokens), volume, each)), [x.stride(0) for x in arrays])


class BoundMap:
    """The arrays of a map that a call reads. signature: MapSignature.key; rows, addresses: of each array; needs_int64:
    True if an array needs 64-bit addressing; is_aligned: True if all are aligned to 16 bytes."""

    __slots__ = ("_arrays", "_segments", "addresses", "is_aligned", "needs_int64", "rows", "signature")
    signature: Hashable
    rows: Sequence[int]
    addresses: Sequence[int]

    def __init__(self, arrays: Sequence[Tensor], signature: MapSignature) -> None:
        rows = [x.shape[0] if x.ndim else 1 for x in arrays]
        self._arrays, self._segments = arrays, dict[Any, SegmentArgs]()
        self._set(signature, rows, [x.data_ptr() for x in arrays])

    def _set(self, signature: MapSignature, rows: Sequence[int], addresses: Sequence[int]) -> None:
        self.signature, self.rows, self.addresses = signature.key, rows, addresses
        self.needs_int64: bool = any([n * s >= INT32_LIMIT for n, s in zip(rows, signature.row_strides, strict=True)])
        bits = 0
        for address in addresses:
            bits |= address
        self.is_aligned: bool = not bits & 15

    @property
    def arrays(self) -> Sequence[Tensor]:
        return self._arrays

    def segments(self, number: int, count: int, rule: SegmentRule) -> SegmentArgs | None:
        """The segments of array `number` for the values 0 to count - 1. None if they need several kernels, the array
        does not belong to the map (-1), or they would have to be computed during CUDA graph capture."""
        key = number, count, rule
        found = self._segments.get(key)
        if found is None:
            found = None if number < 0 else self._known_segments(number, rule) or self._find_segments(*key)
            if found is None:
                return None
            self._segments[key] = found
        return found if found.one_kernel else None

    def _known_segments(self, number: int, rule: SegmentRule) -> SegmentArgs | None:
        """Segments computed together with the map, or None."""
        return None

    def _find_segments(self, number: int, count: int, rule: SegmentRule) -> SegmentArgs | None:
        array = self.arrays[number]
        if array not in PERSISTENT and is_capturing(array.device):
            return None
        return SegmentArgs.of(rule.find(array, count))


class BoundLayout(BoundMap):
    """A BoundMap whose arrays lie in a buffer shared by several maps (coords.chain_tiles). make: creates tensors, only
    if read; pieces: by array number and maximum length, the pieces of its runs."""

    __slots__ = ("_make", "_pieces")

    def __init__(
        self,
        make: Callable[[], Sequence[Tensor]],
        places: tuple[Sequence[int], Sequence[int]],
        pieces: Mapping[int, Mapping[int, PieceLists]],
        signature: MapSignature,
    ) -> None:
        """places: (lengths, addresses) of the arrays."""
        self._make, self._pieces, self._segments = make, pieces, {}
        self._set(signature, *places)

    @property
    def arrays(self) -> Sequence[Tensor]:
        return self._make()

    def _known_segments(self, number: int, rule: SegmentRule) -> SegmentArgs | None:
        pieces = self._pieces.get(number)
        if pieces is None or rule.stack or (rule.per_lane and not rule.chunk):
            return None
        found = pieces.get(rule.chunk or WHOLE)
        if found is None:
            return None
        return SegmentArgs(found.size, dict(zip(_PIECES, found.addresses(), strict=True)), found)


_TILE_OF_ENTRY = _TILE_ARRAYS.index("tile")
_PIECES = ("rows", "starts", "stops", "firsts", "pieces")


class NoMap:
    """Placeholder for the kernel map of a linear map, which has one output per input row."""

    __slots__ = ("_known", "calls", "num_inputs", "num_outputs")
    buffered: None = None
    flipped: bool = False
    num_inputs: int
    num_outputs: int
    calls: dict[Hashable, Any]

    def __init__(self, rows: int) -> None:
        self.num_inputs = self.num_outputs = rows
        self.calls, self._known = dict[Hashable, Any](), dict[Hashable, Any]()

    def cached(self, name: Hashable, build: Callable[[NoMap], Any]) -> Any:
        """As KernelMap.cached."""
        if name not in self._known:
            self._known[name] = build(self)
        return self._known[name]


NO_MAPS: BoundedCache[NoMap] = BoundedCache(1024)
_NO_MAP = BoundMap((), MapSignature(None, ()))


def no_map(rows: int) -> NoMap:
    """The cached placeholder for this many rows."""
    return NO_MAPS.get(rows) or NO_MAPS.keep(rows, NoMap(rows))


def bound_map(found: KernelMap | NoMap) -> BoundMap:
    """The arrays of a map's inference forms, cached with the map."""
    if isinstance(found, NoMap):
        return _NO_MAP
    known = found.get_cached("bound")
    if known is None:
        laid = laid_out(found)
        known = found.cached("bound", _bind_map) if laid is None else found.keep("bound", _bind_tiles(found, *laid))
    return known


def _bind_map(found: KernelMap) -> BoundMap:
    tokens, arrays = planner_operands(found, False)
    return BoundMap(arrays, MapSignature.of(tokens, found.volume, arrays))


def _bind_tiles(found: KernelMap, tokens: tuple[str, ...], tiled: Tiled) -> BoundMap:
    signature = _signature_of_layout(tokens, (tiled.block, 0, 0, tiled.block), found.volume, found.device)
    pieces = {_TILE_OF_ENTRY: tiled.pieces}
    return BoundLayout(tiled.tiles, (tiled.lengths(), tiled.addresses()), pieces, signature)


@lru_cache(maxsize=256)
def _signature_of_layout(
    tokens: tuple[str, ...], columns: tuple[int, ...], volume: int, device: torch.device
) -> MapSignature:
    """MapSignature of contiguous int32 arrays. columns: of each array, 0 for 1-D arrays; volume: kernel offsets."""
    arrays = [torch.empty((1, n) if n else (1,), dtype=torch.int32, device=device) for n in columns]
    return MapSignature.of(tokens, volume, arrays)


class MapArrays:
    """The arrays of a map's default forms; a call under autograd reads some of them. key: equal for maps with the same
    forms and repeated arrays; kind: equal if trailing shapes are, too."""

    arrays: Sequence[Tensor]
    tokens: tuple[str, ...]

    def __init__(self, tokens: tuple[str, ...], volume: int, arrays: Sequence[Tensor]) -> None:
        self.arrays, self.tokens, self._volume = arrays, tokens, volume
        places = [id(x) for x in arrays]
        # An array may occur twice, as in symmetric maps.
        self.key: Hashable = intern_key((read_alike(tokens), volume, tuple(map(places.index, places))))
        self.kind: Hashable = intern_key((self.key, tuple([x.shape[1:] for x in arrays])))
        self._bound: dict[tuple[int, ...], BoundMap] = {}

    @staticmethod
    def of(found: KernelMap | NoMap, differentiable: bool = True) -> MapArrays:
        """The arrays of a map, cached with the map."""
        if isinstance(found, NoMap):
            return NO_ARRAYS
        name = "arrays", differentiable
        return found.get_cached(name) or found.cached(name, lambda m: _arrays_of(m, differentiable))

    def bound(self, places: tuple[int, ...]) -> BoundMap:
        """The arrays at these positions, bound for calls that read only these."""
        known = self._bound.get(places)
        if known is None:
            tokens, arrays = tuple([self.tokens[n] for n in places]), [self.arrays[n] for n in places]
            known = self._bound[places] = BoundMap(arrays, MapSignature.of(tokens, self._volume, arrays))
        return known

    def places(self, arrays: Iterable[Tensor]) -> tuple[int, ...]:
        """The sorted positions of these arrays."""
        places = {id(x): n for n, x in reversed([*enumerate(self.arrays)])}
        return tuple(sorted([places[id(x)] for x in arrays]))


NO_ARRAYS = MapArrays((), 0, ())
"""The (absent) arrays of a linear map."""


class LaidArrays(MapArrays):
    """MapArrays of a map built with others (coords.chain): tiles, tiles of the transpose, groups of pairs. Tensors are
    created only if read."""

    tokens: tuple[str, ...]
    key: Hashable
    kind: Hashable

    def __init__(
        self,
        tokens: tuple[tuple[str, ...], tuple[str, ...]],
        found: KernelMap,
        layouts: tuple[Tiled, Tiled, GroupedPairs],
    ) -> None:
        """tokens: of the map's tiles, of its transpose's tiles."""
        own, turned, groups = self._layouts = layouts
        self.tokens, self._volume, self._bound = (*tokens[0], *tokens[1], *_GROUP_TOKENS), found.volume, {}
        self._device = found.device
        self._lengths = [*own.lengths(), *turned.lengths(), *[groups.count] * 3]
        self._addresses = [*own.addresses(), *turned.addresses(), *groups.addresses()]
        self._columns = own.block, 0, 0, own.block, turned.block, 0, 0, turned.block, groups.size, 0, groups.size
        self.key, self.kind = _keys_of_layouts(self.tokens, found.volume, turned.of is not None, self._columns)

    @property
    def arrays(self) -> Sequence[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The arrays as tensors."""
        return _tensors_of(self._layouts)

    def bound(self, places: tuple[int, ...]) -> BoundMap:
        """As MapArrays.bound."""
        known = self._bound.get(places)
        if known is None:
            tokens, columns = tuple([self.tokens[n] for n in places]), tuple([self._columns[n] for n in places])
            where = [self._lengths[n] for n in places], [self._addresses[n] for n in places]
            own, turned, _ = self._layouts
            each = {_TILE_OF_ENTRY: own.pieces, len(_TILE_ARRAYS) + _TILE_OF_ENTRY: turned.pieces}
            pieces = {number: each[n] for number, n in enumerate(places) if n in each}
            signature = _signature_of_layout(tokens, columns, self._volume, self._device)
            known = BoundLayout(partial(_tensors_of, self._layouts, places), where, pieces, signature)
            self._bound[places] = known
        return known


def _tensors_of(
    layouts: tuple[Tiled, Tiled, GroupedPairs], places: Sequence[int] = range(len(_TOKENS_OF_PASSES))
) -> list[Tensor]:
    """The arrays of LaidArrays at these positions, as tensors."""
    own, turned, groups = layouts
    every = [*own.tiles(), *turned.tiles(), *_form_of_groups(groups)[1]]
    return [every[n] for n in places]


@lru_cache(maxsize=256)
def _keys_of_layouts(
    tokens: tuple[str, ...], volume: int, turned: bool, columns: tuple[int, ...]
) -> tuple[Hashable, Hashable]:
    """(key, kind) of LaidArrays. turned: the map is symmetric, so that its transpose shares all tile arrays but the
    kernel offsets."""
    places = (0, 1, 2, 3, 0, 1, 6, 3, 8, 9, 10) if turned else tuple(range(len(tokens)))
    key = intern_key((read_alike(tokens), volume, places))
    return key, intern_key((key, tuple([torch.Size([n] if n else []) for n in columns])))


def _arrays_of(found: KernelMap, differentiable: bool) -> MapArrays:
    tokens, arrays = planner_operands(found, differentiable)
    return MapArrays(tokens, found.volume, arrays)


def _form(table: Tensor, inputs: int, flipped: bool, *relation: Any) -> list[Tensor]:
    *fields, name = relation
    found = KernelMap(relation_of(*fields), table, inputs, table.shape[0])
    found = found.transpose() if flipped else found
    return own(maps.build_form(found, maps.preferred_form(found, name))[1], table)


def _form_fake(table: Tensor, inputs: int, flipped: bool, *relation: Any) -> list[Tensor]:
    form = maps.FORMS[relation[-1]]
    made = []
    for _ in range(form.storage_form.parts):
        sizes = {axis: dynamic() for axis in dict.fromkeys("".join(form.axes.values()))}
        made += [table.new_empty([sizes[axis] for axis in axes]) for axes in form.axes.values()]
    return made


register(f"form(Tensor table, SymInt inputs, bool flipped, {RELATION}, str name) -> Tensor[]", _form, _form_fake)
