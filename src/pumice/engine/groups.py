"""Groups of layers that share kernel maps, found by running the network.

Layers over one map or its transpose (the inverse of a strided convolution) form a group; a layer that is called on
several maps merges their groups. Only convolutions of pumice.nn have a dataflow to choose, not pools or direct calls of
pumice.ops.conv.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from pumice.coords import Geometry, KernelMap
from pumice.engine.subject import TuningSubject, fresh
from pumice.engine.trace import Product, trace
from pumice.lower import maps
from pumice.nn.conv import Convolution
from pumice.ops import Epilogue, SparseTensor
from pumice.ops.conv import Target
from pumice.schedule.predict import LayerWork, MapStats

LATENCY_BOUND_ROWS = 512  # Map sizes below this many rows count as equal: such kernels are latency-bound


@dataclass(frozen=True)
class EpilogueSpec:
    """An epilogue without its values: the dtypes of its tensors by name, and its options."""

    tensors: tuple[tuple[str, torch.dtype], ...] = ()
    activation: str = ""
    dtype: torch.dtype | None = None
    eps: float = 0.0

    @staticmethod
    def of(epilogue: Epilogue) -> EpilogueSpec:
        held = tuple((name.lstrip("*"), x.dtype) for name, x in epilogue.operands.items())
        return EpilogueSpec(held, epilogue.activation, epilogue.dtype, epilogue.eps)

    def like(self, y: Tensor) -> Epilogue:
        """An epilogue of this kind for a result y [N, C_out], filled with ones."""
        rows = {"residual": y.shape}
        held: dict[str, Any] = {n: y.new_ones(rows.get(n, y.shape[1:]), dtype=dtype) for n, dtype in self.tensors}
        return Epilogue(activation=self.activation, dtype=self.dtype, eps=self.eps, **held)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Recorded call of a layer. geometry, dtype: of its input. found: its kernel map. epilogue: fused by the
    compiled program. Features are not recorded, to save memory."""

    name: str
    layer: Convolution
    geometry: Geometry
    dtype: torch.dtype
    found: KernelMap
    epilogue: EpilogueSpec | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the multiplication."""
        return _cast(self.dtype, self.geometry.device.type)

    @property
    def map_key(self) -> int:
        """Identity of the map, equal for its transpose."""
        return id(self.found.table)


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers that share a dataflow.

    name: describes their map: window, stride, and stride of the level. layers: by name, in the order of their first
    calls. calls: those in the first scene with any. works: LayerWork of the layers, by scene.
    """

    name: str
    layers: Mapping[str, Convolution]
    calls: tuple[LayerCall, ...]
    works: tuple[tuple[LayerWork, ...], ...]

    @property
    def rows(self) -> float:
        """Rows of the map's coarser side, mean over scenes."""
        return fmean(min(works[0].forward_map.outputs, works[0].forward_map.inputs) for works in self.works)

    @property
    def pairs(self) -> float:
        """Pairs of the map, mean over scenes."""
        return fmean(works[0].forward_map.pairs for works in self.works)

    @property
    def workload(self) -> tuple[float, float]:
        """(log2 of rows, log2 of pairs per row), with small maps clamped to equal values."""
        rows, pairs = max(LATENCY_BOUND_ROWS, self.rows), max(8 * LATENCY_BOUND_ROWS, self.pairs)
        return math.log2(rows), math.log2(pairs / rows)

    def __str__(self) -> str:
        count = len(self.layers)
        return (
            f"{self.name}: {count} layer{'s' * (count != 1)}, {self.rows:.0f} rows, "
            f"{self.pairs / max(1.0, self.rows):.1f} pairs a row"
        )


@dataclass(frozen=True, eq=False)
class Observed:
    """Groups of a network, and notes on what is not tuned."""

    groups: tuple[LayerGroup, ...]
    notes: tuple[str, ...]


def observe(tuned_model: TuningSubject, excluded: Iterable[str] = ()) -> Observed:
    """Run the network on each scene and record which layer reads which map. excluded: layers not to be tuned. The
    caller restores modes, buffers and random states."""
    return observe_calls(tuned_model, excluded)[0]


def observe_calls(tuned_model: TuningSubject, excluded: Iterable[str] = ()) -> tuple[Observed, list[list[LayerCall]]]:
    """As `observe`, with the calls of the layers to be tuned by scene, which hold the maps of all scenes."""
    excluded, scenes, notes = set(excluded), [], []
    for number, x in enumerate(tuned_model.scenes):
        x = fresh(x)
        with torch.no_grad(), recording_calls(tuned_model.model, x) as calls:
            tuned_model.model(x)
        scenes.append(calls)
        if not number:
            notes += _unread(x.geometry, calls)
    notes += _idle(tuned_model.model, scenes, excluded)
    tuned = [[call for call in calls if call.name not in excluded] for calls in scenes]
    return Observed(tuple(_groups(tuned, tuned_model)), tuple(notes)), tuned


@contextmanager
def recording_calls(model: nn.Module, x: SparseTensor, arithmetic: bool = True) -> Iterator[list[LayerCall]]:
    """Record every convolution layer call of model(x) in the yielded list, with the epilogue that the compiled program
    fuses. arithmetic: False returns zeros without launching convolution kernels."""
    calls: list[LayerCall] = []
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Convolution)}
    behind = epilogues_of(model, x) if _is_fused(x) else {}

    def called(name: str, x: SparseTensor, target: Target = None) -> SparseTensor:
        layer = layers[name]
        found, outputs = layer.map_of(x, target)
        kind = _cast(x.dtype, x.device.type)
        spec = behind[layer](kind) if layer in behind else None
        calls.append(LayerCall(name, layer, x.geometry, x.dtype, found, spec))
        if arithmetic:
            return type(layer).convolve(layer, x, target)
        return SparseTensor(x.feats.new_zeros(found.num_outputs, layer.out_channels, dtype=kind), outputs)

    for name, layer in layers.items():
        layer.convolve = partial(called, name)
    try:
        yield calls
    finally:
        for layer in layers.values():
            del layer.convolve


def epilogues_of(model: nn.Module, x: SparseTensor) -> Mapping[nn.Module, Callable[[torch.dtype], EpilogueSpec]]:
    """By convolution: the epilogue that the compiled program fuses into the convolution's first call, as a function of
    the features' dtype."""
    traced = trace(model, (x,), {}, {})
    steps = [] if isinstance(traced, str) else traced.steps
    found: dict[nn.Module, Callable[[torch.dtype], EpilogueSpec]] = {}
    for step in steps:
        if isinstance(step, Product) and step.layer is not None and (step.norm or step.residual or step.activation):
            found.setdefault(step.layer, partial(_spec_of, step))
    return found


def _spec_of(step: Product, dtype: torch.dtype) -> EpilogueSpec:
    residual = None if step.residual is None else torch.empty(0, dtype=dtype)
    if step.norm is None:
        return EpilogueSpec.of(Epilogue(residual=residual, activation=step.activation))
    kept, own = step.norm._buffers, step.norm._parameters
    vectors = kept["running_mean"], kept["running_var"], own["weight"], own["bias"]
    return EpilogueSpec.of(Epilogue.of_norm(vectors, step.norm.eps, residual, step.activation))


def _is_fused(x: SparseTensor) -> bool:
    """True if a compiled program fuses epilogues: on a GPU only."""
    return x.device.type == "cuda"


def _cast(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Dtype of the multiplication for operands of a dtype on a device type, under the current autocast."""
    cast = torch.is_autocast_enabled(kind) and dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else dtype


def _groups(scenes: Sequence[Sequence[LayerCall]], tuned_model: TuningSubject) -> Iterator[LayerGroup]:
    """Groups of layers connected by maps in any scene (union-find)."""
    leaders: dict[Any, Any] = {}

    def leader(one: Any) -> Any:
        while (above := leaders.setdefault(one, one)) != one:
            one = above
        return one

    for number, calls in enumerate(scenes):
        for call in calls:
            leaders[leader((number, call.map_key))] = leader(call.name)
    members: dict[Any, dict[str, Convolution]] = {}
    for call in (call for calls in scenes for call in calls):
        members.setdefault(leader(call.name), {}).setdefault(call.name, call.layer)
    names: dict[str, int] = {}
    for layers in members.values():
        own = [[call for call in calls if call.name in layers] for calls in scenes]
        works = tuple(tuple(_works(calls)) for calls in own if calls)
        name = _name(next(calls[0] for calls in own if calls))
        names[name] = names.get(name, 0) + 1
        known = f"{name} ({names[name]})" if names[name] > 1 else name
        yield LayerGroup(known, layers, tuple(next(calls for calls in own if calls)), works)


def _works(calls: Sequence[LayerCall]) -> Iterator[LayerWork]:
    sides: dict[tuple[int, bool], MapStats] = {}
    for call in calls:
        found, size = call.found, call.compute_dtype.itemsize
        both = []
        for one in (found, found.transpose()):
            key = (call.map_key, one.flipped)
            forms = maps.tile_forms(one) if one.device.type == "cuda" else ()
            both.append(sides.get(key) or sides.setdefault(key, map_stats(one, forms)))
        yield LayerWork(both[0], both[1], (call.layer.in_channels, call.layer.out_channels), call.layer.groups, size)


def map_stats(found: KernelMap, forms: Sequence[str] = ()) -> MapStats:
    """Statistics of a map, with the entries of these forms."""
    counts, entries = maps.read_sizes(found, forms)
    return MapStats(found.num_inputs, found.num_outputs, counts, entries, maps.tile_rows_for(found.num_outputs))


def _name(call: LayerCall) -> str:
    """Name of a map by its first call: window, stride, and stride of its finer level."""
    relation, level = call.found.relation, call.geometry.stride
    if call.found.flipped:
        level = tuple(Fraction(s) / f for s, f in zip(level, relation.stride, strict=True))
    window = f"{len(relation.offsets)} offsets" if relation.custom is not None else f"k{_axes(relation.kernel)}"
    stride = "" if set(relation.stride) == {1} else f" s{_axes(relation.stride)}"
    spread = "" if set(relation.dilation) == {1} else f" d{_axes(relation.dilation)}"
    return f"{window}{stride}{spread} at {_axes(level)}"


def _axes(values: Sequence[Any]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def _unread(geometry: Geometry, calls: Sequence[LayerCall]) -> Iterator[str]:
    """Note on kernel maps that no convolution layer reads."""
    read = {call.map_key for call in calls}
    others = [found for found in maps_below(geometry, set()) if id(found.table) not in read]
    if others:
        names = ", ".join(sorted({f"k{_axes(found.relation.kernel)}" for found in others}))
        yield (
            f"{len(others)} of the maps ({names}) are read by no convolution layer of pumice.nn: pools and direct "
            "calls of pumice.ops.conv are not tuned"
        )


def maps_below(geometry: Geometry, seen: set[Geometry]) -> Iterator[KernelMap]:
    """All maps reachable from a geometry."""
    seen.add(geometry)
    for found, outputs in geometry.maps.values():
        yield found
        if outputs is not None and outputs not in seen:
            yield from maps_below(outputs, seen)


def _idle(model: nn.Module, scenes: Sequence[Sequence[LayerCall]], left: set[str]) -> Iterator[str]:
    """Notes on layers that are not tuned."""
    ran = {call.name for calls in scenes for call in calls}
    idle = [name for name, layer in model.named_modules() if isinstance(layer, Convolution) and name not in ran]
    if idle:
        yield f"{_some(idle)} did not run on these samples"
    if left:
        yield f"{_some(sorted(left))} keep the dataflow that was set by hand"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} layer{'s' * (len(names) != 1)} ({shown}{', ...' if len(names) > 3 else ''})"
