"""Movement of rows on a GPU: the kernels against plain torch, also at addresses that no vector begins at."""

from itertools import product

import pytest
import torch
from kernels.movement import NEAR, ROWS, check, slots_of, values

from pumice.lower import movement
from pumice.lower.movement import Slots

pytestmark = pytest.mark.gpu
KINDS = ("distinct", "several", "padded", "none")


@pytest.mark.parametrize(("kind", "channels", "dtype"), list(product(KINDS, (1, 3, 4, 96, 256), NEAR)))
def test_as_torch_does(kind, channels, dtype):
    check(kind, channels, dtype, "cuda")


def test_the_rows_of_a_block_begin_anywhere():
    """A block's slots are a part of those of all blocks."""
    rows = slots_of("several").rows.cuda()
    x = values(ROWS, 96, torch.float16).cuda()
    for first in (1, 2, 3, 7):
        slots = Slots(rows[first:], ROWS)
        for found in (movement.gather_slots(x, slots), movement.gather_stationary(x, slots)):
            assert torch.equal(found, x[rows[first:].long()])


def test_many_rows():
    """More than 2^31 elements in slots."""
    count, channels = (1 << 31) // 128 + 1000, 128
    chance = torch.Generator("cuda").manual_seed(1)
    slots = Slots(torch.randint(0, 1000, (count,), generator=chance, device="cuda").int(), 1000)
    x = torch.randn(1000, channels, device="cuda", dtype=torch.float16)
    for run in (movement.gather_slots, movement.gather_stationary):
        y = run(x, slots)
        assert torch.equal(y[-2000:], x[slots.rows[-2000:].long()])
        del y
    ones = torch.ones(count, channels, device="cuda", dtype=torch.float16)
    want = torch.bincount(slots.rows.long(), minlength=1000).float()[:, None].expand(-1, channels)
    sums = torch.zeros(1000, channels, device="cuda")
    movement.scatter_slots(sums, ones, slots)
    assert torch.equal(sums, want)
    assert torch.equal(movement.scatter_stationary(ones, slots, None), want.half())
