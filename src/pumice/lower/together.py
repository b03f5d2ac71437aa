"""Several statements over the same operands, such as all gradients of a call: one kernel where there is one.

    result[0] += statement 0;   result[1] += statement 1;   result[0] += statement 2; ..

Sums over a small table (pumice.lower.unrolled) read each operand once for all of their statements. Other statements run
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Statement
from pumice.lower import kernel as kernels
from pumice.lower import plan, unrolled
from pumice.lower.unrolled import TableForm, Target
from pumice.runtime.cache import BoundedCache


class StatementPart(NamedTuple):
    """A statement over some operands of a call, by their places; result: the number of the result that it adds to."""

    places: tuple[int, ...]
    names: str
    text: str
    result: int


class _Joined(NamedTuple):
    """What one kernel computes. results: the numbers of its results; forms: with coefficients, whose operands are named
    by their places; extents: of rows and lanes."""

    results: tuple[int, ...]
    forms: tuple[tuple[TableForm, float], ...]
    extents: tuple[int, int]


def is_candidate(operand: Tensor, names: str, text: str, lowering: str) -> bool:
    """True if the gradients of a call may be one kernel. The interpreter is for tests, and only used by name."""
    wanted = lowering.removesuffix(plan.PREFERRED)
    runs = operand.is_cuda or (wanted == "unrolled" and kernels.interpreted())
    return runs and wanted in ("", "unrolled") and _has_table(names, text)


@lru_cache(maxsize=1024)
def _has_table(names: str, text: str) -> bool:
    found = _step(names, text)
    form = None if found is None else unrolled.form_of(found[1])
    return form is not None and sum(bool(view.table) for view in form.factors) > 1


def run(
    operands: Sequence[Tensor], parts: tuple[StatementPart, ...], targets: tuple[Target, ...], lowering: str
) -> list[Tensor]:
    """The results, new tensors of their shapes and dtypes. lowering: of all statements, "" for any."""
    joined = _joined(operands, parts, targets, lowering)
    found: dict[int, Tensor] = {}
    if joined is not None:
        held = {str(place): x for place, x in enumerate(operands)}
        own = tuple(targets[n] for n in joined.results)
        found = dict(zip(joined.results, unrolled.run_sums(joined.forms, joined.extents, own, held), strict=True))
    for part in parts:
        if joined is None or part.result not in joined.results:
            given = [operands[place] for place in part.places]
            own = plan.execute(given, part.names, part.text, targets[part.result].shape, lowering)
            found[part.result] = found[part.result] + own if part.result in found else own
    return [found[n].to(target.dtype) for n, target in enumerate(targets)]


def _joined(
    operands: Sequence[Tensor], parts: tuple[StatementPart, ...], targets: tuple[Target, ...], lowering: str
) -> _Joined | None:
    if not is_candidate(operands[0], parts[0].names, parts[0].text, lowering):
        return None
    key = (parts, targets, *[(x.shape, x.dtype, x.device) for x in operands])
    if key not in _JOINED:
        _JOINED.keep(key, _join(operands, parts, targets))
    return _JOINED[key]


def _join(operands: Sequence[Tensor], parts: tuple[StatementPart, ...], targets: tuple[Target, ...]) -> _Joined | None:
    found = {part: _form(operands, part, targets[part.result]) for part in parts}
    alone = {part.result for part, form in found.items() if form is None}
    ends = {(part.result, form[0].target) for part, form in found.items() if form is not None}
    alone |= {n for n, _ in ends if sum(n == other for other, _ in ends) > 1}
    kept = {part: form for part, form in found.items() if form is not None and part.result not in alone}
    alike = {(form[0].tables, form[0].values, form[2]) for form in kept.values()}
    if len(kept) < 2 or len(alike) != 1:
        return None
    forms = tuple((form, coefficient) for form, coefficient, _ in kept.values())
    ((*_, extents),) = alike
    return _Joined(tuple(dict.fromkeys(part.result for part in kept)), forms, extents)


def _form(
    operands: Sequence[Tensor], part: StatementPart, target: Target
) -> tuple[TableForm, float, tuple[int, int]] | None:
    """(form, coefficient, extents of rows and lanes) of a statement over a table, else None."""
    step = _step(part.names, part.text)
    if step is None:
        return None
    forms, statement = step
    places = {name: part.places[n] for name, n in plan.array_places(part.names, part.text, forms).items()}
    tensors = {name: operands[place] for name, place in places.items()}
    bound: BoundStatement = plan.step_bound(statement, tensors, target.shape)
    form = unrolled.form_of(statement)
    if form is None or unrolled.refusal(statement, bound, tensors) is not None:
        return None
    named = form.named({name: str(place) for name, place in places.items()}, f"result {part.result}")
    return named, float(statement.terms[0].coefficient), (bound.extents[form.row], bound.extents[form.lane])


@lru_cache(maxsize=1024)
def _step(names: str, text: str) -> tuple[tuple[tuple[str, str], ...], Statement] | None:
    """(storage forms, the only step) of a call over the first storage form of each sparse operand, None for several."""
    forms = plan.read(names).first_forms
    done = plan.rewritten(text, names, forms)
    return (forms, done.steps[0]) if len(done.steps) == 1 and not done.dense else None


_JOINED: BoundedCache[_Joined | None] = BoundedCache(1024)
