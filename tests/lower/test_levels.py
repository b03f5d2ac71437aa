"""Entries of dense arrays and levels of operands in C, against loops in Python."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pumice as pm
from pumice.language.formats import parse_format
from pumice.language.iteration import DENSE
from pumice.lower import levels, nest_c
from pumice.ops.direct import stored_operand

pytestmark = pytest.mark.skipif(nest_c.unavailable() is not None, reason="needs a C compiler")

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(7,), (0,), (3, 0), (0, 3), (1, 1, 1), (4, 5), (3, 4, 2), (2, 3, 1, 4, 2), (64,), (3, 130), (9, 7, 8)]
)
def test_nonzeros_of_dense_arrays(shape: tuple[int, ...], dtype: torch.dtype):
    x = torch.randn(shape).mul(torch.rand(shape) < 0.5).to(dtype)
    coords, values, rows = levels.listed(x)
    wanted = x.nonzero().unbind(1)
    assert all(c.dtype == torch.int32 for c in coords)
    assert [c.tolist() for c in coords] == [c.tolist() for c in wanted]
    assert torch.equal(values, x[wanted])
    counts = (x != 0).reshape(-1, shape[-1]).sum(1) if x.numel() else torch.zeros(len(rows) - 1, dtype=torch.int64)
    assert rows.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_zeros_of_both_signs_are_none_and_nan_is_stored(dtype: torch.dtype):
    x = torch.tensor([-0.0, 0.0, NAN, torch.finfo(dtype).smallest_normal, -torch.inf], dtype=dtype)
    (found,), values, _ = levels.listed(x)
    assert found.tolist() == [2, 3, 4] and torch.equal(values[1:], x[3:]) and bool(values[0].isnan())


def test_arrays_without_a_kernel():
    assert levels.listed(torch.ones(3, dtype=torch.int32)) is None
    assert levels.listed(torch.tensor(1.0)) is None
    assert levels.listed(torch.ones(3)) is not None
    with FakeTensorMode() as mode:
        assert levels.listed(mode.from_tensor(torch.ones(3))) is None


@pytest.mark.parametrize("format", ["a:U b:U c:C", "[a,b,c] c:U (b a):C", "(a b c):C", "a:H b:C c:C", "a:C b:C c:U"])
def test_a_view_is_converted_as_by_torch(format: str):
    x = torch.randn(4, 6, 5).mul(torch.rand(4, 6, 5) < 0.4).permute(2, 0, 1)[:, 1:, ::2]
    assert not x.is_contiguous()
    found, by_torch = pm.sparse(x, format), pm.sparse(x.to_sparse_coo(), format)
    assert torch.equal(found.to_dense(), x) and found.nnz == by_torch.nnz
    (part,), (wanted,) = found.parts, by_torch.parts
    assert part.coords.keys() == wanted.coords.keys()
    assert all(torch.equal(part.coords[axis], wanted.coords[axis]) for axis in wanted.coords)


def test_values_keep_their_gradients():
    x = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
    pm.sparse(x, "m:U k:C").to_dense().mul(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert x.grad.tolist() == [[0, 2], [3, 0]]


@pytest.mark.parametrize("seed", range(40))
def test_levels_give_back_the_coordinates(seed: int):
    chance = random.Random(seed)
    sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 6))]
    dense = chance.randrange(len(sizes))
    cells = [*itertools.product(*map(range, sizes))]
    chosen = sorted(chance.sample(cells, chance.randint(1, min(60, len(cells)))))
    given = [*chosen] if seed % 2 else chance.sample(chosen, len(chosen))
    found = made_of(given, sizes, dense)
    assert [*walk(found, len(sizes))] == [(cell, p) for p, cell in enumerate(chosen)]
    order = range(len(given)) if found.order is None else found.order.tolist()
    assert [given[e] for e in order] == chosen and (found.order is None) == (given == chosen)


def test_entries_that_are_repeated_have_no_levels():
    assert made_of([(0, 1), (0, 1)], [2, 2], 0) is None
    assert made_of([(1, 1), (0, 1), (1, 1)], [2, 2], 1) is None


@pytest.mark.parametrize("format", ["a:U b:U c:C", "[a,b,c] c:U b:U a:C", "[a,b,c] b:U a:U c:C", "(a b c):C"])
def test_levels_of_what_was_listed_are_those_of_its_coordinates(format: str):
    x = torch.randn(5, 4, 9) * (torch.rand(5, 4, 9) < 0.4)
    made = stored_operand(pm.sparse(x, format)).levels
    found, wanted = made.fibers, levels.StoredLevels(made.form, made.coordinates).fibers
    assert found.key == wanted.key and [*found.positions] == [*wanted.positions]
    for depth in range(found.dense, 3):
        assert torch.equal(found.pos[depth], wanted.pos[depth]) and torch.equal(found.crd[depth], wanted.crd[depth])
    # Until coordinates are written: here two entries become one.
    x = pm.sparse(torch.tensor([[0.0, 2.0, 3.0]]), "a:U b:C")
    x.parts[0].coords["b"].fill_(1)
    assert stored_operand(x).levels.fibers is None


def made_of(cells: list[tuple[int, ...]], sizes: list[int], dense: int) -> levels.Fibers | None:
    axes = [f"a{n}" for n in range(len(sizes))]
    format = parse_format(" ".join(f"{axis}:{'U' if n < dense else 'C'}" for n, axis in enumerate(axes)))
    columns = torch.tensor(cells, dtype=torch.int32).unbind(1)
    form = levels.StoredForm.of(format, tuple(sizes), axes)
    return levels.StoredLevels(form, [*columns]).fibers


def walk(found: levels.Fibers, count: int, above: int = 0, cell: tuple[int, ...] = ()):
    """(coordinates, position of the last level) of every entry, by walking the levels."""
    depth = len(cell)
    if depth == count:
        yield cell, above
        return
    level = found.levels[depth]
    if level.kind == DENSE:
        for x in range(level.extent):
            yield from walk(found, count, above * level.extent + x, (*cell, x))
        return
    first, last = found.pos[depth][above : above + 2].tolist()
    for p in range(first, last):
        yield from walk(found, count, p, (*cell, int(found.crd[depth][p])))
