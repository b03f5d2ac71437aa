"""The operator `pumice::relational`: a relational layer as one node of the graphs that torch.compile makes.

A pumice.Graph enters as its number, a constant of the compiled code, by which the operator finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pumice.coords.traced_ops import LIBRARY, register
from pumice.ops import autograd
from pumice.ops.graph import graph_of_number
from pumice.ops.relational_steps import ORDERS, GraphJoin, cheapest, gradients, orders_of


def takes(x: Tensor | None, weight: Tensor, edge_weight: Tensor | None, order: str | None) -> bool:
    """True if torch.compile traces a layer as the operator: on a GPU, where its steps are kernels; statements of edge
    weights, one-hot nodes and block-diagonal weights are traced one by one."""
    if x is None or edge_weight is not None or not x.is_floating_point() or weight.ndim != 3 or order == "direct":
        return False
    return torch.compiler.is_compiling() and has_kernels(x)


def has_kernels(x: Tensor) -> bool:
    """True on a GPU."""
    return autograd.uses_gpu(x)


def relational(x: Tensor, weight: Tensor, number: int, aggr: str, order: str | None) -> Tensor:
    """[targets, C_out] of the graph of this number; order: None by the cost model."""
    return torch.ops.pumice.relational(x, weight, number, aggr, order or "")


def _layer(x: Tensor, weight: Tensor, number: int, aggr: str, order: str) -> tuple[GraphJoin, str]:
    found = graph_of_number(number).map
    return GraphJoin(found, aggr, None), order or cheapest(x, weight, found, _able(aggr))


def _able(aggr: str) -> tuple[str, ...]:
    return tuple(name for name in orders_of(aggr, False) if name != "direct")


def _run(x: Tensor, weight: Tensor, number: int, aggr: str, order: str) -> Tensor:
    layer, order = _layer(x, weight, number, aggr, order)
    with torch.no_grad(), autograd.autocast_disabled((x,)):
        return ORDERS[order](x.contiguous(), weight, layer, None)


def _run_fake(x: Tensor, weight: Tensor, number: int, aggr: str, order: str) -> Tensor:
    return x.new_empty(graph_of_number(number).num_targets, weight.shape[2])


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, number: int, aggr: str, order: str) -> tuple[Tensor, Tensor]:
    layer, order = _layer(x, weight, number, aggr, order)
    with torch.no_grad(), autograd.autocast_disabled((x,)):
        dx, dweight = gradients((x.contiguous(), weight, None), grad.contiguous(), layer, order, (True, True))
    assert dx is not None and dweight is not None
    return dx, dweight.contiguous()


def _gradients_fake(
    grad: Tensor, x: Tensor, weight: Tensor, number: int, aggr: str, order: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.call = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.pumice.relational_gradients(grad, *ctx.saved_tensors, *ctx.call)
    return (*found, None, None, None)


_CALL = "Tensor x, Tensor weight, int number, str aggr, str order"
register(f"relational({_CALL}) -> Tensor", _run, _run_fake)
register(f"relational_gradients(Tensor grad, {_CALL}) -> (Tensor, Tensor)", _gradients, _gradients_fake)
torch.library.register_autograd("pumice::relational", _backward, setup_context=_save, lib=LIBRARY)
