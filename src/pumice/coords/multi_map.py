"""MultiMap: a kernel map whose outputs may have any number of inputs at one kernel offset, as the relations of a graph.

A relation of a graph is a kernel offset (TorchSparse++, section 5.2, figure 16). A list of (input, output, offset)
stands in place of the neighbour table, so that dataflows over pairs and groups of pairs serve graphs as they serve
convolutions. Rows, masks and tiles have one input for each output and offset: they refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pumice.coords.buffer import with_own_storage
from pumice.coords.kernel_map import KernelMap, Pairs
from pumice.coords.relation import Relation
from pumice.coords.tiles import PairGroups, PairList
from pumice.errors import OptionError

_KEYS = 1 << 62  # Products of sizes from which pairs have no int64 key


class PairSegments(NamedTuple):
    """The pairs of each (output, kernel offset) as one segment: a sum over pairs is a sum within segments, then over
    the map of segments.

    order int64 [P]: places in `pairs()`; inputs int64 [P]: of each pair; segments int64 [P]: its segment, ascending;
    sizes int64 [S]: pairs of each segment; reduced: the map from segments to outputs, one pair for each segment."""

    order: Tensor
    inputs: Tensor
    segments: Tensor
    sizes: Tensor
    reduced: MultiMap


@dataclass(frozen=True, eq=False)
class MultiMap(KernelMap):
    """`map[o, k, i]` counts the pairs (i, o) of kernel offset k. Worked example, three nodes and two relations:

        edges (i -> o, k) = (0 -> 1, 0), (2 -> 1, 0), (1 -> 1, 1)
        pairs()    : k=0: (0 -> 1), (2 -> 1);  k=1: (1 -> 1)
        segments() : (1, k=0) of two pairs, (1, k=1) of one

    table: int32 [P, 3], (input, output, offset) sorted by offset, output, input of the untransposed map. offsets: K.
    Storages: pairs, taps, grouped, segments, counts."""

    offsets: int = 0

    @staticmethod
    def of(sides: tuple[Tensor, Tensor], taps: Tensor, sizes: tuple[int, int, int]) -> tuple[MultiMap, Tensor]:
        """(map, int64 [P]: place of each of its pairs among those given). sides: rows of inputs and of outputs, taps:
        kernel offset, int [P] each, within sizes, the numbers of inputs, outputs and offsets."""
        inputs, outputs = sides
        if sizes[0] * sizes[1] * sizes[2] >= _KEYS:
            raise OptionError(f"{sizes[0]} inputs, {sizes[1]} outputs and {sizes[2]} offsets exceed int64 keys")
        order = ((taps.long() * sizes[1] + outputs) * sizes[0] + inputs).argsort(stable=True)
        table = torch.stack([inputs, outputs, taps], 1)[order].int()
        return MultiMap._sorted(table, sizes), order

    @staticmethod
    def _sorted(table: Tensor, sizes: tuple[int, int, int]) -> MultiMap:
        # The offsets stand for no coordinates; one dimension names them.
        relation = Relation.of_offsets(1, [(k,) for k in range(sizes[2])], policy="given")
        totals = torch.bincount(table[:, 2], minlength=sizes[2]).tolist()
        return MultiMap(relation, table, *sizes[:2], offsets=sizes[2], _storages={("totals", False): totals})

    @property
    def volume(self) -> int:
        """K, the number of kernel offsets."""
        return self.offsets

    @property
    def symmetric(self) -> bool:
        """False: the transpose has storages of its own."""
        return False

    def transpose(self) -> MultiMap:
        """The map with inputs and outputs exchanged; kernel offsets keep their order."""
        calls = {"calls": self._transposed_calls, "_transposed_calls": self.calls}
        sizes = {"num_inputs": self.num_outputs, "num_outputs": self.num_inputs}
        return replace(self, flipped=not self.flipped, **sizes, **calls)

    def counts(self) -> Tensor:
        """int64 [num_outputs]: number of pairs of each output."""
        return self.cached("counts", lambda m: torch.bincount(m.pairs().outputs, minlength=m.num_outputs))

    def segments(self) -> PairSegments:
        """The pairs of each (output, kernel offset); see PairSegments."""
        return self.cached("segments", _segments)

    def without_storages(self, table: Tensor | None = None) -> MultiMap:
        """The map with empty caches. table: the same table on another device, if given."""
        found = MultiMap._sorted(self.table if table is None else table, self._sizes)
        return found.transpose() if self.flipped else found

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Of the untransposed map."""
        own = self._found
        return own.num_inputs, own.num_outputs, self.offsets

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (with_own_storage(self.table), self._sizes, self.flipped)

    def rows(self) -> Tensor:
        self._refuse("rows")

    def masks(self) -> Tensor:
        self._refuse("masks")

    def split(self, block: int, splits: int, superblock: int = 0) -> NoReturn:
        self._refuse("compacted tiles")

    def pair_counts(self) -> Tensor:
        self._refuse("blocks of a table")

    def tiling(self, block: int, how: Any) -> NoReturn:
        self._refuse("tiles")

    def _refuse(self, name: str) -> NoReturn:
        raise OptionError(
            f"{name} have one input for each output and kernel offset, a MultiMap may have many; it has pairs, groups "
            "and segments: use a dataflow over these"
        )

    def _make_pairs(self) -> Pairs:
        inputs, outputs, _ = self.table.long().t().contiguous()
        return Pairs(inputs, outputs, torch.tensor(self._storages["totals", False], dtype=torch.int64))

    def _make_groups(self, group: int) -> PairGroups:
        """Groups in the order of kernel offsets."""
        sizes = torch.tensor(self._storages["totals", False], dtype=torch.int64)
        whole = -(-sizes // group)
        device, count = self.device, int(whole.sum())
        taps = torch.repeat_interleave(torch.arange(len(sizes)), whole).int().to(device)
        # The first slot of each offset less its first pair.
        shift = ((whole.cumsum(0) - whole) * group - (sizes.cumsum(0) - sizes)).to(device)
        at = torch.arange(len(self.table), device=device) + shift[self.table[:, 2].long()]
        inputs, outputs = (torch.full((count * group,), -1, dtype=torch.int32, device=device) for _ in range(2))
        inputs[at], outputs[at] = self.table[:, 0], self.table[:, 1]
        return PairGroups(taps, inputs.view(count, group), outputs.view(count, group))

    def _make_list(self) -> PairList:
        return PairList(*self.table.t().contiguous())

    def __repr__(self) -> str:
        found = f"{self.num_inputs} -> {self.num_outputs} rows, K={self.volume}, {len(self.table)} pairs"
        return f"MultiMap({found})"


def _restored(table: Tensor, sizes: tuple[int, int, int], flipped: bool) -> MultiMap:
    found = MultiMap._sorted(table, sizes)
    return found.transpose() if flipped else found


def _segments(found: Any) -> PairSegments:
    inputs, outputs, _ = found.pairs()
    keys = found.taps() * found.num_outputs + outputs
    # Stored pairs ascend by the outputs of the untransposed map.
    order = keys.argsort(stable=True) if found.flipped else torch.arange(len(keys), device=keys.device)
    places, segments, sizes = torch.unique_consecutive(keys[order], return_inverse=True, return_counts=True)
    own = torch.arange(len(places), device=places.device)
    table = torch.stack([own, places % max(1, found.num_outputs), places // max(1, found.num_outputs)], 1).int()
    reduced = MultiMap._sorted(table, (len(places), found.num_outputs, found.volume))
    return PairSegments(order, inputs[order], segments, sizes, reduced)
