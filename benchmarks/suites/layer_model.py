"""A small model of the device: the bytes and products that a layer's kernels need, and lower bounds of their time.

    memory     features in and out, weights and index arrays once, through memory
    cache      what all programs gather, their weights and indices, through the L2
    matrix     tiles x rows x C x C products, including absent pairs, on tensor cores; on plain units if a kernel
               multiplies entry by entry
    latency    the longest program alone: its iterations wait for loads, which overlap by the number of stages

The largest is the bound. `why` lists what the bound omits, as reasons for a slower layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.scenes.layers import Layer
from pumice.coords import KernelMap
from pumice.language.bind import BoundStatement
from pumice.lower import maps, plan
from pumice.lower.dataflow import CONV, GROUPED_CONV
from pumice.lower.kernel import DEFAULT, runner, tile_of, use_tuning_mode
from pumice.schedule.predict import DEVICES, Device
from pumice.schedule.tile import PROCESSORS, Tile, occupancy, power_above

LATENCY = 0.6e-6
"""Seconds of a load from memory."""
_L2 = 50e6
"""Bytes of the L2 available to features."""


@dataclass(frozen=True)
class Walk:
    """The work of a kernel: entries (tile, kernel offset) of `block` rows each.

    heaviest: maximum entries of a tile. indices: bytes of the index arrays.
    """

    block: int
    tiles: int
    entries: int
    heaviest: int
    indices: int

    @staticmethod
    def of(rows: Tensor, tiles: Tensor, taps: Tensor, met: Tensor) -> Walk:
        """From the arrays of a coords.TileList."""
        heaviest = int(torch.bincount(tiles.long(), minlength=1).max())
        held = sum(x.numel() * x.element_size() for x in (rows, tiles, taps, met))
        return Walk(rows.shape[1], rows.shape[0], tiles.shape[0], heaviest, held)

    @staticmethod
    def of_all_taps(found: KernelMap, block: int) -> Walk:
        """All kernel offsets of every row, from the table of a map."""
        tiles = -(-found.num_outputs // block)
        return Walk(block, tiles, tiles * found.volume, found.volume, 4 * found.num_outputs * found.volume)


def walks(found: KernelMap, form: str) -> tuple[Walk, ...]:
    """The walk of each part of a tiled form."""
    _, held = maps.build_form(found, form)
    return tuple(Walk.of(*held[at : at + 4]) for at in range(0, len(held), 4))


@dataclass(frozen=True, eq=False)
class Step:
    """The single kernel of a layer over a form of one part, with its tensors by name."""

    bound: BoundStatement
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype

    @staticmethod
    def of(layer: Layer, form: str, block: int = 0) -> Step:
        """block: outputs per tile of the form "compacted"; 0: maps.tile_rows_for."""
        tokens, held = maps.build_form(layer.found, form)
        text, x, weight, shape = _statement(layer)
        names = "|".join(("x", "w", *tokens))
        operands = [x, weight, *(layer.found.compacted(block) if block else held)]
        forms = (("map", form),)
        (step,) = plan.rewritten(text, names, forms).steps
        tensors = plan.arrays(operands, names, text, plan.Candidate(forms, (), (step,), 0.0))
        return Step(plan.step_bound(step, tensors, shape), tensors, layer.feats.dtype)

    def default(self, times: float = 1.0) -> Tile:
        """The tile without tuning, for a map `times` as long."""
        with use_tuning_mode(DEFAULT):
            return tile_of(self.bound, self.tensors if times == 1 else self._longer(times))

    def _longer(self, times: float) -> Mapping[str, Tensor]:
        """The tensors with longer maps, as meta tensors: the default tile depends on shapes only."""
        return {
            name: x.new_empty((round(times * len(x)), *x.shape[1:]), device="meta") if name.startswith("map_") else x
            for name, x in self.tensors.items()
        }

    def best(self) -> Tile:
        """The tuned tile, or the default if nothing was tuned."""
        return tile_of(self.bound, self.tensors)

    def by(self, tile: Tile) -> Tensor:
        """The result with this tile."""
        return runner(self.bound, self.dtype, tile)(self.tensors).flatten(1)


def _statement(layer: Layer) -> tuple[str, Tensor, Tensor, tuple[int, ...]]:
    """The statement of a layer, its features and weights, and the shape of its result."""
    groups, outputs = layer.groups, layer.weight.shape[0]
    if groups == 1:
        return CONV, layer.feats, layer.weight, (layer.rows, outputs)
    each = outputs // groups
    parts = layer.feats.unflatten(1, (groups, -1)), layer.weight.unflatten(0, (groups, each))
    return GROUPED_CONV, *parts, (layer.rows, groups, each)


@dataclass(frozen=True)
class Needs:
    """Cost of a layer. FLOP: useful (pairs), padded (tiles), plain (of these, on plain units). Bytes: memory, cache
    (L2), missed (gathered bytes beyond the L2's capacity, for rows in random order). chain: seconds of the longest
    program. programs: their number; waves: over the programs that run at once."""

    useful: float = 0.0
    padded: float = 0.0
    plain: float = 0.0
    memory: float = 0.0
    cache: float = 0.0
    chain: float = 0.0
    programs: float = 0.0
    waves: float = 0.0
    missed: float = 0.0

    def __add__(self, other: Needs) -> Needs:
        """The costs of both, one after the other."""
        values = zip(vars(self).items(), vars(other).values(), strict=True)
        return Needs(**{name: own + more for (name, own), more in values})


def needs(layer: Layer, walked: Sequence[Walk], tile: Tile) -> Needs:
    """The cost of a layer in 16 or 32 bits over these walks, by kernels with this tile."""
    (outputs, _, each), size = layer.weight.shape, layer.feats.element_size()
    pairs = len(layer.found.pairs().inputs)
    (across, read), turns = _columns(layer, tile), -(-each // tile.reduced)
    pack = max(1, tile.reduced // power_above(each)) if tile.packed else 1
    flops, entrywise = 2.0 * outputs * each, tile.reduced == 1
    total = Needs(useful=pairs * flops, memory=layer.weight.numel() * size + layer.feats.numel() * size)
    for number, walk in enumerate(walked):
        down = max(1, walk.block // tile.rows)
        last = number == len(walked) - 1
        # Parts accumulate into a float32 result, which further parts read and write again.
        out = layer.rows * outputs * ((size if last else 4) + (4 if number else 0))
        gathered = pairs * read * size * across / len(walked)
        weights = walk.entries * down * outputs * each * size
        programs = walk.tiles * down * across
        padded = walk.entries * walk.block * flops
        longest = math.ceil(min(walk.heaviest, tile.stream_k_chunk or walk.heaviest) / pack)
        total += Needs(
            padded=padded,
            plain=padded if entrywise else 0.0,
            memory=out + walk.indices,
            cache=gathered + weights + out + walk.indices * across * turns,
            chain=LATENCY * (1 + longest * turns / max(1, tile.stages - 1) * (1 if tile.prefetch_indices else 2)),
            programs=programs,
            waves=programs / (PROCESSORS * occupancy(tile, 8 * size)),
            missed=gathered * max(0.0, 1 - _L2 / max(1, layer.feats.numel() * size)),
        )
    return total


def _columns(layer: Layer, tile: Tile) -> tuple[int, int]:
    """Blocks of columns, and the channels that each reads per row: matrix products take one group at a time."""
    outputs, _, each = layer.weight.shape
    width = outputs // layer.groups
    if tile.reduced > 1:
        return layer.groups * -(-width // tile.columns), each
    return -(-outputs // tile.columns), each * max(1, min(layer.groups, tile.columns // width))


def bounds(needed: Needs, floor: float = 0.0, gpu: Device = DEVICES["cuda"]) -> Mapping[str, float]:
    """Lower bounds in seconds, by name. floor: the time of an empty kernel. gpu: by default an H200."""
    return {
        "memory": needed.memory / gpu.memory,
        "cache": needed.cache / gpu.cache,
        "matrix": (needed.padded - needed.plain) / gpu.matrix + needed.plain / gpu.plain,
        "latency": floor + needed.chain,
    }


def least(needed: Needs) -> float:
    """The largest lower bound in seconds."""
    return max(bounds(needed).values())


def in_turn(needed: Needs) -> float:
    """The bound in seconds if programs are not split among multiprocessors: the one with the most programs decides."""
    found = bounds(needed)
    share = max(1.0, needed.programs) / PROCESSORS
    busiest = math.ceil(share) / share
    return max(found["memory"], found["latency"], busiest * max(found["cache"], found["matrix"]))


def why(needed: Needs, floor: float, gpu: Device = DEVICES["cuda"]) -> Mapping[str, float]:
    """Seconds that the largest bound omits, by reason, the largest first."""
    found = bounds(needed, floor, gpu)
    name = max(found, key=found.__getitem__)
    busy = sorted(seconds for n, seconds in found.items() if n not in ("latency", name))
    waves = max(needed.waves, 1e-9)
    left = {
        "loads and products take turns": busy[-1],
        "what is gathered does not stay in the L2": needed.missed * (1 / gpu.memory - 1 / gpu.cache),
        "the launch and the longest program": 0.0 if name == "latency" else found["latency"],
        "the last wave is not full": found[name] * (math.ceil(waves) / waves - 1) if waves > 1 else 0.0,
    }
    return dict(sorted(left.items(), key=lambda item: -item[1]))
