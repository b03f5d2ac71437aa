"""From coordinates and a relation to the kernel map and the coordinates of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from pumice.coords.geometry import Geometry
from pumice.coords.kernel_map import KernelMap, Pairs
from pumice.coords.keys import INT32_MAX, Bounds, morton_unique
from pumice.coords.relation import POLICIES, Relation
from pumice.errors import CoordinateError, DeviceError, GeometryError, OptionError, ShapeError

FORWARD = ("same", "support", "floor_unique")


def kernel_map(geometry: Geometry, relation: Relation, target: Geometry | None = None) -> tuple[KernelMap, Geometry]:
    """The map of `relation` from `geometry`, and the geometry of its outputs; found once, then kept by `geometry`.

    `target` names the outputs for the policies `given` and `cached_inverse`, and only for those.

    Raises GeometryError when the map is missing while torch.compile traces (a trace cannot make coordinates),
    OptionError for an unknown policy, ShapeError and DeviceError for a target that does not fit.
    """
    if relation.policy == "cached_inverse":
        return _inverse_map(geometry, relation, target)
    # A geometry as its own target is not named in the key: a reference to itself would keep its memory alive.
    key = (relation, None if target is geometry else target)
    kept = geometry.maps.get(key)
    if kept is None:
        if torch.compiler.is_compiling():
            raise GeometryError(
                "a kernel map is missing while torch.compile traces; call pumice.prepare(model, x) first"
            )
        # A map found in inference serves training afterwards.
        with torch.inference_mode(False):
            kept = _build(geometry, relation, target)
        geometry.maps[key] = kept
    found, outputs = kept
    return found, geometry if outputs is None else outputs


def _build(geometry: Geometry, relation: Relation, target: Geometry | None) -> tuple[KernelMap, Geometry | None]:
    if relation.policy not in OUTPUTS:
        raise OptionError(f"out={relation.policy!r} is no output policy; there are {', '.join(POLICIES)}")
    if relation.dim != geometry.dim:
        raise ShapeError(f"the relation has {relation.dim} axes, the coordinates have {geometry.dim}")
    outputs = OUTPUTS[relation.policy](geometry, relation, target)
    if relation.policy == "transposed_support":
        found = KernelMap(relation, _search(outputs, geometry, relation), len(outputs), len(geometry)).transpose()
    else:
        found = KernelMap(relation, _search(geometry, outputs, relation), len(geometry), len(outputs))
    return found, None if outputs is geometry else outputs


def _inverse_map(geometry: Geometry, relation: Relation, target: Geometry | None) -> tuple[KernelMap, Geometry]:
    """The forward map from `target` to `geometry`, transposed. It is kept by `target`, the one that lives longer."""
    if target is None:
        raise GeometryError("policy 'cached_inverse' needs the target coordinates that the inputs were made from")
    _check_target(geometry, target)
    if geometry.site.stride != target.site.scaled([Fraction(s) for s in relation.stride]).stride:
        raise GeometryError(
            f"x has stride {geometry.stride}; a convolution of stride {relation.stride} from the target's stride "
            f"{target.stride} does not lead there"
        )
    for policy in FORWARD:
        kept = target.maps.get((replace(relation, policy=policy), None))
        if kept is not None and kept[1] is geometry:
            return kept[0].transpose(), target
    forward, _ = kernel_map(target, replace(relation, policy="given"), geometry)
    return forward.transpose(), target


# which outputs exist


def _same(geometry: Geometry, relation: Relation, target: Geometry | None) -> Geometry:
    if any(s != 1 for s in relation.stride):
        raise OptionError(f"out='same' keeps the coordinates and needs stride 1, found stride {relation.stride}")
    return geometry


def _given(geometry: Geometry, relation: Relation, target: Geometry | None) -> Geometry:
    if target is None:
        raise GeometryError("policy 'given' needs the coordinates of the outputs")
    _check_target(geometry, target)
    return target


def _check_target(geometry: Geometry, target: Geometry) -> None:
    if target.dim != geometry.dim:
        raise ShapeError(f"the target has {target.dim} spatial axes, the input has {geometry.dim}")
    if target.device != geometry.device:
        raise DeviceError(f"the target is on {target.device}, the input on {geometry.device}")


def _floor_unique(geometry: Geometry, relation: Relation, target: Geometry | None) -> Geometry:
    """Distinct floor(in / stride): the same for every kernel, so that all of them share one geometry."""
    key = ("floor_unique", relation.stride)
    if key not in geometry.levels:
        stride = torch.tensor((1, *relation.stride), dtype=torch.int32, device=geometry.device)
        coords = torch.div(geometry.coords, stride, rounding_mode="floor")
        box = geometry.bounds
        low, high = (tuple(a // s for a, s in zip(side, relation.stride, strict=True)) for side in (box.low, box.high))
        box = Bounds(low, high, box.batch)
        shape = None if geometry.spatial_shape is None else relation.output_shape(geometry.spatial_shape)
        geometry.levels[key] = _level(geometry, relation, morton_unique(coords, box)[0], box, shape)
    return geometry.levels[key]


def _support(geometry: Geometry, relation: Relation, target: Geometry | None) -> Geometry:
    """Every out with stride * out + offset = in for some active input: (in - offset) / stride, where it divides."""

    def box(low: int, high: int, near: int, far: int, stride: int) -> tuple[int, int]:
        first = -((far - low) // stride)
        return first, max(first, (high - near) // stride)

    def cells(values: Tensor, offset: Tensor, stride: Tensor) -> tuple[Tensor, Tensor | None]:
        shifted = values - offset
        whole = (shifted % stride == 0).all(dim=1)
        return torch.div(shifted[whole], stride, rounding_mode="floor"), whole

    return _spread(geometry, relation, box, cells)


def _transposed_support(geometry: Geometry, relation: Relation, target: Geometry | None) -> Geometry:
    """Every out = stride * in + offset."""

    def box(low: int, high: int, near: int, far: int, stride: int) -> tuple[int, int]:
        return low * stride + near, high * stride + far

    def cells(values: Tensor, offset: Tensor, stride: Tensor) -> tuple[Tensor, Tensor | None]:
        return values * stride + offset, None

    return _spread(geometry, relation, box, cells)


OUTPUTS: dict[str, Callable[[Geometry, Relation, Geometry | None], Geometry]] = {
    "same": _same,
    "given": _given,
    "support": _support,
    "floor_unique": _floor_unique,
    "transposed_support": _transposed_support,
}

_AxisOffsets = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def _separable(relation: Relation) -> list[_AxisOffsets]:
    """(axes, offsets along them) to apply one after the other: one axis at a time for a full kernel window.

    A window is the product of its axes, so that K = k^D candidates a voxel become D times k, merged in between.
    """
    if relation.custom is not None:
        return [(tuple(range(relation.dim)), relation.custom)]
    rule = zip(relation.kernel, relation.dilation, relation.padding, strict=True)
    return [((axis,), tuple((d * t - p,) for t in range(k))) for axis, (k, d, p) in enumerate(rule)]


def _spread(
    geometry: Geometry,
    relation: Relation,
    box: Callable[[int, int, int, int, int], tuple[int, int]],
    cells: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]],
) -> Geometry:
    """The distinct cells that `cells(in, offset, stride)` names for any offset (with the rows it kept, if not all).

    `box(low, high, least offset, greatest offset, stride)` bounds them along an axis.
    """
    coords, bounds = geometry.coords, geometry.bounds
    for axes, offsets in _separable(relation):
        columns = [axis + 1 for axis in axes]
        stride = torch.tensor([relation.stride[a] for a in axes], device=coords.device)
        bounds = _box_along(bounds, relation, (axes, offsets), box).checked()
        found = []
        for offset in offsets:
            moved, kept = cells(coords[:, columns].long(), torch.tensor(offset, device=coords.device), stride)
            out = coords.clone() if kept is None else coords[kept]
            out[:, columns] = moved.int()
            found.append(out)
        coords, _ = morton_unique(torch.cat(found), bounds)
    return _bounded_level(geometry, relation, coords, bounds)


def _box_along(
    bounds: Bounds, relation: Relation, along: _AxisOffsets, box: Callable[[int, int, int, int, int], tuple[int, int]]
) -> Bounds:
    low, high = list(bounds.low), list(bounds.high)
    for place, axis in enumerate(along[0]):
        steps = [offset[place] for offset in along[1]]
        low[axis], high[axis] = box(low[axis], high[axis], min(steps), max(steps), relation.stride[axis])
    return Bounds(tuple(low), tuple(high), bounds.batch)


def _bounded_level(geometry: Geometry, relation: Relation, coords: Tensor, bounds: Bounds) -> Geometry:
    """The level of `coords`, less what lies outside the output's extent where the input has one."""
    if geometry.spatial_shape is None or not relation.bounded:
        return _level(geometry, relation, coords, bounds, None)
    shape = relation.output_shape(geometry.spatial_shape)
    extent = torch.tensor(shape, dtype=torch.int32, device=coords.device)
    inside = ((coords[:, 1:] >= 0) & (coords[:, 1:] < extent)).all(dim=1)
    return _level(geometry, relation, coords[inside], bounds, shape)


def _level(
    geometry: Geometry, relation: Relation, coords: Tensor, bounds: Bounds, shape: tuple[int, ...] | None
) -> Geometry:
    if coords.shape[0] > INT32_MAX:
        raise CoordinateError(f"{coords.shape[0]} output voxels; indices hold at most {INT32_MAX}")
    finer = relation.policy == "transposed_support"
    factor = [Fraction(1, s) if finer else Fraction(s) for s in relation.stride]
    return Geometry(coords, geometry.site.scaled(factor, bounds=bounds, spatial_shape=shape))


# who meets whom


def _search(inputs: Geometry, outputs: Geometry, relation: Relation) -> Pairs:
    """The pairs of `in = stride * out + offset[k]`, by binary search for the keys of the inputs."""
    offsets, device = relation.offsets, outputs.device
    if len(inputs) == 0 or len(outputs) == 0:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return Pairs(none, none, torch.zeros(len(offsets), dtype=torch.int64))
    reach = [max(abs(o[axis]) for o in offsets) for axis in range(relation.dim)]
    # Outputs within reach of the inputs' box ask up to twice as far; beyond it they meet nothing.
    space, keys, rows = inputs.table([2 * r for r in reach])
    steps = [space.step(o) for o in offsets]
    near = _within(outputs.coords, relation.stride, inputs.bounds.grown(reach))
    base = torch.where(near, space.keys(outputs.coords, relation.stride), min(-max(steps), 0) - 1)
    found: list[Tensor] = [base] * len(offsets)
    for taps in _runs(steps):
        _find_run(keys, rows, base + steps[taps[0]], taps, found)
    met = torch.stack(found)
    hits = met >= 0
    return Pairs(met[hits].long(), hits.nonzero()[:, 1], hits.sum(1).cpu())


def _within(coords: Tensor, stride: Sequence[int], bounds: Bounds) -> Tensor:
    scaled = coords[:, 1:].long() * torch.tensor(stride, device=coords.device)
    low = torch.tensor(bounds.low, device=coords.device)
    high = torch.tensor(bounds.high, device=coords.device)
    known = coords[:, 0] < bounds.batch
    return ((scaled >= low) & (scaled <= high)).all(dim=1) & known


def _runs(steps: Sequence[int]) -> list[list[int]]:
    """Taps grouped so that within a group the searched keys follow one another: one search serves the group."""
    runs: list[list[int]] = []
    for tap in sorted(range(len(steps)), key=lambda t: steps[t]):
        if runs and steps[tap] == steps[runs[-1][-1]] + 1:
            runs[-1].append(tap)
        else:
            runs.append([tap])
    return runs


def _find_run(keys: Tensor, rows: Tensor, wanted: Tensor, taps: list[int], found: list[Tensor]) -> None:
    """Rows of the keys wanted, wanted + 1, ... into `found[tap]` as int32, -1 where there is none."""
    last = len(keys) - 1
    at = torch.searchsorted(keys, wanted)
    for distance, tap in enumerate(taps):
        place = at.clamp(max=last)
        hit = keys[place] == wanted + distance
        found[tap] = torch.where(hit, rows[place], -1).int()
        at += hit
