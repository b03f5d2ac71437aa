"""Build the kernel map and the output coordinates of a relation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from pumice.coords import tracing as tracing_module
from pumice.coords.buffer import CoordBuffer
from pumice.coords.chain_build import build_one_in_buffer, map_between
from pumice.coords.geometry import Geometry, alike, described
from pumice.coords.kernel_map import KernelMap
from pumice.coords.lookup import MapSchedule, Neighbours
from pumice.coords.outputs import Outputs, TorchOutputs, level_key, make_outputs, max_outputs, read_counts, site_of
from pumice.coords.relation import Relation
from pumice.errors import DeviceError, GeometryError, OptionError, ShapeError
from pumice.runtime.launch import has_triton, outside_inference_mode
from pumice.runtime.streams import MAP_STREAM_PRIORITY, record_event

_GROWTH = 16  # Maximum worst-case rows of a pyramid's level, per finest row, to build it before its rows are counted
FORWARD = ("same", "support", "floor_unique")


def checked_geometry(
    coords: Tensor,
    stride: int | Sequence[int] = 1,
    spatial_shape: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    dim: int | None = None,
) -> Geometry:
    """`Geometry.checked`; under torch.compile or torch.export the compiled code does the checks."""
    if torch.compiler.is_compiling():
        coords, strides, shape = described(coords, stride, spatial_shape, dim)
        return tracing_module.checked(coords.contiguous(), strides, shape, batch_size)
    return Geometry.checked(coords, stride, spatial_shape, batch_size, dim)


def kernel_map(
    geometry: Geometry, relation: Relation, target: Geometry | None = None, schedule: MapSchedule | None = None
) -> tuple[KernelMap, Geometry]:
    """The kernel map of `relation` on `geometry` and the geometry of its outputs, cached by `geometry`.

    target: the outputs, for policies `given`, `cached_inverse`, `given_inverse` only. schedule: how neighbours are
    searched, by default the cost model's choice; it affects no result and no cached map.

    Under torch.compile or torch.export the map is built when the compiled code runs (coords.tracing), unless `geometry`
    was prepared; `geometry` is not modified, and the returned geometry caches the map.

    Raises OptionError for an unknown policy or a schedule of another type, ShapeError or DeviceError for a target of
    other axes or device, GeometryError for a `geometry` of another type."""
    if not isinstance(geometry, Geometry):
        raise GeometryError(f"kernel_map takes a Geometry, found {type(geometry).__name__}; a tensor's is x.geometry")
    if not isinstance(relation, Relation):
        raise OptionError(f"kernel_map takes a Relation, found {type(relation).__name__}")
    if schedule is not None and not isinstance(schedule, MapSchedule):
        raise OptionError(f"schedule takes a MapSchedule, found {schedule!r}")
    if relation.policy in ("cached_inverse", "given_inverse"):
        return _inverse_map(geometry, relation, target)
    if torch.compiler.is_dynamo_compiling():
        # Reading the cached maps would add guards on them to the compiled code.
        return tracing_module.kernel_map(geometry, *_checked(geometry, relation, target))
    # A geometry as its own target is left out of the key: a reference cycle would keep its memory alive.
    key = (relation, None if target is geometry else target)
    kept = geometry.maps.get(key)
    if kept is None and torch.compiler.is_compiling():
        return tracing_module.kernel_map(geometry, *_checked(geometry, relation, target))
    if kept is None:
        with outside_inference_mode():
            kept = _build(geometry, relation, target, schedule)
        if geometry.unsettled is not None:
            kept = replace(kept[0], inputs=weakref.ref(geometry)), kept[1]
        geometry.keep(*key, kept)
    found, outputs = kept
    if outputs is not None:
        outputs.require_unwritten()
    return found, geometry if outputs is None else outputs


@contextmanager
def on_side_stream(geometry: Geometry) -> Iterator[Callable[[KernelMap], None]]:
    """Under CUDA graph capture, build maps on a side stream, so that layers on finer levels overlap the search for
    coarser ones; otherwise no effect.

    Yields a callback to be called with each map as it is built; later readers wait for its event."""
    if not (geometry.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        yield lambda _: None
        return
    stream = torch.cuda.Stream(geometry.device, priority=MAP_STREAM_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(geometry.device))
    known = set(_levels_below(geometry))
    # Deeper levels may have been built on another side stream.
    for before in dict.fromkeys(filter(None, (level.pending_events.get("found") for level in known))):
        stream.wait_event(before)

    def mark_built(one: KernelMap) -> None:
        event = record_event(stream)
        if one.buffered is not None and None not in one.buffered.pending_events:
            one.buffered.pending_events.register(event, [None])
        for level in _levels_below(geometry):
            if level not in known:
                known.add(level)
                level.pending_events.register(event, ["coords"])

    with torch.cuda.stream(stream):
        yield mark_built
        event = record_event(stream)
    for level in known:
        level.pending_events.register(event, ["found"])


@contextmanager
def join_side_streams(geometry: Geometry) -> Iterator[None]:
    """Context for the end of a program, in which status words may be read; later work waits for all side streams.

    Under CUDA graph capture, if all maps were built on side streams, the context has a stream of its own, which waits
    for the status words but not for the layers."""
    levels = list(_levels_below(geometry))
    maps = [found for level in levels for found, _ in level.maps.values()]
    if maps and all(found.buffered is not None and None in found.buffered.pending_events for found in maps):
        main = torch.cuda.current_stream(geometry.device)
        stream = torch.cuda.Stream(geometry.device, priority=MAP_STREAM_PRIORITY)
        with torch.cuda.stream(stream):
            for level in levels:
                level.wait_for_status()
            yield
        main.wait_stream(stream)
    else:
        for level in levels:
            level.wait_for_all()
        yield
    for level in levels:
        # Includes maps that no layer has read.
        level.wait_for_all()


def _levels_below(geometry: Geometry) -> Iterator[Geometry]:
    """The geometry and all levels derived from it."""
    seen = {id(geometry): geometry}
    waiting = [geometry]
    while waiting:
        one = waiting.pop()
        yield one
        for _, outputs in one.maps.values():
            if outputs is not None and id(outputs) not in seen:
                seen[id(outputs)] = outputs
                waiting.append(outputs)


def _checked(geometry: Geometry, relation: Relation, target: Geometry | None) -> tuple[Relation, Geometry | None]:
    """Checked (relation, target); target is None unless the policy is `given`."""
    if relation.dim != geometry.dim:
        raise ShapeError(f"the relation has {relation.dim} axes, the coordinates have {geometry.dim}")
    return relation.checked(), _checked_target(geometry, target) if relation.policy == "given" else None


def _build(
    geometry: Geometry, relation: Relation, target: Geometry | None, schedule: MapSchedule | None
) -> tuple[KernelMap, Geometry | None]:
    relation, target = _checked(geometry, relation, target)
    if (
        geometry.buffered is not None
        and target is None
        and schedule is None
        and build_one_in_buffer(geometry, relation)
    ):
        return geometry.maps[relation, None]
    if relation.policy in ("same", "given"):
        outputs = geometry if target is None else target
        found = map_between(relation, _search(geometry, outputs, relation, schedule), geometry, outputs)
        return found, None if outputs is geometry else outputs
    return _level(geometry, relation, schedule)


def _level(geometry: Geometry, relation: Relation, schedule: MapSchedule | None) -> tuple[KernelMap, Geometry]:
    """(map, outputs) of a relation that derives its outputs; caches the outputs."""
    key = level_key(relation)
    outputs = geometry.levels.get(key) if key else None
    if outputs is not None:
        return _map_to_outputs(geometry, relation, outputs, None, schedule), outputs
    made = make_outputs(geometry.cloud, geometry.site, relation, schedule)
    buffered = geometry.buffered is not None
    outputs = _buffer_of(made, geometry, relation) if buffered else made.geometry(*read_counts(geometry, [made.count]))
    if key:
        geometry.levels[key] = outputs
    return _map_to_outputs(geometry, relation, outputs, made, schedule), outputs


def _map_to_outputs(
    geometry: Geometry, relation: Relation, outputs: Geometry, made: Outputs | None, schedule: MapSchedule | None
) -> KernelMap:
    """The map from `geometry` to existing `outputs`; `made`, if given, may provide its neighbour table."""
    table = None if made is None else made.table(len(outputs))
    if relation.policy == "transposed_support":
        if table is not None and len(table) > len(geometry):
            # In a pyramid the inputs' buffer may have padding rows.
            table = table[: len(geometry)].clone()
        found = None if table is None else Neighbours(table, None)
        found = found or _search(outputs, geometry, relation, schedule)
        return map_between(relation, found, outputs, geometry).transpose()
    found = _search(geometry, outputs, relation, schedule) if table is None else Neighbours(table, None)
    return map_between(relation, found, geometry, outputs)


def _buffer_of(made: Outputs, geometry: Geometry, relation: Relation) -> Geometry:
    """The outputs of a buffered geometry, in a buffer of their planned capacity."""
    buffered = geometry.buffered
    assert buffered is not None
    site = site_of(geometry.site, relation)
    if isinstance(made, TorchOutputs) and geometry.coords.is_cuda:
        raise GeometryError(
            f"no kernel orders coordinates from {site.bounds.low} to {site.bounds.high}, and the torch fallback "
            "synchronises with the host: capture an example with a spatial_shape"
        )
    path = (*buffered.path, relation)
    most = max_outputs(len(geometry), relation, site)
    capacity = buffered.capacities.capacity(("rows", path, site.stride), made.count, most)
    return Geometry.in_buffer(made.cloud(capacity), site, replace(buffered, path=path))


def pyramid(geometry: Geometry, steps: Sequence[Relation]) -> tuple[Geometry, ...]:
    """`geometry` and the levels that `steps` derive, each from the one before; caches the maps between them.

    On a GPU the counts of several levels are read in one transfer. Raises GeometryError for a policy that creates no
    coordinates, and as kernel_map."""
    check_steps(steps)
    levels = [geometry]
    for place, step in enumerate(steps):
        missing = (step, None) not in levels[-1].maps and not torch.compiler.is_compiling()
        if missing and geometry.buffered is None and has_triton(geometry.coords):
            with outside_inference_mode():
                _pyramid(levels[-1], steps[place:])
        levels.append(kernel_map(levels[-1], step)[1])
    return tuple(levels)


def check_steps(steps: Sequence[Relation]) -> None:
    """Raise GeometryError for a policy that creates no coordinates."""
    for step in steps:
        if step.policy not in ("support", "floor_unique", "transposed_support"):
            raise GeometryError(f"policy {step.policy!r} creates no coordinates; steps of a pyramid must create them")


def _pyramid(geometry: Geometry, steps: Sequence[Relation]) -> None:
    """Build levels in worst-case buffers, read all counts, then crop; the first level beyond _GROWTH is the last."""
    cloud, site = geometry.cloud, geometry.site
    made: list[Outputs] = []
    clouds: list[CoordBuffer] = []
    for step in steps:
        made.append(make_outputs(cloud, site, step))
        site = site_of(site, step)
        capacity = max_outputs(cloud.capacity, step, site)
        if len(made) == len(steps) or capacity > _GROWTH * len(geometry):
            break
        cloud = made[-1].cloud(capacity, coords_only=True)
        clouds.append(cloud)
    counts = read_counts(geometry, [one.count for one in made])
    for step, one, cloud, count in zip(steps, made, [*clouds, None], counts, strict=False):
        key = level_key(step)
        outputs = geometry.levels.get(key) if key else None
        if outputs is None:
            cut = None if cloud is None else Geometry(cloud.coords[:count].clone(), site_of(geometry.site, step))
            outputs = one.geometry(count) if cut is None else cut
        if key:
            geometry.levels[key] = outputs
        if (step, None) not in geometry.maps:
            geometry.keep(step, None, (_map_to_outputs(geometry, step, outputs, one, None), outputs))
        geometry = geometry.maps[step, None][1] or geometry


def _search(inputs: Geometry, outputs: Geometry, relation: Relation, schedule: MapSchedule | None) -> Neighbours:
    """Input row at stride * out + offset, per output and offset."""
    return inputs.lookup(schedule).neighbours(outputs.cloud, relation)


def _inverse_map(geometry: Geometry, relation: Relation, target: Geometry | None) -> tuple[KernelMap, Geometry]:
    """(transpose of the forward map from `target` to `geometry`, target); the forward map is cached by `target`."""
    tracing = torch.compiler.is_dynamo_compiling()
    parent = None if tracing or relation.policy == "given_inverse" else geometry.parent
    target = parent if target is None else target
    if target is None:
        traced = torch.compiler.is_compiling()
        reason = "not known under torch.compile and torch.export" if traced else "unknown or freed"
        raise GeometryError(
            f"{relation.policy} needs a target, layer(x, finer): the geometry that x's coordinates were made from is "
            f"{reason}"
        )
    for forward in _candidate_forwards(relation) if tracing else _cached_forwards(relation):
        kept = tracing_module.cached_map(target, forward) if tracing else target.maps.get((forward, None))
        if kept is not None and kept[1] is not None and alike(kept[1], geometry):
            return kept[0].transpose(), target
    _checked_target(geometry, target)
    if geometry.stride != tracing_module.stride_of(target.stride, relation):
        raise GeometryError(
            f"strides are incompatible: x has stride {geometry.stride}, a convolution of stride {relation.stride} from "
            f"the target's stride {target.stride} does not give it"
        )
    if parent is not None:
        _check_inverse_map(geometry, relation, target, parent)
    forward, _ = kernel_map(target, replace(relation, policy="given"), geometry)
    return forward.transpose(), target


def _check_inverse_map(geometry: Geometry, relation: Relation, target: Geometry, parent: Geometry) -> None:
    """Raise GeometryError for a geometry made from `parent`, but not from `target` by this relation."""
    if parent is not target:
        raise GeometryError(f"x's coordinates were made from {parent}, the target is {target}")
    made = [_window_of(way) for (way, _), (_, outputs) in parent.maps.items() if outputs is geometry]
    raise GeometryError(f"x's coordinates were made by {' and '.join(made)}; the inverse has {_window_of(relation)}")


def _window_of(relation: Relation) -> str:
    four = (relation.kernel, relation.stride, relation.padding, relation.dilation)
    return "kernel_size={}, stride={}, padding={}, dilation={}".format(*four)


def _candidate_forwards(relation: Relation) -> tuple[Relation, ...]:
    """Forward relations that `relation` may invert."""
    return tuple(replace(relation, policy=policy) for policy in FORWARD)


_cached_forwards = lru_cache(maxsize=256)(_candidate_forwards)


def _checked_target(geometry: Geometry, target: Geometry | None) -> Geometry:
    if target is None:
        raise GeometryError("policy 'given' needs the coordinates of the outputs")
    if target.dim != geometry.dim:
        raise ShapeError(f"the target has {target.dim} spatial axes, the input has {geometry.dim}")
    if target.device != geometry.device:
        raise DeviceError(f"the target is on {target.device}, the input on {geometry.device}")
    return target
