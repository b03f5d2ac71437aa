"""torch_scatter (2.1) over pumice.ops: scatter, segment_csr, segment_coo, gather and their names. `out` is joined with
what it holds, in place; max and min also give first positions along dim, the size of src for none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from pumice import ops
from pumice.errors import OptionError, ShapeError

Out = Tensor | None
Size = int | None


def joined(
    src: Tensor, index: Tensor, dim: int = -1, out: Out = None, dim_size: Size = None, reduce: str = "sum"
) -> Any:
    """scatter_sum, scatter_mean and so on."""
    if reduce == "mul":
        raise OptionError("reduce='mul' is not there: take exp of the scattered sum of logarithms")
    size, reduce = dim_size if out is None else out.shape[dim], "sum" if reduce == "add" else reduce
    if reduce in ("max", "min"):
        found, place = ops.scatter(src, index, dim, dim_size=size, reduce=reduce, places=True)
        if out is None:
            return found, place
        better = (place < src.shape[dim]) & (found > out if reduce == "max" else found < out)
        return out.copy_(torch.where(better, found, out)), place.where(better, src.shape[dim])
    if out is None:
        return ops.scatter(src, index, dim, dim_size=size, reduce=reduce)
    out.add_(ops.scatter(src, index, dim, dim_size=size))
    if reduce == "mean":
        counts = ops.scatter(torch.ones_like(src), index, dim, dim_size=size).clamp(min=1)
        out.div_(counts, rounding_mode=None if out.is_floating_point() else "floor")
    return out


def joined_csr(src: Tensor, indptr: Tensor, out: Out = None, reduce: str = "sum") -> Any:
    """segment_sum_csr and so on, over the last axis of indptr; axes before it must be of size 1."""
    how: dict[str, Any] = {"reduce": "sum" if reduce == "add" else reduce, "places": reduce in ("max", "min")}
    found: Any = ops.segment_reduce(src, indptr=_flat(indptr), dim=indptr.ndim - 1, **how)
    if out is None:
        return found
    return (out.copy_(found[0]), found[1]) if isinstance(found, tuple) else out.copy_(found)


def joined_coo(src: Tensor, index: Tensor, out: Out = None, dim_size: Size = None, reduce: str = "sum") -> Any:
    """segment_sum_coo and so on, over the last axis of index."""
    return joined(src, index, index.ndim - 1, out, dim_size, reduce)


def _values(join: Callable[..., Any]) -> Callable[..., Tensor]:
    @wraps(join)
    def values(*args: Any, **more: Any) -> Tensor:
        found = join(*args, **more)
        return found[0] if isinstance(found, tuple) else found

    return values


def gathered(src: Tensor, index: Tensor, out: Out = None, *, by: str) -> Tensor:
    """gather_csr (by "indptr") and gather_coo (by "index")."""
    found = ops.gather(src, **{by: _flat(index)}, dim=index.ndim - 1)
    return found if out is None else out.copy_(found)


def _flat(index: Tensor) -> Tensor:
    if math.prod(index.shape[:-1]) != 1:
        raise ShapeError(f"an index of one row is expected, found shape {list(index.shape)}: call once for each row")
    return index.flatten()


def _at(values: Tensor, index: Tensor, src: Tensor, dim: int) -> Tensor:
    """values[index] along dim, in the shape of src."""
    front = index.reshape(*[1] * (dim % src.ndim if index.ndim == 1 else 0), *index.shape)
    return values.gather(dim, front.reshape(*front.shape, *[1] * (src.ndim - front.ndim)).expand_as(src).long())


def scatter_std(
    src: Tensor, index: Tensor, dim: int = -1, out: Out = None, dim_size: Size = None, unbiased: bool = True
) -> Tensor:
    """sqrt(sum of squared deviations / (max(n - unbiased, 1) + 1e-6))."""
    mean = ops.scatter(src, index, dim, dim_size=dim_size if out is None else out.shape[dim], reduce="mean")
    apart, size = src - _at(mean, index, src, dim), mean.shape[dim]
    counts = ops.scatter(torch.ones_like(src), index, dim, dim_size=size).sub(int(unbiased)).clamp(min=1)
    found = ops.scatter(apart * apart, index, dim, dim_size=size).div(counts + 1e-6).sqrt()
    return found if out is None else out.copy_(found)


def scatter_softmax(src: Tensor, index: Tensor, dim: int = -1, dim_size: Size = None) -> Tensor:
    """In the shape of src."""
    return ops.scatter(src, index, dim, dim_size=dim_size, reduce="softmax")


def scatter_log_softmax(src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12, dim_size: Size = None) -> Tensor:
    """In the shape of src; eps is not needed."""
    return ops.scatter(src, index, dim, dim_size=dim_size, reduce="log_softmax")


_SUMS, _BOTH = ("sum", "add", "mean"), ("max", "min")
_COMPOSITE = {f.__name__: f for f in (scatter_std, scatter_softmax, scatter_log_softmax)}
_GATHERS = {f"gather_{name}": partial(gathered, by=by) for name, by in (("csr", "indptr"), ("coo", "index"))}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "torch_scatter": {
        **{f"scatter_{name}": partial(joined, reduce=name) for name in (*_SUMS, *_BOTH, "mul")},
        **{f"segment_{name}_csr": partial(joined_csr, reduce=name) for name in (*_SUMS, *_BOTH)},
        **{f"segment_{name}_coo": partial(joined_coo, reduce=name) for name in (*_SUMS, *_BOTH)},
        **{"scatter": _values(joined), "segment_csr": _values(joined_csr), "segment_coo": _values(joined_coo)},
        **{**_GATHERS, **_COMPOSITE, "__version__": "2.1.2"},
    },
    "torch_scatter.composite": _COMPOSITE,
}
