"""Sparse convolutions, relational graph convolutions and their gradients on a CPU: the lowering "gathered".

    T[S[p], g, n] += x[G[p], g, c] * w[K[p], g, c, n]           forward; the input gradient with S and G exchanged
    T[K[p], g, c, n] += x[G[p], g, c] * y[S[p], g, n]           weight gradient

with axes in any order and g optional. They run as C kernels (native_products.py), or, without a C compiler, as loops
of torch over the kernel offsets (reference.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import KernelMap, MultiMap, Pairs
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Statement
from pumice.lower import native_products, reference
from pumice.lower.native_products import PairLists
from pumice.runtime.cache import cached_per_tensor, cached_per_values

_MOST_TAPS = 4096  # Kernel offsets of which most may have no pairs
_LISTS = 1 << 24  # Maximum number of lists: pairs of a kernel offset and a chunk of outputs


@dataclass(frozen=True)
class GatherMatch:
    """A "gathered" statement. whole: the access of all indices, w or the target; x, y: the others; forward: y is the
    target, else whole is; group, inner, outer: g, c, n."""

    whole: Access
    x: Access
    y: Access
    forward: bool
    group: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]

    @cached_property
    def orders(self) -> tuple[list[int], ...]:
        """Axes of whole, x and y in the order [group, outer, K, inner], [rows, group, inner], [rows, group, outer]."""
        group, inner, outer = self.group, self.inner, self.outer
        names = (*group, *outer, None, *inner), (None, *group, *inner), (None, *group, *outer)
        have = [[e.bare for e in access.indices] for access in (self.whole, self.x, self.y)]
        return tuple([own.index(name) for name in order] for own, order in zip(have, names, strict=True))

    @cached_property
    def arrays(self) -> tuple[str, ...]:
        """The index arrays of y, x and whole."""
        return tuple(array.name for access in (self.y, self.x, self.whole) if (array := _array_of(access)))

    def sizes(self, operands: Mapping[str, Tensor], shape: Sequence[int]) -> Sizes:
        """The sizes of a call. shape: of the target."""
        whole = operands[self.whole.name].shape if self.forward else shape
        y = shape if self.forward else operands[self.y.name].shape
        every = zip((whole, operands[self.x.name].shape, y), self.orders, strict=True)
        w, x, y = ([given[n] for n in order] for given, order in every)
        at, groups = len(self.group) + len(self.outer), len(self.group)
        return Sizes(y[0], x[0], w[at], math.prod(w[:groups]), math.prod(w[groups:at]), math.prod(w[at + 1 :]))


class Sizes(NamedTuple):
    """Rows of y and x, kernel offsets, groups, their output and input channels."""

    rows: int
    inputs: int
    taps: int
    groups: int
    n: int
    c: int


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
    sizes = match.sizes(operands, bound.shape)
    pairs = operands[match.arrays[-1]].shape[0]
    if sizes.taps > max(_MOST_TAPS, pairs):
        return f"it has {sizes.taps} kernel offsets and {pairs} pairs: most offsets have none"
    if sizes.taps * native_products.chunks_of(sizes.rows) > _LISTS:
        return f"{sizes.taps} kernel offsets and {sizes.rows} rows have too many lists"
    return "a group has one channel" if sizes.n * sizes.c == 1 else None


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
    return GatherMatch(whole, x, y, whole is not accesses[0], group, inner, outer)


@dataclass(frozen=True)
class GatherExecutor:
    """A "gathered" statement as a step of a plan, for operands of any sizes. shape, dtype: of the result."""

    statement: Statement
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None) -> Tensor:
        match = gather_match(self.statement)
        assert isinstance(match, GatherMatch)
        sizes = match.sizes(operands, self.shape)
        factor, order = (match.whole, match.orders[2]) if match.forward else (match.y, match.orders[0])
        if 0 in sizes:
            result = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        else:
            x, other = (self._arranged(operands, match, access) for access in (match.x, factor))
            pairs = _pairs_of([operands[name] for name in match.arrays], sizes)
            result = (_forward if match.forward else _gradient)(x, other, pairs, sizes)
        result = result.reshape([self.shape[n] for n in order]).permute([*map(order.index, range(len(order)))])
        result = result.contiguous().to(self.dtype)
        if self.statement.accumulate:
            result = operands[self.statement.target.name] + result
        return result if before is None else before + result

    def _arranged(self, operands: Mapping[str, Tensor], match: GatherMatch, access: Access) -> Tensor:
        """The operand with its axes in the order of a match, in the dtype of sums: halves are rounded at their end."""
        x = operands[access.name]
        order = match.orders[[access is a for a in (match.whole, match.x, match.y)].index(True)]
        return x.to(torch.float64 if torch.float64 in (x.dtype, self.dtype) else torch.float32).permute(order)


def _forward(x: Tensor, weight: Tensor, pairs: PairLists | Pairs, sizes: Sizes) -> Tensor:
    """y [rows, G, N]. x: [inputs, groups, channels]; weight: [groups, outputs, K, inputs]."""
    rows, inputs, taps, groups, n, c = sizes
    weight = weight.reshape(groups, n, taps, c)
    if isinstance(pairs, Pairs):
        return reference.forward(x.reshape(inputs, -1), weight.flatten(0, 1), pairs, rows, groups)
    base = weight if weight._base is None else weight._base
    layout = x.dtype, weight.shape, weight.stride(), int(weight.storage_offset())
    return native_products.products(
        _kernels(x.dtype), x.reshape(inputs, groups, c), _packed(base, *layout), n, pairs, rows
    )


def _gradient(x: Tensor, y: Tensor, pairs: PairLists | Pairs, sizes: Sizes) -> Tensor:
    """dw [G, N, K, C]. x, y: [rows, groups, channels]."""
    rows, inputs, _, groups, n, c = sizes
    if isinstance(pairs, Pairs):
        return reference.weight_gradient(x.reshape(inputs, -1), y.reshape(rows, -1), pairs, groups)
    return native_products.gradients(_kernels(x.dtype), x.reshape(inputs, groups, c), y.reshape(rows, groups, n), pairs)


@cached_per_values
def _packed(base: Tensor, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A view of a tensor, [G, N, K, C], packed for the C kernels."""
    return native_products.packed(_kernels(dtype), base.detach().as_strided(shape, stride, offset))


def _kernels(dtype: torch.dtype) -> native_products.Kernels:
    found = native_products.kernels(dtype)
    assert found is not None
    return found


# Pairs


def _pairs_of(arrays: Sequence[Tensor], sizes: Sizes) -> PairLists | Pairs:
    """The pairs of (outputs, inputs, kernel offsets) within the sizes, for the C kernels or for torch."""
    outputs, inputs, taps = arrays
    find = _pairs if native_products.kernels(torch.float32) is None else _lists
    return find(outputs, inputs, taps, sizes[:3])


@cached_per_tensor
def _lists(outputs: Tensor, inputs: Tensor, taps: Tensor, extents: tuple[int, int, int]) -> PairLists:
    """The pairs within `extents`, for the C kernels."""
    rows, sources, volume = extents
    if bool((taps[1:] < taps[:-1]).any()):
        taps, order = taps.sort(stable=True)
        outputs, inputs = outputs[order], inputs[order]
    ends = torch.searchsorted(taps.contiguous(), torch.arange(volume + 1, dtype=taps.dtype, device="cpu"))
    return native_products.lists_of_pairs(_kernels(torch.float32), (inputs, outputs), ends, (sources, rows))


@cached_per_tensor
def _pairs(outputs: Tensor, inputs: Tensor, taps: Tensor, extents: tuple[int, int, int]) -> Pairs:
    """The pairs within `extents`, sorted by kernel offset."""
    inside = [(t >= 0) & (t < extent) for t, extent in zip((outputs, inputs, taps), extents, strict=True)]
    kept = (inside[0] & inside[1] & inside[2]).nonzero()[:, 0]
    kept = kept[taps[kept].argsort(stable=True)]
    return Pairs(inputs[kept].long(), outputs[kept].long(), torch.bincount(taps[kept], minlength=extents[2]))


def listed(found: KernelMap) -> Mapping[str, Tensor] | None:
    """The arrays of the form "pairs" of a map, with the lists that GatherExecutor derives from them, by C kernels; None
    if these do not run."""
    if found.device.type != "cpu" or found.buffered is not None or isinstance(found, MultiMap):
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
