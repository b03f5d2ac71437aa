"""pointops (Pointcept's, and the attention of pointops2) over pumice.ops. Offsets are the ends of batch items; -1 and a
distance of 1e5 stand for no neighbour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pumice import ops
from pumice.errors import OptionError

Opt = Tensor | None
_FAR = 1e10  # Squared distance of no neighbour


def offset2batch(offset: Tensor) -> Tensor:
    """Batch item of each point."""
    counts = offset.diff(prepend=offset.new_zeros(1)).long()
    return torch.repeat_interleave(torch.arange(len(offset), device=offset.device), counts)


def _asked(offset: Tensor, new_xyz: Opt, new_offset: Opt) -> dict[str, Any]:
    if new_xyz is None or new_offset is None:
        return {"batch": offset2batch(offset)}
    return {"queries": new_xyz, "batch": offset2batch(offset), "query_batch": offset2batch(new_offset)}


def knn_query(nsample: int, xyz: Tensor, offset: Tensor, new_xyz: Opt = None, new_offset: Opt = None) -> Any:
    """(int32 [M, nsample], distances)."""
    index, squared = ops.knn(xyz, nsample, **_asked(offset, new_xyz, new_offset))
    return index.int(), squared.clamp(max=_FAR).sqrt()


def ball_query(
    nsample: int, max_radius: float, min_radius: float, xyz: Tensor, offset: Tensor, new_xyz: Opt = None,
    new_offset: Opt = None,
) -> Any:  # fmt: skip
    """(int32 [M, nsample], distances): of more than nsample evenly spaced ones by distance."""
    asked = _asked(offset, new_xyz, new_offset)
    edges, queries = ops.radius_graph(xyz, max_radius, loop=True, **asked), asked.get("queries", xyz)
    squared = (xyz[edges[0]] - queries[edges[1]]).square().sum(1)
    kept = (squared <= 1e-5) | (squared >= min_radius**2)
    (index, of), squared = edges[:, kept], squared[kept]
    order = squared.argsort(stable=True)
    order = torch.cat([order[of[order].argsort(stable=True)], order.new_zeros(1)])
    counts = torch.bincount(of, minlength=len(queries))[:, None]
    place = ((counts / nsample).clamp(min=1) * torch.arange(nsample, device=xyz.device)).long()
    at = order[(counts.cumsum(0) - counts + place).clamp(max=len(index))]
    index, squared = (torch.cat([x, x.new_zeros(1)])[at] for x in (index, squared))
    return index.masked_fill(place >= counts, -1).int(), squared.masked_fill(place >= counts, _FAR).sqrt()


def farthest_point_sampling(xyz: Tensor, offset: Tensor, new_offset: Tensor) -> Tensor:
    """int32, from the first point of each item on."""
    counts = new_offset.diff(prepend=new_offset.new_zeros(1))
    return ops.farthest_point_sample(xyz, counts, batch=offset2batch(offset)).int()


def grouping2(input: Tensor, idx: Tensor) -> Tensor:
    """input[idx], 0 for no neighbour."""
    found = ops.gather(input, idx.flatten().clamp(min=0)).reshape(*idx.shape, *input.shape[1:])
    return found.masked_fill((idx < 0).reshape(*idx.shape, *[1] * (input.ndim - 1)), 0)


def grouping(idx: Tensor, feat: Tensor, xyz: Tensor, new_xyz: Opt = None, with_xyz: bool = False) -> Tensor:
    """Features [M, nsample, C] of neighbours, with_xyz after their places relative to new_xyz; 0 for none."""
    if not with_xyz:
        return grouping2(feat, idx)
    apart = grouping2(xyz, idx) - (xyz if new_xyz is None else new_xyz)[:, None]
    return torch.cat([apart.masked_fill((idx < 0)[..., None], 0), grouping2(feat, idx)], -1)


def interpolation(xyz: Tensor, new_xyz: Tensor, feat: Tensor, offset: Tensor, new_offset: Tensor, k: int = 3) -> Tensor:
    """[N, C]: of the k nearest, by inverse distance."""
    return ops.three_interpolate(feat, xyz, k=k, **_asked(offset, new_xyz, new_offset))


def knn_query_and_group(
    feat: Tensor, xyz: Tensor, offset: Any = None, new_xyz: Opt = None, new_offset: Opt = None, idx: Opt = None,
    nsample: int = 0, with_xyz: bool = False,
) -> Any:  # fmt: skip
    """(grouping of the nsample nearest or of idx, their rows)."""
    found = knn_query(nsample, xyz, offset, new_xyz, new_offset)[0] if idx is None else idx
    return grouping(found, feat, xyz, new_xyz, with_xyz), found


def attention_step1(q: Tensor, k: Tensor, index0: Tensor, index1: Tensor) -> Tensor:
    """[M, H]: q[index0] . k[index1]."""
    return (ops.gather(q, index0) * ops.gather(k, index1)).sum(-1)


def attention_step2(attn: Tensor, v: Tensor, index0: Tensor, index1: Tensor, *relative: Tensor) -> Tensor:
    """[N, H, C]: sums over index0 of attn * v[index1], plus a table's entries: `relative` (table, rel_idx)."""
    met = ops.gather(v, index1) + (_entries(*relative) if relative else 0)
    return ops.scatter(attn[..., None] * met, index0, 0, dim_size=len(v))


def _entries(table: Tensor, rel_idx: Tensor) -> Tensor:
    """Sum over axes a of table[rel_idx[m, a], :, :, a]: [M, H, C]."""
    axes = zip(table.unbind(-1), rel_idx.unbind(1), strict=True)
    return torch.stack([ops.gather(entries, index) for entries, index in axes]).sum(0)


def dot_prod_with_idx(q: Tensor, index: Tensor, table: Tensor, rel_idx: Tensor) -> Tensor:
    """[M, H]: q[index] . the entries of a table."""
    return (ops.gather(q, index) * _entries(table, rel_idx)).sum(-1)


def _both(q: Tensor, index_q: Tensor, k: Tensor, index_k: Tensor, tq: Tensor, tk: Tensor, rel_idx: Tensor) -> Tensor:
    return dot_prod_with_idx(q, index_q, tq, rel_idx) + dot_prod_with_idx(k, index_k, tk, rel_idx)


def _absent(*args: Any, **more: Any) -> Any:
    raise OptionError(f"{', '.join(_ABSENT)} are not served: knn_query, knn_query_and_group, ball_query are")


def _rows(offsets: Tensor) -> Tensor:
    return offset2batch(offsets[1:])


_SERVED = (offset2batch, knn_query, ball_query, farthest_point_sampling, interpolation)
_SERVED += (grouping, grouping2, knn_query_and_group, attention_step1, attention_step2, dot_prod_with_idx)
_ABSENT = ("query_and_group", "ball_query_and_group", "random_ball_query", "precompute_index_pairs", "aggregation")
_NAMES: Mapping[str, Any] = {f.__name__: f for f in _SERVED} | {
    "batch2offset": lambda batch: batch.bincount().cumsum(0).int(),
    "attention_step1_v2": lambda q, k, index1, offsets, most: attention_step1(q, k, _rows(offsets), index1),
    "attention_step2_with_rel_pos_value": attention_step2,
    "attention_step2_with_rel_pos_value_v2": lambda attn, v, offsets, most, index1, *table: attention_step2(
        attn, v, _rows(offsets), index1, *table
    ),
    "dot_prod_with_idx_v2": _both,
    "dot_prod_with_idx_v3": lambda q, offsets, most, *rest: _both(q, _rows(offsets), *rest),
    **dict.fromkeys(_ABSENT, _absent),
}
MODULES: Mapping[str, Mapping[str, Any]] = dict.fromkeys(
    ("pointops", "pointops.functions", "pointops2", "pointops2.pointops"), _NAMES
)
