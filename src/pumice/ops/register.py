"""The two operators the dispatcher knows, with their derivatives and their shapes.

`conv` covers the forward operator and the input gradient (the same loop over the transposed map), `conv_weight` the
weight gradient. Each one's derivative is made of the two again, so that derivatives of any order exist.

A map travels as flat tensors (inputs, outputs, sizes, ...): compiled code sees nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pumice.lower import run

_LIBRARY = torch.library.Library("pumice", "DEF")
_LIBRARY.define(
    "conv(Tensor x, Tensor weight, Tensor[] map, Tensor[] map_t, SymInt rows, int groups) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "conv_weight(Tensor x, Tensor grad, Tensor[] map, Tensor[] map_t, int groups) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def conv(
    x: Tensor, weight: Tensor, tables: Sequence[Tensor], tables_t: Sequence[Tensor], rows: int, groups: int
) -> Tensor:
    """out[o, g, n] += x[i, g, c] * weight[g*N + n, k, c] over the meetings of the map; [rows, G*N]."""
    return torch.ops.pumice.conv(x, weight, tables, tables_t, rows, groups)


def _conv(x: Tensor, weight: Tensor, tables: list[Tensor], tables_t: list[Tensor], rows: int, groups: int) -> Tensor:
    return run.forward(x, weight, tables, rows, groups)


def _conv_fake(
    x: Tensor, weight: Tensor, tables: list[Tensor], tables_t: list[Tensor], rows: int, groups: int
) -> Tensor:
    return x.new_empty(rows, weight.shape[0])


def _conv_weight(x: Tensor, grad: Tensor, tables: list[Tensor], tables_t: list[Tensor], groups: int) -> Tensor:
    return run.weight_gradient(x, grad, tables, groups).contiguous()


def _conv_weight_fake(x: Tensor, grad: Tensor, tables: list[Tensor], tables_t: list[Tensor], groups: int) -> Tensor:
    return x.new_empty(grad.shape[1], tables[2].shape[0], x.shape[1] // groups)


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, tables, tables_t, _, groups = inputs
    ctx.save_for_backward(x, weight, *tables, *tables_t)
    ctx.counts, ctx.groups = (len(tables), len(tables_t)), groups


def _save_conv_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, grad, tables, tables_t, groups = inputs
    ctx.save_for_backward(x, grad, *tables, *tables_t)
    ctx.counts, ctx.groups = (len(tables), len(tables_t)), groups


def _saved(ctx: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    first, second, *tables = ctx.saved_tensors
    split = ctx.counts[0]
    return first, second, tables[:split], tables[split:]


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, tables, tables_t = _saved(ctx)
    need_x, need_weight, *_ = ctx.needs_input_grad
    dx = dweight = None
    if need_x:
        weight_t = run.transposed(weight, ctx.groups)
        dx = conv(grad, weight_t, tables_t, tables, x.shape[0], ctx.groups)
    if need_weight:
        dweight = torch.ops.pumice.conv_weight(x, grad, tables, tables_t, ctx.groups)
    return dx, dweight, [None] * len(tables), [None] * len(tables_t), None, None


def _conv_weight_backward(ctx: Any, dweight: Tensor) -> tuple[Any, ...]:
    x, grad, tables, tables_t = _saved(ctx)
    need_x, need_grad, *_ = ctx.needs_input_grad
    dx = dgrad = None
    if need_x:
        dx = conv(grad, run.transposed(dweight, ctx.groups), tables_t, tables, x.shape[0], ctx.groups)
    if need_grad:
        dgrad = conv(x, dweight, tables, tables_t, grad.shape[0], ctx.groups)
    return dx, dgrad, [None] * len(tables), [None] * len(tables_t), None


for _name, _impl, _fake, _backward, _save in (
    ("conv", _conv, _conv_fake, _conv_backward, _save_conv),
    ("conv_weight", _conv_weight, _conv_weight_fake, _conv_weight_backward, _save_conv_weight),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _impl, _key)
    torch.library.register_fake(f"pumice::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"pumice::{_name}", _backward, setup_context=_save, lib=_LIBRARY)
