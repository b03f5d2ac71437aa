"""pointops (Pointcept's, and the attention of pointops2) over pumice.ops. Offsets are the ends of batch items; -1 stands
for no neighbour."""

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
    counts = offset.diff(prepend=offset.new_zeros(1))
    return torch.repeat_interleave(torch.arange(len(offset), device=offset.device), counts.long())


def batch2offset(batch: Tensor) -> Tensor:
    """Ends of batch items, int32."""
    return batch.bincount().cumsum(0).int()


def _asked(xyz: Tensor, offset: Tensor, new_xyz: Opt, new_offset: Opt) -> dict[str, Opt]:
    if new_xyz is None or new_offset is None:
        return {"batch": offset2batch(offset)}
    return {"queries": new_xyz, "batch": offset2batch(offset), "query_batch": offset2batch(new_offset)}


def knn_query(nsample: int, xyz: Tensor, offset: Tensor, new_xyz: Opt = None, new_offset: Opt = None) -> Any:
    """(int32 [M, nsample], distances)."""
    index, squared = ops.knn(xyz, nsample, **_asked(xyz, offset, new_xyz, new_offset))
    return index.int(), squared.clamp(max=_FAR).sqrt()


def _ball(
    nsample: int, radii: tuple[float, float], xyz: Tensor, offset: Tensor, new: tuple[Opt, Opt], random: bool
) -> Any:
    """nsample of the points within: at random, or evenly spaced among them by distance."""
    edges = ops.radius_graph(xyz, radii[0], loop=True, **_asked(xyz, offset, *new))
    queries = xyz if None in new else new[0]
    squared = (xyz[edges[0]] - queries[edges[1]]).square().sum(1)
    kept = (squared <= 1e-5) | (squared >= radii[1] ** 2)
    (index, of), squared = edges[:, kept], squared[kept]
    order = (torch.rand_like(squared) if random else squared).argsort(stable=True)
    order = order[of[order].argsort(stable=True)]
    counts = torch.bincount(of, minlength=len(queries))[:, None]
    step = 1 if random else (counts / nsample).clamp(min=1)
    place = (step * torch.arange(nsample, device=xyz.device)).long()
    none, order = place >= counts, torch.cat([order, order.new_zeros(1)])
    at = order[(counts.cumsum(0) - counts + place).clamp(max=len(index))]
    index, squared = torch.cat([index, index.new_zeros(1)])[at], torch.cat([squared, squared.new_zeros(1)])[at]
    return index.masked_fill(none, -1).int(), squared.masked_fill(none, _FAR).sqrt()


def ball_query(nsample: int, max_radius: float, min_radius: float, xyz: Tensor, offset: Tensor, *new: Opt) -> Any:
    """(int32 [M, nsample], distances): of more than nsample evenly spaced ones by distance."""
    return _ball(nsample, (max_radius, min_radius), xyz, offset, (*new, None, None)[:2], False)


def random_ball_query(
    nsample: int, max_radius: float, min_radius: float, xyz: Tensor, offset: Tensor, *new: Opt
) -> Any:
    """As ball_query, of more than nsample any."""
    return _ball(nsample, (max_radius, min_radius), xyz, offset, (*new, None, None)[:2], True)


def farthest_point_sampling(xyz: Tensor, offset: Tensor, new_offset: Tensor) -> Tensor:
    """int32, from the first point of each item on."""
    counts = new_offset.diff(prepend=new_offset.new_zeros(1))
    return ops.farthest_point_sample(xyz, counts, batch=offset2batch(offset)).int()


def grouping(idx: Tensor, feat: Tensor, xyz: Tensor, new_xyz: Opt = None, with_xyz: bool = False) -> Tensor:
    """Features [M, nsample, C] of neighbours, after their places relative to new_xyz; 0 for none."""
    found = torch.cat([xyz, feat], 1) if with_xyz else feat
    found = grouping2(found, idx)
    if with_xyz:
        apart = found[..., :3] - (xyz if new_xyz is None else new_xyz)[:, None]
        found = torch.cat([apart * (idx >= 0)[..., None], found[..., 3:]], -1)
    return found


def grouping2(input: Tensor, idx: Tensor) -> Tensor:
    """[M, nsample, C]."""
    found = ops.gather(input, idx.flatten().clamp(min=0).long()).reshape(*idx.shape, *input.shape[1:])
    return found.masked_fill((idx < 0).reshape(*idx.shape, *[1] * (input.ndim - 1)), 0)


def interpolation(xyz: Tensor, new_xyz: Tensor, feat: Tensor, offset: Tensor, new_offset: Tensor, k: int = 3) -> Tensor:
    """[N, C]: of the k nearest, by inverse distance."""
    items = {"batch": offset2batch(offset), "query_batch": offset2batch(new_offset)}
    return ops.three_interpolate(feat, xyz, new_xyz, k, **items)


def subtraction(input1: Tensor, input2: Tensor, idx: Tensor) -> Tensor:
    """input1[n] - input2[idx[n, s]]."""
    return input1[:, None] - grouping2(input2, idx)


def aggregation(input: Tensor, position: Tensor, weight: Tensor, idx: Tensor) -> Tensor:
    """sum over s of (input[idx[n, s], c] + position[n, s, c]) * weight[n, s, c mod its channels]."""
    met = (grouping2(input, idx) + position).unflatten(-1, (-1, weight.shape[-1]))
    return torch.einsum("nsgc,nsc->ngc", met, weight).flatten(1)


def knn_query_and_group(
    feat: Tensor,
    xyz: Tensor,
    offset: Opt = None,
    new_xyz: Opt = None,
    new_offset: Opt = None,
    idx: Opt = None,
    nsample: int | None = None,
    with_xyz: bool = False,
) -> Any:
    """(grouped, idx)."""
    if idx is None:
        if nsample is None or offset is None:
            raise OptionError("knn_query_and_group takes idx, or nsample and offset")
        idx = knn_query(nsample, xyz, offset, new_xyz, new_offset)[0]
    return grouping(idx, feat, xyz, new_xyz, with_xyz), idx


def attention_step1(q: Tensor, k: Tensor, index0: Tensor, index1: Tensor) -> Tensor:
    """[M, H]: q[index0] . k[index1]."""
    return (ops.gather(q, index0.long()) * ops.gather(k, index1.long())).sum(-1)


def attention_relation_step(q: Tensor, k: Tensor, weight: Tensor, target: Tensor, refer: Tensor) -> Tensor:
    """[M, H]: q[target] . (weight * k[refer])."""
    return attention_step1(q * weight, k, target, refer)


def attention_step2(attn: Tensor, v: Tensor, index0: Tensor, index1: Tensor) -> Tensor:
    """[N, H, C]: sums over index0 of attn * v[index1]."""
    return ops.scatter(attn[..., None] * ops.gather(v, index1.long()), index0.long(), 0, dim_size=len(v))


def dot_prod_with_idx(q: Tensor, index: Tensor, table: Tensor, rel_idx: Tensor) -> Tensor:
    """[M, H]: q[index] . sum over axes of table[rel_idx]; table [L, H, C, 3], rel_idx [M, 3]."""
    return (ops.gather(q, index.long()) * _relative(table, rel_idx)).sum(-1)


def _relative(table: Tensor, rel_idx: Tensor) -> Tensor:
    return sum(ops.gather(table[..., axis], rel_idx[:, axis].long()) for axis in range(table.shape[-1]))  # pyright: ignore


def dot_prod_with_idx_v2(
    q: Tensor, index_q: Tensor, k: Tensor, index_k: Tensor, tq: Tensor, tk: Tensor, rel: Tensor
) -> Tensor:
    """Of q and k, with a table each."""
    return dot_prod_with_idx(q, index_q, tq, rel) + dot_prod_with_idx(k, index_k, tk, rel)


def attention_step2_with_rel_pos_value(
    attn: Tensor, v: Tensor, index0: Tensor, index1: Tensor, table: Tensor, rel_idx: Tensor
) -> Tensor:
    """[N, H, C]: sums over index0 of attn * (v[index1] + table[rel_idx])."""
    met = ops.gather(v, index1.long()) + _relative(table, rel_idx)
    return ops.scatter(attn[..., None] * met, index0.long(), 0, dim_size=len(v))
