"""A network that is tuned: what a saved plan is of, and its layers without earlier choices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pumice.engine.groups import Observed
from pumice.engine.subject import TuningSubject
from pumice.nn.conv import Convolution, convolutions


@contextmanager
def released(model: nn.Module) -> Iterator[list[str]]:
    """Reset tuned layers to the default dataflow; yields the names of layers set by hand. Restores all on exception."""
    layers = convolutions(model)
    before = [(layer, layer.dataflow, layer.tuned) for layer in layers]
    for layer in layers:
        if layer.dataflow is not None and layer.dataflow == layer.tuned:
            layer.dataflow = layer.tuned = None
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, Convolution))
    try:
        yield [name for name, layer in named if layer.dataflow is not None]
    except BaseException:
        for layer, flow, tuned in before:
            layer.dataflow, layer.tuned = flow, tuned
        raise


def identity(tuned_model: TuningSubject, observed: Observed, details: str) -> tuple[str, str, str, str]:
    """A plan's key without workload: device, dtypes, mode, and a digest of the network. The digest covers the
    convolution layers and their grouping by kernel maps, not weights. details: of the mode."""
    kind = tuned_model.device.type
    device = (
        torch.cuda.get_device_name(tuned_model.device)
        if kind == "cuda"
        else f"{kind}, {torch.get_num_threads()} threads"
    )
    dtypes = sorted({_dtype(layer.weight.dtype) for layer in convolutions(tuned_model.model)})
    if torch.is_autocast_enabled(kind):
        dtypes.append(f"autocast to {_dtype(torch.get_autocast_dtype(kind))}")
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtypes.append("tf32")
    layers = [
        [name, type(m).__name__, list(m.weight.shape), m.groups, m.bias is not None, str(m.relation), str(m.dataflow)]
        for name, m in tuned_model.model.named_modules()
        if isinstance(m, Convolution)
    ]
    groups = [[group.name, *group.layers] for group in observed.groups]
    digest = hashlib.sha256(json.dumps([layers, groups]).encode()).hexdigest()[:16]
    mode = f"{tuned_model.mode}, {details}" if details else tuned_model.mode
    return device, " ".join(dtypes), mode, digest


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
