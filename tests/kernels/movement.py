"""Movement of rows in Triton's interpreter, in a process of its own: the kernels against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from kernels.interpret import answering
from torch import Tensor

from pumice.lower import movement
from pumice.lower.movement import Slots

Checks = Mapping[str, Callable[[], None]]
ROWS = 41
NEAR = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def slots_of(kind: str) -> Slots:
    """Slots of ROWS rows: distinct ones, several of a row, with padding, or none; the first row has no slot."""
    chance = torch.Generator().manual_seed(3)
    if kind == "none":
        return Slots(torch.zeros(0, dtype=torch.int32), ROWS)
    if kind == "distinct":
        return Slots((1 + torch.randperm(ROWS - 1, generator=chance)[:30]).int(), ROWS, False, True)
    rows = torch.randint(1, ROWS, (300,), generator=chance).int()
    if kind == "padded":
        rows[torch.rand(300, generator=chance) < 0.3] = ROWS
    return Slots(rows, ROWS, kind == "padded")


def values(rows: int, channels: int, dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(4)
    return torch.randn(rows, channels, generator=chance).to(dtype)


def check(kind: str, channels: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Gathers bit for bit; sums in float32."""
    made = slots_of(kind)
    slots, x = replace(made, rows=made.rows.to(device)), values(ROWS, channels, dtype).to(device)
    want = movement._gather_torch(x, slots)
    for found in (
        movement.gather_slots(x, slots),
        movement.gather_slots(x, slots, True),
        movement.gather_stationary_padded(x, slots),
    ):
        assert torch.equal(found, want)
    products = values(len(slots.rows), channels, dtype).to(device)
    begun = values(ROWS, channels, torch.float32).to(device)
    near = {"rtol": 1e-5, "atol": 1e-5}
    for scalar in (False, True):
        found, want = begun.clone(), begun.clone()
        movement.scatter_slots(found, products, slots, scalar)
        movement._scatter_torch(want, products, slots)
        torch.testing.assert_close(found, want, **near)
    there = slots.rows < ROWS
    assert torch.equal(movement.gather_stationary(x, slots)[there], x[slots.rows[there].long()])
    near = {"rtol": NEAR[dtype], "atol": 4 * NEAR[dtype]}
    for base in (None, begun.to(dtype)):
        found, want = movement.scatter_stationary(products, slots, base), begun.double() * 0
        real = slots.rows < ROWS
        want.index_add_(0, slots.rows[real].long(), products[real].double())
        want += 0 if base is None else base.double()
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), want, **near)
        torch.testing.assert_close(movement._sums_torch(products, slots, base).double(), want, **near)


@contextmanager
def counting(access: str, x: Tensor | None = None) -> Iterator[list[int]]:
    """Within it, how many elements each access of a kernel has: each "store", or each "load" of x."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[int] = []
    name = f"create_masked_{access}"
    real = getattr(InterpreterBuilder, name)

    def counted(self: Any, pointers: Any, *more: Any) -> Any:
        there = more[0 if access == "load" else 1].data
        if x is not None:
            there = there & (pointers.data >= x.data_ptr()) & (pointers.data < x.data_ptr() + x.nbytes)
        found.append(int(there.sum()))
        return real(self, pointers, *more)

    with patch.object(InterpreterBuilder, name, counted):
        yield found


def check_once(channels: int) -> None:
    """In a stationary order each element of a row is read, or written, once; by slots, once for each slot."""
    slots, x = slots_of("several"), values(ROWS, channels, torch.float32)
    slots.lists  # noqa: B018
    with counting("load", x) as loads:
        y = movement.gather_stationary(x, slots)
    assert sum(loads) == x.numel() < y.numel()
    with counting("load", x) as loads:
        movement.gather_slots(x, slots)
    assert sum(loads) == y.numel()
    with counting("store") as stores:
        found = movement.scatter_stationary(y, slots, None)
    assert sum(stores) == found.numel() == x.numel()


def groups() -> Checks:
    kinds = product(("distinct", "several", "padded", "none"), (1, 3, 4, 32, 96, 160), NEAR)
    found = {f"{k} {c} {str(t)[6:]}": partial(check, k, c, t) for k, c, t in kinds}
    return {**found, **{f"once, {channels} channels": partial(check_once, channels) for channels in (4, 96)}}


GROUPS: Mapping[str, Callable[[], Checks]] = {"movement": groups}
answer = answering(GROUPS)
