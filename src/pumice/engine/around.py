"""Networks whose argument holds a SparseTensor, such as a tensor of pumice.compat, as networks of a SparseTensor."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from pumice.engine.program import uncompiled
from pumice.errors import OptionError
from pumice.ops import SparseTensor
from pumice.ops.tensor import is_sparse


class Around(nn.Module):
    """net(value) as a network of the SparseTensor in value. form: the rest of the value, the same in every call."""

    net: nn.Module
    form: pytree.TreeSpec
    training: bool

    def __init__(self, net: nn.Module, form: pytree.TreeSpec) -> None:
        super().__init__()
        self.net, self.form, self.training = net, form, net.training

    def forward(self, x: SparseTensor) -> Any:
        return self.net(pytree.tree_unflatten([x], self.form))


def around(net: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """(network of a SparseTensor, example) for a network of what the example is; both as they are if it holds none."""
    found = _held(example)
    if found is None:
        return net, example
    x, form = found
    return Around(uncompiled(net), form), x


def sparse_in(net: nn.Module, value: Any) -> Any:
    """The SparseTensor in an argument of a network that `around` made; other values as they are. Raises OptionError if
    the rest of the value is not the example's."""
    found = _held(value) if isinstance(net, Around) else None
    if found is None:
        return value
    x, form = found
    if form != net.form:
        raise OptionError(f"only features and coordinates change between calls: expected {net.form}, found {form}")
    return x


def _held(value: Any) -> tuple[SparseTensor, pytree.TreeSpec] | None:
    if isinstance(value, SparseTensor):
        return None
    values, form = pytree.tree_flatten(value, is_sparse)
    return (values[0], form) if len(values) == 1 and isinstance(values[0], SparseTensor) else None
