"""The sparse tensor `map[o, k, i]` of the one equation, and the storages it can be read through."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords.compact import Compacted, Grouped, compacted, grouped
from pumice.coords.relation import Relation
from pumice.errors import ShapeError


class Pairs(NamedTuple):
    """Lists of meetings, one list per tap k, laid end to end: input row `inputs[j]` meets output `outputs[j]`.

    inputs, outputs int64 [P] on the map's device; sizes int64 [K] on the CPU, the length of each list. Within one
    list no row occurs twice on either side: an output and a tap name one input, and the reverse.
    """

    inputs: Tensor
    outputs: Tensor
    sizes: Tensor


@dataclass(frozen=True, eq=False)
class KernelMap:
    """Who meets whom: `map[o, k, i]` is 1 where output row o and input row i are related through tap k.

    Worked example, D = 1, inputs at 0, 1, 3, kernel 3, policy `same` (offsets -1, 0, +1):

        rows()  = [[-1, 0, 1], [0, 1, -1], [-1, 2, -1]]        (o, k) -> i
        pairs() : k=0: (0 -> 1);  k=1: (0 -> 0), (1 -> 1), (2 -> 2);  k=2: (1 -> 0)
        masks() = [[6], [3], [2]]                              bit k of row o: has tap k an input

    Frozen. Storages are pure functions of the pairs, kept once made; `transpose()` shares them and costs nothing.
    """

    relation: Relation
    forward: Pairs
    num_inputs: int
    num_outputs: int
    flipped: bool = False
    _storages: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def volume(self) -> int:
        """K, the number of taps."""
        return self.forward.sizes.shape[0]

    def transpose(self) -> KernelMap:
        """The same meetings with inputs and outputs exchanged; tap k keeps its list."""
        return replace(self, num_inputs=self.num_outputs, num_outputs=self.num_inputs, flipped=not self.flipped)

    def pairs(self) -> Pairs:
        """The lists of meetings per tap."""
        inputs, outputs, sizes = self.forward
        return Pairs(outputs, inputs, sizes) if self.flipped else self.forward

    def rows(self) -> Tensor:
        """int64 [num_outputs, K]: the input row that each output meets through each tap, -1 where none."""
        return self.storage("rows", _rows)

    def masks(self) -> Tensor:
        """int64 [num_outputs, ceil(K / 62)]: bit k % 62 of word k // 62 says whether tap k has an input."""
        return self.storage("masks", _masks)

    def counts(self) -> Tensor:
        """int64 [num_outputs]: how many inputs each output meets."""
        return self.storage("counts", lambda m: torch.bincount(m.pairs().outputs, minlength=m.num_outputs))

    def taps(self) -> Tensor:
        """int64 [P]: the tap of each pair, in the order of `pairs()`; the same for the transposed map."""
        return self.storage("taps", _taps) if not self.flipped else self.transpose().taps()

    def compacted(self, block: int) -> Compacted:
        """Tiles of `block` outputs with the taps that occur in each; see Compacted."""
        return self.storage(("compacted", block), lambda m: _compacted(m, block))

    def grouped(self, group: int) -> Grouped:
        """The pairs of each tap in groups of `group`; see Grouped."""
        return self.storage(("grouped", group), lambda m: grouped(*m.pairs(), group))

    def has(self, name: Hashable) -> bool:
        """Whether storage `name` was made for this direction of the map."""
        return (name, self.flipped) in self._storages

    def storage(self, name: Hashable, build: Callable[[KernelMap], Any]) -> Any:
        """What `build(self)` gives, made once for this direction of the map and kept under `name`."""
        key = (name, self.flipped)
        if key not in self._storages:
            # A map found in inference serves training afterwards.
            with torch.inference_mode(False):
                self._storages[key] = build(self)
        return self._storages[key]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KernelMap:
        """The map with its pairs on `device`; other storages are made anew there when asked for."""
        inputs, outputs, sizes = self.forward
        move = {"device": device, "non_blocking": non_blocking}
        return replace(self, forward=Pairs(inputs.to(**move), outputs.to(**move), sizes), _storages={})

    @staticmethod
    def from_rows(relation: Relation, rows: Tensor, num_inputs: int) -> KernelMap:
        """The map whose `rows()` are given, int [num_outputs, K]; -1 is no input."""
        if rows.ndim != 2:
            raise ShapeError(f"rows are [num_outputs, K], found a tensor of {rows.ndim} dimensions")
        met = rows.t() >= 0
        outputs = met.nonzero()[:, 1]
        pairs = Pairs(rows.t()[met].long(), outputs, met.sum(1).cpu())
        return KernelMap(relation, pairs, num_inputs, rows.shape[0])

    def __repr__(self) -> str:
        total = int(self.forward.sizes.sum())
        mean = total / max(self.num_outputs, 1)
        return (
            f"KernelMap({self.num_inputs} -> {self.num_outputs} rows, K={self.volume}, {total} pairs, "
            f"{mean:.2f} per output, policy={self.relation.policy!r})"
        )


def _taps(kernel_map: KernelMap) -> Tensor:
    pairs = kernel_map.pairs()
    sizes = pairs.sizes.to(pairs.inputs.device)
    taps = torch.arange(len(sizes), device=sizes.device)
    return torch.repeat_interleave(taps, sizes, output_size=pairs.inputs.shape[0])


def _compacted(kernel_map: KernelMap, block: int) -> Compacted:
    return compacted(kernel_map.pairs(), kernel_map.taps(), kernel_map.num_outputs, block)


def _rows(kernel_map: KernelMap) -> Tensor:
    pairs = kernel_map.pairs()
    rows = pairs.inputs.new_full((kernel_map.num_outputs, kernel_map.volume), -1)
    rows[pairs.outputs, kernel_map.taps()] = pairs.inputs
    return rows


def _masks(kernel_map: KernelMap) -> Tensor:
    pairs, taps = kernel_map.pairs(), kernel_map.taps()
    words = -(-kernel_map.volume // 62)
    masks = pairs.inputs.new_zeros(kernel_map.num_outputs * words)
    # Each (output, tap) occurs once, so that adding bits is setting them.
    masks.index_add_(0, pairs.outputs * words + taps // 62, torch.ones_like(taps) << (taps % 62))
    return masks.view(-1, words)
