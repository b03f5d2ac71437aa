"""Compile unrolled tables for GPUs that are not there: a channelwise product along edges, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from kernels.cross import spilled
from kernels.kept import Facts, facts_of

import pumice as pm
from pumice.lower import kernel as lowered
from pumice.lower import unrolled
from pumice.lower.unrolled_source import numbers, pointers

NODES, EDGES, CHANNELS = 4, 6, 128


def answer(target: str) -> dict[str, Facts]:
    """By kernel: spilled bytes, and shared memory."""
    return {name: facts_of(source, target, {"num_warps": warps}, _read) for name, source, warps in _sources()}


def _read(compiled: Any, log: str) -> Facts:
    return {"spilled": spilled(compiled.asm, log), "shared": compiled.metadata.shared}


def _sources() -> Iterator[tuple[str, Any, int]]:
    from triton.compiler import ASTSource

    for name, (call, _) in zip(("message", "gradients"), _launches(), strict=True):
        names = pointers(call.sums)
        kinds = {"f": "*fp32", "a": "*i64", "o": "*fp32"}
        signature = {each: "*i32" if each in ("order", "starts") else kinds[each[0]] for each in names}
        signature |= {each: "i64" for each in numbers(call.sums)}
        aligned = {(place,): [["tt.divisibility", 16]] for place, _ in enumerate(names)}
        function = call.kernel.launcher._kernel.function
        yield name, ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned), call.kernel.warps


def _launches() -> list[tuple[Any, ...]]:
    """What would be launched for a message and its gradients."""
    x, y = "128x0e+128x1o", pm.ops.Irreps.harmonics(2)
    made = pm.nn.TensorProduct(x, y, f"{x}+128x2e", "uvu", shared_weights=False, layout="ir_mul")
    shapes = (NODES, made.irreps_in1.dim), (EDGES, y.dim), (EDGES, made.weight_numel)
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    edges, found = torch.zeros(2, EDGES, dtype=torch.int64), list[tuple[Any, ...]]()

    def run(*launch: Any) -> list[torch.Tensor]:
        found.append(launch)
        return unrolled.run_torch(*launch)

    # As if on a GPU, where this is the cheapest lowering.
    with patch.object(unrolled, "_launched", run), patch.object(lowered, "interpreted", lambda: True):
        part = made._parts[0]
        operands = {"X": given[0].view(NODES, -1, CHANNELS), "Y": given[1], "W": part.weight(given[2])}
        ends = {"S": edges[0], "T": edges[1], "N": NODES}
        text, ((table,),) = part.along_edges[0], made._tables[torch.float32]
        z = pm.einsum(text, CG=table, **operands, **ends, lowering="unrolled")
        torch.autograd.grad(z.sum(), given)
    return found
