"""Geometries and kernel maps under torch.compile and torch.export, where tensors have no values and sizes are symbolic.

What depends on values (boxes, new coordinates, neighbours, pair lists) is computed by operators of coords.traced_ops
when the compiled code runs; this module makes the objects around the results. Geometries made in a trace cache their
maps as usual. Input geometries are not modified: `trace_local` copies replace them, which `alike` treats as equal."""

from __future__ import annotations

import operator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from pumice.coords.box import UNKNOWN
from pumice.coords.geometry import Geometry, TraceOrigin
from pumice.coords.grid import GridSpec, Stride
from pumice.coords.kernel_map import KernelMap
from pumice.coords.outputs import level_key
from pumice.coords.relation import Relation


def checked(coords: Tensor, stride: Stride, shape: tuple[int, ...] | None, batch_size: int | None) -> Geometry:
    """A geometry of coordinates made in the traced function, which are checked when the compiled code runs."""
    items = -1 if batch_size is None else batch_size
    found = Geometry(coords, GridSpec(stride, shape, items, UNKNOWN))
    box = torch.ops.pumice.box(coords, None if shape is None else list(shape), items, False)
    found.trail = TraceOrigin(_trace(), box=box)
    return found


def trace_local(geometry: Geometry) -> Geometry:
    """A copy of `geometry` that caches maps for this trace; `geometry` itself if this trace made it."""
    if is_local(geometry):
        return geometry
    found = Geometry(geometry.coords, _without_bounds(geometry.outline), geometry.inverse)
    found.trail = TraceOrigin(_trace(), geometry.start, geometry.steps, geometry)
    return found


def is_local(geometry: Geometry) -> bool:
    """True if this trace made the geometry."""
    return geometry.trail is not None and geometry.trail.trace == _trace()


def _trace() -> str:
    return str(id(TracingContext.try_get()))


# As torch.compiler.assume_constant_result does, which would import all of torch's compiler now.
_trace._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def kernel_map(geometry: Geometry, relation: Relation, target: Geometry | None) -> tuple[KernelMap, Geometry]:
    """As build.kernel_map, while tracing."""
    target = None if target is geometry else target
    kept = cached_map(geometry, relation, target)
    if kept is None:
        geometry = trace_local(geometry)
        kept = geometry.maps[relation, target] = _find_map(geometry, relation, target)
    found, outputs = kept
    return found, geometry if outputs is None else outputs


def cached_map(
    geometry: Geometry, relation: Relation, target: Geometry | None = None
) -> tuple[KernelMap, Geometry | None] | None:
    """Cached (map, output geometry or None for `geometry`), or None without a cached map.
    Maps of an input geometry are used only if it was prepared: compiled code guards on the cache it reads, and an
    unprepared cache differs from call to call."""
    kept = geometry.maps.get((relation, target)) if is_local(geometry) else None
    given = _given(geometry)
    return given.maps.get((relation, target)) if kept is None and given is not None else kept


def subset(geometry: Geometry, mask: Tensor) -> tuple[Geometry, Tensor]:
    """(geometry of the coordinates where `mask` is true, in (batch, Morton) order; their rows, int64)."""
    rows = torch.ops.pumice.kept(geometry.coords, mask)
    return _new_geometry(geometry.coords[rows], _without_bounds(geometry.outline)), rows


def union(one: Geometry, two: Geometry) -> tuple[Geometry, tuple[Tensor, Tensor]]:
    """(union of both coordinates, in (batch, Morton) order; the rows in it of each operand's, int64)."""
    coords, *places = torch.ops.pumice.united(one.coords, two.coords)
    first, second = one.outline, two.outline
    items = max(one.batch_size, two.batch_size) if first.batch_size >= 0 <= second.batch_size else -1
    pair = first.spatial_shape, second.spatial_shape
    shape = None if pair[0] is None or pair[1] is None else tuple(map(max, pair[0], pair[1]))
    frame = first.frame if first.frame == second.frame else None
    return _new_geometry(coords, GridSpec(first.stride, shape, items, UNKNOWN, frame)), (places[0], places[1])


def stride_of(stride: Stride, relation: Relation) -> Stride:
    """Stride of a relation's outputs, for inputs of stride `stride`."""
    finer = relation.policy == "transposed_support"
    return tuple(_scaled(s, f, finer) for s, f in zip(stride, relation.stride, strict=True))


def relation_fields(relation: Relation) -> tuple[Any, ...]:
    """A relation as operator arguments; see traced_ops.RELATION."""
    custom = None if relation.custom is None else [o for offset in relation.custom for o in offset]
    extra = None if relation.output_padding is None else list(relation.output_padding)
    four = (relation.kernel, relation.stride, relation.padding, relation.dilation)
    return (*[list(values) for values in four], relation.policy, custom, extra, relation.bounded)


def _without_bounds(site: GridSpec) -> GridSpec:
    """Metadata with bounds UNKNOWN: reading bounds would make compiled code guard on their values."""
    return GridSpec(site.stride, site.spatial_shape, site.batch_size, UNKNOWN, site.frame)


def _new_geometry(coords: Tensor, site: GridSpec) -> Geometry:
    """A geometry made in a trace that is its own root."""
    found = Geometry(coords, site)
    found.trail = TraceOrigin(_trace())
    return found


def _find_map(here: Geometry, relation: Relation, target: Geometry | None) -> tuple[KernelMap, Geometry | None]:
    if relation.policy == "same":
        return _map_between(here, here, relation), None
    if relation.policy == "given":
        return _map_between(here, here if target is None else target, relation), target
    key = level_key(relation)
    outputs = _level_of(here, key)
    if outputs is not None:
        return _map_between(here, outputs, relation), outputs
    outputs, table = _make_outputs(here, relation)
    if key:
        here.levels[key] = outputs
    numbers = here.coords.shape[0], outputs.coords.shape[0]
    if relation.policy == "transposed_support":
        return KernelMap(relation, table, numbers[1], numbers[0]).transpose(), outputs
    return KernelMap(relation, table, *numbers), outputs


def _level_of(here: Geometry, key: Any) -> Geometry | None:
    if not key:
        return None
    kept, given = here.levels.get(key), _given(here)
    return given.levels.get(key) if kept is None and given is not None else kept


def _given(geometry: Geometry) -> Geometry | None:
    """The input geometry, `geometry` or the one that this trace-local copy replaces; None unless prepared."""
    given = geometry
    if geometry.trail is not None and is_local(geometry):
        given = geometry.trail.given
    return given if given is not None and given.prepared else None


def _map_between(inputs: Geometry, outputs: Geometry, relation: Relation) -> KernelMap:
    table = torch.ops.pumice.meet(
        inputs.coords, _box(inputs), outputs.coords, _box(outputs), *relation_fields(relation)
    )
    return KernelMap(relation, table, inputs.coords.shape[0], outputs.coords.shape[0])


def _make_outputs(here: Geometry, relation: Relation) -> tuple[Geometry, Tensor]:
    """(geometry of a relation's new outputs, table of the untransposed map)."""
    shape = here.outline.spatial_shape
    bound = None if shape is None else list(shape)
    coords, box, table = torch.ops.pumice.level(here.coords, _box(here), bound, *relation_fields(relation))
    kept = None if shape is None or not relation.bounded else relation.output_shape(shape)
    site = here.outline
    site = GridSpec(stride_of(site.stride, relation), kept, site.batch_size, UNKNOWN, site.frame)
    outputs = Geometry(coords, site)
    outputs.trail = TraceOrigin(_trace(), here.start, (*here.steps, relation), box=box)
    return outputs, table


def _box(geometry: Geometry) -> Tensor:
    """The box, int64 [1 + 2D] on the CPU; see coords.traced_ops."""
    trail = geometry.trail if is_local(geometry) else None
    if trail is not None and trail.box is not None:
        return trail.box
    given = geometry if trail is None or trail.given is None else trail.given
    shape = None if given.outline.spatial_shape is None else list(given.outline.spatial_shape)
    # Compiled code guards on every number it reads: read batch_size only if needed.
    items = -1 if given.settled and shape is None else given.outline.batch_size
    box = torch.ops.pumice.box(given.coords, shape, items, given.settled)
    if trail is not None:
        trail.box = box
    return box


def _scaled(stride: int | Fraction, factor: int, finer: bool) -> int | Fraction:
    if isinstance(stride, int):
        if not finer:
            return stride * factor
        if stride % factor == 0:
            return stride // factor
        # Specialise on the value: fractions cannot be symbolic.
        stride = operator.index(stride)
    share = Fraction(stride) / factor if finer else Fraction(stride) * factor
    return share.numerator if share.denominator == 1 else share
