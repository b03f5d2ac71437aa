"""Random statements, dense and sparse, through pm.einsum: values against the oracle, gradients against autograd."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from einsum_fuzz import random_case
from einsum_oracle import evaluate
from torch import Tensor
from wide import beyond

import pumice as pm
from pumice.language.bind import BoundStatement, bind
from pumice.language.nodes import Access, Statement, accesses_of, arrays_of
from pumice.language.parse import parse
from pumice.lower import reference
from pumice.ops.sparse import Sparse

FORMATS = {
    1: ["k:C", "k:U", "k:G", "k:C k:B3", "k:U k:B2"],
    2: [
        *["COO", "CSR", "CSC", "DCSR", "ELL", "GroupCOO", "m:U k:C m:B2 k:B3", "m:C k:G2 m:B2 k:B3", "m:C k:G*"],
        *["m:U k:U", "m:C k:U", "k:C m:U", "m:U k:U m:B2 k:B4", "(m k):G", "[m,k] k:C m:U k:B2", "m:U k:C m:B2"],
    ],
    3: [
        *["(a b c):C", "a:U (b c):C", "a:C b:U c:C", "a:U b:C c:U", "a:C b:U c:G", "a:U b:U c:G", "(a b):C c:G"],
        *["[a,b,c] c:C b:U a:G c:B2", "a:C b:U c:U a:B2 b:B2"],
    ],
}


@dataclass(frozen=True)
class Call:
    """A random statement, its tensors, and its given integers."""

    seed: int
    text: str
    tensors: dict[str, Tensor]
    integers: dict[str, int]

    @staticmethod
    def of(seed: int) -> Call:
        case = random_case(seed)
        tensors = {n: torch.as_tensor(np.asarray(v)) for n, v in case.operands.items() if not isinstance(v, int)}
        return Call(seed, case.text, tensors, {n: v for n, v in case.operands.items() if isinstance(v, int)})

    @property
    def statement(self) -> Statement:
        return parse(self.text, self.integers)

    @property
    def floats(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if tensor.is_floating_point()]

    @property
    def bound(self) -> BoundStatement:
        statement, old = self.statement, self.tensors.get(self.statement.target.name)
        if old is not None and statement.reduction in ("max", "min"):
            statement = replace(statement, accumulate=True)
        return bind(statement, {n: t.shape for n, t in self.tensors.items()}, None if old is None else old.shape)

    def run(self, lowering: str = "", **others: Tensor | Sparse) -> Tensor:
        return pm.einsum(self.text, lowering=lowering, **{**self.tensors, **others}, **self.integers)

    def oracle(self) -> Tensor:
        return torch.from_numpy(evaluate(self.text, {n: t.numpy() for n, t in self.tensors.items()} | self.integers))

    def complaint(self, message: str) -> str:
        return f"seed {self.seed}: {self.text}\n{message}"


def close(call: Call, got: object, wanted: object) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=call.complaint)


# Values
@pytest.mark.parametrize("first", beyond(1, range(0, 1000, 100)))
def test_the_oracle_agrees(first):
    for seed in range(first, first + 100):
        call = Call.of(seed)
        before = {name: tensor.clone() for name, tensor in call.tensors.items()}
        close(call, call.run(), call.oracle())
        assert all(torch.equal(tensor, before[name]) for name, tensor in call.tensors.items()), seed


@pytest.mark.parametrize(("lowering", "first"), [("reference", 1000), ("graph", 1100)])
def test_the_oracle_agrees_with_every_lowering(lowering, first):
    for seed in range(first, first + 100):
        call = Call.of(seed)
        close(call, call.run(lowering), call.oracle())


def test_a_second_call_is_the_first():
    for seed in range(100):
        call = Call.of(seed)
        assert torch.equal(call.run(), call.run()), seed


# Sparse operands
def with_holes(call: Call, bare: bool) -> tuple[Call, str, str] | None:
    """The call with one operand mostly 0, that operand, and a format for it; None where no operand can be sparse."""
    statement = call.statement
    arrays = {array.name for array in arrays_of(statement)}
    found: dict[str, int] = {}
    refused = {*arrays, statement.target.name}
    for factor in (f for term in statement.terms for f in term.factors if isinstance(f, Access)):
        names = [e.bare for e in factor.indices]
        if bare and (None in names or len(set(names)) < len(names)):
            refused.add(factor.name)
        found[factor.name] = len(names)
    usable = [name for name, ndim in found.items() if ndim in FORMATS and name not in refused]
    if statement.reduction != "sum" or not usable:
        return None
    chance = random.Random(call.seed)
    name = chance.choice(usable)
    kept = torch.rand(call.tensors[name].shape, generator=torch.Generator().manual_seed(call.seed)) < 0.4
    tensors = {**call.tensors, name: call.tensors[name] * kept}
    return replace(call, tensors=tensors), name, chance.choice(FORMATS[found[name]])


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "any"])
@pytest.mark.parametrize("first", beyond(1, range(0, 400, 100)))
def test_sparse_is_dense(bare, first):
    count = 0
    for seed in range(first, first + 100):
        made = with_holes(Call.of(seed), bare)
        if made is None:
            continue
        call, name, form = made
        count += 1
        close(call, call.run(**{name: pm.sparse(call.tensors[name], form)}), call.oracle())
    assert count > 30


# Gradients
def upstream(seed: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(call: Call, run, twice: bool) -> list[Tensor]:
    """The gradients of all floating operands; twice: and those of a sum of them, with that of the upstream gradient.

    run(tensors) -> the result.
    """
    inputs = {name: call.tensors[name].clone().requires_grad_() for name in call.floats}
    out = run({**call.tensors, **inputs})
    given = upstream(call.seed, out.shape).requires_grad_()
    if not out.requires_grad:
        out = out + 0 * given.detach().requires_grad_()
    options = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(out, [*inputs.values()], given, create_graph=twice, **options)
    if not twice:
        return list(first)
    total = sum((g * upstream(place, g.shape)).sum() for place, g in enumerate(first))
    if not isinstance(total, Tensor) or not total.requires_grad:
        total = given.sum() * 0
    return [*first, *torch.autograd.grad(total, [*inputs.values(), given], **options)]


@pytest.mark.parametrize("first", beyond(1, range(0, 120, 20)))
def test_gradients_are_those_of_the_reference(first):
    for seed in range(first, first + 20):
        call = Call.of(seed)
        wanted = gradients(call, lambda tensors, call=call: reference.run(call.bound, tensors, torch.float64), False)
        got = gradients(call, lambda tensors, call=call: replace(call, tensors=tensors).run(), False)
        close(call, got, wanted)


@pytest.mark.parametrize("first", beyond(1, [200, 205, 210, 215]))
def test_double_gradients_are_those_of_the_reference(first):
    for seed in range(first, first + 5):
        call = Call.of(seed)
        wanted = gradients(call, lambda tensors, call=call: reference.run(call.bound, tensors, torch.float64), True)
        got = gradients(call, lambda tensors, call=call: replace(call, tensors=tensors).run(), True)
        close(call, got, wanted)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("first", beyond(1, range(0, 60, 15)))
def test_gradients_of_sparse_are_those_of_dense(first, twice):
    first, count = (400 + first // 3, 5) if twice else (first, 15)
    for seed in range(first, first + count):
        made = with_holes(Call.of(seed), bare=False)
        if made is None:
            continue
        call, name, form = made

        def run(tensors, call=call, name=name, form=form):
            stored = {**tensors, name: pm.sparse(tensors[name], form)} if form else tensors
            return pm.einsum(call.text, **stored, **call.integers)

        # What is not stored has no gradient.
        mask = call.tensors[name] != 0
        dense = gradients(
            call, lambda tensors, run=run, mask=mask, name=name: run(masked(tensors, name, mask), form=""), twice
        )
        close(call, gradients(call, run, twice), dense)


def masked(tensors: dict[str, Tensor], name: str, mask: Tensor) -> dict[str, Tensor]:
    return {**tensors, name: tensors[name] * mask}


# Several sparse operands
def two_sparse(call: Call) -> tuple[Call, dict] | None:
    """The call with two of its operands mostly 0, and these in random formats; None where it has no two."""
    statement, chance = call.statement, random.Random(call.seed)
    refused = {*(array.name for array in arrays_of(statement)), statement.target.name}
    every = [f for term in statement.terms for f in term.factors]
    factors = [f for f in every if isinstance(f, Access)]
    refused |= {access.name for access in accesses_of(*(f for f in every if f not in factors))}
    usable = sorted({f.name for f in factors if len(f.indices) in FORMATS and f.name not in refused})
    if statement.reduction != "sum" or len(usable) < 2:
        return None
    tensors, stored = dict(call.tensors), {}
    for name in chance.sample(usable, 2):
        kept = torch.rand(tensors[name].shape, generator=torch.Generator().manual_seed(call.seed)) < 0.5
        tensors[name] = tensors[name] * kept
        stored[name] = pm.sparse(tensors[name], chance.choice(FORMATS[tensors[name].ndim]))
    return Call(call.seed, call.text, tensors, call.integers), stored


@pytest.mark.parametrize("first", beyond(1, range(0, 360, 60)))
def test_two_sparse_operands_are_dense_ones(first):
    count = met = 0
    for seed in range(first, first + 60):
        made = two_sparse(Call.of(seed))
        if made is None:
            continue
        call, stored = made
        close(call, call.run(**stored), call.oracle())
        told = pm.compile_einsum(call.text).explain(**{**call.tensors, **stored}, **call.integers)
        met += "join of the entries" in told
        count += 1
    assert count > 15 and met > 3


@pytest.mark.parametrize("first", beyond(1, range(600, 700, 25)))
def test_gradients_of_two_sparse_operands(first):
    for seed in range(first, first + 25):
        made = two_sparse(Call.of(seed))
        if made is None:
            continue
        call, stored = made
        leaves = {name: call.tensors[name].clone().requires_grad_() for name in stored}
        masks = {name: call.tensors[name] != 0 for name in stored}
        dense = call.run(**{name: x * masks[name] for name, x in leaves.items()})
        got = call.run(**{name: pm.sparse(x * masks[name], stored[name].format) for name, x in leaves.items()})
        grads = [torch.autograd.grad(x.sum(), [*leaves.values()], allow_unused=True) for x in (got, dense)]
        for name, a, b in zip(leaves, *grads, strict=True):
            given = [torch.zeros_like(leaves[name]) if x is None else x * masks[name] for x in (a, b)]
            close(call, *given)
