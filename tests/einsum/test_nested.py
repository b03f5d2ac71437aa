"""Max, min and mean of sums: one-line R-GCN, random statements against the oracle, gradients, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from einsum_fuzz import random_case
from einsum_oracle import evaluate
from wide import beyond

import pumice as pm
from pumice.errors import OptionError, StatementError
from pumice.language.parse import parse
from pumice.ops import autograd

EDGES, NODES, RELATIONS = 12, 5, 3
RGCN = "Out[dst[e],o] {}= X[src[e],i] * W[rel[e],i,o] ; Out:[5,_]"


def graph(seed: int = 0) -> dict[str, Any]:
    """A graph with relations: the fourth edge comes from nowhere, the last node has no edge."""
    chance = np.random.default_rng(seed)
    ends = {"src": chance.integers(NODES, size=EDGES), "dst": chance.integers(NODES - 1, size=EDGES)}
    ends["rel"] = chance.integers(RELATIONS, size=EDGES)
    ends["src"][3] = -1
    values = {"X": chance.normal(size=(NODES, 3)), "W": chance.normal(size=(RELATIONS, 3, 4))}
    return {name: torch.from_numpy(x) for name, x in (ends | values).items()}


def aggregated(g: dict[str, Any], operator: str) -> torch.Tensor:
    """R-GCN edge by edge: the messages are matrix products, and whole messages are joined."""
    rows = [torch.zeros(4, dtype=torch.float64)] * NODES
    for node in range(NODES):
        messages = [
            g["X"][g["src"][e]] @ g["W"][g["rel"][e]] for e in range(EDGES) if g["dst"][e] == node and g["src"][e] >= 0
        ]
        if messages:
            join = {"max": torch.amax, "min": torch.amin, "mean": torch.mean}[operator]
            rows[node] = join(torch.stack(messages), 0)
    return torch.stack(rows)


def close(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", ["max", "min", "mean"])
@pytest.mark.parametrize("lowering", ["", "graph", "reference"])
def test_rgcn_joins_messages_not_products(operator, lowering):
    g = graph()
    close(pm.einsum(RGCN.format(operator), lowering=lowering, **g), aggregated(g, operator))


@pytest.mark.parametrize("operator", ["max", "mean"])
def test_gradients_of_rgcn(operator):
    g = graph()
    leaves = [g["X"].requires_grad_(), g["W"].requires_grad_()]
    got = pm.einsum(RGCN.format(operator), **g)
    up = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    close(torch.autograd.grad(got, leaves, up), torch.autograd.grad(aggregated(g, operator), leaves, up))

    def applied(x, w):
        return pm.einsum(RGCN.format(operator), **{**g, "X": x, "W": w})

    assert torch.autograd.gradgradcheck(applied, leaves)


def test_a_maximum_is_found_among_sums_that_are_computed_alike():
    """In the backward pass the sums are computed again, perhaps in another order: so is the maximum."""
    g, text = graph(), RGCN.format("max")
    result = pm.einsum(text, **g)
    call = autograd._CallFunction([*g.values()], "|".join(g), text, "", result.shape)
    steps, places = call.over_arrays()
    needed = [[*g.values()][place].is_floating_point() for place in places]
    one = torch.ones_like(result)
    exact, other = (autograd._gradients_of_steps(steps, one, result * x, needed) for x in (1, 1 + 1e-12))
    close([x for x in other if x is not None], [x for x in exact if x is not None])


@pytest.mark.parametrize("operator", ["max", "mean"])
def test_compiled_rgcn(operator):
    torch._dynamo.reset()
    for seed in range(2):
        g = graph(seed)
        leaves = [g["X"].requires_grad_(), g["W"].requires_grad_()]
        compiled = torch.compile(
            lambda g: pm.einsum(RGCN.format(operator), **g), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        got, wanted = compiled(g), aggregated(g, operator)
        close(got, wanted)
        close(torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(wanted.sin().sum(), leaves))


def test_half_precision_keeps_the_gradient_of_a_rounded_maximum():
    g = {n: x.to(torch.float16) if x.is_floating_point() else x for n, x in graph().items()}
    g["X"].requires_grad_()
    pm.einsum(RGCN.format("max"), **g).sum().backward()
    wide = {n: x.detach().double() if x.is_floating_point() else x for n, x in g.items()}
    wide["X"].requires_grad_()
    aggregated(wide, "max").sum().backward()
    torch.testing.assert_close(g["X"].grad.double(), wide["X"].grad, rtol=1e-2, atol=1e-2)


def nested_cases(first: int, count: int):
    """Random cases with a nested reduction, from the seed `first` on."""
    for seed in range(first, first + 6 * count):
        case = random_case(seed, nested=True)
        if "nested reduction" in case.features:
            yield seed, case


def passed(case) -> dict:
    return {n: x if isinstance(x, int) else torch.as_tensor(np.asarray(x)) for n, x in case.operands.items()}


@pytest.mark.parametrize("first", beyond(1, [0, 1200]))
def test_random_statements(first):
    count = 0
    for seed, case in nested_cases(first, 120):
        got = pm.einsum(case.text, **passed(case))
        wanted = torch.from_numpy(evaluate(case.text, case.operands)).to(got.dtype)
        torch.testing.assert_close(
            got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, s=seed, c=case: f"{s} {c.text}: {m}"
        )
        count += 1
    assert count > 40


def test_random_gradients():
    count = 0
    for seed, case in nested_cases(3000, 25):
        given = passed(case)
        floats = [n for n, x in given.items() if torch.is_tensor(x) and x.is_floating_point()]

        def function(*values, case=case, given=given, floats=floats):
            return pm.einsum(case.text, **{**given, **dict(zip(floats, values, strict=True))})

        leaves = [given[n].clone().requires_grad_() for n in floats]
        count += torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-3, raise_exception=False)
        assert count, seed
    # Where maxima are tied there is no derivative.
    assert count > 8


def test_a_statement_prints_what_it_sums():
    for text, printed in [
        ("C[D[e]] max= A[e,i] * B[i] ; C:[3]", None),
        ("C[D[e]] max= max(i, A[e,i] * B[i]) ; C:[3]", None),
        ("C[D[e]] max= sum(i, A[e,i]) ; C:[3]", None),
        ("C[i] max= max(k, A[i,k])", "C[i] max= A[i,k]"),
        ("C[i] max= max(k, A[i,k] * B[k,j])", "C[i] max= sum(j, A[i,k] * B[k,j])"),
        ("C[i] mean= 2 * sum(j, A[i,k] * B[k,j] - A[i,j]) + A[i,k]", None),
        ("C[i] = sum(k, A[i,k]) * sum(j, B[j])", "C[i] = A[i,k] * B[j]"),
    ]:
        statement = parse(text)
        assert parse(str(statement)) == statement
        if printed:
            assert str(statement) == printed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("C[D[e]] max= |A[e,i] ; C:[3]", "i: summed before the max, or part of it? Write sum(i, ...) or max(i, ...)"),
        ("C[n] max= |A[n,m] * X[m,i] * W[i]", "m, i: summed before the max"),
        ("C[n] mean= |sum(n, A[n])", "`n` is not reduced"),
        ("C[n] mean= |mean(k, A[n])", "`k` is not reduced"),
        ("C[n] max= sum|(k, A[n,k] + B[n])", "`k` does not occur in a term of this sum"),
        ("C[n] max= |sum(k, A[n,k]) + B[k]", "used outside it"),
        ("C[n] = |sum(k, A[n,k]) * B[k]", "`k` is used inside and outside of sum"),
        ("C[n] = |sum(k, A[n,k]) * sum(k, B[k])", "`k` is used inside and outside of sum"),
        ("C[n] max= 2 * |max(k, A[n,k])", "max(...) is the whole right side of max="),
        ("C[n] = |max(k, A[n,k])", "max(...) is the whole right side of max="),
        ("C[n] = sum(|A[n,k])", "expected an index and `,`, as in sum(i, A[i])"),
        ("C[n] = |equal(A[n], sum(k, B[n,k]))", "equal(...) compares values at one point"),
    ],
)
def test_refused(text, named):
    with pytest.raises(StatementError) as error:
        parse(text.replace("|", ""))
    sentence, _, caret = str(error.value).split("\n")
    assert named in sentence and caret.index("^") == text.index("|")


def test_sparse_operands():
    chance = torch.Generator().manual_seed(0)
    a = torch.randn(4, 5, 2, dtype=torch.float64, generator=chance) * (torch.rand(4, 5, 2, generator=chance) < 0.4)
    x, w = (torch.randn(shape, dtype=torch.float64, generator=chance) for shape in ((5, 3), (2, 3, 6)))
    text = "C[n,o] {0}= sum(i, A[n,m,r] * X[m,i] * W[r,i,o])"
    for form in ("(n m r):C", "n:U m:C r:C"):
        for operator, join in (("max", torch.amax), ("mean", torch.mean)):
            stored = pm.sparse(a.requires_grad_(), form)
            got = pm.einsum(text.format(operator), A=stored, X=x.requires_grad_(), W=w)
            messages = torch.einsum("nmr,mi,rio->nmro", a, x, w)
            rows = [[join(m[k], 0) if k.any() else m.new_zeros(6)] for m, k in zip(messages, a != 0, strict=True)]
            wanted = torch.cat([row for (row,) in rows]).reshape(4, 6)
            close(got, wanted)
            close(torch.autograd.grad(got.sin().sum(), (a, x)), torch.autograd.grad(wanted.sin().sum(), (a, x)))


def test_a_sparse_operand_of_summed_and_other_indices_is_refused():
    a = pm.sparse(torch.eye(3), "COO")
    with pytest.raises(
        OptionError, match=r"A is sparse and stores `A\[n,k\]` by indices that are summed first and oth"
    ):
        pm.einsum("C[n] max= sum(k, A[n,k] * B[k,m])", A=a, B=torch.ones(3, 2))
