"""Custom operators that traced code (coords.tracing) calls for results that depend on tensor values.

    box(coords, shape, batch_size, settled) -> box                  bounding box; checks coords unless `settled`
    level(coords, box, shape, RELATION) -> coords, box, table       new output coordinates, and the map to these
    meet(inputs, box, outputs, box, RELATION) -> table              map between existing coordinates
    pairs(table) -> inputs, outputs, sizes, taps                    KernelMap.pairs() and taps()
    kept(coords, mask) -> rows                                      rows where mask is true, in (batch, Morton) order
    united(coords, coords) -> coords, places, places                union, and the rows in it of both operands
    items(coords) -> int64 [batch items]                            rows per batch item
    places(coords, shape, origin, items) -> places                  row-major indices in dense grids

Operators are pure and return fresh memory; data-dependent sizes are unbacked symbols. A box is int64 [1 + 2D] on the
CPU, so that it is read once: number of batch items, minima of all axes, maxima of all axes. A table is that of an
untransposed KernelMap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from pumice.coords.box import Bounds, places_in
from pumice.coords.build import kernel_map
from pumice.coords.codes import morton_argsort, morton_unique
from pumice.coords.geometry import Geometry, bounds_of
from pumice.coords.grid import GridSpec
from pumice.coords.kernel_map import KernelMap
from pumice.coords.relation import Relation
from pumice.runtime.launch import outside_inference_mode

RELATION = (
    "int[] kernel, int[] stride, int[] padding, int[] dilation, str policy, int[]? custom, int[]? output_padding, "
    "bool bounded"
)
"""A relation as operator arguments: its fields in order, `custom` flattened."""

LIBRARY = torch.library.Library("pumice", "FRAGMENT")
TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag))
"""cudagraph_unsafe: the operators synchronise with the host to read sizes."""


def register(schema: str, run: Any, fake: Any) -> None:
    """Define an operator of the namespace `pumice` with its implementation and its fake kernel."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=TAGS)

    # After a graph break at the operator, torch must not trace its body, which would call the operator again.
    @_disable_dynamo
    @wraps(run)
    def found(*args: Any) -> Any:
        with outside_inference_mode():
            return run(*args)

    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, found, key)
    torch.library.register_fake(f"pumice::{name}", fake, lib=LIBRARY)


def dynamic() -> torch.SymInt:
    """A new unbacked symbol for a data-dependent size."""
    return torch.library.get_ctx().new_dynamic_size()


@lru_cache(maxsize=1024)
def _relation(fields: tuple[Any, ...]) -> Relation:
    kernel, stride, padding, dilation, policy, custom, extra, bounded = fields
    dim = len(stride)
    taps = None if custom is None else tuple(custom[at : at + dim] for at in range(0, len(custom), dim))
    return Relation(kernel, stride, padding, dilation, policy, taps, extra, bounded)


def relation_of(*fields: Any) -> Relation:
    """The relation of operator arguments RELATION."""
    return _relation(tuple(tuple(value) if isinstance(value, list) else value for value in fields))


def volume_of(*fields: Any) -> int:
    """K, the number of kernel offsets of operator arguments RELATION."""
    kernel, custom = fields[0], fields[5]
    return math.prod(kernel) if custom is None else len(custom) // len(kernel)


def _geometry(coords: Tensor, box: Tensor, shape: Sequence[int] | None = None) -> Geometry:
    batch, *sides = box.tolist()
    dim = len(sides) // 2
    bounds = Bounds(tuple(sides[:dim]), tuple(sides[dim:]), batch)
    return Geometry(coords, GridSpec((1,) * dim, None if shape is None else tuple(shape), batch, bounds))


def _box_of(bounds: Bounds) -> Tensor:
    return torch.tensor((bounds.batch, *bounds.low, *bounds.high), dtype=torch.int64)


def own(results: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
    """The results as compilers expect them: contiguous, each at the start of a storage of its own."""
    taken = {x.untyped_storage().data_ptr() for x in given}
    found = []
    for x in results:
        alone = x.untyped_storage().data_ptr() not in taken and not x.storage_offset()
        found.append(x.contiguous() if alone else x.clone(memory_format=torch.contiguous_format))
        taken.add(found[-1].untyped_storage().data_ptr())
    return found


def _box(coords: Tensor, shape: list[int] | None, batch_size: int, settled: bool) -> Tensor:
    items = None if batch_size < 0 else batch_size
    if settled:
        return _box_of(bounds_of(coords, None if shape is None else tuple(shape), items))
    geometry = Geometry.checked(coords, 1, shape, items)
    geometry.settle()
    return _box_of(geometry.bounds)


def _box_fake(coords: Tensor, shape: list[int] | None, batch_size: int, settled: bool) -> Tensor:
    return torch.empty(2 * coords.shape[1] - 1, dtype=torch.int64)


def _level(coords: Tensor, box: Tensor, shape: list[int] | None, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    found, outputs = kernel_map(_geometry(coords, box, shape), relation_of(*fields))
    made, table = own([outputs.coords, found.table], coords)
    return made, _box_of(outputs.bounds), table


def _level_fake(coords: Tensor, box: Tensor, shape: list[int] | None, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    made = coords.new_empty(dynamic(), coords.shape[1])
    met = coords if fields[4] == "transposed_support" else made
    return made, torch.empty_like(box), coords.new_empty(met.shape[0], volume_of(*fields))


def _meet(inputs: Tensor, box: Tensor, outputs: Tensor, outputs_box: Tensor, *fields: Any) -> Tensor:
    relation, geometry = relation_of(*fields), _geometry(inputs, box)
    target = geometry if outputs is inputs else _geometry(outputs, outputs_box)
    return own([geometry.lookup().neighbours(target.cloud, relation).rows], inputs, outputs)[0]


def _meet_fake(inputs: Tensor, box: Tensor, outputs: Tensor, outputs_box: Tensor, *fields: Any) -> Tensor:
    return inputs.new_empty(outputs.shape[0], volume_of(*fields))


def _pairs(table: Tensor) -> tuple[Tensor, ...]:
    found = KernelMap(Relation.of(1, 1), table, 0, table.shape[0])
    return tuple(own([*found.pairs(), found.taps()], table))


def _pairs_fake(table: Tensor) -> tuple[Tensor, ...]:
    count = dynamic()
    inputs, outputs, taps = (table.new_empty(count, dtype=torch.int64) for _ in range(3))
    return inputs, outputs, torch.empty(table.shape[1], dtype=torch.int64), taps


def _kept(coords: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero()[:, 0]
    there = coords[rows]
    return own([rows[morton_argsort(there, Bounds.of(there))]], mask)[0]


def _counted_fake(coords: Tensor, *_: Tensor) -> Tensor:
    return coords.new_empty(dynamic(), dtype=torch.int64)


def _united(one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
    both = torch.cat([one, two])
    distinct, place = morton_unique(both, Bounds.of(both))
    return tuple(own([distinct, place[: len(one)], place[len(one) :]]))


def _united_fake(one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
    first, second = (x.new_empty(x.shape[0], dtype=torch.int64) for x in (one, two))
    return one.new_empty(dynamic(), one.shape[1]), first, second


def _items(coords: Tensor) -> Tensor:
    return torch.bincount(coords[:, 0])


def _places_fake(coords: Tensor, shape: list[int], origin: list[int], items: int) -> Tensor:
    return coords.new_empty(coords.shape[0], dtype=torch.int64)


register("box(Tensor coords, SymInt[]? shape, SymInt batch_size, bool settled) -> Tensor", _box, _box_fake)
register(
    f"level(Tensor coords, Tensor box, SymInt[]? shape, {RELATION}) -> (Tensor, Tensor, Tensor)", _level, _level_fake
)
register(
    f"meet(Tensor inputs, Tensor box, Tensor outputs, Tensor outputs_box, {RELATION}) -> Tensor", _meet, _meet_fake
)
register("pairs(Tensor table) -> (Tensor, Tensor, Tensor, Tensor)", _pairs, _pairs_fake)
register("kept(Tensor coords, Tensor mask) -> Tensor", _kept, _counted_fake)
register("united(Tensor one, Tensor two) -> (Tensor, Tensor, Tensor)", _united, _united_fake)
register("items(Tensor coords) -> Tensor", _items, _counted_fake)
register("places(Tensor coords, SymInt[] shape, SymInt[] origin, SymInt items) -> Tensor", places_in, _places_fake)
