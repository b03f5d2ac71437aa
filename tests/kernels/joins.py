"""Joins of rows over segments in Triton's interpreter, in a process of its own: the kernel against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from kernels.interpret import answering
from torch import Tensor

from pumice.lower import joins
from pumice.lower.joins import Joins

Checks = Mapping[str, Callable[[], None]]
SIZES = {
    "cut": [0, 3, 1, 0, 9, 2, 70, 4, 5, 0],
    "whole": [0, 3, 1, 0, 2, 2],
    "one": [300],
    "none": [0, 0],
}
"""Entries of each segment; up to four are one piece."""
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def made(sizes: list[int], indexed: bool, scaled: bool) -> Joins:
    outputs = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    sources = 37 if indexed else len(outputs)
    inputs = torch.randint(0, sources, (len(outputs),)) if indexed else None
    factors = torch.rand(len(outputs)) if scaled else None
    return Joins.of(inputs, outputs, (sources, len(sizes)), factors)


def values(rows: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Rows with equal values and a NaN."""
    x = torch.randn(rows, channels)
    x[:3] = 0.5
    if rows > 5:
        x[4, 0] = float("nan")
    return x.to(dtype)


def check(sizes: str, channels: int, dtype: torch.dtype, indexed: bool, scaled: bool) -> None:
    """Sums, extremes with the number of those that attain them, and gradients of maxima."""
    torch.manual_seed(0)
    near = {"rtol": NEAR[dtype], "atol": 4 * NEAR[dtype], "equal_nan": True}
    with patch.object(joins, "_SHORT", 4):
        found = made(SIZES[sizes], indexed, scaled)
        x = values(found.sources, channels, dtype)
        for how in ("sum", "max", "min"):
            got, want = (run(x, found, how, how != "sum") for run in (joins.join, joins.join_torch))
            torch.testing.assert_close(got[0], want[0], **near)
            if how != "sum":
                torch.testing.assert_close(got[1], want[1], equal_nan=True)
        got = torch.ones(found.count, channels, dtype=dtype)
        joins.add_join(x, found, got)
        torch.testing.assert_close(got, joins.join_torch(x, found, "sum")[0] + 1, **near)
        grad, y = torch.randn(found.count, channels), joins.join_torch(x, found, "max")[0]
        got, want = (run(grad, x, y, found.transposed) for run in (joins.of_maxima, joins.of_maxima_torch))
        torch.testing.assert_close(got, want, **near)
    assert (found.parts > 0) == (sizes in ("cut", "one"))


def every() -> Checks:
    cases = product(SIZES, (5, 70), (torch.float32, torch.float16), ((True, True), (False, False), (True, False)))
    return {
        f"{name} {channels} {dtype} {how}": partial(check, name, channels, dtype, *how)
        for name, channels, dtype, how in cases
        if channels == 5 or (name == "cut" and how[0])
    }


GROUPS: Mapping[str, Callable[[], Checks]] = {"joins": every}
answer = answering(GROUPS)
