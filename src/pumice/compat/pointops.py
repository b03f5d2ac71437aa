"""pointops (Pointcept's, and the attention of pointops2) over pumice.ops. Offsets are the ends of batch items; -1 and a
distance of 1e5 stand for no neighbour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    new_offset: Opt = None, *, random: bool = False,
) -> Any:  # fmt: skip
    """(int32 [M, nsample], distances): of more than nsample evenly spaced ones by distance, or any if `random`."""
    asked = _asked(offset, new_xyz, new_offset)
    edges, queries = ops.radius_graph(xyz, max_radius, loop=True, **asked), xyz if new_xyz is None else new_xyz
    squared = (xyz[edges[0]] - queries[edges[1]]).square().sum(1)
    kept = (squared <= 1e-5) | (squared >= min_radius**2)
    (index, of), squared = edges[:, kept], squared[kept]
    order = (torch.rand_like(squared) if random else squared).argsort(stable=True)
    order = torch.cat([order[of[order].argsort(stable=True)], order.new_zeros(1)])
    counts = torch.bincount(of, minlength=len(queries))[:, None]
    step = 1 if random else (counts / nsample).clamp(min=1)
    place = (step * torch.arange(nsample, device=xyz.device)).long()
    at = order[(counts.cumsum(0) - counts + place).clamp(max=len(index))]
    index, squared = (torch.cat([x, x.new_zeros(1)])[at] for x in (index, squared))
    return index.masked_fill(place >= counts, -1).int(), squared.masked_fill(place >= counts, _FAR).sqrt()


def farthest_point_sampling(xyz: Tensor, offset: Tensor, new_offset: Tensor) -> Tensor:
    """int32, from the first point of each item on."""
    counts = new_offset.diff(prepend=new_offset.new_zeros(1))
    return ops.farthest_point_sample(xyz, counts, batch=offset2batch(offset)).int()


def grouping2(input: Tensor, idx: Tensor) -> Tensor:
    """input[idx], 0 for no neighbour."""
    found = ops.gather(input, idx.flatten().clamp(min=0).long()).reshape(*idx.shape, *input.shape[1:])
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


def aggregation(input: Tensor, position: Tensor, weight: Tensor, idx: Tensor) -> Tensor:
    """Sums over s of (input[idx[n, s], c] + position[n, s, c]) * weight[n, s, c mod its channels]."""
    met = (grouping2(input, idx) + position).unflatten(-1, (-1, weight.shape[-1]))
    return torch.einsum("nsgc,nsc->ngc", met, weight).flatten(1)


def _and_group(query: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        feat: Tensor, xyz: Tensor, offset: Opt = None, new_xyz: Opt = None, new_offset: Opt = None, idx: Opt = None,
        max_radio: float = 0.0, min_radio: float = 0.0, nsample: int = 0, with_xyz: bool = False,
    ) -> Any:  # fmt: skip
        radii = () if query is knn_query else (max_radio, min_radio)
        found = query(nsample, *radii, xyz, offset, new_xyz, new_offset)[0] if idx is None else idx
        return grouping(found, feat, xyz, new_xyz, with_xyz), found

    return call


def attention_step1(q: Tensor, k: Tensor, index0: Tensor, index1: Tensor) -> Tensor:
    """[M, H]: q[index0] . k[index1]."""
    return (ops.gather(q, index0.long()) * ops.gather(k, index1.long())).sum(-1)


def attention_step2(attn: Tensor, v: Tensor, index0: Tensor, index1: Tensor, *relative: Tensor) -> Tensor:
    """[N, H, C]: sums over index0 of attn * v[index1], plus a table's entries: `relative` (table, rel_idx)."""
    met = ops.gather(v, index1.long()) + (_entries(*relative) if relative else 0)
    return ops.scatter(attn[..., None] * met, index0.long(), 0, dim_size=len(v))


def _entries(table: Tensor, rel_idx: Tensor) -> Tensor:
    """Sum over axes a of table[rel_idx[m, a], :, :, a]: [M, H, C]."""
    return torch.stack([ops.gather(t, i.long()) for t, i in zip(table.unbind(-1), rel_idx.unbind(1), strict=True)]).sum(
        0
    )


def dot_prod_with_idx(q: Tensor, index: Tensor, table: Tensor, rel_idx: Tensor) -> Tensor:
    """[M, H]: q[index] . the entries of a table."""
    return (ops.gather(q, index.long()) * _entries(table, rel_idx)).sum(-1)


def _both(q: Tensor, index_q: Tensor, k: Tensor, index_k: Tensor, tq: Tensor, tk: Tensor, rel_idx: Tensor) -> Tensor:
    return dot_prod_with_idx(q, index_q, tq, rel_idx) + dot_prod_with_idx(k, index_k, tk, rel_idx)


def _absent(*args: Any, **more: Any) -> Any:
    raise OptionError(
        "query_and_group and precompute_index_pairs are not served: knn_query_and_group, radius_graph are"
    )


def _rows(offsets: Tensor) -> Tensor:
    return offset2batch(offsets[1:])


_NAMES: dict[str, Any] = {
    f.__name__: f
    for f in (
        offset2batch,
        knn_query,
        ball_query,
        farthest_point_sampling,
        grouping,
        grouping2,
        interpolation,
        aggregation,
    )
}
_NAMES |= {
    "batch2offset": lambda batch: batch.bincount().cumsum(0).int(),
    "random_ball_query": lambda *args: ball_query(*args, random=True),
    "interpolation2": interpolation,
    "subtraction": lambda input1, input2, idx: input1[:, None] - grouping2(input2, idx),
    "knn_query_and_group": _and_group(knn_query),
    "ball_query_and_group": _and_group(ball_query),
    "attention_relation_step": lambda q, k, weight, target, refer: attention_step1(q * weight, k, target, refer),
    "attention_fusion_step": attention_step2,
    "attention_step1": attention_step1,
    "attention_step1_v2": lambda q, k, index1, offsets, most: attention_step1(q, k, _rows(offsets), index1),
    "attention_step2": attention_step2,
    "attention_step2_with_rel_pos_value": attention_step2,
    "attention_step2_with_rel_pos_value_v2": lambda attn, v, offsets, most, index1, *table: attention_step2(
        attn, v, _rows(offsets), index1, *table
    ),
    "dot_prod_with_idx": dot_prod_with_idx,
    "dot_prod_with_idx_v2": _both,
    "dot_prod_with_idx_v3": lambda q, offsets, most, *rest: _both(q, _rows(offsets), *rest),
    **dict.fromkeys(("query_and_group", "precompute_index_pairs"), _absent),
}
MODULES: Mapping[str, Mapping[str, Any]] = dict.fromkeys(
    ("pointops", "pointops.functions", "pointops2", "pointops2.pointops"), _NAMES
)
