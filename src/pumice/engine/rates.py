"""Rates of the device at hand, for the cost model of schedule.predict, by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.lower import native_products
from pumice.schedule.predict import DEVICES, Device

_SIDE, _NARROW, _WIDE, _REPEATS = 20, 16, 64, 9
_KERNEL = 2e-6  # seconds of a small kernel on a GPU, without the host


def rates_of(device: torch.device) -> Device:
    """The rates of a device, of a CPU for torch's number of threads.

    Measured at the first call, in some 0.1 s, and kept for the process: a device does not change, and each estimate
    would otherwise wait for it."""
    return _on_gpu(device) if device.type == "cuda" else _on_cpu(torch.get_num_threads())


@lru_cache(maxsize=8)
def _on_cpu(threads: int) -> Device:  # noqa: ARG001 (the key)
    usual = DEVICES["cpu"]
    a, b = torch.ones(2, 1 << 21)
    x, w = torch.ones(4096, 96), torch.ones(96, 96)
    memory = 3 * a.nbytes / _least(lambda: a + b)
    matrix = 2 * x.numel() * 96 / _least(lambda: x @ w)
    rates = replace(usual, name="this CPU", memory=memory, matrix=matrix)
    run = native_products.kernels(torch.float32)
    return rates if run is None else _with_products(rates, run)


def _with_products(rates: Device, run: native_products.Kernels) -> Device:
    """Rates of products of gathered rows, from two widths: the seconds of a pair are bytes / (cache / 2) + flops / (2.5
    plain), as in predict.pairs_on_cpu."""
    found = _window()
    lists, _ = native_products.lists_of_rows(run, found.rows())
    pairs = len(lists.gather)

    def spent(width: int) -> float:
        x, w = torch.ones(found.num_inputs, 1, width), torch.ones(1, width, found.volume, width)
        packed = native_products.packed(run, w)
        return _least(lambda: native_products.products(run, x, packed, width, lists, found.num_outputs)) / pairs

    narrow, wide, ratio = spent(_NARROW), spent(_WIDE), _WIDE / _NARROW
    # Bytes grow with the width, flops with its square.
    product = max(wide - ratio * narrow, 0.3 * wide) / (1 - 1 / ratio)
    moved = max(narrow - product / ratio**2, 0.1 * narrow)
    return replace(rates, plain=2 * _WIDE**2 / product / 2.5, cache=2 * 8 * _NARROW / moved)


def _window() -> KernelMap:
    """A window of 3 x 3 x 3 over a cube, a quarter of it full: about as many neighbours as in scans."""
    axis = torch.arange(_SIDE, dtype=torch.int32)
    coords = torch.cartesian_prod(torch.zeros(1, dtype=torch.int32), axis, axis, axis)
    kept = torch.rand(len(coords), generator=torch.Generator().manual_seed(0)) < 0.25
    return kernel_map(Geometry.checked(coords[kept], batch_size=1), Relation.of(3, 3))[0]


def _least(call: Callable[[], object]) -> float:
    """The least seconds of a few calls."""
    spent, now = [], clock()
    for _ in range(_REPEATS):
        begin = now()
        call()
        spent.append(now() - begin)
    return min(spent)


def clock() -> Callable[[], float]:
    """A clock in seconds: of one thread its own time, which other programs do not add to."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


@lru_cache(maxsize=8)
def _on_gpu(device: torch.device) -> Device:
    """Copies give the rate of memory, a dense product that of the tensor cores, with which that of the cache rises."""
    usual, size = DEVICES["cuda"], 4096
    x, values = torch.ones(size, size, dtype=torch.float16, device=device), torch.empty(1 << 26, device=device)
    memory = 2 * values.nbytes / _least_on_gpu(values.clone, device)
    matrix = 2 * size**3 / _least_on_gpu(lambda: x @ x, device)
    name = torch.cuda.get_device_name(device)
    return replace(usual, name=name, memory=memory, matrix=matrix, launch=_KERNEL)


def _least_on_gpu(call: Callable[[], object], device: torch.device) -> float:
    spent = []
    with torch.cuda.device(device):
        for _ in range(_REPEATS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            spent.append(1e-3 * first.elapsed_time(last))
    return min(spent)
