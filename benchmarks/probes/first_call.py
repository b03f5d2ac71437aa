"""Times of the first calls of statements and of a network in a new process, printed as JSON.

    python -m benchmarks.probes.first_call DEVICE quick|full NAME,...

Operands, formats and kernel maps of a statement are made before. Its first call includes parsing, the choice of
kernels, their generation, compilation or loading from disk, and one run; a network's also includes its kernel maps.
One-time costs of the process (loading libraries, building Triton's launcher) fall on the first call of a tiny
statement, "start", that runs before statements; a network's first call includes these costs.
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
from benchmarks.scenes.clouds import layer_scenes, surface
from benchmarks.suites import einsum_conv, spmm, tensor_product
from pumice.models import MinkUNet
from pumice.ops import SparseTensor
from pumice.ops.sparse import sparse

Make = Callable[[], Callable[[], Any]]
SCAN = "nuscenes_1f_10cm"


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


def _network(setup: Setup) -> Make:
    """MinkUNet on a scan; if the scan is missing, on a random surface of as many voxels."""
    torch.manual_seed(1)
    net = MinkUNet(width=0.25 if setup.quick else 1.0).to(setup.device, setup.half).eval()
    known = {} if setup.quick else dict(layer_scenes(setup))
    made = known[SCAN]() if SCAN in known else surface(300 if setup.quick else 18_000, setup.device)
    feats = setup.filled(len(made), 4, dtype=setup.half)
    # Each call makes a new tensor, so that it builds its maps.
    return lambda: torch.inference_mode()(lambda: net(SparseTensor(feats, made.coords)).feats.sum().item())


SUBJECTS: Mapping[str, Callable[[Setup], Make]] = {
    "structured": _structured,
    "unstructured": _unstructured,
    "conv": _conv,
    "tensor-product": _tensor_product,
    "network": _network,
}


def _start(setup: Setup) -> Make:
    """The tiny statement "start"."""
    x = setup.random(1000)
    return line("", "C[i] = A[i] * B[i]", "triton" if setup.device.type == "cuda" else "", A=x, B=x).make


def first_and_next(make: Make, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the first call, and the minimum of three later ones."""
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
    """Print {name: [first, next]} in milliseconds; "start" comes first unless only the network is asked for."""
    device, size, names = arguments
    setup = Setup(torch.device(device), size == "quick", lambda text: None)
    warm = setup.random(64, 64, dtype=setup.half)
    (warm @ warm).sum().item()
    wanted = names.split(",")
    makers = {**({} if wanted == ["network"] else {"start": _start}), **{name: SUBJECTS[name] for name in wanted}}
    print(json.dumps({name: first_and_next(make(setup), setup.device) for name, make in makers.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
