"""Statements compiled by TorchInductor: the graph of graph.py, in which matrix products may be fused with gathers and
scatters ("native matmul", the upstream part of Insum's extension; section 5.2).

Only by name: compilation takes seconds, and its kernels are slower than those of emit.py (lazy broadcasting, section
5.2.3, is not upstream).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Statement
from pumice.lower import graph

NATIVE: Mapping[str, Any] = MappingProxyType(
    {"triton.native_matmul": True, "triton.prefer_nd_tiling": True, "unroll_reductions_threshold": 1}
)
"""Options of Inductor on a GPU that fuse gathers, matrix products and scatters into one kernel."""


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why Inductor cannot compile the statement, or None."""
    if not operands:
        return "it has no operands"
    return graph.refusal(statement, bound, operands)


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement; a new tensor of `dtype`. The first call of a statement compiles it."""
    module, arguments = graph.prepare(bound, operands, dtype)
    return compiled(module, any(x.is_cuda for x in operands.values()))(*arguments)


@lru_cache(maxsize=256)
def compiled(module: fx.GraphModule, native: bool) -> Callable[..., Tensor]:
    """The graph compiled by Inductor. native: with products of its own, if this torch has them (2.10 and later)."""
    known = torch._inductor.list_options() if native else ()  # pyright: ignore[reportAttributeAccessIssue]
    options = {name: value for name, value in NATIVE.items() if name in known}
    return torch.compile(module, fullgraph=True, dynamic=None, options=options or None)
