"""Tensors and layers of other libraries as thin wrappers around pumice's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Proxy
from torch.utils import _pytree as pytree

from pumice.ops import SparseTensor


class Wrapped:
    """Base of other libraries' tensors: an object with state of its own around one SparseTensor, `sparse`.

    Everything besides is plain Python: sizes, keys, dictionaries. While pumice.compile traces a network, `sparse` and
    the tensors made of it are proxies, so nothing may branch on their values or sizes.
    """

    sparse: SparseTensor

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        pytree.register_pytree_node(cls, cls.parts, cls.joined)

    def parts(self) -> tuple[list[Any], Any]:
        """(tensors, a hashable description of everything else), from which `joined` makes an equal object.
        Subclasses with tensors besides `sparse`, such as coordinates kept for an inverse convolution, list these."""
        raise NotImplementedError

    @classmethod
    def joined(cls, tensors: Iterable[Any], rest: Any) -> Any:
        """The object of its `parts`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LinearMap:
    """What a convolution of kernel size 1 computes, as a linear map: its matrix() [C_out, C_in] and bias."""

    layer: Any

    @property
    def weight(self) -> Tensor:
        return self.layer.matrix()

    @property
    def bias(self) -> Tensor | None:
        bias = self.layer.bias
        return None if bias is None else bias.reshape(-1)


def call_layer(layer: Any, forward: Callable[..., Any], x: Any, *args: Any) -> Any:
    """forward(x, *args) of a pumice.nn layer on a SparseTensor; while pumice.compile traces, a step of its program."""
    # By type: a proxy answers isinstance in its own way. Then `layer` is called, not traced.
    return layer(x, *args) if issubclass(type(x), Proxy) else forward(x, *args)
