"""Products of rows of blocks in Triton's interpreter, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from unittest.mock import patch

import torch
from kernels.interpret import answering, check_repeated, near, refuses
from torch import Tensor

import pumice as pm
from pumice.lower import block_rows
from pumice.lower.block_rows import PresentBlocks, RowForm, listed
from pumice.lower.segment_sums import Roles

Checks = Mapping[str, Callable[[], None]]
SPMM = "C[m,n] = A[m,k] * B[k,n]"
NEAR = 2e-3  # float16; the interpreter's products of bfloat16 are wrong
FORMATS = ("m:U k:C m:B{} k:B{}", "m:C k:G m:B{} k:B{}", "(m k):C m:B{} k:B{}")


def blocked(rows: int, depths: int, sides: tuple[int, int], kept: float = 0.4) -> Tensor:
    """A float16 matrix of some blocks, the first row of them without any."""
    torch.manual_seed(0)
    height, depth = sides
    there = torch.rand(-(-rows // height), -(-depths // depth)) < kept
    there[0] = False
    found = there[:, None, :, None] * torch.randn(len(there), height, there.shape[1], depth)
    return found.reshape(len(there) * height, -1)[:rows, :depths].half()


def check_products(depth: int, count: int, width: int, format: str = FORMATS[0]) -> None:
    """Kernel and plain torch compute what dense torch does; sizes that cut blocks, too."""
    a, b = blocked(5 * 32 - 3, 4 * depth - 5, (32, depth)), torch.randn(4 * depth - 5, width).half()
    seen, run = list[int](), block_rows.BlockRows.run

    def both(self: block_rows.BlockRows, x: Tensor, values: Tensor, y: Tensor) -> Tensor:
        seen.append(self.lists.count)
        twin = self.run_torch(x, values, torch.empty_like(y))
        near(run(self, x, values, y), twin.double(), NEAR)
        return y

    few, cost = patch.object(block_rows, "PROCESSORS", 1), patch.object(block_rows, "_COST_OF_TWO", 2.0 / count**2)
    with patch.object(block_rows.BlockRows, "run", both), few, cost:
        got = pm.einsum(SPMM, A=pm.sparse(a, format.format(32, depth)), B=b, lowering="block-rows")
    near(got, a.double() @ b.double(), NEAR)
    assert {*seen} == {count}


def check_lists() -> None:
    """Every block is listed once, in its row, padding never; rows with most iterations first."""
    form = RowForm(Roles("", "", "", ""), 64, ("i", "j"), False)
    rows, places = torch.tensor([0, 0, 2, 2, 3]), torch.tensor([[1, 3], [-1, 0], [2, 1], [-1, -1], [1, 9]])
    blocks = PresentBlocks.of(rows, places, (5, 4))
    assert [x.tolist() for x in blocks] == [[0, 0, 0, 2, 2, 3], [1, 3, 0, 2, 1, 1], [0, 1, 3, 4, 5, 8]]
    for count in (1, 2):
        found = listed(blocks, (5, 4), form, count)
        assert found is not None
        seen = set[tuple[int, int, int]]()
        for start, length, group, *first in found.heads.tolist():
            words = found.words[start : start + length].tolist()
            assert not words or words[0] == first
            seen |= {(group * count + n, w[0], w[1 + n]) for w in words for n in range(count) if w[1 + n] >= 0}
        each = zip(*(x.tolist() for x in blocks), strict=True)
        want = {(r, 2 * c + half, 64 * p + half) for r, c, p in each for half in (0, 1)}
        assert seen == want
        assert (found.heads[:, 1].diff() <= 0).all()
    twice = PresentBlocks(*(x.repeat_interleave(2) for x in blocks))
    assert listed(twice, (5, 4), form, 2) is None


def check_statements() -> None:
    """Blocks that are stored turned, or twice; coefficients, old values, more axes."""
    torch.manual_seed(0)
    rows, places = torch.tensor([0, 0, 2]), torch.tensor([1, 1, 0])
    values, x, old = torch.randn(3, 32, 64).half(), torch.randn(128, 4, 8).half(), torch.randn(80, 4, 8).half()
    want = torch.zeros(80, 4, 8, dtype=torch.float64)
    for row, place, block in zip(rows.tolist(), places.tolist(), values.double(), strict=True):
        found = torch.einsum("ij,jno->ino", block, x.double()[64 * place : 64 * place + 64])
        want[32 * row : 32 * row + 32] += found[: 80 - 32 * row]
    text = "T[32*S[p]+i,n,o] = V[p,i,j] * X[64*K[p]+j,n,o] ; S:sorted, T:[80,_,_]"
    turned = text.replace("V[p,i,j]", "V[p,j,i]")
    given = {"S": rows, "K": places, "X": x, "lowering": "block-rows"}
    near(pm.einsum(text, V=values, **given), want, NEAR)
    near(pm.einsum(turned, V=values.mT.contiguous(), **given), want, NEAR)
    near(pm.einsum(text.replace("=", "+= 2 *", 1), V=values, T=old, **given), old + 2 * want, NEAR)


def check_prepared() -> None:
    """A plan as a function of the gathered rows reads values where they are."""
    b = torch.randn(64, 32).half()
    check_repeated(FORMATS[1].format(32, 32), blocked(80, 64, (32, 32)), b, "block-rows", NEAR)


def check_refusals() -> None:
    """Other statements are refused with the reason."""
    ones, b = torch.ones(64, 64), torch.ones(64, 64).half()
    a, long = pm.sparse(ones.half(), FORMATS[0].format(32, 32)), torch.ones(32, 1024).half()
    index = {"S": torch.tensor([0, 1]), "K": torch.tensor([0, 0]), "V": torch.ones(2, 32, 32).half(), "X": b}
    text = "T[32*S[p]+i,n] = V[p,i,j] * X[32*K[p]+j,n] ; S:sorted, T:[64,_]"
    cases = {
        "fewer than 16 columns": (SPMM, {"A": a, "B": b[:, :8]}),
        "not both of float16": (SPMM, {"A": pm.sparse(ones, FORMATS[0].format(32, 32)), "B": b.float()}),
        "sorted index array": (text.replace("S:sorted, ", ""), index),
        "blocks overlap": (text.replace("32*K[p]+j", "64*K[p]+j"), index),
        "blocks are of 32 x": (SPMM, {"A": pm.sparse(ones.half(), FORMATS[0].format(16, 32)), "B": b}),
        "not one product of blocks": (SPMM, {"A": pm.sparse(ones.half(), "CSR"), "B": b}),
        "a part of an axis": (f"{text}, n:8..64", index),
        "few and long": (SPMM, {"A": pm.sparse(long, FORMATS[0].format(32, 32)), "B": torch.ones(1024, 64).half()}),
    }
    refuses("block-rows", cases)


def checks() -> Checks:
    found = {
        f"depth {depth}, {count} rows, {width} columns": partial(check_products, depth, count, width)
        for depth in (32, 128)
        for count in (1, 2)
        for width in ((33, 72, 300) if depth == 32 else (64,))
    }
    found |= {f"format {form}": partial(check_products, 32, 2, 64, form) for form in FORMATS[1:]}
    others = (check_lists, check_statements, check_prepared, check_refusals)
    return {**found, **{check.__name__.removeprefix("check_"): check for check in others}}


GROUPS: Mapping[str, Callable[[], Checks]] = {"block-rows": checks}
answer = answering(GROUPS)
