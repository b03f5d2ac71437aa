"""Sums of gathered rows through embedding_bag: what is of the form agrees with the loops, the rest is refused."""

import random

import pytest
import torch

import pumice as pm
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import cpu, reference

N, C, K = 12, 5, 9


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def places(extent, *shape, seed=0):
    """With -1 among them."""
    return torch.randint(-1, extent, shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "COO": ("y[R[p],n] = V[p] * B[G[p],n]", {"R": places(N, 40), "G": places(K, 40), "V": numbers(40)}, (N, C)),
    "sorted": (
        "y[R[p],n] = V[p] * B[G[p],n] ; R:sorted",
        {"R": places(N, 40).sort().values, "G": places(K, 40), "V": numbers(40)},
        (N, C),
    ),
    "no values": ("y[R[p],n] = B[G[p],n]", {"R": places(N, 40), "G": places(K, 40)}, (N, C)),
    "groups": (
        "y[R[p],n] = V[p,q] * B[G[p,q],n]",
        {"R": places(N, 20), "G": places(K, 20, 3), "V": numbers(20, 3)},
        (N, C),
    ),
    "ELL": ("y[m,n] = V[m,q] * B[G[m,q],n]", {"G": places(K, N, 4), "V": numbers(N, 4)}, (N, C)),
    "neighbours": ("y[m,n] = B[G[m,q],n]", {"G": places(K, N, 4)}, (N, C)),
    "gather": ("y[m,n] = B[G[m],n]", {"G": places(K, N)}, (N, C)),
    "position last": ("y[m,n] = B[G[q,m],n]", {"G": places(K, 4, N)}, (N, C)),
    "scatter the other way round": (
        "y[R[q,p],n] = V[q] * U[p] * B[G[p,q],n]",
        {"R": places(N, 3, 20), "G": places(K, 20, 3), "V": numbers(3), "U": numbers(20)},
        (N, C),
    ),
    "target transposed": ("y[n,R[p]] = B[G[p],n]", {"R": places(N, 40), "G": places(K, 40)}, (C, N)),
    "coefficient": ("y[R[p],n] = -2.5 * B[G[p],n]", {"R": places(N, 40), "G": places(K, 40)}, (N, C)),
    "nothing": ("y[R[p],n] = B[G[p],n]", {"R": places(N, 0), "G": places(K, 0)}, (N, C)),
    "only padding": ("y[R[p],n] = B[G[p],n]", {"R": places(N, 7), "G": torch.full((7,), -1)}, (N, C)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_loops(name, dtype):
    text, operands, shape = CASES[name]
    operands = {"B": numbers(K, C, seed=1), **operands}
    given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in operands.items()}
    bound = bind(parse(text), {n: t.shape for n, t in given.items()}, shape)
    assert cpu.bagged_refusal(bound.statement, bound, given) is None
    got = cpu.run_bagged(bound, given, dtype)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    want = reference.run(bound, wide, torch.float64)
    assert got.dtype == dtype and got.is_contiguous()
    assert (got - want).abs().max() <= 8 * torch.finfo(dtype).eps * max(1, want.abs().max())


def test_any_layout_and_old_values():
    text = "y[R[p],n,m] += V[p] * B[n,G[p],m]"
    operands = {"R": places(N, 80)[::2], "G": places(K, 40), "V": numbers(80)[::2], "B": numbers(3, 4, K).mT}
    operands["y"] = numbers(4, 3, N).permute(2, 1, 0)
    bound = bind(parse(text), {n: t.shape for n, t in operands.items()})
    assert cpu.bagged_refusal(bound.statement, bound, operands) is None
    torch.testing.assert_close(
        cpu.run_bagged(bound, operands, torch.float64), reference.run(bound, operands, torch.float64)
    )


@pytest.mark.parametrize(
    "text,why",
    [
        ("y[R[p],n] max= B[G[p],n]", "not a sum of one term"),
        ("y[R[p],n] = B[G[p],n] + B[H[p],n]", "not a sum of one term"),
        ("y[R[p],n] = B[G[p],n] * D[n]", "other than the positions"),
        ("y[R[p],n] = B[G[p],n] * E[H[p],n]", "not one factor whose rows are gathered"),
        ("y[R[p],n] = B[2*G[p],n]", "not one factor whose rows are gathered"),
        ("y[R[p],n] = B[G[p],k] * D[n]", "the target is not written by rows"),
        ("y[R[p]] = B[G[p],n]", "the target is not written by rows"),
        ("y[R[s],n] = B[G[p],n]", "the target is not written by rows"),
        ("y[R[p],n] = B[G[p],n] * exists(B[H[p],n])", "conditions or declared ranges"),
    ],
)
def test_what_is_not_of_the_form_is_refused(text, why):
    assert why in cpu.bag_match(parse(text))


def random_statement(seed):
    """A statement of the form, with axes in any order: its text, operands and target shape."""
    chance = random.Random(seed)
    sizes = {name: chance.randint(1, 7) for name in ("p", "q", "n", "m")}
    positions = chance.sample(["p", "q"], chance.randint(1, 2))
    columns = chance.sample(["n", "m"], chance.randint(1, 2))
    count, table = chance.randint(1, 6), chance.randint(1, 6)
    gathered = [f"G[{','.join(positions)}]", *columns]
    chance.shuffle(gathered)
    operands = {"G": places(table, *(sizes[i] for i in positions), seed=seed)}
    operands["B"] = numbers(*(sizes.get(name, table) for name in gathered), seed=seed)
    factors = [f"B[{','.join(gathered)}]"]
    for name in chance.sample(["U", "V"], chance.randint(0, 2)):
        own = chance.sample(positions, chance.randint(1, len(positions)))
        operands[name] = numbers(*(sizes[i] for i in own), seed=seed + 1)
        factors.append(f"{name}[{','.join(own)}]")
    chance.shuffle(factors)
    row, own = chance.choice(positions), chance.sample(positions, chance.randint(1, len(positions)))
    extent = sizes[row]
    if chance.random() < 0.6:
        operands["R"] = places(count, *(sizes[i] for i in own), seed=seed + 2)
        row, extent = f"R[{','.join(own)}]", count
    target = [row, *columns]
    chance.shuffle(target)
    return (
        f"y[{','.join(target)}] = {' * '.join(factors)}",
        operands,
        [extent if t == row else sizes[t] for t in target],
    )


def test_random_statements_of_the_form():
    for seed in range(400):
        text, operands, shape = random_statement(seed)
        bound = bind(parse(text), {n: t.shape for n, t in operands.items()}, shape)
        assert cpu.bagged_refusal(bound.statement, bound, operands) is None, text
        got, want = (run(bound, operands, torch.float64) for run in (cpu.run_bagged, reference.run))
        torch.testing.assert_close(got, want, msg=lambda said, text=text: f"{text}: {said}")


def test_an_index_array_that_is_written_to_is_looked_at_again():
    rows, gather, b = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.eye(2)
    text = "y[R[p],n] = B[G[p],n] ; y:[2,_]"
    assert pm.einsum(text, lowering="bagged", R=rows, G=gather, B=b).tolist() == [[1, 0], [0, 1]]
    rows[0] = 1
    assert pm.einsum(text, lowering="bagged", R=rows, G=gather, B=b).tolist() == [[0, 0], [1, 1]]
    gather[0] = 1
    assert pm.einsum(text, lowering="bagged", R=rows, G=gather, B=b).tolist() == [[0, 0], [0, 2]]


@pytest.mark.parametrize("text", ["COO", "CSR", "CSC", "ELL", "GroupCOO", "m:C k:G*"])
def test_large_products_on_a_cpu_take_it(text):
    a = numbers(300, 200) * (numbers(300, 200, seed=1) > 1)
    b = numbers(200, 64, seed=2).requires_grad_()
    s, f = pm.sparse(a, text), pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", {"A": text})
    assert ": bagged" in f.explain(A=s, B=b).split("steps")[0] or "bagged and bagged" in f.explain(A=s, B=b)
    y = f(A=s, B=b)
    torch.testing.assert_close(y, a @ b)
    (grad,) = torch.autograd.grad(y.square().sum(), b)
    torch.testing.assert_close(grad, 2 * a.T @ (a @ b))
