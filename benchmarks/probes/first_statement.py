"""How long the first call of a statement takes in a new process; run as a program, it prints one line of JSON.

    python -m benchmarks.probes.first_statement DEVICE quick|full STATEMENT,...

Operands, formats and maps are made before. What is left in the first call is the text, the choice, the kernel's source,
its compilation or its way from the disk, and one run. What a process pays once (libraries loaded, the launcher of
Triton built) is in the first call of a tiny statement, "start", that runs before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.harness.study import Setup, line
from benchmarks.harness.timing import synchronize
from benchmarks.scenes import matrices
from benchmarks.suites import einsum_conv, spmm, tensor_product
from pumice.ops.sparse import sparse

Make = Callable[[], Callable[[], Any]]


def _structured(setup: Setup) -> Make:
    size = 128 if setup.quick else 4096
    a = sparse(spmm.block_matrix(setup, size, 32, 0.9), "m:C k:G m:B32 k:B32")
    b = setup.random(size, size, dtype=setup.half)
    return line("", spmm.TEXT, A=a, B=b).make


def _unstructured(setup: Setup) -> Make:
    matrix = matrices.uniform("uniform", 500 if setup.quick else 100_000, 4000 if setup.quick else 1_000_000, 15)
    a = sparse(spmm.csr_of(setup, matrix, setup.half), "m:C k:G")
    return line("", spmm.TEXT, A=a, B=setup.filled(matrix.shape[1], 128, dtype=setup.half)).make


def _conv(setup: Setup) -> Make:
    layer = einsum_conv.layer_of(setup, next(einsum_conv.scenes(setup))[1])
    einsum_conv.convert(layer)
    return einsum_conv.planned(layer).make


def _tensor_product(setup: Setup) -> Make:
    given = tensor_product.product(setup, 1 if setup.quick else 2, 4 if setup.quick else 32, shared=True)
    a = sparse(given.coefficients, "(i j k l):C")
    return line("", tensor_product.SHARED, CG=a, X=given.x, Y=given.y, W=given.w).make


STATEMENTS: Mapping[str, Callable[[Setup], Make]] = {
    "structured": _structured,
    "unstructured": _unstructured,
    "conv": _conv,
    "tensor-product": _tensor_product,
}


def _start(setup: Setup) -> Make:
    """The tiny statement."""
    x = setup.random(1000)
    return line("", "C[i] = A[i] * B[i]", "triton" if setup.device.type == "cuda" else "", A=x, B=x).make


def first_and_next(make: Make, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the first call, and of a later one."""
    spent = []
    call: Callable[[], Any] | None = None
    for _ in range(4):
        synchronize(device)
        begin = time.perf_counter()
        call = call or make()
        call()
        synchronize(device)
        spent.append(1e3 * (time.perf_counter() - begin))
    return spent[0], min(spent[1:])


def main(arguments: list[str]) -> None:
    """Print {statement: [first, next]}, "start" among them."""
    device, size, names = arguments
    setup = Setup(torch.device(device), size == "quick", lambda text: None)
    warm = setup.random(64, 64, dtype=setup.half)
    (warm @ warm).sum().item()
    makers = {"start": _start, **{name: STATEMENTS[name] for name in names.split(",")}}
    print(json.dumps({name: first_and_next(make(setup), setup.device) for name, make in makers.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
