"""`pumice warmup`: the kernels of a network, compiled before its first scene."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from pumice.cli.checkpoint import load
from pumice.data import street_scene
from pumice.engine import compile as compiled
from pumice.errors import OptionError
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.ops import SparseTensor
from pumice.runtime.compile import BACKGROUND

MODELS: Mapping[str, Callable[[], nn.Module]] = {"minkunet": MinkUNet, "centerpoint": CenterPointBackbone}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VOXELS = (0.6, 0.3, 0.15, 0.08)
"""Edges, in metres, with which a street has some 3,000 to 60,000 voxels."""
_REPORT = 0.2  # Seconds between reports


def network(name: str) -> nn.Module:
    """The network of a checkpoint of `pumice segment`, one of MODELS, or what MODULE:FUNCTION returns when called.

    Raises OptionError for another name, and for a function that does not return a torch.nn.Module.
    """
    if name in MODELS:
        return MODELS[name]()
    if Path(name).is_file():
        return load(Path(name), torch.device("cpu"))[0]
    module, _, function = name.partition(":")
    if not function:
        raise OptionError(f"{name!r} is no file, and no model; there are {', '.join(MODELS)}, and MODULE:FUNCTION")
    try:
        net = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{name!r} cannot be imported: {error}") from None
    if not isinstance(net, nn.Module):
        raise OptionError(f"{name!r} should return a torch.nn.Module, found {type(net).__name__}")
    return net


def channels_of(net: nn.Module) -> int:
    """Input channels of the first layer with a weight. Raises OptionError if there is none."""
    for module in net.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim > 1:
            return weight.shape[-1]
    raise OptionError(f"{type(net).__name__} has no layer with a weight: give --channels")


def warm(
    net: nn.Module, channels: int, device: torch.device, precision: str, watch: Callable[[int], None]
) -> tuple[int, float]:
    """Run a network in evaluation on generated streets of several sizes, and wait for all kernels that these ask for.

    watch: called with how many are left. Returns how many voxels the largest street had, and seconds.
    """
    if precision not in DTYPES:
        raise OptionError(f"precision {precision!r} is unknown; there are {', '.join(DTYPES)}")
    begin, most = time.perf_counter(), 0
    program = compiled(net.to(device, DTYPES[precision]).eval())
    xyz = torch.from_numpy(street_scene(0).xyz)
    with torch.no_grad():
        for edge in VOXELS:
            cells = torch.unique((xyz / edge).floor().int(), dim=0)
            coords = nn.functional.pad(cells, (1, 0)).to(device)
            feats = torch.randn(len(coords), channels, device=device, dtype=DTYPES[precision])
            program(SparseTensor(feats, coords))
            most = max(most, len(coords))
    while BACKGROUND.left:
        watch(BACKGROUND.left)
        time.sleep(_REPORT)
    return most, time.perf_counter() - begin
