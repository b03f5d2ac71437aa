"""The stable order of integer keys: a radix sort of few digits, of as many bits as the keys have."""

from __future__ import annotations

import torch
from torch import Tensor

from pumice.coords.launch import kernel, runs_kernels

_DIGIT = 9
"""Bits of a digit, at most."""
_BLOCKS = 128
"""Blocks of rows, at most: each looks at the counts of all."""
_LEAST, _MOST = 1024, 2048
"""Rows of a block, at least and at most; they are sorted among themselves."""


def ranked(keys: Tensor, bits: int) -> Tensor:
    """int32 [N]: the places of keys int32 or int64 [N], not falling, equal ones in their own order.

    bits: of which keys differ, the lowest ones; nothing is negative.
    """
    block = next((b for b in (_LEAST, _MOST) if len(keys) <= b * _BLOCKS), None)
    if not runs_kernels(keys) or keys.dtype != torch.int32 or block is None or bits == 0 or len(keys) == 0:
        return ranked_twin(keys)
    turns = -(-bits // _DIGIT)
    width = -(-bits // turns)
    blocks = -(-len(keys) // block)
    counts = torch.empty(blocks << width, dtype=torch.int32, device=keys.device)
    for turn in range(turns):
        last = turn + 1 == turns
        found = torch.empty(len(keys), dtype=torch.int32 if last else torch.int64, device=keys.device)
        numbers, constants = (turn * width, len(keys)), {"BINS": 1 << width, "BLOCK": block, "FIRST": turn == 0}
        kernel("tiling.count_digits")(blocks, (keys, counts), numbers, constants)
        constants |= {"LAST": last, "TURN": _TURN}
        kernel("tiling.place_digits")(blocks, (keys, counts, found), (*numbers, blocks), constants, 8)
        keys = found
    return keys


_TURN = 8
"""Blocks whose counts are read at once."""


def ranked_twin(keys: Tensor) -> Tensor:
    """As ranked, in plain torch."""
    return torch.sort(keys, stable=True)[1].int()
