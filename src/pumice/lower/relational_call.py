"""A relational layer over a graph as a few launches whose arguments are known: a join and a product over relations.

base += product(join(x))          aggregate first; the product adds by atomics
base += join(product(x))          transform first
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.lower.call import BoundCall, call_signature, has_dynamic_rows
from pumice.lower.epilogue import NO_EPILOGUE
from pumice.lower.joins import BoundJoin, Joins
from pumice.runtime.workspace import workspace


@dataclass(frozen=True, eq=False)
class RelationalCall:
    """A layer of one signature (lower.call.call_signature of x and weight) bound to a graph. aggregates: first;
    joins: keeps its arrays; between: shape of the rows between the two steps; result: of the layer."""

    join: BoundJoin
    joins: Joins
    product: BoundCall
    aggregates: bool
    between: tuple[int, int]
    result: tuple[int, int]

    @staticmethod
    def of(x: Tensor, weight: Tensor, found: tuple[KernelMap, Joins], how: str, first: bool) -> RelationalCall | None:
        """For operands like x and weight [K, C_in, C_out]. found: (map of the product, join); how: of the join; first:
        join first. None until such a layer has run, and where no single kernels add."""
        over, joins = found
        inner, outer = weight.shape[1:]
        rows = x.new_empty(joins.count, inner) if first else x
        filters = weight.permute(2, 0, 1)
        signature = call_signature((rows, filters), has_dynamic_rows(NO_EPILOGUE), NO_EPILOGUE)
        product, result = over.calls.get(signature), x.new_empty(over.num_outputs if first else joins.count, outer)
        given = (x, rows) if first else (x.new_empty(over.num_outputs, outer), result)
        join = BoundJoin.of(*given, joins, how, not first)
        if join is None or product is None or not product.executor.adds or product.executor.writes != torch.float32:
            return None
        between = (joins.count, inner) if first else (over.num_outputs, outer)
        return RelationalCall(join, joins, product, first, between, (len(result), outer))

    def __call__(self, x: Tensor, weight: Tensor, base: Tensor) -> Tensor | None:
        """base, plus the layer's result, in the memory of base if that is float32; None, with base unchanged, if
        shapes, alignment or the current device do not fit. base: [targets, C_out] in the dtype of x."""
        if base.shape != self.result or self.join.device != torch._C._cuda_getDevice() or weight.data_ptr() & 15:
            return None
        # Where dtypes are equal, .float() and .to() are the tensor itself.
        dtype = x.dtype
        if self.aggregates:
            rows = x.new_empty(self.between)
            if not self.join(x, rows):
                return None
            y = base.float()
            self._multiply(rows, weight, y)
            return y.to(dtype)
        if x.data_ptr() & 15 or base.data_ptr() & 15:
            return None
        rows = x.new_zeros(self.between, dtype=torch.float32)
        self._multiply(x, weight, rows)
        return base if self.join(rows.to(dtype), base) else None

    def _multiply(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Add to y."""
        needs = self.product.needs
        # Keeps the memory until the launch.
        shared = None if needs is None else workspace(*needs, self.product.device)
        self.product.launch((x.data_ptr(), weight.data_ptr()), y.data_ptr(), shared)
