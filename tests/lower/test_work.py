"""The work that a kernel is reckoned for, on which the choice between forms of a map depends."""

import pytest
import torch

from pumice.language.parse import parse
from pumice.lower import plan, work
from pumice.schedule.predict import DEVICES, seconds

GPU = DEVICES["cuda"]
COMPACTED = "O[rows[tile[e],b],n] = x[met[e,b],c] * w[n,k[e],c] ; tile:sorted, rows:distinct, rows:onto"
GROUPED = "O[o[g,q],n] = x[i[g,q],c] * w[n,k[g],c]"
OF_WEIGHT = {
    "compacted": "dw[n,k[e],c] = x[met[e,b],c] * grad[rows[tile[e],b],n] ; tile:sorted, rows:distinct, rows:onto",
    "grouped": "dw[n,k[g],c] = x[i[g,q],c] * grad[o[g,q],n]",
}


def reckoned(text, shape, dtype=torch.float16, **sizes):
    """The work over so many entries of so many rows."""
    (rows, entries), channels, outputs = sizes["size"], sizes["channels"], sizes["outputs"]
    block, groups, each = 128, -(-entries // 2048), 2048
    numbers = {"met": (entries // block, block), "rows": (-(-rows // block), block), "tile": (entries // block,)}
    numbers |= {"i": (groups, each), "o": (groups, each), "k": (groups if "g,q" in text else entries // block,)}
    values = {"x": (rows, channels), "grad": (rows, outputs), "w": (outputs, 27, channels)}
    operands = {name: torch.empty(size, dtype=torch.int32, device="meta") for name, size in numbers.items()}
    operands |= {name: torch.empty(size, dtype=dtype, device="meta") for name, size in values.items()}
    step = parse(text)
    used = {name: x for name, x in operands.items() if name in {a.name for a in plan.accesses_of(step)}}
    return work.kernel_work(step, plan.step_bound(step, used, shape), used)


@pytest.mark.parametrize("channels", [4, 32, 96])
def test_many_programs_that_each_add_a_little_are_reckoned_for_their_number(channels):
    """Of the weight of 4 to 32 channels over 2 million rows they took 1.16 ms of an H200, and groups of pairs 0.5."""
    sizes = {"size": (1_996_800, 30_900_000), "channels": channels, "outputs": 32}
    tiles, groups = (
        seconds(reckoned(OF_WEIGHT[name], (32, 27, channels), **sizes), GPU) for name in ("compacted", "grouped")
    )
    assert tiles > 2 * groups and tiles > 1e-3


@pytest.mark.parametrize(("dtype", "more"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float32, 1)])
def test_what_is_added_to_is_filled_before_and_rounded_behind(dtype, more):
    sizes = {"size": (9000, 20_000), "channels": 32, "outputs": 32}
    whole, added = (reckoned(text, (9000, 32), dtype, **sizes) for text in (COMPACTED, GROUPED))
    assert (whole.launches, added.launches) == (1, 1 + more)
    # So few pairs are sooner multiplied with what is empty beside them.
    assert seconds(whole, GPU) < seconds(added, GPU)
