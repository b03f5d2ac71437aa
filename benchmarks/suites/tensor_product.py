"""The fully connected equivariant tensor product (uvw) of O(3), against e3nn and cuEquivariance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, kept, measured, seconds_to_move, summarize, tuned
from benchmarks.peers import equivariant
from pumice.nn import FullyConnectedTensorProduct
from pumice.ops import Irreps, clebsch_gordan, compile_einsum, sparse

SHARED = "Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[l,u,w]"
PER_SAMPLE = "Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u,w]"
FORMATS = {
    "COO": "(i j k l):C",
    "COO by path": "[i,j,k,l] (l i j k):C",
    "grouped by path": "[i,j,k,l] l:C (i j k):G",
    "grouped by path and result": "[i,j,k,l] (l i):C (j k):G",
    "grouped by result": "i:C (j k l):G",
    "tables": "[i,j,k,l] l:U i:U j:U k:G",
}
"""Storage formats of the coefficients; all are measured, and the fastest counts."""
CHUNK = 500  # samples per step of the float64 reference


@dataclass(frozen=True, eq=False)
class Product:
    """The operands of a case: x [b, j, u], y [b, k], w [l, u, w] or [b, l, u, w], cotangent like x."""

    highest: int
    channels: int
    coefficients: Tensor
    x: Tensor
    y: Tensor
    w: Tensor
    cotangent: Tensor

    @property
    def shared(self) -> bool:
        return self.w.ndim == 3


def tensor_product(setup: Setup) -> Iterator[Row]:
    """Forward, and forward with the gradients of all three operands, for shared and per-sample weights."""
    done: dict[bool, list[Row]] = {False: [], True: []}
    for highest, channels in _sizes(setup):
        for shared in (False, True):
            name = f"tensor-product/l{highest}/C{channels}/{'shared' if shared else 'per-sample'}"
            for backward in (False, True):
                case = f"{name}/{'fwd+bwd' if backward else 'fwd'}"
                if not setup.wants(case):
                    continue
                rows = list(_one(setup, case, product(setup, highest, channels, shared), backward))
                done[backward] += rows
                yield from kept(rows, FORMATS)
    for backward, rows in done.items():
        setup.say("forward and backward" if backward else "forward")
        summarize(setup, rows, {"e3nn or cuEquivariance": ("e3nn", "cuEq"), "dense einsum": ("dense",)})


def _sizes(setup: Setup) -> Sequence[tuple[int, int]]:
    """(highest degree, channels) of the cases: each degree, each width. Tuning all pairs takes a quarter of an hour:
    they run in a thorough study, or by name."""
    if setup.quick:
        return ((1, 4),)
    if setup.thorough or "/l" in setup.only:
        return tuple((highest, channels) for highest in (1, 2, 3) for channels in (16, 32, 64))
    return ((2, 32), (1, 32), (3, 32), (2, 16), (2, 64))


def product(setup: Setup, highest: int, channels: int, shared: bool) -> Product:
    """Normal random operands for a batch of 10,000."""
    batch, size = 24 if setup.quick else 10_000, (highest + 1) ** 2
    table = coefficients(highest, channels)
    weights = (table.shape[3], channels, channels)
    return Product(
        highest,
        channels,
        table.float().to(setup.device),
        setup.filled(batch, size, channels, seed=1),
        setup.filled(batch, size, seed=2),
        setup.filled(*(weights if shared else (batch, *weights)), seed=3),
        setup.filled(batch, size, channels, seed=4),
    )


def coefficients(highest: int, channels: int) -> Tensor:
    """CG[i,j,k,l] for component i of the result, j of the first and k of the second factor, on path l, in float64.

    Component l * l + l + m is order m of degree l, whose parity is (-1)^l. Paths are in the order of e3nn's
    FullyConnectedTensorProduct, in its normalization (component, element)."""
    irreps = Irreps.harmonics(highest)
    paths = [(a.degree, b.degree, c.degree) for a in irreps for b in irreps for c in irreps if a.couples(b, c)]
    table = torch.zeros(*[(highest + 1) ** 2] * 3, len(paths), dtype=torch.float64)
    for number, (a, b, c) in enumerate(paths):
        alike = sum(result == c for *_, result in paths)
        scale = math.sqrt((2 * c + 1) / (channels * alike))
        path = torch.tensor(clebsch_gordan(a, b, c)).permute(2, 0, 1)
        table[_span(c), _span(a), _span(b), number] = scale * path
    return table


def _span(degree: int) -> slice:
    return slice(degree * degree, (degree + 1) ** 2)


def _one(setup: Setup, case: str, given: Product, backward: bool) -> Iterator[Row]:
    ours = [Way(name, lambda text=text: _ours(given, text, backward), optional=True) for name, text in FORMATS.items()]
    ours.append(Way("module", lambda: _module(given, backward), view=lambda found: _viewed(given, found)))
    peers = [
        Way("dense einsum", lambda: _dense(given, backward)),
        *equivariant.e3nn_ways(setup, given, backward),
        *equivariant.cue_ways(setup, given, backward),
    ]
    truth = exact(given, backward)
    bounds = {"memory bound": 1e3 * seconds_to_move(memory=_bytes(given, backward))}
    yield from measured(setup, Case(case, torch.float32, truth, bounds), ours, peers)


def _ours(given: Product, text: str, backward: bool) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    held = sparse(given.coefficients, text)
    line = compile_einsum(SHARED if given.shared else PER_SAMPLE, {"CG": str(held.format)})
    return tuned(
        with_gradients(
            lambda x, y, w: line(CG=held, X=x, Y=y, W=w), (given.x, given.y, given.w), given.cotangent, backward
        )
    )


def _module(given: Product, backward: bool) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """The module on flat operands, channels last."""
    both, one = (Irreps([(c, (d, (-1) ** d)) for d in range(given.highest + 1)]) for c in (given.channels, 1))
    options = {"shared_weights": given.shared, "internal_weights": False, "layout": "ir_mul"}
    run = FullyConnectedTensorProduct(both, one, both, **options).to(given.x.device)
    flat = (given.x.flatten(1), given.y, given.w.flatten(0 if given.shared else 1))
    return tuned(with_gradients(run, flat, given.cotangent.flatten(1), backward))


def _viewed(given: Product, found: Tensor | tuple[Tensor, ...]) -> Tensor | list[Tensor]:
    """Flat results in the shapes of the operands."""
    if isinstance(found, Tensor):
        return found.view_as(given.x)
    return [x.view_as(like) for x, like in zip(found, (given.x, given.y, given.w), strict=True)]


def _dense(given: Product, backward: bool) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """Plain PyTorch with the coefficients as a dense tensor."""
    return with_gradients(
        lambda x, y, w: dense(given.coefficients, x, y, w), (given.x, given.y, given.w), given.cotangent, backward
    )


def with_gradients(
    run: Callable[..., Tensor], operands: tuple[Tensor, ...], cotangent: Tensor, backward: bool
) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """A call of run(*operands), or of the gradients of all operands for a cotangent."""
    if not backward:

        @torch.no_grad()
        def forward() -> Tensor:
            return run(*operands)

        return forward
    leaves = tuple(x.detach().requires_grad_() for x in operands)
    return lambda: torch.autograd.grad(run(*leaves), leaves, cotangent)


def exact(given: Product, backward: bool) -> Tensor | list[Tensor]:
    """The result, or the three gradients, in float64, CHUNK samples at a time."""
    parts: list[list[Tensor]] = []
    for first in range(0, len(given.x), CHUNK):
        part = slice(first, first + CHUNK)
        cut = (given.x[part], given.y[part], given.w if given.shared else given.w[part])
        leaves = [x.detach().double().requires_grad_(backward) for x in cut]
        result = dense(given.coefficients.double(), *leaves)
        if not backward:
            parts.append([result])
            continue
        found = torch.autograd.grad(result, leaves, given.cotangent[part].double())
        # Per-sample gradients are as large as the operands, so they are kept in float32.
        parts.append([found[0].float(), found[1].float(), found[2] if given.shared else found[2].float()])
    whole = [torch.cat(list(column)) for column in list(zip(*parts, strict=True))[: 2 if given.shared else None]]
    if not backward:
        return torch.cat([part[0] for part in parts])
    if given.shared:
        whole.append(torch.stack([part[2] for part in parts]).sum(0))
    return whole


def dense(coefficients: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The product over all coefficients, including zeros."""
    coupled = torch.einsum("ijkl,bk->bijl", coefficients, y)
    mixed = torch.einsum("bijl,bju->bliu", coupled, x)
    return torch.einsum("bliu,luw->biw" if w.ndim == 3 else "bliu,bluw->biw", mixed, w)


def _bytes(given: Product, backward: bool) -> float:
    """Bytes moved at least: operands read, the result written, and the same for the gradients."""
    operands = given.x.numel() + given.y.numel() + given.w.numel()
    return 4.0 * (operands + given.x.numel() + (2 * operands + given.x.numel() if backward else 0))
