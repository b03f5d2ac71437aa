"""Modes of torch and Python within a block."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms are asked for."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def uncollected() -> Iterator[None]:
    """Memory goes when the last reference goes, not when the garbage collector comes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
