"""torch_cluster (1.6) over pumice.ops. Edges are int64 [2, E]; arguments that only steer its search are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pumice import ops
from pumice.errors import OptionError

Opt = Tensor | None


def _rows(x: Tensor) -> Tensor:
    return x.flatten(1) if x.ndim > 1 else x[:, None]


def fps(
    x: Tensor, batch: Opt = None, ratio: Any = None, random_start: bool = True, batch_size: Any = None, ptr: Any = None
) -> Tensor:
    """ceil(ratio * points) farthest points of each batch item; ratio: default 0.5, a number or one for each item."""
    items = x.new_zeros(len(x), dtype=torch.int64) if batch is None else batch
    if ptr is not None:
        sizes = torch.as_tensor(ptr, device=x.device).diff()
        items = torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes, output_size=len(x))
    sizes, start = torch.bincount(items), None
    counts = (sizes * torch.as_tensor(0.5 if ratio is None else ratio, device=x.device)).ceil().long()
    if random_start and len(x):
        place = (torch.rand(len(sizes), device=x.device) * sizes).long().clamp(max=(sizes - 1).clamp(min=0))
        start = items.argsort(stable=True)[(sizes.cumsum(0) - sizes + place).clamp(max=len(x) - 1)]
    return ops.farthest_point_sample(_rows(x), counts, batch=items, start=start)


def knn(
    x: Tensor, y: Tensor, k: int, batch_x: Opt = None, batch_y: Opt = None, cosine: bool = False, *_: Any, **more: Any
) -> Tensor:
    """(rows of y, their k nearest rows of x), by y, then by distance."""
    points, queries = (normalize(t, dim=1) if cosine else t for t in (_rows(x), _rows(y)))
    return _edges(ops.knn(points, k, queries, batch=batch_x, query_batch=batch_y).index)


def _edges(index: Tensor) -> Tensor:
    """(row, entry) of the entries that are not -1."""
    rows = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
    return torch.stack([rows[index >= 0], index[index >= 0]])


def radius(
    x: Tensor, y: Tensor, r: float, batch_x: Opt = None, batch_y: Opt = None, max_num_neighbors: int = 32,
    num_workers: int = 1, batch_size: Any = None, ignore_same_index: bool = False,
) -> Tensor:  # fmt: skip
    """(rows of y, up to max_num_neighbors rows of x within r), by y, then by row: those of lowest rows."""
    items, most = {"batch": batch_x, "query_batch": batch_y}, max_num_neighbors + ignore_same_index
    found = ops.ball_query(_rows(x), float(r), most, _rows(y), **items, order="index").index
    if ignore_same_index:
        own = found == torch.arange(len(found), device=found.device)[:, None]
        # Where the row itself is not among them the last is left out.
        own[:, -1] |= ~own.any(1)
        found = found[~own].reshape(len(found), max_num_neighbors)
    return _edges(found)


def _directed(edges: Tensor, flow: str) -> Tensor:
    if flow not in ("source_to_target", "target_to_source"):
        raise OptionError(f"flow is source_to_target or target_to_source, found {flow!r}")
    return edges.flip(0) if flow == "source_to_target" else edges


def knn_graph(
    x: Tensor, k: int, batch: Opt = None, loop: bool = False, flow: str = "source_to_target", cosine: bool = False,
    *_: Any, **more: Any,
) -> Tensor:  # fmt: skip
    """Edges from the k nearest rows to each row, without itself unless `loop`."""
    edges = knn(x, x, k if loop else k + 1, batch, batch, cosine)
    return _directed(edges if loop else edges[:, edges[0] != edges[1]], flow)


def radius_graph(
    x: Tensor, r: float, batch: Opt = None, loop: bool = False, max_num_neighbors: int = 32,
    flow: str = "source_to_target", *_: Any, **more: Any,
) -> Tensor:  # fmt: skip
    """Edges to each row from up to max_num_neighbors rows within r."""
    return _directed(radius(x, x, r, batch, batch, max_num_neighbors, ignore_same_index=not loop), flow)


def nearest(x: Tensor, y: Tensor, batch_x: Opt = None, batch_y: Opt = None) -> Tensor:
    """The nearest row of y for each row of x: int64 [len(x)]."""
    return ops.knn(_rows(y), 1, _rows(x), batch=batch_y, query_batch=batch_x).index[:, 0]


def grid_cluster(pos: Tensor, size: Tensor, start: Opt = None, end: Opt = None) -> Tensor:
    """Number of the cell of `size` that holds each point, the first axis fastest: int64 [N]."""
    points = _rows(pos)
    low, high = points.amin(0) if start is None else start, points.amax(0) if end is None else end
    strides = torch.cat([torch.ones_like(low[:1]), ((high - low) / size).floor() + 1]).long()
    return (((points - low) / size).long() * strides[: len(low)].cumprod(0)).sum(1)


def _absent(*args: Any, **more: Any) -> Any:
    raise OptionError("graclus_cluster, random_walk, neighbor_sampler are not served: install torch_cluster for them")


_SERVED = (fps, knn, knn_graph, radius, radius_graph, nearest, grid_cluster)
_ABSENT = ("graclus_cluster", "random_walk", "neighbor_sampler")
MODULES: Mapping[str, Mapping[str, Any]] = {
    "torch_cluster": {f.__name__: f for f in _SERVED} | dict.fromkeys(_ABSENT, _absent) | {"__version__": "1.6.3"}
}
