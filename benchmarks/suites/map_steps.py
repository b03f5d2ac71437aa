"""The study `steps` of the suite `maps`: all kernel maps of a CenterPoint, from separate kernels on.

It follows figure 13 of TorchSparse (MLSys 2022): a hash table and separate kernels, then a grid, fused kernels for
output coordinates, a search without a loop over kernel offsets, and half of the offsets of submanifold maps searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times, busy, together
from benchmarks.scenes.clouds import Voxels
from benchmarks.scenes.network_layers import layers_of
from benchmarks.scenes.workloads import WORKLOADS, Workload, fresh, narrow, samples, stand_in
from benchmarks.suites import map_work
from benchmarks.suites.map_work import Mapped, Truth, Work
from benchmarks.suites.maps import ready, rows_of
from pumice.coords.buffer import CoordBuffer, offset_table
from pumice.coords.lookup import STRUCTURES, Lookup, MapSchedule, default, find, lookup_of
from pumice.coords.outputs import make_outputs, site_of
from pumice.coords.relation import Relation
from pumice.errors import OptionError

NETWORK = "centerpoint-waymo-3f"
_TINY = 150
"""Maximum voxels of a scan in a quick run."""


@dataclass(frozen=True)
class Step:
    """How maps are made. structure: of lookups where available, "" for the cost model's choice. outputs: coordinates by
    fused kernels. whole: all kernel offsets in one kernel, without a loop. mirrored: half of the offsets of submanifold
    maps. The cost model's choice also takes tables that come with output coordinates."""

    structure: str
    outputs: bool = False
    whole: bool = False
    mirrored: bool = False

    def schedule(self, cloud: CoordBuffer, relation: Relation) -> MapSchedule:
        """The options of a search; a hash table where there is no grid, and sorted keys where there is no kernel."""
        mirrored = self.mirrored and relation.policy == "same"
        for structure in (self.structure, "hash") if self.structure else ():
            wanted = MapSchedule(structure, mirrored=mirrored)
            if STRUCTURES[structure].refusal(cloud, wanted) is None:
                return wanted
        return MapSchedule("sorted") if self.structure else default(cloud)


STEPS: Mapping[str, Step] = {
    "1-hash": Step("hash"),
    "2-grid": Step("grid"),
    "3-fused-outputs": Step("grid", outputs=True),
    "4-control-logic": Step("grid", outputs=True, whole=True),
    "5-symmetry": Step("grid", outputs=True, whole=True, mirrored=True),
    "6-default": Step("", outputs=True, whole=True),
}


def steps(setup: Setup) -> Iterator[Row]:
    """The maps of CenterPoint on three frames, made in each step's way: device time of all, and wall time."""
    workload = narrow(stand_in(WORKLOADS[NETWORK])) if setup.quick else WORKLOADS[NETWORK]
    case = f"steps/{NETWORK}{'-generated' * workload.generated}"
    if not setup.wants(case):
        return
    try:
        voxels, relations = _maps_of(setup, workload)
    except OptionError as reason:
        setup.say(f"{NETWORK} is left out: {reason}")
        return
    truths = truths_of(voxels, relations)
    setup.say(f"{case}: {len(voxels)} voxels, {len(truths)} maps")
    works = [
        Work(name, partial(made, step, voxels, truths), partial(_wrong, truths=truths), False)
        for name, step in STEPS.items()
    ]
    done = {one.name: one.call for one in ready(setup, case, works)}
    for clock, times in _spent(setup, done).items():
        first = next(iter(times))
        for name, spent in times.items():
            yield from rows_of(setup, f"{case}/{name}", clock, spent, [Peer(first, times[first].median)])


def _maps_of(setup: Setup, workload: Workload) -> tuple[Voxels, list[Relation]]:
    """The voxels of a scan, and the relations of the network's distinct maps in order, each from the level before."""
    (sample,) = samples(workload, setup.device, count=1, most=_TINY if setup.quick else 0)
    net = workload.model().to(setup.device).eval()
    found = {id(met.found): met.found.relation for met in layers_of(net, fresh(sample))}
    return Voxels.of(sample.coords), list(found.values())


def truths_of(voxels: Voxels, relations: Sequence[Relation]) -> list[Truth]:
    """The maps by plain torch, one after the other."""
    found = []
    for relation in relations:
        found.append(map_work.truth_of(voxels, relation))
        voxels = found[-1].outputs
    return found


def made(step: Step, voxels: Voxels, truths: Sequence[Truth]) -> list[Mapped]:
    """The same maps in a step's way; the numbers of outputs are known."""
    cloud, site, found = voxels.cloud(), voxels.site, list[Mapped]()
    for truth in truths:
        relation, outputs, rows = truth.relation, cloud, None
        schedule = step.schedule(cloud, relation)
        if relation.policy != "same":
            made_of = make_outputs(cloud, site, relation, MapSchedule(fused=step.outputs))
            outputs, site = made_of.cloud(len(truth.outputs)), site_of(site, relation)
            rows = None if step.structure else made_of.table(len(truth.outputs))
        if rows is None:
            rows = _searched(step, lookup_of(cloud, schedule), cloud, outputs, relation)
        found.append(Mapped(rows, None, outputs, relation))
        cloud = outputs
    return found


def _searched(step: Step, lookup: Lookup, inputs: CoordBuffer, outputs: CoordBuffer, relation: Relation) -> Tensor:
    if step.whole:
        return lookup.neighbours(outputs, relation).rows
    return one_by_one(lookup, inputs, outputs, relation)


def one_by_one(lookup: Lookup, inputs: CoordBuffer, outputs: CoordBuffer, relation: Relation) -> Tensor:
    """Rows by a kernel for each kernel offset, over neighbours' coordinates that were written to memory."""
    near = outputs.coords.repeat(len(relation.offsets), 1, 1)
    stride = torch.tensor(relation.stride, dtype=torch.int32, device=near.device)
    near[:, :, 1:] = near[:, :, 1:] * stride + offset_table(relation.offsets, near.device)[:, None]
    return torch.stack([find(lookup, part, inputs.bounds) for part in near], dim=1)


def _wrong(found: Sequence[Mapped], truths: Sequence[Truth]) -> str:
    problems = (map_work.wrong_map(own, truth) for own, truth in zip(found, truths, strict=True))
    return next((f"map {n}: {problem}" for n, problem in enumerate(problems) if problem), "")


def _spent(setup: Setup, calls: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, Times]]:
    """Times by clock, then by name."""
    if not calls:
        return {}
    walls = together(list(calls.values()), setup.device, "wall", setup.seconds)
    found = {"wall": dict(zip(calls, walls, strict=True))}
    if setup.device.type == "cuda":
        found["gpu"] = {name: busy(call) for name, call in calls.items()}
    return found
