"""An interatomic potential with exact forces, of the kind of NequIP and MACE, on generated data.

    python examples/potential.py --steps 120

Clusters of atoms have energies and forces from a made-up potential of pairs and angles. The network passes messages
along the edges between near atoms: features of a neighbour times spherical harmonics of its direction, weighted by a
function of its distance, in one einsum. Forces are minus the gradient of the energy, so training on them takes second
derivatives of everything. At the end the forces are compared with the differences of energies, and with those of the
turned cluster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pumice as pm
from pumice.ops import Irrep, Irreps, spherical_harmonics

CUTOFF = 1.9


@dataclass(frozen=True)
class Atoms:
    """Clusters side by side. positions [N, 3]; edges [2, E] (source, target); cluster [N]: number of each atom's."""

    positions: Tensor
    edges: Tensor
    cluster: Tensor

    @staticmethod
    def of(positions: Tensor) -> Atoms:
        """Of clusters [count, atoms, 3], with edges between atoms nearer than CUTOFF."""
        count, size, _ = positions.shape
        near = (torch.cdist(positions, positions) < CUTOFF) & ~torch.eye(size, dtype=torch.bool)
        which, target, source = near.nonzero().unbind(1)
        edges = torch.stack([source, target]) + which * size
        return Atoms(positions.flatten(0, 1), edges, torch.arange(count).repeat_interleave(size))

    def energies(self, of_atoms: Tensor) -> Tensor:
        return of_atoms.new_zeros(int(self.cluster[-1]) + 1).index_add(0, self.cluster, of_atoms)


def forces(energy: Tensor, positions: Tensor, training: bool = False) -> Tensor:
    """Minus the gradient of the energies; differentiable if training."""
    return -torch.autograd.grad(energy.sum(), positions, create_graph=training)[0]


def smooth(distance: Tensor) -> Tensor:
    """From 1 to 0 at CUTOFF, with two derivatives."""
    x = (distance / CUTOFF).clamp(max=1)
    return 1 - 10 * x**3 + 15 * x**4 - 6 * x**5


def reference(atoms: Atoms) -> Tensor:
    """The energies [clusters] of the made-up potential: repulsion at 1, and each atom prefers tetrahedral angles."""
    source, target = atoms.edges
    v = atoms.positions[source] - atoms.positions[target]
    distance = v.norm(dim=1)
    pairs = ((1 - torch.exp(3 * (1 - distance))) ** 2 - 1) * smooth(distance) / 2
    # The sum over pairs of neighbours of (cos(angle) + 1/3)^2 is one of squared moments of their directions.
    u, w = v / distance[:, None], smooth(distance)
    moments = [w, w[:, None] * u, w[:, None, None] * u[:, :, None] * u[:, None, :]]
    a, b, c = (m.new_zeros(len(atoms.positions), *m.shape[1:]).index_add(0, target, m) for m in moments)
    angles = c.square().sum((1, 2)) + 2 / 3 * b.square().sum(1) + a**2 / 9
    whole = angles / 6
    return atoms.energies(whole.index_add(0, target, pairs))


class Layer(nn.Module):
    """Messages from neighbours, mixed; vectors are scaled by scalars."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        features = Irreps([(channels, (0, 1)), (channels, (1, -1))])
        filters = Irreps.harmonics(2)
        results, paths = [], []
        for degree, parity in ((0, 1), (1, -1)):
            for a, x in enumerate(features):
                for b, y in enumerate(filters):
                    if x.couples(y, Irrep(channels, degree, parity)):
                        paths.append((a, b, len(results), "uvu", True))
                        results.append(Irrep(channels, degree, parity))
        options = {"shared_weights": False, "layout": "ir_mul"}
        self.product = pm.nn.TensorProduct(features, filters, Irreps(results), paths, **options)
        self.radial = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, self.product.weight_numel))
        self.mix = nn.ModuleList(
            nn.Linear(channels * sum(r.degree == degree for r in results), channels, bias=False) for degree in (0, 1)
        )

    def forward(self, x: Tensor, harmonics: Tensor, radial: Tensor, edges: Tensor) -> Tensor:
        found = self.product(x, harmonics, self.radial(radial), edges=edges)
        # Scalars first, then of each path three components of all channels.
        wide = self.mix[0].in_features
        scalars = self.mix[0](found[:, :wide])
        vectors = found[:, wide:].unflatten(1, (-1, 3, self.channels)).transpose(1, 2).flatten(2)
        vectors = self.mix[1](vectors) * torch.sigmoid(scalars)[:, None]
        return x + torch.cat([nn.functional.silu(scalars), vectors.flatten(1)], 1)


class Potential(nn.Module):
    """Energies of clusters. The first features are the same scalars for all atoms."""

    def __init__(self, channels: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(channels))
        self.layers = nn.ModuleList(Layer(channels) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(channels, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, atoms: Atoms) -> Tensor:
        source, target = atoms.edges
        v = atoms.positions[source] - atoms.positions[target]
        distance = v.norm(dim=1, keepdim=True)
        harmonics = spherical_harmonics([0, 1, 2], v, normalize=True, normalization="component")
        waves = torch.arange(1, 9, dtype=v.dtype) * torch.pi / CUTOFF
        radial = torch.sin(waves * distance) / distance * smooth(distance)
        channels = len(self.embedding)
        x = torch.cat([self.embedding, self.embedding.new_zeros(3 * channels)]).expand(len(atoms.positions), -1)
        for layer in self.layers:
            x = layer(x, harmonics, radial, atoms.edges)
        return atoms.energies(self.head(x[:, :channels])[:, 0])


def clusters(count: int, seed: int) -> Tensor:
    """[count, 8, 3]: cubes whose atoms were moved."""
    chance = torch.Generator().manual_seed(seed)
    cube = torch.cartesian_prod(*[torch.arange(2.0)] * 3) * 1.1
    return cube + 0.12 * torch.randn(count, 8, 3, generator=chance)


def labelled(count: int, seed: int) -> tuple[Atoms, Tensor, Tensor]:
    """(clusters, energies, forces) of the reference."""
    atoms = Atoms.of(clusters(count, seed))
    atoms.positions.requires_grad_()
    energies = reference(atoms)
    return atoms, energies.detach(), forces(energies, atoms.positions)


def train(net: Potential, steps: int, seed: int = 0) -> None:
    """Adam on the energies and forces of new clusters in every step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), 1e-4)
    for step in range(steps):
        atoms, energies, wanted = labelled(16, 1000 + seed + step)
        found = net(atoms)
        pull = forces(found, atoms.positions, training=True)
        loss = 0.1 * (found - energies).square().mean() + (pull - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            print(f"step {step:4}: loss {loss.item():.4f}")


@dataclass(frozen=True)
class Result:
    """energy, force: root mean square errors on new clusters; spread: of the forces themselves; exact: largest
    difference of a force and the slope of the energy; turned: of the forces of turned clusters."""

    energy: float
    force: float
    spread: float
    exact: float
    turned: float


def tested(net: Potential) -> Result:
    atoms, energies, wanted = labelled(32, 7)
    found = net(atoms)
    error = (forces(found, atoms.positions) - wanted).square().mean().sqrt()
    net = net.double()
    given = clusters(2, 11).double()
    energy, pull = _of(net, given)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    after, turned = _of(net, given @ turn.T)
    step = torch.zeros_like(given)
    step[0, 3, 1] = 1e-4
    slope = (_of(net, given + step)[0][0] - _of(net, given - step)[0][0]) / 2e-4
    assert torch.allclose(energy, after)
    return Result(
        float((found.detach() - energies).square().mean().sqrt()),
        float(error),
        float(wanted.square().mean().sqrt()),
        float((slope + pull[0, 3, 1]).abs()),
        float((turned - pull @ turn.T).abs().max()),
    )


def _of(net: Potential, positions: Tensor) -> tuple[Tensor, Tensor]:
    atoms = Atoms.of(positions)
    atoms.positions.requires_grad_()
    energy = net(atoms)
    return energy.detach(), forces(energy, atoms.positions).view_as(positions)


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps of 16 clusters")
    parser.add_argument("--channels", type=int, default=8, help="scalars, and vectors, of an atom")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    net, begin = Potential(options.channels), time.perf_counter()
    train(net, options.steps)
    found = tested(net)
    print(f"{time.perf_counter() - begin:.0f} s; on new clusters: energy {found.energy:.3f}, force {found.force:.3f} ")
    print(f"(forces are {found.spread:.3f}); slope of the energy - force {found.exact:.1e}, turned {found.turned:.1e}")
    return found


if __name__ == "__main__":
    main()
