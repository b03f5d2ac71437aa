"""Execution of the named dataflows (schedule.dataflow) of a convolution and its gradients.

    forward   y[o, n]    = map[o, k, i] * x[i, c] * w[n, k, c]
    dgrad     x[i, c]    = map[o, k, i] * y[o, n] * w[n, k, c]          the transposed map
    wgrad     w[n, k, c] = map[o, k, i] * x[i, c] * y[o, n]

with a group axis next to n and c if there are several groups. A dataflow's movement names the engine that executes it:
either products of torch's libraries or a statement over a form of the map, by a kernel on a GPU and by the planner's
lowerings on a CPU (plan.py). Unsupported dataflows raise with the reason; no other one replaces them.

Library products gather, multiply and scatter:

explicit        im2col: columns[o, k, c] of many outputs at once, 0 where there is no input, and one product
vectorised      for each group of kernel offsets: gather, multiply, scatter-add (TorchSparse, MLSys 2022)
fused           one gather of all pairs, sorted by kernel offset, a product per group, and one scatter-add
locality-aware  the same with a segment sum per output instead of the scatter, in a fixed order

The last one sums outputs as TorchSparse's public code (2.1) does. That code also gathers by input, reading each once
for all of its slots; here every slot reads its input. It accumulates halves in half precision and multiplies the centre
offset of a submanifold map without a gather; here sums are in float32 at least, and the centre offset is gathered. As
there, half-precision products on a GPU are stored in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import KernelMap, MultiMap
from pumice.errors import DtypeError, OptionError
from pumice.language.derive import derivative, gradient_name
from pumice.language.parse import parse
from pumice.lower import kernel as kernels
from pumice.lower import maps, plan, reference
from pumice.lower.epilogue import NO_EPILOGUE, Epilogue, EpilogueSignature, applied
from pumice.lower.reference import EIGHT_BITS
from pumice.schedule.dataflow import (
    DATAFLOWS,
    DGRAD,
    FORWARD,
    PASSES,
    WGRAD,
    Chosen,
    Dataflow,
    Grouping,
    split_dataflow,
)

CONV = "O[o,n] = map[o,k,i] * x[i,c] * w[n,k,c]"
GROUPED_CONV = "O[o,g,n] = map[o,k,i] * x[i,g,c] * w[g,n,k,c]"
"""The convolution as a statement whose sparse operand is the kernel map; gradients are its derivatives."""

_COLUMNS = 1 << 28
"""Maximum bytes of columns held at a time."""

Two = tuple[Tensor, Tensor]
Engine = Callable[["Pass", Two, Epilogue | None], Tensor]
"""Executes a pass on its two operands and an epilogue."""
Forward = Callable[[Tensor, Tensor, "PairLayout", int, int], Tensor]


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of a convolution over a map. name: one of PASSES, with operands (x, w), (y, w) or (x, y).

    x [inputs, G*C], w [G*N, K, C], y [outputs, G*N], each the tensor or its gradient.
    """

    name: str
    flow: Dataflow
    found: KernelMap
    groups: int

    def __call__(self, operands: Two, epilogue: Epilogue | None = None) -> Tensor:
        """The result, in the operands' dtype or the epilogue's. Raises OptionError for an unsupported dataflow."""
        check(self)
        engine = ENGINES.get(self.flow.movement)
        if engine is None:
            raise OptionError(f"movement {self.flow.movement!r} is unknown; there are {', '.join(ENGINES)}")
        if self.flow.skipped:
            return _skip(self, operands, epilogue)
        return engine(self, operands, epilogue)

    @property
    def oriented_map(self) -> KernelMap:
        """The map whose outputs are the rows of the result: transposed for dgrad."""
        return self.found.transpose() if self.name == DGRAD else self.found


def check(map_pass: Pass) -> None:
    """Raise OptionError for a nondeterministic dataflow under torch.use_deterministic_algorithms."""
    flow = map_pass.flow
    repeats = flow.repeats
    if isinstance(map_pass.found, MultiMap) and flow.movement == "vectorised":
        # An output may occur twice within a kernel offset.
        repeats = (WGRAD,)
    if plan.deterministic() and map_pass.found.device.type == "cuda" and map_pass.name not in repeats:
        able = ", ".join(name for name, other in DATAFLOWS.items() if map_pass.name in other.repeats)
        raise OptionError(
            f"the {map_pass.name} pass of dataflow {flow.name} is not deterministic, and deterministic algorithms are "
            f"required; Dataflows(forward, dgrad, wgrad) sets one for each pass; deterministic ones: {able}"
        )


def _skip(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """Build what the pass reads of its map; zeros in place of the result."""
    _LAYOUTS.get(map_pass.flow.movement, _lay_out_forms)(map_pass)
    result = _flat(map_pass, given[0].new_zeros(_shape(map_pass, _in_groups(map_pass, given))))
    return result if epilogue is None else applied(result, epilogue, given[0].dtype)


# Library products
def _by_library(run: Callable[[Pass, Two], Tensor], map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    kind = given[0].dtype
    if kind in EIGHT_BITS:
        raise DtypeError(
            f"dataflow {map_pass.flow.name} uses products of torch's libraries, which do not support {kind}; the "
            "implicit-gemm and fetch-on-demand dataflows do"
        )
    if map_pass.name == DGRAD:
        y, w = given
        given = y, reference.transposed(w.contiguous(), map_pass.groups)
    result = run(map_pass, given)
    return result.to(kind) if epilogue is None else applied(result, epilogue, kind)


def _explicit(map_pass: Pass, given: Two) -> Tensor:
    run = columns_weight_gradient if map_pass.name == WGRAD else columns_forward
    return run(*given, map_pass.oriented_map, map_pass.groups)


def _gathered(forward: Forward, map_pass: Pass, given: Two) -> Tensor:
    how: PairLayout = layout(map_pass.oriented_map, map_pass.flow.grouping or Grouping("separate"))
    if map_pass.name == WGRAD:
        fused = forward is not forward_by_group
        return weight_gradient(*given, how, (map_pass.found.volume, map_pass.groups), fused)
    return forward(*given, how, map_pass.oriented_map.num_outputs, map_pass.groups)


# Explicit
def columns_forward(x: Tensor, weight: Tensor, found: KernelMap, groups: int) -> Tensor:
    """y[o, g*n] = columns[o, g, k*c] @ w[g, k*c, n], by slices of the outputs."""
    volume, channels = weight.shape[1:]
    x = _in_compute_dtype(x)
    filters = weight.to(x.dtype).reshape(groups, -1, volume * channels).transpose(1, 2)
    out = x.new_empty(found.num_outputs, weight.shape[0])
    for rows, columns in _columns(x, found, groups):
        out[rows] = torch.bmm(columns.transpose(0, 1), filters).transpose(0, 1).flatten(1)
    return out


def columns_weight_gradient(x: Tensor, y: Tensor, found: KernelMap, groups: int) -> Tensor:
    """w[g, n, k*c] = y[o, g, n]^T @ columns[o, g, k*c], summed over slices of the outputs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = _in_compute_dtype(x), _in_compute_dtype(y)
    channels, volume = x.shape[1] // groups, found.volume
    out = x.new_zeros(groups, y.shape[1] // groups, volume * channels, dtype=wide)
    for rows, columns in _columns(x, found, groups):
        out += torch.bmm(y[rows].view(-1, groups, out.shape[1]).permute(1, 2, 0), columns.transpose(0, 1))
    return out.view(y.shape[1], volume, channels)


def _columns(x: Tensor, found: KernelMap, groups: int) -> Iterator[tuple[slice, Tensor]]:
    """(slice of the outputs, their im2col columns [rows, groups, K * C]); 0 where there is no input."""
    table = found.cached("padded rows", _padded_rows)
    # A zero row instead of a mask: inf * 0 would be NaN.
    x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    each = max(1, found.volume * x.shape[1] * x.element_size())
    step = max(1, _COLUMNS // each)
    for first in range(0, len(table), step):
        rows = slice(first, min(first + step, len(table)))
        met = x.index_select(0, table[rows].reshape(-1))
        parts = met.view(rows.stop - first, found.volume, groups, x.shape[1] // groups).transpose(1, 2)
        yield rows, parts.reshape(rows.stop - first, groups, -1)


def _padded_rows(found: KernelMap) -> Tensor:
    rows = found.rows()
    return torch.where(rows >= 0, rows, found.num_inputs)


# Gather, multiply, scatter
class SlotBlock(NamedTuple):
    """Slots first:last, divided equally between the kernel offsets `taps`."""

    first: int
    last: int
    taps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PairLayout:
    """The pairs of a map in the slots of batched products, sorted by block and kernel offset.

    gather, scatter int64 [S]: input and output of each slot; padding slots have input 0 and output num_outputs.
    filling int64: the padding slots. order int64 [P]: the other slots, sorted by output, then by kernel offset;
    starts int64 [rows]: first position of each output. chosen: offsets of each block on the device, None for one only.
    """

    blocks: tuple[SlotBlock, ...]
    gather: Tensor
    scatter: Tensor
    filling: Tensor
    order: Tensor
    starts: Tensor
    chosen: tuple[Tensor | None, ...]


def layout(found: KernelMap, grouping: Grouping) -> PairLayout:
    """The layout of a map, cached with the map."""
    return found.cached(("layout", grouping), lambda m: _laid_out(m, grouping))


def _laid_out(found: KernelMap, grouping: Grouping) -> PairLayout:
    inputs, outputs, sizes = found.pairs()
    counts, device, rows = sizes.tolist(), inputs.device, found.num_outputs
    blocks = tuple(_blocks(grouping, counts))
    total = blocks[-1].last if blocks else 0
    gather = torch.zeros(total, dtype=torch.int64, device=device)
    scatter = torch.full((total,), rows, dtype=torch.int64, device=device)
    begins = sizes.cumsum(0).sub(sizes).tolist()
    for first, last, taps in blocks:
        each = (last - first) // len(taps)
        for number, tap in enumerate(taps):
            at, own = slice(first + number * each, first + number * each + counts[tap]), begins[tap]
            gather[at], scatter[at] = inputs[own : own + counts[tap]], outputs[own : own + counts[tap]]
    filled = scatter == rows
    order = scatter.argsort(stable=True)[: len(inputs)]
    met = torch.bincount(outputs, minlength=rows)
    chosen = tuple(torch.tensor(b.taps, device=device) if len(b.taps) > 1 else None for b in blocks)
    return PairLayout(blocks, gather, scatter, filled.nonzero()[:, 0], order, met.cumsum(0) - met, chosen)


def _blocks(grouping: Grouping, counts: list[int]) -> Iterator[SlotBlock]:
    """The non-empty blocks of slots."""
    first = 0
    for group in grouping.groups(counts):
        for taps in [group.taps] if group.batched else [(tap,) for tap in group.taps]:
            last = first + len(taps) * max(counts[tap] for tap in taps)
            if last > first:
                yield SlotBlock(first, last, taps)
            first = last


def forward_by_group(x: Tensor, weight: Tensor, how: PairLayout, rows: int, groups: int) -> Tensor:
    """Gather, multiply and scatter-add, one group of kernel offsets after another."""
    x, filters, out = _prepare_operands(x, weight, rows, groups)
    for number, block in enumerate(how.blocks):
        at = slice(block.first, block.last)
        products = x.new_empty(block.last - block.first, weight.shape[0])
        _multiplied(x.index_select(0, how.gather[at]), _filters(filters, how, number), products)
        out.index_add_(0, how.scatter[at], products.to(out.dtype))
    return out[:rows]


def forward_fused(x: Tensor, weight: Tensor, how: PairLayout, rows: int, groups: int) -> Tensor:
    """Gather all pairs, multiply, scatter-add all products."""
    x, filters, out = _prepare_operands(x, weight, rows, groups)
    return out.index_add_(0, how.scatter, _all_products(x, filters, how).to(out.dtype))[:rows]


def forward_in_order(x: Tensor, weight: Tensor, how: PairLayout, rows: int, groups: int) -> Tensor:
    """Gather all pairs, multiply, sum the products of each output in a fixed order."""
    x, filters, _ = _prepare_operands(x, weight, 0, groups)
    if not len(how.order) or not weight.shape[0]:
        return x.new_zeros(rows, weight.shape[0])
    products = _all_products(x, filters, how)
    return torch.embedding_bag(products, how.order, how.starts, False, 0, False, None, False)[0]


def weight_gradient(x: Tensor, y: Tensor, how: PairLayout, shape: tuple[int, int], fused: bool) -> Tensor:
    """w[g*n, k, c]: x^T @ y per block; fused: gather all at once; shape: (kernel volume, groups)."""
    (volume, groups), kind = shape, torch.promote_types(x.dtype, torch.float32)
    x, y = _in_compute_dtype(x), torch.cat([_in_compute_dtype(y), _in_compute_dtype(y).new_zeros(1, y.shape[1])])
    channels, width = x.shape[1] // groups, y.shape[1] // groups
    out = x.new_zeros(volume, groups, channels, width)
    sides = _sides(x, y, how, slice(None)) if fused else None
    for block, chosen in zip(how.blocks, how.chosen, strict=True):
        at = slice(block.first, block.last)
        left, right = _sides(x, y, how, at) if sides is None else (side[at] for side in sides)
        taps = len(block.taps)
        products = torch.bmm(_split(left, taps, groups).transpose(1, 2), _split(right, taps, groups))
        products = products.view(taps, groups, channels, width)
        if chosen is None:
            out[block.taps[0]] = products[0]
        else:
            out.index_copy_(0, chosen, products)
    return out.permute(1, 3, 0, 2).reshape(groups * width, volume, channels).to(kind)


def _sides(x: Tensor, y: Tensor, how: PairLayout, at: slice) -> tuple[Tensor, Tensor]:
    """(rows of x, rows of y) of the slots; 0 on both sides for padding slots."""
    left, right = x.index_select(0, how.gather[at]), y.index_select(0, how.scatter[at])
    if not len(how.filling):
        return left, right
    return left.masked_fill_((how.scatter[at] == len(y) - 1)[:, None], 0), right


def _prepare_operands(x: Tensor, weight: Tensor, rows: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(features, filters [K, G, C, N], zeros [rows + 1, G * N], the last row for padding slots)."""
    x = _in_compute_dtype(x)
    filters = reference.grouped(weight.to(x.dtype).contiguous(), groups)
    return x, filters, x.new_zeros(rows + 1, weight.shape[0], dtype=reference.accumulator(x.dtype))


def _all_products(x: Tensor, filters: Tensor, how: PairLayout) -> Tensor:
    return multiplied(x.index_select(0, how.gather), filters, how)


def multiplied(gathered: Tensor, filters: Tensor, how: PairLayout) -> Tensor:
    """Products of gathered rows [S, G * C] and filters [K, G, C, N]: [S, G * N]."""
    products = gathered.new_empty(len(gathered), filters.shape[1] * filters.shape[3])
    for number, block in enumerate(how.blocks):
        at = slice(block.first, block.last)
        _multiplied(gathered[at], _filters(filters, how, number), products[at])
    return products


def _filters(filters: Tensor, how: PairLayout, number: int) -> Tensor:
    """Filters [T, G, C, N] of the kernel offsets of a block."""
    chosen = how.chosen[number]
    if chosen is not None:
        return filters.index_select(0, chosen)
    tap = how.blocks[number].taps[0]
    return filters[tap : tap + 1]


def _multiplied(rows: Tensor, filters: Tensor, out: Tensor) -> None:
    """Rows [T * M, G * C], M per kernel offset, times [T, G, C, N] into out [T * M, G * N]."""
    taps, groups, channels, width = filters.shape
    if taps == groups == 1:
        torch.mm(rows, filters[0, 0], out=out)
    elif groups == 1:
        torch.bmm(rows.view(taps, -1, channels), filters[:, 0], out=out.view(taps, -1, width))
    else:
        products = torch.bmm(_split(rows, taps, groups), filters.reshape(-1, channels, width))
        out.copy_(products.view(taps, groups, -1, width).transpose(1, 2).reshape(len(rows), -1))


def _split(rows: Tensor, taps: int, groups: int) -> Tensor:
    """Rows [T * M, G * C] as [T * G, M, C]."""
    each = rows.shape[0] // taps
    return rows.view(taps, each, groups, rows.shape[1] // groups).transpose(1, 2).reshape(taps * groups, each, -1)


def _in_compute_dtype(x: Tensor) -> Tensor:
    """Contiguous x in its compute dtype: half precision only on a GPU, which accumulates in float32."""
    return x.contiguous() if x.is_cuda else x.to(reference.accumulator(x.dtype)).contiguous()


# Statements
_OPERANDS = {FORWARD: ("x", "w"), DGRAD: ("grad", "w"), WGRAD: ("x", "grad")}
_PRODUCTS = {
    FORWARD: "Y[s[g,q],h,n] = x[i[g,q],h,c] * w[h,n,k[g],c] ; s:distinct, s:onto",
    DGRAD: "Y[s[g,q],h,c] = grad[i[g,q],h,n] * w[h,n,k[g],c] ; s:distinct, s:onto",
}
"""The product of each pair, at its rank s in the order of outputs; h: channel groups."""
_SUMS = "O[o[p],n] = Y[p,n] ; o:sorted"


@lru_cache(maxsize=16)
def statement(name: str, groups: int) -> str:
    """The statement of a pass: the convolution, or its derivative."""
    whole = parse(CONV if groups == 1 else GROUPED_CONV)
    assert gradient_name(whole) == "grad"
    if name == FORWARD:
        return str(whole)
    (found,) = derivative(whole, "x" if name == DGRAD else "w")
    return str(found)


_SIDES = {FORWARD: "", DGRAD: "_t", WGRAD: "_w"}
"""The ends of the names of a form for each pass: itself, of the transposed map, by kernel offset."""


def _form(map_pass: Pass) -> str:
    """The form of the map that a pass reads, with at most as many splits as kernel offsets."""
    form = map_pass.flow.form
    if map_pass.flow.splits > _splits_of(map_pass):
        form = split_dataflow(_splits_of(map_pass)).form
    own = form + _SIDES[map_pass.name]
    return own if own in maps.FORMS else form


def forms(map_pass: Pass) -> tuple[str, ...]:
    """The forms of the map that the statement of a pass reads; none for library products."""
    if map_pass.flow.movement == "planned":
        return maps.names_of(map_pass.found, map_pass.name != FORWARD)
    return (_form(map_pass),) if map_pass.flow.movement in ("implicit", "on-demand") else ()


def materialize(wanted: Sequence[tuple[KernelMap, Iterable[Chosen | None]]], differentiable: bool) -> None:
    """Materialise the forms of maps that layers with these dataflows read, with one host synchronisation.

    None: the planner's default forms. differentiable: include those of the gradients.
    """
    requests = []
    for found, flows in wanted:
        for three in flows:
            if three is None:
                requests.append((found, maps.names_of(found, differentiable)))
                continue
            passes = PASSES if differentiable else PASSES[:1]
            for name, flow in zip(passes, three, strict=False):
                requests.append((found, forms(Pass(name, flow, found, 1))))
    maps.materialize(requests)


def _run_as_einsum(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """Execute a pass as a statement over its dataflow's form of the map."""
    split, finish = _in_groups(map_pass, given), _finish(epilogue)
    ready = map_pass.found.cached(_key(map_pass, given, finish), lambda _: _plan_of(map_pass, split, finish))
    found = plan.execute_plan(ready, split, None if epilogue is None else epilogue.split(map_pass.groups))
    return _flat(map_pass, found)


def _plan_of(map_pass: Pass, given: Two, finish: EpilogueSignature) -> plan.Plan:
    """The plan of the call, with the arrays of the map bound."""
    each = [maps.form_operands(map_pass.found, form) for form in forms(map_pass)]
    tokens, arrays = [t for names, _ in each for t in names], [x for _, held in each for x in held]
    operands, names = [*given, *arrays], "|".join((*_OPERANDS[map_pass.name], *tokens))
    text, shape = statement(map_pass.name, map_pass.groups), _shape(map_pass, given)
    lowering = "" if map_pass.flow.movement == "planned" else _lowering(given[0])
    # The first axis of a weight is no row count.
    steady = (len(operands),) if map_pass.name == WGRAD else (1,)
    piece = map_pass.flow.piece
    if map_pass.name == WGRAD:
        taps = [x for token, x in zip(tokens, arrays, strict=True) if token.endswith("_w@0@k")]
        piece = _entries_at_once(shape, taps[0].shape[0]) if taps else 0
    return plan.bound_plan(operands, plan.PlanRequest(names, text, shape, steady, (0, 1), lowering, finish, piece))


_PIECE, _PROGRAMS, _SIDE = 32, 264, 128
"""Weight gradients over tiles: entries of an offset per program at least, enough programs for a GPU, and the side of a
program's tile. us by entries (fp16, H200; 64 rows a tile in the first three lines, else 128):
channels, pairs       8     32     64    128    256
384-256, 122k       264    136    113    103    174
256-256, 122k       158     75     68     97    167
128-128, 238k       184     55     55     86    148
96-96, 365k         164     85     88    150    274
"""


def _entries_at_once(shape: Sequence[int], entries: int) -> int:
    """Entries of a kernel offset per program, in weight gradients of this shape over so many (tile, offset) entries."""
    *_, outputs, taps, inputs = shape
    blocks, piece = -(-outputs // _SIDE) * -(-inputs // _SIDE), _PIECE
    while (entries // (2 * piece) + taps) * blocks >= _PROGRAMS and 2 * piece <= entries:
        piece *= 2
    return piece


_IN_PARALLEL = {
    FORWARD: "Y[rows[tile[e],b],h,n] = x[met[e,b],h,c] * w[h,n,k[e],c] ; tile:sorted, rows:distinct, rows:onto",
    DGRAD: "Y[rows[tile[e],b],h,c] = grad[met[e,b],h,n] * w[h,n,k[e],c] ; tile:sorted, rows:distinct, rows:onto",
}
"""The products of all splits in one kernel; rows: of a buffer with a part for each split."""
_OVER_SPLITS = "O[o,n] = Y[s,o,n]"


def _run_implicit(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """One statement; with several splits all in one kernel, each into a buffer, then the sum over the buffers.

    us on an H200 (fp16 and fp32, layers of MinkUNet over a scan), beside a kernel for each split that adds to the one
    before: 2 splits 1.00 and 0.95 times as long (geometric means), 3 splits 0.92 and 0.88, 4 splits 0.90 and 0.79."""
    splits = _splits_of(map_pass)
    if splits < 2 or map_pass.name == WGRAD:
        return _run_as_einsum(map_pass, given, epilogue)
    split, finish = _in_groups(map_pass, given), _finish(epilogue)
    key = _key(map_pass, given, finish)
    products, sums = map_pass.oriented_map.cached(key, lambda _: _plans_in_parallel(map_pass, split, finish))
    found = plan.execute_plan(products, split).flatten(1)
    return plan.execute_plan(sums, [found.view(splits, map_pass.oriented_map.num_outputs, found.shape[1])], epilogue)


def _splits_of(map_pass: Pass) -> int:
    return min(map_pass.flow.splits, max(1, map_pass.found.volume))


def _plans_in_parallel(map_pass: Pass, given: Two, finish: EpilogueSignature) -> tuple[plan.Plan, plan.Plan]:
    splits, found = _splits_of(map_pass), map_pass.oriented_map
    shape, lowering = _shape(map_pass, given), _lowering(given[0])
    text, rows, width = _IN_PARALLEL[map_pass.name], splits * shape[0], math.prod(shape[1:])
    if map_pass.groups == 1:
        text = text.replace(",h", "").replace("h,", "")
    names = "|".join((*_OPERANDS[map_pass.name], "rows", "tile", "k", "met"))
    kind = torch.float32 if given[0].dtype in EIGHT_BITS else given[0].dtype
    wide = torch.promote_types(kind, torch.float32)
    call = plan.PlanRequest(names, text, (rows, *shape[1:]), (1,), (0, 1), lowering, result_dtype=wide)
    products = plan.bound_plan([*given, *maps.splits_in_a_row(found, splits)], call)
    # Only the buffer's shape and dtype are used.
    buffer = given[0].new_empty((splits, shape[0], width), dtype=wide)
    sums = plan.plan_for([buffer], "Y", _OVER_SPLITS, (shape[0], width), lowering, finish, finish.dtype or kind)
    return products, sums


def _run_in_order(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """Products of all pairs in the order of outputs, then a segment sum; wgrad by library products."""
    if map_pass.name == WGRAD:
        return _by_library(partial(_gathered, forward_by_group), map_pass, given, epilogue)
    split, finish = _in_groups(map_pass, given), _finish(epilogue)
    key = _key(map_pass, given, finish)
    products, sums = map_pass.oriented_map.cached(key, lambda _: _plans_in_order(map_pass, split, finish))
    return plan.execute_plan(sums, [plan.execute_plan(products, split).flatten(1)], epilogue)


def _plans_in_order(map_pass: Pass, given: Two, finish: EpilogueSignature) -> tuple[plan.Plan, plan.Plan]:
    taps, inputs, places, outputs = map_pass.oriented_map.cached("pairs in output order", _pairs_in_order)
    operands, lowering = [*given, inputs, taps, places], _lowering(given[0])
    shape = _shape(map_pass, given)
    text, width = _PRODUCTS[map_pass.name], shape[1:]
    if map_pass.groups == 1:
        text = text.replace(",h", "").replace("h,", "")
    names = "|".join((*_OPERANDS[map_pass.name], "i", "k", "s"))
    products = plan.plan_for(operands, names, text, (len(outputs), *width), lowering)
    # Only the buffer's shape and dtype are used.
    buffer = given[0].new_empty((len(outputs), math.prod(width)), dtype=products.dtype)
    sums = plan.plan_for([buffer, outputs], "Y|o", _SUMS, (shape[0], math.prod(width)), lowering, finish)
    return plan.bind_operands(products, operands, (0, 1)), plan.bind_operands(sums, [buffer, outputs], (0,))


def _pairs_in_order(found: KernelMap) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offsets [G], inputs [G, Q] and places [G, Q] of pairs grouped by kernel offset, and the output of each place [P].

    A place is the rank of a pair sorted by output, then by kernel offset; padding is -1.
    """
    if found.buffered is not None:
        raise OptionError("dataflow fetch-on-demand-deterministic reads map sizes on the host, not allowed in capture")
    taps, inputs, outputs = found.grouped(maps.group_of(found))
    flat = outputs.flatten()
    filled = int((flat < 0).sum())
    order = (outputs.long() * found.volume + taps[:, None]).flatten().argsort(stable=True)[filled:]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order), dtype=flat.dtype, device=flat.device)
    return taps, inputs, places.view_as(outputs), flat[order]


def _key(map_pass: Pass, given: Two, finish: EpilogueSignature) -> tuple[object, ...]:
    facts = tuple((x.shape, x.dtype, x.device) for x in given)
    return "dataflow", map_pass.name, map_pass.flow, map_pass.groups, plan.deterministic(), finish, facts


def _lowering(x: Tensor) -> str:
    """The required lowering: kernels where Triton runs, as another one would be another dataflow."""
    return "triton" if x.is_cuda or kernels.interpreted() else ""


def _finish(epilogue: Epilogue | None) -> EpilogueSignature:
    return NO_EPILOGUE if epilogue is None else epilogue.signature


def _in_groups(map_pass: Pass, given: Two) -> Two:
    """The operands, with an axis for channel groups if there are several."""
    if map_pass.groups == 1:
        return given
    axes = {"x": 1, "grad": 1, "w": 0}
    first, second = (
        x.unflatten(axes[name], (map_pass.groups, -1)) for name, x in zip(_OPERANDS[map_pass.name], given, strict=True)
    )
    return first, second


def _shape(map_pass: Pass, given: Two) -> tuple[int, ...]:
    """Shape of the result, with an axis for channel groups, from operands that have it."""
    first, second = given
    groups = () if map_pass.groups == 1 else (map_pass.groups,)
    if map_pass.name == WGRAD:
        return *groups, second.shape[-1], map_pass.found.volume, first.shape[-1]
    width = second.shape[-3] if map_pass.name == FORWARD else second.shape[-1]
    return map_pass.oriented_map.num_outputs, *groups, width


def _flat(map_pass: Pass, found: Tensor) -> Tensor:
    if map_pass.groups == 1:
        return found
    return found.flatten(0, 1) if map_pass.name == WGRAD else found.flatten(1)


def _lay_out_forms(map_pass: Pass) -> None:
    for form in forms(map_pass):
        maps.form_operands(map_pass.found, form)


def _lay_out_columns(map_pass: Pass) -> None:
    map_pass.oriented_map.cached("padded rows", _padded_rows)


def _lay_out_pairs(map_pass: Pass) -> None:
    layout(map_pass.oriented_map, map_pass.flow.grouping or Grouping("separate"))


def _lay_out_order(map_pass: Pass) -> None:
    if map_pass.name == WGRAD:
        _lay_out_pairs(map_pass)
    else:
        map_pass.oriented_map.cached("pairs in output order", _pairs_in_order)


def _library(run: Callable[[Pass, Two], Tensor]) -> Engine:
    return partial(_by_library, run)


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "explicit": _library(_explicit),
        "vectorised": _library(partial(_gathered, forward_by_group)),
        "fused": _library(partial(_gathered, forward_fused)),
        "locality-aware": _library(partial(_gathered, forward_in_order)),
        "on-demand": _run_as_einsum,
        "on-demand-in-order": _run_in_order,
        "implicit": _run_implicit,
        "planned": _run_as_einsum,
    }
)
"""The engine of each movement."""

_LAYOUTS: Mapping[str, Callable[[Pass], object]] = MappingProxyType(
    {
        "explicit": _lay_out_columns,
        "vectorised": _lay_out_pairs,
        "fused": _lay_out_pairs,
        "locality-aware": _lay_out_pairs,
        "on-demand-in-order": _lay_out_order,
    }
)
"""Builds what a pass of each movement reads of its map, if that is no form of it."""
