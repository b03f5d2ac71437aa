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
locality-aware  the same in a stationary order: each input is read once and written to all of its slots, and each output
                sums its slots in a fixed order and is written once

Rows are moved by lower.movement. An offset that pairs every row with itself, as the centre of a submanifold map, is
multiplied without movement: its product X @ W is what the other offsets are added to, and its weight gradient X^T @ Y.

TorchSparse's public code (2.1) accumulates halves in half precision; here sums are in float32 at least. As there,
half-precision products on a GPU are stored in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from pumice.lower import maps, movement, plan, reference
from pumice.lower.epilogue import NO_EPILOGUE, Epilogue, EpilogueSignature, applied
from pumice.lower.movement import Slots
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
from pumice.schedule.tile import Tile, table_parts

CONV = "O[o,n] = map[o,k,i] * x[i,c] * w[n,k,c]"
GROUPED_CONV = "O[o,g,n] = map[o,k,i] * x[i,g,c] * w[g,n,k,c]"
"""The convolution as a statement whose sparse operand is the kernel map; gradients are its derivatives."""

_COLUMNS = 1 << 28
"""Maximum bytes of columns held at a time."""

Two = tuple[Tensor, Tensor]
Engine = Callable[["Pass", Two, Epilogue | None], Tensor]
"""Executes a pass on its two operands and an epilogue."""
Forward = Callable[[Tensor, Tensor, "PairLayout", int], Tensor]
Gather = Callable[[Tensor, Slots], Tensor]
Place = tuple[int, int, tuple[int, ...]]
"""First slot, last slot and kernel offsets of a block."""


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


def _gathered(forward: Forward, gather: Gather | None, map_pass: Pass, given: Two) -> Tensor:
    how: PairLayout = layout(map_pass.oriented_map, map_pass.flow.grouping or Grouping("separate"))
    if map_pass.name == WGRAD:
        return weight_gradient(*given, how, (map_pass.found.volume, map_pass.groups), gather)
    return forward(*given, how, map_pass.groups)


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
    """Slots first:last, divided equally between the kernel offsets `taps`; chosen: these on the device, None for one
    only. inputs, outputs: the rows of these slots."""

    first: int
    last: int
    taps: tuple[int, ...]
    chosen: Tensor | None
    inputs: Slots
    outputs: Slots


@dataclass(frozen=True, eq=False)
class PairLayout:
    """The pairs of a map in the slots of batched products, sorted by block and kernel offset.

    inputs, outputs: the rows of all slots. middle: the kernel offset that pairs every row with itself, which has no
    slots, or None.
    """

    blocks: tuple[SlotBlock, ...]
    inputs: Slots
    outputs: Slots
    middle: int | None


def layout(found: KernelMap, grouping: Grouping) -> PairLayout:
    """The layout of a map, cached with the map."""
    return found.cached(("layout", grouping), lambda m: _laid_out(m, grouping))


def _laid_out(found: KernelMap, grouping: Grouping) -> PairLayout:
    inputs, outputs, sizes = found.pairs()
    counts, begins = sizes.tolist(), sizes.cumsum(0).sub(sizes).tolist()
    middle = _middle(found, counts, begins)
    places = list(_places(grouping, counts, middle))
    padded = any(_is_padded(place, counts) for place in places)
    lists = [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    ins = Slots(_slot_rows(inputs, found.num_inputs, places, lists), found.num_inputs, padded)
    outs = Slots(_slot_rows(outputs, found.num_outputs, places, lists), found.num_outputs, padded)
    blocks = [_block(place, (ins, outs), counts, isinstance(found, MultiMap)) for place in places]
    return PairLayout(tuple(blocks), ins, outs, middle)


def _slot_rows(rows: Tensor, none: int, places: Sequence[Place], lists: Sequence[slice]) -> Tensor:
    """int32: the row of each slot, `none` for padding. lists: where the rows of each kernel offset are."""
    filling = rows.new_full((max((last - first for first, last, _ in places), default=0),), none)
    pieces = [filling[:0]]
    for first, last, taps in places:
        for tap in taps:
            own = lists[tap]
            pieces += [rows[own], filling[: (last - first) // len(taps) - (own.stop - own.start)]]
    return torch.cat(pieces).int()


def _is_padded(place: Place, counts: Sequence[int]) -> bool:
    first, last, taps = place
    return last - first > sum(counts[tap] for tap in taps)


def _middle(found: KernelMap, counts: Sequence[int], begins: Sequence[int]) -> int | None:
    """The kernel offset that pairs every row with itself, or None."""
    (inputs, outputs, _), rows = found.pairs(), found.num_inputs
    if not rows or rows != found.num_outputs:
        return None
    every = torch.arange(rows, device=inputs.device)
    own = (tap for tap, count in enumerate(counts) if count == rows)
    same = (
        tap for tap in own if all(torch.equal(x[begins[tap] : begins[tap] + rows], every) for x in (inputs, outputs))
    )
    return next(same, None)


def _places(grouping: Grouping, counts: list[int], middle: int | None) -> Iterator[Place]:
    """The non-empty blocks of slots."""
    first = 0
    for group in grouping.groups(counts):
        moved = tuple(tap for tap in group.taps if tap != middle)
        for taps in [moved] if group.batched else [(tap,) for tap in moved]:
            last = first + len(taps) * max((counts[tap] for tap in taps), default=0)
            if last > first:
                yield first, last, taps
            first = last


def _block(place: Place, sides: Sequence[Slots], counts: Sequence[int], multiple: bool) -> SlotBlock:
    """A block of slots. multiple: an output may have several inputs at one kernel offset."""
    (first, last, taps), padded = place, _is_padded(place, counts)
    distinct = len(taps) == 1 and not multiple
    inputs, outputs = (Slots(side.rows[first:last], side.count, padded, distinct) for side in sides)
    chosen = torch.tensor(taps, device=inputs.rows.device) if len(taps) > 1 else None
    return SlotBlock(first, last, taps, chosen, inputs, outputs)


def forward_by_group(x: Tensor, weight: Tensor, how: PairLayout, groups: int, scalar: bool = False) -> Tensor:
    """Gather, multiply and scatter-add, one group of kernel offsets after another. scalar: see lower.movement."""
    x, filters = _prepare_operands(x, weight, groups)
    out = _begun(x, filters, how)
    for block in how.blocks:
        products = x.new_empty(block.last - block.first, weight.shape[0])
        _multiplied(movement.gather_slots(x, block.inputs, scalar), _filters(filters, block), products)
        movement.scatter_slots(out, products, block.outputs, scalar)
    return out


def forward_fused(x: Tensor, weight: Tensor, how: PairLayout, groups: int) -> Tensor:
    """Gather all pairs, multiply, scatter-add all products."""
    x, filters = _prepare_operands(x, weight, groups)
    products = multiplied(movement.gather_slots(x, how.inputs), filters, how)
    out = _begun(x, filters, how)
    movement.scatter_slots(out, products, how.outputs)
    return out


def forward_in_order(x: Tensor, weight: Tensor, how: PairLayout, groups: int) -> Tensor:
    """Gather all pairs by input, multiply, sum the products of each output in a fixed order."""
    x, filters = _prepare_operands(x, weight, groups)
    products = multiplied(movement.gather_stationary(x, how.inputs), filters, how)
    return movement.scatter_stationary(products, how.outputs, middle_product(x, filters, how))


def weight_gradient(x: Tensor, y: Tensor, how: PairLayout, shape: tuple[int, int], gather: Gather | None) -> Tensor:
    """w[g*n, k, c]: x^T @ y per block; gather: of all at once, None: block by block; shape: (kernel volume, groups)."""
    (volume, groups), kind = shape, torch.promote_types(x.dtype, torch.float32)
    x, y = _in_compute_dtype(x), _in_compute_dtype(y)
    channels, width = x.shape[1] // groups, y.shape[1] // groups
    out = x.new_zeros(volume, groups, channels, width)
    if how.middle is not None:
        out[how.middle] = _gradients(x, y, 1, groups)[0]
    sides = None if gather is None else (gather(x, how.inputs), gather(y, how.outputs))
    for block in how.blocks:
        if sides is None:
            left, right = movement.gather_slots(x, block.inputs), movement.gather_slots(y, block.outputs)
        else:
            left, right = (side[block.first : block.last] for side in sides)
        products = _gradients(left, right, len(block.taps), groups)
        if block.chosen is None:
            out[block.taps[0]] = products[0]
        else:
            out.index_copy_(0, block.chosen, products)
    return out.permute(1, 3, 0, 2).reshape(groups * width, volume, channels).to(kind)


def _gradients(left: Tensor, right: Tensor, taps: int, groups: int) -> Tensor:
    """Rows [T * M, G * C] and [T * M, G * N], M per kernel offset: their products [T, G, C, N]."""
    products = torch.bmm(_split(left, taps, groups).transpose(1, 2), _split(right, taps, groups))
    return products.view(taps, groups, *products.shape[1:])


def _prepare_operands(x: Tensor, weight: Tensor, groups: int) -> Two:
    """(features, filters [K, G, C, N])."""
    x = _in_compute_dtype(x)
    return x, reference.grouped(weight.to(x.dtype).contiguous(), groups)


def _begun(x: Tensor, filters: Tensor, how: PairLayout) -> Tensor:
    """The result to which products are added, in the accumulator's dtype: the product of the middle offset, or 0."""
    kind = reference.accumulator(x.dtype)
    if how.middle is not None:
        return reference.products(x, filters[how.middle], kind)
    return x.new_zeros(how.outputs.count, filters.shape[1] * filters.shape[3], dtype=kind)


def middle_product(x: Tensor, filters: Tensor, how: PairLayout) -> Tensor | None:
    """The product of the offset without movement, for filters [K, G, C, N]: [rows, G * N] in x's dtype."""
    return None if how.middle is None else reference.products(x, filters[how.middle], x.dtype)


def multiplied(gathered: Tensor, filters: Tensor, how: PairLayout) -> Tensor:
    """Products of gathered rows [S, G * C] and filters [K, G, C, N]: [S, G * N]."""
    products = gathered.new_empty(len(gathered), filters.shape[1] * filters.shape[3])
    for block in how.blocks:
        at = slice(block.first, block.last)
        _multiplied(gathered[at], _filters(filters, block), products[at])
    return products


def _filters(filters: Tensor, block: SlotBlock) -> Tensor:
    """Filters [T, G, C, N] of the kernel offsets of a block."""
    if block.chosen is not None:
        return filters.index_select(0, block.chosen)
    return filters[block.taps[0] : block.taps[0] + 1]


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
_PARTS = {
    FORWARD: "P[o,s,h,n] = x[met[o,s,q],h,c] * w[h,n,s,q,c]",
    DGRAD: "P[o,s,h,c] = grad[met[o,s,q],h,n] * w[h,n,s,q,c]",
}
"""Split-K over the table: part s of an output, the sum over kernel offsets s * Q + q."""
_SUM_OF_PARTS = "O[o,n] = P[o,s,n]"


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
    return (_form(map_pass),) if map_pass.flow.movement in ("implicit", "on-demand", "in-parts") else ()


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
        return _by_library(partial(_gathered, forward_by_group, None), map_pass, given, epilogue)
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


def _run_in_parts(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """Partial sums over ranges of kernel offsets, in float32 at least, then their sum; wgrad is that of the table."""
    if map_pass.name == WGRAD:
        return _run_as_einsum(map_pass, given, epilogue)
    split, finish = _in_groups(map_pass, given), _finish(epilogue)
    shape = _shape(map_pass, split)
    parts = table_parts(shape[0], math.prod(shape[1:]), map_pass.found.volume)
    split = split[0], _in_parts(split[1], -2, parts)
    key = _key(map_pass, split, finish)
    products, sums = map_pass.found.cached(key, lambda _: _plans_in_parts(map_pass, split, shape, finish))
    return plan.execute_plan(sums, [plan.execute_plan(products, split).flatten(2)], epilogue)


def _plans_in_parts(
    map_pass: Pass, given: Two, shape: tuple[int, ...], finish: EpilogueSignature
) -> tuple[plan.Plan, plan.Plan]:
    (form,), lowering, parts = forms(map_pass), _lowering(given[0]), given[1].shape[-3]
    table = _in_parts(maps.form_operands(map_pass.found, form)[1][0], 1, parts, -1)
    names, text = (*_OPERANDS[map_pass.name], "met"), _PARTS[map_pass.name]
    if map_pass.groups == 1:
        text = text.replace(",h", "").replace("h,", "")
    kept = plan.result_dtype(given, "|".join(names[:2]), text.replace("met[o,s,q]", "o"))
    asked = plan.PlanRequest("|".join(names), text, (shape[0], parts, *shape[1:]), (1,), (0, 1), lowering)
    asked = replace(asked, result_dtype=torch.promote_types(kept, torch.float32))
    products = plan.bound_plan([*given, table], asked)
    # Only the buffer's shape and dtype are used.
    buffer = given[0].new_empty((shape[0], parts, math.prod(shape[1:])), dtype=products.dtype)
    whole = shape[0], math.prod(shape[1:])
    asked = plan.PlanRequest("P", _SUM_OF_PARTS, whole, (), (0,), lowering, finish, 0, finish.dtype or kept)
    return products, plan.bound_plan([buffer], asked)


def _in_parts(x: Tensor, axis: int, parts: int, filler: int = 0) -> Tensor:
    """x with an axis of kernel offsets as [parts, offsets of a part], filled up at its end."""
    volume = x.shape[axis]
    each = -(-volume // parts)
    if parts * each > volume:
        ends = (0, 0) * (x.ndim - 1 - axis % x.ndim)
        x = torch.nn.functional.pad(x, (*ends, 0, parts * each - volume), value=filler)
    return x.unflatten(axis, (parts, each))


def planned_tile(map_pass: Pass, form: str, given: Two) -> Tile:
    """The tile of the kernel that runs a pass over one form of its map. given: operands of any contents."""
    given, text = _in_groups(map_pass, given), statement(map_pass.name, map_pass.groups)
    tokens, arrays = maps.form_operands(map_pass.found, form)
    names, forms = "|".join((*_OPERANDS[map_pass.name], *tokens)), (("map", form),)
    operands = [*given, *arrays]
    tensors = {name: operands[place] for name, place in plan.array_places(names, text, forms).items()}
    (step,) = plan.rewritten(text, names, forms).steps
    bound = plan.step_bound(step, tensors, _shape(map_pass, given))
    return kernels.tile_of(bound, tensors, device=map_pass.found.device)


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
        "vectorised": _library(partial(_gathered, forward_by_group, None)),
        "fused": _library(partial(_gathered, forward_fused, movement.gather_slots)),
        "locality-aware": _library(partial(_gathered, forward_in_order, movement.gather_stationary_padded)),
        "on-demand": _run_as_einsum,
        "on-demand-in-order": _run_in_order,
        "implicit": _run_implicit,
        "in-parts": _run_in_parts,
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
