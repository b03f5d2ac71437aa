"""Finding all kernel maps of a network before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from pumice.coords import Geometry, KernelMap, Relation, check_steps, kernel_map, on_side_stream, pyramid, trace_local
from pumice.errors import OptionError, ShapeError
from pumice.lower.dataflow import materialize
from pumice.ops.recorded import Asked, by_graph
from pumice.ops.tensor import SparseTensor
from pumice.schedule.dataflow import Chosen, Dataflow, Dataflows, chosen

T = TypeVar("T")


class DataflowLayer(Protocol):
    """What has a dataflow, as the convolutions of pumice.nn do."""

    dataflow: str | Dataflow | Dataflows | None


@dataclass(frozen=True)
class MapConsumers:
    """The layers over the maps of a pyramid, so that these are laid out as they will be read and in no other way.

    steps: of each step the layers that go down. back: of each step those that go back up over its map. same: of each
    level, and of each of its windows, those that keep the coordinates.
    """

    steps: Sequence[Sequence[DataflowLayer]]
    back: Sequence[Sequence[DataflowLayer]]
    same: Sequence[Sequence[Sequence[DataflowLayer]]]


def prepare_levels(
    x: SparseTensor,
    steps: Sequence[Relation],
    same: Sequence[Sequence[Relation]] = (),
    consumers: MapConsumers | None = None,
) -> SparseTensor:
    """Find the maps of a whole network at once: the levels that `steps` make one from the other, finest first.

    same: for each level, from this one on, the relations that keep its coordinates (submanifold windows). On a
    GPU the numbers of voxels of all levels are read in one transfer, and the sizes of what convolutions read of
    all maps in another; layers that use these maps then wait for nothing. consumers: the layers over the maps
    (pumice.ops.MapConsumers), so that each is laid out for the dataflows of its layers; without, as for layers of no
    named dataflow, and also the other way round, for those that lead back over a step. Returns the tensor to go on
    with: itself.

    Example: the nine maps of a MinkUNet

        x.prepare([Relation.of(3, 2, stride=2)] * 4, [[Relation.of(3, 3)]] * 5)

    Raises what kernel_map raises, GeometryError for a step that makes no coordinates, OptionError for what is no
    Relation, and ShapeError for windows of more levels than there are and for users of other maps than these.
    While torch.compile traces, maps are found where they are needed, and the tensor that is returned keeps them:
    it stands in the place of this one, whose geometry compiled code leaves as it is.
    """
    if not all(isinstance(step, Relation) for step in _listed(steps)):
        raise OptionError(f"steps takes a list of Relations, found {steps!r}")
    if not all(isinstance(window, Relation) for windows in _listed(same) for window in _listed(windows)):
        raise OptionError(f"same takes a list of Relations for each level, found {same!r}")
    if len(same) > len(steps) + 1:
        raise ShapeError(f"windows are given for {len(same)} levels, {len(steps)} steps lead to {len(steps) + 1}")
    if consumers is not None and not isinstance(consumers, MapConsumers):
        raise OptionError(f"consumers takes a pumice.ops.MapConsumers, found {type(consumers).__name__}")
    if torch.compiler.is_compiling():
        return SparseTensor(x.feats, trace_local(x.geometry))
    check_steps(steps)
    wanted = _Wanted(
        tuple(steps), tuple(map(tuple, same)), None if consumers is None else _flows_over(steps, same, consumers)
    )
    geometry, asked = x.geometry, wanted.asked()
    if geometry.buffered is not None:
        wanted.find(geometry, asked.differentiable, geometry.device.type == "cuda")
    elif asked.key not in geometry.asked:
        if not by_graph(geometry, asked):
            wanted.find_together(geometry)
        geometry.asked.add(asked.key)
    return x


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Maps, and in which dataflows each is read; flows: None as the planner picks, both ways."""

    steps: tuple[Relation, ...]
    same: tuple[tuple[Relation, ...], ...]
    flows: tuple[frozenset[Chosen | None], ...] | None

    def maps(self, geometry: Geometry) -> Iterator[tuple[KernelMap, Iterable[Chosen | None]]]:
        """Each found when it is asked for."""
        flows = repeat((None,)) if self.flows is None else self.flows
        return zip(_maps(geometry, self.steps, self.same), flows)  # noqa: B905  (flows may go on)

    def find_together(self, geometry: Geometry) -> None:
        """All levels are counted in one transfer, and what is laid out in another."""
        pyramid(geometry, self.steps)
        found = list(self.maps(geometry))
        if geometry.device.type == "cuda":
            materialize(found, torch.is_grad_enabled())

    def find(self, geometry: Geometry, differentiable: bool, laid: bool = True) -> list[KernelMap]:
        """In buffers nothing is read: each is laid out, if it is to be, while the next is found. Those that are read as
        the planner picks."""
        found = []
        with on_side_stream(geometry) as told:
            for one, flows in self.maps(geometry):
                told(one)
                if laid:
                    materialize([(one, flows)], differentiable)
                if None in flows:
                    found.append(one)
        return found

    def asked(self) -> Asked:
        """As graphs are asked for it."""
        differentiable = torch.is_grad_enabled()
        # Where a graph is recorded, inference mode is left, and gradients are enabled.
        find = partial(self.find, differentiable=differentiable)
        return Asked((self.steps, self.same, self.flows, differentiable), find, differentiable)


def _flows_over(
    steps: Sequence[Relation], same: Sequence[Sequence[Relation]], consumers: MapConsumers
) -> tuple[frozenset[Chosen | None], ...]:
    over = list(_by_need(consumers.same, consumers.steps, consumers.back))
    flat, count = sum(map(len, same)), len(steps)
    if len(over) != flat + 2 * count:
        raise ShapeError(f"users are told of {len(over)} maps, there are {count} down, as many back, {flat} same")
    return tuple(map(_flows, over))


def _by_need(same: Sequence[Sequence[T]], down: Sequence[T], back: Sequence[T]) -> Iterator[T]:
    """In the order in which a network that goes down and back up comes to them."""
    for level in range(max(len(same), len(down))):
        yield from same[level] if level < len(same) else ()
        yield from down[level : level + 1]
    yield from reversed(back)


def _maps(geometry: Geometry, steps: Sequence[Relation], same: Sequence[Sequence[Relation]]) -> Iterator[KernelMap]:
    """The maps in that order, each found when it is asked for."""
    down: list[KernelMap] = []
    for level in range(max(len(same), len(steps))):
        for window in same[level] if level < len(same) else ():
            yield kernel_map(geometry, window)[0]
        if level < len(steps):
            found, geometry = kernel_map(geometry, steps[level])
            down.append(found)
            yield found
    for found in reversed(down):
        yield found.transpose()


def _flows(layers: Iterable[DataflowLayer]) -> frozenset[Chosen | None]:
    return frozenset(None if (flow := layer.dataflow) is None else chosen(flow) for layer in layers)


def _listed(values: Any) -> Sequence[Any]:
    """Itself if it is a sequence, else one entry that is none of those wanted."""
    return values if isinstance(values, Sequence) else (None,)


def prepare(model: nn.Module, x: SparseTensor) -> SparseTensor:
    """Find every kernel map that `model` will ask for on x's coordinates, without any arithmetic; returns x.

    The model runs once on features without values (torch's meta device), so that a later pass does not wait for maps.
    The maps are kept by x's geometry, and compiled code relies on them from then on: for coordinates that come again
    and again. For others it finds maps by itself, and is not bound to the sizes of these.

    Raises OptionError for a model that has no module form.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"prepare takes a torch.nn.Module, found {type(model).__name__}")
    shadow = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    with torch.no_grad():
        torch.func.functional_call(model, shadow, (x.replace(torch.empty_like(x.feats, device="meta")),))
    _mark(x.geometry)
    return x


def _mark(geometry: Geometry) -> None:
    """Compiled code is to rely on the maps of these coordinates, and of those that they lead to."""
    if not geometry.prepared:
        geometry.prepared = True
        for _, outputs in geometry.maps.values():
            _mark(geometry if outputs is None else outputs)
