"""Attention within sequences of different lengths that lie one after the other, through torch's own kernels.

    y[t] = sum over the s of t's sequence of  softmax over s (scale * q[t] . k[s]) * v[s]      for each head

Sequences of one length are a batch of torch's scaled_dot_product_attention. Others are a nested tensor of it on a GPU
in half precision, which takes its flash kernel; elsewhere they are grouped by length into such batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
    lengths, key_lengths = _lengths(cu_seqlens, len(q), "cu_seqlens"), _lengths(keys, len(k), "cu_seqlens_k")
    if len(lengths) != len(key_lengths):
        raise ShapeError(f"cu_seqlens_k has as many entries as cu_seqlens, {len(lengths) + 1}; {len(key_lengths) + 1}")
    pairs = [*zip(lengths, key_lengths, strict=True)]
    how = _Options(dropout, scale, causal, q.shape[1] != k.shape[1])
    if len({*pairs}) == 1 and 0 not in pairs[0]:
        return how.equal(q, k, v, len(pairs), pairs[0])
    square = not causal or keys is cu_seqlens or lengths == key_lengths
    if q.is_cuda and q.dtype in _HALF and square and not how.grouped and all(n and m for n, m in pairs):
        return how.nested(q, k, v, (cu_seqlens, keys), pairs)
    return how.by_length(q, k, v, pairs)


class _Options:
    """What all calls of scaled_dot_product_attention share. grouped: keys have fewer heads."""

    def __init__(self, dropout: float, scale: float | None, causal: bool, grouped: bool) -> None:
        self.dropout, self.scale, self.causal, self.grouped = dropout, scale, causal, grouped

    def _run(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(
            q, k, v, mask, self.dropout, causal, scale=self.scale, enable_gqa=self.grouped
        )

    def equal(self, q: Tensor, k: Tensor, v: Tensor, count: int, sizes: tuple[int, int]) -> Tensor:
        """Of `count` sequences of one length each."""
        heads = [
            x.reshape(count, n, *x.shape[1:]).transpose(1, 2)
            for x, n in zip((q, k, v), (sizes[0], sizes[1], sizes[1]), strict=True)
        ]
        mask, causal = None, self.causal
        if causal and sizes[0] != sizes[1]:
            # torch aligns the first tokens, flash_attn the last.
            late = sizes[1] - sizes[0]
            mask = torch.ones(*sizes, dtype=torch.bool, device=q.device).tril(late)
            found = self._run(*heads, False, mask).masked_fill(~mask.any(1)[:, None], 0)
        else:
            found = self._run(*heads, causal)
        return found.transpose(1, 2).reshape(len(q), q.shape[1], v.shape[2])

    def nested(
        self, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], pairs: list[tuple[int, int]]
    ) -> Tensor:
        """Of sequences of any lengths."""
        longest = [max(lengths) for lengths in zip(*pairs, strict=True)]
        shortest = [min(lengths) for lengths in zip(*pairs, strict=True)]
        heads = [
            torch.nested.nested_tensor_from_jagged(
                x, ends[at].long(), min_seqlen=shortest[at], max_seqlen=longest[at]
            ).transpose(1, 2)
            for x, at in ((q, 0), (k, 1), (v, 1))
        ]
        return self._run(*heads, self.causal).transpose(1, 2).values()

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
                parts.append(self.equal(q[own], k[others], v[others], len(begins), sizes))
        return found.index_copy(0, torch.cat(rows), torch.cat(parts)) if rows else found + 0 * q.sum()


def _rows(begins: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    first = torch.tensor(begins, device=device)
    return (first[:, None] + torch.arange(size, device=device)).flatten()


@cached_per_tensor
def _ends(cu_seqlens: Tensor) -> tuple[int, ...]:
    return tuple(cu_seqlens.tolist())


def _lengths(cu_seqlens: Tensor, total: int, name: str) -> list[int]:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise DtypeError(f"{name} is an int32 or int64 tensor, found {found}")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ShapeError(f"{name} is [B + 1], found shape {list(cu_seqlens.shape)}")
    ends = _ends(cu_seqlens)
    lengths = [last - first for first, last in zip(ends, ends[1:], strict=False)]
    if ends[0] or ends[-1] != total or any(n < 0 for n in lengths):
        raise CoordinateError(f"{name} ascends from 0 to {total}, the number of rows; found {ends[0]} to {ends[-1]}")
    return lengths


def _check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype != q.dtype:
            raise DtypeError(f"q, k and v are of one floating point dtype; {name} is {getattr(x, 'dtype', type(x))}")
        if x.device != q.device:
            raise DeviceError(f"q is on {q.device}, {name} on {x.device}")
        if x.ndim != 3:
            raise ShapeError(f"{name} is [tokens, heads, channels], found shape {list(x.shape)}")
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2] or q.shape[1] % max(1, k.shape[1]):
        raise ShapeError(f"k and v fit q {list(q.shape)}, found {list(k.shape)} and {list(v.shape)}")
    if not 0 <= dropout < 1:
        raise OptionError(f"dropout is a probability from 0 to below 1, found {dropout}")
