"""Statements over gathered rows on a CPU are what the reference loops say, for any number of rows."""

import re

import pytest
import torch

import pumice as pm
from pumice.errors import OptionError
from pumice.lower import rowwise

STATEMENTS = {
    "messages": "Z[T[b],k,u] = CG[k,i,j,p] * X[S[b],i,u] * Y[b,j] * W[b,p,u] ; Z:[5,_,_]",
    "shared": "Z[T[b],k,u] = CG[k,i,j,p] * X[S[b],i,u] * Y[b,j] * V[p,u] ; Z:[5,_,_]",
    "gathered": "Z[b,k,u] = CG[k,i,j,p] * X[S[b],i,u] * Y[b,j] * W[b,p,u]",
    "scattered": "Z[T[b],k,u] = CG[k,i,j,p] * Y[b,j] * W[b,p,u] ; Z:[5,_,_], i:4",
    "both ends": "Z[b,k,u] = CG[k,i,j,p] * X[S[b],i,u] * X[T[b],i,u] * Y[b,j] * W[b,p,u]",
    "matrices": "Z[T[b],k,u] += 2 * CG[k,i,j,p] * X[S[b],i,v] * Y[b,j] * M[p,v,u]",
    "summed": "Z[p,u] = CG[k,i,j,p] * X[S[b],i,u] * Y[b,j] * G[T[b],k,u]",
}


def operands(text, rows, dtype=torch.float64):
    chance = torch.Generator().manual_seed(rows)
    table = torch.randn(4, 4, 3, 2, generator=chance) * (torch.rand(4, 4, 3, 2, generator=chance) < 0.3)
    shapes = {"X": (5, 4, 6), "Y": (rows, 3), "W": (rows, 2, 6), "V": (2, 6), "M": (2, 6, 6), "G": (5, 4, 6)}
    dense = {name: torch.randn(shape, generator=chance).to(dtype) for name, shape in shapes.items()}
    ends = torch.randint(-1, 5, (2, rows), generator=chance)
    given = {"CG": pm.sparse(table.to(dtype), "(k i j p):C"), **dense, "S": ends[0].int(), "T": ends[1]}
    if "+=" in text:
        given["Z"] = torch.randn(5, 4, 6, generator=chance).to(dtype)
    return {name: x for name, x in given.items() if re.search(rf"\b{name}\[", text)}


@pytest.mark.parametrize("rows", [1, 37, 200])
@pytest.mark.parametrize("name", STATEMENTS)
def test_statements(name, rows):
    text = STATEMENTS[name]
    given = operands(text, rows)
    got, want = (pm.einsum(text, **given, lowering=lowering) for lowering in ("rowwise", "reference"))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    assert rows < 2 or want.any()


def test_narrow_results_are_rounded_once():
    given = operands(STATEMENTS["messages"], 40, torch.bfloat16)
    exact = {n: x.to(dtype=torch.float64) if n not in "ST" else x for n, x in given.items()}
    got = pm.einsum(STATEMENTS["messages"], **given, lowering="rowwise")
    want = pm.einsum(STATEMENTS["messages"], **exact, lowering="reference")
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=0.02, rtol=0.01)


def test_blocks_cover_all_rows_with_few_sizes():
    for rows in (*range(1, 300), 1000, 20_000, 50_001):
        blocks = rowwise._blocks(rows)
        assert sum(blocks[:-1]) < rows <= sum(blocks) < rows + max(4, rows / 8) and max(blocks) <= rowwise._MOST
    assert len({block for rows in range(1, 5000) for block in rowwise._blocks(rows)}) < 90


def test_declared_rows():
    """A declared number of rows is that of all blocks."""
    text, given = f"{STATEMENTS['messages']}, b:21", operands(STATEMENTS["messages"], 21)
    got, want = (pm.einsum(text, **given, lowering=way) for way in ("rowwise", "reference"))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_it_is_chosen_for_messages():
    given = operands(STATEMENTS["messages"], 200)
    made = pm.compile_einsum(STATEMENTS["messages"], {"CG": "(k i j p):C"})
    assert "rowwise, estimated" in made.explain(**given)


def test_refusals():
    with pytest.raises(OptionError, match="no rows are gathered"):
        pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=torch.ones(2, 3), B=torch.ones(3, 4), lowering="rowwise")
    with pytest.raises(OptionError, match="no rows are gathered"):
        pm.einsum("y[b] = x[b,S[b]]", x=torch.ones(3, 4), S=torch.tensor([0, 1, 2]), lowering="rowwise")
