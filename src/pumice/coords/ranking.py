"""The stable order of integer keys: a radix sort of few digits, of as many bits as the keys have."""

from __future__ import annotations

import torch
from torch import Tensor

from pumice.coords.launch import kernel, runs_kernels

_DIGIT = 9
"""Bits of a digit, at most."""
_MOST = 1 << 18
"""Keys of more than one digit, at most: torch is as fast with these, and faster with more (on an H200)."""
_BLOCK = 512
"""Rows of a block, which are sorted among themselves."""
_SQUADS = (16, 32, 64)
"""Blocks whose counts are added up, and such sums, at most: a block looks at the sums, and at the counts beside it."""


def ranked(keys: Tensor, bits: int) -> Tensor:
    """int32 [N]: the places of keys int32 or int64 [N], not falling, equal ones in their own order.

    bits: of which keys differ, the lowest ones; nothing is negative. Many keys, and wide ones, are left to torch.
    """
    turns = max(1, -(-bits // _DIGIT))
    most = _MOST if turns > 1 else len(keys)
    squad = next((n for n in _SQUADS if len(keys) <= min(most, _BLOCK * n * n)), None)
    if not runs_kernels(keys) or keys.dtype != torch.int32 or squad is None or bits == 0 or len(keys) == 0:
        return ranked_twin(keys)
    width = -(-bits // turns)
    blocks = -(-len(keys) // _BLOCK)
    counts = torch.empty(blocks << width, dtype=torch.int32, device=keys.device)
    sums = torch.zeros(turns, squad << width, dtype=torch.int32, device=keys.device)
    for turn in range(turns):
        last = turn + 1 == turns
        found = torch.empty(len(keys), dtype=torch.int32 if last else torch.int64, device=keys.device)
        numbers = (turn * width, len(keys))
        constants = {"BINS": 1 << width, "BLOCK": _BLOCK, "FIRST": turn == 0, "SQUAD": squad}
        kernel("tiling.count_digits")(blocks, (keys, counts, sums[turn]), numbers, constants)
        constants["LAST"] = last
        kernel("tiling.place_digits")(blocks, (keys, counts, sums[turn], found), numbers, constants)
        keys = found
    return keys


def ranked_twin(keys: Tensor) -> Tensor:
    """As ranked, in plain torch."""
    return torch.sort(keys, stable=True)[1].int()
