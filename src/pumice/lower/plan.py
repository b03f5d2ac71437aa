"""Planner: choose a form of each sparse operand and a lowering of each step by the cost model.

read(names)      parse the operand names of a call
options(...)     every form and lowering, with its cost or the reason for refusal
execute(...)     run the cheapest one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.errors import OptionError
from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import declare
from pumice.language.formats import parse_format
from pumice.language.nested import unnested
from pumice.language.nodes import Access, Exists, Statement, accesses_of, arrays_of, indices_of
from pumice.language.parse import parse
from pumice.language.rewrite import LoweredStatement, StorageForm, lower_statement, single_terms
from pumice.lower import (
    block_rows,
    block_sums,
    chained,
    cpu,
    entry_sums,
    graph,
    inductor,
    maps,
    nest,
    nest_tune,
    rowwise,
    segment_sums,
    unrolled,
    work,
)
from pumice.lower import kernel as kernels
from pumice.lower import reference as loops
from pumice.lower.call import BoundCall, BoundExecutor, CallTemplate, MapCall, Sizes
from pumice.lower.epilogue import NO_EPILOGUE, Epilogue, EpilogueSignature, applied
from pumice.runtime.cache import BoundedCache, cached_per_tensor
from pumice.runtime.repeat import Repeated
from pumice.runtime.workspace import require_memory
from pumice.schedule.predict import DEVICES, Device, Work, seconds
from pumice.schedule.tile import size_class
from pumice.schedule.tuner import Clock

Shapes = Mapping[str, tuple[int, ...]]
Refusal = Callable[[Statement, BoundStatement, Mapping[str, Tensor]], str | None]
Run = Callable[[Mapping[str, Tensor], Tensor | None], Tensor]


@dataclass(frozen=True)
class Lowering:
    """An implementation of a step. refusal: why it cannot run, or None; step: the function that runs it, of its sizes,
    operands of like shapes, the result's dtype, and a precision or the schedule of a loop nest; work: for the cost
    model. named: it runs only if lowering= names it."""

    refusal: Refusal
    step: Callable[[BoundStatement, Mapping[str, Tensor], torch.dtype, str], Run]
    work: Callable[[Statement, BoundStatement, Mapping[str, Tensor]], Work]
    named: bool = False


@dataclass(frozen=True)
class OperandLayout:
    """Parsed operand names of a call: dense operands, forms of sparse ones with their arrays, shapes, integers.

    places: the position of each tensor, by (operand, form, part, local array); form "" for a dense operand.
    """

    dense: tuple[str, ...]
    forms: Mapping[str, Mapping[str, StorageForm]]
    places: Mapping[tuple[str, str, int, str], int]
    shapes: Shapes
    integers: Mapping[str, int]

    @cached_property
    def first_forms(self) -> tuple[tuple[str, str], ...]:
        """(operand, its first form) of the sparse operands."""
        return tuple((name, next(iter(known))) for name, known in self.forms.items())


@dataclass(frozen=True)
class Candidate:
    """A form of each sparse operand and a lowering of each step, with the estimated seconds or a reason for refusal."""

    forms: tuple[tuple[str, str], ...]
    lowerings: tuple[str, ...]
    steps: tuple[Statement, ...]
    cost: float
    refused: str = ""


def token(operand: str, form: str, part: int, local: str) -> str:
    """The name under which an array of a sparse operand is passed."""
    return f"{operand}@{form}@{part}@{local}"


@lru_cache(maxsize=1024)
def read(names: str) -> OperandLayout:
    """Parse "X|W|map@pairs@0@o|...;A=4096x4096;STR=2": tokens in the order of the tensors, shapes, integers."""
    tokens, *rest = names.split(";")
    dense: list[str] = []
    places: dict[tuple[str, str, int, str], int] = {}
    by_operand: dict[str, dict[str, dict[int, set[str]]]] = {}
    for place, text in enumerate(tokens.split("|") if tokens else []):
        if "@" not in text:
            dense.append(text)
            places[text, "", 0, ""] = place
            continue
        operand, form, part, local = text.split("@")
        places[operand, form, int(part), local] = place
        by_operand.setdefault(operand, {}).setdefault(form, {}).setdefault(int(part), set()).add(local)
    shapes, integers = {}, {}
    for text in rest:
        name, _, value = text.partition("=")
        if "x" in value:
            shapes[name] = tuple(int(n) for n in value.split("x")[1:])
        else:
            integers[name] = int(value)
    forms = {name: {form: _stored(form, parts) for form, parts in own.items()} for name, own in by_operand.items()}
    return OperandLayout(tuple(dense), forms, places, shapes, integers)


def _stored(form: str, parts: Mapping[int, set[str]]) -> StorageForm:
    if form in maps.FORMS:
        return maps.form(form)
    return StorageForm.of(parse_format(form), len(parts), "values" not in parts[0])


@lru_cache(maxsize=1024)
def statement_of(text: str, names: str) -> Statement:
    """The statement of a call; max= and min= include the target's old values if it is passed."""
    given = read(names)
    statement = parse(text, given.integers)
    if statement.reduction in ("max", "min") and statement.target.name in given.dense:
        statement = replace(statement, accumulate=True)
    return statement


@lru_cache(maxsize=4096)
def rewritten(text: str, names: str, forms: tuple[tuple[str, str], ...]) -> LoweredStatement:
    """The steps of a call, lowered to the arrays of these forms."""
    given = read(names)
    return lower_statement(statement_of(text, names), {name: given.forms[name][form] for name, form in forms})


def sizes(text: str, names: str, shapes: Sequence[Sequence[int]], shape: Sequence[int] | None) -> BoundStatement:
    """The statement of a call with its sizes; sparse operands have their dense shape."""
    given = read(names)
    known = dict(given.shapes)
    known.update((name, tuple(shapes[given.places[name, "", 0, ""]])) for name in given.dense)
    return bind(statement_of(text, names), known, shape)


@dataclass(frozen=True, eq=False)
class PlanStep:
    """An executable step, and the positions of its tensors among the operands, by name.

    run(tensors, before) adds to `before`, the sum of the earlier steps (None for the first), and may overwrite it.
    result: name of the operand of later steps that the step computes instead; reads: such operands of this one.
    """

    run: Run
    places: tuple[tuple[str, int], ...]
    result: str = ""
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """Executable plan of a call for given shapes, dtypes and devices.

    accumulated: position of the target's old values among the operands, if they are used. applies_epilogue: the last
    step does. result_dtype: dtype after the epilogue.
    """

    steps: tuple[PlanStep, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    accumulated: int | None
    result_dtype: torch.dtype
    applies_epilogue: bool = False

    @property
    def kernel(self) -> BoundExecutor | None:
        """The only step, if that is a bound kernel of the plan's dtype, else None."""
        run = self.steps[0].run if len(self.steps) == 1 else None
        return run if isinstance(run, BoundExecutor) and run.executor.dtype == self.dtype else None

    def keep_call(
        self, call: MapCall, tensors: Sequence[Tensor], numbers: Sequence[int], finish: EpilogueSignature = NO_EPILOGUE
    ) -> BoundCall | None:
        """Store the template of a call that ran, for calls of its signature over any map; return the bound call, or
        None if the plan is not one kernel.

        tensors: of the call, the epilogue's last; numbers: position of each runtime operand among them."""
        template = self._keep_template(call, (tensors, numbers), finish, True)
        return None if template is None else call.instantiate()

    def compilation(
        self, call: MapCall, tensors: Sequence[Tensor], numbers: Sequence[int], finish: EpilogueSignature = NO_EPILOGUE
    ) -> Callable[[], object] | None:
        """Store the template of a call that has not run, and return a task that compiles its kernel. None if there is
        a template or compiled kernel, the plan is not one kernel, or its tile has to be tuned first."""
        if self.kernel is None or call.template_like(self.kernel) is not None:
            return None
        template = self._keep_template(call, (tensors, numbers), finish, False)
        return None if template is None else template.compilation(call.on, call.rows, call.shape)

    def _keep_template(
        self, call: MapCall, given: tuple[Sequence[Tensor], Sequence[int]], finish: EpilogueSignature, was_run: bool
    ) -> CallTemplate | None:
        kernel, (tensors, numbers) = self.kernel, given
        if kernel is None or (finish != NO_EPILOGUE and not self.applies_epilogue):
            return None
        order = {name: numbers[n] for name, n in self.steps[0].places if n < len(numbers)}
        order |= {name: n for n, name in enumerate(finish.names, len(tensors) - len(finish.names))}
        family = kernel.family({name: tensors[n] for name, n in order.items()}, was_run)
        return None if family is None else call.keep_template(family, kernel, order)


def execute(operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...] | None, lowering: str) -> Tensor:
    """Plan and run a call. shape: of the target; None: inferred, with strict checks of the sizes."""
    return execute_plan(plan_for(operands, names, text, shape, lowering), operands)


def plan_for(
    operands: Sequence[Tensor],
    names: str,
    text: str,
    shape: tuple[int, ...] | None,
    lowering: str,
    finish: EpilogueSignature = NO_EPILOGUE,
    kept: torch.dtype | None = None,
) -> Plan:
    """The cached plan of a call. finish: of the epilogue; kept: result dtype, default: promoted from the values."""
    key = (
        text,
        names,
        shape,
        lowering,
        deterministic(),
        finish,
        kept,
        *[(t.shape, t.dtype, t.device) for t in operands],
    )
    if (known := _PLANS.get(key)) is not None:
        return known
    if finish == NO_EPILOGUE:
        return _PLANS.keep(key, _prepared(operands, names, text, shape, lowering, kept))
    # Results are rounded after the epilogue only.
    dtype = result_dtype(operands, names, text)
    made = _prepared(operands, names, text, shape, lowering, torch.promote_types(dtype, torch.float32))
    made = replace(made, result_dtype=kept or finish.dtype or dtype)
    return _PLANS.keep(key, _with_epilogue(made, finish, operands[0].device))


@dataclass(frozen=True)
class PlanRequest:
    """Planning request for a call with a bound map.

    static_rows: operand positions whose first axis has a fixed size; position len(operands) stands for the result.
    runtime_operands: positions of the operands passed per call, in its order. stream_k_chunk: of the tiles, 0: that of
    the heuristics. result_dtype: `kept` of plan_for.
    """

    names: str
    text: str
    shape: tuple[int, ...]
    static_rows: tuple[int, ...]
    runtime_operands: tuple[int, ...]
    lowering: str = ""
    finish: EpilogueSignature = NO_EPILOGUE
    stream_k_chunk: int = 0
    result_dtype: torch.dtype | None = None


Kind = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape (number of rows as its size class), dtype and device of an operand."""


def kind_of(operand: Tensor, static_rows: bool = False) -> Kind:
    """The Kind of an operand. static_rows: its first axis has a fixed size."""
    shape = operand.shape
    return shape if static_rows else (size_class(shape[0]), *shape[1:]), operand.dtype, operand.device


def bound_plan(operands: Sequence[Tensor], call: PlanRequest, kinds: Sequence[Kind | None] = ()) -> Plan:
    """The plan of a call with its map bound, chosen and cached by size class. kinds: of the operands, if known."""
    fixed, count = call.static_rows, len(operands)
    given = kinds or (None,) * count
    kinds = [k or kind_of(t, n in fixed) for n, (t, k) in enumerate(zip(operands, given, strict=True))]
    whole = call.shape if count in fixed else (size_class(call.shape[0]), *call.shape[1:])
    options = call.lowering, call.finish, call.stream_k_chunk, call.result_dtype, deterministic()
    key = (call.text, call.names, whole, *options, *kinds)
    known = _BUCKETED_PLANS.get(key)
    if known is None:
        made = _plan_for_request(operands, call)
        known = _BUCKETED_PLANS.keep(key, (made, all([_is_resizable(step.run) for step in made.steps])))
    made, resizable = known
    if resizable:
        return bind_operands(made, operands, call.runtime_operands, call.shape)
    return bind_operands(_plan_for_request(operands, call), operands, call.runtime_operands)


def _is_resizable(run: Run) -> bool:
    return isinstance(run, cpu.GatherExecutor) or (isinstance(run, kernels.KernelExecutor) and run.resizable)


def _plan_for_request(operands: Sequence[Tensor], call: PlanRequest) -> Plan:
    plan = plan_for(operands, call.names, call.text, call.shape, call.lowering, call.finish, call.result_dtype)
    return _with_stream_k(plan, operands, call.stream_k_chunk)


def _with_stream_k(plan: Plan, operands: Sequence[Tensor], piece: int) -> Plan:
    """The plan with stream-K kernels, where possible. piece: maximum entries of a segment per program; 0: unchanged."""
    if not piece:
        return plan
    parts = []
    for part in plan.steps:
        if isinstance(run := part.run, kernels.KernelExecutor):
            tile = kernels.tile_of(run.bound, {name: operands[place] for name, place in part.places}, run.precision)
            if kernels.can_share_segments(run.bound, tile):
                tile = replace(tile, stream_k_chunk=piece)
                part = replace(part, run=kernels.runner(run.bound, run.dtype, tile, run.precision, run.finish))
        parts.append(part)
    return replace(plan, steps=tuple(parts))


def _with_epilogue(plan: Plan, finish: EpilogueSignature, device: torch.device) -> Plan:
    """The plan with the epilogue fused into the last step, if that is a kernel that supports one."""
    last = plan.steps[-1] if plan.steps else None
    if last is None or not isinstance(last.run, kernels.KernelExecutor) or not last.run.applies_epilogue:
        return plan
    if plan.result_dtype == torch.float8_e4m3fn and kernels.without_fp8(device):
        return plan
    run = kernels.runner(last.run.bound, plan.result_dtype, None, last.run.precision, finish)
    return replace(
        plan, steps=(*plan.steps[:-1], replace(last, run=run)), dtype=plan.result_dtype, applies_epilogue=True
    )


def bind_operands(
    plan: Plan, operands: Sequence[Tensor], runtime_operands: Sequence[int], shape: tuple[int, ...] | None = None
) -> Plan:
    """Bind all operands but those at `runtime_operands`, which calls pass in this order. shape: of the result, if the
    plan consists of resizable kernels and was made for other sizes.

    Bound operands must not be written to afterwards, and cannot include the target's old values.
    """
    order = {place: number for number, place in enumerate(runtime_operands)}
    steps = []
    for step in plan.steps:
        bound = {name: operands[place] for name, place in step.places if place not in order}
        runtime = tuple([(name, order[place]) for name, place in step.places if place in order])
        at = None if shape is None else ({name: operands[place].shape for name, place in step.places}, shape)
        steps.append(replace(step, run=_bound_run(step.run, bound, at), places=runtime))
    old = None if plan.accumulated is None else order[plan.accumulated]
    return replace(plan, steps=tuple(steps), accumulated=old, shape=plan.shape if shape is None else shape)


def _bound_run(run: Run, bound: Mapping[str, Tensor], at: Sizes | None) -> Run:
    if isinstance(run, kernels.KernelExecutor):
        return BoundExecutor(run, bound, at)
    if isinstance(run, cpu.GatherExecutor) and at is not None:
        run = replace(run, shape=at[1])
    return lambda tensors, before: run({**bound, **tensors}, before)


def execute_plan(plan: Plan, operands: Sequence[Tensor], epilogue: Epilogue | None = None) -> Tensor:
    """Execute a plan with its epilogue, fused or not."""
    if epilogue is None:
        return _run_steps(plan, operands, {})
    inside = epilogue.operands if plan.applies_epilogue else {}
    found = _run_steps(plan, operands, inside)
    return found if plan.applies_epilogue else applied(found, epilogue, plan.result_dtype)


def _run_steps(plan: Plan, operands: Sequence[Tensor], more: Mapping[str, Tensor]) -> Tensor:
    """The sum of the steps. more: epilogue operands of the last one."""
    out: Tensor | None = None
    made: dict[str, Tensor] = {}
    for number, part in enumerate(plan.steps, 1):
        if part.places or part.reads or not operands:
            tensors = {name: operands[place] for name, place in part.places}
            if part.reads:
                tensors.update((name, made[name]) for name in part.reads)
            if more and number == len(plan.steps):
                tensors.update(more)
            if part.result:
                made[part.result] = part.run(tensors, None)
            else:
                out = part.run(tensors, out)
        else:
            # A term without tensors is computed on the CPU.
            result = part.run({}, None).to(operands[0].device)
            out = result if out is None else out + result
    if out is not None:
        return out if out.dtype == plan.dtype else out.to(plan.dtype)
    # The right side is 0.
    if plan.accumulated is not None:
        return operands[plan.accumulated].clone(memory_format=torch.contiguous_format)
    return torch.zeros(plan.shape, dtype=plan.dtype, device=operands[0].device if operands else None)


def repeated(plan: Plan, operands: Sequence[Tensor], given: Sequence[int]) -> Repeated | None:
    """A plan that ran as a function of the operands at the positions `given`, of the same layouts, the others being
    where they are now; None if it is not one kernel or loop nest that reads each of them. Further tensors are ignored
    by a loop nest."""
    if len(plan.steps) != 1 or plan.accumulated is not None:
        return None
    (step,) = plan.steps
    name_of = {place: name for name, place in step.places}
    if getattr(step.run, "dtype", None) != plan.dtype or not name_of.keys() >= {*given}:
        return None
    tensors, names = {name: operands[place] for name, place in step.places}, [name_of[place] for place in given]
    if isinstance(run := step.run, nest.NestStep | entry_sums.EntryStep | segment_sums.SegmentStep):
        return run.repeated(tensors, names)
    if not isinstance(run, kernels.KernelExecutor):
        return None
    bound = BoundExecutor(run, {name: x for name, x in tensors.items() if name not in names})
    return bound.repeated({name: tensors[name] for name in names})


def packs_values(plan: Plan) -> bool:
    """True if a repeated call takes values as they were: loop nests pack them, kernels read them where they are."""
    return any(isinstance(step.run, nest.NestStep) for step in plan.steps)


def depends_on_precision(plan: Plan) -> bool:
    """True if the plan's launches depend on the precision of float32 products that torch is set to."""
    return not all(isinstance(step.run, segment_sums.SegmentStep | nest.NestStep) for step in plan.steps)


class TuningLimits(NamedTuple):
    """candidates: schedules of a loop nest to measure besides the rule's; clock: budget of each, and its observer."""

    candidates: int
    clock: Clock


def tune(
    operands: Sequence[Tensor], names: str, text: str, lowering: str, limits: TuningLimits
) -> list[tuple[Statement, dict[Any, float]]]:
    """Autotune the tiles of all kernels of a plan, and the schedules of its loop nests: (statement, seconds by tile or
    schedule) of each."""
    ready = _prepared(operands, names, text, None, lowering)
    found: list[tuple[Statement, dict[Any, float]]] = []
    for part in ready.steps:
        tensors = {name: operands[place] for name, place in part.places}
        if isinstance(part.run, nest.NestStep):
            found.append((part.run.bound.statement, nest_tune.tune(part.run, tensors, *limits)))
        runners = [part.run] if isinstance(part.run, kernels.KernelExecutor) else []
        if isinstance(part.run, chained.TwoStepLowering):
            runners, tensors = [part.run.first, part.run.second], part.run.run_first(tensors)
        for runner in runners:
            times = kernels.tune(runner.bound, tensors, runner.dtype, kernels.measured)
            found.append((runner.bound.statement, times))
    return found


def _prepared(
    operands: Sequence[Tensor],
    names: str,
    text: str,
    shape: tuple[int, ...] | None,
    lowering: str,
    dtype: torch.dtype | None = None,
) -> Plan:
    dtype = dtype or result_dtype(operands, names, text)
    if shape is None:
        bound = _sizes(text, names, tuple(tuple(t.shape) for t in operands))
        shape = bound.shape
        text = with_lost_ranges(text, names, bound)
    if math.prod(shape) >> 24:  # smaller ones fit
        _require_memory(operands, names, text, shape, dtype)
    option = _option(operands, names, text, shape, lowering)
    choice = lowering.partition("/")[2]
    places = array_places(names, text, option.forms)
    parts = []
    for number, step in enumerate(placed(option.steps, arrays(operands, names, text, option), shape), 1):
        read_here = {access.name for access in accesses_of(step.statement)}
        used = tuple((name, place) for name, place in places.items() if name in read_here)
        tensors = {name: x for name, x in step.tensors.items() if name in read_here}
        # Accumulate in float32; only the last step rounds.
        last = number == len(option.steps) or not dtype.is_floating_point
        kind = step.dtype or (dtype if last else torch.promote_types(dtype, torch.float32))
        run = LOWERINGS[option.lowerings[number - 1]].step(step.bound, tensors, kind, choice)
        if step.result and all(isinstance(f, Exists) for term in step.statement.terms for f in term.factors):
            run = _cached_places(run, tensors)
        parts.append(PlanStep(run, used, step.result, tuple(name for name in tensors if name not in places)))
    statement, given = statement_of(text, names), read(names)
    old = given.places.get((statement.target.name, "", 0, "")) if statement.accumulate else None
    return Plan(tuple(parts), shape, dtype, old, dtype)


def _cached_places(run: Run, tensors: Mapping[str, Tensor]) -> Run:
    """`run` of a step that tells where operands exist, cached by its index arrays: of the others it sees the shapes."""
    if isinstance(run, kernels.KernelExecutor | chained.TwoStepLowering):
        return run
    seen = {name: x.new_empty(()).expand(x.shape) for name, x in tensors.items() if x.is_floating_point()}
    names = [name for name in tensors if name not in seen]
    found = cached_per_tensor(lambda *arrays: run({**seen, **dict(zip(names, arrays, strict=True))}, None))
    return lambda given, _: found(*(given[name] for name in names)) if names else run(given, None)


def _require_memory(
    operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise ShapeError if the target exceeds device memory; on a CPU index_add and scatter_reduce copy it."""
    device = operands[0].device if operands else torch.device("cpu")
    copied = device.type == "cpu" and graph.looked_up(statement_of(text, names).target, distinct=True)
    require_memory(shape, dtype, device, f"the target of `{text}`", 2 if copied else 1)


def _option(operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...], lowering: str) -> Candidate:
    """The cheapest candidate with this lowering; with any if it is only PREFERRED and refused."""
    wanted = lowering.removesuffix(PREFERRED)
    name = wanted.partition("/")[0]
    key = (names, text, name, deterministic(), *((_bucket(t.shape), t.dtype, t.device.type) for t in operands))
    # The choice was cached for a bucket of sizes and may be refused for these.
    if (known := _CHOSEN.get(key)) is not None and not _refused(known, operands, names, text, shape):
        return known
    try:
        return _CHOSEN.keep(key, _cheapest(operands, names, text, shape, name))
    except OptionError:
        if wanted == lowering:
            raise
        return _option(operands, names, text, shape, "")


def schedule_of(choice: str) -> nest.Wanted | None:
    """The schedule of loop nests in a lowering behind "/", None without. One that is only PREFERRED may be replaced by
    the rule's. Raises OptionError for other text."""
    text = choice.removesuffix(PREFERRED)
    return nest.Wanted.of(text, text != choice) if text else None


def result_dtype(operands: Sequence[Tensor], names: str, text: str) -> torch.dtype:
    """The promoted dtype of the values (and of the target if it is read); 8-bit values count as float32."""
    kinds = [torch.float32 if t.dtype in loops.EIGHT_BITS else t.dtype for t in value_tensors(operands, names, text)]
    found = kinds[0] if kinds else torch.float32
    for kind in kinds[1:]:
        found = torch.promote_types(found, kind)
    return found


def value_tensors(operands: Sequence[Tensor], names: str, text: str) -> list[Tensor]:
    """The tensors whose values enter the result; index arrays are left out."""
    given, statement = read(names), statement_of(text, names)
    values = loops.value_names(statement)
    found = [operands[given.places[name, "", 0, ""]] for name in values if name in given.dense]
    for (name, _, _, local), place in given.places.items():
        if local == "values" and name in values:
            found.append(operands[place])
    if statement.accumulate and statement.target.name in given.dense:
        found.append(operands[given.places[statement.target.name, "", 0, ""]])
    return found


def array_places(names: str, text: str, forms: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Positions of the tensors among the operands, by their names in the steps over these forms."""
    given, form = read(names), dict(forms)
    found = {name: given.places[name, "", 0, ""] for name in given.dense}
    for name, array in rewritten(text, names, forms).arrays.items():
        found[name] = given.places[array.operand, form[array.operand], array.part, array.local]
    return found


def arrays(operands: Sequence[Tensor], names: str, text: str, option: Candidate) -> dict[str, Tensor]:
    """The tensors of a call by their names in the steps of a candidate."""
    return {name: operands[place] for name, place in array_places(names, text, option.forms).items()}


def _cheapest(operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...], lowering: str) -> Candidate:
    """The cheapest candidate. Raises OptionError with every reason if all are refused."""
    found = sorted(options(operands, names, text, shape, lowering), key=lambda option: option.cost)
    if not found or found[0].refused:
        reasons = "; ".join(dict.fromkeys(option.refused for option in found))
        raise OptionError(f"`{text}` has no lowering here: {reasons}")
    return found[0]


def _refused(option: Candidate, operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...]) -> bool:
    """True if a step's lowering refuses these operands."""
    steps = placed(option.steps, arrays(operands, names, text, option), shape)
    every = zip(steps, option.lowerings, strict=True)
    return any(LOWERINGS[name].refusal(step.statement, step.bound, step.tensors) for step, name in every)


def options(
    operands: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...], lowering: str = ""
) -> Iterator[Candidate]:
    """Every form of the sparse operands with the cheapest lowering of each step, or the reasons for refusal."""
    given = read(names)
    each = [[(name, form) for form in forms] for name, forms in given.forms.items()]
    device = device_of(operands)
    for forms in product(*each):
        done = rewritten(text, names, forms)
        if done.dense:
            yield Candidate(
                forms, (), done.steps, math.inf, "; ".join(f"{n} is dense: {w}" for n, w in done.dense.items())
            )
            continue
        bare = Candidate(forms, (), done.steps, 0.0)
        tensors = arrays(operands, names, text, bare)
        ways = [list(step_options(step, device, lowering)) for step in placed(done.steps, tensors, shape)]
        names_ = tuple(min(way, key=lambda w: w[1])[0] for way in ways)
        costs = [min(way, key=lambda w: w[1]) for way in ways]
        stuck = (way for way, (_, cost, _) in zip(ways, costs, strict=True) if cost == math.inf)
        refused = "; ".join(f"{n}: {why}" for way in stuck for n, _, why in way)
        yield replace(bare, lowerings=names_, cost=sum(c for _, c, _ in costs), refused=refused)


class PlacedStep(NamedTuple):
    """A step with its sizes and tensors. result: name of the operand of later steps that it computes, and its dtype
    if that is fixed; "" for a step that adds to the target."""

    statement: Statement
    bound: BoundStatement
    tensors: Mapping[str, Tensor]
    result: str
    dtype: torch.dtype | None


def placed(steps: Sequence[Statement], tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Iterator[PlacedStep]:
    """The steps with their sizes; results that later steps read are uninitialised tensors."""
    first = True
    for step in steps:
        result = "" if step.target.name == steps[-1].target.name else step.target.name
        # The first step adds the target's old values.
        step = step if first else replace(step, accumulate=False)
        first = first and bool(result)
        bound = step_bound(step, tensors, None if result else shape)
        dtype = torch.int64 if result in {array.name for array in arrays_of(steps[-1])} else None
        yield PlacedStep(step, bound, tensors, result, dtype)
        if result:
            like = [tensors[name] for name in loops.read_names(step) if name in tensors]
            kinds = [torch.promote_types(t.dtype, torch.float32) for t in like if t.dtype.is_floating_point]
            kind = dtype or next(iter(kinds), torch.int64)
            tensors = {**tensors, result: torch.empty(bound.shape, dtype=kind, device=like[0].device if like else None)}


def step_bound(step: Statement, tensors: Mapping[str, Tensor], shape: tuple[int, ...] | None) -> BoundStatement:
    """A step with its sizes. shape: of its target, None if that follows from its indices."""
    return _bound(step, tuple((name, tuple(t.shape)) for name, t in tensors.items()), shape)


def step_options(step: PlacedStep, device: Device, wanted: str) -> Iterator[tuple[str, float, str]]:
    """(lowering, estimated seconds, reason for refusal) of every candidate lowering."""
    for name, lowering in LOWERINGS.items():
        if wanted and name != wanted:
            continue
        if lowering.named and not wanted:
            yield name, math.inf, "it runs only if lowering= names it"
            continue
        # The interpreter is for tests and only used if requested by name.
        if name in _ON_GPU and not wanted and device.name == "CPU":
            yield name, math.inf, "the operands are not on a GPU"
            continue
        why = lowering.refusal(step.statement, step.bound, step.tensors)
        cost = math.inf if why else seconds(lowering.work(step.statement, step.bound, step.tensors), device)
        yield name, cost, why or ""


def device_of(operands: Sequence[Tensor]) -> Device:
    """The device model for cost estimates of a call on these operands."""
    return DEVICES["cuda" if operands and operands[0].is_cuda else "cpu"]


@lru_cache(maxsize=4096)
def _sizes(text: str, names: str, shapes: tuple[tuple[int, ...], ...]) -> BoundStatement:
    return sizes(text, names, shapes, None)


@lru_cache(maxsize=4096)
def _bound(
    step: Statement, shapes: tuple[tuple[str, tuple[int, ...]], ...], shape: tuple[int, ...] | None
) -> BoundStatement:
    return bind(step, dict(shapes), shape, strict=False)


def with_lost_ranges(text: str, names: str, bound: BoundStatement) -> str:
    """The text, with declarations added for ranges that the single steps could not infer (those set by windows)."""
    statement = statement_of(text, names)
    lost = dict(statement.ranges)
    for step in unnested(statement) if statement.summed else single_terms(statement):
        # The target of a step that computes an operand has no size of its own.
        own = step if step.target.name == statement.target.name else replace(step, target=Access(step.target.name))
        lost.update((name, extent) for name, extent in declare(own, bound.ranges).ranges if name in bound.ranges)
    sparse = set(read(names).forms)
    for access in accesses_of(statement):
        if access.name in sparse:
            lost.update((n, bound.ranges[n]) for n in indices_of(access) if n in bound.windowed)
    return text if len(lost) == len(statement.ranges) else str(replace(statement, ranges=tuple(lost.items())))


PREFERRED = "?"
"""Suffix of a lowering that may be replaced if refused: it may not support the statements of gradients."""

deterministic: Callable[[], bool] = torch.are_deterministic_algorithms_enabled


def _bucket(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes rounded to powers of two, for cache keys."""
    return tuple(int(n).bit_length() for n in shape)


def _on_gpu(refusal: Refusal) -> Refusal:
    """`refusal` that also refuses operands off the GPU, unless Triton interprets kernels."""

    def refused(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
        if any(t.device.type != "cuda" for t in operands.values()) and not kernels.interpreted():
            return "the operands are not on a GPU"
        return refusal(statement, bound, operands)

    return refused


def _step_of(kind: Callable[[BoundStatement, torch.dtype], Run]) -> Any:
    """`Lowering.step` for steps that need nothing else."""
    return lambda bound, tensors, dtype, choice: kind(bound, dtype)


def _function_of(evaluate: Callable[[BoundStatement, Mapping[str, Tensor], torch.dtype], Tensor]) -> Any:
    """`Lowering.step` for a function that evaluates a statement."""

    def step(bound: BoundStatement, tensors: Mapping[str, Tensor], dtype: torch.dtype, _: str) -> Run:
        values = loops.value_names(bound.statement)
        narrow = [n for n in tensors if n in values and tensors[n].dtype in loops.EIGHT_BITS]

        def run(tensors: Mapping[str, Tensor], before: Tensor | None) -> Tensor:
            if narrow:
                # Torch neither multiplies 8-bit floats nor sums 8-bit integers.
                tensors = {**tensors, **{n: tensors[n].to(torch.float32) for n in narrow}}
            found = evaluate(bound, tensors, dtype)
            return found if before is None else before + found

        return run

    return step


def _of_kernel(bound: BoundStatement, _: Mapping[str, Tensor], dtype: torch.dtype, choice: str) -> Run:
    return kernels.runner(bound, dtype, None, choice.removesuffix(PREFERRED))


def _of_two(bound: BoundStatement, tensors: Mapping[str, Tensor], dtype: torch.dtype, choice: str) -> Run:
    return chained.TwoStepLowering(bound, tensors, dtype, choice.removesuffix(PREFERRED))


def _of_nest(bound: BoundStatement, _: Mapping[str, Tensor], dtype: torch.dtype, choice: str) -> Run:
    return nest.NestStep(bound, dtype, schedule_of(choice))


def _of_gathers(bound: BoundStatement, dtype: torch.dtype) -> Run:
    return cpu.GatherExecutor(bound.statement, bound.shape, dtype)


LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        "triton": Lowering(_on_gpu(kernels.refusal), _of_kernel, work.kernel_work),
        "chained": Lowering(_on_gpu(chained.refusal), _of_two, chained.of_chain),
        "block-rows": Lowering(_on_gpu(block_rows.refusal), _step_of(block_rows.BlockRowStep), block_rows.work),
        "blocks": Lowering(_on_gpu(block_sums.refusal), _step_of(block_sums.BlockStep), block_sums.work),
        "entries": Lowering(_on_gpu(entry_sums.refusal), _step_of(entry_sums.EntryStep), entry_sums.work),
        "segments": Lowering(_on_gpu(segment_sums.refusal), _step_of(segment_sums.SegmentStep), segment_sums.work),
        "unrolled": Lowering(_on_gpu(unrolled.refusal), _function_of(unrolled.run), unrolled.work),
        "gathered": Lowering(cpu.gathered_refusal, _step_of(_of_gathers), work.gathered_work),
        "nest": Lowering(nest.refusal, _of_nest, work.nest_work),
        "rowwise": Lowering(rowwise.refusal, _function_of(rowwise.run), rowwise.work),
        "inductor": Lowering(inductor.refusal, _function_of(inductor.run), work.graph_work, named=True),
        "graph": Lowering(graph.refusal, _function_of(graph.run), work.graph_work),
        "reference": Lowering(loops.refusal, _function_of(loops.run), work.loop_work),
    }
)
"""The lowerings of a step, by name."""

_ON_GPU = frozenset(("triton", "chained", "block-rows", "blocks", "entries", "segments", "unrolled"))

_PLANS: BoundedCache[Plan] = BoundedCache(4096)
_BUCKETED_PLANS: BoundedCache[tuple[Plan, bool]] = BoundedCache(4096)
"""(plan, True if all its kernels are resizable, so that it serves its whole size class)."""
_CHOSEN: BoundedCache[Candidate] = BoundedCache(4096)
