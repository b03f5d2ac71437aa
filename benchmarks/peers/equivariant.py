"""e3nn and cuEquivariance as peers of a tensor product, in their layouts, modes and methods."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.harness.study import Setup, Way
from pumice.nn import Instruction
from pumice.ops import Irreps

if TYPE_CHECKING:
    from benchmarks.suites.messages import Messages
    from benchmarks.suites.tensor_product import Product

PARITIES = ("0e", "1o", "2e", "3o")
MODES = ("eager", "script")
COMPILED_UP_TO = 3  # highest degree of the benchmark of e3nn under torch.compile, which takes long


def irreps(channels: int, highest: int) -> str:
    """Irreps of degrees up to `highest`, in the notation of both libraries."""
    return "+".join(f"{channels}x{PARITIES[degree]}" for degree in range(highest + 1))


def channels_first(x: Tensor) -> Tensor:
    """[b, component, channel] as the flat layout "mul_ir": by degree, then channel, then order."""
    parts, first = [], 0
    while first < x.shape[1]:
        orders = 2 * len(parts) + 1
        parts.append(x[:, first : first + orders].transpose(1, 2).flatten(1))
        first += orders
    return torch.cat(parts, 1)


def channels_last(x: Tensor, channels: int) -> Tensor:
    """Inverse of channels_first."""
    parts, first = [], 0
    while first < x.shape[1]:
        orders = 2 * len(parts) + 1
        width = channels * orders
        parts.append(x[:, first : first + width].unflatten(1, (channels, orders)).transpose(1, 2))
        first += width
    return torch.cat(parts, 1)


def e3nn_ways(setup: Setup, given: Product, backward: bool) -> Iterator[Way]:
    """e3nn as peers: eager, scripted, and under torch.compile."""
    for mode in MODES:
        yield _way(f"e3nn {mode}", "e3nn", partial(_e3nn, setup, given, mode), given, backward, "mul_ir")
    if not setup.quick and not backward and given.highest <= COMPILED_UP_TO:

        def compiled() -> Callable[..., Tensor]:
            return torch.compile(_e3nn(setup, given, "eager"), fullgraph=True, dynamic=False)

        yield _way("e3nn compiled", "e3nn", compiled, given, backward, "mul_ir")


def _e3nn(setup: Setup, given: Product, mode: str) -> Callable[..., Tensor]:
    e3nn: Any = import_module("e3nn")
    o3: Any = import_module("e3nn.o3")
    both, one = irreps(given.channels, given.highest), irreps(1, given.highest)
    before = e3nn.get_optimization_defaults()["jit_mode"]
    e3nn.set_optimization_defaults(jit_mode=mode)
    try:
        made = o3.FullyConnectedTensorProduct(both, one, both, shared_weights=given.shared, internal_weights=False)
        return made.to(setup.device)
    finally:
        e3nn.set_optimization_defaults(jit_mode=before)


def cue_ways(setup: Setup, given: Product, backward: bool) -> Iterator[Way]:
    """cuEquivariance as peers: the fused and the naive method, in both layouts."""
    for method in ("fused_tp", "naive"):
        if method == "fused_tp" and setup.device.type != "cuda":
            continue
        for layout in ("ir_mul", "mul_ir"):
            name = f"cuEquivariance {method} {layout}"
            make = partial(_cue, setup, given, method, layout)
            yield _way(name, "cuequivariance-torch", make, given, backward, layout)


def _cue(setup: Setup, given: Product, method: str, layout: str) -> Callable[..., Tensor]:
    if setup.device.type == "cuda":
        _load_nvrtc()
    cue: Any = import_module("cuequivariance")
    cuet: Any = import_module("cuequivariance_torch")
    # The group with e3nn's coefficients.
    group = import_module("cuequivariance.group_theory.experimental.e3nn").O3_e3nn
    both, one = (cue.Irreps(group, irreps(c, given.highest)) for c in (given.channels, 1))
    how = {"layout": getattr(cue, layout), "method": method, "device": setup.device, "dtype": torch.float32}
    weights = {"shared_weights": given.shared, "internal_weights": False}
    made = cuet.FullyConnectedTensorProduct(both, one, both, **how, **weights)
    return lambda x, y, w: made(x, y, w[None] if w.ndim == 1 else w)


def segmented_ways(
    setup: Setup, given: Messages, derived: Callable[[Callable[..., Tensor]], Callable[[], Any]]
) -> Iterator[Way]:
    """cuEquivariance along edges: its fused kernel, which gathers and scatters, or its plain form."""
    method = "uniform_1d" if setup.device.type == "cuda" else "naive"
    yield Way(
        f"cuEquivariance {method}", lambda: derived(_segmented(setup, given, method)), "cuequivariance-torch", slack=2
    )


def _segmented(setup: Setup, given: Messages, method: str) -> Callable[..., Tensor]:
    if setup.device.type == "cuda":
        _load_nvrtc()
    cue: Any = import_module("cuequivariance")
    cuet: Any = import_module("cuequivariance_torch")
    group = import_module("cuequivariance.group_theory.experimental.e3nn").O3_e3nn
    x, y, z = given.irreps
    kept = "+".join(dict.fromkeys(str(each).partition("x")[2] for each in z))
    product = cue.descriptors.channelwise_tensor_product(*(cue.Irreps(group, str(i)) for i in (x, y, kept)))
    made = cuet.SegmentedPolynomial(product.flatten_coefficient_modes().squeeze_modes().polynomial, method=method)
    made = made.to(setup.device)
    like = torch.empty(len(given.operands[0]), 1, device=setup.device)
    edges = {"input_indices": {1: given.edges[0]}, "output_indices": {0: given.edges[1]}, "output_shapes": {0: like}}
    return lambda x, y, w: made([w, x, y], **edges)[0]


def e3nn_product(setup: Setup, irreps: tuple[Irreps, Irreps, Irreps], paths: list[Instruction]) -> Any:
    """e3nn's product of these paths, with weights of each sample."""
    o3: Any = import_module("e3nn.o3")
    given = [tuple(path) for path in paths]
    return o3.TensorProduct(*map(str, irreps), given, shared_weights=False, internal_weights=False).to(setup.device)


def components_last(x: Tensor, irreps: Irreps) -> Tensor:
    """Layout "ir_mul" as "mul_ir"."""
    every = zip(irreps.slices(), irreps, strict=True)
    return torch.cat([x[:, place].unflatten(1, (i.size, i.mul)).mT.flatten(1) for place, i in every], 1)


def components_first(x: Tensor, irreps: Irreps) -> Tensor:
    """Inverse of components_last."""
    every = zip(irreps.slices(), irreps, strict=True)
    return torch.cat([x[:, place].unflatten(1, (i.mul, i.size)).mT.flatten(1) for place, i in every], 1)


def _load_nvrtc() -> None:
    """Load nvrtc, which compiles cuEquivariance's kernels: it comes with torch, off the library search path."""
    for folder in sys.path:
        for library in Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.1[23]"):
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue


def _way(
    name: str, package: str, make: Callable[[], Callable[..., Tensor]], given: Product, backward: bool, layout: str
) -> Way:
    """A peer with flat operands; its results are converted to our layout for the check only."""
    first = channels_first if layout == "mul_ir" else (lambda x: x.flatten(1))

    def back(x: Tensor) -> Tensor:
        return channels_last(x, given.channels) if layout == "mul_ir" else x.unflatten(1, (-1, given.channels))

    def made() -> Callable[[], Any]:
        from benchmarks.suites.tensor_product import with_gradients

        run = make()
        flat = (first(given.x), given.y, given.w.flatten(0 if given.shared else 1))
        return with_gradients(run, flat, first(given.cotangent), backward)

    def view(found: Any) -> Any:
        if not backward:
            return back(found)
        return [back(found[0]), found[1], found[2].view_as(given.w)]

    return Way(name, made, package, view)
