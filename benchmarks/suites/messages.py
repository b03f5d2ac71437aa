"""The channelwise product (uvu) along the edges of a graph, as in MACE and NequIP, against cuEquivariance and e3nn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, measured, seconds_to_move
from benchmarks.peers import equivariant
from pumice.nn import Instruction, TensorProduct
from pumice.ops import Irreps, clebsch_gordan

PASSES = ("fwd", "fwd+bwd", "fwd+bwd+bwd")
"""The message; its gradients; and their gradients, as in training on forces."""
HIGHEST, FILTERS, NEIGHBOURS = 2, 3, 50  # degrees of features and filters, edges of a node
MATERIALIZED = 100_000  # edges up to which messages fit in memory, and what their gradients need
TRAINED = 1_000_000  # edges up to which weights of 128 channels fit in memory with their gradients
CHUNK = 20_000  # edges per step of the float64 reference

Found = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Messages:
    """x [N, components * C], channels last; y [E, components]; w [E, paths * C]; edges [2, E]; cotangents: of the three
    and of the result."""

    channels: int
    operands: tuple[Tensor, Tensor, Tensor]
    edges: Tensor
    cotangents: tuple[Tensor, Tensor, Tensor, Tensor]

    @property
    def irreps(self) -> tuple[Irreps, Irreps, Irreps]:
        return self.paths[0]

    @cached_property
    def paths(self) -> tuple[tuple[Irreps, Irreps, Irreps], list[Instruction]]:
        return paths(self.channels)


def paths(channels: int) -> tuple[tuple[Irreps, Irreps, Irreps], list[Instruction]]:
    """(irreps of x, y and the result, paths by the degree of their result): each has its own result."""
    x, y = Irreps([(channels, (d, (-1) ** d)) for d in range(HIGHEST + 1)]), Irreps.harmonics(FILTERS)
    every = [(c, a, b) for c in range(FILTERS + 1) for a in range(len(x)) for b in range(len(y))]
    kept = [(c, a, b) for c, a, b in every if abs(a - b) <= c <= a + b and (a + b + c) % 2 == 0]
    result = Irreps([(channels, (c, (-1) ** c)) for c, *_ in kept])
    return (x, y, result), [Instruction(a, b, n, "uvu", True) for n, (_, a, b) in enumerate(kept)]


def messages(setup: Setup) -> Iterator[Row]:
    """Random graphs of 50 edges a node, 128 channels."""
    for nodes, channels in ((8, 4),) if setup.quick else ((2_000, 128), (10_000, 128), (100_000, 128)):
        names = PASSES[:1] if nodes * NEIGHBOURS > TRAINED else PASSES
        cases = {order: f"messages/N{nodes}/C{channels}/{name}" for order, name in enumerate(names)}
        cases = {order: case for order, case in cases.items() if setup.wants(case)}
        if cases:
            given = graph(setup, nodes, channels)
            for order, case in cases.items():
                yield from _one(setup, case, given, order)


def graph(setup: Setup, nodes: int, channels: int) -> Messages:
    (x, y, z), every = paths(channels)
    count = nodes * (4 if setup.quick else NEIGHBOURS)
    chance = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, count), generator=chance).to(setup.device)
    shapes = (nodes, x.dim), (count, y.dim), (count, len(every) * channels), (nodes, z.dim)
    a, b, c, *_ = (setup.filled(*shape, seed=n) for n, shape in enumerate(shapes[:3]))
    one = torch.ones((), device=setup.device)
    large = count > TRAINED  # Cotangents are not read then, and take no memory.
    p, q, r, s = (one.expand(shape) if large else setup.filled(*shape, seed=5 + n) for n, shape in enumerate(shapes))
    # By target, as neighbour lists are.
    return Messages(channels, (a, b, c), edges[:, edges[1].argsort(stable=True)], (p, q, r, s))


def _one(setup: Setup, case: str, given: Messages, order: int) -> Iterator[Row]:
    ours = [Way("module", lambda: derived(_module(given), given, order))]
    peers = [*equivariant.segmented_ways(setup, given, lambda run: derived(run, given, order))]
    if given.edges.shape[1] <= MATERIALIZED:
        peers.append(Way("plain PyTorch", lambda: derived(_plain(given), given, order)))
        peers.append(_e3nn_way(setup, given, order))
    size = sum(x.numel() for x in given.operands)
    moved = 4.0 * (size + given.cotangents[3].numel()) * (order + 1) + 4.0 * size * order
    bounds = {"memory bound": 1e3 * seconds_to_move(memory=moved)}
    yield from measured(setup, Case(case, torch.float32, exact(given, order), bounds), ours, peers)


def derived(run: Callable[..., Tensor], given: Messages, order: int) -> Callable[[], Found]:
    """A call of run(x, y, w), of its gradients, or of the gradients of these."""
    if not order:

        @torch.no_grad()
        def forward() -> Tensor:
            return run(*given.operands)

        return forward
    leaves = tuple(x.detach().requires_grad_() for x in given.operands)
    return lambda: _gradients(run(*leaves), leaves, given.cotangents, order)


def _gradients(z: Tensor, leaves: Sequence[Tensor], cotangents: Sequence[Tensor], order: int) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(z, leaves, cotangents[3], create_graph=order > 1)
    return first if order == 1 else torch.autograd.grad(first, leaves, cotangents[:3])


def _module(given: Messages) -> Callable[..., Tensor]:
    (irreps, every), device = given.paths, given.edges.device
    run = TensorProduct(*irreps, every, shared_weights=False, layout="ir_mul").to(device)
    return lambda x, y, w: run(x, y, w, edges=given.edges)


def _e3nn_way(setup: Setup, given: Messages, order: int) -> Way:
    """e3nn on gathered rows, whose results are added up, in its own layout."""
    (x_irreps, _, z_irreps), (source, target) = given.irreps, given.edges
    (x, y, w), (p, q, r, s) = given.operands, given.cotangents
    turned = equivariant.components_last(x, x_irreps), equivariant.components_last(p, x_irreps)
    own = Messages(
        given.channels, (turned[0], y, w), given.edges, (turned[1], q, r, equivariant.components_last(s, z_irreps))
    )

    def make() -> Callable[[], Found]:
        run = equivariant.e3nn_product(setup, *given.paths)

        def whole(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            found = run(x[source], y, w)
            return found.new_zeros(len(x), z_irreps.dim).index_add(0, target, found)

        return derived(whole, own, order)

    def view(found: Any) -> Any:
        if not order:
            return equivariant.components_first(found, z_irreps)
        return [equivariant.components_first(found[0], x_irreps), *found[1:]]

    return Way("e3nn script", make, "e3nn", view)


def exact(given: Messages, order: int) -> Found:
    """In float64, CHUNK edges at a time: what is asked is linear in the messages."""
    x, y, w = given.operands
    sums, parts = torch.zeros(()), list[tuple[Tensor, ...]]()
    for first in range(0, given.edges.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        leaves = [t.double().requires_grad_(order > 0) for t in (x, y[part], w[part])]
        z = plain(given, *leaves, given.edges[:, part])
        p, q, r, s = given.cotangents
        cut = [t.double() for t in (p, q[part], r[part], s)] if order else []
        found = _gradients(z, leaves, cut, order) if order else (z,)
        sums = found[0] if not first else sums.add_(found[0])
        parts.append(tuple(t.float() for t in found[1:]))
    return sums if not order else [sums, *(torch.cat([part[n] for part in parts]) for n in (0, 1))]


def _plain(given: Messages) -> Callable[..., Tensor]:
    return lambda x, y, w: plain(given, x, y, w, given.edges)


def plain(given: Messages, x: Tensor, y: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    """The messages in plain PyTorch, one path at a time."""
    (x_irreps, y_irreps, z_irreps), every = given.paths
    x, w = x.view(len(x), -1, given.channels)[edges[0]], w.view(len(w), -1, given.channels)
    parts = []
    for number, path in enumerate(every):
        a, b, c = x_irreps[path.first].degree, y_irreps[path.second].degree, z_irreps[path.result].degree
        table = torch.tensor(clebsch_gordan(a, b, c) * (2 * c + 1) ** 0.5).to(x)
        coupled = torch.einsum("ej,ijk->eik", y[:, b * b : (b + 1) ** 2], table)
        message = torch.einsum("eik,eiu->eku", coupled, x[:, a * a : (a + 1) ** 2])
        parts.append(message * w[:, number, None])
    whole = torch.cat(parts, 1).flatten(1)
    return whole.new_zeros(len(given.operands[0]), whole.shape[1]).index_add(0, edges[1], whole)
