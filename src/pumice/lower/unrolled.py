"""Products over a small constant table on a GPU, with the table's entries unrolled in registers: channelwise
equivariant tensor products above all.

    Z[T[b],K[q],u] += C[q] * X[S[b],I[q],u] * Y[b,J[q]] * W[b,P[q],u]        q: the table; b: rows (edges); u: lanes

C and the index arrays over q are numbers in the source. The gradients of such a statement are such statements, too;
those over the same operands are one kernel (`TableSums`), which reads a component of an operand once for all of them.
A program takes one row of one index array (T) for a block of lanes, and loops over the b of its row in a fixed order;
those of a T that is not sorted are found by a sort, which is cached with T. What is added up over the rows of another
array (S) is written by b first, and summed in a fixed order, too. A factor whose rows are -1 is zero.

Source: the unrolled coefficients are those of OpenEquivariance (Bharadwaj et al., "An Efficient Sparse Kernel Generator
for O(3)-Equivariant Deep Networks", section 4); gathering by statement, and gradients by the same rule, are our own.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine, Statement, indices_of
from pumice.lower.unrolled_source import (
    EntryTable,
    RowView,
    Sum,
    TableSizes,
    TableSums,
    UnrolledKernel,
    launcher,
    shares,
)
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.launch import keep_for_graph, kernel
from pumice.schedule.predict import Work

_ENTRIES = 1024  # of a table, at most: each is a line of the source
_SPARE = 256  # Programs for rows without a place in the array that programs loop over
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TableForm:
    """A statement over a table. entry, row, lane: its indices; values: the factors of the table's entries."""

    entry: str
    row: str
    lane: str
    values: tuple[str, ...]
    factors: tuple[RowView, ...]
    target: RowView

    @property
    def gathered(self) -> list[RowView]:
        """The factors whose rows are gathered."""
        return [view for view in self.factors if view.rows not in ("", ".")]

    @property
    def tables(self) -> frozenset[str]:
        """The index arrays over the table."""
        return frozenset(view.table for view in (*self.factors, self.target) if view.table)

    def named(self, names: Mapping[str, str], target: str) -> TableForm:
        """The form with other names of its operands and index arrays."""

        def of(view: RowView, name: str) -> RowView:
            return RowView(name, names.get(view.rows, view.rows), names.get(view.table, ""), view.lanes)

        factors = tuple(of(view, names[view.name]) for view in self.factors)
        values = tuple(names[name] for name in self.values)
        return replace(self, values=values, factors=factors, target=of(self.target, target))


@lru_cache(maxsize=1024)
def form_of(statement: Statement) -> TableForm | None:
    """The form of a statement, None for other statements."""
    names = indices_of(statement)
    if len(statement.terms) != 1 or statement.reduction != "sum" or len(names) != 3:
        return None
    accesses = [factor for factor in statement.terms[0].factors if isinstance(factor, Access)]
    if len(accesses) != len(statement.terms[0].factors):
        return None
    held = {e.bare: [a.name for a in accesses if a.indices == (e,)] for a in accesses for e in a.indices if e.bare}
    for entry, values in ((name, held.get(name)) for name in names):
        for row in names:
            lane = next((name for name in names if name not in (entry, row)), "")
            if not values or row == entry:
                continue
            views = [_view(a, entry, row, lane) for a in accesses if a.name not in values]
            target = _view(statement.target, entry, row, lane)
            found = [view for view in views if view is not None]
            if target is not None and target.rows and len(found) == len(views):
                # Sorted: gradients of all orders that differ in the order of factors are one kernel.
                found.sort(key=lambda view: (view.table, view.rows, view.lanes))
                return TableForm(entry, row, lane, tuple(values), tuple(found), target)
    return None


def _view(access: Access, entry: str, row: str, lane: str) -> RowView | None:
    """The view of an access whose axes are (row, component, lane) or some of them, else None."""
    rows, table, lanes, stage = "", "", False, 0
    for expression in access.indices:
        array, index = indexed(expression)
        now = {row: 1, entry: 2 if array else 0, lane: 0 if array else 3}.get(index, 0)
        if now <= stage:
            return None
        rows, table, lanes = (array or "." if now == 1 else rows), (array if now == 2 else table), lanes or now == 3
        stage = now
    return RowView(access.name, rows, table, lanes)


def indexed(expression: Affine) -> tuple[str, str]:
    """("", i) of an index i, (A, i) of an array A[i], ("", "") of others."""
    if expression.bare:
        return "", expression.bare
    if expression.constant or len(expression.terms) != 1 or expression.terms[0][0] != 1 or not expression.arrays:
        return "", ""
    (array,) = expression.arrays
    inner = array.indices[0].bare if len(array.indices) == 1 else None
    return (array.name, inner) if inner else ("", "")


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement has no unrolled kernel, or None."""
    form = form_of(statement)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if form is None:
        return "it is no sum of products over (row, table, lane)"
    if sum(bool(view.table) for view in form.factors) < 2:
        # A table of one factor is a sparse matrix, which changes more often than kernels should be compiled.
        return "fewer than two factors are read through the table"
    if bound.extents[form.entry] > _ENTRIES:
        return f"the table has {bound.extents[form.entry]} entries, at most {_ENTRIES} are unrolled"
    if any(operands[name].dtype not in _TYPES for name in (*form.values, *(view.name for view in form.factors))):
        return "a factor is not of float64, float32, float16 or bfloat16"
    return "the table's values have a gradient" if any(operands[n].requires_grad for n in form.values) else None


def work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """Every factor is read once per row, gathered ones through the second-level cache."""
    form = form_of(statement)
    assert form is not None
    flops = 2 * len(form.factors) * bound.points(indices_of(statement))
    memory = 4 * math.prod(bound.shape) + sum(operands[view.name].nbytes for view in form.factors)
    rows = bound.extents[form.row]
    cache = sum(rows * operands[view.name].nbytes / max(1, len(operands[view.name])) for view in form.gathered)
    return Work(flops, memory, cache)


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    form = form_of(bound.statement)
    assert form is not None
    coefficient = float(bound.statement.terms[0].coefficient)
    target = Target(bound.shape, dtype)
    extents = bound.extents[form.row], bound.extents[form.lane]
    (result,) = run_sums(((form, coefficient),), extents, (target,), operands)
    return operands[form.target.name] + result if bound.statement.accumulate else result


class Target(NamedTuple):
    """A result to compute: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TableCall:
    """Sums to compute. rows, lanes: their extents; targets: of `sums.targets`; shapes: of the factors; wide: the dtype
    of sums."""

    sums: TableSums
    table: EntryTable
    rows: int
    lanes: int
    targets: tuple[Target, ...]
    shapes: tuple[tuple[int, ...], ...]
    wide: torch.dtype

    @cached_property
    def sizes(self) -> TableSizes:
        """Components of the factors, and of the targets."""

        def components(shapes: Sequence[tuple[int, ...]], views: Sequence[RowView]) -> tuple[int, ...]:
            return tuple(x[bool(v.rows)] if v.table else 1 for x, v in zip(shapes, views, strict=True))

        targets = components([target.shape for target in self.targets], self.sums.targets)
        return TableSizes(components(self.shapes, self.sums.factors), targets, self.lanes)

    @cached_property
    def kernel(self) -> UnrolledKernel:
        return launcher(self.sums, self.table, self.sizes, self.wide == torch.float64)

    @cached_property
    def programs(self) -> int:
        """The rows that have programs of their own: those of the array that programs loop over, or all."""
        if not self.sums.loop:
            return self.rows
        shapes = [*self.shapes, *(target.shape for target in self.targets)]
        views = (*self.sums.factors, *self.sums.targets)
        return max(shape[0] for shape, view in zip(shapes, views, strict=True) if view.rows == self.sums.loop)

    @cached_property
    def loop(self) -> str:
        """The array over whose rows programs loop: what is read or written by its rows is so once. "" for none."""
        factors, targets = self.sums.factors, self.sums.targets
        arrays = dict.fromkeys(v.rows for v in targets if v.rows != ".")
        if arrays and len(self.sums.sums) > 1:
            arrays |= dict.fromkeys(v.rows for v in factors if v.rows not in ("", "."))
        # A row that is written is read again. For each b:
        every = [*zip(factors, self.sizes.factors, strict=True), *2 * [*zip(targets, self.sizes.targets, strict=True)]]
        moved = {
            array: sum(n * (self.lanes if v.lanes else 1) for v, n in every if v.rows == array) for array in arrays
        }
        return max(moved, key=lambda array: moved[array], default="")


Forms = tuple[tuple[TableForm, float], ...]
"""Forms over one table, with coefficients."""


def run_sums(
    forms: Forms, extents: tuple[int, int], targets: tuple[Target, ...], operands: Mapping[str, Tensor]
) -> list[Tensor]:
    """The targets of forms, which add up where these have a target in common. extents: of rows and lanes; targets: by
    the forms' targets, in order."""
    first, facts = forms[0][0], tuple([(name, x.shape, x.dtype) for name, x in operands.items()])
    held = [operands[name] for name in (*first.values[1:], *sorted(first.tables))]
    return _launched(_call_of(operands[first.values[0]], forms, extents, targets, facts, *held), operands)


@cached_per_tensor
def _call_of(
    first: Tensor, forms: Forms, extents: tuple[int, int], targets: tuple[Target, ...], facts: tuple, *held: Tensor
) -> TableCall:
    """The call of forms. facts: (name, shape, dtype) of the operands; first, held: the tables's values and arrays."""
    factors = [*dict.fromkeys(view for form, _ in forms for view in form.factors)]
    results = [*dict.fromkeys(form.target for form, _ in forms)]
    sums = [Sum(tuple(map(factors.index, form.factors)), results.index(form.target), c) for form, c in forms]
    shapes, kinds = {name: shape for name, shape, _ in facts}, {name: kind for name, _, kind in facts}
    names = sorted(forms[0][0].tables)
    values, columns = table_of(first, forms[0][0].values, tuple(names), *held)
    columns = tuple(columns[names.index(v.table)] if v.table else (0,) * len(values) for v in (*factors, *results))
    double = torch.float64 in {*(kinds[view.name] for view in factors), *(target.dtype for target in targets)}
    whole = TableSums(tuple(factors), tuple(results), tuple(sums), "")
    wide = torch.float64 if double else torch.float32
    own = tuple(tuple(shapes[view.name]) for view in factors)
    call = TableCall(whole, EntryTable(values, columns), *extents, targets, own, wide)
    return replace(call, sums=whole._replace(loop=call.loop))


@cached_per_tensor
def table_of(first: Tensor, values: tuple[str, ...], names: tuple[str, ...], *others: Tensor) -> EntryTable:
    """The table of values (multiplied) and of index arrays by their names. Synchronises the host."""
    held = [x.tolist() for x in (first, *others)]
    products = [math.prod(each) for each in zip(*held[: len(values)], strict=True)]
    columns = held[len(values) :]
    kept = [n for n, value in enumerate(products) if value and min((column[n] for column in columns), default=0) >= 0]
    return EntryTable(tuple(products[n] for n in kept), tuple(tuple(column[n] for n in kept) for column in columns))


class RowsByTarget(NamedTuple):
    """The rows b with T[b] = n are order[starts[n]] to order[starts[n+1] - 1], ascending; those of other targets follow
    as of one more; int32."""

    order: Tensor
    starts: Tensor


@cached_per_tensor
def rows_by_target(array: Tensor, count: int) -> RowsByTarget:
    """The rows of each of `count` targets."""
    known = torch.where((array >= 0) & (array < count), array.long(), count)
    targets, order = known.sort(stable=True)
    starts = torch.searchsorted(targets, torch.arange(count + 2, device=array.device))
    return RowsByTarget(order.int(), starts.int())


def _launched(call: TableCall, operands: Mapping[str, Tensor]) -> list[Tensor]:
    sums, made, count = call.sums, call.kernel, call.programs
    factors = [operands[view.name].contiguous() for view in sums.factors]
    outs = [_room(call, n, factors[0].device) for n, _ in enumerate(sums.targets)]
    tensors = [*factors, *(operands[view.rows].contiguous() for view in sums.gathered), *outs]
    numbers = [*(len(operands[view.name]) for view in sums.addressed), count, call.rows]
    spare = _SPARE * shares(sums)
    if sums.loop:
        tensors += keep_for_graph(rows_by_target(operands[sums.loop], count))
    made((count + spare) * made.blocks, tensors, [*numbers, spare])
    return [_finished(call, n, out, operands) for n, out in enumerate(outs)]


def _room(call: TableCall, n: int, device: torch.device) -> Tensor:
    """Memory for what a kernel writes of a target: rows of its own or of b; several sums over parts of the lanes."""
    view, target, parts = call.sums.targets[n], call.targets[n], call.kernel.sums
    rows = call.programs if view.rows == call.sums.loop else call.rows
    if view.lanes or parts == 1:
        dtype = target.dtype if view.rows in (".", call.sums.loop) else call.wide
        return torch.empty(rows, *target.shape[1:], dtype=dtype, device=device)
    return torch.empty(parts, rows, *target.shape[1:], dtype=call.wide, device=device)


def _finished(call: TableCall, n: int, out: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    view, target = call.sums.targets[n], call.targets[n]
    out = out if out.dim() == len(target.shape) else out.sum(0)
    if view.rows in (".", call.sums.loop):
        return out[: target.shape[0]].to(target.dtype)
    return _sum_by_rows(out, operands[view.rows], target)


def _sum_by_rows(x: Tensor, array: Tensor, target: Target) -> Tensor:
    """out[array[b]] += x[b], in the order of b."""
    order, starts = keep_for_graph(rows_by_target(array, target.shape[0]))
    out = torch.empty(target.shape, dtype=target.dtype, device=x.device)
    width = math.prod(target.shape[1:])
    block = min(256, 1 << (width - 1).bit_length())
    programs = target.shape[0] * -(-width // block)
    kernel("row_kernels.sum_by_rows", "lower")(programs, [x, order, starts, out], [width], {"BLOCK": block}, 2)
    return out


def run_torch(call: TableCall, operands: Mapping[str, Tensor]) -> list[Tensor]:
    """As the kernel, in plain torch: one entry at a time."""
    picked = [_picked(view, call, operands) for view in call.sums.factors]
    count = len(call.sums.factors)
    totals = [picked[0].new_zeros(call.rows, n, call.lanes) for n in call.sizes.targets]
    for each in call.sums.sums:
        for q, value in enumerate(call.table.values):
            term = each.coefficient * value
            for n in each.factors:
                term = term * picked[n][:, call.table.columns[n][q]]
            totals[each.target][:, call.table.columns[count + each.target][q]] += term
    return [_gathered_total(call, n, total, operands) for n, total in enumerate(totals)]


def _picked(view: RowView, call: TableCall, operands: Mapping[str, Tensor]) -> Tensor:
    """A factor as [row, component, lane]."""
    x = operands[view.name].to(call.wide)
    x = x if view.rows else x.expand(call.rows, *x.shape)
    if view.rows not in ("", "."):
        index = operands[view.rows].long()
        inside = ((index >= 0) & (index < len(x))).view(-1, *[1] * (x.dim() - 1))
        x = torch.where(inside, x[index.clamp(0, len(x) - 1)], 0)
    return x.reshape(call.rows, -1, call.lanes if view.lanes else 1)


def _gathered_total(call: TableCall, n: int, total: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    view, target = call.sums.targets[n], call.targets[n]
    total = total if view.lanes else total.sum(2)
    if view.rows != ".":
        order, starts = rows_by_target(operands[view.rows], target.shape[0])
        lengths = starts[:-1].diff().long()
        total = torch.segment_reduce(total[order.long()][: starts[-2]], "sum", lengths=lengths, axis=0)
    return total.reshape(target.shape).to(target.dtype)
