"""Sparse convolutions, relational graph convolutions and their gradients on a CPU: the lowering "gathered".

    T[S[p], g, n] += x[G[p], g, c] * w[K[p], g, c, n]           forward; the input gradient with S and G exchanged
    T[K[p], g, c, n] += x[G[p], g, c] * y[S[p], g, n]           weight gradient

with axes in any order and g optional. They run as C kernels (native_products.py), or, without a C compiler, as loops
of torch over the kernel offsets (reference.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pumice.coords import KernelMap, Pairs
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Statement
from pumice.lower import native_products, reference
from pumice.lower.native_products import PairLists
from pumice.runtime.cache import cached_per_tensor

_LISTS = 1 << 24  # Maximum number of lists: pairs of a kernel offset and a chunk of outputs


@dataclass(frozen=True)
class GatherMatch:
    """A "gathered" statement. whole: the access of all indices, w or the target; x, y: the others, y the target of a
    forward statement; group, inner, outer: g, c, n."""

    whole: Access
    x: Access
    y: Access
    group: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]

    @property
    def weight(self) -> tuple[str, ...]:
        """The axes of weights, [G, N, K, C]; "" is that of the index array."""
        return (*self.group, *self.outer, "", *self.inner)


def gathered_refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why "gathered" does not apply, or None."""
    match = gather_match(statement)
    if isinstance(match, str):
        return match
    if any(t.device.type != "cpu" for t in operands.values()):
        return "the operands are not on a CPU"
    kinds = {operands[factor.name].dtype for factor in statement.terms[0].factors if isinstance(factor, Access)}
    if len(kinds) > 1 or not kinds.pop().is_floating_point:
        return "the factors do not have one floating-point dtype"
    rows, _, volume = _extents(match, bound, operands)
    if volume * native_products.chunks_of(rows) > _LISTS:
        return f"{volume} kernel offsets and {rows} rows have too many lists"
    return "a group has one channel" if bound.points((*match.inner, *match.outer)) == 1 else None


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
    accesses = [statement.target, *factors]
    arrays = {_array_of(access) for access in accesses}
    if None in arrays or len(arrays) != 3 or len({array.indices for array in arrays if array}) != 1:
        return "target and factors are not each indexed by one index array of one position, and bare indices"
    return _roles(accesses)


def _array_of(access: Access) -> Access | None:
    """The index array of an access, if it is the only one and all axes have distinct bare indices; else None."""
    arrays, bare = [e for e in access.indices if e.bare is None], _bare_of(access)
    if len(arrays) != 1 or len(set(bare)) != len(bare) or arrays[0].constant or len(arrays[0].terms) != 1:
        return None
    ((coefficient, atom),) = arrays[0].terms
    if coefficient != 1 or not isinstance(atom, Access) or len(atom.indices) != 1:
        return None
    return atom if atom.indices[0].bare and atom.indices[0].bare not in bare else None


def _bare_of(access: Access) -> tuple[str, ...]:
    return tuple(e.bare for e in access.indices if e.bare is not None)


def _roles(accesses: Sequence[Access]) -> GatherMatch | str:
    """The match of (target, factor, factor), whose bare indices are those of a product of matrices."""
    whole = max(accesses, key=lambda access: len(access.indices))
    x, y = (a for a in (*accesses[1:], accesses[0]) if a is not whole)
    names = [_bare_of(access) for access in (whole, x, y)]
    group = tuple(i for i in names[1] if i in names[2])
    inner, outer = (tuple(i for i in own if i not in group) for own in names[1:])
    if not inner or not outer or set(names[0]) != {*group, *inner, *outer}:
        return "the indices of factors and target do not form a product of matrices"
    return GatherMatch(whole, x, y, group, inner, outer)


def run_gathered(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `gathered_refusal` accepts; a new tensor of `dtype`."""
    statement = bound.statement
    match = gather_match(statement)
    assert isinstance(match, GatherMatch)
    # Halves are summed in float32 anyway: for a float32 result, do not round in between.
    factors = [a.name for a in (match.whole, match.x, match.y) if a is not statement.target]
    wide = {name: operands[name].to(torch.promote_types(operands[name].dtype, dtype)) for name in factors}
    if 0 in bound.shape or not all(x.numel() for x in wide.values()):
        result = next(iter(wide.values())).new_zeros(bound.shape, dtype=dtype)
    else:
        result = (_gradient if match.whole is statement.target else _forward)(match, bound, {**operands, **wide})
    result = result.to(dtype)
    return operands[statement.target.name] + result if statement.accumulate else result


def _forward(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Tensor:
    groups, n, c = (bound.points(names) for names in (match.group, match.outer, match.inner))
    x = _arranged(operands, match.x, ("", *match.group, *match.inner)).reshape(-1, groups, c)
    weight = _arranged(operands, match.whole, match.weight).reshape(groups, n, -1, c)
    run, arrays, extents = _kernels(x), _index_arrays(match, operands), _extents(match, bound, operands)
    if run is None:
        y = reference.forward(x.flatten(1), weight.flatten(0, 1), _pairs(*arrays, extents), extents[0], groups)
    else:
        weight = native_products.packed(run, weight)
        y = native_products.products(run, x, weight, n, _lists(*arrays, extents), extents[0])
    return _restored(y, ("", *match.group, *match.outer), bound)


def _gradient(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Tensor:
    groups, n, c = (bound.points(names) for names in (match.group, match.outer, match.inner))
    x = _arranged(operands, match.x, ("", *match.group, *match.inner)).reshape(-1, groups, c)
    y = _arranged(operands, match.y, ("", *match.group, *match.outer)).reshape(-1, groups, n)
    run, arrays, extents = _kernels(x), _index_arrays(match, operands), _extents(match, bound, operands)
    if run is None:
        dw = reference.weight_gradient(x.flatten(1), y.flatten(1), _pairs(*arrays, extents), groups)
    else:
        dw = native_products.gradients(run, x, y, _lists(*arrays, extents))
    return _restored(dw, match.weight, bound)


def _kernels(x: Tensor) -> native_products.Kernels | None:
    return native_products.kernels(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _arranged(operands: Mapping[str, Tensor], access: Access, order: Sequence[str]) -> Tensor:
    """The operand of an access with its axes in the order of these indices; "" is the axis of the index array."""
    have = [e.bare or "" for e in access.indices]
    return operands[access.name].permute([have.index(name) for name in order])


def _restored(flat: Tensor, order: Sequence[str], bound: BoundStatement) -> Tensor:
    """The target from a flat result with axes in this order; "" is the axis of the index array."""
    want = [e.bare or "" for e in bound.statement.target.indices]
    sizes = dict(zip(want, bound.shape, strict=True))
    return flat.reshape([int(sizes[name]) for name in order]).permute([order.index(name) for name in want]).contiguous()


# Pairs


def _index_arrays(match: GatherMatch, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, inputs, kernel offsets) of the pairs."""
    outputs, inputs, taps = (operands[array.name] for a in (match.y, match.x, match.whole) if (array := _array_of(a)))
    return outputs, inputs, taps


def _extents(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """(rows of y, rows of x, kernel offsets)."""
    target = bound.statement.target
    rows, inputs, volume = (
        int((bound.shape if a is target else operands[a.name].shape)[[e.bare for e in a.indices].index(None)])
        for a in (match.y, match.x, match.whole)
    )
    return rows, inputs, volume


@cached_per_tensor
def _lists(outputs: Tensor, inputs: Tensor, taps: Tensor, extents: tuple[int, int, int]) -> PairLists:
    """The pairs within `extents`, for the C kernels."""
    run, (rows, sources, volume) = native_products.kernels(torch.float32), extents
    assert run is not None
    if bool((taps[1:] < taps[:-1]).any()):
        taps, order = taps.sort(stable=True)
        outputs, inputs = outputs[order], inputs[order]
    ends = torch.searchsorted(taps.contiguous(), torch.arange(volume + 1, dtype=taps.dtype, device="cpu"))
    return native_products.lists_of_pairs(run, (inputs, outputs), ends, (sources, rows))


@cached_per_tensor
def _pairs(outputs: Tensor, inputs: Tensor, taps: Tensor, extents: tuple[int, int, int]) -> Pairs:
    """The pairs within `extents`, sorted by kernel offset."""
    inside = [(t >= 0) & (t < extent) for t, extent in zip((outputs, inputs, taps), extents, strict=True)]
    kept = (inside[0] & inside[1] & inside[2]).nonzero()[:, 0]
    kept = kept[taps[kept].argsort(stable=True)]
    return Pairs(inputs[kept].long(), outputs[kept].long(), torch.bincount(taps[kept], minlength=extents[2]))


def listed(found: KernelMap) -> Mapping[str, Tensor] | None:
    """The arrays of the form "pairs" of a map, with the lists that `run_gathered` derives from them, by C kernels; None
    if these do not run."""
    if found.device.type != "cpu" or found.buffered is not None:
        return None
    if (run := native_products.kernels(torch.float32)) is None:
        return None
    lists, taps = native_products.lists_of_rows(run, found.rows())
    # Aliases: cached results must not hold the tensors that they are cached for.
    outputs, inputs = lists.scatter.detach(), lists.gather.detach()
    # A table from a file may hold anything.
    if not len(inputs) or int(inputs.max()) < found.num_inputs:
        _lists.keep(lists, outputs, inputs, taps, (found.num_outputs, found.num_inputs, found.volume))
    return {"o": outputs, "k": taps, "i": inputs}
