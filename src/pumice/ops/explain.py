"""Text of `explain`: forms, costs and kernels of a statement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.contraction import contraction_roles
from pumice.language.nodes import Statement, accesses_of, arrays_of, indices_of
from pumice.lower import kernel as kernels
from pumice.lower import plan


def explanation(operands: Sequence[Tensor], names: str, text: str, lowering: str) -> str:
    """The format-agnostic and the format-conscious form and, with operands, the choice, its costs and the kernel."""
    statement = plan.statement_of(text, names)
    lines = ["statement", f"  {statement}", ""]
    if not operands:
        forms = tuple((name, next(iter(held))) for name, held in plan.read(names).forms.items())
        done = plan.rewritten(text, names, forms)
        return "\n".join([*lines, *_steps(done.steps, done.dense)])
    bound = plan.sizes(text, names, [t.shape for t in operands], None)
    ranges = ", ".join(f"{name} {len(extent)}" for name, extent in bound.ranges.items())
    lines += ["sizes", f"  {ranges}", f"  {statement.target.name} {list(bound.shape)}", ""]
    found = plan.options(operands, names, text, bound.shape, lowering.partition("/")[0])
    for option in sorted(found, key=lambda o: o.cost):
        lines += _option(option, operands, names, text, bound.shape)
    return "\n".join(lines)


def _steps(steps: Sequence[Statement], dense: Mapping[str, str]) -> list[str]:
    used = [f"  {name} is used in dense form: {why}" for name, why in dense.items()]
    return ["steps", *(f"  {step}" for step in steps), *used, ""]


def _option(
    option: plan.Candidate, operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...]
) -> list[str]:
    form = ", ".join(f"{name} as {form}" for name, form in option.forms) or "dense operands"
    if option.refused:
        return [f"{form}: refused", f"  {option.refused}", ""]
    tensors = plan.arrays(operands, names, text, option)
    lines = [f"{form}: {' and '.join(option.lowerings)}, estimated {1e6 * option.cost:.1f} us"]
    lines += [*_held(operands, names, option), "", *_steps(option.steps, {})]
    for step in option.steps:
        lines += _ways(step, tensors, shape)
    return lines


def _held(operands: Sequence[Tensor], names: str, option: plan.Candidate) -> list[str]:
    """Bytes of each sparse operand in the chosen form."""
    form, held = dict(option.forms), {}
    for (name, stored, _, _), place in plan.read(names).places.items():
        if form.get(name) == stored:
            held[name] = held.get(name, 0) + operands[place].nbytes
    return [f"  {name}: {_count(size)}B in the arrays that are read" for name, size in held.items()]


def _ways(step: Statement, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> list[str]:
    """Cost (or refusal) of each lowering of a step, its work and index roles, and the source of its kernel."""
    lines = [f"lowerings of {step}"]
    device = plan.device_of(list(tensors.values()))
    for name, cost, why in plan.step_options(step, tensors, shape, device, ""):
        lines.append(f"  {name:10} {why if cost == math.inf else f'{1e6 * cost:.1f} us'}")
    bound = plan.step_bound(step, tensors, shape)
    lines += ["", _work(step, bound), *_contraction(step, bound), ""]
    if source := kernels.source_of(bound, tensors):
        lines += [f"kernel, tile {kernels.tile_of(bound, tensors)}", source, ""]
    return lines


def _work(step: Statement, bound: BoundStatement) -> str:
    """Iteration points, FLOP, and values gathered and scattered through index arrays."""
    gathers = sum(bound.points(indices_of(access)) for access in accesses_of(*step.terms) if arrays_of(*access.indices))
    scatters = bound.points(indices_of(step.target)) if arrays_of(*step.target.indices) else 0
    points = bound.points(indices_of(step))
    factors = max((len(term.factors) for term in step.terms), default=1)
    return (
        f"work       {_count(points)} points, {_count(factors * points)} FLOP, {_count(gathers)} values gathered, "
        f"{_count(scatters)} scattered"
    )


def _count(value: float) -> str:
    """A number with the suffix k, M, G or T."""
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def _contraction(step: Statement, bound: BoundStatement) -> list[str]:
    if step.reduction != "sum" or len(step.terms) != 1:
        return []
    found = contraction_roles(step, bound.extents)
    kind = "matrix product" if found.product else "entry by entry"
    parts = [("batch", found.batch), ("rows", found.rows), ("columns", found.columns), ("reduced", found.reduced)]
    parts.append(("loops", found.loops))
    roles = ", ".join(f"{label} {' '.join(names)}" for label, names in parts if names)
    lines = [f"roles      {kind}: {roles}"]
    if found.segment:
        lines.append(f"           segments of {found.segment.array}: each result is written once, in a fixed order")
    elif found.atomic:
        lines.append("           results are added to memory by atomics, in float32")
    return lines
