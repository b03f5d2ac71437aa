"""Kernel maps of layers: the maps that a network requested in an earlier run are built together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.coords.chain import DOWN, SAME, SIDE, UP, ChainRequest, TileRule
from pumice.coords.chain_build import compile_kernels
from pumice.lower.maps import TILE_HEIGHTS
from pumice.ops.prepare import chain_of, keep_chain
from pumice.runtime.compile import CompiledBeside
from pumice.runtime.launch import has_triton
from pumice.runtime.streams import is_capturing
from pumice.schedule.dataflow import Chosen


@dataclass(eq=False)
class AskedMaps:
    """Maps that the layers of a network requested. steps: per level, the first step to the next level; windows: per
    level, the submanifold windows (level 0: the input). beside: compiles the kernels that build the maps."""

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

    def begins_with(self, relation: Relation) -> bool:
        """True if a map with this relation was requested on the input coordinates."""
        return relation in self.windows[0] or self.steps[:1] == [relation]


_ASKED = WeakIdKeyDictionary()
"""By the weight of a network's first layer: the maps requested from there on. A map built by itself takes a sort and a
host synchronisation, about 1.2 ms, and a layer does not know which layers follow it."""


def layer_map(
    geometry: Geometry, relation: Relation, target: Geometry | None = None, weight: Tensor | None = None
) -> tuple[KernelMap, Geometry]:
    """kernel_map for a layer with the automatic dataflow. Where Triton runs, a missing map is built together, in one
    transfer, with the maps that layers requested after this one in an earlier run of the network; otherwise by itself.

    weight: the layer's, which identifies the network. Raises as kernel_map."""
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
        if known is not None and known.begins_with(relation):
            _follow(geometry, known, grad, rule)
        else:
            known = _ASKED[weight] = AskedMaps()
        geometry.asked = known, 0
    # Record only maps that coords.chain can build together with others.
    together = (relation, None) in geometry.maps or keep_chain(geometry, own)
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
    if _compiled(asked, request.compile_request, geometry.device) and keep_chain(geometry, request, wanted):
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
