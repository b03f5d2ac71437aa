"""What the values of index arrays must be, looked at once per tensor and again where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pumice.errors import CoordinateError
from pumice.language.nodes import Access, Statement, accesses_of
from pumice.runtime.cache import cached_per_tensor


@dataclass(frozen=True)
class IndexCheck:
    """An index array, and the axis whose places it holds in units of `coefficient`."""

    array: str
    text: str
    coefficient: int
    extent: int
    where: str

    def look(self, operands: Mapping[str, Any]) -> None:
        """Raise CoordinateError unless the values are there; they are read once per tensor."""
        array = operands[self.array]
        if _held(array):
            _check_values(self, *_limits(array))


@dataclass(frozen=True)
class Unwritten:
    """An index array that may have been written where its version does not count: through numpy, or `.data`."""

    array: str

    def look(self, operands: Mapping[str, Any]) -> None:
        """Count that as a write, so that all that was found of the array is forgotten.

        On a CPU the values are compared with those seen last. On a GPU that would wait for the device: only where the
        array lies is compared, and values written through `.data` there are not noticed.
        """
        array = operands[self.array]
        if _held(array) and not _same(_seen(array), array):
            torch.autograd.graph.increment_version(array)
            _seen(array)


@dataclass(frozen=True)
class Declared:
    """An index array of which the text says that it is sorted, distinct, or onto an axis of that extent."""

    array: str
    fact: str
    extent: int

    def look(self, operands: Mapping[str, Any]) -> None:
        """Raise CoordinateError unless it is; lowerings rely on it."""
        array = operands[self.array]
        if _held(array) and not _FACTS[self.fact](array, self.extent):
            where = f" an axis of extent {self.extent}" if self.fact == "onto" else ""
            raise CoordinateError(f"{self.array} is declared {self.fact}{where}, and is not")


def checks_of(statement: Statement, operands: Mapping[str, Any]) -> tuple[Unwritten | IndexCheck | Declared, ...]:
    """What the values of the index arrays must be: -1, or a place along each axis that they index."""
    found: list[IndexCheck | Declared] = []
    declared = dict(statement.shapes)
    for access in (statement.target, *accesses_of(*statement.terms, *statement.target.indices)):
        x = operands.get(access.name)
        shape = declared.get(access.name) if x is None else tuple(x.shape)
        if shape is None or len(shape) != len(access.indices):
            continue
        for axis, (extent, expression) in enumerate(zip(shape, access.indices, strict=True)):
            for coefficient, atom in expression.terms:
                if extent is not None and isinstance(atom, Access) and isinstance(operands.get(atom.name), Tensor):
                    where = f"axis {axis} of {access}"
                    found.append(IndexCheck(atom.name, str(atom), coefficient, int(extent), where))
    extents = {(check.array, check.extent) for check in found if isinstance(check, IndexCheck)}
    for name, fact in statement.facts:
        if isinstance(operands.get(name), Tensor):
            # Every axis that an array addresses may become that of a gradient.
            reached = sorted(extent for array, extent in extents if array == name) if fact == "onto" else []
            found += [Declared(name, fact, extent) for extent in reached or [0]]
    written = dict.fromkeys(Unwritten(check.array) for check in found)
    return (*written, *dict.fromkeys(found))


def _check_values(check: IndexCheck, low: int, high: int) -> None:
    step = check.coefficient
    if low < -1 or (high >= 0 and step > 0 and step * high >= check.extent):
        raise CoordinateError(
            f"{check.text} holds {low if low < -1 else high}, but {check.where} has extent {check.extent}: values are "
            f"-1 (nothing) or from 0 to {max(0, -(-check.extent // max(step, 1)) - 1)}"
        )


def _held(array: Tensor) -> bool:
    """Whether there are values, and whether they may be looked at now."""
    there = array.numel() and not array.is_meta and not isinstance(array, FakeTensor)
    return bool(there) and not (array.is_cuda and torch.cuda.is_current_stream_capturing())


@cached_per_tensor
def _seen(array: Tensor) -> Tensor | tuple[Any, ...]:
    """What a later look compares the array with."""
    return (array.data_ptr(), array.shape, array.stride()) if array.is_cuda else array.clone()


def _same(seen: Tensor | tuple[Any, ...], array: Tensor) -> bool:
    if isinstance(seen, Tensor):
        return torch.equal(seen, array)
    return seen == (array.data_ptr(), array.shape, array.stride())


@cached_per_tensor
def _sorted(array: Tensor, extent: int) -> bool:
    """Whether no value is smaller than the one before it on the first axis."""
    return bool((array[1:] >= array[:-1]).all())


@cached_per_tensor
def _distinct(array: Tensor, extent: int) -> bool:
    """Whether no place occurs twice; -1 may."""
    places = array[array >= 0]
    return len(torch.unique(places)) == len(places)


@cached_per_tensor
def _onto(array: Tensor, extent: int) -> bool:
    """Whether every place of the axis occurs."""
    return len(torch.unique(array[array >= 0])) == extent


_FACTS = {"sorted": _sorted, "distinct": _distinct, "onto": _onto}


@cached_per_tensor
def _limits(array: Tensor) -> tuple[int, int]:
    """The smallest and the largest value; reads the device."""
    low, high = torch.stack(torch.aminmax(array)).tolist()
    return low, high
