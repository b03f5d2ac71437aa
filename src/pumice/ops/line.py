"""Kernels of layers one after the other, started without anything in between: what lies between them has no tensors of
its own, but places in one piece of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.lower.direct import Direct
from pumice.ops.conv import instantiate_over
from pumice.ops.linear import cached_call
from pumice.runtime.workspace import workspace

_ALIGNED = 256
"""Bytes."""
_PLACES = 3
"""At most: of what a kernel reads, what is added later, and what it writes."""
GIVEN = -1
"""The place of what a line is given."""


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """A layer of a line, as it is known before its map is.

    relation: a convolution's; None of a linear map. opens: its features are what a residual block begins with; aside:
    its result is what the block adds; adds: it adds that, or what the block began with. ends: how many modules are done
    behind it, 0 within one.
    """

    relation: Relation | None
    opens: bool
    aside: bool
    adds: bool
    ends: int

    @abstractmethod
    def alone(self, outputs: Geometry, rows: int) -> Any:
        """A linear map's call on so many rows, as one like it was carried out before; None where there was none."""

    @abstractmethod
    def over(self, found: KernelMap, outputs: Geometry, kept: bool) -> Any:
        """The same of a convolution over a map; kept: whether the result has the rows that are added."""


L = TypeVar("L", bound=Layer)


@dataclass(frozen=True, eq=False)
class Launch(Layer):
    """A layer as one kernel.

    key: what its calls are kept under (key_of of ops.conv, ops.linear). addresses: of its tensors, in the order of the
    call, but for features and residual. columns: of its result; spare: those left free behind them; lead: how far rows
    of the features are apart, in values; dtype: of both.

    reads, held, writes: the places of features, of what is added later, and of the result (`placed`).
    """

    key: Hashable
    addresses: tuple[int, ...]
    columns: int
    spare: int
    lead: int
    dtype: torch.dtype
    reads: int = GIVEN
    held: int = GIVEN
    writes: int = 0

    def alone(self, outputs: Geometry, rows: int) -> Direct | None:  # noqa: ARG002
        return self._filled(cached_call(self.key, self.counted(rows, rows), self.columns))

    def over(self, found: KernelMap, outputs: Geometry, kept: bool) -> Direct | None:  # noqa: ARG002
        if self.adds and not kept:
            return None
        call = found.get_cached(self.key)
        if call is None:
            counts = self.counted(found.num_inputs, found.num_outputs)
            call = instantiate_over(found, self.key, counts, self.columns)
        return self._filled(call)

    def _filled(self, call: Direct | None) -> Direct | None:
        # What a kernel does not write all of, or in another dtype, is made and finished around it.
        return None if call is None or call.runner.writes_result_dtype is not self.dtype else call

    def counted(self, inputs: int, outputs: int) -> list[tuple[int, int]]:
        """As direct.counted tells the rows of its tensors; weights and vectors have one for each column. Rows that are
        added lie as those that the block began with, which were looked at, or side by side."""
        own = [(inputs, self.lead), *((self.columns, 0) for _ in self.addresses)]
        return [*own, (outputs, self.columns)] if self.adds else own


def placed(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Launches one after the other with their places: none writes to what it reads, or to what is added later."""
    reads = held = GIVEN
    for launch in launches:
        held = reads if launch.opens else held
        writes = next(n for n in range(_PLACES) if n not in (reads, held))
        yield replace(launch, reads=reads, held=held, writes=writes)
        reads, held = (reads, writes) if launch.aside else (writes, held)


class Found(Generic[L]):
    """A layer with its call, the map that this is over, and the coordinates of the result."""

    __slots__ = ("call", "launch", "outputs", "over", "rows")

    def __init__(self, launch: L, call: Any, over: KernelMap | None, outputs: Geometry, rows: int) -> None:
        self.launch, self.call, self.over, self.outputs, self.rows = launch, call, over, outputs, rows


def found_of(
    launches: Sequence[L], rows: int, geometry: Geometry, asked: tuple[Relation, Geometry | None] | None
) -> list[Found[L]]:
    """The calls of as many layers as were carried out before, up to the last one behind which a module is done.

    rows: of the features, on the coordinates `geometry`. asked: what the first one asks for, where it names a target.
    """
    found: list[Found[L]] = []
    began, done = geometry, 0
    for launch in launches:
        if launch.opens:
            began = geometry
        relation, outputs, count, call, over = launch.relation, geometry, rows, None, None
        if relation is None:
            call = None if asked is not None else launch.alone(geometry, rows)
        else:
            kept = geometry.maps.get((relation, None)) if asked is None else kernel_map(geometry, *asked)
            if kept is None and not done and relation.dim == geometry.dim:
                # Later ones are for later lines: until they are found the device has these kernels to run.
                kept = kernel_map(geometry, relation)
            if kept is not None:
                over, outputs = kept[0], geometry if kept[1] is None else kept[1]
                count = outputs.coords.shape[0]
                if (rows, count) == (over.num_inputs, over.num_outputs):
                    call = launch.over(over, outputs, outputs is began)
        # What is added has the rows of what a block began with.
        if call is None or (launch.aside and outputs is not geometry):
            break
        found.append(Found(launch, call, over, outputs, count))
        if not launch.aside:
            geometry, rows = outputs, count
        asked, done = None, len(found) if launch.ends else done
    return found[:done]


def started(found: Sequence[Found[Launch]], x: Tensor) -> Tensor | None:
    """The result of these calls one after the other, of which the last one's alone is a tensor; None, where x is not
    aligned, or not on the current device."""
    address, last = x.data_ptr(), found[-1]
    if address & 15 or (x.is_cuda and x.get_device() != torch._C._cuda_getDevice()):
        return None
    out = last.call.runner.allocate_output(x, (last.rows, last.launch.columns))
    result = out.data_ptr()
    memory, at = _places(found, x, result)
    at[GIVEN] = address
    needs = [f.call.aimed.needs for f in found if f.call.aimed.slots.scratch is not None]
    # Held until the kernels are under way, as the memory is.
    own = workspace(max(n for n, _ in needs), max(n for _, n in needs), x.device) if needs else None
    for one in found:
        launch, call = one.launch, one.call
        addresses = at[launch.reads], *launch.addresses, at[launch.held]
        call.aimed.begin(addresses, call.places, result if one is last else at[launch.writes], own)
    del memory
    return out


def _places(found: Sequence[Found[Launch]], x: Tensor, result: int) -> tuple[Tensor, dict[int, int]]:
    """Memory for what lies between the kernels, and the address of each place. One that the last kernel reads nothing
    from is where that one writes, if there is room."""
    between, end = found[:-1], found[-1]
    most = max((f.rows * f.launch.columns for f in between), default=0)
    roomy = most <= end.rows * (end.launch.columns + end.launch.spare)
    size = max(1, -(-most * x.element_size() // _ALIGNED)) * _ALIGNED
    used = sorted({f.launch.writes for f in between})
    at, own = {}, []
    for place in used:
        if roomy and result not in at.values() and place not in (end.launch.reads, end.launch.held):
            at[place] = result
        else:
            own.append(place)
    memory = x.new_empty(len(own) * size, dtype=torch.uint8)
    at |= {place: memory.data_ptr() + n * size for n, place in enumerate(own)}
    return memory, at
