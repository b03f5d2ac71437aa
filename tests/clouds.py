"""Clouds in buffers that are longer than they are, and what a dictionary says about their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pumice.coords import Bounds, CoordBuffer, Geometry, GridSpec, Relation, morton_argsort
from pumice.coords.buffer import new_status
from pumice.coords.outputs import Outputs, max_outputs, site_of

INT32 = (-(2**31), 2**31 - 1)
SIDES = {1: 150, 2: 14, 3: 7, 4: 4}
"""Boxes that a few dozen voxels of so many axes fill by about a third."""


SHAPES = {1: (150,), 2: (15, 13), 3: (7, 9, 8), 4: (5, 4, 6, 5)}
"""Extents that cut such clouds."""


@dataclass(frozen=True)
class Scene:
    """A random cloud: voxels in a few tight clusters (`clusters`) or all over a box of `side` cells along each axis.

    spare: rows of the buffer past the living; they hold cells of the box, so that whoever reads them finds them.
    loose: cells by which the box that is known is larger than the cloud. far: clusters lie anywhere in int32.
    """

    dim: int = 3
    count: int = 60
    side: int = 8
    batch: int = 2
    spare: int = 7
    loose: int = 0
    clusters: int = 0
    far: bool = False
    seed: int = 0

    def coords(self) -> Tensor:
        """int32 [count, 1+D]: distinct, negative ones among them, in random order."""
        if self.count == 0:
            return torch.zeros(0, self.dim + 1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(self.seed)
        size, half = (3 * self.count, self.dim), self.side // 2
        cells = torch.randint(-half, max(1, self.side - half), size, generator=generator)
        if self.clusters:
            reach = (INT32[0] + 64, INT32[1] - 64) if self.far else (-12 * self.side, 12 * self.side)
            centres = torch.randint(*reach, (self.clusters, self.dim), generator=generator)
            if self.far:
                # Two corners of all that int32 holds are among the clusters.
                centres[0], centres[-1] = INT32[0] + half, INT32[1] - max(1, self.side - half) + 1
            cells = cells + centres[torch.randint(0, self.clusters, size[:1], generator=generator)]
        items = torch.randint(0, self.batch, (len(cells), 1), generator=generator)
        items[0] = self.batch - 1
        found = torch.unique(torch.cat([items, cells], dim=1), dim=0)
        order = torch.randperm(len(found), generator=generator)[: self.count]
        return found[order].int()

    def bounds(self) -> Bounds:
        tight = Bounds.of(self.coords())
        low = tuple(max(INT32[0], a - self.loose) for a in tight.low)
        high = tuple(min(INT32[1], h + self.loose) for h in tight.high)
        return Bounds(low, high, max(tight.batch, 1))

    def cloud(self) -> CoordBuffer:
        return buffered(self.coords(), self.spare, self.bounds())


def buffered(coords: Tensor, spare: int, bounds: Bounds | None = None) -> CoordBuffer:
    """`coords` in a buffer with room for `spare` more, which hold copies and neighbours of the living."""
    bounds = bounds or Bounds.of(coords)
    dead = torch.tensor([[0, *bounds.low], [0, *bounds.high], [-1, *bounds.low]], dtype=torch.int32)
    dead = torch.cat([dead, *((coords[:4], (coords[:4] + 1).clamp(max=INT32[1])) if len(coords) else ())])
    dead = dead.repeat(-(-spare // len(dead)), 1)[:spare]
    count = torch.tensor([len(coords)], dtype=torch.int32)
    return CoordBuffer(torch.cat([coords, dead]), count, bounds, new_status(coords.device), exact=spare == 0)


def fresh(cloud: CoordBuffer) -> CoordBuffer:
    """The same with a status word of its own."""
    return CoordBuffer(cloud.coords, cloud.count, cloud.bounds, new_status(cloud.device), cloud.exact)


def asked(cloud: CoordBuffer, stride: Sequence[int], spare: int = 5) -> CoordBuffer:
    """Outputs for a lookup at this stride: where inputs are met, and some far from all of them."""
    living = cloud.coords[cloud.valid_mask()].long()
    scale = torch.tensor((1, *stride))
    near = torch.div(living, scale, rounding_mode="floor")
    strange = near[: len(near) // 4 + 1] + torch.tensor((0, *((9,) * cloud.dim)))
    other = near[:2] + torch.tensor((1, *((0,) * cloud.dim)))
    places = torch.unique(torch.cat([near, strange, other]).clamp(*INT32), dim=0).int()
    return buffered(places, spare)


def neighbours(cloud: CoordBuffer, outputs: CoordBuffer, relation: Relation) -> Tensor:
    """int32 [capacity, K] by dictionary: the least row at stride * out + offset, -1 where there is none."""
    held: dict[tuple[int, ...], int] = {}
    for row, place in enumerate(cloud.coords[: int(cloud.count)].tolist()):
        held.setdefault(tuple(place), row)
    rows = torch.full((outputs.capacity, len(relation.offsets)), -1, dtype=torch.int32)
    for row, (item, *place) in enumerate(outputs.coords[: int(outputs.count)].tolist()):
        for tap, offset in enumerate(relation.offsets):
            met = (s * c + o for s, c, o in zip(relation.stride, place, offset, strict=True))
            rows[row, tap] = held.get((item, *met), -1)
    return rows


def lookups(dim: int) -> dict[str, Relation]:
    """Relations to ask neighbours by: K from 1 to 5**D (125 in space), strides 1 to 3, gaps, one-sided offsets."""
    mixed = tuple(axis % 3 + 1 for axis in range(dim))
    found = {
        "k1": Relation.of(dim, 1),
        "k3": Relation.of(dim, 3),
        "k2 s2": Relation.of(dim, 2, stride=2),
        "k3 mixed": Relation.of(dim, 3, stride=mixed, padding=1, dilation=mixed[::-1]),
        "offsets": Relation.of_offsets(dim, one_sided(dim), stride=3),
    }
    return {**found, "k5": Relation.of(dim, 5)} if dim < 4 else found


def one_sided(dim: int) -> tuple[tuple[int, ...], ...]:
    """Offsets that are no window: all on one side, one of them far, in no order."""
    return tuple(tuple((7 * tap + 3 * axis) % 5 for axis in range(dim)) for tap in range(4)) + ((11,) * dim,)


def levels(dim: int) -> dict[str, Relation]:
    """Relations that make coordinates, of every policy."""
    found = {
        "floor k2 s2": Relation.of(dim, 2, stride=2),
        "floor k3 s2": Relation.of(dim, 3, stride=2),
        "floor k1 s3": Relation.of(dim, 1, stride=3),
        "support k3 s2 p1": Relation.of(dim, 3, stride=2, padding=1),
        "support k3 s3": Relation.of(dim, 3, stride=3, padding=0),
        "support k2 s2 p0": Relation.of(dim, 2, stride=2, padding=0),
        "support k3": Relation.of(dim, 3, policy="support"),
        "support k3 s2 d2": Relation.of(dim, 3, stride=2, padding=2, dilation=2),
        "transposed k2 s2": Relation.of_transposed(dim, 2, stride=2),
        "transposed k3 s2 p1": Relation.of_transposed(dim, 3, stride=2, padding=1),
        "transposed k3 d2": Relation.of_transposed(dim, 3, padding=None, dilation=2),
        "transposed unbounded": Relation.of_transposed(dim, 3, stride=2, padding=1, bounded=False),
        "offsets support": Relation.of_offsets(dim, one_sided(dim), stride=2, policy="support"),
        "offsets floor": Relation.of_offsets(dim, one_sided(dim), stride=2),
        "mixed strides": Relation.of(dim, 3, stride=tuple(2 - axis % 2 for axis in range(dim)), padding=1),
    }
    return found


def outputs(coords: Tensor, relation: Relation, shape: Sequence[int] | None) -> set[tuple[int, ...]]:
    """The coordinates that a relation makes, one by one."""
    found = set()
    for item, *place in coords.tolist():
        for offset in relation.offsets:
            axes = tuple(zip(place, offset, relation.stride, strict=True))
            if relation.policy == "transposed_support":
                found.add((item, *(s * c + o for c, o, s in axes)))
            elif relation.policy == "floor_unique":
                found.add((item, *(c // s for c, _, s in axes)))
            elif all((c - o) % s == 0 for c, o, s in axes):
                found.add((item, *((c - o) // s for c, o, s in axes)))
    if shape is None or not relation.bounded:
        return found
    extent = relation.output_shape(shape)
    return {cell for cell in found if all(0 <= c < n for c, n in zip(cell[1:], extent, strict=True))}


def site_around(cloud: CoordBuffer) -> GridSpec:
    """What is known of a cloud without a spatial_shape."""
    return GridSpec((1,) * cloud.dim, None, cloud.bounds.batch, cloud.bounds)


def within(shape: Sequence[int]) -> Geometry:
    """Voxels in [0, shape), the two corners among them where an extent cuts."""
    found = Scene(len(shape), 50, 12, seed=3).coords()
    extent = torch.tensor(shape, dtype=torch.int32)
    coords = torch.cat([found[:, :1], found[:, 1:] % extent], dim=1)
    coords[0, 1:], coords[1, 1:] = 0, extent - 1
    coords = torch.unique(coords, dim=0)
    return Geometry.checked(coords[torch.randperm(len(coords), generator=torch.Generator().manual_seed(1))])


def outputs_agree(cloud: CoordBuffer, site: GridSpec, relation: Relation, ways: Sequence[type]) -> None:
    """All ways to find outputs give those of a loop, in order; with just the room that they need and with more."""
    goal = site_of(site, relation)
    want = outputs(cloud.coords[: int(cloud.count)], relation, site.spatial_shape)
    for way in ways:
        made: Outputs = way(cloud, relation, goal)
        count = int(made.count)
        assert made.count.dtype == torch.int32 and made.count.shape == (1,)
        got = made.geometry(count)
        assert got.coords.dtype == torch.int32 and got.site == goal
        assert {tuple(place) for place in got.coords.tolist()} == want, way
        assert count == len(want) <= max_outputs(cloud.capacity, relation, goal)
        assert torch.equal(morton_argsort(got.coords, Bounds.of(got.coords)), torch.arange(count)), way
        padded = made.cloud(count + 5)
        assert torch.equal(padded.coords[:count], got.coords) and bool((padded.coords[count:] == -1).all())
        assert padded.bounds == goal.bounds and padded.capacity == count + 5 and padded.status is cloud.status
        assert int(cloud.status) == 0, way


WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal")


class NoWaits(TorchDispatchMode):
    """Raises where an operator's result has a size that depends on values, or goes to Python."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{func} waits for the device"
        places = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        masked = any(i.dtype == torch.bool for i in places if i is not None)
        assert not masked, f"{func} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


def astray(dim: int, where: str) -> tuple[Tensor, Bounds]:
    """Coordinates of which row 11 lies outside the box of the others: by its batch item, below or above an axis."""
    coords = Scene(dim=dim, side=SIDES[dim]).coords()
    bounds = Bounds.of(coords)
    axis, value = {
        "batch": (0, bounds.batch),
        "negative batch": (0, -1),
        "below": (dim, bounds.low[-1] - 1),
        "above": (1, bounds.high[0] + 1),
    }[where]
    coords[11, axis] = value
    return coords, bounds
