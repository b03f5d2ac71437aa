"""Attention within sequences of different lengths that lie one after the other, through torch's own kernels.

    y[t] = sum over the s of t's sequence of  softmax over s (scale * q[t] . k[s]) * v[s]      for each head

Sequences of one length are a batch of torch's scaled_dot_product_attention. Others go to its varlen_attn on a GPU in
half precision; elsewhere they are grouped by length into such batches.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pumice.coords.box import check_integers
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.runtime.cache import cached_per_tensor

_HALF = (torch.float16, torch.bfloat16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention within each of the sequences that cu_seqlens delimit: [T, H, E].

        y[t, h] = sum over s of  softmax over s (scale * q[t, h] . k[s, h]) * v[s, h]
                  cu_seqlens[b] <= t < cu_seqlens[b + 1],  cu_seqlens_k[b] <= s < cu_seqlens_k[b + 1]

    Parameters
    ----------
    q [T, H, D], k [S, G, D], v [S, G, E]: of one floating point dtype, on one device; H is a multiple of G, whose heads
        then serve H / G heads of q each.
    cu_seqlens, cu_seqlens_k: int [B + 1] from 0 to T and S, ascending; default of the latter: the former. They are read
        on the host once per tensor.
    dropout: probability with which weights are dropped. scale: default 1 / sqrt(D). causal: token i of n of a sequence
        sees keys up to i + m - n of its m, as flash_attn does.

    Differentiable; accumulates in float32. A query without keys gives 0.
    Raises ShapeError, DtypeError, DeviceError, CoordinateError (cu_seqlens), OptionError.
    Source: T. Dao, FlashAttention-2, ICLR 2024, whose varlen interface this follows."""
    keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check(q, k, v, dropout)
    lengths = _lengths(cu_seqlens, len(q), "cu_seqlens")
    others = lengths if keys is cu_seqlens and len(k) == len(q) else _lengths(keys, len(k), "cu_seqlens_k")
    if len(lengths.each) != len(others.each):
        raise ShapeError(f"cu_seqlens_k is [{len(lengths.each) + 1}] as cu_seqlens, found [{len(others.each) + 1}]")
    how = _Options(dropout, scale, causal, q.shape[1] != k.shape[1])
    if lengths.alike and others.alike:
        return how.equal(q, k, v, len(lengths.each))
    if q.is_cuda and q.dtype in _HALF and how.runs_varlen(q, v):
        return how.varlen(q, k, v, (cu_seqlens, keys), (lengths.most, others.most))
    return how.by_length(q, k, v, [*zip(lengths.each, others.each, strict=True)])


@lru_cache(maxsize=1)
def _varlen_attn() -> Callable[..., Any] | None:
    """torch's own attention over sequences of any lengths, where it has one that scales and masks. Imported on first
    use, and kept: the import takes seconds, reading the signature a quarter of a millisecond."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= {*inspect.signature(varlen_attn).parameters} else None


class _Options(NamedTuple):
    """What all calls of scaled_dot_product_attention share. grouped: keys have fewer heads."""

    dropout: float
    scale: float | None
    causal: bool
    grouped: bool

    def _run(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(
            q, k, v, mask, self.dropout, causal, scale=self.scale, enable_gqa=self.grouped
        )

    def equal(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
        """Of `count` sequences of one length each."""
        shape, rows, others = (len(q), q.shape[1], v.shape[2]), len(q) // count, len(k) // count
        q, k, v = (x.reshape(count, len(x) // count, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if self.causal and rows != others:
            # torch aligns the first tokens, flash_attn the last. Queries without keys see all, so that nothing is NaN.
            mask = torch.ones(rows, others, dtype=torch.bool, device=q.device).tril(others - rows)
            alone = ~mask.any(1)[:, None]
            found = self._run(q, k, v, False, mask | alone).masked_fill(alone, 0)
        else:
            found = self._run(q, k, v, self.causal)
        return found.transpose(1, 2).reshape(shape)

    def runs_varlen(self, q: Tensor, v: Tensor) -> bool:
        plain = not self.dropout and not self.grouped and q.shape[2] == v.shape[2]
        return plain and len(q) > 0 and len(v) > 0 and _varlen_attn() is not None

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], most: tuple[int, int]) -> Tensor:
        """Of sequences of any lengths."""
        run, window = _varlen_attn(), {"window_size": (-1, 0)} if self.causal else {}
        assert run is not None
        own, others = (end.to(q.device, torch.int32) for end in ends)
        return run(q, k, v, own, others, *most, scale=self.scale, **window)

    def by_length(self, q: Tensor, k: Tensor, v: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        """Of sequences of any lengths, those of one length at a time."""
        found, first = q.new_zeros(len(q), q.shape[1], v.shape[2]), (0, 0)
        alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for sizes in pairs:
            alike.setdefault(sizes, []).append(first)
            first = first[0] + sizes[0], first[1] + sizes[1]
        rows, parts = [], []
        for sizes, begins in alike.items():
            if 0 not in sizes:
                own, others = (_rows(b, n, q.device) for b, n in zip(zip(*begins, strict=True), sizes, strict=True))
                rows.append(own)
                parts.append(self.equal(q[own], k[others], v[others], len(begins)))
        return found.index_copy(0, torch.cat(rows), torch.cat(parts)) if rows else found + 0 * q.sum()


def _rows(begins: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    first = torch.tensor(begins, device=device)
    return (first[:, None] + torch.arange(size, device=device)).flatten()


class _Lengths(NamedTuple):
    """Of sequences: each, the most, whether all are as long, and more than 0; the ends of the first and the last, and
    whether they ascend."""

    each: tuple[int, ...]
    most: int
    alike: bool
    ends: tuple[int, int]
    ascend: bool


# Kept, since to read it waits for the device, and all layers of a network have the same.
@cached_per_tensor
def _read(cu_seqlens: Tensor) -> _Lengths:
    ends = cu_seqlens.tolist()
    each = tuple(last - first for first, last in itertools.pairwise(ends))
    most = max(each, default=0)
    return _Lengths(each, most, most > 0 and len({*each}) == 1, (ends[0], ends[-1]), min(each, default=0) >= 0)


def _lengths(cu_seqlens: Tensor, total: int, name: str) -> _Lengths:
    check_integers(cu_seqlens, name)
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ShapeError(f"{name} is [B + 1], found shape {list(cu_seqlens.shape)}")
    found = _read(cu_seqlens)
    if found.ends != (0, total) or not found.ascend:
        raise CoordinateError(
            f"{name} ascends from 0 to {total}, the number of rows; found {found.ends[0]} to {found.ends[1]}"
        )
    return found


def _check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype != q.dtype:
            raise DtypeError(f"q, k and v are of one floating point dtype; {name} is {getattr(x, 'dtype', type(x))}")
        if x.device != q.device:
            raise DeviceError(f"q is on {q.device}, {name} on {x.device}")
        if x.ndim != 3:
            raise ShapeError(f"{name} is [tokens, heads, channels], found shape {list(x.shape)}")
    heads = k.shape[1]
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2] or (q.shape[1] % heads if heads else q.shape[1]):
        raise ShapeError(f"k and v fit q {list(q.shape)}, found {list(k.shape)} and {list(v.shape)}")
    if not 0 <= dropout < 1:
        raise OptionError(f"dropout is a probability from 0 to below 1, found {dropout}")
