"""cuSPARSE's SpMM, called by ctypes in the library that torch has loaded; descriptors and buffers are made once."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

ALGORITHMS = {"alg1": 4, "alg2": 6, "alg3": 12}
"""CUSPARSE_SPMM_CSR_ALG1, 2, 3."""
_KINDS = {torch.float32: 0, torch.float16: 2}  # CUDA_R_32F, CUDA_R_16F
_INT32, _FROM_ZERO, _ROW_MAJOR, _AS_IT_IS = 2, 0, 2, 0
_FUNCTIONS = (
    "cusparseCreate",
    "cusparseSetStream",
    "cusparseCreateCsr",
    "cusparseCreateDnMat",
    "cusparseSpMM_bufferSize",
    "cusparseSpMM_preprocess",
    "cusparseSpMM",
)


def spmm(csr: Sequence[Tensor], shape: tuple[int, int], b: Tensor, algorithm: str) -> Callable[[], Tensor]:
    """A call that multiplies csr (int32 row pointers, int32 columns, values) of this shape by b, row-major.

    It runs on the stream current at this point. Raises RuntimeError if the library is missing or returns an error.
    """
    library, handle = _handle()
    pointers, columns, values = csr
    out = torch.empty(shape[0], b.shape[1], dtype=b.dtype, device=b.device)
    kind = c_int(_KINDS[values.dtype])
    sparse, *dense = c_void_p(), c_void_p(), c_void_p()
    _ok(
        library.cusparseCreateCsr(
            byref(sparse), c_int64(shape[0]), c_int64(shape[1]), c_int64(values.numel()),
            _at(pointers), _at(columns), _at(values), c_int(_INT32), c_int(_INT32), c_int(_FROM_ZERO), kind,
        )
    )  # fmt: skip
    for descriptor, matrix in zip(dense, (b, out), strict=True):
        rows, width = matrix.shape
        _ok(
            library.cusparseCreateDnMat(
                byref(descriptor), c_int64(rows), c_int64(width), c_int64(width), _at(matrix), kind, c_int(_ROW_MAJOR)
            )
        )
    one, zero, size = c_float(1.0), c_float(0.0), c_size_t(0)
    # Both dtypes accumulate in float32.
    call = (
        handle, c_int(_AS_IT_IS), c_int(_AS_IT_IS), byref(one), sparse, dense[0], byref(zero), dense[1],
        c_int(_KINDS[torch.float32]), c_int(ALGORITHMS[algorithm]),
    )  # fmt: skip
    _ok(library.cusparseSetStream(handle, c_void_p(torch.cuda.current_stream().cuda_stream)))
    _ok(library.cusparseSpMM_bufferSize(*call, byref(size)))
    buffer = torch.empty(max(int(size.value), 16), dtype=torch.uint8, device=b.device)
    _ok(library.cusparseSpMM_preprocess(*call, _at(buffer)))
    kept = (pointers, columns, values, b, one, zero, sparse, dense)

    def run(kept: object = kept) -> Tensor:
        _ok(library.cusparseSpMM(*call, _at(buffer)))
        return out

    return run


def _at(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def _ok(status: int) -> None:
    if status:
        raise RuntimeError(f"cuSPARSE answers status {status}")


@lru_cache(maxsize=1)
def _handle() -> tuple[ctypes.CDLL, c_void_p]:
    library = _library()
    for name in _FUNCTIONS:
        getattr(library, name).restype = c_int
    handle = c_void_p()
    _ok(library.cusparseCreate(byref(handle)))
    return library, handle


def _library() -> ctypes.CDLL:
    names = ["libcusparse.so.12", "libcusparse.so.13", "libcusparse.so"]
    for folder in sys.path:
        names += map(str, Path(folder or ".").glob("nvidia/*/lib/libcusparse.so*"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("libcusparse is not found")
