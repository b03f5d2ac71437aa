"""How many calls of functions of src/pumice each journey makes, and how often it enters a folder of the package until
its first kernel is launched, as JSON: `python -m journeys.calls`.

A journey is one call by a user. Convolutions run on the emulated device (tests/emulated.py), so that the whole way to
the launch of a kernel is walked; language/nodes.py is left out. Generators count each time that they go on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from unittest.mock import patch

import torch
from emulated import emulated

import pumice as pm
from pumice import nn
from pumice.coords import Relation, kernel_map
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import kernel
from pumice.runtime.launch import CompiledKernel
from pumice.testing import random_cloud

prepare = import_module("pumice.ops.prepare")
PACKAGE = str(Path(pm.__file__).parent) + os.sep
LEFT_OUT = os.path.join(PACKAGE, "language", "nodes.py")
MATMUL = "C[i,n] = A[i,k] * B[k,n]"
SEEN = 4
"""Calls after which a journey is one that was seen before."""


def walked(function: Callable[[], object]) -> list[CodeType]:
    """The functions of the package that are called, in order."""
    found: list[CodeType] = []

    def turn(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and path != LEFT_OUT:
            found.append(frame.f_code)

    before = sys.getprofile()
    # Finalisers of what earlier journeys left do not count.
    gc.collect()
    gc.disable()
    sys.setprofile(turn)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def calls_of(function: Callable[[], object]) -> int:
    return len(walked(function))


def rooms_of(function: Callable[[], object]) -> int:
    """How often a folder of the package is entered until the first kernel is launched."""
    codes = walked(function)
    last = codes.index(CompiledKernel.__call__.__code__)
    folders = [code.co_filename.removeprefix(PACKAGE).split(os.sep)[0] for code in codes[: last + 1]]
    return len([*groupby(folders)])


def seen(function: Callable[[], object]) -> int:
    for _ in range(SEEN):
        function()
    return calls_of(function)


def scene(rows: int, seed: int = 1) -> pm.SparseTensor:
    coords = random_cloud(rows, 3, extent=(24, 24, 12), seed=seed)
    return pm.SparseTensor(torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), coords)


def network() -> nn.Sequential:
    units = [nn.Conv3d(8, 16, 3, bias=False), nn.BatchNorm(16), nn.ReLU()]
    return nn.Sequential(*units, nn.Conv3d(16, 16, 3, bias=False), nn.BatchNorm(16), nn.ReLU())


def step(module: torch.nn.Module, x: pm.SparseTensor) -> None:
    module.zero_grad()
    module(x).feats.sum().backward()


def mapped(x: pm.SparseTensor) -> pm.SparseTensor:
    """With the kernel map of a window of 3, which is not laid out yet."""
    kernel_map(x.geometry, Relation.of(3, 3))
    return x


def moved(x: pm.SparseTensor, cells: int) -> pm.SparseTensor:
    """The scene elsewhere: another map, as large."""
    shift = torch.tensor([0, cells, cells, cells], dtype=torch.int32)
    return mapped(pm.SparseTensor(x.feats, x.coords + shift))


def of_a_layer(x: pm.SparseTensor) -> dict[str, int]:
    """Of a convolution without gradients: over another map of x's sizes, and of others."""
    layer, same, laid_out, other = nn.Conv3d(8, 16, 3, bias=False), moved(x, 2), moved(x, 4), mapped(scene(350, 2))
    again = moved(x, 6)
    found = {"layer, first call": calls_of(lambda: layer(x)), "layer, seen": seen(lambda: layer(x))}
    found["layer, seen: rooms entered"] = rooms_of(lambda: layer(x))
    layer(moved(x, 1))
    found["layer, another map, with its layout"] = calls_of(lambda: layer(same))
    with torch.enable_grad():
        layer(laid_out)
    found["layer, another map, laid out"] = calls_of(lambda: layer(laid_out))
    found["layer, a map of other sizes, with its layout"] = calls_of(lambda: layer(other))
    with torch.enable_grad():
        layer(again)
    found["layer, another map, laid out: rooms entered"] = rooms_of(lambda: layer(again))
    return found


def of_a_new_scene() -> dict[str, int]:
    """Of a compiled network on a scene that was never seen; its maps are found together, in plain torch."""
    program = pm.compile(pm.models.MinkUNet(8, 5, width=0.125).eval())
    with patch.object(prepare, "has_triton", lambda tensor: True):
        for seed in range(SEEN):
            program(scene(400 + seed, seed))
        x = scene(390, SEEN)
        return {"program of a U-Net, a scene never seen": calls_of(lambda: program(x))}


def on_the_device() -> dict[str, int]:
    x = scene(400)
    with torch.no_grad():
        found = of_a_layer(x) | of_a_new_scene()
        net = network().eval()
        program = pm.compile(net)
        found["Sequential, evaluation, seen"] = seen(lambda: net(x))
        found["program, evaluation, seen"] = seen(lambda: program(x))
    net = network()
    program = pm.compile(net)
    found["program, first training step"] = calls_of(lambda: step(program, x))
    found["program, training step, seen"] = seen(lambda: step(program, x))
    found["Sequential, training step, seen"] = seen(lambda: step(net, x))
    layer = nn.Conv3d(8, 16, 3, bias=False)
    found["layer, training step, seen"] = seen(lambda: step(layer, x))
    found["layer, training step, seen: rooms entered"] = rooms_of(lambda: step(layer, x))
    a, b = torch.randn(40, 33), torch.randn(33, 20)
    statement = pm.compile_einsum(MATMUL, lowering="triton")
    found["einsum, repeated"] = seen(lambda: statement(A=a, B=b))
    found["einsum text to Triton source"] = calls_of(lambda: source_of(MATMUL, {"A": a, "B": b}))
    return found


def source_of(text: str, operands: dict[str, torch.Tensor]) -> str:
    return kernel.source_of(bind(parse(text), {name: tuple(x.shape) for name, x in operands.items()}), operands)


def on_a_cpu() -> dict[str, int]:
    a, b, x = torch.randn(40, 33), torch.randn(33, 20), scene(400)
    found = {"kernel map of a cloud (CPU)": calls_of(lambda: kernel_map(x.geometry, Relation.of(3, 3)))}
    found["einsum, seen (CPU)"] = seen(lambda: pm.einsum(MATMUL, A=a, B=b))
    return found


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, emulated(Path(folder)):
        found = on_the_device()
    print(json.dumps(found | on_a_cpu(), indent=1))


if __name__ == "__main__":
    main()
