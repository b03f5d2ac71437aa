"""Sparse einsums over dense and sparse operands, and their plans in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import NoneType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor

from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError, StatementError
from pumice.language.bind import BoundStatement
from pumice.language.contraction import contraction_roles
from pumice.language.formats import Format, parse_format
from pumice.language.groups import Groups
from pumice.language.meet import StoredAxes, check_join, joins, steps_of_join
from pumice.language.nodes import Statement, accesses_of, arrays_of, indices_of
from pumice.language.parse import parse
from pumice.language.rewrite import lower_statement
from pumice.lower import kernel as kernels
from pumice.lower import nest, nest_tune, plan
from pumice.ops import autograd
from pumice.ops.direct import choices_of_windows, windowed
from pumice.ops.meeting import JoinedStatement
from pumice.ops.operands import (
    DeclarationCheck,
    IndexCheck,
    Operand,
    WriteCheck,
    are_integers,
    as_constant,
    check_fractions,
    checks_of,
    facts_of,
    flatten_operands,
    flatten_used,
    one_dtype,
    problem_of,
    tensors_of,
    validate_operands,
    value_names_of,
)
from pumice.ops.repeated import KnownPlan, RepeatedCall, RepeatedCalls
from pumice.ops.sparse import Sparse, sparse
from pumice.runtime.cache import BoundedCache
from pumice.schedule.predict import Device
from pumice.schedule.tuner import Clock, SearchProgress

Given = ParamSpec("Given")
Found = TypeVar("Found")
Measure = Callable[[Callable[[], object]], float]


def einsum(text: str, /, *unnamed: Operand, out: Tensor | None = None, lowering: str = "", **operands: Operand) -> Any:
    """Evaluate a statement of the einsum language.

        einsum("C[i,n] = A[i,k] * B[k,n]", A=A, B=B)                             affine or indirect indices, any depth
        einsum("C[D[y],x] += A[y,E[r]] * B[r,x]", C=C, D=D, A=A, E=E, B=B)
        einsum("O[p] = I[2*p+r-1] * F[r] ; p:14", I=I, F=F)                       a declared range pads with zeros
        einsum("C[m,n] = A[m,k] * B[k,n]", A=pm.sparse(a, "CSR"), B=B)            formats come from the operands
        einsum("C[D[e],o] max= sum(i, X[S[e],i] * W[R[e],i,o]) ; C:[9,_]", ...)   a maximum of sums
        einsum("O[p,m] = M[p] * I[p+r,c] * F[r,c,m] ; O:pattern(M)", ...)         sparse M and I: a Sparse like M

    Parameters
    ----------
    text: target, an operator (= += max= min= mean=), a sum of products, and declarations after ";". Indices that are
        not in the target are reduced, as are several writes to one entry. A term does not contribute where an index
        array holds -1 or an index is out of range. See docs/einsum.md for nested reductions, positions and groups.
    operands: by name. Tensors of one floating dtype (integer and bool values are converted to it, to int64 if all are
        such, which have no mean and no fractions as coefficients), index arrays of int32 or int64, `pm.sparse`
        operands, Python floats (scalars) and ints (scalars, or constants in indices). `+=` adds to the operand of the
        target's name, which is not modified.
    out: tensor of the result's shape and dtype, which is written and returned.
    lowering: "triton", "chained", "block-rows", "blocks", "entries", "segments", "unrolled", "gathered", "nest",
        "rowwise", "inductor", "graph" or "reference"; default: the cheapest by the cost model, see explain();
        "inductor" compiles for seconds and is never the default. "triton/bf16x3" (or ieee, tf32x3, bf16x6, tf32) sets
        the precision of float32 products; default: torch.set_float32_matmul_precision. "nest/vector q; hold 4" and
        "nest/skimcaffe" give the schedule of a loop nest, as text or by a preset's name (see docs/einsum.md); "nest"
        takes the tuned one, or that of a rule.

    Returns a new tensor of the target's shape (a Sparse if the target has a pattern, or positions for its axes, which
    takes `pm.sparse` operands), in the operands' dtype (under autocast in the autocast dtype). Half
    precision is accumulated in float32 and rounded once per term. Differentiable any number of times in every floating
    operand.
    Raises StatementError, ShapeError, DtypeError, DeviceError, OptionError, and CoordinateError for index arrays with
    values out of range (validated once per tensor, and after a write; on a GPU writes through `.data` go undetected,
    but kernels never access memory out of range).

    Source: "Sparse GPU Kernels Simplified and Optimized with Indirect Einsums" (Insum) for indirect indices, "Unified
    Convolution Framework" (UCF) for affine ones and level formats.
    """
    if unnamed:
        text = 'einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b)'
        raise OptionError(f"operands are given by name, as in {text}; found {len(unnamed)} without one")
    if torch.compiler.is_compiling():
        result = _traced(text, operands, lowering)
    else:
        result = _compiled(text, lowering)(**operands)
    return result if out is None else _written(out, result)


def _compiled(text: str, lowering: str) -> Einsum:
    """The Einsum of a statement whose formats come from the operands."""
    known = isinstance(text, str) and isinstance(lowering, str)
    return _cached_einsum(text, lowering) if known else compile_einsum(text, lowering=lowering)


def _traced(text: str, operands: Mapping[str, Operand], lowering: str) -> Tensor:
    """A call while torch.compile traces: the operator checks shapes, lowerings mask invalid indices."""
    if _GROUP.search(text):
        return _without_groups(text, operands, lambda text, operands: _traced(text, operands, lowering))
    operands = {n: as_constant(x) if type(x) in (int, float) else x for n, x in operands.items()}
    integers = _integers(operands)
    values, constants = _numbers(text, integers)
    _check_traced(text, integers, tuple((name, str(x.format)) for name, x in operands.items() if isinstance(x, Sparse)))
    named = [name for name in values if name in operands]
    ready = one_dtype(dict(operands), set(named))
    _check_traced_integers(text, integers, are_integers(ready, named))
    tensors, names = flatten_operands(ready, constants)
    return autograd.einsum(tensors, names, text, None, lowering)


def _without_groups(
    text: str, operands: Mapping[str, Operand], call: Callable[[str, dict[str, Operand]], Tensor | Sparse]
) -> Any:
    """The result of a statement with groups of indices, by a call of the one without, on reshaped operands."""
    groups = Groups(*_groups(text, _integers(operands)))
    grouped = dict(groups.axes)
    for name in grouped:
        if name in operands and not isinstance(operands[name], Tensor):
            raise OptionError(f"{name} has a group of indices: expected a dense tensor, found a {type(operands[name])}")
    shapes = {name: tuple(x.shape) for name, x in operands.items() if isinstance(x, Tensor | Sparse)}
    for name, axes in groups.axes:
        if name in shapes and len(shapes[name]) != len(axes):
            raise ShapeError(f"{name} is read with {len(axes)} axes, found shape {list(shapes[name])}")
    extents = groups.extents(shapes)
    given = dict(operands)
    for name in grouped:
        if isinstance(x := operands.get(name), Tensor):
            given[name] = x.reshape(groups.shape(name, x.shape, extents))
    result = call(groups.text, given)
    if (target := groups.text.partition("[")[0]) not in grouped:
        return result
    if isinstance(result, Sparse):
        raise OptionError(f"the target {target} has a group of indices and a pattern; expected one of them")
    sizes, shape = iter(result.shape), []
    for names in grouped[target]:
        shape.append(math.prod([next(sizes) for _ in names or " "]))
    return result.reshape(shape)


def _integers(operands: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((name, x) for name, x in operands.items() if type(x) is int)


@lru_cache(maxsize=256)
def _cached_einsum(text: str, lowering: str) -> Einsum:
    return compile_einsum(text, lowering=lowering)


@lru_cache(maxsize=256)
def _parsed(text: str, integers: tuple[tuple[str, int], ...]) -> Statement:
    return parse(text, dict(integers))


@dataclass(frozen=True)
class Einsum:
    """A statement with the formats of its sparse operands, called with operands by name."""

    text: str
    formats: tuple[tuple[str, str], ...] = ()
    lowering: str = ""

    @cached_property
    def _memory(self) -> _Memory:
        return _memory_of(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # The cache is not pickled.
        return Einsum, (self.text, self.formats, self.lowering)

    def __call__(self, /, **operands: Operand) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _traced(self.text, operands, self.lowering)
        memory = self._memory
        if (last := memory.last()) is not None and (y := last(operands)) is not None:
            return y
        return self._other_call(operands, memory)

    def _other_call(self, operands: Mapping[str, Operand], memory: _Memory) -> Any:
        """A call that does not repeat the last one that was repeated."""
        calls = memory.repeated
        for x in operands.values():
            if type(x) is Sparse:
                calls = x.calls.get(memory) or x.calls.setdefault(memory, RepeatedCalls())
                break
        for call in calls.kept:
            if (y := call(operands)) is not None:
                memory.last = ref(call)
                return y
        if torch.compiler.is_compiling():
            return _traced(self.text, operands, self.lowering)
        return self._checked_call(operands, calls)

    def _plan(
        self, tensors: Sequence[Tensor], known: autograd.KnownStatement, operands: Mapping[str, Operand]
    ) -> KnownPlan:
        """The plan of a call that ran without conversions."""
        statement = plan.statement_of(self.text, known.names)
        arrays = frozenset(array.name for array in arrays_of(*statement.terms, statement.target))
        return KnownPlan(known.planned(tensors), arrays & operands.keys())

    def _checked_call(self, operands: Mapping[str, Operand], calls: RepeatedCalls) -> Any:
        """The call with all checks of its operands, which is kept with other calls if it may be repeated."""
        facts = facts_of(operands)
        seen = self._memory.checked.get(facts)
        if seen is None:
            return self._first_call(operands, facts)
        for check in seen.checks:
            check.check(operands)
        if seen.statement is None:
            assert seen.joined is not None
            return seen.joined(operands)
        tensors, known = tensors_of(operands.values()), seen.statement
        y = known(tensors)
        if seen.repeats and tensors:
            seen.repeats = calls.look(operands, lambda: self._plan(tensors, known, operands))
        return y

    def _first_call(self, operands: Mapping[str, Operand], facts: tuple[Any, ...]) -> Tensor | Sparse:
        if _GROUP.search(self.text):
            return _without_groups(self.text, operands, lambda text, given: replace(self, text=text)(**given))
        ready = self._checked(operands)
        unchanged = all(ready.operands[name] is x for name, x in operands.items())
        if self._meets(ready):
            joined = JoinedStatement(ready.statement, ready.operands, self.lowering)
            if unchanged:
                self._memory.checked.keep(facts, _CheckedCall(ready.checks, joined=joined))
            return joined(ready.operands)
        tensors, names, dense = flatten_used(self.text, ready.operands, ready.constants)
        if not dense and unchanged:
            known = autograd.KnownStatement(names, self.text, None, self.lowering)
            self._memory.checked.keep(facts, _CheckedCall(ready.checks, known))
        return autograd.einsum(tensors, names, self.text, None, self.lowering)

    def _meets(self, ready: _CheckedOperands) -> bool:
        """True for statements of sparse operands that meet, or, on a CPU, that are read through windows."""
        axes = _coordinate_axes(ready.operands)
        if joins(ready.statement, axes):
            return True
        on_cpu = all(ready.operands[name].device.type == "cpu" for name in axes)
        read = on_cpu and windowed(ready.statement, axes)
        return read and choices_of_windows(self.lowering, ready.statement, axes) is not None

    def explain(self, /, **operands: Operand) -> str:
        """The statement and its steps as text and, with operands, the costs of the lowerings and the kernel source."""
        if _GROUP.search(self.text):
            plain = _groups(self.text, _integers(operands))[0]
            return f"statement\n  {self.text}\n\nwithout groups of indices\n  {plain}\n"
        if not operands:
            formats = {name: parse_format(form) for name, form in self.formats}
            return _join_told(self.text, (), formats) or explanation(
                [], _bare_names(dict(self.formats)), self.text, self.lowering
            )
        ready = self._checked(operands)
        formats = {name: x.format for name, x in ready.operands.items() if isinstance(x, Sparse)}
        if self._meets(ready):
            told = [_join_told(self.text, ready.constants, formats) or f"statement\n  {ready.statement}"]
            return "\n\n".join(
                told + JoinedStatement(ready.statement, ready.operands, self.lowering).explained(ready.operands)
            )
        tensors, names, _ = flatten_used(self.text, ready.operands, ready.constants)
        return explanation(tensors, names, self.text, self.lowering)

    def tune(
        self,
        /,
        *,
        budget: float = 60.0,
        candidates: int = 30,
        progress: Callable[[SearchProgress], object] | None = None,
        **operands: Operand,
    ) -> str:
        """Autotune for operands of this size class: tiles of kernels on a GPU, schedules of loop nests on a CPU;
        returns the measured times as text. The fastest are stored on disk for all processes, by device.

        budget: seconds for each nest, some more to finish; candidates: its schedules besides the rule's, the most
        promising by a model of their cost; progress: called after each measurement.
        Raises OptionError if no step is a kernel or a nest."""
        ready = self._checked(operands)
        if ready.statement.fused or joins(ready.statement, _coordinate_axes(ready.operands)):
            raise OptionError("nothing to tune: the statement is evaluated by others, see explain()")
        tensors, names, _ = flatten_used(self.text, ready.operands, ready.constants)
        clock = Clock(budget, watch=progress or (lambda step: None))
        found = plan.tune(tensors, names, self.text, self.lowering, plan.TuningLimits(candidates, clock))
        if not found:
            raise OptionError("nothing to tune: no step is a kernel or a loop nest here, see explain()")
        lines = []
        for step, times in found:
            lines.append(str(step))
            lines += [f"  {1e3 * t:9.4f} ms  {tile}" for tile, t in sorted(times.items(), key=lambda item: item[1])]
        return "\n".join(lines)

    def grouped(self, name: str, /, *, measure: Measure | None = None, **operands: Any) -> Sparse:
        """The operand of this name in its format, with the group size that makes the statement the fastest on the
        device of the operands: of the powers of two below and above the square root of the mean row length (Insum,
        section 4.2).

        operands: as in a call; the one of this name as `sparse` takes it. measure: seconds of a call; default: of the
        GPU with a cold cache, on a CPU of the thread.
        Raises OptionError if the statement was compiled without a format of this name, or its groups have sizes."""
        form = dict(self.formats).get(name)
        level = parse_format(form).grouped if form else None
        if form is None or level is None or level.sizes:
            raise OptionError(
                f"{name} is expected to have a format with a group without a size, as `k:G`; found {form}"
            )
        made = {group: sparse(operands[name], form, group=group) for group in ("below sqrt", "above sqrt")}
        below, above = made.values()
        if below.format == above.format:
            return below
        seconds = measure or (kernels.measured if below.device.type == "cuda" else nest_tune.seconds_of)
        calls = {x: partial(self, **{**operands, name: x}) for x in (below, above)}
        for call in calls.values():
            call()
        times = {x: seconds(call) for x, call in calls.items()}
        return min(times, key=times.__getitem__)

    def _checked(self, operands: Mapping[str, Operand]) -> _CheckedOperands:
        """Check and convert the operands."""
        if problem := problem_of(operands):
            raise DtypeError(problem)
        integers = _integers(operands)
        statement = _parsed(self.text, integers)
        ready = validate_operands(statement, operands, dict(self.formats))
        checks = checks_of(statement, ready)
        for check in checks:
            check.check(ready)
        return _CheckedOperands(statement, ready, _numbers(self.text, integers)[1], checks)


class _CheckedOperands(NamedTuple):
    """The statement of a call, its converted operands, the integers that the text needs, and the checks that ran."""

    statement: Statement
    operands: dict[str, Any]
    constants: tuple[tuple[str, int], ...]
    checks: tuple[WriteCheck | IndexCheck | DeclarationCheck, ...]


@dataclass(eq=False)
class _CheckedCall:
    """Cached call of operands that need no conversion: of a statement, or of one that takes a join. repeats: False once
    it is known that such calls cannot be kept as repeated ones."""

    checks: tuple[WriteCheck | IndexCheck | DeclarationCheck, ...]
    statement: autograd.KnownStatement | None = None
    joined: JoinedStatement | None = None
    repeats: bool = True


@dataclass(eq=False)
class _Memory:
    """What equal Einsums share. checked: calls by the facts of operands; repeated: those without sparse operands, which
    keep the others; last: the one that was repeated last, for as long as its sparse operand is there."""

    checked: BoundedCache[_CheckedCall] = field(default_factory=lambda: BoundedCache(256))
    repeated: RepeatedCalls = field(default_factory=RepeatedCalls)
    last: Callable[[], RepeatedCall | None] = NoneType


@lru_cache(maxsize=256)
def _memory_of(statement: Einsum) -> _Memory:
    return _Memory()


def compile_einsum(text: str, formats: Mapping[str, str | Format] | None = None, *, lowering: str = "") -> Einsum:
    """Check a statement and return its callable, which takes the operands by name as einsum() does.

    formats: of the sparse operands, by name; a dense tensor of a name with a format is converted on every call, and a
    Sparse keeps its own. Kernels are generated once per (text, formats, dtypes, layouts), for all sizes.
    `.explain(**operands)` shows the statement, its steps over storage arrays, the costs of the lowerings, and the
    kernel source.
    Raises StatementError if the text is invalid for all values of its integers; OptionError for a format of the target,
    of an index array, or of a name that the statement does not read, and where these formats cannot be used; ShapeError
    for a format with another number of axes.
    """
    if not isinstance(text, str):
        raise DtypeError(f"a statement is text, found {type(text).__name__}")
    _check_lowering(lowering)
    if not isinstance(formats or {}, Mapping):
        raise OptionError(f"formats are a mapping from names of operands, found {type(formats).__name__}")
    known = tuple(sorted((name, str(parse_format(f))) for name, f in (formats or {}).items()))
    _check_text(text, known)
    return Einsum(text, known, lowering)


def _constant(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """torch.compiler.assume_constant_result without its import of the compiler (and of Triton)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _check_text(text: str, formats: tuple[tuple[str, str], ...]) -> None:
    """Raise if the text is invalid, or if formats are not of operands that it reads, do not fit or cannot be used."""
    statement = _probed(text)
    read = {access.name for access in accesses_of(*statement.terms, *statement.target.indices)}
    arrays = {array.name for array in arrays_of(*statement.terms, statement.target)}
    known = {name: parse_format(form) for name, form in formats}
    for name in known:
        if name == statement.target.name:
            hint = f"expected its pattern in the text, as `; {name}:pattern(A)`"
            raise OptionError(f"the target {name} is a dense tensor, found a format of it; {hint}")
        if name not in read:
            raise OptionError(f"found a format of {name}, but `{text}` reads {', '.join(sorted(read)) or 'nothing'}")
        if name in arrays:
            raise OptionError(
                f"{name} is an index array: expected a dense tensor, found the format {str(known[name])!r}"
            )
    for access in accesses_of(*statement.terms):
        if access.name in known and len(access.indices) != known[access.name].ndim:
            form = known[access.name]
            have = f"`{access}` has {len(access.indices)}, format {str(form)!r} has {form.ndim}"
            raise ShapeError(f"an access and the format are expected to have the same number of axes: {have}")
    with suppress(StatementError):
        _check_use(_parsed(text, ()), known)


def _check_use(statement: Statement, formats: Mapping[str, Format]) -> None:
    """Raise where the statement cannot use operands in these formats."""
    if statement.positions or joins(statement, {name: StoredAxes.of(f).coordinates for name, f in formats.items()}):
        check_join(statement, {name: StoredAxes.of(f) for name, f in formats.items()})
        return
    parts = {name: len(f.grouped.sizes) if f.grouped else 1 for name, f in formats.items()}
    lower_statement(statement, {name: plan.StorageForm.of(f, max(1, parts[name])) for name, f in formats.items()})


def _probed(text: str) -> Statement:
    """The statement; if it needs integers that come with the operands, parsed with small or large values."""
    try:
        return _parsed(text, ())
    except StatementError:
        # Names with axes or declarations are not integers, nor are the indices of sum(i, ...) and of groups.
        bare = re.sub(r"#[^\n]*", "", text)
        names = set(re.findall(r"[^\W\d]\w*", bare)) - set(re.findall(r"\b([^\W\d]\w*)\s*[\[:]", bare))
        for listed in re.findall(r"\b(?:sum|max|min|mean)\s*\(((?:\s*[^\W\d]\w*\s*,)+)", bare):
            names -= set(re.findall(r"[^\W\d]\w*", listed))
        for group in re.findall(r"[\[,]\s*\(((?:\s*[^\W\d]\w*\s*,)+\s*[^\W\d]\w*)\s*\)", bare):
            names -= set(re.findall(r"[^\W\d]\w*", group))
        for value in (1, 1 << 30):
            with suppress(StatementError):
                return parse(text, dict.fromkeys(names, value))
        raise


def _check_lowering(lowering: str) -> None:
    if not isinstance(lowering, str):
        raise OptionError(f"lowering is text, found {type(lowering).__name__}; there are {', '.join(plan.LOWERINGS)}")
    name, _, choice = lowering.partition("/")
    if name:
        OptionError.check("lowering", name, plan.LOWERINGS)
    if name == "nest":
        plan.schedule_of(choice)
    elif choice and (name != "triton" or choice not in plan.kernels.PRECISIONS):
        precisions = ", ".join(plan.kernels.PRECISIONS)
        raise OptionError(f"{lowering!r}: only triton takes a precision, one of {precisions}, and nest a schedule")


def _bare_names(formats: Mapping[str, str]) -> str:
    tokens = []
    for name, text in formats.items():
        stored = plan.StorageForm.of(parse_format(text))
        tokens += [plan.token(name, text, 0, local) for local in (*stored.arrays, "values")]
    return "|".join(tokens)


@_constant
def _numbers(text: str, integers: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The operands used as values, and the integer operands needed to parse the text."""
    values = value_names_of(_parsed(text, integers))
    return values, tuple((n, x) for n, x in integers if n not in values or _needed(text, integers, n))


_GROUP = re.compile(r"[\[,]\s*\(\s*[^\W\d]\w*\s*,")  # of indices: A[(n,p),m]


@_constant
def _groups(text: str, integers: tuple[tuple[str, int], ...]) -> tuple[Any, ...]:
    return tuple(Groups.of(_parsed(text, integers)))


@_constant
def _check_traced_integers(text: str, integers: tuple[tuple[str, int], ...], over_integers: bool) -> None:
    check_fractions(_parsed(text, integers), over_integers)


@_constant
def _check_traced(text: str, integers: tuple[tuple[str, int], ...], formats: tuple[tuple[str, str], ...]) -> None:
    """Raise OptionError for a statement that joins sparse operands: what meets depends on values."""
    axes = {name: StoredAxes.of(parse_format(form)).coordinates for name, form in formats}
    if joins(_parsed(text, integers), axes):
        raise OptionError(
            f"`{text}` finds the entries of sparse operands that meet, whose number depends on their coordinates: "
            "expected outside torch.compile, as positions (i:pos(A)) for a statement inside"
        )


def _coordinate_axes(operands: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The axes of each sparse operand that have coordinates."""
    return {name: StoredAxes.of(x.format).coordinates for name, x in operands.items() if isinstance(x, Sparse)}


def _needed(text: str, integers: tuple[tuple[str, int], ...], name: str) -> bool:
    """True if an integer operand used as a value is also a constant in an index or a range."""
    try:
        _parsed(text, tuple(given for given in integers if given[0] != name))
    except StatementError:
        return True
    return False


def _written(out: Tensor, result: Tensor | Sparse) -> Tensor:
    if isinstance(result, Sparse):
        raise OptionError("out is for a dense target, found a target with a pattern or positions")
    if not isinstance(out, Tensor):
        raise DtypeError(f"out is a tensor, found {type(out).__name__}")
    if out.device != result.device:
        raise DeviceError(f"out is on {out.device}, the result on {result.device}")
    if out.shape != result.shape:
        raise ShapeError(f"out has shape {list(out.shape)}, the result {list(result.shape)}")
    if out.dtype != result.dtype:
        raise DtypeError(f"out is {out.dtype}, the result {result.dtype}")
    return out.copy_(result)


def explanation(operands: Sequence[Tensor], names: str, text: str, lowering: str) -> str:
    """The statement and its steps over storage arrays or, with operands, costs, choice and kernel, as text."""
    statement = plan.statement_of(text, names)
    lines = ["statement", f"  {statement}", ""]
    if not operands:
        done = plan.rewritten(text, names, plan.read(names).first_forms)
        return "\n".join([*lines, *_steps(done.steps, done.dense)])
    bound = plan.sizes(text, names, [t.shape for t in operands], None)
    ranges = ", ".join(f"{name} {len(extent)}" for name, extent in bound.ranges.items())
    lines += ["sizes", f"  {ranges}", f"  {statement.target.name} {list(bound.shape)}", ""]
    text = plan.with_lost_ranges(text, names, bound)
    name, _, choice = lowering.partition("/")
    found = plan.options(operands, names, text, bound.shape, name)
    schedule = plan.schedule_of(choice) if name == "nest" else None
    for option in sorted(found, key=lambda o: o.cost):
        lines += _option(option, operands, names)
        if not option.refused:
            for step in plan.placed(option.steps, plan.arrays(operands, names, text, option), bound.shape):
                lines += _ways(step, plan.device_of(operands), schedule)
    return "\n".join(lines)


def _join_told(text: str, integers: tuple[tuple[str, int], ...], formats: Mapping[str, Format]) -> str:
    """A statement that joins sparse operands, the join and the statements over it, as text; "" for any other."""
    statement, axes = _parsed(text, integers), {name: StoredAxes.of(f) for name, f in formats.items()}
    if not joins(statement, {name: found.coordinates for name, found in axes.items()}):
        return ""
    lines = ["statement", f"  {statement}", "", f"join of the entries of {', '.join(axes)}"]
    if not statement.positions:
        lines += ["", "steps over its result", *(f"  {step}" for step in steps_of_join(statement, axes))]
    return "\n".join(lines)


def _steps(steps: Sequence[Statement], dense: Mapping[str, str]) -> list[str]:
    used = [f"  {name} is used in dense form: {why}" for name, why in dense.items()]
    return ["steps", *(f"  {step}" for step in steps), *used, ""]


def _option(option: plan.Candidate, operands: Sequence[Tensor], names: str) -> list[str]:
    form = ", ".join(f"{name} as {form}" for name, form in option.forms) or "dense operands"
    if option.refused:
        return [f"{form}: refused", f"  {option.refused}", ""]
    lines = [f"{form}: {' and '.join(option.lowerings)}, estimated {1e6 * option.cost:.1f} us"]
    lines += [*_held(operands, names, option), "", *_steps(option.steps, {})]
    return lines


def _held(operands: Sequence[Tensor], names: str, option: plan.Candidate) -> list[str]:
    """Bytes of each sparse operand in the chosen form."""
    form, held = dict(option.forms), {}
    for (name, stored, _, _), place in plan.read(names).places.items():
        if form.get(name) == stored:
            held[name] = held.get(name, 0) + operands[place].nbytes
    return [f"  {name}: {_count(size)}B in the arrays that are read" for name, size in held.items()]


def _ways(step: plan.PlacedStep, device: Device, schedule: nest.Wanted | None) -> list[str]:
    """Cost (or refusal) of each lowering of a step, its work and index roles, and the source of its kernel."""
    lines = [f"lowerings of {step.statement}"]
    for name, cost, why in plan.step_options(step, device, ""):
        lines.append(f"  {name:10} {why if cost == math.inf else f'{1e6 * cost:.1f} us'}")
    lines += ["", _work(step.statement, step.bound), *_contraction(step.statement, step.bound), ""]
    if source := kernels.source_of(step.bound, step.tensors):
        where = "kernel" if any(x.is_cuda for x in step.tensors.values()) else "kernel on a GPU"
        lines += [f"{where}, tile {kernels.tile_of(step.bound, step.tensors)}", source, ""]
    if nest.refusal(step.statement, step.bound, step.tensors) is None:
        lines += ["loop nest", nest.source_of(step.bound, step.tensors, torch.float32, schedule), ""]
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
