"""Entries of one sparse operand in windows around those of another: found as kernel maps, equal to a join.

Against the join of the same operands and the statement over dense ones; gradients against differences.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import pumice as pm
from pumice.language.formats import parse_format
from pumice.language.parse import parse
from pumice.lower import maps
from pumice.ops import join, meeting
from pumice.ops.convert import FormatBucket
from pumice.ops.sparse import Sparse


@dataclass(frozen=True)
class Case:
    """A statement over sparse Mask and I of these shapes and formats, and a dense F. positions: the retrieval that goes
    with it, if there is one; pattern: the operand whose pattern the target may have; whole: a kernel map is all that
    meets."""

    text: str
    mask: tuple[tuple[int, ...], str]
    input: tuple[tuple[int, ...], str]
    filter: tuple[int, ...]
    positions: str = ""
    pattern: str = "Mask"
    whole: bool = True

    def operands(self, seed: int = 0, share: float = 0.4, device: str = "cpu") -> dict:
        chance = torch.Generator().manual_seed(seed)

        def random(shape: tuple[int, ...], form: str) -> Sparse:
            dense = parse_format(form).levels[-1].kind == "U"
            x = torch.randn(shape, generator=chance, dtype=torch.float64)
            there = torch.rand(shape[:-1] if dense else shape, generator=chance) < share
            x = x * (there[..., None] if dense else there)
            return pm.sparse(x.to(device), form)

        mask, given = random(*self.mask), random(*self.input)
        weight = torch.randn(self.filter, generator=chance, dtype=torch.float64)
        return {"Mask": mask, "I": given, "F": weight.to(device)}


CASES = {
    "1 axis": Case(
        "O[p,m] = Mask[p] * I[p+r-1,c] * F[r,c,m] ; p:9",
        ((9,), "p:C"),
        ((9, 2), "h:C c:U"),
        (3, 2, 4),
        "Map[i,j,k] = Mask[p] * I[p+r-1,:] * F[r,:,:] ; p:9",
    ),
    "2 axes and a batch": Case(
        "O[n,p,q,m] = Mask[n,p,q] * I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:6, q:5",
        ((2, 6, 5), "(n p q):C"),
        ((2, 6, 5, 3), "(n h w):C c:U"),
        (3, 3, 3, 2),
        "Map[i,j,k] = Mask[n,p,q] * I[n,p+r-1,q+s-1,:] * F[r,s,:,:] ; p:6, q:5",
    ),
    "strided": Case(
        "O[n,p,q,m] = Mask[n,p,q] * I[n,2*p+r,3*q+s-1,c] * F[r,s,c,m] ; p:4, q:3",
        ((2, 4, 3), "(n p q):C"),
        ((2, 8, 8, 3), "(n h w):C c:U"),
        (2, 3, 3, 2),
        "Map[j,i,k] = Mask[n,p,q] * I[n,2*p+r,3*q+s-1,:] * F[r,s,:,:] ; p:4, q:3",
    ),
    "dilated": Case(
        "O[p,q,m] = Mask[p,q] * I[p+2*r-2,q+3*s-3,c] * F[r,s,c,m] ; p:7, q:8",
        ((7, 8), "(p q):C"),
        ((7, 8, 3), "(h w):C c:U"),
        (3, 3, 3, 2),
        "Map[i,j,k] = Mask[p,q] * I[p+2*r-2,q+3*s-3,:] * F[r,s,:,:] ; p:7, q:8",
    ),
    "transposed": Case(
        "O[n,2*p+r,2*q+s,m] = Mask[n,2*p+r,2*q+s] * I[n,p,q,c] * F[r,s,c,m] ; r:3, s:2, O:[2,9,8,_]",
        ((2, 9, 8), "(n y x):C"),
        ((2, 4, 4, 3), "(n p q):C c:U"),
        (3, 2, 3, 2),
        "Map[i,j,k] = Mask[n,2*p+r,2*q+s] * I[n,p,q,:] * F[r,s,:,:] ; r:3, s:2",
    ),
    "3 axes": Case(
        "O[n,p,q,t,m] = Mask[n,p,q,t] * I[n,p+r-1,q+s-1,t+u-1,c] * F[r,s,u,c,m] ; p:5, q:4, t:3",
        ((2, 5, 4, 3), "(n p q t):C"),
        ((2, 5, 4, 3, 3), "(n p q t):C c:U"),
        (3, 3, 3, 3, 2),
        "Map[i,j,k] = Mask[n,p,q,t] * I[n,p+r-1,q+s-1,t+u-1,:] * F[r,s,u,:,:] ; p:5, q:4, t:3",
    ),
    "4 axes without a batch": Case(
        "O[p,q,t,w,m] = Mask[p,q,t,w] * I[p+r,q+s,t+u,w+v,c] * F[r,s,u,v,c,m]",
        ((3, 3, 4, 2), "(p q t w):C"),
        ((4, 4, 4, 3, 2), "(p q t w):C c:U"),
        (2, 2, 1, 2, 2, 3),
        "Map[i,j,k] = Mask[p,q,t,w] * I[p+r,q+s,t+u,w+v,:] * F[r,s,u,v,:,:]",
    ),
    "4 axes and a batch": Case(
        "O[n,p,q,t,w,m] = Mask[n,p,q,t,w] * I[n,p+r,q+s,t+u,w+v,c] * F[r,s,u,v,c,m]",
        ((2, 3, 3, 4, 2), "(n p q t w):C"),
        ((2, 4, 4, 4, 3, 2), "(n p q t w):C c:U"),
        (2, 2, 1, 2, 2, 3),
        "Map[i,j,k] = Mask[n,p,q,t,w] * I[n,p+r,q+s,t+u,w+v,:] * F[r,s,u,v,:,:]",
    ),
    "axes in another order": Case(
        "O[n,p,q,m] = Mask[n,p,q] * I[q+s,n,p+r,c] * F[s,r,c,m]",
        ((2, 4, 3), "(n p q):C"),
        ((5, 2, 5, 3), "(w n h):C c:U"),
        (3, 2, 3, 2),
        "Map[i,j,k] = Mask[n,p,q] * I[q+s,n,p+r,:] * F[s,r,:,:]",
    ),
    "an index on two axes": Case(
        "O[p,q,m] = Mask[p,q] * I[p+r,q-r+2,c] * F[r,c,m] ; q:5",
        ((4, 5), "(p q):C"),
        ((6, 7, 3), "(h w):C c:U"),
        (3, 3, 2),
        "Map[i,j,k] = Mask[p,q] * I[p+r,q-r+2,:] * F[r,:,:] ; q:5",
    ),
    "depthwise": Case(
        "O[n,p,q,c] = Mask[n,p,q] * I[n,p+r-1,q+s-1,c] * F[r,s,c] ; p:6, q:5",
        ((2, 6, 5), "(n p q):C"),
        ((2, 6, 5, 3), "(n h w):C c:U"),
        (3, 3, 3),
    ),
    "groups": Case(
        "O[n,p,q,g,m] = Mask[n,p,q] * I[n,p+r-1,q+s-1,g,c] * F[r,s,g,c,m] ; p:6, q:5",
        ((2, 6, 5), "(n p q):C"),
        ((2, 6, 5, 2, 3), "(n h w):C g:U c:U"),
        (3, 3, 2, 3, 2),
    ),
    "uncompressed levels": Case(
        "O[n,p,q,m] = Mask[n,p,q] * I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:6, q:5",
        ((2, 6, 5), "n:U p:U q:C"),
        ((2, 6, 5, 3), "n:U h:U w:C c:U"),
        (3, 3, 3, 2),
        "Map[i,j,k] = Mask[n,p,q] * I[n,p+r-1,q+s-1,:] * F[r,s,:,:] ; p:6, q:5",
    ),
    "the same coordinates": Case(
        "O[n,p,c] = Mask[n,p] * I[n,p,c] * F[c]",
        ((2, 6), "(n p):C"),
        ((2, 6, 3), "(n p):C c:U"),
        (3,),
        whole=False,
    ),
    "no filter": Case(
        "O[n,p,c] = Mask[n,p] * I[n,p+r-1,c] * F[c] ; p:6, r:3",
        ((2, 6), "(n p):C"),
        ((2, 6, 3), "(n p):C c:U"),
        (3,),
        whole=False,
    ),
    "coordinates in another operand": Case(
        "O[n,p,c] = Mask[n,p] * I[n,p+r-1,c] * F[r,p] ; p:6",
        ((2, 6), "(n p):C"),
        ((2, 6, 3), "(n p):C c:U"),
        (3, 6),
        whole=False,
    ),
    "a filter read twice": Case(
        "O[p,q,m] = Mask[p,q] * I[p+r-1,q+s-1,c] * F[r,s,c,m] * F[r,0,c,m] ; p:6, q:5",
        ((6, 5), "(p q):C"),
        ((6, 5, 3), "(h w):C c:U"),
        (3, 3, 3, 2),
        whole=False,
    ),
    "a target of sums": Case(
        "O[q,r,c] = Mask[p,q] * I[p+r-1,q+s-1,c] * F[r,s,c] ; p:6, q:5",
        ((6, 5), "(p q):C"),
        ((6, 5, 3), "(h w):C c:U"),
        (3, 3, 3),
        pattern="",
        whole=False,
    ),
    "a gradient of the filter": Case(
        "O[r,s,c,m] = Mask[p,q,m] * I[p+r,q+s,c] * F[c] ; r:3, s:2",
        ((4, 5, 2), "(p q):C m:U"),
        ((6, 6, 3), "(h w):C c:U"),
        (3,),
        pattern="",
    ),
}


POSITIONS = {True: ", i:pos(Mask), j:pos(I), k:pos(F)", False: " ; i:pos(Mask), j:pos(I), k:pos(F)"}
"""Declarations, by whether the text has some."""


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.fixture
def joined(monkeypatch) -> Callable[[Callable], object]:
    """Calls a function without kernel maps."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(meeting, "map_of", lambda *_: None)
            return function()

    return call


@pytest.fixture
def only_maps(monkeypatch) -> None:
    """No factor is joined."""

    def refused(rows, side, ranges):
        raise AssertionError(f"{side.access} is joined")

    monkeypatch.setattr(join, "_joined", refused)


def evaluated(case: Case, operands: dict) -> Tensor:
    return pm.einsum(case.text, **operands)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_a_join_and_to_dense_operands(name, joined):
    case = CASES[name]
    operands = case.operands()
    got = evaluated(case, operands)
    close(got, joined(lambda: evaluated(case, case.operands())))
    close(got, pm.einsum(case.text, **{n: x.to_dense() if isinstance(x, Sparse) else x for n, x in operands.items()}))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.whole])
def test_found_as_kernel_maps(name, only_maps):
    case = CASES[name]
    evaluated(case, case.operands())
    if case.positions:
        pm.einsum(f"{case.positions}{POSITIONS[';' in case.positions]}", **case.operands())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.positions])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_positions_are_those_of_a_join_in_its_order(name, share, joined):
    case, operands = CASES[name], CASES[name].operands(share=share)
    text = case.positions + POSITIONS[";" in case.positions]
    got, wanted = pm.einsum(text, **operands), joined(lambda: pm.einsum(text, **CASES[name].operands(share=share)))
    assert (str(got.format), got.shape, got.nnz) == (str(wanted.format), wanted.shape, wanted.nnz)
    assert share == 0 or got.nnz > 0
    for axis, x in wanted.parts[0].coords.items():
        assert got.parts[0].coords[axis].dtype == torch.int32 and torch.equal(got.parts[0].coords[axis], x)


@pytest.mark.parametrize("empty", ["Mask", "I", "both"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_stored(name, empty):
    case = CASES[name]
    operands, none = case.operands(), case.operands(share=0)
    operands |= {n: none[n] for n in ("Mask", "I") if empty in (n, "both")}
    assert not evaluated(case, operands).any()


def test_windows_beyond_the_operand():
    """No offset of the window reaches the input."""
    text, chance = "O[p,q,m] = Mask[p,q] * I[p+r+40,q+s-90,c] * F[r,s,c,m] ; p:6, q:5", CASES["dilated"].operands()
    mask, x = torch.ones(6, 5), torch.ones(6, 5, 3)
    given = {"Mask": pm.sparse(mask, "(p q):C"), "I": pm.sparse(x, "(p q):C c:U"), "F": chance["F"].float()}
    assert not pm.einsum(text, **given).any()


def with_duplicates(x: Sparse, rows: list[int]) -> Sparse:
    """The operand with some of its entries once more."""
    order = torch.cat([torch.arange(len(x.parts[0].values)), torch.tensor(rows)])
    coords = {axis: c[order] for axis, c in x.parts[0].coords.items()}
    return Sparse(x.format, x.shape, (FormatBucket(coords, x.parts[0].values[order]),), len(order))


@pytest.mark.parametrize("name", ["Mask", "I"])
def test_equal_entries_are_each_joined(name, joined):
    case = CASES["2 axes and a batch"]
    text = case.positions + POSITIONS[True]
    operands = case.operands()
    operands[name] = with_duplicates(operands[name], [3, 0])
    got = pm.einsum(text, **operands)
    wanted = joined(lambda: pm.einsum(text, **operands))
    assert got.nnz == wanted.nnz > pm.einsum(text, **case.operands()).nnz
    assert all(torch.equal(x, wanted.parts[0].coords[axis]) for axis, x in got.parts[0].coords.items())
    if name == "I":  # of a mask's the result would have equal entries, too
        close(evaluated(case, operands), joined(lambda: evaluated(case, operands)))


@pytest.mark.parametrize(
    "text",
    [
        "O[p,c] = Mask[p] * I[8-p-r,c] * F[r,c] ; p:6",  # it runs backwards
        "O[p,c] = Mask[p] * I[p+r+s,c] * F[r,c] * F[s,c] ; p:6",  # offsets repeat
        "O[p,c] = Mask[p+t] * I[p+r,c] * F[r,c] ; p:4, t:3",  # two windows
        "O[p,c] = Mask[p] * I[R[p]+r,c] * F[r,c] ; p:6",  # index arrays
    ],
)
def test_other_meetings_are_joined(text, monkeypatch):
    def refused(*_):
        raise AssertionError("a kernel map")

    monkeypatch.setattr(meeting, "map_of", refused)
    chance = torch.Generator().manual_seed(0)
    mask = torch.rand(6, generator=chance, dtype=torch.float64) * (torch.rand(6, generator=chance) < 0.6)
    x = torch.randn(9, 2, generator=chance, dtype=torch.float64) * (torch.rand(9, 1, generator=chance) < 0.6)
    dense = {"Mask": mask, "I": x, "F": torch.randn(3, 2, generator=chance, dtype=torch.float64)}
    dense |= {"R": torch.tensor([3, -1, 0, 0, 5, 2])} if "R" in text else {}
    given = dense | {"Mask": pm.sparse(mask, "p:C"), "I": pm.sparse(x, "h:C c:U")}
    close(pm.einsum(text, **given), pm.einsum(text, **dense))


def test_a_third_sparse_operand_is_joined_to_the_map(joined):
    case = CASES["2 axes and a batch"]
    operands = case.operands()
    dense = operands["F"] * (operands["F"] > 0)
    operands["F"] = pm.sparse(dense, "(r s c m):C")
    close(evaluated(case, operands), evaluated(case, case.operands() | {"F": dense}))
    close(evaluated(case, operands), joined(lambda: evaluated(case, operands)))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.whole])
def test_the_storage_forms_of_a_gpu(name, monkeypatch):
    """Tiles of outputs, tiles of the transpose and groups of pairs, read by the lowerings of a CPU."""
    case = CASES[name]
    wanted = gradients(case, case.operands())
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
    for got, one in zip(gradients(case, case.operands()), wanted, strict=True):
        close(got, one)


def gradients(case: Case, operands: dict) -> list[Tensor]:
    """The result and the gradients of the operands."""
    leaves = [x.parts[0].values if isinstance(x, Sparse) else x for x in operands.values()]
    given = {n: x.with_values([x.parts[0].values]) if isinstance(x, Sparse) else x for n, x in operands.items()}
    for leaf in leaves:
        leaf.requires_grad_()
    y = evaluated(case, given)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


# What is kept
def test_nothing_is_searched_again(monkeypatch):
    case = CASES["3 axes"]
    first, text = case.operands(), case.text + ", O:pattern(Mask)"
    result = pm.einsum(text, **first)

    def refused(*_):
        raise AssertionError("searched")

    monkeypatch.setattr(join.Geometry, "lookup", refused)
    again = first | {"I": first["I"].with_values([torch.ones_like(first["I"].parts[0].values)])}
    assert not torch.equal(pm.einsum(text, **again).parts[0].values, result.parts[0].values)
    assert pm.einsum(case.positions + POSITIONS[True], **again).nnz
    # A result has the coordinates of the mask, of which two layers know the map.
    weight = torch.ones(3, 3, 3, 2, 2, dtype=torch.float64)
    monkeypatch.undo()
    pm.einsum(text, Mask=first["Mask"], I=result, F=weight)
    monkeypatch.setattr(join.Geometry, "lookup", refused)
    second = pm.einsum(text, Mask=first["Mask"], I=result, F=weight)
    pm.einsum(text, Mask=first["Mask"], I=second, F=weight)


def test_maps_are_freed_with_the_coordinates_of_either():
    """Of many masks over one input only the last map is there."""
    case, maps = CASES["strided"], list[weakref.ref]()
    x = case.operands()["I"]
    for seed in range(3):
        operands = case.operands(seed) | {"I": x}
        meets = meeting.JoinedStatement(parse(case.text), operands, "").terms[0].meeting
        maps.append(weakref.ref(meets.whole_map(operands)))
        del operands, meets
    gc.collect()
    assert [one() is None for one in maps] == [True] * 3


def test_written_coordinates_are_searched_again():
    case = CASES["2 axes and a batch"]
    operands = case.operands()
    before = evaluated(case, operands)
    column = operands["I"].parts[0].coords["w"]
    column.copy_(4 - column)
    dense = {n: x.to_dense() if isinstance(x, Sparse) else x for n, x in operands.items()}
    after = evaluated(case, operands)
    assert not torch.equal(before, after)
    close(after, pm.einsum(case.text, **dense))


# Gradients
@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    case, operands = CASES[name], CASES[name].operands(share=0.2)
    leaves = [operands["Mask"].parts[0].values, operands["I"].parts[0].values, operands["F"]]

    def applied(mask, values, weight):
        given = {"Mask": operands["Mask"].with_values([mask]), "I": operands["I"].with_values([values]), "F": weight}
        return evaluated(case, given)

    assert torch.autograd.gradcheck(applied, [x.clone().requires_grad_() for x in leaves])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    case = CASES[name]
    here, there = gradients(case, case.operands()), gradients(case, case.operands(device="cuda"))
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.positions])
def test_positions_on_a_gpu(name):
    case = CASES[name]
    text = case.positions + POSITIONS[";" in case.positions]
    wanted, got = pm.einsum(text, **case.operands()), pm.einsum(text, **case.operands(device="cuda"))
    for axis, x in wanted.parts[0].coords.items():
        assert torch.equal(got.parts[0].coords[axis].cpu(), x)
