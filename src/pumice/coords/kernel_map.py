"""KernelMap: the sparse 0/1 tensor `map[o, k, i]` and its storage formats."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pumice.coords import tiles
from pumice.coords.buffer import read, with_own_storage
from pumice.coords.capacity import BufferedMapState
from pumice.coords.lookup import Neighbours, mask_words
from pumice.coords.relation import Relation
from pumice.coords.segments import RUNS, RUNS_PER_STEP, register_and_split, segments_by_length
from pumice.coords.tiles import PairGroups, PairList, SortSpec, TileList, Tiling
from pumice.errors import OptionError, ShapeError
from pumice.runtime.launch import compiling_launches, has_triton, outside_inference_mode
from pumice.runtime.streams import is_capturing

Map = TypeVar("Map", bound="KernelMap")
Kept = TypeVar("Kept")
_MISSING = object()


class Pairs(NamedTuple):
    """Neighbour pairs (inputs[j], outputs[j]), one list per kernel offset, concatenated.

    inputs, outputs: int64 [P] rows on the map's device. sizes: int64 [K] list lengths, on the CPU. No row occurs twice
    on one side of a list."""

    inputs: Tensor
    outputs: Tensor
    sizes: Tensor


class Deferred:
    """A storage that is built when it is first read."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make: Callable[[], Any] = make


@dataclass(frozen=True, eq=False)
class KernelMap:
    """Kernel map (rulebook): `map[o, k, i]` is 1 where input row i is at kernel offset k of output row o.

    Worked example, D = 1, inputs at 0, 1, 3, kernel 3, policy `same` (offsets -1, 0, +1):

        rows()  = [[-1, 0, 1], [0, 1, -1], [-1, 2, -1]]        (o, k) -> i
        pairs() : k=0: (0 -> 1);  k=1: (0 -> 0), (1 -> 1), (2 -> 2);  k=2: (1 -> 0)
        masks() = [[6], [3], [2]]                              bit k of row o: offset k has an input

    Immutable. Storages (derived arrays) are built from the rows on first use and cached; `transpose()` shares them.
    Data-dependent sizes (pairs, tile entries) stay on the device until a storage needs them; `read_pending_sizes` reads
    those of many maps in one transfer.

    table: int32 [num_outputs, K], `rows()` of the untransposed map. flipped: True for the transpose. inputs: input
    geometry with pending checks. buffered: set for a map between buffers of fixed capacity; its sizes are not read."""

    relation: Relation
    table: Tensor
    num_inputs: int
    num_outputs: int
    flipped: bool = False
    inputs: weakref.ref[Any] | None = field(default=None, repr=False)
    buffered: BufferedMapState | None = field(default=None, repr=False)
    _storages: dict[Any, Any] = field(default_factory=dict, repr=False)
    # Launches over the map and its transpose by signature (lower.call), without references to the map's tensors.
    calls: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _transposed_calls: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def volume(self) -> int:
        """K, the number of kernel offsets (taps)."""
        return self.table.shape[1]

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def symmetric(self) -> bool:
        """True if map[o, k, i] = map[i, K-1-k, o], as in a submanifold map of odd kernel size."""
        return self.relation.mirrored and self.num_inputs == self.num_outputs

    def transpose(self) -> KernelMap:
        """The map with inputs and outputs exchanged; kernel offsets keep their order."""
        sizes, calls = (self.num_outputs, self.num_inputs), (self._transposed_calls, self.calls)
        return KernelMap(
            self.relation, self.table, *sizes, not self.flipped, self.inputs, self.buffered, self._storages, *calls
        )

    def rows(self) -> Tensor:
        """int32 [num_outputs, K]: input row of each output at each kernel offset, -1 if none."""
        return self.cached("rows", _rows)

    def masks(self) -> Tensor:
        """int32 [num_outputs, ceil(K / 31)]: bit k % 31 of word k // 31 is set if offset k has an input."""
        return self.cached("masks", lambda m: mask_words(m.rows()))

    def pairs(self) -> Pairs:
        """Pair lists per kernel offset, each in the order of the untransposed map's outputs."""
        inputs, outputs, sizes = self._found.cached("pairs", lambda m: m._make_pairs())
        return Pairs(outputs, inputs, sizes) if self.flipped else Pairs(inputs, outputs, sizes)

    def counts(self) -> Tensor:
        """int64 [num_outputs]: number of inputs of each output."""
        return self.cached("counts", lambda m: (m.rows() >= 0).sum(1))

    def taps(self) -> Tensor:
        """int64 [P]: index of the kernel offset of each pair, in the order of `pairs()`."""
        return self._found.cached("taps", _taps)

    def listed(self) -> PairList:
        """`pairs()` and `taps()` as int32."""
        inputs, outputs, taps = self._found.cached("listed", lambda m: m._make_list())
        return PairList(outputs, inputs, taps) if self.flipped else PairList(inputs, outputs, taps)

    def compacted(self, block: int, splits: int = 1, superblock: int = 0) -> TileList:
        """Tiles of `block` outputs with the kernel offsets that occur in each; see TileList.

        splits: 1 sorts outputs by all offsets, 0 keeps their order (for more use `split`). superblock: see SortSpec."""
        if splits > 1:
            raise OptionError(f"compacted() takes splits of 0 or 1, found {splits}; use split() for several")
        return self.split(block, splits, superblock)[0]

    def split(self, block: int, splits: int, superblock: int = 0) -> tuple[TileList, ...]:
        """One TileList for each of `splits` ranges of kernel offsets, each with its own row order; 0: one, unsorted."""
        if not 0 <= splits <= max(1, self.volume):
            raise OptionError(f"splits takes 0 to {max(1, self.volume)}, the number of kernel offsets, found {splits}")
        if self.flipped and self.symmetric:
            # The transpose of a submanifold map is the map with its offsets reversed.
            parts = self.transpose().split(block, splits, superblock)[::-1]
            return tuple(part._replace(taps=self.volume - 1 - part.taps) for part in parts)
        orders = SortSpec.splits(self.volume, splits, superblock)
        made = (("compacted", block, how) for how in orders)
        return tuple(self.cached(name, lambda m, name=name: _compacted(m, *name[1:])) for name in made)

    def grouped(self, group: int) -> PairGroups:
        """The pairs of each kernel offset in groups of `group`; see PairGroups."""
        taps, inputs, outputs = self._found.cached(("grouped", group), lambda m: m._make_groups(group))
        return PairGroups(taps, outputs, inputs) if self.flipped else PairGroups(taps, inputs, outputs)

    def pair_counts(self) -> Tensor:
        """int32 [K, blocks]: prefix counts of each offset's pairs over blocks of outputs; last column: totals."""
        return self.cached("pair_counts", lambda m: tiles.pair_counts(m.masks(), m.valid_count(), m.volume))

    def tiling(self, block: int, how: SortSpec) -> Tiling:
        """Tiles of `block` outputs without their entries; no host synchronisation."""
        return self.cached(("tiling", block, how), lambda m: _tiling(m, block, how))

    def valid_count(self) -> Tensor:
        """int32 [1] on the device: number of valid outputs."""
        if self.buffered is not None:
            return self.buffered.inputs if self.flipped else self.buffered.outputs
        return self.cached("valid_count", lambda m: torch.full((1,), m.num_outputs, dtype=torch.int32, device=m.device))

    def has(self, name: Hashable) -> bool:
        """True if storage `name` is cached for this direction of the map."""
        return (name, self.flipped) in self._storages

    def get_cached(self, name: Hashable) -> Any:
        """The storage cached under `name`, or None."""
        if self.buffered is not None:
            self.buffered.pending_events.wait_for((name, self.flipped))
        found = self._storages.get((name, self.flipped))
        return self._read((name, self.flipped), found) if type(found) is Deferred else found

    def cached_keys(self) -> set[Hashable]:
        """Keys of all cached storages, of both directions."""
        return set(self._storages)

    def keep(self, name: Hashable, value: Kept) -> Kept:
        """Cache `value` under `name` and return it."""
        self._storages[name, self.flipped] = value
        if self.buffered is not None:
            self.buffered.pending_events.register_derived((name, self.flipped))
        return value

    def cached(self, name: Hashable, build: Callable[[KernelMap], Any]) -> Any:
        """`build(self)`, cached under `name` for this direction of the map."""
        key = (name, self.flipped)
        if self.buffered is not None:
            self.buffered.pending_events.wait_for(key)
        found = self._storages.get(key, _MISSING)
        if type(found) is Deferred:
            return self._read(key, found)
        if found is _MISSING and torch.compiler.is_compiling():
            found = self._storages[key] = build(self)
        elif found is _MISSING:
            with outside_inference_mode():
                found = self._storages[key] = build(self)
            if self.buffered is not None:
                self.buffered.pending_events.register_derived(key)
        return found

    def _read(self, key: Hashable, found: Deferred) -> Any:
        with outside_inference_mode():
            value = self._storages[key] = found.make()
        return value

    def to(self: Map, device: torch.device | str, non_blocking: bool = False) -> Map:
        """The map with its rows on `device`; other storages are rebuilt there on demand."""
        return self.without_storages(self.table.to(device, non_blocking=non_blocking))

    def without_storages(self: Map, table: Tensor | None = None) -> Map:
        """The map with empty caches. table: the same table on another device, if given."""
        own = self.table if table is None else table
        return replace(self, table=own, _storages={}, calls={}, _transposed_calls={})

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the rows are copied; other storages are rebuilt on demand.
        return KernelMap, (self.relation, with_own_storage(self.table), self.num_inputs, self.num_outputs, self.flipped)

    @staticmethod
    def from_rows(relation: Relation, rows: Tensor, num_inputs: int) -> KernelMap:
        """The map whose `rows()` are `rows`, int [num_outputs, K]; -1: no input."""
        if rows.ndim != 2:
            raise ShapeError(f"rows are [num_outputs, K], found a tensor of {rows.ndim} dimensions")
        return KernelMap(relation, rows.int(), num_inputs, rows.shape[0])

    @staticmethod
    def from_neighbours(
        relation: Relation, found: Neighbours, num_inputs: int, valid_counts: tuple[Tensor, Tensor] | None = None
    ) -> KernelMap:
        """The map of a Lookup's result. valid_counts: of inputs and of outputs, int32 [1] each on the device."""
        kept = {} if found.masks is None else {("masks", False): found.masks}
        if valid_counts is not None:
            kept |= {("valid_count", True): valid_counts[0], ("valid_count", False): valid_counts[1]}
        return KernelMap(relation, found.rows, num_inputs, len(found.rows), _storages=kept)

    @property
    def _found(self) -> KernelMap:
        """The untransposed map."""
        return self.transpose() if self.flipped else self

    def _make_pairs(self) -> Pairs:
        """Pairs, if the map is not transposed."""
        if torch.compiler.is_compiling():
            *lists, taps = torch.ops.pumice.pairs(self.table)
            self.keep("taps", taps)
            return Pairs(*lists)
        if self.device.type == "cpu":
            met = self.table.t().contiguous()
            hits = met >= 0
            return Pairs(met[hits].long(), hits.nonzero()[:, 1], hits.sum(1))
        inputs, outputs, _ = self.listed()
        return Pairs(inputs.long(), outputs.long(), torch.tensor(_totals(self)))

    def _make_list(self) -> PairList:
        """PairList, if the map is not transposed."""
        if self.device.type == "cpu" or torch.compiler.is_compiling():
            inputs, outputs, _ = self.pairs()
            return PairList(inputs.int(), outputs.int(), self.taps().int())
        if self.buffered is not None:
            raise OptionError("pairs() has a data-dependent length and is not available in a captured network")
        return tiles.list_pairs(self.rows(), self.valid_count(), self.pair_counts(), sum(_totals(self)))

    def _make_groups(self, group: int) -> PairGroups:
        """Pair groups, if the map is not transposed."""
        buffered = self.buffered
        if buffered is None:
            groups = sum(-(-total // group) for total in _totals(self))
            return tiles.group_pairs(self.rows(), self.valid_count(), self.pair_counts(), (groups, group))
        groups = _group_capacity(self, buffered, group)
        made = tiles.group_pairs(self.rows(), self.valid_count(), self.pair_counts(), (groups, group), buffered.status)
        buffered.pending_events.register_status_writer()
        return made

    def __repr__(self) -> str:
        if self.buffered is not None:
            return f"KernelMap({self.num_inputs} -> {self.num_outputs} rows of buffers, K={self.volume})"
        total = sum(_totals(self._found))
        mean = total / max(self.num_outputs, 1)
        return (
            f"KernelMap({self.num_inputs} -> {self.num_outputs} rows, K={self.volume}, {total} pairs, "
            f"{mean:.2f} per output, policy={self.relation.policy!r})"
        )


def read_pending_sizes(wanted: Iterable[tuple[KernelMap, int, SortSpec | None]]) -> None:
    """Read sizes of storages, and pending checks of the maps' inputs (raises as `settle`), in one transfer.

    wanted: (map, outputs per tile, order) for numbers of tile entries, order None for numbers of pairs per kernel
    offset. Maps between buffers are skipped."""
    pending = []
    for found, block, how in wanted:
        if found.buffered is not None:
            continue
        name = "totals" if how is None else ("entries", block, how)
        if not found.has(name):
            size = found.pair_counts()[:, -1] if how is None else found.tiling(block, how).entries
            pending.append((found, name, size))
    owners = {id(owner): owner for found, *_ in pending if (owner := found.inputs and found.inputs()) is not None}
    unread = [(owner, word) for owner in owners.values() if (word := owner.unsettled) is not None]
    values = read([*(size for *_, size in pending), *(word for _, word in unread)])
    for (owner, _), (status,) in zip(unread, values[len(pending) :], strict=True):
        owner.settle(status)
    for (found, name, _), value in zip(pending, values, strict=False):
        found.keep(name, value)


def _totals(found: KernelMap) -> list[int]:
    """Number of pairs per kernel offset; one host synchronisation."""
    read_pending_sizes([(found, 0, None)])
    return found._storages["totals", found.flipped]


def _rows(found: KernelMap) -> Tensor:
    if not found.flipped:
        return found.table.contiguous()
    whole = found.transpose()
    if torch.compiler.is_compiling():
        inputs, outputs, _ = whole.pairs()
        rows = found.table.new_full((found.num_outputs, found.volume), -1)
        return rows.index_put((inputs, whole.taps()), outputs.int())
    if found.symmetric:
        return whole.rows().flip(1)
    return tiles.transpose_table(whole.rows(), whole.valid_count(), found.num_outputs)


def _taps(found: KernelMap) -> Tensor:
    if found.device.type != "cpu" and not torch.compiler.is_compiling():
        return found.listed().taps.long()
    pairs = found.pairs()
    sizes = pairs.sizes.to(found.device, non_blocking=True)
    taps = torch.arange(len(sizes), device=sizes.device)
    return torch.repeat_interleave(taps, sizes, output_size=pairs.inputs.shape[0])


def _tiling(found: KernelMap, block: int, how: SortSpec) -> Tiling:
    if found.device.type == "cuda" and not is_capturing(found.device):
        _compile_kernels(found.relation, block, how, torch.is_grad_enabled(), found.device)
    return tiles.build_tiling(found.masks(), found.valid_count(), found.relation, block, how)


@lru_cache(maxsize=64)
def _compile_kernels(relation: Relation, block: int, how: SortSpec, paired: bool, device: torch.device) -> None:
    """Compile the kernels that lay out maps in tiles, and in pair groups if `paired`, in parallel, once per process."""
    rows = torch.zeros(1, len(relation.offsets), dtype=torch.int32, device=device)
    count, volume = torch.zeros(1, dtype=torch.int32, device=device), rows.shape[1]
    with compiling_launches():
        masks = mask_words(rows)
        tiles.fill_tiles(rows, tiles.build_tiling(masks, count, relation, block, how), 1)
        # Few and many tiles are sorted by different variants.
        for ends in (count, torch.zeros(RUNS_PER_STEP + 1, dtype=torch.int32, device=device)):
            RUNS.register(count, ends, volume)
            segments_by_length(count, len(ends))
        if paired:
            tiles.group_pairs(rows, count, tiles.pair_counts(masks, count, volume), (1, 1))


def _compacted(found: KernelMap, block: int, how: SortSpec) -> TileList:
    if found.buffered is not None:
        return _buffered_tiles(found, found.buffered, block, how)
    read_pending_sizes([(found, block, how)])
    # sum: the list may be empty.
    capacity = sum(found._storages[("entries", block, how), found.flipped])
    return tiles.fill_tiles(found.rows(), found.tiling(block, how), capacity)


def _buffered_tiles(found: KernelMap, buffered: BufferedMapState, block: int, how: SortSpec) -> TileList:
    """The TileList of a map between buffers, with the planned capacity in entries."""
    tiling = found.tiling(block, how)
    most = len(tiling.slots) * (how.last - how.first)
    key = ("entries", buffered.key, found.flipped, block, how)
    capacity = buffered.capacities.capacity(key, tiling.entries, most)
    if not has_triton(found.table):
        # Plain torch allocates the exact size.
        capacity = min(capacity, int(tiling.entries))
    made = tiles.fill_tiles(found.rows(), tiling, capacity, buffered.status)
    buffered.pending_events.register_status_writer()
    register_and_split(made.tiles, tiling.ends, found.volume, buffered.capacities.piece_lengths(key))
    return made


def pair_capacity(found: KernelMap, buffered: BufferedMapState) -> int:
    """Planned capacity in pairs of an untransposed map between buffers."""
    return buffered.capacities.capacity(
        ("pairs", buffered.key), found.pair_counts()[:, -1], found.volume * found.num_outputs
    )


def _group_capacity(found: KernelMap, buffered: BufferedMapState, group: int) -> int:
    """Planned capacity in groups of pairs; the last group of each kernel offset may be partial."""
    pairs = pair_capacity(found, buffered)
    return min(pairs // group + found.volume, found.volume * -(-found.num_outputs // group))
