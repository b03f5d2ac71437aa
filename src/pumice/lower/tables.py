"""Accesses with one axis indexed by an index array, as rows: helpers of the CPU lowerings that match a form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine


def refusal(names: Iterable[str], operands: Mapping[str, Tensor]) -> str | None:
    """The reason why these operands are refused (names: the factors), or None."""
    if any(t.device.type != "cpu" for t in operands.values()):
        return "the operands are not on a CPU"
    kinds = {operands[name].dtype for name in names}
    if len(kinds) > 1 or not kinds.pop().is_floating_point:
        return "the factors do not have one floating-point dtype"
    return None


def array_of(access: Access) -> Access | None:
    """The only index array of an access, if it has distinct bare indices and so have the other axes; else None."""
    arrays = [e for e in access.indices if e.bare is None]
    bare = bare_of(access)
    if len(arrays) != 1 or len(set(bare)) != len(bare):
        return None
    return _alone(arrays[0], bare)


def _alone(expression: Affine, bare: tuple[str, ...]) -> Access | None:
    if expression.constant or len(expression.terms) != 1:
        return None
    ((coefficient, atom),) = expression.terms
    if coefficient != 1 or not isinstance(atom, Access):
        return None
    names = [e.bare for e in atom.indices]
    plain = all(name and name not in bare for name in names) and len(set(names)) == len(names)
    return atom if plain and names else None


def bare_of(access: Access) -> tuple[str, ...]:
    """The bare indices of an access."""
    return tuple(e.bare for e in access.indices if e.bare is not None)


def array_axis(access: Access) -> int:
    """The axis indexed by the index array."""
    return next(i for i, e in enumerate(access.indices) if e.bare is None)


def arranged(tensor: Tensor, access: Access, order: Sequence[str]) -> Tensor:
    """The tensor with its axes in the order of these indices; "" is the axis of the index array."""
    have = [e.bare or "" for e in access.indices]
    return tensor.permute([have.index(name) for name in order])


def rows_of(tensor: Tensor, access: Access, names: Sequence[str]) -> Tensor:
    """The tensor as [rows, other axes in this order, flattened]."""
    found = arranged(tensor, access, ("", *names))
    return found.reshape(len(found), math.prod(found.shape[1:]))


def restored(flat: Tensor, order: Sequence[str], bound: BoundStatement) -> Tensor:
    """Reshape a flat result, with axes in this order ("": that of the index array), to the target's layout."""
    want = [e.bare or "" for e in bound.statement.target.indices]
    sizes = dict(zip(want, bound.shape, strict=True))
    return flat.reshape([int(sizes[name]) for name in order]).permute([order.index(name) for name in want]).contiguous()
