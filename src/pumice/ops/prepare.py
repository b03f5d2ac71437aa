"""Build all kernel maps of a network before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pumice.coords import Geometry, KernelMap, Relation, check_steps, kernel_map, on_side_stream, pyramid, trace_local
from pumice.coords.chain import DOWN, SAME, SIDE, UP, ChainRequest, TileRule, is_supported, refusal, request_refusal
from pumice.coords.chain_build import NO_TILES, build_chain, build_in_buffer, compile_kernels
from pumice.errors import OptionError, ShapeError
from pumice.lower.dataflow import materialize
from pumice.lower.maps import TILE_HEIGHTS, keep_tiles
from pumice.ops.tensor import SparseTensor, not_sparse
from pumice.runtime.compile import CompiledBeside
from pumice.runtime.launch import has_triton
from pumice.runtime.streams import is_capturing
from pumice.schedule.dataflow import Chosen, Dataflow, Dataflows, chosen

T = TypeVar("T")


class DataflowLayer(Protocol):
    """A layer with a dataflow, such as a convolution."""

    dataflow: str | Dataflow | Dataflows | None


@dataclass(frozen=True)
class MapConsumers:
    """The layers that read each kernel map of a network; a map is laid out only for their dataflows.

    steps: per step, its strided layers. back: per step, the inverse layers over its map. same: per level and window,
    the submanifold layers.
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
    """Build the kernel maps of all levels of a network; returns the tensor to continue with, x itself when eager.

    steps: the relation from each level to the next coarser one, finest first. same: per level, from x's on, the
    relations that keep its coordinates (submanifold windows). consumers: the layers that read each map, which is laid
    out for their dataflows; None: for the automatic dataflow, transposed maps of the steps included. On a
    GPU this takes one host synchronisation if steps are strided windows without dilation, windows have at most 31
    kernel offsets and layers an automatic dataflow (coords.chain); otherwise two, for the voxel counts and for the
    layout sizes. Layers over these maps then need none.

    Example: the nine maps of a MinkUNet

        x.prepare([Relation.of(3, 2, stride=2)] * 4, [[Relation.of(3, 3)]] * 5)

    Raises as kernel_map does, GeometryError for a step that makes no coordinates, OptionError for values that are not
    Relations, and ShapeError if `same` has too many levels or `consumers` does not match the maps.
    While torch.compile traces, maps are built on first use and kept by the returned tensor, not by x's geometry.
    """
    if not all(isinstance(step, Relation) for step in _listed(steps)):
        raise OptionError(f"steps takes a list of Relations, found {steps!r}")
    if not all(isinstance(window, Relation) for windows in _listed(same) for window in _listed(windows)):
        raise OptionError(f"same takes a list of Relations for each level, found {same!r}")
    if len(same) > len(steps) + 1:
        raise ShapeError(f"same has {len(same)} levels, expected at most {len(steps) + 1} for {len(steps)} steps")
    if consumers is not None and not isinstance(consumers, MapConsumers):
        raise OptionError(f"consumers takes a pumice.ops.MapConsumers, found {type(consumers).__name__}")
    if torch.compiler.is_compiling():
        return SparseTensor(x.feats, trace_local(x.geometry))
    check_steps(steps)
    requested_maps(steps, same, consumers).prepare(x.geometry)
    return x


def requested_maps(
    steps: Sequence[Relation], same: Sequence[Sequence[Relation]], consumers: MapConsumers | None = None
) -> RequestedMaps:
    """The RequestedMaps of `prepare_levels`. Raises ShapeError if `consumers` does not match the maps."""
    flows = None if consumers is None else _flows_over(steps, same, consumers)
    return _requested(tuple(steps), tuple(map(tuple, same)), flows)


@dataclass(frozen=True, eq=False)
class RequestedMaps:
    """Requested maps with the dataflows of their layers; flows None: automatic, with transposed maps."""

    steps: tuple[Relation, ...]
    same: tuple[tuple[Relation, ...], ...]
    flows: tuple[frozenset[Chosen | None], ...] | None
    _chains: dict[Any, tuple[ChainRequest, int, bool]] = field(default_factory=dict)

    def prepare(self, geometry: Geometry, meanwhile: Callable[[], object] | None = None) -> None:
        """Build all maps, unless built before. meanwhile: see build_chain; not called if another method builds them."""
        differentiable = torch.is_grad_enabled()
        if geometry.buffered is not None:
            self.build_in_buffers(geometry, differentiable)
        elif (self, differentiable) not in geometry.prepared_requests:
            if not self.build_chain(geometry, meanwhile):
                self.build(geometry)
            geometry.prepared_requests.add((self, differentiable))

    def maps(self, geometry: Geometry) -> Iterator[tuple[KernelMap, Iterable[Chosen | None]]]:
        """(map, dataflows), built lazily."""
        flows = repeat((None,)) if self.flows is None else self.flows
        return zip(_maps(geometry, self.steps, self.same), flows)  # noqa: B905  (flows may go on)

    def build_chain(self, geometry: Geometry, meanwhile: Callable[[], object] | None = None) -> bool:
        """Build all maps, those that coords.chain supports in one transfer; False without Triton, in graph capture, or
        if it does not support the steps."""
        if not has_triton(geometry.coords) or is_capturing(geometry.device):
            return False
        facts = geometry.dim, torch.is_grad_enabled(), TILE_HEIGHTS.rule()
        known = self._chains.get(facts)
        if known is None:
            dim, differentiable, rule = facts
            known = self._chains[facts] = chain_of(dim, self.steps, self.same, self.flows, differentiable, rule)
        request, wanted, complete = known
        if not keep_chain(geometry, request, wanted, meanwhile):
            return False
        if not complete:
            self.build(geometry)
        return True

    def build(self, geometry: Geometry) -> None:
        """Build all maps with one transfer for the voxel counts and one for the layout sizes, where any are missing."""
        pyramid(geometry, self.steps)
        found = list(self.maps(geometry))
        if geometry.device.type == "cuda":
            materialize(found, torch.is_grad_enabled())

    def build_in_buffers(self, geometry: Geometry, differentiable: bool) -> None:
        """Build maps of padded buffers; on a GPU each is laid out while the next is built."""
        with on_side_stream(geometry) as publish:
            windows = tuple(tuple(window for window in each if is_supported(window)) for each in self.same)
            build_in_buffer(geometry, ChainRequest(geometry.dim, self.steps, windows, (), NO_TILES))
            for one, flows in self.maps(geometry):
                publish(one)
                if geometry.device.type == "cuda":
                    materialize([(one, flows)], differentiable)


_requested = lru_cache(maxsize=64)(RequestedMaps)


def keep_chain(
    geometry: Geometry, request: ChainRequest, wanted: int | None = None, meanwhile: Callable[[], object] | None = None
) -> bool:
    """Build the maps of a request together, and cache the tile layouts of the first `wanted` (None: all) for layers;
    False if coords.chain does not support them. Raises as build_chain."""
    found = None if refusal(geometry, request) is not None else build_chain(geometry, request, meanwhile)
    for one in (found or ())[:wanted]:
        keep_tiles(one)
    return found is not None


def chain_of(
    dim: int,
    steps: tuple[Relation, ...],
    same: tuple[tuple[Relation, ...], ...],
    flows: tuple[frozenset[Chosen | None], ...] | None,
    differentiable: bool,
    rule: TileRule,
) -> tuple[ChainRequest, int, bool]:
    """(request, wanted, complete): the chain request; how many of its tiled maps, before the transposes for gradients,
    are read by layers with the automatic dataflow; True if the request covers all that layers read."""
    wanted = _by_need(
        [[(SAME, level, window) for window in windows] for level, windows in enumerate(same)],
        [(DOWN, level + 1, step) for level, step in enumerate(steps)],
        [(UP, level, step) for level, step in enumerate(steps)],
    )
    automatic = frozenset((None,))
    pairs = [(place, automatic if flows is None else flows[n]) for n, place in enumerate(wanted)]
    fits = [place[0] != SAME or is_supported(place[2]) for place, _ in pairs]
    complete = all(fits) and all(over <= automatic for _, over in pairs)
    # coords.chain builds no transposes of asymmetric windows.
    complete &= not differentiable or all(kind or relation.mirrored for (kind, _, relation), _ in pairs)
    asked = dict.fromkeys(place for (place, over), there in zip(pairs, fits, strict=True) if there and None in over)
    turned = {(UP, level - 1, step) if kind == DOWN else (DOWN, level + 1, step) for kind, level, step in asked if kind}
    tiled = dict.fromkeys((*asked, *sorted(turned, key=lambda place: place[:2]) * differentiable))
    windows = tuple(tuple(window for window in each if is_supported(window)) for each in same)
    return ChainRequest(dim, steps, windows, tuple(tiled), rule, differentiable), len(asked), complete


def _flows_over(
    steps: Sequence[Relation], same: Sequence[Sequence[Relation]], consumers: MapConsumers
) -> tuple[frozenset[Chosen | None], ...]:
    over = list(_by_need(consumers.same, consumers.steps, consumers.back))
    flat, count = sum(map(len, same)), len(steps)
    if len(over) != flat + 2 * count:
        raise ShapeError(f"consumers has {len(over)} maps, expected {count} down, {count} back, {flat} same")
    return tuple(map(_flows, over))


def _by_need(same: Sequence[Sequence[T]], down: Sequence[T], back: Sequence[T]) -> Iterator[T]:
    """The values in the order in which an encoder-decoder uses them."""
    for level in range(max(len(same), len(down))):
        yield from same[level] if level < len(same) else ()
        yield from down[level : level + 1]
    yield from reversed(back)


def _maps(geometry: Geometry, steps: Sequence[Relation], same: Sequence[Sequence[Relation]]) -> Iterator[KernelMap]:
    """The maps in the order of _by_need, built lazily."""
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
    """The values if they are a sequence, else (None,), which fails the check of its entries."""
    return values if isinstance(values, Sequence) else (None,)


def prepare(model: nn.Module, x: SparseTensor) -> SparseTensor:
    """Build every kernel map that `model` uses on x's coordinates, without arithmetic; returns x.

    The model runs once on meta features. x's geometry keeps the maps, so that later passes need not build them, and
    compiled code specialises on them: for coordinates that are used repeatedly. On other coordinates, compiled code
    builds maps itself, for any sizes.
    Raises OptionError if model is not a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"prepare takes a torch.nn.Module, found {type(model).__name__}")
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, "prepare")
    shadow = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    with torch.no_grad():
        torch.func.functional_call(model, shadow, (x.replace(torch.empty_like(x.feats, device="meta")),))
    _mark(x.geometry)
    return x


def _mark(geometry: Geometry) -> None:
    """Let compiled code rely on the maps of these coordinates, and of those derived from them."""
    if not geometry.prepared:
        geometry.prepared = True
        for _, outputs in geometry.maps.values():
            _mark(geometry if outputs is None else outputs)


@dataclass(eq=False)
class AskedMaps:
    """Maps that the layers of a network requested. first: the relation of the first one; steps: per level, the first
    step to the next level; windows: per level, the submanifold windows (level 0: the input). beside: compiles the
    kernels that build the maps."""

    first: Relation
    steps: list[Relation] = field(default_factory=list)
    windows: list[list[Relation]] = field(default_factory=lambda: [[]])
    beside: CompiledBeside = field(default_factory=CompiledBeside)

    def add(self, level: int, relation: Relation) -> int | None:
        """Record a requested map. Returns the next level if the map is the recorded step to it, else None."""
        if relation.policy == "same":
            if relation not in self.windows[level] and sum(map(len, self.windows)) < SIDE:
                self.windows[level].append(relation)
            return None
        if level == len(self.steps):
            self.steps.append(relation)
            self.windows.append([])
        return level + 1 if self.steps[level] == relation else None


_ASKED = WeakIdKeyDictionary()
"""By the weight of a network's first layer: the maps requested from there on. A map built by itself takes a sort and a
host synchronisation, about 1.2 ms, and a layer does not know which layers follow it."""


def layer_map(
    geometry: Geometry, relation: Relation, target: Geometry | None = None, weight: Tensor | None = None
) -> tuple[KernelMap, Geometry]:
    """kernel_map for a pool, or for a layer with the automatic dataflow. Where Triton runs, a missing map is built
    together, in one transfer, with the maps that layers requested after this one in an earlier run of the network;
    otherwise by itself.

    weight: the layer's, which identifies the network; None for a pool, which reads no tiles. Raises as kernel_map."""
    if target is None and isinstance(geometry, Geometry) and not torch.compiler.is_compiling():
        found = _kept(geometry, relation)
        if found is not None:
            return found
        if geometry.buffered is None and has_triton(geometry.coords) and not is_capturing(geometry.device):
            return _found(geometry, relation, weight)
    return kernel_map(geometry, relation, target)


def _kept(geometry: Geometry, relation: Relation) -> tuple[KernelMap, Geometry] | None:
    kept = geometry.maps.get((relation, None))
    if kept is None:
        return None
    found, outputs = kept
    if outputs is None:
        return found, geometry
    outputs.require_unwritten()
    return found, outputs


def _found(geometry: Geometry, relation: Relation, weight: Tensor | None) -> tuple[KernelMap, Geometry]:
    """Build a missing map, together with those that an earlier run of the network requested, if any."""
    grad, rule = torch.is_grad_enabled(), TILE_HEIGHTS.rule()
    own = _of_layer(relation, grad, rule)
    if own is None:
        return kernel_map(geometry, relation)
    if geometry.asked is None and weight is not None and not geometry.maps and geometry.parent is None:
        known = _ASKED.get(weight)
        if known is not None and known.first == relation:
            _follow(geometry, known, grad, rule)
        else:
            known = _ASKED[weight] = AskedMaps(relation)
        geometry.asked = known, 0
    # Record only maps that coords.chain can build together with others.
    together = (relation, None) in geometry.maps or (
        request_refusal(own) is None if weight is None else keep_chain(geometry, own)
    )
    found, outputs = kernel_map(geometry, relation)
    if geometry.asked is not None and together:
        asked, level = geometry.asked
        below = asked.add(level, relation)
        if below is not None:
            outputs.asked = asked, below
    return found, outputs


def _follow(geometry: Geometry, asked: AskedMaps, differentiable: bool, rule: TileRule) -> None:
    """Build all maps of `asked` together and set `asked` on their levels; no effect while the kernels for that
    compile."""
    steps, windows = tuple(asked.steps), tuple(map(tuple, asked.windows))
    request, wanted, _ = _together(geometry.dim, steps, windows, differentiable, rule)
    if request_refusal(request) is not None or not _compiled(asked, request.compile_request, geometry.device):
        return
    if keep_chain(geometry, request, wanted):
        for level, step in enumerate(steps, 1):
            kept = geometry.maps.get((step, None))
            if kept is None or kept[1] is None:
                break
            geometry = kept[1]
            geometry.asked = asked, level


def _compiled(asked: AskedMaps, request: ChainRequest, device: torch.device) -> bool:
    """True if the kernels that build a request are compiled; otherwise they compile in the background."""
    return device.type != "cuda" or asked.beside.run(request, partial(compile_kernels, request, device))


@lru_cache(maxsize=64)
def _together(
    dim: int,
    steps: tuple[Relation, ...],
    windows: tuple[tuple[Relation, ...], ...],
    differentiable: bool,
    rule: TileRule,
) -> tuple[ChainRequest, int, bool]:
    """chain_of for the automatic dataflow, with the transposed steps that single layers would build."""
    automatic, none = frozenset[Chosen | None]((None,)), frozenset[Chosen | None]()
    count = sum(map(len, windows)) + len(steps)
    turned = [automatic if _turns(step, differentiable, rule) else none for step in reversed(steps)]
    return chain_of(dim, steps, windows, (*[automatic] * count, *turned), differentiable, rule)


def _turns(step: Relation, differentiable: bool, rule: TileRule) -> bool:
    """True if the transposed step is laid out too: for gradients, or if small, as an inverse convolution may follow."""
    return differentiable or len(step.offsets) <= rule.few_taps


@lru_cache(maxsize=256)
def _of_layer(relation: Relation, differentiable: bool, rule: TileRule) -> ChainRequest | None:
    """The request of a single map; None for relations that coords.chain does not support."""
    if relation.policy == "same":
        return ChainRequest(relation.dim, (), ((relation,),), ((SAME, 0, relation),), rule, differentiable)
    if relation.policy not in ("support", "floor_unique"):
        return None
    turned = ((UP, 0, relation),) if _turns(relation, differentiable, rule) else ()
    return ChainRequest(relation.dim, (relation,), (), ((DOWN, 1, relation), *turned), rule, differentiable)
