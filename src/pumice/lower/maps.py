"""Storage forms of a kernel map as sparse operand map[o, k, i].

pairs        lists of pairs per kernel offset (weight-stationary)
compacted    tiles of outputs with the offsets that occur in each (output-stationary), rows sorted by their offset masks
unsorted     the same with rows in their order
split2, split3, split4   the same in as many parts, each with rows sorted by its share of the kernel offsets
table        the input of every output and kernel offset, -1 if none: all offsets are computed
..._t        the same for the transposed map
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

from pumice.coords import KernelMap, SortSpec, read_pending_sizes
from pumice.coords.chain import LARGE, SMALL, TileRule
from pumice.coords.chain_build import TiledMap
from pumice.coords.chain_pairs import GroupedPairs
from pumice.coords.chain_tiles import PieceLists, Tiled, Turned
from pumice.coords.kernel_map import Deferred, pair_capacity
from pumice.coords.segments import WHOLE
from pumice.coords.traced_ops import RELATION, dynamic, own, register, relation_of
from pumice.coords.tracing import relation_fields
from pumice.language.parse import parse
from pumice.language.rewrite import StorageForm
from pumice.lower import maps
from pumice.lower.segments import SegmentArgs, SegmentRule
from pumice.lower.tile_family import INT32_LIMIT
from pumice.runtime.cache import PERSISTENT, BoundedCache, intern_key
from pumice.runtime.compile import BACKGROUND
from pumice.runtime.streams import MAP_STREAM_PRIORITY, is_capturing, record_event
from pumice.schedule.tile import SHARED_CHUNK

_PAIRS = "map[o[p], k[p], i[p]] = 1 ; k:sorted"
_TILES = "map[rows[tile[e],b], k[e], met[e,b]] = 1 ; tile:sorted, rows:distinct, rows:onto"
_TILES_T = "map[met[e,b], k[e], rows[tile[e],b]] = 1 ; tile:sorted, rows:distinct, rows:onto"
_GROUPS = "map[o[g,q], k[g], i[g,q]] = 1"
_TABLE = "map[o, k, met[o,k]] = 1"
_TABLE_T = "map[met[i,k], k, i] = 1"
_TILE_ARRAYS = ("rows", "tile", "k", "met")
_SPLITS = {"unsorted": 0, "compacted": 1, "split2": 2, "split3": 3, "split4": 4}
"""Number of parts into which forms of tiles split the kernel offsets; 0: rows are not sorted."""

_FORMS_OF: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("pairs",), ("pairs",)),
    "cuda": (("compacted",), ("compacted", "compacted_t", "grouped")),
}
"""Forms passed to the planner by device type: (inference, training)."""

_FEW_TAPS, _SORTED = 8, 1 << 15
"""Kernel offsets and outputs up to which sorting rows does not pay off (MinkUNet's 2 x 2 x 2, 18k voxels, H200)."""
_FEW_ROWS = 50_000
"""Outputs below which tiles are smaller."""
_USUAL_ROWS = 4096
"""Outputs of a map with tiles of fewer rows."""
_UNSORTED = {"compacted": "unsorted", "compacted_t": "unsorted_t"}


def form(name: str) -> StorageForm:
    """The storage form of that name."""
    return FORMS[name].storage_form


Arrays = Mapping[str, Tensor]
Sizes = Sequence[tuple[KernelMap, int, SortSpec | None]]


@dataclass(frozen=True)
class MapForm:
    """A form and the function that builds its arrays, part by part. sizes: arguments of coords.read_pending_sizes.

    axes: for forms that traced code builds by an operator (lower.layouts): axes of each int32 array, a letter per size.
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
    inputs, outputs, _ = found.pairs()
    return [{"o": outputs, "k": found.taps(), "i": inputs}]


def _tiles(found: KernelMap, splits: int) -> Sequence[Arrays]:
    parts = found.split(tile_rows_for(found.num_outputs), splits)
    return [dict(zip(_TILE_ARRAYS, part, strict=True)) for part in parts]


def _grouped(found: KernelMap) -> Sequence[Arrays]:
    taps, inputs, outputs = found.grouped(group_of(found))
    return [{"o": outputs, "k": taps, "i": inputs}]


def planner_operands(found: KernelMap, differentiable: bool) -> tuple[tuple[str, ...], list[Tensor]]:
    """(tokens, arrays) of a map in its device's default forms; under torch.compile in the existing forms, if any."""
    if torch.compiler.is_compiling():
        liked = _preferred_forms(found, differentiable)
        # Without duplicates: a form that needs no sorting is its own alternative.
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
    """Keep what a map is laid out in as its forms, without asking for its sizes."""
    found, turned, groups = one.found, one.turned, one.groups
    name = _keep_form(found, one.tiled, "")
    found.keep("laid out", (name, one.tiled))
    if groups is None:
        return
    found.keep(("form", "grouped"), Deferred(partial(_form_of_groups, groups)))
    if turned is not None:
        tokens = _TILE_TOKENS[name], _TILE_TOKENS[_keep_form(found, turned, "_t")]
        found.keep(("arrays", True), LaidArrays(tokens, found, (one.tiled, turned, groups)))


def _keep_form(found: KernelMap, tiled: Tiled | Turned, side: str) -> str:
    """Keep tiles as a form of a map; its name. side: "_t" for tiles of the transpose."""
    name = ("compacted" if tiled.sorted else "unsorted") + side
    # Not of the map, which would hold itself.
    found.keep(("form", name), Deferred(partial(_form_of_tiles, tiled, name)))
    return name


def _form_of_tiles(tiled: Tiled | Turned, name: str) -> tuple[tuple[str, ...], list[Tensor]]:
    return _TILE_TOKENS[name], [*tiled.tiles()]


def _form_of_groups(groups: GroupedPairs) -> tuple[tuple[str, ...], list[Tensor]]:
    taps, inputs, outputs = groups.pairs()
    return _GROUP_TOKENS, [outputs, taps, inputs]


def laid_out(found: KernelMap) -> tuple[tuple[str, ...], Tiled] | None:
    """(tokens, tiles) of a map's default form for inference, if it was laid out with others; else None."""
    kept = found.get_cached("laid out")
    return None if kept is None else (_TILE_TOKENS[kept[0]], kept[1])


_TILE_TOKENS = {
    name: tuple(f"map@{name}@0@{local}" for local in _TILE_ARRAYS)
    for name in ("compacted", "unsorted", "compacted_t", "unsorted_t")
}
_GROUP_TOKENS = tuple(f"map@grouped@0@{local}" for local in "oki")


def names_of(found: KernelMap, differentiable: bool) -> tuple[str, ...]:
    """The default forms of a map for the planner."""
    names = _preferred_forms(found, differentiable)
    return names if found.volume > _FEW_TAPS else tuple(preferred_form(found, name) for name in names)


def _preferred_forms(found: KernelMap, differentiable: bool) -> tuple[str, ...]:
    inference, training = _FORMS_OF.get(found.device.type, _FORMS_OF["cpu"])
    return training if differentiable else inference


def preferred_form(found: KernelMap, name: str) -> str:
    """The form of that name, or its unsorted variant if sorting costs more than it saves."""
    outputs = {"compacted": found.num_outputs, "compacted_t": found.num_inputs}.get(name, _SORTED)
    return _UNSORTED[name] if found.volume <= _FEW_TAPS and outputs < _SORTED else name


@lru_cache(maxsize=256)
def read_alike(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The tokens of a map's forms, the same where kernels read their arrays in the same way: sorted or not."""
    return tuple(token.replace("@unsorted", "@compacted") for token in tokens)


class UsualTiles(NamedTuple):
    """Tiles as maps of a scene have them. outputs: of a map; block: rows of a tile; mean: entries of a tile."""

    outputs: int
    block: int
    mean: int

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those of their arrays."""
        return _TILE_TOKENS["compacted"]

    def arrays(self, device: torch.device) -> list[Tensor]:
        """Their arrays, without contents."""
        tiles = -(-self.outputs // self.block)
        entries = tiles * self.mean
        return _without_contents(device, (tiles, self.block), (entries,), (entries,), (entries, self.block))

    def arrays_of_passes(self, volume: int, symmetric: bool, device: torch.device) -> MapArrays:
        """Those of all forms that training takes, of a map of so many kernel offsets that is, or is not, its own
        transpose but for the order of these."""
        forward, group = self.arrays(device), _GROUPS_OF[0][1]
        back = self.arrays(device)
        if symmetric:
            # As KernelMap.split.
            back = [forward[0], forward[1], back[2], forward[3]]
        groups = volume + self.outputs * self.mean // group
        grouped = _without_contents(device, (groups, group), (groups,), (groups, group))
        return MapArrays(_TOKENS_OF_PASSES, volume, [*forward, *back, *grouped])


def _without_contents(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


_TOKENS_OF_PASSES = (*_TILE_TOKENS["compacted"], *_TILE_TOKENS["compacted_t"], *_GROUP_TOKENS)


def other_tiles(found: KernelMap) -> UsualTiles:
    """Tiles of the other height than those of a map, with as many entries each."""
    laid, rule = laid_out(found), tile_rule()
    arrays = planner_operands(found, False)[1] if laid is None else laid[1].tiles()
    (tiles, height), entries = arrays[0].shape, arrays[1].shape[0]
    outputs = _FEW_ROWS if height == rule.block(0) else _FEW_ROWS - 1
    return UsualTiles(outputs, rule.block(outputs), max(1, round(entries / max(tiles, 1))))


def usual_tiles(volume: int, rows: int) -> Iterator[UsualTiles]:
    """Tiles of the maps of so many kernel offsets on the levels of a scene of `rows` voxels: of each height."""
    yield _usual_tiles(volume, min(rows, _USUAL_ROWS))
    if rows >= _FEW_ROWS:
        yield _usual_tiles(volume, _FEW_ROWS)


def tiles_of_larger_scenes(volume: int, rows: int) -> Iterator[UsualTiles]:
    """The same of larger scenes, for which kernels differ from those for `rows` voxels."""
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
            # An idle stream would have to be waited for as well.
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
    """(pairs per kernel offset, (tile, offset) entries of each part by form); with one host synchronisation."""
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
    """The forms of tiles with no more parts than the map has kernel offsets."""
    return tuple(name for name, splits in _SPLITS.items() if splits <= max(1, found.volume))


def _missing(found: KernelMap) -> Sequence[int]:
    raise AssertionError("read_pending_sizes() has not cached it")


def build_form(found: KernelMap, name: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """(tokens, arrays) of a map in one form."""
    form = FORMS[name]
    parts = _traced(found, name) if form.axes and torch.compiler.is_compiling() else form.arrays(found)
    named = [(f"map@{name}@{number}@{local}", x) for number, part in enumerate(parts) for local, x in part.items()]
    if found.buffered is not None:
        for _, x in named:
            PERSISTENT.add(x)
    return tuple(token for token, _ in named), [x for _, x in named]


def _traced(found: KernelMap, name: str) -> Sequence[Arrays]:
    """The arrays of a form, built by an operator."""
    inputs, axes = (found.num_outputs if found.flipped else found.num_inputs), FORMS[name].axes
    arrays = torch.ops.pumice.form(found.table, inputs, found.flipped, *relation_fields(found.relation), name)
    return [dict(zip(axes, arrays[at:], strict=False)) for at in range(0, len(arrays), len(axes))]


def tile_rows_for(outputs: int) -> int:
    """Rows of a tile for that many outputs: fewer if there were too few tiles to fill a GPU.

    Time with 64 rows by that with 128 (H100, fp16, scans), with 256, 96 and 128 channels: 42,000 outputs 0.70, 0.85 and
    0.98; 136,000 outputs 1.40, 1.06 and 1.33. A U-Net: 0.90 at 42,000 voxels, 1.03 at 70,000, 1.08 at 100,000.
    """
    return tile_rule().block(outputs)


def tile_rule() -> TileRule:
    """How the default forms of maps are tiled, by their sizes."""
    return TileRule(_FEW_ROWS, _FEW_TAPS, _SORTED, (SHARED_CHUNK,), _GROUPS_OF)


class TileHeights:
    """The heights of tiles whose kernels are being compiled in the background: maps that are found meanwhile take the
    other one, whose kernels are there."""

    def __init__(self) -> None:
        self._lock, self._pending = Lock(), Counter[int]()

    def compile(self, height: int, task: Callable[[], object]) -> None:
        """Run what compiles a kernel for tiles of a height in the background."""
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
        """How maps are tiled now."""
        usual = tile_rule()
        small, large = (self._pending[height] > 0 for height in (SMALL, LARGE))
        if small == large:
            return usual
        return replace(usual, few_rows=_ANY if large else 0)


_ANY = 1 << 30
"""More outputs than a map has."""
TILE_HEIGHTS = TileHeights()

_GROUPS_OF = ((4_000_000, 1024), (math.inf, 2048))
"""(upper bound of the number of pairs, pairs per group): few lengths, each of which is a kernel to compile.

On an H200, gradients of weights in fp16, us, by the length of groups:
pairs, channels       1024   2048   4096   8192
0.5 million, 128        57     76     90     94
1.2 million, 96        100    105    125    176
1.8 million, 128       150    148    147    192
7.4 million, 96        508    483    462    477
29.5 million, 96      2114   1951   1896   1950
"""


def group_of(found: KernelMap) -> int:
    """Pairs per group, by the number of pairs (one host synchronisation), or the capacity if between buffers."""
    own = found.transpose() if found.flipped else found
    pairs = sum(read_sizes(found)[0]) if own.buffered is None else pair_capacity(own, own.buffered)
    return tile_rule().group(pairs)


def _tile_sizes(found: KernelMap, splits: int) -> Sizes:
    if found.flipped and found.symmetric:
        # A symmetric map has the tiles of its transpose.
        found = found.transpose()
    return [(found, tile_rows_for(found.num_outputs), how) for how in SortSpec.splits(found.volume, splits)]


def _group_sizes(found: KernelMap) -> Sizes:
    return [(found.transpose() if found.flipped else found, 0, None)]


def _tiled(splits: int, flipped: bool) -> MapForm:
    """Tiles of a map, or of its transpose."""

    def side(found: KernelMap) -> KernelMap:
        return found.transpose() if flipped else found

    stored = _stored(_TILES_T if flipped else _TILES, max(1, splits))
    axes = {"rows": "tb", "tile": "e", "k": "e", "met": "eb"}
    return MapForm(
        stored, lambda found: _tiles(side(found), splits), lambda found: _tile_sizes(side(found), splits), axes
    )


FORMS: Mapping[str, MapForm] = {
    "pairs": MapForm(_stored(_PAIRS), _pairs),
    "grouped": MapForm(_stored(_GROUPS), _grouped, _group_sizes, {"o": "gq", "k": "g", "i": "gq"}),
    "table": MapForm(_stored(_TABLE), lambda found: [{"met": found.rows()}]),
    "table_t": MapForm(_stored(_TABLE_T), lambda found: [{"met": found.transpose().rows()}]),
    **{name: _tiled(splits, False) for name, splits in _SPLITS.items()},
    **{f"{name}_t": _tiled(splits, True) for name, splits in _SPLITS.items()},
}


# What calls over a map take


class MapSignature(NamedTuple):
    """What the arrays of maps have in common that one template serves. key: all but numbers of rows, interned;
    row_strides: of each array."""

    key: Hashable
    row_strides: Sequence[int]

    @staticmethod
    def of(tokens: tuple[str, ...], volume: int, arrays: Sequence[Tensor]) -> MapSignature:
        """tokens: of the arrays; volume: kernel offsets of the map."""
        places = [id(x) for x in arrays]
        # Of an array that is there twice, as in a map that is its own transpose, a template knows one place.
        each = tuple([(x.shape[1:], x.stride(), x.dtype, x.device, places.index(id(x))) for x in arrays])
        return MapSignature(intern_key((read_alike(tokens), volume, each)), [x.stride(0) for x in arrays])


class BoundMap:
    """The arrays of a map that calls over it take. signature: key of a MapSignature; rows, addresses: of the arrays;
    needs_int64: True if one is so long that addressing needs 64 bits; is_aligned: True if all are, to 16 bytes."""

    __slots__ = ("_arrays", "_segments", "addresses", "is_aligned", "needs_int64", "rows", "signature")

    def __init__(self, arrays: Sequence[Tensor], signature: MapSignature) -> None:
        rows = [x.shape[0] if x.ndim else 1 for x in arrays]
        self._arrays, self._segments = arrays, dict[Any, SegmentArgs]()
        self._set(signature, rows, [x.data_ptr() for x in arrays])

    def _set(self, signature: MapSignature, rows: Sequence[int], addresses: Sequence[int]) -> None:
        self.signature, self.rows, self.addresses = signature.key, rows, addresses
        self.needs_int64 = any([n * s >= INT32_LIMIT for n, s in zip(rows, signature.row_strides, strict=True)])
        bits = 0
        for address in addresses:
            bits |= address
        self.is_aligned = not bits & 15

    @property
    def arrays(self) -> Sequence[Tensor]:
        return self._arrays

    def segments(self, number: int, count: int, rule: SegmentRule) -> SegmentArgs | None:
        """The segments of array `number`, of the values 0 to count - 1; None where they take several kernels, where the
        array is none of the map's (-1), and where they would have to be found while a graph is captured."""
        key = number, count, rule
        found = self._segments.get(key)
        if found is None:
            found = None if number < 0 else self._known_segments(number, rule) or self._find_segments(*key)
            if found is None:
                return None
            self._segments[key] = found
        return found if found.one_kernel else None

    def _known_segments(self, number: int, rule: SegmentRule) -> SegmentArgs | None:
        """Segments that were found with the map."""
        return None

    def _find_segments(self, number: int, count: int, rule: SegmentRule) -> SegmentArgs | None:
        array = self.arrays[number]
        if array not in PERSISTENT and is_capturing(array.device):
            return None
        return SegmentArgs.of(rule.find(array, count))


class BoundLayout(BoundMap):
    """Those of a layout that was made with others (coords.chain_tiles), without a tensor for each. make: makes these;
    pieces: by the number of an array, those of its runs."""

    __slots__ = ("_make", "_pieces")

    def __init__(
        self,
        make: Callable[[], Sequence[Tensor]],
        places: tuple[Sequence[int], Sequence[int]],
        pieces: Mapping[int, Mapping[int, PieceLists]],
        signature: MapSignature,
    ) -> None:
        """places: lengths and addresses of the arrays."""
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
    """In place of the map of a linear map, which has as many results as rows of features."""

    __slots__ = ("_known", "calls", "num_inputs", "num_outputs")
    buffered, flipped = None, False

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
    """That of so many rows."""
    return NO_MAPS.get(rows) or NO_MAPS.keep(rows, NoMap(rows))


def bound_map(found: KernelMap | NoMap) -> BoundMap:
    """The arrays of a map that calls without gradients take, cached with it."""
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
    """That of all arrays of so many columns, 0 for lists, of maps of so many kernel offsets."""
    arrays = [torch.empty((1, n) if n else (1,), dtype=torch.int32, device=device) for n in columns]
    return MapSignature.of(tokens, volume, arrays)


class MapArrays:
    """The arrays of a map, of which calls that autograd records take some each. key: equal where the same ones are at
    the same places; kind: where they have as many columns, too."""

    def __init__(self, tokens: tuple[str, ...], volume: int, arrays: Sequence[Tensor]) -> None:
        self.arrays, self.tokens, self._volume = arrays, tokens, volume
        places = [id(x) for x in arrays]
        # One of a map that is its own transpose is there twice.
        self.key = intern_key((read_alike(tokens), volume, tuple(map(places.index, places))))
        self.kind = intern_key((self.key, tuple([x.shape[1:] for x in arrays])))
        self._bound: dict[tuple[int, ...], BoundMap] = {}

    @staticmethod
    def of(found: KernelMap | NoMap, differentiable: bool = True) -> MapArrays:
        """Those of a map, cached with it."""
        if isinstance(found, NoMap):
            return NO_ARRAYS
        name = "arrays", differentiable
        return found.get_cached(name) or found.cached(name, lambda m: _arrays_of(m, differentiable))

    def bound(self, places: tuple[int, ...]) -> BoundMap:
        """Those at some places, for calls that take no others."""
        known = self._bound.get(places)
        if known is None:
            tokens, arrays = tuple([self.tokens[n] for n in places]), [self.arrays[n] for n in places]
            known = self._bound[places] = BoundMap(arrays, MapSignature.of(tokens, self._volume, arrays))
        return known

    def places(self, arrays: Iterable[Tensor]) -> tuple[int, ...]:
        """Where these are among them."""
        places = {id(x): n for n, x in reversed([*enumerate(self.arrays)])}
        return tuple(sorted([places[id(x)] for x in arrays]))


NO_ARRAYS = MapArrays((), 0, ())
"""Those of a linear map."""


class LaidArrays(MapArrays):
    """Those of all forms that training takes, of a map that was laid out with others: of its tiles, of those of its
    transpose, and of its groups of pairs; without a tensor for each."""

    def __init__(
        self,
        tokens: tuple[tuple[str, ...], tuple[str, ...]],
        found: KernelMap,
        layouts: tuple[Tiled, Tiled | Turned, GroupedPairs],
    ) -> None:
        """tokens: of both tiles."""
        own, turned, groups = self._layouts = layouts
        self.tokens, self._volume, self._bound = (*tokens[0], *tokens[1], *_GROUP_TOKENS), found.volume, {}
        self._device = found.device
        self._lengths = [*own.lengths(), *turned.lengths(), *[groups.count] * 3]
        self._addresses = [*own.addresses(), *turned.addresses(), *groups.addresses()]
        self._columns = own.block, 0, 0, own.block, turned.block, 0, 0, turned.block, groups.size, 0, groups.size
        self.key, self.kind = _keys_of_layouts(self.tokens, found.volume, type(turned) is Turned, self._columns)

    @property
    def arrays(self) -> Sequence[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As tensors."""
        return _tensors_of(self._layouts)

    def bound(self, places: tuple[int, ...]) -> BoundMap:
        """See MapArrays."""
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
    layouts: tuple[Tiled, Tiled | Turned, GroupedPairs], places: Sequence[int] = range(len(_TOKENS_OF_PASSES))
) -> list[Tensor]:
    """Those of the arrays of LaidArrays at some places."""
    own, turned, groups = layouts
    every = [*own.tiles(), *turned.tiles(), *_form_of_groups(groups)[1]]
    return [every[n] for n in places]


@lru_cache(maxsize=256)
def _keys_of_layouts(
    tokens: tuple[str, ...], volume: int, turned: bool, columns: tuple[int, ...]
) -> tuple[Hashable, Hashable]:
    """Key and kind of LaidArrays. turned: of a map that is its own transpose, whose tiles are there twice but for the
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
