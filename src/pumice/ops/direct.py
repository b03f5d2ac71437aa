"""Products of sparse operands computed by loop nests over their levels, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.iteration import IterationChoices
from pumice.language.nodes import Access, Statement, indices_of
from pumice.lower.iterate import SparseProduct, dense_places, refusal, run, source_of
from pumice.lower.levels import StoredOperand
from pumice.ops.sparse import Sparse
from pumice.schedule.loop_rule import PRESETS
from pumice.schedule.loops import LoopSchedule, check_of_levels


def windowed(statement: Statement, sparse: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a coordinate of a sparse factor is a sum of indices, so that its entries would write through windows.
    sparse: the axes of each sparse operand that have coordinates."""
    factors = [f for term in statement.terms for f in term.factors if isinstance(f, Access) and f.name in sparse]
    coordinates = (f.indices[axis] for f in factors for axis in sparse[f.name])
    return statement.reduction == "sum" and any(len(indices_of(e)) > 1 for e in coordinates)


def contiguous(statement: Statement, sparse: Mapping[str, tuple[int, ...]]) -> bool:
    """True if vectors along the target's last axis are neighbours in all factors, or the same: its indices are in last
    axes of dense operands only. sparse: as above."""
    last = {*indices_of(*statement.target.indices[-1:])}
    factors = [f for term in statement.terms for f in term.factors if isinstance(f, Access)]
    other = (axis for f in factors for axis in (f.indices if f.name in sparse else f.indices[:-1]))
    return last.isdisjoint(indices_of(*other))


def choices_of(lowering: str, sparse: Sequence[str]) -> IterationChoices | None:
    """What a lowering prescribes for nests over the levels of these operands; None if it asks for something else.
    Raises OptionError if they cannot have the schedule."""
    name, _, text = lowering.partition("/")
    if not lowering or text == "direct":
        return IterationChoices()
    if name != "nest" or not text or text in PRESETS:
        return None
    schedule = LoopSchedule.parse(text)
    check_of_levels(schedule, sparse)
    return IterationChoices(schedule.order, schedule.vector[0][0] if schedule.vector else None, schedule.locate)


def computed(
    bound: BoundStatement, operands: Mapping[str, Any], pattern: int, choices: IterationChoices
) -> Tensor | None:
    """The target of one product, or None if no nest computes it. pattern: the place of the factor at whose entries the
    target has values, which are returned; or -1."""
    product = _product(bound, operands, pattern, choices)
    if refusal(product) is not None:
        return None
    return run(product, _dtype(product))


def best_dense(bound: BoundStatement, operands: Mapping[str, Any]) -> frozenset[str]:
    """The sparse operands of a product that are best used in dense form: vectors run along dense axes alone."""
    product = _product(bound, operands, -1, IterationChoices())
    if refusal(product) is not None:
        return frozenset()
    names = [f.name for f in bound.statement.terms[0].factors if isinstance(f, Access)]
    return frozenset(names[place] for place in dense_places(product))


def explained(bound: BoundStatement, operands: Mapping[str, Any], pattern: int, choices: IterationChoices) -> str:
    """The loop nest of a product and its C source, or the reason why there is none."""
    product = _product(bound, operands, pattern, choices)
    why = refusal(product)
    return f"no nest over levels: {why}" if why else f"loop nest over levels\n{source_of(product, _dtype(product))}"


def _product(
    bound: BoundStatement, operands: Mapping[str, Any], pattern: int, choices: IterationChoices
) -> SparseProduct:
    given = [operands[f.name] for f in bound.statement.terms[0].factors if isinstance(f, Access)]
    return SparseProduct(bound, tuple(x if isinstance(x, Tensor) else stored(x) for x in given), pattern, choices)


def _dtype(product: SparseProduct) -> torch.dtype:
    tensors = [x if isinstance(x, Tensor) else x.values for x in product.factors]
    return next(t.dtype for t in tensors if t is not None and t.dtype.is_floating_point)


def stored(x: Sparse) -> StoredOperand:
    """An operand without groups and blocks."""
    coords, names = x.parts[0].coords, (name for name, _ in x.format.coordinates)
    found = tuple((x.format.axes.index(name), coords[name]) for name in names if name in coords)
    return StoredOperand(x.format, x.shape, found, x.parts[0].values)
