"""The kernel map of a layer, found with those that its network asked for before."""

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
    """What layers asked of the coordinates of a tensor and of those made from them: the first step from each level to
    the next, and the windows of each level. beside: compiles the kernels that find all of it."""

    steps: list[Relation] = field(default_factory=list)
    windows: list[list[Relation]] = field(default_factory=lambda: [[]])
    beside: CompiledBeside = field(default_factory=CompiledBeside)

    def add(self, level: int, relation: Relation) -> int | None:
        """Remember that a map was asked for; the level of its outputs, None where that is none of these."""
        if relation.policy == "same":
            if relation not in self.windows[level] and sum(map(len, self.windows)) < SIDE:
                self.windows[level].append(relation)
            return None
        if level == len(self.steps):
            self.steps.append(relation)
            self.windows.append([])
        return level + 1 if self.steps[level] == relation else None

    def begins_with(self, relation: Relation) -> bool:
        """True if the map is one of the coordinates of the tensor itself."""
        return relation in self.windows[0] or self.steps[:1] == [relation]


_ASKED = WeakIdKeyDictionary()
"""By weight of the layer that came first: what was asked for after it. A map that is found by itself takes a sort and
a host synchronisation, some 1.2 ms, and no layer knows which others follow it."""


def layer_map(
    geometry: Geometry, relation: Relation, target: Geometry | None = None, weight: Tensor | None = None
) -> tuple[KernelMap, Geometry]:
    """kernel_map for a layer of an automatic dataflow. Where kernels run, a map that is not there is found with those
    that layers asked for after this one when its network ran before, all in one transfer, or else by itself.

    weight: the layer's, by which the network is told. Raises as kernel_map."""
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
    """The map of a layer, which is not there yet."""
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
    # What cannot be found with others is not asked for with others.
    together = (relation, None) in geometry.maps or keep_chain(geometry, own)
    found, outputs = kernel_map(geometry, relation)
    if geometry.asked is not None and together:
        asked, level = geometry.asked
        below = asked.add(level, relation)
        if below is not None:
            outputs.asked = asked, below
    return found, outputs


def _follow(geometry: Geometry, asked: AskedMaps, differentiable: bool, rule: TileRule) -> None:
    """Find all maps that were asked for before, and let the levels know of what is asked; nothing while the kernels for
    that are compiled."""
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
    """False while the kernels of a request are compiled in the background."""
    return device.type != "cuda" or asked.beside.run(request, partial(compile_kernels, request, device))


@lru_cache(maxsize=64)
def _together(
    dim: int,
    steps: tuple[Relation, ...],
    windows: tuple[tuple[Relation, ...], ...],
    differentiable: bool,
    rule: TileRule,
) -> tuple[ChainRequest, int, bool]:
    """See chain_of; transposed maps of steps as for single layers."""
    automatic, none = frozenset[Chosen | None]((None,)), frozenset[Chosen | None]()
    count = sum(map(len, windows)) + len(steps)
    turned = [automatic if _turns(step, differentiable, rule) else none for step in reversed(steps)]
    return chain_of(dim, steps, windows, (*[automatic] * count, *turned), differentiable, rule)


def _turns(step: Relation, differentiable: bool, rule: TileRule) -> bool:
    """True if the transpose of a step is laid out too: for gradients, and where it takes little, as an inverse
    convolution may follow."""
    return differentiable or len(step.offsets) <= rule.few_taps


@lru_cache(maxsize=256)
def _of_layer(relation: Relation, differentiable: bool, rule: TileRule) -> ChainRequest | None:
    """The request of one map, or None."""
    if relation.policy == "same":
        return ChainRequest(relation.dim, (), ((relation,),), ((SAME, 0, relation),), rule, differentiable)
    if relation.policy not in ("support", "floor_unique"):
        return None
    turned = ((UP, 0, relation),) if _turns(relation, differentiable, rule) else ()
    return ChainRequest(relation.dim, (relation,), (), ((DOWN, 1, relation), *turned), rule, differentiable)
