"""Entries of sparse operands that meet: retrieval, masked statements, products of sparse tensors, groups of indices.

Against the oracle's loops on dense tensors; gradients against those of dense operands.
"""

import itertools
import string
import time

import numpy as np
import pytest
import torch
from einsum_oracle import evaluate
from torch import Tensor

import pumice as pm
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError, StatementError
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import cpu
from pumice.ops import join, meeting

AXES = ("x", "y", "z", "t")


def close(got, wanted, about: object = "") -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda found: f"{about}\n{found}")


class Masked:
    """A masked convolution over some axes: its texts, operands and their dense forms."""

    def __init__(self, dim: int, stride: int = 1, dilation: int = 1, seed: int = 0) -> None:
        chance = torch.Generator().manual_seed(100 * dim + 10 * stride + dilation + seed)
        size, taps = (7, 5, 4, 3)[:dim], (3, 2, 3, 2)[:dim]
        outputs = [-(-n // stride) for n in size]
        out = ",".join(f"p{a}" for a in AXES[:dim])
        window = ",".join(f"{stride}*p{a}+{dilation}*r{a}-1" for a in AXES[:dim])
        weight = ",".join(f"r{a}" for a in AXES[:dim])
        self.ranges = ", ".join(f"p{a}:{n}" for a, n in zip(AXES, outputs, strict=False))
        self.text = f"O[n,{out},m] = Mask[n,{out}] * I[n,{window},c] * F[{weight},c,m] ; {self.ranges}"
        every = ",".join(":" * 2)
        self.retrieval = f"Map[i,j,k] = Mask[n,{out}] * I[n,{window},:] * F[{weight},{every}]"
        self.retrieval += f" ; {self.ranges}, i:pos(Mask), j:pos(I), k:pos(F)"
        self.mask = torch.rand(2, *outputs, generator=chance, dtype=torch.float64)
        self.mask = (self.mask * (self.mask < 0.4)).requires_grad_()
        self.there = torch.rand(2, *size, generator=chance) < 0.4
        self.values = torch.randn(2, *size, 3, generator=chance, dtype=torch.float64).requires_grad_()
        self.weight = torch.randn(*taps, 3, 2, generator=chance, dtype=torch.float64).requires_grad_()
        names = " ".join(AXES[:dim])
        self.forms = f"(n {names}):C", f"(n {names}):C c:U"

    @property
    def dense(self) -> dict[str, torch.Tensor]:
        return {"Mask": self.mask, "I": self.values * self.there[..., None], "F": self.weight}

    @property
    def sparse(self) -> dict:
        own = self.dense
        return {"Mask": pm.sparse(self.mask, self.forms[0]), "I": pm.sparse(own["I"], self.forms[1]), "F": self.weight}

    def gradients(self, out: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
        """Of the weight, and of what the mask and the input store."""
        mask, values, weight = torch.autograd.grad(out, (self.mask, self.values, self.weight), up)
        return [weight, mask * (self.mask != 0), values * self.there[..., None]]


CONVOLUTIONS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 2), (3, 1, 1), (3, 2, 1), (4, 1, 1), (4, 2, 1)]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_masked_convolutions(case):
    made = Masked(*case)
    dense, got = pm.einsum(made.text, **made.dense), pm.einsum(made.text, **made.sparse)
    close(got, dense)
    if case[0] < 3:
        close(got, torch.from_numpy(evaluate(made.text, {n: x.detach().numpy() for n, x in made.dense.items()})))
    up = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    close(made.gradients(got, up), made.gradients(dense, up))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_target_with_the_pattern_of_the_mask(case):
    made = Masked(*case)
    given = made.sparse
    got = pm.einsum(made.text + ", O:pattern(Mask)", **given)
    assert str(got.format) == made.forms[0] + " m:U" and got.parts[0].values.shape == (given["Mask"].nnz, 2)
    dense = pm.einsum(made.text, **made.dense)
    close(got.to_dense(), dense)
    up = torch.randn(dense.shape, dtype=dense.dtype, generator=torch.Generator().manual_seed(1))
    close(made.gradients(got.to_dense(), up), made.gradients(dense, up))


def neighbours(made: Masked, stride: int, dilation: int) -> set[tuple[int, int, int]]:
    """The map, by loops over outputs and the offsets of the window."""
    taps = [*itertools.product(*map(range, made.weight.shape[:-2]))]
    inputs = {tuple(at): j for j, at in enumerate(made.there.nonzero().tolist())}
    found = set()
    for i, (n, *p) in enumerate(made.mask.nonzero().tolist()):
        for k, r in enumerate(taps):
            at = (n, *(stride * a + dilation * b - 1 for a, b in zip(p, r, strict=True)))
            if at in inputs:
                found.add((i, inputs[at], k))
    return found


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_both_halves_of_a_map_based_convolution(case):
    made = Masked(*case)
    given = made.sparse
    found = pm.einsum(made.retrieval, **given)
    (part,) = found.parts
    assert part.values is None and found.shape == (given["Mask"].nnz, len(given["I"].parts[0].values), case_taps(made))
    entries = [*zip(*(part.coords[axis].tolist() for axis in "ijk"), strict=True)]
    assert set(entries) == neighbours(made, *case[1:]) and len(set(entries)) == len(entries) == found.nnz
    got = pm.einsum(
        "OV[i,m] = Map[i,j,k] * IV[j,c] * FV[k,c,m]",
        Map=found,
        IV=given["I"].parts[0].values,
        FV=made.weight.reshape(-1, *made.weight.shape[-2:]),
    )
    masked = got * given["Mask"].parts[0].values[:, None]
    close(masked, pm.einsum(made.text + ", O:pattern(Mask)", **given).parts[0].values)


def case_taps(made: Masked) -> int:
    return made.weight[..., 0, 0].numel()


def test_positions_of_a_dense_operand_that_meets_nothing():
    a, b = pm.sparse(torch.tensor([0.0, 1, 1]), "n:C"), pm.sparse(torch.tensor([1.0, 0, 1]), "n:C")
    text = "Map[k,i,j] = A[n] * F[r,:] * B[n] ; i:pos(A), j:pos(B), k:pos(F)"
    found = pm.einsum(text, A=a, B=b, F=torch.ones(2, 3)).to_dense()
    assert found.shape == (2, 2, 2) and found.nonzero().tolist() == [[0, 1, 1], [1, 1, 1]]


def test_the_second_half_compiles_and_the_first_is_refused():
    torch._dynamo.reset()
    made = Masked(2)
    found = pm.einsum(made.retrieval, **made.sparse)
    values, weight = made.sparse["I"].parts[0].values.detach(), made.weight.detach().flatten(0, 1)

    def second(map, values, weight):
        return pm.einsum("OV[i,m] = Map[i,j,k] * IV[j,c] * FV[k,c,m]", Map=map, IV=values, FV=weight)

    compiled = torch.compile(second, fullgraph=True, backend="aot_eager")
    close(compiled(found, values, weight), second(found, values, weight))
    with pytest.raises(Exception, match="expected outside torch.compile"):
        torch.compile(lambda given: pm.einsum(made.text, **given), backend="aot_eager", fullgraph=True)(made.sparse)


def test_three_sparse_operands():
    made = Masked(2)
    kept = torch.rand(made.weight.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    dense = {**made.dense, "F": made.weight * kept}
    for forms in (("(n p q):C", "(n h w c):C", "(r s c m):C"), ("n:U p:U q:C", "n:U h:C w:C c:U", "r:U s:U c:C m:C")):
        sparse = {name: pm.sparse(x, form) for (name, x), form in zip(dense.items(), forms, strict=True)}
        wanted, got = pm.einsum(made.text, **dense), pm.einsum(made.text, **sparse)
        close(got, wanted)
        leaves = [made.values, made.weight]
        grads = [torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True) for x in (got, wanted)]
        close([grads[0][0] * made.there[..., None], grads[0][1] * kept], [*grads[1]])


def test_gradients_of_gradients():
    made = Masked(1)

    def applied(values, weight):
        return pm.einsum(made.text, **{**made.sparse, "I": made.sparse["I"].with_values([values]), "F": weight})

    assert torch.autograd.gradgradcheck(applied, [made.sparse["I"].parts[0].values, made.weight])


# The join
def test_a_window_is_tried_or_solved_for(monkeypatch):
    """Few offsets of a window are looked up one by one; of many, only those that entries have are visited."""
    monkeypatch.setattr(meeting, "map_of", lambda *_: None)
    chance = np.random.default_rng(0)
    for width in (3, 400):
        mask, x = (
            (chance.random(60) < 0.3).astype(float),
            chance.normal(size=60 + width) * (chance.random(60 + width) < 0.1),
        )
        text, f = "O[p] = M[p] * I[p+r] * F[r]", chance.normal(size=width)
        given = {"M": pm.sparse(mask, "p:C"), "I": pm.sparse(x, "h:C"), "F": torch.from_numpy(f)}
        close(pm.einsum(text, **given), torch.from_numpy(evaluate(text, {"M": mask, "I": x, "F": f})))


def test_a_product_of_sparse_matrices_has_no_kernel_offsets():
    """Each entry of a large result is no kernel offset of a weight gradient, most of which would have no pairs."""
    statement = parse("T[K[p],c,d] = x[G[p],c] * y[S[p],d] ; K:sorted, T:[5000,_,_]")
    given = {"K": torch.arange(50) * 100, "G": torch.arange(50), "S": torch.arange(50)}
    given |= {"x": torch.randn(50, 3), "y": torch.randn(50, 2)}
    bound = bind(statement, {name: tuple(x.shape) for name, x in given.items()})
    assert cpu.gathered_refusal(statement, bound, given) == (
        "it has 5000 kernel offsets and 50 pairs: most offsets have none"
    )
    chance = torch.Generator().manual_seed(0)
    a, b = (torch.randn(90, 90, generator=chance) * (torch.rand(90, 90, generator=chance) < 0.05) for _ in range(2))
    got = pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=pm.sparse(a, "CSR"), B=pm.sparse(b, "CSR"))
    torch.testing.assert_close(got, a @ b)


def test_a_join_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(join, "MOST_ROWS", 10)
    # A nest over levels makes no list of what meets; gradients need one.
    a, b = pm.sparse(torch.eye(20).requires_grad_(), "COO"), pm.sparse(torch.ones(20, 1), "COO")
    with pytest.raises(OptionError, match=r"[AB]\[.*\] meets .* in 20 combinations of entries, expected at most 10"):
        pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b)


def test_rows_with_many_columns_are_refused_earlier(monkeypatch):
    """Entries of each of many operands are a column: a chain of them would take all memory."""
    monkeypatch.setattr(join, "MOST_NUMBERS", 1 << 10)
    text = " * ".join(f"A{n}[i{n},i{n + 1}]" for n in range(20))
    chain = {f"A{n}": pm.sparse(torch.ones(2, 2), "CSR") for n in range(20)}
    with pytest.raises(OptionError, match="in 128 combinations of entries, expected at most 85"):
        pm.einsum(f"O = {text}", lowering="graph", **chain)  # Without one, it is evaluated in parts


def test_loops_of_endless_ranges_are_refused():
    a, b = pm.sparse(torch.eye(6), "CSR"), pm.sparse(torch.eye(6), "COO")
    text = f"O[x,j] = A[x,k+z] * B[k+y,j] ; k:{1 << 40}, y:{1 << 40}, z:{1 << 30}"
    with pytest.raises(OptionError, match="combinations of entries, expected at most"):
        pm.einsum(text, A=a, B=b)
    assert "its loops have some" in pm.compile_einsum(text).explain(A=a, B=b)


def test_what_meets_has_coordinates_and_as_many_axes_as_are_read():
    a, b = pm.sparse(torch.eye(6), "CSR"), pm.sparse(torch.ones(6, 6, 2), "(a b c):C")
    with pytest.raises(DeviceError, match="entries meet by their coordinates: A is on the device meta"):
        pm.einsum("O[i,j] = A[i,k] * B[k,j]", A=a.to("meta"), B=a.to("meta"))
    with pytest.raises(ShapeError, match=r"B\[k,j\] has 2 indices, the operand B has 3 axes \(shape \[6, 6, 2\]\)"):
        pm.einsum("O[i,j] = A[i,k] * B[k,j]", A=a, B=b)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_integers_stay_integers(kind):
    """Exact beyond 2^24, as where all operands are dense; their means would not be."""
    big = (1 << 24) + 1 if kind != torch.bool else 1
    eye = torch.eye(6, dtype=torch.int64)
    a, b = pm.sparse((eye * big).to(kind), "CSR"), pm.sparse(eye.to(kind), "CSR")
    got = pm.einsum("O[i,j] = A[i,k] * B[k,j]", A=a, B=b)
    assert got.dtype == torch.int64 and got.equal(big * eye)
    with pytest.raises(DtypeError, match="is a mean: expected floating-point values, found integers"):
        pm.einsum("O[i] mean= A[i,k] * B[k]", A=a, B=torch.ones(6).to(kind))


@pytest.mark.parametrize("values", [torch.ones(2, 3).int(), torch.ones(2, 3).bool(), pm.sparse(torch.eye(3).bool())])
def test_fractions_of_integers_are_refused(values):
    """They were cut off."""
    with pytest.raises(DtypeError, match=r"has the coefficient 0.5: expected floating-point values, found integers"):
        pm.einsum("O[i] = 0.5 * A[i,k]", A=values)
    double = torch.compile(lambda a: pm.einsum("O[i] = 2e0 * A[i,k]", A=a), backend="eager")
    half = torch.compile(lambda a: pm.einsum("O[i] = 0.5 * A[i,k]", A=a), backend="eager")
    assert double(values).dtype == torch.int64
    with pytest.raises(Exception, match=r"has the coefficient 0.5"):
        half(values)


# Groups of indices
def test_groups_of_indices():
    x, f = torch.randn(2, 5, 4, 3), torch.randn(2, 2, 3, 6, requires_grad=True)
    columns = pm.einsum("C[(n,p,q),(r,s,c)] = I[n,p+r,q+s,c] ; r:2, s:2", I=x)
    out = pm.einsum(
        "O[(n,p,q),m] = C[(n,p,q),(r,s,c)] * F[(r,s,c),m] ; n:2, p:4, r:2, s:2", C=columns, F=f.reshape(12, 6)
    )
    wanted = pm.einsum("O[n,p,q,m] = I[n,p+r,q+s,c] * F[r,s,c,m]", I=x, F=f)
    torch.testing.assert_close(out, wanted.flatten(0, 2))
    compiled = pm.compile_einsum("O[(n,p),m] = A[n,(p,k)] * B[k,m]")
    a, b = torch.randn(2, 12), torch.randn(4, 5)
    torch.testing.assert_close(compiled(A=a, B=b), a.reshape(6, 4) @ b)
    assert "O[n,p,m] = A[n,p,k] * B[k,m]" in compiled.explain(A=a, B=b)
    traced = torch.compile(lambda a, b: compiled(A=a, B=b), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(a, b), a.reshape(6, 4) @ b)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("C[m] = A[(m,k)] * B[k]", "axis 0 of A has extent 13, expected 15: the group (m,k) has m 3 * k 5"),
        ("C[m] = A[(m,k)]", "m, k in the group (m,k) on axis 0 of A has no size; declare it"),
    ],
)
def test_groups_without_sizes(text, named):
    given = {"A": torch.ones(13), "B": torch.ones(5)}
    text += " ; m:3" if "B" in text else ""
    with pytest.raises(ShapeError) as error:
        pm.einsum(text, **{name: given[name] for name in given if f"{name}[" in text})
    assert named in str(error.value)


# What is refused
@pytest.mark.parametrize(
    ("text", "formats", "error", "named"),
    [
        ("C[m,n] = A[m,k] * B[k,n]", {"A": "(a b c):C"}, ShapeError, ["`A[m,k]` has 2", "'(a b c):C' has 3"]),
        ("C[X[p]] = A[p] ; C:[3]", {"X": "k:C"}, OptionError, ["X is an index array", "'k:C'"]),
        ("C[m] = A[m]", {"C": "k:C"}, OptionError, ["the target C", "`; C:pattern(A)`"]),
        ("C[m] = A[m]", ["CSR"], OptionError, ["a mapping", "list"]),
        ("C[m] max= A[m,k] * B[m,k]", {"A": "CSR", "B": "CSR"}, OptionError, ["meet under max=", "expected under ="]),
        ("C[m] max= sum(k, A[m,k])", {"A": "CSR"}, OptionError, ["A is sparse", "summed first"]),
        (
            "O[n,m] = A[n,c] * B[n,c,m] ; O:pattern(A)",
            {"A": "CSR"},
            ShapeError,
            ["O[n,m] has the pattern of A", "A[n,c]"],
        ),
        ("O[n,c] = A[n,c] * B[n,c] ; O:pattern(B)", {"A": "CSR"}, None, []),
        ("M[i,j] = A[n,c] * B[c,:] ; i:pos(A), j:pos(B)", {"A": "CSR", "B": "CSR"}, ShapeError, ["expected B[c,_]"]),
    ],
)
def test_formats_are_checked_at_once(text, formats, error, named):
    if error is None:
        pm.compile_einsum(text, formats)
        return
    with pytest.raises(error) as raised:
        pm.compile_einsum(text, formats)
    assert all(part in str(raised.value) for part in named), raised.value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("C[i] = |A[i,:]", "`:` in A[i,:]: declare a position of its levels, `i:pos(A)`"),
        ("C[i,k] = |A[j] ; i:pos(A)", "the axes of a target of positions are their indices"),
        ("C[i] = |2 * A[j] ; i:pos(A)", "one product of operands, each with a position"),
        ("C[i] = |A[j] * B[j] ; i:pos(A)", "one product of operands, each with a position"),
        ("C[i] = A[j] ; C:|pos(A)", "pos(...) is declared of an index of the target; `C` is not one"),
        ("C[i] = A[i] ; i:|pattern(A)", "pattern(...) is declared of the target; `i` is not one"),
        ("C[i] = A[i] ; C:pattern(|B)", "names an operand of the right side, found `B`"),
        ("C[i] = |A[i] + B[i] ; C:pattern(A)", "is one product, after `=`"),
        ("C[i] = A[(i,|2*j)]", "a group holds indices, as (n,p,q); found `2*j`"),
        ("C[i] = A[(i,j)] * |A[i,j]", "`A` has other groups of indices here"),
        ("C[i] = A[i,j] * |A[(i,j)]", "`A` has other groups of indices here"),
    ],
)
def test_refused_text(text, named):
    with pytest.raises(StatementError) as error:
        pm.compile_einsum(text.replace("|", ""))
    sentence, _, caret = str(error.value).split("\n")
    assert named in sentence and caret.index("^") == text.index("|")


# Computed patterns
def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=chance, dtype=torch.float64)
    return x * (torch.rand(*shape, generator=chance) < 0.3)


@pytest.mark.parametrize(
    "text",
    [
        "C[i,j] = A[i,k] * B[k,j]",
        "C[i,j] = A[i,k] * B[k,j] + D[i,j]",
        "C[i,j] = 2 * D[i,j] - E[j,i]",
        "C[i,n] = A[i,k] * F[k,n]",
        "C[i,j,n] = A[i,k] * B[k,j] * G[n]",
        "C[i] = A[i,k] * A[i,k]",
        "C[i,n] = A[i,k] * H[i,n]",
        "C[i,n] = A[i,k] * B[k,j] * H[i,n] * F[k,n]",
    ],
)
def test_a_target_with_a_computed_pattern(text):
    dense = {"A": drawn(9, 11), "B": drawn(11, 7), "D": drawn(9, 7), "E": drawn(7, 9)}
    dense["A"][::3] = 0  # Not every row is reached
    dense |= {name: torch.randn(n, 4, dtype=torch.float64) for name, n in {"F": 11, "H": 9}.items()}
    dense |= {"G": torch.randn(3, dtype=torch.float64)}
    read = {name for name in dense if f"{name}[" in text}
    leaves = {name: dense[name].clone().requires_grad_() for name in read}
    sparse = {name: pm.sparse(x, "m:U k:C") if name in "ABDE" else x for name, x in leaves.items()}
    got, wanted = pm.einsum(f"{text} ; C:pattern(*)", **sparse), pm.einsum(text, **leaves)
    close(got.to_dense(), wanted)
    # Only what some product reaches is stored.
    ones = {name: (x != 0).double() for name, x in dense.items() if name in read}
    rows = len(got.parts[0].coords["i"])
    reached = pm.einsum(text.replace("-", "+"), **ones) != 0
    assert rows == int((reached.any(-1) if got.parts[0].values.ndim > 1 else reached).sum())
    up = torch.randn(wanted.shape, dtype=torch.float64)
    grads = [torch.autograd.grad(x, [*leaves.values()], up) for x in (got.to_dense(), wanted)]
    for name, one, other in zip(leaves, *grads, strict=True):
        close(one, other * (dense[name] != 0 if name in "ABDE" else 1), name)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("C[n,i] = A[i,k] * F[k,n]", ShapeError, r"over its first axes.*found axes \[1\]"),
        ("C[i,n] += A[i,k] * F[k,n]", StatementError, "written by `=`, found `.*=`"),
        ("C[i,n] = A[i,k] * F[k,n] + H[i,n]", OptionError, r"expected a sparse operand in `H\[i,n\]`"),
        ("C[n] = F[k,n] * A[i,k]", ShapeError, "found axes none|found axes \\[\\]"),
    ],
)
def test_computed_patterns_that_are_refused(text, error, message):
    given = {"A": pm.sparse(drawn(9, 11), "CSR"), "F": torch.ones(11, 4).double(), "H": torch.ones(9, 4).double()}
    given = {name: x for name, x in given.items() if f"{name}[" in text}
    with pytest.raises(error, match=message):
        pm.einsum(f"{text} ; C:pattern(*)", **given)


def test_a_computed_pattern_of_nothing():
    a, b = pm.sparse(torch.zeros(4, 5), "CSR"), pm.sparse(torch.ones(5, 3), "CSR")
    got = pm.einsum("C[i,j] = A[i,k] * B[k,j] ; C:pattern(*)", A=a, B=b)
    assert got.nnz == 0 and got.shape == (4, 3) and torch.equal(got.to_dense(), torch.zeros(4, 3))


def chain(count: int, extent: int, density: float = 0.1) -> tuple[str, dict[str, Tensor]]:
    """Matrices A0[a,b] * A1[b,c] * ..., and the text of their product."""
    names = string.ascii_letters
    chance = torch.Generator().manual_seed(count)
    dense = {}
    for n in range(count):
        x = torch.randn(extent, extent, generator=chance, dtype=torch.float64)
        dense[f"A{n}"] = x * (torch.rand(extent, extent, generator=chance) < density)
    return " * ".join(f"A{n}[{names[n]},{names[n + 1]}]" for n in range(count)), dense


@pytest.mark.parametrize("count", [7, 12, 30])
def test_chains_are_evaluated_in_parts(count: int):
    text, dense = chain(count, 20, 0.2)
    given = {name: pm.sparse(x, "CSR") for name, x in dense.items()}
    wanted = torch.linalg.multi_dot([*dense.values()])
    torch.testing.assert_close(pm.einsum(f"O[a] = {text}", **given), wanted.sum(1))
    last = string.ascii_letters[count]
    torch.testing.assert_close(pm.einsum(f"O[a,{last}] = -3 * {text}", **given), -3 * wanted)
    found = pm.einsum(f"O[a] = {text} + more[a]", more=wanted[0], **given)
    torch.testing.assert_close(found, wanted.sum(1) + wanted[0])
    leaf = dense["A1"].clone().requires_grad_()
    pm.einsum(f"O[a] = {text}", **{**given, "A1": pm.sparse(leaf, "CSR")}).sum().backward()
    before, after = dense["A0"].sum(0), torch.linalg.multi_dot([*dense.values()][2:]).sum(1)
    torch.testing.assert_close(leaf.grad, torch.outer(before, after) * (dense["A1"] != 0))
    assert "as several statements" in pm.compile_einsum(f"O[a] = {text}").explain(**given)


def test_windows_among_many_indices():
    chance = torch.Generator().manual_seed(0)
    shapes = {"I": (9, 4), "F": (3, 4), "A": (4, 5), "B": (5, 6), "C": (6, 3), "D": (3, 7)}
    dense = {name: torch.randn(shape, generator=chance, dtype=torch.float64) for name, shape in shapes.items()}
    given = {name: pm.sparse(x * (x > 0), "CSR") for name, x in dense.items()}
    text = "O[p] = I[p+r-1,a] * F[r,a] * A[a,b] * B[b,c] * C[c,d] * D[d,e] ; p:9"
    assert "as several statements" in pm.compile_einsum(text).explain(**given)
    rest = torch.linalg.multi_dot([given[name].to_dense() for name in "ABCD"]).sum(1)
    image, weight = given["I"].to_dense() * rest, given["F"].to_dense()
    wanted = torch.nn.functional.conv1d(image.T[None], weight.T[None], padding=1)[0, 0]
    torch.testing.assert_close(pm.einsum(text, **given), wanted)


def test_joins_that_grow_are_refused_at_once():
    text, dense = chain(30, 40)
    given = {name: pm.sparse(x, "CSR") for name, x in dense.items()}
    before = time.process_time()
    with pytest.raises(OptionError, match="30 sparse operands meet in some .* combinations"):
        pm.einsum(f"O[a,{string.ascii_letters[30]}] = {text} ; O:pattern(*)", **given)
    assert time.process_time() - before < 10


@pytest.mark.parametrize("operator", ["max", "min", "mean"])
@pytest.mark.parametrize("form", ["CSR", "COO", "[m,k] k:U m:C", "(m k):H"])
def test_reductions_of_stored_entries(operator: str, form: str):
    a = torch.randn(7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 1
    a *= torch.rand(7, 9, generator=torch.Generator().manual_seed(2)) < 0.4
    a[2] = 0  # A row without entries gives 0.
    reduce = {"max": torch.amax, "min": torch.amin, "mean": torch.nanmean}[operator]
    gone = {"max": -torch.inf, "min": torch.inf, "mean": torch.nan}[operator]
    for axis, index in ((1, "i"), (0, "j")):
        leaf = a.clone().requires_grad_()
        got = pm.einsum(f"O[{index}] {operator}= 2 * A[i,j]", A=pm.sparse(leaf, form))
        other = a.clone().requires_grad_()
        found = reduce(torch.where(a != 0, 2 * other, gone), axis)
        wanted = torch.where((a != 0).any(axis), found, 0)
        torch.testing.assert_close(got, wanted)
        (one,), (two,) = torch.autograd.grad(got.sum(), leaf), torch.autograd.grad(wanted.nan_to_num().sum(), other)
        torch.testing.assert_close(one, two.nan_to_num())


def test_operands_of_before_that_meet_in_inference_mode():
    operands = {"V": pm.sparse(torch.rand(6), "e:C"), "W": pm.sparse(torch.rand(3, 4, 5), "(r i):H o:C")}
    operands |= {"x": torch.rand(7, 4), "S": torch.tensor([0, 6, 2, 2, 1, 5]), "L": torch.tensor([0, 1, 2, 2, 1, 0])}
    text = "O[e,o] = V[e] * x[S[e],i] * W[L[e],i,o]"
    with torch.inference_mode():
        found = pm.einsum(text, **operands)
    assert torch.equal(found, pm.einsum(text, **operands))
