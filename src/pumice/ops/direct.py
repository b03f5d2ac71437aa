"""Products of sparse operands computed by loop nests over their levels, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.formats import parse_format
from pumice.language.iteration import IterationChoices
from pumice.language.nodes import Access, Statement, indices_of
from pumice.lower.iterate import ReadyProduct, SparseProduct
from pumice.lower.levels import StoredForm, StoredLevels, StoredOperand
from pumice.ops import autograd
from pumice.ops.sparse import Sparse
from pumice.runtime.cache import BoundedCache
from pumice.schedule.loop_rule import PRESETS
from pumice.schedule.loops import LoopSchedule, check_of_levels


def windowed(statement: Statement, sparse: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a coordinate of a sparse factor is a sum of indices, so that its entries would write through windows.
    sparse: the axes of each sparse operand that have coordinates."""
    coordinates = (f.indices[axis] for f in _reads(statement, sparse) for axis in sparse[f.name])
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


def choices_of_windows(
    lowering: str, statement: Statement, sparse: Mapping[str, tuple[int, ...]]
) -> IterationChoices | None:
    """What a lowering prescribes for the nest of a statement that reads one sparse operand, through windows; None if it
    asks for something else. Raises OptionError if it cannot have the schedule. sparse: as above."""
    name, _, preset = lowering.partition("/")
    if preset == "deepsparse":
        # Of each pixel its entries, in the order in which they are stored; vectors along the output channels.
        names = indices_of(
            statement.target, *(e for f in _reads(statement, sparse) for e in f.indices), *statement.terms
        )
        return IterationChoices(names)
    if name not in ("", "nest") or (preset in PRESETS and preset != "direct"):
        return None
    return IterationChoices() if lowering == "nest" else choices_of(lowering, [*sparse])


def _reads(statement: Statement, sparse: Mapping[str, tuple[int, ...]]) -> list[Access]:
    factors = (f for term in statement.terms for f in term.factors)
    return [f for f in factors if isinstance(f, Access) and f.name in sparse]


class LevelNests:
    """Nests over the levels of a product's operands, which are of the formats and shapes of these. pattern: the place
    of the factor at whose entries the target has values, which are returned; or -1."""

    def __init__(
        self,
        bound: BoundStatement,
        operands: Mapping[str, Any],
        pattern: int = -1,
        choices: IterationChoices = IterationChoices(),  # noqa: B008 (immutable)
    ) -> None:
        self._names = [f.name for f in bound.statement.terms[0].factors if isinstance(f, Access)]
        self._product = SparseProduct(bound, self._factors(operands), pattern, choices)
        self._dense = BoundedCache[frozenset[str]](256)

    def _factors(self, operands: Mapping[str, Any]) -> list[Tensor | StoredOperand]:
        return [x if isinstance(x := operands[name], Tensor) else stored_operand(x) for name in self._names]

    def ready(self, operands: Mapping[str, Any]) -> ReadyProduct | None:
        """The product of these operands; None if no nest computes it."""
        if autograd.has_active_mode():
            return None
        found = self._product.ready(self._factors(operands))
        return None if isinstance(found, str) else found

    def choose(self, operands: Mapping[str, Any]) -> ReadyProduct | frozenset[str] | None:
        """The same, or the sparse operands that are best used in dense form: vectors run along dense axes alone. The
        latter are remembered by about the numbers of entries: levels of such operands are not needed again."""
        if autograd.has_active_mode():
            return None
        sizes, recorded = list[int](), torch.is_grad_enabled()
        for name in self._names:
            x = operands[name]
            if isinstance(x, Sparse):
                sizes.append(x.nnz.bit_length())
                x = x.parts[0].values
            if recorded and x is not None and x.requires_grad:
                return None
        if (names := self._dense.get(key := tuple(sizes))) is not None:
            return names
        found = self._product.ready(self._factors(operands))
        if isinstance(found, str):
            return None
        if not found.planned.dense:
            return found
        return self._dense.keep(key, frozenset([self._names[place] for place in found.planned.dense]))

    def explained(self, operands: Mapping[str, Any]) -> str:
        """The loop nest of the product and its C source, or the reason why there is none."""
        found = self._product.ready(self._factors(operands))
        if isinstance(found, str):
            return f"no nest over levels: {found}"
        return f"loop nest over levels\n{found.planned.source}"


def stored_operand(x: Sparse) -> StoredOperand:
    """An operand without groups and blocks."""
    return StoredOperand(x.storage("levels", _levels), x.parts[0].values)


def _levels(x: Sparse) -> StoredLevels:
    coords = x.parts[0].coords
    form, names = _form(str(x.format), x.shape, tuple(coords))
    return StoredLevels(form, [coords[name] for name in names], x.storage("rows", lambda _: None))


@lru_cache(maxsize=1024)
def _form(text: str, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[StoredForm, tuple[str, ...]]:
    """The form of an operand, and the names of the axes that have coordinates, outermost first."""
    format = parse_format(text)
    form = StoredForm.of(format, shape, names)
    return form, tuple(format.axes[axis] for axis in form.axes)
