"""Convolutions and sums of gathered rows on a CPU, by C kernels where there is a compiler, else by operators of torch.

    out[o, n] += x[i, c] * weight[n, k, c]        for every pair (o, k, i)

The C kernels are in native_products.py; float64 and several groups use torch. There, outputs are processed in chunks.
The inputs of a chunk's pairs are gathered (`index_select`), multiplied into a buffer of products, and `embedding_bag`
sums the products of each output: data stays in the cache, sums have a fixed order, and there is no scatter. The
identity offset, the centre of a submanifold map, pairs row j with row j: it needs no gather.
The plain references are in reference.py.

The lowering "gathered" runs statements of one of these forms,

    T[S[p], g, n] += x[G[p], g, c] * w[K[p], g, c, n]           forward; the input gradient with S and G exchanged
    T[K[p], g, c, n] += x[G[p], g, c] * y[S[p], g, n]           weight gradient                             K sorted

with axes in any order and g optional: sparse convolutions, relational graph convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from pumice.coords import KernelMap, Pairs
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine, Statement, arrays_of, indices_of
from pumice.lower import graph, native_products, reference
from pumice.runtime.cache import cached_per_tensor
from pumice.schedule.predict import CpuSchedule

_MOST_TAPS = 4096  # kernel offsets of which most may have no pairs
_PAIRS = 3  # tables are the three arrays of Pairs, then the chunks


class Chunk(NamedTuple):
    """Output rows first:last and their pairs in tiles of one kernel offset each, without the identity offset.

    taps [tiles]: offset of each tile. gather [tiles * tile]: the inputs, tile after tile or interleaved (the first of
    every tile, the second of every tile, ...), padded with 0. Output first + j is the sum of the products
    slots[starts[j]:starts[j + 1]], none of them padding.
    """

    first: int
    last: int
    taps: Tensor
    gather: Tensor
    slots: Tensor
    starts: Tensor


def chunks(pairs: Pairs, rows: int, inputs: int, schedule: CpuSchedule) -> tuple[Tensor, ...]:
    """The chunks of pairs: (gather, taps, slots, starts, layout). rows, inputs: numbers of output and input rows.

    layout int64: [identity offset or -1, tiles are interleaved, rows, tiles and pairs of each chunk].
    """
    return _chunk(pairs, _identity_tap(pairs, rows, inputs), rows, schedule)


def forward(
    x: Float[Tensor, "inputs c_in"],
    weight: Float[Tensor, "c_out k c_group"],
    tables: Sequence[Tensor],
    rows: int,
    groups: int,
) -> Float[Tensor, "{rows} c_out"]:
    """x [N_in, G*C], weight [G*N, K, C] -> out [rows, G*N] in x's dtype.

    Half precisions are computed in float32 and rounded once. Several groups use the loop of reference.py.
    """
    pairs = Pairs(*tables[:_PAIRS])
    if groups > 1:
        return reference.forward(x, weight, pairs, rows, groups)
    schedule = CpuSchedule.default(weight.shape[2], weight.shape[0], len(pairs.inputs))
    chunked = tables[_PAIRS:] or _chunk(pairs, -1, rows, schedule)
    dtype, x = x.dtype, _computable(x)
    if 0 in weight.shape or not len(pairs.inputs):
        return x.new_zeros(rows, weight.shape[0], dtype=dtype)
    identity, interleaved = chunked[-1][:2].tolist()
    engine = _engine(bool(interleaved), x.dtype)
    filters = weight.to(x.dtype).permute(engine.axes).contiguous()
    whole = identity >= 0
    out = engine.dense(x, filters[identity]) if whole else x.new_zeros(rows, weight.shape[0])
    chunks = [chunk for chunk in _chunks(chunked) if len(chunk.slots)]
    # Buffers are reused for every chunk: page faults are expensive.
    longest = max((len(chunk.gather) for chunk in chunks), default=0)
    scratch = x.new_empty(longest, x.shape[1]), x.new_empty(longest if engine.buffered else 0, out.shape[1])
    for chunk in chunks:
        gathered = torch.index_select(x, 0, chunk.gather, out=scratch[0][: len(chunk.gather)])
        products = engine.multiply(gathered, filters.index_select(0, chunk.taps), scratch[1])
        total = torch.embedding_bag(products, chunk.slots, chunk.starts, False, 0, False, None, False)[0]
        part = out[chunk.first : chunk.last]
        part.add_(total) if whole else part.copy_(total)
    return out.to(dtype)


def weight_gradient(
    x: Float[Tensor, "inputs c_in"], grad: Float[Tensor, "outputs c_out"], tables: Sequence[Tensor], groups: int
) -> Float[Tensor, "c_out k c_group"]:
    """x [N_in, G*C], grad [N_out, G*N] -> dw [G*N, K, C] in x's dtype, accumulated in float32 at least."""
    pairs = Pairs(*tables[:_PAIRS])
    if groups > 1:
        return reference.weight_gradient(x, grad, pairs, groups)
    schedule = CpuSchedule.default(x.shape[1], grad.shape[1], len(pairs.inputs))
    identity = int(tables[-1][0]) if len(tables) > _PAIRS else -1
    dtype, x, grad = x.dtype, _computable(x), _computable(grad)
    result = x.new_zeros(len(pairs.sizes), x.shape[1], grad.shape[1])  # [K, C_in, C_out]
    block = schedule.gradient_pairs
    whole = GRADIENTS[schedule.gradient if _onednn(x.dtype) else "gemm"]
    for tap, inputs, outputs in reference.meetings(pairs):
        for at in range(0, len(inputs), block):
            here = slice(at, at + block)
            # The identity offset pairs row j with row j: no gather.
            a = x[here] if tap == identity else x.index_select(0, inputs[here])
            b = grad[here] if tap == identity else grad.index_select(0, outputs[here])
            (whole if len(a) == block else _outer_gemm)(a, b, result[tap])
    return result.permute(2, 0, 1).contiguous().to(dtype)


class ProductEngine(NamedTuple):
    """Implementation of the products of rows and filters.

    axes                               permutation of weight [C_out, K, C_in] that the engine reads, K first
    dense(x, filter)                   the product of every row with one filter
    multiply(rows, filters, buffer)    the product of every row with the filter of its tile
    interleaved                        rows of the tiles are interleaved
    buffered                           multiply writes into its buffer [at least len(rows), C_out]
    """

    axes: tuple[int, int, int]
    dense: Callable[[Tensor, Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    interleaved: bool
    buffered: bool


def _batched(rows: Tensor, filters: Tensor, buffer: Tensor) -> Tensor:
    """One batched product: full BLAS speed however few pairs a kernel offset has."""
    tiles, c_in, c_out = filters.shape
    products = buffer[: len(rows)]
    torch.bmm(rows.view(tiles, -1, c_in), filters, out=products.view(tiles, -1, c_out))
    return products


def _strided(rows: Tensor, filters: Tensor, buffer: Tensor) -> Tensor:
    """As _batched, for interleaved rows."""
    tiles, c_in, c_out = filters.shape
    return torch.bmm(rows.view(-1, tiles, c_in).transpose(0, 1), filters).transpose(0, 1).reshape(-1, c_out)


def _grouped(rows: Tensor, filters: Tensor, buffer: Tensor | None = None) -> Tensor:
    """A 1x1 convolution with a group per tile, whose channels-last pixels are the interleaved rows."""
    tiles, c_out, c_in = filters.shape
    image = rows.view(1, -1, 1, tiles * c_in).permute(0, 3, 1, 2)
    out = torch.mkldnn_convolution(image, filters.view(-1, c_in, 1, 1), None, [0, 0], [1, 1], [1, 1], tiles)
    return out.permute(0, 2, 3, 1).reshape(-1, c_out)


def _grouped_dense(x: Tensor, filter: Tensor) -> Tensor:
    return _grouped(x, filter.unsqueeze(0))


@no_type_check  # here and below: called for every kernel offset; weight_gradient has checked the types
def _outer_gemm(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """out [C_in, C_out] += x.T @ grad for the pairs of a kernel offset: x [pairs, C_in], grad [pairs, C_out]."""
    out.addmm_(x.t(), grad)


@no_type_check
def _outer_convolution(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """As _outer_gemm, by the gradient of a 1x1 convolution: pairs are the pixels of one channels-last image."""
    count, (c_in, c_out) = len(x), out.shape
    image = x.view(1, count, 1, c_in).permute(0, 3, 1, 2)
    image_grad = grad.view(1, count, 1, c_out).permute(0, 3, 1, 2)
    shape = out.new_empty(c_out, c_in, 1, 1)  # only its shape is read
    gradient = torch.ops.aten.convolution_backward(
        image_grad, image, shape, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    out.add_(gradient.view(c_out, c_in).t())


ENGINES = {
    "batched": ProductEngine((1, 2, 0), torch.mm, _batched, interleaved=False, buffered=True),
    "grouped": ProductEngine((1, 0, 2), _grouped_dense, _grouped, interleaved=True, buffered=False),
    "strided": ProductEngine((1, 2, 0), torch.mm, _strided, interleaved=True, buffered=False),
}
GRADIENTS = {"gemm": _outer_gemm, "convolution": _outer_convolution}


def _onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _engine(interleaved: bool, dtype: torch.dtype) -> ProductEngine:
    """The engine for this layout; oneDNN does not support float64."""
    return ENGINES[("grouped" if _onednn(dtype) else "strided") if interleaved else "batched"]


def _identity_tap(pairs: Pairs, rows: int, inputs: int) -> int:
    """The kernel offset whose pairs are (0, 0), (1, 1), ... up to the last row, or -1."""
    if rows != inputs:
        return -1
    each, start = torch.arange(rows), 0
    for tap, size in enumerate(pairs.sizes.tolist()):
        here = slice(start, start + size)
        if size == rows and torch.equal(pairs.inputs[here], each) and torch.equal(pairs.outputs[here], each):
            return tap
        start += size
    return -1


def _chunk(pairs: Pairs, identity: int, num_outputs: int, schedule: CpuSchedule) -> tuple[Tensor, ...]:
    """As `chunks`, for a known identity offset (or -1); the chunks have about equally many pairs."""
    inputs, outputs, taps = _gathered_pairs(pairs, identity)
    count, tile, interleaved = len(pairs.sizes), schedule.tile, ENGINES[schedule.engine].interleaved
    met = torch.bincount(outputs, minlength=num_outputs)
    ends = met.cumsum(0)
    blocks = max(1, -(-len(inputs) // schedule.pairs))
    block_of = (ends - 1).clamp(min=0) * blocks // max(len(inputs), 1)  # the chunk of each output
    block = block_of[outputs]
    # Pairs are sorted by kernel offset: a stable sort by chunk sorts them by (chunk, kernel offset).
    order = block.argsort(stable=True)
    segment = block * count + taps
    lengths = torch.bincount(segment, minlength=blocks * count)
    tiles = ((lengths + tile - 1) // tile).view(blocks, count)
    tiles[:, 0] += -tiles.sum(dim=1) % schedule.multiple
    begin = (tiles.view(-1).cumsum(0) - tiles.view(-1)) * tile
    place = torch.empty_like(order)  # of each pair among all products
    place[order] = torch.arange(len(order)) + (begin - lengths.cumsum(0) + lengths)[segment[order]]
    gather = inputs.new_zeros(int(tiles.sum()) * tile)
    gather[place] = inputs
    slots = place - begin[block * count]
    tiles_of = tiles.sum(dim=1)
    if interleaved:
        gather = torch.cat([part.t().reshape(-1) for part in gather.view(-1, tile).split(tiles_of.tolist())])
        slots = slots % tile * tiles_of[block] + slots // tile
    slots = slots[outputs.argsort(stable=True)]
    rows, used = torch.bincount(block_of, minlength=blocks), lengths.view(blocks, count).sum(dim=1)
    starts = ends - met - (used.cumsum(0) - used)[block_of]
    of_tiles = torch.arange(count).repeat(blocks).repeat_interleave(tiles.view(-1))
    layout = torch.cat([rows.new_tensor([identity, interleaved]), rows, tiles_of, used])
    return gather.int(), of_tiles.int(), slots.int(), starts.int(), layout


def _chunks(chunked: Sequence[Tensor]) -> Iterator[Chunk]:
    gather, taps, slots, starts, layout = chunked
    rows, tiles, used = layout[2:].view(3, -1).tolist()
    tile = len(gather) // max(1, sum(tiles))
    inputs = gather.split([count * tile for count in tiles])
    parts = zip(rows, taps.split(tiles), inputs, slots.split(used), starts.split(rows), strict=True)
    first = 0
    for height, *tensors in parts:
        yield Chunk(first, first + height, *tensors)
        first += height


def _gathered_pairs(pairs: Pairs, identity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, outputs, kernel offset) of every pair outside the identity offset."""
    taps = torch.repeat_interleave(torch.arange(len(pairs.sizes)), pairs.sizes)
    if identity < 0:
        return pairs.inputs, pairs.outputs, taps
    kept = taps != identity
    return pairs.inputs[kept], pairs.outputs[kept], taps[kept]


def _computable(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


# Accesses whose rows are gathered or scattered by one index array
def _operand_refusal(names: Iterable[str], operands: Mapping[str, Tensor]) -> str | None:
    """The reason why these operands are refused (names: the factors), or None."""
    if any(t.device.type != "cpu" for t in operands.values()):
        return "the operands are not on a CPU"
    kinds = {operands[name].dtype for name in names}
    if len(kinds) > 1 or not kinds.pop().is_floating_point:
        return "the factors do not have one floating-point dtype"
    return None


def _array_of(access: Access) -> Access | None:
    """The index array of an access, if it is the only one and all axes have distinct bare indices; else None."""
    arrays = [e for e in access.indices if e.bare is None]
    bare = _bare_of(access)
    if len(arrays) != 1 or len(set(bare)) != len(bare):
        return None
    return _alone(arrays[0], bare)


def _alone(expression: Affine, bare: tuple[str, ...]) -> Access | None:
    if expression.constant or len(expression.terms) != 1:
        return None
    ((coefficient, atom),) = expression.terms
    if coefficient != 1 or not isinstance(atom, Access):
        return None
    names = [e.bare for e in atom.indices]
    plain = all(name and name not in bare for name in names) and len(set(names)) == len(names)
    return atom if plain and names else None


def _bare_of(access: Access) -> tuple[str, ...]:
    return tuple(e.bare for e in access.indices if e.bare is not None)


def _array_axis(access: Access) -> int:
    return next(i for i, e in enumerate(access.indices) if e.bare is None)


def _arranged(tensor: Tensor, access: Access, order: Sequence[str]) -> Tensor:
    """The tensor with its axes in the order of these indices; "" is the axis of the index array."""
    have = [e.bare or "" for e in access.indices]
    return tensor.permute([have.index(name) for name in order])


def _rows_of(tensor: Tensor, access: Access, names: Sequence[str]) -> Tensor:
    """The tensor as [rows, other axes], these in the given order and flattened."""
    found = _arranged(tensor, access, ("", *names))
    return found.reshape(len(found), math.prod(found.shape[1:]))


def _restored(flat: Tensor, order: Sequence[str], bound: BoundStatement) -> Tensor:
    """The target from a flat result with axes in this order; "" is the axis of the index array."""
    want = [e.bare or "" for e in bound.statement.target.indices]
    sizes = dict(zip(want, bound.shape, strict=True))
    return flat.reshape([int(sizes[name]) for name in order]).permute([order.index(name) for name in want]).contiguous()


# Products of gathered rows
@dataclass(frozen=True)
class GatherMatch:
    """A "gathered" statement. other: w or y; gather, scatter, taps: G, S, K; group, inner, outer: g, c, n."""

    x: Access
    other: Access
    gather: str
    scatter: str
    taps: str
    group: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    weights: bool


def gathered_refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why "gathered" does not apply, or None."""
    match = gather_match(statement)
    if isinstance(match, str):
        return match
    volume, pairs = _volume(match, bound, operands), operands[match.taps].shape[0]
    if volume > max(_MOST_TAPS, pairs):
        return f"it has {volume} kernel offsets and {pairs} pairs: most offsets have none"
    return _operand_refusal((match.x.name, match.other.name), operands)


def run_gathered(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `gathered_refusal` accepts; a new tensor of `dtype`."""
    statement = bound.statement
    match = gather_match(statement)
    assert isinstance(match, GatherMatch)
    if not _all_in_bounds(match, bound, operands):
        return graph.run(bound, operands, dtype)
    # Halves are summed in float32 anyway: for a float32 result, do not round in between.
    names = (match.x.name, match.other.name)
    operands = {**operands, **{n: operands[n].to(torch.promote_types(operands[n].dtype, dtype)) for n in names}}
    sizes = _tap_sizes(operands[match.taps], _volume(match, bound, operands))
    pairs = Pairs(operands[match.gather], operands[match.scatter], sizes)
    result = (_forward_of if match.weights else _gradient_of)(match, bound, operands, pairs).to(dtype)
    if statement.accumulate:
        result = operands[statement.target.name] + result
    return result


def _volume(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor]) -> int:
    """The number of kernel offsets."""
    if match.weights:
        return operands[match.other.name].shape[_array_axis(match.other)]
    return int(bound.shape[_array_axis(bound.statement.target)])


@lru_cache(maxsize=256)
def gather_match(statement: Statement) -> GatherMatch | str:
    """The match of a statement, or the reason why there is none."""
    if statement.reduction != "sum" or len(statement.terms) != 1 or statement.terms[0].coefficient != 1:
        return "it is not a plain sum of one product"
    factors = [f for f in statement.terms[0].factors if isinstance(f, Access)]
    if len(factors) != 2 or len(statement.terms[0].factors) != 2:
        return "it is not a product of two factors"
    if statement.ranges:
        return "a range is declared"
    accesses = (statement.target, *factors)
    arrays = [_array_of(access) for access in accesses]
    if any(array is None or len(array.indices) != 1 for array in arrays):
        return "target and factors are not each indexed by one index array and bare indices"
    taps = {name for name, fact in statement.facts if fact == "sorted"}
    names = [array.name for array in arrays if array is not None]
    if len(set(arrays_of(*accesses))) != 3 or len(set(indices_of(*(a for a in arrays if a)))) != 1:
        return "the index arrays do not share one position"
    place = next((i for i, name in enumerate(names) if name in taps), None)
    if place is None:
        return "no index array is known to be sorted"
    return _roles(accesses, names, place)


def _all_in_bounds(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor]) -> bool:
    """True if all values of the statement's index arrays are in bounds."""
    target = bound.statement.target
    scattered, tapped = (target, match.other) if match.weights else (match.other, target)
    for name, access in ((match.gather, match.x), (match.scatter, scattered), (match.taps, tapped)):
        shape = bound.shape if access is target else operands[access.name].shape
        if not _in_bounds(operands[name], int(shape[_array_axis(access)])):
            return False
    return True


def _roles(accesses: Sequence[Access], names: Sequence[str], place: int) -> GatherMatch | str:
    target, first, second = (_bare_of(access) for access in accesses)
    if place == 0:
        group = tuple(i for i in first if i in second and i in target)
        inner = tuple(i for i in first if i in target and i not in second)
        outer = tuple(i for i in second if i in target and i not in first)
        whole = (
            set(first) == {*group, *inner}
            and set(second) == {*group, *outer}
            and len(target) == len({*group, *inner, *outer})
        )
        match = GatherMatch(accesses[1], accesses[2], names[1], names[2], names[0], group, inner, outer, False)
        return match if whole else "an index other than the position is reduced"
    weights, x = (1, 2) if place == 1 else (2, 1)
    axes = _bare_of(accesses[x]), _bare_of(accesses[weights])
    group = tuple(i for i in axes[0] if i in axes[1] and i in target)
    inner = tuple(i for i in axes[0] if i in axes[1] and i not in target)
    outer = tuple(i for i in axes[1] if i in target and i not in axes[0])
    found = [set(axes[0]), set(axes[1]), set(target)]
    whole = found == [{*group, *inner}, {*group, *inner, *outer}, {*group, *outer}]
    match = GatherMatch(accesses[x], accesses[weights], names[x], names[0], names[weights], group, inner, outer, True)
    return match if whole else "the indices of factors and target do not form a product of matrices"


def _forward_of(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor], pairs: Pairs) -> Tensor:
    sizes = [bound.points(names) for names in (match.group, match.inner, match.outer)]
    groups, c_in, c_out = sizes
    x = _rows_of(operands[match.x.name], match.x, (*match.group, *match.inner))
    order = (*match.group, *match.outer, "", *match.inner)
    weight = _arranged(operands[match.other.name], match.other, order).reshape(groups * c_out, -1, c_in)
    target = bound.statement.target
    rows = int(bound.shape[_array_axis(target)])
    if groups == 1 and (kernels := native_products.kernels_for(x, weight)) is not None:
        lists = native_products.pair_lists(pairs.outputs, pairs.inputs, pairs.sizes, rows)
        flat = native_products.products(kernels, x, weight, lists, rows)
        return _restored(flat, ("", *match.group, *match.outer), bound)
    prepared = _prepared_pairs(pairs, rows, len(x), (groups * c_in, groups * c_out))
    flat = forward(x, weight, prepared, rows, groups)
    return _restored(flat, ("", *match.group, *match.outer), bound)


def _gradient_of(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor], pairs: Pairs) -> Tensor:
    groups = bound.points(match.group)
    x = _rows_of(operands[match.x.name], match.x, (*match.group, *match.inner))
    y = _rows_of(operands[match.other.name], match.other, (*match.group, *match.outer))
    if groups == 1 and (kernels := native_products.kernels_for(x, y)) is not None:
        lists = native_products.pair_lists(pairs.outputs, pairs.inputs, pairs.sizes, len(y))
        flat = native_products.gradients(kernels, x, y, lists)
    else:
        prepared = _prepared_pairs(pairs, len(y), len(x), (x.shape[1], y.shape[1]))
        flat = weight_gradient(x, y, prepared, groups)  # [G*N, K, C]
    return _restored(flat, (*match.group, *match.outer, "", *match.inner), bound)


def listed(found: KernelMap) -> Mapping[str, Tensor] | None:
    """The arrays of the form "pairs" of a map, with all that `run_gathered` derives from them, by C kernels; None if
    these do not run."""
    if found.device.type != "cpu" or found.buffered is not None:
        return None
    if (run := native_products.kernels()) is None:
        return None
    lists, taps = native_products.lists_of_rows(run, rows := found.rows())
    # Aliases: cached results must not hold the tensors that they are cached for.
    outputs, inputs = lists.scatter.detach(), lists.gather.detach()
    sizes = lists.ends.diff()
    native_products.pair_lists.keep(lists, outputs, inputs, sizes, len(rows))
    _tap_sizes.keep(sizes, taps, found.volume)
    # Inputs are what the table holds, and are checked on first use.
    for array, extent in ((outputs, len(rows)), (taps, found.volume)):
        _in_bounds.keep(True, array, extent)
    return {"o": outputs, "k": taps, "i": inputs}


@cached_per_tensor
def _tap_sizes(taps: Tensor, volume: int) -> Tensor:
    """The number of pairs per kernel offset, int64 [volume]."""
    return torch.bincount(taps, minlength=volume)


@cached_per_tensor
def _in_bounds(array: Tensor, extent: int) -> bool:
    """True if all values of an index array are in bounds."""
    return not len(array) or (int(array.min()) >= 0 and int(array.max()) < extent)


def _prepared_pairs(pairs: Pairs, rows: int, inputs: int, channels: tuple[int, int]) -> tuple[Tensor, ...]:
    """The pairs, then their cached chunks, which do not depend on gradient fields of the schedule."""
    schedule = replace(CpuSchedule.default(*channels, len(pairs.inputs)), gradient="gemm", gradient_pairs=1)
    return (*pairs, *_cached_chunks(pairs.outputs, pairs.inputs, pairs.sizes, rows, inputs, schedule))


@cached_per_tensor
def _cached_chunks(
    outputs: Tensor, inputs: Tensor, sizes: Tensor, rows: int, other_rows: int, schedule: CpuSchedule
) -> tuple[Tensor, ...]:
    return chunks(Pairs(inputs, outputs, sizes), rows, other_rows, schedule)
