"""Products of sparse operands computed by loop nests over their levels, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, indices_of
from pumice.lower import iterate
from pumice.ops.sparse import Sparse


def windowed(statement: Any, sparse: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a coordinate of a sparse factor is a sum of indices, so that its entries would write through windows.
    sparse: the axes of each sparse operand that have coordinates."""
    factors = (f for term in statement.terms for f in term.factors if isinstance(f, Access) and f.name in sparse)
    return any(len(indices_of(f.indices[axis])) > 1 for f in factors for axis in sparse[f.name])


def product_of(bound: BoundStatement, operands: Mapping[str, Any], pattern: int) -> iterate.SparseProduct:
    """A statement of one product, with its operands by place. pattern: the factor whose pattern the target has, or -1."""
    factors = [f for f in bound.statement.terms[0].factors if isinstance(f, Access)]
    given = {number: operands[f.name] for number, f in enumerate(factors)}
    sparse = {number: stored_operand(x) for number, x in given.items() if isinstance(x, Sparse)}
    return iterate.SparseProduct(bound, sparse, {n: x for n, x in given.items() if n not in sparse}, pattern)


def stored_operand(x: Sparse) -> iterate.StoredOperand:
    """An operand without groups and blocks."""
    names = [name for level in x.format.levels for name in level.axes]
    coords = x.parts[0].coords
    found = tuple((x.format.axes.index(name), coords[name]) for name in names if name in coords)
    return iterate.StoredOperand(x.format, x.shape, found, x.parts[0].values)


def computed(bound: BoundStatement, operands: Mapping[str, Any], pattern: int) -> Tensor | None:
    """The target of one product (its values at the entries of the pattern), or None if no nest computes it."""
    product = product_of(bound, operands, pattern)
    if iterate.refusal(product) is not None:
        return None
    tensors = [x if isinstance(x, Tensor) else x.parts[0].values for x in operands.values()]
    kinds = [t.dtype for t in tensors if t is not None and t.dtype.is_floating_point]
    return iterate.run(product, kinds[0] if kinds else torch.get_default_dtype())
