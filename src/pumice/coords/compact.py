"""Two more storages of a kernel map: tiles of outputs that share their taps, and groups of pairs of one tap.

Both are plain torch; each reads the device once, for the size of its result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 62


class Compacted(NamedTuple):
    """Tiles of B outputs, and for each tile only the taps that any of its outputs has.

    rows int32 [T, B]: the outputs of each tile, -1 past the last.
    tiles int32 [E]: the tile of each (tile, tap) entry, not falling; taps int32 [E]: its tap.
    inputs int32 [E, B]: the input that output rows[tiles[e], b] meets through taps[e], -1 where none.
    """

    rows: Tensor
    tiles: Tensor
    taps: Tensor
    inputs: Tensor


class Grouped(NamedTuple):
    """The pairs of each tap in groups of Q, the last one of a tap filled up with -1.

    taps int32 [G], not falling; inputs, outputs int32 [G, Q].
    """

    taps: Tensor
    inputs: Tensor
    outputs: Tensor


def compacted(pairs: tuple[Tensor, Tensor, Tensor], taps: Tensor, rows: int, block: int) -> Compacted:
    """Pairs (inputs, outputs, sizes on the CPU) and their taps, in tiles of `block` of the `rows` outputs.

    Outputs with like taps share a tile: they are sorted by the Gray code of their taps, rare taps as the high bits
    (the order with the least computing of absent pairs in the project's simulation of indoor and LiDAR scenes).
    """
    inputs, outputs, sizes = pairs
    device, volume = inputs.device, len(sizes)
    order = _gray_order(outputs, taps, rows, sizes)
    tiles = -(-rows // block)
    padded = torch.full((tiles * block,), -1, dtype=torch.int64, device=device)
    padded[:rows] = order
    place = torch.empty_like(order)
    place[order] = torch.arange(rows, device=device)
    slot = place[outputs]
    cell = slot // block * volume + taps
    active = torch.zeros(tiles * volume, dtype=torch.bool, device=device)
    active[cell] = True
    entry_of = active.cumsum(0) - 1
    entries = active.nonzero()[:, 0]
    met = torch.full((len(entries) * block,), -1, dtype=torch.int32, device=device)
    met[entry_of[cell] * block + slot % block] = inputs.int()
    volume = max(volume, 1)
    return Compacted(
        padded.view(tiles, block).int(), (entries // volume).int(), (entries % volume).int(), met.view(-1, block)
    )


def grouped(inputs: Tensor, outputs: Tensor, sizes: Tensor, group: int) -> Grouped:
    """Pairs sorted by tap, sizes [K] of them on the CPU, in groups of `group`."""
    counts = (sizes + group - 1) // group
    first = (counts.cumsum(0) - counts) * group
    shift = (first - sizes.cumsum(0) + sizes).to(inputs.device)
    length = len(inputs)
    taps = torch.arange(len(sizes), device=inputs.device)
    of_pair = torch.repeat_interleave(taps, sizes.to(inputs.device), output_size=length)
    place = torch.arange(length, device=inputs.device) + shift[of_pair]
    total = int(counts.sum())
    both = torch.full((2, total * group), -1, dtype=torch.int32, device=inputs.device)
    both[0, place], both[1, place] = inputs.int(), outputs.int()
    of_group = torch.repeat_interleave(taps, counts.to(inputs.device), output_size=total)
    return Grouped(of_group.int(), both[0].view(total, group), both[1].view(total, group))


def _gray_order(outputs: Tensor, taps: Tensor, rows: int, sizes: Tensor) -> Tensor:
    """Output rows sorted by the rank of their taps' bits in Gray code, the rarest tap the highest bit."""
    volume = len(sizes)
    bit = torch.empty_like(sizes)
    bit[sizes.argsort(descending=True, stable=True)] = torch.arange(volume)
    bit = bit.to(taps.device, non_blocking=True)
    words = max(1, -(-volume // _BITS))
    masks = torch.zeros(words * rows, dtype=torch.int64, device=taps.device)
    bits = bit[taps]
    masks.index_add_(0, bits // _BITS * rows + outputs, torch.ones_like(bits) << (bits % _BITS))
    ranks = masks.view(words, rows)
    parity = torch.zeros(rows, dtype=torch.int64, device=taps.device)
    order = torch.arange(rows, device=taps.device)
    keys: list[Tensor] = []
    for word in range(words - 1, -1, -1):
        rank = _gray_rank(ranks[word])
        # An odd number of bits above turns the order below around.
        rank = torch.where(parity == 1, ((1 << _BITS) - 1) ^ rank, rank)
        parity = rank & 1
        keys.append(rank)
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order


def _gray_rank(code: Tensor) -> Tensor:
    """The rank of a Gray code: the exclusive or of all its right shifts."""
    for shift in (1, 2, 4, 8, 16, 32):
        code = code ^ (code >> shift)
    return code
