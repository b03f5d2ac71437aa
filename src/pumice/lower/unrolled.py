"""Products over a small constant table on a GPU, each one kernel with the table's entries unrolled in registers:
channelwise equivariant tensor products above all.

    Z[T[b],K[q],u] += C[q] * X[S[b],I[q],u] * Y[b,J[q]] * W[b,P[q],u]        q: the table; b: rows (edges); u: lanes

C and the index arrays over q are numbers in the source. A program computes one row of the result for a block of lanes:
it loads each component of a factor once, and sums all entries in registers. Where the rows of the result are gathered
(T), it loops over the b of its row, in a fixed order; those of a T that is not sorted are found by a sort, which is
cached with T. A factor whose rows are -1 is zero. The gradients of such a statement are such statements, too.

Source: the unrolled coefficients are those of OpenEquivariance (Bharadwaj et al., "An Efficient Sparse Kernel Generator
for O(3)-Equivariant Deep Networks", section 4); gathering by statement, and gradients by the same rule, are our own.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine, Statement, indices_of
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.compile import Parameter, TritonKernel, digest
from pumice.runtime.launch import KernelLauncher, keep_for_graph
from pumice.schedule.predict import Work

_ENTRIES = 1024  # of a table, at most: each is a line of the source
_LANES = 128  # of a program, at most, unless it sums them
_SUMMED = 1024
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class RowView(NamedTuple):
    """An operand [row, component, lane], each axis optional. rows: "" without, "." for the row itself, else the index
    array of its rows; table: the index array of its components, or ""; lanes: it has lanes."""

    name: str
    rows: str
    table: str
    lanes: bool


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
    def summed(self) -> bool:
        """True if rows of the result are sums over rows."""
        return self.target.rows != "."


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
    if not form.target.lanes and bound.extents[form.lane] > _SUMMED:
        return f"at most {_SUMMED} lanes are summed in a program, found {bound.extents[form.lane]}"
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
    statement, form = bound.statement, form_of(bound.statement)
    assert form is not None
    coefficient = float(statement.terms[0].coefficient)
    first, *others = [operands[name] for name in _table_names(form)]
    table = table_of(first, form, coefficient, *others)
    result = _launched(bound, form, table, operands, dtype)
    return operands[statement.target.name] + result if statement.accumulate else result


def _table_names(form: TableForm) -> list[str]:
    return [*form.values, *(view.table for view in (*form.factors, form.target) if view.table)]


class EntryTable(NamedTuple):
    """values: of the entries; columns: the component of each entry, in each factor and, last, in the target."""

    values: tuple[float, ...]
    columns: tuple[tuple[int, ...], ...]


@cached_per_tensor
def table_of(first: Tensor, form: TableForm, coefficient: float, *others: Tensor) -> EntryTable:
    """The table of a form, read from the values and index arrays that `_table_names` lists. Synchronises the host."""
    held = dict(zip(_table_names(form), [x.tolist() for x in (first, *others)], strict=True))
    count = len(first)
    columns = [held[view.table] if view.table else [0] * count for view in (*form.factors, form.target)]
    values = [coefficient] * count
    for name in form.values:
        values = [a * b for a, b in zip(values, held[name], strict=True)]
    kept = [n for n in range(count) if values[n] and min(column[n] for column in columns) >= 0]
    return EntryTable(tuple(values[n] for n in kept), tuple(tuple(column[n] for n in kept) for column in columns))


class RowsByTarget(NamedTuple):
    """The rows b with T[b] = n are order[starts[n]] to order[starts[n+1] - 1], ascending; int32."""

    order: Tensor
    starts: Tensor


@cached_per_tensor
def rows_by_target(array: Tensor, count: int) -> RowsByTarget:
    """The rows of each of `count` targets; those of other targets are left out."""
    known = torch.where((array >= 0) & (array < count), array.long(), count)
    targets, order = known.sort(stable=True)
    starts = torch.searchsorted(targets, torch.arange(count + 1, device=array.device))
    return RowsByTarget(order.int(), starts.int())


def _launched(
    bound: BoundStatement, form: TableForm, table: EntryTable, operands: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    factors = [operands[view.name].contiguous() for view in form.factors]
    out = torch.empty(bound.shape, dtype=dtype, device=factors[0].device)
    tensors = [*factors, *(operands[view.rows] for view in form.gathered), out]
    if form.summed:
        tensors += keep_for_graph(rows_by_target(operands[form.target.rows], bound.shape[0]))
    lanes = bound.extents[form.lane]
    sizes = tuple(operands[view.name].shape[bool(view.rows)] if view.table else 1 for view in form.factors)
    kinds = torch.float64 in {x.dtype for x in (*factors, out)}
    components = bound.shape[1] if form.target.table else 1
    made, block = _kernel(form, table, (*sizes, components), lanes, kinds)
    numbers = [len(operands[view.name]) for view in form.gathered]
    blocks = -(-lanes // block) if form.target.lanes else 1
    made(bound.shape[0] * blocks, tensors, numbers, {}, max(1, min(4, block // 32)))
    return out


def run_torch(
    bound: BoundStatement, form: TableForm, table: EntryTable, operands: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """As the kernel, in plain torch: one entry at a time."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, lanes = bound.extents[form.row], bound.extents[form.lane]
    picked = []
    for view in form.factors:
        x = operands[view.name].to(wide)
        x = x if view.rows else x.expand(rows, *x.shape)
        if view.rows not in ("", "."):
            index = operands[view.rows].long()
            inside = ((index >= 0) & (index < len(x))).view(-1, *[1] * (x.dim() - 1))
            x = torch.where(inside, x[index.clamp(0, len(x) - 1)], 0)
        picked.append(x.reshape(rows, -1, lanes if view.lanes else 1))
    components = bound.shape[1] if form.target.table else 1
    total = torch.zeros(rows, components, lanes, dtype=wide, device=picked[0].device)
    for value, *places, component in zip(table.values, *table.columns, strict=True):
        term = value
        for x, place in zip(picked, places, strict=True):
            term = term * x[:, place]
        total[:, component] += term
    total = total if form.target.lanes else total.sum(2)
    if form.summed:
        order, starts = rows_by_target(operands[form.target.rows], bound.shape[0])
        total = torch.segment_reduce(total[order.long()][: starts[-1]], "sum", lengths=starts.diff().long(), axis=0)
    return total.reshape(bound.shape).to(dtype)


@lru_cache(maxsize=256)
def _kernel(
    form: TableForm, table: EntryTable, sizes: tuple[int, ...], lanes: int, double: bool
) -> tuple[KernelLauncher, int]:
    """(the kernel, the lanes of a program)."""
    block = 1 << (lanes - 1).bit_length()
    block = min(block, _LANES) if form.target.lanes else block
    text = source(form, table, sizes, (lanes, block), double)
    code = digest(text)
    name = f"pumice_unrolled_{code[:24]}"
    parameters = [Parameter(n) for n in _pointers(form)]
    parameters += [Parameter(f"n{n}", False, False, "i64") for n, _ in enumerate(form.gathered)]
    return KernelLauncher(TritonKernel((name, f"<{name}>", "unrolled"), text, code, parameters)), block


def _pointers(form: TableForm) -> list[str]:
    arrays = [f"a{n}" for n, _ in enumerate(form.gathered)]
    return [*(f"f{n}" for n, _ in enumerate(form.factors)), *arrays, "out", *(["order", "starts"] * form.summed)]


def source(form: TableForm, table: EntryTable, sizes: Sequence[int], lanes: tuple[int, int], double: bool) -> str:
    """The Triton source of a form. sizes: components of each factor and of the target; lanes: all, of a program."""
    every, block = lanes
    numbers = [f"n{n}" for n, _ in enumerate(form.gathered)]
    blocks = -(-every // block)
    kind = "tl.float64" if double else "tl.float32"
    writer = _UnrolledWriter(form, table, tuple(sizes), every, kind)
    signature = ", ".join([*_pointers(form), *(f'{n}: "i64"' for n in numbers)])
    head = [
        f"lane = tl.program_id(0) % {blocks} * {block} + tl.arange(0, {block})",
        f"live = lane < {every}",
        f"row = (tl.program_id(0) // {blocks}).to(tl.int64)",
    ]
    body = [*writer.rows(), *writer.loads(True), *writer.sums()]
    zeros = [f"o{n} = tl.zeros([{block}], {kind})" for n in range(sizes[-1])]
    if form.summed:
        loop = "for at in range(tl.load(starts + row), tl.load(starts + row + 1)):"
        body = [loop, *(f"    {line}" for line in ["edge = tl.load(order + at).to(tl.int64)", *body])]
    else:
        body = ["edge = row", *body]
    lines = "\n    ".join([*head, *writer.loads(False), *zeros, *body, *writer.stores()])
    return (
        '"""Written by pumice.lower.unrolled."""\n\nimport triton\nimport triton.language as tl\n\n\n'
        f"@triton.jit(do_not_specialize={numbers})\ndef unrolled({signature}):\n    {lines}\n"
    )


@dataclass(frozen=True)
class _UnrolledWriter:
    """Lines of a kernel. Component i of factor n is the variable fn_i, component k of the target ok."""

    form: TableForm
    table: EntryTable
    sizes: tuple[int, ...]
    lanes: int
    kind: str

    def rows(self) -> Iterator[str]:
        """The rows that are read in gathered factors."""
        for n, _ in enumerate(self.form.gathered):
            yield f"r{n} = tl.load(a{n} + edge).to(tl.int64)"
            yield f"in{n} = (r{n} >= 0) & (r{n} < n{n})"

    def loads(self, by_row: bool) -> Iterator[str]:
        """The components of all factors that have rows, or have none."""
        gathered = self.form.gathered
        for n, view in enumerate(self.form.factors):
            if bool(view.rows) != by_row:
                continue
            place = gathered.index(view) if view in gathered else -1
            row = f" + {'edge' if place < 0 else f'r{place}'} * {self._size(n)}" if view.rows else ""
            conditions = ["live"] * view.lanes + ([f"in{place}"] if place >= 0 else [])
            mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
            for i in sorted(set(self.table.columns[n])):
                where = f"f{n}{row} + {i * (self.lanes if view.lanes else 1)}{' + lane' if view.lanes else ''}"
                yield f"f{n}_{i} = tl.load({where}{mask}).to({self.kind})"

    def _size(self, n: int) -> int:
        """Elements of a row of a factor."""
        return self.sizes[n] * (self.lanes if self.form.factors[n].lanes else 1)

    def sums(self) -> Iterator[str]:
        """The entries, those of one component of the target and of one other factor together."""
        shared = self._shared()
        groups: dict[tuple[int, int], list[int]] = {}
        for q, k in enumerate(self.table.columns[-1]):
            groups.setdefault((k, self.table.columns[shared][q]), []).append(q)
        for (k, i), entries in sorted(groups.items()):
            for q in entries:
                factors = [f"f{n}_{c[q]}" for n, c in enumerate(self.table.columns[:-1]) if n != shared]
                yield f"t {'=' if q == entries[0] else '+='} {' * '.join([repr(self.table.values[q]), *factors])}"
            yield f"o{k} += t * f{shared}_{i}"

    def _shared(self) -> int:
        """The factor that most entries of a component of the target have in common."""
        *columns, target = self.table.columns
        return min(range(len(columns)), key=lambda n: len({*zip(columns[n], target, strict=True)}))

    def stores(self) -> Iterator[str]:
        target = self.form.target
        step = self.lanes if target.lanes else 1
        for k in range(self.sizes[-1]):
            where = f"out + row * {self.sizes[-1] * step} + {k * step}"
            value = f"o{k}" if target.lanes else f"tl.sum(o{k}, 0)"
            rest = " + lane" if target.lanes else ""
            yield f"tl.store({where}{rest}, {value}{', mask=live' if target.lanes else ''})"
