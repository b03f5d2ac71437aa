"""Unstructured SpMM: a sparse matrix by a dense one of 128 columns, against cuSPARSE."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, kept, line, measured, quietly, seconds_to_move, summarize
from benchmarks.peers import cusparse
from benchmarks.scenes import matrices
from benchmarks.scenes.matrices import Matrix
from pumice.env import settings
from pumice.ops.sparse import Sparse, sparse

TEXT = "C[m,n] = A[m,k] * B[k,n]"
FORMATS = {"GroupCOO": "m:C k:G", "COO": "(m k):C", "CSR": "m:U k:C", "buckets": "m:C k:G*"}
CHUNK = 1 << 20  # non-zeros of the float64 result at once
LEAST = 150_000  # non-zeros of a real matrix, but for a thorough run: each size is tuned anew


def unstructured(setup: Setup) -> Iterator[Row]:
    """Every matrix in fp32 and, on a GPU, fp16, in all our formats."""
    columns = 16 if setup.quick else 128
    done: list[Row] = []
    for matrix in _matrices(setup):
        setup.say(str(matrix))
        for dtype in dict.fromkeys((torch.float32, setup.half)):
            rows = list(_one(setup, matrix, columns, dtype))
            done += rows
            yield from kept(rows, set(FORMATS) - {"GroupCOO"})
    summarize(setup, done, {"cuSPARSE": ("torch.sparse.mm", "cuSPARSE")})


def _matrices(setup: Setup) -> Iterator[Matrix]:
    names = [name for name in matrices.STAND_INS if setup.wants(f"unstructured/{name}/")]
    if setup.quick:
        yield from (matrices.stand_in(name, 0.005) for name in names)
        return
    yield from map(matrices.stand_in, names)
    folder = settings().data
    if folder is None:
        setup.say("PUMICE_DATA is not set: stand-ins only")
        return
    least = 20_000 if setup.thorough else LEAST
    found = list(matrices.real(folder, least))
    if not found:
        setup.say(f"no matrix with {least} non-zeros in {folder}: stand-ins only")
    yield from (m for m in found if setup.wants(f"unstructured/{m.name}/"))


def _one(setup: Setup, matrix: Matrix, columns: int, dtype: torch.dtype) -> Iterator[Row]:
    csr = csr_of(setup, matrix, dtype)
    b = setup.filled(matrix.shape[1], columns, dtype=dtype, seed=6)
    truth = product(matrix, csr.values(), b)
    ours = [line(name, TEXT, A=made, B=b) for name, made in _formats(setup, csr)]
    peers = [Way("torch.sparse.mm", lambda: lambda: torch.sparse.mm(csr, b), slack=4), *_cached(setup, csr, b)]
    case = Case(f"unstructured/{matrix.name}/N{columns}", dtype, truth, {"L2 bound": 1e3 * _least(matrix, b)})
    yield from measured(setup, case, ours, peers)


def csr_of(setup: Setup, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix with normal values as a torch CSR tensor with int32 coordinates."""
    pointers, cols = (torch.from_numpy(x).int().to(setup.device) for x in (matrix.pointers, matrix.cols))
    with quietly():
        return torch.sparse_csr_tensor(pointers, cols, setup.filled(matrix.nnz, dtype=dtype, seed=5), matrix.shape)


def _formats(setup: Setup, csr: Tensor) -> Iterator[tuple[str, Sparse]]:
    for name, text in FORMATS.items():
        made = sparse(csr, text)
        setup.say(f"  {name}: {made}")
        yield name, made


def product(matrix: Matrix, values: Tensor, b: Tensor) -> Tensor:
    """The product in float64, some non-zeros at a time."""
    rows, cols = (torch.from_numpy(x).to(b.device) for x in (matrix.rows, matrix.cols))
    out = torch.zeros(matrix.shape[0], b.shape[1], dtype=torch.float64, device=b.device)
    for first in range(0, matrix.nnz, CHUNK):
        part = slice(first, first + CHUNK)
        out.index_add_(0, rows[part], values[part, None].double() * b[cols[part]].double())
    return out


def _cached(setup: Setup, csr: Tensor, b: Tensor) -> list[Way]:
    """cuSPARSE without the host's work of torch: descriptors, buffer and preprocessing made once."""
    if setup.device.type != "cuda":
        return []
    given = (csr.crow_indices(), csr.col_indices(), csr.values())
    shape = (int(csr.shape[0]), int(csr.shape[1]))
    return [
        Way(f"cuSPARSE cached {name}", lambda name=name: cusparse.spmm(given, shape, b, name), slack=4)
        for name in cusparse.ALGORITHMS
    ]


def _least(matrix: Matrix, b: Tensor) -> float:
    """Seconds: each non-zero reads a row of b through the L2 (only reuse across rows goes below)."""
    size, columns = b.element_size(), b.shape[1]
    entries = matrix.nnz * (4 + size)
    compulsory = entries + size * columns * (matrix.shape[0] + len(np.unique(matrix.cols)))
    return seconds_to_move(cache=matrix.nnz * columns * size + entries, memory=compulsory)
