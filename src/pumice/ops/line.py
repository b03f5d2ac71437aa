"""Kernels of layers one after the other, started without anything in between: what lies between them has no tensors of
its own, but places in one piece of memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.lower.direct import Direct
from pumice.lower.scratch import scratch
from pumice.ops.conv import cast_over
from pumice.ops.linear import known_call

_ALIGNED = 256
"""Bytes."""
_PLACES = 3
"""At most: of what a kernel reads, what is added later, and what it writes."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A layer's kernel as it is known before its map is.

    key: what its calls are kept under (key_of of ops.conv, ops.linear). relation: a convolution's; None of a linear
    map. addresses: of its tensors, in the order of the call, but for features and residual. columns: of its result;
    spare: those left free behind them; lead: how far rows of the features are apart, in values.

    opens: its features are what a residual block begins with; aside: its result is what the block adds; adds: it adds
    that, or what the block began with. ends: how many modules are done behind it, 0 within one.
    """

    key: Hashable
    relation: Relation | None
    addresses: tuple[int, ...]
    columns: int
    spare: int
    lead: int
    opens: bool
    aside: bool
    adds: bool
    ends: int


class Found(NamedTuple):
    """A launch with its call, and the coordinates of the result."""

    launch: Launch
    call: Direct
    outputs: Geometry
    rows: int


def found_of(
    launches: Sequence[Launch], x: Tensor, geometry: Geometry, asked: tuple[Relation, Geometry | None] | None
) -> list[Found]:
    """The calls of as many launches as were carried out before, up to the last one behind which a module is done.

    x: the features, on the coordinates `geometry`. asked: what the first one asks for, where it names a target.
    """
    found: list[Found] = []
    rows, began, done = x.shape[0], geometry, 0
    for launch in launches:
        if launch.opens:
            began = geometry
        relation, outputs, count, call = launch.relation, geometry, rows, None
        if relation is None:
            call = None if asked is not None else known_call(launch.key, ((rows, launch.lead),), launch.columns)
        else:
            kept = geometry.maps.get((relation, None)) if asked is None else kernel_map(geometry, *asked)
            if kept is None and not found and relation.dim == geometry.dim:
                # Later ones are for later lines: until they are found the device has these kernels to run.
                kept = kernel_map(geometry, relation)
            if kept is not None:
                outputs = kept[1] or geometry
                count = outputs.coords.shape[0]
                call = _over(kept[0], launch, (rows, count), outputs is began)
        # What a kernel does not write all of, or in another dtype, is made and finished around it. What is added has
        # the rows of what a block began with.
        if call is None or call.runner.fills is not x.dtype or (launch.aside and outputs is not geometry):
            break
        found.append(Found(launch, call, outputs, count))
        if not launch.aside:
            geometry, rows = outputs, count
        asked, done = None, len(found) if launch.ends else done
    return found[:done]


def _over(found: KernelMap, launch: Launch, rows: tuple[int, int], kept: bool) -> Direct | None:
    """The call over a map; rows: of features and result; kept: whether the result has the rows that are added."""
    if rows != (found.num_inputs, found.num_outputs) or (launch.adds and not kept):
        return None
    call = found.kept(launch.key)
    if call is None:
        counted = [(rows[0], launch.lead), *((0, 0) for _ in launch.addresses)]
        counted += [(rows[1], launch.columns)] if launch.adds else []
        call = cast_over(found, launch.key, counted, launch.columns)
    return call


def started(found: Sequence[Found], x: Tensor) -> Tensor | None:
    """The result of these calls one after the other, of which the last one's alone is a tensor; None, where x is not
    aligned, or not on the current device."""
    address, last = x.data_ptr(), found[-1]
    if address & 15 or (x.is_cuda and x.get_device() != torch._C._cuda_getDevice()):
        return None
    size = max((f.rows * f.launch.columns for f in found[:-1]), default=0) * x.element_size()
    size = max(1, -(-size // _ALIGNED)) * _ALIGNED
    count = min(_PLACES, len(found) - 1)
    memory = x.new_empty(count * size, dtype=torch.uint8)
    places = [memory.data_ptr() + n * size for n in range(count)]
    needs = [f.call.aimed.needs for f in found if f.call.aimed.slots.scratch is not None]
    # Held until the kernels are under way, as the memory is.
    own = scratch(max(n for n, _ in needs), max(n for _, n in needs), x.device) if needs else None
    out = last.call.runner.fresh(x, (last.rows, last.launch.columns))
    held = address
    for one in found:
        launch, call = one.launch, one.call
        if launch.opens:
            held = address
        if one is last:
            result = out.data_ptr()
        else:
            result = next(place for place in places if place != address and place != held)
        call.aimed.begin((address, *launch.addresses, held), call.places, result, own)
        if launch.aside:
            held = result
        else:
            address = result
    return out
