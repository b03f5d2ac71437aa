"""The kernels that each journey launches, as JSON: `python -m journeys.launches`, with TRITON_INTERPRET=1.

Layers run on the emulated device (tests/emulated.py), einsums and all kernels of coordinates in Triton's interpreter.
Of each launch: the kernel, its programs, and its integers and constants; no addresses. A kernel that the library
generated is told by its statement, and by a digest of its source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from emulated import emulated
from torch.nn.functional import cross_entropy
from triton.runtime.interpreter import GridExecutor

import pumice as pm
from pumice import nn
from pumice.coords import MapSchedule, Relation, kernel_map, tiles
from pumice.coords.tiles import stable_argsort_torch
from pumice.lower.emit import Source
from pumice.runtime.launch import tensor_of
from pumice.testing import random_cloud

Journey = Callable[[], object]
linear = import_module("pumice.ops.linear")
CALLS = 3
"""Calls of a journey: the launches of the first and of the last are kept."""


class Log:
    """The launches of a call in their order. kernels: what is known of each that was generated, by a name that it has
    within one journey."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Another journey."""
        self.lines: list[str] = []
        self.kernels: dict[str, str] = {}
        self._known: dict[Source, str] = {}

    def append(self, launch: tuple[object, int, dict[str, object]]) -> None:
        """As emulated.Gpu.launches."""
        of, programs, arguments = launch
        name = self._named(of) if isinstance(of, Source) else str(of)
        told = " ".join(_told(key, value) for key, value in arguments.items())
        self.lines.append(f"{name} [{programs}] {told}".rstrip())

    def clear(self) -> None:
        self.lines = []

    def _named(self, source: Source) -> str:
        known = self._known.get(source)
        if known is None:
            known = self._known[source] = f"k{len(self._known)}"
            # The documentation of the file and of the kernel is no part of what it does.
            _, _, head, doc, body = source.text.split('"""')
            digest = hashlib.sha256((head + body).encode()).hexdigest()[:16]
            self.kernels[known] = f"{doc.strip().splitlines()[0]} | {digest}"
        return known


def _told(key: str, value: object) -> str:
    return f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"


@contextmanager
def interpreted(log: Log) -> Iterator[None]:
    """Within it the log hears of each kernel that Triton's interpreter runs. The interpreter takes two seconds for a
    sort of rows: its kernels are heard of, and torch sorts."""
    run, ranked = GridExecutor.__call__, tiles.stable_argsort
    sorts = False

    def heard(self, *values, **options):
        arguments = dict(zip(self.arg_names, values, strict=False)) | options
        numbers = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
        log.append((self.fn.__name__, self.grid[0], numbers))
        return None if sorts else run(self, *values, **options)

    def by_torch(keys, *given):
        nonlocal sorts
        sorts = True
        try:
            ranked(keys, *given)
        finally:
            sorts = False
        # Of some, so many as a tensor says are keys.
        order = stable_argsort_torch(tensor_of(keys) if len(given) < 3 else tensor_of(keys)[: int(tensor_of(given[2]))])
        if len(given) > 3:
            tensor_of(given[3][-1])[: len(order)] = order
        return order

    with patch.object(GridExecutor, "__call__", heard), patch.object(tiles, "stable_argsort", by_torch):
        yield


# Journeys

MATMUL = "C[m,n] = A[m,k] * B[k,n]"
FORMS = ("COO", "CSR", "GroupCOO")
STRUCTURES = ("hash", "grid", "bitmap")


def cloud(channels: int = 8, rows: int = 120, dtype: torch.dtype = torch.float32, dim: int = 3) -> pm.SparseTensor:
    coords = random_cloud(rows, dim, extent=(16, 16, 8, 4)[:dim], seed=1)
    feats = torch.randn(rows, channels, generator=torch.Generator().manual_seed(rows))
    return pm.SparseTensor(feats.to(dtype), coords, dim=dim)


def evaluated(module: torch.nn.Module, *given: object) -> Journey:
    module.eval()

    def journey() -> None:
        with torch.no_grad():
            module(*given)

    return journey


def trained(module: torch.nn.Module, x: pm.SparseTensor, dtype: torch.dtype | None = None) -> Journey:
    """A forward and a backward pass, without an optimizer."""
    module.train()

    def journey() -> None:
        module.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = module(x)
        y.feats.float().square().sum().backward()

    return journey


def leaf(x: pm.SparseTensor) -> pm.SparseTensor:
    x.feats.requires_grad_()
    return x


def unit(before: int, after: int, size: int = 3, **options: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(before, after, size, bias=False, **options), nn.BatchNorm(after), nn.ReLU())


def network() -> nn.Sequential:
    return nn.Sequential(unit(8, 16), unit(16, 16, 2, stride=2), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 24))


def inverse() -> Journey:
    x, down, up = cloud(), nn.Conv3d(8, 16, 2, stride=2), nn.InverseConv3d(16, 8, 2, stride=2)

    def journey() -> None:
        with torch.no_grad():
            up(down(x), x)

    return journey


def with_loss() -> Journey:
    net, x = torch.nn.ModuleList([pm.compile(network()), nn.Linear(24, 5)]), cloud()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def journey() -> None:
        optimizer.zero_grad()
        y = net[1](net[0](x))
        cross_entropy(y.feats, torch.arange(y.feats.shape[0]) % 5).backward()
        optimizer.step()

    return journey


def minkunet() -> pm.models.MinkUNet:
    return pm.models.MinkUNet(4, 5, width=0.125)


def captured() -> Journey:
    x = cloud()
    net = pm.capture(network().eval(), x)
    return lambda: net(x)


def einsum(text: str, wants: bool = False, **operands: object) -> Journey:
    def journey() -> None:
        values = {name: x.detach().requires_grad_() if wants and is_value(x) else x for name, x in operands.items()}
        y = pm.einsum(text, lowering="triton", **values)
        if wants:
            y.square().sum().backward()

    return journey


def is_value(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def spmm(form: str) -> Journey:
    generator = torch.Generator().manual_seed(7)
    dense = torch.randn(32, 48, generator=generator) * (torch.rand(32, 48, generator=generator) < 0.2)
    return einsum(MATMUL, A=pm.sparse(dense, form), B=torch.randn(48, 20, generator=generator))


def maps(structure: str) -> Journey:
    def journey() -> None:
        found, coarse = kernel_map(cloud().geometry, Relation.of(3, 3), schedule=MapSchedule(structure))
        kernel_map(coarse, Relation.of(3, 2, stride=2), schedule=MapSchedule(structure))

    return journey


def on_the_device() -> dict[str, Callable[[], Journey]]:
    half, x = torch.float16, cloud
    return {
        "convolution 3x3x3": lambda: evaluated(nn.Conv3d(8, 16, 3), x()),
        "convolution 1x1x1": lambda: evaluated(nn.Conv3d(8, 16, 1), x()),
        "convolution in half precision": lambda: evaluated(nn.Conv3d(16, 32, 3).to(half), x(16, dtype=half)),
        "convolution of stride 2": lambda: evaluated(nn.Conv3d(8, 16, 2, stride=2), x()),
        "convolution of stride 2, support": lambda: evaluated(nn.Conv3d(8, 16, 3, stride=2, padding=1), x()),
        "convolution in groups": lambda: evaluated(nn.Conv3d(8, 16, 3, groups=2), x()),
        "depthwise convolution": lambda: evaluated(nn.Conv3d(8, 8, 3, groups=8), x()),
        "convolution in 2D": lambda: evaluated(nn.Conv2d(8, 16, 3, dilation=2), x(dim=2, rows=90)),
        "transposed convolution": lambda: evaluated(nn.ConvTranspose3d(8, 16, 2, stride=2), x()),
        "inverse convolution": inverse,
        "convolution, training step": lambda: trained(nn.Conv3d(8, 16, 3), x()),
        "convolution, training step, autocast": lambda: trained(nn.Conv3d(8, 16, 3), x(), half),
        "linear, training step": lambda: trained(nn.Linear(8, 19).to(half), leaf(x(dtype=half))),
        "batch norm, training step": lambda: trained(nn.BatchNorm(8), x()),
        "max pool, training step": lambda: trained(nn.Sequential(nn.Linear(8, 8), nn.MaxPool3d(2, stride=2)), x()),
        "average pool": lambda: evaluated(nn.AvgPool3d(2, stride=2), x()),
        "program, evaluation": lambda: evaluated(pm.compile(network()), x()),
        "program, training step with optimizer": with_loss,
        "program of MinkUNet, evaluation": lambda: evaluated(pm.compile(minkunet()), x(4)),
        "program of MinkUNet, training step": lambda: trained(pm.compile(minkunet()), x(4)),
    }


def in_the_interpreter() -> dict[str, Callable[[], Journey]]:
    rows, values = torch.tensor([0, 0, 2, 5, 5, 5]), torch.randn(6, 20)
    found: dict[str, Callable[[], Journey]] = {f"einsum, {form}": partial(spmm, form) for form in FORMS}
    found["einsum, dense, gradients"] = lambda: einsum(MATMUL, True, A=torch.randn(40, 48), B=torch.randn(48, 20))
    found["einsum, sorted rows, gradients"] = lambda: einsum(
        "T[R[e],n] = V[e,n] ; R:sorted, T:[6,20]", True, R=rows, V=values
    )
    found |= {f"kernel maps, {structure}": partial(maps, structure) for structure in STRUCTURES}
    found["captured Sequential"] = captured
    return found


def walked(journeys: dict[str, Callable[[], Journey]], log: Log) -> dict[str, dict[str, Any]]:
    """Of each journey its generated kernels, the launches of its first call, and those of a later one where they are
    others."""
    found: dict[str, dict[str, Any]] = {}
    for name, prepared in journeys.items():
        torch.manual_seed(5)
        log.begin()
        journey, each = prepared(), []
        for _ in range(CALLS):
            log.clear()
            journey()
            each.append(log.lines)
        found[name] = {"kernels": log.kernels, "first": each[0]}
        found[name] |= {"again": each[-1]} if each[-1] != each[0] else {}
    return found


def main() -> None:
    torch.set_num_threads(1)
    log = Log()
    with interpreted(log):
        with TemporaryDirectory() as folder, emulated(Path(folder)) as gpu:
            gpu.launches = log
            found = walked(on_the_device(), log)
        found |= walked(in_the_interpreter(), log)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
