"""Sparse times dense: block-sparse matrices against cuBLAS and PyTorch's BSR kernels, others against cuSPARSE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.rows import Row
from benchmarks.harness.study import (
    DTYPES,
    Case,
    Setup,
    Way,
    goals_told,
    kept,
    line,
    measured,
    quietly,
    ratios_of,
    seconds_to_move,
    summarize,
)
from benchmarks.harness.timing import together
from benchmarks.peers import cusparse
from benchmarks.peers.published import figure
from benchmarks.scenes import matrices
from benchmarks.scenes.matrices import Matrix
from pumice.env import settings
from pumice.ops.sparse import sparse

# Structured: square block-sparse matrices

TEXT = "C[m,n] = A[m,k] * B[k,n]"
BLOCK_FORMATS = {"BlockGroupCOO": "m:C k:G m:B{b} k:B{b}", "BCSR": "m:U k:C m:B{b} k:B{b}"}
SPARSITIES = (0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 0.99)
TILE = 256  # columns of a result tile, for the bound
# (columns of a tile, stages, warps) of PyTorch's kernel: the best settings of the recorded baselines.
KNOBS = ((128, 2, 8), (128, 3, 4), (64, 3, 4), (256, 2, 8), (128, 4, 8), (64, 5, 4))


def structured(setup: Setup) -> Iterator[Row]:
    """Square fp16 matrices with blocks of 32 and 128, by sparsity; reports from which sparsity on ours beats dense."""
    done: list[Row] = []
    for size, block, sparsities in _cases(setup):
        ratios: dict[str, list[tuple[float, float]]] = {}
        for sparsity in sparsities:
            rows = list(_one(setup, size, block, sparsity))
            for found in rows:
                if found.peer == "dense" and found.metric == "time":
                    ratios.setdefault(found.clock, []).append((sparsity, found.ratio))
            done += rows
            yield from kept(rows, ("BCSR",))
        for clock, points in ratios.items():
            setup.say(f"{size}/B{block} {clock}: {crossing(points)}")
    summarize(setup, done, {"dense": ("dense",), "torch BSR": ("torch BSR",)})


def _cases(setup: Setup) -> Iterator[tuple[int, int, tuple[float, ...]]]:
    if setup.quick:
        yield 128, 32, (0.25, 0.75)
        return
    for size in (1024, 4096):
        for block in (32, 128):
            yield size, block, (0.25, 0.35, *SPARSITIES[1:]) if block == 128 else SPARSITIES


def crossing(points: Sequence[tuple[float, float]]) -> str:
    """Text: the sparsity from which on our best way is faster than dense. points: (sparsity, dense time over ours)."""
    best: dict[float, float] = {}
    for sparsity, ratio in points:
        best[sparsity] = max(ratio, best.get(sparsity, 0.0))
    path = sorted(best.items())
    faster = [sparsity for sparsity, ratio in path if ratio >= 1]
    if not faster:
        return "nowhere faster than dense"
    slower = [at for at, ratio in path if ratio < 1]
    if not slower:
        return f"faster than dense from {faster[0]:.0%} on, the least measured"
    last = max(slower)
    above = [at for at in faster if at > last]
    if not above:
        return f"slower than dense at {last:.0%}, the most measured"
    first = above[0]
    share = (1 - best[last]) / (best[first] - best[last])
    return f"faster than dense from about {last + share * (first - last):.0%} on"


def _one(setup: Setup, size: int, block: int, sparsity: float) -> Iterator[Row]:
    name = f"structured/{size}/B{block}/s{sparsity:.2f}"
    if not setup.wants(name):
        return
    a, b = block_matrix(setup, size, block, sparsity), setup.random(size, size, dtype=setup.half, seed=2)
    dense = filled_out(a)
    truth = dense.double() @ b.double()
    ours = [line(name, TEXT, A=sparse(a, text.format(b=block)), B=b) for name, text in BLOCK_FORMATS.items()]
    peers = [Way("dense", lambda: lambda: torch.mm(dense, b)), *_bsr(setup, a, b)]
    bound = {"L2 bound": 1e3 * _least(a.values().numel(), block, size)}
    yield from measured(setup, Case(name, setup.half, truth, bound), ours, peers)


def block_matrix(setup: Setup, size: int, block: int, sparsity: float) -> Tensor:
    """A square torch BSR matrix with uniformly chosen blocks of normal random values."""
    found = matrices.blocks(size // block, sparsity)
    values = setup.random(found.nnz, block, block, dtype=setup.half, seed=3)
    pointers, cols = (torch.from_numpy(x).int().to(setup.device) for x in (found.pointers, found.cols))
    with quietly():
        return torch.sparse_bsr_tensor(pointers, cols, values, (size, size))


def filled_out(a: Tensor) -> Tensor:
    """The dense matrix of a torch BSR matrix."""
    pointers, cols, values = a.crow_indices().long(), a.col_indices().long(), a.values()
    rows = torch.repeat_interleave(torch.arange(len(pointers) - 1, device=a.device), pointers.diff())
    grid, block = len(pointers) - 1, values.shape[1]
    dense = values.new_zeros(grid, grid, block, block)
    dense[rows, cols] = values
    return dense.transpose(1, 2).reshape(a.shape)


def _least(entries: int, block: int, columns: int) -> float:
    """Lower bound in seconds: tiles of two rows of blocks by TILE columns, which share the rows of b that they read
    through the L2, as in lower.block_rows."""
    flops = 2.0 * entries * columns
    intensity = 2 * block * TILE / (2 * block + TILE)
    memory = 2.0 * (entries + 2 * columns * columns)
    return seconds_to_move(cache=flops / intensity, memory=memory, flops=flops)


def _bsr(setup: Setup, a: Tensor, b: Tensor) -> list[Way]:
    """PyTorch's kernels: by default, with the best of KNOBS for this case, and after PyTorch's own search.

    The search takes a minute or two per size and block, so only a thorough run includes it.
    """
    plain = Way("torch BSR mm", lambda: lambda: torch.mm(a, b), "triton" if setup.device.type == "cuda" else "")
    if setup.device.type != "cuda":
        return [plain]
    swept = Way("torch BSR addmm swept", lambda: _swept(setup, a, b), "triton")
    if not setup.thorough:
        return [plain, swept]
    return [plain, swept, Way("torch BSR addmm tuned", lambda: _tuned_by_torch(a, b), "triton")]


def _addmm(a: Tensor, b: Tensor) -> Callable[..., Any]:
    operators: Any = import_module("torch.sparse._triton_ops")
    out = torch.empty(a.shape[0], b.shape[1], dtype=b.dtype, device=b.device)
    return lambda **settings: operators.bsr_dense_addmm(out, a, b, beta=0, alpha=1, out=out, **settings)


def _tuned_by_torch(a: Tensor, b: Tensor) -> Callable[[], Any]:
    _tune(a.shape[0], a.values().shape[1], b.dtype)
    return _addmm(a, b)


@lru_cache(maxsize=16)
def _tune(size: int, block: int, dtype: torch.dtype) -> None:
    """Run PyTorch's search; at sparsity 0.5 its result serves every sparsity without an entry of its own."""
    meta: Any = import_module("torch.sparse._triton_ops_meta")
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):  # the search sets the seed
        meta.optimize_bsr_dense_addmm(size, size, size, block, block, beta=0, alpha=1, dtype=dtype, sparsity=0.5)


def _swept(setup: Setup, a: Tensor, b: Tensor) -> Callable[[], Any]:
    call = _addmm(a, b)
    best: tuple[float, dict[str, int]] | None = None
    for width, stages, warps in KNOBS:
        if b.shape[1] % width:
            continue
        meta = {"SPLIT_N": b.shape[1] // width, "GROUP_SIZE_ROW": 4, "num_stages": stages, "num_warps": warps}
        try:
            (times,) = together([lambda meta=meta: call(meta=dict(meta))], setup.device, "gpu", 0.01)
        except Exception:  # skip settings that do not fit the device
            continue
        if best is None or times.median < best[0]:
            best = (times.median, meta)
    if best is None:
        raise RuntimeError(f"none of {len(KNOBS)} settings runs for {DTYPES[b.dtype]}")
    chosen = best[1]
    return lambda: call(meta=dict(chosen))


# Unstructured: matrices by a dense one of 128 columns

CSR_FORMATS = {"GroupCOO": "m:C k:G", "COO": "(m k):C", "CSR": "m:U k:C", "buckets": "m:C k:G*"}
CHUNK = 1 << 20  # non-zeros per step of the float64 reference
GOALS = {"fp32": 1.2, "fp16": 2.0}
"""Least geometric means over the graphs of TC-GNN of cuSPARSE's time over ours."""


def unstructured(setup: Setup) -> Iterator[Row]:
    """Every matrix in all our formats, in fp32 and, on a GPU, in fp16; those of TC-GNN beside the papers' figures."""
    columns = 16 if setup.quick else 128
    done: list[Row] = []
    for matrix in _matrices(setup):
        setup.say(str(matrix))
        for dtype in dict.fromkeys((torch.float32, setup.half)):
            rows = list(_matrix(setup, matrix, columns, dtype))
            done += rows
            yield from kept(rows, set(CSR_FORMATS) - {"GroupCOO"})
    summarize(setup, done, {"cuSPARSE": ("torch.sparse.mm", "cuSPARSE")})
    _say_goals(setup, done)


def _say_goals(setup: Setup, done: Sequence[Row]) -> None:
    """Report the goals over the graphs of TC-GNN by dtype and clock, beside what Insum published of them."""
    told = figure("Insum", "figure 11").values
    for dtype, least in GOALS.items():
        recorded = ", ".join(f"{name} {found[dtype]}" for name, found in told.items() if dtype in found)
        for clock in dict.fromkeys(row.clock for row in done):
            rows = [
                r for r in done if (r.dtype, r.clock, r.peer_source, r.metric) == (dtype, clock, "same run", "time")
            ]
            chosen = [r for r in rows if r.case.split("/")[1] in matrices.TC_GNN]
            goals_told(setup, f"{dtype} {clock} (published: {recorded})", ratios_of(chosen) if chosen else {}, least)


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
    found = list(matrices.real(folder))
    if not found:
        setup.say(f"no matrix in {folder}: stand-ins only")
    yield from (m for m in found if setup.wants(f"unstructured/{m.name}/"))


def _matrix(setup: Setup, matrix: Matrix, columns: int, dtype: torch.dtype) -> Iterator[Row]:
    csr = csr_of(setup, matrix, dtype)
    b = setup.filled(matrix.shape[1], columns, dtype=dtype, seed=6)
    truth = product(matrix, csr.values(), b)
    formats = {name: sparse(csr, text) for name, text in CSR_FORMATS.items()}
    for name, made in formats.items():
        setup.say(f"  {name}: {made}")
    ours = [line(name, TEXT, A=made, B=b) for name, made in formats.items()]
    peers = [Way("torch.sparse.mm", lambda: lambda: torch.sparse.mm(csr, b), slack=4), *_cached(setup, csr, b)]
    case = Case(f"unstructured/{matrix.name}/N{columns}", dtype, truth, {"L2 bound": 1e3 * _least_of_rows(matrix, b)})
    yield from measured(setup, case, ours, peers)


def csr_of(setup: Setup, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix as a torch CSR tensor with normal random values and int32 coordinates."""
    pointers, cols = (torch.from_numpy(x).int().to(setup.device) for x in (matrix.pointers, matrix.cols))
    with quietly():
        return torch.sparse_csr_tensor(pointers, cols, setup.filled(matrix.nnz, dtype=dtype, seed=5), matrix.shape)


def product(matrix: Matrix, values: Tensor, b: Tensor) -> Tensor:
    """The product in float64, CHUNK non-zeros at a time."""
    rows, cols = (torch.from_numpy(x).to(b.device) for x in (matrix.rows, matrix.cols))
    out = torch.zeros(matrix.shape[0], b.shape[1], dtype=torch.float64, device=b.device)
    for first in range(0, matrix.nnz, CHUNK):
        part = slice(first, first + CHUNK)
        out.index_add_(0, rows[part], values[part, None].double() * b[cols[part]].double())
    return out


def _cached(setup: Setup, csr: Tensor, b: Tensor) -> list[Way]:
    """cuSPARSE without torch's host overhead: descriptors, buffer and preprocessing are made once."""
    if setup.device.type != "cuda":
        return []
    given = (csr.crow_indices(), csr.col_indices(), csr.values())
    shape = (int(csr.shape[0]), int(csr.shape[1]))
    return [
        Way(f"cuSPARSE cached {name}", lambda name=name: cusparse.spmm(given, shape, b, name), slack=4)
        for name in cusparse.ALGORITHMS
    ]


def _least_of_rows(matrix: Matrix, b: Tensor) -> float:
    """Lower bound in seconds if each non-zero reads a row of b through the L2; only reuse across rows could beat it."""
    size, columns = b.element_size(), b.shape[1]
    entries = matrix.nnz * (4 + size)
    compulsory = entries + size * columns * (matrix.shape[0] + len(np.unique(matrix.cols)))
    return seconds_to_move(cache=matrix.nnz * columns * size + entries, memory=compulsory)
