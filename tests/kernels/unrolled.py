"""Unrolled tables in Triton's interpreter, in a process of its own: channelwise tensor products and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from unittest.mock import patch

import torch
from kernels.interpret import answering, near, refuses
from torch import Tensor

import pumice as pm
from pumice.lower import unrolled

Checks = Mapping[str, Callable[[], None]]
NODES, EDGES = 5, 12
PER_EDGE = "Z[T[b],k,u] = CG[k,i,j,p] * X[S[b],i,u] * Y[b,j] * W[b,p,u] ; Z:[5,_,_]"
SHARED = "Z[T[b],k,u] = CG[k,i,j,p] * X[S[b],i,u] * Y[b,j] * W[p,u] ; Z:[5,_,_]"
ROWS = "Z[b,k,u] = CG[k,i,j,p] * X[b,i,u] * Y[b,j] * W[b,p,u]"
BOTH_ENDS = "Z[T[b],k,u] = CG[k,i,j,p] * X[S[b],i,u] * X[T[b],i,u] * Y[b,j] * W[b,p,u] ; Z:[5,_,_]"
STATEMENTS = {
    "per edge": PER_EDGE,
    "shared": SHARED,
    "rows": ROWS,
    "twice": f"{ROWS} * W[b,p,u]",
    "both ends": BOTH_ENDS,
}


def operands(text: str, lanes: int, dtype: torch.dtype) -> dict[str, Tensor | pm.Sparse]:
    """Edges in no order, some of them padding; one node has none."""
    torch.manual_seed(lanes)
    table = torch.randn(4, 4, 3, 2, dtype=torch.float64) * (torch.rand(4, 4, 3, 2) < 0.3)
    ends = torch.randint(0, NODES - 1, (2, EDGES))
    ends[0, 3] = ends[1, 5] = -1
    rows = NODES if "S[b]" in text else EDGES
    own = () if "W[p" in text else (EDGES,)
    given = {"X": (rows, 4, lanes), "Y": (EDGES, 3), "W": (*own, 2, lanes)}
    dense = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in given.items()}
    edges = {"S": ends[0], "T": ends[1].int()} if "S[b]" in text else {}
    return {"CG": pm.sparse(table.to(dtype), "(k i j p):C"), **dense, **edges}


def check(text: str, lanes: int, dtype: torch.dtype, limit: float) -> None:
    """The kernel and its plain form are the reference, and so are their gradients."""
    given = operands(text, lanes, dtype)
    plain = patch.object(unrolled, "_launched", unrolled.run_torch)
    want = _with_gradients(text, _double(given), "reference")
    got = _with_gradients(text, given, "unrolled")
    with plain:
        found = _with_gradients(text, given, "unrolled")
    for one, other, exact in zip(got, found, want, strict=True):
        assert one.dtype == dtype
        near(one, exact, limit)
        near(other, exact, limit)


def _double(given: dict[str, Tensor | pm.Sparse]) -> dict[str, Tensor | pm.Sparse]:
    floats = {n for n, x in given.items() if isinstance(x, pm.Sparse) or x.is_floating_point()}
    return {name: x.to(dtype=torch.float64) if name in floats else x for name, x in given.items()}


def _with_gradients(text: str, given: dict[str, Tensor | pm.Sparse], lowering: str) -> list[Tensor]:
    """The result, first gradients, and second ones of a sum over the first."""
    leaves = {n: given[n].clone().requires_grad_() for n in ("X", "Y", "W")}
    z = pm.einsum(text, **{**given, **leaves}, lowering=lowering)
    first = torch.autograd.grad((z * _weights(z)).sum(), list(leaves.values()), create_graph=True)
    total = sum((g * _weights(g)).sum() for g in first)
    return [x.detach() for x in (z, *first, *torch.autograd.grad(total, list(leaves.values())))]


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).to(x.dtype)


def check_kernels_run() -> None:
    """The result is an unrolled kernel, and so are all gradients of an order, but for weights that all rows share."""
    for text, expected in ((PER_EDGE, [1, 3, 9, 3]), (SHARED, [1, 2, 7, 2])):
        ran = list[int]()
        launched = unrolled._launched

        def run(call, given, ran=ran, launched=launched):
            return ran.append(len(call.sums.sums)) or launched(call, given)

        given = operands(text, 4, torch.float32)
        leaves = {n: given[n].clone().requires_grad_() for n in ("X", "Y", "W")}
        with patch.object(unrolled, "_launched", run):
            z = pm.einsum(text, **{**given, **leaves}, lowering="unrolled").square().sum()
            first = torch.autograd.grad(z, list(leaves.values()), create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))
        assert ran == expected, f"kernels of {ran} sums, expected {expected}"


def check_strided_ends() -> None:
    """Index arrays that are columns of a matrix, as edges often are."""
    given = operands(PER_EDGE, 4, torch.float32)
    edges = torch.stack([given["S"], given["T"].long()], 1)
    want = pm.einsum(PER_EDGE, lowering="reference", **given)
    near(pm.einsum(PER_EDGE, lowering="unrolled", **{**given, "S": edges[:, 0], "T": edges[:, 1]}), want.double(), 1e-5)


def check_refusals() -> None:
    given = operands(ROWS, 4, torch.float32)
    many = pm.sparse(torch.ones(4, 4, 3, 50), "(k i j p):C")
    cases = {
        "fewer than two factors": ("Z[b,k,u] = CG[k,i] * X[b,i,u]", {"CG": pm.sparse(torch.eye(4), "COO")}),
        "no sum of products": ("Z[b,k,w] = CG[k,i,j,p] * X[b,i,u] * Y[b,j] * W[p,u,w]", {"W": torch.ones(2, 4, 3)}),
        "at most 1024": (ROWS, {"CG": many, "W": torch.ones(EDGES, 50, 4)}),
        "have a gradient": (ROWS, {"CG": given["CG"].with_values([torch.ones(given["CG"].nnz).requires_grad_()])}),
    }
    for reason, (text, changed) in cases.items():
        used = {name: x for name, x in {**given, **changed}.items() if f"{name}[" in text}
        refuses("unrolled", {reason: (text, used)})


def checks() -> Checks:
    found = {name: partial(check, text, 6, torch.float64, 1e-12) for name, text in STATEMENTS.items()}
    more = {
        "fp32": partial(check, PER_EDGE, 33, torch.float32, 1e-5),
        "fp16, two blocks": partial(check, PER_EDGE, 130, torch.float16, 2e-2),
        "one lane": partial(check, SHARED, 1, torch.float32, 1e-5),
    }
    more |= {"kernels run": check_kernels_run, "strided ends": check_strided_ends, "refusals": check_refusals}
    return {**found, **more}


GROUPS: Mapping[str, Callable[[], Checks]] = {"unrolled": checks}
answer = answering(GROUPS)
