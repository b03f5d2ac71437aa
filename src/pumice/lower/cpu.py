"""Sparse convolutions, relational graph convolutions and their gradients on a CPU: the lowering "gathered".

    T[S[p], g, n] += x[G[p], g, c] * w[K[p], g, c, n]           forward; the input gradient with S and G exchanged
    T[K[p], g, c, n] += x[G[p], g, c] * y[S[p], g, n]           weight gradient

with axes in any order and g optional. They run as C kernels (native_products.py), or, without a C compiler, as loops
of torch over the kernel offsets (reference.py).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import KernelMap, Pairs
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Statement
from pumice.lower import native_products, reference
from pumice.lower.native_products import PairLists
from pumice.runtime.cache import cached_per_tensor

_MOST_TAPS = 4096  # Kernel offsets of which most may have no pairs
_SEEN = 61  # Values that tell whether a weight was written
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

    def sizes(self, statement: Statement, operands: Mapping[str, Tensor], shape: Sequence[int]) -> Sizes:
        """The sizes of a call. shape: of the target."""
        accesses = zip((self.whole, self.x, self.y), self.orders, strict=True)
        w, x, y = (
            [(shape if a is statement.target else operands[a.name].shape)[n] for n in order] for a, order in accesses
        )
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
    sizes = match.sizes(statement, operands, bound.shape)
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
    return GatherMatch(whole, x, y, group, inner, outer)


def run_gathered(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `gathered_refusal` accepts; a new tensor of `dtype`."""
    return GatherExecutor(bound.statement, bound.shape, dtype)(operands, None)


@dataclass(frozen=True)
class GatherExecutor:
    """A "gathered" statement as a step of a plan, for operands of any sizes. shape, dtype: of the result."""

    statement: Statement
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None) -> Tensor:
        match, target = gather_match(self.statement), self.statement.target
        assert isinstance(match, GatherMatch)
        sizes, order = match.sizes(self.statement, operands, self.shape), match.orders[2]
        outputs, inputs, taps = (operands[name] for name in match.arrays)
        pairs = _PairArrays(outputs, inputs, taps, sizes)
        if 0 in sizes:
            result = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        else:
            x = self._arranged(operands, match.x, match.orders[1]).reshape(sizes.inputs, sizes.groups, sizes.c)
            if match.y is target:
                result = _forward(x, self._arranged(operands, match.whole, match.orders[0]), pairs)
            else:
                result = _gradient(x, self._arranged(operands, match.y, order), pairs)
        order = order if match.y is target else match.orders[0]
        result = result.reshape([self.shape[n] for n in order]).permute([*map(order.index, range(len(order)))])
        result = result.contiguous().to(self.dtype)
        if self.statement.accumulate:
            result = operands[target.name] + result
        return result if before is None else before + result

    def _arranged(self, operands: Mapping[str, Tensor], access: Access, order: Sequence[int]) -> Tensor:
        """The operand with its axes in this order, in the dtype of sums: halves are not rounded before their end."""
        x = operands[access.name]
        return x.to(torch.float64 if torch.float64 in (x.dtype, self.dtype) else torch.float32).permute(*order)


class _PairArrays(NamedTuple):
    """The index arrays of a call, and its sizes."""

    outputs: Tensor
    inputs: Tensor
    taps: Tensor
    sizes: Sizes

    def lists(self) -> PairLists:
        return _lists(*self[:3], self.sizes[:3])

    def pairs(self) -> Pairs:
        return _pairs(*self[:3], self.sizes[:3])


def _forward(x: Tensor, weight: Tensor, pairs: _PairArrays) -> Tensor:
    """y [rows, G, N]. weight: [groups, outputs, K, inputs]."""
    rows, _, taps, groups, n, c = pairs.sizes
    weight, run = weight.reshape(groups, n, taps, c), native_products.kernels(x.dtype)
    if run is None:
        return reference.forward(x.flatten(1), weight.flatten(0, 1), pairs.pairs(), rows, groups)
    return native_products.products(run, x, _packed(run, weight), n, pairs.lists(), rows)


def _gradient(x: Tensor, y: Tensor, pairs: _PairArrays) -> Tensor:
    """dw [G, N, K, C]. y: [rows, groups, outputs]."""
    rows, _, _, groups, n, _ = pairs.sizes
    y, run = y.reshape(rows, groups, n), native_products.kernels(x.dtype)
    if run is None:
        return reference.weight_gradient(x.flatten(1), y.flatten(1), pairs.pairs(), groups)
    return native_products.gradients(run, x, y, pairs.lists())


def _packed(run: native_products.Kernels, weight: Tensor) -> Tensor:
    """The packed weight, kept from the second time on that the same values are used: in training they change before."""
    base = weight if weight._base is None else weight._base
    if not base.is_contiguous():
        return native_products.packed(run, weight)
    kept = _kept(base, run.dtype, weight.shape, weight.stride(), weight.storage_offset())
    # Writes through `.data` do not change a tensor's version: some values are compared.
    seen = base.detach().view(-1)[:: base.numel() // _SEEN + 1]
    if "seen" in kept and torch.equal(kept["seen"], seen):
        if "packed" not in kept:
            kept["packed"] = native_products.packed(run, weight)
        return kept["packed"]
    kept.clear()
    kept["seen"] = seen.clone()
    return native_products.packed(run, weight)


@cached_per_tensor
def _kept(weight: Tensor, *layout: Hashable) -> dict[str, Tensor]:
    return {}


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
